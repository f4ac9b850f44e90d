//! Tests of bans with several members in one process and real connections on loopback.
use super::*;
use crate::driver::queue;
use crate::store::Store;
use state::BANS_MAX;
use std::sync::OnceLock;
use transport::bulk::REQUEST_BYTES_MAX;
use transport::{Event, Identity, Limits, Options, Reply, Roles};

mod rules;

/// Far more than an exchange on loopback takes; a stalled test fails after this time.
const PATIENCE: Duration = Duration::from_secs(60);

struct Member {
    bans: Arc<Bans>,
    endpoint: Arc<Endpoint>,
    identity: Identity,
    held: MeshCredentials,
    _dir: tempfile::TempDir,
}

impl Member {
    fn start(identity: Identity, held: MeshCredentials) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let own: Arc<OnceLock<Arc<Bans>>> = Arc::default();
        let (on_event, on_request) = (own.clone(), own.clone());
        let options = Options {
            listen: "127.0.0.1:0".parse().unwrap(),
            identity: identity.clone(),
            credentials: Some(held.clone()),
            limits: Limits::default(),
        };
        let sink = move |event: Event| match (event, on_event.get()) {
            (Event::Connected { node, .. }, Some(bans)) => bans.connected(node),
            (Event::Banned(revocation), Some(bans)) => bans.handle_refused(*revocation),
            (_, _) => {}
        };
        let serve = move |from: transport::NodeId, request: bytes::Bytes, reply: Reply| {
            let bans = on_request.get().cloned();
            tokio::task::spawn_blocking(move || {
                let answer = match (bans, BulkRequest::decode(&request)) {
                    (Some(bans), Some(BulkRequest::Bans(exchange))) => bans.answer(from, exchange),
                    (_, _) => Vec::new(),
                };
                if reply.blocking_send(answer.into()) {
                    reply.finish();
                }
            });
        };
        let endpoint = Arc::new(Endpoint::bind(options, sink, serve).unwrap());
        let store = Arc::new(Store::open(dir.path()).unwrap());
        let admission = Arc::new(Admission::new(identity.clone(), held.clone(), store, vec![], false));
        let gossip =
            GossipSocket::spawn("127.0.0.1:0".parse().unwrap(), identity.node_id(), 1, &held.mesh_key, |_, _, _| {});
        let (driver, _) = queue::channel();
        let name = format!("node {}", &identity.peer_id().to_string()[44..]);
        let bans =
            Bans::open(endpoint.clone(), admission, Arc::new(gossip.unwrap()), driver, dir.path().to_owned(), name)
                .unwrap();
        let bans = own.get_or_init(|| bans).clone();
        Self { bans, endpoint, identity, held, _dir: dir }
    }

    fn dial(&self, other: &Member) {
        self.endpoint.connect(other.identity.peer_id(), vec![other.endpoint.local_addr()]);
    }

    fn banned(&self, who: &Member) -> bool {
        self.bans.of(NodeId(who.identity.node_id())).is_some()
    }

    fn key(&self) -> [u8; 32] {
        self.bans.state().key
    }
}

/// A founder and members that it certified.
fn mesh(members: usize) -> Vec<Member> {
    let founder = Identity::generate();
    let root = MeshCredentials::found(&founder, unix_seconds() + 1000);
    let mut all = vec![Member::start(founder.clone(), root.clone())];
    for _ in 0..members {
        let member = Identity::generate();
        let chain = root.issue(&founder, member.peer_id(), Roles::INVITER, unix_seconds() + 1000).unwrap();
        all.push(Member::start(member, MeshCredentials { chain, root_secret: None, ..root.clone() }));
    }
    all
}

