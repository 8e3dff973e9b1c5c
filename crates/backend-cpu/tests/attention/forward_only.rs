//! Plans without a backward pass: split-KV decode, narrow masks, keys read in place (of one rank)
//! or packed, and outputs that the tasks of the last block write.

use std::sync::Arc;

use annulus_core::{DType, Dims, Dropout, Result, SinkShape, Spec, mask};
use annulus_cpu::{Cpu, Isa};
use annulus_plan::Layout;
use annulus_test_cases::{Answer, Case, Draw};
use ndarray::{Array2, Array3, Array4, s};

use crate::{self as support, assert_close, ranks::OnRanks};

fn isas() -> impl Iterator<Item = Isa> {
    Isa::ALL.into_iter().filter(|isa| isa.is_available())
}

/// Makes backends of so many threads and this instruction set.
fn of(threads: usize, isa: Isa) -> impl Fn() -> Result<Cpu> + Sync {
    move || Cpu::new(threads)?.with_isa(isa)
}

/// Compares out and lse with `want`.
fn assert_outputs(
    (out, lse): &(Array4<f64>, Array3<f64>),
    want: &Answer,
    tolerance: f64,
    what: &str,
) {
    assert_close(&Answer { out: out.clone(), ..want.clone() }, want, tolerance, what);
    assert_close(&Answer { lse: lse.clone(), ..want.clone() }, want, 2e-5, what);
}

/// A case of few queries of `group` query heads a KV head, with enough keys for several splits.
fn long(seed: u64, dtype: DType, group: usize) -> Case {
    let q_len = [1, 3, 7, 12, 2][seed as usize % 5];
    let dims = Dims {
        q_len,
        kv_len: 1500,
        q_heads: 2 * group,
        value_dim: [16, 9][seed as usize % 2],
        ..Dims::new(2, 0, 2, [20, 64][seed as usize / 2 % 2])
    };
    let mut spec = Spec::new(dims, dtype);
    spec.alignment = annulus_core::Alignment::BottomRight;
    spec.soft_cap = (seed % 4 == 1).then_some(3.0);
    spec.dropout = (seed % 4 == 2).then_some(Dropout { probability: 0.3, seed });
    spec.sinks = (seed % 3 == 1).then_some(SinkShape { per_head: true, count: 2 });
    spec.bias = match seed % 5 {
        0 => Some([2, 2 * group, q_len, 1500]),
        1 => Some([1, 1, 1, 1500]),
        2 => Some([1, 2 * group, q_len, 1500]),
        3 => None,
        _ => Some([2, 1, q_len, 1]),
    };
    spec.mask = match seed % 3 {
        0 => Arc::new(mask::Everything),
        1 => Arc::new(mask::Causal::default()),
        _ => mask::and(
            Arc::new(mask::Causal::default()),
            Arc::new(mask::Window::new(Some(700), None)),
        ),
    };
    support::case(spec, &mut Draw::new(seed))
}

#[test]
fn any_features_forward_only() {
    for seed in 0..60 {
        let case = support::any_features(seed, if seed % 2 == 0 { DType::F32 } else { DType::F64 });
        let want = support::oracle(&case);
        for isa in isas() {
            let ranks = 1 + seed as usize % 3;
            let got = case.run_forward(&of(2, isa), &Layout::Striped, ranks).unwrap();
            assert_outputs(&got, &want, 2e-5, &format!("seed {seed} {isa}"));
        }
    }
}

