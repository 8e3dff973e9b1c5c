//! Ranks as processes: messages over MPI, in host memory.
//!
//! ```text
//! caller's communicator ──idup, or adopted──▶ data ──idup──▶ control
//!
//! data      bytes of blocks; MPI tag: `messages.rs`; pieces of at most 1 GiB
//! control   frames of any length, in order per peer, matched by MPI_Improbe
//! ```
//! * A message whose bytes are contiguous is sent from, and received into, the caller's buffer. Any
//!   other is packed into, or unpacked from, a staging buffer: sender and receiver may divide it
//!   differently, so messages per range could not be matched, and an MPI datatype would leave the
//!   packing to MPI, at a time that MPI chooses. On a warm plan staging allocates nothing.
//! * MPI must never get a message longer than its receive: Open MPI 4.1 writes past the end of the
//!   buffer where it copies between processes. There are two ways to be sure of that:
//!   * **Agreed lengths.** The ranks of a plan prove once, in its closing status, that every send
//!     has a receive of the same length ([`MessageBalance`](annulus_core::MessageBalance)). Such a
//!     receive starts when it is posted, and no control message belongs to it. So a network that
//!     matches messages by itself moves them while the rank computes, and a message that is not
//!     late is not copied twice. The tag contains a digest of the length, so that a message of
//!     another length would not match.
//!   * **Announcements.** Any other message, and every one if a rank sets [`Settings::announce`],
//!     is announced on `control` (channel, tag, length, length of its pieces). Its receive starts
//!     once the announcement has arrived and fits. So a wrong length or a repeated tag is a typed
//!     error.
//! * Messages with the same receiver and channel are sent one after another. At the same time they
//!   would share the bandwidth, and all parts of a block would arrive at the end.
//! * An all-gather consists of messages, O(log ranks) per rank (`circulant.rs`), never of an MPI
//!   collective: a collective that a dead rank has not joined cannot be cancelled.
//! * Only [`Transport::progress`](annulus_core::Transport::progress) waits. It polls, first without
//!   a pause, then less and less often, down to once per millisecond. So where ranks outnumber
//!   cores, waiting ranks leave the cores to computing ones.
//! * Sends complete as `MPI_Isend` does or, with [`Settings::synchronous`], as `MPI_Issend`. A
//!   schedule that finishes with the latter needs no buffering.
//!
//! # Lifetime
//! The caller's communicator is duplicated once, and neither used afterwards nor freed. By default
//! that waits for all of its ranks, as the host's own collective operations do. If the caller sets
//! a limit ([`Timeout::at_most`]) and it runs out, that duplication stays pending: the host must
//! start no further collective operation on the communicator, because MPI would match the two.
//!
//! [`Mpi::adopt`] takes over a communicator that the host has made for the endpoint, so that no
//! operation of this library ever concerns a communicator of the host's.
//!
//! MPI is never initialised or finalised here; a program without a host does that with [`Launch`].
//! Dropping an endpoint sends a last frame to its neighbours (below). If nothing is in flight it
//! waits in a barrier for all ranks to drop theirs, for at most [`Settings::drop_patience`], and
//! frees its two communicators. Otherwise, and after any failure, it cancels its receives, and
//! leaks the communicators and every buffer that MPI might still read or write: those of sends, and
//! of receives whose messages have begun to arrive. Dropping one after `MPI_Finalize` only leaks.
//!
//! Below `MPI_THREAD_MULTIPLE`, an endpoint that is dropped on another thread than its own waits,
//! and is dropped when its thread makes the next endpoint or finalises MPI (`lifetime.rs`).
//! Until then the other ranks do not learn of it. MPI's communicators have names: "annulus data"
//! and "annulus control".
//!
//! # Sharing
//! A host with many plans makes one endpoint and a handle for each plan ([`Mpi::share`]). A handle
//! has a context (`endpoint.rs`): its number is part of every tag, all-gather and last frame, so the
//! messages of two plans are never matched. Communicators, locations, heartbeats and staging
//! buffers exist once.
//!
//! ```no_run
//! use annulus_comm::mpi::{Launch, Mpi, Settings};
//!
//! let _launch = Launch::begin()?;
//! let endpoint = Mpi::world(Settings::default())?;
//! let (first, second) = (endpoint.share()?, endpoint.share()?);
//! // pass each to a plan; drop the plans in any order
//! # drop((first, second));
//! # Ok::<(), annulus_core::Error>(())
//! ```
//! * Calls of different plans may interleave in another order on each rank, as far as each rank can
//!   reach its calls: a pass needs all ranks in it at some time.
//! * Plans may be dropped in any order, another one on each rank. A rank that is called by the
//!   others for a plan that it has dropped is lost to them.
//! * An error that is not fatal concerns its plan alone. A fatal one ([`Error::is_fatal`]), as of a
//!   lost rank, ends the endpoint: all plans over it return it. The host makes another endpoint.
//! * A plan that is dropped within a call, or by a panic, ends the others likewise.
//! * Where MPI grants `MPI_THREAD_MULTIPLE`, plans may be used by different threads at a time. One
//!   that waits does not hold up the others.
//! * The messages of a plan are received ahead unless MPI's tags for it are in use: a plan and the
//!   64th one after it (with fewer tags, an earlier one) have the same. The later one then
//!   announces its messages.
//! * The endpoint ends with its last handle.
//!
//! # Neighbours
//! Control messages that concern all ranks move between rank r and the ranks r ± 2^k, at most
//! 2·⌈log₂ ranks⌉ neighbours (`circulant.rs`): heartbeats, aborts, last frames, the barrier of the
//! drop, all-gathers. So a rank sends to those and to the ranks with which it exchanges blocks;
//! only
//! `MPI_Comm_idup` may connect it with others. A rank that waits for one which is not its neighbour
//! does not judge its silence; that rank's neighbours do, and their abort reaches all.
//!
//! # Device memory
//! `DeviceMpi` (feature `cuda`) sends memory of CUDA or HIP directly, over an MPI that accepts it:
//! one that reports so, or for which [`GpuAwareness::VARIABLE`] is set. Over any other,
//! [`Staged`](crate::Staged) copies through host memory. Both use the same messages, so ranks of
//! both kinds can share a ring.
//!
//! # Nodes
//! When an endpoint is created, its ranks exchange the nodes on which they run ([`Mpi::nodes`]). An
//! automatic ring order places the ranks of a node next to each other
//! ([`Placement`](annulus_core::Placement)).
//!
//! # Forked children
//! A child of `fork` cannot use MPI: endpoints of the parent return [`Error::Unsupported`] there,
//! their drop calls nothing, and none can be made.
//!
//! # Threads
//! If MPI grants `MPI_THREAD_MULTIPLE`, any thread may use an endpoint. Below, only MPI's main
//! thread can create and use one, and others get [`Error::Unsupported`]. So a host program needs to
//! request no more than `MPI_THREAD_FUNNELED`.
//!
//! # Errors
//! | cause | error |
//! |---|---|
//! | the announcement of a message has another length than its receive | [`Error::Comm`] "… truncated: got x bytes, want y" |
//! | a message without agreed lengths repeats a tag | [`Error::Comm`] "duplicate message …" |
//! | a message with agreed lengths has another length than its receive | it does not arrive: [`Error::Timeout`] of a [`Deadline`](crate::Deadline); where the tags are equal nevertheless and it is shorter, [`Error::Comm`] |
//! | the tag of a receive is not above the last one's, or its buffer is co-owned | [`Error::Comm`] |
//! | a rank starts an all-gather twice before it is collected here | [`Error::Comm`] |
//! | MPI fails | [`Error::PeerLost`] if MPI reports a failed process, else [`Error::Comm`] with its error string |
//! | a message names no rank of this ring, or bytes outside its buffer; a round or message was never started | [`Error::InvalidArgument`], without effect |
//! | MPI is not initialised yet, or finalised | [`Error::InvalidArgument`], without effect |
//! | the endpoint of a rank that this one waits for was dropped | [`Error::PeerLost`] |
//! | a rank called [`Control::abort`](annulus_core::Control::abort) | [`Error::Aborted`] on every other rank, its own error on itself |
//!
//! After a fatal error ([`Error::is_fatal`]) the endpoint is dead and returns the same error again.
//! A process that is killed sends no last frame, and most MPIs do not report it: bound the waits
//! with a [`Deadline`](crate::Deadline).

