//! Grids on GPUs as CubeCL kernels: one source for CUDA and Vulkan. Models on GPUs are the package `kernels-gpu`.
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use cubecl::bytes::Bytes;
use cubecl::prelude::*;
use cubecl::server::{Handle, ServerError};

pub mod grid;

/// What a read gives, once the device is done with what came before it.
pub type Coming = Pin<Box<dyn Future<Output = Result<Vec<Bytes>, ServerError>> + Send>>;

/// A read that is with the device already, whenever it is awaited.
pub fn submitted<R: Runtime>(client: ComputeClient<R>, handle: Handle) -> Coming {
    let mut coming: Coming = Box::pin(async move {
        let read = client.read_async(vec![handle]);
        // The first poll ends here, before the one that may block.
        let mut first = true;
        poll_fn(|_| if std::mem::take(&mut first) { Poll::Pending } else { Poll::Ready(()) }).await;
        read.await
    });
    let polled = coming.as_mut().poll(&mut Context::from_waker(Waker::noop()));
    debug_assert!(polled.is_pending());
    coming
}

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
