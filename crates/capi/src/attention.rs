//! The handle of a description, to which masks, functions and a layout are added.

use std::{
    ffi::{CStr, OsStr, c_char, c_int, c_void},
    os::unix::ffi::OsStrExt,
    path::Path,
    sync::Arc,
};

use annulus::{
    Error, Layout, Result, Setup, Strategy,
    bias::{Alibi, BiasTable},
    comm::ring::StepEvent,
    mask::Neighborhood,
    planning::{CustomLayout, Runs},
};

use crate::{
    batch::{annulus_batch, copied},
    callbacks::{
        ANNULUS_MASK_PER_BATCH, ANNULUS_MASK_PER_HEAD, HostBias, HostContext, HostMask,
        SilenceHook, annulus_bias_function, annulus_mask_function, annulus_silence_function,
        annulus_step_event, annulus_step_function, name, text,
    },
    fields::{self, check_pointer, length, list, write_rows},
    handle::Handles,
    option_fields::annulus_options,
    options::{Description, ListedKind},
    status::guard,
};

/// The description of an attention. Opaque.
pub struct annulus_attention {
    _opaque: [u8; 0],
}

pub(crate) static ATTENTIONS: Handles<Description> = Handles::new("attention");

/// Changes the description behind a handle. Returns the status.
pub(crate) fn change(
    attention: *mut annulus_attention,
    body: impl FnOnce(&mut Description) -> Result<()>,
) -> c_int {
    guard(|| ATTENTIONS.with(attention, body))
}

/// Copies the description behind a handle.
pub(crate) fn description(attention: *const annulus_attention) -> Result<Description> {
    ATTENTIONS.with(attention, |description| Ok(description.clone()))
}

/// Returns what the builder has made of the options, for tests.
#[doc(hidden)]
pub fn setup_of(attention: *const annulus_attention) -> Result<Setup> {
    Ok(description(attention)?.setup)
}

/// Returns a function of the host's, or refuses NULL.
fn given<F>(name: &str, function: Option<F>) -> Result<F> {
    function.ok_or_else(|| Error::invalid(name, "NULL", "a function"))
}

/// Describes an attention: checks the options and returns a handle in `*attention`.
///
/// Local. The handle is destroyed by [`annulus_attention_destroy`]; plans that were made of it live
/// on. `*attention` is NULL if the call fails.
///
/// # Errors
/// ANNULUS_INVALID_ARGUMENT, with the name of the option; ANNULUS_UNSUPPORTED for an option of a
/// newer header.
///
/// # Safety
/// `options` points to initialised options, `attention` to a writable pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn annulus_attention_create(
    options: *const annulus_options,
    attention: *mut *mut annulus_attention,
) -> c_int {
    // SAFETY: as the caller promises
    unsafe { ATTENTIONS.create(attention, || Description::of(&fields::read(options)?)) }
}

/// Adds a mask of the host's, as one more condition.
///
/// `name` identifies the mask: ranks compare it, so two functions that differ, and two contexts
/// that differ, have two names. `flags` is a sum of ANNULUS_MASK_PER_HEAD and
/// ANNULUS_MASK_PER_BATCH; without them the function is called once for all heads and batch rows.
/// `context` is passed back.
///
/// The function and its context must live until this attention and all plans that were made of it
/// are destroyed. See [`annulus_mask_function`] for what it may do.
///
/// # Errors
/// ANNULUS_INVALID_ARGUMENT.
///
/// # Safety
/// `name` is a text that ends with a zero byte, and the function is as said.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn annulus_attention_add_mask(
    attention: *mut annulus_attention,
    name: *const c_char,
    flags: u32,
    visible: annulus_mask_function,
    context: *mut c_void,
) -> c_int {
    change(attention, |description| {
        // SAFETY: as the caller promises
        let name = unsafe { self::name(name) }?;
        let visible = given("visible", visible)?;
        if flags & !(ANNULUS_MASK_PER_HEAD | ANNULUS_MASK_PER_BATCH) != 0 {
            return Err(Error::invalid("flags", flags, "a sum of ANNULUS_MASK_* constants"));
        }
        let mask = HostMask { name, flags, visible, context: HostContext::new(context) };
        description.set_attention(|attention| attention.mask(Arc::new(mask)));
        Ok(())
    })
}

