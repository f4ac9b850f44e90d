//! Round trips, their error bounds, golden bytes, and bytes that no encoder writes.
use super::*;

/// Numbers from a counter, roughly Gaussian: sums of twelve uniform ones.
fn noise(seed: u64, count: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut uniform = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 24) as f32
    };
    (0..count).map(|_| (0..12).map(|_| uniform()).sum::<f32>() - 6.0).collect()
}

/// A row as language models have them: some channels are a hundred times larger.
fn hidden(seed: u64, width: usize) -> Vec<f32> {
    let mut row = noise(seed, width);
    for (at, times) in [(3, 150.0), (width / 2, -90.0), (width - 1, 40.0)] {
        row[at] = times;
    }
    row
}

fn round_trip(codec: Codec, row: &[f32]) -> Vec<f32> {
    let coded = codec.encode(row.len(), row);
    assert_eq!(Some(coded.len()), codec.row_bytes(row.len()), "{codec:?}");
    codec.decode(row.len(), &coded).unwrap()
}

fn squared(values: impl Iterator<Item = f32>) -> f64 {
    values.map(|x| f64::from(x) * f64::from(x)).sum()
}

const WIDTHS: [usize; 9] = [1, 8, 31, 64, 100, 576, 960, 2048, 4096];

#[test]
fn rows_take_the_bytes_that_the_layouts_say() {
    assert_eq!(Codec::ALL.map(|codec| codec.row_bytes(576).unwrap()), [2304, 1154, 636, 323]);
    assert_eq!(Codec::ALL.map(|codec| codec.row_bytes(4096).unwrap()), [16_384, 8194, 4376, 2302]);
    for width in [64, 576, 960, 1024, 2048, 3072, 4096, 16_384] {
        let bytes = Codec::Q4.row_bytes(width).unwrap();
        assert!(bytes * 16 <= width * 9, "{bytes} bytes for {width} elements are more than 4.5 bits each");
    }
    for codec in Codec::ALL {
        assert_eq!((codec.row_bytes(0), codec.row_bytes(WIDTH_MAX + 1)), (None, None));
        assert_eq!(Codec::from_name(codec.name()), Some(codec));
    }
    assert_eq!(Codec::from_name("zip"), None);
}

#[test]
fn lossless_is_exact_and_half_precision_keeps_eleven_bits_at_any_magnitude() {
    for width in WIDTHS {
        for power in [-140, -30, 0, 30, 120] {
            let row: Vec<f32> = noise(width as u64, width).iter().map(|x| scaled(*x, power)).collect();
            assert_eq!(round_trip(Codec::Lossless, &row), row);
            let most = largest(&row);
            for (x, y) in row.iter().zip(round_trip(Codec::F16, &row)) {
                // Half a unit of the last of eleven bits, and of the least that the row's exponent can express.
                let bound = (x.abs() / 2048.0).max(most / (1 << 28) as f32).max(f32::from_bits(1));
                assert!((x - y).abs() <= bound, "{x} became {y} in a row up to {most}");
            }
        }
    }
}

#[test]
fn eight_bits_err_by_half_a_step_and_keep_outliers_exact() {
    for width in WIDTHS.into_iter().filter(|width| *width >= 256) {
        let row = hidden(width as u64, width);
        let decoded = round_trip(Codec::Q8, &row);
        for at in [3, width / 2, width - 1] {
            assert_eq!(decoded[at], row[at]);
        }
        for (x, y) in row.iter().zip(&decoded) {
            // The largest of the others is below 6, of which a bf16 may be 1/128 more.
            assert!((x - y).abs() <= 6.0 / 127.0 * 0.504, "{x} became {y}");
        }
    }
}

#[test]
fn four_bits_err_less_than_any_scalar_quantiser_of_a_gaussian() {
    for width in [576, 2048, 4096] {
        let (mut error, mut energy) = (0.0, 0.0);
        for seed in 0..40 {
            let row = hidden(seed, width);
            let decoded = round_trip(Codec::Q4, &row);
            let large = [3, width / 2, width - 1];
            assert!(large.iter().all(|&at| (decoded[at] - row[at]).abs() <= row[at].abs() / 256.0));
            let others = || (0..width).filter(|at| !large.contains(at));
            error += squared(others().map(|at| row[at] - decoded[at]));
            energy += squared(others().map(|at| row[at]));
        }
        // Max's quantiser of 16 levels has 0.0095 of the variance, and four bits at the rate-distortion bound 0.0039.
        let share = error / energy;
        assert!((0.0039..0.0063).contains(&share), "width {width}: {share}");
    }
}

#[test]
fn rows_of_zeros_and_of_any_magnitude_survive() {
    for codec in Codec::ALL {
        for width in WIDTHS {
            assert_eq!(round_trip(codec, &vec![0.0; width]), vec![0.0; width], "{codec:?}");
            for power in [-145, -100, 100, 118] {
                let row: Vec<f32> = noise(7, width).iter().map(|x| scaled(*x, power)).collect();
                let decoded = round_trip(codec, &row);
                let bound = largest(&row) * 0.3 + 1e-30;
                assert!(row.iter().zip(&decoded).all(|(x, y)| (x - y).abs() <= bound), "{codec:?} {width} {power}");
            }
        }
    }
}

