//! What holds of a node whenever it waits for its next input. The simulator checks it while it runs.
use super::Node;

impl Node {
    /// Asserts the invariants of this node and of its child state machines. They hold between any two calls of `handle`
    /// and `poll`.
    ///
    /// # Panics
    /// One of them is violated.
    pub fn assert_invariants(&self) {
        assert!(self.to_self.is_empty(), "{} messages to this node itself are not handled", self.to_self.len());
        self.membership.assert_invariants();
        self.liveness.assert_invariants();
        self.parts.assert_invariants();
        self.jobs.assert_invariants();
        self.failover.assert_invariants(|job| self.jobs.epoch_of(job).is_some());
        let own = self.liveness.jobs_with(self.me).next();
        assert!(own.is_none(), "this node holds a lease on itself, in {own:?}");
    }
}
