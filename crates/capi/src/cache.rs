//! The handle of a KV cache: creation over each kind of ring, appends, queries, destruction.

use std::ffi::c_int;

use annulus::{Cache, Element, Error, LocalCache, Result, Setup, Spec};
use annulus_core::{Host, Transport};
use ndarray::{ArrayView2, ArrayView4, ArrayViewMut3, ArrayViewMut4};

#[cfg(feature = "mpi")]
use crate::endpoint::MPI_Comm;
use crate::{
    attention::{annulus_attention, description},
    endpoint::{self, Communicator, annulus_endpoint},
    fields::{self, Versioned, length, write_numbers, write_rows},
    handle::Handles,
    options::Description,
    passes,
    plan::by_dtype,
    status::guard,
    tensor::{Checked, annulus_tensor, check_overlap},
};

/// A KV cache for decoding and chunked prefill, whose rows are sharded over ranks. Opaque.
pub struct annulus_cache {
    _opaque: [u8; 0],
}

static CACHES: Handles<CacheState> = Handles::new("cache");

/// State behind the handle of a cache: a cache of either kind of ring.
enum CacheState {
    /// All ranks, as threads of this process.
    Ring(LocalCache),
    /// One rank.
    Rank(Box<Cache>),
}

/// Views of a call of [`annulus_cache_attend`].
struct AttendTensors<'a, T: Element> {
    q: ArrayView4<'a, T>,
    softmax_aux: Option<ArrayView2<'a, T::Accumulator>>,
    out: ArrayViewMut4<'a, T>,
    lse: ArrayViewMut3<'a, T::Accumulator>,
}

/// Keys and values of rows.
type KeysValues<'a, T> = (ArrayView4<'a, T>, ArrayView4<'a, T>);

/// Evaluates an expression for either kind of cache.
macro_rules! either {
    ($state:expr, $cache:ident => $body:expr) => {
        match $state {
            CacheState::Ring($cache) => $body,
            CacheState::Rank($cache) => $body,
        }
    };
}

impl CacheState {
    fn spec(&self) -> &Spec {
        either!(self, cache => cache.spec())
    }

    fn append_own<T: Element>(&mut self, count: usize, (k, v): KeysValues<'_, T>) -> Result<()> {
        match self {
            // the tensors of this process have the rows of all ranks
            Self::Ring(_) if k.dim().1 != count => {
                Err(Error::invalid("count", count, format!("the {} rows of k", k.dim().1)))
            }
            Self::Ring(ring) => ring.append(k, v),
            Self::Rank(cache) => cache.append_own(count, k, v),
        }
    }

    /// Computes the call. If its arguments were refused, so is the call on the other ranks.
    fn attend<T: Element>(&mut self, tensors: Result<AttendTensors<'_, T>>) -> Result<()> {
        let AttendTensors { q, softmax_aux, out, lse } = tensors.map_err(|error| match self {
            Self::Ring(_) => error,
            Self::Rank(cache) => cache.refuse(error),
        })?;
        either!(self, cache => cache.attend_into(q, softmax_aux, out, lse).map(drop))
    }
}

/// Makes one rank of a cache over a transport. The transport comes first, so that ranks with other
/// options do not wait for one whose options have no cache.
fn over<T: Transport<Host> + 'static>(
    description: &Description,
    transport: T,
) -> Result<CacheState> {
    let Setup { attention, runtime, .. } = &description.setup;
    let cache = Cache::new(attention, runtime, description.cache_shape()?, transport)?;
    Ok(CacheState::Rank(Box::new(cache)))
}

/// Creates an empty KV cache of `ranks` ranks in this process.
///
/// Each rank has every ranks-th page of options.page_rows rows. options.q_len and kv_len are 0: the
/// cache has the rows that are appended. annulus_cache_attend starts one thread per rank (none for
/// one rank), each of which computes with `options.threads` threads. `*cache` is NULL if the call
/// fails.
///
/// Local.
///
/// # Errors
/// ANNULUS_INVALID_ARGUMENT; ANNULUS_OUT_OF_MEMORY; ANNULUS_UNSUPPORTED, with its name, for what a
/// cache does not have: layout, route, strategy, kv_block_size, receive_ahead, backward_mode,
/// local_gradients, bias_dims, unnormalized, a machine, and a function of
/// [`annulus_attention_on_step`](crate::annulus_attention_on_step).
///
/// # Safety
/// `cache` points to a writable pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn annulus_cache_create_threads(
    attention: *const annulus_attention,
    ranks: i64,
    cache: *mut *mut annulus_cache,
) -> c_int {
    let make = || {
        let description = description(attention)?;
        let shape = description.cache_shape()?;
        let Setup { attention, runtime, .. } = &description.setup;
        let ring = LocalCache::new(attention, runtime, shape, length("ranks", ranks)?)?;
        Ok(CacheState::Ring(ring))
    };
    // SAFETY: as the caller promises
    unsafe { CACHES.create(cache, make) }
}

