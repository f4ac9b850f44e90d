//! Causal attention of new rows over a cache, with running maximum and sum over blocks of 32 positions.
//!
//! Blocks begin at position 0 whatever the batch or chunk, so a row's result depends on its own position only.
use cubecl::prelude::*;
use cubecl::server::Handle;

use super::{LANES, array};

/// Sizes of one attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attention {
    /// Query heads, a multiple of `kv_heads`.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Elements of a head, a multiple of 4.
    pub head_dim: usize,
    /// Positions that the caches have room for.
    pub capacity: usize,
}

/// `n` rows of `q[n, heads, head_dim]` at positions `position ..` over `keys`, `values` `[capacity, kv_heads, head_dim]`,
/// in which the rows' own positions are already written. The result is `[n, heads, head_dim]`.
///
/// # Panics
/// If a position is beyond the caches.
pub fn attention<R: Runtime>(
    client: &ComputeClient<R>,
    q: &Handle,
    keys: &Handle,
    values: &Handle,
    n: usize,
    position: usize,
    sizes: Attention,
) -> Handle {
    let Attention { heads, kv_heads, head_dim, capacity } = sizes;
    assert!(position + n <= capacity, "positions {position}..{} of {capacity}", position + n);
    let len = n * heads * head_dim;
    let y = client.empty(len * size_of::<f32>());
    // SAFETY: positions read are below position + n, which the caches hold; one cube per head and row.
    unsafe {
        kernel::launch_unchecked::<R>(
            client,
            CubeCount::Static(heads as u32, n as u32, 1),
            CubeDim::new_1d(LANES),
            array(q, len),
            array(keys, capacity * kv_heads * head_dim),
            array(values, capacity * kv_heads * head_dim),
            array(&y, len),
            position as u32,
            1.0 / (head_dim as f32).sqrt(),
            heads,
            kv_heads,
            head_dim,
        );
    }
    y
}

/// Below every score, and far enough from the end of f32 that differences stay finite.
const LOWEST: f32 = -1e30;

#[cube(launch_unchecked)]
fn kernel(
    q: &Array<Vector<f32, Const<4>>>,
    keys: &Array<Vector<f32, Const<4>>>,
    values: &Array<f32>,
    y: &mut Array<f32>,
    position: u32,
    scale: f32,
    #[comptime] heads: usize,
    #[comptime] kv_heads: usize,
    #[comptime] head_dim: usize,
) {
    let lanes = comptime!(LANES as usize);
    let each = comptime!(head_dim.div_ceil(LANES as usize));
    let lane = UNIT_POS_X as usize;
    let (head, row) = (CUBE_POS_X as usize, CUBE_POS_Y as usize);
    let kv = head / comptime!(heads / kv_heads);
    let count = position as usize + row + 1;
    let query = (row * heads + head) * comptime!(head_dim / 4);
    let mut shared = SharedMemory::<f32>::new(lanes);
    let mut sums = Array::<f32>::new(each);
    #[unroll]
    for e in 0..each {
        sums[e] = 0.0f32;
    }
    let mut top = LOWEST.runtime();
    let mut total = 0.0f32;
    let mut start = 0usize;
    while start < count {
        let at = start + lane;
        let mut score = LOWEST.runtime();
        if at < count {
            let key = (at * kv_heads + kv) * comptime!(head_dim / 4);
            let mut dot = 0.0f32;
            for k in 0..comptime!(head_dim / 4) {
                let (a, b) = (q[query + k], keys[key + k]);
                #[unroll]
                for j in 0..4usize {
                    dot = fma(a[j], b[j], dot);
                }
            }
            score = dot * scale;
        }
        shared[lane] = score;
        sync_cube();
        let mut block_top = top;
        for j in 0..lanes {
            block_top = max(block_top, shared[j]);
        }
        sync_cube();
        let mut weight = 0.0f32;
        if at < count {
            weight = f32::exp(score - block_top);
        }
        shared[lane] = weight;
        sync_cube();
        let shrink = f32::exp(top - block_top);
        total *= shrink;
        for j in 0..lanes {
            total += shared[j];
        }
        let held = min(lanes, count - start);
        #[unroll]
        for e in 0..each {
            let d = lane + e * lanes;
            if d < head_dim {
                let mut sum = sums[e] * shrink;
                for j in 0..held {
                    sum = fma(shared[j], values[((start + j) * kv_heads + kv) * head_dim + d], sum);
                }
                sums[e] = sum;
            }
        }
        top = block_top;
        start += lanes;
        sync_cube();
    }
    #[unroll]
    for e in 0..each {
        let d = lane + e * lanes;
        if d < head_dim {
            y[(row * heads + head) * head_dim + d] = sums[e] / total;
        }
    }
}
