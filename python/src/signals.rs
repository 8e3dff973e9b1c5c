//! Ctrl-C during a pass.
//!
//! Kernels poll the transport between tiles, at most every 0.2 ms. [`Interruptible`] is a transport
//! around the ring's that fails once Python has a signal to handle, so that the pass ends on all
//! ranks and the plan is dead. Python handles signals on its main thread only:
//!
//! ```text
//! one rank, or MPI     the calling thread computes, and checks for signals in `progress`
//! several ranks here   the calling thread waits for theirs, and checks meanwhile
//! ```

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, ThreadId},
    time::{Duration, Instant},
};

use annulus::{Error, Result};
use annulus_core::{Control, Host, Transport};
use pyo3::prelude::*;

use crate::Raises;

/// Time between two checks for signals. A person does not notice it, and taking the GIL as rarely
/// costs nothing that can be measured.
const EVERY: Duration = Duration::from_millis(50);

/// State of signals, shared by a call and its transports.
#[derive(Debug, Default)]
pub(crate) struct Signals {
    interrupted: AtomicBool,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// The thread that called, while a call runs.
    caller: Option<ThreadId>,
    last_check: Option<Instant>,
    /// The exception of a signal handler, or of a mask or bias function.
    raised: Option<PyErr>,
}

impl Signals {
    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps an exception that ends the pass.
    pub(crate) fn keep(&self, error: PyErr) {
        self.state().raised.get_or_insert(error);
        self.interrupted.store(true, Ordering::Release);
    }

    /// Ends the pass under way, without an exception of its own.
    pub(crate) fn interrupt(&self) {
        self.interrupted.store(true, Ordering::Release);
    }

    /// Fails if the pass is to end. On the calling thread, checks for signals first.
    fn poll(&self) -> Result<()> {
        if !self.interrupted.load(Ordering::Acquire) {
            self.check();
        }
        if self.interrupted.load(Ordering::Acquire) {
            return Err(Error::Device { what: "the pass was interrupted by an exception".into() });
        }
        Ok(())
    }

    /// Lets Python handle signals, if this is the calling thread and the last check is long ago.
    fn check(&self) {
        {
            let mut state = self.state();
            let now = Instant::now();
            let due = state.last_check.is_none_or(|last| now.duration_since(last) >= EVERY);
            if state.caller != Some(thread::current().id()) || !due {
                return;
            }
            state.last_check = Some(now);
        }
        if let Err(error) = Python::attach(|py| py.check_signals()) {
            self.keep(error);
        }
    }

    /// Runs `work` without the GIL, on this thread or, with `elsewhere`, on another one while this
    /// thread checks for signals.
    ///
    /// # Errors
    /// The exception of a signal handler or of a function of the caller's, else the error of
    /// `work`.
    pub(crate) fn run<T: Send>(
        &self,
        py: Python<'_>,
        elsewhere: bool,
        work: impl FnOnce() -> Result<T> + Send,
    ) -> Raises<T> {
        {
            let mut state = self.state();
            *state = State { caller: Some(thread::current().id()), ..State::default() };
            state.last_check = Some(Instant::now());
        }
        self.interrupted.store(false, Ordering::Release);
        let result = py.detach(|| if elsewhere { self.watch(work) } else { work() });
        let mut state = self.state();
        state.caller = None;
        match (result, state.raised.take()) {
            (Ok(value), None) => Ok(value),
            (_, Some(raised)) => Err(raised.into()),
            (Err(error), None) => Err(error.into()),
        }
    }

    fn watch<T: Send>(&self, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        thread::scope(|scope| {
            let caller = thread::current();
            let pass =
                thread::Builder::new().name("annulus pass".into()).spawn_scoped(scope, move || {
                    let result = work();
                    caller.unpark();
                    result
                });
            let pass = pass.map_err(|error| Error::Device {
                what: format!("the thread of a pass did not start: {error}"),
            })?;
            while !pass.is_finished() {
                thread::park_timeout(EVERY);
                self.check();
            }
            pass.join().unwrap_or_else(|_| Err(Error::internal("the thread of a pass panicked")))
        })
    }
}

/// A transport that fails once the pass is to end.
pub(crate) struct Interruptible<T> {
    inner: T,
    signals: Arc<Signals>,
}

impl<T> Interruptible<T> {
    /// Wraps a transport.
    pub(crate) fn new(inner: T, signals: Arc<Signals>) -> Self {
        Self { inner, signals }
    }
}

impl<T: Transport<Host>> Control for Interruptible<T> {
    annulus::comm::forward_control! {
        rank ranks start_all_gather try_all_gather stragglers abort heartbeat placement last_heard
        last_work
    }
}

impl<T: Transport<Host>> Transport<Host> for Interruptible<T> {
    annulus::comm::forward_transport! {
        post take pending bytes_sent posts_ahead runs_groups_in_order
    }

    fn progress(&mut self, timeout: Duration) -> Result<()> {
        self.signals.poll()?;
        self.inner.progress(timeout)
    }
}