/// Creates this rank of an empty KV cache over the ranks of a communicator of MPI, given as Fortran
/// and MPI_Comm_c2f have it. The rules for the communicator are those of
/// [`annulus_plan_create_mpi_f`](crate::annulus_plan_create_mpi_f).
///
/// Collective over the communicator. `*cache` is NULL if the call fails.
///
/// # Errors
/// As [`annulus_cache_create_threads`] and
/// [`annulus_plan_create_mpi_f`](crate::annulus_plan_create_mpi_f).
///
/// # Safety
/// As [`annulus_plan_create_mpi_f`](crate::annulus_plan_create_mpi_f).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn annulus_cache_create_mpi_f(
    attention: *const annulus_attention,
    communicator: i32,
    cache: *mut *mut annulus_cache,
) -> c_int {
    let make = || {
        let description = description(attention)?;
        // SAFETY: as the caller promises
        let endpoint = unsafe { Communicator::Fortran(communicator).open(&description) }?;
        over(&description, endpoint)
    };
    // SAFETY: as the caller promises
    unsafe { CACHES.create(cache, make) }
}

/// As [`annulus_cache_create_mpi_f`], of a communicator as C has it.
///
/// Only in a library with the feature mpi. The header declares it where ANNULUS_WITH_MPI is
/// defined, and then includes mpi.h.
///
/// # Errors
/// As [`annulus_cache_create_mpi_f`].
///
/// # Safety
/// As [`annulus_cache_create_mpi_f`].
#[cfg(feature = "mpi")]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn annulus_cache_create_mpi(
    attention: *const annulus_attention,
    communicator: MPI_Comm,
    cache: *mut *mut annulus_cache,
) -> c_int {
    let make = || {
        let description = description(attention)?;
        // SAFETY: as the caller promises
        let endpoint = unsafe { Communicator::C(communicator).open(&description) }?;
        over(&description, endpoint)
    };
    // SAFETY: as the caller promises
    unsafe { CACHES.create(cache, make) }
}

/// Creates this rank of an empty KV cache over an endpoint, which several plans and caches share,
/// by the rules of [`annulus_plan_create_endpoint`](crate::annulus_plan_create_endpoint).
///
/// Collective over the ranks of the endpoint. `*cache` is NULL if the call fails.
///
/// # Errors
/// As [`annulus_cache_create_threads`] and
/// [`annulus_plan_create_endpoint`](crate::annulus_plan_create_endpoint).
///
/// # Safety
/// `cache` points to a writable pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn annulus_cache_create_endpoint(
    attention: *const annulus_attention,
    endpoint: *const annulus_endpoint,
    cache: *mut *mut annulus_cache,
) -> c_int {
    let make = || {
        let endpoint = endpoint::share(endpoint)?;
        over(&description(attention)?, endpoint)
    };
    // SAFETY: as the caller promises
    unsafe { CACHES.create(cache, make) }
}

/// Creates the cache of one rank over a transport, as the functions over MPI do, for tests.
#[doc(hidden)]
pub fn cache_over<T: Transport<Host> + 'static>(
    attention: *const annulus_attention,
    transport: T,
    cache: &mut *mut annulus_cache,
) -> c_int {
    // SAFETY: a reference to a writable pointer
    unsafe { CACHES.create(cache, || over(&description(attention)?, transport)) }
}

/// Reads and views keys and values.
///
/// # Safety
/// As [`annulus_cache_append`].
unsafe fn keys_values<'a, T: Element>(
    k: *const annulus_tensor,
    v: *const annulus_tensor,
) -> Result<KeysValues<'a, T>> {
    // SAFETY: as the caller promises
    unsafe { Ok((Checked::read("k", k)?.view()?, Checked::read("v", v)?.view()?)) }
}

