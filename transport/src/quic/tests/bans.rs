//! Banned members, and the members that they certified.
use super::*;
use crate::Revocation;
use std::collections::BTreeMap;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_ban_revokes_every_member_that_the_banned_peer_certified() {
    let mut nodes = mesh(3);
    // Node 1 certifies the guest itself, so the guest's chain contains node 1.
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
    let (founder, held) = (nodes[0].identity.clone(), nodes[0].endpoint.0.credentials().unwrap());
    let revocation = Revocation::issue(&held, &founder, banned, now_unix(), ("n1", "n0")).unwrap();
    nodes[0].endpoint.ban(BTreeMap::from([(banned, revocation.clone())]));
    for out in [1, 3] {
        let reason = nodes[out].disconnected().await;
        assert!(matches!(reason, Disconnect::ByPeer { code: CloseCode::Banned, .. }), "{reason}");
        // The closed node dials again by itself and receives the signed revocation.
        let shown = nodes[out]
            .until(|event| match event {
                Event::Banned(revocation) => Some((**revocation).clone()),
                _ => None,
            })
            .await;
        assert_eq!(shown, revocation);
        let reason = nodes[out].disconnected().await;
        assert!(matches!(reason, Disconnect::Dial(DialError::Refused { code: CloseCode::Banned, .. })), "{reason}");
    }
    // Neither is admitted or dialed again.
    for out in [1, 3] {
        nodes[out].dial(&nodes[0]);
        let reason = nodes[out].disconnected().await;
        assert!(reason.to_string().contains("banned"), "{reason}");
    }
    nodes[0].drain_events();
    nodes[0].dial(&nodes[1]);
    let reason = nodes[0].disconnected().await;
    assert!(matches!(reason, Disconnect::Dial(DialError::BadCertificate { .. })), "{reason}");
    let connected: Vec<NodeId> = nodes[0].endpoint.peers().iter().map(|peer| peer.node).collect();
    assert_eq!(connected, [ids[2]], "no other member is affected");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_invalid_revocation_is_ignored() {
    let mut nodes = mesh(2);
    let (victim, forger) = (nodes[1].identity.peer_id(), nodes[0].identity.clone());
    // For another mesh, so no member of this mesh signed it.
    let other = MeshCredentials::found(&forger, now_unix() + 100);
    let forged = Revocation::issue(&other, &forger, victim, now_unix(), ("", "")).unwrap();
    nodes[0].endpoint.ban(BTreeMap::from([(victim, forged)]));
    let (a, b) = pair(&mut nodes);
    b.dial(a);
    let reason = b.disconnected().await;
    assert!(reason.to_string().contains("revocation is invalid"), "{reason}");
    assert!(!b.drain_events().iter().any(|event| matches!(event, Event::Banned(_))));
}
