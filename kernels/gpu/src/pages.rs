//! Page allocator of the KV cache: one pool for all sequences of a stage, allocated as positions are reserved.
use std::collections::BTreeMap;

use kernels::order::POSITIONS;
use kernels_models::stage::SequenceId;

/// The pages of each sequence, and the free pages. A page holds [`POSITIONS`] positions of all layers.
#[derive(Debug)]
pub(crate) struct Pool {
    pages: usize,
    free: Vec<u32>,
    sequences: BTreeMap<SequenceId, Vec<u32>>,
}

impl Pool {
    pub(crate) fn new(pages: usize) -> Self {
        Self { pages, free: (0..pages as u32).rev().collect(), sequences: BTreeMap::new() }
    }

    /// Sets the number of positions of some sequences: allocates the missing pages and frees those behind the last position. No
    /// sequence may be listed twice.
    ///
    /// # Errors
    /// The number of pages to allocate, if fewer are free. Nothing has changed.
    pub(crate) fn reserve(&mut self, wanted: &[(SequenceId, usize)]) -> Result<(), usize> {
        let pages =
            |(sequence, positions): &(SequenceId, usize)| (self.of(*sequence).len(), positions.div_ceil(POSITIONS));
        let (less, more) = wanted.iter().map(pages).fold((0, 0), |(less, more), (held, wanted)| {
            (less + held.saturating_sub(wanted), more + wanted.saturating_sub(held))
        });
        if more > self.free.len() + less {
            return Err(more);
        }
        // Shrink first: the same call may need the freed pages.
        for grows in [false, true] {
            for (sequence, positions) in wanted {
                let wanted = positions.div_ceil(POSITIONS);
                let pages = self.sequences.entry(*sequence).or_default();
                if grows {
                    let first = self.free.len() - wanted.saturating_sub(pages.len());
                    pages.extend(self.free.drain(first..).rev());
                } else {
                    self.free.extend(pages.drain(wanted.min(pages.len())..).rev());
                }
            }
        }
        Ok(())
    }

    pub(crate) fn release(&mut self, sequence: SequenceId) {
        self.free.extend(self.sequences.remove(&sequence).into_iter().flatten());
    }

    /// Pages of a sequence, in the order of positions.
    pub(crate) fn of(&self, sequence: SequenceId) -> &[u32] {
        self.sequences.get(&sequence).map_or(&[], Vec::as_slice)
    }

    /// Free pages, and all pages.
    pub(crate) fn free_of(&self) -> (usize, usize) {
        (self.free.len(), self.pages)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_allocated_once_and_freed() {
        let mut pool = Pool::new(5);
        assert_eq!(pool.reserve(&[(1, 129), (2, 128)]), Ok(()));
        assert_eq!((pool.of(1).len(), pool.of(2).len(), pool.free_of()), (2, 1, (2, 5)));
        assert_eq!(pool.reserve(&[(2, 4 * 128)]), Err(3));
        assert_eq!(pool.reserve(&[(3, 128), (2, 3 * 128)]), Err(3), "only the first request fits");
        assert_eq!((pool.of(2).len(), pool.of(3).len(), pool.free_of()), (1, 0, (2, 5)), "nothing changed");
        assert_eq!(pool.reserve(&[(2, 3 * 128)]), Ok(()));
        let mut all: Vec<u32> = pool.of(1).iter().chain(pool.of(2)).copied().collect();
        all.sort_unstable();
        assert_eq!(all, [0, 1, 2, 3, 4]);
        assert_eq!(pool.reserve(&[(3, 128), (1, 5)]), Ok(()), "the page of dropped positions is reused");
        assert_eq!((pool.of(1).len(), pool.of(3).len(), pool.free_of()), (1, 1, (0, 5)));
        pool.release(2);
        pool.release(2);
        assert_eq!((pool.free_of(), pool.of(2).len()), ((3, 5), 0));
    }
}
