//! Weights to a CUDA device through pinned memory: one slab is filled while the other one is copied.
//!
//! CubeCL copies what it is given twice on the host and sends it from pageable memory, which the driver copies once more. So
//! weights are converted straight into memory that the device reads by itself, and copied on a stream of our own.
use cubecl::cuda::CudaRuntime;
use cubecl::prelude::*;
use cubecl::server::Handle;
use cudarc::driver::{result, sys};
use kernels::stage::StageError;

use crate::engine::failed;

/// Two pinned slabs and the stream that copies them to buffers of CubeCL's.
///
/// Copies run in the order in which they begin, and are numbered from 1. A slab is not written between the beginning of its copy
/// and the event behind it.
pub(crate) struct Upload {
    cuda: ComputeClient<CudaRuntime>,
    stream: sys::CUstream,
    /// [`SLABS`] of them once made.
    slabs: Vec<Slab>,
    slab_bytes: usize,
    /// Number of the last copy that began.
    begun: u64,
    /// Number of the last copy that is known to be complete.
    done: u64,
    /// Dropped last: all of the above is of this context.
    context: Context,
}

/// Filled and copied in turns: while one is copied, the other one is filled.
const SLABS: usize = 2;

struct Slab {
    start: *mut u8,
    /// Recorded behind the slab's last copy.
    copied: sys::CUevent,
    /// Number of that copy; 0 without one.
    copy: u64,
    /// Where it goes: CubeCL must not give this memory to others until the copy is complete.
    target: Option<Handle>,
}

impl Upload {
    /// Slabs of `slab_bytes` bytes for device `number`, whose client is given.
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
        // SAFETY: freed when the upload is dropped, after its last copy.
        match unsafe { result::malloc_host(self.slab_bytes, 0) } {
            Ok(start) => Ok(Slab { start: start.cast(), copied, copy: 0, target: None }),
            Err(error) => {
                // SAFETY: the event was just made, and nothing records it.
                let _ = unsafe { result::event::destroy(copied) };
                let mib = self.slab_bytes.div_ceil(1 << 20);
                Err(driver(&format!("{mib} MiB of the host's memory cannot be pinned; free some of it"), error))
            }
        }
    }

    /// Bytes of a slab.
    pub(crate) fn slab_bytes(&self) -> usize {
        self.slab_bytes
    }

    /// Where a buffer lies on the device. When this returns, the device has allocated it and is done with whatever used the memory
    /// before, so that a copy on our own stream may write it.
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
            // SAFETY: the event was recorded behind the slab's copy.
            unsafe { result::event::synchronize(slab.copied) }
                .map_err(|error| driver("weights were not copied", error))?;
            self.done = slab.copy;
        }
        slab.target = None;
        // SAFETY: the system gave this memory, any byte of it is valid, and no copy reads it any more. The borrow of `self` lasts as
        // long as the slice.
        Ok(unsafe { std::slice::from_raw_parts_mut(slab.start, bytes) })
    }

    /// Begins to copy the first `len` bytes of the slab that [`Self::slab`] gave last to `address`, within `target`. Gives the
    /// copy's number.
    ///
    /// # Errors
    /// The device failed.
    ///
    /// # Panics
    /// If a slab has fewer bytes.
    pub(crate) fn copy(&mut self, len: usize, target: &Handle, address: u64) -> Result<u64, StageError> {
        assert!(len <= self.slab_bytes, "{len} bytes of a slab of {}", self.slab_bytes);
        self.context.enter()?;
        let slab = &mut self.slabs[self.begun as usize % SLABS];
        // From here on, also after an error: a copy may have begun.
        slab.target = Some(target.clone());
        self.begun += 1;
        slab.copy = self.begun;
        // SAFETY: the slab has `len` bytes, is pinned, and is not written before the event says that it was copied, by `slab`.
        // `address` and what follows it are of `target`, which is allocated (`address` waited for that) and is kept by the slab.
        let begun = unsafe {
            let bytes = std::slice::from_raw_parts(slab.start.cast_const(), len);
            result::memcpy_htod_async(address, bytes, self.stream)
                .and_then(|()| result::event::record(slab.copied, self.stream))
        };
        begun.map_err(|error| driver(&format!("{len} bytes of weights cannot be copied"), error))?;
        Ok(self.begun)
    }

    /// Number of the last copy that is known to be complete; all before it are.
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
            .map_err(|error| driver("weights were not copied", error))?;
        self.done = self.begun;
        Ok(())
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        // A device that is lost says so to the next call, and its copies have ended.
        let _ = self.finish();
        for slab in &self.slabs {
            // SAFETY: both were made by `pinned`, and no copy reads the memory or records the event any more.
            unsafe {
                let _ = result::free_host(slab.start.cast());
                let _ = result::event::destroy(slab.copied);
            }
        }
        // SAFETY: made by `new`; nothing is on it any more.
        let _ = unsafe { result::stream::destroy(self.stream) };
    }
}

/// The primary context of a device, which is the one that CubeCL uses.
struct Context {
    device: sys::CUdevice,
    context: sys::CUcontext,
}

impl Context {
    fn of(number: usize) -> Result<Self, StageError> {
        let ordinal = i32::try_from(number).map_err(failed)?;
        let device =
            result::device::get(ordinal).map_err(|error| driver(&format!("there is no cuda:{number}"), error))?;
        // SAFETY: the device was just found; released when this is dropped.
        let context = unsafe { result::primary_ctx::retain(device) };
        let context = context.map_err(|error| driver(&format!("cuda:{number} gives no context"), error))?;
        Ok(Self { device, context })
    }

    /// Makes it this thread's.
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

/// Bytes that a device has free, for all programs.
pub(crate) fn memory_free(number: usize) -> Option<u64> {
    let context = Context::of(number).ok()?;
    context.enter().ok()?;
    result::mem_get_info().ok().map(|(free, _)| free as u64)
}

fn driver(what: &str, error: result::DriverError) -> StageError {
    StageError::Device(format!("{what}: the driver says {error:?}"))
}
