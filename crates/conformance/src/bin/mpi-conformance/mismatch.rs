//! Arguments that differ between ranks: the same error on all, in under a second, before any data
//! moves. Every field that the ranks of a plan compare is tested, but for the environment's
//! `ANNULUS_DEADLINE` (`crates/conformance/tests/failures/main.rs`).

use std::{
    collections::BTreeSet,
    sync::Arc,
    time::{Duration, Instant},
};

use annulus::{
    Alignment, Attention, BackwardMode, Batch, BiasOrder, DType, Dims, Division, Layout, Plan,
    Precision, Route, Runtime, SinkShape, Strategy, Tensors, backend::Cpu, bias::Alibi,
    mask::DenseMask,
};
use annulus_comm::mpi::{Mpi, Settings};
use annulus_conformance::{Crossings, Placed};
use annulus_core::{Error, Placement, Result, index};
use annulus_cpu::Isa;
use ndarray::Array2;

use crate::{
    failures::{self, Mortal},
    {Harness, Verdict, ensure, tensors},
};

const DIMS: Dims =
    Dims { batch: 1, q_len: 24, kv_len: 24, q_heads: 2, kv_heads: 1, head_dim: 4, value_dim: 4 };
/// Limit for the error. Far below the deadline, so that no error comes from a timeout.
const AT_ONCE: Duration = Duration::from_secs(1);
const DEADLINE: Duration = Duration::from_secs(20);

/// The arguments of one rank's plan.
#[derive(Clone)]
struct Arguments {
    attention: Attention,
    division: Division,
    dims: Dims,
    isa: Isa,
    /// True if the placement has all ranks on one node, false if each has its own.
    together: bool,
}

impl Arguments {
    fn of(attention: Attention) -> Self {
        let isa = Isa::Portable;
        Self {
            attention,
            division: Division::new().layout(Layout::Contiguous),
            dims: DIMS,
            isa,
            together: true,
        }
    }
}

