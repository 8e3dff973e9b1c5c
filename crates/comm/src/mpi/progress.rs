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
    mem,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use annulus_core::{Control, Error, Host, Result, Transport};

use super::{Mpi, endpoint::SharedEndpoint, lifetime::is_forked};
use crate::delegate::forward_control;

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
    inner: Mpi,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

/// Polls the endpoint while blocks are in flight, until `stop` is set or the endpoint fails; its
/// next user gets the error.
fn poll(endpoint: &SharedEndpoint, stop: &AtomicBool, interval: Duration) {
    while !stop.load(Ordering::Acquire) {
        thread::park_timeout(interval);
        // skipped while a rank uses the endpoint, because every call advances messages
        let Some(mut endpoint) = endpoint.try_lock() else { continue };
        // a call into MPI advances the messages of all endpoints, and takes MPI's lock from them
        if endpoint.has_transfers() && endpoint.pump().is_err() {
            return;
        }
    }
}

impl Progress {
    /// Default interval between polls: well below the milliseconds for which the buffers of a
    /// network last.
    pub const EVERY: Duration = Duration::from_micros(500);

    /// Starts a thread that polls `endpoint` once per `interval` while blocks are in flight.
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
        let stop = Arc::new(AtomicBool::new(false));
        let polled = Arc::clone(&endpoint.shared);
        let until = Arc::clone(&stop);
        let thread = thread::Builder::new()
            .name("annulus-mpi-progress".to_owned())
            .spawn(move || poll(&polled, &until, interval));
        let thread = thread.map_err(|error| Error::Device {
            what: format!("the progress thread could not be started: {error}"),
        })?;
        Ok(Self { inner: endpoint, stop, thread: Some(thread) })
    }
}

impl Drop for Progress {
    /// Ends the thread, so that the endpoint is dropped here and not after `MPI_Finalize`.
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        if is_forked() {
            // a child does not have the thread
            return mem::forget(self.thread.take());
        }
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // a panic of the thread leaves nothing to handle: a poisoned lock is accepted
            drop(thread.join());
        }
    }
}

impl Transport<Host> for Progress {
    crate::forward_transport! {
        post progress take pending bytes_sent posts_ahead runs_groups_in_order
    }
}

impl Control for Progress {
    forward_control! {
        rank ranks start_all_gather try_all_gather stragglers abort heartbeat placement last_heard
        last_work
    }
}

impl std::fmt::Debug for Progress {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Progress").field("endpoint", &self.inner).finish_non_exhaustive()
    }
}
