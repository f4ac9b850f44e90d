//! Boundary conditions of lattice Boltzmann fluids: periodic wrap-around, walls, masks and open faces.
//!
//! Before a step, the value that each boundary cell pulls is written where the cell pulls it: into a ghost or solid
//! cell, whose own state has no meaning. Walls, masks and inlets are half-way between cells; an outlet's density is
//! that of its cells, or half-way too in cells where several open faces meet.
use std::ops::Range;

use kernels::planes::Planes;

use super::Directions;
use crate::error::GridError;
use crate::frame::{Frame, Span};
use crate::fused::PLANES_MAX;
use crate::grid::Face;
use crate::number::Number;
use crate::region::CellMap;
use crate::stepper::{Cells, Near, SumOf};

/// The boundary conditions of one tile.
pub struct Edges {
    directions: &'static Directions,
    /// Bounce-back links, in the order of cells.
    links: Vec<Link>,
    /// By direction: owned cells that receive a population bounced back from the part of the mask whose force is
    /// measured.
    masked: Vec<Vec<usize>>,
    /// By open face of the tile.
    open: Vec<(Turn, Vec<Open>)>,
    /// Bit mask of the solid owned cells, row by row, 64 cells per word; empty if none is solid.
    solid: Vec<u64>,
}

/// Half-way bounce-back of one population of one cell.
#[derive(Clone, Copy)]
struct Link {
    cell: usize,
    /// The population that returns; the cell pulls it from a ghost or solid cell.
    direction: u8,
    back: Back,
}

/// How a population bounces back.
#[derive(Clone, Copy, PartialEq)]
pub struct Back {
    /// Anti-bounce-back (sign reversed): the density at the boundary is given instead of the velocity.
    pub negative: bool,
    /// The term added for a moving wall, an inlet or a given density.
    pub add: f32,
}

/// A cell at an outlet.
#[derive(Clone, Copy)]
struct Open {
    cell: usize,
    given: Given,
}

/// The given values at an outlet.
#[derive(Clone, Copy)]
pub struct Given {
    /// The density.
    pub density: f32,
    /// Body force along the inward normal.
    pub push: f32,
}

/// Whether a cell (local coordinates) is solid, or its force is measured.
type Is<'a> = &'a dyn Fn([isize; 3]) -> bool;

impl Edges {
    /// `force_cells`: the solid cells whose force is measured. `force`: body force per fluid cell.
    pub(super) fn new(
        directions: &'static Directions,
        solid: Option<&CellMap<bool>>,
        pushed: Option<&CellMap<bool>>,
        force: [f32; 3],
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
        // All cells computed while the halo is valid.
        let computed = frame.span(frame.depth - 1);
        let is_pushed = |at: [isize; 3]| pushed.is_none_or(|pushed| frame.global(at).is_some_and(|at| pushed(at)));
        edges.link(frame, &computed, !solid.is_empty(), (&is_solid, &is_pushed));
        for axis in 0..frame.grid.dimensions() {
            (0..2).for_each(|side| edges.open(frame, &computed, (axis, side), force, &is_solid));
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
            // Without a mask only the first and the last cells of a row have boundary links.
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
            let side = |axis: usize| match beyond[axis] {
                at if at < 0 => Some(0),
                at if at >= frame.size[axis] => Some(1),
                _ => None,
            };
            let faces =
                (0..3).filter_map(|axis| side(axis).and_then(|side| Some((axis, side, frame.face(axis, side)?))));
            let faces: Vec<(usize, usize, Face)> = faces.collect();
            let masked = faces.is_empty() && is_solid(beyond);
            if masked && (0..3).all(|axis| (0..frame.size[axis]).contains(&cell[axis])) && is_pushed(beyond) {
                self.masked[i].push(frame.at(cell));
            }
            let back = match faces.is_empty() {
                true => masked.then_some(Back { negative: false, add: 0.0 }),
                false => self.back(frame, cell, i, &faces),
            };
            if let Some(back) = back {
                self.links.push(Link { cell: frame.at(cell), direction: i as u8, back });
            }
        }
    }