/// Returns every field of a plan with the arguments of all ranks but the last, then those of the
/// last.
fn plans() -> Vec<(&'static str, Arguments, Arguments)> {
    let plain = || Arguments::of(Attention::new());
    let dims = |name, dims| (name, plain(), Arguments { dims, ..plain() });
    let odd = |name, change: fn(Attention) -> Attention| {
        (name, plain(), Arguments::of(change(Attention::new())))
    };
    let divided = |name, change: fn(Division) -> Division| {
        (name, plain(), Arguments { division: change(plain().division), ..plain() })
    };
    let both = |name, usual: fn(Attention) -> Attention, odd: fn(Attention) -> Attention| {
        (name, Arguments::of(usual(Attention::new())), Arguments::of(odd(Attention::new())))
    };
    let exact =
        || Arguments::of(Attention::new().unnormalized(true).backward_mode(BackwardMode::TwoPass));
    let mut all = vec![
        dims("batch", Dims { batch: 2, ..DIMS }),
        dims("q_len", Dims { q_len: 25, ..DIMS }),
        dims("kv_len", Dims { kv_len: 25, ..DIMS }),
        dims("q_heads", Dims { q_heads: 4, ..DIMS }),
        dims("kv_heads", Dims { kv_heads: 2, ..DIMS }),
        dims("head_dim", Dims { head_dim: 8, ..DIMS }),
        dims("value_dim", Dims { value_dim: 8, ..DIMS }),
        odd("dtype", |a| a.dtype(DType::F64)),
        odd("mask", |a| a.causal(true)),
        odd("alignment", |a| a.align(Alignment::BottomRight)),
        odd("softmax_scale", |a| a.softmax_scale(0.3)),
        odd("logits_soft_cap", |a| a.logits_soft_cap(3.0)),
        odd("bias batch", |a| a.bias([1, 1, 1, 24])),
        both("bias q_heads", |a| a.bias([1, 1, 1, 24]), |a| a.bias([1, 2, 1, 24])),
        both("bias q_len", |a| a.bias([1, 1, 1, 24]), |a| a.bias([1, 1, 24, 24])),
        both("bias kv_len", |a| a.bias([1, 1, 1, 24]), |a| a.bias([1, 1, 1, 1])),
        odd("bias_function", |a| a.bias_function(Arc::new(Alibi::published(2)))),
        odd("bias_order", |a| a.bias_order(BiasOrder::BeforeSoftCap)),
        odd("softmax_aux count", |a| a.softmax_aux(SinkShape::shared(2))),
        both(
            "softmax_aux per_head",
            |a| a.softmax_aux(SinkShape::shared(2)),
            |a| a.softmax_aux(SinkShape::per_head(2)),
        ),
        odd("normalize_output", |a| a.unnormalized(true)),
        odd("dropout_prob", |a| a.dropout(0.25, 1)),
        both("dropout_seed", |a| a.dropout(0.25, 1), |a| a.dropout(0.25, 2)),
        odd("logits_dtype", |a| a.logits_dtype(DType::Bf16)),
        odd("precision", |a| a.precision(Precision::High)),
        odd("backward_mode", |a| a.backward_mode(BackwardMode::TwoPass)),
        divided("layout", |division| division.layout(Layout::Zigzag)),
        divided("route", |division| division.route(Route::Direct)),
        divided("strategy", |division| division.strategy(Strategy::HeadsRing { heads: 2 })),
        both(
            "reproducible leaf rows",
            |a| a.backward_mode(BackwardMode::TwoPass),
            |a| a.backward_mode(BackwardMode::TwoPass).reproducible(true),
        ),
        ("placement", plain(), Arguments { together: false, ..plain() }),
        odd("backward", |a| a.forward_only(true)),
        odd("local_gradients", |a| a.local_gradients(true)),
    ];
    // on a machine with one instruction set the arithmetic of ranks cannot differ
    if let Some(isa) = Isa::ALL.into_iter().find(|&isa| isa != Isa::Portable && isa.is_available())
    {
        all.push(("backend", exact(), Arguments { isa, ..exact() }));
    }
    // with bf16 dot products the probabilities are rounded to bf16
    if Isa::Avx512Bf16.is_available() {
        let halves = || Arguments::of(Attention::new().dtype(DType::Bf16));
        let odd = Arguments { isa: Isa::Avx512Bf16, ..halves() };
        all.push(("probabilities rounded to", halves(), odd));
    }
    all
}

/// Returns every field of a batch that ranks compare, with a batch that sets it.
fn batches(rows: usize) -> Vec<(&'static str, Batch)> {
    let ids = Some(Array2::zeros((1, rows)));
    let positions = Some(Array2::zeros((1, rows)));
    let plain = Batch::default;
    vec![
        ("q_segment_ids given", Batch { q_segment_ids: ids.clone(), ..plain() }),
        ("kv_segment_ids given", Batch { kv_segment_ids: ids, ..plain() }),
        ("q_positions given", Batch { q_positions: positions.clone(), ..plain() }),
        ("kv_positions given", Batch { kv_positions: positions, ..plain() }),
        (
            "cum_seqlens_q",
            Batch {
                cum_seqlens_q: Some(vec![0, 7, 24]),
                cum_seqlens_k: Some(vec![0, 9, 24]),
                ..plain()
            },
        ),
        (
            "cum_seqlens_k",
            Batch {
                cum_seqlens_q: Some(vec![0, 7, 24]),
                cum_seqlens_k: Some(vec![0, 8, 24]),
                ..plain()
            },
        ),
        (
            "attention_mask",
            Batch {
                attention_mask: Some(DenseMask::from_fn([1, 1, rows, 24], |_| true)),
                ..plain()
            },
        ),
    ]
}

