//! What cells pull from where no fluid is: other ends of periodic axes, walls, masks and open faces.
//!
//! Each is written into the place from which the one cell that looks there will pull, before the step. A solid cell's
//! own numbers mean nothing.
use std::ops::Range;

use super::Directions;
use crate::grid::frame::{Frame, Span};
use crate::grid::fused::{Cells, Near, PLANES_MAX};
use crate::grid::number::Number;
use crate::grid::planes::Planes;
use crate::grid::rule::{CellMap, SumOf};
use crate::grid::{Face, GridError};

/// The edges of one tile.
pub(crate) struct Edges {
    directions: &'static Directions,
    /// What bounces back, in the order of cells.
    links: Vec<Link>,
    /// By direction: owned cells into which it bounces back from the part of the mask whose force is wanted.
    masked: Vec<Vec<usize>>,
    /// By open face of the tile.
    open: Vec<(Turn, Vec<Open>)>,
    /// Bit rows of the owned cells that are solid, 64 from each multiple of 64 on; none if no cell is.
    solid: Vec<u64>,
}

/// Half-way bounce-back of one population of one cell.
#[derive(Clone, Copy)]
struct Link {
    cell: usize,
    /// Of the population that comes back, from the place beyond the cell from which it is pulled.
    direction: u8,
    /// What a moving wall adds.
    add: f32,
}

/// A cell at an open face.
#[derive(Clone, Copy)]
struct Open {
    cell: usize,
    given: Given,
}

/// What is known at an open face: the velocity into the grid and along the face's axes, or the density.
#[derive(Clone, Copy)]
pub(crate) enum Given {
    Velocity([f32; 3]),
    Density(f32),
}

/// Whether a cell, in local coordinates, is solid, or its force wanted.
type Is<'a> = &'a dyn Fn([isize; 3]) -> bool;

impl Edges {
    /// `pushed`: of which solid cells the force is wanted.
    pub(super) fn new(
        directions: &'static Directions,
        solid: Option<&CellMap<bool>>,
        pushed: Option<&CellMap<bool>>,
        frame: &Frame,
    ) -> Self {
        let whole = frame.whole();
        let solid: Vec<bool> = match solid {
            None => Vec::new(),
            Some(solid) => {
                let all = whole.rows().flat_map(|(y, z)| whole.0[0].clone().map(move |x| [x, y, z]));
                all.map(|at| frame.global(at).is_some_and(|at| solid(at))).collect()
            }
        };
        let is_solid = |at: [isize; 3]| {
            let [x, y, z] = std::array::from_fn(|axis| (at[axis] - whole.0[axis].start) as usize);
            !solid.is_empty() && solid[(z * whole.len(1) + y) * whole.len(0) + x]
        };
        let count = directions.c.len();
        let masked = vec![Vec::new(); count];
        let mut edges = Self { directions, links: Vec::new(), masked, open: Vec::new(), solid: Vec::new() };
        // Whatever is computed while a halo lasts.
        let computed = frame.span(frame.depth - 1);
        let is_pushed = |at: [isize; 3]| pushed.is_none_or(|pushed| frame.global(at).is_some_and(|at| pushed(at)));
        edges.link(frame, &computed, !solid.is_empty(), (&is_solid, &is_pushed));
        for axis in 0..frame.grid.dimensions() {
            (0..2).for_each(|side| edges.open(frame, &computed, axis, side, &is_solid));
        }
        if solid.iter().any(|&solid| solid) {
            for (y, z) in frame.span(0).rows() {
                for start in (0..frame.size[0]).step_by(64) {
                    let cells = (start..frame.size[0].min(start + 64)).map(|x| u64::from(is_solid([x, y, z])));
                    edges.solid.push(cells.enumerate().fold(0, |word, (i, bit)| word | bit << i));
                }
            }
        }
        edges
    }

