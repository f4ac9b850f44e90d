//! Pages of keys and values: one pool for all sequences of a stage, handed out as positions are reserved.
use std::collections::BTreeMap;

use kernels::order::POSITIONS;
use kernels::stage::SequenceId;

/// Which pages belong to whom. A page is [`POSITIONS`] positions of all layers.
#[derive(Debug)]
pub(crate) struct Pool {
    pages: usize,
    free: Vec<u32>,
    sequences: BTreeMap<SequenceId, Vec<u32>>,
}

impl Pool {
    /// A pool of `pages` pages.
    pub(crate) fn new(pages: usize) -> Self {
        Self { pages, free: (0..pages as u32).rev().collect(), sequences: BTreeMap::new() }
    }

    /// Makes room for the first `positions` of a sequence; pages behind them are free again. `false`, with nothing changed, if
    /// there are not enough.
    pub(crate) fn reserve(&mut self, sequence: SequenceId, positions: usize) -> bool {
        let wanted = positions.div_ceil(POSITIONS);
        let held = self.sequences.get(&sequence).map_or(0, Vec::len);
        if wanted > held + self.free.len() {
            return false;
        }
        let pages = self.sequences.entry(sequence).or_default();
        while pages.len() > wanted {
            self.free.extend(pages.pop());
        }
        while pages.len() < wanted {
            pages.extend(self.free.pop());
        }
        true
    }

    pub(crate) fn release(&mut self, sequence: SequenceId) {
        self.free.extend(self.sequences.remove(&sequence).into_iter().flatten());
    }

    /// Pages of a sequence, in the order of positions.
    pub(crate) fn of(&self, sequence: SequenceId) -> &[u32] {
        self.sequences.get(&sequence).map_or(&[], Vec::as_slice)
    }

    /// Pages that nobody holds, and all.
    pub(crate) fn free_of(&self) -> (usize, usize) {
        (self.free.len(), self.pages)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_handed_out_once_and_come_back() {
        let mut pool = Pool::new(5);
        assert!(pool.reserve(1, 129) && pool.reserve(2, 128));
        assert_eq!((pool.of(1).len(), pool.of(2).len(), pool.free_of()), (2, 1, (2, 5)));
        assert!(!pool.reserve(2, 4 * 128), "three more than the two that are free");
        assert_eq!((pool.of(2).len(), pool.free_of()), (1, (2, 5)), "nothing changed");
        assert!(pool.reserve(2, 3 * 128));
        let mut all: Vec<u32> = pool.of(1).iter().chain(pool.of(2)).copied().collect();
        all.sort_unstable();
        assert_eq!(all, [0, 1, 2, 3, 4]);
        assert!(pool.reserve(1, 5), "positions behind are forgotten");
        assert_eq!(pool.free_of(), (1, 5));
        pool.release(2);
        pool.release(2);
        assert_eq!((pool.free_of(), pool.of(2).len()), ((4, 5), 0));
    }
}