mod circulant;
mod communicator;
mod control;
#[cfg(feature = "cuda")]
mod device;
mod drop;
mod endpoint;
mod ffi;
mod frame;
mod gpu_awareness;
mod lifetime;
mod messages;
mod nodes;
mod peers;
mod pump;
mod requests;
mod transfers;

use std::{ffi::CStr, sync::Arc, time::Duration};

use annulus_core::{Error, Result};

#[cfg(feature = "cuda")]
pub use self::device::DeviceMpi;
pub use self::{
    communicator::Timeout,
    gpu_awareness::{GpuAwareness, GpuRuntime},
    lifetime::Launch,
    lifetime::ThreadLevel,
    nodes::FirstRanks,
    nodes::{NodeMap, RankLocation},
};
use self::{
    communicator::{MpiCommunicator, ParentCommunicator},
    endpoint::{MpiEndpoint, SharedEndpoint},
    lifetime::check_alive,
    requests::LONGEST_PIECE,
};

/// Communicator handle of C.
pub type Communication = annulus_mpi::ffi::MPI_Comm;

/// Communicator handle of Fortran, and of every binding that converts to it.
pub type FortranHandle = annulus_mpi::ffi::RSMPI_Fint;

/// Source of the shim for an MPI without the standard ABI, which is loaded at run time.
pub use annulus_mpi::SHIM_SOURCE;

