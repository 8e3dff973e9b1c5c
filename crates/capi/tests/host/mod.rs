//! A host of annulus whose ranks are threads: it carries messages by functions of its own.

use std::{
    collections::HashMap,
    ffi::{c_int, c_void},
    ptr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use annulus_capi::*;

/// Sender, receiver and tag.
type Key = (i64, i64, i32);

/// State shared by the hosts of all ranks.
#[derive(Default)]
pub(crate) struct Wire {
    /// All messages that were sent, in their order: message n is matched with receive n.
    sent: Mutex<HashMap<Key, Vec<Vec<u8>>>>,
    /// Messages of any kind that were sent.
    pub(crate) messages: AtomicUsize,
    /// Requests that exist.
    pub(crate) live: AtomicUsize,
}

impl Wire {
    /// Bytes of the longest message that was sent.
    #[allow(dead_code, reason = "used by one of the tests that share this file")]
    pub(crate) fn longest(&self) -> usize {
        self.sent.lock().unwrap().values().flatten().map(Vec::len).max().unwrap_or(0)
    }
}

/// The host of one rank.
pub(crate) struct Host {
    wire: Arc<Wire>,
    pub(crate) rank: i64,
    /// Fails all sends after this many.
    sends_left: AtomicUsize,
}

/// A request of the host's.
enum Request {
    Send,
    Receive { key: Key, number: usize, data: *mut u8, bytes: usize },
}

thread_local! {
    /// Receives that were posted, by sender and tag: messages are matched in this order.
    static POSTED: std::cell::RefCell<HashMap<Key, usize>> = Default::default();
}

/// # Safety
/// `context` is that of [`transport`].
unsafe fn host<'a>(context: *mut c_void) -> &'a Host {
    // SAFETY: as the caller promises; the host outlives its plan
    unsafe { &*context.cast::<Host>() }
}

unsafe extern "C" fn send(
    context: *mut c_void,
    peer: i64,
    tag: i32,
    data: *const c_void,
    bytes: u64,
    request: *mut *mut c_void,
) -> c_int {
    assert!((0..ANNULUS_TRANSPORT_TAGS).contains(&tag) && bytes > 0);
    // SAFETY: the context of `transport`
    let host = unsafe { host(context) };
    let left = host.sends_left.load(Ordering::Relaxed);
    if left == 0 {
        return 17;
    }
    host.sends_left.store(left - 1, Ordering::Relaxed);
    // SAFETY: annulus passes as many readable bytes
    let message = unsafe { std::slice::from_raw_parts(data.cast::<u8>(), bytes as usize) };
    let key = (host.rank, peer, tag);
    host.wire.sent.lock().unwrap().entry(key).or_default().push(message.to_vec());
    host.wire.messages.fetch_add(1, Ordering::Relaxed);
    host.wire.live.fetch_add(1, Ordering::Relaxed);
    // SAFETY: annulus passes a writable pointer
    unsafe { request.write(Box::into_raw(Box::new(Request::Send)).cast()) };
    0
}

unsafe extern "C" fn recv(
    context: *mut c_void,
    peer: i64,
    tag: i32,
    data: *mut c_void,
    bytes: u64,
    request: *mut *mut c_void,
) -> c_int {
    // SAFETY: the context of `transport`
    let host = unsafe { host(context) };
    let key = (peer, host.rank, tag);
    let number = POSTED.with_borrow_mut(|posted| {
        let count = posted.entry(key).or_default();
        *count += 1;
        *count - 1
    });
    host.wire.live.fetch_add(1, Ordering::Relaxed);
    let receive = Request::Receive { key, number, data: data.cast(), bytes: bytes as usize };
    // SAFETY: annulus passes a writable pointer
    unsafe { request.write(Box::into_raw(Box::new(receive)).cast()) };
    0
}

unsafe extern "C" fn test(context: *mut c_void, request: *mut c_void, done: *mut i32) -> c_int {
    // SAFETY: the context of `transport`
    let host = unsafe { host(context) };
    // SAFETY: a request of `send` or `recv` that was neither done nor cancelled
    let is_done = match unsafe { &*request.cast::<Request>() } {
        Request::Send => true,
        &Request::Receive { key, number, data, bytes } => {
            let sent = host.wire.sent.lock().unwrap();
            match sent.get(&key).and_then(|queue| queue.get(number)) {
                None => false,
                Some(message) if message.len() != bytes => return 18,
                Some(message) => {
                    // SAFETY: annulus passed as many writable bytes
                    unsafe { ptr::copy_nonoverlapping(message.as_ptr(), data, bytes) };
                    true
                }
            }
        }
    };
    if is_done {
        // SAFETY: made by Box::into_raw, and never used again
        drop(unsafe { Box::from_raw(request.cast::<Request>()) });
        host.wire.live.fetch_sub(1, Ordering::Relaxed);
    }
    // SAFETY: annulus passes a writable number
    unsafe { done.write(is_done.into()) };
    0
}

unsafe extern "C" fn cancel(context: *mut c_void, request: *mut c_void) -> c_int {
    // SAFETY: as of `test`
    drop(unsafe { Box::from_raw(request.cast::<Request>()) });
    // SAFETY: the context of `transport`
    unsafe { host(context) }.wire.live.fetch_sub(1, Ordering::Relaxed);
    0
}

pub(crate) fn transport(host: &Host, ranks: i64) -> annulus_transport {
    annulus_transport {
        struct_size: size_of::<annulus_transport>() as u64,
        context: ptr::from_ref(host).cast_mut().cast(),
        rank: host.rank,
        ranks,
        send: Some(send),
        recv: Some(recv),
        test: Some(test),
        cancel: Some(cancel),
    }
}

/// Runs `rank` on a thread per rank; the results, and the wire.
pub(crate) fn on_all<R: Send>(
    ranks: i64,
    sends_left: impl Fn(i64) -> usize,
    rank: impl Fn(&Host) -> R + Sync,
) -> (Vec<R>, Arc<Wire>) {
    let wire = Arc::new(Wire::default());
    let hosts: Vec<Host> = (0..ranks)
        .map(|rank| Host {
            wire: Arc::clone(&wire),
            rank,
            sends_left: AtomicUsize::new(sends_left(rank)),
        })
        .collect();
    let rank = &rank;
    let results = thread::scope(|scope| {
        let threads: Vec<_> = hosts.iter().map(|host| scope.spawn(move || rank(host))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    (results, wire)
}
