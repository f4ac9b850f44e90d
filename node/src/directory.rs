//! Which models other members serve. A node asks them when its user wants what it does not serve itself, or serves a second
//! copy: the answer is where to go, and nothing is decided by it.
use crate::handle::ServedModels;
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;
use std::sync::{OnceLock, PoisonError};

/// What this node answers members that ask.
#[derive(Default)]
pub(crate) struct Directory {
    /// What is served here.
    pub(crate) models: ServedModels,
    /// Where the local API listens, once it does.
    pub(crate) api: OnceLock<SocketAddr>,
}

/// What a member serves.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Served {
    /// Names of its models.
    pub(crate) models: Vec<String>,
    /// Where its API listens, as it sees its own addresses.
    pub(crate) api: Option<SocketAddr>,
}

/// Most bytes of an answer: a node serves a few dozen models, and names are a line long.
pub(crate) const ANSWER_BYTES_MAX: usize = 64 << 10;

impl Directory {
    pub(crate) fn answer(&self) -> Vec<u8> {
        let models = self.models.lock().unwrap_or_else(PoisonError::into_inner).keys().cloned().collect();
        let served = Served { models, api: self.api.get().copied() };
        let bytes = serde_json::to_vec(&served).unwrap_or_default();
        if bytes.len() <= ANSWER_BYTES_MAX { bytes } else { Vec::new() }
    }
}

/// A member's answer; none if it cannot be parsed. Names with control characters are left out, because terminals obey them.
pub(crate) fn decode(bytes: &[u8]) -> Option<Served> {
    let mut served: Served = serde_json::from_slice(bytes.get(..ANSWER_BYTES_MAX.min(bytes.len()))?).ok()?;
    served.models.retain(|name| !name.chars().any(char::is_control));
    Some(served)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_read_as_it_was_given_and_noise_is_none() {
        let directory = Directory::default();
        directory.api.set("127.0.0.1:9470".parse().unwrap()).unwrap();
        let bytes = directory.answer();
        let expected = Served { models: vec![], api: Some("127.0.0.1:9470".parse().unwrap()) };
        assert_eq!(decode(&bytes), Some(expected));
        for noise in [&b""[..], b"{", b"[]x", &[0xff; 300], &bytes[..bytes.len() - 1]] {
            assert_eq!(decode(noise), None);
        }
        let named = decode(br#"{"models": ["a", "b\u001b[2J"], "api": null}"#).unwrap();
        assert_eq!(named.models, ["a"], "no control characters reach a terminal");
    }
}
