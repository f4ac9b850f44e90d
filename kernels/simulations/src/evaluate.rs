//! Number types that expressions are evaluated in: `f64`, and dual numbers with a spatial gradient (forward-mode
//! automatic differentiation), from which the viscous stress of an initial flow is computed exactly.
use crate::expression::{Binary, Unary};

/// A number type that expressions can be evaluated in.
pub(super) trait Number: Copy {
    /// A constant.
    fn number(value: f64) -> Self;
    /// The coordinate of a cell's centre along an axis.
    fn place(cell: [usize; 3], axis: usize) -> Self;
    /// Uniform in 0..1.
    fn noise(seed: u64, stream: u64, cell: [usize; 3]) -> Self {
        Self::number(noise(seed, stream, cell))
    }
    /// The first if this is not 0, else the second.
    fn select(self, then: Self, other: Self) -> Self;
    fn unary(self, unary: Unary) -> Self;
    fn binary(self, binary: Binary, other: Self) -> Self;
}

impl Number for f64 {
    fn number(value: f64) -> Self {
        value
    }

    fn place(cell: [usize; 3], axis: usize) -> Self {
        cell[axis] as f64 + 0.5
    }

    fn select(self, then: Self, other: Self) -> Self {
        if self != 0.0 { then } else { other }
    }

    fn unary(self, unary: Unary) -> Self {
        match unary {
            Unary::Negate => -self,
            Unary::Not => truth(self == 0.0),
            Unary::Absolute => self.abs(),
            Unary::SquareRoot => self.sqrt(),
            Unary::Exponential => libm::exp(self),
            Unary::Logarithm => libm::log(self),
            Unary::Sine => libm::sin(self),
            Unary::Cosine => libm::cos(self),
            Unary::Tangent => libm::tan(self),
            Unary::HyperbolicTangent => libm::tanh(self),
            Unary::Floor => self.floor(),
            Unary::Power(power) => (0..power).fold(1.0, |product, _| product * self),
        }
    }

    fn binary(self, binary: Binary, other: Self) -> Self {
        match binary {
            Binary::Add => self + other,
            Binary::Subtract => self - other,
            Binary::Multiply => self * other,
            Binary::Divide => self / other,
            Binary::Power => libm::pow(self, other),
            // Not `f64::min`: its result for zeros of different sign depends on the machine.
            Binary::Minimum => truth(self < other).select(self, other),
            Binary::Maximum => truth(self > other).select(self, other),
            Binary::Less => truth(self < other),
            Binary::LessEqual => truth(self <= other),
            Binary::Greater => truth(self > other),
            Binary::GreaterEqual => truth(self >= other),
            Binary::Equal => truth(self == other),
            Binary::And => truth(self != 0.0 && other != 0.0),
            Binary::Or => truth(self != 0.0 || other != 0.0),
        }
    }
}

fn truth(yes: bool) -> f64 {
    if yes { 1.0 } else { 0.0 }
}

/// A value with its gradient along x, y and z. Discontinuous functions, such as comparisons and noise, have gradient 0.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Slope {
    pub(super) value: f64,
    pub(super) along: [f64; 3],
}

impl Slope {
    fn flat(value: f64) -> Self {
        Self { value, along: [0.0; 3] }
    }

    /// Chain rule: `value`, with `rate` times this gradient.
    fn chain(self, value: f64, rate: f64) -> Self {
        Self { value, along: self.along.map(|slope| if slope == 0.0 { 0.0 } else { rate * slope }) }
    }

    fn plus(self, other: Self) -> [f64; 3] {
        std::array::from_fn(|axis| self.along[axis] + other.along[axis])
    }
}

impl Number for Slope {
    fn number(value: f64) -> Self {
        Self::flat(value)
    }

    fn place(cell: [usize; 3], axis: usize) -> Self {
        Self { value: f64::place(cell, axis), along: std::array::from_fn(|other| truth(other == axis)) }
    }

    fn select(self, then: Self, other: Self) -> Self {
        if self.value != 0.0 { then } else { other }
    }

