//! Device memory of a tile: size checks, verified allocation, partial reads and writes.
//!
//! Devices do not report a failed allocation: later launches do nothing, and later reads return arbitrary data. So
//! every allocation is written by a kernel and read back, and no read is trusted after a failed flush.
use std::sync::atomic::{AtomicBool, Ordering};

use cubecl::bytes::Bytes;
use cubecl::ir::features::TypeUsage;
use cubecl::prelude::*;
use cubecl::server::Handle;
use half::f16;
use kernels_grids::GridError;

/// Threads per cube (CubeCL's thread block) in kernels that run over memory and not over cells.
pub(super) const UNITS: u32 = 256;
/// Cubes along x of such a launch: Vulkan guarantees only 65,535.
const ACROSS: usize = 32_768;
/// Test value written at the end of an allocation.
const STAMP: u32 = 0x6d65_7368;

/// A device buffer of 32-bit elements.
#[derive(Clone, Debug)]
pub(super) struct Buffer {
    pub(super) handle: Handle,
    pub(super) len: usize,
}

impl Buffer {
    /// A buffer of zeros.
    ///
    /// # Errors
    /// The device does not allow a buffer of this size, or has no memory for it.
    pub(super) fn new<R: Runtime>(client: &ComputeClient<R>, len: usize) -> Result<Self, GridError> {
        check_len(client, len)?;
        // Exact size: the pools for short-lived memory round up to their pages.
        let handle = client.memory_persistent_allocation((), |()| client.empty(4 * len)).map_err(failed)?;
        let buffer = Self { handle, len };
        buffer.fill(client, 0, 0..len);
        buffer.fill(client, STAMP, len - 1..len);
        check(client)?;
        let found = buffer.read(client, len - 1..len);
        if !matches!(found, Ok(ref bytes) if bytes[..] == STAMP.to_le_bytes()) {
            return Err(GridError::Memory { bytes: 4 * len });
        }
        buffer.fill(client, 0, len - 1..len);
        Ok(buffer)
    }

    /// A buffer with these elements; at least one.
    pub(super) fn from_elements<R: Runtime>(client: &ComputeClient<R>, elements: &[u32]) -> Result<Self, GridError> {
        check_len(client, elements.len())?;
        let handle = client.create_from_slice(bytemuck::cast_slice(elements));
        Ok(Self { handle, len: elements.len() })
    }

    pub(super) fn arg<R: Runtime>(&self) -> ArrayArg<R> {
        // SAFETY: the length is that of the allocation; kernels stay below it.
        unsafe { ArrayArg::from_raw_parts(self.handle.clone(), self.len) }
    }

    /// The buffer as 16-bit numbers, twice as many.
    pub(super) fn halves<R: Runtime>(&self) -> ArrayArg<R> {
        // SAFETY: the length is that of the allocation; kernels stay below it.
        unsafe { ArrayArg::from_raw_parts(self.handle.clone(), 2 * self.len) }
    }

    /// A range of elements.
    pub(super) fn part(&self, range: std::ops::Range<usize>) -> Handle {
        let (start, end) = (4 * range.start as u64, 4 * (self.len - range.end) as u64);
        self.handle.clone().offset_start(start).offset_end(end)
    }

    /// The bytes of a range of elements.
    pub(super) fn read<R: Runtime>(
        &self,
        client: &ComputeClient<R>,
        range: std::ops::Range<usize>,
    ) -> Result<Bytes, GridError> {
        let bytes = client.read_one(self.part(range.clone())).map_err(failed)?;
        if bytes.len() != 4 * range.len() {
            return Err(GridError::Device { what: format!("a read of {range:?} returned {} bytes", bytes.len()) });
        }
        Ok(bytes)
    }

    /// Sets elements from `at` on.
    pub(super) fn write<R: Runtime>(&self, client: &ComputeClient<R>, at: usize, bytes: &[u8]) {
        let len = bytes.len() / 4;
        debug_assert!(at + len <= self.len, "{at} + {len} of {}", self.len);
        let from = client.create_from_slice(bytes);
        let (count, dim) = over(len);
        // SAFETY: within both buffers; threads past `len` do nothing.
        unsafe {
            put::launch_unchecked::<R>(
                client,
                count,
                dim,
                address(client, self.len),
                ArrayArg::from_raw_parts(from, len),
                self.arg(),
                at,
                len,
            );
        }
    }

