//! What holds of membership between two inputs.
use super::{CONTACTS_MAX, Membership, STRANGER_DIALS_MAX};

impl Membership {
    /// Asserts what holds between two inputs.
    ///
    /// # Panics
    /// An invariant is violated.
    pub fn assert_invariants(&self) {
        assert!(self.output.is_empty(), "{} outputs of membership are not routed", self.output.len());
        assert!(self.contacts.len() <= CONTACTS_MAX, "{} contacts", self.contacts.len());
        assert!(self.reaching.len() <= STRANGER_DIALS_MAX, "{} dials to strangers", self.reaching.len());
        assert!(!self.banned.contains(&self.node), "this node has banned itself");
    }
}
