//! Weight storage formats: ggml's quantised block formats and their dequantisation.
//!
//! [`QuantType::dequantize_f64`] defines the exact value of every format and is the reference for each kernel; the f32 form is
//! that value rounded once, which equals ggml's scalar code.
use half::{bf16, f16};

mod grids;
pub mod search;

/// A storage format of tensor rows. A row is a whole number of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum QuantType {
    /// IEEE single, little-endian.
    F32,
    /// IEEE half.
    F16,
    /// The upper half of an IEEE single.
    Bf16,
    /// 32 weights: f16 scale, 4 bits each, minus 8.
    Q4_0,
    /// 32 weights: f16 scale, f16 minimum, 4 bits each.
    Q4_1,
    /// 32 weights: f16 scale, 5 bits each (fifth bits stored separately), minus 16.
    Q5_0,
    /// 32 weights: f16 scale, f16 minimum, 5 bits each (fifth bits stored separately).
    Q5_1,
    /// 32 weights: f16 scale, signed bytes.
    Q8_0,
    /// 256 weights: 8 groups of 32 with 4-bit scales; 8 weights each are an entry of a code book with 256, and 7 bits of signs.
    Iq2Xxs,
    /// 256 weights: 16 groups of 16 with 4-bit scales; 8 weights each are an entry of a code book with 512, and 7 bits of signs.
    Iq2Xs,
    /// 256 weights: 16 groups of 16 with 4-bit scales; 8 weights each are an entry of a code book with 1024, and their signs.
    Iq2S,
    /// 256 weights: 8 groups of 32 with 4-bit scales; 4 weights each are an entry of a code book with 256, 8 have 7 bits of signs.
    Iq3Xxs,
    /// 256 weights: 8 groups of 32 with 4-bit scales; 4 weights each are an entry of a code book with 512, 8 have their signs.
    Iq3S,
    /// 256 weights: 16 groups of 16 with 6-bit scales, minus 32; 3 bits each (third bits stored separately), minus 4.
    Q3K,
    /// 256 weights: 8 groups of 32 with 6-bit scales and minima, 4 bits each.
    Q4K,
    /// 256 weights: as `Q4K` with a fifth bit stored separately.
    Q5K,
    /// 256 weights: 16 groups of 16 with 8-bit scales, 6 bits each, minus 32.
    Q6K,
    /// 32 weights: f16 scale, 4 bits each, which index [`IQ4_VALUES`].
    Iq4Nl,
    /// 256 weights: 8 groups of 32 with 6-bit scales, minus 32; 4 bits each, which index [`IQ4_VALUES`].
    Iq4Xs,
    /// 32 weights: a power of two as scale, 4 bits each, which index [`MXFP4_VALUES`].
    Mxfp4,
    /// 32 weights: a word with a scale of 9 bits and a zero of 7, see [`scale_and_zero`]; 4 bits each, minus the zero. Of `.mesh`
    /// files: as precise as `Q4K`, and in tiles as small as `Q4_0`.
    Q4Z,
}

/// All formats; tests iterate over them.
pub const QUANT_TYPES: [QuantType; 21] = [
    QuantType::F32,
    QuantType::F16,
    QuantType::Bf16,
    QuantType::Q4_0,
    QuantType::Q4_1,
    QuantType::Q5_0,
    QuantType::Q5_1,
    QuantType::Q8_0,
    QuantType::Iq2Xxs,
    QuantType::Iq2Xs,
    QuantType::Iq2S,
    QuantType::Iq3Xxs,
    QuantType::Iq3S,
    QuantType::Q3K,
    QuantType::Q4K,
    QuantType::Q5K,
    QuantType::Q6K,
    QuantType::Iq4Nl,
    QuantType::Iq4Xs,
    QuantType::Mxfp4,
    QuantType::Q4Z,
];

/// Weights per block of the 32-wide formats.
pub const BLOCK: usize = 32;
/// Weights per super-block of the K formats.
pub const SUPER_BLOCK: usize = 256;

