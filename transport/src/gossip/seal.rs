//! Encryption of gossip datagrams: ChaCha20-Poly1305 under a separate key per (sender, generation), counter nonces, and
//! a replay window that accepts each datagram once.
//!
//! The receiver's id is authenticated, so that a datagram cannot be replayed to another member. An outsider can delay a
//! datagram (up to the window); SWIM and leases carry their own sequence numbers against that.
use crate::identity::NodeId;
use crate::wire::Reader;
use chacha20poly1305::{AeadInPlace, ChaCha20Poly1305, KeyInit};
use std::{
    collections::BTreeMap,
    sync::atomic::{AtomicU64, Ordering},
};
use thiserror::Error;

/// Bytes that encryption adds: version, sender, generation, counter, tag.
pub(super) const OVERHEAD: usize = HEADER + TAG;
const HEADER: usize = 1 + 16 + 8 + 8;
const TAG: usize = 16;
const VERSION: u8 = 1;
/// Reordering tolerated, in datagrams: at 100 per second and sender, more than ten seconds' worth.
const WINDOW: u64 = 1024;
/// Maximum senders remembered; a mesh has at most 4096 members. Only members (who hold the key) can fill the table.
const SENDERS_MAX: usize = 8192;

/// Encrypts datagrams of one generation of this node.
pub struct Sealer {
    cipher: ChaCha20Poly1305,
    prefix: [u8; 25],
    counter: AtomicU64,
    key_hash: [u8; 32],
}

impl Sealer {
    /// `generation` must never be used twice with the same key and node: nonces count from zero.
    pub fn new(mesh_key: &[u8; 32], node: NodeId, generation: u64) -> Self {
        let mut prefix = [VERSION; 25];
        prefix[1..17].copy_from_slice(&node);
        prefix[17..].copy_from_slice(&generation.to_le_bytes());
        let key_hash = *blake3::hash(mesh_key).as_bytes();
        Self { cipher: cipher(mesh_key, &node, generation), prefix, counter: AtomicU64::new(0), key_hash }
    }

    /// The same sealer, continuing after `used` nonces.
    pub(super) fn after(self, used: u64) -> Self {
        Self { counter: AtomicU64::new(used), ..self }
    }

    /// Number of nonces used.
    pub(super) fn used(&self) -> u64 {
        self.counter.load(Ordering::Relaxed)
    }

    /// Identifies the mesh key.
    pub(super) fn key_hash(&self) -> [u8; 32] {
        self.key_hash
    }

    /// The packet that carries `payload` to `to`; `None` once all nonces are used.
    pub fn seal(&self, to: &NodeId, payload: &[u8]) -> Option<Vec<u8>> {
        let counter = self.counter.fetch_add(1, Ordering::Relaxed);
        if counter == u64::MAX {
            self.counter.store(u64::MAX, Ordering::Relaxed);
            return None;
        }
        let mut packet = Vec::with_capacity(payload.len() + OVERHEAD);
        packet.extend_from_slice(&self.prefix);
        packet.extend_from_slice(&counter.to_le_bytes());
        let associated = associated(&packet, to);
        packet.extend_from_slice(payload);
        let tag = self.cipher.encrypt_in_place_detached(&nonce(counter), &associated, &mut packet[HEADER..]).ok()?;
        packet.extend_from_slice(&tag);
        Some(packet)
    }
}

/// Decrypts datagrams for one node, each once.
pub struct Opener {
    mesh_key: [u8; 32],
    me: NodeId,
    senders: BTreeMap<NodeId, Sender>,
}

/// The newest generation received from a sender.
struct Sender {
    generation: u64,
    cipher: ChaCha20Poly1305,
    seen: Seen,
}

/// A decrypted datagram.
#[derive(Debug, PartialEq, Eq)]
pub struct Unsealed {
    /// The sender (some member: all hold the mesh key).
    pub from: NodeId,
    /// The plaintext.
    pub payload: Vec<u8>,
}

impl Opener {
    /// Decrypts datagrams for `me`.
    pub fn new(mesh_key: &[u8; 32], me: NodeId) -> Self {
        Self { mesh_key: *mesh_key, me, senders: BTreeMap::new() }
    }

