//! Decode steps as CUDA graphs: the launches of a step are recorded once and replayed with one call.
//!
//! CubeCL has no graphs, and each launch through it costs the host about 8 µs; a step has hundreds. So we run the functions that
//! launch kernels on a [`Recorder`], a runtime that only records launches. The recorded kernels are compiled, captured on our own
//! stream, and replayed there.
use parking_lot::Mutex;
use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::ffi::{CString, c_void};
use std::sync::Arc;

use cubecl::bytes::Bytes;
use cubecl::cuda::{CudaCompiler, CudaRuntime};
use cubecl::device::{Device, DeviceId, DeviceService, ServerUtilitiesHandle};
use cubecl::future::DynFut;
use cubecl::ir::{DeviceProperties, TargetProperties};
use cubecl::prelude::*;
use cubecl::profile::ProfileDuration;
use cubecl::server::{
    Binding, ComputeServer, CopyDescriptor, Handle, IoError, KernelArguments, MemoryLayout, MemoryLayoutDescriptor,
    MemoryLayoutPolicy, ProfileError, ProfilingToken, ServerCommunication, ServerError, ServerUtilities,
};
use cubecl::stream_id::StreamId;
use cubecl::zspace::{Shape, Strides};
use cubecl::{CubeTask, MemoryAllocationMode, MemoryUsage};
use cubecl_runtime::logging::ServerLogger;
use cubecl_runtime::memory_management::ManagedMemoryHandle;
use cubecl_runtime::storage::{ComputeStorage, ManagedResource, StorageHandle, StorageId};
use cudarc::driver::{result, sys};
use kernels_models::stage::StageError;

use crate::compile::{AWAITS, Compiler, EntryPoint, Source};
use crate::device::cuda::capability;
use crate::error::failed;

/// A runtime that records launches instead of executing them.
#[derive(Clone, Debug)]
pub(crate) struct Recorder;

/// The CUDA device that launches are recorded for.
#[derive(Clone, Debug, Default)]
pub(crate) struct RecorderDevice(usize);

/// A launch as recorded.
struct RecordedLaunch {
    kernel: Box<dyn CubeTask<CudaCompiler>>,
    cubes: (u32, u32, u32),
    arguments: KernelArguments,
}

/// Recorded launches with the stream of the launching thread.
static RECORDED: Mutex<Vec<(StreamId, RecordedLaunch)>> = Mutex::new(Vec::new());

thread_local! {
    /// Buffers of this thread's launches, in the order of their arguments.
    static BOUND: RefCell<Vec<Handle>> = const { RefCell::new(Vec::new()) };
}

impl Recorder {
    /// Notes a buffer of this thread's next launch; called in the order of the launch's arguments.
    pub(crate) fn note(handle: &Handle) {
        BOUND.with_borrow_mut(|bound| bound.push(handle.clone()));
    }
}

impl Device for RecorderDevice {
    fn from_id(id: DeviceId) -> Self {
        Self(id.index_id.into())
    }

    fn to_id(&self) -> DeviceId {
        DeviceId { type_id: TYPE, index_id: self.0 as u16 }
    }
}

impl Runtime for Recorder {
    type Compiler = CudaCompiler;
    type Server = RecorderServer;
    type Device = RecorderDevice;

    fn client(device: &Self::Device) -> ComputeClient<Self> {
        ComputeClient::load(device)
    }

    fn name(_client: &ComputeClient<Self>) -> &'static str {
        "cuda" // kernels are generated for CUDA
    }

    fn require_array_lengths() -> bool {
        CudaRuntime::require_array_lengths()
    }

    fn max_cube_count() -> (u32, u32, u32) {
        CudaRuntime::max_cube_count()
    }

    fn can_read_tensor(shape: &Shape, strides: &Strides) -> bool {
        CudaRuntime::can_read_tensor(shape, strides)
    }

    fn target_properties() -> TargetProperties {
        CudaRuntime::target_properties()
    }

    fn enumerate_devices(_: u16, (): &()) -> Vec<DeviceId> {
        Vec::new()
    }
}

