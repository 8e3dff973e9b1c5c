//! NCCL's functions for ranks that are threads of this process, each with an emulated device.
//!
//! A group of sends and receives is one piece of work in its stream. It is done when all of its messages are: a message moves when both sides' streams
//! have come to it, messages of one pair in the order in which they were posted. Nothing blocks: communicators are made, and groups are queued, only
//! when somebody asks for the state, as a communicator that was asked not to block may do.

use std::{
    cell::RefCell,
    collections::{HashMap, VecDeque},
    ffi::{c_char, c_int, c_void},
    sync::{
        Arc, Mutex, OnceLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use cudarc::driver::sys::CUstream;

use super::functions::{is_device_memory, lock, push_until};
use crate::nccl::{Config, IN_PROGRESS, NcclSymbols, RawCommunicator, SUCCESS, Status, UniqueId};

const INVALID_ARGUMENT: Status = 4;
const INVALID_USAGE: Status = 5;

/// What ranks of one id share.
#[derive(Default)]
struct World {
    joined: AtomicU64,
    /// By sender and receiver.
    messages: Mutex<HashMap<(c_int, c_int), VecDeque<Message>>>,
}

struct Message {
    from: u64,
    bytes: usize,
    taken: Arc<AtomicBool>,
}

struct Communicator {
    world: Arc<World>,
    ranks: c_int,
    rank: c_int,
    aborted: Arc<AtomicBool>,
    /// Groups that are not in their stream yet: the state becomes good once they are.
    ended: Mutex<Vec<(usize, Vec<Transfer>)>>,
}

/// One side of a message, and how far it is.
struct Transfer {
    at: u64,
    bytes: usize,
    peer: c_int,
    sends: bool,
    /// Of a send that has begun: whether it was taken.
    taken: Option<Arc<AtomicBool>>,
    done: bool,
}

type Grouped = (RawCommunicator, CUstream, Transfer);

thread_local! {
    static GROUP: RefCell<Option<Vec<Grouped>>> = const { RefCell::new(None) };
}

fn worlds() -> &'static Mutex<HashMap<u64, Arc<World>>> {
    static WORLDS: OnceLock<Mutex<HashMap<u64, Arc<World>>>> = OnceLock::new();
    WORLDS.get_or_init(Mutex::default)
}

/// The emulated NCCL.
pub fn nccl_symbols() -> NcclSymbols {
    NcclSymbols {
        version,
        unique_id,
        init_rank,
        count,
        user_rank,
        async_error,
        abort,
        destroy,
        group_start,
        group_end,
        send,
        receive,
        error_string,
    }
}

unsafe extern "C" fn version(version: *mut c_int) -> Status {
    // SAFETY: the caller gives a valid pointer.
    unsafe { *version = NcclSymbols::OLDEST };
    SUCCESS
}

unsafe extern "C" fn unique_id(id: *mut UniqueId) -> Status {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let mut bytes = [0; UniqueId::BYTES];
    bytes[..8].copy_from_slice(&NEXT.fetch_add(1, Ordering::Relaxed).to_ne_bytes());
    // SAFETY: the caller gives a valid pointer.
    unsafe { *id = UniqueId(bytes) };
    SUCCESS
}

unsafe extern "C" fn init_rank(made: *mut RawCommunicator, ranks: c_int, id: UniqueId, rank: c_int, _: *mut Config) -> Status {
    let Some((number, _)) = id.0.split_first_chunk::<8>() else { return INVALID_ARGUMENT };
    if !(0..ranks).contains(&rank) {
        return INVALID_ARGUMENT;
    }
    let world = Arc::clone(lock(worlds()).entry(u64::from_ne_bytes(*number)).or_default());
    world.joined.fetch_add(1, Ordering::AcqRel);
    let communicator = Communicator { world, ranks, rank, aborted: Arc::default(), ended: Mutex::default() };
    // SAFETY: the caller gives a valid pointer.
    unsafe { *made = Box::into_raw(Box::new(communicator)).cast() };
    IN_PROGRESS
}

/// # Safety
/// A communicator that is alive.
unsafe fn of<'a>(communicator: RawCommunicator) -> &'a Communicator {
    // SAFETY: as promised.
    unsafe { &*communicator.cast::<Communicator>() }
}

unsafe extern "C" fn count(communicator: RawCommunicator, ranks: *mut c_int) -> Status {
    // SAFETY: the caller gives a communicator and a valid pointer.
    unsafe { *ranks = of(communicator).ranks };
    SUCCESS
}

unsafe extern "C" fn user_rank(communicator: RawCommunicator, rank: *mut c_int) -> Status {
    // SAFETY: the caller gives a communicator and a valid pointer.
    unsafe { *rank = of(communicator).rank };
    SUCCESS
}

unsafe extern "C" fn async_error(communicator: RawCommunicator, status: *mut Status) -> Status {
    // SAFETY: the caller gives a communicator and a valid pointer.
    let (communicator, status) = unsafe { (of(communicator), &mut *status) };
    let joined = communicator.world.joined.load(Ordering::Acquire);
    let ended = std::mem::take(&mut *lock(&communicator.ended));
    *status = if joined < u64::from(communicator.ranks.unsigned_abs()) || !ended.is_empty() { IN_PROGRESS } else { SUCCESS };
    for (stream, mut transfers) in ended {
        let (world, rank, aborted) = (Arc::clone(&communicator.world), communicator.rank, Arc::clone(&communicator.aborted));
        // SAFETY: the stream is alive as long as the communicator is used.
        unsafe { push_until(stream as CUstream, move || advance(&world, rank, &aborted, &mut transfers)) };
    }
    SUCCESS
}

/// Moves what can be moved: whether all is done, and went well.
fn advance(world: &World, rank: c_int, aborted: &AtomicBool, transfers: &mut [Transfer]) -> Option<bool> {
    if aborted.load(Ordering::Acquire) {
        // what was under way ends, with anything in it
        return Some(true);
    }
    let mut messages = lock(&world.messages);
    let mut waited_for = Vec::new();
    for transfer in transfers.iter_mut().filter(|transfer| !transfer.done) {
        if transfer.sends {
            let taken = transfer.taken.get_or_insert_with(|| {
                let taken = Arc::<AtomicBool>::default();
                let message = Message { from: transfer.at, bytes: transfer.bytes, taken: Arc::clone(&taken) };
                messages.entry((rank, transfer.peer)).or_default().push_back(message);
                taken
            });
            transfer.done = taken.load(Ordering::Acquire);
            continue;
        }
        let first = !waited_for.contains(&transfer.peer);
        match messages.get_mut(&(transfer.peer, rank)).filter(|_| first).and_then(VecDeque::pop_front) {
            Some(message) if message.bytes != transfer.bytes => return Some(false),
            Some(message) => {
                // SAFETY: both were checked to be device memory; the sender's is kept until the message was taken, this one until its work is done.
                unsafe { std::ptr::copy_nonoverlapping(message.from as *const u8, transfer.at as *mut u8, message.bytes) };
                message.taken.store(true, Ordering::Release);
                transfer.done = true;
            }
            None => waited_for.push(transfer.peer),
        }
    }
    transfers.iter().all(|transfer| transfer.done).then_some(true)
}

unsafe extern "C" fn abort(communicator: RawCommunicator) -> Status {
    // SAFETY: made by `init_rank`, given up once.
    let communicator = unsafe { Box::from_raw(communicator.cast::<Communicator>()) };
    communicator.aborted.store(true, Ordering::Release);
    SUCCESS
}

unsafe extern "C" fn destroy(communicator: RawCommunicator) -> Status {
    // SAFETY: made by `init_rank`, given up once.
    drop(unsafe { Box::from_raw(communicator.cast::<Communicator>()) });
    SUCCESS
}

unsafe extern "C" fn group_start() -> Status {
    GROUP.with_borrow_mut(|group| if group.replace(Vec::new()).is_none() { SUCCESS } else { INVALID_USAGE })
}

unsafe extern "C" fn group_end() -> Status {
    let Some(group) = GROUP.take() else { return INVALID_USAGE };
    let mut streams: Vec<(RawCommunicator, CUstream, Vec<Transfer>)> = Vec::new();
    for (communicator, stream, transfer) in group {
        match streams.iter_mut().find(|known| (known.0, known.1) == (communicator, stream)) {
            Some(known) => known.2.push(transfer),
            None => streams.push((communicator, stream, vec![transfer])),
        }
    }
    for (communicator, stream, transfers) in streams {
        // SAFETY: alive, as the caller used it in this group.
        lock(&unsafe { of(communicator) }.ended).push((stream as usize, transfers));
    }
    IN_PROGRESS
}

fn transfer(at: u64, bytes: usize, peer: c_int, communicator: RawCommunicator, stream: CUstream, sends: bool) -> Status {
    // SAFETY: the caller gives a communicator.
    let ranks = unsafe { of(communicator) }.ranks;
    if !is_device_memory(at, bytes) || !(0..ranks).contains(&peer) {
        return INVALID_ARGUMENT;
    }
    GROUP.with_borrow_mut(|group| {
        // the emulator knows grouped transfers only
        let Some(group) = group else { return INVALID_USAGE };
        group.push((communicator, stream, Transfer { at, bytes, peer, sends, taken: None, done: false }));
        SUCCESS
    })
}

unsafe extern "C" fn send(
    from: *const c_void,
    bytes: usize,
    _: c_int,
    peer: c_int,
    communicator: RawCommunicator,
    stream: CUstream,
) -> Status {
    transfer(from as u64, bytes, peer, communicator, stream, true)
}

unsafe extern "C" fn receive(
    to: *mut c_void,
    bytes: usize,
    _: c_int,
    peer: c_int,
    communicator: RawCommunicator,
    stream: CUstream,
) -> Status {
    transfer(to as u64, bytes, peer, communicator, stream, false)
}

unsafe extern "C" fn error_string(status: Status) -> *const c_char {
    let text = match status {
        SUCCESS => c"no error",
        2 => c"unhandled system error",
        INVALID_ARGUMENT => c"invalid argument",
        INVALID_USAGE => c"invalid usage",
        6 => c"remote process exited or there was a network error",
        IN_PROGRESS => c"operation in progress",
        _ => c"another error",
    };
    text.as_ptr()
}
