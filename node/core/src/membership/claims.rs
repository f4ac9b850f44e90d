//! Precedence of membership claims. foca treats any `Down` as final, however old. Here claims are ordered by incarnation, so
//! that a single node that errs, misreports or is deaf cannot declare live members down for all.
//!
//! Claims about one life are ordered by incarnation, then Alive < Suspect < Down. Only the member itself raises its
//! incarnation, so a higher incarnation proves that the member was alive after the suspicion.
use super::swim::Life;
use foca::{Member, State};

/// How to treat another node's claim about a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Pass it to foca, which applies its usual rules.
    Keep,
    /// Ignore it: the known claim outranks it.
    Drop,
    /// It outranks the known `Down`, which foca must forget first.
    Supersede,
}

/// Compares a claim with the known claim about the same node.
pub(super) fn weigh(known: Option<&Member<Life>>, claim: &Member<Life>) -> Verdict {
    let says_down = claim.state() == State::Down;
    if !says_down && claim.incarnation() == LEFT {
        return Verdict::Drop;
    }
    // A `Down` of an unknown node is ignored: passing it on would keep such claims circulating forever.
    let Some(known) = known else { return if says_down { Verdict::Drop } else { Verdict::Keep } };
    if known.id() != claim.id() {
        return Verdict::Keep; // of two lives the later one wins, as in foca
    }
    let is_down = known.state() == State::Down;
    if is_down && known.incarnation() != LEFT && claim.incarnation() > known.incarnation() {
        Verdict::Supersede
    } else if !is_down && says_down && claim.incarnation() < known.incarnation() {
        Verdict::Drop
    } else {
        Verdict::Keep
    }
}

/// Whether a claim could change what is known: most of a peer's table is known everywhere.
pub(super) fn is_news(known: Option<&Member<Life>>, claim: &Member<Life>) -> bool {
    let Some(known) = known else { return claim.state() != State::Down };
    if known.id() != claim.id() {
        return claim.id().generation > known.id().generation;
    }
    let higher = claim.incarnation() > known.incarnation();
    match (known.state(), claim.state()) {
        (State::Alive | State::Suspect, State::Down) => true,
        (State::Alive, State::Suspect) => claim.incarnation() >= known.incarnation(),
        (State::Alive, State::Alive) | (State::Suspect | State::Down, _) => higher,
    }
}

/// How a node with this incarnation treats a claim about itself: `Down` too is only a suspicion, which the next incarnation
/// refutes. After the last incarnation, or after a goodbye, refuting is impossible: then the node continues under a new life.
pub(super) fn answer(me: Life, incarnation: u16, claim: &Member<Life>) -> Member<Life> {
    match claim.state() {
        State::Alive => claim.clone(),
        State::Suspect | State::Down if claim.incarnation().max(incarnation) >= LEFT - 1 => Member::down(me),
        State::Suspect | State::Down => Member::new(me, claim.incarnation(), State::Suspect),
    }
}

/// An incarnation that no claim of a live node reaches: a `Down` that carries it was sent by the node itself.
pub(super) const LEFT: u16 = u16::MAX;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::{Generation, NodeId};

    const LIFE: Life = Life { node: NodeId([1; 16]), generation: Generation(7), addr: None };

    fn claim(incarnation: u16, state: State) -> Member<Life> {
        Member::new(LIFE, incarnation, state)
    }

    #[test]
    fn the_higher_incarnation_wins_even_over_down() {
        use State::{Alive, Down, Suspect};
        use Verdict::{Drop, Keep, Supersede};
        for (known, heard, verdict) in [
            (claim(5, Alive), claim(4, Down), Drop),
            (claim(5, Suspect), claim(4, Down), Drop),
            (claim(5, Alive), claim(5, Down), Keep),
            (claim(5, Alive), claim(6, Down), Keep),
            (claim(5, Alive), claim(LEFT, Down), Keep),
            (claim(5, Down), claim(5, Alive), Keep),
            (claim(5, Down), claim(6, Alive), Supersede),
            (claim(5, Down), claim(6, Suspect), Supersede),
            (claim(5, Down), claim(6, Down), Supersede),
            (claim(LEFT, Down), claim(6, Alive), Keep),
            (claim(LEFT, Down), claim(LEFT, Alive), Drop),
            (claim(5, Down), claim(LEFT, Alive), Drop),
        ] {
            assert_eq!(weigh(Some(&known), &heard), verdict, "{known:?} known, {heard:?} heard");
        }
        assert_eq!(weigh(None, &claim(3, Alive)), Keep);
        assert_eq!(weigh(None, &claim(3, Down)), Drop, "a `Down` of an unknown node is ignored");
        let later = Member::new(Life { generation: Generation(8), ..LIFE }, 0, Down);
        assert_eq!(weigh(Some(&claim(3, Alive)), &later), Keep, "a later life is down, so this one is too");
    }

    #[test]
    fn only_claims_that_change_something_are_news() {
        use State::{Alive, Down, Suspect};
        for known in [claim(5, Alive), claim(5, Suspect), claim(5, Down), claim(LEFT, Down)] {
            for (incarnation, state) in [4, 5, 6, LEFT].into_iter().flat_map(|i| [Alive, Suspect, Down].map(|s| (i, s)))
            {
                let heard = claim(incarnation, state);
                // foca's own order, applied after ours has passed the claim.
                let changes = match (weigh(Some(&known), &heard), known.state(), state) {
                    (Verdict::Drop, _, _) => false,
                    (Verdict::Supersede, _, _) => true,
                    (Verdict::Keep, Down, _) => false,
                    (Verdict::Keep, _, Down) => true,
                    (Verdict::Keep, Alive, Suspect) => incarnation >= known.incarnation(),
                    (Verdict::Keep, Alive | Suspect, _) => incarnation > known.incarnation(),
                };
                assert!(!changes || is_news(Some(&known), &heard), "{known:?} known, {heard:?} heard");
            }
        }
        assert!(is_news(None, &claim(0, Alive)) && !is_news(None, &claim(0, Down)));
        let (earlier, later) = (Generation(6), Generation(8));
        let of = |generation| Member::new(Life { generation, ..LIFE }, 0, Alive);
        assert!(is_news(Some(&claim(5, Down)), &of(later)) && !is_news(Some(&claim(5, Down)), &of(earlier)));
    }

    #[test]
    fn a_node_refutes_its_down_while_an_incarnation_is_left() {
        use State::{Alive, Down, Suspect};
        assert_eq!(answer(LIFE, 4, &claim(4, Alive)), claim(4, Alive));
        assert_eq!(answer(LIFE, 4, &claim(4, Down)), claim(4, Suspect));
        assert_eq!(answer(LIFE, 4, &claim(9, Suspect)), claim(9, Suspect));
        assert_eq!(answer(LIFE, 4, &claim(LEFT, Down)), claim(0, Down));
        assert_eq!(answer(LIFE, LEFT - 1, &claim(4, Suspect)), claim(0, Down), "no incarnation is left to refute with");
    }
}