/// What the codes of IQ4_NL and IQ4_XS stand for (ggml's `kvalues_iq4nl`).
pub const IQ4_VALUES: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];
/// What the codes of MXFP4 stand for, times two (ggml's `kvalues_mxfp4`); they are multiplied by half the scale.
pub const MXFP4_VALUES: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// What the codes of [`BookGroup`] stand for in IQ2: magnitudes, then the same with a minus.
pub const IQ2_VALUES: [i8; 16] = [8, 25, 43, 0, 0, 0, 0, 0, -8, -25, -43, 0, 0, 0, 0, 0];
/// Those of IQ3_XXS.
pub const IQ3_XXS_VALUES: [i8; 16] = [4, 12, 20, 28, 36, 44, 52, 62, -4, -12, -20, -28, -36, -44, -52, -62];
/// Those of IQ3_S.
pub const IQ3_S_VALUES: [i8; 16] = [1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15];
/// Scales of IQ2 are divided by two to this power.
pub const IQ2_SHIFT: u32 = 3;
/// Scales of IQ3_XXS are.
pub const IQ3_XXS_SHIFT: u32 = 2;

impl QuantType {
    /// The format of a ggml type number; `None` if unsupported.
    #[must_use]
    pub fn from_ggml(id: u32) -> Option<Self> {
        QUANT_TYPES.into_iter().find(|q| q.ggml_id() == id)
    }

    /// The ggml type number in GGUF; from 1000 for formats that ggml does not have.
    #[must_use]
    pub fn ggml_id(self) -> u32 {
        match self {
            Self::F32 => 0,
            Self::F16 => 1,
            Self::Q4_0 => 2,
            Self::Q4_1 => 3,
            Self::Q5_0 => 6,
            Self::Q5_1 => 7,
            Self::Q8_0 => 8,
            Self::Q3K => 11,
            Self::Q4K => 12,
            Self::Q5K => 13,
            Self::Q6K => 14,
            Self::Iq2Xxs => 16,
            Self::Iq2Xs => 17,
            Self::Iq3Xxs => 18,
            Self::Iq4Nl => 20,
            Self::Iq3S => 21,
            Self::Iq2S => 22,
            Self::Iq4Xs => 23,
            Self::Bf16 => 30,
            Self::Mxfp4 => 39,
            Self::Q4Z => 1000,
        }
    }

