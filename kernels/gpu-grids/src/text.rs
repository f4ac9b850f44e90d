//! Kernel for rules from rule files: all operations of a rule in one kernel, compiled when the tile is created.
//!
//! The list of operations is a compile-time parameter. It is cloned, hashed and compared at every launch, so it is
//! behind an `Arc` with a precomputed hash. Kernel compile time grows with the square of its length, hence the bound on
//! it.
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use cubecl::prelude::*;
use kernels_grids::GridError;
use kernels_grids::frame::{Frame, Span};
use kernels_grids::rule_file::{NAME, Operation, TextRule};

use crate::memory::{Buffer, address, units};
use crate::place::{Boundary, Ends, Memory, Place, unit_row};

/// The operations of a rule, cheap to clone, hash and compare.
#[derive(Clone, Debug)]
struct Operations(Arc<Inner>);

#[derive(Debug, PartialEq, Eq)]
struct Inner {
    hash: u64,
    operations: Vec<Operation>,
    /// Index of the operation with the next value of each field.
    next: Vec<usize>,
}

impl Hash for Operations {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.0.hash);
    }
}

impl PartialEq for Operations {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0) || self.0 == other.0
    }
}

impl Eq for Operations {}

impl Operations {
    fn new(rule: &TextRule) -> Self {
        let program = rule.program();
        let operations = program.operations().to_vec();
        let next: Vec<usize> = program.next().iter().map(|&value| value.into()).collect();
        let mut hasher = std::hash::DefaultHasher::new();
        (&operations, &next).hash(&mut hasher);
        Self(Arc::new(Inner { hash: hasher.finish(), operations, next }))
    }
}

/// A rule from a rule file on one tile.
pub(super) struct Text {
    operations: Operations,
    parameters: Buffer,
    ends: Ends,
    three: bool,
    /// Threads per cube.
    pub(super) cube: CubeDim,
}

impl Text {
    pub(super) fn new<R: Runtime>(
        client: &ComputeClient<R>,
        rule: &TextRule,
        frame: &Frame,
    ) -> Result<Self, GridError> {
        let ends = Ends::new(frame);
        for (axis, name) in kernels_grids::AXES.into_iter().enumerate() {
            let mirrors = ends.0[axis].iter().any(|end| matches!(end, Boundary::Wall));
            let [low, high] = frame.halo[axis];
            if mirrors && frame.size[axis] + low.max(high) < frame.radius as isize {
                let what =
                    format!("{} cells along {name} are fewer than the rule's radius: use the CPU", frame.size[axis]);
                return Err(GridError::Parameter { rule: NAME, what });
            }
        }
        // The extra value keeps the buffer from being empty.
        let values = rule.parameters().iter().chain([&0.0]).map(|value| value.to_bits());
        let parameters = Buffer::from_elements(client, &values.collect::<Vec<_>>())?;
        let three = frame.grid.dimensions() == 3;
        Ok(Self {
            operations: Operations::new(rule),
            parameters,
            ends,
            three,
            cube: CubeDim::new_2d(units(client, 256) / 2, 2),
        })
    }

