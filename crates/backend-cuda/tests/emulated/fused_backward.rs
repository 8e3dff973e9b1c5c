//! Fused backward kernel on emulated warpgroups: which passes it serves, masks, numbers that are
//! not finite, and the order in which thread blocks add to dQ. The suite of `warpgroup.rs` covers
//! it too.

use std::{sync::OnceLock, time::Duration};

use annulus_conformance::{Answer, Case, Draw, Judge, Masks, Setting, Subject};
use annulus_core::{BackwardMode, DType, Dims, Error, Layout, Result, Spec};
use annulus_cuda_emulator as emulator;
use ndarray::s;

use crate::{
    common::staged,
    mistakes::{DEADLOCK, OTHER_BITS, Planted},
    support::{hopper, hopper_on, masked_rows_change_no_bit, next_device, with_seed},
};

/// Kernels of a backward pass: fused, dQ, dK and dV.
const KERNELS: [&str; 3] =
    ["backward_fused_warpgroup", "backward_queries_warpgroup", "backward_keys_warpgroup"];

fn text(error: Error) -> String {
    error.to_string()
}

/// Emulated GPUs with the fused kernel.
fn fused() -> impl Subject {
    staged("emulated cuda with the fused backward kernel", Duration::ZERO, || {
        Ok(hopper(None)?.with_fused_backward(true))
    })
}

/// `passes` passes of one plan on one rank, perhaps with a planted mistake; the device they ran on.
fn passes(
    case: &Case,
    planted: Option<Planted>,
    passes: usize,
) -> (usize, Result<Vec<Answer>, String>) {
    let ordinal = next_device();
    let subject = staged("one emulated gpu", Duration::ZERO, move || {
        Ok(hopper_on(ordinal, planted, 0)?.with_fused_backward(true))
    });
    (ordinal, subject.run(case, &Setting::ALONE, passes).map_err(text))
}

/// Verdict on a pass on one rank, and the numbers of blocks of [`KERNELS`].
fn blocks(case: &Case) -> Result<[u64; 3], String> {
    let (ordinal, answers) = passes(case, None, 1);
    Judge::new(case).map_err(text)?.check(&answers?[0])?;
    Ok(KERNELS.map(|name| emulator::blocks(ordinal, name)))
}

fn case_of(name: &str, dims: Dims, masks: Masks, dtype: DType) -> Case {
    Case::new(name, Spec::new(dims, DType::F64), masks, &mut Draw::new(21)).in_dtype(dtype)
}

const fn causal() -> Masks {
    Masks {
        causal: true,
        window: None,
        first_visible: 0,
        chunk: None,
        prefix: None,
        objects: vec![],
    }
}

/// Three tiles of keys for each of two KV heads, and queries that end within a tile.
fn dims(head_dim: usize) -> Dims {
    Dims { batch: 1, q_len: 330, kv_len: 300, q_heads: 2, kv_heads: 2, head_dim, value_dim: 56 }
}

#[test]
fn the_fused_kernel_serves_blocks_of_which_all_gradients_are_wanted() {
    let case = case_of("full", dims(64), Masks::default(), DType::Bf16);
    assert_eq!(blocks(&case), Ok([6, 0, 0]));
    // a score epilogue
    let mut capped = case.clone();
    capped.spec.soft_cap = Some(3.0);
    assert_eq!(blocks(&capped), Ok([0, 0, 0]));
    // queries travel for dK and dV, so that no block of keys has both
    let ordinal = next_device();
    let subject = staged("one emulated gpu", Duration::ZERO, move || {
        Ok(hopper_on(ordinal, None, 0)?.with_fused_backward(true))
    });
    let mut two_passes = case.clone();
    two_passes.spec.backward = BackwardMode::TwoPass;
    let answers = subject.run(&two_passes, &Setting::new(2, Layout::Contiguous), 1).unwrap();
    Judge::new(&two_passes).unwrap().check(&answers[0]).unwrap();
    let [fused, queries, keys] = KERNELS.map(|name| emulator::blocks(ordinal, name));
    assert!(queries > 0 && keys > 0, "{fused} {queries} {keys}");
}

#[test]
fn masks_and_dims_hold_in_the_fused_kernel() {
    let window = Masks { window: Some([Some(100), Some(40)]), ..Masks::default() };
    let few_heads = Dims { batch: 2, q_len: 150, kv_len: 140, q_heads: 8, kv_heads: 2, ..dims(64) };
    let few_queries = Dims { q_len: 70, kv_len: 520, ..dims(72) };
    let documents = Masks { chunk: Some(90), ..Masks::default() };
    for (name, dims, masks, dtype) in [
        ("full, 64 dims", dims(64), Masks::default(), DType::F16),
        ("causal, 64 dims", dims(64), causal(), DType::Bf16),
        ("full, 128 dims", dims(128), Masks::default(), DType::Bf16),
        ("causal, 128 dims", dims(128), causal(), DType::F16),
        ("window", dims(64), window, DType::Bf16),
        ("heads 8 : 2", few_heads, causal(), DType::Bf16),
        ("fewer queries than keys", few_queries, Masks::default(), DType::F16),
        ("documents", dims(128), documents, DType::Bf16),
    ] {
        let [fused, queries, keys] = blocks(&case_of(name, dims, masks, dtype))
            .unwrap_or_else(|wrong| panic!("{name}: {wrong}"));
        assert!(fused > 0 && queries == 0 && keys == 0, "{name}: {fused} {queries} {keys}");
    }
}