/// Adds a neighbourhood on a grid of one to three axes, whose points are the positions in row-major
/// order, as one more condition (docs/semantics.md).
///
/// `text` is SHAPE:WINDOW[:OPTION=...], with a number for each axis or one for all:
/// "64x128:7x5:dilation=2x1:causal=0x1:periodic=0:edge=clip". A window of w points has w / 2 before
/// the query, 3+2 stands for 3 before and 2 after. Default: dilation 1, no causal and no periodic
/// axis, edge=shift, by which every query has all its keys.
///
/// # Errors
/// ANNULUS_INVALID_ARGUMENT, naming `shape`, `window`, `dilation`, `causal`, `periodic`, `edge` or
/// `neighborhood`.
///
/// # Safety
/// `text` is a text that ends with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn annulus_attention_add_neighborhood(
    attention: *mut annulus_attention,
    text: *const c_char,
) -> c_int {
    change(attention, |description| {
        // SAFETY: as the caller promises
        let mask: Neighborhood = unsafe { self::text("text", text) }?.parse()?;
        description.set_attention(|attention| attention.mask(Arc::new(mask)));
        Ok(())
    })
}

/// Sets a bias that the host computes from each pair, in place of an earlier one. It is added to
/// the bias tensor, if there is one, and has no gradient.
///
/// Name, context and function: as of [`annulus_attention_add_mask`].
///
/// # Errors
/// ANNULUS_INVALID_ARGUMENT.
///
/// # Safety
/// As of [`annulus_attention_add_mask`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn annulus_attention_set_bias_function(
    attention: *mut annulus_attention,
    name: *const c_char,
    bias: annulus_bias_function,
    context: *mut c_void,
) -> c_int {
    change(attention, |description| {
        // SAFETY: as the caller promises
        let name = unsafe { self::name(name) }?;
        let bias = given("bias", bias)?;
        let function = HostBias { name, bias, context: HostContext::new(context) };
        description.set_attention(|attention| attention.bias_function(Arc::new(function)));
        Ok(())
    })
}

/// Sets the bias -slope * |i' - j'| of ALiBi (Press et al. 2022), in place of another bias
/// function.
///
/// `slopes` has `count` numbers, one per query head.
///
/// # Errors
/// ANNULUS_INVALID_ARGUMENT, also if `count` is not the number of query heads.
///
/// # Safety
/// `slopes` points to `count` numbers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn annulus_attention_set_alibi(
    attention: *mut annulus_attention,
    slopes: *const f64,
    count: i64,
) -> c_int {
    change(attention, |description| {
        // SAFETY: as the caller promises
        let slopes = unsafe { list("slopes", slopes, count) }?;
        let heads = description.dims.q_heads;
        if slopes.len() != heads {
            let got = format!("{} numbers", slopes.len());
            return Err(Error::invalid("slopes", got, format!("{heads}, one per query head")));
        }
        let alibi = Alibi { slopes: slopes.to_vec() };
        description.set_attention(|attention| attention.bias_function(Arc::new(alibi)));
        Ok(())
    })
}

/// Sets which rows each rank holds, for the layout ANNULUS_LAYOUT_CUSTOM.
///
/// `q_rows` has the global query rows of rank 0 in its local order, then those of rank 1, and so
/// on; `q_counts[r]` is the number of rows of rank r. `kv_counts` and `kv_rows` are alike for keys.
/// Every row is on one rank. A plan of another number of ranks is refused.
///
/// # Errors
/// ANNULUS_INVALID_ARGUMENT, with the row that is missing or there twice.
///
/// # Safety
/// `q_counts` and `kv_counts` point to `ranks` numbers, `q_rows` and `kv_rows` to as many as these
/// add up to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn annulus_attention_set_custom_layout(
    attention: *mut annulus_attention,
    ranks: i64,
    q_counts: *const i64,
    q_rows: *const i64,
    kv_counts: *const i64,
    kv_rows: *const i64,
) -> c_int {
    change(attention, |description| {
        description.list(ListedKind::Custom, |division, _, dims| {
            // SAFETY: as the caller promises
            let (q, kv) = unsafe {
                let q_counts = list("q_counts", q_counts, ranks)?;
                let kv_counts = list("kv_counts", kv_counts, ranks)?;
                (shards("q", q_counts, q_rows)?, shards("kv", kv_counts, kv_rows)?)
            };
            let layout = Layout::Custom(Arc::new(CustomLayout { q, kv }));
            layout.validate(dims.q_len, dims.kv_len, length("ranks", ranks)?)?;
            Ok(division.layout(layout))
        })
    })
}

