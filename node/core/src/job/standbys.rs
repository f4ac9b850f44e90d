//! Standbys of a job's parts: chosen while the job runs, announced to the nodes that feed them, promoted when an owner
//! drains or is lost.
use super::lifecycle::{Job, Phase, Role};
use super::output::{JobOutput, Out};
use super::part::{Part, Standby};
use super::serve::standby_positions;
use super::workload::Workload;
use crate::id::{NodeId, PartId};
use crate::limits::{PREPARE_RETRY, STANDBY_RETRY};
use crate::message::ToParticipant;
use crate::output::Event;
use crate::place::PlaceSet;
use crate::planted::{self, Planted};
use crate::time::Instant;
use crate::work::{Cursors, Ready};
use alloc::collections::BTreeSet;
use alloc::vec::Vec;
use partitioner::tiles::TileStandby;

impl Job {
    /// Whether a part lacks a standby.
    fn lacks_standbys(&self) -> bool {
        self.workload.wants_standbys() && self.parts.iter().any(|part| part.standby.is_none())
    }

    /// Asks the planner for missing standbys.
    pub(super) fn seek_standbys(&mut self, now: Instant, out: &mut Out) {
        self.standbys_due = None;
        if planted::has(Planted::NoStandbys) || !self.is_running() || !self.lacks_standbys() {
            return;
        }
        let kept =
            |(at, part): (usize, &Part)| part.standby.as_ref().map(|standby| (PartId::of(at).0, standby.place()));
        let kept = self.parts.iter().enumerate().filter_map(kept).collect();
        if let Some(what) = self.workload.ask_standbys(&self.parts, kept) {
            self.unfit.retain(|_, until| *until > now);
            let without = self.unfit.keys().copied().collect();
            self.standbys_asked = Some(self.ask(without, what, out));
        }
        self.standbys_due = Some(now + STANDBY_RETRY);
    }

    /// The planner chose standbys for stages.
    pub(super) fn handle_stage_standbys(&mut self, now: Instant, chosen: Vec<partitioner::Standby>, out: &mut Out) {
        let mut new = Vec::new();
        for standby in chosen {
            let part = PartId(standby.stage);
            if let Workload::Serve(serve) = &mut self.workload {
                serve.set_tier(part, standby.tier, standby.stall_ns);
            }
            let Some(place) = standby.place else { continue };
            let costs = (place.room(), place.step_ns);
            new.push((part, Standby::new(now, place.device, standby.tier, costs)));
        }
        self.add_standbys(now, new, out);
    }

    /// The planner chose standbys for tiles. If a tile's standby is reassigned, the answer also has a new one for that
    /// tile.
    pub(super) fn handle_tile_standbys(&mut self, now: Instant, chosen: &[TileStandby], out: &mut Out) {
        let Workload::Steps(steps) = &self.workload else { return };
        let tier = steps.spec.tier;
        let mut new = Vec::new();
        for &TileStandby { tile, device, snapshot_every_ns } in chosen {
            let Some(part) = self.parts.get_mut(usize::from(tile)) else { continue };
            let snapshot_ms = u32::try_from(snapshot_every_ns / 1_000_000).unwrap_or(u32::MAX);
            let standby = Standby::new(now, device, tier, (part.room, part.step_ns));
            let before = part.standby.take();
            new.push((PartId(tile), Standby { snapshot_ms, ..standby }));
            if let Some(before) = before {
                self.send(before.node, ToParticipant::Release { part: PartId(tile) }, out);
            }
        }
        self.add_standbys(now, new, out);
    }

    fn add_standbys(&mut self, now: Instant, new: Vec<(PartId, Standby)>, out: &mut Out) {
        if !self.is_running() {
            return;
        }
        let mut added = false;
        for (number, standby) in new {
            let node = standby.node;
            let Some(part) = self.parts.get_mut(number.index()) else { continue };
            if part.standby.is_some() || part.owner == node {
                continue;
            }
            part.standby = Some(standby);
            self.asked.insert(node);
            self.note_asked(node);
            self.order_standby(now, number, out);
            out.push_back(JobOutput::Notify(Event::Standby { job: self.id, part: number, node, current: false }));
            added = true;
        }
        if added {
            self.watch(out);
            self.publish_record(out);
            if let Workload::Serve(serve) = &mut self.workload {
                serve.requests.log_again(now);
            }
        }
    }

