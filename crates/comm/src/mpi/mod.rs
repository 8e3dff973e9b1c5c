//! One rank a process: messages over MPI, in host memory.
//!
//! ```text
//!  communicator handed in ──idup──▶ data:    the bytes of hops, MPI tag = (tag mod window)·3 + channel, in pieces of at most 1 GiB
//!                                    └─idup──▶ control: frames of any length, one queue from each peer, matched by MPI_Improbe
//! ```
//! * A hop whose bytes lie in one piece of memory is sent from there and received there. Any other is packed into (or unpacked from) a staging
//!   buffer of the transport's: the two ends need not be cut alike, so messages per range could not be matched, and a derived type would
//!   leave the packing to MPI at a moment that it chooses. On a warm plan staging allocates nothing.
//! * Every hop is announced on `control` (channel, tag, length, pieces), and its receive begins when the announcement has come and fits. So a message of
//!   another length or a second one with the same tag is a typed error; MPI is never given a message that is longer than its receive, which
//!   OpenMPI 4.1 writes past the end of the buffer where it copies from process to process. The announcement travels before the message does, so
//!   this costs no time on the way: a long message waits for its receiver's next look in any case.
//! * A gather is made of messages, a logarithmic number of them a rank (`gather.rs`), never an MPI collective: a collective that a dead rank has
//!   not joined cannot be left.
//! * Nothing waits but [`Transport::progress`], by looking: first often, then less and less often, up to once a millisecond. Where ranks
//!   outnumber cores, those that wait leave the cores to those that work.
//! * Sends complete as `MPI_Isend` does, or, with [`Settings::synchronous`], as `MPI_Issend`: a schedule that finishes so needs no buffering.
//!
//! # Life and death
//! The communicator handed in is duplicated once, and neither used afterwards nor freed. Should some
//! of its ranks not come within [`Settings::patience`], that duplication stays pending on it: the
//! host must begin no collective operation on it any more, for MPI would match the two.
//!
//! MPI is never initialised or finalised here; a program of
//! its own does that with [`Launch`]. Dropping an endpoint says goodbye to all ranks. If nothing is in flight it waits for theirs, for
//! [`Settings::farewell`] at most, and frees what it duplicated; otherwise, and wherever something has failed, it leaks the two communicators and
//! every buffer that MPI might still touch. Dropping one after `MPI_Finalize` only leaks.
//!
//! # Device memory
//! `DeviceMpi` (feature `cuda`) sends CUDA memory from where it is, over an MPI that takes it: one that says so, or is said to
//! ([`GpuAwareness::VARIABLE`]). Over any other, [`Staged`](crate::Staged) goes through host memory; the two understand each other.
//!
//! # Nodes
//! When an endpoint is made, its ranks find out which of them share a node ([`Mpi::nodes`]) by `MPI_Comm_split_type`, the only collective that is not
//! begun and then looked at: every rank has come by then, and only one that dies in that very moment would be waited for in vain. A ring that is free
//! to choose who holds what lets each node's ranks stand next to each other ([`Placement`](annulus_core::Placement)).
//!
//! # Threads
//! Where MPI grants `MPI_THREAD_MULTIPLE`, an endpoint may be used by any thread. Below, only MPI's main thread can make and use one (another
//! one gets [`Error::Unsupported`]); so a host program needs to ask for no more than `MPI_THREAD_FUNNELED`.
//!
//! # Errors
//! | what happened | error |
//! |---|---|
//! | a message has another length than the receive that was posted for it | [`Error::Comm`] "… truncated: got x bytes, want y" |
//! | a message has a tag that was received before | [`Error::Comm`] "duplicate message …" |
//! | a receive is posted with a tag that is not above the last one's, or in a buffer that somebody else co-owns | [`Error::Comm`] |
//! | a rank offers to a gather twice, before it was collected here | [`Error::Comm`] |
//! | MPI fails | [`Error::PeerLost`] if it says that a process did, else [`Error::Comm`] with MPI's words |
//! | a hop names no rank of this ring, or bytes outside its buffer; a round or hop is asked for that was never begun | [`Error::InvalidArgument`], nothing was done |
//! | MPI is not initialised yet, or finalised | [`Error::InvalidArgument`], nothing was done |
//! | an endpoint was dropped that this one still waits for | [`Error::PeerLost`] |
//! | a rank called [`Control::abort`] | [`Error::Aborted`] on every other rank, its own error on itself |
//!
//! After any but [`Error::InvalidArgument`] and [`Error::Unsupported`] the endpoint is dead and returns the same error again. A process that is
//! killed says no goodbye, and most MPIs do not tell: wrap the endpoint in a [`Deadline`](crate::Deadline).

