//! Every weight format is bit-identical to the scalar reference, for every instruction set, number of rows and split.
use super::*;
use crate::cpu::activations::Quantise;
use crate::order;
use crate::quant::{QUANT_TYPES, random_blocks};
use crate::tile::tests::matrix;

/// Column counts: whole groups, a block more and less, a single block; K formats need multiples of 256, float formats
/// take any.
fn columns(kind: QuantType) -> Vec<usize> {
    [1, 7, 31, 32, 64, 96, 160, 256, 512, 576, 1536].into_iter().filter(|c| kind.row_bytes(*c).is_some()).collect()
}

fn noise(count: usize, seed: u64) -> Vec<f32> {
    let bytes = random_blocks(QuantType::F32, count, seed);
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap()) * 3.0).collect()
}

fn rows(isa: Isa, count: usize, cols: usize) -> Rows {
    let mut x = Rows::default();
    x.shape(count, cols);
    let out = x.rows_mut();
    for m in 0..count {
        // SAFETY: one row at a time; the instruction set was detected.
        unsafe {
            let (floats, blocks) = out.row(m);
            floats[..cols].copy_from_slice(&noise(cols, 77 + m as u64));
            isa.run(Quantise { floats: &floats[..cols], blocks });
        }
    }
    x
}

fn product(isa: Isa, weights: Tiles<'_>, x: &Rows, integers: bool, splits: &[usize]) -> Vec<f32> {
    let mut out = vec![f32::NAN; x.count() * weights.rows()];
    let bounds = [&[0], splits, &[weights.rows()]].concat();
    for pair in bounds.windows(2) {
        // SAFETY: `out` has room for every row; the instruction set was detected.
        unsafe { Product { weights, x, rows: pair[0]..pair[1], integers, out: out.as_mut_ptr() }.run(isa) }
    }
    out
}

/// The product by the scalar reference.
fn reference(weights: Tiles<'_>, count: usize, integers: bool) -> Vec<f32> {
    let cols = weights.cols();
    let blocks = |row: usize| -> Option<Vec<_>> { (0..cols.div_ceil(BLOCK)).map(|b| weights.block(row, b)).collect() };
    let rows: Vec<_> = (0..weights.rows()).map(|row| (blocks(row).filter(|_| integers), weights.row(row))).collect();
    let mut out = Vec::new();
    for m in 0..count {
        let x = noise(cols, 77 + m as u64);
        let quantised = order::quantise(&x);
        out.extend(rows.iter().map(|(blocks, numbers)| match blocks {
            Some(blocks) => order::dot(blocks, &quantised, cols),
            None => order::dot_f32(numbers, &x),
        }));
    }
    out
}

fn bits(v: &[f32]) -> Vec<u32> {
    v.iter().map(|v| v.to_bits()).collect()
}

#[test]
fn quantised_activations_match_the_reference_bit_for_bit() {
    for isa in Isa::all() {
        for cols in [1, 31, 32, 33, 100, 576] {
            let x = rows(isa, 2, cols);
            for m in 0..2 {
                let expected = order::quantise(&noise(cols, 77 + m as u64));
                // SAFETY: a row has blocks for whole groups.
                let blocks = unsafe { std::slice::from_raw_parts(x.blocks_at(m), block_count(cols)) };
                let codes: Vec<i8> = blocks.iter().flat_map(|block| block.codes).collect();
                let scales: Vec<f32> = blocks.iter().map(|block| block.scale).collect();
                assert_eq!((&codes, bits(&scales)), (&expected.codes, bits(&expected.scales)), "{isa:?} {cols}");
                for block in blocks {
                    let sums =
                        [0, 1].map(|half| block.codes[16 * half..][..16].iter().map(|c| i32::from(*c)).sum::<i32>());
                    assert_eq!((block.sums, block.total), (sums, block.scale * (sums[0] + sums[1]) as f32));
                }
            }
        }
    }
}

#[test]
fn every_format_instruction_set_and_row_count_matches_the_reference_bit_for_bit() {
    for kind in QUANT_TYPES {
        for cols in columns(kind) {
            let n = 37;
            let (_, tiles) = matrix(kind, n, cols, 11);
            let weights = Tiles::new(kind, n, cols, &tiles).unwrap();
            for integers in [false, true] {
                let expected = bits(&reference(weights, 21, integers));
                for isa in Isa::all() {
                    let counts: &[usize] = if isa == Isa::detect() { &[1, 2, 3, 4, 5, 8, 9, 13, 21] } else { &[13] };
                    for &count in counts {
                        let found = product(isa, weights, &rows(isa, count, cols), integers, &[16]);
                        assert_eq!(bits(&found), expected[..count * n], "{kind:?} {cols} {integers} {count} {isa:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn non_finite_activations_give_non_finite_products() {
    for kind in QUANT_TYPES {
        for cols in columns(kind) {
            let n = 37;
            let (_, tiles) = matrix(kind, n, cols, 11);
            let weights = Tiles::new(kind, n, cols, &tiles).unwrap();
            for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                for at in [0, cols / 2, cols - 1] {
                    for isa in Isa::all() {
                        let mut x = rows(isa, 3, cols);
                        let out = x.rows_mut();
                        // SAFETY: one row at a time; the instruction set was detected.
                        unsafe {
                            let (floats, blocks) = out.row(1);
                            floats[at] = bad;
                            isa.run(Quantise { floats: &floats[..cols], blocks });
                        }
                        for integers in [false, true] {
                            let found = product(isa, weights, &x, integers, &[16]);
                            let quantised = integers && Layout::of(kind).bits > 0;
                            let sound = |row: &[f32]| row.iter().all(|y| y.is_finite());
                            let what = format!("{kind:?} {cols} {integers} {bad} at {at} {isa:?}");
                            assert!(sound(&found[..n]) && sound(&found[2 * n..]), "{what}: other rows stay finite");
                            // Zero times infinity is NaN, so no element of the row is finite.
                            assert!(found[n..2 * n].iter().all(|y| !y.is_finite()), "{what}");
                            assert!(!quantised || found[n..2 * n].iter().all(|y| y.is_nan()), "{what}");
                        }
                    }
                }
            }
        }
    }
}