#[test]
fn a_row_that_is_not_finite_decodes_to_nan() {
    for codec in [Codec::F16, Codec::Q8, Codec::Q4] {
        for width in WIDTHS {
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let mut rows = noise(1, 2 * width);
                rows[width / 2] = bad;
                let decoded = codec.decode(width, &codec.encode(width, &rows)).unwrap();
                assert!(decoded[..width].iter().all(|x| x.is_nan()), "{codec:?} {width} {bad}");
                assert!(is_finite(&decoded[width..]), "{codec:?}: the other row");
            }
        }
        let huge = round_trip(codec, &[f32::MAX; 640]);
        assert!(huge.iter().all(|x| !x.is_finite() || (x - f32::MAX).abs() <= f32::MAX / 100.0), "{codec:?}");
    }
}

#[test]
fn each_row_is_encoded_alone() {
    for codec in Codec::ALL {
        let (a, b) = (hidden(1, 576), hidden(2, 576));
        let both = codec.encode(576, &[a.clone(), b.clone()].concat());
        assert_eq!(both, [codec.encode(576, &a), codec.encode(576, &b)].concat());
        let decoded = codec.decode(576, &both).unwrap();
        let alone = |row: &[f32]| codec.decode(576, &codec.encode(576, row)).unwrap();
        assert_eq!(decoded, [alone(&a), alone(&b)].concat());
    }
}

#[test]
fn every_instruction_set_gives_the_same_bytes() {
    for codec in Codec::ALL {
        for width in WIDTHS {
            let rows = noise(width as u64, 2 * width);
            let expected = codec.encode(width, &rows);
            for isa in Isa::all() {
                let mut out = Vec::new();
                // SAFETY: the machine has the instruction set.
                unsafe { isa.run(Encode { codec, width, rows: &rows, out: &mut out }) };
                assert_eq!(out, expected, "{codec:?}, {isa:?}");
            }
        }
    }
}

#[test]
fn bytes_of_a_wrong_length_or_with_wrong_outliers_are_rejected() {
    for codec in Codec::ALL {
        let bytes = codec.encode(576, &hidden(1, 576));
        for wrong in [&bytes[1..], &[bytes.as_slice(), &[0]].concat()] {
            assert!(matches!(codec.decode(576, wrong), Err(BoundaryError::Length { .. })));
        }
        assert!(matches!(codec.decode(0, &bytes), Err(BoundaryError::Width { .. })));
        assert!(matches!(codec.decode(WIDTH_MAX + 1, &bytes), Err(BoundaryError::Width { .. })));
        assert_eq!(codec.decode(576, &[]), Ok(Vec::new()));
    }
    for (codec, first, each) in [(Codec::Q8, 0, 6), (Codec::Q4, 2, 4)] {
        let mut bytes = codec.encode(576, &hidden(1, 576));
        bytes[first..first + 2].copy_from_slice(&576u16.to_le_bytes());
        assert_eq!(codec.decode(576, &bytes), Err(BoundaryError::Outlier { found: 576, least: 0, most: 575 }));
        bytes[first..first + 2].copy_from_slice(&9u16.to_le_bytes());
        bytes[first + each..first + each + 2].copy_from_slice(&9u16.to_le_bytes());
        assert_eq!(codec.decode(576, &bytes), Err(BoundaryError::Outlier { found: 9, least: 10, most: 575 }));
    }
    for codec in [Codec::F16, Codec::Q4] {
        let mut bytes = codec.encode(576, &hidden(1, 576));
        bytes[..2].copy_from_slice(&999i16.to_le_bytes());
        assert_eq!(codec.decode(576, &bytes), Err(BoundaryError::Exponent { found: 999 }));
    }
}

#[test]
fn rows_have_the_same_bytes_on_any_number_of_threads() {
    const WIDTH: usize = 96;
    let rows: Vec<f32> = (0..37 * WIDTH).map(|i| (i * 37 % 101) as f32 - 50.0).collect();
    for count in [1, 2, 3] {
        let mut threads = Threads::new(count).unwrap();
        for codec in Codec::ALL {
            for rows in [0, 1, 4, 5, 37].map(|count| &rows[..count * WIDTH]) {
                assert_eq!(codec.encode_on(&mut threads, WIDTH, rows), codec.encode(WIDTH, rows), "{codec:?}");
            }
        }
    }
}

#[test]
fn random_bytes_never_panic() {
    let mut state = 5u64;
    for round in 0..3000 {
        for codec in Codec::ALL {
            let width = WIDTHS[round % 6];
            let mut bytes = vec![0u8; codec.row_bytes(width).unwrap()];
            for byte in &mut bytes {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                *byte = (state >> 56) as u8;
            }
            if let Ok(rows) = codec.decode(width, &bytes) {
                assert_eq!(rows.len(), width);
            }
        }
    }
}

/// The bytes are part of the protocol: a change needs a new number of it.
#[test]
fn golden_bytes() {
    let row: Vec<f32> =
        (0..128).map(|i| ((i * 37 % 101) as f32 - 50.0) / 16.0 + if i == 70 { 300.0 } else { 0.0 }).collect();
    let sums = Codec::ALL.map(|codec| {
        // FNV-1a.
        let bytes = codec.encode(128, &row);
        bytes
            .iter()
            .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3))
    });
    let golden = [0x301a_0a43_f869_4373, 0x4137_7cfa_760a_5302, 0x2916_6c1b_225d_56ee, 0x2124_ad17_c132_5e68];
    assert_eq!(sums, golden, "{sums:#x?}");
}