/// The recorder's compute server. It has no memory.
#[derive(Debug)]
pub(crate) struct RecorderServer(Arc<ServerUtilities<Self>>);

/// Memory management of a server without memory.
#[derive(Debug)]
pub(crate) struct NoMemory;

/// A device type that CubeCL's own runtimes do not use. Devices of equal type and number share a thread, and a recorder on the real
/// device's thread would deadlock.
const TYPE: u16 = 9;

/// Properties of the devices whose launches are recorded, by number.
static PROPERTIES: Mutex<BTreeMap<u16, DeviceProperties>> = Mutex::new(BTreeMap::new());

impl DeviceService for RecorderServer {
    fn init(device: DeviceId) -> Self {
        let known = PROPERTIES.lock();
        let properties = known.get(&device.index_id).expect("set before a recorder's client is created").clone();
        Self(Arc::new(ServerUtilities::new(properties, Arc::new(ServerLogger::default()), (), NoMemory)))
    }

    fn utilities(&self) -> ServerUtilitiesHandle {
        Arc::clone(&self.0) as ServerUtilitiesHandle
    }
}

impl ServerCommunication for RecorderServer {
    const SERVER_COMM_ENABLED: bool = false;
}

impl MemoryLayoutPolicy for NoMemory {
    fn apply(&self, _: StreamId, _: &[MemoryLayoutDescriptor]) -> (Handle, Vec<MemoryLayout>) {
        unreachable!("a recorder allocates nothing")
    }
}

impl ComputeStorage for NoMemory {
    type Resource = ();

    fn alignment(&self) -> usize {
        1
    }

    fn get(&mut self, _: &StorageHandle) {}

    fn alloc(&mut self, _: u64) -> Result<StorageHandle, IoError> {
        Err(no_memory())
    }

    fn dealloc(&mut self, _: StorageId) {}

    fn flush(&mut self) {}
}

fn no_memory() -> IoError {
    IoError::UnsupportedIoOperation { backtrace: cubecl::backtrace::BackTrace::capture() }
}

impl ComputeServer for RecorderServer {
    type Kernel = Box<dyn CubeTask<CudaCompiler>>;
    type Info = ();
    type MemoryLayoutPolicy = NoMemory;
    type Storage = NoMemory;

    fn initialize_memory(&mut self, _: ManagedMemoryHandle, _: u64, _: StreamId) {}

    fn logger(&self) -> Arc<ServerLogger> {
        Arc::clone(&self.0.logger)
    }

    fn utilities(&self) -> Arc<ServerUtilities<Self>> {
        Arc::clone(&self.0)
    }

    fn read(&mut self, _: Vec<CopyDescriptor>, _: StreamId) -> DynFut<Result<Vec<Bytes>, ServerError>> {
        Box::pin(async { Err(no_memory().into()) })
    }

    fn write(&mut self, _: Vec<(CopyDescriptor, Bytes)>, _: StreamId) {}

    fn sync(&mut self, _: StreamId) -> DynFut<Result<(), ServerError>> {
        Box::pin(async { Ok(()) })
    }

    fn get_resource(&mut self, _: Binding, _: StreamId) -> Result<ManagedResource<()>, ServerError> {
        Err(no_memory().into())
    }

    unsafe fn launch(
        &mut self,
        kernel: Self::Kernel,
        count: CubeCount,
        arguments: KernelArguments,
        _: ExecutionMode,
        stream: StreamId,
    ) {
        let cubes = match count {
            CubeCount::Static(x, y, z) => (x, y, z),
            CubeCount::Dynamic(_) => (0, 0, 0), // rejected by `Graphs::record`
        };
        RECORDED.lock().push((stream, RecordedLaunch { kernel, cubes, arguments }));
    }

    fn flush(&mut self, _: StreamId) -> Result<(), ServerError> {
        Ok(())
    }

    fn memory_usage(&mut self, _: StreamId) -> Result<MemoryUsage, ServerError> {
        Err(no_memory().into())
    }

