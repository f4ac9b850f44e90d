//! Peers of other protocol versions: the error on each side says which side to update.
use super::*;
use crate::quic::hello::{Hello, PROTOCOL, Purpose};
use crate::ticket::Ticket;
use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use quinn::{Connection, ConnectionError};

const OLDER: &[&str] = &["meshnode/1"];
const NEWER: &[&str] = &["meshnode/4", "meshnode/3", "meshnode/1"];

/// A peer that offers these protocol names.
struct Peer {
    identity: Identity,
    endpoint: quinn::Endpoint,
}

impl Peer {
    fn new(names: &[&str]) -> Self {
        let identity = Identity::generate();
        let names: Vec<Vec<u8>> = names.iter().map(|name| name.as_bytes().to_vec()).collect();
        let (client, server) = tls::configs(&identity, &names).unwrap();
        let server = quinn::ServerConfig::with_crypto(Arc::new(QuicServerConfig::try_from(server).unwrap()));
        let mut endpoint = quinn::Endpoint::server(server, "127.0.0.1:0".parse().unwrap()).unwrap();
        let client = QuicClientConfig::try_from(client).unwrap();
        endpoint.set_default_client_config(quinn::ClientConfig::new(Arc::new(client)));
        Self { identity, endpoint }
    }

    fn addr(&self) -> SocketAddr {
        self.endpoint.local_addr().unwrap()
    }

    async fn dial(&self, to: &Node) -> Result<Connection, ConnectionError> {
        self.endpoint.connect(to.addr(), "l").unwrap().await
    }

    /// Accepts one connection and reads the number of its greeting, as every version does.
    async fn greeted(&self) -> (Connection, u16) {
        let connection = self.endpoint.accept().await.unwrap().await.unwrap();
        let (_send, mut recv) = connection.accept_bi().await.unwrap();
        let mut head = [0; 10];
        recv.read_exact(&mut head).await.unwrap();
        assert_eq!(&head[4..8], b"mesh");
        (connection, u16::from_le_bytes([head[8], head[9]]))
    }
}

async fn closed(connection: &Connection) -> (u64, String) {
    match timeout(PATIENCE, connection.closed()).await.unwrap() {
        ConnectionError::ApplicationClosed(close) => {
            (close.error_code.into_inner(), String::from_utf8(close.reason.to_vec()).unwrap())
        }
        other => panic!("{other}"),
    }
}

/// The error of a join with a ticket of this inviter.
async fn joining(inviter: &Peer) -> String {
    let joiner = Node::start(Identity::generate(), None, Limits::default());
    let mesh = MeshCredentials::found(&inviter.identity, now_unix() + 100).mesh;
    let (peer_id, addrs) = (inviter.identity.peer_id(), vec![inviter.addr()]);
    let ticket = Ticket { mesh, inviter: peer_id, addrs, secret: [1; 16], expiry_unix: now_unix() + 100 };
    joiner.endpoint.join(&ticket, "box").await.unwrap_err().to_string()
}

/// The error of a member that dials this peer.
async fn dialling(peer: &Peer) -> String {
    let mut node = mesh(1).pop().unwrap();
    node.endpoint.connect(peer.identity.peer_id(), vec![peer.addr()]);
    let reason = node.disconnected().await;
    assert!(matches!(reason, Disconnect::Dial(DialError::OtherVersion { .. })), "{reason:?}");
    reason.to_string()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_older_caller_is_rejected_by_name() {
    let mut node = mesh(1).pop().unwrap();
    let connection = Peer::new(OLDER).dial(&node).await.unwrap();
    let there = "it speaks meshnode/3, this node meshnode/1: update meshnode here";
    assert_eq!(closed(&connection).await, (CloseCode::OtherVersion as u64, there.to_owned()));
    assert_eq!(node.refused().await, "speaks meshnode/1, this node meshnode/3: update meshnode there");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dialed_older_node_is_reported_and_rejects_the_greeting() {
    let older = Peer::new(OLDER);
    let expected = format!("{} speaks meshnode/1, this node meshnode/3: update meshnode there", older.addr());
    // The greeting of `meshnode/1` had the number 2.
    let refuse = async |older: &Peer| {
        let (connection, number) = older.greeted().await;
        assert_ne!(number, 2);
        connection.close((CloseCode::OtherVersion as u32).into(), b"protocol 2 here meets protocol 3");
    };
    let (said, ()) = tokio::join!(dialling(&older), refuse(&older));
    assert_eq!(said, expected);
    let (said, ()) = tokio::join!(joining(&older), refuse(&older));
    assert_eq!(said, expected);
    // A node that never answers the greeting does not delay the caller.
    let (said, connection) = tokio::join!(dialling(&older), older.greeted());
    assert_eq!(said, expected);
    let there = "it speaks meshnode/3, this node meshnode/1: update meshnode here";
    assert_eq!(closed(&connection.0).await, (CloseCode::OtherVersion as u64, there.to_owned()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_newer_caller_is_rejected_by_the_number_of_its_greeting() {
    let mut node = mesh(1).pop().unwrap();
    let connection = Peer::new(NEWER).dial(&node).await.unwrap();
    let mut greeting = Hello { instance: 1, purpose: Purpose::Member(None) }.encode();
    greeting[8..10].copy_from_slice(&(PROTOCOL + 1).to_le_bytes());
    let (mut send, _recv) = connection.open_bi().await.unwrap();
    send.write_all(&greeting).await.unwrap();
    let there = "it speaks meshnode/3, this node meshnode/4: update meshnode there";
    assert_eq!(closed(&connection).await, (CloseCode::OtherVersion as u64, there.to_owned()));
    assert_eq!(node.refused().await, "speaks meshnode/4, this node meshnode/3: update meshnode here");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dialed_newer_node_reports_which_side_to_update() {
    let newer = Peer::new(NEWER);
    let words = "it speaks meshnode/4, this node meshnode/3: update meshnode here";
    let expected = format!("{} refuses this node's protocol version: {words}", newer.addr());
    let refuse = async |newer: &Peer| {
        let connection = newer.endpoint.accept().await.unwrap().await.unwrap();
        connection.close((CloseCode::OtherVersion as u32).into(), words.as_bytes());
        newer.endpoint.wait_idle().await;
    };
    let (said, ()) = tokio::join!(dialling(&newer), refuse(&newer));
    assert_eq!(said, expected);
    let (said, ()) = tokio::join!(joining(&newer), refuse(&newer));
    assert_eq!(said, expected);
}

/// Without a common protocol name the handshake fails, and both sides report why.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_without_a_common_name_fails_the_handshake() {
    let mut node = mesh(1).pop().unwrap();
    let other = Peer::new(&["meshnode/9"]);
    assert!(other.dial(&node).await.is_err());
    let here =
        "it offers no protocol that this node supports (meshnode/3): if it is a newer meshnode, update meshnode here";
    assert_eq!(node.refused().await, here);
    let accept = async { drop(other.endpoint.accept().await.unwrap().await) };
    let (said, ()) = tokio::join!(joining(&other), accept);
    let unsupported =
        "supports no protocol that this node offers (meshnode/3): if it is a newer meshnode, update meshnode here";
    assert_eq!(said, format!("{} {unsupported}", other.addr()));
}

#[test]
fn greetings_are_numbered_with_the_names() {
    assert_eq!(crate::PROTOCOL_NAME, format!("meshnode/{}", PROTOCOL - 1));
}
