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

/// Who is out, of all that was said: the same for everybody who heard the same, in whatever order. The root's word holds
/// before all others', then the earlier one; whoever is out has nothing to say.
pub fn in_force(said: impl IntoIterator<Item = Revoked>) -> BTreeSet<NodeId> {
    let mut said: Vec<Revoked> = said.into_iter().collect();
    said.sort_by_key(|revoked| (revoked.by.is_some(), revoked.at, revoked.by, revoked.banned));
    let mut out = BTreeSet::new();
    for Revoked { by, banned, .. } in said {
        if by.is_none_or(|by| !out.contains(&by)) {
            out.insert(banned);
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
    /// A book with the invitations that survived the last life; `open` admits everybody.
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

    /// Decides, and spends a use where a ticket admits.
    ///
    /// # Errors
    /// Why the peer stays outside.
    pub fn decide(&mut self, peer: NodeId, claim: Claim, now_unix: u64) -> Result<(), Refusal> {
        match claim {
            Claim::Secret(id) => {
                let invite = self.invites.get_mut(&id).ok_or(Refusal::Unknown)?;
                if now_unix > invite.expiry {
                    return Err(Refusal::Expired);
                }
                invite.uses_left = invite.uses_left.checked_sub(1).ok_or(Refusal::UsedUp)?;
                Ok(())
            }
            Claim::UnknownSecret if !self.open => Err(Refusal::Unknown),
            Claim::UnknownSecret | Claim::Nothing => self.decide_by_name(peer),
        }
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

    fn decide_by_name(&mut self, peer: NodeId) -> Result<(), Refusal> {
        if self.open || self.approved.remove(&peer) {
            return Ok(());
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

    fn book() -> InviteBook {
        InviteBook::new([(TICKET, Invite { expiry: 100, uses_left: 1 })], false)
    }

    #[test]
    fn a_ticket_admits_as_often_as_it_says() {
        let mut book = book();
        assert_eq!(book.decide(PEER, Claim::Secret(TICKET), 50), Ok(()));
        assert_eq!(book.decide(PEER, Claim::Secret(TICKET), 50), Err(Refusal::UsedUp));
        assert_eq!(book.invites()[0].1.uses_left, 0);
    }

    #[test]
    fn a_ticket_ends() {
        assert_eq!(book().decide(PEER, Claim::Secret(TICKET), 100), Ok(()));
        assert_eq!(book().decide(PEER, Claim::Secret(TICKET), 101), Err(Refusal::Expired));
        assert_eq!(book().decide(PEER, Claim::Secret([8; 16]), 50), Err(Refusal::Unknown));
        assert_eq!(book().decide(PEER, Claim::UnknownSecret, 50), Err(Refusal::Unknown));
    }

    #[test]
    fn approval_is_for_one_peer_and_one_admission() {
        let mut book = book();
        assert_eq!(book.decide(PEER, Claim::Nothing, 50), Err(Refusal::NotApproved));
        assert_eq!(book.waiting().collect::<Vec<_>>(), [PEER]);
        book.approve(PEER);
        assert_eq!(book.waiting().count(), 0);
        assert_eq!(book.decide(NodeId([2; 16]), Claim::Nothing, 50), Err(Refusal::NotApproved));
        assert_eq!(book.decide(PEER, Claim::Nothing, 50), Ok(()));
        assert_eq!(book.decide(PEER, Claim::Nothing, 50), Err(Refusal::NotApproved));
    }

    #[test]
    fn strangers_cannot_fill_memory() {
        let mut book = book();
        for i in 0..1000u16 {
            let mut id = [0; 16];
            id[..2].copy_from_slice(&i.to_le_bytes());
            assert_eq!(book.decide(NodeId(id), Claim::Nothing, 0), Err(Refusal::NotApproved));
            book.issue(id, Invite { expiry: u64::from(i), uses_left: 1 });
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
            assert_eq!(in_force(said.iter().copied()), expected, "{said:?}");
            assert_eq!(in_force(said.iter().rev().copied()), expected, "{said:?} the other way round");
        }
    }

    #[test]
    fn an_open_mesh_admits_everybody() {
        let mut book = InviteBook::new([], true);
        assert_eq!(book.decide(PEER, Claim::Nothing, 0), Ok(()));
        assert_eq!(book.decide(PEER, Claim::UnknownSecret, 0), Ok(()));
    }
}
