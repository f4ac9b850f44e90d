//! Membership of a few nodes on a lossless network with a manual clock: joins, silence, goodbyes, forgeries.
#![expect(clippy::wildcard_enum_match_arm, reason = "a test looks at few of many outputs")]
use super::*;
use crate::config::DeviceCapacity;
use crate::message::{Advert, SignedAdvert};
use alloc::format;
use alloc::string::String;
use alloc::vec;
use core::net::Ipv4Addr;

pub(super) fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// A few nodes on a lossless network with a manual clock.
pub(super) struct Bench {
    pub(super) nodes: Vec<Membership>,
    pub(super) ids: Vec<NodeId>,
    pub(super) now: Instant,
    seen: Vec<(usize, MembershipOutput)>,
    deaf: Vec<usize>,
}

fn config(n: usize) -> Config {
    let peer_id = format!("peer {n}").into_bytes();
    let ip = Ipv4Addr::new(10, 0, 0, n as u8 + 1);
    Config {
        node: NodeId::of_peer(&peer_id),
        generation: Generation(1000),
        peer_id,
        name: format!("node {n}"),
        gossip_addrs: vec![SocketAddr::from((ip, 1))],
        data_addrs: vec![SocketAddr::from((ip, 2))],
        capacity: Capacity {
            machine: n as u64,
            zone: String::new(),
            devices: vec![DeviceCapacity {
                device: String::from("cpu"),
                memory_total: 1 << 30,
                memory_free: 1 << 30,
                bytes_per_second: 1 << 30,
                flops_per_second: 1 << 30,
                copy_bytes_per_second: 1 << 30,
                step_ns: 1000,
                layer_ns: 0,
                cache_bytes_per_second: 0,
                ram_total: 0,
                ram_free: 0,
                ram_bytes_per_second: 0,
                ram_flops_per_second: 0,
                numerics: 1,
                pass_steps: 1,
                gone: false,
            }],
        },
    }
}

/// A signature that fits only its key and its bytes; no test forges a valid one.
fn sign(peer_id: &[u8], bytes: &[u8]) -> Vec<u8> {
    blake3::hash(&[peer_id, bytes].concat()).as_bytes().to_vec()
}

impl Bench {
    pub(super) fn new(n: usize) -> Self {
        let nodes: Vec<_> = (0..n).map(|i| Membership::new(&config(i), Instant(0), i as u64)).collect();
        let ids = (0..n).map(|i| config(i).node).collect();
        let mut bench = Bench { nodes, ids, now: Instant(0), seen: Vec::new(), deaf: Vec::new() };
        for i in 1..n {
            bench.introduce(i, 0);
        }
        bench
    }

    fn introduce(&mut self, who: usize, to: usize) {
        let c = config(to);
        self.nodes[who].handle_peer_found(self.now, c.node, c.peer_id, c.gossip_addrs, c.data_addrs);
        self.settle();
    }

    pub(super) fn pass(&mut self, time: Duration) {
        let end = self.now + time;
        loop {
            let next = |i: &usize| self.nodes[*i].next_wakeup().map(|(at, _)| at);
            let awake = (0..self.nodes.len()).filter(|i| !self.deaf.contains(i));
            let Some(i) = awake.filter(|i| next(i).is_some_and(|at| at <= end)).min_by_key(next) else { break };
            self.now = self.now.max(next(&i).unwrap_or(end));
            self.nodes[i].handle_wakeup(self.now);
            self.settle();
        }
        self.now = end;
    }

    fn settle(&mut self) {
        let mut quiet = false;
        while !quiet {
            quiet = true;
            for i in 0..self.nodes.len() {
                while let Some(output) = self.nodes[i].poll_output() {
                    quiet = false;
                    if !self.deaf.contains(&i) {
                        self.carry_out(i, output);
                    }
                }
            }
        }
    }