/// Divides a grid of one to three axes, whose points are the rows in row-major order, into one box
/// per rank, for the layout ANNULUS_LAYOUT_CUSTOM: boxes of about equal size and least surface, so
/// that a neighbourhood receives the least halo, with the rows of a rank in patches of 8 x 8 or
/// 4 x 4 x 4 points. A plan of another number of ranks is refused.
///
/// # Errors
/// ANNULUS_INVALID_ARGUMENT, naming `shape`, `ranks` or `layout`.
///
/// # Safety
/// `shape` points to `axes` numbers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn annulus_attention_set_boxes_layout(
    attention: *mut annulus_attention,
    ranks: i64,
    axes: i64,
    shape: *const i64,
) -> c_int {
    change(attention, |description| {
        description.list(ListedKind::Custom, |division, _, dims| {
            // SAFETY: as the caller promises
            let shape = unsafe { list("shape", shape, axes) }?;
            let lens = shape.iter().map(|&len| length("shape", len).map(|len| len as u64));
            let ranks = length("ranks", ranks)?;
            let layout = Layout::boxes(&lens.collect::<Result<Vec<_>>>()?, ranks)?;
            layout.validate(dims.q_len, dims.kv_len, ranks)?;
            Ok(division.layout(layout))
        })
    })
}

/// Makes the bias, whose shape options.bias_dims is then `[1, q_heads or 1, 1, entries]`, a table by
/// relative positions, in place of an earlier one. A plan's dbias is the gradient of the table.
///
/// Local. `kind` is `clipped:LEFT,RIGHT` (LEFT + RIGHT + 1 entries, by the difference of key and
/// query position), `t5:BUCKETS,DISTANCE` (BUCKETS entries, bidirectional),
/// `t5-causal:BUCKETS,DISTANCE`, or `grid:LENGTHS` or `grid:LENGTHS,WINDOWS` with one to three
/// lengths such as `8x8`. docs/semantics.md defines the entries.
///
/// # Errors
/// ANNULUS_INVALID_ARGUMENT naming `bias_table` for another text; of another options.bias_dims when
/// a plan is made.
///
/// # Safety
/// `kind` is a text that ends with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn annulus_attention_set_bias_table(
    attention: *mut annulus_attention,
    kind: *const c_char,
) -> c_int {
    change(attention, |description| {
        check_pointer("kind", kind)?;
        // SAFETY: not NULL, and the caller promises the rest
        let kind = unsafe { CStr::from_ptr(kind) }.to_string_lossy();
        let table: BiasTable = kind.parse()?;
        description.set_attention(|attention| attention.bias_table(table));
        Ok(())
    })
}

/// Sets the machine, of the machine file `path` (docs/machine.md), in place of an earlier one:
/// ANNULUS_STRATEGY_AUTO then takes the strategy of the least predicted time whose buffers fit the
/// memory of a rank, instead of the fewest bytes. All ranks have the same machine.
///
/// Local: the file is read by this call only. The command `annulus measure` writes it.
///
/// # Errors
/// ANNULUS_IO with the path, if the file cannot be read or is no machine; ANNULUS_INVALID_ARGUMENT
/// naming path and field for a wrong number, and naming `machine` if options.strategy is not
/// ANNULUS_STRATEGY_AUTO. The machine that was set before stays.
///
/// # Safety
/// `path` is a text that ends with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn annulus_attention_set_machine(
    attention: *mut annulus_attention,
    path: *const c_char,
) -> c_int {
    change(attention, |description| {
        check_pointer("path", path)?;
        // SAFETY: not NULL, and the caller promises the rest
        let path = Path::new(OsStr::from_bytes(unsafe { CStr::from_ptr(path) }.to_bytes()));
        if description.strategy != Strategy::Auto {
            let want = "none, or options.strategy = ANNULUS_STRATEGY_AUTO";
            return Err(Error::invalid("machine", path.display(), want));
        }
        let machine = annulus_machine_file::read(path)?;
        description.set_division(|division| division.machine(machine));
        Ok(())
    })
}