    /// The bounce-back rule of a population that comes through these faces; `None` if the outlet condition provides it.
    fn back(&self, frame: &Frame, cell: [isize; 3], i: usize, faces: &[(usize, usize, Face)]) -> Option<Back> {
        let (c, w) = (self.directions.c[i], self.directions.w[i]);
        let dot = |a: [f64; 3], b: [f64; 3]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        let along = |velocity: [f32; 3]| dot(c.map(f64::from), velocity.map(f64::from));
        let moved =
            |density: f64, velocity| Back { negative: false, add: (6.0 * w * density * along(velocity)) as f32 };
        let wall = |face: &Face| match *face {
            Face::Wall => Some([0.0; 3]),
            Face::Moving { velocity } => Some(velocity),
            Face::Periodic | Face::Fixed(_) | Face::Inlet { .. } | Face::Outlet { .. } => None,
        };
        let (corner, mut walls) = (in_corner(frame, cell), faces.iter().filter_map(|(.., face)| wall(face)));
        if let Some(velocity) = walls.next() {
            // Where walls meet, the velocity is zero: otherwise a lid would drag the fluid in its corners, with effects
            // far away. Every wall still adds as much mass as it removes.
            return Some(moved(1.0, if walls.next().is_some() { [0.0; 3] } else { velocity }));
        }
        let outlet = faces.iter().find_map(|(.., face)| density(*face));
        match outlet {
            Some(_) if !corner => None,
            Some(density) => {
                // Given here: the density, and the velocity of an inlet that the outlet meets.
                let [along, square] = inlet(frame, cell).map_or([0.0; 2], |velocity| {
                    [along(velocity), dot(velocity.map(f64::from), velocity.map(f64::from))]
                });
                let density = f64::from(density);
                let rest = density - 1.0 + density * (4.5 * along * along - 1.5 * square);
                Some(Back { negative: true, add: (2.0 * w * rest) as f32 })
            }
            None => {
                let (axis, side, _) = faces.iter().find(|(.., face)| matches!(face, Face::Inlet { .. }))?;
                // The inflow has the density of the outlets.
                let mut all = (0..frame.grid.dimensions()).flat_map(|axis| frame.grid.faces(axis));
                let density = all.find_map(density).unwrap_or(1.0);
                Some(moved(density.into(), inflow(frame, cell, (*axis, *side), c)?))
            }
        }
    }

    fn open(
        &mut self,
        frame: &Frame,
        computed: &Span,
        (axis, side): (usize, usize),
        force: [f32; 3],
        is_solid: Is<'_>,
    ) {
        let Some(density) = frame.face(axis, side).and_then(density) else { return };
        let turn = Turn::new(self.directions, axis, side);
        let given = Given { density, push: if side == 0 { force[axis] } else { -force[axis] } };
        let mut layer = computed.clone();
        let place = if side == 0 { 0 } else { frame.size[axis] - 1 };
        layer.0[axis] = place..place + 1;
        let mut cells = Vec::new();
        for (y, z) in layer.rows() {
            for x in layer.0[0].clone() {
                if !is_solid([x, y, z]) && !in_corner(frame, [x, y, z]) {
                    cells.push(Open { cell: frame.at([x, y, z]), given });
                }
            }
        }
        self.open.push((turn, cells));
    }

    /// Momentum exchange: every population that bounces back transfers twice its momentum, minus that of the fluid at
    /// rest.
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

    /// The solid bits of 64 owned cells, from a local position on.
    pub(super) fn solid(&self, frame: &Frame, [x, y, z]: [isize; 3]) -> u64 {
        let words = (frame.size[0] as usize).div_ceil(64);
        let row = (z * frame.size[1] + y) as usize;
        self.solid.get(row * words + x as usize / 64).copied().unwrap_or(0)
    }

    /// The bounce-back links: direction, source element in the plane of the opposite direction, target element, rule.
    pub fn bounces(&self, frame: &Frame) -> impl Iterator<Item = (usize, usize, usize, Back)> {
        let beyond = self.beyond(frame);
        self.links.iter().map(move |&Link { cell, direction, back }| {
            let direction = usize::from(direction);
            (direction, cell, cell.wrapping_add_signed(-beyond[direction]), back)
        })
    }

    /// By direction, offset in elements from where a population is pulled to the cell that pulls it.
    fn beyond(&self, frame: &Frame) -> Vec<isize> {
        let [row, layer] = frame.strides();
        let elements = |c: &[i8; 3]| isize::from(c[0]) + isize::from(c[1]) * row + isize::from(c[2]) * layer;
        self.directions.c.iter().map(elements).collect()
    }

    /// The cells at outlets, face by face.
    pub fn openings(&self) -> impl Iterator<Item = (&Turn, impl Iterator<Item = (usize, Given)>)> {
        self.open.iter().map(|(turn, cells)| (turn, cells.iter().map(|open| (open.cell, open.given))))
    }