/// Appends rows that every rank passes: each rank copies those of its pages.
///
/// `k` is `[batch, rows, kv_heads, head_dim]` and `v` `[batch, rows, kv_heads, value_dim]`, of the
/// type of the options: the same rows on every rank.
///
/// Local: nothing is sent. [`annulus_cache_attend`] checks that all ranks have appended as many
/// rows.
///
/// # Errors
/// ANNULUS_INVALID_ARGUMENT, ANNULUS_OUT_OF_MEMORY, ANNULUS_POISONED: nothing was appended.
///
/// # Safety
/// `k` and `v` point to tensors whose elements are allocated and which nobody writes to during the
/// call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn annulus_cache_append(
    cache: *mut annulus_cache,
    k: *const annulus_tensor,
    v: *const annulus_tensor,
) -> c_int {
    guard(|| {
        // SAFETY: as the caller promises, for all four
        CACHES.with(cache, |state| unsafe {
            by_dtype!(state, T => {
                let (k, v) = keys_values::<T>(k, v)?;
                either!(state, cache => cache.append(k, v))
            })
        })
    })
}

/// Appends `count` rows, of which this rank passes only those of its pages, in ascending order
/// ([`annulus_cache_own_rows`]): a prefill whose keys and values are sharded. In an in-process ring
/// these are all rows.
///
/// `k` is `[batch, own rows, kv_heads, head_dim]` and `v` `[batch, own rows, kv_heads, value_dim]`.
///
/// Local. `count` is the same on every rank.
///
/// # Errors
/// As [`annulus_cache_append`].
///
/// # Safety
/// As [`annulus_cache_append`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn annulus_cache_append_own(
    cache: *mut annulus_cache,
    count: i64,
    k: *const annulus_tensor,
    v: *const annulus_tensor,
) -> c_int {
    guard(|| {
        // SAFETY: as the caller promises, for all four
        CACHES.with(cache, |state| unsafe {
            let count = length("count", count)?;
            by_dtype!(state, T => state.append_own(count, keys_values::<T>(k, v)?))
        })
    })
}

/// Writes the rows of this rank among the next `next` rows, which count from 0, to `rows`, and
/// their number to `*count`. Local.
///
/// `rows` has room for `capacity` numbers. With NULL as `rows` and 0 as `capacity` only the number
/// is written. In an in-process ring these are all rows, because its tensors are whole.
///
/// # Errors
/// ANNULUS_INVALID_ARGUMENT, also if there is too little room: then `*count` is written, and no
/// row.
///
/// # Safety
/// `rows` points to `capacity` writable numbers, `count` to one.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn annulus_cache_own_rows(
    cache: *const annulus_cache,
    next: i64,
    rows: *mut i64,
    capacity: i64,
    count: *mut i64,
) -> c_int {
    // `count` is another argument here
    let of_next = |error| match error {
        Error::InvalidArgument { argument, got, want } if argument == "count" => {
            Error::invalid("next", got, want)
        }
        other => other,
    };
    let of = || {
        let next = length("next", next)?;
        CACHES.with(cache, |state| either!(state, cache => cache.own_rows(next)).map_err(of_next))
    };
    // SAFETY: as the caller promises
    guard(|| unsafe { write_rows([rows, count], capacity, of) })
}

/// Removes the rows from `len` on, for example tokens of a speculation that were refused. Their
/// memory is kept for later rows.
///
/// Local, as [`annulus_cache_append`].
///
/// # Errors
/// ANNULUS_INVALID_ARGUMENT, also if there are fewer rows.
#[unsafe(no_mangle)]
pub extern "C" fn annulus_cache_truncate(cache: *mut annulus_cache, len: i64) -> c_int {
    guard(|| {
        let len = length("len", len)? as u64;
        CACHES.with(cache, |state| either!(state, cache => cache.truncate(len)))
    })
}

