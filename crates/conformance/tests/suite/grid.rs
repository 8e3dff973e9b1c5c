//! Grids of queries × keys: bytes, choice, and what a grid refuses. `suite::strategies` compares
//! them with the oracle.

use annulus::{Attention, Division, LocalRing, Tensors};
use annulus_conformance::{Case, Draw, Facade, Judge, Masks, Setting, Subject};
use annulus_core::{BackwardMode, Batch, DType, Dims, Placement, Spec};
use annulus_plan::{Choice, Layout, Route, Strategy, StrategyTraffic, TrafficOptions};
use ndarray::{Array4, Axis};

const DIMS: Dims =
    Dims { batch: 2, q_len: 53, kv_len: 53, q_heads: 4, kv_heads: 2, head_dim: 8, value_dim: 6 };

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

/// Rows have equal maxima in several columns: keys are repeated.
#[test]
fn outputs_that_are_not_normalised_are_the_oracle() {
    for backward in [BackwardMode::OnePass, BackwardMode::TwoPass] {
        let causal = Masks { causal: true, ..Masks::default() };
        let plain = Spec { normalize: false, backward, ..Spec::new(DIMS, DType::F64) };
        let window = Masks { window: Some([Some(4), Some(4)]), ..Masks::default() };
        for (name, spec, masks) in [
            ("not normalised", plain.clone(), causal),
            // some rows have no key in some columns
            ("not normalised, window", plain, window),
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

/// Packed documents: a rank has several, or a part of one.
fn documents() -> Batch {
    let starts = Some(vec![0, 7, 30, 31, 53]);
    Batch { cum_seqlens_q: starts.clone(), cum_seqlens_k: starts, ..Batch::default() }
}

/// Every strategy of `ranks` ranks on a layout, with its traffic under the documents.
fn strategies_of_documents(
    attention: &Attention,
    layout: Option<&Layout>,
    balanced_route: Option<Route>,
    ranks: usize,
) -> annulus::Result<Vec<StrategyTraffic>> {
    let spec = attention.spec(DIMS)?;
    let batch = documents();
    let options = TrafficOptions {
        backward: true,
        layout,
        balanced_route,
        batch: Some(&batch),
        ..TrafficOptions::FORWARD
    };
    let mut all = StrategyTraffic::of_all(&spec, ranks, &options, &mut || ())?;
    // nodes of two ranks, on which the ring itself would have another route
    let placement = Placement::new((0..ranks).map(|rank| rank / 2).collect());
    let on_nodes = TrafficOptions { placement: Some(&placement), ..options };
    all.extend(StrategyTraffic::of_routes(&spec, ranks, &on_nodes, &mut || ())?);
    Ok(all)
}

/// Runs both passes over the documents, and compares the bytes sent with the prediction and the
/// output with that of one rank.
fn check_documents(
    division: &Division,
    traffic: &StrategyTraffic,
    ranks: usize,
) -> annulus::Result<()> {
    let tensor = |heads, dim, seed: usize| {
        let number = |of: usize| ((of * 7 + seed) % 13) as f32 * 0.2 - 1.0;
        let shape = (DIMS.batch, DIMS.q_len, heads, dim);
        Array4::from_shape_fn(shape, |(b, i, h, d)| number(b * 31 + i * 5 + h * 3 + d))
    };
    let q = tensor(DIMS.q_heads, DIMS.head_dim, 1);
    let k = tensor(DIMS.kv_heads, DIMS.head_dim, 2);
    let v = tensor(DIMS.kv_heads, DIMS.value_dim, 3);
    let tensors = Tensors::new(q.view(), k.view(), v.view());
    let name = format!("{} of {ranks} ranks on {:?}", traffic.strategy, traffic.layout.of_ranks);
    let division = division.clone().strategy(traffic.strategy);
    let mut ring = LocalRing::new((Attention::new().causal(true), division), DIMS, ranks)?;
    ring.update(&documents())?;
    let forward = ring.forward(&tensors)?;
    let dout = tensor(DIMS.q_heads, DIMS.value_dim, 4);
    let backward = ring.backward(&tensors, &forward, dout.view(), None)?;
    for (rank, plan) in ring.plans().enumerate() {
        let index = plan.ring_index();
        let sent = [&forward.reports, &backward.reports].map(|of| u128::from(of[rank].bytes_sent));
        let want = [traffic.forward[index], traffic.backward[index]];
        assert_eq!(sent, want, "{name}, rank {rank}");
    }
    let mut one = LocalRing::new(Attention::new().causal(true), DIMS, 1)?;
    one.update(&documents())?;
    let want = one.forward(&tensors)?;
    let error = (&forward.out - &want.out).fold(0.0f32, |most, error| most.max(error.abs()));
    assert!(error < 1e-5, "{name}: {error}");
    Ok(())
}

#[test]
fn the_predicted_bytes_of_documents_are_those_sent() -> annulus::Result<()> {
    let causal = Attention::new().causal(true);
    let mut checked = [0; 2];
    for ranks in [2, 3, 4, 8] {
        let mut layouts: Vec<_> = LAYOUTS.into_iter().map(|layout| (layout, None)).collect();
        let Choice { layout, route, .. } =
            Choice::balanced(&causal.spec(DIMS)?, &documents(), ranks)?;
        layouts.push((Some(layout), Some(route)));
        for (layout, balanced_route) in layouts {
            let all = strategies_of_documents(&causal, layout.as_ref(), balanced_route, ranks)?;
            let division = Division::new();
            let division = match balanced_route {
                Some(_) => division.balanced(&causal, DIMS, &documents(), ranks)?,
                None => division.layout(layout),
            };
            for traffic in &all {
                check_documents(&division, traffic, ranks)?;
                checked[usize::from(traffic.grid.columns() > 1)] += 1;
            }
        }
    }
    // on each of five layouts
    assert_eq!(checked, [5 * 15, 5 * 11], "with one key column, with several");
    Ok(())
}

/// The documents of a balanced layout, or those that are given, decide; without them the mask does.
#[test]
fn the_strategy_of_documents_is_chosen_by_their_bytes() -> annulus::Result<()> {
    // a document for each rank: a ring sends nothing
    let starts = Some((0..=4).map(|rank| rank * 16).collect());
    let documents = Batch { cum_seqlens_q: starts, ..Batch::default() };
    let dims = Dims::new(1, 64, 8, 8);
    let causal = Attention::new().causal(true);
    let auto = Division::new().strategy(Strategy::Auto).layout(Layout::Contiguous);
    let chosen = |division: Division| -> annulus::Result<Strategy> {
        let ring = LocalRing::new((&causal, division), dims, 4)?;
        Ok(ring.plan().strategy())
    };
    assert_eq!(chosen(auto.clone())?, Strategy::Grid { heads: 1, queries: 2, keys: 2 });
    assert_eq!(chosen(auto.clone().documents(documents.clone()))?, Strategy::Ring);
    assert_eq!(chosen(auto.clone().balanced(&causal, dims, &documents, 4)?)?, Strategy::Ring);
    // ids of one side serve for both, also where a key column has other rows than the queries
    let ids = ndarray::Array2::from_shape_fn((1, 64), |(_, row)| (row / 16) as i32);
    let ids = Batch { kv_segment_ids: Some(ids), ..Batch::default() };
    assert_eq!(chosen(auto.clone().documents(ids))?, Strategy::Ring);
    let wrong = Batch { cum_seqlens_q: Some(vec![0, 65]), ..Batch::default() };
    let error = chosen(auto.clone().documents(wrong)).unwrap_err().to_string();
    assert!(error.starts_with("cum_seqlens_q: got 65 as the last number"), "{error}");
    let error = chosen(auto.clone().strategy(Strategy::Ring).documents(documents)).unwrap_err();
    let want = "documents: got one, for ring, want none: the strategy auto alone depends on it";
    assert_eq!(error.to_string(), want);
    Ok(())
}
