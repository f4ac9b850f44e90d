//! Page allocator of the KV cache: one pool for all sequences of a stage, allocated as positions are reserved.
//!
//! Pages of sequences that are not computed may move to RAM. They are back on the device before the next pass that needs them.
use std::collections::{BTreeMap, BTreeSet};

use kernels::order::POSITIONS;
use kernels_models::stage::SequenceId;

/// The pages of each sequence, and the free places. A page holds [`POSITIONS`] positions of all layers.
#[derive(Debug)]
pub(crate) struct Pool {
    /// Free places on the device.
    free: Vec<u32>,
    /// By page number.
    pages: Vec<Page>,
    /// Page numbers that no sequence has.
    unused: Vec<u32>,
    sequences: BTreeMap<SequenceId, Sequence>,
    /// Places on the device.
    places: usize,
    /// Most pages in RAM.
    ram: usize,
    in_ram: usize,
    /// Number of reservations so far.
    reservations: u64,
}

#[derive(Debug, Default)]
struct Page {
    at: Place,
    /// Number of sequences that have it.
    references: u32,
}

#[derive(Debug, Default)]
enum Place {
    #[default]
    Nowhere,
    Device(u32),
    /// With its contents once they are read.
    Ram(Vec<u8>),
}

#[derive(Debug, Default)]
struct Sequence {
    pages: Vec<u32>,
    /// Number of the last reservation that named it.
    used: u64,
}

/// Pages to move before the next pass: first all that leave the device, then those that return to it.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Moves {
    /// Page and its place on the device until now.
    pub(crate) out: Vec<(u32, u32)>,
    /// Page and its new place on the device.
    pub(crate) back: Vec<(u32, u32)>,
}

impl Moves {
    pub(crate) fn is_empty(&self) -> bool {
        self.out.is_empty() && self.back.is_empty()
    }
}

/// Pages that leave the device at once, if as many may: each move waits for the device.
pub(crate) const OUT_AT_ONCE: usize = 8;

impl Pool {
    pub(crate) fn new(places: usize) -> Self {
        Self {
            free: (0..places as u32).rev().collect(),
            pages: Vec::new(),
            unused: Vec::new(),
            sequences: BTreeMap::new(),
            places,
            ram: 0,
            in_ram: 0,
            reservations: 0,
        }
    }

    /// Sets the number of pages that may be in RAM.
    pub(crate) fn set_ram(&mut self, pages: usize) {
        self.ram = pages;
    }

    /// Sets the number of positions of some sequences: allocates the missing pages and frees those behind the last position. No
    /// sequence may be listed twice. All pages of these sequences are on the device after the moves that this returns.
    ///
    /// # Errors
    /// The number of pages to allocate, if fewer can be made free. Nothing has changed.
    pub(crate) fn reserve(&mut self, wanted: &[(SequenceId, usize)]) -> Result<Moves, usize> {
        let kept =
            |(sequence, positions): &(SequenceId, usize)| positions.div_ceil(POSITIONS).min(self.held(*sequence).len());
        let (mut more, mut freed, mut back) = (0, 0, BTreeSet::new());
        for one in wanted {
            let (held, kept) = (self.held(one.0), kept(one));
            more += one.1.div_ceil(POSITIONS) - kept;
            let ends = |page: &&u32| {
                let page = &self.pages[**page as usize];
                page.references == 1 && matches!(page.at, Place::Device(_))
            };
            freed += held[kept..].iter().filter(ends).count();
            if self.in_ram > 0 {
                back.extend(
                    held[..kept].iter().copied().filter(|page| matches!(self.pages[*page as usize].at, Place::Ram(_))),
                );
            }
        }
        let needed = (more + back.len()).saturating_sub(self.free.len() + freed);
        let mut moves = Moves::default();
        if needed > 0 {
            let named: BTreeSet<u32> = wanted.iter().flat_map(|one| &self.held(one.0)[..kept(one)]).copied().collect();
            let mut able = self.oldest_but(&named);
            // Those that return make room in RAM.
            let room = (self.ram + back.len()).saturating_sub(self.in_ram);
            if needed > able.len().min(room) {
                return Err(more);
            }
            able.truncate(needed.max(OUT_AT_ONCE).min(room));
            moves.out = able;
        }
        for &(page, place) in &moves.out {
            self.pages[page as usize].at = Place::Ram(Vec::new());
            self.free.push(place);
        }
        self.in_ram += moves.out.len();
        self.reservations += 1;
        // Shrink first: the same call may need the freed pages.
        for (sequence, positions) in wanted {
            let sequence = self.sequences.entry(*sequence).or_default();
            sequence.used = self.reservations;
            let dropped = sequence.pages.split_off(positions.div_ceil(POSITIONS).min(sequence.pages.len()));
            self.drop_references(dropped);
        }
        for page in back {
            moves.back.extend(self.free.pop().map(|place| (page, place)));
        }
        for (sequence, positions) in wanted {
            for _ in self.held(*sequence).len()..positions.div_ceil(POSITIONS) {
                let Some(place) = self.free.pop() else { break };
                let page = self.new_page(place);
                self.sequences.entry(*sequence).or_default().pages.push(page);
            }
        }
        Ok(moves)
    }