    /// Authenticates and decrypts a packet. A packet that fails leaves no state behind.
    ///
    /// # Errors
    /// Why the packet is rejected.
    pub fn open(&mut self, packet: &[u8]) -> Result<Unsealed, SealError> {
        if packet.len() > super::PACKET_BYTES_MAX {
            return Err(SealError::Malformed);
        }
        let Packet { from, generation, counter, body, tag } = split(packet).ok_or(SealError::Malformed)?;
        let known = self.senders.get(&from);
        if known.is_some_and(|s| generation < s.generation) {
            return Err(SealError::Replayed);
        }
        let known = known.filter(|s| s.generation == generation);
        if known.is_some_and(|s| !s.seen.is_new(counter)) {
            return Err(SealError::Replayed);
        }
        let associated = associated(&packet[..HEADER], &self.me);
        let mut payload = body.to_vec();
        let fresh;
        let cipher = match known {
            Some(sender) => &sender.cipher,
            None => {
                fresh = cipher(&self.mesh_key, &from, generation);
                &fresh
            }
        };
        cipher
            .decrypt_in_place_detached(&nonce(counter), &associated, &mut payload, &tag.into())
            .map_err(|_| SealError::Forged)?;
        self.remember(from, generation, counter);
        Ok(Unsealed { from, payload })
    }

    fn remember(&mut self, from: NodeId, generation: u64, counter: u64) {
        if self.senders.len() >= SENDERS_MAX && !self.senders.contains_key(&from) {
            // Datagrams of an evicted sender could be replayed; but members that fill the table could also forge
            // outright.
            self.senders.pop_first();
        }
        let sender = self.senders.entry(from).or_insert_with(|| Sender {
            generation,
            cipher: cipher(&self.mesh_key, &from, generation),
            seen: Seen::default(),
        });
        if sender.generation < generation {
            let cipher = cipher(&self.mesh_key, &from, generation);
            *sender = Sender { generation, cipher, seen: Seen::default() };
        }
        sender.seen.mark(counter);
    }
}

/// The set of counters seen among the last `WINDOW`.
#[derive(Default)]
struct Seen {
    /// One above the highest seen.
    next: u64,
    /// Bit `c % WINDOW` belongs to counter `c` in `next - WINDOW .. next`.
    bits: [u64; (WINDOW / 64) as usize],
}

impl Seen {
    fn is_new(&self, counter: u64) -> bool {
        if counter >= self.next {
            return true;
        }
        self.next - counter <= WINDOW && self.bits[word(counter)] & bit(counter) == 0
    }

    fn mark(&mut self, counter: u64) {
        if counter >= self.next {
            if counter - self.next >= WINDOW {
                self.bits = Default::default();
            } else {
                (self.next..=counter).for_each(|c| self.bits[word(c)] &= !bit(c));
            }
            self.next = counter.saturating_add(1);
        }
        self.bits[word(counter)] |= bit(counter);
    }
}

fn word(counter: u64) -> usize {
    (counter % WINDOW / 64) as usize
}

fn bit(counter: u64) -> u64 {
    1 << (counter % 64)
}

/// The fields of a sealed datagram.
struct Packet<'a> {
    from: NodeId,
    generation: u64,
    counter: u64,
    body: &'a [u8],
    tag: [u8; TAG],
}

fn split(packet: &[u8]) -> Option<Packet<'_>> {
    let (front, tag) = packet.split_last_chunk::<TAG>()?;
    let mut r = Reader::new(front);
    if r.u8()? != VERSION {
        return None;
    }
    let (from, generation, counter) = (r.array()?, r.u64()?, r.u64()?);
    Some(Packet { from, generation, counter, body: front.get(HEADER..)?, tag: *tag })
}

/// Associated data, authenticated but not sent: the header and the receiver.
fn associated(header: &[u8], to: &NodeId) -> [u8; HEADER + 16] {
    let mut out = [0; HEADER + 16];
    out[..HEADER].copy_from_slice(&header[..HEADER]);
    out[HEADER..].copy_from_slice(to);
    out
}

fn cipher(mesh_key: &[u8; 32], sender: &NodeId, generation: u64) -> ChaCha20Poly1305 {
    let mut material = [0; 32 + 16 + 8];
    material[..32].copy_from_slice(mesh_key);
    material[32..48].copy_from_slice(sender);
    material[48..].copy_from_slice(&generation.to_le_bytes());
    ChaCha20Poly1305::new(&blake3::derive_key("meshnode v1 gossip seal", &material).into())
}