    pub(super) fn launch<R: Runtime>(
        &self,
        client: &ComputeClient<R>,
        memory: &Memory,
        span: &Span,
        [from, to]: [&Buffer; 2],
    ) {
        // SAFETY: `span` and one radius around it are in memory; threads outside it do nothing.
        unsafe {
            text_step::launch_unchecked::<R>(
                client,
                memory.cubes(span, self.cube, 1),
                self.cube,
                address(client, from.len),
                from.arg(),
                to.arg(),
                self.parameters.arg(),
                memory.place(span),
                self.operations.clone(),
                self.ends,
                self.three,
            );
        }
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn text_step(
    from: &Array<f32>,
    to: &mut Array<f32>,
    parameters: &Array<f32>,
    place: &Place,
    #[comptime] rule: Operations,
    #[comptime] ends: Ends,
    #[comptime] three: bool,
) {
    let x = CUBE_POS_X * CUBE_DIM_X + UNIT_POS_X;
    let row = unit_row();
    if x < place.nx && row < place.rows {
        let x = place.x + x;
        let mut y = place.y + row;
        let mut z = place.z;
        if comptime!(three) {
            y = place.y + row % place.ny;
            z = place.z + row / place.ny;
        }
        let mut values = Sequence::<f32>::new();
        let count = comptime!(rule.0.operations.len());
        #[unroll]
        for k in 0..count {
            let operation = comptime!(rule.0.operations[k]);
            let value = match operation {
                Operation::Constant(bits) => comptime!(f32::from_bits(bits)).runtime(),
                Operation::Parameter(i) => parameters[comptime!(i as usize)],
                Operation::Load { field, offset } => load(from, place, x, y, z, field, offset, ends, three),
                Operation::Add(a, b) => *values.index(comptime!(a as usize)) + *values.index(comptime!(b as usize)),
                Operation::Subtract(a, b) => {
                    *values.index(comptime!(a as usize)) - *values.index(comptime!(b as usize))
                }
                Operation::Multiply(a, b) => {
                    *values.index(comptime!(a as usize)) * *values.index(comptime!(b as usize))
                }
                Operation::MultiplyAdd(a, b, c) => fma(
                    *values.index(comptime!(a as usize)),
                    *values.index(comptime!(b as usize)),
                    *values.index(comptime!(c as usize)),
                ),
                Operation::Divide(a, b) => *values.index(comptime!(a as usize)) / *values.index(comptime!(b as usize)),
                Operation::Negate(a) => -*values.index(comptime!(a as usize)),
                Operation::Absolute(a) => f32::abs(*values.index(comptime!(a as usize))),
                Operation::SquareRoot(a) => f32::sqrt(*values.index(comptime!(a as usize))),
                Operation::Exponential(a) => exponential(*values.index(comptime!(a as usize))),
                Operation::Floor(a) => f32::floor(*values.index(comptime!(a as usize))),
                Operation::Minimum(a, b) => {
                    let (a, b) = (*values.index(comptime!(a as usize)), *values.index(comptime!(b as usize)));
                    select(a < b, a, b)
                }
                Operation::Maximum(a, b) => {
                    let (a, b) = (*values.index(comptime!(a as usize)), *values.index(comptime!(b as usize)));
                    select(a > b, a, b)
                }
                Operation::Less(a, b) => {
                    truth(*values.index(comptime!(a as usize)) < *values.index(comptime!(b as usize)))
                }
                Operation::LessEqual(a, b) => {
                    truth(*values.index(comptime!(a as usize)) <= *values.index(comptime!(b as usize)))
                }
                Operation::Equal(a, b) => {
                    truth(*values.index(comptime!(a as usize)) == *values.index(comptime!(b as usize)))
                }
                Operation::And(a, b) => {
                    let (a, b) = (*values.index(comptime!(a as usize)), *values.index(comptime!(b as usize)));
                    truth(a != 0.0f32 && b != 0.0f32)
                }
                Operation::Or(a, b) => {
                    let (a, b) = (*values.index(comptime!(a as usize)), *values.index(comptime!(b as usize)));
                    truth(a != 0.0f32 || b != 0.0f32)
                }
                Operation::Not(a) => truth(*values.index(comptime!(a as usize)) == 0.0f32),
                Operation::Select(a, b, c) => select(
                    *values.index(comptime!(a as usize)) != 0.0f32,
                    *values.index(comptime!(b as usize)),
                    *values.index(comptime!(c as usize)),
                ),
            };
            values.push(value);
        }
        let here = z as usize * place.layer + y as usize * place.row + x as usize;
        let fields = comptime!(rule.0.next.len());
        #[unroll]
        for field in 0..fields {
            let value = comptime!(rule.0.next[field]);
            to[field * place.plane + here] = *values.index(value);
        }
    }
}

#[cube]
fn truth(yes: bool) -> f32 {
    select(yes, 1.0f32, 0.0f32)
}

/// A field's value at an offset from the cell.
#[cube]
fn load(
    from: &Array<f32>,
    place: &Place,
    x: u32,
    y: u32,
    z: u32,
    #[comptime] field: u16,
    #[comptime] offset: [i8; 3],
    #[comptime] ends: Ends,
    #[comptime] three: bool,
) -> f32 {
    let (dx, dy, dz) = comptime!((offset[0] as i32, offset[1] as i32, offset[2] as i32));
    let (ends_x, ends_y, ends_z) = comptime!((ends.0[0], ends.0[1], ends.0[2]));
    let column = shifted(x, place.left, place.right, dx, ends_x);
    let row = shifted(y, place.low, place.high, dy, ends_y);
    let mut at = row as usize * place.row + column as usize;
    if comptime!(three) {
        at += shifted(z, place.near, place.far, dz, ends_z) as usize * place.layer;
    } else {
        at += z as usize * place.layer;
    }
    let mut value = from[comptime!(field as usize) * place.plane + at];
    // Outside two faces the later axis decides, as when ghost cells are filled axis by axis.
    value = fixed(value, x, place.left, place.right, dx, ends_x, field);
    value = fixed(value, y, place.low, place.high, dy, ends_y, field);
    if comptime!(three) {
        value = fixed(value, z, place.near, place.far, dz, ends_z, field);
    }
    value
}

/// Position along an axis of the cell at an offset; walls reflect.
#[cube]
fn shifted(position: u32, first: u32, last: u32, #[comptime] by: i32, #[comptime] ends: [Boundary; 2]) -> u32 {
    let end = comptime!(if by < 0 { ends[0] } else { ends[1] });
    let away = comptime!(by.unsigned_abs());
    let onwards = if comptime!(by < 0) { position - away } else { position + away };
    let beyond = if comptime!(by < 0) { onwards < first } else { onwards > last };
    if comptime!(by == 0) {
        position
    } else {
        match end {
            Boundary::Cells => onwards,
            Boundary::Fixed(_) => onwards,
            Boundary::Wall => {
                let mirror =
                    if comptime!(by < 0) { 2u32 * first - 1u32 - onwards } else { 2u32 * last + 1u32 - onwards };
                select(beyond, mirror, onwards)
            }
            Boundary::Wrap => {
                let size = last - first + 1u32;
                let other = if comptime!(by < 0) { onwards + size } else { onwards - size };
                select(beyond, other, onwards)
            }
        }
    }
}

/// Replaces the value if the cell at the offset is outside a face with a fixed value.
#[cube]
fn fixed(
    value: f32,
    position: u32,
    first: u32,
    last: u32,
    #[comptime] by: i32,
    #[comptime] ends: [Boundary; 2],
    #[comptime] field: u16,
) -> f32 {
    let bits = comptime!(match if by < 0 { ends[0] } else { ends[1] } {
        Boundary::Fixed(bits) if by != 0 => bits.get(field as usize).copied().or(Some(0)),
        Boundary::Fixed(_) | Boundary::Cells | Boundary::Wall | Boundary::Wrap => None,
    });
    match bits {
        Some(bits) => {
            let away = comptime!(by.unsigned_abs());
            let given = comptime!(f32::from_bits(bits)).runtime();
            if comptime!(by < 0) {
                select(position < first + away, given, value)
            } else {
                select(position + away > last, given, value)
            }
        }
        None => value,
    }
}

/// e to the power of `x`, with the same steps as `kernels/grids/src/rule_file/program.rs`.
#[cube]
fn exponential(x: f32) -> f32 {
    let clamped = clamp(x, -87.0f32, 88.0f32);
    let n = f32::floor(clamped * comptime!(std::f32::consts::LOG2_E) + 0.5f32);
    let r = fma(n, 2.121_944_4e-4f32, fma(n, -0.693_359_4f32, clamped));
    let mut series = comptime!(1.0f32 / 5040.0).runtime();
    series = fma(series, r, comptime!(1.0f32 / 720.0).runtime());
    series = fma(series, r, comptime!(1.0f32 / 120.0).runtime());
    series = fma(series, r, comptime!(1.0f32 / 24.0).runtime());
    series = fma(series, r, comptime!(1.0f32 / 6.0).runtime());
    series = fma(series, r, 0.5f32);
    series = fma(series, r, 1.0f32);
    series = fma(series, r, 1.0f32);
    let power = f32::reinterpret((i32::cast_from(n) + 127i32) << 23i32);
    let value = series * power;
    // Infinite above 88, by overflow: some kernel compilers support neither infinity nor reinterpreting constant bits.
    let infinite = clamped * 1e38f32;
    select(x > 88.0f32, infinite, select(x < -87.0f32, 0.0f32, value))
}
