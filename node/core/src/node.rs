//! Who is told what: the router between the child machines, which do not see each other. No policy hides here.
//!
//! The shell calls `handle` for everything that happens, then `poll` until `None`, and comes back at `next_wakeup`.
//! What a node says to itself (a head that holds a stage) goes the same way as what it says to others, without a network.
//! Next: `membership.rs`.
use crate::codec::{self, Datagram};
use crate::config::Config;
use crate::failover::Failover;
use crate::id::{Epoch, JobId, NodeId, TensorId};
use crate::input::Input;
use crate::job::{JobOutput, JobView, Jobs};
use crate::limits::{LEASE, LINK_BROKEN, LINK_CUT};
use crate::links::Links;
use crate::liveness::{Liveness, LivenessOutput};
use crate::membership::{Member, Membership, MembershipOutput};
use crate::message::{FrameHeader, Message};
use crate::output::{Event, Output};
use crate::pipeline::{Pipeline, PipelineOutput};
use crate::placement::{Admission, HeldStage, Placement, PlacementOutput};
use crate::speeds::Speeds;
use crate::tiles::{Grids, Tiles};
use crate::time::{Duration, Instant};
use crate::work::{Change, DownReason, Payload};
use alloc::collections::{BTreeSet, VecDeque};
use alloc::{boxed::Box, format, string::String, vec::Vec};

mod grids;
mod losses;
mod planning;

/// A node of the mesh: the whole of what it decides.
///
/// Contract: after each `handle` (or several in a row, so that work that came together runs together), call `poll` until
/// it returns `None` and carry each output out; call `handle(now, Input::Wakeup)` no later than `next_wakeup`. Time must
/// not go backwards. Every call returns within about a millisecond.
pub struct Node {
    me: NodeId,
    membership: Membership,
    liveness: Liveness,
    placement: Placement,
    pipeline: Pipeline,
    jobs: Jobs,
    tiles: Tiles,
    grids: Grids,
    failover: Failover,
    speeds: Speeds,
    now: Instant,
    links: Links,
    /// This node's executor does not get on, and the jobs headed here know.
    stuck: bool,
    /// What this node said to itself and has not heard yet.
    to_self: VecDeque<ToSelf>,
    out: VecDeque<Output>,
}

enum ToSelf {
    Message(Message),
    Frame(FrameHeader, Payload),
}

impl Node {
    /// A node that knows nobody yet. Nothing it does depends on chance beyond `seed`.
    pub fn new(config: Config, seed: u64) -> Self {
        let me = config.node;
        Node {
            me,
            membership: Membership::new(&config, Instant::default(), seed),
            liveness: Liveness::new(),
            placement: Placement::new(me),
            pipeline: Pipeline::default(),
            jobs: Jobs::new(me, config.generation),
            tiles: Tiles::new(me),
            grids: Grids::new(me),
            failover: Failover::default(),
            speeds: Speeds::default(),
            now: Instant::default(),
            links: Links::default(),
            stuck: false,
            to_self: VecDeque::new(),
            out: VecDeque::new(),
        }
    }

    /// Something happened.
    pub fn handle(&mut self, now: Instant, input: Input) {
        // A node with work hears from its own clock every heartbeat. A leap means that it was stopped (SIGSTOP, a closed
        // lid), and may have been replaced.
        if now.since(self.now) >= LEASE {
            self.pipeline.withhold(self.me);
            let late = self.next_wakeup().map_or(Duration::ZERO, |(due, _)| now.since(due));
            self.pipeline.excuse(late);
        }
        self.now = self.now.max(now);
        self.route_input(input);
        self.look_after_executor();
        self.settle();
    }

    /// Connections to neighbours of running work that broke are dialled again, and the head is told of those that do not stand.
    fn look_after_links(&mut self) {
        let now = self.now;
        for (node, elapsed) in self.links.take_due(now, |node| self.liveness.jobs_with(node).next().is_some()) {
            self.membership.reconnect(now, node);
            let jobs: Vec<JobId> = self.liveness.jobs_with(node).filter(|_| elapsed >= LINK_BROKEN).collect();
            for job in jobs {
                if self.own_epoch(job).is_none() {
                    self.report(job, node, elapsed);
                } else if elapsed >= LINK_BROKEN + LINK_CUT * 2 {
                    self.failover.handle_silent(now, job, node, elapsed);
                }
            }
        }
    }

