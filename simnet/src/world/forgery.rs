//! Byzantine members: forge messages and frames in the names of other nodes, close to what those would send at the same moment.
//!
//! A misreporting member sees the current jobs, epochs, requests and positions. It forges nothing that it may say for
//! itself: a member's reports about its own stage are trusted.
use super::{Happening, World};
use crate::compute::Cargo;
use crate::host::HostId;
use node_core::codec::{self, Datagram};
use node_core::id::{Epoch, JobId, NodeId, PartId, RequestId};
use node_core::input::Input;
use node_core::job::{JobView, ProgramView};
use node_core::message::{Drafts, FrameHeader, FromStage, FromTile, Heartbeat, Message, ToCoordinator, ToParticipant};
use node_core::message::{ToStage, ToTile};
use node_core::output::Output;
use node_core::time::Duration;
use node_core::work::serve::{Position, Sampling};
use node_core::work::steps::{SaveKind, TileFigures};
use node_core::work::{Cursors, Order, PartState, PartWork, Ready, Resume};
use partitioner::Tier;
use rand::RngExt;
use std::collections::BTreeMap;

/// Observed state of jobs; forged messages are variations of it.
#[derive(Default)]
pub(super) struct Known {
    frames: BTreeMap<JobId, FrameHeader>,
    stages: BTreeMap<JobId, Order>,
    tiles: BTreeMap<JobId, (Epoch, Order)>,
}

impl Known {
    pub(super) fn note(&mut self, output: &Output) {
        match output {
            Output::SendFrame { header, .. } => _ = self.frames.insert(header.job, *header),
            Output::Load { job, epoch, order, .. } => match order.work {
                PartWork::Stage(_) => _ = self.stages.insert(*job, (**order).clone()),
                PartWork::Tile(_) => _ = self.tiles.insert(*job, (*epoch, (**order).clone())),
            },
            Output::Continue { job, epoch, .. } => {
                self.tiles.entry(*job).and_modify(|(known, _)| *known = *epoch);
            }
            Output::SendDatagram { .. }
            | Output::SendMessage { .. }
            | Output::Connect { .. }
            | Output::Disconnect { .. }
            | Output::Sign { .. }
            | Output::Verify { .. }
            | Output::Plan { .. }
            | Output::Restore { .. }
            | Output::Fetch { .. }
            | Output::Challenge { .. }
            | Output::Drop { .. }
            | Output::Unload { .. }
            | Output::Run(_)
            | Output::Release { .. }
            | Output::Fork { .. }
            | Output::Discard { .. }
            | Output::Split { .. }
            | Output::Share { .. }
            | Output::Collect { .. }
            | Output::Forget { .. }
            | Output::KeepCheckpoint { .. }
            | Output::Mirror { .. }
            | Output::Remember { .. }
            | Output::Notify(_) => {}
        }
    }
}

/// A forged message and its receiver.
enum Forgery {
    Message(HostId, Message),
    Frame(HostId, FrameHeader),
    Heartbeat(HostId, Heartbeat),
}

impl World {
    /// Schedules a member's forged messages over a time span.
    pub(super) fn plan_forgeries(&mut self, host: HostId, messages: u32, lasts: Duration) {
        let span_us = u64::try_from(lasts.as_micros()).unwrap_or(u64::MAX).max(1);
        for _ in 0..messages {
            let after = Duration::from_micros(self.forgery_chance.random_range(0..span_us));
            self.queue.push(self.now + after, Happening::Forge { era: self.era, host });
        }
    }

    /// Sends one forged message, if there is a job to forge about.
    pub(super) fn forge(&mut self, era: u32, forger: HostId) {
        let host = &self.hosts[forger.index()];
        if era != self.era || !host.runs() || host.paused_until.is_some() {
            return;
        }
        let (from, source) = (host.node_id, host.gossip_addr);
        let Some(forgery) = self.forge_about_a_job(forger) else { return };
        let (to, input) = match forgery {
            Forgery::Message(to, message) => {
                let Ok(bytes) = codec::encode_message(&message) else { return };
                (to, Input::Message { from, bytes })
            }
            Forgery::Frame(to, header) => {
                let tensor = self.hosts[to.index()].executor.take(Cargo::Rows(vec![from.0[0].into()], 4));
                (to, Input::Frame { from, header, tensor })
            }
            Forgery::Heartbeat(to, heartbeat) => {
                let bytes = codec::encode_datagram(&Datagram::Heartbeat(heartbeat));
                (to, Input::Datagram { from, source, bytes })
            }
        };
        let life = self.hosts[to.index()].life;
        let input = Box::new(input);
        self.queue.push(self.now, Happening::Forged { host: to, life, input });
    }

