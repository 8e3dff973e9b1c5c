//! Masks and bias functions that the host computes.

use std::ffi::{CStr, c_char, c_void};

use annulus::{
    BiasFunction, Error, Fingerprint, KeyIntervals, Mask, Result,
    mask::{Key, Query},
};

use crate::versioned::check_pointer;

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
/// `waited_seconds`, a quarter of the deadline, in ring step `step`: once per silence.
pub type annulus_silence_function =
    Option<unsafe extern "C" fn(context: *mut c_void, peer: i64, step: i64, waited_seconds: f64)>;

/// The mask depends on the query head.
pub const ANNULUS_MASK_PER_HEAD: u32 = 1;
/// The mask depends on the batch row other than through positions.
pub const ANNULUS_MASK_PER_BATCH: u32 = 2;

/// The host's pointer that is passed back to its callbacks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Context(*mut c_void);

// SAFETY: annulus only passes the pointer back; the documentation of every callback has the host
// promise that it may be called from any thread
unsafe impl Send for Context {}
// SAFETY: as above, from several threads at once
unsafe impl Sync for Context {}

impl Context {
    pub(crate) const fn new(pointer: *mut c_void) -> Self {
        Self(pointer)
    }

    /// The pointer. A method, so that a closure captures the whole context, which is Send.
    pub(crate) const fn pointer(self) -> *mut c_void {
        self.0
    }
}

/// Reads a name.
///
/// # Safety
/// `name` is NULL or points to a text that ends with a zero byte.
pub(crate) unsafe fn name(name: *const c_char) -> Result<String> {
    check_pointer("name", name)?;
    // SAFETY: not NULL, and the caller promises the rest
    let text = unsafe { CStr::from_ptr(name) };
    let text = text.to_str().map_err(|_| Error::invalid("name", format!("{text:?}"), "UTF-8"))?;
    if text.is_empty() {
        return Err(Error::invalid("name", "an empty text", "a name that all ranks give alike"));
    }
    Ok(text.to_owned())
}

fn number(row: u64) -> i64 {
    row.cast_signed()
}

fn pair(query: &Query, key: &Key) -> annulus_pair {
    annulus_pair {
        batch: number(query.batch as u64),
        head: number(query.head as u64),
        q_row: number(query.row),
        kv_row: number(key.row),
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
    pub(crate) context: Context,
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
    pub(crate) context: Context,
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
