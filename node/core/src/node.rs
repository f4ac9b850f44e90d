//! The router between the child state machines, which do not see each other. It passes their outputs on, and detects
//! what concerns several of them: clock leaps, broken links, a stalled executor.
//!
//! The shell calls `handle` for everything that happens, then `poll` until `None`, and comes back at `next_wakeup`.
//! Messages of a node to itself (a coordinator that holds a part) take the same path as messages to other nodes,
//! without a network. Next: `membership.rs`.
use crate::codec::{self, Datagram};
use crate::config::Config;
use crate::failover::Failover;
use crate::id::{JobId, NodeId};
use crate::input::Input;
use crate::job::{JobOutput, JobView, Jobs, ParticipantFailure};
use crate::limits::{LEASE, LINK_BROKEN, LINK_CUT};
use crate::links::Links;
use crate::liveness::{Liveness, LivenessOutput};
use crate::membership::{Member, MemberState, Membership, MembershipOutput};
use crate::message::{FrameHeader, Message, ToCoordinator, ToParticipant};
use crate::output::{Event, Output};
use crate::part::{PartOutput, Parts};
use crate::speeds::MeasuredSpeeds;
use crate::time::{Duration, Instant};
use crate::work::steps::SaveKind;
use crate::work::{DownReason, HeldPart, Payload, Takeover};
use alloc::collections::VecDeque;
use alloc::{format, string::String, vec::Vec};

mod invariants;
mod losses;
mod planning;

/// A node of the mesh, with all of its decisions.
///
/// Contract: after each `handle` (or several in a row, so that work that arrived together runs together), call `poll`
/// until it returns `None` and carry each output out; call `handle(now, Input::Wakeup)` no later than `next_wakeup`.
/// Time must not go backwards. Every call returns within about a millisecond.
pub struct Node {
    me: NodeId,
    membership: Membership,
    liveness: Liveness,
    parts: Parts,
    jobs: Jobs,
    failover: Failover,
    speeds: MeasuredSpeeds,
    now: Instant,
    links: Links,
    /// This node's executor is stalled, and the jobs coordinated here were notified.
    stalled: bool,
    /// Messages and frames of this node to itself that are not handled yet.
    to_self: VecDeque<ToSelf>,
    out: VecDeque<Output>,
}

enum ToSelf {
    Message(Message),
    Frame(FrameHeader, Payload),
}

impl Node {
    /// A node that has not found other nodes yet. `seed` is its only source of randomness.
    pub fn new(config: Config, seed: u64) -> Self {
        let me = config.node;
        Node {
            me,
            membership: Membership::new(&config, Instant::default(), seed),
            liveness: Liveness::new(),
            parts: Parts::new(me),
            jobs: Jobs::new(me, config.generation),
            failover: Failover::default(),
            speeds: MeasuredSpeeds::default(),
            now: Instant::default(),
            links: Links::default(),
            stalled: false,
            to_self: VecDeque::new(),
            out: VecDeque::new(),
        }
    }

    /// Something happened.
    pub fn handle(&mut self, now: Instant, input: Input) {
        // A node with work wakes up for every heartbeat. A leap of the clock means that it was stopped (SIGSTOP, a
        // closed lid), and may have been replaced.
        if now.since(self.now) >= LEASE {
            self.parts.withhold();
            self.jobs.handle_clock_leap();
            let late = self.next_wakeup().map_or(Duration::ZERO, |(due, _)| now.since(due));
            self.parts.excuse(late);
        }
        self.now = self.now.max(now);
        self.route_input(input);
        self.look_after_executor();
        self.settle();
    }

    /// Redials broken connections to neighbours that share work with this node, and reports those that stay down to the
    /// coordinator.
    fn look_after_links(&mut self) {
        let now = self.now;
        for (node, elapsed) in self.links.take_due(now, |node| self.liveness.jobs_with(node).next().is_some()) {
            self.membership.reconnect(now, node);
            let jobs: Vec<JobId> = self.liveness.jobs_with(node).filter(|_| elapsed >= LINK_BROKEN).collect();
            for job in jobs {
                if self.jobs.epoch_of(job).is_none() {
                    self.report(job, node, elapsed);
                } else if elapsed >= LINK_BROKEN + LINK_CUT * 2 {
                    self.failover.handle_silent(now, job, node, elapsed);
                }
            }
        }
    }

