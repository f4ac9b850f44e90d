//! Halo exchange of GPU tiles: one kernel gathers the halo strips for all neighbours, one scatters a received one.
//!
//! Index lists on the device, built once from the boxes of `kernels/grids/src/halo.rs`, map elements to positions in halo strips.
//! The strips have the same bytes as those of a CPU tile.
use cubecl::prelude::*;
use half::f16;
use kernels_grids::GridError;
use kernels_grids::frame::{Format, Frame, Span};
use kernels_grids::halo::HaloStrips;

use crate::memory::{Buffer, address, element, failed, over};
use crate::place::Memory;
use crate::transfer::{PendingRead, submit_read};

/// The links of a tile and their index lists.
pub(super) struct Exchange {
    pub(super) strips: Vec<HaloStrips>,
    format: Format,
    /// Elements to send, link after link.
    out: Option<List>,
    /// Elements to receive, by link.
    into: Vec<Option<List>>,
    pub(super) packed: Packed,
}

/// Entries of four words. Numbers: (element of the field, field, 0, 0). Bits: (word, first bit in it, mask, 0) for
/// sending, (word, bit in the strip, mask, 0) for receiving.
struct List {
    entries: Buffer,
    count: usize,
    /// Words of the halo strips; for bits with one word of padding before and after. 16-bit numbers may not fill the
    /// last word.
    words: usize,
}

/// State of the packed halo strips on their way from the device.
pub(super) enum Packed {
    Nothing,
    Coming(PendingRead),
    Here(Vec<Vec<u8>>),
}

impl Exchange {
    pub(super) fn none(format: Format) -> Self {
        Self { strips: Vec::new(), format, out: None, into: Vec::new(), packed: Packed::Nothing }
    }

    pub(super) fn new<R: Runtime>(
        client: &ComputeClient<R>,
        frame: &Frame,
        memory: &Memory,
        strips: Vec<HaloStrips>,
    ) -> Result<Self, GridError> {
        let format = frame.format;
        let mut out = Vec::new();
        for strip in &strips {
            (0..).zip(&strip.out).for_each(|(field, span)| leaving(format, memory, field, span, &mut out));
        }
        let words = (out.len() / 4).div_ceil(memory.of_word);
        let out = List::new(client, &out, words)?;
        let into = strips.iter().map(|strip| {
            let (mut entries, mut bits) = (Vec::new(), 32);
            for (field, span) in (0..).zip(&strip.into) {
                coming(format, memory, field, span, &mut entries, &mut bits);
            }
            let numbers = (entries.len() / 4).div_ceil(memory.of_word);
            let words = if format == Format::Bit { bits / 32 + 1 } else { numbers };
            List::new(client, &entries, words)
        });
        Ok(Self { into: into.collect::<Result<_, _>>()?, strips, format, out, packed: Packed::Nothing })
    }

    pub(super) fn is_fetched(&self) -> bool {
        !matches!(self.packed, Packed::Nothing)
    }

    /// Drops packed halo strips: they belong to an earlier state.
    pub(super) fn forget(&mut self) {
        if let Packed::Coming(coming) = std::mem::replace(&mut self.packed, Packed::Nothing) {
            // Wait: an abandoned read would leave its memory mapped, and the next read that gets that memory fails.
            // Device errors are checked elsewhere.
            let _ = cubecl::future::block_on(coming);
        }
    }

    /// Starts fetching the halo strips of a state for all neighbours.
    pub(super) fn fetch<R: Runtime>(&mut self, client: &ComputeClient<R>, state: &Buffer, memory: &Memory) {
        let Some(list) = &self.out else {
            self.packed = Packed::Here(vec![Vec::new(); self.strips.len()]);
            return;
        };
        let strips = Buffer { handle: client.empty(4 * list.words), len: list.words };
        let (cubes, dim) = over(list.count);
        let (wide, plane) = (address(client, state.len * memory.of_word), memory.plane);
        let entries = list.entries.arg();
        // SAFETY: entries are elements of the state; threads past the last entry do nothing.
        unsafe {
            match self.format {
                Format::Float => {
                    let (from, to) = (state.arg(), strips.arg());
                    gather::launch_unchecked::<f32, R>(client, cubes, dim, wide, entries, from, to, plane, list.count);
                }
                Format::Half => {
                    let (from, to) = (state.halves(), strips.halves());
                    gather::launch_unchecked::<f16, R>(client, cubes, dim, wide, entries, from, to, plane, list.count);
                }
                Format::Bit => {
                    let (from, to) = (state.arg(), strips.arg());
                    gather_bits::launch_unchecked::<R>(client, cubes, dim, wide, entries, from, to, list.count);
                }
            }
        }
        // The copy is ordered after all launches so far and before all later ones.
        self.packed = Packed::Coming(submit_read(client.clone(), strips.handle));
    }