    fn unary(self, unary: Unary) -> Self {
        let before = self.value;
        // Bit-identical to evaluation without gradients.
        let value = before.unary(unary);
        let rate = match unary {
            Unary::Negate => -1.0,
            Unary::Not | Unary::Floor => 0.0,
            Unary::Absolute => truth(before < 0.0).select(-1.0, 1.0),
            Unary::SquareRoot => 0.5 / value,
            Unary::Exponential => value,
            Unary::Logarithm => 1.0 / before,
            Unary::Sine => libm::cos(before),
            Unary::Cosine => -libm::sin(before),
            Unary::Tangent => 1.0 + value * value,
            Unary::HyperbolicTangent => 1.0 - value * value,
            Unary::Power(0) => 0.0,
            Unary::Power(power) => f64::from(power) * before.unary(Unary::Power(power - 1)),
        };
        self.chain(value, rate)
    }

    fn binary(self, binary: Binary, other: Self) -> Self {
        let (a, b) = (self.value, other.value);
        let value = a.binary(binary, b);
        let along = match binary {
            Binary::Add => self.plus(other),
            Binary::Subtract => self.plus(other.chain(b, -1.0)),
            Binary::Multiply => self.chain(a, b).plus(other.chain(b, a)),
            Binary::Divide => self.chain(a, 1.0 / b).plus(other.chain(b, -value / b)),
            Binary::Power => self.chain(a, b * libm::pow(a, b - 1.0)).plus(other.chain(b, value * libm::log(a))),
            Binary::Minimum => (if a < b { self } else { other }).along,
            Binary::Maximum => (if a > b { self } else { other }).along,
            Binary::Less
            | Binary::LessEqual
            | Binary::Greater
            | Binary::GreaterEqual
            | Binary::Equal
            | Binary::And
            | Binary::Or => [0.0; 3],
        };
        Self { value, along }
    }
}

/// The values of some adjacent cells of a row, bit-identical to each cell's own.
#[derive(Clone, Copy)]
pub(super) struct Lanes(pub(super) [f64; Lanes::COUNT]);

impl Lanes {
    pub(super) const COUNT: usize = 64;
}

impl Number for Lanes {
    fn number(value: f64) -> Self {
        Self([value; Self::COUNT])
    }

    fn place([x, y, z]: [usize; 3], axis: usize) -> Self {
        Self(std::array::from_fn(|i| f64::place([x + i, y, z], axis)))
    }

    fn noise(seed: u64, stream: u64, [x, y, z]: [usize; 3]) -> Self {
        let row = NoiseRow::new(seed, stream, [y, z]);
        Self(std::array::from_fn(|i| row.at(x + i)))
    }

    fn select(self, then: Self, other: Self) -> Self {
        Self(std::array::from_fn(|i| self.0[i].select(then.0[i], other.0[i])))
    }

    fn unary(self, unary: Unary) -> Self {
        Self(self.0.map(|value| value.unary(unary)))
    }

    fn binary(self, binary: Binary, other: Self) -> Self {
        Self(std::array::from_fn(|i| self.0[i].binary(binary, other.0[i])))
    }
}

/// Uniform noise in 0..1: a pure function of the job's seed, the stream and the cell's coordinates.
pub(super) fn noise(seed: u64, stream: u64, [x, y, z]: [usize; 3]) -> f64 {
    NoiseRow::new(seed, stream, [y, z]).at(x)
}

/// Noise of a row of cells, with the hash of seed, stream, y and z precomputed.
#[derive(Clone, Copy)]
pub(super) struct NoiseRow(u64);

/// Units per 1.0 of noise.
pub(super) const NOISE_UNITS: f64 = (1u64 << 53) as f64;

impl NoiseRow {
    pub(super) fn new(seed: u64, stream: u64, [y, z]: [usize; 2]) -> Self {
        let mixed = mix(mix(mix(seed).wrapping_add(stream)).wrapping_add(z as u64));
        Self(mix(mixed.wrapping_add(y as u64)))
    }

    /// A cell's noise in units of 1 / [`NOISE_UNITS`].
    pub(super) fn units(self, x: usize) -> u64 {
        mix(self.0.wrapping_add(x as u64)) >> 11
    }

    pub(super) fn at(self, x: usize) -> f64 {
        self.units(x) as f64 * (1.0 / NOISE_UNITS)
    }
}

/// The finaliser of splitmix64: flipping one input bit flips half of the output bits on average.
fn mix(seed: u64) -> u64 {
    let mut bits = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}
