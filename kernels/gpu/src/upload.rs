//! Uploads weights to a CUDA device through pinned memory, double-buffered: one slab is filled while the other is copied.
//!
//! CubeCL copies its input twice on the host and sends it from pageable memory, which the driver copies once more. So we convert
//! weights directly into pinned memory, and copy it on our own stream.
use cubecl::cuda::CudaRuntime;
use cubecl::prelude::*;
use cubecl::server::Handle;
use cudarc::driver::{result, sys};
use kernels_models::stage::StageError;

use crate::error::failed;

/// Two pinned slabs and the stream that copies them to CubeCL's buffers.
///
/// Copies are numbered from 1 and run in that order. A slab is not written from the start of its copy until the event after it.
pub(crate) struct Upload {
    cuda: ComputeClient<CudaRuntime>,
    stream: sys::CUstream,
    /// [`SLABS`] after `new`.
    slabs: Vec<Slab>,
    slab_bytes: usize,
    /// Number of the last copy that was started.
    begun: u64,
    /// Number of the last copy known to be complete.
    done: u64,
    /// Last, so dropped last: everything above belongs to this context.
    context: Context,
}

// SAFETY: streams, events, contexts and pinned memory belong to no thread, and every method enters the context first.
unsafe impl Send for Upload {}

/// One is filled while the other is copied.
const SLABS: usize = 2;

struct Slab {
    start: *mut u8,
    /// Recorded after the slab's last copy.
    copied: sys::CUevent,
    /// Number of that copy; 0 before the first.
    copy: u64,
    /// Destination of that copy, held so that CubeCL does not reuse the memory before the copy is complete.
    target: Option<Handle>,
}

impl Upload {
    /// Allocates slabs of `slab_bytes` bytes for device `number`, the device of `cuda`.
    ///
    /// # Errors
    /// The host has no memory to pin, or the device failed.
    pub(crate) fn new(cuda: &ComputeClient<CudaRuntime>, number: usize, slab_bytes: usize) -> Result<Self, StageError> {
        let context = Context::of(number)?;
        context.enter()?;
        let stream = result::stream::create(result::stream::StreamKind::NonBlocking);
        let stream = stream.map_err(|error| driver("no stream to copy weights on", error))?;
        let slabs = Vec::with_capacity(SLABS);
        let mut upload = Self { cuda: cuda.clone(), stream, slabs, slab_bytes, begun: 0, done: 0, context };
        for _ in 0..SLABS {
            let slab = upload.pinned()?;
            upload.slabs.push(slab);
        }
        Ok(upload)
    }

