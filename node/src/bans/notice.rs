//! The notice that a banned node shows its user.
use crate::calendar::date_time;
use std::collections::BTreeMap;
use transport::{MeshCredentials, PeerId, Revocation};

/// Why a node is no longer a member.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BanNotice {
    text: String,
    /// The banned node is not this node, but a member in its certificate chain.
    pub(crate) sponsor: bool,
}

impl BanNotice {
    /// The notice for the node `me`, if one of the `banned` nodes is it or in its certificate chain.
    pub(super) fn of(me: PeerId, held: &MeshCredentials, banned: &BTreeMap<PeerId, Revocation>) -> Option<Self> {
        let mesh: String = held.mesh.0[..4].iter().map(|b| format!("{b:02x}")).collect();
        if let Some(ban) = banned.get(&me) {
            let text = format!(
                "this node was banned from mesh {mesh} on {} by {}: members reject its connections, and the identity in its data \
                 directory stays banned. To rejoin, get a ticket from a member and join with a new identity: \
                 meshnode join TICKET --data-dir NEW",
                date_time(ban.at),
                issuer(ban)
            );
            return Some(Self { text, sponsor: false });
        }
        let (sponsor, ban) = held.chain.peers().find_map(|peer| Some((peer, banned.get(&peer)?)))?;
        let text = format!(
            "this node is no longer a member of mesh {mesh}: {}, which its membership depends on, was banned on {} by {}. To \
             rejoin, get a ticket from another member: meshnode join TICKET (name, identity and models are kept)",
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

/// Display name of the issuer.
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
    fn the_notice_has_issuer_date_and_next_step() {
        let (founder, member, guest) = (Identity::generate(), Identity::generate(), Identity::generate());
        let root = MeshCredentials::found(&founder, u64::MAX);
        let hold = |chain| MeshCredentials { chain, root_secret: None, ..root.clone() };
        let held = hold(root.issue(&founder, member.peer_id(), Roles::INVITER, u64::MAX).unwrap());
        let guests = hold(held.issue(&member, guest.peer_id(), Roles::INVITER, u64::MAX).unwrap());
        let ban = Revocation::issue(&root, &founder, member.peer_id(), 951_782_400, ("laptop", "desk")).unwrap();
        let banned = BTreeMap::from([(member.peer_id(), ban)]);
        let own = BanNotice::of(member.peer_id(), &held, &banned).unwrap();
        for part in ["banned from mesh", "2000-02-29 00:00 UTC", "by desk (the founder)", "--data-dir NEW"] {
            assert!(own.to_string().contains(part), "{own}");
        }
        assert!(!own.sponsor);
        let through = BanNotice::of(guest.peer_id(), &guests, &banned).unwrap();
        for part in ["laptop, which its membership depends on", "by desk (the founder)", "meshnode join TICKET"] {
            assert!(through.to_string().contains(part), "{through}");
        }
        assert!(through.sponsor);
        assert_eq!(BanNotice::of(founder.peer_id(), &root, &banned), None);
    }
}
