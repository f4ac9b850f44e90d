//! Predicted effect of losing a whole zone on a job, for users who decide where machines go.
//!
//! All nodes of a zone are lost at the same time. A part continues on its standby if that is in another zone; otherwise the
//! lost parts are placed again on the remaining nodes. Next: `fit.rs`.
use crate::fleet::{Device, DeviceId, Fleet, NodeKey};
use crate::plan::{Options, Plan};
use crate::repair::repair;
use crate::standby::{Standby, placed_ns};
use crate::tiles::{self, Block, GridPlan, GridWork, RuleRates, TileStandby};
use crate::work::Work;
use alloc::collections::BTreeSet;
use alloc::string::{String, ToString};
use alloc::vec::Vec;

/// Maximum number of zones considered: each costs a search, and a longer list is not read.
pub const ZONES_MAX: usize = 32;

/// The effect of losing one zone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ZoneLoss {
    /// The zone's name.
    pub zone: String,
    /// The zone contains the job's coordinator.
    pub coordinator: bool,
    /// Numbers of the job's parts whose owners are in the zone.
    pub parts: Vec<u16>,
    /// What happens to these parts.
    pub outcome: Outcome,
}

/// What happens to the parts of a lost zone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The zone has no parts.
    Untouched,
    /// Each part continues on its standby outside the zone.
    Standbys {
        /// Predicted nanoseconds from the detected loss until the job continues; `None` without a prediction.
        stall_ns: Option<u64>,
    },
    /// The parts are placed again on the remaining nodes: a model replays its contexts through all stages, a simulation rolls
    /// back to its last checkpoint.
    Placed {
        /// As above.
        stall_ns: Option<u64>,
    },
    /// The remaining nodes cannot hold the job.
    Ends {
        /// The planner's error.
        why: String,
    },
}

/// The effect of losing each zone on a model; empty if no zone is known. At most [`ZONES_MAX`] zones, by name.
pub fn model_losses(plan: &Plan, standbys: &[Standby], work: &Work, fleet: &Fleet, options: &Options) -> Vec<ZoneLoss> {
    let owners: Vec<DeviceId> = plan.stages().iter().map(|stage| stage.device).collect();
    let of = |zone: Zone<'_>| {
        let parts = zone.parts(&owners);
        let standby = |part: &u16| {
            let standby = standbys.iter().find(|standby| standby.stage == *part);
            let standby = standby.filter(|s| s.place.as_ref().is_some_and(|place| !zone.has(place.device)))?;
            Some(standby.stall_ns)
        };
        let stalls: Option<Vec<Option<u64>>> = parts.iter().map(standby).collect();
        let then = match stalls {
            Some(stalls) if stalls.is_empty() => Outcome::Untouched,
            Some(stalls) => Outcome::Standbys { stall_ns: stalls.into_iter().max().flatten() },
            None => placed_again(plan, work, options, &zone),
        };
        ZoneLoss { zone: zone.name.into(), coordinator: zone.has_node(options.head), parts, outcome: then }
    };
    zones(fleet).map(of).collect()
}

fn placed_again(plan: &Plan, work: &Work, options: &Options, zone: &Zone<'_>) -> Outcome {
    let left = zone.left();
    // If the coordinator is lost too, another node replaces it.
    let first = left.devices.iter().find(|device| !device.excluded).map(|device| device.id.node);
    let head = if zone.has_node(options.head) { first.unwrap_or(options.head) } else { options.head };
    match repair(plan, work, &left, &Options { goal: options.goal, head, losses: false }) {
        Err(error) => Outcome::Ends { why: error.to_string() },
        Ok(next) => {
            let lost: Vec<NodeKey> = zone.devices().map(|device| device.id.node).collect();
            Outcome::Placed { stall_ns: Some(placed_ns(plan, &next, work, &left, (head, &lost))) }
        }
    }
}