    fn forge_about_a_job(&mut self, forger: HostId) -> Option<Forgery> {
        let views = self.hosts.iter().filter(|host| host.id != forger);
        let views = views.filter_map(|host| Some((host.id, host.node.as_ref()?.jobs())));
        let views: Vec<(HostId, JobView)> =
            views.flat_map(|(host, views)| views.filter(is_model).map(move |view| (host, view))).collect();
        let tiles: Vec<JobId> = self.known.tiles.keys().copied().collect();
        let at = self.forgery_chance.random_range(0..(views.len() + tiles.len()).max(1));
        match views.into_iter().nth(at) {
            Some((coordinator, view)) => {
                let order = self.known.stages.get(&view.job)?.clone();
                Subject { forger, coordinator, order, frame: self.known.frames.get(&view.job).copied(), view }
                    .forge(self)
            }
            None => self.forge_about_a_tile(forger, *tiles.get(at.checked_sub(self.jobs_seen(forger))?)?),
        }
    }

    fn jobs_seen(&self, forger: HostId) -> usize {
        let others = self.hosts.iter().filter(|host| host.id != forger);
        others.filter_map(|host| host.node.as_ref()).map(|node| node.jobs().filter(is_model).count()).sum()
    }

    /// A random host of `among` that runs and that the sender reaches.
    fn victim(&mut self, forger: HostId, among: impl IntoIterator<Item = HostId>) -> Option<HostId> {
        let reached = |host: &HostId| *host != forger && self.hosts[host.index()].runs() && self.reaches(forger, *host);
        let all: Vec<HostId> = among.into_iter().filter(reached).collect();
        (!all.is_empty()).then(|| all[self.forgery_chance.random_range(0..all.len())])
    }
}

fn is_model(view: &JobView) -> bool {
    matches!(view.program, ProgramView::Serve { .. })
}

/// A model job as the misreporting member sees it.
struct Subject {
    forger: HostId,
    coordinator: HostId,
    view: JobView,
    order: Order,
    frame: Option<FrameHeader>,
}

impl Subject {
    fn forge(&self, world: &mut World) -> Option<Forgery> {
        let me = world.hosts[self.forger.index()].node_id;
        let owners = self.view.parts.iter().map(|part| part.owner);
        let standbys = self.view.parts.iter().filter_map(|part| part.standby.as_ref()?.node);
        let holds = world.hosts[self.forger.index()].node.as_ref()?.parts().any(|part| part.job == self.view.job);
        let takes_part = holds || owners.chain(standbys).any(|node| node == me);
        let holders = world
            .hosts
            .iter()
            .filter(|host| host.node.as_ref().is_some_and(|node| node.parts().any(|part| part.job == self.view.job)));
        let holders: Vec<HostId> = holders.map(|host| host.id).collect();
        let victim = world.victim(self.forger, holders)?;
        let coordinator = world.victim(self.forger, [self.coordinator]);
        // Participants are trusted about their own stages, so a participant forges no such report.
        let kinds =
            if takes_part { 0..AS_COORDINATOR + AS_PARTICIPANT } else { 0..AS_COORDINATOR + AS_PARTICIPANT + AS_STAGE };
        let kind = world.forgery_chance.random_range(kinds);
        match kind {
            0..AS_COORDINATOR => self.as_coordinator(world, kind, victim, me),
            kind if kind < AS_COORDINATOR + AS_PARTICIPANT => {
                self.as_participant(world, kind - AS_COORDINATOR, victim, coordinator?, takes_part)
            }
            kind => Some(Forgery::Message(coordinator?, self.as_stage(world, kind - AS_COORDINATOR - AS_PARTICIPANT))),
        }
    }

