//! A progress thread: advances an endpoint's messages while the rank computes, for kernels that do
//! not tick, where MPI grants `MPI_THREAD_MULTIPLE`.
//!
//! Many MPIs move a long message only inside their calls. A CPU kernel ticks between tiles and
//! needs nothing else. A kernel that does not return for longer than the network's buffers last
//! (some milliseconds) leaves the network idle. [`Progress`] polls the endpoint meanwhile;
//! messages, their order and all results stay the same. It takes time from a core, so it pays where
//! one is idle.
//!
//! The thread sends no heartbeats: those must come from the computing thread, or a rank whose
//! kernel hangs would appear alive.

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

/// An endpoint that a thread of its own also polls.
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
    cell: Arc<EndpointCell>,
    /// The endpoint's placement, which never changes: a copy that can be borrowed without the lock.
    placement: Option<Placement>,
    /// The endpoint's neighbours, likewise.
    neighbours: Vec<usize>,
    thread: Option<JoinHandle<()>>,
}

/// An endpoint that the rank and its progress thread use in turn.
struct EndpointCell {
    endpoint: Mutex<Mpi>,
    stop: AtomicBool,
}

impl EndpointCell {
    /// Locks the endpoint. A poisoned lock is no error: the endpoint records its own failures.
    fn lock(&self) -> MutexGuard<'_, Mpi> {
        self.endpoint.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Polls the endpoint until `stop` is set or the endpoint fails; its next user gets the error.
    fn poll(&self, interval: Duration) {
        while !self.stop.load(Ordering::Acquire) {
            thread::park_timeout(interval);
            // skipped while the rank uses the endpoint, because every call advances messages
            if let Ok(mut endpoint) = self.endpoint.try_lock()
                && endpoint.progress(Duration::ZERO).is_err()
            {
                return;
            }
        }
    }
}

impl Progress {
    /// Default interval between polls: well below the milliseconds for which the buffers of a
    /// network last.
    pub const EVERY: Duration = Duration::from_micros(500);

    /// Starts a thread that polls `endpoint` once per `interval`.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if MPI does not grant `MPI_THREAD_MULTIPLE`,
    /// [`Error::InvalidArgument`] if `interval` is zero, [`Error::Device`] if the thread cannot be
    /// started.
    pub fn new(endpoint: Mpi, interval: Duration) -> Result<Self> {
        if !endpoint.any_thread() {
            return Err(Error::unsupported(
                "a progress thread",
                "an MPI without MPI_THREAD_MULTIPLE",
            ));
        }
        if interval.is_zero() {
            return Err(Error::invalid("interval", format!("{interval:?}"), "more than zero"));
        }
        let placement = endpoint.placement().cloned();
        let neighbours = endpoint.watched().unwrap_or_default().to_vec();
        let cell =
            Arc::new(EndpointCell { endpoint: Mutex::new(endpoint), stop: AtomicBool::new(false) });
        let polled = Arc::clone(&cell);
        let thread = thread::Builder::new()
            .name("annulus-mpi-progress".to_owned())
            .spawn(move || polled.poll(interval));
        let thread = thread.map_err(|error| Error::Device {
            what: format!("the progress thread could not be started: {error}"),
        })?;
        Ok(Self { cell, placement, neighbours, thread: Some(thread) })
    }
}

impl Drop for Progress {
    /// Ends the thread, so that the endpoint is dropped here and not after `MPI_Finalize`.
    fn drop(&mut self) {
        self.cell.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // a panic of the thread leaves nothing to handle: a poisoned lock is accepted
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
        self.cell.lock().post(sends, receives)
    }

    fn progress(&mut self, patience: Duration) -> Result<()> {
        self.cell.lock().progress(patience)
    }

    fn take(&mut self, header: &MessageHeader) -> Result<Option<Arrived<Host>>> {
        self.cell.lock().take(header)
    }

    fn pending(&self) -> bool {
        self.cell.lock().pending()
    }

    fn bytes_sent(&self) -> u64 {
        self.cell.lock().bytes_sent()
    }

    fn posts_ahead(&self) -> bool {
        self.cell.lock().posts_ahead()
    }

    fn runs_groups_in_order(&self) -> bool {
        self.cell.lock().runs_groups_in_order()
    }
}

impl Control for Progress {
    fn rank(&self) -> usize {
        self.cell.lock().rank()
    }

    fn ranks(&self) -> usize {
        self.cell.lock().ranks()
    }

    fn start_all_gather(&mut self, round: u64, bytes: &[u8]) -> Result<()> {
        self.cell.lock().start_all_gather(round, bytes)
    }

    fn try_all_gather(&mut self, round: u64) -> Result<Option<Vec<Vec<u8>>>> {
        self.cell.lock().try_all_gather(round)
    }

    fn stragglers(&self, round: u64) -> Vec<usize> {
        self.cell.lock().stragglers(round)
    }

    fn abort(&mut self, error: &Error) {
        self.cell.lock().abort(error);
    }

    fn heartbeat(&mut self, working: bool) {
        self.cell.lock().heartbeat(working);
    }

    fn placement(&self) -> Option<&Placement> {
        self.placement.as_ref()
    }

    fn last_heard(&self, peer: usize) -> Instant {
        self.cell.lock().last_heard(peer)
    }

    fn watched(&self) -> Option<&[usize]> {
        Some(&self.neighbours)
    }

    fn last_work(&self) -> Instant {
        self.cell.lock().last_work()
    }
}

impl std::fmt::Debug for Progress {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("Progress")
            .field("endpoint", &*self.cell.lock())
            .finish_non_exhaustive()
    }
}