fn nonce(counter: u64) -> chacha20poly1305::Nonce {
    let mut nonce = [0; 12];
    nonce[..8].copy_from_slice(&counter.to_le_bytes());
    nonce.into()
}

/// Why a datagram is rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum SealError {
    /// Too short, too long, or of another version.
    #[error("not a sealed datagram")]
    Malformed,
    /// Encrypted with another key or for another node, or modified in transit.
    #[error("authentication failed: another mesh, another receiver, or modified in transit")]
    Forged,
    /// Seen before, older than the window, or of an earlier generation of the sender.
    #[error("replayed")]
    Replayed,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fuzz::Noise;

    const KEY: [u8; 32] = [3; 32];
    const A: NodeId = [1; 16];
    const B: NodeId = [2; 16];

    fn pair() -> (Sealer, Opener) {
        (Sealer::new(&KEY, A, 5), Opener::new(&KEY, B))
    }

    #[test]
    fn a_datagram_opens_once() {
        let (sealer, mut opener) = pair();
        let packet = sealer.seal(&B, b"ping").unwrap();
        assert_eq!(packet.len(), 4 + OVERHEAD);
        assert_eq!(opener.open(&packet), Ok(Unsealed { from: A, payload: b"ping".to_vec() }));
        assert_eq!(opener.open(&packet), Err(SealError::Replayed));
    }

    #[test]
    fn another_key_receiver_or_generation_is_rejected() {
        let (sealer, mut opener) = pair();
        let packet = sealer.seal(&B, b"ping").unwrap();
        assert_eq!(Opener::new(&[4; 32], B).open(&packet), Err(SealError::Forged));
        assert_eq!(Opener::new(&KEY, A).open(&packet), Err(SealError::Forged));
        let newer = Sealer::new(&KEY, A, 6).seal(&B, b"back").unwrap();
        assert!(opener.open(&newer).is_ok());
        assert_eq!(opener.open(&packet), Err(SealError::Replayed), "an earlier generation");
    }

    #[test]
    fn any_flipped_bit_is_detected() {
        let (sealer, mut opener) = pair();
        let packet = sealer.seal(&B, b"ping").unwrap();
        for bit in 0..packet.len() * 8 {
            let mut bad = packet.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(opener.open(&bad).is_err(), "bit {bit}");
        }
        assert!(opener.open(&packet).is_ok(), "the forgeries left no state");
    }

    #[test]
    fn datagrams_may_be_reordered_within_the_window() {
        let (sealer, mut opener) = pair();
        let packets: Vec<_> = (0..WINDOW + 2).map(|i| sealer.seal(&B, &i.to_le_bytes()).unwrap()).collect();
        assert!(opener.open(&packets[WINDOW as usize]).is_ok());
        assert_eq!(opener.open(&packets[0]), Err(SealError::Replayed), "older than the window");
        for i in (1..WINDOW as usize).rev() {
            assert!(opener.open(&packets[i]).is_ok(), "{i}");
            assert_eq!(opener.open(&packets[i]), Err(SealError::Replayed), "{i} again");
        }
        assert!(opener.open(&packets[WINDOW as usize + 1]).is_ok());
    }

    #[test]
    fn the_window_agrees_with_a_plain_set() {
        let mut noise = Noise::new(4);
        let (mut seen, mut all, mut high) = (Seen::default(), std::collections::BTreeSet::new(), 0u64);
        for _ in 0..100_000 {
            let counter = (high + noise.next() % 40).saturating_sub(noise.next() % 1500);
            let fresh = !all.contains(&counter) && (counter >= high || high - counter <= WINDOW);
            assert_eq!(seen.is_new(counter), fresh, "{counter} below {high}");
            if fresh {
                seen.mark(counter);
                all.insert(counter);
                high = high.max(counter + 1);
            }
        }
    }

    #[test]
    fn noise_never_panics_nor_leaves_state() {
        let (sealer, mut opener) = pair();
        let packet = sealer.seal(&B, &[9; 100]).unwrap();
        let mut noise = Noise::new(5);
        for _ in 0..20_000 {
            let bytes = noise.mangle(&packet);
            assert!(bytes == packet || opener.open(&bytes).is_err());
        }
        assert!(opener.senders.is_empty());
    }
}
