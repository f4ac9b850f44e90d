//! Messages and frames to a participant: the epoch fence first, then the part.
use super::output::discard_payload;
use super::program::Program;
use super::{HeldJob, Load, PartOutput, Parts, tile};
use crate::id::{Epoch, JobId, NodeId, PartId};
use crate::message::{FrameHeader, ToParticipant, ToTile};
use crate::output::Output;
use crate::time::Instant;
use crate::work::Payload;
use crate::work::steps::SaveKind;

impl Parts {
    /// A message to this node as a participant of a job.
    pub fn handle_message(&mut self, now: Instant, from: NodeId, job: JobId, epoch: Epoch, say: ToParticipant) {
        match say {
            ToParticipant::Prepare(order) => return self.prepare(now, from, job, epoch, order),
            ToParticipant::Fetch(order) => return self.fetch(from, job, epoch, order),
            ToParticipant::End => {
                self.fetches.retain(|(fetched, _), fetch| *fetched != job || fetch.epoch.issuer != from);
                // From the coordinator, or from a successor that does not use this node. The epoch may be far ahead: this node
                // took no part in those since a coordinator skipped some.
                let me = self.me;
                let may_end = |held: &HeldJob| {
                    let obeys = held.obeys(from) && !held.hears_another(me, from);
                    epoch >= held.epoch && epoch.issuer == from && obeys
                };
                if self.jobs.get(&job).is_some_and(may_end) && !self.follow_deferred(now, job) {
                    self.drop_job(job);
                }
                return;
            }
            ToParticipant::Go { .. }
            | ToParticipant::Release { .. }
            | ToParticipant::Challenge { .. }
            | ToParticipant::Standby { .. }
            | ToParticipant::Record(_)
            | ToParticipant::Log(_)
            | ToParticipant::CoordinatorSilent { .. }
            | ToParticipant::Held { .. }
            | ToParticipant::Gap { .. }
            | ToParticipant::Stage(_)
            | ToParticipant::Tile(_) => {}
        }
        // Frequent reports that ask for nothing are not answered if they are out of date.
        let quiet = matches!(say, ToParticipant::Held { again: false, .. });
        match self.jobs.get(&job).map(|held| held.epoch) {
            known if quiet && known != Some(epoch) => {}
            None => self.report_missing_for(job, epoch, &say),
            Some(_) if self.awaits_order(job, epoch) => {
                if let ToParticipant::Release { part } = say
                    && from == epoch.issuer
                {
                    self.release_unordered(job, part);
                } else {
                    self.report_missing_for(job, epoch, &say);
                }
            }
            Some(_) if self.admits(from, job, epoch) => self.handle_admitted(now, from, job, epoch, say),
            Some(_) => {}
        }
    }

    /// Reports a missing part that a message counts on, of a job that this node does not know.
    pub(super) fn report_missing_for(&mut self, job: JobId, epoch: Epoch, say: &ToParticipant) {
        let part = match say {
            ToParticipant::Go { part, .. } | ToParticipant::Challenge { part, .. } => *part,
            ToParticipant::Held { to, .. } => *to,
            ToParticipant::Prepare(_)
            | ToParticipant::Fetch(_)
            | ToParticipant::End
            | ToParticipant::Release { .. }
            | ToParticipant::Standby { .. }
            | ToParticipant::Record(_)
            | ToParticipant::Log(_)
            | ToParticipant::CoordinatorSilent { .. }
            | ToParticipant::Gap { .. }
            | ToParticipant::Stage(_)
            | ToParticipant::Tile(_) => return,
        };
        self.report_missing(job, epoch, part);
    }