    pub(super) fn fill<R: Runtime>(&self, client: &ComputeClient<R>, value: u32, range: std::ops::Range<usize>) {
        let (count, dim) = over(range.len());
        // SAFETY: within the buffer; threads past the range do nothing.
        unsafe {
            set::launch_unchecked::<R>(
                client,
                count,
                dim,
                address(client, self.len),
                self.arg(),
                value,
                range.start,
                range.len(),
            );
        }
    }
}

/// Checks that the device allows a buffer of `len` elements.
pub(super) fn check_len<R: Runtime>(client: &ComputeClient<R>, len: usize) -> Result<(), GridError> {
    let properties = client.properties();
    // Vulkan cannot bind larger buffers; on CUDA this is only the page size of a pool.
    let most = if properties.supports_address(AddressType::U64) {
        isize::MAX as usize
    } else {
        (properties.memory.max_page_size as usize).min(u32::MAX as usize)
    };
    if 4 * len > most { Err(GridError::Buffer { bytes: 4 * len, most }) } else { Ok(()) }
}

/// Whether a device supports storage of 16-bit numbers.
pub(super) fn has_halves<R: Runtime>(client: &ComputeClient<R>) -> bool {
    f16::supported_uses(client).contains(TypeUsage::Buffer)
}

/// Index type of kernels: 32 bits where possible.
pub(super) fn address<R: Runtime>(client: &ComputeClient<R>, len: usize) -> AddressType {
    let long = len > u32::MAX as usize || ALWAYS_WIDE.load(Ordering::Relaxed);
    if long && client.properties().supports_address(AddressType::U64) { AddressType::U64 } else { AddressType::U32 }
}

/// For tests: uses 64-bit indices wherever the device supports them, as the largest tiles do.
pub(super) fn always_wide(yes: bool) {
    ALWAYS_WIDE.store(yes, Ordering::Relaxed);
}

static ALWAYS_WIDE: AtomicBool = AtomicBool::new(false);

/// `requested` threads per cube, or the device's maximum.
pub(super) fn units<R: Runtime>(client: &ComputeClient<R>, requested: u32) -> u32 {
    requested.min(client.properties().hardware.max_units_per_cube)
}

/// Number and size of cubes for one thread per element.
pub(super) fn over(len: usize) -> (CubeCount, CubeDim) {
    let cubes = len.div_ceil(UNITS as usize).max(1);
    let across = cubes.min(ACROSS);
    let down = cubes.div_ceil(across);
    // 32,768 × 32,768 × 256 threads are more elements than any device holds.
    (CubeCount::Static(across as u32, down as u32, 1), CubeDim::new_1d(UNITS))
}

/// The element of a thread in such a launch.
#[cube]
pub(super) fn element() -> usize {
    (CUBE_POS_Y as usize * CUBE_COUNT_X as usize + CUBE_POS_X as usize) * CUBE_DIM_X as usize + UNIT_POS_X as usize
}

/// A stored number, 32 bits or 16 bits ([`kernels_grids::number::Half`]), as the bits of an `f32`. Exact: does not depend
/// on the device's own handling of subnormals.
#[cube]
pub(super) fn number(cells: &Array<u32>, at: usize, #[comptime] half: bool) -> u32 {
    if comptime!(half) {
        let bits = cells[at / 2] >> (16u32 * u32::cast_from(at % 2));
        let (exponent, mantissa) = ((bits >> 10u32) & 31u32, bits & 1023u32);
        // The value is 2^-15 times the stored one. An `f16` subnormal is a normal `f32`.
        let usual = ((exponent + 97u32) << 23u32) | (mantissa << 13u32);
        let infinite = 0x7f80_0000u32 | (mantissa << 13u32);
        let small = u32::reinterpret(f32::cast_from(mantissa) * comptime!(1.0f32 / (1u64 << 39) as f32));
        let bound = select(exponent == 31u32, infinite, usual);
        ((bits & 0x8000u32) << 16u32) | select(exponent == 0u32, small, bound)
    } else {
        cells[at]
    }
}

/// Submits all queued work and checks for device errors.
pub(super) fn check<R: Runtime>(client: &ComputeClient<R>) -> Result<(), GridError> {
    client.flush().map_err(failed)
}

pub(super) fn failed(error: impl std::fmt::Debug) -> GridError {
    // The beginning is the reason; a backtrace follows.
    let text = format!("{error:?}");
    GridError::Device { what: text.chars().take(300).collect() }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn put(from: &Array<u32>, to: &mut Array<u32>, at: usize, len: usize) {
    let i = element();
    if i < len {
        to[at + i] = from[i];
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn set(to: &mut Array<u32>, value: u32, at: usize, len: usize) {
    let i = element();
    if i < len {
        to[at + i] = value;
    }
}
