//! Masks and bias functions that the host computes.

use std::{
    ffi::{CStr, c_char, c_void},
    time::Duration,
};

use annulus::{
    Error, Result,
    bias::BiasFunction,
    comm::ring::{Activity, PassKind, StepEvent},
    mask::{Fingerprint, Key, KeyIntervals, Mask, Query},
};

use crate::fields::check_pointer;

/// One pair of query and key, as a callback gets it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct annulus_pair {
    /// Batch row. 0 for a mask without ANNULUS_MASK_PER_BATCH.
    pub batch: i64,
    /// Query head. 0 for a mask without ANNULUS_MASK_PER_HEAD.
    pub head: i64,
    /// Row number of the query in the whole sequence.
    pub q_row: i64,
    /// Row number of the key in the whole sequence.
    pub kv_row: i64,
    /// Position i' of the query.
    pub q_position: i64,
    /// Position j' of the key.
    pub kv_position: i64,
}

/// Returns 1 if the pair is visible, 0 if it is masked.
///
/// A pure function: called any number of times, from several threads at once, during plan_create,
/// plan_update, forward and backward. It does not unwind and calls no function of annulus.
pub type annulus_mask_function =
    Option<unsafe extern "C" fn(context: *mut c_void, pair: *const annulus_pair) -> i32>;

/// Returns the bias of the pair; -INFINITY masks it. Rules: as [`annulus_mask_function`].
pub type annulus_bias_function =
    Option<unsafe extern "C" fn(context: *mut c_void, pair: *const annulus_pair) -> f64>;

/// Is called, on a thread that waits within a call of annulus, when rank `peer` has been silent for
/// `waited_seconds`, a quarter of the deadline, in ring step `step`: once per silence. At the entry
/// of a collective call, in every quarter of the deadline, with a rank that has not made the call.
/// While a plan over MPI waits for ranks that have not begun to make it, every 30 s with -1 as
/// `peer`.
pub type annulus_silence_function =
    Option<unsafe extern "C" fn(context: *mut c_void, peer: i64, step: i64, waited_seconds: f64)>;

/// The forward pass.
pub const ANNULUS_PASS_FORWARD: i32 = 0;
/// The backward pass.
pub const ANNULUS_PASS_BACKWARD: i32 = 1;

/// Tiles of one block of keys and values (in a two-pass backward also of queries), or of a part.
pub const ANNULUS_ACTIVITY_COMPUTE: i32 = 0;
/// Messages that were posted together, from their post until the rank found them sent.
pub const ANNULUS_ACTIVITY_SEND: i32 = 1;
/// Exposed communication: the rank waited for messages.
pub const ANNULUS_ACTIVITY_WAIT: i32 = 2;

/// One activity of one rank in a pass. Times are seconds since the pass began on this rank.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct annulus_step_event {
    /// sizeof(annulus_step_event) in the library.
    pub struct_size: u64,
    /// The rank.
    pub rank: i64,
    /// An ANNULUS_PASS constant.
    pub pass: i32,
    /// An ANNULUS_ACTIVITY constant.
    pub activity: i32,
    /// Ring step. A two-pass backward counts from 0 twice.
    pub step: i64,
    /// Payload bytes of ANNULUS_ACTIVITY_SEND, otherwise 0. Their sum over a pass is that of
    /// annulus_plan_predicted_bytes.
    pub bytes: u64,
    /// Floating-point operations of ANNULUS_ACTIVITY_COMPUTE, otherwise 0: two for each
    /// multiply-add of the matrix products, for visible pairs only. Pairs that only a dense mask or
    /// a mask of the host's hides are counted.
    pub flops: f64,
    /// Start.
    pub begin_seconds: f64,
    /// End.
    pub end_seconds: f64,
}

/// Is called with every activity of a pass, on the thread of the rank, which in an in-process ring
/// of several ranks is not the caller's: by several threads at once. It does not unwind and calls
/// no function of annulus. `event` is valid during the call.
pub type annulus_step_function =
    Option<unsafe extern "C" fn(context: *mut c_void, event: *const annulus_step_event)>;

impl annulus_step_event {
    pub(crate) fn of(event: &StepEvent) -> Self {
        Self {
            struct_size: size_of::<Self>() as u64,
            rank: event.rank as i64,
            pass: match event.pass {
                PassKind::Forward => ANNULUS_PASS_FORWARD,
                PassKind::Backward => ANNULUS_PASS_BACKWARD,
            },
            activity: match event.activity {
                Activity::Compute => ANNULUS_ACTIVITY_COMPUTE,
                Activity::Send => ANNULUS_ACTIVITY_SEND,
                Activity::Wait => ANNULUS_ACTIVITY_WAIT,
            },
            step: event.step as i64,
            bytes: event.bytes,
            flops: event.flops,
            begin_seconds: event.begin.as_secs_f64(),
            end_seconds: event.end.as_secs_f64(),
        }
    }
}