    fn memory_cleanup(&mut self, _: StreamId) {}

    fn start_profile(&mut self, _: StreamId) -> Result<ProfilingToken, ServerError> {
        Err(no_memory().into())
    }

    fn end_profile(&mut self, _: StreamId, _: ProfilingToken) -> Result<ProfileDuration, ProfileError> {
        Err(ProfileError::NotRegistered { backtrace: cubecl::backtrace::BackTrace::capture() })
    }

    fn allocation_mode(&mut self, _: MemoryAllocationMode, _: StreamId) {}
}

/// The launches of `launch`, and their buffers in the order of arguments.
fn recorded(
    recorder: &ComputeClient<Recorder>,
    launch: impl FnOnce(&ComputeClient<Recorder>),
) -> Result<(Vec<RecordedLaunch>, Vec<Handle>), StageError> {
    let stream = StreamId::current();
    let take = || -> Vec<RecordedLaunch> {
        let mut all = RECORDED.lock();
        let (mine, others) = all.drain(..).partition(|(of, _)| *of == stream);
        *all = others;
        mine.into_iter().map(|(_, recorded): (_, RecordedLaunch)| recorded).collect()
    };
    BOUND.with_borrow_mut(Vec::clear);
    take();
    launch(recorder);
    recorder.flush().map_err(failed)?;
    Ok((take(), BOUND.take()))
}

/// Number of kernels that `launch` launches on a device with these properties, of any runtime.
pub(crate) fn launches(properties: &DeviceProperties, launch: impl FnOnce(&ComputeClient<Recorder>)) -> usize {
    /// A number that no device has: these launches are neither compiled nor replayed.
    const COUNTED: u16 = u16::MAX - 1;
    PROPERTIES.lock().insert(COUNTED, properties.clone());
    let recorder = Recorder::client(&RecorderDevice(COUNTED.into()));
    recorded(&recorder, launch).expect("recording does not fail").0.len()
}

impl Source {
    fn of(kernel: &dyn CubeTask<CudaCompiler>) -> Result<Self, StageError> {
        let mut options = <CudaCompiler as cubecl::Compiler>::CompilationOptions::default();
        options.supports_features.grid_constants = true; // scalars are parameters by value
        let compiled = kernel
            .compile(&mut Default::default(), &options, ExecutionMode::Unchecked, kernel.address_type())
            .map_err(failed)?;
        let shared = compiled.repr.as_ref().map_or(0, |text| text.shared_memory_size());
        let entry = EntryPoint {
            name: compiled.entrypoint_name,
            units: (compiled.cube_dim.x, compiled.cube_dim.y, compiled.cube_dim.z),
            shared_bytes: shared as u32,
            awaits: compiled.source.contains(AWAITS),
        };
        Ok(Self { text: compiled.source, entry })
    }

    /// The distinct kernels that `launch` launches on a device with these properties. Needs no device.
    #[cfg(test)]
    pub(crate) fn all(
        properties: DeviceProperties,
        launch: impl FnOnce(&ComputeClient<Recorder>),
    ) -> Result<Vec<Self>, StageError> {
        const NONE: u16 = u16::MAX;
        PROPERTIES.lock().insert(NONE, properties);
        let recorder = Recorder::client(&RecorderDevice(NONE.into()));
        let mut known = std::collections::HashSet::new();
        let (recorded, _) = recorded(&recorder, launch)?;
        recorded.iter().filter(|n| known.insert(n.kernel.id())).map(|n| Self::of(&*n.kernel)).collect()
    }
}

/// A kernel loaded into the driver.
#[derive(Clone, Copy)]
struct Function {
    function: sys::CUfunction,
    units: (u32, u32, u32),
    shared_bytes: u32,
    /// The kernel itself waits for the preceding kernel, so it may be launched early.
    awaits: bool,
}

// SAFETY: a driver handle, which any thread may use.
unsafe impl Send for Function {}

