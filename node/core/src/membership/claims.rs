//! Which claim about a member outranks which. foca takes any `Down` for the last word, however old; here the order is
//! that of incarnations, so that one node that errs, lies or hears nothing cannot take the living from everybody.
//!
//! Claims about one life are ordered by incarnation, then Alive < Suspect < Down. Only the member itself raises its
//! incarnation, so a higher one proves that it was there after whoever gave it up had looked.
use super::swim::Life;
use foca::{Member, State};

/// What becomes of a claim that another node makes about a third one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// foca decides as it always does.
    Keep,
    /// It is outranked by what is known.
    Drop,
    /// It outranks the `Down` that is known, which must be forgotten first.
    Supersede,
}

/// Weighs a claim against what is known about the same node.
pub(super) fn weigh(known: Option<&Member<Life>>, claim: &Member<Life>) -> Verdict {
    let says_down = claim.state() == State::Down;
    if !says_down && claim.incarnation() == LEFT {
        return Verdict::Drop;
    }
    // The death of an unknown node is no news: whoever passed it on would keep the dead going round for ever.
    let Some(known) = known else { return if says_down { Verdict::Drop } else { Verdict::Keep } };
    if known.id() != claim.id() {
        return Verdict::Keep; // of two lives the later one wins, as foca has it
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

/// Whether a claim could change what is known: a peer's whole table is mostly what everybody knows.
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

/// What a node of this incarnation makes of a claim about itself: a `Down` too is only a doubt, to be refuted by the
/// next incarnation. There is none after the last, and a goodbye cannot be refuted: then it goes on under a new life.
pub(super) fn answer(me: Life, incarnation: u16, claim: &Member<Life>) -> Member<Life> {
    match claim.state() {
        State::Alive => claim.clone(),
        State::Suspect | State::Down if claim.incarnation().max(incarnation) >= LEFT - 1 => Member::down(me),
        State::Suspect | State::Down => Member::new(me, claim.incarnation(), State::Suspect),
    }
}

/// An incarnation no living claim reaches: a `Down` that carries it was sent by the node itself.
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
        assert_eq!(weigh(None, &claim(3, Down)), Drop, "the dead do not come back as rumours");
        let later = Member::new(Life { generation: Generation(8), ..LIFE }, 0, Down);
        assert_eq!(weigh(Some(&claim(3, Alive)), &later), Keep, "a later life was there and is gone, so this one is");
    }

    #[test]
    fn only_what_changes_something_is_news() {
        use State::{Alive, Down, Suspect};
        for known in [claim(5, Alive), claim(5, Suspect), claim(5, Down), claim(LEFT, Down)] {
            for (incarnation, state) in [4, 5, 6, LEFT].into_iter().flat_map(|i| [Alive, Suspect, Down].map(|s| (i, s)))
            {
                let heard = claim(incarnation, state);
                // foca's own order, after ours has let the claim through.
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
    fn a_node_refutes_its_death_unless_it_cannot() {
        use State::{Alive, Down, Suspect};
        assert_eq!(answer(LIFE, 4, &claim(4, Alive)), claim(4, Alive));
        assert_eq!(answer(LIFE, 4, &claim(4, Down)), claim(4, Suspect));
        assert_eq!(answer(LIFE, 4, &claim(9, Suspect)), claim(9, Suspect));
        assert_eq!(answer(LIFE, 4, &claim(LEFT, Down)), claim(0, Down));
        assert_eq!(answer(LIFE, LEFT - 1, &claim(4, Suspect)), claim(0, Down), "no incarnation is left to refute with");
    }
}
