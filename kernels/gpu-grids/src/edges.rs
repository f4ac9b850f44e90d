//! Boundary conditions of lattice Boltzmann fluids on GPUs. Before a step, moving walls and open faces write the pulled
//! populations into ghost or solid cells, as `kernels/grids/src/lbm/edges.rs` does. Bounce-back at resting walls is a list that the
//! step kernel reads; periodic wrap-around is index arithmetic in the kernel.
#![expect(clippy::needless_range_loop, reason = "kernels loop over integer ranges only")]
use std::collections::HashSet;
use std::sync::Arc;

use cubecl::prelude::*;
use kernels_grids::GridError;
use kernels_grids::frame::Frame;
use kernels_grids::lbm::Directions;
use kernels_grids::lbm::edges::{Back, Edges as Known, Turn as KnownTurn};

use crate::collision::ENLARGED;
use crate::memory::{Buffer, address, element, over};
use crate::place::Memory;

/// Boundary lists of a tile.
pub(super) struct Edges {
    /// Bounce-back links at resting walls, in the format of [`super::collision::bounced`]; applied by the step kernel.
    pub(super) links: Option<Buffer>,
    /// Links of moving walls, inlets, and cells at outlets. Four words each: source element, target element, the two
    /// directions in bytes with [`NEGATIVE`] if the sign changes, and the added term.
    bounces: Option<Buffer>,
    openings: Vec<Opening>,
}

/// An outlet.
struct Opening {
    turn: Turn,
    /// Per cell: the element pulled for each direction, then the given density and the body force along the inward
    /// normal.
    cells: Buffer,
}

/// Words per bounce-back link, and words of given values per outlet cell.
const BOUNCE: usize = 4;
const GIVEN: usize = 2;
/// Flag for anti-bounce-back: the sign changes.
const NEGATIVE: u32 = 1 << 16;

/// The directions relative to an open face: a compile-time parameter of kernels, cheap to clone.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Turn(Arc<Inner>);

#[derive(Debug, PartialEq, Eq, Hash)]
struct Inner {
    /// Number of directions of the lattice.
    count: usize,
    along: Vec<usize>,
    leaving: Vec<usize>,
    coming: Vec<usize>,
    /// The direction along the inward normal, its opposite, and its share of the mass flow as bits.
    straight: (usize, usize, u32),
    /// The diagonal directions into the grid, their opposites, the entry of `axes`, and whether the sign along it is
    /// positive.
    diagonal: Vec<(usize, usize, usize, bool)>,
    axes: Vec<(usize, Vec<usize>, Vec<usize>)>,
}

impl Turn {
    fn new(turn: &KnownTurn, count: usize) -> Self {
        let (straight, opposite, share) = turn.straight;
        let entry = |axis: usize| turn.axes.iter().position(|(other, ..)| *other == axis).unwrap_or(0);
        let diagonal = turn.diagonal.iter().map(|&(i, opposite, axis, sense)| (i, opposite, entry(axis), sense > 0.0));
        Self(Arc::new(Inner {
            count,
            along: turn.along.clone(),
            leaving: turn.leaving.clone(),
            coming: turn.coming.clone(),
            straight: (straight, opposite, share.to_bits()),
            diagonal: diagonal.collect(),
            axes: turn.axes.clone(),
        }))
    }
}