/// The effect of losing each zone on a simulation that `head` coordinates; empty if no zone is known. At most [`ZONES_MAX`]
/// zones, by name. `hot`: its standbys compute all steps too.
pub fn grid_losses(
    plan: &GridPlan,
    (standbys, hot): (&[TileStandby], bool),
    work: &GridWork,
    fleet: &Fleet,
    head: NodeKey,
) -> Vec<ZoneLoss> {
    let owners: Vec<(DeviceId, Block)> = plan.tiles().iter().map(|tile| (tile.device, tile.block)).collect();
    let devices: Vec<DeviceId> = owners.iter().map(|(device, _)| *device).collect();
    let of = |zone: Zone<'_>| {
        let parts = zone.parts(&devices);
        let stall = |part: &u16| {
            let standby = standbys.iter().find(|standby| standby.tile == *part && !zone.has(standby.device))?;
            let every = (!hot).then_some(standby.snapshot_every_ns);
            Some(tiles::takeover_ns(work, plan, usize::from(*part), every))
        };
        let stalls: Option<Vec<u64>> = parts.iter().map(stall).collect();
        let then = match stalls {
            Some(stalls) if stalls.is_empty() => Outcome::Untouched,
            Some(stalls) => Outcome::Standbys { stall_ns: stalls.into_iter().max() },
            None => match tiles::cut(work, &zone.left(), &RuleRates::default(), None) {
                Ok(_) => Outcome::Placed { stall_ns: None },
                Err(error) => Outcome::Ends { why: error.to_string() },
            },
        };
        ZoneLoss { zone: zone.name.into(), coordinator: zone.has_node(head), parts, outcome: then }
    };
    zones(fleet).map(of).collect()
}

/// A zone of a fleet.
struct Zone<'a> {
    name: &'a str,
    fleet: &'a Fleet,
}

fn zones(fleet: &Fleet) -> impl Iterator<Item = Zone<'_>> {
    let names = fleet.devices.iter().map(|device| device.zone.as_str()).filter(|zone| !zone.is_empty());
    let names: BTreeSet<&str> = names.collect();
    names.into_iter().take(ZONES_MAX).map(move |name| Zone { name, fleet })
}