    /// Heartbeats report stalled executors of other nodes. This node gets no heartbeat of its own, so its executor is
    /// checked here.
    fn look_after_executor(&mut self) {
        let was_stalled = self.stalled;
        self.stalled = self.parts.stalled(self.now).is_some();
        if self.stalled && !was_stalled {
            self.jobs.handle_stalled(self.now);
        }
    }

    /// The next action; call until `None`.
    pub fn poll(&mut self) -> Option<Output> {
        if self.out.is_empty() {
            // Everything that arrived together has been handled: queued work may run as one batch.
            while let Some(output) = self.parts.poll_runs(self.now) {
                self.route_part(output);
                self.settle();
            }
        }
        self.out.pop_front()
    }

    /// When to come back, and the reason.
    pub fn next_wakeup(&self) -> Option<(Instant, &'static str)> {
        let coordinates = !self.stalled && !self.jobs.is_empty();
        let stalled = self.parts.stalled_at().filter(|_| coordinates);
        let stalled = stalled.map(|at| (at, "node: its executor may be stalled"));
        let links = self.links.next_wakeup(|node| self.liveness.jobs_with(node).next().is_some());
        let children = [
            stalled,
            links,
            self.membership.next_wakeup(),
            self.liveness.next_wakeup(),
            self.parts.next_wakeup(),
            self.failover.next_wakeup(),
            self.jobs.next_wakeup(),
        ];
        children.into_iter().flatten().min()
    }

    // ---- views

