//! Warpgroup backward on emulated GPUs of compute capability 9.0: which kernels serve a pass,
//! masks, score options, and numbers that are not finite.

use annulus_conformance::{Case, Draw, Masks, Setting, suite};
use annulus_core::{BackwardMode, DType, Dims, Spec};
use annulus_cuda::{Cuda, Variant};
use ndarray::s;

use crate::{
    matrix_backward::{large_scores, non_finite_elements_reach_visible_pairs, passes_hold},
    mistakes::{Of, Planted},
    support::{
        SCORE_OPTIONS, blocks, hopper, hopper_on, masked_rows_change_no_bit, on_warpgroups,
        orders_change_no_bit,
    },
    warpgroup::{self, TWO_PANELS},
};

/// Kernels of dQ, and of dK and dV: on warpgroups without and with a score epilogue, on tensor
/// cores.
pub(crate) const QUERIES: [&str; 3] = [
    "backward_queries_warpgroup",
    "backward_queries_warpgroup_epilogue",
    "backward_queries_matrix",
];
pub(crate) const KEYS: [&str; 3] =
    ["backward_keys_warpgroup", "backward_keys_warpgroup_epilogue", "backward_keys_matrix"];

/// One batch row, heads 2 : 1, `queries` queries and 300 keys: full tiles and partial ones on both
/// sides.
fn dims(queries: usize, dim: usize) -> Dims {
    Dims { q_len: queries, kv_len: 300, kv_heads: 1, ..Dims::new(1, 300, 2, dim) }
}

/// Blocks of [`QUERIES`] and [`KEYS`] for a case on one rank, whose answer must be right.
fn blocks_of(case: &Case, fewest_rows: usize) -> Result<[[u64; 3]; 2], String> {
    let [a, b, c] = QUERIES;
    let [d, e, f] = KEYS;
    let open = |ordinal| hopper_on(ordinal, None, fewest_rows);
    let [a, b, c, d, e, f] = blocks(case, &Setting::ALONE, [a, b, c, d, e, f], open)?;
    Ok([[a, b, c], [d, e, f]])
}

fn plain_case(name: &str, dims: Dims, dtype: DType) -> Case {
    let masks = Masks { causal: true, ..Masks::default() };
    Case::new(name, Spec::new(dims, DType::F64), masks, &mut Draw::new(3)).in_dtype(dtype)
}

#[test]
fn variants_serve_dims_up_to_128() {
    let cuda = hopper(None).unwrap();
    let name = |dim| {
        let spec = Spec::new(Dims::new(1, 8, 2, dim), DType::Bf16);
        cuda.backward_variant(&spec).unwrap().to_string()
    };
    assert_eq!(
        [64, 72, 136].map(name),
        ["bf16 64 warpgroup backward", "bf16 128 warpgroup backward", "bf16 256"]
    );
    // strides that are no multiples of 16 bytes; unnormalised outputs; 32-bit products
    assert_eq!(name(71), "bf16 128");
    let spec = Spec { normalize: false, ..Spec::new(Dims::new(1, 8, 2, 64), DType::F16) };
    assert_eq!(Variant::backward_on_warpgroups(&spec), Ok(None));
    let spec = Spec::new(Dims::new(1, 8, 2, 64), DType::F32);
    assert_eq!(cuda.backward_variant(&spec).unwrap().to_string(), "f32 64");
}

#[test]
fn kernels_are_chosen_by_dims_queries_and_score_epilogue() {
    // three tiles of 128 queries for each of two heads, three of 128 keys
    let case = |dim| plain_case("causal", dims(300, dim), DType::Bf16);
    assert_eq!(blocks_of(&case(16), Cuda::MIN_WARPGROUP_ROWS), Ok([[6, 0, 0], [3, 0, 0]]));
    let mut capped = case(16);
    capped.spec.soft_cap = Some(3.0);
    assert_eq!(blocks_of(&capped, Cuda::MIN_WARPGROUP_ROWS), Ok([[0, 6, 0], [0, 3, 0]]));
    // fewer queries than a tile has: level matrix, with tiles of 128 queries, and of 64 keys
    let few = plain_case("few", dims(127, 16), DType::Bf16);
    assert_eq!(blocks_of(&few, Cuda::MIN_WARPGROUP_ROWS), Ok([[0, 0, 2], [0, 0, 5]]));
    assert_eq!(blocks_of(&few, 0), Ok([[2, 0, 0], [3, 0, 0]]));
    // 256 dims: tiles of 64, and two blocks for each tile of keys
    assert_eq!(blocks_of(&case(136), 0), Ok([[0, 0, 10], [0, 0, 10]]));
}

