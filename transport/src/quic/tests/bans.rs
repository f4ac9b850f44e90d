//! Members whose membership was taken back, and those they certified.
use super::*;
use std::collections::BTreeSet;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_banned_and_whom_they_certified_are_out() {
    let mut nodes = mesh(3);
    // Invited by node 1, which was not certified by the root key alone then.
    let host = (*nodes[1].endpoint.0.credentials().unwrap()).clone();
    let guest = Identity::generate();
    let held = member(&MeshCredentials { root_secret: None, ..host }, &nodes[1].identity, &guest, now_unix() + 100);
    nodes.push(Node::start(guest, Some(held), Limits::default()));
    let ids: Vec<NodeId> = nodes.iter().map(Node::id).collect();
    for other in [1, 2, 3] {
        nodes[other].dial(&nodes[0]);
        nodes[other].connected(&ids[0]).await;
        nodes[0].connected(&ids[other]).await;
    }
    let (banned, guest) = (nodes[1].identity.peer_id(), nodes[3].identity.peer_id());
    assert_eq!(nodes[0].endpoint.certified_by(banned), [guest]);
    nodes[0].endpoint.ban(BTreeSet::from([banned]));
    for out in [1, 3] {
        let reason = nodes[out].disconnected().await;
        assert!(matches!(reason, Disconnect::ByPeer { code: CloseCode::Banned, .. }), "{reason}");
    }
    // Neither is let in again, nor dialed.
    for out in [1, 3] {
        nodes[out].dial(&nodes[0]);
        let reason = nodes[out].disconnected().await;
        assert!(reason.to_string().contains("banned"), "{reason}");
    }
    nodes[0].told();
    nodes[0].dial(&nodes[1]);
    let reason = nodes[0].disconnected().await;
    assert!(matches!(reason, Disconnect::Dial(DialError::BadCertificate { .. })), "{reason}");
    let connected: Vec<NodeId> = nodes[0].endpoint.peers().iter().map(|peer| peer.node).collect();
    assert_eq!(connected, [ids[2]], "nobody else is touched");
}
