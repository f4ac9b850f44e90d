//! Endpoints against each other on loopback, and against misbehaving peers.
#![allow(clippy::wildcard_enum_match_arm, reason = "a test waits for one kind of event and ignores the rest")]
use super::inner::now_unix;
use super::*;
use crate::certificate::Roles;
use crate::close::{DialError, Disconnect};
use crate::event::Event;
use crate::frame::{Codec, Dtype, Epoch};
use crate::join::Admission;
use std::collections::VecDeque;
use tokio::sync::mpsc;
use tokio::time::timeout;

mod bans;
mod join;
mod members;
mod unauthorized;
mod versions;

/// Far longer than any exchange on loopback, so that a stalled test fails.
const PATIENCE: Duration = Duration::from_secs(30);

/// A node of the test: its endpoint and its events.
struct Node {
    endpoint: Endpoint,
    identity: Identity,
    events: mpsc::UnboundedReceiver<Event>,
    /// Events received while another one was awaited.
    passed: VecDeque<Event>,
}

impl Node {
    fn start(identity: Identity, credentials: Option<MeshCredentials>, limits: Limits) -> Self {
        Self::start_at(identity, credentials, limits, "127.0.0.1:0".parse().unwrap())
    }

    fn start_at(identity: Identity, credentials: Option<MeshCredentials>, limits: Limits, listen: SocketAddr) -> Self {
        let (sender, events) = mpsc::unbounded_channel();
        let options = Options { listen, identity: identity.clone(), credentials, limits };
        let sink = move |event: Event| drop(sender.send(event));
        let endpoint = Endpoint::bind(options, sink, serve).unwrap();
        Self { endpoint, identity, events, passed: VecDeque::new() }
    }

    fn id(&self) -> NodeId {
        self.identity.node_id()
    }

    fn addr(&self) -> SocketAddr {
        self.endpoint.local_addr()
    }

    fn dial(&self, other: &Node) {
        self.endpoint.connect(other.identity.peer_id(), vec![other.addr()]);
    }

    /// The next event that `pick` accepts; others are kept for later.
    async fn until<T>(&mut self, mut pick: impl FnMut(&Event) -> Option<T>) -> T {
        if let Some(at) = self.passed.iter().position(|event| pick(event).is_some()) {
            let event = self.passed.remove(at).unwrap();
            return pick(&event).unwrap();
        }
        loop {
            let event = match timeout(PATIENCE, self.events.recv()).await {
                Ok(Some(event)) => event,
                Ok(None) => panic!("the endpoint is gone"),
                Err(_) => panic!("no matching event; seen: {:?}", self.passed),
            };
            match pick(&event) {
                Some(found) => return found,
                None => self.passed.push_back(event),
            }
        }
    }

    async fn connected(&mut self, to: &NodeId) {
        self.until(|event| matches!(event, Event::Connected { node, .. } if node == to).then_some(())).await;
    }

    async fn disconnected(&mut self) -> Disconnect {
        self.until(|event| match event {
            Event::Disconnected { reason, .. } => Some(reason.clone()),
            _ => None,
        })
        .await
    }

    async fn refused(&mut self) -> String {
        self.until(|event| match event {
            Event::Rejected { why, .. } => Some(why.clone()),
            _ => None,
        })
        .await
    }

    async fn message(&mut self) -> Vec<u8> {
        self.until(|event| match event {
            Event::Message { bytes, .. } => Some(bytes.to_vec()),
            _ => None,
        })
        .await
    }

    async fn frame(&mut self) -> (NodeId, WireHeader, Vec<u8>) {
        self.until(|event| match event {
            Event::Frame { from, head, payload } => Some((*from, *head, payload.to_vec())),
            _ => None,
        })
        .await
    }

    /// All events so far.
    fn drain_events(&mut self) -> Vec<Event> {
        while let Ok(event) = self.events.try_recv() {
            self.passed.push_back(event);
        }
        self.passed.drain(..).collect()
    }
}

/// Echoes the request 1000 times, or fails on request.
fn serve(_: NodeId, request: Bytes, reply: crate::Reply) {
    tokio::spawn(async move {
        match &request[..] {
            b"refuse" => reply.fail("not today"),
            b"die" => drop(reply),
            _ => {
                for _ in 0..1000 {
                    reply.send(request.clone()).await;
                }
                reply.finish();
            }
        }
    });
}

/// A mesh of `n` nodes with certificates; the first is the founder.
fn mesh(n: usize) -> Vec<Node> {
    mesh_with(n, Limits::default())
}

fn mesh_with(n: usize, limits: Limits) -> Vec<Node> {
    let founder = Identity::generate();
    let credentials = MeshCredentials::found(&founder, now_unix() + 1000);
    let mut nodes = vec![Node::start(founder.clone(), Some(credentials.clone()), limits)];
    for _ in 1..n {
        let identity = Identity::generate();
        let member = member(&credentials, &founder, &identity, now_unix() + 1000);
        nodes.push(Node::start(identity, Some(member), limits));
    }
    nodes
}

fn member(mesh: &MeshCredentials, issuer: &Identity, who: &Identity, expiry: u64) -> MeshCredentials {
    let chain = mesh.issue(issuer, who.peer_id(), Roles::INVITER, expiry).unwrap();
    Admission { chain, mesh_key: mesh.mesh_key, members: Bytes::new() }.credentials()
}

fn pair(nodes: &mut [Node]) -> (&mut Node, &mut Node) {
    let [a, b, ..] = nodes else { panic!("two nodes") };
    (a, b)
}

async fn connected_pair(limits: Limits) -> Vec<Node> {
    let mut nodes = mesh_with(2, limits);
    let (a, b) = pair(&mut nodes);
    a.dial(b);
    a.connected(&b.id()).await;
    b.connected(&a.id()).await;
    nodes
}

fn route(job: u64) -> Route {
    Route { job, epoch: Epoch { counter: 1, issuer: [1; 16] }, part: 1 }
}

fn head(route: Route, cursor: u32, count: u32, width: u32) -> WireHeader {
    WireHeader {
        route,
        channel: 5,
        cursor,
        count,
        last: false,
        continues: None,
        drafts: 0,
        kept: 0,
        round: 0,
        dtype: Dtype::F32,
        width,
    }
}

fn rows(count: u32, width: u32) -> Bytes {
    let values: Vec<f32> = (0..count * width).map(|i| (i % 97) as f32 / 8.0).collect();
    crate::frame::from_f32(&values)
}
