//! Who may join: invitations with an end and a number of uses, peers approved by name, or an open mesh.
//!
//! The shell proves that a joiner knows a secret (bound to its TLS channel); this decides what the secret is worth.
use crate::id::NodeId;
use alloc::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    vec::Vec,
};
use serde::{Deserialize, Serialize};

/// Invitations kept: a person makes tickets by hand, a script that makes more should let old ones end.
pub const INVITES_MAX: usize = 1024;
/// Peers remembered that asked without a ticket: strangers can fill this list, so it is short.
pub const WAITING_MAX: usize = 64;

/// One ticket's worth.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Invite {
    /// Unix seconds after which it is worthless.
    pub expiry: u64,
    /// Admissions left.
    pub uses_left: u32,
    /// Unix seconds when it was made; 0 where an earlier version did not record it.
    #[serde(default)]
    pub issued: u64,
}

/// What let a joiner in, and so what it may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admitted {
    /// A ticket.
    Invited,
    /// A member's approval by name.
    Approved,
    /// The mesh is open to the local network: nobody vouched for it, so it may not let in others.
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

/// What a joiner brings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Claim {
    /// It proved to know the secret with this id.
    Secret([u8; 16]),
    /// It named a secret that is not in the book.
    UnknownSecret,
    /// Nothing but its own identity.
    Nothing,
}

/// Why a joiner is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The ticket was never issued here, or was dropped.
    Unknown,
    /// Its time is over.
    Expired,
    /// All its uses are spent.
    UsedUp,
    /// No ticket, and nobody approved the peer yet.
    NotApproved,
}

/// What a revocation says whose signature holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Revoked {
    /// Who said so; `None` is the mesh's root key.
    pub by: Option<NodeId>,
    /// Since when, unix seconds.
    pub at: u64,
    /// Who is out.
    pub banned: NodeId,
}

