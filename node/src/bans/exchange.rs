//! The push-pull exchange of bans between two members, and its format on the wire.
use super::state::BanState;

/// First byte of an exchange: the receiver starts an exchange of its own if the states differ.
pub(super) const NEWS: u8 = 1;
/// First byte of an exchange that was started by a [`NEWS`]: the receiver only answers.
pub(super) const BACK: u8 = 0;

/// A push-pull request about bans: whether the receiver should start an exchange too, the digest of the sender's state,
/// and the founder's newest revocations. So the founder's revocations arrive even if the response, which has the rest,
/// fails.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Exchange {
    pub(super) kind: u8,
    pub(super) digest: [u8; 32],
    pub(super) head: BanState,
}

impl Exchange {
    pub(super) fn new(state: &BanState, kind: u8) -> Self {
        Self { kind, digest: state.digest(), head: state.head() }
    }

    /// The wire format, without the tag.
    pub(crate) fn encode(&self) -> Vec<u8> {
        [&[self.kind][..], &self.digest[..], self.head.encode().as_slice()].concat()
    }

    /// Decodes the wire format; `None` if it is malformed.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let (&kind, rest) = bytes.split_first()?;
        let (digest, head) = rest.split_first_chunk::<32>()?;
        Some(Self { kind, digest: *digest, head: BanState::decode(head)? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use transport::{Identity, MeshCredentials, Revocation};

    fn state() -> BanState {
        let founder = Identity::generate();
        let held = MeshCredentials::found(&founder, u64::MAX);
        let issue = |at| Revocation::issue(&held, &founder, Identity::generate().peer_id(), at, ("a", "b")).unwrap();
        BanState { number: 3, key: [7; 32], revocations: [5, 6].map(issue).into() }
    }

    #[test]
    fn an_exchange_round_trips() {
        for kind in [NEWS, BACK] {
            let exchange = Exchange::new(&state(), kind);
            assert_eq!(exchange.head.revocations.len(), 2);
            assert_eq!(Exchange::decode(&exchange.encode()), Some(exchange));
        }
        let empty = Exchange::new(&BanState::default(), NEWS);
        assert_eq!(Exchange::decode(&empty.encode()), Some(empty));
    }

    #[test]
    fn an_exchange_does_not_contain_the_mesh_key() {
        let encoded = Exchange::new(&state(), NEWS).encode();
        assert!(!encoded.windows(32).any(|part| part == [7; 32]), "the receiver may be banned in the sender's state");
    }

    #[test]
    fn a_truncated_exchange_is_rejected_or_shorter() {
        let state = state();
        let encoded = Exchange::new(&state, NEWS).encode();
        let revocations = |length: usize| Exchange::decode(&encoded[..length]).map(|read| read.head.revocations.len());
        let shorter: Vec<usize> = (0..encoded.len()).filter_map(revocations).collect();
        assert_eq!(shorter, [0, 1], "only between two revocations");
        assert_eq!(Exchange::decode(&[encoded.as_slice(), &[0]].concat()), None);
    }

    #[test]
    fn the_digest_is_of_the_whole_state() {
        let state = state();
        let digest = |state: &BanState| Exchange::new(state, NEWS).digest;
        let changed = [
            BanState { number: 4, ..state.clone() },
            BanState { key: [8; 32], ..state.clone() },
            BanState { revocations: state.revocations[..1].to_vec(), ..state.clone() },
        ];
        assert!(changed.iter().all(|changed| digest(changed) != digest(&state)));
        assert_eq!(digest(&state.clone()), digest(&state));
    }
}
