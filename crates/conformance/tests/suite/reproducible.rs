//! The reproducible order on the CPU, and its refusals.

use std::{sync::Arc, time::Duration};

use annulus::{
    Attention, Dims, Division, Error, Layout, LocalRing, Plan, Setup,
    backend::Cpu,
    comm::{ring::Ring, threads},
};
use annulus_conformance::{
    Altered, Case, Draw, Facade, HostMemory, Masks, RankSetup, Setting, Subject,
    subjects::{cpu, cpu_delayed, mock, over_threads},
    suite,
};
use annulus_core::{
    Alibi, Capabilities, DType, Dropout, LEAF_ROWS, LeafMerges, RankLeaves, RankShard, Result,
    Runs, SinkShape, Spec,
};
use annulus_plan::{CustomLayout, Strategy};
use proptest::prelude::*;

#[test]
#[ignore = "long: scripts/test --whole"]
fn bits_depend_on_neither_ranks_nor_layout_nor_threads() {
    let delayed = cpu_delayed(Duration::from_micros(200));
    suite::reproducible_bits(&[&cpu(), &delayed], 0..24).unwrap();
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 24,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn bits_of_any_random_case_do_not_depend_on_the_ranks(
        seed in any::<u64>(),
        ranks in 1..=16usize,
    ) {
        let delayed = cpu_delayed(Duration::from_micros(200));
        let verdict = suite::reproducible_ranks(&[&cpu(), &delayed], seed, ranks);
        prop_assert_eq!(verdict, Ok(()));
    }
}

/// Mistake of a planted backend.
#[derive(Debug, Clone, Copy)]
enum Mistake {
    /// None, so that the test fails if the backend itself changes bits.
    None,
    /// The tree is over the order in which leaves arrive.
    ArrivalOrder,
    /// On rank 0 every leaf takes the place of the next one in the tree.
    LeavesShifted,
}

impl Mistake {
    fn plant(self, rank: usize, merges: &LeafMerges) -> Result<LeafMerges> {
        let arrivals = || merges.steps().iter().map(|step| step.leaf);
        let wrong = match self {
            Self::ArrivalOrder => LeafMerges::of_arrivals(0..merges.steps().len() as u64)?,
            Self::LeavesShifted if rank == 0 => {
                LeafMerges::of_arrivals(arrivals().map(|leaf| leaf + 1))?
            }
            _ => return Ok(merges.clone()),
        };
        Ok(wrong.with_leaves(arrivals()))
    }

    /// Returns a shard with the mistake in its merges.
    fn of_shard(self, rank: usize, shard: &RankShard) -> Result<RankShard> {
        let mut shard = shard.clone();
        if let Some(leaves) = &shard.leaves {
            let mut wrong = RankLeaves::clone(leaves);
            wrong.keys = self.plant(rank, &leaves.keys)?;
            wrong.queries = self.plant(rank, &leaves.queries)?;
            shard.leaves = Some(Arc::new(wrong));
        }
        Ok(shard)
    }
}

#[test]
#[ignore = "long: scripts/test --whole"]
fn mistakes_in_the_merges_are_found() {
    let verdict = |mistake: Mistake| {
        let planted = over_threads(format!("{mistake:?}"), move |rank, endpoint| {
            let shard = move |shard: &RankShard| mistake.of_shard(rank, shard);
            let backend = Altered::new(|same| same, shard)?;
            Ok(RankSetup { memory: HostMemory, backend, transport: Box::new(endpoint) })
        });
        suite::reproducible_bits(&[&planted], 0..12)
    };
    assert_eq!(verdict(Mistake::None), Ok(()));
    for mistake in [Mistake::ArrivalOrder, Mistake::LeavesShifted] {
        let wrong = verdict(mistake).unwrap_err();
        assert!(wrong.starts_with(&format!("{mistake:?}: random ")), "{wrong}");
    }
}

#[test]
fn gradients_of_bias_and_sinks_have_the_same_bits() {
    suite::reproducible_gradients(&[&cpu(), &cpu_delayed(Duration::from_micros(200))]).unwrap();
}

#[test]
#[ignore = "long: scripts/test --whole"]
fn the_error_is_not_larger_than_in_the_free_order() {
    suite::reproducible_accuracy(&cpu()).unwrap();
}

#[test]
fn bits_of_the_free_order_depend_on_the_ranks() {
    // otherwise equal bits would prove nothing about the reproducible order
    let case = Case::random_long(5).in_dtype(DType::F32);
    let out = |ranks| {
        let setting = Setting::new(ranks, Layout::Contiguous);
        cpu().run(&case, &setting, 1).unwrap().remove(0).out
    };
    assert!(case.spec.dims.kv_len > 64);
    assert_ne!(out(1), out(3));
}

fn attention() -> Attention {
    Attention::new().reproducible(true).forward_only(true)
}

const DIMS: Dims = Dims::new(1, 600, 2, 16);