    fn link(&mut self, frame: &Frame, computed: &Span, masked: bool, (is_solid, is_pushed): (Is<'_>, Is<'_>)) {
        let [width, height, depth] = frame.size;
        let deep = frame.grid.dimensions() == 3;
        for (y, z) in computed.rows() {
            // Without a mask there is something beyond the first and the last cells only.
            let at_face = y == 0 || y == height - 1 || deep && (z == 0 || z == depth - 1);
            let whole_row = masked || at_face;
            let step = if whole_row { 1 } else { (width - 1).max(1) };
            let first = if whole_row { computed.0[0].start } else { 0 };
            for x in (first..computed.0[0].end).step_by(step as usize) {
                if !is_solid([x, y, z]) {
                    self.link_cell(frame, [x, y, z], is_solid, is_pushed);
                }
            }
        }
    }

    fn link_cell(&mut self, frame: &Frame, cell: [isize; 3], is_solid: Is<'_>, is_pushed: Is<'_>) {
        for (i, c) in self.directions.c.iter().enumerate().skip(1) {
            let beyond: [isize; 3] = std::array::from_fn(|axis| cell[axis] - isize::from(c[axis]));
            let face = |axis: usize| match beyond[axis] {
                at if at < 0 => frame.face(axis, 0),
                at if at >= frame.size[axis] => frame.face(axis, 1),
                _ => None,
            };
            let wall = |moving: bool| {
                (0..3).rev().filter_map(face).find_map(|face| match face {
                    Face::Moving { velocity } => moving.then_some(velocity),
                    Face::Wall => (!moving).then_some([0.0; 3]),
                    Face::Periodic | Face::Fixed(_) | Face::Inlet { .. } | Face::Outlet { .. } => None,
                })
            };
            // In a corner a moving wall goes before one at rest: so it adds as much as it takes.
            let velocity = wall(true).or_else(|| wall(false));
            let faces = (0..3).any(|axis| face(axis).is_some());
            let masked = velocity.is_none() && !faces && is_solid(beyond);
            if masked && (0..3).all(|axis| (0..frame.size[axis]).contains(&cell[axis])) && is_pushed(beyond) {
                self.masked[i].push(frame.at(cell));
            }
            let velocity = velocity.or_else(|| masked.then_some([0.0; 3]));
            if let Some(velocity) = velocity {
                let along: f64 = c.iter().zip(velocity).map(|(c, v)| f64::from(*c) * f64::from(v)).sum();
                let add = (6.0 * self.directions.w[i] * along) as f32;
                self.links.push(Link { cell: frame.at(cell), direction: i as u8, add });
            }
        }
    }

    fn open(&mut self, frame: &Frame, computed: &Span, axis: usize, side: usize, is_solid: Is<'_>) {
        let Some(face @ (Face::Inlet { .. } | Face::Outlet { .. })) = frame.face(axis, side) else { return };
        let turn = Turn::new(self.directions, axis, side);
        let dimensions = frame.grid.dimensions();
        let given = |at: [usize; 3]| match face {
            Face::Inlet { velocity, parabola } => {
                let bent =
                    (0..dimensions).filter(|&across| parabola && across != axis && !frame.grid.is_periodic(across));
                let share = bent.fold(1.0, |share, across| {
                    let place = (at[across] as f32 + 0.5) / frame.grid.size()[across] as f32;
                    share * 4.0 * place * (1.0 - place)
                });
                let mut given = velocity.map(|part| share * part);
                given[axis] = if side == 0 { given[axis] } else { -given[axis] };
                Given::Velocity(given)
            }
            Face::Outlet { density } => Given::Density(density),
            Face::Periodic | Face::Wall | Face::Fixed(_) | Face::Moving { .. } => Given::Density(1.0),
        };
        let mut layer = computed.clone();
        let place = if side == 0 { 0 } else { frame.size[axis] - 1 };
        layer.0[axis] = place..place + 1;
        let mut cells = Vec::new();
        for (y, z) in layer.rows() {
            for x in layer.0[0].clone() {
                if let Some(global) = frame.global([x, y, z]).filter(|_| !is_solid([x, y, z])) {
                    cells.push(Open { cell: frame.at([x, y, z]), given: given(global) });
                }
            }
        }
        self.open.push((turn, cells));
    }

    /// What populations that bounce back give the mask in a step: twice their momentum, less that of the fluid at rest.
    pub(super) fn force(&self, sum: SumOf<'_>) -> Result<[i128; 3], GridError> {
        let mut force = [0i128; 3];
        for (i, cells) in self.masked.iter().enumerate().filter(|(_, cells)| !cells.is_empty()) {
            let sum = sum(self.directions.opposite[i], cells)?;
            for (force, c) in force.iter_mut().zip(self.directions.c[i]) {
                *force = force.wrapping_sub(2 * i128::from(c) * sum);
            }
        }
        Ok(force)
    }

