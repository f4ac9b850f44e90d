//! Memberships end, and are extended while a node runs: by any member that it is connected to, may invite, and lasts
//! longer. Founders extend their own with the mesh's root key.
//!
//! A member proves nothing new when it asks: it is connected by its certificate, and sends the chain along so that the
//! new one gives it the same rights and no more.
use crate::admission::{self, Admission, MEMBERSHIP};
use crate::bulk::BulkRequest;
use crate::handle::unix_seconds;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use transport::certificate::CHAIN_BYTES_MAX;
use transport::{Chain, Endpoint, Identity, MeshCredentials, NodeId, PeerId, node_id};

/// A membership with less than this left is to be extended.
const EXTEND_SECONDS: u64 = 365 * DAY;
/// People are told from here on: something kept it from being extended.
const WARN_SECONDS: u64 = 60 * DAY;
/// A new chain that lasts hardly longer is not worth a new connection to everybody.
const GAIN_SECONDS_MIN: u64 = 30 * DAY;
const DAY: u64 = 24 * 3600;
/// How soon after the start it is looked at first: time to connect.
const FIRST: Duration = Duration::from_secs(30);
/// How often afterwards.
const AGAIN: Duration = Duration::from_secs(6 * 3600);

/// The task that sees to this node's own membership; it ends with this.
pub struct Renewal(tokio::task::JoinHandle<()>);

impl Renewal {
    /// Begins to watch.
    pub fn watch(endpoint: Arc<Endpoint>, admission: Arc<Admission>, data_dir: PathBuf) -> Self {
        Self(tokio::spawn(async move {
            tokio::time::sleep(FIRST).await;
            loop {
                let held = admission.credentials();
                if seconds_left(&held) < EXTEND_SECONDS {
                    match renewed(&endpoint, &held, admission.identity()).await {
                        // The key of the mesh may have changed while others were asked.
                        Some(MeshCredentials { chain, .. }) => {
                            let now = admission.credentials();
                            keep(&endpoint, &admission, &data_dir, MeshCredentials { chain, ..(*now).clone() });
                        }
                        None => tell(&held),
                    }
                }
                tokio::time::sleep(AGAIN).await;
            }
        }))
    }
}

impl Renewal {
    /// The task, to see whether it runs.
    pub fn task(&self) -> tokio::task::AbortHandle {
        self.0.abort_handle()
    }
}

