//! Boxes of a grid: the planner's blocks as regions of the kernels, their intersections, and their text.
use kernels_grids::Region;
use partitioner::tiles::Block;

/// Converts a block to a region of the kernels.
pub(crate) fn region(block: &Block) -> Region {
    Region { start: block.from.map(|at| at as usize), end: block.to.map(|at| at as usize) }
}

/// The intersection of two regions, or `None` if it is empty.
pub(crate) fn common(a: &Region, b: &Region) -> Option<Region> {
    let start: [usize; 3] = std::array::from_fn(|axis| a.start[axis].max(b.start[axis]));
    let end: [usize; 3] = std::array::from_fn(|axis| a.end[axis].min(b.end[axis]));
    (0..3).all(|axis| start[axis] < end[axis]).then_some(Region { start, end })
}

/// A block, human-readable.
pub(crate) fn extent(block: &Block) -> String {
    let axes = (0..3).filter(|&axis| axis < 2 || block.to[axis] > 1);
    axes.map(|axis| format!("{}-{}", block.from[axis], block.to[axis].saturating_sub(1)))
        .collect::<Vec<_>>()
        .join(" x ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cells(start: [usize; 3], end: [usize; 3]) -> Region {
        Region { start, end }
    }

    #[test]
    fn a_block_has_the_cells_of_its_region() {
        let block = Block { from: [1, 2, 3], to: [40, 50, 60] };
        assert_eq!(region(&block), cells([1, 2, 3], [40, 50, 60]));
    }

    #[test]
    fn an_intersection_is_the_same_from_both_sides() {
        let (a, b) = (cells([0, 0, 0], [10, 10, 10]), cells([5, 8, 2], [20, 9, 4]));
        let both = Some(cells([5, 8, 2], [10, 9, 4]));
        assert_eq!((common(&a, &b), common(&b, &a)), (both, both));
        assert_eq!(common(&a, &a), Some(a));
    }

    #[test]
    fn regions_that_only_touch_have_no_cell_in_common() {
        let a = cells([0, 0, 0], [10, 10, 10]);
        for axis in 0..3 {
            let mut b = a;
            (b.start[axis], b.end[axis]) = (10, 20);
            assert_eq!((common(&a, &b), common(&b, &a)), (None, None), "axis {axis}");
        }
        let empty = cells([3, 3, 3], [3, 5, 5]);
        assert_eq!(common(&a, &empty), None, "it has no cells");
    }

    #[test]
    fn the_extent_of_a_plane_has_two_axes_and_includes_its_last_cells() {
        assert_eq!(extent(&Block { from: [0, 8, 0], to: [64, 16, 1] }), "0-63 x 8-15");
        assert_eq!(extent(&Block { from: [0, 0, 4], to: [64, 8, 5] }), "0-63 x 0-7 x 4-4");
    }
}