    /// Heads learn from heartbeats that another node's executor does not get on; nobody tells them of their own.
    fn look_after_executor(&mut self) {
        let was_stuck = self.stuck;
        self.stuck = self.pipeline.stuck(self.now).is_some();
        if self.stuck && !was_stuck {
            self.jobs.handle_stuck(self.now);
        }
    }

    /// Do this; call until `None`.
    pub fn poll(&mut self) -> Option<Output> {
        if self.out.is_empty() {
            // Everything that came together has been handled: what waits may run as one batch.
            while let Some(output) = self.pipeline.poll_compute(self.now) {
                self.route_pipeline(output);
            }
        }
        self.out.pop_front()
    }

    /// When to come back, and who asked.
    pub fn next_wakeup(&self) -> Option<(Instant, &'static str)> {
        let heads = !self.stuck && !self.jobs.is_empty();
        let stuck = self.pipeline.stuck_at().filter(|_| heads).map(|at| (at, "node: its executor may be stuck"));
        let links = self.links.next_wakeup(|node| self.liveness.jobs_with(node).next().is_some());
        let children = [
            stuck,
            links,
            self.membership.next_wakeup(),
            self.liveness.next_wakeup(),
            self.placement.next_wakeup(),
            self.pipeline.next_wakeup(),
            self.failover.next_wakeup(),
            self.jobs.next_wakeup(),
            self.tiles.next_wakeup(),
            self.grids.next_wakeup(),
        ];
        children.into_iter().flatten().min()
    }

    // ---- views

