//! The state that the calls of a plan and those of a KV cache share: a lock, signals, callbacks.

use std::sync::{
    Arc, Mutex, MutexGuard, TryLockError,
    atomic::{AtomicBool, Ordering},
};

use annulus::{Error, Result};
use annulus_core::Process;
use pyo3::{exceptions::PyRuntimeError, prelude::*};

use crate::{Raises, masks::Callback, signals::Signals};

/// Evaluates `$call` with `$element` bound to an element type.
macro_rules! by_dtype {
    ($dtype:expr, $element:ident => $call:expr) => {
        match $dtype {
            ::annulus::DType::F64 => by_dtype!(@ $element, f64, $call),
            ::annulus::DType::F32 => by_dtype!(@ $element, f32, $call),
            ::annulus::DType::Bf16 => by_dtype!(@ $element, ::annulus::half::bf16, $call),
            ::annulus::DType::F16 => by_dtype!(@ $element, ::annulus::half::f16, $call),
        }
    };
    (@ $element:ident, $type:ty, $call:expr) => {{
        type $element = $type;
        $call
    }};
}
pub(crate) use by_dtype;

/// The engine behind an object of Python's, and the state of its calls.
pub(crate) struct Session<E> {
    /// Name of the object in errors.
    name: &'static str,
    /// Process that made the engine. In a forked child every call is refused, before it takes a
    /// lock that another thread of the parent may have held.
    process: Process,
    /// `None` once closed.
    engine: Mutex<Option<E>>,
    signals: Arc<Signals>,
    callbacks: Vec<Arc<Callback>>,
    /// True if ranks are threads of their own.
    elsewhere: bool,
    /// True once a call has reached the ring, which then tells the other ranks of errors.
    entered: AtomicBool,
}

impl<E: Send> Session<E> {
    /// Makes an engine, whose transports get the signals. `elsewhere`: its ranks are threads of
    /// their own.
    pub(crate) fn new(
        py: Python<'_>,
        name: &'static str,
        callbacks: Vec<Arc<Callback>>,
        elsewhere: bool,
        make: impl FnOnce(&Arc<Signals>) -> Result<E> + Send,
    ) -> Raises<Self> {
        let mut session = Self {
            name,
            process: Process::current(),
            engine: Mutex::default(),
            signals: Arc::default(),
            callbacks,
            elsewhere,
            entered: AtomicBool::new(false),
        };
        let engine = session.run(py, || make(&session.signals))?;
        session.engine = Mutex::new(Some(engine));
        Ok(session)
    }

    pub(crate) const fn signals(&self) -> &Arc<Signals> {
        &self.signals
    }

    /// Begins a call, of which the arguments are yet to be checked.
    pub(crate) fn begin(&self) {
        self.entered.store(false, Ordering::Relaxed);
    }

    /// Runs `work` without the GIL. An exception of a mask or bias function is the cause of the
    /// error that it leads to.
    pub(crate) fn run<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce() -> Result<T> + Send,
    ) -> Raises<T> {
        self.entered.store(true, Ordering::Relaxed);
        self.signals.run(py, self.elsewhere, work).map_err(|error| {
            let error = PyErr::from(error);
            let cause = self.callbacks.iter().find_map(|callback| callback.take_raised());
            if let Some(cause) = cause {
                error.set_cause(py, Some(cause));
            }
            error.into()
        })
    }

    /// Locks the engine, or refuses: a call that waits for another one would wait for the GIL too.
    fn lock(&self) -> Raises<MutexGuard<'_, Option<E>>> {
        self.process.check(self.name)?;
        match self.engine.try_lock() {
            Ok(guard) => Ok(guard),
            Err(TryLockError::WouldBlock) => {
                let what = format!("the {} is in use by another call", self.name);
                Err(PyRuntimeError::new_err(what).into())
            }
            Err(TryLockError::Poisoned(_)) => {
                Err(Error::internal(format!("a call of this {} panicked", self.name)).into())
            }
        }
    }

    /// Calls `body` with the engine, unless it is closed or in use.
    pub(crate) fn with<T>(&self, body: impl FnOnce(&mut E) -> Raises<T>) -> Raises<T> {
        let mut engine = self.lock()?;
        let closed = || PyRuntimeError::new_err(format!("the {} is closed", self.name));
        body(engine.as_mut().ok_or_else(closed)?)
    }

    /// Ends a call whose arguments were refused: `take_part` tells the other ranks, which wait for
    /// it. Does nothing if the call has reached the ring, which has told them.
    pub(crate) fn refuse(
        &self,
        py: Python<'_>,
        [argument, got, want]: [String; 3],
        take_part: impl FnOnce(&mut E, Error) + Send,
    ) -> Raises<()> {
        if self.entered.load(Ordering::Relaxed) || !self.process.is_current() {
            return Ok(());
        }
        self.with(|engine| {
            self.run(py, || {
                take_part(engine, Error::InvalidArgument { argument, got, want });
                Ok(())
            })
        })
    }

    /// Drops the engine. Does nothing in a forked child, whose parent has it.
    pub(crate) fn close(&self, py: Python<'_>) -> Raises<()> {
        if !self.process.is_current() {
            return Ok(());
        }
        let engine = self.lock()?.take();
        py.detach(|| drop(engine));
        Ok(())
    }
}