    /// Appends the halo strip for a neighbour from the fetched state.
    pub(super) fn packed(&mut self, link: usize, strip: &mut Vec<u8>) -> Result<(), GridError> {
        if let Packed::Coming(coming) = &mut self.packed {
            let bytes = cubecl::future::block_on(coming.as_mut());
            let bytes = bytes.map_err(failed).map(|mut all| all.pop());
            self.packed = Packed::Nothing;
            let bytes = bytes?.ok_or_else(|| GridError::Device { what: "a read came back empty".into() })?;
            self.packed = Packed::Here(self.part(&bytes));
        }
        match &self.packed {
            Packed::Here(strips) if link < strips.len() => {
                strip.extend_from_slice(&strips[link]);
                Ok(())
            }
            Packed::Here(_) | Packed::Nothing | Packed::Coming(_) => {
                Err(GridError::NoLink { link, links: self.strips.len() })
            }
        }
    }

    /// Converts rows of whole words to rows of whole bytes, and splits them into one halo strip per link.
    fn part(&self, mut words: &[u8]) -> Vec<Vec<u8>> {
        let mut parted = Vec::new();
        for strip in &self.strips {
            let mut bytes = Vec::with_capacity(strip.bytes_out);
            match self.format {
                Format::Float | Format::Half => {
                    let (ours, rest) = words.split_at(strip.bytes_out.min(words.len()));
                    bytes.extend_from_slice(ours);
                    words = rest;
                }
                Format::Bit => {
                    for span in strip.out.iter().filter(|span| !span.is_empty()) {
                        let (row, kept) = (span.len(0).div_ceil(32) * 4, span.len(0).div_ceil(8));
                        for _ in span.rows() {
                            let (ours, rest) = words.split_at(row.min(words.len()));
                            bytes.extend_from_slice(&ours[..kept.min(ours.len())]);
                            words = rest;
                        }
                    }
                }
            }
            parted.push(bytes);
        }
        parted
    }

    /// Writes a neighbour's halo strip, of the correct length, into a state.
    pub(super) fn insert<R: Runtime>(
        &self,
        client: &ComputeClient<R>,
        link: usize,
        strip: &[u8],
        state: &Buffer,
        memory: &Memory,
    ) {
        let Some(Some(list)) = self.into.get(link) else { return };
        let padded;
        let words = match self.format {
            Format::Float => strip,
            Format::Half => {
                padded = [strip, &[0; 2]].concat();
                &padded[..4 * list.words]
            }
            Format::Bit => {
                padded = self.pad(link, strip, list.words);
                &padded
            }
        };
        let from = Buffer { handle: client.create_from_slice(words), len: list.words };
        let (cubes, dim) = over(list.count);
        let (wide, plane) = (address(client, state.len * memory.of_word), memory.plane);
        let entries = list.entries.arg();
        // SAFETY: entries are elements of the state and of the strip; threads past the last entry do nothing.
        unsafe {
            match self.format {
                Format::Float => {
                    let (from, to) = (from.arg(), state.arg());
                    scatter::launch_unchecked::<f32, R>(client, cubes, dim, wide, entries, from, to, plane, list.count);
                }
                Format::Half => {
                    let (from, to) = (from.halves(), state.halves());
                    scatter::launch_unchecked::<f16, R>(client, cubes, dim, wide, entries, from, to, plane, list.count);
                }
                Format::Bit => {
                    let (from, to) = (from.arg(), state.arg());
                    scatter_bits::launch_unchecked::<R>(client, cubes, dim, wide, entries, from, to, list.count);
                }
            }
        }
    }