mod control;
#[cfg(feature = "cuda")]
mod device;
mod drop;
mod ffi;
mod first_ranks;
mod frame;
mod gather;
mod launch;
mod memory;
mod nodes;
mod peers;
mod progress;
mod pump;
mod requests;
mod topology;

use std::{
    collections::{BTreeMap, HashMap},
    ops::Range,
    time::{Duration, Instant},
};

use annulus_core::{
    Arrived, Channel, Control, Error, Host, HostBuffer, Incoming, MessageHeader, Outgoing, Result,
    Space, Transport,
};

#[cfg(feature = "cuda")]
pub use self::device::DeviceMpi;
use self::{
    ffi::{Communicator, Foreign},
    frame::{CHANNELS, Frame},
    gather::Gather,
    memory::Memory,
    peers::Peers,
    pump::{Early, Label, Receive, Stage},
    requests::{Address, LONGEST_PIECE, Mode, Requests},
};
pub use self::{
    first_ranks::FirstRanks,
    launch::{GpuAwareness, Launch, ThreadLevel},
    nodes::{NodeMap, Place},
    progress::Progress,
};
use crate::{ranges, ring::block_parts, staging::Staging};

/// A handle of a communicator, as C has it.
pub type Communication = ::mpi::ffi::MPI_Comm;

/// A handle of a communicator, as Fortran (and every binding that can name it) has it.
pub type FortranHandle = ::mpi::ffi::RSMPI_Fint;

/// How an endpoint behaves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// Time to wait for the other ranks when the endpoint is made. Afterwards the communicator
    /// that was handed in cannot be used for collective operations any more.
    pub patience: Duration,
    /// How long to wait for the other ranks when it is dropped.
    pub farewell: Duration,
    /// Whether a send completes only when it is being received.
    pub synchronous: bool,
    /// Longer messages go in pieces of this many bytes, 1 GiB at most.
    pub piece_bytes: u64,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            patience: Duration::from_secs(120),
            farewell: Duration::from_secs(1),
            synchronous: false,
            piece_bytes: LONGEST_PIECE,
        }
    }
}

/// One rank's endpoint of a ring of processes. See the [module](self).
pub struct Mpi {
    /// `None` once given up.
    data: Option<Communicator>,
    control: Option<Communicator>,
    rank: usize,
    ranks: usize,
    settings: Settings,
    requests: Requests<Label>,
    staging: Staging,
    /// Posted and not yet taken.
    receives: Vec<Receive>,
    /// Announced before their receives were posted.
    early: Vec<Early>,
    /// The last tag that was posted for a receive.
    last_tags: HashMap<(usize, Channel), u64>,
    peers: Peers,
    /// Empty until it is made, which is the first thing that an endpoint does.
    nodes: NodeMap,
    gathers: BTreeMap<u64, Gather>,
    /// How many gathers this rank has begun.
    begun: u64,
    /// The step that was posted last.
    step: usize,
    bytes_sent: u64,
    /// How many times this rank has worked.
    worked: u64,
    last_work: Instant,
    last_beat: Option<Instant>,
    /// Since when nothing has moved.
    idle_since: Instant,
    told_abort: bool,
    failed: Option<Error>,
}

impl Mpi {
    /// The ring of all ranks of the job.
    ///
    /// # Ordering
    /// Collective over the ranks.
    /// # Errors
    /// [`Error::InvalidArgument`] if MPI is not alive or a setting makes no sense, [`Error::Unsupported`] on a thread that may not call MPI or for
    /// more ranks than MPI's tags can serve, [`Error::Comm`] if MPI fails or not all ranks come within [`Settings::patience`].
    pub fn world(settings: Settings) -> Result<Self> {
        Self::over(Foreign::world(), settings)
    }

