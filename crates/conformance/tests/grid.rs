//! Grids of queries × keys against the f64 oracle: every shape on 2, 3, 4, 6 and 8 ranks, every
//! layout, masks and options that depend on positions, and what a grid refuses.

use annulus::{Attention, LocalRing, PassKind};
use annulus_conformance::{Case, Draw, Facade, Judge, Masks, Setting, Subject};
use annulus_core::{
    BackwardMode, BiasOrder, DType, Dims, Dropout, Error, HeadGrid, Layout, SinkShape, Spec,
    Strategy, StrategyTraffic, TrafficOptions,
};
use ndarray::Axis;

const DIMS: Dims =
    Dims { batch: 2, q_len: 53, kv_len: 53, q_heads: 4, kv_heads: 2, head_dim: 8, value_dim: 6 };

/// Query parts × key columns.
const SHAPES: [[usize; 2]; 11] = [
    [1, 2],
    [1, 3],
    [1, 4],
    [2, 2],
    [1, 6],
    [2, 3],
    [3, 2],
    [1, 8],
    [2, 4],
    [4, 2],
    // one key column is the ring
    [3, 1],
];

const LAYOUTS: [Option<Layout>; 4] =
    [None, Some(Layout::Contiguous), Some(Layout::Zigzag), Some(Layout::Striped)];

const fn grid([queries, keys]: [usize; 2]) -> Strategy {
    Strategy::Grid { heads: 1, queries, keys }
}

fn setting(shape: [usize; 2], layout: Option<Layout>) -> Setting {
    let [queries, keys] = shape;
    Setting { ranks: queries * keys, layout, strategy: grid(shape), ..Setting::ALONE }
}

fn case(name: &str, spec: Spec, masks: Masks) -> Case {
    let draw = &mut Draw::new(23);
    let mut case = Case::new(name, spec, masks, draw);
    case.draw_tensors(draw);
    case
}

/// Attention with everything that a rank of a grid adds once, or computes from positions.
fn with_options(backward: BackwardMode) -> Spec {
    Spec {
        sinks: Some(SinkShape::per_head(2)),
        bias: Some([1, 4, 1, 53]),
        bias_order: BiasOrder::BeforeSoftCap,
        soft_cap: Some(5.0),
        dropout: Some(Dropout { probability: 0.3, seed: 5 }),
        backward,
        ..Spec::new(DIMS, DType::F64)
    }
}

fn check(case: &Case, shape: [usize; 2], layout: Option<Layout>) {
    let setting = setting(shape, layout);
    let judge = Judge::new(case).expect("a valid case");
    let answers = Facade.run(case, &setting, 2);
    let answers = answers.unwrap_or_else(|error| panic!("{} on {setting}: {error}", case.name));
    for answer in &answers {
        let verdict = judge.check(answer);
        verdict.unwrap_or_else(|wrong| panic!("{} on {setting}: {wrong}", case.name));
    }
}

#[test]
fn every_shape_and_layout_is_the_oracle() {
    let full = case("full", Spec::new(DIMS, DType::F64), Masks::default());
    let causal = Masks { causal: true, ..Masks::default() };
    let causal = case("causal", Spec::new(DIMS, DType::F64), causal);
    for (number, shape) in SHAPES.into_iter().enumerate() {
        for (offset, layout) in LAYOUTS.into_iter().enumerate() {
            let dtypes = [DType::F32, DType::Bf16, DType::F16, DType::F64];
            let dtype = dtypes[(number + offset) % 4];
            check(&full.in_dtype(dtype), shape, layout.clone());
            check(&causal.in_dtype(dtype), shape, layout);
        }
    }
}

#[test]
fn sinks_bias_and_dropout_are_the_oracle() {
    for backward in [BackwardMode::OnePass, BackwardMode::TwoPass] {
        let causal = Masks { causal: true, ..Masks::default() };
        let options = case("options", with_options(backward), causal);
        let by_query = Spec { bias: Some([2, 1, 53, 1]), ..with_options(BackwardMode::OnePass) };
        let by_query = case("bias by query", by_query, Masks::default());
        let all = Spec { bias: Some([1, 4, 53, 53]), ..with_options(BackwardMode::OnePass) };
        let all = case("bias by query and key", all, Masks::default());
        for shape in [[1, 3], [2, 2], [3, 2]] {
            for case in [&options, &by_query, &all] {
                check(&case.in_dtype(DType::F32), shape, None);
            }
        }
    }
}

