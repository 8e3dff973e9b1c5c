//! A thread that moves an endpoint's messages while the rank computes: for kernels that do not tick, where MPI lets any thread call it.
//!
//! Many MPIs move a long message only while somebody calls them. A CPU kernel ticks between tiles and so needs nothing else; a kernel that
//! does not come back for longer than a network's buffers last (some milliseconds) leaves the network idle meanwhile. [`Progress`] looks after
//! the endpoint in between: same messages, same order, same bits. It takes time from a core, so it is worth most where one is spare.
//!
//! The thread never beats: a sign of life must come from whoever works, or a rank whose kernel is stuck would look alive.

use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use annulus_core::{
    Arrived, Control, Error, Host, Incoming, MessageHeader, Outgoing, Placement, Result, Transport,
};

use super::Mpi;

/// An endpoint whose messages also move while nobody calls it.
///
/// # Examples
/// On two ranks or more, under a launcher:
/// ```no_run
/// use annulus_comm::mpi::{Launch, Mpi, Progress, Settings};
/// use annulus_core::Control;
///
/// let launch = Launch::begin()?;
/// let endpoint = Progress::new(Mpi::world(Settings::default())?, Progress::EVERY)?;
/// println!("rank {} of {}", endpoint.rank(), endpoint.ranks());
/// // before MPI ends
/// drop(endpoint);
/// drop(launch);
/// # Ok::<(), annulus_core::Error>(())
/// ```
pub struct Progress {
    shared: Arc<Shared>,
    /// The endpoint's, which never changes.
    placement: Option<Placement>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    endpoint: Mutex<Mpi>,
    stop: AtomicBool,
}

impl Shared {
    /// The endpoint, whether or not somebody panicked with it: it remembers by itself what has failed.
    fn lock(&self) -> MutexGuard<'_, Mpi> {
        self.endpoint.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks after the endpoint until told to stop, or until it fails: then whoever uses it gets the error.
    fn look_after(&self, every: Duration) {
        while !self.stop.load(Ordering::Acquire) {
            thread::park_timeout(every);
            // whoever holds it moves messages too
            if let Ok(mut endpoint) = self.endpoint.try_lock()
                && endpoint.progress(Duration::ZERO).is_err()
            {
                return;
            }
        }
    }
}

impl Progress {
    /// How often to look, where nobody knows better: what a fast network brings in this time fits into its buffers.
    pub const EVERY: Duration = Duration::from_micros(500);

    /// Starts a thread that looks after `endpoint` that often.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if MPI does not grant `MPI_THREAD_MULTIPLE`, [`Error::InvalidArgument`] if `every` is zero, [`Error::Device`] if the
    /// thread cannot be started.
    pub fn new(endpoint: Mpi, every: Duration) -> Result<Self> {
        if !endpoint.any_thread() {
            return Err(Error::unsupported(
                "a progress thread",
                "an MPI without MPI_THREAD_MULTIPLE",
            ));
        }
        if every.is_zero() {
            return Err(Error::invalid("every", format!("{every:?}"), "more than nothing"));
        }
        let placement = endpoint.placement().cloned();
        let shared =
            Arc::new(Shared { endpoint: Mutex::new(endpoint), stop: AtomicBool::new(false) });
        let looker = Arc::clone(&shared);
        let thread = thread::Builder::new()
            .name("annulus-mpi-progress".to_owned())
            .spawn(move || looker.look_after(every));
        let thread = thread.map_err(|error| Error::Device {
            what: format!("the progress thread could not be started: {error}"),
        })?;
        Ok(Self { shared, placement, thread: Some(thread) })
    }
}

impl Drop for Progress {
    /// Ends the thread, so that the endpoint is dropped here, before whoever drops this ends MPI.
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // it sleeps no longer than `every`, and a panic of its would have poisoned nothing that matters
            drop(thread.join());
        }
    }
}

impl Transport<Host> for Progress {
    fn control(&mut self) -> &mut dyn Control {
        self
    }

    fn post(
        &mut self,
        sends: &[Outgoing<'_, Host>],
        receives: &mut Vec<Incoming<Host>>,
    ) -> Result<()> {
        self.shared.lock().post(sends, receives)
    }

    fn progress(&mut self, patience: Duration) -> Result<()> {
        self.shared.lock().progress(patience)
    }

    fn take(&mut self, hop: &MessageHeader) -> Result<Option<Arrived<Host>>> {
        self.shared.lock().take(hop)
    }

    fn pending(&self) -> bool {
        self.shared.lock().pending()
    }

    fn bytes_sent(&self) -> u64 {
        self.shared.lock().bytes_sent()
    }
}

impl Control for Progress {
    fn rank(&self) -> usize {
        self.shared.lock().rank()
    }

    fn ranks(&self) -> usize {
        self.shared.lock().ranks()
    }

    fn start_all_gather(&mut self, round: u64, bytes: &[u8]) -> Result<()> {
        self.shared.lock().start_all_gather(round, bytes)
    }

    fn try_all_gather(&mut self, round: u64) -> Result<Option<Vec<Vec<u8>>>> {
        self.shared.lock().try_all_gather(round)
    }

    fn stragglers(&self, round: u64) -> Vec<usize> {
        self.shared.lock().stragglers(round)
    }

    fn abort(&mut self, error: &Error) {
        self.shared.lock().abort(error);
    }

    fn heartbeat(&mut self, working: bool) {
        self.shared.lock().heartbeat(working);
    }

    fn placement(&self) -> Option<&Placement> {
        self.placement.as_ref()
    }

    fn last_heard(&self, peer: usize) -> Instant {
        self.shared.lock().last_heard(peer)
    }

    fn last_work(&self) -> Instant {
        self.shared.lock().last_work()
    }
}

impl std::fmt::Debug for Progress {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("Progress")
            .field("endpoint", &*self.shared.lock())
            .finish_non_exhaustive()
    }
}
