//! The compute threads that everything on a processor is given: a node has one set for the stages and tiles that it holds.
use crate::grid::GridError;
use crate::grid::fused::Ring;
use crate::pool::Pool;

/// Threads that compute one piece of work at a time: a batch of a stage, or steps of a tile.
pub struct Threads {
    pool: Pool,
    /// What each keeps between the steps of a tile's pass, once there was one.
    rings: Vec<Ring>,
}

impl Threads {
    /// `count` threads, at least one; the caller is one of them.
    ///
    /// # Errors
    /// The operating system refuses a thread.
    pub fn new(count: usize) -> std::io::Result<Self> {
        Ok(Self { pool: Pool::new(count)?, rings: Vec::new() })
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.pool.workers()
    }

    pub(crate) fn pool(&mut self) -> &mut Pool {
        &mut self.pool
    }

    /// The pool, and a ring of at least `bytes` for each thread.
    pub(crate) fn with_rings(&mut self, bytes: usize) -> Result<(&mut Pool, &mut [Ring]), GridError> {
        if self.rings.first().is_none_or(|ring| ring.bytes() < bytes) {
            // The old ones go first.
            self.rings.clear();
            self.rings = (0..self.count()).map(|_| Ring::new(bytes)).collect::<Result<_, _>>()?;
        }
        Ok((&mut self.pool, &mut self.rings))
    }
}
