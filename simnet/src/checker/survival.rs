//! A request fails only if its coordinator is lost or leaves, if devices fail under it repeatedly, or if the mesh lacks memory for the
//! model for a long time.
use crate::host::HostId;
use crate::world::{Observer, World};
use node_core::input::Input;
use node_core::limits::{DEGRADED_MAX, EXCLUDED, REQUEST_STRIKES_MAX};
use node_core::time::{Duration, Instant};
use std::cell::RefCell;
use std::rc::Rc;

/// Records what may fail a request. Clones share the record.
#[derive(Clone, Default)]
pub struct Survival {
    seen: Rc<RefCell<Seen>>,
}

#[derive(Default)]
struct Seen {
    /// When batches failed on a device, or a stage did not fit.
    strikes: Vec<Instant>,
    /// When a node was asked to leave.
    leaves: Vec<(Instant, HostId)>,
    /// Since when usable hosts have had memory for the model without interruption.
    room: Option<Instant>,
}

impl Survival {
    /// Checks whether the hosts that the coordinator can use have memory for `bytes` together.
    pub fn look(&self, world: &World, head: HostId, bytes: u64) {
        let usable = world.hosts().filter(|host| {
            let linked = host.id == head || (world.reaches(host.id, head) && world.reaches(head, host.id));
            host.runs() && host.paused_until.is_none() && !host.leaves && linked
        });
        let room: u64 = usable.map(|host| host.spec.capacity.memory_free).sum();
        let mut seen = self.seen.borrow_mut();
        let since = seen.room;
        seen.room = (room >= bytes * PLENTY).then(|| since.unwrap_or(world.now()));
    }

    /// Why a request to `head` must not have failed at this time; `None` if it may have.
    pub fn doubt(&self, at: Instant, head: HostId) -> Option<String> {
        let seen = self.seen.borrow();
        if seen.strikes.iter().filter(|strike| **strike <= at).count() >= REQUEST_STRIKES_MAX as usize {
            return None;
        }
        if seen.leaves.iter().any(|(left, host)| *host == head && *left <= at) {
            return None;
        }
        let room = seen.room.filter(|since| *since + (EXCLUDED + GRACE) < at)?;
        Some(format!(
            "though its coordinator lives, no device failed {REQUEST_STRIKES_MAX} times, and for {} ms (of {} that a job \
             waits) hosts had {PLENTY} times the memory of the model",
            at.since(room).as_millis(),
            DEGRADED_MAX.as_millis()
        ))
    }
}

#[expect(clippy::wildcard_enum_match_arm, reason = "a checker looks at few of many things")]
impl Observer for Survival {
    fn input(&mut self, at: Instant, host: HostId, input: &Input) {
        let mut seen = self.seen.borrow_mut();
        match input {
            Input::Ran { result: Err(_), .. } | Input::Loaded { result: Err(_), .. } => seen.strikes.push(at),
            Input::Leave => seen.leaves.push((at, host)),
            _ => {}
        }
    }
}

/// Layers do not fill hosts to the last byte, and a plan needs them next to each other.
const PLENTY: u64 = 2;
/// From a host being usable again to a plan with it.
const GRACE: Duration = Duration::from_secs(3);