    fn carry_out(&mut self, i: usize, output: MembershipOutput) {
        let (now, me) = (self.now, self.ids[i]);
        let source = config(i).gossip_addrs[0];
        match output {
            MembershipOutput::SendDatagram { addr, bytes, .. } => {
                let Some(to) = (0..self.nodes.len()).find(|to| config(*to).gossip_addrs[0] == addr) else { return };
                if !self.deaf.contains(&to) {
                    self.hear(to, me, source, &bytes);
                }
            }
            MembershipOutput::SendMessage { to, message } => {
                let Some(to) = self.ids.iter().position(|id| *id == to).filter(|to| !self.deaf.contains(to)) else {
                    return;
                };
                match message {
                    Message::PushPull { members, heard, adverts, reply } => {
                        self.nodes[to].handle_push_pull(now, me, &members, &heard, adverts, reply);
                    }
                    Message::Leaving => self.nodes[to].handle_leaving(now, me),
                    other => panic!("unexpected message {other:?}"),
                }
            }
            MembershipOutput::Connect { node, .. } => self.nodes[i].handle_connected(now, node, 100_000),
            MembershipOutput::Sign { token, bytes } => {
                self.nodes[i].handle_signed(now, token, sign(&config(i).peer_id, &bytes));
            }
            MembershipOutput::Verify { token, peer_id, bytes, signature } => {
                let valid = sign(&peer_id, &bytes) == signature;
                self.nodes[i].handle_verified(now, token, valid);
            }
            other => self.seen.push((i, other)),
        }
    }

    fn hear(&mut self, to: usize, from: NodeId, source: SocketAddr, bytes: &[u8]) {
        let node = &mut self.nodes[to];
        match codec::decode_datagram(bytes).expect("own datagrams can be decoded") {
            Datagram::Swim(packet) => node.handle_swim(self.now, from, source, packet),
            Datagram::Suspected { generation, incarnation } => {
                node.handle_suspected(self.now, from, generation, incarnation);
            }
            Datagram::Advert(advert) => node.handle_advert(from, advert),
            Datagram::Heartbeat(_) => panic!("membership sends no heartbeats"),
        }
    }

    fn alive(&self, i: usize) -> usize {
        self.nodes[i].alive().count()
    }

    fn refusals(&self) -> Vec<&'static str> {
        let refused = |output: &MembershipOutput| match output {
            MembershipOutput::Rejected { what, .. } => Some(*what),
            _ => None,
        };
        self.seen.iter().filter_map(|(_, output)| refused(output)).collect()
    }
}

#[test]
fn strangers_become_members_with_adverts() {
    let mut bench = Bench::new(5);
    bench.pass(ms(5000));
    for i in 0..5 {
        assert_eq!(bench.alive(i), 4, "node {i}");
        let fleet = bench.nodes[i].fleet();
        assert_eq!(fleet.devices.len(), 5, "node {i} has the capacities of all five, its own included");
        assert!(fleet.devices.is_sorted_by_key(|device| device.id));
        assert!(fleet.links.keys().all(|(a, b)| a != b));
    }
    assert!(bench.refusals().is_empty(), "{:?}", bench.refusals());
}

#[test]
fn a_silent_node_is_down_within_a_second() {
    let mut bench = Bench::new(6);
    bench.pass(ms(5000));
    bench.seen.clear();
    bench.deaf.push(3);
    bench.pass(ms(1200));
    let dead = bench.ids[3];
    for i in [0, 1, 2, 4, 5] {
        let down = (i, MembershipOutput::PeerDown { node: dead, reason: DownReason::Failed });
        assert!(bench.seen.contains(&down), "node {i} did not report it");
        assert_eq!(bench.nodes[i].member(dead).map(|m| m.state), Some(MemberState::Down(DownReason::Failed)));
        assert!(!bench.nodes[i].fleet().devices.iter().any(|device| device.id.node == dead.into()));
    }
    // It was only deaf: notified that it was declared down, it refutes that, and keeps its identity.
    bench.deaf.clear();
    bench.pass(ms(6000));
    assert!((0..6).all(|i| bench.alive(i) == 5), "{:?}", (0..6).map(|i| bench.alive(i)).collect::<Vec<_>>());
    assert!(bench.nodes[0].member(dead).is_some_and(|member| member.generation == Generation(1000)));
}

/// Its thread gets the CPU every 60 ms, so each probe and each suspicion finds it late.
#[test]
fn a_node_that_is_always_late_detects_a_crash() {
    let mut bench = Bench::new(4);
    bench.pass(ms(3_000));
    assert_eq!(bench.alive(0), 3, "all others are up");
    bench.deaf.push(2);
    for _ in 0..200 {
        bench.now = bench.now + ms(60);
        for node in [0, 1, 3] {
            bench.nodes[node].handle_wakeup(bench.now);
            bench.settle();
        }
    }
    assert_eq!([0, 1, 3].map(|node| bench.alive(node)), [2; 3]);
}