    /// The ring of the ranks of a communicator of a C program's.
    ///
    /// # Ordering
    /// As [`Mpi::world`].
    /// # Errors
    /// As [`Mpi::world`]; [`Error::InvalidArgument`] for a null or an inter-communicator.
    /// # Safety
    /// The handle is null or that of a live communicator of the MPI that this program is linked with.
    #[expect(unsafe_code, reason = "no handle can be checked")]
    pub unsafe fn over_communicator(
        communicator: Communication,
        settings: Settings,
    ) -> Result<Self> {
        // SAFETY: as the caller says
        Self::over(unsafe { Foreign::of(communicator) }, settings)
    }

    /// The ring of the ranks of a communicator of a Fortran or a Python program's.
    ///
    /// # Ordering
    /// As [`Mpi::world`].
    /// # Errors
    /// As [`Mpi::over_communicator`].
    /// # Safety
    /// As [`Mpi::over_communicator`].
    #[expect(unsafe_code, reason = "no handle can be checked")]
    pub unsafe fn over_fortran(handle: FortranHandle, settings: Settings) -> Result<Self> {
        if ffi::state() != (true, false) {
            return Err(Error::invalid(
                "MPI",
                "MPI before MPI_Init or after MPI_Finalize",
                "MPI between the two",
            ));
        }
        // SAFETY: as the caller says, and MPI is alive
        Self::over(unsafe { Foreign::of_fortran(handle) }, settings)
    }

    fn over(foreign: Foreign, settings: Settings) -> Result<Self> {
        let mut made = Self::over_unmapped(foreign, settings)?;
        made.nodes = made.map_nodes()?;
        Ok(made)
    }

    /// As [`Mpi::over`], without the map of nodes.
    fn over_unmapped(foreign: Foreign, settings: Settings) -> Result<Self> {
        if !(1..=LONGEST_PIECE).contains(&settings.piece_bytes) {
            return Err(Error::invalid(
                "piece_bytes",
                settings.piece_bytes,
                format!("1 to {LONGEST_PIECE}"),
            ));
        }
        let data = Communicator::duplicate(foreign, settings.patience)?;
        // of our own: only the one above is ever pending on a communicator of the host's
        let control = Communicator::duplicate(data.as_foreign(), settings.patience)?;
        let (rank, ranks) = (data.rank(), data.ranks());
        // tags in flight span two passes of at most two journeys each; as many again to spare
        if window(&data) < 8 * block_parts::tags(ranks) {
            return Err(Error::unsupported(
                format!("a ring of {ranks} ranks"),
                format!("an MPI whose tags end at {}", data.last_tag()),
            ));
        }
        let mut made = Self::detached(rank, ranks);
        made.settings = settings;
        made.data = Some(data);
        made.control = Some(control);
        Ok(made)
    }

    /// An endpoint without communicators, which can neither send nor receive.
    fn detached(rank: usize, ranks: usize) -> Self {
        let now = Instant::now();
        Self {
            data: None,
            control: None,
            rank,
            ranks,
            settings: Settings::default(),
            requests: Requests::new(),
            staging: Staging::default(),
            receives: Vec::new(),
            early: Vec::new(),
            last_tags: HashMap::new(),
            peers: Peers::new(ranks, now),
            nodes: NodeMap::new(Vec::new()),
            gathers: BTreeMap::new(),
            begun: 0,
            step: 0,
            bytes_sent: 0,
            worked: 0,
            last_work: now,
            last_beat: None,
            idle_since: now,
            told_abort: false,
            failed: None,
        }
    }

    /// The highest tag that MPI can send (`MPI_TAG_UB`), which bounds the ranks of a ring.
    pub fn last_tag(&self) -> u64 {
        self.data.as_ref().map_or(0, Communicator::last_tag)
    }

    /// Whether any thread may use this endpoint: whether MPI grants `MPI_THREAD_MULTIPLE`.
    pub fn any_thread(&self) -> bool {
        self.data.as_ref().is_some_and(Communicator::any_thread)
    }

    /// Where every rank of this ring runs.
    pub const fn nodes(&self) -> &NodeMap {
        &self.nodes
    }

    /// The two communicators, if this thread may call MPI now.
    fn enter(&self) -> Result<(&Communicator, &Communicator)> {
        match (&self.data, &self.control) {
            (Some(data), Some(control)) => data.enter().map(|()| (data, control)),
            _ => Err(Error::invalid("MPI", "an endpoint that is being dropped", "one that is not")),
        }
    }

    fn check_alive(&self) -> Result<()> {
        self.failed.clone().map_or(Ok(()), Err)
    }

