//! Tests of the right to ban, of what a member accepts from others, and of what it recalls after a restart.
use super::*;

fn peer() -> PeerId {
    Identity::generate().peer_id()
}

/// A member with a certificate of these roles, which does not expire.
fn member(roles: Roles) -> Member {
    let founder = Identity::generate();
    let root = MeshCredentials::found(&founder, u64::MAX);
    let identity = Identity::generate();
    let chain = root.issue(&founder, identity.peer_id(), roles, u64::MAX).unwrap();
    Member::start(identity, MeshCredentials { chain, root_secret: None, ..root })
}

impl Member {
    fn revoke(&self, banned: PeerId, at: u64) -> BanState {
        let revocation = Revocation::issue(&self.held, &self.identity, banned, at, ("", "")).unwrap();
        BanState { number: 0, key: [0; 32], revocations: vec![revocation] }
    }
}

#[tokio::test]
async fn a_node_does_not_ban_itself() {
    let member = member(Roles::INVITER);
    let error = member.bans.ban(member.identity.peer_id(), "me").unwrap_err();
    assert!(matches!(&error, NodeError::Invalid(what) if what.contains("meshnode leave")), "{error}");
    assert!(member.bans.notice().is_none() && member.bans.state().revocations.is_empty());
}

#[tokio::test]
async fn a_member_without_the_right_to_invite_does_not_ban() {
    let member = member(Roles::MEMBER);
    let (key, guest) = (member.key(), peer());
    let error = member.bans.ban(guest, "guest").unwrap_err();
    assert!(matches!(error, NodeError::Unauthorised(_)), "{error}");
    assert_eq!((member.key(), member.bans.of(NodeId(node_id(&guest)))), (key, None));
}

#[tokio::test]
async fn a_ban_rotates_the_key_and_is_recalled_after_a_restart() {
    let member = member(Roles::INVITER);
    let (before, guest) = (member.key(), peer());
    member.bans.ban(guest, "guest").unwrap();
    let after = member.key();
    assert_ne!(after, before);
    assert_eq!(member.bans.of(NodeId(node_id(&guest))).map(|ban| ban.banned_name), Some("guest".to_owned()));
    assert_eq!(member.bans.admission.credentials().mesh_key, after, "newcomers get the new key");
    let (held, notice) = restore(member._dir.path(), member.identity.peer_id(), member.held.clone()).unwrap();
    assert_eq!((held.mesh_key, notice), (after, None));
    // The banned node recalls that it was banned.
    let (_, notice) = restore(member._dir.path(), guest, member.held.clone()).unwrap();
    assert!(notice.is_some_and(|notice| notice.to_string().contains("was banned")));
}

#[tokio::test]
async fn each_ban_has_a_key_of_its_own() {
    let member = member(Roles::INVITER);
    let keys = [0; 3].map(|_| {
        member.bans.ban(peer(), "").unwrap();
        let number = member.bans.state().number;
        (number, member.key())
    });
    assert_eq!(keys.map(|(number, _)| number), [1, 2, 3]);
    assert!(keys[0].1 != keys[1].1 && keys[1].1 != keys[2].1);
}

#[tokio::test]
async fn revocations_from_the_future_are_not_accepted() {
    let member = member(Roles::INVITER);
    let guest = peer();
    let week = 7 * 24 * 3600;
    assert_eq!(member.bans.merge(member.revoke(guest, unix_seconds() + week)).unwrap(), None);
    assert_eq!(member.bans.of(NodeId(node_id(&guest))), None);
    assert!(member.bans.merge(member.revoke(guest, unix_seconds())).unwrap().is_some());
}

#[tokio::test]
async fn revocations_of_another_mesh_are_not_accepted() {
    let (member, stranger) = (member(Roles::INVITER), member(Roles::INVITER));
    let ban = stranger.revoke(member.identity.peer_id(), unix_seconds());
    assert_eq!(member.bans.merge(ban).unwrap(), None);
    assert!(member.bans.notice().is_none());
}

#[tokio::test]
async fn a_known_ban_changes_nothing_when_it_is_received_again() {
    let member = member(Roles::INVITER);
    let ban = member.revoke(peer(), unix_seconds());
    assert!(member.bans.merge(ban.clone()).unwrap().is_some());
    let state = member.bans.state().clone();
    assert_eq!(member.bans.merge(ban).unwrap(), None, "no exchange with all members follows");
    assert_eq!(*member.bans.state(), state);
}

#[tokio::test]
async fn an_exchange_between_equal_states_needs_no_answer() {
    let member = member(Roles::INVITER);
    let same = Exchange::new(&member.bans.state(), BACK);
    assert!(member.bans.answer([9; 16], same).is_empty());
    member.bans.ban(peer(), "").unwrap();
    let answer = member.bans.answer([9; 16], Exchange::new(&BanState::default(), BACK));
    assert_eq!(BanState::decode(&answer).as_ref(), Some(&*member.bans.state()), "the whole state, with the key");
}

#[tokio::test]
async fn the_head_of_an_exchange_is_merged_before_the_answer() {
    let member = member(Roles::INVITER);
    let guest = peer();
    let news = Exchange { kind: BACK, digest: [0; 32], head: member.revoke(guest, unix_seconds()) };
    let answer = member.bans.answer([9; 16], news);
    assert!(BanState::decode(&answer).is_some_and(|state| state.revocations.len() == 1));
    assert!(member.bans.of(NodeId(node_id(&guest))).is_some());
}

#[tokio::test]
async fn an_exchange_is_repeated_once_for_all_changes_meanwhile() {
    let member = member(Roles::INVITER);
    let node = [9; 16];
    member.bans.exchanging().insert(node, false);
    member.bans.exchange(node, NEWS);
    member.bans.exchange(node, NEWS);
    assert!(member.bans.must_repeat(&node));
    assert!(!member.bans.must_repeat(&node) && member.bans.exchanging().is_empty());
    assert!(!member.bans.must_repeat(&[8; 16]), "none runs");
}

#[tokio::test]
async fn a_node_that_was_rejected_with_a_revocation_knows_why() {
    let (banned, issuer) = (member(Roles::INVITER), mesh(1));
    let [founder, guest] = issuer.as_slice() else { panic!("two") };
    let ban = founder.revoke(guest.identity.peer_id(), unix_seconds()).revocations.remove(0);
    let key = guest.key();
    guest.bans.handle_refused(ban.clone());
    assert!(guest.bans.notice().is_some_and(|notice| !notice.sponsor));
    assert_eq!(guest.key(), key);
    banned.bans.handle_refused(ban);
    assert!(banned.bans.notice().is_none(), "the revocation is of another mesh");
}