impl Edges {
    pub(super) fn new<R: Runtime>(
        client: &ComputeClient<R>,
        edges: &Known,
        directions: &Directions,
        frame: &Frame,
        memory: &Memory,
    ) -> Result<Self, GridError> {
        let wrapped = |place: usize| memory.wrapped(frame, place) as u32;
        let mut words = Vec::new();
        // Sorted by direction, so that adjacent entries are adjacent in memory.
        let mut bounces: Vec<_> = edges.bounces(frame).collect();
        bounces.sort_by_key(|&(i, ..)| i);
        // The outlet condition reads the populations that its cells pull.
        let open: HashSet<usize> = edges.openings().flat_map(|(_, cells)| cells.map(|(cell, _)| cell)).collect();
        let mut at_rest = Vec::new();
        for (i, from, to, Back { negative, add }) in bounces {
            if add == 0.0 && !negative && !open.contains(&from) {
                at_rest.push((from, 1u32 << (i - 1)));
                continue;
            }
            let planes = (i | directions.opposite[i] << 8) as u32 | if negative { NEGATIVE } else { 0 };
            words.extend([from as u32, wrapped(to), planes, add.to_bits()]);
        }
        let list = |words: &[u32]| match words.is_empty() {
            true => Ok(None),
            false => Buffer::from_elements(client, words).map(Some),
        };
        let (bounces, links) = (list(&words)?, list(&linked(at_rest, memory.plane))?);
        let (row, layer) = (memory.row as isize, memory.layer as isize);
        let mut openings = Vec::new();
        for (turn, cells) in edges.openings() {
            let mut words = Vec::new();
            for (cell, given) in cells {
                words.extend(directions.c.iter().map(|c| {
                    let [x, y, z] = c.map(isize::from);
                    wrapped((cell as isize - (x + y * row + z * layer)) as usize)
                }));
                words.extend([given.density.to_bits(), given.push.to_bits()]);
            }
            if let Some(cells) = list(&words)? {
                openings.push(Opening { turn: Turn::new(turn, directions.c.len()), cells });
            }
        }
        Ok(Self { links, bounces, openings })
    }

    /// Applies the boundary conditions to the state. `S`: storage type of its `len` numbers; `enlarged`: scaled, with
    /// 16 bits.
    pub(super) fn fill<R: Runtime, S: Float>(
        &self,
        client: &ComputeClient<R>,
        (state, len, enlarged): (&Buffer, usize, bool),
        memory: &Memory,
    ) {
        let wide = address(client, len);
        // SAFETY: the length is that of the allocation, and entries are elements of the state.
        let arg = || unsafe { ArrayArg::from_raw_parts(state.handle.clone(), len) };
        if let Some(list) = &self.bounces {
            let count = list.len / BOUNCE;
            let (cubes, dim) = over(count);
            // SAFETY: threads past the last entry do nothing.
            unsafe {
                bounce::launch_unchecked::<S, R>(
                    client,
                    cubes,
                    dim,
                    wide,
                    list.arg(),
                    arg(),
                    memory.plane,
                    count,
                    enlarged,
                );
            }
        }
        for Opening { turn, cells } in &self.openings {
            let count = cells.len / (turn.0.count + GIVEN);
            let (cubes, dim) = over(count);
            // SAFETY: as above.
            unsafe {
                open::launch_unchecked::<S, R>(
                    client,
                    cubes,
                    dim,
                    wide,
                    cells.arg(),
                    arg(),
                    memory.plane,
                    count,
                    turn.clone(),
                    enlarged,
                );
            }
        }
    }
}

