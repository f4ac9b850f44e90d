//! Versions of the protocol between nodes: their names, and which side a mismatch asks to update.
//!
//! In the TLS handshake a node offers the names of all versions, its own first, and speaks only its own. So a handshake
//! between two versions succeeds under the name of the older one, both nodes see that name, and each of them can say which
//! side to update. A version that comes after this one must offer this one's name, too.

/// The version that this node speaks. Its number grows with each incompatible change of what nodes send to each other.
pub const PROTOCOL_NAME: &str = "meshnode/2";
/// Versions before it, the newest first: offered so that a peer that speaks one of them is refused by name.
pub(crate) const EARLIER: [&str; 1] = ["meshnode/1"];

/// All names, in the order in which they are offered.
pub(crate) fn offered() -> Vec<Vec<u8>> {
    [PROTOCOL_NAME].into_iter().chain(EARLIER).map(|name| name.as_bytes().to_vec()).collect()
}

/// A peer speaks another version: what that means to the two nodes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Mismatch {
    /// For this node's user, after the peer's name.
    pub(crate) here: String,
    /// For the peer's user.
    pub(crate) there: String,
}

impl Mismatch {
    /// With a peer that speaks the version of this name.
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

    /// With a caller of which no name is known here.
    pub(crate) fn unknown_caller() -> String {
        format!(
            "it offers no protocol that this node knows ({PROTOCOL_NAME}): if it is a newer meshnode, update meshnode here"
        )
    }

    /// With a node that was dialled and knows no name that this node offers.
    pub(crate) fn unknown_answer() -> String {
        format!(
            "knows no protocol that this node offers ({PROTOCOL_NAME}): if it is a newer meshnode, update meshnode here"
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
    fn each_side_reads_which_one_to_update() {
        let Mismatch { here, there } = Mismatch::with("meshnode/1");
        assert_eq!(here, "speaks meshnode/1, this node meshnode/2: update meshnode there");
        assert_eq!(there, "it speaks meshnode/2, this node meshnode/1: update meshnode here");
        let Mismatch { here, there } = Mismatch::with("meshnode/10");
        assert_eq!(here, "speaks meshnode/10, this node meshnode/2: update meshnode here");
        assert_eq!(there, "it speaks meshnode/2, this node meshnode/10: update meshnode there");
        assert!(Mismatch::with("meshnode/x").here.ends_with("update meshnode on the older side"));
    }

    #[test]
    fn the_own_name_is_offered_first() {
        assert_eq!(offered(), [b"meshnode/2", b"meshnode/1"]);
    }
}