    /// 64 owned cells, from local ones.
    pub(super) fn solid(&self, frame: &Frame, [x, y, z]: [isize; 3]) -> u64 {
        let words = (frame.size[0] as usize).div_ceil(64);
        let row = (z * frame.size[1] + y) as usize;
        self.solid.get(row * words + x as usize / 64).copied().unwrap_or(0)
    }

    /// What bounces back: the direction, where from in the plane of the opposite one, where to, what is added.
    pub(crate) fn bounces(&self, frame: &Frame) -> impl Iterator<Item = (usize, usize, usize, f32)> {
        let beyond = self.beyond(frame);
        self.links.iter().map(move |&Link { cell, direction, add }| {
            let direction = usize::from(direction);
            (direction, cell, cell.wrapping_add_signed(-beyond[direction]), add)
        })
    }

    /// By direction, elements from where a population is pulled to the cell that pulls it.
    fn beyond(&self, frame: &Frame) -> Vec<isize> {
        let [row, layer] = frame.strides();
        let elements = |c: &[i8; 3]| isize::from(c[0]) + isize::from(c[1]) * row + isize::from(c[2]) * layer;
        self.directions.c.iter().map(elements).collect()
    }

    /// The cells at open faces, face by face.
    pub(crate) fn openings(&self) -> impl Iterator<Item = (&Turn, impl Iterator<Item = (usize, Given)>)> {
        self.open.iter().map(|(turn, cells)| (turn, cells.iter().map(|open| (open.cell, open.given))))
    }

    /// For so many steps in one pass.
    pub(super) fn fill<N: Number>(&self, frame: &Frame, state: &mut Planes, steps: usize) {
        let columns = steps.min(frame.size[0] as usize);
        self.wrap::<N>(frame, state, columns as isize);
        let planes = state.shared();
        // Where each population is that the cell at element 0 pulls, and where it is itself.
        let own: Vec<*mut N> = (0..self.directions.c.len()).map(|i| planes.start::<N>(i)).collect();
        let pulled: Vec<*mut N> =
            own.iter().zip(self.beyond(frame)).map(|(own, beyond)| own.wrapping_offset(-beyond)).collect();
        // SAFETY: cells with links or at open faces are computed in some step, so they and all around them are in the frame;
        // nobody else has the planes. The same holds for cells beyond the ends.
        unsafe {
            self.meet(0..frame.elements(), &own, &pulled);
            if columns > 1 && frame.wraps[0] && !(self.links.is_empty() && self.open.is_empty()) {
                let (size, columns) = (frame.size[0], columns as isize - 1);
                for (x, away) in [(size - columns..size, -size), (0..columns, size)] {
                    let [own, pulled] =
                        [&own, &pulled].map(|all| all.iter().map(|at| at.wrapping_offset(away)).collect::<Vec<_>>());
                    for (y, z) in frame.span(frame.depth - 1).rows() {
                        self.meet(frame.at([x.start, y, z])..frame.at([x.end, y, z]), &own, &pulled);
                    }
                }
            }
        }
    }

    /// Writes what cells of a range of elements pull from walls, masks and open faces. `own`: by direction, where the population
    /// of the cell at element 0 is, `pulled`: where it pulls it from.
    ///
    /// # Safety
    /// These cells and all around them are there for whoever calls.
    unsafe fn meet<N: Number>(&self, cells: Range<usize>, own: &[*mut N], pulled: &[*mut N]) {
        let within = |len: usize, at: &dyn Fn(usize) -> usize| match len {
            0 => 0..0,
            _ => bound(len, cells.start, at)..bound(len, cells.end, at),
        };
        let bouncing = within(self.links.len(), &|i| self.links[i].cell);
        for &Link { cell, direction, add } in &self.links[bouncing] {
            let direction = usize::from(direction);
            let from = own[self.directions.opposite[direction]].wrapping_add(cell);
            // SAFETY: the caller's contract.
            unsafe { *pulled[direction].wrapping_add(cell) = N::of((*from).value() + add) };
        }
        for (turn, open) in &self.open {
            for open in &open[within(open.len(), &|i| open[i].cell)] {
                // SAFETY: as above.
                unsafe { turn.fill(open, pulled) };
            }
        }
    }

