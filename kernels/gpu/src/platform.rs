//! The CubeCL runtimes that the engine supports, and what each offers beyond kernel launches.
use cubecl::cuda::CudaRuntime;
use cubecl::prelude::*;
use cubecl::server::Handle;
use cubecl::wgpu::WgpuRuntime;
use kernels_models::stage::StageError;

use crate::graph::{Graphs, Recorder};
use crate::upload::{Upload, memory_free};

/// A CubeCL runtime that the engine supports, with its optional features.
pub trait Platform: Runtime {
    /// Binds a buffer to a launch.
    #[doc(hidden)]
    fn bind(handle: &Handle) -> Handle {
        handle.clone()
    }

    /// Records and replays steps on device `number`; `None` if the runtime has no graphs.
    #[doc(hidden)]
    #[allow(private_interfaces)]
    fn graphs(_client: &ComputeClient<Self>, _number: usize) -> Result<Option<Graphs>, StageError> {
        Ok(None)
    }

    /// Copies weights to device `number` in slabs of `slab_bytes`; `None` if the runtime gives no access to device memory.
    ///
    /// # Errors
    /// The host has no memory for the slabs, or the device failed.
    #[doc(hidden)]
    #[allow(private_interfaces)]
    fn upload(_client: &ComputeClient<Self>, _number: usize, _slab_bytes: usize) -> Result<Option<Upload>, StageError> {
        Ok(None)
    }

    /// Free bytes on device `number`; `None` if the runtime does not report them.
    #[doc(hidden)]
    fn memory_free(_number: usize) -> Option<u64> {
        None
    }
}

impl Platform for WgpuRuntime {}

impl Platform for CudaRuntime {
    #[allow(private_interfaces)]
    fn graphs(client: &ComputeClient<Self>, number: usize) -> Result<Option<Graphs>, StageError> {
        Graphs::new(client, number).map(Some)
    }

    #[allow(private_interfaces)]
    fn upload(client: &ComputeClient<Self>, number: usize, slab_bytes: usize) -> Result<Option<Upload>, StageError> {
        Upload::new(client, number, slab_bytes).map(Some)
    }

    fn memory_free(number: usize) -> Option<u64> {
        memory_free(number)
    }
}

/// Binds a buffer by noting it, so that the recorded launches can be replayed with it.
impl Platform for Recorder {
    fn bind(handle: &Handle) -> Handle {
        Self::note(handle);
        handle.clone()
    }
}

/// A buffer as a kernel argument; `len` counts 32-bit elements.
pub(crate) fn array<R: Platform>(handle: &Handle, len: usize) -> ArrayArg<R> {
    // SAFETY: every caller passes at most the allocated length, and kernels stay below `len`.
    unsafe { ArrayArg::from_raw_parts(R::bind(handle), len) }
}
