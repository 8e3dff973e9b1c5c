//! Ranks as processes: messages over MPI, in host memory.
//!
//! ```text
//! caller's communicator ──idup, or adopted──▶ data ──idup──▶ control
//!
//! data      bytes of blocks; MPI tag: `wire_tags.rs`; pieces of at most 1 GiB
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
//! * An all-gather consists of messages, O(log ranks) per rank (`all_gather.rs`), never of an MPI
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
//! a limit ([`Patience::at_most`]) and it runs out, that duplication stays pending: the host must
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
//! and is dropped when its thread makes the next endpoint or finalises MPI (`parked.rs`). Until
//! then the other ranks do not learn of it. MPI's communicators have names: "annulus data" and
//! "annulus control".
//!
//! # Neighbours
//! Control messages that concern all ranks move between rank r and the ranks r ± 2^k, at most
//! 2·⌈log₂ ranks⌉ neighbours (`circulant.rs`): heartbeats, aborts, last frames, the barrier of the
//! drop, all-gathers. So a rank sends to those and to the ranks with which it exchanges blocks; only
//! `MPI_Comm_idup` may connect it with others. A rank that waits for one which is not its neighbour
//! does not judge its silence; that rank's neighbours do, and their abort reaches all.
//!
//! # Device memory
//! `DeviceMpi` (feature `cuda`) sends CUDA memory directly, over an MPI that accepts it: one that
//! reports so, or for which [`GpuAwareness::VARIABLE`] is set. Over any other,
//! [`Staged`](crate::Staged) copies through host memory. Both use the same messages, so ranks of
//! both kinds can share a ring.
//!
//! # Nodes
//! When an endpoint is created, its ranks tell each other where they run ([`Mpi::nodes`]). An
//! automatic ring order places the ranks of a node next to each other
//! ([`Placement`](annulus_core::Placement)).
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

mod all_gather;
mod circulant;
mod communicator;
mod control;
#[cfg(feature = "cuda")]
mod device;
mod drop;
mod ffi;
mod first_ranks;
mod frame;
mod gpu_awareness;
mod known_work;
mod launch;
mod lifetime;
mod message_buffer;
mod messages;
mod nodes;
mod parked;
mod patience;
mod peers;
mod progress;
mod pump;
mod requests;
mod thread_level;
mod topology;
mod transfers;
mod wire_tags;

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    ffi::CStr,
    time::{Duration, Instant},
};

use annulus_core::{Channel, Error, Result};

#[cfg(feature = "cuda")]
pub use self::device::DeviceMpi;
use self::{
    all_gather::AllGather,
    circulant::Barrier,
    communicator::{Communicator, ParentCommunicator},
    known_work::KnownWork,
    lifetime::check_alive,
    messages::{Announcement, MessageKind, PostedReceive, QueuedSend, SendKey},
    peers::Peers,
    requests::{LONGEST_PIECE, Requests},
    wire_tags::WireTags,
};
pub use self::{
    first_ranks::FirstRanks,
    gpu_awareness::GpuAwareness,
    launch::Launch,
    nodes::{NodeMap, RankLocation},
    patience::Patience,
    progress::Progress,
    thread_level::ThreadLevel,
};
use crate::staging::Staging;

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

/// Names of the communicators of an endpoint.
const DATA: &CStr = c"annulus data";
const CONTROL: &CStr = c"annulus control";

/// Settings of an endpoint.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Time to wait for the other ranks when the endpoint is created. Default: no limit.
    pub patience: Patience,
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
            patience: Patience::unlimited(),
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

/// Endpoint of one rank of a ring of processes. See the [module](self).
pub struct Mpi {
    /// `None` once it is being dropped.
    data: Option<Communicator>,
    control: Option<Communicator>,
    rank: usize,
    ranks: usize,
    settings: Settings,
    tags: WireTags,
    /// True if receives with agreed lengths start when they are posted, on all ranks. False until
    /// the records of all ranks are gathered, right after creation.
    posts_ahead: bool,
    requests: Requests<MessageKind>,
    staging: Staging,
    /// Sends that have not completed.
    sends: Vec<SendKey>,
    /// Those of them that follow another one and have not started.
    queued: VecDeque<QueuedSend>,
    /// Posted and not yet taken.
    receives: Vec<PostedReceive>,
    /// Announced before their receives were posted.
    early: Vec<Announcement>,
    /// Tag of the last posted receive, by peer and channel.
    last_tags: HashMap<(usize, Channel), u64>,
    peers: Peers,
    /// Empty until the records of all ranks are gathered, right after creation.
    nodes: NodeMap,
    all_gathers: BTreeMap<u64, AllGather>,
    /// Number of all-gathers that this rank has started.
    started: u64,
    /// Step of the last post.
    step: usize,
    bytes_sent: u64,
    work: KnownWork,
    /// True from a heartbeat of a working rank to the end of the next all-gather.
    is_working: bool,
    /// Barrier of the drop.
    barrier: Barrier,
    last_heartbeat: Option<Instant>,
    /// Time since which no message has moved.
    idle_since: Instant,
    abort_sent: bool,
    failed: Option<Error>,
}

