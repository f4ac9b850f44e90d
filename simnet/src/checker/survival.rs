//! A request fails only where something was lost that nobody can replace: its coordinator, a device that broke under it time and
//! again, or memory for the model over a long time.
use crate::host::HostId;
use crate::world::{Observer, World};
use node_core::input::Input;
use node_core::limits::{DEGRADED_MAX, EXCLUDED, REQUEST_STRIKES_MAX};
use node_core::time::{Duration, Instant};
use std::cell::RefCell;
use std::rc::Rc;

/// Witnesses of what was lost. Clones share what they saw.
#[derive(Clone, Default)]
pub struct Survival {
    seen: Rc<RefCell<Seen>>,
}

#[derive(Default)]
struct Seen {
    /// When batches failed on a device, or a stage did not fit where it should have.
    strikes: Vec<Instant>,
    /// When a node was asked to leave.
    leaves: Vec<(Instant, HostId)>,
    /// Since when hosts have had memory for the model without a break.
    room: Option<Instant>,
}

impl Survival {
    /// Looks whether the hosts that work have memory for `bytes` together, as the coordinator could know.
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

    /// Why a request that was asked of `head` must not have failed at this time; nothing if it may have.
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
            Input::Computed { results: Err(_), .. } | Input::Loaded { result: Err(_), .. } => seen.strikes.push(at),
            Input::Leave => seen.leaves.push((at, host)),
            _ => {}
        }
    }
}

/// Layers do not fill hosts to the last byte, and a plan needs them next to each other.
const PLENTY: u64 = 2;
/// From a host being usable again to a plan with it.
const GRACE: Duration = Duration::from_secs(3);