/// Who is banned, and by which revocation: the same on every node that holds the same revocations, in whatever order. The
/// root's revocations hold before all others, then the earlier one; those of banned members have no effect.
pub fn in_force(said: impl IntoIterator<Item = Revoked>) -> BTreeMap<NodeId, Revoked> {
    let mut said: Vec<Revoked> = said.into_iter().collect();
    said.sort_by_key(|revoked| (revoked.by.is_some(), revoked.at, revoked.by, revoked.banned));
    let mut out = BTreeMap::new();
    for revoked in said {
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
    /// A book with the invitations that survived the last life; `open` admits every peer of the local network.
    pub fn new(invites: impl IntoIterator<Item = ([u8; 16], Invite)>, open: bool) -> Self {
        Self { invites: invites.into_iter().take(INVITES_MAX).collect(), open, ..Self::default() }
    }

    /// Enters a new invitation. The one that ends first makes room if the book is full.
    pub fn issue(&mut self, id: [u8; 16], invite: Invite) {
        if self.invites.len() >= INVITES_MAX
            && let Some(oldest) = self.invites.iter().min_by_key(|(_, i)| i.expiry).map(|(id, _)| *id)
        {
            self.invites.remove(&oldest);
        }
        self.invites.insert(id, invite);
    }

    /// Decides, and spends a use where a ticket admits. `local`: the peer asks from this machine or its local network.
    ///
    /// # Errors
    /// Why the peer stays outside.
    pub fn decide(&mut self, peer: NodeId, claim: Claim, local: bool, now_unix: u64) -> Result<Admitted, Refusal> {
        let open = self.open && local;
        match claim {
            Claim::Secret(id) => {
                let invite = self.invites.get_mut(&id).ok_or(Refusal::Unknown)?;
                if now_unix > invite.expiry {
                    return Err(Refusal::Expired);
                }
                invite.uses_left = invite.uses_left.checked_sub(1).ok_or(Refusal::UsedUp)?;
                Ok(Admitted::Invited)
            }
            Claim::UnknownSecret if !open => Err(Refusal::Unknown),
            Claim::UnknownSecret | Claim::Nothing => self.decide_by_name(peer, open),
        }
    }

    /// Revokes every invitation made until `issued_unix`; returns those that would still have admitted a node.
    pub fn void(&mut self, issued_unix: u64, now_unix: u64) -> Vec<Invite> {
        let (void, kept): (BTreeMap<_, _>, BTreeMap<_, _>) =
            core::mem::take(&mut self.invites).into_iter().partition(|(_, invite)| invite.issued <= issued_unix);
        self.invites = kept;
        void.into_values().filter(|invite| invite.uses_left > 0 && now_unix <= invite.expiry).collect()
    }

    /// Lets a peer in the next time it asks.
    pub fn approve(&mut self, peer: NodeId) {
        self.waiting.retain(|p| *p != peer);
        self.approved.insert(peer);
    }

    /// Peers that asked without a ticket, oldest first.
    pub fn waiting(&self) -> impl Iterator<Item = NodeId> + '_ {
        self.waiting.iter().copied()
    }

    /// The invitations, to be written to disk.
    pub fn invites(&self) -> Vec<([u8; 16], Invite)> {
        self.invites.iter().map(|(id, invite)| (*id, *invite)).collect()
    }

    fn decide_by_name(&mut self, peer: NodeId, open: bool) -> Result<Admitted, Refusal> {
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
        Err(Refusal::NotApproved)
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
    fn a_ticket_admits_as_often_as_it_says() {
        let mut book = book();
        assert_eq!(book.decide(PEER, Claim::Secret(TICKET), FAR, 50), Ok(Admitted::Invited));
        assert_eq!(book.decide(PEER, Claim::Secret(TICKET), FAR, 50), Err(Refusal::UsedUp));
        assert_eq!(book.invites()[0].1.uses_left, 0);
    }

    #[test]
    fn a_ticket_ends() {
        assert_eq!(book().decide(PEER, Claim::Secret(TICKET), FAR, 100), Ok(Admitted::Invited));
        assert_eq!(book().decide(PEER, Claim::Secret(TICKET), FAR, 101), Err(Refusal::Expired));
        assert_eq!(book().decide(PEER, Claim::Secret([8; 16]), FAR, 50), Err(Refusal::Unknown));
        assert_eq!(book().decide(PEER, Claim::UnknownSecret, FAR, 50), Err(Refusal::Unknown));
    }

    #[test]
    fn approval_is_for_one_peer_and_one_admission() {
        let mut book = book();
        assert_eq!(book.decide(PEER, Claim::Nothing, FAR, 50), Err(Refusal::NotApproved));
        assert_eq!(book.waiting().collect::<Vec<_>>(), [PEER]);
        book.approve(PEER);
        assert_eq!(book.waiting().count(), 0);
        assert_eq!(book.decide(NodeId([2; 16]), Claim::Nothing, FAR, 50), Err(Refusal::NotApproved));
        assert_eq!(book.decide(PEER, Claim::Nothing, FAR, 50), Ok(Admitted::Approved));
        assert_eq!(book.decide(PEER, Claim::Nothing, FAR, 50), Err(Refusal::NotApproved));
    }

    #[test]
    fn strangers_cannot_fill_memory() {
        let mut book = book();
        for i in 0..1000u16 {
            let mut id = [0; 16];
            id[..2].copy_from_slice(&i.to_le_bytes());
            assert_eq!(book.decide(NodeId(id), Claim::Nothing, FAR, 0), Err(Refusal::NotApproved));
            book.issue(id, Invite { expiry: u64::from(i), uses_left: 1, issued: 10 });
        }
        assert_eq!(book.waiting().count(), WAITING_MAX);
        assert!(book.invites().len() <= INVITES_MAX);
    }

    #[test]
    fn who_is_out_does_not_depend_on_who_was_heard_first() {
        let node = |n: u8| NodeId([n; 16]);
        let say = |by: Option<u8>, at, banned| Revoked { by: by.map(node), at, banned: node(banned) };
        let cases: [(&[Revoked], &[u8]); 5] = [
            (&[say(Some(1), 5, 2)], &[2]),
            // Two that ban each other: the earlier word holds.
            (&[say(Some(1), 5, 2), say(Some(2), 6, 1)], &[2]),
            // It bans others after it was banned, and one before.
            (&[say(Some(1), 5, 2), say(Some(2), 6, 3), say(Some(2), 4, 4)], &[2, 4]),
            // It dates its revenge back; the founder's word undoes it.
            (&[say(Some(1), 5, 2), say(Some(2), 1, 1)], &[1]),
            (&[say(Some(1), 5, 2), say(Some(2), 1, 1), say(None, 9, 2)], &[2]),
        ];
        for (said, out) in cases {
            let expected: BTreeSet<NodeId> = out.iter().copied().map(node).collect();
            let (there, back) = (in_force(said.iter().copied()), in_force(said.iter().rev().copied()));
            assert_eq!(there.keys().copied().collect::<BTreeSet<_>>(), expected, "{said:?}");
            assert_eq!(back, there, "{said:?} the other way round");
        }
    }

    #[test]
    fn an_open_mesh_admits_only_the_local_network_and_without_the_right_to_invite() {
        let mut book = InviteBook::new([], true);
        assert_eq!(book.decide(PEER, Claim::Nothing, FAR, 0), Err(Refusal::NotApproved));
        assert_eq!(book.decide(PEER, Claim::UnknownSecret, FAR, 0), Err(Refusal::Unknown));
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
        assert_eq!(book.decide(PEER, Claim::Secret([0; 16]), FAR, 50), Err(Refusal::Unknown));
        assert_eq!(book.decide(PEER, Claim::Secret([3; 16]), FAR, 61), Ok(Admitted::Invited), "made after the ban");
    }
}
