//! Life-like cellular automata, bit-sliced: 64 cells per word, neighbour counts as bit planes.
//!
//! For each row, the sums of three adjacent cells are two bit planes. Adding those of three rows gives the number of
//! live cells in the 3 × 3 square as four planes, and the rule is a boolean function of these and the cell itself.
//! Going down a column of words, each row's sums are computed once.
use std::ops::Range;

use kernels::cpu::Isa;
use kernels::cpu::simd::{Kernel, Simd};
use kernels::cpu::words::{One, Words};
use kernels::planes::{Planes, Shared};

use crate::error::GridError;
use crate::frame::Frame;
use crate::grid::{Face, Grid};
use crate::stepper::{Rows, Stepper, aligned_frame};

pub use pattern::{Pattern, RUNS_MAX, Run};

mod pattern;

/// A two-dimensional Life-like rule: the neighbour counts with which a cell is born, and with which it survives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Life {
    /// Bit n: born with n neighbours.
    birth: u16,
    /// Bit n: survives with n neighbours.
    survival: u16,
}

impl Life {
    /// Conway's: born with 3, survives with 2 or 3.
    pub const CONWAY: Self = Self { birth: 1 << 3, survival: 1 << 2 | 1 << 3 };

    /// Parses `B3/S23`, also without the slash (`b3s23`), or the older `23/3` with survival first.
    ///
    /// # Errors
    /// Another form, or a digit above 8.
    pub fn parse(text: &str) -> Result<Self, GridError> {
        let error = |what: String| GridError::Parameter { rule: "life", what };
        let form = || error(format!("{text:?} is not a rule: expected one such as B3/S23, b3s23 or 23/3"));
        let text = text.trim();
        let second_letter = || text.char_indices().skip(1).find(|(_, sign)| sign.is_ascii_alphabetic());
        let parts = text.split_once('/').or_else(|| second_letter().map(|(at, _)| text.split_at(at)));
        let (first, second) = parts.ok_or_else(form)?;
        let strip =
            |part: &'_ str, letter: char| part.strip_prefix([letter, letter.to_ascii_lowercase()]).map(str::to_owned);
        let (birth, survival) = match (strip(first, 'B'), strip(second, 'S')) {
            (Some(birth), Some(survival)) => (birth, survival),
            (None, None) => match (strip(first, 'S'), strip(second, 'B')) {
                (Some(survival), Some(birth)) => (birth, survival),
                _ => (second.to_owned(), first.to_owned()),
            },
            _ => return Err(form()),
        };
        let counts = |digits: &str| {
            digits.chars().try_fold(0u16, |counts, digit| match digit.to_digit(10) {
                Some(count) if count <= 8 => Ok(counts | 1 << count),
                Some(count) => Err(error(format!("{count} neighbours in {text:?}: a cell has 8"))),
                None => Err(form()),
            })
        };
        Ok(Self { birth: counts(&birth)?, survival: counts(&survival)? })
    }

    /// Birth and survival masks. Bit n: born, or survives, with n neighbours.
    pub fn counts(&self) -> (u16, u16) {
        (self.birth, self.survival)
    }

    pub(crate) fn check(&self, grid: &Grid) -> Result<(), GridError> {
        if grid.dimensions() != 2 {
            let what = format!("expected a grid of two dimensions, found {}", grid.dimensions());
            return Err(GridError::Parameter { rule: "life", what });
        }
        for axis in 0..grid.dimensions() {
            for (side, face) in grid.faces(axis).into_iter().enumerate() {
                if !matches!(face, Face::Periodic | Face::Wall) {
                    let expected = "\"periodic\" or \"wall\" (dead cells outside)";
                    return Err(grid.bad_face("life", axis, side, expected));
                }
            }
        }
        Ok(())
    }
}

impl std::fmt::Display for Life {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let digits = |counts: u16| (0..=8).filter(|n| counts >> n & 1 == 1).map(|n| n.to_string()).collect::<String>();
        write!(f, "B{}/S{}", digits(self.birth), digits(self.survival))
    }
}