/// Gives every rank equal rows and balanced work for the documents of `batch`, for the layout
/// ANNULUS_LAYOUT_BALANCED on `ranks` ranks. With ANNULUS_ROUTE_AUTO it also chooses the route on
/// which rows are sent only to ranks that need them.
///
/// Local; every rank makes the same call. It uses the masks that were added before. `batch` has all
/// rows, on every rank: segment ids, positions or packed lengths; a dense mask is not used. NULL is
/// a batch without documents. Nothing of it is kept: the plan is given its own rows of the batch by
/// [`annulus_plan_update`](crate::annulus_plan_update). Other batches are computed correctly, less
/// balanced. A plan of another number of ranks is refused.
///
/// [`annulus_attention_q_rows`] then returns the rows of a rank.
///
/// # Errors
/// ANNULUS_INVALID_ARGUMENT, with the name of the tensor, or of `layout` if the options have
/// another one; ANNULUS_OUT_OF_MEMORY.
///
/// # Safety
/// `batch` is NULL or points to an initialised batch, whose tensors nobody writes to meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn annulus_attention_set_balanced_layout(
    attention: *mut annulus_attention,
    ranks: i64,
    batch: *const annulus_batch,
) -> c_int {
    change(attention, |description| {
        description.list(ListedKind::Balanced, |division, attention, dims| {
            let ranks = length("ranks", ranks)?;
            // SAFETY: as the caller promises
            let batch = unsafe { copied(batch) }?.unwrap_or_default();
            division.balanced(attention, dims, &batch, ranks)
        })
    })
}

/// Sets the documents for which ANNULUS_STRATEGY_AUTO chooses the strategy, in place of earlier
/// ones. Default: those of [`annulus_attention_set_balanced_layout`]; without either, it chooses by
/// the mask alone. NULL restores the default.
///
/// Local; every rank makes the same call, because the strategy is the same on all. `batch` has all
/// rows, on every rank: packed lengths, segment ids or positions; a dense mask is not used. Rows
/// after the last packed document are padding, and a document may have no row. The batch is copied,
/// and only the choice depends on it: the plan is given its own rows of it by
/// [`annulus_plan_update`](crate::annulus_plan_update), and other batches are computed correctly.
///
/// With a layout other than ANNULUS_LAYOUT_AUTO, [`annulus_attention_q_rows`] returns the rows of a
/// rank before there is a plan, whichever strategy is chosen. With ANNULUS_LAYOUT_AUTO the layout
/// depends on the strategy, and [`annulus_plan_q_rows`](crate::annulus_plan_q_rows) returns them.
///
/// # Errors
/// ANNULUS_INVALID_ARGUMENT, with the name of the tensor, or of `documents` if options.strategy is
/// not ANNULUS_STRATEGY_AUTO; ANNULUS_OUT_OF_MEMORY. The documents that were set before stay.
///
/// # Safety
/// `batch` is NULL or points to an initialised batch, whose tensors nobody writes to meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn annulus_attention_set_documents(
    attention: *mut annulus_attention,
    batch: *const annulus_batch,
) -> c_int {
    change(attention, |description| {
        // SAFETY: as the caller promises
        let batch = unsafe { copied(batch) }?;
        if batch.is_some() && description.strategy != Strategy::Auto {
            let got = format!("a batch, for the strategy {}", description.strategy);
            let want = "none, or options.strategy = ANNULUS_STRATEGY_AUTO";
            return Err(Error::invalid("documents", got, want));
        }
        let mut changed = description.clone();
        changed.set_division(|division| division.documents(batch));
        changed.setup.spec(changed.dims)?;
        *description = changed;
        Ok(())
    })
}

/// Writes the global query rows of `rank` of `ranks` to `rows`, in the order of its tensors, and
/// their number to `*count`, before there is a plan. Local.
///
/// `rows` has room for `capacity` numbers. With NULL as `rows` and 0 as `capacity` only the number
/// is written. A plan of `ranks` ranks has these rows, over MPI.
///
/// # Errors
/// ANNULUS_INVALID_ARGUMENT: `layout` if it is ANNULUS_LAYOUT_AUTO, which a plan chooses together
/// with the order of its ranks, or one of another number of ranks; also if there is too little
/// room: then `*count` is written, and no row.
///
/// # Safety
/// `rows` points to `capacity` writable numbers, `count` to one.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn annulus_attention_q_rows(
    attention: *const annulus_attention,
    ranks: i64,
    rank: i64,
    rows: *mut i64,
    capacity: i64,
    count: *mut i64,
) -> c_int {
    let of = || Ok(rows_of_rank(attention, ranks, rank)?.q);
    // SAFETY: as the caller promises
    guard(|| unsafe { write_rows([rows, count], capacity, of) })
}

