//! Tests that tiles hold exactly the weights of the file.
use super::*;
use crate::quant::{QUANT_TYPES, random_blocks};

/// A random matrix in storage format, and its tiles.
pub(crate) fn matrix(kind: QuantType, rows: usize, cols: usize, seed: u64) -> (Vec<u8>, Vec<u8>) {
    let stored = random_blocks(kind, rows * cols / kind.block_len(), seed);
    let mut tiles = vec![0xaa; Layout::of(kind).matrix_bytes(rows, cols)];
    convert(kind, cols, 0..rows, &stored, &mut tiles).expect("finite weights");
    (stored, tiles)
}

#[test]
fn every_format_keeps_its_weights() {
    for kind in QUANT_TYPES {
        for (rows, cols) in [(16usize, 256usize), (1, 512), (37, 256), (48, 768), (33, 96), (5, 32)] {
            if !cols.is_multiple_of(kind.block_len()) {
                continue;
            }
            let (stored, tiles) = matrix(kind, rows, cols, (rows * cols) as u64);
            let tiles = Tiles::new(kind, rows, cols, &tiles).expect("the size of a matrix");
            for (row, stored) in stored.chunks_exact(kind.row_bytes(cols).unwrap()).enumerate() {
                let mut exact = vec![0.0; cols];
                kind.dequantize(stored, &mut exact);
                assert_eq!(tiles.row(row), exact, "{} row {row} of {rows} by {cols}", kind.name());
            }
        }
    }
}

#[test]
fn padding_of_the_last_tile_is_zero() {
    for kind in QUANT_TYPES {
        let cols = kind.block_len().max(BLOCK) * 3;
        let (_, tiles) = matrix(kind, 17, cols, 9);
        let padded = Tiles::new(kind, 32, cols.next_multiple_of(GROUP), &tiles).expect("the size of the padded matrix");
        for row in 0..32 {
            let weights = padded.row(row);
            assert!(weights[cols..].iter().all(|w| *w == 0.0), "{} row {row}", kind.name());
            assert!(row < 17 || weights.iter().all(|w| *w == 0.0), "{} row {row}", kind.name());
        }
    }
}

#[test]
fn rows_can_be_converted_in_parts() {
    for kind in QUANT_TYPES {
        let (rows, cols) = (50, 512);
        let (stored, all) = matrix(kind, rows, cols, 4);
        let row_bytes = kind.row_bytes(cols).unwrap();
        let mut parts = Vec::new();
        for part in [0..16, 16..48, 48..50] {
            let mut tiles = vec![0; Layout::of(kind).matrix_bytes(part.len(), cols)];
            convert(kind, cols, part.clone(), &stored[part.start * row_bytes..part.end * row_bytes], &mut tiles)
                .unwrap();
            parts.extend(tiles);
        }
        assert_eq!(parts, all, "{}", kind.name());
    }
}

#[test]
fn non_finite_numbers_are_found() {
    for kind in QUANT_TYPES {
        let (rows, cols) = (20, 512);
        let (mut stored, mut tiles) = matrix(kind, rows, cols, 5);
        let (bytes, len) = (kind.block_bytes(), kind.block_len());
        let at = 18 * cols / len * bytes + (256 / len) * bytes;
        let place = match kind {
            QuantType::Q3K => at + 108,
            QuantType::Q6K => at + 208,
            QuantType::Q4_1 | QuantType::Q5_1 | QuantType::Q4K | QuantType::Q5K => at + 2, // the minimum
            QuantType::F32 => at + 2,
            QuantType::F16
            | QuantType::Bf16
            | QuantType::Q4_0
            | QuantType::Q5_0
            | QuantType::Q8_0
            | QuantType::Q4Z
            | QuantType::Iq2Xxs
            | QuantType::Iq2Xs
            | QuantType::Iq2S
            | QuantType::Iq3Xxs
            | QuantType::Iq3S
            | QuantType::Iq4Nl
            | QuantType::Iq4Xs
            | QuantType::Mxfp4 => at,
        };
        // Infinity as the upper half of an f32, NaN as an f16; MXFP4 has a NaN of one byte, Q4_Z an f16 without its sign.
        let bad = if kind == QuantType::Mxfp4 {
            [0xff, 0]
        } else if kind == QuantType::Q4Z {
            [0x80, 0xf8]
        } else {
            [0x80, 0x7f]
        };
        stored[place..place + 2].copy_from_slice(&bad);
        let found = convert(kind, cols, 0..rows, &stored, &mut tiles);
        let reason = BadWeights::NotFinite;
        assert_eq!(found, Err(BadBlock { row: 18, column: 256, reason }), "{}", kind.name());
    }
}

