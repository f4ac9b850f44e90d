//! The SWIM protocol: wraps foca with its timers, packets and notifications, in a LAN profile. `probes.rs` handles distant
//! members.
use super::claims::{LEFT, Verdict, answer, is_news, weigh};
use super::health::Health;
use super::probes::{Due, PROBE_RTT, Probes};
use crate::codec::SwimCodec;
use crate::id::{Generation, NodeId};
use crate::limits::{DATAGRAM_BYTES_MAX, MEMBERS_MAX};
use crate::time::{Duration, Instant};
use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use bytes::{Buf, BufMut};
use core::net::SocketAddr;
use core::num::{NonZeroU8, NonZeroUsize};
use foca::{Codec, Foca, Header, Identity, Member, Message, NoCustomBroadcast, OwnedNotification, State, Timer};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};

/// The SWIM identity of a node's lifetime. Two are equal if node and generation are: the address is a hint for sending to a
/// node before its advert arrives.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct Life {
    pub(super) node: NodeId,
    pub(super) generation: Generation,
    pub(super) addr: Option<SocketAddr>,
}

impl PartialEq for Life {
    fn eq(&self, other: &Self) -> bool {
        self.node == other.node && self.generation == other.generation
    }
}

impl Eq for Life {}

impl Identity for Life {
    type Addr = NodeId;
    fn renew(&self) -> Option<Self> {
        self.generation.0.checked_add(1).map(|next| Life { generation: Generation(next), ..*self })
    }
    fn addr(&self) -> NodeId {
        self.node
    }
    fn win_addr_conflict(&self, other: &Self) -> bool {
        self.generation > other.generation
    }
}

/// An action or a report of SWIM.
pub(super) enum SwimOutput {
    /// Send this packet.
    Send(Life, Vec<u8>),
    /// Tell a member that it is suspected, and in which incarnation.
    NotifySuspect(Life, u16),
    /// A member is up. Its life may be new (a restart, or a return after it was declared down).
    Up(Life),
    /// A member is down; `true` if the member itself announced that it leaves.
    Down(Life, bool),
    /// A member has been down for so long that its entry was dropped.
    Forgotten(NodeId),
    /// This node was declared down and continues under a new generation.
    Renewed,
    /// The first member is known.
    Active,
    /// Most of this node's datagrams were lost, now they arrive again.
    Recovered,
}

/// The membership protocol of one node.
pub(super) struct Swim {
    foca: Foca<Life, SwimCodec, ChaCha8Rng, NoCustomBroadcast>,
    /// By due time, then in the order of arming: foca relies on the order of its timers.
    timers: BTreeMap<(Instant, u64), Armed>,
    armed: u64,
    /// Members that this node suspects; each is notified repeatedly until it refutes or is declared down.
    suspicions: BTreeMap<NodeId, Suspicion>,
    health: Health,
    probes: Probes,
    /// Number of the last ping outside foca.
    pings: u8,
    /// The token of foca's present timers.
    token: Option<u8>,
    /// The sender of the packet being handled: a goodbye is accepted only from the leaving node itself.
    speaker: Option<NodeId>,
    /// This node's incarnation, as in its last packet: foca does not expose it.
    incarnation: u16,
    /// Cluster size for which `max_transmissions` was last chosen.
    sized_for: usize,
}

#[derive(Clone, Copy)]
struct Suspicion {
    life: Life,
    incarnation: u16,
    next_notice: Instant,
    until: Instant,
}

/// A timer of foca's.
struct Armed {
    timer: Timer<Life>,
    /// How often it was postponed because this thread was late.
    excuses: u8,
}