    /// An epoch close to the current one.
    fn epoch(&self, world: &mut World, issuer: NodeId) -> Epoch {
        let more = [0, 0, 1, 2, 65_536, 65_537, u32::MAX / 2][world.forgery_chance.random_range(0..7usize)];
        Epoch { counter: self.view.epoch.counter.saturating_add(more), issuer }
    }

    fn request(&self, world: &mut World) -> RequestId {
        let near = self.frame.map_or(0, |frame| frame.channel);
        RequestId(near + [0, 0, 0, 1, 7][world.forgery_chance.random_range(0..5usize)])
    }

    fn position(&self, world: &mut World) -> u32 {
        let near = self.frame.map_or(0, |frame| frame.end());
        let context = match self.view.program {
            ProgramView::Serve { context, .. } => context,
            ProgramView::Steps { .. } => 0,
        };
        [0, near.saturating_sub(1), near, near + 1, near + 100, context, u32::MAX]
            [world.forgery_chance.random_range(0..7usize)]
    }

    /// Messages that only the coordinator may send.
    fn as_coordinator(&self, world: &mut World, kind: u32, victim: HostId, me: NodeId) -> Option<Forgery> {
        let job = self.view.job;
        // Holders of a stage of this job reject an epoch that the sender issued; for other hosts it would be a new job.
        let issuer = if world.forgery_chance.random_bool(0.7) { self.view.epoch.issuer } else { me };
        let mut epoch = self.epoch(world, issuer);
        let request = self.request(world);
        let part = self.part(world);
        let say = match kind {
            0 | 1 => ToParticipant::Prepare(self.order(world, victim)?),
            2 => ToParticipant::Go { part, resume: Resume::Stage(vec![(request, self.position(world))]) },
            3 => ToParticipant::End,
            4 => {
                let sampling = Sampling { temperature_e6: 900_000, seed: 7, ..Sampling::GREEDY };
                ToParticipant::Stage(ToStage::Open { request, sampling, tokens: vec![1, 2, 3], prompt: 3 })
            }
            5 => ToParticipant::Stage(ToStage::Close { request }),
            6 => ToParticipant::Standby { part, node: world.forgery_chance.random_bool(0.5).then_some(me) },
            7 => {
                epoch.issuer = self.view.epoch.issuer;
                ToParticipant::Fetch(self.order(world, victim)?)
            }
            8 => ToParticipant::Release { part },
            _ => ToParticipant::Challenge { part, nonce: world.forgery_chance.random() },
        };
        Some(Forgery::Message(victim, Message::ToParticipant { job, epoch, say }))
    }

    fn part(&self, world: &mut World) -> PartId {
        PartId::of(world.forgery_chance.random_range(0..self.view.parts.len().max(1)))
    }

    fn order(&self, world: &mut World, victim: HostId) -> Option<Box<Order>> {
        let owners: Vec<NodeId> = self.view.parts.iter().map(|part| part.owner).collect();
        let node = world.hosts[victim.index()].node_id;
        let own = owners.iter().position(|owner| *owner == node);
        let part = own.map_or_else(|| self.part(world), PartId::of);
        let standby = own.is_none().then_some(Tier::Hot);
        (!owners.is_empty()).then(|| Box::new(Order { part, owners, standby, ..self.order.clone() }))
    }

