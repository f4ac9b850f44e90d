//! `bench net`: measures the data plane between two real endpoints (keys, certificates, QUIC, encryption) on loopback.
use crate::cli::failure::Failure;
use crate::cli::service::runtime;
use serde_json::{Value, json};
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::mpsc;
use std::time::Duration;
use transport::{Endpoint, Event, Identity, Limits, MeshCredentials, Options, Roles};

/// Number of measurements; the results are medians.
const REPEATS: usize = 5;
/// Timeout for the connection between the endpoints.
const CONNECT_MAX: Duration = Duration::from_secs(10);
/// Lifetime of the certificates: longer than any measurement.
const MESH_SECONDS: u64 = 600;

pub(super) fn measure() -> Result<Value, Failure> {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.as_secs());
    let (near, far) = (Identity::generate(), Identity::generate());
    let credentials = MeshCredentials::found(&near, now + MESH_SECONDS);
    let chain = credentials.issue(&near, far.peer_id(), Roles::MEMBER, now + MESH_SECONDS).map_err(Failure::failed)?;
    let far_credentials = MeshCredentials { chain, root_secret: None, ..credentials.clone() };
    let far_node = far.node_id();
    let far_peer = far.peer_id();
    runtime()?.block_on(async move {
        let (sender, events) = mpsc::channel();
        let sender = parking_lot::Mutex::new(sender);
        let near = endpoint(near, credentials, move |event| {
            let _ = sender.lock().send(event);
        })?;
        let far = endpoint(far, far_credentials, |_| {})?;
        near.connect(far_peer, vec![far.local_addr()]);
        let connected = tokio::task::spawn_blocking(move || wait_connected(&events)).await;
        connected.map_err(Failure::failed)??;
        let mut links = Vec::new();
        for _ in 0..REPEATS {
            links.push(near.measure(far_node).await.map_err(|e| Failure::failed(format!("the measurement failed: {e}")))?);
        }
        let buffers = near.buffers();
        near.shutdown().await;
        let mut rtts: Vec<f64> = links.iter().map(|l| l.rtt.as_secs_f64() * 1e6).collect();
        let mut rates: Vec<f64> = links.iter().map(|l| l.bytes_per_second as f64).collect();
        rtts.sort_by(f64::total_cmp);
        rates.sort_by(f64::total_cmp);
        Ok(json!({
            "rtt_us": rtts[REPEATS / 2], "bytes_per_s": rates[REPEATS / 2], "rtt_us_all": rtts, "bytes_per_s_all": rates,
            "receive_buffer": buffers.receive, "send_buffer": buffers.send, "advice": buffers.advice(),
        }))
    })
}

pub(super) fn text(figures: &Value) -> String {
    let number = |name: &str| figures[name].as_f64().unwrap_or(0.0);
    let advice = figures["advice"].as_str().map(|a| format!("\n{a}")).unwrap_or_default();
    format!(
        "round trip {:.0} µs, {:.2} GB/s over QUIC on loopback (median of {REPEATS}){advice}",
        number("rtt_us"),
        number("bytes_per_s") / 1e9
    )
}

fn endpoint(
    identity: Identity,
    credentials: MeshCredentials,
    sink: impl Fn(Event) + Send + Sync + 'static,
) -> Result<Endpoint, Failure> {
    let listen = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let options = Options { listen, identity, credentials: Some(credentials), limits: Limits::default() };
    Endpoint::bind(options, sink, |_, _, _| {}).map_err(Failure::failed)
}

fn wait_connected(events: &mpsc::Receiver<Event>) -> Result<(), Failure> {
    let end = std::time::Instant::now() + CONNECT_MAX;
    loop {
        let left = end.saturating_duration_since(std::time::Instant::now());
        match events.recv_timeout(left) {
            Ok(Event::Connected { .. }) => return Ok(()),
            Ok(_) => {}
            Err(_) => return Err(Failure::failed("two endpoints on 127.0.0.1 could not connect: is UDP blocked?")),
        }
    }
}
