//! What happens to rows between the matrix products: RMSNorm, rotary embedding, SwiGLU, and writing to a cache.
use cubecl::prelude::*;
use cubecl::server::Handle;

use super::{UNITS, array};
use crate::weights::RopeKind;

/// Each of `n` rows of `x[n, width]` divided by its root mean square, times `weight[width]`.
pub fn rms_norm<R: Runtime>(
    client: &ComputeClient<R>,
    x: &Handle,
    weight: &Handle,
    n: usize,
    width: usize,
    eps: f32,
) -> Handle {
    let y = client.empty(n * width * size_of::<f32>());
    // SAFETY: a cube's units stay within its row.
    unsafe {
        rms_norm_kernel::launch_unchecked::<R>(
            client,
            CubeCount::Static(n as u32, 1, 1),
            CubeDim::new_1d(UNITS),
            array(x, n * width),
            array(weight, width),
            array(&y, n * width),
            width as u32,
            eps,
        );
    }
    y
}

/// How heads turn with their position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rotation {
    /// Which two elements of a head turn together.
    pub kind: RopeKind,
    /// Elements of a head that turn, the first ones.
    pub dims: usize,
    /// Elements of a head.
    pub head_dim: usize,
}

/// Rotary embedding of `x[n, heads, head_dim]` by `table[n, dims]`: a row's cosines, then its sines.
pub fn rotate<R: Runtime>(
    client: &ComputeClient<R>,
    x: &Handle,
    table: &Handle,
    n: usize,
    heads: usize,
    rotation: Rotation,
) -> Handle {
    let Rotation { kind, dims, head_dim } = rotation;
    let y = client.empty(n * heads * head_dim * size_of::<f32>());
    let pairs = heads * head_dim / 2;
    // SAFETY: units beyond the last pair do nothing; a pair is inside its head.
    unsafe {
        rotate_kernel::launch_unchecked::<R>(
            client,
            CubeCount::Static(pairs.div_ceil(UNITS as usize) as u32, n as u32, 1),
            CubeDim::new_1d(UNITS),
            array(x, n * heads * head_dim),
            array(table, n * dims),
            array(&y, n * heads * head_dim),
            pairs as u32,
            dims as u32,
            head_dim as u32,
            kind == RopeKind::Interleaved,
        );
    }
    y
}

/// `up × gate / (1 + e^-gate)`, elementwise over `len` elements.
pub fn swiglu<R: Runtime>(client: &ComputeClient<R>, gate: &Handle, up: &Handle, n: usize, width: usize) -> Handle {
    let y = client.empty(n * width * size_of::<f32>());
    // SAFETY: units beyond a row's end do nothing.
    unsafe {
        swiglu_kernel::launch_unchecked::<R>(
            client,
            CubeCount::Static(width.div_ceil(UNITS as usize) as u32, n as u32, 1),
            CubeDim::new_1d(UNITS),
            array(gate, n * width),
            array(up, n * width),
            array(&y, n * width),
            width as u32,
        );
    }
    y
}

/// `x + y` of two `[n, width]`.
pub fn add<R: Runtime>(client: &ComputeClient<R>, x: &Handle, y: &Handle, n: usize, width: usize) -> Handle {
    let sum = client.empty(n * width * size_of::<f32>());
    // SAFETY: units beyond a row's end do nothing.
    unsafe {
        add_kernel::launch_unchecked::<R>(
            client,
            CubeCount::Static(width.div_ceil(UNITS as usize) as u32, n as u32, 1),
            CubeDim::new_1d(UNITS),
            array(x, n * width),
            array(y, n * width),
            array(&sum, n * width),
            width as u32,
        );
    }
    sum
}

/// Writes `rows[n, width]` into `cache[capacity, width]` from row `at` on, in place.
///
/// # Panics
/// If the rows do not fit.
pub fn append<R: Runtime>(
    client: &ComputeClient<R>,
    cache: &Handle,
    capacity: usize,
    rows: &Handle,
    n: usize,
    width: usize,
    at: usize,
) {
    assert!(at + n <= capacity, "rows {at}..{} of a cache of {capacity}", at + n);
    // SAFETY: the rows fit, as just checked; units beyond a row's end do nothing.
    unsafe {
        append_kernel::launch_unchecked::<R>(
            client,
            CubeCount::Static(width.div_ceil(UNITS as usize) as u32, n as u32, 1),
            CubeDim::new_1d(UNITS),
            array(cache, capacity * width),
            array(rows, n * width),
            at as u32,
            width as u32,
        );
    }
}

