//! Grids on GPUs as CubeCL kernels: one source for CUDA and Vulkan. Models on GPUs are the package `kernels-gpu`.
use cubecl::prelude::*;
use cubecl::server::Handle;

pub mod grid;

/// Units of a cube of [`copy`].
const UNITS: u32 = 128;

/// Copies `len` floats, 16 bytes a unit: what the device's memory can do at best.
///
/// # Panics
/// If `len` is no multiple of 512 or more than a grid holds.
pub fn copy<R: Runtime>(client: &ComputeClient<R>, from: &Handle, to: &Handle, len: usize) {
    let units = len / 4;
    assert!(len.is_multiple_of(4 * UNITS as usize), "{len} floats are no whole cubes");
    let (across, down) = (units / UNITS as usize, 1usize);
    let (across, down) = if across > 32_768 { (32_768, across.div_ceil(32_768)) } else { (across, down) };
    // SAFETY: the kernel tests its position against the length, which both have.
    unsafe {
        let array = |handle: &Handle| ArrayArg::from_raw_parts(handle.clone(), len);
        copy_kernel::launch_unchecked::<R>(
            client,
            CubeCount::Static(across as u32, down as u32, 1),
            CubeDim::new_1d(UNITS),
            array(from),
            array(to),
        );
    }
}

#[cube(launch_unchecked)]
fn copy_kernel(from: &Array<Vector<f32, Const<4>>>, to: &mut Array<Vector<f32, Const<4>>>) {
    if ABSOLUTE_POS < to.len() {
        to[ABSOLUTE_POS] = from[ABSOLUTE_POS];
    }
}