    /// Sends the order of a part to its standby.
    pub(super) fn order_standby(&mut self, now: Instant, part: PartId, out: &mut Out) {
        let Some(order) = self.order(part, Role::Standby).filter(|order| order.standby.is_some()) else { return };
        let Some(standby) = self.parts.get_mut(part.index()).and_then(|part| part.standby.as_mut()) else { return };
        standby.prepared = Err(now);
        let node = standby.node;
        self.send(node, ToParticipant::Prepare(order), out);
    }

    /// Repeats orders that standbys have not answered.
    pub(super) fn standbys_wakeup(&mut self, now: Instant, out: &mut Out) {
        let late = |part: &Part| {
            let asked = part.standby.as_ref().and_then(|standby| standby.prepared.as_ref().err());
            asked.is_some_and(|at| now.since(*at) >= PREPARE_RETRY)
        };
        let late: Vec<PartId> = (0..self.parts.len()).filter(|&at| late(&self.parts[at])).map(PartId::of).collect();
        late.into_iter().for_each(|part| self.order_standby(now, part, out));
    }

    pub(super) fn next_standby_retry(&self) -> Option<Instant> {
        let asked = self.parts.iter().filter_map(|part| part.standby.as_ref()?.prepared.as_ref().err());
        asked.min().map(|at| *at + PREPARE_RETRY)
    }

    /// A standby has answered its order. It is announced to the nodes that feed it.
    pub(super) fn standby_prepared(&mut self, now: Instant, part: PartId, ready: &Ready, out: &mut Out) {
        let ready_now = self.workload.ready_when_prepared();
        let Some(standby) = self.parts.get_mut(part.index()).and_then(|part| part.standby.as_mut()) else { return };
        (standby.prepared, standby.ram_pages) = (Ok(ready.has.clone()), ready.ram_pages);
        standby.ready |= ready_now;
        let node = standby.node;
        if self.phase != Phase::Running {
            return;
        }
        if let Workload::Serve(serve) = &mut self.workload {
            serve.count_ram(&self.parts, out);
            serve.requests.handle_standby(now, out);
            serve.requests.close_ended(node, standby_positions(&ready.has), out);
        }
        self.announce_standby(part, out);
        self.announce_to_standby(part, out);
        self.report_standbys(now, out);
        self.publish_record(out); // it may vote from now on
        if !self.draining.is_empty() {
            self.standbys_due = Some(now); // it may take over immediately
        }
    }

    /// The standby of a part, if the nodes that feed the part have to know it.
    fn fed(&self, part: PartId) -> Option<NodeId> {
        let standby = self.parts.get(part.index())?.standby.as_ref()?;
        (standby.is_prepared() && self.workload.follows(standby)).then_some(standby.node)
    }

    /// Nodes that must know a part's standby: the owners of the parts that feed it. For a stage also the owner of the
    /// next stage, and the standbys of both neighbours.
    fn beside(&self, part: PartId) -> BTreeSet<NodeId> {
        let Some(order) = self.order(part, Role::Owner) else { return BTreeSet::new() };
        let mut beside: BTreeSet<PartId> = order.upstream(part).into_iter().collect();
        let route = matches!(self.workload, Workload::Serve(_));
        if route {
            beside.insert(part.after());
        }
        let owners = beside.iter().filter_map(|&part| order.owner(part));
        let standbys = beside.iter().filter(|_| route).filter_map(|&part| self.fed(part));
        owners.chain(standbys).collect()
    }

    fn announce_standby(&mut self, part: PartId, out: &mut Out) {
        let node = self.fed(part);
        for to in self.beside(part) {
            self.send(to, ToParticipant::Standby { part, node }, out);
        }
        self.update_fed();
    }

    /// The standby of a stage must also know the standbys of the neighbouring stages.
    fn announce_to_standby(&self, part: PartId, out: &mut Out) {
        let Some(to) = self.fed(part).filter(|_| matches!(self.workload, Workload::Serve(_))) else { return };
        for other in part.before().into_iter().chain([part.after()]) {
            if let Some(node) = self.fed(other) {
                self.send(to, ToParticipant::Standby { part: other, node: Some(node) }, out);
            }
        }
    }

    /// The coordinator itself feeds the first stage's standby, and closes requests at all standbys.
    fn update_fed(&mut self) {
        let fed = (0..self.parts.len()).map(PartId::of).filter_map(|part| Some((part, self.fed(part)?))).collect();
        if let Workload::Serve(serve) = &mut self.workload {
            serve.requests.set_standbys(fed);
        }
    }