/// A crashed node is dropped from every table after a while, and a node that joins meanwhile never learns of it.
#[test]
fn nodes_down_for_long_are_forgotten_everywhere() {
    let mut bench = Bench::new(5);
    bench.pass(ms(5000));
    bench.deaf.push(4);
    bench.pass(ms(3000));
    let dead = bench.ids[4];
    assert!(
        (0..4).all(|i| bench.nodes[i].member(dead).is_some_and(|m| m.state == MemberState::Down(DownReason::Failed)))
    );
    // A node that joins late, under a new generation.
    bench.pass(swim::FORGET - ms(60_000));
    let late = Config { generation: Generation(2000), ..config(3) };
    bench.nodes[3] = Membership::new(&late, bench.now, 77);
    bench.introduce(3, 0);
    bench.pass(ms(50_000));
    assert!(bench.nodes[0].member(dead).is_some(), "still listed");
    assert!(bench.nodes[3].member(dead).is_none(), "a new node does not learn of nodes that are down");
    bench.seen.clear();
    bench.pass(ms(300_000));
    for i in 0..4 {
        assert!(bench.nodes[i].member(dead).is_none(), "node {i} still lists it");
        assert!(bench.nodes[i].adverts.get(dead).is_none(), "node {i} still has its advert");
        assert!(bench.nodes[i].swim.state().iter().all(|member| member.id().node != dead));
    }
    let up = MembershipOutput::PeerUp { node: dead };
    assert!(bench.seen.iter().all(|(_, seen)| *seen != up), "no node reports it up");
    // It was only deaf: the nodes find each other again without an operator.
    bench.deaf.clear();
    bench.pass(ms(40_000));
    assert!((0..5).all(|i| bench.alive(i) == 4), "{:?}", (0..5).map(|i| bench.alive(i)).collect::<Vec<_>>());
}

/// Its datagrams still arrive for a while, and members that have not received the ban pass it on.
#[test]
fn a_banned_node_stays_out_whatever_others_claim() {
    let mut bench = Bench::new(5);
    bench.pass(ms(5000));
    let out = bench.ids[2];
    bench.seen.clear();
    for i in [0, 1] {
        bench.nodes[i].handle_banned(bench.now, vec![out]);
    }
    bench.settle();
    for i in [0, 1] {
        assert!(bench.seen.contains(&(i, MembershipOutput::PeerDown { node: out, reason: DownReason::Left })));
        assert!(bench.seen.contains(&(i, MembershipOutput::Disconnect { node: out })));
    }
    bench.seen.clear();
    bench.pass(ms(3000));
    bench.introduce(0, 2);
    bench.introduce(2, 0);
    let state = codec::encode_part(&bench.nodes[3].swim.state());
    bench.nodes[0].handle_push_pull(bench.now, bench.ids[3], &state, &[], vec![], false);
    bench.pass(ms(60_000));
    for i in [0, 1] {
        assert!(!bench.nodes[i].is_alive(out) && bench.alive(i) == 3, "node {i}");
        assert!(!bench.seen.contains(&(i, MembershipOutput::PeerUp { node: out })), "node {i}");
        assert!(!bench.nodes[i].fleet().devices.iter().any(|device| device.id.node == out.into()));
    }
}

#[test]
fn a_stale_advert_replaces_nothing() {
    let mut bench = Bench::new(3);
    bench.pass(ms(5000));
    let id = bench.ids[1];
    let current = |bench: &Bench| bench.nodes[0].member(id).and_then(|m| m.advert).cloned().unwrap();
    let kept = bench.nodes[0].adverts.newer_than(Vec::new(), |node| node == id).pop().unwrap();
    let mut capacity = config(1).capacity;
    capacity.devices[0].memory_free /= 2;
    bench.nodes[1].handle_capacity(bench.now, capacity);
    bench.pass(ms(2000));
    let newer = current(&bench);
    assert!(newer.version > codec::decode_advert(&kept.bytes).unwrap().version);
    // Signed by the right key, but older: by datagram, by push-pull, and while a newer one is being verified.
    bench.nodes[0].handle_advert(bench.ids[2], kept.clone());
    bench.nodes[0].handle_push_pull(bench.now, bench.ids[2], &[], &[], vec![kept.clone()], false);
    let mut newest = bench.nodes[1].own().clone();
    newest.version += 5;
    let bytes = codec::encode_advert(&newest).unwrap();
    let signature = sign(&newest.peer_id, &bytes);
    bench.nodes[0].handle_advert(bench.ids[2], SignedAdvert { bytes, signature });
    bench.nodes[0].handle_advert(bench.ids[2], kept.clone());
    bench.settle();
    assert_eq!(current(&bench), newest);
    // The high version of an earlier generation is stale too.
    let former = Advert { generation: Generation(999), version: 1_000_000, ..newest.clone() };
    let bytes = codec::encode_advert(&former).unwrap();
    let signature = sign(&former.peer_id, &bytes);
    bench.nodes[0].handle_advert(bench.ids[2], SignedAdvert { bytes, signature });
    bench.settle();
    assert_eq!(current(&bench), newest);
    assert!(bench.refusals().is_empty(), "stale is not forged: {:?}", bench.refusals());
}