/// True if the MPI is linked; false if it is loaded at run time (without the feature `link-mpi`).
pub const IS_LINKED: bool = cfg!(feature = "link-mpi");

/// Returns name and version of the MPI library, also of one that is not initialised.
///
/// # Errors
/// [`Error::Unsupported`] if MPI is to be loaded and there is none.
pub fn library() -> Result<String> {
    ffi::library()
}

/// Returns true between `MPI_Init` and `MPI_Finalize`, by whomever MPI was initialised.
pub fn is_alive() -> bool {
    check_alive().is_ok()
}

/// Checks that this process was not forked from one whose MPI was alive: its child cannot use MPI.
/// A fork of a process that has neither made an endpoint nor called [`is_alive`] is not found.
///
/// # Errors
/// [`Error::Unsupported`].
pub fn check_process() -> Result<()> {
    lifetime::check_process()
}

/// Names of the communicators of an endpoint.
const DATA: &CStr = c"annulus data";
const CONTROL: &CStr = c"annulus control";

/// Settings of an endpoint.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Time to wait for the other ranks when the endpoint is created. Default: no limit.
    pub timeout: Timeout,
    /// Time to wait for the other ranks when the endpoint is dropped. Default: 1 s.
    pub drop_patience: Duration,
    /// True if a send completes only once its receive has started. Default: false.
    pub synchronous: bool,
    /// Longest piece in which a message is sent, in bytes; at most, and by default, 1 GiB.
    pub piece_bytes: u64,
    /// True to announce every message and to start its receive after that, also if its length is
    /// agreed. If any rank does, all do. For tests and comparisons. Default: false.
    pub announce: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            timeout: Timeout::unlimited(),
            drop_patience: Duration::from_secs(1),
            synchronous: false,
            piece_bytes: LONGEST_PIECE,
            announce: false,
        }
    }
}