    /// Pages on the device with their places, those of the sequences that were used longest ago first, without these.
    fn oldest_but(&self, named: &BTreeSet<u32>) -> Vec<(u32, u32)> {
        let mut used: BTreeMap<u32, u64> = BTreeMap::new();
        for sequence in self.sequences.values() {
            for page in &sequence.pages {
                let last = used.entry(*page).or_default();
                *last = sequence.used.max(*last);
            }
        }
        let on_device = |(page, used): (u32, u64)| match self.pages[page as usize].at {
            Place::Device(place) if !named.contains(&page) => Some((used, page, place)),
            Place::Device(_) | Place::Ram(_) | Place::Nowhere => None,
        };
        let mut pages: Vec<(u64, u32, u32)> = used.into_iter().filter_map(on_device).collect();
        pages.sort_unstable();
        pages.into_iter().map(|(_, page, place)| (page, place)).collect()
    }

    fn new_page(&mut self, place: u32) -> u32 {
        let new = Page { at: Place::Device(place), references: 1 };
        match self.unused.pop() {
            Some(page) => {
                self.pages[page as usize] = new;
                page
            }
            None => {
                self.pages.push(new);
                self.pages.len() as u32 - 1
            }
        }
    }

    /// The contents of a page that has left the device.
    pub(crate) fn put(&mut self, page: u32, contents: Vec<u8>) {
        if let Place::Ram(empty) = &mut self.pages[page as usize].at {
            *empty = contents;
        }
    }

    /// A page returns to the device. Returns its contents.
    pub(crate) fn take(&mut self, page: u32, place: u32) -> Vec<u8> {
        match std::mem::replace(&mut self.pages[page as usize].at, Place::Device(place)) {
            Place::Ram(contents) => {
                self.in_ram -= 1;
                contents
            }
            Place::Device(_) | Place::Nowhere => Vec::new(),
        }
    }

    /// Gives a sequence the pages of the first `positions` of another, instead of those that it had.
    pub(crate) fn share(&mut self, from: SequenceId, to: SequenceId, positions: usize) {
        let pages: Vec<u32> = self.held(from).iter().take(positions.div_ceil(POSITIONS)).copied().collect();
        pages.iter().for_each(|page| self.pages[*page as usize].references += 1);
        self.release(to);
        self.sequences.insert(to, Sequence { pages, used: self.reservations });
    }

    pub(crate) fn release(&mut self, sequence: SequenceId) {
        let Sequence { pages, .. } = self.sequences.remove(&sequence).unwrap_or_default();
        self.drop_references(pages);
    }

    /// Frees the pages that no other sequence has, the last one first.
    fn drop_references(&mut self, pages: Vec<u32>) {
        for number in pages.into_iter().rev() {
            let page = &mut self.pages[number as usize];
            page.references -= 1;
            if page.references > 0 {
                continue;
            }
            match std::mem::take(&mut page.at) {
                Place::Device(place) => self.free.push(place),
                Place::Ram(_) => self.in_ram -= 1,
                Place::Nowhere => {}
            }
            self.unused.push(number);
        }
    }

    fn held(&self, sequence: SequenceId) -> &[u32] {
        self.sequences.get(&sequence).map_or(&[], |sequence| &sequence.pages)
    }

