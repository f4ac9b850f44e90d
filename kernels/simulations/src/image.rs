//! PNG images as masks and initial states: one grey value per cell, the same size as the grid.
use std::io::Cursor;

use kernels_grids::Grid;

/// Maximum pixels: the image is sent with its job, and a larger mask is better given as an expression.
const PIXELS_MAX: usize = 1 << 26;
/// Maximum bytes of decoder memory besides its rows.
const DECODER_BYTES_MAX: usize = 64 << 20;

/// Grey values from 0 (black) to 65535 (white), indexed by x and y; all z layers of a 3D grid share them.
#[derive(Clone)]
pub(super) struct Image {
    width: usize,
    grey: Vec<u16>,
}

/// Reads a PNG of 8 or 16 bits, grey or colour, the same size as the grid, and calls `put(index, value)` per cell.
/// `upright`: the last row is at y = 0, matching the orientation of output frames.
fn read(png: &[u8], grid: &Grid, upright: bool, put: &mut dyn FnMut(usize, u16)) -> Result<(), String> {
    let not_png = |error: png::DecodingError| format!("expected a PNG file, found something else: {error}");
    let limits = png::Limits { bytes: DECODER_BYTES_MAX };
    let mut decoder = png::Decoder::new_with_limits(Cursor::new(png), limits);
    // Palettes and lower bit depths become 8 bits per channel.
    decoder.set_transformations(png::Transformations::EXPAND);
    decoder.set_ignore_text_chunk(true);
    decoder.set_ignore_iccp_chunk(true);
    let mut reader = decoder.read_info().map_err(not_png)?;
    let (width, height) = (reader.info().width as usize, reader.info().height as usize);
    let [nx, ny, _] = grid.size();
    // Before anything is allocated for the pixels.
    if [width, height] != [nx, ny] {
        return Err(format!("the image has {width} × {height} pixels, the grid {nx} × {ny} cells: make them equal"));
    }
    if width.saturating_mul(height) > PIXELS_MAX {
        return Err(format!("expected an image of at most {PIXELS_MAX} pixels, found more: use an expression instead"));
    }
    if reader.info().interlaced {
        return Err("expected an image without interlacing, found an interlaced one: save it without".into());
    }
    let (colour, depth) = reader.output_color_type();
    let (channels, bytes) = (colour.samples(), if depth == png::BitDepth::Sixteen { 2 } else { 1 });
    for row in 0..height {
        let pixels = reader.next_row().map_err(not_png)?.ok_or("the image ends before its last row: save it again")?;
        let row = if upright { height - 1 - row } else { row };
        for (at, pixel) in (row * width..(row + 1) * width).zip(pixels.data().chunks_exact(channels * bytes)) {
            put(at, level(pixel, channels, bytes));
        }
    }
    Ok(())
}

impl Image {
    /// Reads a PNG file (see [`read`]).
    pub(super) fn read(png: &[u8], grid: &Grid, upright: bool) -> Result<Self, String> {
        let mut grey = Vec::new();
        read(png, grid, upright, &mut |at, value| {
            if grey.is_empty() {
                grey = vec![0; grid.size()[0] * grid.size()[1]];
            }
            grey[at] = value;
        })?;
        Ok(Self { width: grid.size()[0], grey })
    }

    /// The grey value of a cell.
    pub(super) fn at(&self, [x, y, _]: [usize; 3]) -> u16 {
        self.grey[y * self.width + x]
    }
}

/// Luminance of a pixel (ITU-R BT.601 weights), composited over white.
fn level(pixel: &[u8], channels: usize, bytes: usize) -> u16 {
    let value = |channel: usize| match pixel[channel * bytes..(channel + 1) * bytes] {
        [high, low] => u32::from(u16::from_be_bytes([high, low])),
        [one] => u32::from(one) * 257,
        _ => 0,
    };
    let grey = match channels {
        1 | 2 => value(0),
        _ => (299 * value(0) + 587 * value(1) + 114 * value(2)) / 1000,
    };
    let opaque = match channels {
        2 => value(1),
        4 => value(3),
        _ => 65535,
    };
    ((u64::from(grey) * u64::from(opaque)) / 65535 + u64::from(65535 - opaque)) as u16
}

/// A mask of solid or live cells, one bit per cell.
#[derive(Clone)]
pub(super) struct Mask {
    width: usize,
    bits: Vec<u64>,
}

impl Mask {
    /// Thresholds a PNG file (see [`read`]): cells at or above it if `bright`, else below it. Row by row into bits: the
    /// grey values of a large image would take 16 times the memory.
    pub(super) fn read(png: &[u8], grid: &Grid, upright: bool, threshold: f64, bright: bool) -> Result<Self, String> {
        let level = (threshold * 65535.0).ceil() as u32;
        let mut bits = Vec::new();
        read(png, grid, upright, &mut |at, grey| {
            if bits.is_empty() {
                bits = vec![0u64; (grid.size()[0] * grid.size()[1]).div_ceil(64)];
            }
            bits[at / 64] |= u64::from((u32::from(grey) >= level) == bright) << (at % 64);
        })?;
        Ok(Self { width: grid.size()[0], bits })
    }

    pub(super) fn at(&self, [x, y, _]: [usize; 3]) -> bool {
        let at = y * self.width + x;
        self.bits[at / 64] >> (at % 64) & 1 == 1
    }

    /// Appends bytes that identify the mask.
    pub(super) fn describe(&self, to: &mut Vec<u8>) {
        to.extend(self.bits.iter().flat_map(|word| word.to_le_bytes()));
    }
}
