//! Reads that do not block, and plain copies in device memory: what grids and models on GPUs share.
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use cubecl::bytes::Bytes;
use cubecl::prelude::*;
use cubecl::server::{Handle, ServerError};

/// A pending read; completes once the device has executed everything queued before it.
pub type PendingRead = Pin<Box<dyn Future<Output = Result<Vec<Bytes>, ServerError>> + Send>>;

/// Queues a read on the device immediately; the returned future only waits for it.
pub fn submit_read<R: Runtime>(client: ComputeClient<R>, handle: Handle) -> PendingRead {
    let mut coming: PendingRead = Box::pin(async move {
        let read = client.read_async(vec![handle]);
        // Stop the first poll here: the next one may block.
        let mut first = true;
        poll_fn(|_| if std::mem::take(&mut first) { Poll::Pending } else { Poll::Ready(()) }).await;
        read.await
    });
    let polled = coming.as_mut().poll(&mut Context::from_waker(Waker::noop()));
    debug_assert!(polled.is_pending());
    coming
}

/// Threads per block of [`copy`].
const UNITS: u32 = 128;

/// Copies `len` floats, 16 bytes per thread: measures the peak memory bandwidth of the device.
///
/// # Panics
/// If `len` is not a multiple of 512, or exceeds the largest launch grid.
pub fn copy<R: Runtime>(client: &ComputeClient<R>, from: &Handle, to: &Handle, len: usize) {
    let units = len / 4;
    assert!(len.is_multiple_of(4 * UNITS as usize), "expected a multiple of 512 floats, found {len}");
    let (across, down) = (units / UNITS as usize, 1usize);
    let (across, down) = if across > 32_768 { (32_768, across.div_ceil(32_768)) } else { (across, down) };
    // SAFETY: the kernel checks its position against the length, which both buffers have.
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