#[test]
fn few_queries_over_many_keys() {
    for (seed, dtype) in
        (0..20).zip([DType::F32, DType::Bf16, DType::F64, DType::F16].into_iter().cycle())
    {
        // 16 heads of a KV head are multiplied on tiles
        let case = long(seed, dtype, if seed < 12 { 2 } else { 16 });
        let want = support::oracle(&case);
        let tolerance =
            [(DType::F64, 1e-11), (DType::F32, 1e-5), (DType::F16, 2e-3), (DType::Bf16, 1e-2)];
        let tolerance = tolerance.into_iter().find(|(of, _)| *of == dtype).unwrap().1;
        for isa in isas() {
            let run = |threads, ranks| {
                case.run_forward(&of(threads, isa), &Layout::Contiguous, ranks).unwrap()
            };
            let alone = run(1, 1);
            assert_outputs(&alone, &want, tolerance, &format!("seed {seed} {isa}"));
            assert!(run(2, 1) == alone && run(5, 1) == alone, "seed {seed} {isa}");
            let two = run(2, 2);
            assert_outputs(&two, &want, tolerance, &format!("seed {seed} {isa}, two ranks"));
        }
    }
}

#[test]
fn few_queries_propagate_only_visible_nans() {
    for (dtype, biased, group) in [
        (DType::F32, false, 2),
        (DType::F32, true, 2),
        (DType::F64, false, 2),
        (DType::F32, true, 8),
        (DType::F16, false, 8),
        (DType::Bf16, true, 8),
    ] {
        let mut clean = long(3, dtype, group);
        if biased {
            // hides a key from the first query head of KV head 1 alone
            let mut bias = Array4::zeros((1, 2 * group, 1, 1500));
            bias[[0, group, 0, 900]] = f64::NEG_INFINITY;
            clean.spec.bias = Some([1, 2 * group, 1, 1500]);
            clean.bias = Some(bias);
        }
        let ids =
            |len: usize| Array2::from_shape_fn((2, len), |(_, i)| if i % 7 == 3 { -1 } else { 0 });
        let q_len = clean.spec.dims.q_len;
        clean.batch.q_segment_ids = Some(Array2::zeros((2, q_len)));
        clean.batch.kv_segment_ids = Some(ids(1500));
        let mut poisoned = clean.clone();
        for j in (3..1500).step_by(7) {
            poisoned.k.slice_mut(s![.., j, .., ..]).fill(f64::NAN);
            poisoned.v.slice_mut(s![.., j, .., ..]).fill(f64::INFINITY);
        }
        let mut with_nan = clean.clone();
        with_nan.v[[1, 900, 1, 2]] = f64::NAN;
        for isa in isas() {
            let run = |case: &Case| case.run_forward(&of(2, isa), &Layout::Contiguous, 1).unwrap();
            let want = run(&clean);
            assert!(run(&poisoned) == want);
            let (out, lse) = run(&with_nan);
            assert!(lse == want.1);
            for ((index, got), want) in out.indexed_iter().zip(&want.0) {
                let (b, _, head, element) = index;
                let visible = b == 1 && head >= group + usize::from(biased) && element == 2;
                assert!(
                    if visible { got.is_nan() } else { got == want },
                    "{isa} {dtype} {index:?} {biased}"
                );
            }
        }
    }
}

#[test]
fn narrow_masks_use_row_major_tasks_and_give_the_same_bits() {
    let len = 1300;
    let dims = Dims { q_heads: 4, ..Dims::new(1, len, 2, 20) };
    for documents in [false, true] {
        let mut spec = Spec::new(dims, DType::F32);
        let window = mask::Window::new(Some(100), Some(3));
        spec.mask = if documents { Arc::new(mask::Causal::default()) } else { Arc::new(window) };
        let mut case = support::case(spec, &mut Draw::new(7));
        if documents {
            let ids = Array2::from_shape_fn((1, len), |(_, i)| (i / 300) as i32);
            case.batch.q_segment_ids = Some(ids.clone());
            case.batch.kv_segment_ids = Some(ids);
        }
        for isa in isas() {
            // a workspace with a backward pass arranges its tasks head by head
            let want = case.run(&of(2, isa), &Layout::Contiguous, 1).unwrap();
            for threads in [1, 3] {
                let (out, lse) =
                    case.run_forward(&of(threads, isa), &Layout::Contiguous, 1).unwrap();
                assert!(
                    out == want.out && lse == want.lse,
                    "{isa}, {threads} threads, documents {documents}"
                );
            }
        }
    }
}