    /// Members of the mesh except this node, alive or lately down.
    pub fn members(&self) -> impl Iterator<Item = Member<'_>> {
        self.membership.members()
    }

    /// The membership machine, for views of this node's advert and of the addresses of others.
    pub fn membership(&self) -> &Membership {
        &self.membership
    }

    /// Jobs that this node coordinates.
    pub fn jobs(&self) -> impl Iterator<Item = JobView> + '_ {
        self.jobs.views()
    }

    /// Parts that this node holds, of its own jobs and of others'.
    pub fn parts(&self) -> impl Iterator<Item = HeldPart> + '_ {
        self.parts.held()
    }

    // ---- in

    fn route_input(&mut self, input: Input) {
        let now = self.now;
        match input {
            Input::Wakeup => {
                self.membership.handle_wakeup(now);
                self.liveness.handle_wakeup(now);
                self.parts.handle_wakeup(now);
                self.failover.handle_wakeup(now);
                self.jobs.handle_wakeup(now);
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
                if let Some(reported) = self.links.handle_connected(node) {
                    if reported {
                        let jobs: Vec<JobId> = self.liveness.jobs_with(node).collect();
                        jobs.into_iter().for_each(|job| self.report(job, node, Duration::ZERO));
                    }
                    self.failover.handle_peer_up(node);
                    self.jobs.handle_reconnected(now, node);
                    self.parts.handle_reconnected(node);
                    self.fleet_changed();
                }
            }
            Input::Disconnected { node } => {
                self.membership.handle_disconnected(now, node);
                let needed = self.liveness.jobs_with(node).next().is_some();
                // A non-member that cannot be reached leaves no entry: only members hold running work.
                let known = needed || self.membership.member(node).is_some();
                // Running work waits for the connection. The node with the smaller id dials immediately, the other one
                // if that does not help.
                if known && self.links.handle_disconnected(node) && needed && self.me < node {
                    self.membership.reconnect(now, node);
                }
            }
            // The connections of a banned node are being closed. What arrives on them is ignored.
            Input::Message { from, .. } if self.membership.is_banned(from) => {
                self.refused(Some(from), String::from("message of a banned node"));
            }
            Input::Frame { from, tensor, .. } if self.membership.is_banned(from) => {
                self.out.push_back(Output::Discard { tensor });
                self.refused(Some(from), String::from("frame of a banned node"));
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
            Input::Banned(nodes) => {
                let dead = self.membership.handle_banned(now, nodes);
                dead.into_iter().for_each(|node| self.peer_down(node, DownReason::Left));
            }
            Input::Leave => {
                self.parts.set_draining(true);
                self.membership.handle_leave(now);
                self.jobs.handle_leave();
            }
            Input::Drain(draining) => {
                self.parts.set_draining(draining);
                self.membership.handle_drain(now, draining);
            }
            Input::Start { call, job } => self.jobs.handle_start(call, *job),
            Input::Plan { call, what, standbys } => self.jobs.handle_plan(call, *what, standbys),
            Input::Planned { asked, answer } => {
                self.jobs.set_domains(&self.domains());
                self.jobs.handle_planned(now, asked, answer);
            }
            Input::Submit { call, job, request } => self.jobs.handle_submit(now, call, job, *request),
            Input::Ask { call, to, job, request } => {
                self.membership.connect(now, to);
                self.jobs.handle_ask(now, call, to, job, *request);
            }
            Input::Cancel { call } => self.jobs.handle_cancel(now, call),
            Input::End { job } => self.jobs.handle_end(job),
            Input::Survey { call, job } => self.survey(call, job),
            Input::Loaded { job, part, load, result } => self.parts.handle_loaded(now, job, part, load, result),
            Input::Fetched { job, epoch, part, result } => self.parts.handle_fetched(job, epoch, part, result),
            Input::Challenged { job, epoch, part, nonce, result } => {
                let say = ToCoordinator::Challenged { part, nonce, result };
                self.send(epoch.issuer, Message::ToCoordinator { job, epoch, say });
            }
            Input::Frame { from, header, tensor } => {
                self.liveness.handle_heard(now, from);
                self.parts.handle_frame(now, from, header, Payload::Tensor(tensor));
            }
            Input::Halos { job, part, work, sizes } => self.parts.handle_halos(now, job, part, work, &sizes),
            Input::Ran { job: _, part, work, result } => self.parts.handle_ran(now, part, work, result),
            Input::Collected { job, part, step, kind: SaveKind::Snapshot, result } => {
                self.parts.handle_collected(now, job, part, step, &result);
            }
            Input::Collected { job, part, step, kind, result } => {
                self.jobs.handle_collected(now, job, (part, step, kind), result);
            }
            Input::CheckpointKept { job, step, result } => self.jobs.handle_kept(now, job, step, result),
            Input::Mirrored { job, step, result } => self.parts.handle_mirrored(now, job, step, &result),
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
            Ok(Datagram::Heartbeat(heartbeat)) if !self.membership.is_banned(from) => {
                self.liveness.handle_heartbeat(now, from, heartbeat);
                self.parts.coordinator_heard(now, from, heartbeat.job, heartbeat.epoch);
            }
            Ok(Datagram::Heartbeat(_)) => {}
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
            Message::Stale { job, mine } => {
                self.parts.handle_stale(from, job, mine);
                self.jobs.handle_predecessor(now, from, job, mine);
                self.jobs.handle_stale(now, from, job, mine);
            }
            Message::ToParticipant { job, epoch, say } => {
                // A message that this node sent to itself as coordinator, before it stood down.
                let stood_down = epoch.issuer == self.me && self.jobs.epoch_of(job).is_none();
                if from == self.me && stood_down && !matches!(say, ToParticipant::End) {
                    return;
                }
                // From another coordinator of the same job. This may be the only way in which the coordinator here
                // learns of it. If it was absent, it stands down before it answers, whatever the epoch: its answer
                // would make the other one stand down.
                let orders = matches!(say, ToParticipant::Prepare(_));
                let rival = epoch.issuer == from && from != self.me;
                if rival && self.jobs.epoch_of(job).is_some_and(|mine| mine < epoch || orders) {
                    self.jobs.handle_stale(now, from, job, epoch);
                    // If it stood down, its parts must know that before they see the order. They would answer with its
                    // epoch otherwise.
                    self.settle();
                }
                // An answer would make the other coordinator stand down, before this node knows which of the two has the
                // participants.
                if rival && orders && self.jobs.doubts(now, job) {
                    return;
                }
                // A job has one set of leases. Those of this coordinator and those of the other one's participant would
                // be mixed up.
                if rival
                    && orders
                    && let Some(mine) = self.jobs.epoch_of(job).filter(|_| self.parts.coordinator_of(job).is_none())
                {
                    return self.send(from, Message::Stale { job, mine });
                }
                self.parts.handle_message(now, from, job, epoch, say);
            }
            Message::ToCoordinator { job, epoch, say: ToCoordinator::Silent { node, silent_ms } } => {
                if self.jobs.epoch_of(job) == Some(epoch) {
                    let silent = Duration::from_millis(silent_ms.into());
                    // A node that does not hear this one, although this one hears it, is behind a link that is cut in
                    // one direction.
                    let node = if node == self.me { from } else { node };
                    let heard = self.liveness.is_fresh(now, node);
                    self.failover.handle_reported(now, job, from, node, silent, heard);
                }
            }
            Message::ToCoordinator { job, epoch, say } => match self.jobs.handle_message(now, from, job, epoch, say) {
                Some(ParticipantFailure::Unprepared { device, reason }) => {
                    self.failover.handle_unprepared(now, job, from.device(device), &reason)
                }
                Some(ParticipantFailure::Failed { place, held, reason }) => {
                    self.failover.handle_stage_failed(now, job, place, held, reason);
                }
                None => {}
            },
            Message::FromCaller { job, call, say } => self.jobs.handle_from_caller(now, from, job, call, say),
            Message::ToCaller { call, say } => self.jobs.handle_to_caller(now, from, call, say),
        }
    }

    // ---- out

    /// Routes the outputs of the children until there are none left.
    fn settle(&mut self) {
        loop {
            if let Some(said) = self.to_self.pop_front() {
                match said {
                    ToSelf::Message(message) => self.route_message(self.me, message),
                    ToSelf::Frame(header, payload) => self.parts.handle_frame(self.now, self.me, header, payload),
                }
            } else if let Some(output) = self.membership.poll_output() {
                self.route_membership(output);
            } else if let Some(output) = self.liveness.poll_output() {
                self.route_liveness(output);
            } else if let Some(output) = self.failover.poll_output() {
                self.route_failover(output);
            } else if let Some(output) = self.jobs.poll_output(self.now) {
                self.route_job(output);
            } else if let Some(output) = self.parts.poll_output() {
                self.route_part(output);
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
            MembershipOutput::Rejected { from, what } => self.refused(Some(from), what.into()),
        }
    }

    fn fleet_changed(&mut self) {
        if self.jobs.is_empty() {
            return;
        }
        let (draining, gone) = (self.membership.draining(), self.membership.gone());
        self.jobs.handle_fleet_changed(self.now, &draining, &gone);
    }

    fn peer_down(&mut self, node: NodeId, reason: DownReason) {
        let heard = self.liveness.is_fresh(self.now, node);
        self.failover.handle_peer_down(self.now, node, reason, heard);
        self.jobs.handle_down(self.now, node);
        self.speeds.forget(node);
        if reason == DownReason::Left {
            self.jobs.handle_peer_left(node);
        }
        if reason == DownReason::Left || !heard {
            self.parts.handle_coordinator_gone(self.now, node, reason == DownReason::Left);
        }
        self.fleet_changed();
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
                if self.jobs.epoch_of(job).is_some() {
                    self.failover.handle_silent(now, job, node, silent);
                } else {
                    self.report(job, node, silent);
                    self.parts.handle_coordinator_silent(now, job, node);
                }
            }
            LivenessOutput::Stalled { job, node, elapsed } => self.failover.handle_silent(now, job, node, elapsed),
            LivenessOutput::Back { job, node } if self.jobs.epoch_of(job).is_some() => {
                self.failover.handle_back(job, node);
                let lost = self.failover.excluded(now, job);
                if !self.jobs.awaits_others(now, job, &lost) {
                    self.fleet_changed();
                }
            }
            // Heartbeats arrive, but the connection is still down.
            LivenessOutput::Back { node, .. } if self.links.is_reported(node) => {}
            LivenessOutput::Back { job, node } => self.report(job, node, Duration::ZERO),
        }
    }

    fn route_job(&mut self, output: JobOutput) {
        match output {
            JobOutput::Shell(output) => self.out.push_back(output),
            JobOutput::Ask { asked, ask } => {
                let question = self.question(*ask);
                self.out.push_back(Output::Plan { asked, question });
            }
            JobOutput::Message { to, job, epoch, say } => self.send(to, Message::ToParticipant { job, epoch, say }),
            JobOutput::Stale { to, job, mine } => self.send(to, Message::Stale { job, mine }),
            JobOutput::Tell { to, call, say } => self.send(to, Message::ToCaller { call, say }),
            JobOutput::Call { to, job, call, say } => self.send(to, Message::FromCaller { job, call, say }),
            JobOutput::Frame { to, header, tokens, copy } => self.send_frame(to, header, Payload::Tokens(tokens), copy),
            JobOutput::Watch { job, epoch, nodes, standbys, others } => {
                self.failover.handle_placed(job, epoch, nodes.iter().copied());
                self.failover.handle_standbys(job, standbys.iter().copied());
                let all = nodes.into_iter().chain(standbys).chain(others);
                let all: Vec<NodeId> = all.filter(|&node| node != self.me).collect();
                self.liveness.handle_watch(self.now, job, epoch, &all);
            }
            JobOutput::Unwatch { job, successor } => {
                self.failover.handle_ended(job);
                self.speeds.forget_job(job);
                self.liveness.handle_unwatch(job);
                self.parts.handle_left(self.now, job, successor);
            }
            JobOutput::Measured { job, device, work, layers, ram, measured } => {
                self.measured(job, device, &work, (&layers, ram), measured);
            }
            JobOutput::Drafting(_) => {} // between jobs, which have routed it
            JobOutput::Notify(event) => self.notify(event),
        }
    }

    fn route_part(&mut self, output: PartOutput) {
        match output {
            PartOutput::Shell(output) => self.out.push_back(output),
            PartOutput::Load { job, epoch, load, order, replaces } => {
                let sources = self.sources(epoch, &order);
                self.out.push_back(Output::Load { job, epoch, load, order, sources, replaces });
            }
            PartOutput::Fetch { job, epoch, order } => {
                let sources = self.sources(epoch, &order);
                self.out.push_back(Output::Fetch { job, epoch, order, sources });
            }
            PartOutput::Message { to, job, epoch, say } => self.send(to, Message::ToParticipant { job, epoch, say }),
            PartOutput::Report { job, epoch, say } => {
                self.send(epoch.issuer, Message::ToCoordinator { job, epoch, say });
            }
            PartOutput::Stale { to, job, mine } => self.send(to, Message::Stale { job, mine }),
            PartOutput::Frame { to, header, payload: Payload::Tensor(tensor), copy: _ } if to == self.me => {
                // The receiving part consumes the payload, so that it needs a second name: others may need it still.
                let also = self.parts.name();
                self.out.push_back(Output::Share { tensor, also });
                self.send_frame(to, header, Payload::Tensor(also), false);
            }
            PartOutput::Frame { to, header, payload: Payload::Tensors(tensors), copy: _ } if to == self.me => {
                let mut shared = Vec::with_capacity(tensors.len());
                for tensor in tensors {
                    let also = self.parts.name();
                    self.out.push_back(Output::Share { tensor, also });
                    shared.push(also);
                }
                self.send_frame(to, header, Payload::Tensors(shared), false);
            }
            PartOutput::Frame { to, header, payload, copy } => self.send_frame(to, header, payload, copy),
            PartOutput::WorkStarted { job, device, budget } => {
                self.liveness.handle_work_started(self.now, job, device, budget);
            }
            PartOutput::WorkDone { job, device } => self.liveness.handle_work_done(self.now, job, device),
            PartOutput::Connect { node } => self.membership.connect(self.now, node),
            PartOutput::Watch { job, epoch, nodes } => {
                // Neighbours may not have been connected before.
                nodes.iter().for_each(|&node| self.membership.connect(self.now, node));
                self.liveness.handle_watch(self.now, job, epoch, &nodes);
            }
            PartOutput::Unwatch { job } => self.liveness.handle_unwatch(job),
            PartOutput::Succeed(inheritance) => self.succeed(*inheritance),
            PartOutput::Refused { from, what } => self.refused(Some(from), what),
        }
    }

    /// Takes over a job whose coordinator is silent.
    fn succeed(&mut self, inheritance: Takeover) {
        let (job, before) = (inheritance.job, inheritance.epoch.issuer);
        let participants = inheritance.record.participants(&inheritance.order.owners);
        let silent = self.liveness.last_heard(job, before).map_or(LEASE, |(at, _)| self.now.since(at));
        if self.jobs.handle_inherited(inheritance) {
            self.jobs.set_domains(&self.domains());
            self.failover.handle_inherited(self.now, job, participants.iter().copied(), (before, silent));
            // The coordinator may not have known, or not have published, which other nodes are down.
            for node in participants.into_iter().filter(|node| *node != self.me && *node != before) {
                if let Some(MemberState::Down(reason)) = self.membership.member(node).map(|member| member.state) {
                    let heard = self.liveness.is_fresh(self.now, node);
                    self.failover.handle_peer_down(self.now, node, reason, heard);
                }
            }
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

    fn notify(&mut self, event: Event) {
        self.out.push_back(Output::Notify(event));
    }

    fn refused(&mut self, from: Option<NodeId>, what: String) {
        self.notify(Event::Rejected { from, what });
    }
}

#[cfg(test)]
mod tests;
