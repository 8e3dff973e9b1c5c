//! Arguments that differ between ranks: the same error on all ranks, before any data moves. Every
//! field that the ranks of a plan compare is tested.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use annulus::{
    Alignment, Attention, BackwardMode, Batch, BiasOrder, DType, Dims, Division, Layout, Plan,
    Precision, Result, Route, Runtime, SinkShape, Strategy, Tensors,
    backend::Cpu,
    bias::Alibi,
    comm::{
        Trace,
        threads::{Threads, each_rank, ring},
        trace::{EventKind, TraceLog},
    },
    mask::DenseMask,
    planning::{ComputeRate, Link, Machine},
};
use annulus_conformance::{Crossings, Placed};
use annulus_core::{Error, Placement, index};
use annulus_cpu::Isa;
use ndarray::{Array2, Array4};

const RANKS: usize = 4;
const LAST: usize = RANKS - 1;
const DIMS: Dims =
    Dims { batch: 1, q_len: 24, kv_len: 24, q_heads: 2, kv_heads: 1, head_dim: 4, value_dim: 4 };

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
        let division = Division::new().layout(Layout::Contiguous);
        Self { attention, division, dims: DIMS, isa: Isa::Portable, together: true }
    }

    /// Plans on one rank, and returns the log of its messages.
    fn plan(&self, transport: Threads) -> (Result<Plan>, TraceLog) {
        let nodes = (0..RANKS).map(|rank| if self.together { 0 } else { rank }).collect();
        let placed = Placed::new(transport, Placement::new(nodes), Crossings::default());
        let transport = Trace::new(placed, Instant::now());
        let log = transport.log();
        let runtime = Runtime::new().deadline(Duration::from_secs(20));
        let setup = (&self.attention, &self.division, runtime);
        let backend = Cpu::new(1).and_then(|cpu| cpu.with_isa(self.isa));
        (backend.and_then(|cpu| Plan::with_backend(setup, self.dims, cpu, transport)), log)
    }
}

/// Requires the mismatch of this field, and that no message was sent since the log was cleared.
#[track_caller]
fn mismatch<T>(name: &str, result: Result<T>, log: &TraceLog) -> Error {
    let error = result.map(drop).expect_err(name);
    let named = matches!(&error, Error::RankMismatch { field, rank: LAST, .. } if field == name);
    let message =
        |kind: &EventKind| matches!(kind, EventKind::Send { .. } | EventKind::Receive { .. });
    let moved = log.events().iter().any(|event| message(&event.kind));
    assert!(named && !moved, "{name}: {error:?}, moved data: {moved}");
    error
}

/// A machine on which every strategy fits.
fn machine(latency: u8) -> Machine {
    let rate = ComputeRate { dtype: DType::F32, head_dim: 4, forward: 1.0, backward: 1.0 };
    Machine {
        ranks_per_node: RANKS,
        inside_node: Some(Link { latency: latency.into(), bandwidth: 1.0 }),
        between_nodes: None,
        node_bandwidth: None,
        rates: vec![rate],
        memory: 1 << 40,
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
    let auto = |change: fn(Division) -> Division| {
        let division = plain().division.strategy(Strategy::Auto);
        Arguments { division: change(division), ..plain() }
    };
    let both_divided = |name, usual, odd| (name, auto(usual), auto(odd));
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
        odd("statistics", |a| a.statistics(true)),
        odd("dropout_prob", |a| a.dropout(0.25, 1)),
        both("dropout_seed", |a| a.dropout(0.25, 1), |a| a.dropout(0.25, 2)),
        odd("logits_dtype", |a| a.logits_dtype(DType::Bf16)),
        odd("precision", |a| a.precision(Precision::High)),
        odd("backward_mode", |a| a.backward_mode(BackwardMode::TwoPass)),
        divided("layout", |division| division.layout(Layout::Zigzag)),
        divided("route", |division| division.route(Route::Direct)),
        divided("receive_ahead", |division| division.receive_ahead(3)),
        divided("strategy", |division| division.strategy(Strategy::HeadsRing { heads: 2 })),
        both(
            "reproducible leaf rows",
            |a| a.backward_mode(BackwardMode::TwoPass),
            |a| a.backward_mode(BackwardMode::TwoPass).reproducible(true),
        ),
        both_divided(
            "machine",
            |division| division.machine(machine(1)),
            |division| division.machine(machine(2)),
        ),
        both_divided("machine", |division| division.machine(machine(1)), |division| division),
        ("placement", plain(), Arguments { together: false, ..plain() }),
        odd("backward", |a| a.forward_only(true)),
        odd("second_derivatives", |a| a.second_derivatives(true)),
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

#[test]
fn a_field_of_a_plan_that_differs_is_named_on_all_ranks() {
    for (name, usual, odd) in plans() {
        let errors = each_rank(ring(RANKS), |rank, transport| {
            let (plan, log) = if rank == LAST { &odd } else { &usual }.plan(transport);
            Ok(mismatch(name, plan, &log))
        });
        let errors = errors.unwrap();
        assert!(errors.iter().all(|error| *error == errors[0]), "{name}: {errors:?}");
    }
}

/// On one plan, which stays usable.
#[test]
fn batches_and_calls_that_differ_are_named_on_all_ranks() {
    let errors = each_rank(ring(RANKS), |rank, transport| {
        let (plan, log) = Arguments::of(Attention::new()).plan(transport);
        let mut plan = plan?;
        let rows = index(plan.q_rows().len());
        let all = batches(rows);
        let mut errors = Vec::new();
        for (name, odd) in &all {
            // packed lengths are given for both sides or not at all, so only given key lengths can
            // differ alone
            let usual = if *name == "cum_seqlens_k" { &all[4].1 } else { &Batch::default() };
            log.clear();
            let updated = plan.update(if rank == LAST { odd } else { usual });
            errors.push(mismatch(name, updated, &log));
        }
        let [q, kv] = [2, 1].map(|heads| Array4::<f32>::from_elem((1, rows, heads, 4), 0.5));
        let tensors = Tensors::new(q.view(), kv.view(), kv.view());
        let forward = plan.forward(&tensors)?;
        log.clear();
        let called = if rank == LAST {
            plan.backward(&tensors, &forward, q.view(), None).map(drop)
        } else {
            plan.forward(&tensors).map(drop)
        };
        errors.push(mismatch("call", called, &log));
        Ok(errors)
    });
    let errors = errors.unwrap();
    assert!(errors.iter().all(|of_rank| *of_rank == errors[0]), "{errors:?}");
}
