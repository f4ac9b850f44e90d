//! The text that a banned node shows its user.
use crate::calendar::date_time;
use std::collections::BTreeMap;
use transport::{MeshCredentials, PeerId, Revocation};

/// Why a node is a member no more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BanNotice {
    text: String,
    /// Not the node itself but a member that its membership runs through.
    pub(crate) sponsor: bool,
}

impl BanNotice {
    /// The notice for the node `me`, if one of these bans concerns it.
    pub(super) fn of(me: PeerId, held: &MeshCredentials, out: &BTreeMap<PeerId, Revocation>) -> Option<Self> {
        let mesh: String = held.mesh.0[..4].iter().map(|b| format!("{b:02x}")).collect();
        if let Some(ban) = out.get(&me) {
            let text = format!(
                "this node was banned from mesh {mesh} on {} by {}: members no longer talk to it, and the key in its data \
                 directory stays banned. To take part again, ask a member for a ticket and join with a new identity: \
                 meshnode join TICKET --data-dir NEW",
                date_time(ban.at),
                issuer(ban)
            );
            return Some(Self { text, sponsor: false });
        }
        let (sponsor, ban) = held.chain.peers().find_map(|peer| Some((peer, out.get(&peer)?)))?;
        let text = format!(
            "this node is no longer a member of mesh {mesh}: {}, which its membership came from, was banned on {} by {}. To \
             take part again, ask another member for a ticket: meshnode join TICKET (name, key and models stay)",
            name(&ban.banned_name, sponsor),
            date_time(ban.at),
            issuer(ban)
        );
        Some(Self { text, sponsor: true })
    }
}

impl std::fmt::Display for BanNotice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.text)
    }
}

/// Name of the issuer.
fn issuer(ban: &Revocation) -> String {
    match ban.issuer() {
        None if ban.issuer_name.is_empty() => "the founder".into(),
        None => format!("{} (the founder)", ban.issuer_name),
        Some(issuer) => name(&ban.issuer_name, issuer),
    }
}

fn name(name: &str, peer: PeerId) -> String {
    if name.is_empty() { peer.to_string() } else { name.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use transport::{Identity, Roles};

    #[test]
    fn a_banned_node_says_by_whom_when_and_what_to_do() {
        let (founder, member, guest) = (Identity::generate(), Identity::generate(), Identity::generate());
        let root = MeshCredentials::found(&founder, u64::MAX);
        let hold = |chain| MeshCredentials { chain, root_secret: None, ..root.clone() };
        let held = hold(root.issue(&founder, member.peer_id(), Roles::INVITER, u64::MAX).unwrap());
        let guests = hold(held.issue(&member, guest.peer_id(), Roles::INVITER, u64::MAX).unwrap());
        let ban = Revocation::issue(&root, &founder, member.peer_id(), 951_782_400, ("laptop", "desk")).unwrap();
        let out = BTreeMap::from([(member.peer_id(), ban)]);
        let own = BanNotice::of(member.peer_id(), &held, &out).unwrap();
        for part in ["banned from mesh", "2000-02-29 00:00 UTC", "by desk (the founder)", "--data-dir NEW"] {
            assert!(own.to_string().contains(part), "{own}");
        }
        assert!(!own.sponsor);
        let through = BanNotice::of(guest.peer_id(), &guests, &out).unwrap();
        for part in ["laptop, which its membership came from", "by desk (the founder)", "meshnode join TICKET"] {
            assert!(through.to_string().contains(part), "{through}");
        }
        assert!(through.sponsor);
        assert_eq!(BanNotice::of(founder.peer_id(), &root, &out), None);
    }
}
