//! Three members in one process, with real connections on loopback: bans reach all of them, however many there are.
use super::*;
use crate::driver;
use crate::store::Store;
use state::BANS_MAX;
use std::sync::OnceLock;
use transport::bulk::REQUEST_BYTES_MAX;
use transport::{Event, Identity, Limits, Options, Reply, Roles};

/// Far more than an exchange on loopback takes, so that a test that hangs fails.
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
        let (told, asked) = (own.clone(), own.clone());
        let options = Options {
            listen: "127.0.0.1:0".parse().unwrap(),
            identity: identity.clone(),
            credentials: Some(held.clone()),
            limits: Limits::default(),
        };
        let sink = move |event: Event| match (event, told.get()) {
            (Event::Connected { node, .. }, Some(bans)) => bans.connected(node),
            (Event::Banned(revocation), Some(bans)) => bans.handle_refused(*revocation),
            (_, _) => {}
        };
        let serve = move |from: transport::NodeId, request: bytes::Bytes, reply: Reply| {
            let bans = asked.get().cloned();
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
        let (driver, _) = driver::queue();
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
        assert!(begun.elapsed() < PATIENCE, "it does not come: {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// 256 bans by one member are more than a request may hold. They must not keep the founder's ban of that member, or the key
/// that comes with it, from any other.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bans_beyond_64_kib_still_reach_everybody() {
    let nodes = mesh(2);
    let [founder, flooder, third] = nodes.as_slice() else { panic!("three") };
    flooder.dial(founder);
    third.dial(flooder);
    third.dial(founder);
    until("connections", || nodes.iter().all(|node| node.endpoint.peers().len() == 2)).await;

    let out = || Identity::generate().peer_id();
    let say = |_| {
        Revocation::issue(&flooder.held, &flooder.identity, out(), unix_seconds(), ("some name", "flooder")).unwrap()
    };
    let flood = State { number: 1, key: [7; 32], said: (0..BANS_MAX).map(say).collect() };
    assert!(flood.encode().len() > REQUEST_BYTES_MAX, "more than one request holds");
    flooder.bans.hear(flood);
    until("the flood", || nodes.iter().all(|node| node.bans.state().said.len() == BANS_MAX)).await;

    let said = founder.bans.clone();
    let peer = flooder.identity.peer_id();
    tokio::task::spawn_blocking(move || said.ban(peer, "flooder")).await.unwrap().unwrap();
    until("the founder's ban at the third node", || third.banned(flooder)).await;
    until("one state and one key", || *third.bans.state() == *founder.bans.state()).await;
    assert_ne!(third.key(), [7; 32]);
    until("the banned is disconnected", || third.endpoint.peers().len() == 1 && founder.endpoint.peers().len() == 1)
        .await;
    assert_ne!(flooder.key(), third.key(), "the banned does not get the new key");
    until("the banned knows it", || flooder.bans.notice().is_some()).await;
    let notice = flooder.bans.notice().unwrap().to_string();
    assert!(notice.contains("this node was banned") && notice.contains("(the founder)"), "{notice}");

    // An honest ban after the flood still holds: revocations of a banned member give way.
    let (said, peer) = (third.bans.clone(), Identity::generate().peer_id());
    tokio::task::spawn_blocking(move || said.ban(peer, "fourth")).await.unwrap().unwrap();
    let heard = || founder.bans.of(NodeId(node_id(&peer))).is_some();
    until("a later ban", || heard() && founder.key() == third.key()).await;
}

/// The key of a ban by a member other than the founder: a node that took it before it knew the ban would pass it on to the
/// banned.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_member_that_another_member_bans_does_not_get_the_new_key() {
    let nodes = mesh(3);
    let [founder, member, third, culprit] = nodes.as_slice() else { panic!("four") };
    for (from, to) in [(member, founder), (third, founder), (third, member)] {
        from.dial(to);
    }
    [founder, member, third].into_iter().for_each(|node| culprit.dial(node));
    until("connections", || nodes.iter().all(|node| node.endpoint.peers().len() == 3)).await;
    let old = culprit.key();
    let (said, peer) = (member.bans.clone(), culprit.identity.peer_id());
    tokio::task::spawn_blocking(move || said.ban(peer, "culprit")).await.unwrap().unwrap();
    until("one state and one key", || {
        [founder, third].iter().all(|node| *node.bans.state() == *member.bans.state()) && member.key() != old
    })
    .await;
    until("the banned knows it", || culprit.bans.notice().is_some()).await;
    assert_eq!(culprit.key(), old);
}

/// A member that was not connected during a ban gets it with the next connection, beyond 64 KiB too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_member_that_was_away_gets_all_bans_when_it_connects() {
    let nodes = mesh(1);
    let [founder, away] = nodes.as_slice() else { panic!("two") };
    let say = |_| {
        let out = Identity::generate().peer_id();
        Revocation::issue(&away.held, &away.identity, out, unix_seconds(), ("", "")).unwrap()
    };
    founder.bans.hear(State { number: 5, key: [9; 32], said: (0..BANS_MAX).map(say).collect() });
    away.dial(founder);
    until("all of them", || *away.bans.state() == *founder.bans.state()).await;
    assert_eq!((away.key(), away.bans.state().said.len()), ([9; 32], BANS_MAX));
}

/// A clock that stands before the day of a ban does not end it: the date was checked when the ban was first heard.
#[test]
fn a_ban_that_was_heard_outlives_a_clock_that_falls_back() {
    let founder = Identity::generate();
    let root = MeshCredentials::found(&founder, u64::MAX);
    let out = Identity::generate().peer_id();
    // From the point of view of a clock at 1970, every date is far ahead; this one is for the present clock too.
    let ahead = unix_seconds() + 10 * 365 * 24 * 3600;
    let said = Revocation::issue(&root, &founder, out, ahead, ("", "")).unwrap();
    assert!(said.is_from_the_future(unix_seconds()));
    let dir = tempfile::tempdir().unwrap();
    State { number: 1, key: root.mesh_key, said: vec![said.clone()] }.save(dir.path(), root.mesh).unwrap();
    let kept = State::load(dir.path(), &root).unwrap();
    assert_eq!(kept.out(root.mesh).into_keys().collect::<Vec<_>>(), [out], "kept, so in force");
}

/// Two changes of the key within a second: the newest one seals in the end, at every node.
#[tokio::test]
async fn the_newest_key_seals_however_quickly_keys_follow_each_other() {
    let key = [1; 32];
    let gossip =
        |node: u8| GossipSocket::spawn("127.0.0.1:0".parse().unwrap(), [node; 16], 1, &key, |_, _, _| {}).unwrap();
    let sender = Arc::new(gossip(1));
    let (tell, mut told) = tokio::sync::mpsc::unbounded_channel();
    let newest = [3; 32];
    let receiver = GossipSocket::spawn("127.0.0.1:0".parse().unwrap(), [2; 16], 1, &newest, move |_, _, payload| {
        drop(tell.send(payload))
    })
    .unwrap();
    let (keys, follow) = watch::channel(key);
    let task = tokio::spawn(seal(sender.clone(), follow));
    keys.send_replace([2; 32]);
    tokio::time::sleep(SEAL_AFTER / 2).await;
    keys.send_replace(newest);
    let heard = tokio::time::timeout(PATIENCE, async {
        loop {
            sender.send(&[2; 16], receiver.local_addr(), b"here").unwrap();
            if let Ok(payload) = told.try_recv() {
                return payload;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    });
    assert_eq!(heard.await.unwrap(), b"here");
    drop(keys);
    task.await.unwrap();
}
