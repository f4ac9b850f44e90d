//! Loopback benchmark of two endpoints: round trip of decode frames, bulk throughput, and the result of the link probe.
#![allow(clippy::print_stdout, reason = "a bench prints its figures")]
use bytes::Bytes;
use std::{
    sync::{Arc, mpsc},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};
use transport::{
    Dtype, Endpoint, Epoch, Event, Expectation, Identity, Limits, MeshCredentials, NodeId, Options, Priority, Reply,
    Roles, Route, WireHeader,
};

const WIDTH: u32 = 576;
const ROUNDS: usize = 5_000;
const BULK_BYTES: usize = 256 << 20;

fn main() {
    let runtime = || tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    // As in production, each node has its own runtime.
    let (here, there) = (runtime(), runtime());
    let (founder, member) = (Identity::generate(), Identity::generate());
    let expiry = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs() + 3600;
    let mesh = MeshCredentials::found(&founder, expiry);
    let chain = mesh.issue(&founder, member.peer_id(), Roles::MEMBER, expiry).unwrap();
    let joined = MeshCredentials { chain, root_secret: None, ..mesh.clone() };

    let (sender, events) = mpsc::channel();
    let a = here.block_on(async { start(founder.clone(), mesh, move |event| drop(sender.send(event))) });
    let echo: Arc<std::sync::OnceLock<Endpoint>> = Arc::default();
    let echoes = echo.clone();
    let b = there.block_on(async {
        start(member.clone(), joined, move |event| {
            if let (Event::Frame { from, head, payload }, Some(b)) = (event, echoes.get()) {
                let back = WireHeader { route: Route { part: 2, ..head.route }, ..head };
                b.send_frame(from, back, payload.into_bytes(), Priority::Decode).unwrap();
            }
        })
    });
    echo.set(b.clone()).unwrap();
    let route = Route { job: 1, epoch: Epoch { counter: 1, issuer: [0; 16] }, part: 1 };
    b.expect(route, Expectation::hidden(Dtype::F32, WIDTH, 512));
    a.expect(Route { part: 2, ..route }, Expectation::hidden(Dtype::F32, WIDTH, 512));
    a.connect(member.peer_id(), vec![b.local_addr()]);
    wait(&events, |event| matches!(event, Event::Connected { .. }));
    println!("socket buffers: {:?}", a.buffers());

    for count in [1, 8, 64, 512] {
        round_trips(&a, &events, member.node_id(), route, count);
    }
    here.block_on(bulk(&a, member.node_id()));
    let link = here.block_on(a.measure(member.node_id())).unwrap();
    println!("measured link: rtt {:?}, {:.0} MB/s", link.rtt, link.bytes_per_second as f64 / 1e6);
    for stats in a.peers() {
        println!("mtu {}, rtt {:?}, {} packets lost", stats.mtu, stats.rtt, stats.packets_lost);
    }
}

fn start(identity: Identity, credentials: MeshCredentials, sink: impl Fn(Event) + Send + Sync + 'static) -> Endpoint {
    let listen = "127.0.0.1:0".parse().unwrap();
    let options = Options { listen, identity, credentials: Some(credentials), limits: Limits::default() };
    Endpoint::bind(options, sink, |_: NodeId, _: Bytes, reply: Reply| {
        std::thread::spawn(move || {
            let block = Bytes::from(vec![7; 1 << 20]);
            (0..BULK_BYTES >> 20).for_each(|_| assert!(reply.blocking_send(block.clone())));
            reply.finish();
        });
    })
    .unwrap()
}

fn wait(events: &mpsc::Receiver<Event>, is: impl Fn(&Event) -> bool) {
    while !is(&events.recv().unwrap()) {}
}

fn round_trips(a: &Endpoint, events: &mpsc::Receiver<Event>, to: NodeId, route: Route, count: u32) {
    let bytes = (count * WIDTH * 4) as usize;
    let payload = Bytes::from(vec![1; bytes]);
    let rounds = (ROUNDS / count as usize).max(200);
    let mut times: Vec<Duration> = (0..rounds)
        .map(|i| {
            let head = WireHeader {
                route,
                channel: 1,
                cursor: i as u32,
                count,
                last: false,
                continues: None,
                drafts: 0,
                kept: 0,
                round: 0,
                dtype: Dtype::F32,
                width: WIDTH,
            };
            let start = Instant::now();
            a.send_frame(to, head, payload.clone(), Priority::Decode).unwrap();
            wait(events, |event| matches!(event, Event::Frame { .. }));
            start.elapsed()
        })
        .collect();
    times.sort();
    let at = |q: usize| times[times.len() * q / 100];
    println!(
        "round trip of {bytes} B frames: median {:?}, p10 {:?}, p99 {:?}; one way about {:?}",
        at(50),
        at(10),
        at(99),
        at(50) / 2
    );
}

async fn bulk(a: &Endpoint, from: NodeId) {
    let start = Instant::now();
    let mut response = a.request(from, Bytes::from_static(b"weights")).await.unwrap();
    let mut bytes = 0;
    while let Some(block) = response.block().await.unwrap() {
        bytes += block.len();
    }
    let seconds = start.elapsed().as_secs_f64();
    println!("bulk: {} MiB in {seconds:.2} s, {:.0} MB/s", bytes >> 20, bytes as f64 / 1e6 / seconds);
}
