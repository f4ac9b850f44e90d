//! Buffers that are used again. What a large frame brings, and what is packed for one, would else be fetched from the system
//! and given back each time: of every page the first touch costs more than the copy.
use std::ops::{Deref, DerefMut};
use std::sync::{Mutex, PoisonError};

use bytes::Bytes;

/// Smaller buffers the allocator keeps itself.
const LEAST: usize = 128 << 10;
/// Bytes that wait to be used again: what a tile of a grid sends and receives in a cycle.
const KEPT_BYTES: usize = 8 << 20;

static SPARE: Mutex<Vec<Vec<u8>>> = Mutex::new(Vec::new());

/// A buffer that serves again after the last who has it, as itself or as [`Bytes`], drops it.
#[derive(Debug, Default)]
pub struct Buffer(Vec<u8>);

impl Buffer {
    /// With nothing in it, and room for so many bytes.
    #[must_use]
    pub fn with_room(bytes: usize) -> Self {
        let mut buffer = spare(bytes).unwrap_or_else(|| Vec::with_capacity(bytes));
        buffer.clear();
        Self(buffer)
    }

    /// Of so many bytes, whatever they are: to be written before they are read.
    #[must_use]
    pub(crate) fn of(bytes: usize) -> Self {
        Self(match spare(bytes) {
            Some(mut buffer) => {
                buffer.resize(bytes, 0);
                buffer
            }
            None => vec![0; bytes],
        })
    }
}

/// The first that is large enough and not twice as large.
fn spare(bytes: usize) -> Option<Vec<u8>> {
    if bytes < LEAST {
        return None;
    }
    let mut spare = SPARE.lock().unwrap_or_else(PoisonError::into_inner);
    let found = spare.iter().position(|buffer| (bytes..2 * bytes).contains(&buffer.capacity()))?;
    Some(spare.remove(found))
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let size = self.0.capacity();
        if !(LEAST..=KEPT_BYTES).contains(&size) {
            return;
        }
        let mut spare = SPARE.lock().unwrap_or_else(PoisonError::into_inner);
        // Those that nobody wanted for longest go first.
        let mut gone = Vec::new();
        while size + spare.iter().map(Vec::capacity).sum::<usize>() > KEPT_BYTES {
            gone.push(spare.remove(0));
        }
        spare.push(std::mem::take(&mut self.0));
        drop(spare);
        drop(gone); // back to the system, with nobody waiting
    }
}

impl From<Vec<u8>> for Buffer {
    fn from(bytes: Vec<u8>) -> Self {
        Self(bytes)
    }
}

impl From<Buffer> for Bytes {
    fn from(buffer: Buffer) -> Self {
        if buffer.0.capacity() < LEAST {
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

    /// One test, for the spare buffers are everybody's.
    #[test]
    fn buffers_serve_again_and_few_are_kept() {
        let size = 3 << 20; // no other test has such
        let mut buffer = Buffer::with_room(size);
        buffer.extend_from_slice(&[7; 100]);
        let place = buffer.as_ptr();
        let bytes = Bytes::from(buffer);
        let part = bytes.slice(10..20);
        drop(bytes);
        let other = Buffer::of(size);
        assert_ne!(other.as_ptr(), place, "somebody still reads it");
        drop(part);
        let again = Buffer::of(size);
        assert_eq!((again.as_ptr(), again.len()), (place, size));
        let small = Bytes::from(Buffer::of(100));
        assert_eq!(&small[..], [0; 100]);
        let many: Vec<Buffer> = (0..10).map(|_| Buffer::of(size)).collect();
        drop((many, again, other));
        let kept: usize = SPARE.lock().unwrap().iter().map(Vec::capacity).sum();
        assert!(kept <= KEPT_BYTES, "{kept}");
        let huge = Buffer::of(KEPT_BYTES + 1);
        drop(huge);
        assert!(SPARE.lock().unwrap().iter().all(|buffer| buffer.capacity() <= KEPT_BYTES));
        assert!(Buffer::with_room(size).is_empty());
    }
}