/// Tiles that come from a file as tiles: each of their numbers in turn is infinite, then NaN.
#[test]
fn non_finite_numbers_in_tiles_are_found() {
    for kind in QUANT_TYPES {
        let (rows, cols) = (20, 512);
        let (_, tiles) = matrix(kind, rows, cols, 5);
        assert_eq!(check(kind, cols, 32, &tiles), Ok(()), "{}", kind.name());
        let layout = Layout::of(kind);
        let (size, numbers, blocks) = match (kind, layout.scales) {
            (QuantType::F32, _) => (4, ROWS * GROUP, 1),
            (_, Scales::None) => (2, ROWS * GROUP, 1),
            (_, Scales::Half | Scales::HalfAndZero) => (2, 2 * ROWS, 2),
            (_, Scales::HalfAndMinimum) => (2, 4 * ROWS, 2),
            (_, Scales::Bytes) => (2, 2 * ROWS, 1),
            (_, Scales::SignedBytes | Scales::Sixteens) => (2, ROWS, 1),
        };
        // The second tile of the second row of tiles.
        let tile = layout.matrix_bytes(ROWS, cols) + layout.tile_bytes;
        for number in 0..numbers {
            // Infinity in four bytes; NaN as BF16, and as f16.
            let bad = if size == 4 {
                &[0, 0, 0x80, 0xff][..]
            } else if kind == QuantType::Bf16 {
                &[0x80, 0x7f]
            } else if kind == QuantType::Q4Z {
                &[0x80, 0xf8]
            } else {
                &[1, 0x7c]
            };
            let mut tiles = tiles.clone();
            tiles[tile + 2 * layout.block_bytes * usize::from(layout.bits > 0) + number * size..][..size]
                .copy_from_slice(bad);
            let column = GROUP + if layout.bits == 0 { number / ROWS } else { number / ROWS % blocks * BLOCK };
            let expected = BadBlock { row: 48 + number % ROWS, column, reason: BadWeights::NotFinite };
            assert_eq!(check(kind, cols, 32, &tiles), Err(expected), "{} number {number}", kind.name());
        }
    }
}

#[test]
fn scales_of_mxfp4_are_exact_or_rejected() {
    for scale in 0..=u8::MAX {
        let (kind, exponent) = (QuantType::Mxfp4, i32::from(scale) - 127);
        let mut stored = random_blocks(kind, 2, 6);
        stored[17] = scale;
        let mut tiles = vec![0; Layout::of(kind).matrix_bytes(1, 64)];
        let found = convert(kind, 64, 0..1, &stored, &mut tiles);
        let expected = match (scale, exponent) {
            (u8::MAX, _) => Err(BadWeights::NotFinite),
            (_, -23..=16) => Ok(()),
            _ => Err(BadWeights::Scale { exponent }),
        };
        assert_eq!(found, expected.map_err(|reason| BadBlock { row: 0, column: 32, reason }));
        let mut exact = vec![0.0; 64];
        kind.dequantize(&stored, &mut exact);
        let row = || Tiles::new(kind, 1, 64, &tiles).expect("one tile").row(0);
        assert!(found.is_err() || row() == exact, "2^{exponent}");
    }
    let error = BadBlock { row: 3, column: 64, reason: BadWeights::Scale { exponent: 17 } }.to_string();
    assert!(error.starts_with("row 3, columns from 64: the scale is 2^17, expected 2^-23 to 2^16; convert"), "{error}");
}

#[test]
fn zeros_of_mxfp4_may_have_any_scale() {
    for scale in [0, 90, 200, 254] {
        let stored = [&[scale][..], &[0x08; 8], &[0x80; 8]].concat();
        let mut tiles = vec![0xaa; Layout::of(QuantType::Mxfp4).matrix_bytes(1, 32)];
        convert(QuantType::Mxfp4, 32, 0..1, &stored, &mut tiles).expect("zeros");
        let tiles = Tiles::new(QuantType::Mxfp4, 1, 32, &tiles).expect("one tile");
        assert_eq!(tiles.row(0), [0.0; 32]);
    }
}