    /// Places of a sequence's pages on the device, in the order of positions. They are there after a reservation that names the
    /// sequence.
    pub(crate) fn of(&self, sequence: SequenceId) -> impl Iterator<Item = u32> + '_ {
        self.held(sequence).iter().map(move |page| match self.pages[*page as usize].at {
            Place::Device(place) => place,
            Place::Ram(_) | Place::Nowhere => unreachable!("page {page} of sequence {sequence} is not on the device"),
        })
    }

    /// Free places on the device, and all of them.
    pub(crate) fn free_of(&self) -> (usize, usize) {
        (self.free.len(), self.places)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn places(pool: &Pool, sequence: SequenceId) -> Vec<u32> {
        pool.of(sequence).collect()
    }

    /// Reserves without moves.
    fn reserve(pool: &mut Pool, wanted: &[(SequenceId, usize)]) -> Result<(), usize> {
        pool.reserve(wanted).map(|moves| assert!(moves.is_empty(), "{moves:?}"))
    }

    /// Reserves, and moves contents between RAM and a device whose places hold one byte each.
    fn move_pages(pool: &mut Pool, device: &mut [u8], wanted: &[(SequenceId, usize)]) -> Result<(usize, usize), usize> {
        let moves = pool.reserve(wanted)?;
        moves.out.iter().for_each(|(page, place)| pool.put(*page, vec![device[*place as usize]]));
        moves.back.iter().for_each(|(page, place)| device[*place as usize] = pool.take(*page, *place)[0]);
        Ok((moves.out.len(), moves.back.len()))
    }

    #[test]
    fn pages_are_allocated_once_and_freed() {
        let mut pool = Pool::new(5);
        assert_eq!(reserve(&mut pool, &[(1, 129), (2, 128)]), Ok(()));
        assert_eq!((pool.held(1).len(), pool.held(2).len(), pool.free_of()), (2, 1, (2, 5)));
        assert_eq!(reserve(&mut pool, &[(2, 4 * 128)]), Err(3));
        assert_eq!(reserve(&mut pool, &[(3, 128), (2, 3 * 128)]), Err(3), "only the first request fits");
        assert_eq!((pool.held(2).len(), pool.held(3).len(), pool.free_of()), (1, 0, (2, 5)), "nothing changed");
        assert_eq!(reserve(&mut pool, &[(2, 3 * 128)]), Ok(()));
        let mut all: Vec<u32> = places(&pool, 1).into_iter().chain(places(&pool, 2)).collect();
        all.sort_unstable();
        assert_eq!(all, [0, 1, 2, 3, 4]);
        assert_eq!(reserve(&mut pool, &[(3, 128), (1, 5)]), Ok(()), "the page of dropped positions is reused");
        assert_eq!((pool.held(1).len(), pool.held(3).len(), pool.free_of()), (1, 1, (0, 5)));
        pool.release(2);
        pool.release(2);
        assert_eq!((pool.free_of(), pool.held(2).len()), ((3, 5), 0));
    }

    #[test]
    fn a_shared_page_is_free_when_no_sequence_has_it() {
        let mut pool = Pool::new(4);
        reserve(&mut pool, &[(1, 3 * 128)]).unwrap();
        pool.share(1, 2, 2 * 128);
        assert_eq!((places(&pool, 2), pool.free_of()), (places(&pool, 1)[..2].to_vec(), (1, 4)));
        assert_eq!(
            reserve(&mut pool, &[(1, 128), (2, 5 * 128)]),
            Err(3),
            "one page would become free, one stays shared"
        );
        reserve(&mut pool, &[(1, 128), (2, 4 * 128)]).unwrap();
        assert_eq!((pool.held(2).len(), pool.free_of()), (4, (0, 4)));
        pool.release(1);
        assert_eq!(pool.free_of(), (0, 4));
        pool.release(2);
        assert_eq!(pool.free_of(), (4, 4));
    }

    #[test]
    fn pages_that_were_used_longest_ago_move_to_ram_and_back() {
        let (mut pool, mut device) = (Pool::new(4), [0; 4]);
        pool.set_ram(3);
        for sequence in [1, 2] {
            assert_eq!(move_pages(&mut pool, &mut device, &[(sequence, 2 * 128)]), Ok((0, 0)));
            for (place, n) in places(&pool, sequence).into_iter().zip(1..) {
                device[place as usize] = 10 * sequence as u8 + n;
            }
        }
        let contents = |pool: &Pool, device: &[u8; 4], sequence| -> Vec<u8> {
            pool.of(sequence).map(|place| device[place as usize]).collect()
        };
        assert_eq!(move_pages(&mut pool, &mut device, &[(3, 4 * 128)]), Err(4), "RAM has room for three");
        assert_eq!(move_pages(&mut pool, &mut device, &[(2, 2 * 128)]), Ok((0, 0)));
        assert_eq!(move_pages(&mut pool, &mut device, &[(3, 128)]), Ok((3, 0)), "as many as RAM has room for");
        assert_eq!(move_pages(&mut pool, &mut device, &[(1, 2 * 128)]), Ok((0, 2)));
        assert_eq!(contents(&pool, &device, 1), [11, 12]);
        pool.share(2, 4, 2 * 128);
        assert_eq!(move_pages(&mut pool, &mut device, &[(2, 2 * 128), (4, 2 * 128)]), Ok((3, 1)));
        assert_eq!((contents(&pool, &device, 2), contents(&pool, &device, 4)), (vec![21, 22], vec![21, 22]));
        // What is dropped in RAM makes room there.
        assert_eq!(pool.in_ram, 3);
        pool.release(1);
        assert_eq!(pool.in_ram, 1);
        [2, 3, 4].into_iter().for_each(|sequence| pool.release(sequence));
        assert_eq!((pool.in_ram, pool.free_of()), (0, (4, 4)));
        assert_eq!(pool.unused.len(), pool.pages.len());
    }
}
