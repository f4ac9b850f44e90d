//! Page allocator of the KV cache: one pool for all sequences of a stage, allocated as positions are reserved.
use std::collections::BTreeMap;

use kernels::order::POSITIONS;
use kernels_models::stage::SequenceId;

/// The pages of each sequence, and the free pages. A page holds [`POSITIONS`] positions of all layers.
#[derive(Debug)]
pub(crate) struct Pool {
    free: Vec<u32>,
    /// For each page the number of sequences that have it.
    references: Vec<u32>,
    sequences: BTreeMap<SequenceId, Vec<u32>>,
}

impl Pool {
    pub(crate) fn new(pages: usize) -> Self {
        Self { free: (0..pages as u32).rev().collect(), references: vec![0; pages], sequences: BTreeMap::new() }
    }

    /// Sets the number of positions of some sequences: allocates the missing pages and frees those behind the last position. No
    /// sequence may be listed twice.
    ///
    /// # Errors
    /// The number of pages to allocate, if fewer are free. Nothing has changed.
    pub(crate) fn reserve(&mut self, wanted: &[(SequenceId, usize)]) -> Result<(), usize> {
        let pages = |(sequence, positions): &(SequenceId, usize)| (self.of(*sequence), positions.div_ceil(POSITIONS));
        let (less, more) = wanted.iter().map(pages).fold((0, 0), |(less, more), (held, wanted)| {
            let last = |page: &&u32| self.references[**page as usize] == 1;
            let freed = held.iter().skip(wanted).filter(last).count();
            (less + freed, more + wanted.saturating_sub(held.len()))
        });
        if more > self.free.len() + less {
            return Err(more);
        }
        // Shrink first: the same call may need the freed pages.
        for (sequence, positions) in wanted {
            let pages = self.sequences.entry(*sequence).or_default();
            let dropped = pages.split_off(positions.div_ceil(POSITIONS).min(pages.len()));
            self.drop_references(dropped);
        }
        for (sequence, positions) in wanted {
            let pages = self.sequences.entry(*sequence).or_default();
            let first = self.free.len() - positions.div_ceil(POSITIONS).saturating_sub(pages.len());
            for page in self.free.drain(first..).rev() {
                self.references[page as usize] = 1;
                pages.push(page);
            }
        }
        Ok(())
    }

    /// Gives a sequence the pages of the first `positions` of another, instead of those that it had.
    pub(crate) fn share(&mut self, from: SequenceId, to: SequenceId, positions: usize) {
        let pages: Vec<u32> = self.of(from).iter().take(positions.div_ceil(POSITIONS)).copied().collect();
        pages.iter().for_each(|page| self.references[*page as usize] += 1);
        self.release(to);
        self.sequences.insert(to, pages);
    }

    pub(crate) fn release(&mut self, sequence: SequenceId) {
        let pages = self.sequences.remove(&sequence).unwrap_or_default();
        self.drop_references(pages);
    }

    /// Frees the pages that no other sequence has, the last one first.
    fn drop_references(&mut self, pages: Vec<u32>) {
        for page in pages.into_iter().rev() {
            let count = &mut self.references[page as usize];
            *count -= 1;
            if *count == 0 {
                self.free.push(page);
            }
        }
    }

    /// Pages of a sequence, in the order of positions.
    pub(crate) fn of(&self, sequence: SequenceId) -> &[u32] {
        self.sequences.get(&sequence).map_or(&[], Vec::as_slice)
    }

    /// Free pages, and all pages.
    pub(crate) fn free_of(&self) -> (usize, usize) {
        (self.free.len(), self.references.len())
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

    #[test]
    fn a_shared_page_is_free_when_no_sequence_has_it() {
        let mut pool = Pool::new(4);
        pool.reserve(&[(1, 3 * 128)]).unwrap();
        pool.share(1, 2, 2 * 128);
        assert_eq!((pool.of(2), pool.free_of()), (&pool.of(1)[..2], (1, 4)));
        assert_eq!(pool.reserve(&[(1, 128), (2, 5 * 128)]), Err(3), "one page would become free, one stays shared");
        pool.reserve(&[(1, 128), (2, 4 * 128)]).unwrap();
        assert_eq!((pool.of(2).len(), pool.free_of()), (4, (0, 4)));
        pool.release(1);
        assert_eq!(pool.free_of(), (0, 4));
        pool.release(2);
        assert_eq!(pool.free_of(), (4, 4));
    }
}