    /// The ggml name, if ggml has the format.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::Bf16 => "BF16",
            Self::Q4_0 => "Q4_0",
            Self::Q4_1 => "Q4_1",
            Self::Q5_0 => "Q5_0",
            Self::Q5_1 => "Q5_1",
            Self::Q8_0 => "Q8_0",
            Self::Iq2Xxs => "IQ2_XXS",
            Self::Iq2Xs => "IQ2_XS",
            Self::Iq2S => "IQ2_S",
            Self::Iq3Xxs => "IQ3_XXS",
            Self::Iq3S => "IQ3_S",
            Self::Q3K => "Q3_K",
            Self::Q4K => "Q4_K",
            Self::Q5K => "Q5_K",
            Self::Q6K => "Q6_K",
            Self::Iq4Nl => "IQ4_NL",
            Self::Iq4Xs => "IQ4_XS",
            Self::Mxfp4 => "MXFP4",
            Self::Q4Z => "Q4_Z",
        }
    }

    /// Weights per block.
    #[must_use]
    pub fn block_len(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::Bf16 => 1,
            Self::Q4_0 | Self::Q4_1 | Self::Q5_0 | Self::Q5_1 | Self::Q8_0 | Self::Iq4Nl | Self::Mxfp4 | Self::Q4Z => {
                BLOCK
            }
            Self::Iq2Xxs | Self::Iq2Xs | Self::Iq2S | Self::Iq3Xxs | Self::Iq3S | Self::Iq4Xs => SUPER_BLOCK,
            Self::Q3K | Self::Q4K | Self::Q5K | Self::Q6K => SUPER_BLOCK,
        }
    }

    /// Bytes per block.
    #[must_use]
    pub fn block_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::Mxfp4 => 17,
            Self::Q4_0 | Self::Iq4Nl | Self::Q4Z => 18,
            Self::Q4_1 => 20,
            Self::Q5_0 => 22,
            Self::Q5_1 => 24,
            Self::Q8_0 => 34,
            Self::Iq2Xxs => 66,
            Self::Iq2Xs => 74,
            Self::Iq2S => 82,
            Self::Iq3Xxs => 98,
            Self::Iq3S | Self::Q3K => 110,
            Self::Iq4Xs => 136,
            Self::Q4K => 144,
            Self::Q5K => 176,
            Self::Q6K => 210,
        }
    }

    /// Bytes of a row of `cols` weights; `None` if `cols` is not a multiple of the block length, or on overflow.
    #[must_use]
    pub fn row_bytes(self, cols: usize) -> Option<usize> {
        if !cols.is_multiple_of(self.block_len()) {
            return None;
        }
        (cols / self.block_len()).checked_mul(self.block_bytes())
    }

    /// Dequantises whole blocks exactly.
    ///
    /// # Panics
    /// If `bytes` is not whole blocks or `out` has not one element per weight. Shapes are checked when a file is opened.
    pub fn dequantize_f64(self, bytes: &[u8], out: &mut [f64]) {
        self.each(bytes, out);
    }

    /// Dequantises whole blocks, rounding once to f32.
    ///
    /// # Panics
    /// As [`Self::dequantize_f64`].
    pub fn dequantize(self, bytes: &[u8], out: &mut [f32]) {
        self.each(bytes, out);
    }

    fn each<R: Real>(self, bytes: &[u8], out: &mut [R]) {
        let (block_bytes, block_len) = (self.block_bytes(), self.block_len());
        assert!(bytes.len().is_multiple_of(block_bytes), "{} bytes are not whole {} blocks", bytes.len(), self.name());
        assert_eq!(
            bytes.len() / block_bytes * block_len,
            out.len(),
            "weights in {} bytes of {}",
            bytes.len(),
            self.name()
        );
        for (block, out) in bytes.chunks_exact(block_bytes).zip(out.chunks_exact_mut(block_len)) {
            match self {
                Self::F32 => out[0] = R::new(f64::from(f32::from_le_bytes([block[0], block[1], block[2], block[3]]))),
                Self::F16 => out[0] = R::new(half_at(block, 0)),
                Self::Bf16 => out[0] = R::new(bf16::from_le_bytes([block[0], block[1]]).to_f64()),
                Self::Q4_0 => q4(half_at(block, 0), -8.0 * half_at(block, 0), &[0; 4], &block[2..], out),
                Self::Q4_1 => q4(half_at(block, 0), half_at(block, 2), &[0; 4], &block[4..], out),
                Self::Q5_0 => q4(half_at(block, 0), -16.0 * half_at(block, 0), &block[2..6], &block[6..], out),
                Self::Q5_1 => q4(half_at(block, 0), half_at(block, 2), &block[4..8], &block[8..], out),
                Self::Q8_0 => q8_0(block, out),
                Self::Iq2Xxs => by_book(block, &IQ2_VALUES, IQ2_SHIFT, iq2_xxs_group, out),
                Self::Iq2Xs => by_book(block, &IQ2_VALUES, IQ2_SHIFT, iq2_xs_group, out),
                Self::Iq2S => by_book(block, &IQ2_VALUES, IQ2_SHIFT, iq2_s_group, out),
                Self::Iq3Xxs => by_book(block, &IQ3_XXS_VALUES, IQ3_XXS_SHIFT, iq3_xxs_group, out),
                Self::Iq3S => by_book(block, &IQ3_S_VALUES, 0, iq3_s_group, out),
                Self::Q3K => q3_k(block, out),
                Self::Q4K => q45_k(block, None, &block[16..], out),
                Self::Q5K => q45_k(block, Some(&block[16..48]), &block[48..], out),
                Self::Q6K => q6_k(block, out),
                Self::Iq4Nl => by_table(half_at(block, 0), &IQ4_VALUES, &block[2..], out),
                Self::Iq4Xs => iq4_xs(block, out),
                Self::Q4Z => {
                    let (scale, zero) = scale_and_zero(u16::from_le_bytes([block[0], block[1]]));
                    q4(scale.to_f64(), -scale.to_f64() * f64::from(zero), &[0; 4], &block[2..], out);
                }
                Self::Mxfp4 => by_table(2f64.powi(mxfp4_exponent(block) - 1), &MXFP4_VALUES, &block[1..], out),
            }
        }
    }
}