#[test]
fn every_dim_type_and_backward_mode_holds() {
    let dims = |dim| Dims { value_dim: 40, ..dims(300, dim) };
    let passes = [
        (DType::Bf16, 128, false, BackwardMode::OnePass, 1),
        (DType::F16, 128, true, BackwardMode::TwoPass, 2),
        (DType::F16, 64, false, BackwardMode::TwoPass, 3),
        (DType::Bf16, 64, true, BackwardMode::OnePass, 2),
        // values narrower than keys: the rest of the panels is zeros
        (DType::Bf16, 80, true, BackwardMode::TwoPass, 1),
    ];
    passes_hold(&on_warpgroups(None), dims, &passes);
}

#[test]
fn score_options_hold() {
    for (name, change) in SCORE_OPTIONS {
        let mut spec = Spec::new(dims(150, 24), DType::F64);
        change(&mut spec);
        let masks = Masks { window: Some([Some(170), Some(90)]), ..Masks::default() };
        let mut case = Case::new(name, spec, masks, &mut Draw::new(4));
        if name == "rounded scores" {
            // multiples of 1/4 have exact products and sums: no order of summation changes the
            // rounding of a score
            let quarter = |x: f64| (4.0 * x).round() / 4.0;
            [&mut case.q, &mut case.k].into_iter().for_each(|tensor| tensor.mapv_inplace(quarter));
        }
        let [queries, keys] = blocks_of(&case.in_dtype(DType::Bf16), 0).unwrap();
        assert!(queries[1] > 0 && keys[1] > 0, "{name}: {queries:?} {keys:?}");
    }
}

#[test]
fn large_scores_hold() {
    for causal in [false, true] {
        let [queries, keys] = blocks_of(&large_scores(dims(200, 16), causal), 0).unwrap();
        assert!(queries[0] > 0 && keys[0] > 0);
    }
}

#[test]
fn masked_rows_that_are_not_finite_change_no_bit() {
    for dim in [64, 128] {
        masked_rows_change_no_bit(&on_warpgroups(None), DType::F16, [300, dim]).unwrap();
    }
}

#[test]
fn masked_non_finite_elements_change_nothing() {
    for soft_cap in [None, Some(3.0)] {
        let spec = Spec { soft_cap, ..Spec::new(dims(300, 16), DType::F64) };
        non_finite_elements_reach_visible_pairs(&on_warpgroups(None), spec);
    }
}

/// Enough keys that the dQ pass uses stages again, and enough queries that the dK/dV pass does; or
/// with `few` pairs, so that one more visible key changes the result.
fn case(few: bool) -> Case {
    warpgroup::case(TWO_PANELS, 330, few)
}

#[test]
fn the_order_of_threads_and_copies_changes_no_bit_on_warpgroups() {
    orders_change_no_bit(|| on_warpgroups(None), &case(false), 11..16);
}

/// Verdict on a case with a planted mistake.
pub(crate) fn verdict(of: Of, planted: Planted) -> Result<(), String> {
    let mut case = case(matches!(of, Of::FewPairs | Of::MaskedNan));
    if of == Of::MaskedNan {
        case.k[[0, 69, 0, 0]] = f64::NAN;
    }
    let subject = on_warpgroups(Some(planted));
    if of != Of::MaskedNan {
        return suite::answer(&subject, &case, &Setting::ALONE).map(drop);
    }
    let answer = suite::run(&subject, &case, &Setting::ALONE)?;
    // of all queries but the last
    let is_finite = answer.dq.slice(s![0, ..69, 0, ..]).iter().all(|x| x.is_finite());
    if is_finite { Ok(()) } else { Err("dq[0, ..69, 0, ..] is not finite".into()) }
}
