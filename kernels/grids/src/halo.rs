//! Halo exchange: which cells tiles send each other, and how they are packed.
//!
//! Tiles may be arbitrary boxes: neighbours follow from the boxes that tiles own. A [`Link`] is one neighbour at one
//! periodic shift. Both ends of a link count the same cells in the same order, so a halo strip needs no header. Both
//! ends compute the extent of a halo, and what the rule needs of it, with the same function (`needed`).
use kernels::planes::Planes;

use crate::error::GridError;
use crate::frame::{Format, Frame, Span};
use crate::grid::Grid;
use crate::number::Half;
use crate::region::{Link, Region};
use crate::tile::Tile;

/// All links of the tile `me`, each with the index of the neighbour in `regions`, which cover the grid. Ordered by
/// index, then by shift (x, y, z). `reach`: halo width in cells, the halo depth times the rule's radius. The other end
/// of a link has the opposite shift.
pub fn links(grid: &Grid, regions: &[Region], me: usize, reach: usize) -> Vec<(usize, Link)> {
    let Some(&own) = regions.get(me) else { return Vec::new() };
    let shifts = |axis: usize| if axis < grid.dimensions() && grid.is_periodic(axis) { -1..=1i8 } else { 0..=0 };
    let mut found = Vec::new();
    for (peer, &region) in regions.iter().enumerate().filter(|(peer, _)| *peer != me) {
        for x in shifts(0) {
            for y in shifts(1) {
                found.extend(shifts(2).map(|z| Link { region, shift: [x, y, z] }).filter_map(|link| {
                    let (ours, theirs) = (at(own, own), link.seen(grid, own));
                    let touches = !grown(grid, own, ours.clone(), reach).meet(&theirs).is_empty()
                        || !grown(grid, region, theirs, reach).meet(&ours).is_empty();
                    touches.then_some((peer, link))
                }));
            }
        }
    }
    found
}

impl Link {
    /// The neighbour's cells in the local coordinates of a tile.
    fn seen(&self, grid: &Grid, tile: Region) -> Span {
        let Span(own) = at(self.region, tile);
        let shift = |axis: usize| isize::from(self.shift[axis]) * grid.size()[axis] as isize;
        Span(std::array::from_fn(|axis| own[axis].start + shift(axis)..own[axis].end + shift(axis)))
    }
}

/// A region in the local coordinates of a tile.
fn at(region: Region, tile: Region) -> Span {
    let from = |axis: usize, place: usize| place as isize - tile.start[axis] as isize;
    Span(std::array::from_fn(|axis| from(axis, region.start[axis])..from(axis, region.end[axis])))
}

/// A region grown by its halo; `seen` is the region in local coordinates.
fn grown(grid: &Grid, region: Region, Span(seen): Span, reach: usize) -> Span {
    let halo = Frame::halos(grid, region, reach);
    Span(std::array::from_fn(|axis| seen[axis].start - halo[axis][0]..seen[axis].end + halo[axis][1]))
}

/// The halo strips of a link: which cells of each field are sent and received, in local coordinates.
pub struct HaloStrips {
    /// The neighbour.
    pub link: Link,
    /// Cells sent, by field.
    pub out: Vec<Span>,
    /// Cells received, by field.
    pub into: Vec<Span>,
    /// Bytes sent.
    pub bytes_out: usize,
    /// Bytes received.
    pub bytes_in: usize,
    /// Whether the halo strip of the current step was received.
    pub arrived: bool,
}

impl Tile {
    /// Sets the neighbours. Invalidates the halo.
    ///
    /// # Errors
    /// The links do not cover every halo cell exactly once, one is out of reach, or a step is half computed. The tile
    /// is then unchanged.
    pub fn link(&mut self, links: &[Link]) -> Result<(), GridError> {
        self.whole()?;
        let travels: Vec<_> = (0..self.fields()).map(|field| self.stepper.streaming_direction(field)).collect();
        self.strips = strips(&self.frame, &travels, links)?;
        self.await_halo();
        Ok(())
    }

