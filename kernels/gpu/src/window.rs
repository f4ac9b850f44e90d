//! Windows of attention on a device: the first position that a row attends to.
use cubecl::prelude::*;
use kernels_models::weights::Window;

/// Which of the positions up to its own a row attends to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Reach {
    /// All positions up to its own.
    All,
    /// [`Window::Sliding`].
    Sliding,
    /// [`Window::Chunk`].
    Chunk,
}

impl Reach {
    /// The kind of a layer's window, and its positions.
    pub(crate) fn of(window: Option<Window>) -> (Self, u32) {
        let (reach, positions) = match window {
            None => (Self::All, 0),
            Some(Window::Sliding(positions)) => (Self::Sliding, positions),
            Some(Window::Chunk(positions)) => (Self::Chunk, positions),
        };
        (reach, positions as u32) // a window has at most 2^24 positions
    }
}

/// First position that a row at `position` attends to: see [`Window::first`].
#[cube]
pub(crate) fn first_seen(position: usize, window: u32, #[comptime] reach: Reach) -> usize {
    let mut first = 0usize;
    if comptime!(reach == Reach::Sliding) {
        first = select(position + 1 > window as usize, position + 1 - window as usize, 0usize);
    }
    if comptime!(reach == Reach::Chunk) {
        first = position / window as usize * window as usize;
    }
    first
}
