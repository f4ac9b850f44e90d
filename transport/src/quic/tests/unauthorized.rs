//! Unauthorized peers, and members that violate the protocol: each is rejected with a reason, without other effects.
use super::*;
use crate::certificate::Chain;
use crate::frame::{Dtype, HEADER_BYTES, encode_header};
use crate::fuzz::Noise;
use crate::quic::hello::{Hello, PROTOCOL, Purpose};
use crate::version::PROTOCOL_NAME;
use quinn::{Connection, RecvStream, SendStream, crypto::rustls::QuicClientConfig};

/// A peer that sends arbitrary bytes.
struct MisbehavingPeer {
    identity: Identity,
    endpoint: quinn::Endpoint,
}

impl MisbehavingPeer {
    fn new(identity: Identity) -> Self {
        Self { identity, endpoint: quinn::Endpoint::client("127.0.0.1:0".parse().unwrap()).unwrap() }
    }

    async fn connect(&self, to: &Node, name: &str) -> Result<Connection, quinn::ConnectionError> {
        let mut tls = libp2p_tls::make_client_config(self.identity.keypair(), None).unwrap();
        tls.alpn_protocols = vec![name.as_bytes().to_vec()];
        let mut config = quinn::ClientConfig::new(Arc::new(QuicClientConfig::try_from(tls).unwrap()));
        let mut transport = quinn::TransportConfig::default();
        // The peer always lets the node open streams.
        transport.max_concurrent_uni_streams(100u32.into());
        config.transport_config(Arc::new(transport));
        self.endpoint.connect_with(config, to.addr(), "l").unwrap().await
    }

    async fn greet(&self, to: &Node, greeting: &[u8]) -> (Connection, SendStream, RecvStream) {
        let connection = self.connect(to, PROTOCOL_NAME).await.unwrap();
        let (mut send, recv) = connection.open_bi().await.unwrap();
        send.write_all(greeting).await.unwrap();
        (connection, send, recv)
    }

    /// Sends a valid member's greeting and reads the answer.
    async fn greet_as(&self, to: &Node, chain: Chain) -> (Connection, SendStream, RecvStream) {
        let hello = Hello { instance: 1, purpose: Purpose::Member(Some(chain)) };
        let (connection, send, mut recv) = self.greet(to, &hello.encode()).await;
        Hello::read(&mut recv).await.unwrap();
        (connection, send, recv)
    }
}

fn greeting(chain: Option<Chain>) -> Vec<u8> {
    Hello { instance: 1, purpose: Purpose::Member(chain) }.encode()
}