impl Settings {
    fn check(&self) -> Result<()> {
        if (1..=LONGEST_PIECE).contains(&self.piece_bytes) {
            return Ok(());
        }
        let want = format!("1 to {LONGEST_PIECE}");
        Err(Error::invalid("piece_bytes", self.piece_bytes, want))
    }

    /// Returns the settings that both ends of a message must share to receive it ahead.
    fn message_format(&self) -> String {
        format!("{} {}", self.piece_bytes, self.announce)
    }
}

/// Endpoint of one rank of a ring of processes, or one of the handles that share it. See the
/// [module](self).
pub struct Mpi {
    shared: Arc<SharedEndpoint>,
    /// Number of this handle's context.
    context: u64,
    rank: usize,
    ranks: usize,
    nodes: Arc<NodeMap>,
    posts_ahead: bool,
    /// Neighbours that had not left at the last poll, ascending.
    watched: Vec<usize>,
    /// Moves of the endpoint that this handle has seen.
    seen: u64,
}

impl Mpi {
    /// Creates the endpoint of a ring of all ranks of the job.
    ///
    /// # Ordering
    /// Collective over the ranks.
    /// # Errors
    /// [`Error::InvalidArgument`] if MPI is not alive or a setting is out of range;
    /// [`Error::Unsupported`] on a thread that may not call MPI, or for more ranks than MPI has
    /// tags for; [`Error::Comm`] if MPI fails or [`Settings::timeout`] runs out.
    pub fn world(settings: Settings) -> Result<Self> {
        Self::over(ParentCommunicator::world(), settings)
    }

    /// Creates the endpoint of a ring of the ranks of a communicator of a C program.
    ///
    /// # Ordering
    /// As [`Mpi::world`].
    /// # Errors
    /// As [`Mpi::world`]; [`Error::InvalidArgument`] for a null or an inter-communicator.
    /// # Safety
    /// The handle is null or that of a live communicator of the MPI that this program is linked
    /// with.
    #[expect(unsafe_code, reason = "no handle can be checked")]
    pub unsafe fn over_communicator(
        communicator: Communication,
        settings: Settings,
    ) -> Result<Self> {
        // SAFETY: as the caller promises
        Self::over(unsafe { ParentCommunicator::from_raw(communicator) }, settings)
    }

    /// Creates the endpoint of a ring of the ranks of a communicator of a Fortran or Python
    /// program.
    ///
    /// # Ordering
    /// As [`Mpi::world`].
    /// # Errors
    /// As [`Mpi::over_communicator`].
    /// # Safety
    /// As [`Mpi::over_communicator`].
    #[expect(unsafe_code, reason = "no handle can be checked")]
    pub unsafe fn over_fortran(handle: FortranHandle, settings: Settings) -> Result<Self> {
        check_alive()?;
        // SAFETY: as the caller promises, and MPI is alive
        Self::over(unsafe { ParentCommunicator::from_fortran(handle) }, settings)
    }

    /// Creates the endpoint of a ring of the ranks of a communicator that the host has made for it,
    /// as by `MPI_Comm_dup`. It takes the communicator over: the host neither uses nor frees it
    /// afterwards, also if this fails. No operation concerns any other communicator.
    ///
    /// # Ordering
    /// As [`Mpi::world`], on that communicator.
    /// # Errors
    /// As [`Mpi::over_communicator`].
    /// # Safety
    /// As [`Mpi::over_communicator`], and no other code uses or frees the communicator.
    #[expect(unsafe_code, reason = "no handle can be checked")]
    pub unsafe fn adopt(communicator: Communication, settings: Settings) -> Result<Self> {
        // SAFETY: as the caller promises
        Self::adopted(unsafe { ParentCommunicator::from_raw(communicator) }, settings)
    }