    /// Announces all standbys again: earlier announcements may be lost.
    pub(super) fn announce_standbys(&mut self, out: &mut Out) {
        for part in (0..self.parts.len()).map(PartId::of) {
            if self.fed(part).is_some() {
                self.announce_standby(part, out);
            }
        }
    }

    /// Announces each standby once as current, and again when it can follow all requests after it could not.
    pub(super) fn report_standbys(&mut self, now: Instant, out: &mut Out) {
        let mut changed = false;
        for (at, part) in self.parts.iter_mut().enumerate() {
            let Some(standby) = &mut part.standby else { continue };
            let current = match standby.reported {
                true => !self.workload.is_left_behind(now, standby),
                false => self.workload.is_current(standby),
            };
            if current != standby.reported {
                standby.reported = current;
                let (job, part, node) = (self.id, PartId::of(at), standby.node);
                out.push_back(JobOutput::Notify(Event::Standby { job, part, node, current }));
                changed = true;
            }
        }
        if changed {
            self.publish_record(out);
        }
    }

    /// A standby reports its progress.
    pub(super) fn handle_held(&mut self, now: Instant, from: NodeId, part: PartId, cursors: Cursors, out: &mut Out) {
        let standby = self.parts.get_mut(part.index()).and_then(|part| part.standby.as_mut());
        let Some(standby) = standby.filter(|standby| standby.node == from) else { return };
        standby.cursors = cursors;
        self.standbys_moved(now, out);
    }

    /// Standbys may have become current.
    pub(super) fn standbys_moved(&mut self, now: Instant, out: &mut Out) {
        if self.is_running() {
            self.report_standbys(now, out);
            self.hand_over(now, out);
        }
    }

    /// Removes a part's standby: it is lost, or cannot hold the part.
    pub(super) fn drop_standby(&mut self, now: Instant, part: PartId, out: &mut Out) {
        let Some(standby) = self.parts.get_mut(part.index()).and_then(|part| part.standby.take()) else { return };
        self.standbys_due = Some(now + STANDBY_RETRY);
        let node = standby.node;
        if standby.reported {
            out.push_back(JobOutput::Notify(Event::Standby { job: self.id, part, node, current: false }));
        }
        if self.is_running() {
            self.announce_standby(part, out);
        }
        // If the node lives, it drops the part. If this message is lost, it drops the part once it receives nothing
        // more about the job.
        self.send(node, ToParticipant::Release { part }, out);
        self.watch(out);
        self.publish_record(out);
    }

    /// Standbys are lost.
    pub(super) fn handle_standby_lost(&mut self, now: Instant, lost: &PlaceSet, out: &mut Out) {
        let stands = |part: &Part| part.standby.as_ref().is_some_and(|standby| lost.has(standby.place()));
        let parts: Vec<PartId> = (0..self.parts.len()).filter(|&at| stands(&self.parts[at])).map(PartId::of).collect();
        parts.into_iter().for_each(|part| self.drop_standby(now, part, out));
    }

    /// Releases standbys on draining nodes.
    pub(super) fn release_draining_standbys(&mut self, now: Instant, out: &mut Out) {
        let leaving: Vec<NodeId> = self.standby_nodes().intersection(&self.draining).copied().collect();
        leaving.into_iter().for_each(|node| self.handle_standby_lost(now, &PlaceSet::from_iter([node]), out));
    }

    /// Hands parts of draining nodes over to their standbys once those are current. Without a current standby a part
    /// stays: a running part is better than none. The coordinator's own parts stay as long as it coordinates.
    pub(super) fn hand_over(&mut self, now: Instant, out: &mut Out) {
        if !self.is_running() || self.draining.is_empty() {
            return;
        }
        let leaves = |part: &&Part| {
            let current = part.standby.as_ref().is_some_and(|s| s.ready && self.workload.is_current(s));
            self.draining.contains(&part.owner) && part.owner != self.me && current
        };
        let leaving: BTreeSet<NodeId> = self.parts.iter().filter(leaves).map(|part| part.owner).collect();
        // A node hands over all its parts, or none.
        let all = |node: &NodeId| self.parts.iter().filter(|part| part.owner == *node).all(|part| leaves(&part));
        let leaving: BTreeSet<NodeId> = leaving.into_iter().filter(all).collect();
        if !leaving.is_empty() {
            self.replan(now, &leaving.into_iter().collect(), out);
        }
    }
}