async fn closed(connection: &Connection) -> (CloseCode, String) {
    match timeout(PATIENCE, connection.closed()).await.unwrap() {
        quinn::ConnectionError::ApplicationClosed(close) => {
            let code = CloseCode::from_wire(close.error_code.into_inner()).unwrap();
            (code, String::from_utf8_lossy(&close.reason).into_owned())
        }
        other => panic!("{other}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn strangers_are_rejected_before_anything_else() {
    let mut nodes = mesh(1);
    let node = &mut nodes[0];
    let mesh = (*node.endpoint.0.credentials().unwrap()).clone();
    let peer = MisbehavingPeer::new(Identity::generate());
    let me = peer.identity.clone();

    let own_mesh = MeshCredentials::found(&me, now_unix() + 100);
    let third_party = Identity::generate();
    let third_party_chain = mesh.issue(&node.identity, third_party.peer_id(), Roles::MEMBER, now_unix() + 100).unwrap();
    let expired = mesh.issue(&node.identity, me.peer_id(), Roles::MEMBER, now_unix() - 3).unwrap();
    let mut forged = own_mesh.chain.encode();
    forged[3..35].copy_from_slice(&mesh.mesh.0);
    let forged = Chain::decode(&forged).unwrap();
    let mut other_version = greeting(None);
    other_version[8..10].copy_from_slice(&(PROTOCOL + 1).to_le_bytes());

    let cases = [
        (greeting(None), CloseCode::NoCertificate, "no certificate"),
        (greeting(Some(own_mesh.chain)), CloseCode::OtherMesh, "for mesh"),
        (greeting(Some(third_party_chain)), CloseCode::BadCertificate, "belongs to"),
        (greeting(Some(expired)), CloseCode::CertificateExpired, "expired"),
        (greeting(Some(forged)), CloseCode::BadCertificate, "forged"),
        (other_version, CloseCode::OtherVersion, "this node meshnode/"),
        (b"GET / HTTP/1.1\r\n\r\n".to_vec(), CloseCode::BadHello, "malformed"),
    ];
    for (greeting, code, words) in cases {
        let (connection, mut control, _recv) = peer.greet(node, &greeting).await;
        // A message right after the greeting, and a frame on its own stream: neither may get through. The stream cannot
        // even be opened.
        let _ = control.write_all(&[4, 0, 0, 0, 1, 2, 3, 4]).await;
        let stream = tokio::spawn({
            let connection = connection.clone();
            async move { connection.open_uni().await.map(drop) }
        });
        let (found, text) = closed(&connection).await;
        assert_eq!(found, code, "{text}");
        assert!(text.contains(words), "{text}");
        assert!(stream.await.unwrap().is_err(), "a stranger opened a stream");
        assert!(node.refused().await.contains(words));
    }
    let seen = node.drain_events();
    assert!(seen.is_empty(), "{seen:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stolen_or_missing_certificate_fails_the_handshake() {
    let mut nodes = mesh(1);
    let node = &mut nodes[0];
    let peer = MisbehavingPeer::new(Identity::generate());
    // Another peer's certificate, copied off the wire, with this peer's own key: the handshake signature does not
    // verify.
    let (stolen, _) = libp2p_tls::certificate::generate(Identity::generate().keypair()).unwrap();
    let (_, own_key) = libp2p_tls::certificate::generate(peer.identity.keypair()).unwrap();
    for (certificates, key) in [(vec![stolen], Some(own_key)), (Vec::new(), None)] {
        let (mut tls, _) = crate::quic::tls::configs(&peer.identity, &crate::version::offered()).unwrap();
        tls.client_auth_cert_resolver = Arc::new(Presents(key.map(|key| {
            let key = rustls::crypto::aws_lc_rs::sign::any_ecdsa_type(&key).unwrap();
            Arc::new(rustls::sign::CertifiedKey::new(certificates, key))
        })));
        let config = quinn::ClientConfig::new(Arc::new(QuicClientConfig::try_from(tls).unwrap()));
        let connection = peer.endpoint.connect_with(config, node.addr(), "l").unwrap().await;
        // The dialer's side of TLS completes before the node has verified: the dialer may see the close a moment later.
        if let Ok(connection) = connection {
            assert!(timeout(PATIENCE, connection.closed()).await.is_ok());
        }
        assert!(node.refused().await.contains("handshake"));
    }
    assert!(node.drain_events().is_empty());
}

#[derive(Debug)]
struct Presents(Option<Arc<rustls::sign::CertifiedKey>>);

impl rustls::client::ResolvesClientCert for Presents {
    fn resolve(&self, _: &[&[u8]], _: &[rustls::SignatureScheme]) -> Option<Arc<rustls::sign::CertifiedKey>> {
        self.0.clone()
    }

    fn has_certs(&self) -> bool {
        self.0.is_some()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_dialer_learns_the_reason() {
    let mut nodes = mesh(1);
    let node = nodes.pop().unwrap();
    let mesh = (*node.endpoint.0.credentials().unwrap()).clone();
    let dialer = |expiry: Option<u64>| {
        let identity = Identity::generate();
        let credentials = match expiry {
            Some(expiry) => member(&mesh, &node.identity, &identity, expiry),
            None => MeshCredentials::found(&identity, now_unix() + 100),
        };
        Node::start(identity, Some(credentials), Limits::default())
    };
    let mut expired = dialer(Some(now_unix() - 5));
    expired.dial(&node);
    let reason = expired.disconnected().await;
    let refused = Disconnect::Dial(DialError::Refused {
        code: CloseCode::CertificateExpired,
        text: "the certificate expired 5 s ago; join again with a new ticket".into(),
    });
    assert!(
        reason == refused
            || matches!(&reason, Disconnect::Dial(DialError::Refused { code: CloseCode::CertificateExpired, .. })),
        "{reason:?}"
    );
    assert!(reason.to_string().contains("new ticket"));
    let mut foreign = dialer(None);
    foreign.dial(&node);
    let reason = foreign.disconnected().await;
    assert!(matches!(reason, Disconnect::Dial(DialError::Refused { code: CloseCode::OtherMesh, .. })), "{reason:?}");
    let mut unjoined = Node::start(Identity::generate(), None, Limits::default());
    unjoined.dial(&node);
    assert_eq!(unjoined.disconnected().await, Disconnect::Dial(DialError::NoCredentials));
    // Members also reject invalid peers that they dial.
    let mut member = node;
    member.dial(&foreign);
    let reason = member.disconnected().await;
    assert!(matches!(&reason, Disconnect::Dial(DialError::Refused { code: CloseCode::OtherMesh, .. })), "{reason:?}");
}

/// A member of the mesh that sends raw bytes to `node`, which expects frames of job 1, width 8, at most 4 rows.
async fn misbehaving_member() -> (Node, MisbehavingPeer, Chain) {
    let node = mesh(1).pop().unwrap();
    let mesh = (*node.endpoint.0.credentials().unwrap()).clone();
    let peer = MisbehavingPeer::new(Identity::generate());
    let chain = mesh.issue(&node.identity, peer.identity.peer_id(), Roles::MEMBER, now_unix() + 100).unwrap();
    node.endpoint.expect(route(1), Expectation::hidden(Dtype::F32, 8, 4));
    (node, peer, chain)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn invalid_frames_close_the_connection() {
    let (mut node, peer, chain) = misbehaving_member().await;
    let good = || {
        let payload = rows(2, 8);
        let mut bytes = encode_header(&head(route(1), 0, 2, 8), Codec::Raw, &payload).to_vec();
        bytes.extend_from_slice(&payload);
        bytes
    };
    let changed = |at: usize, to: u8| {
        let mut bytes = good();
        bytes[at] = to;
        bytes
    };
    let mut other_route = good();
    other_route.extend_from_slice(&changed(8, 9));
    let cases = [
        (changed(0, 4), "format 4"),
        (changed(1, 10), "dtype"),
        (changed(1, Dtype::U32 as u8), "dtype"),
        (changed(2, 3), "codec"),
        (changed(3, 4), "reserved"),
        (changed(6, 1), "checksum"),
        (changed(7, 1), "checksum"),
        (changed(52, 9), "width"),
        (changed(20, 5), "rows"),
        (changed(20, 0), "rows"),
        (changed(56, 63), "bytes"),
        (changed(63, 255), "bytes"),
        (changed(64, 0xaa), "reserved"),
        (changed(72, 0xaa), "checksum"),
        (changed(76, 0xaa), "checksum"),
        (changed(HEADER_BYTES, 0xaa), "checksum"),
        (bomb(), "unpack"),
        (other_route, "another job"),
    ];
    for (bytes, words) in cases {
        let (connection, _control, _recv) = peer.greet_as(&node, chain.clone()).await;
        node.connected(&peer.identity.node_id()).await;
        let mut stream = connection.open_uni().await.unwrap();
        stream.write_all(&bytes).await.unwrap();
        let (code, text) = closed(&connection).await;
        assert_eq!(code, CloseCode::BadFrame, "{text}");
        assert!(text.contains(words), "{text} should contain {words}");
        assert!(node.refused().await.contains(words));
        assert!(matches!(node.disconnected().await, Disconnect::Here { code: CloseCode::BadFrame, .. }));
    }
    let frames = node.drain_events().into_iter().filter(|e| matches!(e, Event::Frame { .. })).count();
    assert_eq!(frames, 1, "only the valid frame before the one of another route");
}

/// A frame of 4 x 8 values whose payload fits on the wire but decompresses to 32 times as many values.
fn bomb() -> Vec<u8> {
    let payload = crate::compress::pack(Codec::ShuffledZstd, Dtype::F32, &[0; 4096]).unwrap();
    assert!(payload.len() < 128);
    let mut bytes = encode_header(&head(route(1), 0, 4, 8), Codec::ShuffledZstd, &payload).to_vec();
    bytes.extend_from_slice(&payload);
    bytes
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn oversized_messages_and_unknown_streams_close_the_connection() {
    let (mut node, peer, chain) = misbehaving_member().await;
    let (connection, mut control, _recv) = peer.greet_as(&node, chain.clone()).await;
    control.write_all(&u32::MAX.to_le_bytes()).await.unwrap();
    assert_eq!(closed(&connection).await.0, CloseCode::BadMessage);
    assert!(node.refused().await.contains("at most"));
    let (connection, _control, _recv) = peer.greet_as(&node, chain).await;
    let (mut send, _recv) = connection.open_bi().await.unwrap();
    send.write_all(&[99]).await.unwrap();
    assert_eq!(closed(&connection).await.0, CloseCode::BadMessage);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn noise_on_every_kind_of_stream_does_not_harm_the_node() {
    let (mut node, peer, chain) = misbehaving_member().await;
    let payload = rows(2, 8);
    let mut good = encode_header(&head(route(1), 0, 2, 8), Codec::Raw, &payload).to_vec();
    good.extend_from_slice(&payload);
    let mut noise = Noise::new(11);
    for round in 0..60 {
        let (connection, mut control, _recv) = peer.greet_as(&node, chain.clone()).await;
        match round % 3 {
            0 => {
                let mut stream = connection.open_uni().await.unwrap();
                let _ = stream.write_all(&noise.mangle(&good)).await;
                let _ = stream.finish();
            }
            1 => {
                let (mut send, _recv) = connection.open_bi().await.unwrap();
                let _ = send.write_all(&noise.mangle(&[1, 4, 0, 0, 0, 1, 2, 3, 4])).await;
                let _ = send.finish();
            }
            _ => {
                let _ = control.write_all(&noise.mangle(&[4, 0, 0, 0, 1, 2, 3, 4])).await;
                let _ = control.finish();
            }
        }
        let hello = noise.mangle(&greeting(Some(chain.clone())));
        let (_stranger, _send, _recv) = peer.greet(&node, &hello).await;
        connection.close(0u32.into(), b"");
        node.drain_events();
    }
    // The node still serves other peers.
    let mesh = (*node.endpoint.0.credentials().unwrap()).clone();
    let identity = Identity::generate();
    let member = member(&mesh, &node.identity, &identity, now_unix() + 100);
    let mut other = Node::start(identity, Some(member), Limits::default());
    other.dial(&node);
    other.connected(&node.id()).await;
    other.endpoint.send_message(node.id(), Bytes::from_static(b"well?")).unwrap();
    loop {
        if node.message().await == b"well?" {
            return;
        }
    }
}