impl Stepper for Life {
    fn fill(&self, frame: &Frame, state: &mut Planes, _steps: usize) {
        let (cells, [width, height, _]) = (state.plane_mut::<u64>(0), frame.size);
        let [below, above] = frame.halo[1];
        for side in (0..2).filter(|&side| frame.halo[0][side] == 0) {
            fill_ends(frame, cells, -below..height + above, side);
        }
        let [left, right] = frame.ring[0];
        for (side, ghost, source) in [(0, -1, height - 1), (1, height, 0)] {
            if frame.halo[1][side] > 0 {
                continue;
            }
            let row = |y| frame.at([-left, y, 0])..frame.at([width + right - 1, y, 0]) + 1;
            if frame.wraps[1] {
                cells.copy_within(row(source), row(ghost).start);
            } else {
                cells[row(ghost)].fill(0);
            }
        }
    }

    unsafe fn rows(&self, isa: Isa, frame: &Frame, state: &Planes, next: Shared<'_>, rows: &Rows) {
        let start = frame.at([rows.x.start, rows.y.start, 0]);
        let end = frame.at([rows.x.end - 1, rows.y.start, 0]) + 1;
        let part = Part {
            // SAFETY: within the planes, by the caller's contract.
            from: unsafe { state.plane::<u64>(0).as_ptr().add(start) },
            // SAFETY: as above.
            to: unsafe { next.start::<u64>(0).add(start) },
            stride: frame.strides()[0],
            rows: rows.y.len(),
            words: end - start,
        };
        // SAFETY: a row, one word on either side and the rows above and below lie in the plane; the instruction set was
        // detected.
        unsafe {
            if *self == Self::CONWAY {
                isa.run(Walk { part, next: Conway });
            } else {
                isa.run(Walk { part, next: Counted::new(self) });
            }
        }
    }
}

/// Fills the ghost cells at one end of these rows.
fn fill_ends(frame: &Frame, cells: &mut [u64], rows: Range<isize>, side: usize) {
    let width = frame.size[0];
    let (ghost, source) = if side == 0 { (-1, width - 1) } else { (width, 0) };
    let (to, from) = (frame.at([ghost, rows.start, 0]), frame.at([source, rows.start, 0]));
    let (bit, shift) = (ghost.rem_euclid(64), source.rem_euclid(64));
    for row in 0..rows.len() {
        let next = row * frame.strides()[0] as usize;
        let alive = frame.wraps[0] && cells[from + next] >> shift & 1 == 1;
        let word = &mut cells[to + next];
        *word = *word & !(1 << bit) | u64::from(alive) << bit;
    }
}

/// A block of rows, in whole words.
#[derive(Clone, Copy)]
struct Part {
    from: *const u64,
    to: *mut u64,
    stride: isize,
    rows: usize,
    words: usize,
}

/// A cell's next state from the cell and the bit planes of the live count in its 3 × 3 square, which includes it.
trait Next: Copy {
    unsafe fn next<V: Words>(&self, count: [V::W; 4], cell: V::W) -> V::W;
}

#[derive(Clone, Copy)]
struct Conway;

impl Next for Conway {
    /// Three in the square, or four with the cell alive.
    #[inline(always)]
    unsafe fn next<V: Words>(&self, [t0, t1, t2, _]: [V::W; 4], cell: V::W) -> V::W {
        // SAFETY: the caller's contract.
        unsafe {
            // t0 & t1 & !t2, or cell & !t0 & !t1 & t2. Nine is 1001, so t3 is not needed.
            let three = V::and(t0, t1);
            let low = V::or(t0, t1);
            let four = V::and(V::xor(V::or(low, cell), low), t2);
            V::or(four, V::xor(three, V::and(three, t2)))
        }
    }
}

/// Any rule, as tables over the count in the square.
#[derive(Clone, Copy)]
struct Counted {
    /// All bits set for counts with which a dead cell is born.
    born: [u64; 10],
    /// All bits set for counts with which dead and live cells have different next states.
    differs: [u64; 10],
}

impl Counted {
    fn new(life: &Life) -> Self {
        let all = |set: bool| if set { u64::MAX } else { 0 };
        let born = std::array::from_fn(|count| all(count < 9 && life.birth >> count & 1 == 1));
        let survives = |count: usize| all(count > 0 && life.survival >> (count - 1) & 1 == 1);
        Self { born, differs: std::array::from_fn(|count| born[count] ^ survives(count)) }
    }
}

