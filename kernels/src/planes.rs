//! Memory of equal planes, such as the fields of a tile: aligned for non-temporal stores, in huge pages where available.
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;

use bytemuck::Pod;

/// Allocations of at least this size are huge-page aligned, and the system is asked for huge pages: a stencil walks
/// along many rows of many planes, more than the TLB has entries for small pages.
const LARGE: usize = 2 << 20;
const LINE: usize = 64;
/// Padding between planes, so that planes of a power-of-two size do not all begin in the same cache set.
const STAGGER: usize = 7 * LINE;

/// The system has no memory for planes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot allocate {bytes} bytes")]
pub struct NoMemory {
    /// Bytes requested.
    pub bytes: usize,
}

/// Planes of equal length, initially zero.
pub struct Planes {
    memory: NonNull<u8>,
    layout: Layout,
    /// Bytes per plane, a multiple of 64.
    len: usize,
    count: usize,
}

// SAFETY: owns plain bytes.
unsafe impl Send for Planes {}
// SAFETY: as above; shared references only read.
unsafe impl Sync for Planes {}

impl Planes {
    /// Bytes allocated for `count` planes of `len` bytes.
    pub fn bytes(count: usize, len: usize) -> usize {
        count.saturating_mul(len.next_multiple_of(LINE) + STAGGER)
    }

    /// `count` planes of `len` bytes.
    ///
    /// # Errors
    /// No memory.
    pub fn new(count: usize, len: usize) -> Result<Self, NoMemory> {
        let bytes = Self::bytes(count, len).max(LINE);
        let align = if bytes >= LARGE { LARGE } else { LINE };
        let layout = Layout::from_size_align(bytes, align).map_err(|_| NoMemory { bytes })?;
        // SAFETY: the size is not zero.
        let memory = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or(NoMemory { bytes })?;
        #[cfg(target_os = "linux")]
        if bytes >= LARGE {
            // SAFETY: the memory was allocated above; the advice changes no content. Refusal is harmless.
            let _ = unsafe {
                rustix::mm::madvise(memory.as_ptr().cast(), bytes & !(LARGE - 1), rustix::mm::Advice::LinuxHugepage)
            };
        }
        Ok(Self { memory, layout, len: len.next_multiple_of(LINE), count })
    }

    /// Number of planes.
    #[inline]
    pub fn count(&self) -> usize {
        self.count
    }

    /// The cells of one plane.
    ///
    /// # Panics
    /// There is no such plane.
    pub fn plane<T: Pod>(&self, plane: usize) -> &[T] {
        assert!(plane < self.count, "plane {plane} of {}", self.count);
        // SAFETY: within the memory, initialised, and borrowed as long as `self`.
        bytemuck::cast_slice(unsafe {
            std::slice::from_raw_parts(self.memory.as_ptr().add(plane * (self.len + STAGGER)), self.len)
        })
    }

    /// The cells of one plane, mutable.
    ///
    /// # Panics
    /// There is no such plane.
    pub fn plane_mut<T: Pod>(&mut self, plane: usize) -> &mut [T] {
        assert!(plane < self.count, "plane {plane} of {}", self.count);
        // SAFETY: as above, and borrowed exclusively.
        bytemuck::cast_slice_mut(unsafe {
            std::slice::from_raw_parts_mut(self.memory.as_ptr().add(plane * (self.len + STAGGER)), self.len)
        })
    }

    /// Read-only access.
    #[inline]
    pub fn shared_to_read(&self) -> Shared<'_> {
        Shared { planes: self }
    }

    /// Access for threads that write different rows of the same planes.
    #[inline]
    pub fn shared(&mut self) -> Shared<'_> {
        Shared { planes: self }
    }
}

impl Drop for Planes {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout.
        unsafe { dealloc(self.memory.as_ptr(), self.layout) }
    }
}

/// Planes that several threads write concurrently, each its own rows.
#[derive(Clone, Copy)]
pub struct Shared<'a> {
    planes: &'a Planes,
}

impl Shared<'_> {
    /// Bytes between the beginnings of consecutive planes.
    #[inline]
    pub fn stride(&self) -> usize {
        self.planes.len + STAGGER
    }

    /// Start of a plane. The caller ensures that no other thread reads or writes the cells it writes.
    pub fn start<T: Pod>(&self, plane: usize) -> *mut T {
        assert!(plane < self.planes.count, "plane {plane} of {}", self.planes.count);
        // SAFETY: within the memory.
        unsafe { self.planes.memory.as_ptr().add(plane * (self.planes.len + STAGGER)).cast() }
    }
}