#[test]
fn what_is_not_reproducible_is_refused() {
    let custom = |cut: i64| {
        let shards = || -> Vec<Runs> { vec![(0..cut).collect(), (cut..600).collect()] };
        Layout::Custom(std::sync::Arc::new(CustomLayout { q: shards(), kv: shards() }))
    };
    let ring = |cut| LocalRing::new((attention(), Division::new().layout(custom(cut))), DIMS, 2);
    ring(256).unwrap();
    for cut in [255, 300] {
        let error = ring(cut).unwrap_err();
        assert!(error.to_string().contains("whole leaves of 256 rows"), "{error}");
    }
}

#[test]
fn ranks_with_other_arithmetic_are_refused() {
    let numerics = |reproducible: bool, other: usize| {
        let attention = attention().reproducible(reproducible);
        threads::each_rank(threads::ring(2), |rank, transport| {
            if rank == other {
                let other =
                    |capabilities| Capabilities { numerics_id: "other".into(), ..capabilities };
                let backend = Altered::new(other, |shard| Ok(shard.clone()))?;
                let plan = Plan::with_backend(&attention, DIMS, backend, transport)?;
                Ok(plan.numerics().to_owned())
            } else {
                let plan = Plan::new(&attention, DIMS, transport)?;
                Ok(plan.numerics().to_owned())
            }
        })
    };
    let error = numerics(true, 1).unwrap_err();
    assert!(matches!(error, Error::RankMismatch { .. }), "{error}");
    let alike = numerics(true, 2).unwrap();
    assert!(alike[0] == alike[1] && alike[0].starts_with("cpu "), "{alike:?}");
    assert_eq!(numerics(false, 1).unwrap()[1], "other");
}

#[test]
fn bits_do_not_depend_on_the_strategy() {
    let dims = Dims { q_heads: 4, ..Dims::new(1, 1100, 4, 8).kv_heads(2) };
    let mut spec = Spec::new(dims, DType::F32);
    spec.bias = Some([1, 4, 1, 1100]);
    spec.sinks = Some(SinkShape::per_head(2));
    spec.dropout = Some(Dropout { probability: 0.2, seed: 9 });
    spec.bias_function = Some(Arc::new(Alibi::published(4)));
    spec.leaf_rows = Some(LEAF_ROWS);
    let draw = &mut Draw::new(17);
    let masks = Masks { causal: true, ..Masks::default() };
    let mut case = Case::new("strategies", spec, masks, draw);
    case.draw_tensors(draw);
    let case = case.in_dtype(DType::F32);
    let run = |setting: &Setting| Facade.run(&case, setting, 1).unwrap().remove(0);
    let ring = run(&Setting::new(3, Layout::Striped));
    let heads = Strategy::HeadsRing { heads: 2 };
    for (ranks, layout, strategy) in [
        (2, None, heads),
        (4, Some(Layout::Striped), heads),
        (4, Some(Layout::Zigzag), heads),
        (4, None, Strategy::AllGather),
        (4, None, Strategy::OncePerNode { node_ranks: 2 }),
    ] {
        let setting = Setting { ranks, layout, strategy, ..Setting::ALONE };
        run(&setting).same_bits(&ring).unwrap_or_else(|wrong| panic!("{setting}: {wrong}"));
    }
}

#[test]
fn a_backend_without_leaves_refuses() {
    let refused = suite::reproducible_bits(&[&mock()], 1..2).unwrap_err();
    assert!(refused.contains("reproducible"), "{refused}");
}

#[test]
fn layouts_are_cut_at_leaves() {
    for layout in [None, Some(Layout::Contiguous), Some(Layout::Zigzag), Some(Layout::Striped)] {
        let division = Division::new().layout(layout.clone());
        let ring = LocalRing::new((attention().causal(true), division), DIMS, 2).unwrap();
        let name = ring.plan().layout().name();
        assert!(layout.is_none_or(|layout| layout.name() == name), "{name}");
    }
}

#[test]
fn partial_results_take_the_memory_that_was_predicted() {
    let dims = Dims::new(1, 2048, 2, 64);
    for (ranks, layout) in [(1, Layout::Contiguous), (3, Layout::Zigzag), (4, Layout::Striped)] {
        let attention = Setup::from((
            Attention::new().causal(true).reproducible(true),
            Division::new().layout(layout),
        ));
        for forward_only in [false, true] {
            let attention = attention.clone().map_attention(|of| of.forward_only(forward_only));
            let bytes = threads::each_rank(threads::ring(ranks), |_, transport| {
                let spec = attention.spec(dims);
                let options = attention.ring_options();
                let ring = Ring::new(Cpu::new(1)?, Box::new(transport), spec, options)?;
                Ok([ring.leaf_bytes(), ring.workspace().leaf_bytes()])
            });
            for [predicted, allocated] in bytes.unwrap() {
                // the lists of partial results themselves are not in the prediction
                assert!(predicted > 0, "{ranks} ranks");
                let most = predicted + predicted / 50;
                assert!((predicted..=most).contains(&allocated), "{allocated} of {predicted}");
            }
        }
    }
}