impl Zone<'_> {
    fn devices(&self) -> impl Iterator<Item = &Device> {
        self.fleet.devices.iter().filter(|device| device.zone == self.name)
    }

    fn has(&self, device: DeviceId) -> bool {
        self.devices().any(|of| of.id == device)
    }

    fn has_node(&self, node: NodeKey) -> bool {
        self.devices().any(|of| of.id.node == node)
    }

    /// Parts whose owners are in the zone.
    fn parts(&self, owners: &[DeviceId]) -> Vec<u16> {
        let lost = owners.iter().enumerate().filter(|(_, owner)| self.has(**owner));
        lost.filter_map(|(at, _)| u16::try_from(at).ok()).collect()
    }

    /// The fleet without the zone.
    fn left(&self) -> Fleet {
        let devices = self.fleet.devices.iter().filter(|device| device.zone != self.name).cloned().collect();
        Fleet { devices, ..self.fleet.clone() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Goal;
    use crate::standby::{
        standbys,
        tests::{self, fleet},
    };
    use crate::work::Layer;
    use alloc::vec;

    fn device(id: u8, zone: &str, memory: u64) -> Device {
        Device { zone: zone.into(), ..tests::device(DeviceId::first([id; 16]), id.into(), memory) }
    }

    fn work() -> Work {
        let layer =
            Layer { flops_per_token: 0, weight_bytes: 1 << 20, kv_bytes_per_token: 1, window: None, experts: None };
        Work {
            layers: vec![layer; 8],
            embed_bytes: 1 << 20,
            head_bytes: 1 << 20,
            tied: false,
            head_flops: 0,
            activation_bytes: 2_304,
            coarser_bytes: Vec::new(),
            context: 1024,
            sequences: 1,
            scratch_bytes: 0,
        }
    }

    #[test]
    fn the_loss_of_a_zone_leaves_a_model_on_standbys_or_ends_it() {
        let options = Options { goal: Goal::Latency, head: NodeKey([1; 16]), losses: false };
        let asked = |devices: Vec<Device>| {
            let fleet = fleet(devices);
            let stages = [(DeviceId::first([1; 16]), 0..4), (DeviceId::first([2; 16]), 4..8)];
            let plan = Plan::new(&stages, &work(), &fleet, &options).unwrap();
            let standbys = standbys(&plan, &work(), &fleet, &options, &[]);
            model_losses(&plan, &standbys, &work(), &fleet, &options)
        };
        let unknown = asked(vec![device(1, "", 1 << 30), device(2, "", 1 << 30)]);
        assert_eq!(unknown, vec![]);
        let found = asked(vec![
            device(1, "a", 6 << 20),
            device(2, "b", 6 << 20),
            device(3, "b", 6 << 20),
            device(4, "c", 6 << 20),
        ]);
        let names: Vec<&str> = found.iter().map(|loss| &*loss.zone).collect();
        assert_eq!(names, ["a", "b", "c"]);
        let placed = matches!(found[0].outcome, Outcome::Standbys { stall_ns: Some(1..) });
        assert!(found[0].coordinator && found[0].parts == [0] && placed, "{found:?}");
        assert!(
            matches!(found[1].outcome, Outcome::Standbys { stall_ns: Some(1..) }) && found[1].parts == [1],
            "{found:?}"
        );
        assert_eq!((&found[2].outcome, found[2].parts.len()), (&Outcome::Untouched, 0));
        // The only standby is in the same zone as its stage.
        let found = asked(vec![device(1, "a", 6 << 20), device(2, "b", 6 << 20), device(3, "b", 6 << 20)]);
        assert!(matches!(found[1].outcome, Outcome::Ends { .. }), "{found:?}");
        let found = asked(vec![device(1, "a", 1 << 30), device(2, "b", 6 << 20), device(3, "b", 6 << 20)]);
        assert!(matches!(found[1].outcome, Outcome::Standbys { .. }), "the coordinator has memory for both: {found:?}");
    }

    #[test]
    fn the_loss_of_a_zone_leaves_a_simulation_on_standbys_or_places_it_again_or_ends_it() {
        let work = GridWork {
            size: [1024, 1024, 1],
            periodic: [true, true, false],
            radius: 1,
            state_bits: 576,
            traffic_bits: 576,
            face_bits: 96,
            cell_bits: 288,
            align_x: 64,
            scratch_bytes: 1 << 20,
            pass_steps: 1,
        };
        let head = NodeKey([1; 16]);
        let asked = |devices: Vec<Device>| {
            let fleet = fleet(devices);
            let plan = tiles::cut(&work, &fleet, &RuleRates::default(), Some(4)).unwrap();
            let owners: Vec<(DeviceId, Block)> = plan.tiles().iter().map(|tile| (tile.device, tile.block)).collect();
            let standbys = tiles::standbys(&work, &owners, plan.depth(), &fleet, &[]);
            grid_losses(&plan, (&standbys, true), &work, &fleet, head)
        };
        let room = 1 << 30;
        let found = asked(vec![device(1, "a", room), device(2, "a", room), device(3, "b", room), device(4, "b", room)]);
        assert_eq!(found.len(), 2);
        assert!(
            found.iter().all(|loss| matches!(loss.outcome, Outcome::Standbys { stall_ns: Some(1..) })),
            "{found:?}"
        );
        assert_eq!([found[0].coordinator, found[1].coordinator], [true, false]);
        let tight = 48 << 20;
        let found = asked(vec![device(1, "a", tight), device(2, "b", tight)]);
        assert!(found.iter().all(|loss| matches!(loss.outcome, Outcome::Ends { .. })), "{found:?}");
        let fleet = fleet(vec![device(1, "a", room), device(2, "b", room)]);
        let plan = tiles::cut(&work, &fleet, &RuleRates::default(), Some(4)).unwrap();
        let unguarded = grid_losses(&plan, (&[], true), &work, &fleet, head);
        assert!(unguarded.iter().all(|loss| matches!(loss.outcome, Outcome::Placed { .. })), "{unguarded:?}");
    }
}