/// Output type of a weight. The exact value of every format fits in f64; conversion to f32 rounds once.
trait Real: Copy {
    fn new(exact: f64) -> Self;
}

impl Real for f64 {
    fn new(exact: f64) -> Self {
        exact
    }
}

impl Real for f32 {
    fn new(exact: f64) -> Self {
        exact as Self
    }
}

fn half_at(block: &[u8], at: usize) -> f64 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f64()
}

/// Scale and zero of a block of [`QuantType::Q4Z`]: the upper nine bits are those of an f16 without its sign and its lowest six
/// bits, the lower seven are the zero in eighths of a code. A weight is `scale · (code - zero)`.
#[must_use]
pub fn scale_and_zero(word: u16) -> (f16, f32) {
    (f16::from_bits(word >> 1 & 0x7fc0), f32::from(word & 0x7f) / 8.0)
}

/// 16 bytes of nibbles: weight `j` is the low nibble of byte `j`, weight `16 + j` its high nibble; bit `i` of the four bytes of
/// `fifth` is the fifth bit of weight `i`.
fn q4<R: Real>(scale: f64, minimum: f64, fifth: &[u8], nibbles: &[u8], out: &mut [R]) {
    let mut put = |i: usize, nibble: u8| {
        let code = nibble | (fifth[i / 8] >> (i % 8) & 1) << 4;
        out[i] = R::new(scale * f64::from(code) + minimum);
    };
    for (j, &byte) in nibbles[..16].iter().enumerate() {
        put(j, byte & 15);
        put(16 + j, byte >> 4);
    }
}

/// 16 bytes of nibbles in the order of [`q4`], which index `values`.
fn by_table<R: Real>(scale: f64, values: &[i8; 16], nibbles: &[u8], out: &mut [R]) {
    for (j, &byte) in nibbles[..16].iter().enumerate() {
        out[j] = R::new(scale * f64::from(values[usize::from(byte & 15)]));
        out[16 + j] = R::new(scale * f64::from(values[usize::from(byte >> 4)]));
    }
}

/// The exponent of the scale of a block of MXFP4.
#[must_use]
pub fn mxfp4_exponent(block: &[u8]) -> i32 {
    i32::from(block[0]) - 127
}

fn q8_0<R: Real>(block: &[u8], out: &mut [R]) {
    let scale = half_at(block, 0);
    for (out, &byte) in out.iter_mut().zip(&block[2..]) {
        *out = R::new(scale * f64::from(byte.cast_signed()));
    }
}

/// 16 weights of a super-block of IQ2 or IQ3.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BookGroup {
    /// Its scale, 1 to 31: multiplied by the factor of the super-block and divided by a power of two of the format.
    pub scale: u8,
    /// What the weights are, as indices of the format's table: three bits of magnitude below a sign.
    pub codes: [u8; 16],
}

impl BookGroup {
    fn new(scale: u8) -> Self {
        Self { scale: 2 * (scale & 15) + 1, codes: [0; 16] }
    }

    /// Eight weights from `at` on: an entry of a code book of IQ2, and their signs.
    fn eight(&mut self, at: usize, entry: u16, signs: u8) {
        for (i, code) in self.codes[at..at + 8].iter_mut().enumerate() {
            *code = (entry >> (2 * i) & 3) as u8 | (signs >> i & 1) << 3;
        }
    }