    /// Messages between participants, reports to the coordinator about other nodes, and frames out of range.
    fn as_participant(
        &self,
        world: &mut World,
        kind: u32,
        victim: HostId,
        coordinator: HostId,
        takes_part: bool,
    ) -> Option<Forgery> {
        let job = self.view.job;
        match kind {
            0 | 1 => {
                let issuer = if world.forgery_chance.random_bool(0.8) {
                    self.view.epoch.issuer
                } else {
                    world.hosts[self.forger.index()].node_id
                };
                let mine = self.epoch(world, issuer);
                let to = if world.forgery_chance.random_bool(0.3) { coordinator } else { victim };
                Some(Forgery::Message(to, Message::Stale { job, mine }))
            }
            2 => {
                let others = self.view.parts.iter().filter_map(|part| world.host_of(part.owner)).chain([coordinator]);
                let others: Vec<HostId> = others.collect();
                let node = world.victim(self.forger, others).map(|host| world.hosts[host.index()].node_id)?;
                let silent_ms = world.forgery_chance.random_range(0..5_000);
                let say = ToCoordinator::Silent { node, silent_ms };
                Some(Forgery::Message(coordinator, Message::ToCoordinator { job, epoch: self.view.epoch, say }))
            }
            3 => {
                let epoch = self.epoch(world, self.view.epoch.issuer);
                let heartbeat = Heartbeat { job, epoch, done: 1 << 40, op_elapsed_us: u32::MAX, op_budget_us: 1 };
                Some(Forgery::Heartbeat(if takes_part { victim } else { coordinator }, heartbeat))
                    .filter(|_| !takes_part)
            }
            _ => {
                let node = world.hosts[victim.index()].node_id;
                let own = self.view.parts.iter().position(|part| part.owner == node);
                let part = PartId::of(own.unwrap_or(0));
                // A stage's real predecessor may send it any rows, so a participant addresses another part.
                let part = if takes_part || world.forgery_chance.random_bool(0.2) { PartId(part.0 + 3) } else { part };
                let (channel, cursor) = (self.request(world).0, self.position(world));
                let count = [1, 1, 0, 513, u32::MAX][world.forgery_chance.random_range(0..5usize)];
                let epoch = self.epoch(world, self.view.epoch.issuer);
                let continues = (cursor % 2 == 0).then_some(channel ^ 1);
                let drafts = Drafts { round: cursor % 3, rows: [0, 0, 3, 255][cursor as usize % 4], kept: count as u8 };
                Some(Forgery::Frame(
                    victim,
                    FrameHeader { job, epoch, part, channel, cursor, count, last: true, continues, drafts },
                ))
            }
        }
    }

    /// Messages that only a stage or a standby may send to the coordinator.
    fn as_stage(&self, world: &mut World, kind: u32) -> Message {
        let (job, epoch) = (self.view.job, self.view.epoch);
        let (request, position) = (self.request(world), self.position(world));
        let part = self.part(world);
        let more = world.forgery_chance.random_bool(0.3);
        let epoch = Epoch { counter: epoch.counter.saturating_add(more.into()), ..epoch };
        let say = match kind {
            0 => ToCoordinator::Stage(FromStage::Token { request, position, sampled: 4_711.into() }),
            1 => ToCoordinator::Stage(FromStage::Tokens { request, position, round: 1, tokens: vec![4_711; 9] }),
            2 => ToCoordinator::Stage(FromStage::Progress { request, position }),
            3 => ToCoordinator::Stage(FromStage::Gap { request, have: position }),
            4 => ToCoordinator::Held { part, cursors: Cursors::Each(vec![(request.0, position)]) },
            5 => ToCoordinator::Stage(FromStage::Resume { request, have: position }),
            6 => {
                let has = PartState::Stage(vec![Position { request, have: position, kept_from: 0 }]);
                ToCoordinator::Prepared {
                    part,
                    result: Ok(Ready {
                        device: self.order.device,
                        bytes: self.order.bytes_max,
                        ram: self.order.ram,
                        ram_pages: u32::MAX,
                        has,
                    }),
                }
            }
            7 => ToCoordinator::Prepared { part, result: Err("made up".into()) },
            8 => ToCoordinator::Failed { part, held: true, reason: "made up".into() },
            9 => ToCoordinator::Failed { part, held: false, reason: "made up".into() },
            10 => ToCoordinator::Fetched { part, result: Ok(1) },
            11 => ToCoordinator::Stage(FromStage::Busy { part, busy_us: world.forgery_chance.random() }),
            _ => ToCoordinator::Challenged { part, nonce: world.forgery_chance.random(), result: Ok(1) },
        };
        Message::ToCoordinator { job, epoch, say }
    }
}

/// A tile as the misreporting member sees it.
struct Tile {
    part: PartId,
    other: PartId,
    step: u32,
    kind: SaveKind,
}