/// The tensors of [`annulus_cache_attend`]. T is the type of the options; A is f64 for f64 and f32
/// for the others.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct annulus_attend_args {
    /// sizeof(annulus_attend_args).
    pub struct_size: u64,
    /// Input `[batch, queries, q_heads, head_dim]`, T: the queries of the last cached rows.
    pub q: *const annulus_tensor,
    /// Input `[q_heads or 1, sinks, 1, 1]`, A. NULL without sinks.
    pub softmax_aux: *const annulus_tensor,
    /// Output `[batch, queries, q_heads, value_dim]`, T.
    pub out: *const annulus_tensor,
    /// Output `[batch, q_heads, queries, 1]`, A: natural logarithm of the row sum of e^score.
    pub lse: *const annulus_tensor,
}

// SAFETY: repr(C), begins with its size, and pointers may be null
unsafe impl Versioned for annulus_attend_args {
    const NAME: &'static str = "args";
    const FIRST_BYTES: usize = 40;
}

/// Checks and views the tensors of a call.
///
/// # Safety
/// As [`annulus_cache_attend`].
unsafe fn attend_tensors<'a, T: Element>(
    args: *const annulus_attend_args,
) -> Result<AttendTensors<'a, T>> {
    // SAFETY: as the caller promises; the views of outputs share no element with another view,
    // which `tensor::check` has proved before any is made
    unsafe {
        let args = fields::read(args)?;
        let q = Checked::read("q", args.q)?;
        let softmax_aux = Checked::read_optional("softmax_aux", args.softmax_aux)?;
        let out = Checked::read("out", args.out)?;
        let lse = Checked::read("lse", args.lse)?;
        check_overlap(|| [q].into_iter().chain(softmax_aux), || [out, lse].into_iter())?;
        Ok(AttendTensors {
            q: q.view()?,
            softmax_aux: passes::view(softmax_aux)?,
            out: out.view_mut()?,
            lse: lse.view_mut()?,
        })
    }
}

/// Computes out and lse of the queries of the last cached rows, in place: of n queries, query i has
/// the row number and the position len - n + i. All ranks pass the same queries and sinks, and all
/// get the result, with the same bits.
///
/// Collective over the ranks. Outputs share no element with another tensor of the call. A rank
/// sends [`annulus_cache_predicted_bytes`], whatever the number of cached rows.
///
/// # Errors
/// ANNULUS_INVALID_ARGUMENT and ANNULUS_OUT_OF_MEMORY here and ANNULUS_REFUSED elsewhere;
/// ANNULUS_RANK_MISMATCH if ranks have different numbers of cached rows or of queries: nothing was
/// written, the cache lives. ANNULUS_ARRIVAL_TIMEOUT: likewise, and the call is to be made again
/// with the same arguments. ANNULUS_COMM, ANNULUS_TIMEOUT, ANNULUS_PEER_LOST, ANNULUS_ABORTED,
/// ANNULUS_DEVICE and ANNULUS_INTERNAL end the cache: later calls return ANNULUS_POISONED. A handle
/// that is not alive is refused locally, without the other ranks.
///
/// # Safety
/// `args` points to initialised arguments, which point to tensors whose elements are allocated and
/// which nobody else writes to during the call; outputs are not read either.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn annulus_cache_attend(
    cache: *mut annulus_cache,
    args: *const annulus_attend_args,
) -> c_int {
    guard(|| {
        // SAFETY: as the caller promises, for all four
        CACHES.with(cache, |state| unsafe {
            by_dtype!(state, T => state.attend(attend_tensors::<T>(args)))
        })
    })
}

/// Writes a number to `*out`, computed from the cache.
///
/// # Safety
/// `out` is NULL, misaligned or points to a writable value.
unsafe fn answer<T>(
    cache: *const annulus_cache,
    name: &str,
    out: *mut T,
    of: impl FnOnce(&CacheState) -> Result<T>,
) -> c_int {
    let number = || CACHES.with(cache, |state| Ok([of(state)?]));
    // SAFETY: as the caller promises
    guard(|| unsafe { write_numbers([(name, out)], number) })
}

/// Writes the number of cached rows of all ranks to `*len`. Local.
///
/// # Errors
/// ANNULUS_INVALID_ARGUMENT.
///
/// # Safety
/// `len` points to a writable number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn annulus_cache_len(cache: *const annulus_cache, len: *mut i64) -> c_int {
    // SAFETY: as the caller promises
    unsafe {
        answer(cache, "len", len, |state| Ok(either!(state, cache => cache.len()).cast_signed()))
    }
}