    /// Four weights from `at` on: an entry of a code book of IQ3, and their signs.
    fn four(&mut self, at: usize, entry: u16, signs: u8) {
        for (i, code) in self.codes[at..at + 4].iter_mut().enumerate() {
            *code = (entry >> (4 * i) & 7) as u8 | (signs >> i & 1) << 3;
        }
    }
}

/// Eight signs of which seven are stored: the number of negative ones is even.
fn eight_signs(seven: u32) -> u8 {
    let seven = (seven & 127) as u8;
    seven | ((seven.count_ones() & 1) as u8) << 7
}

fn word_at(block: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]])
}

/// Group `j` of 16 in a super-block of IQ2_XXS: for 32 weights, the indices of four entries, and a word with their signs and, in
/// its high four bits, the scale.
#[must_use]
pub fn iq2_xxs_group(block: &[u8], j: usize) -> BookGroup {
    let at = 2 + 8 * (j / 2);
    let word = word_at(block, at + 4);
    let mut group = BookGroup::new((word >> 28) as u8);
    for i in 0..2 {
        let entry = 2 * (j % 2) + i;
        group.eight(8 * i, grids::IQ2_XXS[usize::from(block[at + entry])], eight_signs(word >> (7 * entry)));
    }
    group
}

/// Group `j` of 16 in a super-block of IQ2_XS: for 8 weights, nine bits of an index and seven of signs; then the scales.
#[must_use]
pub fn iq2_xs_group(block: &[u8], j: usize) -> BookGroup {
    let mut group = BookGroup::new(block[66 + j / 2] >> (4 * (j % 2)));
    for i in 0..2 {
        let at = 2 + 4 * j + 2 * i;
        let bits = u16::from_le_bytes([block[at], block[at + 1]]);
        group.eight(8 * i, grids::IQ2_XS[usize::from(bits & 511)], eight_signs(u32::from(bits >> 9)));
    }
    group
}

/// Group `j` of 16 in a super-block of IQ2_S: low bytes of all indices, signs, high two bits of the indices, scales.
#[must_use]
pub fn iq2_s_group(block: &[u8], j: usize) -> BookGroup {
    let mut group = BookGroup::new(block[74 + j / 2] >> (4 * (j % 2)));
    for i in 0..2 {
        let entry = 2 * j + i;
        let high = block[66 + entry / 4] >> (2 * (entry % 4)) & 3;
        let index = usize::from(block[2 + entry]) | usize::from(high) << 8;
        group.eight(8 * i, grids::IQ2_S[index], block[34 + entry]);
    }
    group
}

/// Group `j` of 16 in a super-block of IQ3_XXS: the indices of all entries, then a word for 32 weights as in IQ2_XXS.
#[must_use]
pub fn iq3_xxs_group(block: &[u8], j: usize) -> BookGroup {
    let word = word_at(block, 66 + 4 * (j / 2));
    let mut group = BookGroup::new((word >> 28) as u8);
    for i in 0..4 {
        let signs = eight_signs(word >> (7 * (2 * (j % 2) + i / 2))) >> (4 * (i % 2));
        group.four(4 * i, grids::IQ3_XXS[usize::from(block[2 + 4 * j + i])], signs);
    }
    group
}

/// Group `j` of 16 in a super-block of IQ3_S: low bytes of all indices, their ninth bits, signs, scales of 32 weights each.
#[must_use]
pub fn iq3_s_group(block: &[u8], j: usize) -> BookGroup {
    let mut group = BookGroup::new(block[106 + j / 4] >> (4 * (j / 2 % 2)));
    for i in 0..4 {
        let entry = 4 * j + i;
        let ninth = block[66 + entry / 8] >> (entry % 8) & 1;
        let index = usize::from(block[2 + entry]) | usize::from(ninth) << 8;
        group.four(4 * i, grids::IQ3_S[index], block[74 + entry / 2] >> (4 * (i % 2)));
    }
    group
}