pub(crate) fn all(harness: &mut Harness, settings: &Settings) -> Verdict {
    let last = harness.ranks() - 1;
    if last == 0 {
        return Ok(());
    }
    let mut named = BTreeSet::new();
    for (name, usual, odd) in plans() {
        named.insert(name.to_owned());
        let arguments = if harness.rank() == last { odd } else { usual };
        let started = Instant::now();
        let made = plan(&arguments, settings, last + 1).map(|_| "a plan");
        judge(harness, name, started.elapsed(), &made)?;
    }
    named.extend(one_plan(harness, settings)?);
    harness.share(ensure(named.len() >= 40, || format!("only {} fields: {named:?}", named.len())))
}

fn plan(arguments: &Arguments, settings: &Settings, ranks: usize) -> Result<Plan> {
    let nodes = (0..ranks).map(|rank| if arguments.together { 0 } else { rank }).collect();
    let placed =
        Placed::new(Mpi::world(settings.clone())?, Placement::new(nodes), Crossings::default());
    let transport = Mortal::new(placed, None);
    Plan::with_backend(
        (&arguments.attention, &arguments.division, Runtime::new().deadline(DEADLINE)),
        arguments.dims,
        Cpu::new(1)?.with_isa(arguments.isa)?,
        transport,
    )
}

/// Requires that `result` is the mismatch of this field, came in time and before data moved, and is
/// the same on all ranks.
fn judge<T: std::fmt::Debug>(
    harness: &mut Harness,
    name: &str,
    took: Duration,
    result: &Result<T>,
) -> Verdict {
    let last = harness.ranks() - 1;
    let named = matches!(
        result,
        Err(Error::RankMismatch { field, rank, .. }) if field == name && *rank == last
    );
    let right = named && took < AT_ONCE && failures::transfers() == 0;
    same_everywhere(harness, result, right, || {
        format!("{name}: {result:?} after {took:?} and {} transfers", failures::transfers())
    })
}

/// Requires that `right` holds on every rank, and that `result` is the same on all.
fn same_everywhere<T: std::fmt::Debug>(
    harness: &mut Harness,
    result: &Result<T>,
    right: bool,
    what: impl Fn() -> String,
) -> Verdict {
    harness.share(ensure(right, &what))?;
    let all = harness.gather(format!("{result:?}").as_bytes())?;
    ensure(all.iter().all(|text| *text == all[0]), || format!("{}: not the same on all", what()))
}

/// Checks batches and calls that differ between ranks, on one plan that stays usable.
fn one_plan(
    harness: &mut Harness,
    settings: &Settings,
) -> std::result::Result<Vec<String>, String> {
    let last = harness.ranks() - 1;
    let made = plan(&Arguments::of(Attention::new()), settings, last + 1)
        .map_err(|error| error.to_string());
    harness.share(made.as_ref().map(drop).map_err(Clone::clone))?;
    let mut plan = made?;
    let rows = index(plan.q_rows().len());
    let mut named = Vec::new();
    let all = batches(rows);
    // packed lengths are given for both sides or not at all, so only given key lengths can differ
    // alone
    let usual = |name| if name == "cum_seqlens_k" { all[4].1.clone() } else { Batch::default() };
    for (name, odd) in &all {
        let batch = if harness.rank() == last { odd.clone() } else { usual(*name) };
        let started = Instant::now();
        let updated = plan.update(&batch);
        judge(harness, name, started.elapsed(), &updated)?;
        named.push((*name).to_owned());
    }
    let [q, kv] = tensors(&plan);
    let tensors = Tensors::new(q.view(), kv.view(), kv.view());
    let forward = plan.forward(&tensors).map_err(|error| error.to_string());
    harness.share(forward.as_ref().map(drop).map_err(Clone::clone))?;
    let forward = forward?;
    failures::forget_transfers();
    let started = Instant::now();
    let called = if harness.rank() == last {
        plan.backward(&tensors, &forward, q.view(), None).map(drop)
    } else {
        plan.forward(&tensors).map(drop)
    };
    judge(harness, "call", started.elapsed(), &called)?;
    named.push("call".to_owned());
    Ok(named)
}