impl Swim {
    pub(super) fn new(life: Life, seed: u64) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        rng.set_stream(1);
        let mut probes = Probes::default();
        probes.measure_from(life.node);
        Swim {
            foca: Foca::new(life, profile(2, SUSPECT), rng, SwimCodec),
            timers: BTreeMap::new(),
            armed: 0,
            suspicions: BTreeMap::new(),
            health: Health::default(),
            probes,
            pings: 0,
            token: None,
            speaker: None,
            incarnation: 0,
            sized_for: 2,
        }
    }

    pub(super) fn life(&self) -> Life {
        *self.foca.identity()
    }

    pub(super) fn alone(&self) -> bool {
        self.foca.num_members() == 0
    }

    pub(super) fn suspects(&self, node: NodeId) -> bool {
        self.suspicions.contains_key(&node)
    }

    /// All known members, for push-pull.
    pub(super) fn state(&self) -> Vec<Member<Life>> {
        let mut state: Vec<_> = self.foca.iter_membership_state().cloned().collect();
        state.push(Member::new(self.life(), self.incarnation, State::Alive));
        state
    }

    /// Handles a packet. Returns the sender's life, or why the packet was rejected.
    pub(super) fn handle_packet(
        &mut self,
        now: Instant,
        from: NodeId,
        packet: &[u8],
        out: &mut Vec<SwimOutput>,
    ) -> Result<Life, &'static str> {
        self.observe(now);
        let mut updates = packet;
        let header: Header<Life> =
            SwimCodec.decode_header(&mut updates).map_err(|_| "a membership packet that cannot be decoded")?;
        if header.src.node != from {
            return Err("a membership packet in another node's name");
        }
        if header.src_incarnation == LEFT {
            return Err("a membership packet with a reserved incarnation");
        }
        if let Message::Ack(number) = header.message {
            if self.probes.answered(now, from, number) {
                self.health.answered(true);
            } else {
                self.health.acked();
            }
            if self.health.take_recovery(now) {
                self.hasten(now);
                out.push(SwimOutput::Recovered);
            }
        }
        if let Message::ForwardedAck { origin, probe_number } = header.message {
            self.probes.vouched(from, origin.node, probe_number);
        }
        if header.message == Message::TurnUndead {
            // The message does not name the incarnation that was declared down, so it is only a hint; this implementation
            // sends `Suspected` instead.
            self.handle_suspected(now, Some(header.src), self.life().generation.0, self.incarnation, out);
            return Ok(header.src);
        }
        let sifted = self.sift(&header, updates);
        let mut outbox = Outbox::default();
        let result = self.foca.handle_data(sifted.as_deref().unwrap_or(packet), &mut outbox);
        self.speaker = Some(from);
        self.settle(now, outbox, out);
        self.speaker = None;
        self.bound(now, out);
        result.map(|()| header.src).map_err(|_| "a membership packet that foca rejected")
    }

    /// The packet without its outranked claims; `None` if foca can take it as it is.
    fn sift(&mut self, header: &Header<Life>, mut updates: &[u8]) -> Option<Vec<u8>> {
        let announce = header.message == Message::Announce;
        if header.dst != self.life() && !(announce && header.dst.node == self.life().node) {
            return None; // foca ignores it too
        }
        let known = self.known(header.src.node);
        let alive = Member::new(header.src, header.src_incarnation, State::Alive);
        let outranked = known.as_ref().is_some_and(|known| {
            known.state() == State::Down
                && (*known.id() == header.src || known.id().generation > header.src.generation)
                && weigh(Some(known), &alive) != Verdict::Supersede
        });
        self.admit_beside(known, alive);
        if outranked || updates.len() <= 2 {
            return None; // foca ignores such a sender's claims, or there are none
        }
        let mut claims = Vec::new();
        for _ in 0..updates.get_u16() {
            claims.push(SwimCodec.decode_member(&mut updates).ok()?); // foca reports the error
        }
        let admitted: Vec<Member<Life>> = claims.iter().filter_map(|claim| self.admit(claim.clone())).collect();
        if admitted == claims {
            return None;
        }
        let mut packet = Vec::new();
        SwimCodec.encode_header(header, &mut packet).ok()?;
        packet.put_u16(u16::try_from(admitted.len()).ok()?);
        for claim in &admitted {
            SwimCodec.encode_member(claim, &mut packet).ok()?;
        }
        packet.put_slice(updates);
        Some(packet)
    }

    /// foca's entry of a node: at most one life.
    fn known(&self, node: NodeId) -> Option<Member<Life>> {
        self.foca.iter_membership_state().find(|member| member.id().node == node).cloned()
    }

    /// The form in which foca may see a claim, or `None` to drop it.
    fn admit(&mut self, claim: Member<Life>) -> Option<Member<Life>> {
        let known = self.known(claim.id().node);
        self.admit_beside(known, claim)
    }

    /// As `admit`, with the known entry already looked up.
    fn admit_beside(&mut self, known: Option<Member<Life>>, claim: Member<Life>) -> Option<Member<Life>> {
        if *claim.id() == self.life() {
            return Some(answer(self.life(), self.incarnation, &claim));
        }
        match weigh(known.as_ref(), &claim) {
            Verdict::Keep => Some(claim),
            Verdict::Drop => None,
            Verdict::Supersede => {
                let life = *claim.id();
                let of_it = |timer: &Timer<Life>| matches!(timer, Timer::RemoveDown(down) if *down == life);
                self.timers.retain(|_, armed| !of_it(&armed.timer));
                // Dropping an entry causes no output.
                let _ = self.foca.handle_timer(Timer::RemoveDown(life), &mut Outbox::default());
                Some(claim)
            }
        }
    }

    /// Another member suspects this node, or declared it down: refute with a higher incarnation.
    pub(super) fn handle_suspected(
        &mut self,
        now: Instant,
        by: Option<Life>,
        generation: u64,
        incarnation: u16,
        out: &mut Vec<SwimOutput>,
    ) {
        self.observe(now);
        let own = self.life().generation.0;
        let mut outbox = Outbox::default();
        if generation > own && generation - own <= LEAP_MAX {
            // The peer knows a later generation than this one: the store was lost and the clock went back. Continue with a
            // higher generation.
            let next = Life { generation: Generation(generation.saturating_add(1)), ..self.life() };
            if self.foca.change_identity(next, &mut outbox).is_ok() {
                out.push(SwimOutput::Renewed);
            }
        } else if generation != own {
            return;
        }
        self.health.doubted(now);
        let doubt = answer(self.life(), self.incarnation, &Member::new(self.life(), incarnation, State::Suspect));
        // foca's errors here concern only the encoding of its own packets, for which `profile` leaves enough room.
        let _ = self.foca.apply_many(core::iter::once(doubt).filter(|_| generation == own), false, &mut outbox);
        if let Some(by) = by {
            let _ = self.foca.announce(by, &mut outbox);
        }
        self.settle(now, outbox, out);
    }

    pub(super) fn handle_state(&mut self, now: Instant, state: Vec<Member<Life>>, out: &mut Vec<SwimOutput>) {
        self.observe(now);
        let mut outbox = Outbox::default();
        // Most of a peer's table is known here too: one sorted index avoids searching the whole table for each claim.
        let known: BTreeMap<NodeId, &Member<Life>> =
            self.foca.iter_membership_state().map(|member| (member.id().node, member)).collect();
        let me = self.life().node;
        let news = |claim: &Member<Life>| {
            let node = claim.id().node;
            node == me || is_news(known.get(&node).copied(), claim)
        };
        let state: Vec<Member<Life>> = state.into_iter().filter(news).collect();
        let state: Vec<Member<Life>> = state.into_iter().filter_map(|claim| self.admit(claim)).collect();
        let _ = self.foca.apply_many(state.into_iter(), true, &mut outbox);
        self.settle(now, outbox, out);
        self.bound(now, out);
    }

    /// A member announced its departure outside SWIM packets, or must be treated as if it had.
    pub(super) fn handle_departure(&mut self, now: Instant, life: Life, out: &mut Vec<SwimOutput>) {
        self.speaker = Some(life.node);
        self.handle_state(now, alloc::vec![Member::new(life, LEFT, State::Down)], out);
        self.speaker = None;
    }

    pub(super) fn announce(&mut self, now: Instant, to: Life, out: &mut Vec<SwimOutput>) {
        let mut outbox = Outbox::default();
        let _ = self.foca.announce(to, &mut outbox);
        self.settle(now, outbox, out);
    }

    /// A packet that announces this node's departure to a member.
    pub(super) fn goodbye(&self, to: Life) -> Vec<u8> {
        let me = self.life();
        let header = Header { src: me, src_incarnation: 0, dst: to, message: Message::Gossip };
        let mut packet = Vec::new();
        let mut codec = SwimCodec;
        let encoded = codec.encode_header(&header, &mut packet).and_then(|()| {
            packet.put_u16(1);
            codec.encode_member(&Member::new(me, LEFT, State::Down), &mut packet)
        });
        if encoded.is_err() { Vec::new() } else { packet }
    }

    pub(super) fn handle_wakeup(&mut self, now: Instant, out: &mut Vec<SwimOutput>) {
        self.observe(now);
        while let Some(entry) = self.timers.first_entry().filter(|entry| entry.key().0 <= now) {
            let Armed { timer, .. } = entry.remove();
            let mut forgotten = None;
            match &timer {
                Timer::ProbeRandomMember(_) => self.health.probed(),
                Timer::SendIndirectProbe { .. } => self.health.judged(),
                // foca checks this too before it declares a member down, but notifies the member in any case.
                Timer::ChangeSuspectToDown { member_id, incarnation, .. } => {
                    if !self.is_suspect(*member_id, *incarnation) {
                        continue;
                    }
                }
                Timer::RemoveDown(life) => forgotten = Some(life.node),
                Timer::PeriodicAnnounce(_) | Timer::PeriodicAnnounceDown(_) | Timer::PeriodicGossip(_) => {}
            }
            let probes = matches!(timer, Timer::ProbeRandomMember(_));
            let mut outbox = Outbox::default();
            let _ = self.foca.handle_timer(timer, &mut outbox);
            if probes {
                self.take_over_late_probe(now, &mut outbox);
            }
            self.settle(now, outbox, out);
            // The node may have returned under another life meanwhile.
            if let Some(node) = forgotten.filter(|node| self.known(*node).is_none()) {
                self.probes.forget(node);
                out.push(SwimOutput::Forgotten(node));
            }
        }
        self.probe_late(now, out);
        self.notify_suspects(now, out);
    }

    pub(super) fn next_wakeup(&self) -> Option<(Instant, &'static str)> {
        // A gossip round without updates waits for the next timer or update: this saves half of all wakeups.
        let silent = self.foca.updates_backlog() == 0;
        let idle = |timer: &Timer<Life>| silent && matches!(timer, Timer::PeriodicGossip(_));
        let timer =
            self.timers.iter().find(|(_, armed)| !idle(&armed.timer)).map(|((at, _), _)| (*at, "membership timer"));
        let notice = self.suspicions.values().map(|s| s.next_notice).min().map(|at| (at, "suspect to notify"));
        timer.into_iter().chain(notice).chain(self.probes.next_wakeup()).min()
    }

    /// foca chose a member to probe. If its answer takes longer than foca waits, the table of late probes takes over, and foca
    /// counts the probe as answered.
    fn take_over_late_probe(&mut self, now: Instant, outbox: &mut Outbox) {
        let ping = |(to, packet): &(Life, Vec<u8>)| {
            let header = <SwimCodec as Codec<Life>>::decode_header(&mut SwimCodec, packet.as_slice()).ok()?;
            if let Message::Ping(number) = header.message { Some((*to, number)) } else { None }
        };
        let Some((to, number)) = outbox.sends.iter().find_map(ping) else { return };
        self.probes.sent(now, to.node, number);
        let Some(patience) = self.probes.patience(to.node) else { return };
        let Some(incarnation) = self.known(to.node).filter(|known| *known.id() == to).map(|known| known.incarnation())
        else {
            return;
        };
        let message = Message::Ack(number);
        let header = Header { src: to, src_incarnation: incarnation, dst: self.life(), message };
        let mut packet = Vec::new();
        if SwimCodec.encode_header(&header, &mut packet).is_ok() {
            let _ = self.foca.handle_data(&packet, outbox);
            self.health.put_off();
            self.probes.begin(now, to, incarnation, number, patience);
        }
    }

    /// Pings members whose round trip is not measured, and advances the probes that foca does not wait for.
    fn probe_late(&mut self, now: Instant, out: &mut Vec<SwimOutput>) {
        let unmeasured = self.probes.next_unmeasured(now).and_then(|node| self.known(node));
        if let Some(member) = unmeasured.filter(|member| member.state() != State::Down) {
            self.pings = self.pings.wrapping_add(1);
            self.probes.sent(now, member.id().node, self.pings);
            out.extend(self.packet(*member.id(), Message::Ping(self.pings)));
        }
        for due in self.probes.take_due(now) {
            match due {
                Due::Indirect(probe) => {
                    self.health.answered(false);
                    let helpers = self.helpers(probe.life, probe.number);
                    for &helper in &helpers {
                        let message = Message::PingReq { target: probe.life, probe_number: probe.number };
                        out.extend(self.packet(helper, message));
                    }
                    self.probes.asked(probe.life.node, helpers.iter().map(|helper| helper.node).collect());
                }
                Due::Suspect(probe) => self.suspect(now, probe.life, probe.incarnation, SUSPECT + probe.patience, out),
            }
        }
    }

    /// Members for an indirect probe of `target`, spread over the table.
    fn helpers(&self, target: Life, from: u8) -> Vec<Life> {
        let others: Vec<Life> =
            self.foca.iter_members().map(|member| *member.id()).filter(|id| *id != target).collect();
        let step = (others.len() / HELPERS).max(1);
        let places = (0..HELPERS.min(others.len())).map(|nth| (usize::from(from) * 37 + nth * step) % others.len());
        places.map(|place| others[place]).collect()
    }

    /// Suspects a member that no indirect probe reached: it has `after` to refute.
    fn suspect(&mut self, now: Instant, life: Life, incarnation: u16, after: Duration, out: &mut Vec<SwimOutput>) {
        if !self.is_up(life) {
            return;
        }
        let mut outbox = Outbox::default();
        let claim = Member::new(life, incarnation, State::Suspect);
        let _ = self.foca.apply_many(core::iter::once(claim), true, &mut outbox);
        if let Some(token) = self.token.filter(|_| self.is_suspect(life, incarnation)) {
            outbox.timers.push((Timer::ChangeSuspectToDown { member_id: life, incarnation, token }, after));
        }
        self.settle(now, outbox, out);
    }

    /// A packet of this node's own, without claims.
    fn packet(&self, to: Life, message: Message<Life>) -> Option<SwimOutput> {
        let header = Header { src: self.life(), src_incarnation: self.incarnation, dst: to, message };
        let mut packet = Vec::new();
        SwimCodec.encode_header(&header, &mut packet).ok()?;
        packet.put_u16(0);
        Some(SwimOutput::Send(to, packet))
    }

    /// A thread that was late (paused, starved of CPU) must not blame others for its own delay: their answers may be unread. A
    /// thread that is always late judges after a few excuses, or it would never detect a crash.
    fn observe(&mut self, now: Instant) {
        let judging = |armed: &Armed| {
            matches!(
                armed.timer,
                Timer::ProbeRandomMember(_) | Timer::SendIndirectProbe { .. } | Timer::ChangeSuspectToDown { .. }
            )
        };
        // Timers are few and sorted: the first due timer that judges others shows how late this thread is.
        let due = self.timers.range(..(now, u64::MAX)).find(|(_, armed)| judging(armed)).map(|((at, _), _)| *at);
        let Some(late) = due.map(|at| now.since(at)).filter(|late| *late > LATE) else { return };
        self.health.late(now);
        self.probes.delay(late + PROBE_RTT);
        for ((at, seq), mut armed) in core::mem::take(&mut self.timers) {
            let put_off = match armed.timer {
                Timer::ChangeSuspectToDown { .. } => late + SUSPECT,
                Timer::ProbeRandomMember(_) | Timer::SendIndirectProbe { .. } => late + PROBE_RTT,
                Timer::PeriodicAnnounce(_)
                | Timer::PeriodicAnnounceDown(_)
                | Timer::PeriodicGossip(_)
                | Timer::RemoveDown(_) => Duration::ZERO,
            };
            let excused = armed.excuses < EXCUSES_MAX && !put_off.is_zero();
            armed.excuses += u8::from(excused);
            self.timers.insert((if excused { at + put_off } else { at }, seq), armed);
        }
    }

    /// Answers arrive again, and so do refutations: a suspect no longer needs the time that it got during the outage.
    fn hasten(&mut self, now: Instant) {
        let patience = self.health.patience(now);
        for ((at, seq), armed) in core::mem::take(&mut self.timers) {
            let mut latest = at;
            if let Timer::ChangeSuspectToDown { member_id, .. } = &armed.timer {
                let distance = self.probes.patience(member_id.node).unwrap_or_default();
                latest = now + (SUSPECT + distance).saturating_mul(patience);
            }
            self.timers.insert((at.min(latest), seq), armed);
        }
    }

    /// Passes foca's output of one call on.
    fn settle(&mut self, now: Instant, outbox: Outbox, out: &mut Vec<SwimOutput>) {
        for (timer, after) in outbox.timers {
            let mut after = after;
            if let Timer::ProbeRandomMember(token) = &timer {
                self.token = Some(*token);
            }
            if let Timer::ChangeSuspectToDown { member_id, incarnation, .. } = &timer {
                after = after.saturating_mul(self.health.patience(now));
                self.suspicions.entry(member_id.node).or_insert(Suspicion {
                    life: *member_id,
                    incarnation: *incarnation,
                    next_notice: now,
                    until: now + after,
                });
            }
            self.armed += 1;
            self.timers.insert((now + after, self.armed), Armed { timer, excuses: 0 });
        }
        // foca also announces to members that are down, and this node's earlier lives are among them.
        let me = self.life().node;
        for (to, packet) in outbox.sends.into_iter().filter(|(to, _)| to.node != me) {
            out.push(self.outgoing(to, packet));
        }
        for notice in outbox.notices {
            match notice {
                OwnedNotification::MemberUp(life) | OwnedNotification::Rename(_, life) => {
                    self.suspicions.remove(&life.node);
                    if self.is_up(life) {
                        self.probes.joined(life.node);
                        out.push(SwimOutput::Up(life));
                    }
                }
                OwnedNotification::MemberDown(life) => {
                    self.suspicions.remove(&life.node);
                    self.probes.gone(life.node);
                    out.push(SwimOutput::Down(life, self.said_goodbye(life)));
                }
                OwnedNotification::Active => out.push(SwimOutput::Active),
                OwnedNotification::Rejoin(_) => out.push(SwimOutput::Renewed),
                OwnedNotification::Idle | OwnedNotification::Defunct => {}
            }
        }
        self.notify_suspects(now, out);
        self.resize();
    }

    /// foca's message to a member that it declared down does not name the incarnation, so the member could only change its
    /// identity. `NotifySuspect` names the incarnation, so the member can refute.
    fn outgoing(&mut self, to: Life, packet: Vec<u8>) -> SwimOutput {
        let Ok(header) = <SwimCodec as Codec<Life>>::decode_header(&mut SwimCodec, packet.as_slice()) else {
            return SwimOutput::Send(to, packet);
        };
        self.incarnation = header.src_incarnation;
        if header.message != Message::TurnUndead {
            return SwimOutput::Send(to, packet);
        }
        match self.known(to.node) {
            Some(known) => SwimOutput::NotifySuspect(*known.id(), known.incarnation()),
            None => SwimOutput::Send(to, packet),
        }
    }

    /// Notifies suspects directly, more often than gossip would, so that one lost packet causes no false `Down`.
    fn notify_suspects(&mut self, now: Instant, out: &mut Vec<SwimOutput>) {
        if self.suspicions.is_empty() {
            return;
        }
        let foca = &self.foca;
        self.suspicions.retain(|_, suspicion| {
            now <= suspicion.until
                && foca.iter_members().any(|member| {
                    *member.id() == suspicion.life
                        && member.incarnation() == suspicion.incarnation
                        && member.state() == State::Suspect
                })
        });
        for suspicion in self.suspicions.values_mut().filter(|s| s.next_notice <= now) {
            suspicion.next_notice = now + NOTICE_EVERY;
            out.push(SwimOutput::NotifySuspect(suspicion.life, suspicion.incarnation));
        }
    }

    /// Adapts the number of transmissions per update, which grows with the logarithm of the mesh size.
    fn resize(&mut self) {
        let members = self.foca.num_members() + 1;
        if members.ilog2() != self.sized_for.ilog2() {
            self.sized_for = members;
            // Cannot fail: only the number of transmissions changes.
            let _ = self.foca.set_config(profile(members, SUSPECT));
        }
    }

    /// Drops members that are down before the table exceeds its bound.
    fn bound(&mut self, now: Instant, out: &mut Vec<SwimOutput>) {
        let excess = self.foca.iter_membership_state().len().saturating_sub(MEMBERS_MAX);
        if excess == 0 {
            return;
        }
        let dead: Vec<Life> = self
            .foca
            .iter_membership_state()
            .filter(|member| member.state() == State::Down)
            .take(excess)
            .map(|member| *member.id())
            .collect();
        for life in dead {
            let mut outbox = Outbox::default();
            let _ = self.foca.handle_timer(Timer::RemoveDown(life), &mut outbox);
            self.settle(now, outbox, out);
            self.probes.forget(life.node);
            out.push(SwimOutput::Forgotten(life.node));
        }
    }

    /// Whether this incarnation of a member is still suspected: neither refuted nor declared down.
    fn is_suspect(&self, life: Life, incarnation: u16) -> bool {
        self.foca.iter_members().any(|member| {
            *member.id() == life && member.incarnation() == incarnation && member.state() == State::Suspect
        })
    }

    fn is_up(&self, life: Life) -> bool {
        self.foca.iter_members().any(|member| *member.id() == life)
    }

    fn said_goodbye(&self, life: Life) -> bool {
        let mut known = self.foca.iter_membership_state();
        self.speaker == Some(life.node) && known.any(|member| *member.id() == life && member.incarnation() == LEFT)
    }
}