impl Mpi {
    /// Creates the endpoint of a ring of all ranks of the job.
    ///
    /// # Ordering
    /// Collective over the ranks.
    /// # Errors
    /// [`Error::InvalidArgument`] if MPI is not alive or a setting is out of range;
    /// [`Error::Unsupported`] on a thread that may not call MPI, or for more ranks than MPI has
    /// tags for; [`Error::Comm`] if MPI fails or [`Settings::patience`] runs out.
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
        let data = Communicator::adopt(communicator, DATA)?;
        let mut endpoint = Self::with_data(data, settings)?;
        endpoint.gather_records()?;
        Ok(endpoint)
    }

    fn over(parent: ParentCommunicator, settings: Settings) -> Result<Self> {
        let mut endpoint = Self::over_unmapped(parent, settings)?;
        endpoint.gather_records()?;
        Ok(endpoint)
    }

    /// As [`Mpi::over`], without the records of the other ranks.
    fn over_unmapped(parent: ParentCommunicator, settings: Settings) -> Result<Self> {
        settings.check()?;
        let data = Communicator::duplicate(parent, DATA, &settings.patience)?;
        Self::with_data(data, settings)
    }

    /// Creates the endpoint of a communicator that is its own, without the records of other ranks.
    fn with_data(data: Communicator, settings: Settings) -> Result<Self> {
        // a duplicate of `data`, so that at most one operation is ever pending on the caller's
        let control = Communicator::duplicate(data.as_parent(), CONTROL, &settings.patience)?;
        let rank = data.rank();
        let ranks = data.ranks();
        let tags = WireTags::new(data.last_tag(), ranks).ok_or_else(|| {
            Error::unsupported(
                format!("a ring of {ranks} ranks"),
                format!("an MPI whose tags end at {}", data.last_tag()),
            )
        })?;
        let mut endpoint = Self::detached(rank, ranks);
        endpoint.settings = settings;
        endpoint.tags = tags;
        endpoint.data = Some(data);
        endpoint.control = Some(control);
        Ok(endpoint)
    }

    /// Creates an endpoint without communicators, which can neither send nor receive.
    fn detached(rank: usize, ranks: usize) -> Self {
        let now = Instant::now();
        Self {
            data: None,
            control: None,
            rank,
            ranks,
            settings: Settings::default(),
            tags: WireTags::default(),
            posts_ahead: false,
            requests: Requests::new(),
            staging: Staging::default(),
            sends: Vec::new(),
            queued: VecDeque::new(),
            receives: Vec::new(),
            early: Vec::new(),
            last_tags: HashMap::new(),
            peers: Peers::new(rank, ranks, now),
            nodes: NodeMap::new(Vec::new()),
            all_gathers: BTreeMap::new(),
            started: 0,
            step: 0,
            bytes_sent: 0,
            work: KnownWork::new(rank, now),
            is_working: false,
            barrier: Barrier::new(rank, ranks),
            last_heartbeat: None,
            idle_since: now,
            abort_sent: false,
            failed: None,
        }
    }

    /// Returns the highest tag that MPI can send (`MPI_TAG_UB`), which bounds the ranks of a ring.
    pub fn last_tag(&self) -> u64 {
        self.data.as_ref().map_or(0, Communicator::last_tag)
    }

    /// Returns true if any thread may use this endpoint: if MPI grants `MPI_THREAD_MULTIPLE`.
    pub fn any_thread(&self) -> bool {
        self.data.as_ref().is_some_and(Communicator::any_thread)
    }

    /// Returns the node, host and cores of every rank of this ring.
    pub const fn nodes(&self) -> &NodeMap {
        &self.nodes
    }

    /// Returns the two communicators, `data` and `control`, if this thread may call MPI now.
    fn enter(&self) -> Result<(&Communicator, &Communicator)> {
        match (&self.data, &self.control) {
            (Some(data), Some(control)) => data.enter().map(|()| (data, control)),
            _ => Err(Error::invalid("MPI", "an endpoint that is being dropped", "one that is not")),
        }
    }

    fn check_alive(&self) -> Result<()> {
        self.failed.clone().map_or(Ok(()), Err)
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
