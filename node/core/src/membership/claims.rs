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

/// Weighs a claim against what is known about the same life.
pub(super) fn weigh(known: Option<&Member<Life>>, claim: &Member<Life>) -> Verdict {
    let says_down = claim.state() == State::Down;
    if !says_down && claim.incarnation() == LEFT {
        return Verdict::Drop;
    }
    let Some(known) = known else { return Verdict::Keep };
    let is_down = known.state() == State::Down;
    if is_down && known.incarnation() != LEFT && claim.incarnation() > known.incarnation() {
        Verdict::Supersede
    } else if !is_down && says_down && claim.incarnation() < known.incarnation() {
        Verdict::Drop
    } else {
        Verdict::Keep
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
        assert_eq!(weigh(None, &claim(3, Down)), Keep);
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
