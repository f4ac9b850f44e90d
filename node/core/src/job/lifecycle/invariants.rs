//! What holds of a job at its coordinator between two inputs.
use super::{Job, Phase};
use crate::limits::{PLACE_ATTEMPTS_MAX, PREVIOUS_COORDINATORS_MAX, SUCCESSORS_MAX};

impl Job {
    /// Asserts what holds between two inputs.
    pub(in crate::job) fn assert_invariants(&self) {
        let (id, phase) = (self.id, &self.phase);
        assert_eq!(self.epoch.issuer, self.me, "{id:?} runs under an epoch of another coordinator");
        assert!(self.attempts <= PLACE_ATTEMPTS_MAX, "{} placements of {id:?} in a row", self.attempts);
        match phase {
            Phase::Planning { .. } => {}
            Phase::Degraded { .. } => assert!(self.degraded.is_some(), "{id:?} has no plan, without a reason"),
            Phase::Preparing { .. } => self.assert_placed(),
            Phase::Running => {
                self.assert_placed();
                assert!(self.degraded.is_none(), "{id:?} runs, and has no plan: {:?}", self.degraded);
                // A successor has not ordered its parts yet.
                let ready = self.inherited || self.parts.iter().all(|part| part.ready.is_some());
                assert!(ready, "{id:?} runs before all of its parts are ready");
            }
        }
        assert!(self.asked.is_subset(&self.known), "{id:?} asked nodes whose reports it does not believe");
        assert!(self.successors.len() <= SUCCESSORS_MAX, "{} successors", self.successors.len());
        assert!(!self.successors.contains(&self.me), "this node succeeds itself");
        assert!(self.successors.iter().all(|node| self.named.contains(node)), "a successor that was never named");
        assert!(self.previous.len() <= PREVIOUS_COORDINATORS_MAX, "{} previous coordinators", self.previous.len());
        self.workload.assert_invariants();
    }

    /// The job has a placement.
    fn assert_placed(&self) {
        let (id, phase) = (self.id, &self.phase);
        assert!(self.epoch.counter > 0 && !self.parts.is_empty(), "{id:?} is {phase:?} without a placement");
        assert!(self.participants().is_subset(&self.asked), "{id:?} would not dismiss all of its participants");
    }
}
