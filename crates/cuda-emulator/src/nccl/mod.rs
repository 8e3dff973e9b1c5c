//! Emulated NCCL and RCCL for ranks of one machine, threads or processes, each with an emulated
//! device.
//!
//! A group of sends and receives is one item of work in its stream, done when all of its messages
//! are. A message moves when both streams have reached it; messages of one pair keep the order in
//! which they were posted ([`links`]). Nothing blocks: communicators are initialized, and groups
//! are queued, only when the state is queried, as a non-blocking communicator may do. The death of
//! a rank's process is an error of each of its communicators; an abort or destroy by a rank is not,
//! as with NCCL. A communicator's groups use one stream.

mod links;

use std::{
    cell::RefCell,
    ffi::{c_char, c_int, c_void},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
};

use annulus_device_cuda::cudarc::driver::sys::CUstream;

use self::links::{Links, State, Token};
use super::context::{is_device_memory, lock, push_until};
use annulus_device_cuda::{
    Api,
    nccl::{Config, IN_PROGRESS, NcclSymbols, RawCommunicator, SUCCESS, Status, UniqueId},
};

const SYSTEM_ERROR: Status = 2;
const INVALID_ARGUMENT: Status = 4;
const INVALID_USAGE: Status = 5;
const REMOTE_ERROR: Status = 6;

struct Communicator {
    links: Arc<Mutex<Links>>,
    ranks: c_int,
    rank: c_int,
    aborted: Arc<AtomicBool>,
    /// Groups to be queued at the next query; the state is in progress until then.
    posted: Mutex<Vec<(usize, Vec<Transfer>)>>,
}

