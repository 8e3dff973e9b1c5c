//! Where and how the ranks run: backend, threads, deadlines, hooks.

use std::{env, ffi::OsStr, fmt, num::NonZero, sync::Arc, thread, time::Duration};

use annulus_comm::{
    Deadline, Silence, deadline,
    ring::{StepEvent, StepHook},
};
use annulus_core::{Error, Result, Space, Transport};

use crate::backend::AnyBackend;

/// Backend, threads, deadlines and hooks of the ranks of this process. No result depends on it
/// beyond the rounding of another backend.
///
/// # Examples
/// ```
/// use annulus::{
///     Attention, Dims, Division, LocalRing, Runtime,
///     backend::{AnyBackend, BackendName},
/// };
/// use std::time::Duration;
///
/// let backend = AnyBackend::open(BackendName::Cpu, None, 2)?; // two threads each
/// let runtime = Runtime::new().backend(backend).deadline(Duration::from_secs(60));
/// let attention = Attention::new().causal(true);
/// let ring = LocalRing::new((&attention, &Division::new(), &runtime), Dims::new(1, 64, 2, 8), 3)?;
/// assert_eq!(ring.plans().count(), 3);
/// # Ok::<(), annulus::Error>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct Runtime {
    backend: Option<AnyBackend>,
    threads: Option<usize>,
    deadline: Option<Duration>,
    arrival_deadline: Option<Duration>,
    silence_hook: Option<Hook<Silence>>,
    step_hook: Option<Hook<StepEvent>>,
}

/// A function of the caller's that takes an event of type `E`.
struct Hook<E>(Arc<dyn Fn(E) + Send + Sync>);

impl<E> Clone for Hook<E> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<E> fmt::Debug for Hook<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a function")
    }
}

/// Longest deadline in seconds, as of the command's `--deadline`: 11 days.
const LONGEST: f64 = 1e6;

impl Runtime {
    /// Name of the variable that replaces the deadline of plans, and the arrival deadline of those
    /// that have one: seconds, or 0 for none, for example while a debugger stops ranks. It is read
    /// when a plan is made, and must be the same on all ranks.
    pub const DEADLINE_VARIABLE: &str = "ANNULUS_DEADLINE";

    /// Starts with CPU ranks and no hooks.
    pub fn new() -> Self {
        Self::default()
    }

    /// Backend of the ranks, for constructors that take none. Default: the CPU.
    #[must_use]
    pub fn backend(mut self, backend: impl Into<Option<AnyBackend>>) -> Self {
        self.backend = backend.into();
        self
    }

    /// Threads of each CPU rank, unless [`Runtime::backend`] is set. Default: the cores of this
    /// machine divided by the ranks of a [`LocalRing`](crate::LocalRing) or a
    /// [`LocalCache`](crate::LocalCache); one for a rank over another transport.
    ///
    /// Refused for a backend that was made with its own threads: [`AnyBackend::open`],
    /// [`crate::backend::Cpu::new`].
    #[must_use]
    pub fn threads(mut self, threads: impl Into<Option<usize>>) -> Self {
        self.threads = threads.into();
        self
    }

    /// Longest silence of a rank within a call before the call fails, at least 1 s. Default: 120 s.
    /// [`Runtime::DEADLINE_VARIABLE`] replaces it.
    #[must_use]
    pub fn deadline(mut self, deadline: impl Into<Option<Duration>>) -> Self {
        self.deadline = deadline.into();
        self
    }

    /// Longest wait at the entry of a collective call (a plan, an update, a pass) for ranks that
    /// have not made it, at least 1 s. Default: no limit, because a rank whose program is busy
    /// elsewhere has not failed; in a [`LocalRing`](crate::LocalRing), whose ranks begin together,
    /// the deadline.
    ///
    /// A pass or an update that ends at this deadline returns [`Error::ArrivalTimeout`]. It has
    /// changed nothing, and this rank makes the same call again. Ranks that enter meanwhile count
    /// this one as entered, so it has until their [`Runtime::deadline`] to do so. A plan that
    /// ends at it is not made; the other ranks get [`Error::PeerLost`].
    #[must_use]
    pub fn arrival_deadline(mut self, deadline: impl Into<Option<Duration>>) -> Self {
        self.arrival_deadline = deadline.into();
        self
    }