#[test]
fn rings_hold_in_the_fused_kernel() {
    for (dtype, dim, ranks, layout) in
        [(DType::Bf16, 128, 2, Layout::Zigzag), (DType::F16, 64, 3, Layout::Striped)]
    {
        let case = case_of("ring", Dims { q_len: 300, ..dims(dim) }, causal(), dtype);
        let answers = fused().run(&case, &Setting::new(ranks, layout), 1).unwrap();
        let judge = Judge::new(&case).unwrap();
        answers.iter().for_each(|answer| judge.check(answer).unwrap());
    }
}

/// Scores whose lse is beyond the bound of fused exponents, with keys beyond the end: their
/// probabilities are not finite.
#[test]
fn large_scores_hold_in_the_fused_kernel() {
    let mut spec = Spec::new(dims(64), DType::F64);
    spec.scale = 1.0;
    let mut case = Case::new("large", spec, Masks::default(), &mut Draw::new(5));
    // one dim adds the same to all scores, which leaves the probabilities as they are
    for score in [2048.0, -1000.0] {
        case.q.slice_mut(s![.., .., .., 0]).fill(32.0);
        case.k.slice_mut(s![.., .., .., 0]).fill(score / 32.0);
        let [fused, ..] = blocks(&case.clone().in_dtype(DType::F16)).unwrap();
        assert!(fused > 0);
    }
}

#[test]
fn masked_rows_that_are_not_finite_change_no_bit_in_the_fused_kernel() {
    for dim in [64, 128] {
        masked_rows_change_no_bit(&fused(), DType::F16, [300, dim])
            .unwrap_or_else(|wrong| panic!("{dim}: {wrong}"));
    }
}

/// Elements that are not finite reach only the gradients of pairs that are visible.
#[test]
fn masked_non_finite_elements_change_nothing_in_the_fused_kernel() {
    for dim in [64, 72] {
        let masks = Masks { window: Some([Some(20), Some(20)]), ..Masks::default() };
        let all = Dims { q_len: 300, q_heads: 2, kv_heads: 1, ..dims(dim) };
        let mut case = case_of("not finite", all, masks, DType::Bf16);
        // of queries 180 … 220, and through them of keys 160 … 240
        case.k[[0, 200, 0, 3]] = f64::NAN;
        // keys 0 … 40 and 20 … 60
        case.q[[0, 20, 1, 5]] = f64::INFINITY;
        case.dout[[0, 40, 0, 7]] = f64::NAN;
        let (_, answers) = passes(&case, None, 1);
        let answer = answers.unwrap().remove(0);
        let want = case.truth().unwrap().backward;
        for (what, got, want) in [
            ("dq", &answer.dq, &want.dq),
            ("dk", &answer.dk, &want.dk),
            ("dv", &answer.dv, &want.dv),
        ] {
            for ((index, got), want) in got.indexed_iter().zip(want) {
                assert_eq!(got.is_nan(), want.is_nan(), "{dim}: {what}{index:?}: {got} {want}");
                let near = want.is_nan() || (got - want).abs() < 0.02 + 0.02 * want.abs();
                assert!(near, "{dim}: {what}{index:?}: got {got}, want {want}");
            }
        }
        assert!(answer.dq[[0, 180, 0, 0]].is_nan() && answer.dq[[0, 179, 0, 0]].is_finite());
    }
}

/// Eight tiles of keys that add to the same queries: more than run at the same time. With 72 dims a
/// tile of queries has two parts.
fn eight_tiles(dim: usize) -> Case {
    let dims = Dims { q_len: 200, kv_len: 1000, q_heads: 1, kv_heads: 1, ..dims(dim) };
    case_of("eight tiles of keys", dims, Masks::default(), DType::F16)
}

#[test]
fn the_order_of_blocks_changes_no_bit() {
    for dim in [64, 72] {
        let case = eight_tiles(dim);
        let run = |seed| with_seed(seed, || passes(&case, None, 2)).1.unwrap();
        let want = run(31);
        Judge::new(&case).unwrap().check(&want[0]).unwrap();
        for seed in 32..36 {
            for answer in run(seed) {
                answer.same_bits(&want[0]).unwrap();
            }
        }
    }
}

/// Verdict on two passes with a planted mistake.
pub(crate) fn verdict(planted: Planted) -> Result<(), String> {
    static WANT: OnceLock<Answer> = OnceLock::new();
    let case = eight_tiles(72);
    // the bits without a mistake
    let want = WANT.get_or_init(|| passes(&case, None, 1).1.expect("an answer").remove(0));
    let (ordinal, answers) = passes(&case, Some(planted), 2);
    if emulator::deadlocks(ordinal) > 0 {
        return Err(DEADLOCK.to_owned());
    }
    let (answers, judge) = (answers?, Judge::new(&case).map_err(text)?);
    answers.iter().try_for_each(|answer| judge.check(answer))?;
    let same = |answer: &Answer| answer.same_bits(want).map_err(|_| OTHER_BITS.to_owned());
    answers.iter().try_for_each(same)
}