    /// Members of the mesh but this node, alive or lately gone.
    pub fn members(&self) -> impl Iterator<Item = Member<'_>> {
        self.membership.members()
    }

    /// The membership machine, for views of this node's own advert and of where to reach others.
    pub fn membership(&self) -> &Membership {
        &self.membership
    }

    /// Jobs of which this node is the head.
    pub fn jobs(&self) -> impl Iterator<Item = JobView> + '_ {
        self.jobs.views()
    }

    /// Stages this node holds, of its own jobs and of others'.
    pub fn stages(&self) -> impl Iterator<Item = HeldStage> + '_ {
        self.placement.stages()
    }

    // ---- in

    fn route_input(&mut self, input: Input) {
        let now = self.now;
        match input {
            Input::Wakeup => {
                self.membership.handle_wakeup(now);
                self.liveness.handle_wakeup(now);
                self.placement.handle_wakeup(now);
                self.pipeline.handle_wakeup(now);
                self.failover.handle_wakeup(now);
                self.jobs.handle_wakeup(now);
                self.tiles.handle_wakeup(now);
                self.grids.handle_wakeup(now);
                self.look_after_links();
            }
            Input::PeerFound { node, peer_id, gossip, data, remembered } => {
                self.membership.handle_peer_found(now, node, peer_id, gossip, data);
                if remembered {
                    self.membership.handle_remembered(now, node);
                }
            }
            Input::Datagram { from, source, bytes } => self.route_datagram(from, source, &bytes),
            Input::Connected { node, rtt_ns } => {
                self.membership.handle_connected(now, node, rtt_ns);
                if let Some(told) = self.links.handle_connected(node) {
                    if told {
                        let jobs: Vec<JobId> = self.liveness.jobs_with(node).collect();
                        jobs.into_iter().for_each(|job| self.report(job, node, Duration::ZERO));
                    }
                    self.failover.handle_peer_up(node);
                    self.jobs.handle_reconnected(now, node);
                    self.pipeline.handle_reconnected(node);
                    self.tiles.handle_reconnected(node);
                    self.fleet_changed();
                }
            }
            Input::Disconnected { node } => {
                self.membership.handle_disconnected(now, node);
                let needed = self.liveness.jobs_with(node).next().is_some();
                // A stranger that cannot be reached leaves no entry: only members hold running work.
                let known = needed || self.membership.member(node).is_some();
                // Work waits for it: the smaller id dials at once, the other one if that does not help.
                if known && self.links.handle_disconnected(node) && needed && self.me < node {
                    self.membership.reconnect(now, node);
                }
            }
            Input::Message { from, bytes } => match codec::decode_message(&bytes) {
                Ok(message) => {
                    self.liveness.handle_heard(now, from);
                    self.route_message(from, message);
                }
                Err(error) => self.refused(Some(from), format!("message: {error}")),
            },
            Input::Signed { token, signature } => self.membership.handle_signed(now, token, signature),
            Input::Verified { token, valid } => self.membership.handle_verified(now, token, valid),
            Input::LinkMeasured { node, rtt_ns, bytes_per_second } => {
                self.membership.handle_link_measured(node, rtt_ns, bytes_per_second);
            }
            Input::CapacityChanged(capacity) => {
                self.membership.handle_capacity(now, capacity);
                self.fleet_changed();
            }
            Input::Holdings(holds) => self.membership.handle_holdings(now, holds),
            Input::Banned(nodes) => self.membership.handle_banned(now, nodes),
            Input::Leave => {
                self.placement.set_draining(true);
                self.tiles.set_draining(true);
                self.membership.handle_leave(now);
                self.jobs.handle_leave();
                self.grids.handle_leave();
            }
            Input::Drain(draining) => {
                self.placement.set_draining(draining);
                self.tiles.set_draining(draining);
                self.membership.handle_drain(now, draining);
            }
            Input::Deploy { call, model, plan_only } => self.jobs.handle_deploy(now, call, *model, plan_only),
            Input::Survey { call, job } => {
                let resident = job.map(|job| self.jobs.holdings(job)).unwrap_or_default();
                let fleet = job.map_or_else(|| self.fleet(), |job| self.fleet_for(job, &resident));
                self.notify(Event::Fleet { call, fleet: Box::new(fleet), options: self.plan_options(false) });
            }
            Input::Planned { token, result } => self.jobs.handle_planned(now, token, result),
            Input::Submit { call, job, request } => self.jobs.handle_submit(now, call, job, *request),
            Input::Cancel { call } => self.jobs.handle_cancel(now, call),
            Input::Undeploy { job } => self.jobs.handle_undeploy(job),
            Input::Loaded { job, load, result } => self.placement.handle_loaded(job, load, result),
            Input::Fetched { job, epoch, result } => self.placement.handle_fetched(job, epoch, result),
            Input::Challenged { job, epoch, nonce, result } => {
                self.send(epoch.minter, Message::Challenged { job, epoch, nonce, result });
            }
            Input::Frame { from, header, tensor } => {
                self.liveness.handle_heard(now, from);
                self.route_frame(from, header, Payload::Tensor(tensor));
            }
            Input::Computed { work, results } => self.pipeline.handle_computed(now, work, results),
            Input::Grid(input) => self.route_grid_input(input),
        }
    }

    fn route_datagram(&mut self, from: NodeId, source: core::net::SocketAddr, bytes: &[u8]) {
        let now = self.now;
        match codec::decode_datagram(bytes) {
            Ok(Datagram::Swim(packet)) => self.membership.handle_swim(now, from, source, packet),
            Ok(Datagram::Suspected { generation, incarnation }) => {
                self.membership.handle_suspected(now, from, generation, incarnation);
            }
            Ok(Datagram::Advert(advert)) => self.membership.handle_advert(from, advert),
            Ok(Datagram::Heartbeat(heartbeat)) => {
                self.liveness.handle_heartbeat(now, from, heartbeat);
                self.tiles.coordinator_heard(now, from, heartbeat.job);
                if self.placement.head_heard(now, from, heartbeat.job, heartbeat.epoch) {
                    self.pipeline.release(heartbeat.job);
                }
            }
            Err(error) => self.refused(Some(from), format!("datagram: {error}")),
        }
    }

    fn route_message(&mut self, from: NodeId, message: Message) {
        let now = self.now;
        match message {
            Message::PushPull { members, heard, adverts, reply } => {
                self.membership.handle_push_pull(now, from, &members, &heard, adverts, reply);
            }
            Message::Leaving => self.membership.handle_leaving(now, from),
            Message::Prepare { job, epoch, prepare } => {
                let wedged = self.pipeline.wedged(now);
                self.placement.handle_prepare(now, from, job, epoch, prepare, wedged);
            }
            Message::Go { job, epoch, resume } => self.placement.handle_go(now, from, job, epoch, resume),
            Message::End { job, epoch } => self.placement.handle_end(from, job, epoch),
            Message::Open { job, epoch, request, sampling, tokens, prompt } => {
                if self.is_admitted(from, job, epoch) && from == epoch.minter {
                    self.pipeline.handle_open(job, request, sampling, tokens, prompt);
                }
            }
            Message::Close { job, epoch, request } => {
                if self.is_admitted(from, job, epoch) && from == epoch.minter {
                    self.pipeline.handle_close(job, request);
                }
            }
            Message::Stale { job, mine } => {
                self.placement.handle_stale(from, job, mine);
                self.jobs.handle_stale(now, from, job, mine);
                self.grids.handle_stale(now, from, job, mine);
            }
            Message::Standby { job, epoch, stage, node } => {
                if self.is_admitted(from, job, epoch) && from == epoch.minter {
                    self.pipeline.handle_standby(job, stage, node);
                }
            }
            Message::Resume { job, epoch, request, have } => {
                if self.jobs.feeds(from, job, epoch) {
                    self.jobs.handle_resume(from, job, request, have);
                } else if self.is_admitted(from, job, epoch) {
                    self.pipeline.handle_resume(from, job, request, have);
                }
            }
            Message::Held { job, epoch, held } => {
                self.jobs.handle_held(now, from, job, epoch, &held);
                // It comes often and asks for nothing: what is out of date is not worth an answer.
                if self.placement.admit(job, epoch) == Admission::Current {
                    self.pipeline.handle_held(from, job, held);
                }
            }
            Message::Prepared { job, epoch, result, held } => match result {
                Ok(bytes) => self.jobs.handle_prepared(now, from, job, epoch, bytes, held),
                Err(reason) if self.jobs.epoch_of(job) == Some(epoch) => {
                    self.jobs.handle_unprepared(now, job, from, &reason);
                    self.failover.handle_unprepared(now, job, from, &reason);
                }
                Err(_) => {}
            },
            Message::Token { job, epoch, request, position, token } => {
                self.jobs.handle_token(now, from, job, epoch, request, position, token);
            }
            Message::Progress { job, epoch, request, position } => {
                self.jobs.handle_progress(now, from, job, epoch, request, position);
            }
            Message::Gap { job, epoch, request, have } => self.jobs.handle_gap(now, from, job, epoch, request, have),
            Message::Tile { job, epoch, say } => self.route_tile_message(from, job, epoch, *say),
            Message::Fetch { job, epoch, prepare } => self.placement.handle_fetch(from, job, epoch, prepare),
            Message::Fetched { job, epoch, result } => self.jobs.handle_fetched(now, from, job, epoch, result),
            Message::Challenge { job, epoch, nonce } => {
                if self.is_admitted(from, job, epoch) && from == epoch.minter {
                    self.out.push_back(Output::Challenge { job, epoch, nonce });
                }
            }
            Message::Challenged { job, epoch, nonce, result } => {
                if self.jobs.epoch_of(job) == Some(epoch) {
                    self.jobs.handle_challenged(now, from, job, nonce, result);
                }
            }
            Message::Silent { job, epoch, node, silent_ms } => {
                if self.own_epoch(job) == Some(epoch) {
                    let silent = Duration::from_millis(silent_ms.into());
                    // Whoever does not hear this head, though this head hears it, is behind a link cut in one direction.
                    let node = if node == self.me { from } else { node };
                    let heard = self.liveness.is_fresh(now, node);
                    self.failover.handle_reported(now, job, from, node, silent, heard);
                }
            }
            Message::StageFailed { job, epoch, held, reason } => {
                if self.jobs.epoch_of(job) == Some(epoch) {
                    self.failover.handle_stage_failed(now, job, from, held, reason);
                }
            }
        }
    }

    fn route_frame(&mut self, from: NodeId, header: FrameHeader, payload: Payload) {
        if self.tiles.has(header.job) {
            if let Payload::Tensor(tensor) = payload {
                self.tiles.handle_strip(self.now, from, header, tensor);
            }
        } else if self.is_admitted(from, header.job, header.epoch) {
            self.pipeline.handle_frame(self.now, from, header, payload);
        } else if let Payload::Tensor(tensor) = payload {
            self.discard(tensor);
        }
    }

    /// Whether a frame or message of this epoch may act on the job's stage; a lower epoch is told the present one.
    fn is_admitted(&mut self, from: NodeId, job: JobId, epoch: Epoch) -> bool {
        match self.placement.admit(job, epoch) {
            Admission::Current => return true,
            Admission::Stale(mine) => self.send(from, Message::Stale { job, mine }),
            Admission::Unknown => {
                // The stage that the head counts on is not here (any more): the head should not wait to find out.
                let reason = String::from("this node holds no stage of the job");
                self.send(epoch.minter, Message::StageFailed { job, epoch, held: false, reason });
            }
            Admission::NotReady => {}
        }
        false
    }

    // ---- out

    /// Moves what the children want done to where it is done, until all are quiet.
    fn settle(&mut self) {
        loop {
            if let Some(said) = self.to_self.pop_front() {
                match said {
                    ToSelf::Message(message) => self.route_message(self.me, message),
                    ToSelf::Frame(header, payload) => self.route_frame(self.me, header, payload),
                }
            } else if let Some(output) = self.membership.poll_output() {
                self.route_membership(output);
            } else if let Some(output) = self.liveness.poll_output() {
                self.route_liveness(output);
            } else if let Some(output) = self.failover.poll_output() {
                self.route_failover(output);
            } else if let Some(output) = self.jobs.poll_output() {
                self.route_job(output);
            } else if let Some(output) = self.placement.poll_output() {
                self.route_placement(output);
            } else if let Some(output) = self.pipeline.poll_output() {
                self.route_pipeline(output);
            } else if let Some(output) = self.tiles.poll_output() {
                self.route_tiles(output);
            } else if let Some(output) = self.grids.poll_output() {
                self.route_grid(output);
            } else {
                return;
            }
        }
    }

    fn route_membership(&mut self, output: MembershipOutput) {
        match output {
            MembershipOutput::SendDatagram { to, addr, bytes } => {
                self.out.push_back(Output::SendDatagram { to, addr, bytes });
            }
            MembershipOutput::SendMessage { to, message } => self.send(to, message),
            MembershipOutput::Connect { node, peer_id, addrs } => {
                self.out.push_back(Output::Connect { node, peer_id, addrs });
            }
            MembershipOutput::Disconnect { node } => {
                self.links.forget(node);
                self.out.push_back(Output::Disconnect { node });
            }
            MembershipOutput::Sign { token, bytes } => self.out.push_back(Output::Sign { token, bytes }),
            MembershipOutput::Verify { token, peer_id, bytes, signature } => {
                self.out.push_back(Output::Verify { token, peer_id, bytes, signature });
            }
            MembershipOutput::PeerUp { node } => {
                self.failover.handle_peer_up(node);
                self.jobs.handle_peer_up(node);
                self.fleet_changed();
                self.notify(Event::PeerUp { node });
            }
            MembershipOutput::PeerDown { node, reason } => self.peer_down(node, reason),
            MembershipOutput::AdvertChanged { node: _ } => self.fleet_changed(),
            MembershipOutput::Remember { peers } => self.out.push_back(Output::Remember { peers }),
            MembershipOutput::Refused { from, what } => self.refused(Some(from), what.into()),
        }
    }

    fn fleet_changed(&mut self) {
        self.grids.handle_fleet_changed(self.now);
        if self.jobs.is_empty() {
            return;
        }
        let fleet = self.membership.fleet();
        let draining = fleet.devices.iter().filter(|device| device.excluded).map(|device| device.id.into()).collect();
        self.jobs.handle_fleet_changed(self.now, &draining);
    }

    fn peer_down(&mut self, node: NodeId, reason: DownReason) {
        let heard = self.liveness.is_fresh(self.now, node);
        self.failover.handle_peer_down(self.now, node, reason, heard);
        self.jobs.handle_gone(self.now, node);
        self.speeds.forget(node);
        if reason == DownReason::Left {
            self.jobs.handle_peer_left(node);
        }
        // What a dead head placed here is of no use to anybody: whoever takes over its requests needs the memory.
        if reason == DownReason::Left || !heard {
            self.placement.handle_head_gone(node);
            self.tiles.handle_coordinator_gone(self.now, node);
        }
        self.notify(Event::PeerDown { node, reason });
    }

    fn route_liveness(&mut self, output: LivenessOutput) {
        let now = self.now;
        match output {
            LivenessOutput::SendHeartbeat { to, heartbeat } => {
                if let Some(addr) = self.membership.gossip_addr(to) {
                    let bytes = codec::encode_datagram(&Datagram::Heartbeat(heartbeat));
                    self.out.push_back(Output::SendDatagram { to, addr, bytes });
                }
            }
            LivenessOutput::Silent { job, node, silent } => {
                if self.own_epoch(job).is_some() {
                    self.failover.handle_silent(now, job, node, silent);
                } else {
                    self.report(job, node, silent);
                    self.tiles.handle_coordinator_silent(now, job, node);
                }
            }
            LivenessOutput::Stuck { job, node, elapsed } => self.failover.handle_silent(now, job, node, elapsed),
            LivenessOutput::Back { job, node } if self.own_epoch(job).is_some() => {
                self.failover.handle_back(job, node);
                let lost: BTreeSet<NodeId> = self.failover.excluded(now, job).collect();
                if !self.jobs.awaits_others(now, job, &lost) {
                    self.fleet_changed();
                }
            }
            // Heartbeats come through; what is sent does not.
            LivenessOutput::Back { node, .. } if self.links.is_told(node) => {}
            LivenessOutput::Back { job, node } => self.report(job, node, Duration::ZERO),
        }
    }

    fn route_job(&mut self, output: JobOutput) {
        match output {
            JobOutput::PlanOnly { token, work, served } => {
                let fleet = served.map_or_else(|| self.fleet(), |(job, resident)| self.fleet_for(job, &resident));
                let fleet = Box::new(fleet);
                let options = self.plan_options(true);
                self.out.push_back(Output::Plan { token, work, fleet, options, repair: None });
            }
            JobOutput::PlanFound { call, result, work, served } => {
                let held = served.as_ref().map(|(job, resident, _)| self.fleet_for(*job, resident));
                let (fleet, options) = (held.unwrap_or_else(|| self.fleet()), self.plan_options(true));
                let change = served.zip(result.as_ref().ok()).and_then(|((_, _, present), next)| {
                    let before_ns = self.token_ns(&present, &work, &fleet)?;
                    let bytes = partitioner::moved_bytes(&present, next, &work);
                    Some(Change { before_ns, after_ns: next.token_ns(), bytes })
                });
                let standbys = result
                    .as_ref()
                    .map_or_else(|_| Vec::new(), |plan| partitioner::standbys(plan, &work, &fleet, &options, &[]));
                self.notify(Event::PlanReady { call, result, standbys, change });
            }
            JobOutput::Plan { token, job, work, resident, without, repair } => {
                let (mut fleet, options) = (Box::new(self.fleet_for(job, &resident)), self.plan_options(false));
                for device in &mut fleet.devices {
                    device.excluded |= without.contains(&device.id.into());
                }
                self.out.push_back(Output::Plan { token, work, fleet, options, repair });
            }
            JobOutput::Look { token, job, work, resident, present, repair } => {
                let (fleet, options) = (Box::new(self.fleet_for(job, &resident)), self.plan_options(false));
                self.jobs.handle_present(token, self.token_ns(&present, &work, &fleet));
                let repair = repair.then_some(present);
                self.out.push_back(Output::Plan { token, work, fleet, options, repair });
            }
            JobOutput::Measured { job, node, work, layers, took, quiet, digest } => {
                self.measured(job, node, &work, &layers, (took, quiet), digest);
            }
            JobOutput::Message { to, message } => self.send(to, message),
            JobOutput::Frame { to, header, tokens, copy } => self.send_frame(to, header, Payload::Tokens(tokens), copy),
            JobOutput::Watch { job, epoch, nodes, standbys } => self.watch(job, epoch, nodes, standbys),
            JobOutput::Standbys { job, plan, work, kept } => {
                let (fleet, options) = (self.fleet_for(job, &[]), self.plan_options(false));
                let chosen = partitioner::standbys(&plan, &work, &fleet, &options, &kept);
                self.jobs.handle_standbys(self.now, job, chosen);
            }
            JobOutput::Unwatch { job } => {
                self.failover.handle_ended(job);
                self.speeds.forget_job(job);
                self.liveness.handle_unwatch(job);
            }
            JobOutput::Notify(event) => self.notify(event),
        }
    }

    fn route_placement(&mut self, output: PlacementOutput) {
        match output {
            PlacementOutput::Load { job, epoch, load, mut stage } => {
                self.find_sources(&mut stage);
                self.out.push_back(Output::Load { job, epoch, load, stage });
            }
            PlacementOutput::Keep { job, epoch, load, stage } => {
                self.out.push_back(Output::Keep { job, epoch, load, stage });
            }
            PlacementOutput::Fetch { job, epoch, mut stage } => {
                self.find_sources(&mut stage);
                self.out.push_back(Output::Fetch { job, epoch, stage });
            }
            PlacementOutput::Unload { job } => self.out.push_back(Output::Unload { job }),
            PlacementOutput::Fence { job } => {
                self.pipeline.fence(job);
                while let Some(output) = self.pipeline.poll_output() {
                    self.route_pipeline(output);
                }
            }
            PlacementOutput::Quiesce { job } => self.pipeline.quiesce(job),
            PlacementOutput::Install { job, route } => self.pipeline.install(job, route),
            PlacementOutput::Reroute { job, route } => self.pipeline.reroute(job, route),
            PlacementOutput::Go { job, resume } => self.pipeline.go(self.now, job, &resume),
            PlacementOutput::Ready { job, epoch, bytes } => {
                let held = self.pipeline.positions(job);
                self.send(epoch.minter, Message::Prepared { job, epoch, result: Ok(bytes), held });
            }
            PlacementOutput::Watch { job, epoch, nodes } => self.liveness.handle_watch(self.now, job, epoch, &nodes),
            PlacementOutput::Unwatch { job } => self.liveness.handle_unwatch(job),
            PlacementOutput::Message { to, message } => self.send(to, message),
            PlacementOutput::Refused { from, what } => self.refused(Some(from), what),
        }
    }

    fn route_pipeline(&mut self, output: PipelineOutput) {
        match output {
            PipelineOutput::Compute { work, job, epoch, items, budget } => {
                self.liveness.handle_work_started(self.now, job, budget);
                self.out.push_back(Output::Compute { work, job, epoch, items });
            }
            PipelineOutput::Returned { job } => self.liveness.handle_work_done(self.now, job),
            PipelineOutput::Release { job, request } => self.out.push_back(Output::Release { job, request }),
            PipelineOutput::Discard { tensor } => self.discard(tensor),
            PipelineOutput::Frame { to, header, payload, copy } => self.send_frame(to, header, payload, copy),
            PipelineOutput::Failed { job, epoch, reason } => {
                self.placement.handle_stage_failed(job, epoch, &reason);
                self.send(epoch.minter, Message::StageFailed { job, epoch, held: true, reason });
            }
            PipelineOutput::Message { to, message } => self.send(to, message),
            PipelineOutput::Refused { from, what } => self.refused(Some(from), what),
        }
    }

    fn send(&mut self, to: NodeId, message: Message) {
        if to == self.me {
            self.to_self.push_back(ToSelf::Message(message));
            return;
        }
        match codec::encode_message(&message) {
            Ok(bytes) => self.out.push_back(Output::SendMessage { to, bytes }),
            Err(error) => self.refused(None, format!("message to {to} not sent: {error}")),
        }
    }

    fn send_frame(&mut self, to: NodeId, header: FrameHeader, payload: Payload, copy: bool) {
        if to == self.me {
            self.to_self.push_back(ToSelf::Frame(header, payload));
        } else {
            self.out.push_back(Output::SendFrame { to, header, payload, copy });
        }
    }

    fn discard(&mut self, tensor: TensorId) {
        self.out.push_back(Output::Discard { tensor });
    }

    fn notify(&mut self, event: Event) {
        self.out.push_back(Output::Notify(event));
    }

    fn refused(&mut self, from: Option<NodeId>, what: String) {
        self.notify(Event::Refused { from, what });
    }
}

#[cfg(test)]
mod tests;
