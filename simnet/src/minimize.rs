//! Minimises a failing case by delta debugging: first its faults, then its requests and simulations.
use crate::case::Case;
use crate::run::Outcome;
use crate::soak::run_caught;

/// A smaller case that fails, and its outcome.
pub struct Minimized {
    /// The case.
    pub case: Case,
    /// Its outcome.
    pub outcome: Outcome,
    /// Number of runs that it took.
    pub runs: u32,
}

/// The smallest case found within `runs_max` runs that still violates an invariant of the same kind.
pub fn minimize(case: &Case, outcome: &Outcome, runs_max: u32) -> Minimized {
    let mut search = Search { kinds: kinds(outcome), best: case.clone(), outcome: outcome.clone(), runs: 0, runs_max };
    search.reduce(|case| case.faults.len(), |case, kept| keep(&mut case.faults, kept));
    search.reduce(|case| case.requests.len(), |case, kept| keep(&mut case.requests, kept));
    search.reduce(|case| case.simulations.len(), |case, kept| keep(&mut case.simulations, kept));
    // Drops entry nodes that no request uses, the last one first: requests name them by number.
    while let Some(smaller) = search.best.without_last_entry() {
        let Some(outcome) = search.fails(&smaller) else { break };
        (search.best, search.outcome) = (smaller, outcome);
    }
    Minimized { case: search.best, outcome: search.outcome, runs: search.runs }
}

struct Search {
    kinds: Vec<String>,
    best: Case,
    outcome: Outcome,
    runs: u32,
    runs_max: u32,
}

impl Search {
    /// ddmin: removes ever smaller subsets, as long as the rest still fails.
    fn reduce(&mut self, count: impl Fn(&Case) -> usize, keep: impl Fn(&mut Case, &dyn Fn(usize) -> bool)) {
        let mut parts = 2;
        while count(&self.best) > 0 && self.runs < self.runs_max {
            let items = count(&self.best);
            let size = items.div_ceil(parts.min(items));
            let smaller = (0..items).step_by(size).find(|start| {
                let mut case = self.best.clone();
                keep(&mut case, &|index| !(*start..*start + size).contains(&index));
                self.fails(&case).is_some_and(|outcome| {
                    (self.best, self.outcome) = (case, outcome);
                    true
                })
            });
            match smaller {
                Some(_) => parts = (parts - 1).max(2),
                None if size == 1 => return,
                None => parts = (parts * 2).min(items),
            }
        }
    }

    fn fails(&mut self, case: &Case) -> Option<Outcome> {
        if self.runs >= self.runs_max {
            return None;
        }
        self.runs += 1;
        let outcome = run_caught(case);
        kinds(&outcome).iter().any(|kind| self.kinds.contains(kind)).then_some(outcome)
    }
}

fn keep<T>(items: &mut Vec<T>, kept: &dyn Fn(usize) -> bool) {
    let mut index = 0;
    items.retain(|_| {
        index += 1;
        kept(index - 1)
    });
}

/// Violations without numbers: times and hosts change with each fault that is removed.
fn kinds(outcome: &Outcome) -> Vec<String> {
    let plain = |text: &String| text.chars().filter(|c| c.is_alphabetic() || *c == ' ').take(KIND_CHARS).collect();
    outcome.violations.iter().map(plain).collect()
}

/// Length of the text that distinguishes kinds of violations.
const KIND_CHARS: usize = 24;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::case::{Ask, EntryNode, Simulation};
    use crate::faults::{Fault, Timed};
    use crate::host::HostId;
    use node_core::time::{Duration, Instant};

    /// A model that fits nowhere is never served, with or without faults: the minimal case has none.
    #[test]
    fn irrelevant_events_are_removed() {
        let timed = |ms: u64| Timed { at: Instant(ms * 1_000_000), fault: Fault::Crash(HostId(1)) };
        let mut case = Case { faults: (0..7).map(timed).collect(), ..Case::default() };
        (case.mesh.hosts, case.mesh.memory_mib, case.lasts) = (2, 50, Duration::from_secs(1));
        case.requests = vec![Ask::default(); 3];
        case.simulations = vec![Simulation::default(); 2];
        case.entries = vec![EntryNode::default()];
        let outcome = run_caught(&case);
        assert!(!outcome.violations.is_empty());
        let least = minimize(&case, &outcome, 50);
        assert_eq!((least.case.faults.len(), least.case.requests.len()), (0, 0), "{} runs", least.runs);
        assert_eq!((least.case.simulations.len(), least.case.entries.len()), (0, 0), "{} runs", least.runs);
    }
}
