//! Tiles that this node stands by for: they take a snapshot of the owner's, compute along or keep it, and say what they hold.
use super::message::TileMessage;
use super::run::State;
use super::{Tiles, TilesOutput};
use crate::id::{JobId, LoadId, NodeId};
use crate::limits::{SNAPSHOT_EVERY_MIN, SNAPSHOT_RETRY};
use crate::time::{Duration, Instant};
use crate::work::steps::SaveKind;
use alloc::string::String;
use alloc::vec::Vec;

impl Tiles {
    /// A standby that has something says so to those who feed it; one that has nothing asks for a snapshot.
    pub(super) fn take_up_shadow(&mut self, job: JobId, tile: u16) {
        let Some(run) = self.run(job, tile) else { return };
        let live = run.has_cells();
        if run.state == State::Ready {
            run.state = State::Running;
            run.shadow_owners();
        }
        let step = match run.state {
            State::Holding { step, .. } => step,
            State::Loading(_)
            | State::Wanting { .. }
            | State::Fetching { .. }
            | State::Ready
            | State::Running
            | State::Failed(_) => run.step,
        };
        let wants = matches!(run.state, State::Wanting { .. });
        let (epoch, owner) = (run.epoch, run.order.owner(tile));
        let feeders: Vec<(u16, NodeId)> =
            run.peers().into_iter().filter_map(|peer| Some((peer, run.order.owner(peer)?))).collect();
        for (to, node) in feeders {
            self.say(node, job, epoch, TileMessage::Held { tile, to, step, live, again: true });
        }
        if let Some(owner) = owner.filter(|_| wants) {
            self.say(owner, job, epoch, TileMessage::WantSnapshot { tile });
        }
    }

    pub(super) fn snapshot_made(&mut self, job: JobId, from: NodeId, tile: u16, step: u32, kind: SaveKind, bytes: u64) {
        let me = self.me;
        let Some(run) = self.run(job, tile) else { return };
        let wanted = matches!(run.state, State::Wanting { .. } | State::Holding { .. });
        if kind != SaveKind::Snapshot || !run.is_shadow() || run.order.owner(tile) != Some(from) || from == me {
            return;
        }
        if wanted && bytes <= run.order.bytes_max {
            if matches!(run.state, State::Wanting { .. }) {
                run.state = State::Fetching { step };
            }
            self.out.push_back(TilesOutput::Collect { job, from, tile, step, kind, bytes });
        }
    }

    /// A snapshot is here, or cannot be had.
    pub fn handle_collected(&mut self, now: Instant, job: JobId, tile: u16, step: u32, result: Result<(), String>) {
        let Some(run) = self.jobs.get_mut(&job).and_then(|held| held.runs.get_mut(&tile)) else { return };
        let (epoch, owner, warm) = (run.epoch, run.order.owner(tile), run.is_warm());
        let kind = SaveKind::Snapshot;
        match (&run.state, result) {
            (State::Fetching { step: wanted }, Ok(())) if *wanted == step => {
                if warm {
                    run.state = State::Holding { step, at: now, asked: false };
                    run.step = step;
                } else {
                    self.loads += 1;
                    let load = LoadId(self.loads);
                    run.state = State::Loading(load);
                    self.out.push_back(TilesOutput::Restore { job, load, tile, step });
                }
            }
            (State::Holding { step: before, at, .. }, Ok(())) if *before < step => {
                let (before, at) = (*before, *at);
                run.state = State::Holding { step, at, asked: false };
                run.step = step;
                self.out.push_back(TilesOutput::Forget { job, tile, step: before, kind });
            }
            (State::Fetching { .. }, Err(_)) => run.state = State::Wanting { since: now },
            (_, Ok(())) => self.out.push_back(TilesOutput::Forget { job, tile, step, kind }),
            (State::Holding { step: before, at, .. }, Err(_)) => {
                run.state = State::Holding { step: *before, at: *at, asked: false };
            }
            (_, Err(_)) => {}
        }
        if let Some(owner) = owner {
            self.say(owner, job, epoch, TileMessage::Taken { tile, step, kind });
        }
        if warm {
            self.take_up_shadow(job, tile);
        }
    }

    /// What the standby is at is not kept any more: it takes a new snapshot.
    pub(super) fn gap(&mut self, now: Instant, job: JobId, tile: u16) {
        let Some(run) = self.jobs.get_mut(&job).and_then(|held| held.runs.get_mut(&tile)) else { return };
        if run.is_shadow() && run.has_cells() && !run.is_busy() {
            run.loaded(job, 0, run.bytes, &mut self.out);
            run.state = State::Wanting { since: now };
            self.take_up_shadow(job, tile);
        }
    }

    /// Standbys say what they hold to those who feed them, and ask for what they lack.
    pub(super) fn tell_held(&mut self, now: Instant, job: JobId) {
        let Some(held) = self.jobs.get_mut(&job) else { return };
        let mut say = Vec::new();
        for run in held.runs.values_mut().filter(|run| run.is_shadow()) {
            let (tile, epoch, owner) = (run.tile(), run.epoch, run.order.owner(run.order.tile));
            let every = Duration::from_millis(run.order.snapshot_ms.into()).max(SNAPSHOT_EVERY_MIN);
            match &mut run.state {
                State::Running => {
                    let feeders = run.peers().into_iter().filter_map(|peer| Some((peer, run.order.owner(peer)?)));
                    let step = run.step;
                    say.extend(feeders.map(|(to, node)| {
                        (node, epoch, TileMessage::Held { tile, to, step, live: true, again: false })
                    }));
                }
                State::Wanting { since } if now.since(*since) >= SNAPSHOT_RETRY => {
                    *since = now;
                    say.extend(owner.map(|owner| (owner, epoch, TileMessage::WantSnapshot { tile })));
                }
                // The owner keeps the last one only: another is asked for when that is here, or does not come.
                State::Holding { at, asked, .. }
                    if now.since(*at) >= if *asked { every.max(SNAPSHOT_RETRY) } else { every } =>
                {
                    (*at, *asked) = (now, true);
                    say.extend(owner.map(|owner| (owner, epoch, TileMessage::WantSnapshot { tile })));
                }
                State::Wanting { .. }
                | State::Holding { .. }
                | State::Loading(_)
                | State::Fetching { .. }
                | State::Ready
                | State::Failed(_) => {}
            }
        }
        say.into_iter().for_each(|(to, epoch, message)| self.say(to, job, epoch, message));
    }
}
