//! State of the emulated devices and the current context of each thread.

use std::{
    cell::Cell,
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    },
};

use annulus_device_cuda::Status;
use annulus_device_cuda::cudarc::driver::sys::CUstream;

use super::{
    memory::Memory,
    work::{Queue, Step, Work},
};

/// Number of devices. Each has its own memory and its own failure, so that tests are independent.
pub const DEVICES: usize = 4096;

/// State of one device.
#[derive(Default)]
pub(super) struct Context {
    pub(super) memory: Mutex<Memory>,
    pub(super) queues: Mutex<Vec<Weak<Queue>>>,
    failed: AtomicBool,
    pub(super) mistake: AtomicU32,
    /// Seed of the order in which blocks start, threads run and copies complete.
    pub(super) seed: AtomicU64,
    /// Thread blocks launched so far, by kernel.
    pub(super) blocks: Mutex<HashMap<String, u64>>,
    /// Calls that copy from device to device memory.
    pub(super) device_copies: AtomicU64,
    /// Bytes copied from host to device memory.
    pub(super) bytes_to_device: AtomicU64,
    /// Bytes copied from device to host memory.
    pub(super) bytes_to_host: AtomicU64,
    /// Launches in which every thread waited for another one.
    pub(super) deadlocks: AtomicU64,
    default_stream: OnceLock<&'static EmulatedStream>,
}

impl Context {
    fn new() -> Self {
        Self { seed: AtomicU64::new(DEFAULT_SEED), ..Self::default() }
    }

    /// Marks the device as failed and drops all queued work, because the memory it would access may
    /// be freed from now on.
    pub(super) fn fail(&self) {
        self.failed.store(true, Ordering::Relaxed);
        self.queues().iter().for_each(|queue| queue.discard());
    }

    /// Returns the queues of all live streams.
    pub(super) fn queues(&self) -> Vec<Arc<Queue>> {
        lock(&self.queues).iter().filter_map(Weak::upgrade).collect()
    }
}

/// Object behind a stream's handle.
pub(super) struct EmulatedStream {
    pub(super) context: &'static Context,
    pub(super) queue: Arc<Queue>,
}

impl EmulatedStream {
    pub(super) fn new(context: &'static Context) -> Self {
        let queue = Arc::new(Queue::default());
        let mut queues = lock(&context.queues);
        queues.retain(|queue| queue.strong_count() > 0);
        queues.push(Arc::downgrade(&queue));
        Self { context, queue }
    }

    /// Returns the stream of a handle. Handles 0 to 2 are the default stream of `context`, which
    /// here is ordered with the others by events only.
    ///
    /// # Safety
    /// The handle is one of these, or of a stream that is not destroyed during `'a`.
    pub(super) unsafe fn of<'a>(context: &'static Context, handle: CUstream) -> &'a Self {
        if handle.addr() <= 2 {
            // leaked, as its context
            return context.default_stream.get_or_init(|| Box::leak(Box::new(Self::new(context))));
        }
        // SAFETY: as the caller guarantees
        unsafe { &*handle.cast::<Self>() }
    }
}

thread_local! {
    /// Context of the calls of a thread, as set by `cuCtxSetCurrent`.
    pub(super) static CURRENT: Cell<Option<&'static Context>> = const { Cell::new(None) };
}

fn contexts() -> &'static [OnceLock<&'static Context>] {
    static CONTEXTS: OnceLock<Vec<OnceLock<&'static Context>>> = OnceLock::new();
    CONTEXTS.get_or_init(|| (0..DEVICES).map(|_| OnceLock::new()).collect())
}

/// Returns the context of a device, which is created on its first use.
pub(super) fn context_of(ordinal: usize) -> Option<&'static Context> {
    // leaked: a device exists until the process ends, like a GPU
    Some(*contexts().get(ordinal)?.get_or_init(|| Box::leak(Box::new(Context::new()))))
}

/// Seed of a device for which [`set_seed`] was not called.
pub const DEFAULT_SEED: u64 = 1;

/// Sets the seed of device `ordinal`, from which the order follows in which the blocks of its later
/// launches start, their threads run and their copies complete.
pub fn set_seed(ordinal: usize, seed: u64) {
    if let Some(context) = context_of(ordinal) {
        context.seed.store(seed, Ordering::Relaxed);
    }
}

/// Added to a planted mistake: asynchronous copies complete when they are issued, rather than as
/// late as possible. Reveals a missing wait for what else a kernel reads.
pub const EARLY_COPIES: u32 = 1 << 16;

/// Added to a planted mistake: shuffles are exchanges of whole waves. Reveals a lane that is missing
/// in a shuffle, also where a GPU would not need it. Mirrored in `primitives_host.h`.
pub const WHOLE_WAVES: u32 = 1 << 17;

