//! The relay between sockets in place of nodes.
use super::*;

/// The two sockets of a simulated node.
struct FakeNode {
    gossip: UdpSocket,
    data: UdpSocket,
    place: Place,
    front: SocketAddr,
}

impl FakeNode {
    fn new(relay: &mut Relay) -> Self {
        let (gossip, data) = front().unwrap();
        for socket in [&gossip, &data] {
            socket.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        }
        let (place, front) = relay.add(gossip.local_addr().unwrap().port()).unwrap();
        Self { gossip, data, place, front }
    }

    fn socket(&self, plane: Plane) -> &UdpSocket {
        match plane {
            Plane::Gossip => &self.gossip,
            Plane::Data => &self.data,
        }
    }

    fn send(&self, to: &FakeNode, plane: Plane, bytes: &[u8]) {
        let to = SocketAddr::new(to.front.ip(), to.front.port() + plane as u16);
        self.socket(plane).send_to(bytes, to).unwrap();
    }

    fn receive(&self, plane: Plane) -> (Vec<u8>, SocketAddr) {
        let mut buffer = [0; 2000];
        let (length, source) = self.socket(plane).recv_from(&mut buffer).unwrap();
        (buffer[..length].to_vec(), source)
    }
}

#[test]
fn each_node_sees_the_others_at_their_fronts_on_both_planes() {
    let mut relay = Relay::start(1).unwrap();
    let nodes: Vec<FakeNode> = (0..3).map(|_| FakeNode::new(&mut relay)).collect();
    for plane in PLANES {
        for from in &nodes {
            for to in nodes.iter().filter(|to| to.place != from.place) {
                from.send(to, plane, &[from.place as u8]);
                let (bytes, source) = to.receive(plane);
                assert_eq!(bytes, [from.place as u8]);
                assert_eq!(source.port(), from.front.port() + plane as u16);
                let expected = Passed { datagrams: 1, bytes: 1, ..Passed::default() };
                assert_eq!(relay.passed(from.place, to.place, plane), expected);
            }
        }
    }
    assert_eq!(relay.passed_in_all(Plane::Data).datagrams, 6);
}

#[test]
fn latency_delays_and_keeps_the_order() {
    let mut relay = Relay::start(1).unwrap();
    let (a, b) = (FakeNode::new(&mut relay), FakeNode::new(&mut relay));
    let latency = Duration::from_millis(30);
    relay.link(a.place, b.place, Link { latency, jitter: latency, ..Link::PLAIN });
    let start = Instant::now();
    for i in 0..50 {
        a.send(&b, Plane::Data, &[i]);
    }
    let received: Vec<u8> = (0..50).map(|_| b.receive(Plane::Data).0[0]).collect();
    assert!(start.elapsed() >= latency);
    assert_eq!(received, (0..50).collect::<Vec<u8>>());
}

#[test]
fn cuts_affect_one_direction_or_one_node_until_restored() {
    let mut relay = Relay::start(1).unwrap();
    let (a, b) = (FakeNode::new(&mut relay), FakeNode::new(&mut relay));
    let expect_cut = |from: &FakeNode, to: &FakeNode| {
        let before = relay.passed(from.place, to.place, Plane::Gossip).cut;
        from.send(to, Plane::Gossip, b"lost");
        while relay.passed(from.place, to.place, Plane::Gossip).cut == before {
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    relay.cut(a.place, b.place, true);
    expect_cut(&a, &b);
    b.send(&a, Plane::Gossip, b"back");
    assert_eq!(a.receive(Plane::Gossip).0, b"back");
    relay.cut(a.place, b.place, false);
    relay.isolate(b.place, true);
    expect_cut(&a, &b);
    expect_cut(&b, &a);
    relay.isolate(b.place, false);
    a.send(&b, Plane::Gossip, b"healed");
    assert_eq!(b.receive(Plane::Gossip).0, b"healed");
}

#[test]
fn the_same_seed_loses_the_same_datagrams() {
    let lost = |seed| {
        let mut relay = Relay::start(seed).unwrap();
        let (a, b) = (FakeNode::new(&mut relay), FakeNode::new(&mut relay));
        relay.links(Link { loss: 0.3, ..Link::PLAIN });
        (0..60u8)
            .filter(|i| {
                let before = relay.passed(a.place, b.place, Plane::Data);
                a.send(&b, Plane::Data, &[*i]);
                loop {
                    let now = relay.passed(a.place, b.place, Plane::Data);
                    if now != before {
                        return now.lost > before.lost;
                    }
                    std::thread::sleep(Duration::from_millis(1));
                }
            })
            .collect::<Vec<u8>>()
    };
    let first = lost(5);
    assert!(!first.is_empty() && first.len() < 40, "{first:?}");
    assert_eq!(first, lost(5));
}

#[test]
fn a_narrow_link_limits_the_rate() {
    let mut relay = Relay::start(1).unwrap();
    let (a, b) = (FakeNode::new(&mut relay), FakeNode::new(&mut relay));
    relay.link(a.place, b.place, Link { bytes_per_second: Some(100_000), ..Link::PLAIN });
    let start = Instant::now();
    for _ in 0..10 {
        a.send(&b, Plane::Data, &[0; 1000]);
    }
    for _ in 0..10 {
        b.receive(Plane::Data);
    }
    assert!(start.elapsed() >= Duration::from_millis(100), "10,000 bytes at 100,000 bytes per second");
}