/// The mask depends on the query head.
pub const ANNULUS_MASK_PER_HEAD: u32 = 1;
/// The mask depends on the batch row other than through positions.
pub const ANNULUS_MASK_PER_BATCH: u32 = 2;

/// The host's pointer that is passed back to its callbacks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HostContext(*mut c_void);

// SAFETY: annulus only passes the pointer back; the documentation of every callback has the host
// promise that it may be called from any thread
unsafe impl Send for HostContext {}
// SAFETY: as above, from several threads at once
unsafe impl Sync for HostContext {}

impl HostContext {
    pub(crate) const fn new(pointer: *mut c_void) -> Self {
        Self(pointer)
    }

    /// The pointer. A method, so that a closure captures the whole context, which is Send.
    pub(crate) const fn pointer(self) -> *mut c_void {
        self.0
    }
}

/// A silence function of the host's, with its context.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SilenceHook {
    pub(crate) function: unsafe extern "C" fn(*mut c_void, i64, i64, f64),
    pub(crate) context: HostContext,
}

impl SilenceHook {
    /// Calls it; `None` stands for unknown ranks.
    pub(crate) fn call(self, peer: Option<usize>, step: usize, waited: Duration) {
        let peer = peer.map_or(-1, |peer| peer as i64);
        // SAFETY: the host promised a function that may be called with its context
        // (`annulus_attention_on_silence`)
        unsafe {
            (self.function)(self.context.pointer(), peer, step as i64, waited.as_secs_f64());
        }
    }
}

/// Reads a name.
///
/// # Safety
/// `name` is NULL or points to a text that ends with a zero byte.
pub(crate) unsafe fn name(name: *const c_char) -> Result<String> {
    // SAFETY: as the caller promises
    let text = unsafe { text("name", name) }?;
    if text.is_empty() {
        return Err(Error::invalid("name", "an empty text", "a name that all ranks give alike"));
    }
    Ok(text.to_owned())
}

/// Reads the text of an argument.
///
/// # Safety
/// `text` is NULL or points to a text that ends with a zero byte, which outlives the result.
pub(crate) unsafe fn text<'a>(argument: &'static str, text: *const c_char) -> Result<&'a str> {
    check_pointer(argument, text)?;
    // SAFETY: not NULL, and the caller promises the rest
    let text = unsafe { CStr::from_ptr(text) };
    text.to_str().map_err(|_| Error::invalid(argument, format!("{text:?}"), "UTF-8"))
}

fn pair(query: &Query, key: &Key) -> annulus_pair {
    annulus_pair {
        batch: query.batch as i64,
        head: query.head as i64,
        q_row: query.row.cast_signed(),
        kv_row: key.row.cast_signed(),
        q_position: query.position,
        kv_position: key.position,
    }
}

/// A mask of the host's.
#[derive(Debug)]
pub(crate) struct HostMask {
    pub(crate) name: String,
    pub(crate) flags: u32,
    pub(crate) visible: unsafe extern "C" fn(*mut c_void, *const annulus_pair) -> i32,
    pub(crate) context: HostContext,
}

impl Mask for HostMask {
    fn fingerprint(&self, into: Fingerprint) -> Fingerprint {
        into.text("host mask").text(&self.name).number(self.flags.into())
    }

    fn visible(&self, query: &Query, key: &Key) -> bool {
        let mut pair = pair(query, key);
        if !self.per_head() {
            pair.head = 0;
        }
        if !self.per_batch() {
            pair.batch = 0;
        }
        // SAFETY: the host promised a function that may be called with its context from any thread
        // as long as a plan has it (`annulus_attention_add_mask`); the pair lives through the call
        unsafe { (self.visible)(self.context.pointer(), &raw const pair) != 0 }
    }

    fn intervals(&self, _: &Query) -> Option<KeyIntervals> {
        None
    }

    fn per_head(&self) -> bool {
        self.flags & ANNULUS_MASK_PER_HEAD != 0
    }

    fn per_batch(&self) -> bool {
        self.flags & ANNULUS_MASK_PER_BATCH != 0
    }
}

/// A bias function of the host's.
#[derive(Debug)]
pub(crate) struct HostBias {
    pub(crate) name: String,
    pub(crate) bias: unsafe extern "C" fn(*mut c_void, *const annulus_pair) -> f64,
    pub(crate) context: HostContext,
}

impl BiasFunction for HostBias {
    fn fingerprint(&self, into: Fingerprint) -> Fingerprint {
        into.text("host bias").text(&self.name)
    }

    fn bias(&self, query: &Query, key: &Key) -> f64 {
        let pair = pair(query, key);
        // SAFETY: as of `HostMask::visible` (`annulus_attention_set_bias_function`)
        unsafe { (self.bias)(self.context.pointer(), &raw const pair) }
    }
}