/// Plants a mistake in later launches on device `ordinal`, by its number: `planted(number)` of
/// `primitives_host.h` is true, which tests put into the kernels' text. 0: none.
pub fn plant(ordinal: usize, mistake: u32) {
    if let Some(context) = context_of(ordinal) {
        context.mistake.store(mistake, Ordering::Relaxed);
    }
}

/// Returns the number of thread blocks of a kernel that were launched on device `ordinal`.
pub fn blocks(ordinal: usize, kernel: &str) -> u64 {
    context_of(ordinal).map_or(0, |context| lock(&context.blocks).get(kernel).copied().unwrap_or(0))
}

/// Forgets the blocks and copies of device `ordinal` so far, before another user counts its own.
pub fn clear_counts(ordinal: usize) {
    if let Some(context) = context_of(ordinal) {
        lock(&context.blocks).clear();
        context.device_copies.store(0, Ordering::Relaxed);
        context.bytes_to_device.store(0, Ordering::Relaxed);
        context.bytes_to_host.store(0, Ordering::Relaxed);
    }
}

/// Returns the bytes that were copied from the host to device `ordinal`.
pub fn bytes_to_device(ordinal: usize) -> u64 {
    context_of(ordinal).map_or(0, |context| context.bytes_to_device.load(Ordering::Relaxed))
}

/// Returns the bytes that were copied from device `ordinal` to the host.
pub fn bytes_to_host(ordinal: usize) -> u64 {
    context_of(ordinal).map_or(0, |context| context.bytes_to_host.load(Ordering::Relaxed))
}

/// Returns the number of items of work of device `ordinal` that are queued and have not run.
pub fn queued(ordinal: usize) -> usize {
    context_of(ordinal).map_or(0, |context| context.queues().iter().map(|queue| queue.len()).sum())
}

/// Returns the number of calls that copied from device to device memory on device `ordinal`.
pub fn device_copies(ordinal: usize) -> u64 {
    context_of(ordinal).map_or(0, |context| context.device_copies.load(Ordering::Relaxed))
}

/// Returns the number of launches on device `ordinal` that failed because every thread of the
/// resident blocks waited for another one, with nothing under way that could end a wait.
pub fn deadlocks(ordinal: usize) -> u64 {
    context_of(ordinal).map_or(0, |context| context.deadlocks.load(Ordering::Relaxed))
}

/// Returns the number of live allocations of device `ordinal`.
pub fn allocations(ordinal: usize) -> usize {
    context_of(ordinal).map_or(0, |context| lock(&context.memory).len())
}

/// Returns the peak of allocated bytes of device `ordinal`, pinned host memory included.
pub fn most_bytes(ordinal: usize) -> usize {
    context_of(ordinal).map_or(0, |context| lock(&context.memory).most_bytes())
}

/// Calls with the current context, unless it has failed.
pub(super) fn with_context(call: impl FnOnce(&'static Context) -> Status) -> Status {
    match CURRENT.get() {
        None => Status::INVALID_CONTEXT,
        Some(context) if context.failed.load(Ordering::Relaxed) => Status::LAUNCH_FAILED,
        Some(context) => call(context),
    }
}

/// Queues work on a stream; `work` returns true on success.
pub(super) fn push(
    context: &'static Context,
    stream: CUstream,
    work: impl FnOnce() -> bool + Send + 'static,
) -> Status {
    // SAFETY: a valid handle.
    let stream = unsafe { EmulatedStream::of(context, stream) };
    stream.queue.push(Work::Run(Box::new(work)));
    Status::SUCCESS
}

/// Runs all work of a stream.
pub(super) fn drain(context: &'static Context, stream: CUstream) -> Status {
    // SAFETY: a valid handle.
    let stream = unsafe { EmulatedStream::of(context, stream) };
    if stream.queue.drain() == Step::Failed {
        context.fail();
        return Status::LAUNCH_FAILED;
    }
    Status::SUCCESS
}

/// Queues an operation that is attempted until it completes.
///
/// # Safety
/// `stream` is a handle that `cuStreamCreate` returned and that is not destroyed.
#[cfg(target_os = "linux")]
pub(super) unsafe fn push_until(
    stream: CUstream,
    attempt: impl FnMut() -> Option<bool> + Send + 'static,
) {
    // SAFETY: as required of the caller.
    let stream = unsafe { &*stream.cast::<EmulatedStream>() };
    stream.queue.push(Work::Attempt(Box::new(attempt)));
}

/// True if the bytes are memory of this thread's current device.
#[cfg(target_os = "linux")]
pub(super) fn is_device_memory(address: u64, bytes: usize) -> bool {
    CURRENT.get().is_some_and(|context| lock(&context.memory).holds(address, bytes))
}

/// Locks, also after a panic of another thread, whose test has failed already.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
