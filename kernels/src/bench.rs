//! What measurements of speed share: robust figures, the bandwidth of memory, and the [`Speed`] of a device.
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::cpu::Isa;
use crate::cpu::simd::{Kernel, Simd};
use crate::pool::Pool;

/// Measured speed of the engine's kernels on a device, except attention: the planner's cost model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Speed {
    /// Quantised weight bytes per second with one row per weight (decode).
    pub weight_bytes_s: u64,
    /// Multiplications and additions per second with many rows per weight (prefill).
    pub flops_s: u64,
    /// Fixed overhead of a step in nanoseconds: thread hand-overs, launch, round trip to the device.
    pub step_ns: u64,
    /// Overhead of a layer in nanoseconds besides reading its weights: hand-overs between compute threads, launches.
    pub layer_ns: u64,
}

/// Seconds of the fastest of several passes: other programs only slow a pass down, and the minimum filters that out. No
/// pass begins after `limit`, except the warm-up and one measured pass.
pub fn fastest(limit: Duration, mut pass: impl FnMut()) -> f64 {
    let began = Instant::now();
    let mut passes = Vec::new();
    // The first pass is a warm-up: it allocates scratch and wakes threads.
    while passes.len() < 2 || (passes.len() < 7 && began.elapsed() < limit) {
        let start = Instant::now();
        pass();
        passes.push(start.elapsed().as_secs_f64());
    }
    passes.split_off(1).into_iter().fold(f64::INFINITY, f64::min)
}

/// The lower quartile in nanoseconds: robust against other load on the machine, which is not constant.
pub fn lower_quartile_ns(mut times: Vec<Duration>) -> u64 {
    times.sort_unstable();
    times.get(times.len() / 4).map_or(0, |time| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX))
}

/// The median.
///
/// # Panics
/// There are no figures.
pub fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    figures[figures.len() / 2]
}

/// After this time without work, threads and drivers are asleep, as between two tokens.
pub const IDLE: Duration = Duration::from_millis(2);

/// Bytes of a buffer larger than the caches: twice the last-level cache, clamped to 64..256 MiB.
pub fn beyond_caches() -> usize {
    let size = std::fs::read_to_string("/sys/devices/system/cpu/cpu0/cache/index3/size").unwrap_or_default();
    let kib: usize = size.trim().trim_end_matches('K').parse().unwrap_or(0);
    ((2 * kib) << 10).clamp(64 << 20, 256 << 20)
}

/// Read bandwidth of all threads of a pool over one pass of a buffer, in bytes per second.
pub fn read_bandwidth(isa: Isa, pool: &mut Pool, buffer: &[f32]) -> f64 {
    let start = Instant::now();
    pool.run(buffer.len(), 4096, &|_, mine| {
        // SAFETY: the instruction set was detected.
        std::hint::black_box(unsafe { isa.run(ReadAll { numbers: &buffer[mine] }) });
    });
    size_of_val(buffer) as f64 / start.elapsed().as_secs_f64()
}

struct ReadAll<'a> {
    numbers: &'a [f32],
}

impl Kernel for ReadAll<'_> {
    type Output = [f32; 4];

    #[inline(always)]
    unsafe fn run<S: Simd>(self) -> [f32; 4] {
        // SAFETY: chunks have eight vectors; the machine has `S`.
        unsafe {
            let mut sums = [S::splat(0.0); 8];
            for chunk in self.numbers.chunks_exact(128) {
                for (i, sum) in sums.iter_mut().enumerate() {
                    *sum = S::add(*sum, S::load(chunk.as_ptr().add(16 * i)));
                }
            }
            let [a, b, c, d, e, f, g, h] = sums;
            let (low, high) = (S::sum4([a, b, c, d]), S::sum4([e, f, g, h]));
            std::array::from_fn(|i| low[i] + high[i])
        }
    }
}