/// Loaded kernels by device. They live as long as the device's context, which lives as long as the process.
static FUNCTIONS: Mutex<BTreeMap<usize, HashMap<KernelId, Function>>> = Mutex::new(BTreeMap::new());

/// A launch to capture.
struct Call {
    function: Function,
    cubes: (u32, u32, u32),
    /// Device addresses of the buffers.
    pointers: Vec<u64>,
    /// Scalar parameters.
    info: Vec<u64>,
}

impl Call {
    /// Launches the kernel on a stream. `early`: its cubes may start before the preceding kernel is complete.
    ///
    /// # Safety
    /// The stream's context must be current, and the parameters must be those that the kernel was compiled for.
    unsafe fn launch(&mut self, stream: sys::CUstream, early: bool) -> Result<(), result::DriverError> {
        let Function { function, units, shared_bytes, .. } = self.function;
        let mut parameters: Vec<*mut c_void> = self.pointers.iter_mut().map(|p| (p as *mut u64).cast()).collect();
        parameters.push(self.info.as_mut_ptr().cast());
        // SAFETY: guaranteed by the caller; the attribute is only read during the call, and all zeros are a valid attribute.
        unsafe {
            if !early {
                return result::launch_kernel(function, self.cubes, units, shared_bytes, stream, &mut parameters);
            }
            let mut attribute: sys::CUlaunchAttribute = std::mem::zeroed();
            attribute.id = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
            attribute.value.programmaticStreamSerializationAllowed = 1;
            let config = sys::CUlaunchConfig {
                gridDimX: self.cubes.0,
                gridDimY: self.cubes.1,
                gridDimZ: self.cubes.2,
                blockDimX: units.0,
                blockDimY: units.1,
                blockDimZ: units.2,
                sharedMemBytes: shared_bytes,
                hStream: stream,
                attrs: &raw mut attribute,
                numAttrs: 1,
            };
            sys::cuLaunchKernelEx(&raw const config, function, parameters.as_mut_ptr(), std::ptr::null_mut()).result()
        }
    }
}

/// Whether graphs support programmatic dependent launch on this device: Hopper and later, from CUDA 12.3 on.
fn starts_early(device: sys::CUdevice) -> Result<bool, result::DriverError> {
    const VERSION: i32 = 12_030;
    const CAPABILITY: u32 = 90;
    let mut version = 0;
    // SAFETY: writes one number.
    unsafe { sys::cuDriverGetVersion(&raw mut version) }.result()?;
    Ok(version >= VERSION && capability(device)? >= CAPABILITY)
}

/// Records and replays graphs on one device.
pub(crate) struct Graphs {
    cuda: ComputeClient<CudaRuntime>,
    recorder: ComputeClient<Recorder>,
    context: sys::CUcontext,
    stream: sys::CUstream,
    compiler: Compiler,
    /// Number of the device.
    number: usize,
    /// Kernels that wait for the preceding kernel themselves are launched early.
    early: bool,
}

// SAFETY: each call makes the context current; streams, functions and graphs may be used from any thread, one at a time.
unsafe impl Send for Graphs {}

/// A recorded step.
pub(crate) struct Graph(sys::CUgraphExec);

// SAFETY: see `Graphs`.
unsafe impl Send for Graph {}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: it was instantiated, and nothing replays it any more. If the device is lost, the next call reports it.
        let _ = unsafe { result::graph::exec_destroy(self.0) };
    }
}

/// A CubeCL buffer and its device address, which is valid while the handle lives.
pub(crate) struct Buffer {
    pub(crate) handle: Handle,
    address: u64,
}

impl Buffer {
    /// Its device address.
    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    /// Device address of `words` words from byte `offset` on.
    pub(crate) fn part(&self, offset: usize, words: usize) -> Result<u64, StageError> {
        let (end, size) = ((offset + 4 * words) as u64, self.handle.size_in_used());
        if end > size {
            return Err(failed(format!("a copy up to byte {end} of a buffer of {size}")));
        }
        Ok(self.address + offset as u64)
    }
}