impl Tile {
    /// Messages of its coordinator and of other participants to the holder of the tile.
    fn to_participant(&self, number: u32, order: &Order) -> Option<ToParticipant> {
        let Tile { part, other, step, kind } = *self;
        Some(match number {
            0 => ToParticipant::Prepare(Box::new(Order { part, ..order.clone() })),
            1 => ToParticipant::Go { part, resume: Resume::Tile(vec![step; order.owners.len()]) },
            2 => ToParticipant::Held { part, to: other, cursors: Cursors::All(step), live: false, again: true },
            3 => ToParticipant::Gap { part, from: other },
            4 => ToParticipant::Release { part },
            5 => ToParticipant::End,
            6 => ToParticipant::CoordinatorSilent { checkpoint: Some(u32::MAX) },
            7 => ToParticipant::Tile(ToTile::Saved { part, step, bytes: 1 }),
            8 => ToParticipant::Tile(ToTile::Fetched { part, step, kind }),
            9 => ToParticipant::Tile(ToTile::WantSnapshot { part }),
            _ => return None,
        })
    }

    /// Messages of the tile's holders to the coordinator.
    fn to_coordinator(&self, number: u32) -> Option<ToCoordinator> {
        let Tile { part, step, kind, .. } = *self;
        let ready =
            Ready { device: 0, bytes: 1, ram: 0, ram_pages: 0, has: PartState::Tile { step, kept: Vec::new() } };
        Some(match number {
            10 => ToCoordinator::Prepared { part, result: Ok(ready) },
            11 => ToCoordinator::Prepared { part, result: Err("made up".into()) },
            12 => ToCoordinator::Failed { part, held: true, reason: "made up".into() },
            13 => ToCoordinator::Tile(FromTile::Saved { part, step, kind, bytes: 1 }),
            14 => ToCoordinator::Tile(FromTile::Progress { part, step, figures: TileFigures::default() }),
            15 => ToCoordinator::Held { part, cursors: Cursors::All(step) },
            _ => return None,
        })
    }
}

impl World {
    /// Forges a message about a simulation, unless the member holds or owns a tile of it.
    fn forge_about_a_tile(&mut self, forger: HostId, job: JobId) -> Option<Forgery> {
        let (epoch, order) = self.known.tiles.get(&job)?.clone();
        let PartWork::Tile(work) = &order.work else { return None };
        let me = self.hosts[forger.index()].node_id;
        let holds =
            |host: &crate::host::Host| host.node.as_ref().is_some_and(|node| node.parts().any(|part| part.job == job));
        if holds(&self.hosts[forger.index()]) || order.owners.contains(&me) || epoch.issuer == me {
            return None;
        }
        let holders: Vec<HostId> = self.hosts.iter().filter(|host| holds(host)).map(|host| host.id).collect();
        let coordinator = self.host_of(epoch.issuer);
        let to = self.victim(forger, holders.into_iter().chain(coordinator))?;
        let random = &mut self.forgery_chance;
        let mut part = || PartId::of(random.random_range(0..order.owners.len().max(1)));
        let (part, other) = (part(), part());
        let every = work.schedule.checkpoint_every.filter(|_| random.random_bool(0.5)).unwrap_or(1).max(1);
        let step = random.random_range(0..work.schedule.steps.max(1)).next_multiple_of(every);
        let more = u32::from(random.random_bool(0.3));
        let issuer = if random.random_bool(0.8) { epoch.issuer } else { me };
        let epoch = Epoch { counter: epoch.counter.saturating_add(more), issuer };
        let kind = [SaveKind::Checkpoint, SaveKind::Snapshot, SaveKind::Output(0)][random.random_range(0..3usize)];
        let (tile, number) = (Tile { part, other, step, kind }, random.random_range(0..TILE_FORGERIES));
        let message = match (tile.to_participant(number, &order), tile.to_coordinator(number)) {
            (Some(say), _) => Message::ToParticipant { job, epoch, say },
            (None, Some(say)) => Message::ToCoordinator { job, epoch, say },
            (None, None) => Message::Stale { job, mine: epoch },
        };
        Some(Forgery::Message(to, message))
    }
}

/// Kinds of messages forged in the coordinator's name.
const AS_COORDINATOR: u32 = 10;
/// Kinds that any participant may send.
const AS_PARTICIPANT: u32 = 6;
/// Kinds forged in a stage's name.
const AS_STAGE: u32 = 13;
/// Kinds about tiles: ten to participants, six to the coordinator, and `Stale`.
const TILE_FORGERIES: u32 = 17;