    /// Writes what cells of a row look at, as [`Self::fill`] does for all, of a tile in two dimensions.
    ///
    /// # Safety
    /// As [`RowWise::before`](crate::grid::fused::RowWise::before).
    pub(super) unsafe fn before<N: Number>(&self, frame: &Frame, Cells { x, y }: &Cells, near: &Near) {
        if self.links.is_empty() && self.open.is_empty() {
            return;
        }
        let (size, count) = (frame.size[0], self.directions.c.len());
        // At which elements of the tile these cells are, and how far they are from there.
        let parts = match frame.wraps[0] {
            true => [(x.start.max(0)..x.end.min(size), 0), (x.start + size..size, -size), (0..x.end - size, size)],
            false => [(x.clone(), 0), (0..0, 0), (0..0, 0)],
        };
        for (x, away) in parts.into_iter().filter(|(x, _)| !x.is_empty()) {
            let first = frame.at([0, *y, 0]) as isize - away;
            let mut own = [std::ptr::null_mut::<N>(); PLANES_MAX];
            let mut pulled = own;
            for (i, c) in self.directions.c.iter().enumerate() {
                let [c, up] = [c[0], c[1]].map(isize::from);
                own[i] = near[1].plane::<N>(i).wrapping_offset(-first);
                pulled[i] = near[(1 - up) as usize].plane::<N>(i).wrapping_offset(-first - c);
            }
            let cells = frame.at([x.start, *y, 0])..frame.at([x.end, *y, 0]);
            // SAFETY: the caller's contract: cells with links or at open faces are computed, so all that they look at is there.
            unsafe { self.meet(cells, &own[..count], &pulled[..count]) };
        }
    }

    /// The other ends of periodic axes: of what moves towards this one; of everything, where several columns are needed.
    /// Later axes take with them what earlier ones made.
    fn wrap<N: Number>(&self, frame: &Frame, state: &mut Planes, columns: isize) {
        let mut within = frame.span(frame.depth);
        let strides = frame.strides().map(isize::unsigned_abs);
        for axis in (0..frame.grid.dimensions()).filter(|&axis| frame.wraps[axis]) {
            let (size, deep) = (frame.size[axis], if axis == 0 { columns } else { 1 });
            for (i, c) in self.directions.c.iter().enumerate() {
                let cells = state.plane_mut::<N>(i);
                let sides = [(1, -deep, size - deep), (-1, size, 0)];
                for (_, to, from) in sides.into_iter().filter(|(into, ..)| deep > 1 || c[axis] == *into) {
                    let mut span = within.clone();
                    span.0[axis] = to..to + deep;
                    let [rows, layers] = [1, 2].map(|axis| span.len(axis));
                    let first = |place: isize| {
                        let mut at: [isize; 3] = std::array::from_fn(|axis| span.0[axis].start);
                        at[axis] = place;
                        frame.at(at)
                    };
                    let ([row, layer], len, to, from) = (strides, span.len(0), first(to), first(from));
                    for z in 0..layers {
                        let (to, from) = (to + z * layer, from + z * layer);
                        if len == 1 {
                            (0..rows).for_each(|y| cells[to + y * row] = cells[from + y * row]);
                        } else {
                            (0..rows)
                                .for_each(|y| cells.copy_within(from + y * row..from + y * row + len, to + y * row));
                        }
                    }
                }
            }
            within.0[axis] = -deep..size + deep;
        }
    }
}

/// The first of so many ascending elements that is not below one.
fn bound(len: usize, least: usize, at: &dyn Fn(usize) -> usize) -> usize {
    let (mut low, mut high) = (0, len);
    while low < high {
        let middle = low.midpoint(high);
        if at(middle) < least { low = middle + 1 } else { high = middle }
    }
    low
}