/// Collects foca's output of one call.
#[derive(Default)]
struct Outbox {
    sends: Vec<(Life, Vec<u8>)>,
    timers: Vec<(Timer<Life>, Duration)>,
    notices: Vec<OwnedNotification<Life>>,
}

impl foca::Runtime<Life> for Outbox {
    fn notify(&mut self, notification: foca::Notification<'_, Life>) {
        self.notices.push(notification.to_owned());
    }
    fn send_to(&mut self, to: Life, data: &[u8]) {
        self.sends.push((to, data.to_vec()));
    }
    fn submit_after(&mut self, timer: Timer<Life>, after: Duration) {
        self.timers.push((timer, after));
    }
}

/// An aggressive LAN profile: in a mesh of 64 nodes, the first node detects a crash within 0.75 s in 99 of 100 cases. Members
/// farther away than `PROBE_RTT` allows are handled by `Probes`.
fn profile(members: usize, suspect: Duration) -> foca::Config {
    let every = |frequency, members| {
        NonZeroUsize::new(members).map(|num_members| foca::PeriodicParams { frequency, num_members })
    };
    // foca's own rule, ceil(4 log10(n + 1)), leaves one of 64 nodes without one in a hundred updates: use 50 % more.
    let transmissions = (members.ilog2() + 1).saturating_mul(2).clamp(6, 255);
    foca::Config {
        probe_period: PROBE_PERIOD,
        probe_rtt: PROBE_RTT,
        suspect_to_down_after: suspect,
        max_transmissions: u8::try_from(transmissions).ok().and_then(NonZeroU8::new).unwrap_or(NonZeroU8::MAX),
        max_packet_size: NonZeroUsize::new(DATAGRAM_BYTES_MAX - 2).unwrap_or(NonZeroUsize::MAX),
        notify_down_members: true,
        remove_down_after: Some(FORGET),
        periodic_gossip: every(Duration::from_millis(50), 3),
        periodic_announce: every(Duration::from_secs(5), 1),
        // Heals a partition: without it both halves consider each other down for good.
        periodic_announce_to_down_members: every(Duration::from_secs(2), 2),
        ..foca::Config::simple()
    }
}

/// How long a member that is down stays listed, and is greeted in case only the path to it was cut. A `Down` of a node unknown
/// here is not stored at all, so that such claims do not circulate forever.
pub(super) const FORGET: Duration = Duration::from_secs(15 * 60);
const PROBE_PERIOD: Duration = Duration::from_millis(100);
/// After a probe's 100 ms, a stall or an outage of 250 ms ends with time left for five answers.
const SUSPECT: Duration = Duration::from_millis(250);
/// Members asked for an indirect probe.
const HELPERS: usize = 3;
/// Interval of the notifications to a suspect.
const NOTICE_EVERY: Duration = Duration::from_millis(20);
/// Generations that a node may be claimed to be behind: generations are unix seconds, so this is more than a century.
const LEAP_MAX: u64 = 1 << 32;
/// A wakeup later than this says more about this thread than about its peers.
const LATE: Duration = Duration::from_millis(25);
/// How often a probe or suspicion is postponed because this thread was late: on a machine starved of CPU this adds about a
/// second to each.
pub(super) const EXCUSES_MAX: u8 = 4;