    /// Calls `hook`, on a rank that waits, when a peer has been silent for a quarter of the
    /// deadline: once per silence. At the entry of a call it is called in every quarter of the
    /// deadline, with the lowest rank that has not made the call. Over MPI a rank reports only the
    /// ranks that it watches, so of many ranks some report a late one and others none.
    ///
    /// It is called on the thread that waits. Default: no hook.
    #[must_use]
    pub fn on_silence(mut self, hook: impl Fn(Silence) + Send + Sync + 'static) -> Self {
        self.silence_hook = Some(Hook(Arc::new(hook)));
        self
    }

    /// Calls `hook` with every activity of a pass: tiles of a block, messages, waits
    /// ([`StepEvent`]).
    ///
    /// It is called on the thread of the rank, by several ranks of a
    /// [`LocalRing`](crate::LocalRing) at once, between tiles and messages, so a slow hook delays
    /// the ring. A hook that panics ends the plan. Default: no hook, and then no clock is read.
    ///
    /// # Examples
    /// ```
    /// use annulus::{Attention, Dims, Division, LocalRing, Runtime, Tensors, comm::ring::Activity};
    /// use ndarray::Array4;
    /// use std::sync::{Arc, atomic::{AtomicU64, Ordering}};
    ///
    /// let sent = Arc::new(AtomicU64::new(0));
    /// let sum = Arc::clone(&sent);
    /// let runtime = Runtime::new().on_step(move |event| {
    ///     if event.activity == Activity::Send {
    ///         sum.fetch_add(event.bytes, Ordering::Relaxed);
    ///     }
    /// });
    /// let x = Array4::<f32>::ones((1, 8, 2, 4));
    /// let setup = (Attention::new(), Division::new(), runtime);
    /// let mut ring = LocalRing::new(setup, Dims::new(1, 8, 2, 4), 2)?;
    /// let forward = ring.forward(&Tensors::new(x.view(), x.view(), x.view()))?;
    /// let predicted = forward.reports.iter().map(|report| report.bytes_predicted).sum();
    /// assert_eq!(sent.load(Ordering::Relaxed), predicted);
    /// # Ok::<(), annulus::Error>(())
    /// ```
    #[must_use]
    pub fn on_step(mut self, hook: impl Fn(StepEvent) + Send + Sync + 'static) -> Self {
        self.step_hook = Some(Hook(Arc::new(hook)));
        self
    }

    /// Returns the deadline in force: the given one, or 120 s.
    ///
    /// Also 120 s where the given one is below 1 s, which [`crate::Setup::spec`] refuses.
    pub fn effective_deadline(&self) -> Duration {
        self.deadline.filter(|&deadline| deadline >= deadline::LEAST).unwrap_or(deadline::DEFAULT)
    }

    /// Checks the values.
    pub(crate) fn check(&self) -> Result<()> {
        let deadlines = [("deadline", self.deadline), ("arrival_deadline", self.arrival_deadline)];
        for (name, deadline) in deadlines {
            if let Some(deadline) = deadline.filter(|&deadline| deadline < deadline::LEAST) {
                let want = format!("at least {:?}", deadline::LEAST);
                return Err(Error::invalid(name, format!("{deadline:?}"), want));
            }
        }
        Ok(())
    }

    /// Bounds every wait of `transport` by the deadlines in force, with the hook for silent peers.
    /// `variable` is the deadline that the environment sets.
    pub(crate) fn bounded<T: Transport<S>, S: Space>(
        &self,
        transport: T,
        variable: Option<Duration>,
    ) -> Result<Deadline<T, S>> {
        let bounded = match variable {
            Some(Duration::ZERO) => Deadline::new(transport, self.effective_deadline())?.endless(),
            variable => {
                let deadline = variable.unwrap_or_else(|| self.effective_deadline());
                let arrival = self.arrival_deadline.map(|own| variable.unwrap_or(own));
                Deadline::new(transport, deadline)?.with_arrival_deadline(arrival)
            }
        };
        Ok(match self.silence_hook.clone() {
            Some(Hook(hook)) => bounded.with_warning(move |silence| hook(silence)),
            None => bounded,
        })
    }