fn by_book<R: Real>(
    block: &[u8],
    values: &[i8; 16],
    shift: u32,
    group: impl Fn(&[u8], usize) -> BookGroup,
    out: &mut [R],
) {
    let factor = half_at(block, 0) / f64::from(1u32 << shift);
    for (j, out) in out.chunks_exact_mut(16).enumerate() {
        let BookGroup { scale, codes } = group(block, j);
        for (out, code) in out.iter_mut().zip(codes) {
            *out = R::new(factor * f64::from(scale) * f64::from(values[usize::from(code)]));
        }
    }
}

/// The scale of group `j` of 16 in a super-block of Q3_K: its low four bits are in bytes 0 to 7, its high two bits in bytes 8 to 11
/// of the 12.
#[must_use]
pub fn q3_k_scale(packed: &[u8], j: usize) -> i8 {
    let low = packed[j % 8] >> (4 * (j / 8)) & 15;
    let high = packed[8 + j % 4] >> (2 * (j / 4)) & 3;
    (low | high << 4).cast_signed() - 32
}

/// Two halves of 128. Within a half, quarter `k` of 32 takes its low two bits from bits 2k of byte `l` of the half's 32 bytes; the
/// third bit of the group `4 half + k` of 32 is that bit of byte `l` of the first 32 bytes.
fn q3_k<R: Real>(block: &[u8], out: &mut [R]) {
    let (third, low, scales, scale) = (&block[..32], &block[32..96], &block[96..108], half_at(block, 108));
    for (i, out) in out.iter_mut().enumerate() {
        let (half, k, l) = (i / 128, i % 128 / 32, i % 32);
        let q = (low[half * 32 + l] >> (2 * k) & 3) | (third[l] >> (4 * half + k) & 1) << 2;
        let group = f64::from(q3_k_scale(scales, i / 16));
        *out = R::new(scale * group * (f64::from(q) - 4.0));
    }
}

/// The scale of group `j` of 32 in a super-block of IQ4_XS. `packed`: two bytes with the high two bits of all groups, then
/// four with their low four bits.
#[must_use]
pub fn iq4_xs_scale(packed: &[u8], j: usize) -> i8 {
    let high = packed[j / 4] >> (2 * (j % 4)) & 3;
    let low = packed[2 + j / 2] >> (4 * (j % 2)) & 15;
    (low | high << 4).cast_signed() - 32
}

fn iq4_xs<R: Real>(block: &[u8], out: &mut [R]) {
    let scale = half_at(block, 0);
    for (group, (nibbles, out)) in block[8..].chunks_exact(16).zip(out.chunks_exact_mut(32)).enumerate() {
        by_table(scale * f64::from(iq4_xs_scale(&block[2..8], group)), &IQ4_VALUES, nibbles, out);
    }
}

/// The 6-bit (scale, minimum) of group `j` of 8, packed in 12 bytes. Groups 0 to 3 are stored directly; the upper two bits of
/// their bytes complete groups 4 to 7.
#[must_use]
pub fn k_scale_min(packed: &[u8], j: usize) -> (u8, u8) {
    if j < 4 {
        (packed[j] & 63, packed[j + 4] & 63)
    } else {
        ((packed[j + 4] & 15) | ((packed[j - 4] >> 6) << 4), (packed[j + 4] >> 4) | ((packed[j] >> 6) << 4))
    }
}