async fn until(what: &str, met: impl Fn() -> bool) {
    let begun = Instant::now();
    while !met() {
        assert!(begun.elapsed() < PATIENCE, "timed out waiting for {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// 256 bans by one member exceed a request. They must not prevent other members from receiving the founder's ban of
/// that member, or the new key.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bans_above_64_kib_still_reach_all_members() {
    let nodes = mesh(2);
    let [founder, flooder, third] = nodes.as_slice() else { panic!("three") };
    flooder.dial(founder);
    third.dial(flooder);
    third.dial(founder);
    until("connections", || nodes.iter().all(|node| node.endpoint.peers().len() == 2)).await;

    let peer = || Identity::generate().peer_id();
    let issue = |_| {
        Revocation::issue(&flooder.held, &flooder.identity, peer(), unix_seconds(), ("some name", "flooder")).unwrap()
    };
    let flood = BanState { number: 1, key: [7; 32], revocations: (0..BANS_MAX).map(issue).collect() };
    assert!(flood.encode().len() > REQUEST_BYTES_MAX, "larger than a request");
    flooder.bans.receive(flood);
    until("the flood", || nodes.iter().all(|node| node.bans.state().revocations.len() == BANS_MAX)).await;

    let bans = founder.bans.clone();
    let peer = flooder.identity.peer_id();
    tokio::task::spawn_blocking(move || bans.ban(peer, "flooder")).await.unwrap().unwrap();
    until("the founder's ban at the third node", || third.banned(flooder)).await;
    until("one state and one key", || *third.bans.state() == *founder.bans.state()).await;
    assert_ne!(third.key(), [7; 32]);
    until("the banned node to be disconnected", || {
        third.endpoint.peers().len() == 1 && founder.endpoint.peers().len() == 1
    })
    .await;
    assert_ne!(flooder.key(), third.key(), "the banned node does not get the new key");
    until("the notice at the banned node", || flooder.bans.notice().is_some()).await;
    let notice = flooder.bans.notice().unwrap().to_string();
    assert!(notice.contains("this node was banned") && notice.contains("(the founder)"), "{notice}");

    // A legitimate ban after the flood still takes effect: revocations by a banned member are dropped first.
    let (bans, peer) = (third.bans.clone(), Identity::generate().peer_id());
    tokio::task::spawn_blocking(move || bans.ban(peer, "fourth")).await.unwrap().unwrap();
    let is_banned = || founder.bans.of(NodeId(node_id(&peer))).is_some();
    until("a later ban", || is_banned() && founder.key() == third.key()).await;
}

/// A ban by a member other than the founder: a node that received the key before the ban would send it to the banned
/// node.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_member_banned_by_another_member_does_not_get_the_new_key() {
    let nodes = mesh(3);
    let [founder, member, third, culprit] = nodes.as_slice() else { panic!("four") };
    for (from, to) in [(member, founder), (third, founder), (third, member)] {
        from.dial(to);
    }
    [founder, member, third].into_iter().for_each(|node| culprit.dial(node));
    until("connections", || nodes.iter().all(|node| node.endpoint.peers().len() == 3)).await;
    let old = culprit.key();
    let (bans, peer) = (member.bans.clone(), culprit.identity.peer_id());
    tokio::task::spawn_blocking(move || bans.ban(peer, "culprit")).await.unwrap().unwrap();
    until("one state and one key", || {
        [founder, third].iter().all(|node| *node.bans.state() == *member.bans.state()) && member.key() != old
    })
    .await;
    until("the notice at the banned node", || culprit.bans.notice().is_some()).await;
    assert_eq!(culprit.key(), old);
}

/// A member that was disconnected during a ban receives it with the next connection, also above 64 KiB.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disconnected_member_gets_all_bans_when_it_reconnects() {
    let nodes = mesh(1);
    let [founder, away] = nodes.as_slice() else { panic!("two") };
    let issue = |_| {
        let peer = Identity::generate().peer_id();
        Revocation::issue(&away.held, &away.identity, peer, unix_seconds(), ("", "")).unwrap()
    };
    founder.bans.receive(BanState { number: 5, key: [9; 32], revocations: (0..BANS_MAX).map(issue).collect() });
    away.dial(founder);
    until("all of them", || *away.bans.state() == *founder.bans.state()).await;
    assert_eq!((away.key(), away.bans.state().revocations.len()), ([9; 32], BANS_MAX));
}

/// A clock before the date of a saved ban does not end it: the date is checked only when the ban is received.
#[test]
fn a_saved_ban_survives_a_clock_that_is_set_back() {
    let founder = Identity::generate();
    let root = MeshCredentials::found(&founder, u64::MAX);
    let peer = Identity::generate().peer_id();
    // For a clock at 1970 every date is in the future; this one is in the future of the present clock too.
    let ahead = unix_seconds() + 10 * 365 * 24 * 3600;
    let revocation = Revocation::issue(&root, &founder, peer, ahead, ("", "")).unwrap();
    assert!(revocation.is_from_the_future(unix_seconds()));
    let dir = tempfile::tempdir().unwrap();
    BanState { number: 1, key: root.mesh_key, revocations: vec![revocation.clone()] }
        .save(dir.path(), root.mesh)
        .unwrap();
    let kept = BanState::load(dir.path(), &root).unwrap();
    assert_eq!(kept.banned(root.mesh).into_keys().collect::<Vec<_>>(), [peer], "saved, so in force");
}

/// After two rotations within a second, the newest key is used for encryption.
#[tokio::test]
async fn the_newest_key_is_used_after_quick_rotations() {
    let key = [1; 32];
    let gossip =
        |node: u8| GossipSocket::spawn("127.0.0.1:0".parse().unwrap(), [node; 16], 1, &key, |_, _, _| {}).unwrap();
    let sender = Arc::new(gossip(1));
    let (deliver, mut payloads) = tokio::sync::mpsc::unbounded_channel();
    let newest = [3; 32];
    let receiver = GossipSocket::spawn("127.0.0.1:0".parse().unwrap(), [2; 16], 1, &newest, move |_, _, payload| {
        drop(deliver.send(payload))
    })
    .unwrap();
    let (keys, follow) = watch::channel(key);
    let task = tokio::spawn(seal(sender.clone(), follow));
    keys.send_replace([2; 32]);
    tokio::time::sleep(SEAL_AFTER / 2).await;
    keys.send_replace(newest);
    let received = tokio::time::timeout(PATIENCE, async {
        loop {
            sender.send(&[2; 16], receiver.local_addr(), b"here").unwrap();
            if let Ok(payload) = payloads.try_recv() {
                return payload;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    });
    assert_eq!(received.await.unwrap(), b"here");
    drop(keys);
    task.await.unwrap();
}