/// Directions as seen from an open face.
#[derive(Clone, Debug)]
pub(crate) struct Turn {
    /// Those along the face, rest first, and those that leave.
    pub(crate) along: Vec<usize>,
    pub(crate) leaving: Vec<usize>,
    /// The one that comes straight in, its opposite, and what it gains of the flow.
    pub(crate) straight: (usize, usize, f32),
    /// Those that come in aslant, their opposites, the axis and the sense along it.
    pub(crate) aslant: Vec<(usize, usize, usize, f32)>,
    /// By axis along the face: the axis, directions along it and against it.
    pub(crate) axes: Vec<(usize, Vec<usize>, Vec<usize>)>,
    pub(crate) axis: usize,
}

impl Turn {
    fn new(directions: &Directions, axis: usize, side: usize) -> Self {
        let into = if side == 0 { 1 } else { -1 };
        let towards = |sense: i8| (0..directions.c.len()).filter(move |&i| directions.c[i][axis] == sense);
        let across = |i: usize| (0..3).find(|&other| other != axis && directions.c[i][other] != 0);
        let (mut straight, mut aslant) = ((0, 0, 0.0), Vec::new());
        for i in towards(into) {
            let opposite = directions.opposite[i];
            match across(i) {
                None => straight = (i, opposite, (6.0 * directions.w[i]) as f32),
                Some(other) => aslant.push((i, opposite, other, f32::from(directions.c[i][other]))),
            }
        }
        let senses = |other: usize, sense: i8| towards(0).filter(|&i| directions.c[i][other] == sense).collect();
        let axes = (0..3).filter(|&other| other != axis).map(|other| (other, senses(other, 1), senses(other, -1)));
        Self {
            along: towards(0).collect(),
            leaving: towards(-into).collect(),
            straight,
            aslant,
            axes: axes.filter(|(_, with, _): &(_, Vec<usize>, _)| !with.is_empty()).collect(),
            axis,
        }
    }

    /// Zou's and He's condition: what comes from beyond bounces back, out of equilibrium, from what goes there, and momentum
    /// along the face is set right by what comes in aslant.
    unsafe fn fill<N: Number>(&self, open: &Open, pulled: &[*mut N]) {
        let at = |i: usize| pulled[i].wrapping_add(open.cell);
        // SAFETY: the caller's contract.
        let f = |i: usize| unsafe { (*at(i)).value() };
        let sum = |which: &[usize]| which.iter().fold(0.0, |sum, &i| sum + f(i));
        let leaving = sum(&self.along) + 2.0 * sum(&self.leaving);
        let (density, velocity) = match open.given {
            Given::Velocity(velocity) => ((1.0 + leaving) / (1.0 - velocity[self.axis]), velocity),
            Given::Density(density) => {
                let mut velocity = [0.0; 3];
                velocity[self.axis] = 1.0 - (1.0 + leaving) / density;
                (density, velocity)
            }
        };
        let flow = density * velocity[self.axis];
        let mut turn = [0.0; 3];
        for (axis, with, against) in &self.axes {
            turn[*axis] = 0.5 * (density * velocity[*axis] - (sum(with) - sum(against)));
        }
        let (i, opposite, share) = self.straight;
        // SAFETY: as above.
        unsafe { *at(i) = N::of(f(opposite) + flow * share) };
        for &(i, opposite, axis, sense) in &self.aslant {
            // SAFETY: as above.
            unsafe { *at(i) = N::of(f(opposite) + flow * (1.0 / 6.0) + sense * turn[axis]) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::grid::lbm::{D2Q9, D3Q19};

    #[test]
    fn open_faces_know_all_directions() {
        for (directions, dimensions, known) in [(&D2Q9, 2, [3, 3, 2, 1]), (&D3Q19, 3, [9, 5, 4, 3])] {
            for (axis, side) in [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)].into_iter().take(2 * dimensions) {
                let turn = Turn::new(directions, axis, side);
                let crossing = turn.axes[0].1.len();
                assert_eq!([turn.along.len(), turn.leaving.len(), turn.aslant.len(), crossing], known);
                assert_eq!(turn.axes.len(), dimensions - 1);
                let (straight, opposite, _) = turn.straight;
                assert_eq!(directions.c[straight][axis], if side == 0 { 1 } else { -1 });
                assert_eq!(directions.c[straight].map(|c| -c), directions.c[opposite]);
            }
        }
    }
}
