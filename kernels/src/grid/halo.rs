//! What tiles send each other: the cells along a face, an edge or a corner, as they are in memory.
//!
//! A strip is named by the direction its receiver looks to: who has a neighbour in direction d sends `pack(d)`, and the
//! neighbour unpacks it as coming from -d. Both ends count the same cells in the same order, so a strip needs no header.
use super::GridError;
use super::frame::{Format, Frame, Span};
use super::planes::Planes;
use super::tile::Tile;

impl Tile {
    /// Directions in which neighbours are, each step -1, 0 or 1: their strips are needed before each cycle.
    pub fn neighbours(&self) -> Vec<[i8; 3]> {
        self.frame.directions()
    }

    /// Bytes of the strip to, and of that from, the neighbour in a direction.
    ///
    /// # Errors
    /// There is none.
    pub fn strip_len(&self, direction: [i8; 3]) -> Result<usize, GridError> {
        self.number(direction)?;
        let bytes = |field| bytes(self.frame.format, &self.box_of(direction, field, true));
        Ok((0..self.fields()).map(bytes).sum())
    }

    /// What the neighbour in a direction needs for its next cycle. While a step is half made: of the new state.
    ///
    /// # Errors
    /// There is none.
    pub fn pack(&self, direction: [i8; 3]) -> Result<Vec<u8>, GridError> {
        let mut strip = Vec::with_capacity(self.strip_len(direction)?);
        let planes = if self.half { &self.next } else { &self.state };
        for field in 0..self.fields() {
            read(&self.frame, planes, field, &self.box_of(direction, field, true), &mut strip);
        }
        Ok(strip)
    }

    /// Takes the strip that the neighbour in a direction packed after the same step. When the last one is here, the halo
    /// is fresh.
    ///
    /// # Errors
    /// There is no such neighbour, the strip has another length than it must have, or a step is half made. Nothing is
    /// changed then.
    pub fn unpack(&mut self, direction: [i8; 3], strip: &[u8]) -> Result<(), GridError> {
        self.whole()?;
        let number = self.number(direction)?;
        let expected = self.strip_len(direction)?;
        if strip.len() != expected {
            return Err(GridError::Strip { direction, expected, found: strip.len() });
        }
        let mut rest = strip;
        for field in 0..self.fields() {
            let span = self.box_of(direction, field, false);
            rest = write(&self.frame, &mut self.state, field, &span, rest);
        }
        self.received |= 1 << number;
        if self.received == (1 << self.frame.directions().len()) - 1 {
            self.fresh = self.frame.depth;
        }
        Ok(())
    }

    fn number(&self, direction: [i8; 3]) -> Result<usize, GridError> {
        let found = self.frame.directions().iter().position(|&there| there == direction);
        found.ok_or(GridError::NoNeighbour(direction))
    }

    /// The cells of a strip: those of ours that the neighbour in that direction needs (`own`), or its that we do.
    fn box_of(&self, direction: [i8; 3], field: usize, own: bool) -> Span {
        let (frame, travels) = (&self.frame, self.stepper.travels(field));
        Span(std::array::from_fn(|axis| {
            let (size, to) = (frame.size[axis], direction[axis]);
            let depth = frame.halo[axis][usize::from(to > 0)];
            // Towards the receiver.
            let inward = if own { to } else { -to };
            // Of the layer that is farthest from the receiver only what moves towards it counts.
            let spared = isize::from(travels.is_some_and(|travels| travels[axis] != inward)) * frame.radius as isize;
            match (to, own) {
                (1, true) => size - depth + spared..size,
                (1, false) => size..size + depth - spared,
                (-1, true) => 0..depth - spared,
                (-1, false) => -depth + spared..0,
                _ => 0..size,
            }
        }))
    }
}

/// Bytes of a field of some cells: each row begins with a whole byte.
fn bytes(format: Format, span: &Span) -> usize {
    if span.is_empty() {
        return 0;
    }
    let row = match format {
        Format::Float => 4 * span.len(0),
        Format::Bit => span.len(0).div_ceil(8),
    };
    row * span.len(1) * span.len(2)
}

/// Appends a field of some cells.
pub(crate) fn read(frame: &Frame, planes: &Planes, field: usize, span: &Span, into: &mut Vec<u8>) {
    if span.is_empty() {
        return;
    }
    let (start, len) = (span.0[0].start, span.len(0));
    for (y, z) in span.rows() {
        let at = frame.at([start, y, z]);
        match frame.format {
            Format::Float => into.extend_from_slice(bytemuck::cast_slice(&planes.plane::<f32>(field)[at..at + len])),
            Format::Bit => {
                let (row, offset) = (&planes.plane::<u64>(field)[at..], start.rem_euclid(64) as usize);
                for done in (0..len).step_by(64) {
                    let count = (len - done).min(64);
                    into.extend_from_slice(&bits(row, offset + done, count).to_le_bytes()[..count.div_ceil(8)]);
                }
            }
        }
    }
}

/// Sets a field of some cells; gives back what is left of `from`.
pub(crate) fn write<'a>(frame: &Frame, planes: &mut Planes, field: usize, span: &Span, mut from: &'a [u8]) -> &'a [u8] {
    if span.is_empty() {
        return from;
    }
    let (start, len) = (span.0[0].start, span.len(0));
    for (y, z) in span.rows() {
        let at = frame.at([start, y, z]);
        match frame.format {
            Format::Float => {
                let (row, rest) = from.split_at(4 * len);
                bytemuck::cast_slice_mut(&mut planes.plane_mut::<f32>(field)[at..at + len]).copy_from_slice(row);
                from = rest;
            }
            Format::Bit => {
                let (row, offset) = (&mut planes.plane_mut::<u64>(field)[at..], start.rem_euclid(64) as usize);
                for done in (0..len).step_by(64) {
                    let count = (len - done).min(64);
                    let (some, rest) = from.split_at(count.div_ceil(8));
                    let mut word = [0; 8];
                    word[..some.len()].copy_from_slice(some);
                    set_bits(row, offset + done, count, u64::from_le_bytes(word));
                    from = rest;
                }
            }
        }
    }
    from
}

/// `count` (1 to 64) bits from bit `at` on; the others are zero.
pub(crate) fn bits(row: &[u64], at: usize, count: usize) -> u64 {
    let (word, shift) = (at / 64, at % 64);
    let low = row[word] >> shift;
    let high = if shift + count > 64 { row[word + 1] << (64 - shift) } else { 0 };
    (low | high) & u64::MAX >> (64 - count)
}

fn set_bits(row: &mut [u64], at: usize, count: usize, value: u64) {
    let (word, shift, mask) = (at / 64, at % 64, u64::MAX >> (64 - count));
    let value = value & mask;
    row[word] = row[word] & !(mask << shift) | value << shift;
    if shift + count > 64 {
        row[word + 1] = row[word + 1] & !(mask >> (64 - shift)) | value >> (64 - shift);
    }
}
