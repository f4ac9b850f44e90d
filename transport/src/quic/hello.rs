//! The greeting, the first frame of a connection in both directions: protocol version, instance of the endpoint, and
//! either a certificate chain, a join request, or the revocation for which the peer is rejected. Nothing else is read
//! before it.
use crate::certificate::{CHAIN_BYTES_MAX, Chain};
use crate::join::{ASK_BYTES_MAX, Ask};
use crate::revocation::{REVOCATION_BYTES_MAX, Revocation};
use crate::wire::{Reader, put_long};
use tokio::io::{AsyncRead, AsyncReadExt};

/// One more than the number in the TLS protocol name (`version.rs`), and incremented with it: greetings of `meshnode/1`
/// carried the number 2.
pub(crate) const PROTOCOL: u16 = 4;
const MAGIC: [u8; 4] = *b"mesh";
/// A revocation contains a whole chain, so it is the longest of the three.
const HELLO_BYTES_MAX: usize = 32 + REVOCATION_BYTES_MAX;
const _: () = assert!(REVOCATION_BYTES_MAX > CHAIN_BYTES_MAX && REVOCATION_BYTES_MAX > ASK_BYTES_MAX);

/// A greeting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Hello {
    /// Random per endpoint: distinguishes a restarted peer from one that dialed twice.
    pub(crate) instance: u64,
    pub(crate) purpose: Purpose,
}

/// Purpose of the connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// Communication between members; an empty chain means "no certificate".
    Member(Option<Chain>),
    /// Request to become a member.
    Join(Ask),
    /// Answer to a banned member: the signed revocation, which the member can verify itself.
    Banned(Box<Revocation>),
}

/// Why a greeting is rejected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum HelloError {
    Malformed,
    /// Another version's number.
    Version {
        found: u16,
    },
    BadChain,
}

impl Hello {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut body = MAGIC.to_vec();
        body.extend_from_slice(&PROTOCOL.to_le_bytes());
        body.extend_from_slice(&self.instance.to_le_bytes());
        match &self.purpose {
            Purpose::Member(chain) => {
                body.push(MEMBER);
                body.extend_from_slice(&chain.as_ref().map(Chain::encode).unwrap_or_default());
            }
            Purpose::Join(ask) => {
                body.push(JOIN);
                ask.encode(&mut body);
            }
            Purpose::Banned(revocation) => {
                body.push(BANNED);
                body.extend_from_slice(&revocation.encode());
            }
        }
        let mut out = Vec::with_capacity(4 + body.len());
        put_long(&mut out, &body);
        out
    }

    pub(crate) fn decode(body: &[u8]) -> Result<Self, HelloError> {
        let mut r = Reader::new(body);
        let magic = r.array::<4>().ok_or(HelloError::Malformed)?;
        let version = r.u16().ok_or(HelloError::Malformed)?;
        if magic != MAGIC {
            return Err(HelloError::Malformed);
        }
        if version != PROTOCOL {
            return Err(HelloError::Version { found: version });
        }
        let instance = r.u64().ok_or(HelloError::Malformed)?;
        let purpose = match (r.u8(), body.get(HEAD..).unwrap_or_default()) {
            (Some(MEMBER), []) => Purpose::Member(None),
            (Some(MEMBER), chain) => Purpose::Member(Some(Chain::decode(chain).map_err(|_| HelloError::BadChain)?)),
            (Some(JOIN), ask) => Purpose::Join(Ask::decode(ask).ok_or(HelloError::Malformed)?),
            (Some(BANNED), revocation) => {
                Purpose::Banned(Revocation::decode(revocation).map_err(|_| HelloError::Malformed)?.into())
            }
            (Some(_) | None, _) => return Err(HelloError::Malformed),
        };
        Ok(Self { instance, purpose })
    }

    /// Reads one greeting.
    pub(crate) async fn read(recv: &mut (impl AsyncRead + Unpin)) -> Result<Self, HelloError> {
        let length = recv.read_u32_le().await.map_err(|_| HelloError::Malformed)? as usize;
        if length > HELLO_BYTES_MAX {
            return Err(HelloError::Malformed);
        }
        let mut body = vec![0; length];
        recv.read_exact(&mut body).await.map_err(|_| HelloError::Malformed)?;
        Self::decode(&body)
    }
}

const MEMBER: u8 = 1;
const JOIN: u8 = 2;
const BANNED: u8 = 3;
/// Magic, version, instance, purpose.
const HEAD: usize = 4 + 2 + 8 + 1;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::certificate::{MeshCredentials, MeshId};
    use crate::fuzz::Noise;
    use crate::identity::Identity;

    fn hellos() -> Vec<Hello> {
        let founder = Identity::generate();
        let held = MeshCredentials::found(&founder, 1000);
        let out = Identity::generate().peer_id();
        let revocation = Revocation::issue(&held, &founder, out, 1000, ("out", "founder")).unwrap();
        let chain = held.chain;
        let ticket = Some((MeshId([1; 32]), [2; 16], [3; 32]));
        [
            Purpose::Member(None),
            Purpose::Member(Some(chain)),
            Purpose::Join(Ask { name: "n".into(), ticket: None }),
            Purpose::Join(Ask { name: String::new(), ticket }),
            Purpose::Banned(revocation.into()),
        ]
        .map(|purpose| Hello { instance: 77, purpose })
        .into()
    }

    #[tokio::test]
    async fn greetings_round_trip() {
        for hello in hellos() {
            assert_eq!(Hello::read(&mut &hello.encode()[..]).await, Ok(hello));
        }
    }

    #[tokio::test]
    async fn each_invalid_greeting_has_its_own_error() {
        let mut bytes = hellos()[1].encode();
        bytes[8] = 9;
        assert_eq!(Hello::read(&mut &bytes[..]).await, Err(HelloError::Version { found: 9 }));
        bytes[4] = b'x';
        assert_eq!(Hello::read(&mut &bytes[..]).await, Err(HelloError::Malformed));
        let huge = u32::MAX.to_le_bytes();
        assert_eq!(Hello::read(&mut &huge[..]).await, Err(HelloError::Malformed));
        let mut cut = hellos()[1].encode();
        let length = cut.len() as u32 - 4 - 10;
        cut.truncate(cut.len() - 10);
        cut[..4].copy_from_slice(&length.to_le_bytes());
        assert_eq!(Hello::read(&mut &cut[..]).await, Err(HelloError::BadChain));
    }

    #[tokio::test]
    async fn noise_never_panics() {
        let mut noise = Noise::new(10);
        for hello in hellos() {
            let good = hello.encode();
            for _ in 0..5_000 {
                let _ = Hello::read(&mut &noise.mangle(&good)[..]).await;
            }
        }
    }
}