#[test]
fn a_goodbye_takes_effect_immediately() {
    let mut bench = Bench::new(4);
    bench.pass(ms(5000));
    bench.seen.clear();
    bench.nodes[2].handle_leave(bench.now);
    bench.settle();
    let gone = bench.ids[2];
    for i in [0, 1, 3] {
        assert!(bench.seen.contains(&(i, MembershipOutput::PeerDown { node: gone, reason: DownReason::Left })));
        assert!(bench.seen.contains(&(i, MembershipOutput::Disconnect { node: gone })));
    }
    assert_eq!(bench.nodes[2].next_wakeup(), None, "no timers left");
    bench.pass(ms(5000));
    assert!([0, 1, 3].iter().all(|i| bench.alive(*i) == 2), "it does not return on its own");
}

#[test]
fn own_changes_reach_all_members_and_small_ones_wait() {
    let mut bench = Bench::new(4);
    bench.pass(ms(5000));
    let mut capacity = config(1).capacity;
    capacity.devices[0].memory_free /= 2;
    bench.nodes[1].handle_capacity(bench.now, capacity.clone());
    bench.pass(ms(1000));
    let seen = |bench: &Bench, i: usize| {
        bench.nodes[i].member(bench.ids[1]).and_then(|m| m.advert).map(|a| a.capacity.devices[0].memory_free)
    };
    assert!([0, 2, 3].iter().all(|i| seen(&bench, *i) == Some(1 << 29)));
    capacity.devices[0].memory_free -= 1000;
    bench.nodes[1].handle_capacity(bench.now, capacity);
    bench.pass(ms(5000));
    assert_eq!(seen(&bench, 0), Some(1 << 29), "a change of a millionth is not worth a round of gossip");
    bench.nodes[1].handle_drain(bench.now, true);
    bench.pass(ms(2000));
    assert!(
        bench.nodes[0].fleet().devices.iter().any(|device| device.id.node == bench.ids[1].into() && device.excluded)
    );
}

#[test]
fn forgeries_are_rejected() {
    let mut bench = Bench::new(3);
    bench.pass(ms(5000));
    let version = |bench: &Bench| bench.nodes[0].member(bench.ids[1]).and_then(|m| m.advert).map(|a| a.version);
    let before = version(&bench);
    // Node 2 sends an advert with a higher version in node 1's name.
    let mut advert = bench.nodes[1].own().clone();
    advert.version += 10;
    let bytes = codec::encode_advert(&advert).unwrap();
    bench.nodes[0].handle_advert(bench.ids[2], SignedAdvert { bytes, signature: vec![0; 32] });
    bench.settle();
    assert_eq!(bench.refusals(), ["an advert with a wrong signature"]);
    // …and one with its own key for another node.
    advert.peer_id = config(2).peer_id;
    let bytes = codec::encode_advert(&advert).unwrap();
    bench.nodes[0].handle_advert(bench.ids[2], SignedAdvert { bytes, signature: vec![0; 32] });
    bench.settle();
    assert_eq!(bench.refusals()[1], "an advert whose key does not belong to its node");
    let refused = |bench: &Bench, i: usize| bench.nodes[0].member(bench.ids[i]).map(|member| member.refused);
    assert_eq!((refused(&bench, 2), refused(&bench, 1)), (Some(2), Some(0)), "counted against the sender");
    assert_eq!(version(&bench), before);
    // A packet in another's name, and garbage.
    let packet = bench.nodes[1].swim.goodbye(Life { node: bench.ids[0], generation: Generation(1000), addr: None });
    let (now, source) = (bench.now, config(2).gossip_addrs[0]);
    bench.nodes[0].handle_swim(now, bench.ids[2], source, &packet);
    bench.nodes[0].handle_swim(now, bench.ids[2], source, &[7; 100]);
    bench.nodes[0].handle_push_pull(now, bench.ids[2], &[255; 40], &[], Vec::new(), false);
    bench.settle();
    assert_eq!(
        bench.refusals()[2..],
        [
            "a membership packet in another node's name",
            "a membership packet that cannot be decoded",
            "a push-pull with a bad member list"
        ]
    );
    assert_eq!(bench.alive(0), 2);
}

