//! Admission to the mesh: invitations with an expiry and a number of uses, peers approved by name, or an open mesh.
//!
//! The shell proves that a joiner knows a secret (bound to its TLS channel). This module decides what that secret permits.
use crate::id::NodeId;
use alloc::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    vec::Vec,
};
use serde::{Deserialize, Serialize};

/// Invitations in the book: a user makes tickets by hand, and a script that makes more should let old ones expire.
pub const INVITES_MAX: usize = 1024;
/// Peers remembered after a request without a ticket: strangers can fill this list, so it is short.
pub const WAITING_MAX: usize = 64;

/// An invitation behind a ticket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Invite {
    /// Unix seconds after which it expires.
    pub expiry: u64,
    /// Admissions left.
    pub uses_left: u32,
    /// Unix seconds when it was issued; 0 where an earlier version did not record it.
    #[serde(default)]
    pub issued: u64,
}

/// How a joiner was admitted, which decides what it may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admitted {
    /// By a ticket.
    Invited,
    /// By a member's approval of its id.
    Approved,
    /// By an open mesh, from the local network: no member vouched for it, so it may not admit others.
    Open,
}

impl Admitted {
    /// Whether the new member may certify others.
    pub fn may_invite(self) -> bool {
        match self {
            Admitted::Invited | Admitted::Approved => true,
            Admitted::Open => false,
        }
    }
}

/// The credential of a joiner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Claim {
    /// Proof that it knows the secret with this id.
    Secret([u8; 16]),
    /// A secret that is not in the book.
    UnknownSecret,
    /// None but its own identity.
    Nothing,
}

/// Why a joiner is rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rejection {
    /// The ticket was never issued here, or was dropped.
    Unknown,
    /// The ticket expired.
    Expired,
    /// All uses of the ticket are spent.
    UsedUp,
    /// The peer has no ticket and is not approved yet.
    NotApproved,
}

/// A revocation whose signature was verified.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Revoked {
    /// The issuer; `None` is the mesh's root key.
    pub by: Option<NodeId>,
    /// When it was issued, unix seconds.
    pub at: u64,
    /// The banned node.
    pub banned: NodeId,
}

/// The banned nodes, each with the revocation that bans it. The result depends on the set of revocations only, not on their
/// order. Revocations by the root come first, then earlier ones; a revocation issued by a node that is banned already has no
/// effect.
pub fn in_force(revocations: impl IntoIterator<Item = Revoked>) -> BTreeMap<NodeId, Revoked> {
    let mut revocations: Vec<Revoked> = revocations.into_iter().collect();
    revocations.sort_by_key(|revoked| (revoked.by.is_some(), revoked.at, revoked.by, revoked.banned));
    let mut out = BTreeMap::new();
    for revoked in revocations {
        if revoked.by.is_none_or(|by| !out.contains_key(&by)) {
            out.entry(revoked.banned).or_insert(revoked);
        }
    }
    out
}

/// The invitations of one node.
#[derive(Clone, Debug, Default)]
pub struct InviteBook {
    invites: BTreeMap<[u8; 16], Invite>,
    approved: BTreeSet<NodeId>,
    waiting: VecDeque<NodeId>,
    open: bool,
}

impl InviteBook {
    /// A book with the stored invitations of the previous run; `open` admits every peer of the local network.
    pub fn new(invites: impl IntoIterator<Item = ([u8; 16], Invite)>, open: bool) -> Self {
        Self { invites: invites.into_iter().take(INVITES_MAX).collect(), open, ..Self::default() }
    }

    /// Adds an invitation. A full book drops the one that expires first.
    pub fn issue(&mut self, id: [u8; 16], invite: Invite) {
        if self.invites.len() >= INVITES_MAX
            && let Some(oldest) = self.invites.iter().min_by_key(|(_, i)| i.expiry).map(|(id, _)| *id)
        {
            self.invites.remove(&oldest);
        }
        self.invites.insert(id, invite);
    }