impl Next for Counted {
    #[inline(always)]
    unsafe fn next<V: Words>(&self, [t0, t1, t2, t3]: [V::W; 4], cell: V::W) -> V::W {
        // SAFETY: the caller's contract.
        unsafe {
            let low = self.four::<V>(0, t0, t1, cell);
            let high = self.four::<V>(4, t0, t1, cell);
            choose::<V>(t3, choose::<V>(t2, low, high), self.pair::<V>(8, t0, cell))
        }
    }
}

// Functions, not closures: closures would not be compiled for the instruction set.
impl Counted {
    #[inline(always)]
    unsafe fn four<V: Words>(&self, count: usize, t0: V::W, t1: V::W, cell: V::W) -> V::W {
        // SAFETY: the caller's contract.
        unsafe { choose::<V>(t1, self.pair::<V>(count, t0, cell), self.pair::<V>(count + 2, t0, cell)) }
    }

    #[inline(always)]
    unsafe fn pair<V: Words>(&self, count: usize, t0: V::W, cell: V::W) -> V::W {
        // SAFETY: the caller's contract.
        unsafe { choose::<V>(t0, self.leaf::<V>(count, cell), self.leaf::<V>(count + 1, cell)) }
    }

    #[inline(always)]
    unsafe fn leaf<V: Words>(&self, count: usize, cell: V::W) -> V::W {
        // SAFETY: the caller's contract.
        unsafe { V::xor(V::and(cell, V::splat_word(self.differs[count])), V::splat_word(self.born[count])) }
    }
}

/// `one` where the bit is set, else `zero`.
#[inline(always)]
unsafe fn choose<V: Words>(by: V::W, zero: V::W, one: V::W) -> V::W {
    // SAFETY: the caller's contract.
    unsafe { V::xor(zero, V::and(by, V::xor(zero, one))) }
}

struct Walk<N> {
    part: Part,
    next: N,
}

impl<N: Next> Kernel for Walk<N> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Self { part, next } = self;
        aligned_frame();
        let mut word = 0;
        // SAFETY: the contract of `Stepper::rows` holds here too.
        unsafe {
            while word + S::WORDS <= part.words {
                column::<S, N>(part, next, word);
                word += S::WORDS;
            }
            while word < part.words {
                column::<One, N>(part, next, word);
                word += 1;
            }
        }
    }
}

/// Two bit planes: the sum of three bits.
type Sums<V> = (<V as Words>::W, <V as Words>::W);

/// Computes all rows of a column as wide as one vector.
#[inline(always)]
unsafe fn column<V: Words, N: Next>(part: Part, next: N, word: usize) {
    // SAFETY: by the contract of `Stepper::rows`, rows -1 to `rows` and one word on either side are readable.
    unsafe {
        let (mut from, mut to) = (part.from.add(word).offset(-part.stride), part.to.add(word));
        let (mut above, _) = side_by_side::<V>(from);
        from = from.offset(part.stride);
        let (mut here, mut cell) = side_by_side::<V>(from);
        for _ in 0..part.rows {
            from = from.offset(part.stride);
            let (below, cell_below) = side_by_side::<V>(from);
            let (t0, c0) = sum::<V>(above.0, here.0, below.0);
            let (u0, u1) = sum::<V>(above.1, here.1, below.1);
            let carry = V::and(u0, c0);
            let count = [t0, V::xor(u0, c0), V::xor(u1, carry), V::and(u1, carry)];
            V::store_words(next.next::<V>(count, cell), to);
            to = to.offset(part.stride);
            (above, here, cell) = (here, below, cell_below);
        }
    }
}

/// For each cell the sum of its left neighbour, itself and its right neighbour; and the cells.
#[inline(always)]
unsafe fn side_by_side<V: Words>(at: *const u64) -> (Sums<V>, V::W) {
    // SAFETY: the caller's contract.
    unsafe {
        let cell = V::load_words(at);
        let left = V::or(V::left::<1>(cell), V::right::<63>(V::load_words(at.sub(1))));
        let right = V::or(V::right::<1>(cell), V::left::<63>(V::load_words(at.add(1))));
        (sum::<V>(left, cell, right), cell)
    }
}

#[inline(always)]
unsafe fn sum<V: Words>(a: V::W, b: V::W, c: V::W) -> Sums<V> {
    // SAFETY: the caller's contract.
    unsafe {
        let ab = V::xor(a, b);
        (V::xor(ab, c), V::or(V::and(a, b), V::and(ab, c)))
    }
}
