//! What holds of this node's parts between two inputs.
use super::{HeldJob, Load, LocalPart, Parts};
use crate::id::{JobId, NodeId, PartId};
use crate::limits::{JOBS_MAX, PARTS_MAX};

impl Parts {
    /// Asserts what holds between two inputs.
    ///
    /// # Panics
    /// An invariant is violated.
    pub fn assert_invariants(&self) {
        assert!(self.out.is_empty(), "{} outputs of parts are not routed", self.out.len());
        assert!(self.jobs.len() <= JOBS_MAX, "parts of {} jobs", self.jobs.len());
        assert!(self.fetches.len() <= JOBS_MAX, "{} fetches", self.fetches.len());
        for (&job, held) in &self.jobs {
            held.assert_invariants(job, self.me);
            for (part, known) in &held.parts {
                let flights = self.in_flight.iter().filter(|(_, flight)| flight.job == job);
                let runs = flights.filter(|(work, _)| known.run.runs(**work)).count();
                assert_eq!(runs, usize::from(known.run.is_busy()), "runs of part {part} of {job:?} at the executor");
            }
        }
    }
}

impl HeldJob {
    fn assert_invariants(&self, job: JobId, me: NodeId) {
        assert!(self.parts.len() <= PARTS_MAX, "{} parts of {job:?}", self.parts.len());
        assert!(!self.stood_down || self.epoch.issuer == me, "{job:?} under {:?} was left by this node", self.epoch);
        self.succession.assert_invariants();
        for (&part, held) in &self.parts {
            let (lower, upper) = (held.epoch.counter, self.epoch.counter);
            assert!(lower <= upper, "part {part} of {job:?} is under epoch {lower}, the job under epoch {upper}");
            held.assert_invariants(part);
        }
    }
}

impl LocalPart {
    fn assert_invariants(&self, part: PartId) {
        let (busy, load) = (self.run.is_busy(), &self.load);
        assert_eq!(self.order.part, part, "the order of another part");
        assert!(!busy || *load == Load::Resident, "part {part} runs, and is {load:?}");
        // An order is answered as soon as the part is loaded and its run is done.
        assert!(!self.answer_due || busy || matches!(load, Load::Loading(_)), "part {part} did not answer its order");
        assert!(!self.reroute || self.answer_due, "part {part} has answered without its new route");
        self.run.assert_invariants(&self.order);
    }
}