/// An event on the stream: marks the end of the work queued before it.
pub(crate) struct Mark(sys::CUevent);

// SAFETY: see `Graphs`.
unsafe impl Send for Mark {}

impl Drop for Mark {
    fn drop(&mut self) {
        // SAFETY: it was created. If the device is lost, the next call reports it.
        let _ = unsafe { result::event::destroy(self.0) };
    }
}

/// Pinned host memory, which the device accesses directly.
pub(crate) struct Pinned {
    start: *mut u32,
    words: usize,
}

// SAFETY: it owns its memory.
unsafe impl Send for Pinned {}

impl Pinned {
    pub(crate) fn words(&mut self) -> &mut [u32] {
        // SAFETY: allocated with `words` words; any bit pattern is a valid word.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.words) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: allocated by `Graphs::pinned`.
        let _ = unsafe { result::free_host(self.start.cast()) };
    }
}

impl Graphs {
    /// For CUDA device `device`, whose CubeCL client is `cuda`.
    pub(crate) fn new(cuda: &ComputeClient<CudaRuntime>, device: usize) -> Result<Self, StageError> {
        let number = i32::try_from(device).map_err(failed)?;
        let found = result::device::get(number).map_err(failed)?;
        let compiler = Compiler::new(found)?;
        // SAFETY: the device exists; CubeCL uses its primary context too.
        let (context, stream) = unsafe {
            let context = result::primary_ctx::retain(found).map_err(failed)?;
            result::ctx::set_current(context).map_err(failed)?;
            (context, result::stream::create(result::stream::StreamKind::NonBlocking).map_err(failed)?)
        };
        let properties = cuda.properties().clone();
        PROPERTIES.lock().insert(device as u16, properties);
        Ok(Self {
            cuda: cuda.clone(),
            recorder: Recorder::client(&RecorderDevice(device)),
            context,
            stream,
            compiler,
            number: device,
            early: starts_early(found).map_err(failed)?,
        })
    }

    /// Number of the device.
    pub(crate) fn number(&self) -> usize {
        self.number
    }

    /// The device's primary context.
    pub(crate) fn context(&self) -> sys::CUcontext {
        self.context
    }

    /// Makes the context current on this thread.
    pub(crate) fn enter(&self) -> Result<(), StageError> {
        // SAFETY: the context was retained.
        unsafe { result::ctx::set_current(self.context) }.map_err(failed)
    }

    /// Records the launches of `launch` as a graph.
    pub(crate) fn record(&mut self, launch: impl FnOnce(&ComputeClient<Recorder>)) -> Result<Graph, StageError> {
        self.enter()?;
        let (recorded, bound) = recorded(&self.recorder, launch)?;
        let buffers: usize = recorded.iter().map(|recorded| recorded.arguments.buffers.len()).sum();
        if buffers != bound.len() {
            return Err(StageError::Device(format!("{buffers} buffers were recorded but {} were bound", bound.len())));
        }
        let mut calls = Vec::with_capacity(recorded.len());
        let mut bound = bound.into_iter();
        for RecordedLaunch { kernel, cubes, arguments } in recorded {
            let mut pointers = Vec::with_capacity(arguments.buffers.len());
            for handle in bound.by_ref().take(arguments.buffers.len()) {
                pointers.push(self.buffer(handle)?.address);
            }
            let info = arguments.info;
            if info.dynamic_metadata_offset < info.data.len() || cubes == (0, 0, 0) {
                return Err(StageError::Device("cannot record a launch with dynamic shapes or cube counts".into()));
            }
            calls.push(Call { function: self.function(&*kernel)?, cubes, pointers, info: info.data });
        }
        if self.early {
            match self.capture(&mut calls, true) {
                Ok(graph) => return Ok(graph),
                Err(error) => {
                    tracing::debug!("graphs on this device do not support early kernel starts: {error}");
                    self.early = false;
                }
            }
        }
        self.capture(&mut calls, false).map_err(failed)
    }

