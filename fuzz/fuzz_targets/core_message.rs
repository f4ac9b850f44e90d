//! Fuzzes the core with bytes from peers: first the decoders alone, then a whole node that receives messages and datagrams.
#![no_main]
use libfuzzer_sys::fuzz_target;
use node_core::codec;
use node_core::config::{Capacity, Config};
use node_core::id::{Generation, NodeId};
use node_core::input::Input;
use node_core::node::Node;
use node_core::output::Output;
use node_core::time::{Duration, Instant};
use std::net::SocketAddr;

fuzz_target!(|data: &[u8]| {
    if let Ok(message) = codec::decode_message(data) {
        let again = codec::encode_message(&message).expect("what was decoded is within bounds");
        assert_eq!(codec::decode_message(&again).as_ref(), Ok(&message));
    }
    let _ = codec::decode_datagram(data);
    let _ = codec::decode_advert(data);

    // Inputs for a node: [kind and length] [bytes] …
    let mut node = Node::new(config(), 1);
    let mut now = Instant(0);
    let from = NodeId::of_peer(b"peer");
    let source = SocketAddr::from(([10, 0, 0, 2], 9440));
    let mut rest = data;
    while let Some((&head, tail)) = rest.split_first() {
        let (bytes, tail) = tail.split_at(usize::from(head >> 1).min(tail.len()));
        rest = tail;
        let bytes = [&[codec::PROTOCOL], bytes].concat();
        let input = match head & 1 {
            0 => Input::Message { from, bytes },
            _ => Input::Datagram { from, source, bytes },
        };
        run(&mut node, now, input);
        now = now + Duration::from_millis(20);
        run(&mut node, now, Input::Wakeup);
    }
});

/// Accepts every signature, so that the code after verification is reached.
fn run(node: &mut Node, now: Instant, input: Input) {
    node.handle(now, input);
    let outputs: Vec<Output> = std::iter::from_fn(|| node.poll()).take(10_000).collect();
    for output in outputs {
        match output {
            Output::Sign { token, .. } => node.handle(now, Input::Signed { token, signature: vec![1; 64] }),
            Output::Verify { token, .. } => node.handle(now, Input::Verified { token, valid: true }),
            _ => {}
        }
    }
}

fn config() -> Config {
    let peer_id = b"this node".to_vec();
    Config {
        node: NodeId::of_peer(&peer_id),
        generation: Generation(7),
        peer_id,
        name: "fuzzed".into(),
        gossip_addrs: vec![SocketAddr::from(([10, 0, 0, 1], 9440))],
        data_addrs: vec![SocketAddr::from(([10, 0, 0, 1], 9441))],
        capacity: Capacity {
            machine: 1,
            zone: String::new(),
            device: "cpu".into(),
            memory_total: 1 << 30,
            memory_free: 1 << 30,
            bytes_per_second: 1 << 30,
            flops_per_second: 1 << 30,
            copy_bytes_per_second: 1 << 30,
            step_ns: 1000,
            layer_ns: 100,
            cache_bytes_per_second: 1 << 30,
            numerics: 1,
            pass_steps: 1,
        },
    }
}