/// Writes the number of cached rows of this rank to `*len`: all rows in an in-process ring. Local.
///
/// # Errors
/// ANNULUS_INVALID_ARGUMENT.
///
/// # Safety
/// `len` points to a writable number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn annulus_cache_local_len(
    cache: *const annulus_cache,
    len: *mut i64,
) -> c_int {
    let of = |state: &CacheState| match state {
        CacheState::Ring(ring) => Ok(ring.len().cast_signed()),
        CacheState::Rank(cache) => Ok(cache.local_len().cast_signed()),
    };
    // SAFETY: as the caller promises
    unsafe { answer(cache, "len", len, of) }
}

/// Writes the rows of a page to `*rows`. Local.
///
/// # Errors
/// ANNULUS_INVALID_ARGUMENT.
///
/// # Safety
/// `rows` points to a writable number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn annulus_cache_page_rows(
    cache: *const annulus_cache,
    rows: *mut i64,
) -> c_int {
    let of = |state: &CacheState| Ok(either!(state, cache => cache.page_rows()).cast_signed());
    // SAFETY: as the caller promises
    unsafe { answer(cache, "rows", rows, of) }
}

/// Writes this rank to `*rank`; 0 for an in-process ring. Local.
///
/// # Errors
/// ANNULUS_INVALID_ARGUMENT.
///
/// # Safety
/// `rank` points to a writable number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn annulus_cache_rank(cache: *const annulus_cache, rank: *mut i64) -> c_int {
    let of = |state: &CacheState| match state {
        CacheState::Ring(_) => Ok(0),
        CacheState::Rank(cache) => Ok(cache.rank() as i64),
    };
    // SAFETY: as the caller promises
    unsafe { answer(cache, "rank", rank, of) }
}

/// Writes the number of ranks to `*ranks`. Local.
///
/// # Errors
/// ANNULUS_INVALID_ARGUMENT.
///
/// # Safety
/// `ranks` points to a writable number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn annulus_cache_ranks(
    cache: *const annulus_cache,
    ranks: *mut i64,
) -> c_int {
    let of = |state: &CacheState| match state {
        CacheState::Ring(ring) => Ok(ring.ranks().len() as i64),
        CacheState::Rank(cache) => Ok(cache.ranks() as i64),
    };
    // SAFETY: as the caller promises
    unsafe { answer(cache, "ranks", ranks, of) }
}

/// Writes the payload bytes that a call of [`annulus_cache_attend`] with `queries` queries sends to
/// `*bytes`: those of this rank, or of all ranks of an in-process ring. Local.
///
/// # Errors
/// ANNULUS_INVALID_ARGUMENT.
///
/// # Safety
/// `bytes` points to a writable number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn annulus_cache_predicted_bytes(
    cache: *const annulus_cache,
    queries: i64,
    bytes: *mut u64,
) -> c_int {
    let of = |state: &CacheState| {
        let queries = length("queries", queries)?;
        Ok(either!(state, cache => cache.bytes_predicted(queries)))
    };
    // SAFETY: as the caller promises
    unsafe { answer(cache, "bytes", bytes, of) }
}

/// Writes the bytes of keys, values and message buffers of the ranks in this process to `*bytes`.
/// The memory of a rank grows by segments of at least 4,096 rows. Local.
///
/// # Errors
/// ANNULUS_INVALID_ARGUMENT.
///
/// # Safety
/// `bytes` points to a writable number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn annulus_cache_buffer_bytes(
    cache: *const annulus_cache,
    bytes: *mut u64,
) -> c_int {
    let of = |state: &CacheState| Ok(either!(state, cache => cache.buffer_bytes()));
    // SAFETY: as the caller promises
    unsafe { answer(cache, "bytes", bytes, of) }
}

/// Destroys a cache. If a call is using it, it is destroyed when that call ends.
///
/// Local: a rank that failed can do it alone. Over MPI it waits up to one second for
/// the other ranks to do the same, so that nothing is in flight. After MPI_Finalize it is harmless.
///
/// # Errors
/// ANNULUS_INVALID_ARGUMENT for NULL, a foreign handle, or one that was destroyed.
#[unsafe(no_mangle)]
pub extern "C" fn annulus_cache_destroy(cache: *mut annulus_cache) -> c_int {
    guard(|| CACHES.remove(cache))
}