    /// Returns the arrival deadline of ranks that are threads of this process: they begin a call
    /// together, so a rank that does not enter it within the deadline has failed.
    pub(crate) fn of_threads(&self) -> Self {
        let arrival = self.arrival_deadline.unwrap_or_else(|| self.effective_deadline());
        self.clone().arrival_deadline(arrival)
    }

    /// Returns the hook for the activities of a pass.
    pub(crate) fn step_hook(&self) -> Option<StepHook> {
        self.step_hook.clone().map(|Hook(hook)| hook)
    }

    /// Returns the backend, opened, for one of `ranks` ranks in this process.
    pub(crate) fn backend_of(&self, ranks: Option<usize>) -> Result<AnyBackend> {
        if let Some(backend) = &self.backend {
            self.check_threads()?;
            return Ok(backend.clone());
        }
        let cores = thread::available_parallelism().map_or(1, NonZero::get);
        let default = ranks.map_or(1, |ranks| cores.checked_div(ranks).unwrap_or(1).max(1));
        match self.threads.unwrap_or(default) {
            0 => Err(Error::invalid("threads", 0, "at least 1")),
            threads => AnyBackend::open(crate::backend::BackendName::Cpu, None, threads),
        }
    }

    /// Refuses [`Runtime::threads`] for a backend that has its own.
    fn check_threads(&self) -> Result<()> {
        match self.threads {
            Some(threads) => Err(Error::invalid(
                "threads",
                threads,
                "no threads here: the plan's backend was made with its own",
            )),
            None => Ok(()),
        }
    }

    /// Refuses a backend and threads, for a constructor that takes a backend.
    pub(crate) fn check_own_backend(&self) -> Result<()> {
        self.check_threads()?;
        match &self.backend {
            Some(backend) => {
                let want = "none: this rank is made on another backend";
                Err(Error::invalid("backend", backend.name(), want))
            }
            None => Ok(()),
        }
    }

    /// Refuses hooks that a KV cache does not call.
    pub(crate) fn check_cache(&self) -> Result<()> {
        match self.step_hook {
            Some(_) => Err(Error::unsupported("on_step", "the KV cache")),
            None => self.check(),
        }
    }

    /// Returns the deadline that [`Runtime::DEADLINE_VARIABLE`] sets, 0 for none; `None` if it is
    /// not set.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if its value is no number of seconds from 1 to 10⁶, and not 0.
    pub fn deadline_variable() -> Result<Option<Duration>> {
        env::var_os(Self::DEADLINE_VARIABLE).map(|value| parse(&value)).transpose()
    }
}

fn parse(value: &OsStr) -> Result<Duration> {
    let least = deadline::LEAST.as_secs_f64();
    let seconds = value.to_str().and_then(|text| text.trim().parse::<f64>().ok());
    match seconds {
        Some(seconds) if seconds == 0.0 || (least..=LONGEST).contains(&seconds) => {
            Ok(Duration::from_secs_f64(seconds))
        }
        _ => {
            let want = format!("0 for no deadline, or {least} to {LONGEST} seconds");
            Err(Error::invalid(Runtime::DEADLINE_VARIABLE, value.to_string_lossy(), want))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_are_read_and_anything_else_is_an_error() {
        let read = |text: &str| parse(OsStr::new(text));
        assert_eq!(read("0"), Ok(Duration::ZERO));
        assert_eq!(read(" 1.5 "), Ok(Duration::from_millis(1500)));
        assert_eq!(read("1000000"), Ok(Duration::from_secs(1_000_000)));
        for wrong in ["", "none", "0.5", "-1", "1e7", "NaN", "inf", "10s"] {
            let error = read(wrong).unwrap_err();
            assert!(error.to_string().starts_with("ANNULUS_DEADLINE: got"), "{error}");
        }
    }
}
