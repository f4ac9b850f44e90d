//! Every format against f64, and equal bits for every instruction set, number of rows and split.
use super::*;
use crate::cpu::activations::Quantise;
use crate::quant::{QUANT_TYPES, random_blocks};

/// Columns: whole groups, one block short and over, one block; K formats take multiples of 256, numbers any.
fn columns(kind: QuantType) -> Vec<usize> {
    [1, 7, 31, 32, 64, 96, 128, 160, 256, 512, 576, 1536].into_iter().filter(|c| kind.row_bytes(*c).is_some()).collect()
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
            let (floats, groups) = out.row(m);
            floats[..cols].copy_from_slice(&noise(cols, 77 + m as u64));
            isa.run(Quantise { floats: &floats[..cols], groups });
        }
    }
    x
}

fn product(isa: Isa, weights: Matrix<'_>, x: &Rows, integers: bool, splits: &[usize]) -> Vec<f32> {
    let mut out = vec![f32::NAN; x.count() * weights.rows()];
    let bounds = [&[0], splits, &[weights.rows()]].concat();
    for pair in bounds.windows(2) {
        // SAFETY: `out` has room for every row; the instruction set was detected.
        unsafe { Product { weights, x, rows: pair[0]..pair[1], integers, out: out.as_mut_ptr() }.run(isa) }
    }
    out
}

/// What the integers of a row stand for.
fn rounded(x: &Rows, m: usize) -> Vec<f64> {
    (0..x.cols())
        .map(|k| {
            // SAFETY: the row has a group for each 128 columns.
            let group = unsafe { &*x.groups_at(m).add(k / GROUP) };
            let (block, i) = (k % GROUP / 32, k % 32);
            let half = if i < 16 { &group.low } else { &group.high };
            f64::from(half[16 * block + i % 16]) * f64::from(group.scale[4 * block])
        })
        .collect()
}

fn bits(v: &[f32]) -> Vec<u32> {
    v.iter().map(|v| v.to_bits()).collect()
}

#[test]
fn rounding_stays_within_half_a_step() {
    for isa in Isa::all() {
        for cols in [1, 31, 32, 33, 100, 576] {
            let x = rows(isa, 2, cols);
            for m in 0..2 {
                let exact = noise(cols, 77 + m as u64);
                for (block, approx) in exact.chunks(32).zip(rounded(&x, m).chunks(32)) {
                    let step = block.iter().fold(0f32, |a, v| a.max(v.abs())) / 127.0;
                    for (exact, approx) in block.iter().zip(approx) {
                        assert!((f64::from(*exact) - approx).abs() <= f64::from(step) * 0.50001, "{isa:?} {cols}");
                    }
                }
            }
        }
    }
}

#[test]
fn agrees_with_f64_for_every_format_and_shape() {
    for (kind, isa) in QUANT_TYPES.into_iter().flat_map(|k| Isa::all().into_iter().map(move |i| (k, i))) {
        for cols in columns(kind) {
            let n = 13;
            let bytes = random_blocks(kind, n * cols / kind.block_len(), 5);
            let weights = Matrix::new(kind, n, cols, &bytes).unwrap();
            let mut exact = vec![0.0; n * cols];
            kind.dequantize_f64(&bytes, &mut exact);
            let x = rows(isa, 9, cols);
            for integers in [false, true] {
                let y = product(isa, weights, &x, integers, &[]);
                for m in 0..9 {
                    let quantised = integers && kind.block_len() > 1;
                    let x = if quantised {
                        rounded(&x, m)
                    } else {
                        noise(cols, 77 + m as u64).iter().map(|v| f64::from(*v)).collect()
                    };
                    for (row, w) in exact.chunks_exact(cols).enumerate() {
                        let sum: f64 = w.iter().zip(&x).map(|(w, x)| w * x).sum();
                        let size: f64 = w.iter().zip(&x).map(|(w, x)| (w * x).abs()).sum();
                        // Offsets and minima cancel parts that are larger than the products themselves.
                        let size = size + x.iter().map(|x| x.abs()).sum::<f64>();
                        let found = f64::from(y[m * n + row]);
                        assert!(
                            (found - sum).abs() <= 2e-6 * size,
                            "{kind:?} {isa:?} {cols} {integers}: {found} for {sum}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn a_row_has_the_same_bits_in_any_batch_and_split() {
    for kind in QUANT_TYPES {
        for cols in columns(kind) {
            let n = 37;
            let bytes = random_blocks(kind, n * cols / kind.block_len(), 11);
            let weights = Matrix::new(kind, n, cols, &bytes).unwrap();
            let isa = Isa::detect();
            for integers in [false, true] {
                let all = product(isa, weights, &rows(isa, 32, cols), integers, &[]);
                for count in [1, 2, 3, 4, 5, 7, 8, 9, 13, 16, 31] {
                    let some = product(isa, weights, &rows(isa, count, cols), integers, &[5, 16, 17]);
                    assert_eq!(bits(&some), bits(&all[..count * n]), "{kind:?} {cols} {integers} {count}");
                }
            }
        }
    }
}

#[test]
fn instruction_sets_agree_bit_for_bit() {
    let (best, others) = (Isa::detect(), Isa::all());
    for kind in QUANT_TYPES {
        for cols in columns(kind) {
            let n = 6;
            let bytes = random_blocks(kind, n * cols / kind.block_len(), 3);
            let weights = Matrix::new(kind, n, cols, &bytes).unwrap();
            for integers in [false, true] {
                let expected = product(best, weights, &rows(best, 9, cols), integers, &[]);
                for &isa in &others {
                    let found = product(isa, weights, &rows(isa, 9, cols), integers, &[]);
                    assert_eq!(bits(&found), bits(&expected), "{kind:?} {cols} {integers} {isa:?}");
                }
            }
        }
    }
}