#[test]
fn a_forged_down_is_refuted_without_a_new_identity() {
    use foca::{Codec, Header, Member as Claim, Message as Word, State};
    let mut bench = Bench::new(4);
    bench.pass(ms(5000));
    let victim = Life { node: bench.ids[1], generation: Generation(1000), addr: None };
    let claim = |incarnation| codec::encode_part(&[Claim::new(victim, incarnation, State::Down)].to_vec());
    let lose = |bench: &mut Bench, incarnation| {
        bench.seen.clear();
        bench.nodes[0].handle_push_pull(bench.now, bench.ids[2], &claim(incarnation), &[], Vec::new(), false);
        bench.settle();
        let reason = bench.seen.iter().map(|(_, output)| output).find_map(|output| match output {
            MembershipOutput::PeerDown { node, reason } if *node == victim.node => Some(*reason),
            _ => None,
        });
        bench.pass(ms(2000));
        assert!((0..4).all(|i| bench.alive(i) == 3), "all nodes are up again");
        reason
    };
    // A claim about the present incarnation takes effect for a moment; one about an earlier incarnation is ignored.
    assert_eq!(lose(&mut bench, 0), Some(DownReason::Failed));
    assert_eq!(bench.nodes[0].member(victim.node).map(|m| m.generation), Some(victim.generation));
    assert_eq!(lose(&mut bench, 0), None);
    // A packet asks it to give up its identity.
    let (from, to) = (Life { node: bench.ids[2], ..victim }, victim);
    let header = Header { src: from, src_incarnation: 0, dst: to, message: Word::TurnUndead };
    let mut packet = Vec::new();
    crate::codec::SwimCodec.encode_header(&header, &mut packet).unwrap();
    let (now, source) = (bench.now, config(2).gossip_addrs[0]);
    bench.nodes[1].handle_swim(now, from.node, source, &packet);
    bench.pass(ms(2000));
    assert_eq!(bench.nodes[0].member(victim.node).map(|m| m.generation), Some(victim.generation));
    // A goodbye in its name by another node counts as a failure, but only a new identity outranks it.
    assert_eq!(lose(&mut bench, u16::MAX), Some(DownReason::Failed));
    assert!(bench.nodes[0].member(victim.node).is_some_and(|m| m.generation > victim.generation));
    assert!(bench.refusals().is_empty(), "{:?}", bench.refusals());
}

#[test]
fn a_node_whose_clock_went_back_can_rejoin() {
    let mut bench = Bench::new(3);
    bench.pass(ms(5000));
    // It restarts without its store, and its clock is far in the past.
    let mut again = Config { generation: Generation(3), ..config(2) };
    again.capacity.devices[0].memory_free /= 4;
    bench.nodes[2] = Membership::new(&again, bench.now, 99);
    bench.introduce(2, 0);
    bench.pass(ms(5000));
    assert!((0..3).all(|i| bench.alive(i) == 2), "{:?}", (0..3).map(|i| bench.alive(i)).collect::<Vec<_>>());
    let came_back = bench.nodes[0].member(bench.ids[2]);
    assert!(came_back.is_some_and(|member| member.generation > Generation(1000)));
    let offered = came_back.and_then(|member| member.advert).map(|advert| advert.capacity.devices[0].memory_free);
    assert_eq!(offered, Some(again.capacity.devices[0].memory_free), "its new advert outranks the old one");
}

#[test]
fn an_address_that_moved_is_followed() {
    let mut bench = Bench::new(2);
    bench.pass(ms(3000));
    assert_eq!(bench.nodes[0].gossip_addr(bench.ids[1]), Some(config(1).gossip_addrs[0]));
    let moved = SocketAddr::from(([10, 9, 9, 9], 77));
    let packet = bench.nodes[1].swim.goodbye(Life { node: bench.ids[0], generation: Generation(1000), addr: None });
    // Any packet with an authenticated sender works; this one is addressed to a generation that node 0 no longer has.
    let stale = Life { node: bench.ids[0], generation: Generation(1), addr: None };
    let stale_packet = bench.nodes[1].swim.goodbye(stale);
    assert_ne!(packet, stale_packet);
    bench.nodes[0].handle_swim(bench.now, bench.ids[1], moved, &stale_packet);
    assert_eq!(bench.nodes[0].gossip_addr(bench.ids[1]), Some(moved));
}