/// Copies `len` floats, 16 bytes a unit: what the device's memory can do at best.
///
/// # Panics
/// If `len` is no multiple of 512 or more than a grid holds.
pub fn copy<R: Runtime>(client: &ComputeClient<R>, from: &Handle, to: &Handle, len: usize) {
    let units = len / 4;
    assert!(len.is_multiple_of(4 * UNITS as usize), "{len} floats are no whole cubes");
    let (across, down) = (units / UNITS as usize, 1usize);
    let (across, down) = if across > 32_768 { (32_768, across.div_ceil(32_768)) } else { (across, down) };
    // SAFETY: the kernel tests its position against the length.
    unsafe {
        copy_kernel::launch_unchecked::<R>(
            client,
            CubeCount::Static(across as u32, down as u32, 1),
            CubeDim::new_1d(UNITS),
            array(from, len),
            array(to, len),
        );
    }
}

#[cube(launch_unchecked)]
fn rms_norm_kernel(x: &Array<f32>, weight: &Array<f32>, y: &mut Array<f32>, width: u32, eps: f32) {
    let width = width as usize;
    let unit = UNIT_POS_X as usize;
    let base = CUBE_POS_X as usize * width;
    let mut squares = 0.0f32;
    let mut i = unit;
    while i < width {
        squares = fma(x[base + i], x[base + i], squares);
        i += comptime!(UNITS as usize);
    }
    let mut shared = SharedMemory::<f32>::new(comptime!(UNITS as usize));
    shared[unit] = squares;
    sync_cube();
    #[unroll]
    for step in 1..8u32 {
        let half = comptime!((UNITS >> step) as usize);
        if unit < half {
            let other = shared[unit + half];
            shared[unit] += other;
        }
        sync_cube();
    }
    let scale = 1.0f32 / f32::sqrt(shared[0] / f32::cast_from(width) + eps);
    let mut i = unit;
    while i < width {
        y[base + i] = x[base + i] * scale * weight[i];
        i += comptime!(UNITS as usize);
    }
}

#[cube(launch_unchecked)]
fn rotate_kernel(
    x: &Array<f32>,
    table: &Array<f32>,
    y: &mut Array<f32>,
    pairs: u32,
    dims: u32,
    head_dim: u32,
    #[comptime] interleaved: bool,
) {
    let pair = (CUBE_POS_X * CUBE_DIM_X + UNIT_POS_X) as usize;
    let (pairs, dims, head_dim) = (pairs as usize, dims as usize, head_dim as usize);
    if pair < pairs {
        let row = CUBE_POS_Y as usize;
        let (head, i) = (pair / (head_dim / 2), pair % (head_dim / 2));
        let base = row * pairs * 2 + head * head_dim;
        if i < dims / 2 {
            let (cosine, sine) = (table[row * dims + i], table[row * dims + dims / 2 + i]);
            let (first, second) =
                if comptime!(interleaved) { (base + 2 * i, base + 2 * i + 1) } else { (base + i, base + i + dims / 2) };
            let (a, b) = (x[first], x[second]);
            y[first] = fma(a, cosine, -(b * sine));
            y[second] = fma(b, cosine, a * sine);
        } else {
            // Elements beyond `dims` do not turn; pairs i and up are elements 2 i and up, dims being even.
            y[base + 2 * i] = x[base + 2 * i];
            y[base + 2 * i + 1] = x[base + 2 * i + 1];
        }
    }
}

#[cube(launch_unchecked)]
fn swiglu_kernel(gate: &Array<f32>, up: &Array<f32>, y: &mut Array<f32>, width: u32) {
    let i = CUBE_POS_X * CUBE_DIM_X + UNIT_POS_X;
    if i < width {
        let at = CUBE_POS_Y as usize * width as usize + i as usize;
        let g = gate[at];
        y[at] = up[at] * (g / (1.0f32 + f32::exp(-g)));
    }
}

#[cube(launch_unchecked)]
fn add_kernel(x: &Array<f32>, y: &Array<f32>, sum: &mut Array<f32>, width: u32) {
    let i = CUBE_POS_X * CUBE_DIM_X + UNIT_POS_X;
    if i < width {
        let at = CUBE_POS_Y as usize * width as usize + i as usize;
        sum[at] = x[at] + y[at];
    }
}

#[cube(launch_unchecked)]
fn append_kernel(cache: &mut Array<f32>, rows: &Array<f32>, at: u32, width: u32) {
    let i = CUBE_POS_X * CUBE_DIM_X + UNIT_POS_X;
    if i < width {
        let width = width as usize;
        let row = CUBE_POS_Y as usize;
        cache[(at as usize + row) * width + i as usize] = rows[row * width + i as usize];
    }
}

#[cube(launch_unchecked)]
fn copy_kernel(from: &Array<Vector<f32, Const<4>>>, to: &mut Array<Vector<f32, Const<4>>>) {
    if ABSOLUTE_POS < to.len() {
        to[ABSOLUTE_POS] = from[ABSOLUTE_POS];
    }
}