    /// Applies all boundary conditions before a pass of `steps` steps.
    pub(super) fn fill<N: Number>(&self, frame: &Frame, state: &mut Planes, steps: usize) {
        let columns = steps.min(frame.size[0] as usize);
        self.wrap::<N>(frame, state, columns as isize);
        let planes = state.shared();
        // By direction: the cell's own population, and the population it pulls, for the cell at element 0.
        let own: Vec<*mut N> = (0..self.directions.c.len()).map(|i| planes.start::<N>(i)).collect();
        let pulled: Vec<*mut N> =
            own.iter().zip(self.beyond(frame)).map(|(own, beyond)| own.wrapping_offset(-beyond)).collect();
        // SAFETY: cells with links or at open faces are computed in some step, so they and their neighbours are in the
        // frame, and the planes are borrowed exclusively. The same holds for cells past the ends.
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

    /// Applies walls, masks and open faces to a range of cells. `own`: by direction, pointer to the population of the
    /// cell at element 0; `pulled`: pointer to the population that it pulls.
    ///
    /// # Safety
    /// The caller has exclusive access to these cells and their neighbours.
    unsafe fn meet<N: Number>(&self, cells: Range<usize>, own: &[*mut N], pulled: &[*mut N]) {
        let links = &self.links[..self.links.partition_point(|link| link.cell < cells.end)];
        let links = &links[links.partition_point(|link| link.cell < cells.start)..];
        for &Link { cell, direction, back: Back { negative, add } } in links {
            let direction = usize::from(direction);
            let from = own[self.directions.opposite[direction]].wrapping_add(cell);
            // SAFETY: the caller's contract.
            unsafe {
                let gone = (*from).value();
                *pulled[direction].wrapping_add(cell) = N::of(if negative { add - gone } else { gone + add });
            }
        }
        for (turn, open) in &self.open {
            let open = &open[..open.partition_point(|open| open.cell < cells.end)];
            for open in &open[open.partition_point(|open| open.cell < cells.start)..] {
                // SAFETY: as above.
                unsafe { turn.fill(open, own, pulled) };
            }
        }
    }

    /// As [`Self::fill`], for the cells of one row of a two-dimensional tile.
    ///
    /// # Safety
    /// As [`RowWise::before`](crate::stepper::RowWise::before).
    pub(super) unsafe fn before<N: Number>(&self, frame: &Frame, Cells { x, y }: &Cells, near: &Near) {
        if self.links.is_empty() && self.open.is_empty() {
            return;
        }
        let (size, count) = (frame.size[0], self.directions.c.len());
        // Ranges of tile cells, and the offset from each to the requested cells.
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
            // SAFETY: by the caller's contract, cells with links or at open faces are computed, so their neighbours are
            // there.
            unsafe { self.meet(cells, &own[..count], &pulled[..count]) };
        }
    }

