//! State that all [`Device`]s of one context share: streams that may have work, and loaded modules.

use std::{
    collections::BTreeMap,
    ffi::c_void,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use annulus_core::Result;
use cudarc::driver::sys::{CUcontext, CUdeviceptr, CUevent, CUmodule, CUresult, CUstream};

use crate::{
    Device, Kernel, Module,
    device::Parts,
    module::ModuleParts,
    range_copy::RangeCopyKernel,
    stream::{NO_TIMING, POLL, StreamParts},
};

/// Longest wait for work that may use memory, before the memory is needed or the context released:
/// as for a download, far longer than any pass.
const DRAIN: Duration = Duration::from_secs(120);

/// Digest of an image.
pub(crate) type ImageKey = [u64; 2];

/// State of one context. Several ranks of a process may share it, each with a [`Device`].
#[derive(Default)]
pub(crate) struct ContextState {
    streams: Mutex<Vec<Weak<StreamParts>>>,
    retired: Mutex<Vec<Retired>>,
    /// True if work did not end within a deadline.
    hangs: AtomicBool,
    modules: Mutex<BTreeMap<ImageKey, Weak<ModuleParts>>>,
    range_copy: Mutex<Option<RangeCopyKernel>>,
}

/// Resource that its last owner has dropped. It is freed once the work of the context has ended,
/// because the driver would wait for that work: for ever, if it hangs.
pub(crate) enum Retired {
    Memory(CUdeviceptr),
    Pinned(*mut c_void),
    Module(CUmodule),
    Stream(CUstream),
}

// SAFETY: handles and addresses that any thread may use; the owner is gone.
unsafe impl Send for Retired {}

impl ContextState {
    /// Returns the state of a context, which lives as long as one of its devices.
    pub(crate) fn of(context: CUcontext) -> Arc<Self> {
        static CONTEXTS: Mutex<BTreeMap<usize, Weak<ContextState>>> = Mutex::new(BTreeMap::new());
        let mut contexts = lock(&CONTEXTS);
        if let Some(state) = contexts.get(&(context as usize)).and_then(Weak::upgrade) {
            return state;
        }
        contexts.retain(|_, state| state.strong_count() > 0);
        let state = Arc::<Self>::default();
        contexts.insert(context as usize, Arc::downgrade(&state));
        state
    }

    pub(crate) fn set_range_copy(&self, kernel: RangeCopyKernel) {
        *lock(&self.range_copy) = Some(kernel);
    }

    /// Returns the kernel that copies ranges, and its threads per block.
    pub(crate) fn range_copy(&self) -> Option<(Kernel, u32)> {
        lock(&self.range_copy).as_ref().and_then(RangeCopyKernel::upgrade)
    }

    pub(crate) fn add_stream(&self, stream: &Arc<StreamParts>) {
        let mut streams = lock(&self.streams);
        streams.retain(|stream| stream.strong_count() > 0);
        streams.push(Arc::downgrade(stream));
    }

    /// Returns the module of this image, loaded by `load` on first use.
    pub(crate) fn module(
        &self,
        key: ImageKey,
        load: impl FnOnce() -> Result<Module>,
    ) -> Result<Module> {
        let mut modules = lock(&self.modules);
        if let Some(parts) = modules.get(&key).and_then(Weak::upgrade) {
            return Ok(Module(parts));
        }
        let module = load()?;
        modules.retain(|_, module| module.strong_count() > 0);
        modules.insert(key, Arc::downgrade(&module.0));
        Ok(module)
    }
}

impl Device {
    /// Records that work of the context may never end, such as that of a communicator that could
    /// not be aborted. Then nothing waits for it, and what it may use is leaked.
    pub fn suspect_hang(&self) {
        self.0.state.hangs.store(true, Ordering::Relaxed);
    }
}

impl Parts {
    /// Frees `what` now if the context is idle, else later.
    pub(crate) fn retire(&self, what: Retired) {
        lock(&self.state.retired).push(what);
        self.collect(Instant::now());
    }

    /// As [`Parts::collect`], after a wait of at most [`DRAIN`]; without one after a failure, or if
    /// work hangs.
    pub(crate) fn drain(&self) -> bool {
        let hopeless = self.lock_failure().is_some() || self.state.hangs.load(Ordering::Relaxed);
        self.collect(Instant::now() + if hopeless { Duration::ZERO } else { DRAIN })
    }

    /// Frees what is retired, if the work of all streams ends by `until`. False if it does not.
    fn collect(&self, until: Instant) -> bool {
        let state = &self.state;
        // taken before the events are recorded, so that they follow all work that uses it
        let retired = std::mem::take(&mut *lock(&state.retired));
        let streams: Vec<_> = lock(&state.streams).iter().filter_map(Weak::upgrade).collect();
        let left = retired.iter().filter_map(|what| match what {
            Retired::Stream(stream) => Some(*stream),
            _ => None,
        });
        let mut all = streams.iter().map(|stream| stream.handle).chain(left);
        if !all.all(|stream| self.ends(stream, until)) {
            lock(&state.retired).extend(retired);
            return false;
        }
        state.hangs.store(false, Ordering::Relaxed);
        for what in retired {
            // SAFETY: created by this driver, freed once, after the work that uses it.
            self.call_unchecked(|symbols| unsafe {
                match what {
                    Retired::Memory(address) => (symbols.free)(address),
                    Retired::Pinned(start) => (symbols.free_host)(start),
                    Retired::Module(module) => (symbols.module_unload)(module),
                    Retired::Stream(stream) => (symbols.stream_destroy)(stream),
                }
            });
        }
        true
    }

    /// Polls until the work queued on a stream has ended. False if it has not by `until`.
    fn ends(&self, stream: CUstream, until: Instant) -> bool {
        let mut event: CUevent = std::ptr::null_mut();
        // SAFETY: `event` is a local of the right type, and the stream is alive.
        let recorded = self.call_unchecked(|symbols| unsafe {
            match (symbols.event_create)(&raw mut event, NO_TIMING) {
                CUresult::CUDA_SUCCESS => (symbols.event_record)(event, stream),
                error => error,
            }
        });
        let mut ended = recorded != CUresult::CUDA_SUCCESS;
        while !ended {
            // SAFETY: the event was recorded. Any error but "not ready" is a failure of the
            // context, whose work has ended.
            let state = self.call_unchecked(|symbols| unsafe { (symbols.event_query)(event) });
            ended = state != CUresult::CUDA_ERROR_NOT_READY;
            if !ended && Instant::now() >= until {
                break;
            }
            if !ended {
                std::thread::sleep(POLL);
            }
        }
        if !event.is_null() {
            // SAFETY: created above, destroyed once; the driver does not wait for it.
            self.call_unchecked(|symbols| unsafe { (symbols.event_destroy)(event) });
        }
        ended
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
