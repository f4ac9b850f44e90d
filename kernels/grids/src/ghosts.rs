//! Ghost cells of scalar fields: boundary conditions at the faces, and wrap-around of periodic axes that the tile owns
//! whole.
use crate::frame::Frame;
use crate::grid::Face;

/// Fills the ghost cells of a field to the width of the rule's radius: the other end of a periodic axis, the mirror
/// image at a wall (zero flux), or fixed values. `corners` fills edges and corners too; rules with axis-aligned
/// stencils do not read them.
pub(crate) fn fill(frame: &Frame, cells: &mut [f32], field: usize, corners: bool) {
    let radius = frame.radius as isize;
    let mut within = frame.span(frame.depth);
    for axis in 0..frame.grid.dimensions() {
        let size = frame.size[axis];
        for side in 0..2 {
            let wraps = frame.wraps[axis];
            let value = match frame.face(axis, side) {
                None if !wraps => continue,
                Some(Face::Fixed(values)) => Some(values[field]),
                None
                | Some(Face::Periodic | Face::Wall | Face::Moving { .. } | Face::Inlet { .. } | Face::Outlet { .. }) => {
                    None
                }
            };
            for away in 0..radius {
                let (ghost, mirror, other) = match side {
                    0 => (-1 - away, away, size - 1 - away),
                    _ => (size + away, size - 1 - away, away),
                };
                // An axis without neighbours may be shorter than the radius.
                let last = size - 1 + frame.halo[axis][1];
                let source = if wraps { other } else { mirror.clamp(-frame.halo[axis][0], last) };
                let mut span = within.clone();
                span.0[axis] = ghost..ghost + 1;
                let len = span.len(0);
                for (y, z) in span.rows() {
                    let row = |place: isize| {
                        let mut at = [span.0[0].start, y, z];
                        at[axis] = place;
                        frame.at(at)
                    };
                    match value {
                        Some(value) => cells[row(ghost)..row(ghost) + len].fill(value),
                        None => cells.copy_within(row(source)..row(source) + len, row(ghost)),
                    }
                }
            }
        }
        if corners {
            let ghosts = |side: usize| if frame.face(axis, side).is_some() || frame.wraps[axis] { radius } else { 0 };
            let range = &mut within.0[axis];
            *range = range.start - ghosts(0)..range.end + ghosts(1);
        }
    }
}