    /// Copies the other ends of periodic axes into the ghost cells: only populations that move inwards, or all if
    /// several columns are needed. Later axes include the ghost cells of earlier ones.
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

/// The density of a face, if it is an outlet.
fn density(face: Face) -> Option<f32> {
    match face {
        Face::Outlet { density } => Some(density),
        Face::Periodic | Face::Wall | Face::Fixed(_) | Face::Moving { .. } | Face::Inlet { .. } => None,
    }
}

/// The open faces that a cell touches.
fn open_faces(frame: &Frame, cell: [isize; 3]) -> impl Iterator<Item = (usize, usize, Face)> {
    let all = (0..3).flat_map(|axis| [(axis, 0), (axis, 1)]);
    let at = move |&(axis, side): &(usize, usize)| cell[axis] == if side == 0 { 0 } else { frame.size[axis] - 1 };
    let open = |face: &Face| matches!(face, Face::Inlet { .. } | Face::Outlet { .. });
    all.filter(at).filter_map(move |(axis, side)| Some((axis, side, frame.face(axis, side).filter(open)?)))
}

/// Whether a cell touches several open faces.
fn in_corner(frame: &Frame, cell: [isize; 3]) -> bool {
    open_faces(frame, cell).nth(1).is_some()
}

/// The velocity of the first inlet that a cell touches.
fn inlet(frame: &Frame, cell: [isize; 3]) -> Option<[f32; 3]> {
    open_faces(frame, cell).find_map(|(axis, side, _)| inflow(frame, cell, (axis, side), [0; 3]))
}

/// The velocity of an inlet where the direction `c` from a cell crosses the face; `None` if the face is no inlet.
fn inflow(frame: &Frame, cell: [isize; 3], (axis, side): (usize, usize), c: [i8; 3]) -> Option<[f32; 3]> {
    let Some(Face::Inlet { velocity, parabola }) = frame.face(axis, side) else { return None };
    let (at, grid) = (frame.global(cell)?, &frame.grid);
    let bent = (0..grid.dimensions()).filter(|&across| parabola && across != axis && !grid.is_periodic(across));
    let share = bent.fold(1.0, |share, across| {
        let place = (at[across] as f32 + 0.5 * (1.0 - f32::from(c[across]))) / grid.size()[across] as f32;
        share * 4.0 * place * (1.0 - place)
    });
    Some(velocity.map(|part| share * part))
}

/// The directions relative to an open face.
#[derive(Clone, Debug)]
pub struct Turn {
    /// Directions along the face, rest first.
    pub along: Vec<usize>,
    /// Directions out of the grid.
    pub leaving: Vec<usize>,
    /// Directions into the grid.
    pub coming: Vec<usize>,
    /// The direction along the inward normal, its opposite, and its share of the mass flow.
    pub straight: (usize, usize, f32),
    /// The diagonal directions into the grid, their opposites, the tangential axis and the sign along it.
    pub diagonal: Vec<(usize, usize, usize, f32)>,
    /// By tangential axis: the axis, and the directions with positive and with negative sense along it.
    pub axes: Vec<(usize, Vec<usize>, Vec<usize>)>,
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
            coming: towards(into).collect(),
            straight,
            diagonal: aslant,
            axes: axes.filter(|(_, with, _): &(_, Vec<usize>, _)| !with.is_empty()).collect(),
        }
    }

    /// Zou-He pressure boundary: unknown populations are the non-equilibrium bounce-back of their opposites, and the
    /// diagonal ones correct the tangential momentum to zero.
    ///
    /// The normal velocity is the mean of the one that follows from the density and that of the previous step. The
    /// fixed point is the same; without the mean, momentum that alternates in sign between cells and steps would never
    /// decay.
    unsafe fn fill<N: Number>(&self, open: &Open, own: &[*mut N], pulled: &[*mut N]) {
        let Open { cell, given: Given { density, push } } = *open;
        let at = |i: usize| pulled[i].wrapping_add(cell);
        // SAFETY: the caller's contract.
        let f = |i: usize| unsafe { (*at(i)).value() };
        let sum = |which: &[usize]| which.iter().fold(0.0, |sum, &i| sum + f(i));
        // SAFETY: as above.
        let before = |i: usize| unsafe { (*own[i].wrapping_add(cell)).value() };
        let sum_before = |which: &[usize]| which.iter().fold(0.0, |sum, &i| sum + before(i));
        let leaving = 1.0 + (sum(&self.along) + 2.0 * sum(&self.leaving));
        let (left, came) = (sum_before(&self.leaving), sum_before(&self.coming));
        let was = (came - left - push) / (1.0 + (sum_before(&self.along) + left + came));
        let into = 0.5 * ((1.0 - leaving / density) + was);
        let flow = leaving / (1.0 - into) * into;
        let mut turn = [0.0; 3];
        for (axis, with, against) in &self.axes {
            turn[*axis] = -0.5 * (sum(with) - sum(against));
        }
        let (i, opposite, share) = self.straight;
        // SAFETY: as above.
        unsafe { *at(i) = N::of(f(opposite) + flow * share) };
        for &(i, opposite, axis, sense) in &self.diagonal {
            // SAFETY: as above.
            unsafe { *at(i) = N::of(f(opposite) + flow * (1.0 / 6.0) + sense * turn[axis]) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lbm::{D2Q9, D3Q19};

    #[test]
    fn an_open_face_classifies_all_directions() {
        for (directions, dimensions, known) in [(&D2Q9, 2, [3, 3, 2, 1]), (&D3Q19, 3, [9, 5, 4, 3])] {
            for (axis, side) in [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)].into_iter().take(2 * dimensions) {
                let turn = Turn::new(directions, axis, side);
                let crossing = turn.axes[0].1.len();
                assert_eq!([turn.along.len(), turn.leaving.len(), turn.diagonal.len(), crossing], known);
                assert_eq!(turn.axes.len(), dimensions - 1);
                let (straight, opposite, _) = turn.straight;
                assert_eq!(directions.c[straight][axis], if side == 0 { 1 } else { -1 });
                assert_eq!(directions.c[straight].map(|c| -c), directions.c[opposite]);
            }
        }
    }
}
