//! Joining a mesh, and the ways it fails.
use super::*;
use crate::certificate::CertificateError;
use crate::join::{JoinRejection, JoinRequest};
use crate::ticket::Ticket;

const SECRET: [u8; 16] = [42; 16];

fn ticket(inviter: &Node) -> Ticket {
    let mesh = inviter.endpoint.0.credentials().unwrap().mesh;
    let addrs = vec![inviter.addr()];
    Ticket { mesh, inviter: inviter.identity.peer_id(), addrs, secret: SECRET, expiry_unix: now_unix() + 1000 }
}

/// A node that is not in a mesh.
fn stranger() -> Node {
    Node::start(Identity::generate(), None, Limits::default())
}

/// Waits for a request at the inviter and decides it.
async fn decide(inviter: &mut Node, decide: impl FnOnce(&Node, JoinRequest)) {
    loop {
        match timeout(PATIENCE, inviter.events.recv()).await.unwrap().unwrap() {
            Event::Join(request) => return decide(inviter, request),
            other => inviter.passed.push_back(other),
        }
    }
}

fn admit(inviter: &Node, request: JoinRequest) {
    assert!(request.proves(&SECRET));
    assert!(!request.proves(&[1; 16]));
    admit_anyway(inviter, request);
}

fn admit_anyway(inviter: &Node, request: JoinRequest) {
    let mesh = inviter.endpoint.0.credentials().unwrap();
    let chain = mesh.issue(&inviter.identity, request.peer_id, Roles::INVITER, now_unix() + 500).unwrap();
    request.admit(Admission { chain, mesh_key: mesh.mesh_key, members: Bytes::from_static(b"who is here") });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_ticket_makes_a_member_that_can_invite() {
    let mut nodes = mesh(1);
    let mut inviter = nodes.pop().unwrap();
    let mut chain_length = 1;
    for _ in 0..2 {
        let mut joiner = stranger();
        let ticket: Ticket = ticket(&inviter).to_string().parse().unwrap();
        let (admission, ()) = tokio::join!(
            joiner.endpoint.join(&ticket, "box"),
            decide(&mut inviter, |inviter, request| {
                assert_eq!(request.name, "box");
                assert_eq!(request.ticket, Some(ticket.id()));
                admit(inviter, request);
            })
        );
        let admission = admission.unwrap();
        assert_eq!(admission.members, b"who is here"[..]);
        joiner.endpoint.set_credentials(admission.credentials());
        joiner.dial(&inviter);
        joiner.connected(&inviter.id()).await;
        inviter.connected(&joiner.id()).await;
        assert!(admission.chain.encode().len() > chain_length);
        chain_length = admission.chain.encode().len();
        inviter = joiner;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_joiner_receives_the_reason_and_advice() {
    let mut nodes = mesh(1);
    let inviter = &mut nodes[0];
    let joiner = stranger();
    let ticket = ticket(inviter);
    let refusals = [
        (JoinRejection::UsedUp, "used up"),
        (JoinRejection::Expired, "expired"),
        (JoinRejection::Unknown, "does not know this ticket"),
        (JoinRejection::Busy, "try again"),
    ];
    for (refusal, words) in refusals {
        let (result, ()) =
            tokio::join!(joiner.endpoint.join(&ticket, "box"), decide(inviter, |_, request| request.reject(refusal)));
        let error = result.unwrap_err();
        assert_eq!(error, JoinError::Refused { refusal, me: joiner.identity.peer_id() });
        assert!(error.to_string().contains(words), "{error}");
        assert!(inviter.refused().await.contains(words));
    }
    let (result, ()) = tokio::join!(joiner.endpoint.join(&ticket, "box"), decide(inviter, |_, request| drop(request)));
    assert!(matches!(result, Err(JoinError::Refused { refusal: JoinRejection::Busy, .. })));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_ticket_a_peer_waits_for_approval() {
    let mut nodes = mesh(1);
    let inviter = &mut nodes[0];
    let joiner = stranger();
    let addrs = [inviter.addr()];
    let ask = || joiner.endpoint.join_at(&addrs, None, "box");
    let (result, ()) = tokio::join!(
        ask(),
        decide(inviter, |_, request| {
            assert_eq!(request.ticket, None);
            assert!(!request.proves(&SECRET));
            request.reject(JoinRejection::NotApproved);
        })
    );
    let text = result.unwrap_err().to_string();
    assert!(text.contains(&format!("meshnode approve {}", joiner.identity.peer_id())), "{text}");
    let (result, ()) = tokio::join!(ask(), decide(inviter, admit_anyway));
    let (admission, by) = result.unwrap();
    assert_eq!(admission.credentials().mesh, inviter.endpoint.0.credentials().unwrap().mesh);
    assert_eq!(by, inviter.identity.peer_id());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unusable_tickets_fail_before_the_node_decides() {
    let mut nodes = mesh(2);
    let joiner = stranger();
    let other = nodes[1].identity.peer_id();
    let (inviter, _) = pair(&mut nodes);
    let good = ticket(inviter);

    let expired = Ticket { expiry_unix: now_unix() - 10, ..good.clone() };
    let error = joiner.endpoint.join(&expired, "box").await.unwrap_err();
    assert!(matches!(error, JoinError::Refused { refusal: JoinRejection::Expired, .. }), "{error}");

    let other_mesh = Ticket { mesh: crate::MeshId([9; 32]), ..good.clone() };
    let error = joiner.endpoint.join(&other_mesh, "box").await.unwrap_err();
    assert!(matches!(error, JoinError::Refused { refusal: JoinRejection::OtherMesh, .. }), "{error}");

    let wrong_peer = Ticket { inviter: other, ..good.clone() };
    let error = joiner.endpoint.join(&wrong_peer, "box").await.unwrap_err();
    let found = inviter.identity.peer_id().into();
    let expected = DialError::WrongPeer { addr: inviter.addr(), expected: other.into(), found };
    assert_eq!(error, JoinError::Dial(expected));

    let lonely = stranger();
    let nowhere = Ticket { addrs: vec![lonely.addr()], inviter: lonely.identity.peer_id(), ..good };
    let error = joiner.endpoint.join(&nowhere, "box").await.unwrap_err();
    assert!(matches!(error, JoinError::Refused { refusal: JoinRejection::NotAMember, .. }), "{error}");
    assert!(!inviter.drain_events().iter().any(|e| matches!(e, Event::Join(_))));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_admission_to_another_mesh_is_rejected() {
    let mut nodes = mesh(1);
    let inviter = &mut nodes[0];
    let joiner = stranger();
    let ticket = ticket(inviter);
    let foreign = MeshCredentials::found(&inviter.identity, now_unix() + 1000);
    let (result, ()) = tokio::join!(
        joiner.endpoint.join(&ticket, "box"),
        decide(inviter, |inviter, request| {
            let chain = foreign.issue(&inviter.identity, request.peer_id, Roles::MEMBER, now_unix() + 500).unwrap();
            request.admit(Admission { chain, mesh_key: [0; 32], members: Bytes::new() });
        })
    );
    assert!(matches!(result, Err(JoinError::Certificate(CertificateError::OtherMesh { .. }))), "{result:?}");
}