    /// Converts rows of whole bytes to rows of whole words, with one word of padding before and after.
    fn pad(&self, link: usize, mut strip: &[u8], words: usize) -> Vec<u8> {
        let mut padded = Vec::with_capacity(4 * words);
        padded.resize(4, 0);
        for span in self.strips[link].into.iter().filter(|span| !span.is_empty()) {
            let (row, kept) = (span.len(0).div_ceil(32) * 4, span.len(0).div_ceil(8));
            for _ in span.rows() {
                let (ours, rest) = strip.split_at(kept.min(strip.len()));
                padded.extend_from_slice(ours);
                padded.resize(padded.len() + row - kept, 0);
                strip = rest;
            }
        }
        padded.resize(4 * words, 0);
        padded
    }
}

impl Drop for Exchange {
    fn drop(&mut self) {
        self.forget();
    }
}

impl List {
    fn new<R: Runtime>(client: &ComputeClient<R>, entries: &[u32], words: usize) -> Result<Option<Self>, GridError> {
        if entries.is_empty() {
            return Ok(None);
        }
        Ok(Some(Self { entries: Buffer::from_elements(client, entries)?, count: entries.len() / 4, words }))
    }
}

/// Appends entries for sending a span: numbers one by one, bits in groups of 32 along rows.
fn leaving(format: Format, memory: &Memory, field: u32, span: &Span, entries: &mut Vec<u32>) {
    if span.is_empty() {
        return;
    }
    let range = span.0[0].clone();
    for (y, z) in span.rows() {
        let at = |x: isize| memory.at([x, y, z]) as u32;
        match format {
            Format::Float | Format::Half => range.clone().for_each(|x| entries.extend([at(x), field, 0, 0])),
            Format::Bit => {
                for x in range.clone().step_by(32) {
                    let count = (range.end - x).min(32) as u32;
                    entries.extend([at(x), x.rem_euclid(32) as u32, u32::MAX >> (32 - count), 0]);
                }
            }
        }
    }
}

/// Appends entries for receiving a span: numbers one by one, bits by destination word. `bits`: length of the strip so
/// far.
fn coming(format: Format, memory: &Memory, field: u32, span: &Span, entries: &mut Vec<u32>, bits: &mut usize) {
    if span.is_empty() {
        return;
    }
    let range = span.0[0].clone();
    for (y, z) in span.rows() {
        let at = |x: isize| memory.at([x, y, z]) as u32;
        match format {
            Format::Float | Format::Half => range.clone().for_each(|x| entries.extend([at(x), field, 0, 0])),
            Format::Bit => {
                let first = range.start.div_euclid(32) * 32;
                for x in (first..range.end).step_by(32) {
                    let (skipped, count) = ((range.start - x).max(0) as u32, (range.end - x).min(32) as u32);
                    let mask = u32::MAX >> (32 - count) & u32::MAX << skipped;
                    // The padding word before the strip keeps this from being negative.
                    let bit = (*bits as isize + x - range.start) as u32;
                    entries.extend([at(x), bit, mask, 0]);
                }
                *bits += range.len().next_multiple_of(32);
            }
        }
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn gather<S: Float>(entries: &Array<u32>, from: &Array<S>, to: &mut Array<S>, plane: usize, count: usize) {
    let i = element();
    if i < count {
        to[i] = from[entries[4 * i + 1] as usize * plane + entries[4 * i] as usize];
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn scatter<S: Float>(entries: &Array<u32>, from: &Array<S>, to: &mut Array<S>, plane: usize, count: usize) {
    let i = element();
    if i < count {
        let at = entries[4 * i + 1] as usize * plane + entries[4 * i] as usize;
        to[at] = from[i];
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn gather_bits(entries: &Array<u32>, from: &Array<u32>, to: &mut Array<u32>, count: usize) {
    let i = element();
    if i < count {
        to[i] = two_words(from, entries[4 * i] as usize, entries[4 * i + 1]) & entries[4 * i + 2];
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn scatter_bits(entries: &Array<u32>, from: &Array<u32>, to: &mut Array<u32>, count: usize) {
    let i = element();
    if i < count {
        let (at, bit, mask) = (entries[4 * i] as usize, entries[4 * i + 1], entries[4 * i + 2]);
        let value = two_words(from, (bit / 32u32) as usize, bit % 32u32);
        to[at] = (to[at] & !mask) | (value & mask);
    }
}

/// 32 bits, starting at bit `shift` of word `at`.
#[cube]
fn two_words(words: &Array<u32>, at: usize, shift: u32) -> u32 {
    let mut found = words[at] >> shift;
    if shift > 0u32 {
        found |= words[at + 1] << (32u32 - shift);
    }
    found
}