impl Drop for Renewal {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// From the root key, or from the first connected member that gives something better.
async fn renewed(endpoint: &Endpoint, held: &MeshCredentials, me: &Identity) -> Option<MeshCredentials> {
    if let Some(renewed) = renew_founder(held, me) {
        return Some(renewed);
    }
    let request = BulkRequest::Renewal(held.chain.clone()).encode();
    for peer in endpoint.peers() {
        let Ok(response) = endpoint.request(peer.node, request.clone().into()).await else { continue };
        let Ok(answer) = response.all(CHAIN_BYTES_MAX + 1).await else { continue };
        if let Some(renewed) = accept(held, me.peer_id(), &answer, unix_seconds()) {
            return Some(renewed);
        }
    }
    None
}

fn keep(endpoint: &Endpoint, admission: &Admission, data_dir: &Path, credentials: MeshCredentials) {
    if let Err(e) = admission::save(data_dir, &credentials) {
        return tracing::warn!("the membership was extended but is not kept: {e}");
    }
    tracing::info!("the membership of this node was extended by {} days", seconds_left(&credentials) / DAY);
    endpoint.set_credentials(credentials.clone());
    admission.set_credentials(credentials);
}

fn tell(held: &MeshCredentials) {
    if let Some(advice) = advice(held.chain.expiry()) {
        tracing::warn!("{advice}");
    }
}

/// Answers a member that asks for a longer membership than this one: a status byte, then its new chain.
pub fn answer(admission: &Admission, from: NodeId, theirs: &Chain) -> Vec<u8> {
    let chain = grant(&admission.credentials(), admission.identity(), from, theirs, unix_seconds());
    chain.map_or_else(|| vec![0], |chain| [&[1], chain.encode().as_slice()].concat())
}

fn grant(held: &MeshCredentials, me: &Identity, from: NodeId, theirs: &Chain, now: u64) -> Option<Chain> {
    let subject = theirs.own()?.subject;
    let roles = theirs.verify(held.mesh, subject, now).ok().filter(|_| node_id(&subject) == from)?;
    held.issue(me, subject, roles, now + MEMBERSHIP.as_secs()).ok()
}

/// The credentials with the chain of an answer, if it is sound and lasts longer.
fn accept(held: &MeshCredentials, me: PeerId, answer: &[u8], now: u64) -> Option<MeshCredentials> {
    let chain = Chain::decode(answer.strip_prefix(&[1])?).ok()?;
    chain.verify(held.mesh, me, now).ok()?;
    let better = chain.expiry() >= held.chain.expiry() + GAIN_SECONDS_MIN;
    better.then(|| MeshCredentials { chain, ..held.clone() })
}

/// The founder's credentials extended, if these are a founder's and it is time.
pub fn renew_founder(held: &MeshCredentials, me: &Identity) -> Option<MeshCredentials> {
    if seconds_left(held) >= EXTEND_SECONDS {
        return None;
    }
    held.renew_founder(me, unix_seconds() + MEMBERSHIP.as_secs())
}

/// How long a membership still lasts.
pub fn seconds_left(held: &MeshCredentials) -> u64 {
    held.chain.expiry().saturating_sub(unix_seconds())
}

/// What to tell people about a membership that ends at `expiry`, once that is near.
pub fn advice(expiry: u64) -> Option<String> {
    let left = expiry.saturating_sub(unix_seconds());
    (left < WARN_SECONDS).then(|| {
        format!(
            "this node's membership ends in {} days and no member in reach could extend it: start a member that lasts \
             longer (the founder always does), or join again with a ticket of one (`meshnode invite` there)",
            left / DAY
        )
    })
}

/// Why a node does not start whose membership is over.
pub fn over(data_dir: &Path) -> String {
    format!(
        "the membership in {} is over: get a ticket from a member (`meshnode invite`) and start with `meshnode join \
         TICKET`; name, key and models stay",
        data_dir.display()
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use transport::Roles;

    /// A founder, and a member whose membership ends in a month.
    fn two(roles: Roles) -> (Identity, MeshCredentials, Identity, MeshCredentials) {
        let (founder, member) = (Identity::generate(), Identity::generate());
        let mesh = MeshCredentials::found(&founder, unix_seconds() + MEMBERSHIP.as_secs());
        let chain = mesh.issue(&founder, member.peer_id(), roles, unix_seconds() + WARN_SECONDS / 2).unwrap();
        let held = MeshCredentials { chain, root_secret: None, ..mesh.clone() };
        (founder, mesh, member, held)
    }

    #[test]
    fn a_member_is_extended_with_the_rights_it_has() {
        for roles in [Roles::MEMBER, Roles::INVITER] {
            let (founder, mesh, member, held) = two(roles);
            assert!(advice(held.chain.expiry()).is_some());
            let from = node_id(&member.peer_id());
            let chain = grant(&mesh, &founder, from, &held.chain, unix_seconds()).expect("a longer chain");
            let answer = [&[1], chain.encode().as_slice()].concat();
            let renewed = accept(&held, member.peer_id(), &answer, unix_seconds()).expect("a better one");
            assert!(seconds_left(&renewed) > EXTEND_SECONDS && advice(renewed.chain.expiry()).is_none());
            assert_eq!(renewed.chain.verify(mesh.mesh, member.peer_id(), unix_seconds()), Ok(roles));
            assert!(accept(&renewed, member.peer_id(), &answer, unix_seconds()).is_none(), "no better than before");
        }
    }

    #[test]
    fn nobody_is_extended_who_is_not_who_asks_or_is_over() {
        let (founder, mesh, member, held) = two(Roles::INVITER);
        let (now, from) = (unix_seconds(), node_id(&member.peer_id()));
        let stranger = node_id(&Identity::generate().peer_id());
        assert!(grant(&mesh, &founder, stranger, &held.chain, now).is_none(), "somebody else's chain");
        assert!(grant(&mesh, &founder, from, &held.chain, now + WARN_SECONDS).is_none(), "it is over");
        let (_, other, _, _) = two(Roles::INVITER);
        assert!(grant(&other, &founder, from, &held.chain, now).is_none(), "another mesh");
        let by_member = grant(&held, &member, node_id(&founder.peer_id()), &mesh.chain, now).unwrap();
        assert!(by_member.expiry() <= held.chain.expiry(), "never longer than the issuer's");
    }

    #[test]
    fn a_founder_extends_itself() {
        let founder = Identity::generate();
        let ended = MeshCredentials::found(&founder, unix_seconds() - 5);
        assert_eq!(seconds_left(&ended), 0);
        let renewed = renew_founder(&ended, &founder).unwrap();
        assert!(seconds_left(&renewed) > EXTEND_SECONDS);
        assert!(renew_founder(&renewed, &founder).is_none(), "not before it is time");
    }
}