/// Groups 2p (low nibbles) and 2p + 1 (high nibbles) share bytes `32 p .. 32 p + 32`; group g's fifth bits are bit g.
fn q45_k<R: Real>(block: &[u8], fifth: Option<&[u8]>, nibbles: &[u8], out: &mut [R]) {
    let (scale, minimum, packed) = (half_at(block, 0), half_at(block, 2), &block[4..16]);
    for (group, out) in out.chunks_exact_mut(32).enumerate() {
        let (s, m) = k_scale_min(packed, group);
        let (s, m) = (scale * f64::from(s), minimum * f64::from(m));
        for (l, out) in out.iter_mut().enumerate() {
            let byte = nibbles[group / 2 * 32 + l];
            let low = if group % 2 == 0 { byte & 15 } else { byte >> 4 };
            let high = fifth.map_or(0, |bits| (bits[l] >> group & 1) << 4);
            *out = R::new(s * f64::from(low | high) - m);
        }
    }
}

/// Two halves of 128. Within a half, quarter `k` of 32 takes its low 4 bits from byte `32 (k % 2) + l` (upper nibble for k ≥ 2)
/// and its high 2 bits from bits 2k of byte `l` of the half's 32 high bytes.
fn q6_k<R: Real>(block: &[u8], out: &mut [R]) {
    let (low, high, scales, scale) = (&block[..128], &block[128..192], &block[192..208], half_at(block, 208));
    for (i, out) in out.iter_mut().enumerate() {
        let (half, k, l) = (i / 128, i % 128 / 32, i % 32);
        let byte = low[half * 64 + 32 * (k % 2) + l];
        let nibble = if k < 2 { byte & 15 } else { byte >> 4 };
        let q = nibble | (high[half * 32 + l] >> (2 * k) & 3) << 4;
        let group = f64::from(scales[i / 16].cast_signed());
        *out = R::new(scale * group * (f64::from(q) - 32.0));
    }
}

/// Quantises rows with the rounding of ggml's reference quantisers: F32, F16, BF16, Q8_0, Q4_0, Q4_1. `None` for the other
/// formats, which are only read.
///
/// # Panics
/// If `weights` is not a whole number of blocks.
#[must_use]
pub fn quantize(kind: QuantType, weights: &[f32]) -> Option<Vec<u8>> {
    let bytes = kind.row_bytes(weights.len()).expect("a whole number of blocks");
    let mut out = Vec::with_capacity(bytes);
    for block in weights.chunks_exact(kind.block_len()) {
        match kind {
            QuantType::F32 => out.extend(block[0].to_le_bytes()),
            QuantType::F16 => out.extend(f16::from_f32(block[0]).to_le_bytes()),
            QuantType::Bf16 => out.extend(bf16::from_f32(block[0]).to_le_bytes()),
            QuantType::Q8_0 => quantize_q8_0(block, &mut out),
            QuantType::Q4_0 => {
                let extreme = block.iter().fold(0.0f32, |m, &w| if w.abs() > m.abs() { w } else { m });
                quantize_q4(block, extreme / -8.0, None, &mut out);
            }
            QuantType::Q4_1 => {
                let low = block.iter().copied().fold(f32::INFINITY, f32::min);
                let high = block.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                quantize_q4(block, (high - low) / 15.0, Some(low), &mut out);
            }
            QuantType::Q5_0
            | QuantType::Q5_1
            | QuantType::Iq2Xxs
            | QuantType::Iq2Xs
            | QuantType::Iq2S
            | QuantType::Iq3Xxs
            | QuantType::Iq3S
            | QuantType::Q3K
            | QuantType::Q4K
            | QuantType::Q5K
            | QuantType::Q6K
            | QuantType::Iq4Nl
            | QuantType::Iq4Xs
            | QuantType::Mxfp4
            | QuantType::Q4Z => return None,
        }
    }
    Some(out)
}

fn quantize_q8_0(block: &[f32], out: &mut Vec<u8>) {
    let scale = block.iter().fold(0.0f32, |m, w| m.max(w.abs())) / 127.0;
    let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
    out.extend(f16::from_f32(scale).to_le_bytes());
    out.extend(block.iter().map(|w| ((w * inverse).round() as i8).cast_unsigned()));
}