/// The words of [`Edges::links`], from pairs of element and direction bit.
fn linked(mut at_rest: Vec<(usize, u32)>, plane: usize) -> Vec<u32> {
    if at_rest.is_empty() {
        return Vec::new();
    }
    at_rest.sort_unstable();
    let first = 2 * plane.div_ceil(32);
    let mut words = vec![0; first];
    for cell in at_rest.chunk_by(|one, other| one.0 == other.0) {
        let (word, bit) = (cell[0].0 / 32, cell[0].0 % 32);
        if words[2 * word] == 0 {
            words[2 * word + 1] = words.len() as u32;
        }
        words[2 * word] |= 1 << bit;
        words.push(cell.iter().fold(0, |all, (_, direction)| all | direction));
    }
    words
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn bounce<S: Float>(list: &Array<u32>, state: &mut Array<S>, plane: usize, count: usize, #[comptime] enlarged: bool) {
    let i = element();
    if i < count {
        let at = i * 4;
        let planes = list[at + 2];
        let from = (planes >> 8u32 & 255u32) as usize * plane + list[at] as usize;
        let to = (planes & 255u32) as usize * plane + list[at + 1] as usize;
        let gone = get::<S>(state, from, enlarged);
        let gone = select(planes >= comptime!(NEGATIVE), -gone, gone);
        put::<S>(state, to, gone + f32::reinterpret(list[at + 3]), enlarged);
    }
}

/// Zou-He pressure boundary with the mean normal velocity of two steps, as in `Turn::fill` of `kernels/grids/src/lbm/edges.rs`.
#[cube(launch_unchecked, address_type = "dynamic")]
fn open<S: Float>(
    list: &Array<u32>,
    state: &mut Array<S>,
    plane: usize,
    count: usize,
    #[comptime] turn: Turn,
    #[comptime] enlarged: bool,
) {
    let i = element();
    if i < count {
        let at = i * comptime!(turn.0.count + 2);
        let given = at + comptime!(turn.0.count);
        let density = f32::reinterpret(list[given]);
        let push = f32::reinterpret(list[given + 1]);
        let along = sum::<S>(list, state, at, plane, comptime!(turn.0.along.clone()), false, enlarged);
        let twice = 2.0f32 * sum::<S>(list, state, at, plane, comptime!(turn.0.leaving.clone()), false, enlarged);
        let leaving = 1.0f32 + (along + twice);
        let stayed = sum::<S>(list, state, at, plane, comptime!(turn.0.along.clone()), true, enlarged);
        let left = sum::<S>(list, state, at, plane, comptime!(turn.0.leaving.clone()), true, enlarged);
        let came = sum::<S>(list, state, at, plane, comptime!(turn.0.coming.clone()), true, enlarged);
        let was = (came - left - push) / (1.0f32 + (stayed + left + came));
        let into = 0.5f32 * ((1.0f32 - leaving / density) + was);
        let flow = leaving / (1.0f32 - into) * into;
        let mut turns = Sequence::<f32>::new();
        let axes = comptime!(turn.0.axes.len());
        #[unroll]
        for k in 0..axes {
            let with = sum::<S>(list, state, at, plane, comptime!(turn.0.axes[k].1.clone()), false, enlarged);
            let against = sum::<S>(list, state, at, plane, comptime!(turn.0.axes[k].2.clone()), false, enlarged);
            turns.push(-0.5f32 * (with - against));
        }
        let (straight, opposite) = comptime!((turn.0.straight.0, turn.0.straight.1));
        let share = comptime!(f32::from_bits(turn.0.straight.2));
        let back = pulled::<S>(list, state, at, plane, opposite, enlarged);
        put::<S>(state, place(list, at, plane, straight), back + flow * share, enlarged);
        let diagonal = comptime!(turn.0.diagonal.len());
        #[unroll]
        for k in 0..diagonal {
            let (i, opposite) = comptime!((turn.0.diagonal[k].0, turn.0.diagonal[k].1));
            let turned = *turns.index(comptime!(turn.0.diagonal[k].2));
            let back = pulled::<S>(list, state, at, plane, opposite, enlarged) + flow * comptime!(1.0f32 / 6.0);
            let value = if comptime!(turn.0.diagonal[k].3) { back + turned } else { back - turned };
            put::<S>(state, place(list, at, plane, i), value, enlarged);
        }
    }
}

/// Sum over directions of the populations that the cell pulls, or of its own.
#[cube]
fn sum<S: Float>(
    list: &Array<u32>,
    state: &Array<S>,
    at: usize,
    plane: usize,
    #[comptime] which: Vec<usize>,
    #[comptime] own: bool,
    #[comptime] enlarged: bool,
) -> f32 {
    let count = comptime!(which.len());
    let mut sum = 0.0f32;
    #[unroll]
    for k in 0..count {
        let i = comptime!(which[k]);
        // The rest population is pulled from the cell itself.
        let place = if comptime!(own) { i * plane + list[at] as usize } else { place(list, at, plane, i) };
        sum += get::<S>(state, place, enlarged);
    }
    sum
}

#[cube]
fn pulled<S: Float>(
    list: &Array<u32>,
    state: &Array<S>,
    at: usize,
    plane: usize,
    #[comptime] i: usize,
    #[comptime] enlarged: bool,
) -> f32 {
    get::<S>(state, place(list, at, plane, i), enlarged)
}

/// Loads a stored number.
#[cube]
fn get<S: Float>(from: &Array<S>, at: usize, #[comptime] enlarged: bool) -> f32 {
    let value = f32::cast_from(from[at]);
    if comptime!(enlarged) { value * comptime!(1.0f32 / ENLARGED) } else { value }
}

#[cube]
fn put<S: Float>(to: &mut Array<S>, at: usize, value: f32, #[comptime] enlarged: bool) {
    let value = if comptime!(enlarged) { value * comptime!(ENLARGED) } else { value };
    to[at] = S::cast_from(value);
}

/// The element that the cell pulls for a direction.
#[cube]
fn place(list: &Array<u32>, at: usize, plane: usize, #[comptime] i: usize) -> usize {
    i * plane + list[at + i] as usize
}