    /// As [`Mpi::adopt`], of a communicator of a Fortran or Python program.
    ///
    /// # Ordering
    /// As [`Mpi::adopt`].
    /// # Errors
    /// As [`Mpi::adopt`].
    /// # Safety
    /// As [`Mpi::adopt`].
    #[expect(unsafe_code, reason = "no handle can be checked")]
    pub unsafe fn adopt_fortran(handle: FortranHandle, settings: Settings) -> Result<Self> {
        check_alive()?;
        // SAFETY: as the caller promises, and MPI is alive
        Self::adopted(unsafe { ParentCommunicator::from_fortran(handle) }, settings)
    }

    fn adopted(communicator: ParentCommunicator, settings: Settings) -> Result<Self> {
        settings.check()?;
        let data = MpiCommunicator::adopt(communicator, DATA)?;
        let mut endpoint = MpiEndpoint::new(data, settings)?;
        endpoint.gather_records()?;
        Self::of(endpoint)
    }

    fn over(parent: ParentCommunicator, settings: Settings) -> Result<Self> {
        let mut endpoint = Self::unmapped(parent, settings)?;
        endpoint.gather_records()?;
        Self::of(endpoint)
    }

    /// Creates the endpoint of a duplicate of `parent`, without the records of the other ranks.
    fn unmapped(parent: ParentCommunicator, settings: Settings) -> Result<MpiEndpoint> {
        settings.check()?;
        let data = MpiCommunicator::duplicate(parent, DATA, &settings.timeout)?;
        MpiEndpoint::new(data, settings)
    }

    /// Creates the first handle to an endpoint.
    fn of(endpoint: MpiEndpoint) -> Result<Self> {
        Self::sharing(&Arc::new(SharedEndpoint::new(endpoint)))
    }

    /// Creates a handle to an endpoint.
    fn sharing(shared: &Arc<SharedEndpoint>) -> Result<Self> {
        let mut endpoint = shared.lock();
        let context = endpoint.open_context()?;
        Ok(Self {
            context,
            rank: endpoint.rank,
            ranks: endpoint.ranks,
            nodes: Arc::clone(&endpoint.nodes),
            posts_ahead: endpoint.context(context).posts_ahead,
            watched: endpoint.peers.staying.clone(),
            seen: endpoint.moves,
            shared: Arc::clone(shared),
        })
    }

    /// Creates a further handle to this endpoint, for a plan of its own. It costs no message, no
    /// communicator and no other resource of MPI.
    ///
    /// Messages of different handles are never matched, so plans over them are used and dropped
    /// independently; see "Sharing" in the [module](self).
    ///
    /// # Ordering
    /// Local. All ranks share an endpoint in the same order: their n-th handles belong together.
    /// # Errors
    /// That of an endpoint that is dead; [`Error::Unsupported`] on a thread that may not use it,
    /// and in a forked child.
    pub fn share(&self) -> Result<Self> {
        lifetime::check_process()?;
        // handles that were dropped elsewhere may make room for tags
        lifetime::drop_deferred();
        self.shared.lock().enter()?;
        Self::sharing(&self.shared)
    }

    /// Returns the highest tag that MPI can send (`MPI_TAG_UB`), which bounds the ranks of a ring.
    pub fn last_tag(&self) -> u64 {
        self.shared.lock().data.as_ref().map_or(0, |data| data.last_tag)
    }

    /// Returns true if any thread may use this endpoint: if MPI grants `MPI_THREAD_MULTIPLE`.
    pub fn any_thread(&self) -> bool {
        // in a forked child another thread may have held the lock
        !lifetime::is_forked()
            && self.shared.lock().data.as_ref().is_some_and(MpiCommunicator::any_thread)
    }

    /// Returns the node, host and cores of every rank of this ring.
    pub fn nodes(&self) -> &NodeMap {
        &self.nodes
    }
}

impl std::fmt::Debug for Mpi {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("Mpi")
            .field("rank", &self.rank)
            .field("ranks", &self.ranks)
            .finish_non_exhaustive()
    }
}
