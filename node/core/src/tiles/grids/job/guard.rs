//! Who stands by for the tiles of a simulation.
use super::super::super::message::TileMessage;
use super::super::GridOutput;
use super::{GridJob, Phase, Standby};
use crate::id::NodeId;
use crate::limits::STANDBY_RETRY;
use crate::output::Event;
use crate::time::Instant;
use crate::work::steps::{Tier, TileStart};
use alloc::boxed::Box;
use alloc::collections::VecDeque;
use partitioner::DeviceId;
use partitioner::tiles::TileStandby;

impl GridJob {
    pub(super) fn lacks_standbys(&self) -> bool {
        self.spec.tier != Tier::None && self.tiles.iter().any(|tile| tile.standby.is_none())
    }

    pub(super) fn look_for_standbys(&mut self, now: Instant, out: &mut VecDeque<GridOutput>) {
        self.standbys_at = None;
        if !self.lacks_standbys() || self.phase != Phase::Running || self.computed {
            return;
        }
        let kept = self.tiles.iter().enumerate();
        let kept = kept.filter_map(|(tile, known)| Some((tile as u16, DeviceId::from(known.standby?.node)))).collect();
        out.push_back(GridOutput::Standbys {
            job: self.spec.job,
            work: Box::new(self.spec.work.clone()),
            owners: self.tiles.iter().map(|tile| (tile.owner.into(), tile.block)).collect(),
            depth: self.depth,
            step_ns: self.step_ns,
            kept,
            resident: self.resident(),
            without: self.unfit.clone(),
        });
        self.standbys_at = Some(now + STANDBY_RETRY * 5);
    }

    pub(in crate::tiles::grids) fn handle_standbys(
        &mut self,
        now: Instant,
        chosen: &[TileStandby],
        out: &mut VecDeque<GridOutput>,
    ) {
        for &TileStandby { tile, device, snapshot_every_ns } in chosen {
            let Some(known) = self.tiles.get_mut(usize::from(tile)) else { continue };
            if let Some(before) = known.standby.take() {
                // It is needed elsewhere.
                self.say(before.node, TileMessage::Release { tile }, out);
            }
            let snapshot_ms = u32::try_from(snapshot_every_ns / 1_000_000).unwrap_or(u32::MAX);
            let node = device.into();
            let Some(known) = self.tiles.get_mut(usize::from(tile)) else { continue };
            known.standby = Some(Standby { node, prepared: false, step: None, asked: now, told: false, snapshot_ms });
            self.ask_standby(now, usize::from(tile), out);
        }
        self.watch(out);
    }

    /// Asks a tile's standby to have it.
    pub(super) fn ask_standby(&mut self, now: Instant, tile: usize, out: &mut VecDeque<GridOutput>) {
        let Some(standby) = self.tiles[tile].standby.as_mut().filter(|standby| !standby.prepared) else { return };
        standby.asked = now;
        let node = standby.node;
        self.asked.insert(node);
        let order = self.order(tile, Some(self.spec.tier), TileStart::Snapshot);
        self.say(node, TileMessage::Prepare(order), out);
        let (job, stage) = (self.spec.job, tile as u16);
        out.push_back(GridOutput::Notify(Event::Standby { job, stage, node, current: false }));
    }

    pub(in crate::tiles::grids) fn handle_standby_lost(
        &mut self,
        now: Instant,
        node: NodeId,
        out: &mut VecDeque<GridOutput>,
    ) {
        for tile in &mut self.tiles {
            tile.standby = tile.standby.filter(|standby| standby.node != node);
        }
        self.standbys_at = Some(now + STANDBY_RETRY);
        self.watch(out);
        self.bequeath(out);
    }
}