/// One side of a message.
struct Transfer {
    at: u64,
    bytes: usize,
    peer: usize,
    sends: bool,
    progress: Progress,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Progress {
    Posted,
    /// Offered to the peer, or its offer accepted.
    Offered,
    /// Queued for sending, done when the link has written up to this position.
    Sending(u64),
    Done,
}

type Grouped = (RawCommunicator, CUstream, Transfer);

thread_local! {
    static GROUP: RefCell<Option<Vec<Grouped>>> = const { RefCell::new(None) };
}

/// Returns the emulated RCCL, for devices of HIP.
pub fn rccl_symbols() -> NcclSymbols {
    NcclSymbols { api: Api::Hip, ..nccl_symbols() }
}

/// Returns the emulated NCCL.
pub fn nccl_symbols() -> NcclSymbols {
    NcclSymbols {
        api: Api::Cuda,
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
    // SAFETY: the caller passes a valid pointer.
    unsafe { *version = NcclSymbols::OLDEST };
    SUCCESS
}

unsafe extern "C" fn unique_id(id: *mut UniqueId) -> Status {
    let mut bytes = [0; UniqueId::BYTES];
    let token = links::new_token();
    bytes[..token.len()].copy_from_slice(&token);
    // SAFETY: the caller passes a valid pointer.
    unsafe { *id = UniqueId(bytes) };
    SUCCESS
}

unsafe extern "C" fn init_rank(
    made: *mut RawCommunicator,
    ranks: c_int,
    id: UniqueId,
    rank: c_int,
    _: *mut Config,
) -> Status {
    let (Some(token), true) = (id.0.first_chunk(), (0..ranks).contains(&rank)) else {
        return INVALID_ARGUMENT;
    };
    let Ok(links) = Links::new(Token::clone(token), number(rank), number(ranks)) else {
        return SYSTEM_ERROR;
    };
    let communicator = Communicator {
        links: Arc::new(Mutex::new(links)),
        ranks,
        rank,
        aborted: Arc::default(),
        posted: Mutex::default(),
    };
    // SAFETY: the caller passes a valid pointer.
    unsafe { *made = Box::into_raw(Box::new(communicator)).cast() };
    IN_PROGRESS
}

/// Converts a number that is not negative.
const fn number(of: c_int) -> usize {
    of.unsigned_abs() as usize
}

/// # Safety
/// The communicator is valid.
unsafe fn of<'a>(communicator: RawCommunicator) -> &'a Communicator {
    // SAFETY: as required of the caller.
    unsafe { &*communicator.cast::<Communicator>() }
}

unsafe extern "C" fn count(communicator: RawCommunicator, ranks: *mut c_int) -> Status {
    // SAFETY: the caller passes a communicator and a valid pointer.
    unsafe { *ranks = of(communicator).ranks };
    SUCCESS
}

unsafe extern "C" fn user_rank(communicator: RawCommunicator, rank: *mut c_int) -> Status {
    // SAFETY: the caller passes a communicator and a valid pointer.
    unsafe { *rank = of(communicator).rank };
    SUCCESS
}

unsafe extern "C" fn async_error(communicator: RawCommunicator, status: *mut Status) -> Status {
    // SAFETY: the caller passes a communicator and a valid pointer.
    let (communicator, status) = unsafe { (of(communicator), &mut *status) };
    let state = lock(&communicator.links).poll();
    if state == State::Lost {
        *status = REMOTE_ERROR;
        return SUCCESS;
    }
    let posted = std::mem::take(&mut *lock(&communicator.posted));
    *status = if state == State::Connecting || !posted.is_empty() { IN_PROGRESS } else { SUCCESS };
    for (stream, mut transfers) in posted {
        let links = Arc::clone(&communicator.links);
        let aborted = Arc::clone(&communicator.aborted);
        // SAFETY: the stream is valid while the communicator is used.
        unsafe {
            push_until(stream as CUstream, move || {
                advance(&mut lock(&links), &aborted, &mut transfers)
            })
        };
    }
    SUCCESS
}

/// Advances the transfers of a group. Returns `Some(success)` once all are done. Transfers with a
/// lost rank never complete; the group ends when it is aborted.
fn advance(links: &mut Links, aborted: &AtomicBool, transfers: &mut [Transfer]) -> Option<bool> {
    if aborted.load(Ordering::Acquire) {
        // pending transfers end with undefined contents
        return Some(true);
    }
    links.poll();
    let mut before: Vec<(usize, bool)> = Vec::new();
    for transfer in transfers.iter_mut().filter(|transfer| transfer.progress != Progress::Done) {
        let Some(link) = links.to(transfer.peer) else { continue };
        let first = !before.contains(&(transfer.peer, transfer.sends));
        match (transfer.progress, transfer.sends) {
            (Progress::Posted, true) => {
                link.start_all_gather(transfer.bytes);
                transfer.progress = Progress::Offered;
            }
            (Progress::Offered, true) if first && link.accepted > 0 => {
                link.accepted -= 1;
                // SAFETY: checked to be device memory, which is kept until the group is done.
                let message =
                    unsafe { std::slice::from_raw_parts(transfer.at as *const u8, transfer.bytes) };
                transfer.progress = Progress::Sending(link.send(message));
            }
            (Progress::Sending(by), _) if link.has_written(by) => {
                transfer.progress = Progress::Done
            }
            (Progress::Posted, false) if first => match link.offers.pop_front() {
                Some(offered) if offered != transfer.bytes => return Some(false),
                Some(_) => {
                    link.accept();
                    transfer.progress = Progress::Offered;
                }
                None => {}
            },
            (Progress::Offered, false) if first => {
                if let Some(message) = link.messages.pop_front() {
                    // SAFETY: the message has the offered length, which is that of this device
                    // memory; it is kept until the group is done.
                    unsafe {
                        std::ptr::copy_nonoverlapping(
                            message.as_ptr(),
                            transfer.at as *mut u8,
                            message.len(),
                        )
                    };
                    transfer.progress = Progress::Done;
                }
            }
            _ => {}
        }
        // messages of one pair and direction keep their order: a pending one holds up later ones,
        // unless it is already being sent
        if matches!(transfer.progress, Progress::Posted | Progress::Offered) {
            before.push((transfer.peer, transfer.sends));
        }
    }
    links.poll();
    transfers.iter().all(|transfer| transfer.progress == Progress::Done).then_some(true)
}

unsafe extern "C" fn abort(communicator: RawCommunicator) -> Status {
    // SAFETY: created by `init_rank`, freed once.
    let communicator = unsafe { Box::from_raw(communicator.cast::<Communicator>()) };
    communicator.aborted.store(true, Ordering::Release);
    lock(&communicator.links).leave(false);
    SUCCESS
}

unsafe extern "C" fn destroy(communicator: RawCommunicator) -> Status {
    // SAFETY: created by `init_rank`, freed once.
    let communicator = unsafe { Box::from_raw(communicator.cast::<Communicator>()) };
    lock(&communicator.links).leave(true);
    SUCCESS
}

unsafe extern "C" fn group_start() -> Status {
    GROUP.with_borrow_mut(
        |group| if group.replace(Vec::new()).is_none() { SUCCESS } else { INVALID_USAGE },
    )
}

unsafe extern "C" fn group_end() -> Status {
    let Some(group) = GROUP.take() else { return INVALID_USAGE };
    let mut streams: Vec<(RawCommunicator, CUstream, Vec<Transfer>)> = Vec::new();
    for (communicator, stream, transfer) in group {
        match streams.iter_mut().find(|grouped| (grouped.0, grouped.1) == (communicator, stream)) {
            Some(grouped) => grouped.2.push(transfer),
            None => streams.push((communicator, stream, vec![transfer])),
        }
    }
    for (communicator, stream, transfers) in streams {
        // SAFETY: valid, because the caller used it in this group.
        lock(&unsafe { of(communicator) }.posted).push((stream as usize, transfers));
    }
    IN_PROGRESS
}

fn transfer(
    at: u64,
    bytes: usize,
    peer: c_int,
    communicator: RawCommunicator,
    stream: CUstream,
    sends: bool,
) -> Status {
    // SAFETY: the caller passes a communicator.
    let &Communicator { ranks, rank, .. } = unsafe { of(communicator) };
    // a send to the rank itself is not emulated
    if !is_device_memory(at, bytes) || !(0..ranks).contains(&peer) || peer == rank {
        return INVALID_ARGUMENT;
    }
    GROUP.with_borrow_mut(|group| {
        // transfers outside a group are not emulated
        let Some(group) = group else { return INVALID_USAGE };
        group.push((
            communicator,
            stream,
            Transfer { at, bytes, peer: number(peer), sends, progress: Progress::Posted },
        ));
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
        SYSTEM_ERROR => c"unhandled system error",
        INVALID_ARGUMENT => c"invalid argument",
        INVALID_USAGE => c"invalid usage",
        REMOTE_ERROR => c"remote process exited or there was a network error",
        IN_PROGRESS => c"operation in progress",
        _ => c"another error",
    };
    text.as_ptr()
}
