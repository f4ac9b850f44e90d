//! A pool of large buffers. Without it, every large frame received or compressed would get its buffer from the
//! operating system and return it, and the first touch of a page costs more than the copy.
use parking_lot::Mutex;
use std::ops::{Deref, DerefMut};

use bytes::Bytes;

/// Smaller buffers are left to the allocator, which caches them itself.
const POOLED_BYTES_MIN: usize = 128 << 10;
/// Capacity of the pool in bytes: what one tile of a grid sends and receives per cycle.
const POOL_BYTES_MAX: usize = 8 << 20;

static POOL: Mutex<Vec<Vec<u8>>> = Mutex::new(Vec::new());

/// A buffer that returns to the pool when its last owner drops it, also after conversion to [`Bytes`].
#[derive(Debug, Default)]
pub struct Buffer(Vec<u8>);

impl Buffer {
    /// An empty buffer with capacity for at least `bytes` bytes.
    #[must_use]
    pub fn with_capacity(bytes: usize) -> Self {
        let mut buffer = pooled(bytes).unwrap_or_else(|| Vec::with_capacity(bytes));
        buffer.clear();
        Self(buffer)
    }

    /// A buffer of `bytes` bytes with unspecified contents: write before reading.
    #[must_use]
    pub(crate) fn of(bytes: usize) -> Self {
        Self(match pooled(bytes) {
            Some(mut buffer) => {
                buffer.resize(bytes, 0);
                buffer
            }
            None => vec![0; bytes],
        })
    }
}

/// Takes the first pooled buffer with a capacity in `bytes..2 * bytes`.
fn pooled(bytes: usize) -> Option<Vec<u8>> {
    if bytes < POOLED_BYTES_MIN {
        return None;
    }
    let mut pool = POOL.lock();
    let found = pool.iter().position(|buffer| (bytes..2 * bytes).contains(&buffer.capacity()))?;
    Some(pool.remove(found))
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let size = self.0.capacity();
        if !(POOLED_BYTES_MIN..=POOL_BYTES_MAX).contains(&size) {
            return;
        }
        let mut pool = POOL.lock();
        // Evict the buffers that have been in the pool longest.
        let mut evicted = Vec::new();
        while size + pool.iter().map(Vec::capacity).sum::<usize>() > POOL_BYTES_MAX {
            evicted.push(pool.remove(0));
        }
        pool.push(std::mem::take(&mut self.0));
        drop(pool);
        drop(evicted); // freed outside the lock
    }
}

impl From<Vec<u8>> for Buffer {
    fn from(bytes: Vec<u8>) -> Self {
        Self(bytes)
    }
}

impl From<Buffer> for Bytes {
    fn from(buffer: Buffer) -> Self {
        if buffer.0.capacity() < POOLED_BYTES_MIN {
            return Bytes::from(Vec::from(buffer));
        }
        Bytes::from_owner(buffer)
    }
}

impl From<Buffer> for Vec<u8> {
    fn from(mut buffer: Buffer) -> Self {
        std::mem::take(&mut buffer.0)
    }
}

impl AsRef<[u8]> for Buffer {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl Deref for Buffer {
    type Target = Vec<u8>;
    fn deref(&self) -> &Vec<u8> {
        &self.0
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut Vec<u8> {
        &mut self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A single test, because the pool is global to the process.
    #[test]
    fn buffers_are_reused_and_the_pool_is_bounded() {
        let size = 3 << 20; // no other test uses this size
        let mut buffer = Buffer::with_capacity(size);
        buffer.extend_from_slice(&[7; 100]);
        let place = buffer.as_ptr();
        let bytes = Bytes::from(buffer);
        let part = bytes.slice(10..20);
        drop(bytes);
        let other = Buffer::of(size);
        assert_ne!(other.as_ptr(), place, "a slice still refers to it");
        drop(part);
        let again = Buffer::of(size);
        assert_eq!((again.as_ptr(), again.len()), (place, size));
        let small = Bytes::from(Buffer::of(100));
        assert_eq!(&small[..], [0; 100]);
        let many: Vec<Buffer> = (0..10).map(|_| Buffer::of(size)).collect();
        drop((many, again, other));
        let pooled: usize = POOL.lock().iter().map(Vec::capacity).sum();
        assert!(pooled <= POOL_BYTES_MAX, "{pooled}");
        let huge = Buffer::of(POOL_BYTES_MAX + 1);
        drop(huge);
        assert!(POOL.lock().iter().all(|buffer| buffer.capacity() <= POOL_BYTES_MAX));
        assert!(Buffer::with_capacity(size).is_empty());
    }
}