/// As [`annulus_attention_q_rows`], of keys.
///
/// # Errors
/// As [`annulus_attention_q_rows`].
///
/// # Safety
/// As [`annulus_attention_q_rows`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn annulus_attention_kv_rows(
    attention: *const annulus_attention,
    ranks: i64,
    rank: i64,
    rows: *mut i64,
    capacity: i64,
    count: *mut i64,
) -> c_int {
    let of = || Ok(rows_of_rank(attention, ranks, rank)?.kv);
    // SAFETY: as the caller promises
    guard(|| unsafe { write_rows([rows, count], capacity, of) })
}

fn rows_of_rank(
    attention: *const annulus_attention,
    ranks: i64,
    rank: i64,
) -> Result<annulus::RankRows> {
    ATTENTIONS.with(attention, |description| {
        description.check_listed()?;
        let (ranks, rank) = (length("ranks", ranks)?, length("rank", rank)?);
        let Setup { attention, division, .. } = &description.setup;
        division.rank_rows(attention, description.dims, ranks, rank)
    })
}

/// The rows of every rank.
///
/// # Safety
/// `rows` points to as many numbers as `counts` add up to.
unsafe fn shards(side: &str, counts: &[i64], rows: *const i64) -> Result<Vec<Runs>> {
    let total = counts.iter().try_fold(0i64, |total, &count| {
        length(&format!("{side}_counts"), count)?;
        total.checked_add(count).ok_or_else(|| {
            Error::invalid(format!("{side}_counts"), "more than 2^63 rows", "fewer rows")
        })
    })?;
    // SAFETY: as the caller promises
    let mut rest = unsafe { list(&format!("{side}_rows"), rows, total) }?;
    let mut shards = Vec::with_capacity(counts.len());
    for &count in counts {
        let (own, others) = rest.split_at(length(side, count)?);
        shards.push(own.iter().copied().collect());
        rest = others;
    }
    Ok(shards)
}

/// Sets the function that is called when a rank has been silent for a quarter of the deadline.
/// NULL is refused: by default there is none.
///
/// Function and context must live until this attention and all plans that were made of it are
/// destroyed. The function does not unwind and calls no function of annulus.
///
/// # Errors
/// ANNULUS_INVALID_ARGUMENT.
///
/// # Safety
/// The function is as said.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn annulus_attention_on_silence(
    attention: *mut annulus_attention,
    silence: annulus_silence_function,
    context: *mut c_void,
) -> c_int {
    change(attention, |description| {
        let silence = given("silence", silence)?;
        let hook = SilenceHook { function: silence, context: HostContext::new(context) };
        let call = move |silence: annulus::comm::Silence| {
            hook.call(Some(silence.peer), silence.step, silence.waited);
        };
        description.set_runtime(|runtime| runtime.on_silence(call));
        description.mpi.silence = Some(hook);
        Ok(())
    })
}

/// Sets the function that is called with every activity of a pass, in place of an earlier one. NULL
/// is refused: by default there is none, and then no clock is read.
///
/// Function and context must live until this attention and all plans that were made of it are
/// destroyed. See [`annulus_step_function`] for what the function may do.
///
/// # Errors
/// ANNULUS_INVALID_ARGUMENT.
///
/// # Safety
/// The function is as said.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn annulus_attention_on_step(
    attention: *mut annulus_attention,
    step: annulus_step_function,
    context: *mut c_void,
) -> c_int {
    change(attention, |description| {
        let step = given("step", step)?;
        let context = HostContext::new(context);
        let hook = move |event: StepEvent| {
            let event = annulus_step_event::of(&event);
            // SAFETY: the host promised a function that may be called with its context from any
            // thread as long as a plan has it; the event lives through the call
            unsafe { step(context.pointer(), &raw const event) };
        };
        description.set_runtime(|runtime| runtime.on_step(hook));
        Ok(())
    })
}

/// Destroys the handle of a description. Local. Plans that were made of it live on.
///
/// # Errors
/// ANNULUS_INVALID_ARGUMENT for NULL, a foreign handle, or one that was destroyed.
#[unsafe(no_mangle)]
pub extern "C" fn annulus_attention_destroy(attention: *mut annulus_attention) -> c_int {
    guard(|| ATTENTIONS.remove(attention))
}
