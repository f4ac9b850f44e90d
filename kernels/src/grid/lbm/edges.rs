//! What cells pull from where no fluid is: other ends of periodic axes, walls, masks and open faces.
//!
//! Each is written into the place from which the one cell that looks there will pull, before the step. A solid cell's
//! own numbers mean nothing.
use super::{C, Fluid, OPPOSITE, W};
use crate::grid::Face;
use crate::grid::frame::{Frame, Span};
use crate::grid::planes::Planes;

/// The edges of one tile.
pub(super) struct Edges {
    /// By direction: what bounces back into it.
    links: [Vec<Link>; 9],
    open: Vec<Open>,
    /// Bit rows of the owned cells that are solid, 64 from each multiple of 64 on; none if no cell is.
    solid: Vec<u64>,
}

/// Half-way bounce-back of one population of one cell.
#[derive(Clone, Copy)]
struct Link {
    /// The cell, and the place beyond it.
    from: usize,
    to: usize,
    /// What a moving wall adds.
    add: f32,
}

/// A cell at an open face.
#[derive(Clone, Copy)]
struct Open {
    cell: usize,
    turn: &'static [usize; 9],
    given: Given,
}

/// What is known at an open face: the velocity into the grid and along the face, or the density.
#[derive(Clone, Copy)]
enum Given {
    Velocity([f32; 2]),
    Density(f32),
}

impl Edges {
    pub(super) fn new(fluid: &Fluid, frame: &Frame) -> Self {
        let whole = frame.whole();
        let width = whole.len(0);
        let solid: Vec<bool> = match &fluid.solid {
            None => Vec::new(),
            Some(solid) => {
                let all = whole.rows().flat_map(|(y, z)| whole.0[0].clone().map(move |x| [x, y, z]));
                all.map(|at| frame.global(at).is_some_and(|at| solid(at))).collect()
            }
        };
        let is_solid = |[x, y, _]: [isize; 3]| {
            let place = (y - whole.0[1].start) as usize * width + (x - whole.0[0].start) as usize;
            !solid.is_empty() && solid[place]
        };
        let mut edges = Self { links: Default::default(), open: Vec::new(), solid: Vec::new() };
        // Whatever is computed while a halo lasts.
        let computed = frame.span(frame.depth - 1);
        edges.link(frame, &computed, !solid.is_empty(), &is_solid);
        edges.open(frame, &computed, &is_solid);
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

    fn link(&mut self, frame: &Frame, computed: &Span, masked: bool, is_solid: &dyn Fn([isize; 3]) -> bool) {
        let [width, height, _] = frame.size;
        for (y, z) in computed.rows() {
            // Without a mask there is something beyond the first and the last cells only.
            let whole_row = masked || y == 0 || y == height - 1;
            let step = if whole_row { 1 } else { (width - 1).max(1) };
            let first = if whole_row { computed.0[0].start } else { 0 };
            for x in (first..computed.0[0].end).step_by(step as usize) {
                if is_solid([x, y, z]) {
                    continue;
                }
                for (i, c) in C.iter().enumerate().skip(1) {
                    let beyond = [x - isize::from(c[0]), y - isize::from(c[1]), z];
                    let crossed = [(beyond[0], width), (beyond[1], height)].map(|(at, size)| match at {
                        _ if at < 0 => Some(0),
                        _ if at >= size => Some(1),
                        _ => None,
                    });
                    let face = |axis: usize| crossed[axis].and_then(|side| frame.face(axis, side));
                    let wall = |moving: bool| {
                        (0..2).rev().filter_map(face).find_map(|face| match face {
                            Face::Moving { velocity } => moving.then_some(velocity),
                            Face::Wall => (!moving).then_some([0.0; 3]),
                            Face::Periodic | Face::Fixed(_) | Face::Inlet { .. } | Face::Outlet { .. } => None,
                        })
                    };
                    // In a corner a moving wall goes before one at rest: so it adds as much as it takes.
                    let velocity = wall(true).or_else(|| wall(false));
                    let faces = (0..2).any(|axis| face(axis).is_some());
                    let velocity = velocity.or_else(|| (!faces && is_solid(beyond)).then_some([0.0; 3]));
                    if let Some(velocity) = velocity {
                        let along = f64::from(c[0]) * f64::from(velocity[0]) + f64::from(c[1]) * f64::from(velocity[1]);
                        let (from, to) = (frame.at([x, y, z]), frame.at(beyond));
                        self.links[i].push(Link { from, to, add: (6.0 * W[i] * along) as f32 });
                    }
                }
            }
        }
    }

    fn open(&mut self, frame: &Frame, computed: &Span, is_solid: &dyn Fn([isize; 3]) -> bool) {
        for (axis, side) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
            let (across, face) = (1 - axis, frame.face(axis, side));
            let cells = frame.grid.size()[across] as f32;
            let given = |at: usize| match face? {
                Face::Inlet { velocity, parabola } => {
                    let place = (at as f32 + 0.5) / cells;
                    let share = if parabola { 4.0 * place * (1.0 - place) } else { 1.0 };
                    let into = if side == 0 { velocity[axis] } else { -velocity[axis] };
                    Some(Given::Velocity([share * into, share * velocity[across]]))
                }
                Face::Outlet { density } => Some(Given::Density(density)),
                Face::Periodic | Face::Wall | Face::Fixed(_) | Face::Moving { .. } => None,
            };
            for along in computed.0[across].clone() {
                let mut at = [0; 3];
                at[axis] = if side == 0 { 0 } else { frame.size[axis] - 1 };
                at[across] = along;
                let Some(global) = frame.global(at).filter(|_| !is_solid(at)) else { continue };
                if let Some(given) = given(global[across]) {
                    self.open.push(Open { cell: frame.at(at), turn: &TURNS[2 * axis + side], given });
                }
            }
        }
    }