#[test]
fn a_node_that_is_alone_announces_ever_more_slowly() {
    let mut bench = Bench::new(2);
    bench.deaf.push(0);
    let mut lonely = Bench::new(1);
    let c = config(1);
    lonely.nodes[0].handle_peer_found(Instant(0), c.node, c.peer_id, c.gossip_addrs, c.data_addrs);
    let mut asked = Vec::new();
    let mut now = Instant(0);
    while now < Instant(0) + ms(30_000) {
        while let Some(output) = lonely.nodes[0].poll_output() {
            if matches!(output, MembershipOutput::SendDatagram { .. }) {
                asked.push(now);
            }
        }
        now = lonely.nodes[0].next_wakeup().map_or(now + ms(1000), |(at, _)| at.max(now + ms(1)));
        lonely.nodes[0].handle_wakeup(now);
    }
    assert!((6..14).contains(&asked.len()), "{asked:?}");
}

/// An invented contact: a key and an address without a node, as a stranger can make them up.
fn invented(n: u16) -> (NodeId, Vec<u8>, SocketAddr) {
    let peer_id = format!("stranger {n}").into_bytes();
    (NodeId::of_peer(&peer_id), peer_id, SocketAddr::from(([10, 99, (n >> 8) as u8, n as u8], 1)))
}

/// What a node sends to strangers.
#[derive(Default)]
struct Sent {
    datagrams: usize,
    dials: usize,
    dialled: Vec<NodeId>,
}

fn send(node: &mut Membership, sent: &mut Sent) {
    while let Some(output) = node.poll_output() {
        match output {
            MembershipOutput::SendDatagram { .. } => sent.datagrams += 1,
            MembershipOutput::Connect { node, .. } => {
                sent.dials += 1;
                sent.dialled.push(node);
            }
            _ => {}
        }
    }
}

#[test]
fn an_address_that_never_answers_is_tried_ever_more_rarely() {
    let mut node = Membership::new(&config(0), Instant(0), 1);
    let (stranger, peer_id, addr) = invented(0);
    let (mut sent, mut now) = (Sent::default(), Instant(0));
    // Discovery repeats it every second for ten minutes.
    for second in 0..600u64 {
        node.handle_peer_found(now, stranger, peer_id.clone(), vec![addr], vec![addr]);
        let end = Instant(0) + ms(1000 * (second + 1));
        while let Some((at, _)) = node.next_wakeup().filter(|(at, _)| *at <= end) {
            now = now.max(at);
            node.handle_wakeup(now);
        }
        now = end;
        send(&mut node, &mut sent);
        sent.dialled.drain(..).for_each(|dialled| node.handle_disconnected(now, dialled));
    }
    assert!((20..=32).contains(&sent.datagrams), "{} datagrams in ten minutes", sent.datagrams);
    assert!((10..=30).contains(&sent.dials), "{} dials in ten minutes", sent.dials);
}

#[test]
fn invented_addresses_cost_few_dials_and_a_bounded_table() {
    let mut bench = Bench::new(2);
    bench.pass(ms(3000));
    let member = bench.ids[1];
    bench.introduce(0, 1);
    let node = &mut bench.nodes[0];
    let mut sent = Sent::default();
    for n in 0..2000 {
        let (stranger, peer_id, addr) = invented(n);
        node.handle_peer_found(bench.now, stranger, peer_id, vec![addr], vec![addr]);
        send(node, &mut sent);
    }
    assert_eq!(sent.dials, STRANGER_DIALS_MAX, "further dials wait for these to end");
    for dialled in sent.dialled.drain(..) {
        node.handle_disconnected(bench.now, dialled);
    }
    // Ends of dials to strangers that were dropped meanwhile.
    for n in 0..2000 {
        node.handle_disconnected(bench.now, invented(n).0);
    }
    assert_eq!(node.contacts.len(), CONTACTS_MAX);
    assert!(node.contacts.contains_key(&member), "strangers do not displace a member");
    assert!(node.dialled.len() <= CONTACTS_MAX + 1 && node.reaching.is_empty(), "{}", node.dialled.len());
}

#[test]
fn a_zone_name_is_truncated_to_fit_an_advert() {
    let mut config = config(0);
    config.capacity.zone = "ü".repeat(40);
    let node = Membership::new(&config, Instant(0), 0);
    assert_eq!(node.own().capacity.zone, "ü".repeat(16));
    assert_eq!(node.fleet().devices[0].zone, "ü".repeat(16));
}
