//! Certificate renewal while a node runs: any connected member that may invite and has a longer lifetime issues a new
//! certificate. Founders renew their own with the mesh's root key.
//!
//! A request needs no new proof: the connection is authenticated by the current certificate. The request includes the
//! current chain, so that the new one has the same rights and no more.
use crate::admission::{self, Admission, MEMBERSHIP};
use crate::bulk::BulkRequest;
use crate::clock::unix_seconds;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use transport::certificate::CHAIN_BYTES_MAX;
use transport::{Chain, Endpoint, Identity, MeshCredentials, NodeId, PeerId, node_id};

/// Renew when the remaining lifetime is below this.
const EXTEND_SECONDS: u64 = 365 * DAY;
/// Warn the user when the remaining lifetime is below this, because renewal has failed for months.
const WARN_SECONDS: u64 = 60 * DAY;
/// Smallest gain: a new certificate means new connections to all members.
const GAIN_SECONDS_MIN: u64 = 30 * DAY;
const DAY: u64 = 24 * 3600;
/// Delay of the first check after the start: time to connect to members.
const FIRST: Duration = Duration::from_secs(30);
/// Interval of later checks.
const AGAIN: Duration = Duration::from_secs(6 * 3600);

/// The task that renews this node's certificate; aborted on drop.
pub(crate) struct Renewal(tokio::task::JoinHandle<()>);

impl Renewal {
    /// Spawns the task.
    pub(crate) fn watch(endpoint: Arc<Endpoint>, admission: Arc<Admission>, data_dir: PathBuf) -> Self {
        Self(tokio::spawn(async move {
            tokio::time::sleep(FIRST).await;
            loop {
                let held = admission.credentials();
                if seconds_left(&held) < EXTEND_SECONDS {
                    match renewed(&endpoint, &held, admission.identity()).await {
                        // Take only the chain: the mesh key may have been rotated meanwhile.
                        Some(MeshCredentials { chain, .. }) => {
                            let now = admission.credentials();
                            keep(&endpoint, &admission, &data_dir, MeshCredentials { chain, ..(*now).clone() });
                        }
                        None => warn(&held),
                    }
                }
                tokio::time::sleep(AGAIN).await;
            }
        }))
    }
}

impl Renewal {
    /// Handle of the task, to check that it runs.
    pub(crate) fn task(&self) -> tokio::task::AbortHandle {
        self.0.abort_handle()
    }
}

impl Drop for Renewal {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Renews with the root key, or asks connected members until one answers with a longer certificate.
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
        return tracing::warn!("the renewed membership cannot be saved, so it is not used: {e}");
    }
    tracing::info!(
        "the membership of this node was renewed and is valid for {} days",
        seconds_left(&credentials) / DAY
    );
    endpoint.set_credentials(credentials.clone());
    admission.set_credentials(credentials);
}

fn warn(held: &MeshCredentials) {
    if let Some(advice) = advice(held.chain.expiry()) {
        tracing::warn!("{advice}");
    }
}

/// Answers a renewal request for the chain `theirs`: a status byte, then the new chain.
pub(crate) fn answer(admission: &Admission, from: NodeId, theirs: &Chain) -> Vec<u8> {
    let chain = grant(&admission.credentials(), admission.identity(), from, theirs, unix_seconds());
    chain.map_or_else(|| vec![0], |chain| [&[1], chain.encode().as_slice()].concat())
}

fn grant(held: &MeshCredentials, me: &Identity, from: NodeId, theirs: &Chain, now: u64) -> Option<Chain> {
    let subject = theirs.own()?.subject;
    let roles = theirs.verify(held.mesh, subject, now).ok().filter(|_| node_id(&subject) == from)?;
    held.issue(me, subject, roles, now + MEMBERSHIP.as_secs()).ok()
}

/// The credentials with the chain of an answer, if it is valid and gains at least [`GAIN_SECONDS_MIN`].
fn accept(held: &MeshCredentials, me: PeerId, answer: &[u8], now: u64) -> Option<MeshCredentials> {
    let chain = Chain::decode(answer.strip_prefix(&[1])?).ok()?;
    chain.verify(held.mesh, me, now).ok()?;
    let better = chain.expiry() >= held.chain.expiry() + GAIN_SECONDS_MIN;
    better.then(|| MeshCredentials { chain, ..held.clone() })
}