    const fn mode(&self) -> Mode {
        if self.settings.synchronous { Mode::Synchronous } else { Mode::Standard }
    }

    const fn address(data: &Communicator, hop: &MessageHeader, piece: u64) -> Address {
        let tag = hop.tag % window(data) * CHANNELS + frame::number(hop.channel);
        Address { peer: hop.peer, tag, step: hop.step, piece }
    }

    fn check_receive(
        &self,
        hop: &MessageHeader,
        size: u64,
        shared: bool,
        last: Option<u64>,
    ) -> Result<()> {
        let MessageHeader { peer, step, channel, tag, .. } = *hop;
        ranges::check(hop, self.ranks, size)?;
        if last.is_some_and(|last| tag <= last) {
            return Err(Error::Comm {
                peer,
                step,
                what: format!(
                    "receive {channel:?} {tag} posted after a tag as high: tags only grow"
                ),
            });
        }
        if shared {
            return Err(Error::Comm {
                peer,
                step,
                what: format!("the buffer of receive {channel:?} {tag} is in use"),
            });
        }
        Ok(())
    }

    /// Whether the receives of a group can be posted: hop, bytes of the buffer, and whether somebody else co-owns it, of each in the order of tags.
    fn check_receives<'a>(
        &mut self,
        receives: impl Iterator<Item = (&'a MessageHeader, u64, bool)>,
    ) -> Result<()> {
        let mut previous = None;
        for (hop, size, shared) in receives {
            let key = (hop.peer, hop.channel);
            let last = previous
                .filter(|&(of, _)| of == key)
                .map(|(_, tag)| tag)
                .or_else(|| self.last_tags.get(&key).copied());
            let checked = self.check_receive(hop, size, shared, last);
            checked.inspect_err(|error| self.fail(error))?;
            previous = Some((key, hop.tag));
        }
        Ok(())
    }

    /// Lets MPI receive what was announced and fits.
    fn begin_receive(&mut self, place: usize, piece: u64) -> Result<()> {
        let hop = self.receives[place].hop.clone();
        let address = Self::address(self.enter()?.0, &hop, piece);
        let bytes = hop.bytes();
        let (into, stage, range) = match contiguous(&hop.ranges) {
            Some(range) => (self.receives[place].buffer.take(), Stage::Direct, range),
            None => (Some(Memory::Host(self.staging.take(bytes)?)), Stage::Staged, 0..bytes),
        };
        self.receives[place].stage = stage;
        let label = Label::Receive { peer: hop.peer, channel: hop.channel, tag: hop.tag };
        if let (Some(data), Some(into)) = (&self.data, into) {
            self.requests.receive(data, address, into, range, label)?;
        }
        Ok(())
    }

    fn start_send(&mut self, Outgoing { hop, buffer, .. }: &Outgoing<'_, Host>) -> Result<()> {
        let (from, range) = match contiguous(&hop.ranges) {
            Some(range) => ((*buffer).clone(), range),
            None => (self.pack(buffer, &hop.ranges, hop.bytes())?, 0..hop.bytes()),
        };
        self.start_send_of(hop, Memory::Host(from), range)
    }

    /// Sends a hop whose bytes lie in one piece.
    fn start_send_of(
        &mut self,
        hop: &MessageHeader,
        from: Memory,
        range: Range<u64>,
    ) -> Result<()> {
        let (MessageHeader { channel, tag, .. }, step, piece) =
            (hop, hop.step as u64, self.settings.piece_bytes);
        let announcement =
            Frame::Announce { channel: *channel, tag: *tag, step, bytes: hop.bytes(), piece };
        self.say(hop.peer, &announcement.encode()?, Label::Said { peer: hop.peer })?;
        let mode = self.mode();
        let (data, _) = self.enter()?;
        let address = Self::address(data, hop, self.settings.piece_bytes);
        self.step = hop.step;
        self.bytes_sent += hop.bytes();
        self.peers.begin_send(hop.peer, hop.step);
        let label = Label::Sent { peer: hop.peer, step: hop.step };
        if let Some(data) = &self.data {
            self.requests.send(data, mode, address, from, range, label)?;
        }
        Ok(())
    }