fn quantize_q4(block: &[f32], scale: f32, minimum: Option<f32>, out: &mut Vec<u8>) {
    let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
    out.extend(f16::from_f32(scale).to_le_bytes());
    out.extend(minimum.map(|m| f16::from_f32(m).to_le_bytes()).into_iter().flatten());
    // Without a minimum, code 8 represents zero.
    let code = |w: f32| ((minimum.map_or(w * inverse + 8.0, |m| (w - m) * inverse) + 0.5) as u8).min(15);
    out.extend((0..16).map(|j| code(block[j]) | code(block[16 + j]) << 4));
}

/// Random valid blocks of any format with weights near `-1 ..= 1`, for tests and benchmarks of kernels.
#[must_use]
pub fn random_blocks(kind: QuantType, blocks: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        // xorshift64*: the quality is irrelevant, but the numbers must be the same on every platform.
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32
    };
    let mut out = vec![0u8; blocks * kind.block_bytes()];
    for block in out.chunks_exact_mut(kind.block_bytes()) {
        block.fill_with(|| next() as u8);
        // An f16 in (0.5 ..= 1) × size, so that no weight is infinite or NaN.
        let mut unit = |size: f32| f16::from_f32(size * (0.5 + next() as f32 / 2f32.powi(33))).to_le_bytes();
        match kind {
            QuantType::F32 => block.copy_from_slice(&f16::from_le_bytes(unit(1.0)).to_f32().to_le_bytes()),
            QuantType::F16 => block.copy_from_slice(&unit(1.0)),
            QuantType::Bf16 => {
                block.copy_from_slice(&bf16::from_f32(f16::from_le_bytes(unit(1.0)).to_f32()).to_le_bytes());
            }
            QuantType::Q4_0 => block[..2].copy_from_slice(&unit(0.125)),
            QuantType::Q4_1 => {
                block[..2].copy_from_slice(&unit(0.125));
                block[2..4].copy_from_slice(&unit(-1.0));
            }
            QuantType::Q5_0 => block[..2].copy_from_slice(&unit(0.0625)),
            QuantType::Q5_1 => {
                block[..2].copy_from_slice(&unit(0.0625));
                block[2..4].copy_from_slice(&unit(-1.0));
            }
            QuantType::Q8_0 | QuantType::Iq4Nl => block[..2].copy_from_slice(&unit(1.0 / 128.0)),
            QuantType::Iq2Xxs | QuantType::Iq2Xs | QuantType::Iq2S => block[..2].copy_from_slice(&unit(1.0 / 166.0)),
            QuantType::Iq3Xxs | QuantType::Iq3S => block[..2].copy_from_slice(&unit(1.0 / 480.0)),
            QuantType::Q3K => block[108..110].copy_from_slice(&unit(1.0 / 32.0 / 4.0)),
            QuantType::Q4K | QuantType::Q5K => {
                let codes = if kind == QuantType::Q4K { 16.0 } else { 32.0 };
                block[..2].copy_from_slice(&unit(2.0 / 63.0 / codes));
                block[2..4].copy_from_slice(&unit(1.0 / 63.0));
            }
            QuantType::Q6K => block[208..210].copy_from_slice(&unit(1.0 / 128.0 / 32.0)),
            QuantType::Iq4Xs => block[..2].copy_from_slice(&unit(1.0 / 32.0 / 128.0)),
            // Scales of 2^-6 to 2^-3.
            QuantType::Mxfp4 => block[0] = 122 + block[0] % 4,
            QuantType::Q4Z => {
                let (scale, zero) = (u16::from_le_bytes(unit(0.125)) >> 6 << 7, u16::from(block[0] & 0x7f));
                block[..2].copy_from_slice(&(scale | zero).to_le_bytes());
            }
        }
        // Signs of the unquantised formats are set last: such a block is a single number.
        if matches!(kind, QuantType::F32 | QuantType::F16 | QuantType::Bf16) && next() % 2 == 1 {
            *block.last_mut().expect("a block has bytes") ^= 0x80;
        }
    }
    out
}

#[cfg(test)]
mod tests;