    /// Decides on a joiner, and spends one use of its ticket. `local`: the peer asks from this machine or its local network.
    ///
    /// # Errors
    /// Why the peer is rejected.
    pub fn decide(&mut self, peer: NodeId, claim: Claim, local: bool, now_unix: u64) -> Result<Admitted, Rejection> {
        let open = self.open && local;
        match claim {
            Claim::Secret(id) => {
                let invite = self.invites.get_mut(&id).ok_or(Rejection::Unknown)?;
                if now_unix > invite.expiry {
                    return Err(Rejection::Expired);
                }
                invite.uses_left = invite.uses_left.checked_sub(1).ok_or(Rejection::UsedUp)?;
                Ok(Admitted::Invited)
            }
            Claim::UnknownSecret if !open => Err(Rejection::Unknown),
            Claim::UnknownSecret | Claim::Nothing => self.decide_by_name(peer, open),
        }
    }

    /// Revokes every invitation issued up to `issued_unix`; returns those that were still valid.
    pub fn void(&mut self, issued_unix: u64, now_unix: u64) -> Vec<Invite> {
        let (void, kept): (BTreeMap<_, _>, BTreeMap<_, _>) =
            core::mem::take(&mut self.invites).into_iter().partition(|(_, invite)| invite.issued <= issued_unix);
        self.invites = kept;
        void.into_values().filter(|invite| invite.uses_left > 0 && now_unix <= invite.expiry).collect()
    }

    /// Admits a peer when it asks the next time.
    pub fn approve(&mut self, peer: NodeId) {
        self.waiting.retain(|p| *p != peer);
        self.approved.insert(peer);
    }