    /// The links set by [`Self::link`].
    pub fn links(&self) -> impl ExactSizeIterator<Item = &Link> {
        self.strips.iter().map(|strips| &strips.link)
    }

    /// Bytes of the halo strip sent to a neighbour. An empty one need not be sent.
    ///
    /// # Errors
    /// There is no such link.
    pub fn bytes_out(&self, link: usize) -> Result<usize, GridError> {
        Ok(self.strips_at(link)?.bytes_out)
    }

    /// Bytes of the halo strip received from a neighbour. An empty one is not waited for.
    ///
    /// # Errors
    /// There is no such link.
    pub fn bytes_in(&self, link: usize) -> Result<usize, GridError> {
        Ok(self.strips_at(link)?.bytes_in)
    }

    /// Packs the halo strip that a neighbour needs for its next cycle; while a pass is half computed, from its new
    /// state.
    ///
    /// # Errors
    /// There is no such link.
    pub fn pack(&self, link: usize) -> Result<Vec<u8>, GridError> {
        let mut strip = Vec::new();
        self.pack_into(link, &mut strip)?;
        Ok(strip)
    }

    /// As [`Self::pack`], appended to `strip`.
    ///
    /// # Errors
    /// As [`Self::pack`].
    pub fn pack_into(&self, link: usize, strip: &mut Vec<u8>) -> Result<(), GridError> {
        let strips = self.strips_at(link)?;
        strip.reserve_exact(strips.bytes_out);
        let planes = if self.half > 0 { &self.next } else { &self.state };
        for (field, span) in strips.out.iter().enumerate() {
            read(&self.frame, planes, field, span, strip);
        }
        Ok(())
    }

    /// Stores a halo strip that the neighbour packed after the same step. After the last one the halo is valid again.
    ///
    /// # Errors
    /// There is no such link, the halo strip's length is wrong, or a step is half computed. The tile is then unchanged.
    pub fn unpack(&mut self, link: usize, strip: &[u8]) -> Result<(), GridError> {
        self.whole()?;
        let expected = self.bytes_in(link)?;
        if strip.len() != expected {
            return Err(GridError::StripLength { link, expected, found: strip.len() });
        }
        let mut rest = strip;
        for (field, span) in self.strips[link].into.iter().enumerate() {
            rest = write(&self.frame, &mut self.state, field, span, rest);
        }
        self.strips[link].arrived = true;
        if self.strips.iter().all(|strips| strips.arrived || strips.bytes_in == 0) {
            self.fresh = self.frame.depth;
        }
        Ok(())
    }

    fn strips_at(&self, link: usize) -> Result<&HaloStrips, GridError> {
        self.strips.get(link).ok_or(GridError::NoLink { link, links: self.strips.len() })
    }
}

/// The halo strips of all links. `streaming_direction`: [`Stepper::streaming_direction`](crate::stepper::Stepper::travels) of each field.
///
/// # Errors
/// The links do not cover every halo cell exactly once, or one is out of reach.
pub fn strips(frame: &Frame, travels: &[Option<[i8; 3]>], links: &[Link]) -> Result<Vec<HaloStrips>, GridError> {
    let (own, all) = (frame.span(0), frame.span(frame.depth));
    let reach = frame.depth * frame.radius;
    let mut seen: Vec<Span> = Vec::new();
    for link in links {
        let odd = (0..3).any(|axis| link.shift[axis] != 0 && !frame.grid.is_periodic(axis));
        if link.region.cells() == 0 || !frame.grid.region().contains(&link.region) || odd {
            return Err(GridError::Link { link: *link, what: "it is not in the grid" });
        }
        let theirs = link.seen(&frame.grid, frame.owned);
        if seen.iter().chain([&own]).any(|other| !other.meet(&theirs).is_empty()) {
            return Err(GridError::Link { link: *link, what: "another tile owns cells of it" });
        }
        if all.meet(&theirs).is_empty() && grown(&frame.grid, link.region, theirs.clone(), reach).meet(&own).is_empty()
        {
            return Err(GridError::Link { link: *link, what: "it is out of reach" });
        }
        seen.push(theirs);
    }
    let covered = seen.iter().map(|theirs| all.meet(theirs).cells()).sum::<usize>();
    let halo = all.cells() - own.cells();
    if covered != halo {
        return Err(GridError::Uncovered { cells: halo - covered, halo });
    }
    let strips_of = |link: Link, theirs: &Span| {
        let needed = |region, seen: &Span| {
            let halo = Frame::halos(&frame.grid, region, reach);
            travels.iter().map(|travels| needed(seen, halo, frame.radius, *travels)).collect::<Vec<_>>()
        };
        let out: Vec<Span> = needed(link.region, theirs).iter().map(|needed| needed.meet(&own)).collect();
        let into: Vec<Span> = needed(frame.owned, &own).iter().map(|needed| needed.meet(theirs)).collect();
        let count = |spans: &[Span]| spans.iter().map(|span| bytes(frame.format, span)).sum();
        HaloStrips { link, bytes_out: count(&out), bytes_in: count(&into), out, into, arrived: false }
    };
    Ok(links.iter().zip(&seen).map(|(link, theirs)| strips_of(*link, theirs)).collect())
}