/// Renews a founder's credentials with the root key, if due.
pub(crate) fn renew_founder(held: &MeshCredentials, me: &Identity) -> Option<MeshCredentials> {
    if seconds_left(held) >= EXTEND_SECONDS {
        return None;
    }
    held.renew_founder(me, unix_seconds() + MEMBERSHIP.as_secs())
}

/// Remaining lifetime of the credentials, in seconds.
pub(crate) fn seconds_left(held: &MeshCredentials) -> u64 {
    held.chain.expiry().saturating_sub(unix_seconds())
}

/// A warning for the user about a membership that expires at `expiry`, if that is less than 60 days away.
pub(crate) fn advice(expiry: u64) -> Option<String> {
    let left = expiry.saturating_sub(unix_seconds());
    (left < WARN_SECONDS).then(|| {
        format!(
            "this node's membership expires in {} days, and no reachable member could renew it: start a member whose membership \
             is valid longer (the founder's always is), or join again with a ticket from such a member (`meshnode invite`)",
            left / DAY
        )
    })
}

/// The error of a node that does not start because its membership has expired.
pub(crate) fn expired(data_dir: &Path) -> String {
    format!(
        "the membership in {} has expired: get a ticket from a member (`meshnode invite`) and start with `meshnode join \
         TICKET`; name, identity and models are kept",
        data_dir.display()
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use transport::Roles;

    /// A founder, and a member whose membership expires in a month.
    fn two(roles: Roles) -> (Identity, MeshCredentials, Identity, MeshCredentials) {
        let (founder, member) = (Identity::generate(), Identity::generate());
        let mesh = MeshCredentials::found(&founder, unix_seconds() + MEMBERSHIP.as_secs());
        let chain = mesh.issue(&founder, member.peer_id(), roles, unix_seconds() + WARN_SECONDS / 2).unwrap();
        let held = MeshCredentials { chain, root_secret: None, ..mesh.clone() };
        (founder, mesh, member, held)
    }

    #[test]
    fn a_member_is_renewed_with_the_same_rights() {
        for roles in [Roles::MEMBER, Roles::INVITER] {
            let (founder, mesh, member, held) = two(roles);
            assert!(advice(held.chain.expiry()).is_some());
            let from = node_id(&member.peer_id());
            let chain = grant(&mesh, &founder, from, &held.chain, unix_seconds()).expect("a longer chain");
            let answer = [&[1], chain.encode().as_slice()].concat();
            let renewed = accept(&held, member.peer_id(), &answer, unix_seconds()).expect("a longer chain");
            assert!(seconds_left(&renewed) > EXTEND_SECONDS && advice(renewed.chain.expiry()).is_none());
            assert_eq!(renewed.chain.verify(mesh.mesh, member.peer_id(), unix_seconds()), Ok(roles));
            assert!(accept(&renewed, member.peer_id(), &answer, unix_seconds()).is_none(), "not longer than before");
        }
    }

    #[test]
    fn renewal_is_denied_for_other_chains_expired_members_and_other_meshes() {
        let (founder, mesh, member, held) = two(Roles::INVITER);
        let (now, from) = (unix_seconds(), node_id(&member.peer_id()));
        let stranger = node_id(&Identity::generate().peer_id());
        assert!(grant(&mesh, &founder, stranger, &held.chain, now).is_none(), "another node's chain");
        assert!(grant(&mesh, &founder, from, &held.chain, now + WARN_SECONDS).is_none(), "expired");
        let (_, other, _, _) = two(Roles::INVITER);
        assert!(grant(&other, &founder, from, &held.chain, now).is_none(), "another mesh");
        let by_member = grant(&held, &member, node_id(&founder.peer_id()), &mesh.chain, now).unwrap();
        assert!(by_member.expiry() <= held.chain.expiry(), "never longer than the issuer's");
    }

    #[test]
    fn a_founder_renews_itself() {
        let founder = Identity::generate();
        let ended = MeshCredentials::found(&founder, unix_seconds() - 5);
        assert_eq!(seconds_left(&ended), 0);
        let renewed = renew_founder(&ended, &founder).unwrap();
        assert!(seconds_left(&renewed) > EXTEND_SECONDS);
        assert!(renew_founder(&renewed, &founder).is_none(), "not due yet");
    }
}
