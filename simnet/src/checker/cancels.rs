//! A cancelled simulation ends within a second and its tiles are freed within two, if no fault is active meanwhile.
use super::survival::Survival;
use crate::submissions::Submissions;
use crate::world::World;
use node_core::id::JobId;
use node_core::time::Duration;
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::rc::Rc;

/// Records what survives a cancellation. Clones share the record.
#[derive(Clone, Default)]
pub struct Cancels {
    seen: Rc<RefCell<Seen>>,
}

#[derive(Default)]
struct Seen {
    /// Jobs whose end was checked, and jobs whose tiles were.
    ended: BTreeSet<JobId>,
    freed: BTreeSet<JobId>,
    violations: Vec<String>,
}

impl Cancels {
    /// All violations.
    pub fn violations(&self) -> Vec<String> {
        self.seen.borrow().violations.clone()
    }

    /// Checks every simulation that was cancelled long enough ago.
    pub fn look(&self, world: &World, submissions: &Submissions, survival: &Survival) {
        let mut seen = self.seen.borrow_mut();
        let now = world.now();
        for submission in &submissions.all {
            let Some(at) = submission.cancelled else { continue };
            let (job, calm) = (submission.job(), survival.is_calm(at, now));
            if now >= at + ENDS && seen.ended.insert(job) && submission.end.is_none() && calm {
                seen.violations.push(format!("{} has not ended 1 s after its cancellation", submission.name()));
            }
            if now >= at + FREED && seen.freed.insert(job) && calm {
                let holds = world
                    .hosts()
                    .filter(|host| host.node.as_ref().is_some_and(|node| node.parts().any(|held| held.job == job)));
                let hosts: Vec<u32> = holds.map(|host| host.id.0).collect();
                if !hosts.is_empty() {
                    let name = submission.name();
                    seen.violations.push(format!("{name}: hosts {hosts:?} hold tiles 2 s after its cancellation"));
                }
            }
        }
    }
}

/// From the cancellation to the simulation's end.
const ENDS: Duration = Duration::from_secs(1);
/// From the cancellation until no host holds a tile.
const FREED: Duration = Duration::from_secs(2);