/// The owned cells and the halo that a cycle needs of a field: in the outermost layers only fields that move inwards.
fn needed(own: &Span, halo: [[isize; 2]; 3], radius: usize, travels: Option<[i8; 3]>) -> Span {
    Span(std::array::from_fn(|axis| {
        let [low, high] = [(0, 1), (1, -1)].map(|(side, inward)| {
            let spared = halo[axis][side] > 0 && travels.is_some_and(|travels| travels[axis] != inward);
            halo[axis][side] - if spared { radius as isize } else { 0 }
        });
        own.0[axis].start - low..own.0[axis].end + high
    }))
}

/// Bytes of one field of a span; each row begins at a byte boundary.
pub(crate) fn bytes(format: Format, span: &Span) -> usize {
    if span.is_empty() {
        return 0;
    }
    let row = match format {
        Format::Float | Format::Half => format.bytes() * span.len(0),
        Format::Bit => span.len(0).div_ceil(8),
    };
    row * span.len(1) * span.len(2)
}

/// Appends one field of a span.
pub(crate) fn read(frame: &Frame, planes: &Planes, field: usize, span: &Span, into: &mut Vec<u8>) {
    if span.is_empty() {
        return;
    }
    let (start, len) = (span.0[0].start, span.len(0));
    for (y, z) in span.rows() {
        let at = frame.at([start, y, z]);
        match frame.format {
            Format::Float => into.extend_from_slice(bytemuck::cast_slice(&planes.plane::<f32>(field)[at..at + len])),
            Format::Half => into.extend_from_slice(bytemuck::cast_slice(&planes.plane::<Half>(field)[at..at + len])),
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

/// Writes one field of a span; returns the rest of `from`.
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
            Format::Half => {
                let (row, rest) = from.split_at(2 * len);
                bytemuck::cast_slice_mut(&mut planes.plane_mut::<Half>(field)[at..at + len]).copy_from_slice(row);
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

/// `count` (1 to 64) bits from bit `at` on, in the low bits of the result.
pub fn bits(row: &[u64], at: usize, count: usize) -> u64 {
    let (word, shift) = (at / 64, at % 64);
    let low = row[word] >> shift;
    let high = if shift + count > 64 { row[word + 1] << (64 - shift) } else { 0 };
    (low | high) & u64::MAX >> (64 - count)
}

/// Sets `count` (1 to 64) bits from bit `at` on, to the low bits of `value`.
pub fn set_bits(row: &mut [u64], at: usize, count: usize, value: u64) {
    let (word, shift, mask) = (at / 64, at % 64, u64::MAX >> (64 - count));
    let value = value & mask;
    row[word] = row[word] & !(mask << shift) | value << shift;
    if shift + count > 64 {
        row[word + 1] = row[word + 1] & !(mask >> (64 - shift)) | value >> (64 - shift);
    }
}
