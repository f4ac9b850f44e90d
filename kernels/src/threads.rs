//! Compute threads of the CPU: a node has one set, which all its stages and tiles share.
use crate::planes::{NoMemory, Planes, Shared};
use crate::pool::Pool;

/// A thread pool that runs one job at a time: a batch of a stage, or steps of a tile.
pub struct Threads {
    pool: Pool,
    /// Per-thread ring buffers for fused steps of a tile; empty until first needed.
    rings: Vec<Ring>,
}

/// Rows of intermediate steps, private to a thread.
pub struct Ring {
    planes: Planes,
}

impl Ring {
    /// A ring of `bytes` bytes.
    fn new(bytes: usize) -> Result<Self, NoMemory> {
        Ok(Self { planes: Planes::new(1, bytes)? })
    }

    fn bytes(&self) -> usize {
        self.planes.plane::<u8>(0).len()
    }

    /// The memory: one plane.
    pub fn shared(&mut self) -> Shared<'_> {
        self.planes.shared()
    }
}

impl Threads {
    /// `count` threads (at least one) including the caller.
    ///
    /// # Errors
    /// The operating system cannot start a thread.
    pub fn new(count: usize) -> std::io::Result<Self> {
        Ok(Self { pool: Pool::new(count)?, rings: Vec::new() })
    }

    /// Number of threads including the caller.
    pub fn count(&self) -> usize {
        self.pool.workers()
    }

    /// The pool.
    pub fn pool(&mut self) -> &mut Pool {
        &mut self.pool
    }

    /// The pool, and a ring buffer of at least `bytes` per thread.
    ///
    /// # Errors
    /// No memory for the buffers.
    pub fn with_rings(&mut self, bytes: usize) -> Result<(&mut Pool, &mut [Ring]), NoMemory> {
        if self.rings.first().is_none_or(|ring| ring.bytes() < bytes) {
            // Free the old rings before allocating new ones.
            self.rings.clear();
            self.rings = (0..self.count()).map(|_| Ring::new(bytes)).collect::<Result<_, _>>()?;
        }
        Ok((&mut self.pool, &mut self.rings))
    }
}
