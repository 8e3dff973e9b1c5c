//! State that all devices of one context share: streams that may have work, resources to free
//! after it, and what other modules keep for a context ([`ContextState::shared`]).
//!
//! Nothing of CUDA's is freed while work may hang, because the driver waits for all work before it
//! frees memory, without a deadline. What is dropped is kept until the streams of the context are
//! idle, and leaked after a failure.

use std::{
    any::{Any, TypeId},
    collections::BTreeMap,
    ffi::c_void,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use annulus_core::Process;
use cudarc::driver::sys::{CUcontext, CUdeviceptr, CUevent, CUmodule, CUstream};

use crate::symbols::{NO_TIMING, Status, Symbols};

/// Interval between queries of an event: a trade-off between latency and load on the host.
pub(crate) const POLL: Duration = Duration::from_micros(50);

/// Time for which a wait for an event queries it without sleeping. A sleep of [`POLL`] takes about
/// twice as long with Linux's timer slack, a tenth of the time of a token over a long cache.
pub(crate) const SPIN: Duration = Duration::from_millis(1);

/// Longest wait for work that may use memory, before the context is released. Longer than most
/// passes; what longer ones use is leaked with the context. No rank is silent meanwhile: its plan
/// has been dropped.
const DRAIN: Duration = Duration::from_secs(120);

/// Longest wait of an allocation for work that may use memory which was dropped. An allocation
/// cannot tick, and other ranks may wait for this one: a quarter of the default deadline of a ring,
/// so that they get the error of this rank instead of finding it silent.
const ALLOCATION_DRAIN: Duration = Duration::from_secs(30);

/// Driver functions, and the context that they work in.
#[derive(Clone, Copy)]
pub(crate) struct Driver {
    pub(crate) symbols: Symbols,
    pub(crate) context: CUcontext,
    /// Process of the context. In a forked child the driver refuses to make it current, so no call
    /// reaches it, and nothing is freed.
    pub(crate) process: Process,
}

impl Driver {
    /// Calls the driver with the context current.
    pub(crate) fn call_unchecked(&self, call: impl FnOnce(&Symbols) -> Status) -> Status {
        // SAFETY: the context is alive as long as the devices that have this.
        match unsafe { (self.symbols.context_set)(self.context) } {
            Status::SUCCESS => call(&self.symbols),
            error => error,
        }
    }
}

/// A stream that is not destroyed as long as this exists.
pub(crate) trait OpenStream: Send + Sync {
    /// Handle for driver calls.
    fn handle(&self) -> CUstream;
}

/// State of one context. Several ranks of a process may share it, each with a [`Device`].
#[derive(Default)]
pub(crate) struct ContextState {
    streams: Mutex<Vec<Weak<dyn OpenStream>>>,
    retired: Mutex<Vec<Retired>>,
    /// True if work did not end within a deadline.
    hangs: AtomicBool,
    /// One value of each type: see [`ContextState::shared`].
    shared: Mutex<BTreeMap<TypeId, Arc<dyn Any + Send + Sync>>>,
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

    /// Returns the value of type `T` of this context, which is created on first use. It lives as
    /// long as the context's state, so it must not own a device.
    pub(crate) fn shared<T: Default + Send + Sync + 'static>(&self) -> Arc<T> {
        let mut shared = lock(&self.shared);
        let found = shared.get(&TypeId::of::<T>()).cloned().and_then(|value| value.downcast().ok());
        found.unwrap_or_else(|| {
            let value = Arc::<T>::default();
            shared.insert(TypeId::of::<T>(), value.clone());
            value
        })
    }

    pub(crate) fn add_stream(&self, stream: Weak<dyn OpenStream>) {
        let mut streams = lock(&self.streams);
        streams.retain(|stream| stream.strong_count() > 0);
        streams.push(stream);
    }

    /// Records that work may never end. Then nothing waits for it, and what it may use is leaked.
    pub(crate) fn suspect_hang(&self) {
        self.hangs.store(true, Ordering::Relaxed);
    }

    /// Frees `what` now if the context is idle, else later. Leaks it in a forked child.
    pub(crate) fn retire(&self, driver: &Driver, what: Retired) {
        if !driver.process.is_current() {
            return;
        }
        lock(&self.retired).push(what);
        self.collect(driver, Instant::now());
    }

    /// Frees what is retired, if the work of all streams ends within [`DRAIN`], or if it has ended
    /// after a failure (`failed`) and if work hangs. False if it does not.
    pub(crate) fn drain(&self, driver: &Driver, failed: bool) -> bool {
        self.drain_within(driver, failed, DRAIN)
    }

    /// As [`ContextState::drain`], for an allocation, within [`ALLOCATION_DRAIN`]. Does not wait,
    /// and returns false, if nothing is retired: the wait would free nothing.
    pub(crate) fn make_room(&self, driver: &Driver, failed: bool) -> bool {
        let is_empty = lock(&self.retired).is_empty();
        !is_empty && self.drain_within(driver, failed, ALLOCATION_DRAIN)
    }

    fn drain_within(&self, driver: &Driver, failed: bool, bound: Duration) -> bool {
        let hopeless = failed || self.hangs.load(Ordering::Relaxed);
        self.collect(driver, Instant::now() + if hopeless { Duration::ZERO } else { bound })
    }

    /// Frees what is retired, if the work of all streams ends by `until`. False if it does not.
    fn collect(&self, driver: &Driver, until: Instant) -> bool {
        // taken before the events are recorded, so that they follow all work that uses it
        let retired = std::mem::take(&mut *lock(&self.retired));
        let streams: Vec<_> = lock(&self.streams).iter().filter_map(Weak::upgrade).collect();
        let left = retired.iter().filter_map(|what| match what {
            Retired::Stream(stream) => Some(*stream),
            _ => None,
        });
        let mut all = streams.iter().map(|stream| stream.handle()).chain(left);
        if !all.all(|stream| driver.ends(stream, until)) {
            lock(&self.retired).extend(retired);
            return false;
        }
        self.hangs.store(false, Ordering::Relaxed);
        for what in retired {
            // SAFETY: created by this driver, freed once, after the work that uses it.
            driver.call_unchecked(|symbols| unsafe {
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
}

impl Driver {
    /// Polls until the work queued on a stream has ended. False if it has not by `until`.
    fn ends(&self, stream: CUstream, until: Instant) -> bool {
        let mut event: CUevent = std::ptr::null_mut();
        // SAFETY: `event` is a local of the right type, and the stream is alive.
        let recorded = self.call_unchecked(|symbols| unsafe {
            match (symbols.event_create)(&raw mut event, NO_TIMING) {
                Status::SUCCESS => (symbols.event_record)(event, stream),
                error => error,
            }
        });
        let mut ended = recorded != Status::SUCCESS;
        while !ended {
            // SAFETY: the event was recorded. Any error but "not ready" is a failure of the
            // context, whose work has ended.
            let state = self.call_unchecked(|symbols| unsafe { (symbols.event_query)(event) });
            ended = state != Status::NOT_READY;
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

/// Locks a mutex whose value is whole even if a thread has panicked.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