    /// Captures launches as a graph. `early`: kernels that wait for the preceding kernel themselves start early.
    fn capture(&self, calls: &mut [Call], early: bool) -> Result<Graph, result::DriverError> {
        // SAFETY: the parameters are those that the kernels were compiled for: buffers in order, then scalars by value. Capturing a
        // launch copies them. The graph is destroyed after it is instantiated.
        unsafe {
            let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
            result::stream::begin_capture(self.stream, mode)?;
            let mut launched = Ok(());
            for (i, call) in calls.iter_mut().enumerate() {
                let awaits = call.function.awaits;
                launched = launched.and(call.launch(self.stream, early && awaits && i > 0));
            }
            let graph = result::stream::end_capture(self.stream)?;
            let replayed = launched.and_then(|()| result::graph::instantiate(graph, sys::CUgraphInstantiate_flags(0)));
            let _ = result::graph::destroy(graph);
            replayed.map(Graph)
        }
    }

    fn function(&self, kernel: &dyn CubeTask<CudaCompiler>) -> Result<Function, StageError> {
        let id = kernel.id();
        // Locked while loading: another stage may need the same kernel.
        let mut all = FUNCTIONS.lock();
        let functions = all.entry(self.number).or_default();
        if let Some(function) = functions.get(&id) {
            return Ok(*function);
        }
        let source = || Source::of(kernel);
        let function = self.compiler.load(&id, source, |entry, code| {
            let name = CString::new(entry.name.as_str()).map_err(failed)?;
            let EntryPoint { units, shared_bytes, awaits, .. } = *entry;
            // SAFETY: NVRTC generated the code.
            unsafe {
                let module = result::module::load_data(code.as_ptr().cast()).map_err(failed)?;
                let function = result::module::get_function(module, name).map_err(failed)?;
                let most = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
                result::function::set_function_attribute(function, most, shared_bytes as i32).map_err(failed)?;
                Ok(Function { function, units, shared_bytes, awaits })
            }
        })?;
        functions.insert(id, function);
        Ok(function)
    }

    /// Allocates pinned host memory for transfers.
    pub(crate) fn pinned(&self, words: usize) -> Result<Pinned, StageError> {
        self.enter()?;
        // SAFETY: freed when the `Pinned` is dropped.
        let start = unsafe { result::malloc_host(words.max(1) * 4, 0) }.map_err(failed)?;
        Ok(Pinned { start: start.cast(), words })
    }

    /// Looks up a buffer's device address. This is a call to CubeCL's thread, too slow for every step.
    pub(crate) fn buffer(&self, handle: Handle) -> Result<Buffer, StageError> {
        let address = self.cuda.get_resource(handle.clone()).map_err(failed)?.resource().ptr;
        Ok(Buffer { handle, address })
    }

    /// Waits until the launches on CubeCL's stream are complete.
    pub(crate) fn join(&self) -> Result<(), StageError> {
        self.cuda.flush().map_err(failed)?;
        cubecl::future::block_on(self.cuda.sync()).map_err(failed)
    }

    /// Waits until everything that was queued here is complete.
    pub(crate) fn settle(&self) -> Result<(), StageError> {
        self.enter()?;
        // SAFETY: the stream is ours.
        unsafe { result::stream::synchronize(self.stream).map_err(failed) }
    }

    /// Replays a graph and waits until it is complete.
    pub(crate) fn replay(&self, graph: &Graph) -> Result<(), StageError> {
        self.enter()?;
        // SAFETY: the graph was instantiated for this context.
        unsafe {
            result::graph::launch(graph.0, self.stream).map_err(failed)?;
            result::stream::synchronize(self.stream).map_err(failed)
        }
    }

