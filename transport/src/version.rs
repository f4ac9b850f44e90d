//! Protocol versions: their names, and which side must be updated on a mismatch.
//!
//! In the TLS handshake a node offers the names of all versions, its own first, but speaks only its own. A handshake
//! between two versions therefore succeeds under the name of the older one. Both nodes see that name and can report
//! which side to update. For this to hold, every later version must also offer this version's name.

/// The version that this node speaks. Its number is incremented with each incompatible change of the protocol.
pub const PROTOCOL_NAME: &str = "meshnode/3";
/// Earlier versions, newest first. They are offered so that a peer of such a version is rejected by name.
pub(crate) const EARLIER: [&str; 2] = ["meshnode/2", "meshnode/1"];

/// All names, in order of preference.
pub(crate) fn offered() -> Vec<Vec<u8>> {
    [PROTOCOL_NAME].into_iter().chain(EARLIER).map(|name| name.as_bytes().to_vec()).collect()
}

/// A version mismatch with a peer, described for the users of both nodes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Mismatch {
    /// For this node's user; printed after the peer's name.
    pub(crate) here: String,
    /// For the peer's user.
    pub(crate) there: String,
}

impl Mismatch {
    /// Mismatch with a peer that speaks version `name`.
    pub(crate) fn with(name: &str) -> Self {
        let (older_there, older_here) = match (number(name), number(PROTOCOL_NAME)) {
            (Some(theirs), Some(ours)) if theirs < ours => ("there", "here"),
            (Some(_), Some(_)) => ("here", "there"),
            (None, _) | (_, None) => ("on the older side", "on the older side"),
        };
        Self {
            here: format!("speaks {name}, this node {PROTOCOL_NAME}: update meshnode {older_there}"),
            there: format!("it speaks {PROTOCOL_NAME}, this node {name}: update meshnode {older_here}"),
        }
    }

    /// Message about a caller without a common protocol name.
    pub(crate) fn unknown_caller() -> String {
        format!(
            "it offers no protocol that this node supports ({PROTOCOL_NAME}): if it is a newer meshnode, update meshnode here"
        )
    }

    /// Message about a dialed node without a common protocol name.
    pub(crate) fn unknown_answer() -> String {
        format!(
            "supports no protocol that this node offers ({PROTOCOL_NAME}): if it is a newer meshnode, update meshnode here"
        )
    }
}

fn number(name: &str) -> Option<u32> {
    name.strip_prefix("meshnode/")?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_side_learns_which_one_to_update() {
        let Mismatch { here, there } = Mismatch::with("meshnode/1");
        assert_eq!(here, "speaks meshnode/1, this node meshnode/3: update meshnode there");
        assert_eq!(there, "it speaks meshnode/3, this node meshnode/1: update meshnode here");
        let Mismatch { here, there } = Mismatch::with("meshnode/10");
        assert_eq!(here, "speaks meshnode/10, this node meshnode/3: update meshnode here");
        assert_eq!(there, "it speaks meshnode/3, this node meshnode/10: update meshnode there");
        assert!(Mismatch::with("meshnode/x").here.ends_with("update meshnode on the older side"));
    }

    #[test]
    fn the_current_version_is_offered_first() {
        assert_eq!(offered(), [b"meshnode/3".as_slice(), b"meshnode/2", b"meshnode/1"]);
    }
}