    /// The bytes of a hop in one piece.
    fn pack(&mut self, buffer: &HostBuffer, from: &[Range<u64>], bytes: u64) -> Result<HostBuffer> {
        let mut staged = self.staging.take(bytes)?;
        if let Some(into) = staged.bytes_mut() {
            ranges::copy(buffer.bytes(), from, into, std::slice::from_ref(&(0..bytes)));
        }
        self.staging.lend(staged.clone());
        Ok(staged)
    }

    /// The buffer of a posted receive, if it has arrived.
    fn take_memory(&mut self, hop: &MessageHeader) -> Result<Option<Memory>> {
        self.check_alive()?;
        let Some(place) =
            self.receives.iter().position(|receive| receive.is_for(hop.peer, hop.channel, hop.tag))
        else {
            let got = format!("{:?} {} from rank {}", hop.channel, hop.tag, hop.peer);
            return Err(Error::invalid("hop", got, "a receive that was posted and not yet taken"));
        };
        if self.receives[place].stage != Stage::Arrived {
            return Ok(None);
        }
        let buffer = self.receives.swap_remove(place).buffer;
        Ok(buffer)
    }

    fn start(
        &mut self,
        sends: &[Outgoing<'_, Host>],
        receives: Vec<(MessageHeader, Memory)>,
    ) -> Result<()> {
        for (hop, buffer) in receives {
            self.step = hop.step;
            self.last_tags.insert((hop.peer, hop.channel), hop.tag);
            self.receives.push(Receive { hop, buffer: Some(buffer), stage: Stage::Posted });
        }
        self.match_early()?;
        sends.iter().try_for_each(|send| self.start_send(send))
    }
}

/// How many tags of a channel can be told apart on the wire.
const fn window(data: &Communicator) -> u64 {
    (data.last_tag() + 1) / CHANNELS
}

/// The one range that these ranges are, if they are one.
fn contiguous(ranges: &[Range<u64>]) -> Option<Range<u64>> {
    let mut filled = ranges.iter().filter(|range| range.start < range.end);
    let first = filled.next().cloned().unwrap_or(0..0);
    filled.try_fold(first, |whole, range| {
        (whole.end == range.start).then_some(whole.start..range.end)
    })
}

impl Transport<Host> for Mpi {
    fn control(&mut self) -> &mut dyn Control {
        self
    }

    fn post(
        &mut self,
        sends: &[Outgoing<'_, Host>],
        receives: &mut Vec<Incoming<Host>>,
    ) -> Result<()> {
        self.check_alive()?;
        self.enter()?;
        for send in sends {
            ranges::check(&send.hop, self.ranks, Host::size(send.buffer))?;
        }
        // within a group the order means nothing
        receives
            .sort_by_key(|incoming| (incoming.hop.peer, incoming.hop.channel, incoming.hop.tag));
        self.check_receives(
            receives
                .iter()
                .map(|Incoming { hop, buffer }| (hop, Host::size(buffer), buffer.is_shared())),
        )?;
        let receives = receives
            .drain(..)
            .map(|Incoming { hop, buffer }| (hop, Memory::Host(buffer)))
            .collect();
        self.idle_since = Instant::now();
        self.start(sends, receives).inspect_err(|error| self.fail(error))
    }

    fn progress(&mut self, patience: Duration) -> Result<()> {
        self.wait(patience)
    }

    fn take(&mut self, hop: &MessageHeader) -> Result<Option<Arrived<Host>>> {
        let taken = self.take_memory(hop)?;
        Ok(taken.and_then(Memory::into_host).map(|buffer| Arrived { buffer, ready: () }))
    }

    fn pending(&self) -> bool {
        self.peers.has_unsent()
    }

    fn bytes_sent(&self) -> u64 {
        self.bytes_sent
    }
}

impl std::fmt::Debug for Mpi {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (rank, ranks) = (self.rank, self.ranks);
        formatter
            .debug_struct("Mpi")
            .field("rank", &rank)
            .field("ranks", &ranks)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_that_touch_are_one() {
        assert_eq!(contiguous(&[]), Some(0..0));
        assert_eq!(contiguous(&[5..5, 2..2]), Some(0..0));
        assert_eq!(contiguous(&[3..3, 4..6, 7..7, 6..9]), Some(4..9));
        assert_eq!(contiguous(&[4..6, 7..9]), None);
        assert_eq!(contiguous(&[4..6, 2..4]), None);
    }
}