    /// Queues, in this order: a copy of `sent` to buffer `to` from word `start` on, a graph, a copy of buffer `from` to `got`, and to
    /// `also` if given, and the mark. The caller must wait for the mark before it uses `sent` or `got` again.
    pub(crate) fn queue(
        &self,
        (sent, to, start): (&[u32], &Buffer, usize),
        graph: &Graph,
        (got, from, also): (&mut [u32], &Buffer, Option<&Buffer>),
        mark: &Mark,
    ) -> Result<(), StageError> {
        self.enter()?;
        // SAFETY: the engine made the buffers at least as long as the words; the words are pinned, and stay untouched until the
        // caller has waited for the mark.
        unsafe {
            result::memcpy_htod_async(to.address + 4 * start as u64, sent, self.stream).map_err(failed)?;
            result::graph::launch(graph.0, self.stream).map_err(failed)?;
            if let Some(also) = also {
                let to = also.part(0, got.len())?;
                result::memcpy_dtod_async(to, from.address, 4 * got.len(), self.stream).map_err(failed)?;
            }
            result::memcpy_dtoh_async(got, from.address, self.stream).map_err(failed)?;
            result::event::record(mark.0, self.stream).map_err(failed)
        }
    }

    /// Queues a copy from an address of another device, whose context is given, to one of this device.
    pub(crate) fn queue_peer_copy(
        &self,
        to: u64,
        (from, context): (u64, sys::CUcontext),
        bytes: usize,
    ) -> Result<(), StageError> {
        self.enter()?;
        // SAFETY: the caller keeps both buffers, which have room for the bytes, until the copy is complete.
        unsafe { sys::cuMemcpyPeerAsync(to, self.context, from, context, bytes, self.stream) }.result().map_err(failed)
    }

    /// Queues a graph.
    pub(crate) fn launch(&self, graph: &Graph) -> Result<(), StageError> {
        self.enter()?;
        // SAFETY: the graph was instantiated for this context.
        unsafe { result::graph::launch(graph.0, self.stream) }.map_err(failed)
    }

    /// Queues a mark.
    pub(crate) fn set(&self, mark: &Mark) -> Result<(), StageError> {
        self.enter()?;
        // SAFETY: the event belongs to this context.
        unsafe { result::event::record(mark.0, self.stream) }.map_err(failed)
    }

    /// Queues a copy from buffer `from`, from byte `offset` on, to `to`, which is pinned. The caller must [`settle`](Self::settle)
    /// before it uses `to`.
    pub(crate) fn queue_read(&self, from: &Buffer, offset: usize, to: &mut [u32]) -> Result<(), StageError> {
        let address = from.part(offset, to.len())?;
        self.enter()?;
        // SAFETY: the words are within the buffer; `to` is pinned, and stays untouched until the caller has settled.
        unsafe { result::memcpy_dtoh_async(to, address, self.stream) }.map_err(failed)
    }

    /// Queues a copy of `from`, which is pinned, to buffer `to` from byte `offset` on. The caller must [`settle`](Self::settle)
    /// before it changes `from`.
    pub(crate) fn queue_write(&self, from: &[u32], to: &Buffer, offset: usize) -> Result<(), StageError> {
        let address = to.part(offset, from.len())?;
        self.enter()?;
        // SAFETY: the words are within the buffer; `from` is pinned, and stays unchanged until the caller has settled.
        unsafe { result::memcpy_htod_async(address, from, self.stream) }.map_err(failed)
    }

    /// Creates a mark that is not queued yet.
    pub(crate) fn mark(&self) -> Result<Mark, StageError> {
        self.enter()?;
        result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING).map(Mark).map_err(failed)
    }

    /// Waits until everything queued before a mark is complete.
    pub(crate) fn wait(&self, mark: &Mark) -> Result<(), StageError> {
        self.enter()?;
        // SAFETY: the event belongs to this context.
        unsafe { result::event::synchronize(mark.0) }.map_err(failed)
    }
}

impl Drop for Graphs {
    fn drop(&mut self) {
        // SAFETY: the stream is ours; modules live as long as the context. Synchronise first: a queued step may use memory that is
        // freed after this.
        let _ = self.enter().map(|()| unsafe {
            let _ = result::stream::synchronize(self.stream);
            result::stream::destroy(self.stream)
        });
    }
}