    /// 64 owned cells, from local ones.
    pub(super) fn solid(&self, frame: &Frame, [x, y, _]: [isize; 3]) -> u64 {
        let words = (frame.size[0] as usize).div_ceil(64);
        self.solid.get(y as usize * words + x as usize / 64).copied().unwrap_or(0)
    }

    pub(super) fn fill(&self, frame: &Frame, state: &mut Planes) {
        wrap(frame, state);
        let planes = state.shared();
        for (i, links) in self.links.iter().enumerate() {
            let (from, to) = (planes.start::<f32>(OPPOSITE[i]), planes.start::<f32>(i));
            for link in links {
                // SAFETY: both are cells of the frame; nobody else has the planes.
                unsafe { *to.add(link.to) = *from.add(link.from) + link.add };
            }
        }
        let row = frame.strides()[0];
        let planes: [*mut f32; 9] = std::array::from_fn(|i| planes.start(i));
        for open in &self.open {
            // SAFETY: the cell is computed in some step, so it and all around it are in the frame; nobody else has the
            // planes.
            unsafe { open.fill(&planes, row) };
        }
    }
}

impl Open {
    /// Zou's and He's condition: what comes from beyond bounces back, out of equilibrium, from what goes there.
    unsafe fn fill(&self, planes: &[*mut f32; 9], row: isize) {
        // In the order of `C`, as if the face were that at the low end of x.
        let pulled = |i: usize| {
            let i = self.turn[i];
            let from = self.cell as isize - (isize::from(C[i][0]) + isize::from(C[i][1]) * row);
            // SAFETY: the caller's contract.
            unsafe { planes[i].offset(from) }
        };
        let f = |i: usize| -> f32 {
            // SAFETY: as above.
            unsafe { *pulled(i) }
        };
        let leaving = (f(0) + (f(2) + f(4))) + 2.0 * (f(3) + (f(6) + f(7)));
        let (density, into, along) = match self.given {
            Given::Velocity([into, along]) => ((1.0 + leaving) / (1.0 - into), into, along),
            Given::Density(density) => (density, 1.0 - (1.0 + leaving) / density, 0.0),
        };
        let (flow, slip) = (density * into, density * along);
        let turn = 0.5 * (f(2) - f(4));
        let coming = [
            (1, f(3) + flow * (2.0 / 3.0)),
            (5, f(7) - turn + flow * (1.0 / 6.0) + 0.5 * slip),
            (8, f(6) + turn + flow * (1.0 / 6.0) - 0.5 * slip),
        ];
        for (i, value) in coming {
            // SAFETY: as above.
            unsafe { *pulled(i) = value };
        }
    }
}

/// Directions as seen with one's back to the face: low and high x, low and high y. The second axis keeps its sense.
const TURNS: [[usize; 9]; 4] = [
    [0, 1, 2, 3, 4, 5, 6, 7, 8],
    [0, 3, 2, 1, 4, 6, 5, 8, 7],
    [0, 2, 1, 4, 3, 5, 8, 7, 6],
    [0, 4, 1, 2, 3, 8, 5, 6, 7],
];

/// The other ends of periodic axes, of what moves towards this one.
fn wrap(frame: &Frame, state: &mut Planes) {
    let [width, height, _] = frame.size;
    if frame.wraps[0] {
        for (i, c) in C.iter().enumerate().filter(|(_, c)| c[0] != 0) {
            let cells = state.plane_mut::<f32>(i);
            let (to, from) = if c[0] > 0 { (-1, width - 1) } else { (width, 0) };
            for y in -frame.halo[1][0]..height + frame.halo[1][1] {
                cells[frame.at([to, y, 0])] = cells[frame.at([from, y, 0])];
            }
        }
    }
    if frame.wraps[1] {
        let [left, right] = frame.ring[0];
        for (i, c) in C.iter().enumerate().filter(|(_, c)| c[1] != 0) {
            let row = |y| frame.at([-left, y, 0])..frame.at([width + right, y, 0]);
            let (to, from) = if c[1] > 0 { (-1, height - 1) } else { (height, 0) };
            state.plane_mut::<f32>(i).copy_within(row(from), row(to).start);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turns_are_reflections_and_rotations() {
        for (turn, (axis, side)) in TURNS.iter().zip([(0, 0), (0, 1), (1, 0), (1, 1)]) {
            for i in 0..9 {
                let seen = C[i];
                let mut real = [0; 3];
                real[axis] = if side == 0 { seen[0] } else { -seen[0] };
                real[1 - axis] = seen[1];
                assert_eq!(C[turn[i]], real, "direction {i} at face {axis}, {side}");
            }
        }
    }
}
