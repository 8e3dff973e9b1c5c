//! Bit-reproducibility: results do not depend on the thread count, on earlier calls or on fused and
//! separate passes.

use std::sync::Arc;

use annulus_core::{BackwardMode, BiasOrder, DType, Dims, Spec, mask};
use annulus_cpu::{Cpu, Isa};
use annulus_plan::Layout;
use annulus_test_cases::{Case, Draw};

use crate::{self as support, assert_close, ranks::OnRanks};

#[test]
fn the_number_of_threads_changes_no_bit() {
    for (seed, dtype) in (400..412).zip([DType::F32, DType::Bf16, DType::F64].into_iter().cycle()) {
        let case = support::any_features(seed, dtype);
        let run = |threads| case.run(&|| Cpu::new(threads), &Layout::Contiguous, 1).unwrap();
        let alone = run(1);
        for threads in [2, 3, 7] {
            run(threads).same_bits(&alone).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
        }
    }
}

#[test]
fn many_tasks_of_a_long_sequence_change_no_bit() {
    // long enough for several tasks per thread, of several strips each
    let dims = Dims { q_len: 900, kv_len: 700, ..Dims::new(1, 0, 2, 16) };
    let mut spec = Spec::new(dims, DType::F32);
    spec.mask = Arc::new(mask::Causal { offset: 40 });
    for bias in [Some([1, 1, 1, 700]), None] {
        let case = support::case(Spec { bias, ..spec.clone() }, &mut Draw::new(77));
        let run = |threads, ranks| case.run(&|| Cpu::new(threads), &Layout::Zigzag, ranks).unwrap();
        for ranks in [1, 2] {
            let alone = run(1, ranks);
            assert_close(&alone, &support::oracle(&case), 2e-5, "900 × 700");
            for threads in [2, 3, 7] {
                run(threads, ranks).same_bits(&alone).unwrap();
            }
        }
    }
}

/// A case with few (batch row, KV head) planes, so that several threads share one.
fn few_planes(seed: u64, bias: Option<[bool; 4]>) -> Case {
    let random = &mut Draw::new(seed);
    let [batch, kv_heads, group] =
        random.pick(&[[1, 1, 1], [1, 1, 3], [1, 2, 2], [2, 1, 2], [3, 1, 1]]);
    let dims = Dims {
        q_len: 200,
        kv_len: 330,
        q_heads: kv_heads * group,
        ..Dims::new(batch, 0, kv_heads, 8)
    };
    let mut spec = Spec::new(dims, DType::F32);
    let heads = (0..dims.q_heads)
        .map(|head| -> mask::SharedMask { Arc::new(mask::Causal { offset: 60 + head as i64 }) });
    spec.mask = match random.below(4) {
        0 => Arc::new(mask::Everything),
        1 => Arc::new(mask::Causal { offset: 130 }),
        2 => Arc::new(mask::Window::new(Some(40), Some(90))),
        _ => Arc::new(mask::PerHead(heads.collect())),
    };
    spec.bias = bias.map(|[batches, heads, queries, keys]| {
        let or_one = |whole: bool, len| if whole { len } else { 1 };
        [
            or_one(batches, batch),
            or_one(heads, dims.q_heads),
            or_one(queries, dims.q_len),
            or_one(keys, dims.kv_len),
        ]
    });
    spec.soft_cap = random.once_in(2).then_some(3.0);
    spec.bias_order =
        if random.once_in(2) { BiasOrder::BeforeSoftCap } else { BiasOrder::AfterSoftCap };
    support::case(spec, random)
}

#[test]
fn threads_that_share_a_plane_change_no_bit() {
    for seed in 500..512 {
        let case = few_planes(seed, None);
        for ranks in [1, 2] {
            let run = |threads| case.run(&|| Cpu::new(threads), &Layout::Zigzag, ranks).unwrap();
            let [alone, others @ ..] = [1, 2, 3, 7].map(run);
            assert_close(
                &alone,
                &support::oracle(&case),
                2e-5,
                &format!("seed {seed}, {:?}", case.spec),
            );
            assert!(
                others.iter().all(|other| other.same_bits(&alone).is_ok()),
                "seed {seed}, {ranks} ranks"
            );
        }
    }
}

#[test]
fn the_gradient_of_any_bias_is_the_same_for_any_thread_count() {
    for form in 0..16 {
        let case = few_planes(600 + form, Some([0, 1, 2, 3].map(|axis| form >> axis & 1 == 1)));
        for (ranks, backward) in
            [(1, BackwardMode::OnePass), (2, BackwardMode::OnePass), (1, BackwardMode::TwoPass)]
        {
            let case = Case { spec: Spec { backward, ..case.spec.clone() }, ..case.clone() };
            let run = |threads| case.run(&|| Cpu::new(threads), &Layout::Zigzag, ranks).unwrap();
            let [alone, others @ ..] = [1, 2, 3, 7].map(run);
            assert_close(
                &alone,
                &support::oracle(&case),
                2e-5,
                &format!("{ranks} ranks: {:?}", case.spec),
            );
            assert!(
                others.iter().all(|other| other.same_bits(&alone).is_ok()),
                "{ranks} ranks, {:?}",
                case.spec
            );
        }
    }
}

#[test]
fn heads_with_masks_of_their_own_add_to_one_dbias_in_the_same_order() {
    let dims = Dims { kv_len: 330, q_heads: 4, ..Dims::new(1, 200, 2, 8) };
    let mut spec = Spec { bias: Some([1, 1, 200, 1]), ..Spec::new(dims, DType::F32) };
    let heads = (0..4)
        .map(|head| -> mask::SharedMask { Arc::new(mask::Causal { offset: 130 + head as i64 }) });
    spec.mask = Arc::new(mask::PerHead(heads.collect()));
    let case = support::case(spec, &mut Draw::new(8));
    let run = |threads| case.run(&|| Cpu::new(threads), &Layout::Contiguous, 1).unwrap();
    let alone = run(1);
    assert!((0..12).all(|_| run(3).same_bits(&alone).is_ok()));
}

#[test]
fn every_instruction_set_splits_planes_and_sums_dbias() {
    for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
        let dtypes = [(DType::F32, 2e-5), (DType::F64, 1e-12), (DType::F16, 2e-3)];
        for (seed, (dtype, tolerance)) in (640..646).zip(dtypes.into_iter().cycle()) {
            let mut case = few_planes(seed, Some([0, 1, 2, 3].map(|axis| seed >> axis & 1 == 1)));
            case.spec.dtype = dtype;
            case = support::case(case.spec, &mut Draw::new(seed));
            let cpu = || Cpu::new(3)?.with_isa(isa);
            let got = case.run(&cpu, &Layout::Contiguous, 2).unwrap();
            let what = format!("{isa}, {:?}", case.spec);
            assert_close(&got, &support::oracle(&case), tolerance, &what);
        }
    }
}