    /// Peers that asked without a ticket, oldest first.
    pub fn waiting(&self) -> impl Iterator<Item = NodeId> + '_ {
        self.waiting.iter().copied()
    }

    /// The invitations, for storage.
    pub fn invites(&self) -> Vec<([u8; 16], Invite)> {
        self.invites.iter().map(|(id, invite)| (*id, *invite)).collect()
    }

    fn decide_by_name(&mut self, peer: NodeId, open: bool) -> Result<Admitted, Rejection> {
        if self.approved.remove(&peer) {
            return Ok(Admitted::Approved);
        }
        if open {
            return Ok(Admitted::Open);
        }
        if !self.waiting.contains(&peer) {
            if self.waiting.len() >= WAITING_MAX {
                self.waiting.pop_front();
            }
            self.waiting.push_back(peer);
        }
        Err(Rejection::NotApproved)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PEER: NodeId = NodeId([1; 16]);
    const TICKET: [u8; 16] = [9; 16];
    const FAR: bool = false;
    const LOCAL: bool = true;

    fn book() -> InviteBook {
        InviteBook::new([(TICKET, Invite { expiry: 100, uses_left: 1, issued: 10 })], false)
    }

    #[test]
    fn a_ticket_admits_up_to_its_number_of_uses() {
        let mut book = book();
        assert_eq!(book.decide(PEER, Claim::Secret(TICKET), FAR, 50), Ok(Admitted::Invited));
        assert_eq!(book.decide(PEER, Claim::Secret(TICKET), FAR, 50), Err(Rejection::UsedUp));
        assert_eq!(book.invites()[0].1.uses_left, 0);
    }

    #[test]
    fn a_ticket_expires() {
        assert_eq!(book().decide(PEER, Claim::Secret(TICKET), FAR, 100), Ok(Admitted::Invited));
        assert_eq!(book().decide(PEER, Claim::Secret(TICKET), FAR, 101), Err(Rejection::Expired));
        assert_eq!(book().decide(PEER, Claim::Secret([8; 16]), FAR, 50), Err(Rejection::Unknown));
        assert_eq!(book().decide(PEER, Claim::UnknownSecret, FAR, 50), Err(Rejection::Unknown));
    }

    #[test]
    fn approval_is_for_one_peer_and_one_admission() {
        let mut book = book();
        assert_eq!(book.decide(PEER, Claim::Nothing, FAR, 50), Err(Rejection::NotApproved));
        assert_eq!(book.waiting().collect::<Vec<_>>(), [PEER]);
        book.approve(PEER);
        assert_eq!(book.waiting().count(), 0);
        assert_eq!(book.decide(NodeId([2; 16]), Claim::Nothing, FAR, 50), Err(Rejection::NotApproved));
        assert_eq!(book.decide(PEER, Claim::Nothing, FAR, 50), Ok(Admitted::Approved));
        assert_eq!(book.decide(PEER, Claim::Nothing, FAR, 50), Err(Rejection::NotApproved));
    }

    #[test]
    fn strangers_cannot_fill_memory() {
        let mut book = book();
        for i in 0..1000u16 {
            let mut id = [0; 16];
            id[..2].copy_from_slice(&i.to_le_bytes());
            assert_eq!(book.decide(NodeId(id), Claim::Nothing, FAR, 0), Err(Rejection::NotApproved));
            book.issue(id, Invite { expiry: u64::from(i), uses_left: 1, issued: 10 });
        }
        assert_eq!(book.waiting().count(), WAITING_MAX);
        assert!(book.invites().len() <= INVITES_MAX);
    }

    #[test]
    fn bans_do_not_depend_on_the_order_of_revocations() {
        let node = |n: u8| NodeId([n; 16]);
        let say = |by: Option<u8>, at, banned| Revoked { by: by.map(node), at, banned: node(banned) };
        let cases: [(&[Revoked], &[u8]); 5] = [
            (&[say(Some(1), 5, 2)], &[2]),
            // Two nodes that ban each other: the earlier revocation holds.
            (&[say(Some(1), 5, 2), say(Some(2), 6, 1)], &[2]),
            // A banned node bans others: after its own ban without effect, before it with effect.
            (&[say(Some(1), 5, 2), say(Some(2), 6, 3), say(Some(2), 4, 4)], &[2, 4]),
            // A banned node backdates a counter-revocation: the root's revocation overrides it.
            (&[say(Some(1), 5, 2), say(Some(2), 1, 1)], &[1]),
            (&[say(Some(1), 5, 2), say(Some(2), 1, 1), say(None, 9, 2)], &[2]),
        ];
        for (said, out) in cases {
            let expected: BTreeSet<NodeId> = out.iter().copied().map(node).collect();
            let (there, back) = (in_force(said.iter().copied()), in_force(said.iter().rev().copied()));
            assert_eq!(there.keys().copied().collect::<BTreeSet<_>>(), expected, "{said:?}");
            assert_eq!(back, there, "{said:?} reversed");
        }
    }

    #[test]
    fn an_open_mesh_admits_only_the_local_network_and_without_the_right_to_invite() {
        let mut book = InviteBook::new([], true);
        assert_eq!(book.decide(PEER, Claim::Nothing, FAR, 0), Err(Rejection::NotApproved));
        assert_eq!(book.decide(PEER, Claim::UnknownSecret, FAR, 0), Err(Rejection::Unknown));
        assert_eq!(book.decide(PEER, Claim::Nothing, LOCAL, 0), Ok(Admitted::Open));
        assert_eq!(book.decide(PEER, Claim::UnknownSecret, LOCAL, 0), Ok(Admitted::Open));
        assert!(!Admitted::Open.may_invite() && Admitted::Invited.may_invite());
        book.approve(PEER);
        assert_eq!(book.decide(PEER, Claim::Nothing, LOCAL, 0), Ok(Admitted::Approved), "a member vouched for it");
    }

    #[test]
    fn a_ban_voids_the_tickets_made_before_it() {
        let invite = |uses_left, expiry, issued| Invite { expiry, uses_left, issued };
        let made = [invite(3, 100, 10), invite(0, 100, 10), invite(1, 40, 10), invite(2, 100, 60)];
        let mut book = InviteBook::new(made.iter().enumerate().map(|(i, invite)| ([i as u8; 16], *invite)), false);
        assert_eq!(book.void(50, 50), [invite(3, 100, 10)], "neither the used up nor the expired");
        assert_eq!(book.decide(PEER, Claim::Secret([0; 16]), FAR, 50), Err(Rejection::Unknown));
        assert_eq!(book.decide(PEER, Claim::Secret([3; 16]), FAR, 61), Ok(Admitted::Invited), "made after the ban");
    }
}