    pub(super) fn handle_admitted(&mut self, now: Instant, from: NodeId, job: JobId, epoch: Epoch, say: ToParticipant) {
        let coordinator = from == epoch.issuer;
        // What parts on its node send is no sign that it still coordinates the job.
        if coordinator
            && says_coordinator(&say)
            && let Some(held) = self.jobs.get_mut(&job)
        {
            held.heard(now);
        }
        match say {
            ToParticipant::Go { part, resume } if coordinator => self.go(now, job, part, &resume),
            ToParticipant::Release { part } if coordinator => self.release(job, part),
            ToParticipant::Record(record) if coordinator => self.handle_record(now, job, record),
            ToParticipant::Log(news) if coordinator => self.handle_log(job, news),
            ToParticipant::Standby { part, node } if coordinator => self.handle_standby(job, part, node),
            ToParticipant::Challenge { part, nonce } if coordinator => {
                if self.is_resident(from, job, epoch, part) {
                    self.out.push_back(PartOutput::Shell(Output::Challenge { job, epoch, part, nonce }));
                }
            }
            ToParticipant::Stage(say) if coordinator => {
                let Some(held) = self.jobs.get_mut(&job) else { return };
                for known in held.parts.values_mut().filter(|known| known.load == Load::Resident) {
                    if let Program::Stage(run) = &mut known.run {
                        run.handle_message(say.clone(), &mut self.out);
                    }
                }
            }
            ToParticipant::CoordinatorSilent { checkpoint } => self.handle_vote(now, from, job, checkpoint),
            ToParticipant::Held { part, to, cursors, live, again } => {
                let Some(known) = self.jobs.get_mut(&job).and_then(|held| held.parts.get_mut(&to)) else { return };
                known.run.handle_held(from, part, &cursors, (live, again), &mut self.out);
            }
            ToParticipant::Gap { part, from: of } => {
                let known = self.jobs.get(&job).and_then(|held| held.parts.get(&part));
                let is_owner = known.is_some_and(|known| known.order.owner(of) == Some(from));
                if let Some(tile) = tile(&mut self.jobs, job, part).filter(|_| is_owner) {
                    tile.handle_gap(now, &mut self.out);
                }
            }
            // Only the coordinator collects states that are not snapshots.
            ToParticipant::Tile(ToTile::Fetched { kind, .. }) if kind != SaveKind::Snapshot && !coordinator => {}
            ToParticipant::Tile(say) => self.handle_tile_message(now, from, job, say),
            ToParticipant::Go { .. }
            | ToParticipant::Release { .. }
            | ToParticipant::Record(_)
            | ToParticipant::Log(_)
            | ToParticipant::Standby { .. }
            | ToParticipant::Challenge { .. }
            | ToParticipant::Stage(_)
            | ToParticipant::Prepare(_)
            | ToParticipant::Fetch(_)
            | ToParticipant::End => {}
        }
        self.start(now, job);
    }

    pub(super) fn handle_tile_message(&mut self, now: Instant, from: NodeId, job: JobId, say: ToTile) {
        let me = self.me;
        let part = match say {
            ToTile::WantSnapshot { part } | ToTile::Saved { part, .. } | ToTile::Fetched { part, .. } => part,
        };
        let Some(known) = self.jobs.get_mut(&job).and_then(|held| held.parts.get_mut(&part)) else { return };
        if known.run.handle_tile_message(me, from, say, &mut self.out) {
            self.start(now, job);
        }
    }

    /// The coordinator named the standby of a part, or removed it.
    pub(super) fn handle_standby(&mut self, job: JobId, part: PartId, node: Option<NodeId>) {
        let Some(held) = self.jobs.get_mut(&job) else { return };
        for (_, known) in held.parts.iter_mut().filter(|(at, _)| **at != part) {
            known.run.handle_standby(part, node);
        }
    }

    /// A frame arrived.
    pub fn handle_frame(&mut self, now: Instant, from: NodeId, header: FrameHeader, payload: Payload) {
        let admitted = self.is_resident(from, header.job, header.epoch, header.part);
        let held = self.jobs.get_mut(&header.job).and_then(|held| held.parts.get_mut(&header.part));
        let Some(held) = held.filter(|_| admitted) else { return discard_payload(payload, &mut self.out) };
        if held.run.handle_frame(now, from, header, payload, &mut self.out) {
            self.start(now, header.job);
        }
    }

    /// A broken connection is up again: messages that were in flight are lost.
    pub fn handle_reconnected(&mut self, node: NodeId) {
        for known in self.jobs.values_mut().flat_map(|held| held.parts.values_mut()) {
            if known.load != Load::Resident {
                continue;
            }
            known.run.handle_reconnected(node, &mut self.out);
        }
    }
}

/// Whether only the coordinator of a job sends this.
fn says_coordinator(say: &ToParticipant) -> bool {
    match say {
        ToParticipant::Prepare(_)
        | ToParticipant::Go { .. }
        | ToParticipant::Release { .. }
        | ToParticipant::End
        | ToParticipant::Fetch(_)
        | ToParticipant::Challenge { .. }
        | ToParticipant::Standby { .. }
        | ToParticipant::Record(_)
        | ToParticipant::Log(_)
        | ToParticipant::Stage(_) => true,
        ToParticipant::CoordinatorSilent { .. }
        | ToParticipant::Held { .. }
        | ToParticipant::Gap { .. }
        | ToParticipant::Tile(_) => false,
    }
}