/// Rows have equal maxima in several columns: keys are repeated.
#[test]
fn outputs_that_are_not_normalised_are_the_oracle() {
    for backward in [BackwardMode::OnePass, BackwardMode::TwoPass] {
        let causal = Masks { causal: true, ..Masks::default() };
        let plain = Spec { normalize: false, backward, ..Spec::new(DIMS, DType::F64) };
        let options = Spec { normalize: false, ..with_options(backward) };
        let window = Masks { window: Some([Some(4), Some(4)]), ..Masks::default() };
        for (name, spec, masks) in [
            ("not normalised", plain.clone(), causal.clone()),
            // some rows have no key in some columns
            ("not normalised, window", plain, window),
            ("not normalised, options", options, causal),
        ] {
            let mut case = case(name, spec, masks);
            for (key, from) in [(20, 3), (41, 3), (52, 17)] {
                let row = case.k.index_axis(Axis(1), from).to_owned();
                case.k.index_axis_mut(Axis(1), key).assign(&row);
            }
            for shape in [[1, 3], [2, 2], [3, 2], [1, 8]] {
                check(&case.in_dtype(DType::F32), shape, None);
                check(&case.in_dtype(DType::Bf16), shape, Some(Layout::Zigzag));
            }
        }
    }
}

#[test]
fn different_lengths_and_few_rows_are_the_oracle() {
    for (q_len, kv_len) in [(1, 53), (5, 2), (53, 1), (3, 3), (0, 7), (7, 0)] {
        let dims = Dims { q_len, kv_len, ..DIMS };
        let case = case("lengths", Spec::new(dims, DType::F32), Masks::default());
        for shape in [[1, 4], [2, 2], [4, 2]] {
            check(&case.in_dtype(DType::F32), shape, Some(Layout::Zigzag));
        }
    }
}

/// Partial results are not rounded to the element type: a grid is as close to the oracle as a ring.
#[test]
fn partial_results_are_not_rounded() {
    let case = case("bf16", Spec::new(DIMS, DType::F64), Masks::default()).in_dtype(DType::Bf16);
    let run = |setting: &Setting| Facade.run(&case, setting, 1).expect("an answer").remove(0);
    let ring = run(&Setting::new(8, Layout::Contiguous));
    let grid = run(&setting([1, 8], Some(Layout::Contiguous)));
    let differ = |of: [&ndarray::Array4<f64>; 2]| {
        let [ring, grid] = of;
        let different = ring.iter().zip(grid).filter(|(ring, grid)| ring != grid).count();
        different as f64 / ring.len() as f64
    };
    // rounding of eight terms would change about every second element
    let out = differ([&ring.out, &grid.out]);
    let dq = differ([&ring.dq, &grid.dq]);
    assert!(out < 0.02 && dq < 0.02, "{out} of out, {dq} of dq");
}

#[test]
fn the_predicted_bytes_are_those_of_the_plans() {
    let spec = Spec { sinks: Some(SinkShape::shared(1)), ..Spec::new(DIMS, DType::F32) };
    let attention = Attention::new().causal(true).softmax_aux(SinkShape::shared(1));
    let spec = Spec { mask: attention.spec(DIMS).unwrap().mask, ..spec };
    let mut grids = 0;
    for ranks in [2, 3, 4, 6, 8] {
        for of in HeadGrid::candidates(&spec, ranks, true) {
            let strategy = of.strategy();
            let options = TrafficOptions {
                backward: true,
                layout: None,
                route: None,
                placement: None,
                kv_tile: 1,
                receive_ahead: 1,
                batch: None,
            };
            let traffic = StrategyTraffic::of(&spec, of, &options, &mut || ()).unwrap();
            let ring = attention.clone().strategy(strategy).local_ring(DIMS, ranks).unwrap();
            for plan in ring.plans() {
                assert_eq!(plan.strategy(), strategy);
                let predicted = [PassKind::Forward, PassKind::Backward]
                    .map(|pass| u128::from(plan.bytes_predicted(pass)));
                let index = plan.ring_index();
                let of_strategy = [traffic.forward[index], traffic.backward[index]];
                assert_eq!(of_strategy, predicted, "{strategy} rank {index}");
            }
            grids += usize::from(of.columns() > 1);
        }
    }
    assert_eq!(grids, 15);
}

#[test]
fn what_a_grid_does_not_compute_is_refused_with_the_plan() {
    let refused = |attention: Attention, ranks: usize| -> Error {
        let plan: Result<LocalRing, Error> = attention.local_ring(DIMS, ranks);
        plan.map(drop).unwrap_err()
    };
    let grid = |shape| Attention::new().strategy(grid(shape));
    let error = refused(grid([2, 2]).reproducible(true), 4);
    assert!(matches!(error, Error::Unsupported { .. }), "{error}");
    let want = "reproducible is not supported by keys in 2 columns";
    assert!(error.to_string().contains(want), "{error}");
    for (attention, ranks) in [(grid([2, 2]), 3), (grid([0, 4]), 4), (grid([3, 1]), 4)] {
        let error = refused(attention, ranks);
        assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
        assert!(error.to_string().starts_with("strategy: got grid:"), "{error}");
    }
    // one key column is the ring, which does all of this
    grid([4, 1]).reproducible(true).local_ring(DIMS, 4).unwrap();
}