    fn pinned(&self) -> Result<Slab, StageError> {
        let event = result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING);
        let copied = event.map_err(|error| driver("no event for copies of weights", error))?;
        // SAFETY: freed when the `Upload` is dropped, after its last copy.
        match unsafe { result::malloc_host(self.slab_bytes, 0) } {
            Ok(start) => Ok(Slab { start: start.cast(), copied, copy: 0, target: None }),
            Err(error) => {
                // SAFETY: the event was just created, and nothing records it.
                let _ = unsafe { result::event::destroy(copied) };
                let mib = self.slab_bytes.div_ceil(1 << 20);
                Err(driver(&format!("cannot pin {mib} MiB of host memory; free some memory"), error))
            }
        }
    }

    /// Bytes of a slab.
    pub(crate) fn slab_bytes(&self) -> usize {
        self.slab_bytes
    }

    /// A buffer's device address. When this returns, the device has allocated the buffer and finished all earlier work on that
    /// memory, so a copy on our own stream may write to it.
    ///
    /// # Errors
    /// The device failed.
    pub(crate) fn address(&self, buffer: &Handle) -> Result<u64, StageError> {
        let address = self.cuda.get_resource(buffer.clone()).map_err(failed)?.resource().ptr;
        cubecl::future::block_on(self.cuda.sync()).map_err(failed)?;
        Ok(address)
    }

    /// The next slab to fill, [`Self::slab_bytes`] long: waits until its last copy is complete.
    ///
    /// # Errors
    /// The device failed.
    pub(crate) fn slab(&mut self) -> Result<&mut [u8], StageError> {
        self.context.enter()?;
        let (bytes, slab) = (self.slab_bytes, &mut self.slabs[self.begun as usize % SLABS]);
        if slab.copy > self.done {
            // SAFETY: the event was recorded after the slab's copy.
            unsafe { result::event::synchronize(slab.copied) }
                .map_err(|error| driver("the upload of weights failed", error))?;
            self.done = slab.copy;
        }
        slab.target = None;
        // SAFETY: the memory is allocated, any byte is valid, and no copy reads it any more. The slice borrows `self`.
        Ok(unsafe { std::slice::from_raw_parts_mut(slab.start, bytes) })
    }

    /// Starts to copy the first `len` bytes of the slab that [`Self::slab`] returned last to `address`, within `target`. Returns
    /// the copy's number.
    ///
    /// # Errors
    /// The device failed.
    ///
    /// # Panics
    /// If `len` exceeds [`Self::slab_bytes`].
    pub(crate) fn copy(&mut self, len: usize, target: &Handle, address: u64) -> Result<u64, StageError> {
        assert!(len <= self.slab_bytes, "{len} bytes of a slab of {}", self.slab_bytes);
        self.context.enter()?;
        let slab = &mut self.slabs[self.begun as usize % SLABS];
        // Set before the copy, and kept after an error: the copy may have started.
        slab.target = Some(target.clone());
        self.begun += 1;
        slab.copy = self.begun;
        // SAFETY: the slab has `len` bytes, is pinned, and `slab` does not hand it out before the event has completed. `address`
        // and the `len` bytes after it are in `target`, which is allocated (`address` waited for that) and held by the slab.
        let begun = unsafe {
            let bytes = std::slice::from_raw_parts(slab.start.cast_const(), len);
            result::memcpy_htod_async(address, bytes, self.stream)
                .and_then(|()| result::event::record(slab.copied, self.stream))
        };
        begun.map_err(|error| driver(&format!("cannot copy {len} bytes of weights"), error))?;
        Ok(self.begun)
    }

    /// Number of the last copy known to be complete; so are all before it.
    pub(crate) fn done(&self) -> u64 {
        self.done
    }

    /// Waits until every copy is complete.
    ///
    /// # Errors
    /// The device failed.
    pub(crate) fn finish(&mut self) -> Result<(), StageError> {
        self.context.enter()?;
        // SAFETY: the stream is ours.
        unsafe { result::stream::synchronize(self.stream) }
            .map_err(|error| driver("the upload of weights failed", error))?;
        self.done = self.begun;
        Ok(())
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        // If the device is lost, its copies have ended and the next call reports the loss.
        let _ = self.finish();
        for slab in &self.slabs {
            // SAFETY: both were created by `pinned`, and no copy reads the memory or records the event any more.
            unsafe {
                let _ = result::free_host(slab.start.cast());
                let _ = result::event::destroy(slab.copied);
            }
        }
        // SAFETY: created by `new`; nothing is queued on it any more.
        let _ = unsafe { result::stream::destroy(self.stream) };
    }
}

/// A device's primary context, which CubeCL uses too.
struct Context {
    device: sys::CUdevice,
    context: sys::CUcontext,
}

impl Context {
    fn of(number: usize) -> Result<Self, StageError> {
        let ordinal = i32::try_from(number).map_err(failed)?;
        let device =
            result::device::get(ordinal).map_err(|error| driver(&format!("cuda:{number} was not found"), error))?;
        // SAFETY: the device was just found; released when this is dropped.
        let context = unsafe { result::primary_ctx::retain(device) };
        let context = context.map_err(|error| driver(&format!("cannot open a context on cuda:{number}"), error))?;
        Ok(Self { device, context })
    }

    /// Makes it this thread's current context.
    fn enter(&self) -> Result<(), StageError> {
        // SAFETY: the context is retained.
        unsafe { result::ctx::set_current(self.context) }.map_err(|error| driver("the device's context is lost", error))
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained once by `of`.
        let _ = unsafe { result::primary_ctx::release(self.device) };
    }
}

/// Free bytes of a device's memory, shared by all processes.
pub(crate) fn memory_free(number: usize) -> Option<u64> {
    let context = Context::of(number).ok()?;
    context.enter().ok()?;
    result::mem_get_info().ok().map(|(free, _)| free as u64)
}

fn driver(what: &str, error: result::DriverError) -> StageError {
    StageError::Device(format!("{what}: the driver reports {error:?}"))
}
