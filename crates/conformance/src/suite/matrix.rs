//! Mask × ranks × layout, with dims, GQA, element type and features sampled over that product.
//!
//! The product of masks, ranks and layouts is run in full at tiny sizes. Every member draws the
//! other choices of `pairwise.rs` at random. [`sizes`] are fewer and larger; [`random_cases`]
//! combine everything at random.
//!
//! Strategies other than the ring run over every grid that ranks and heads admit.

use std::ops::Range;

use annulus_core::{Alignment, Dims, Error, index};
use annulus_plan::{HeadGrid, Layout, Route, Strategy};

use super::{
    LAYOUTS, Verdict, examine, examine_twice, judge,
    numeric::{large_constant, large_constants},
    pairwise::{Configuration, LAYOUT, MASK, MASKS, random_layout},
};
use crate::{Case, Draw, Setting, Subject};

/// Sampled part of a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scale {
    /// Every member.
    Full,
    /// One member in this many.
    OneIn(usize),
}

impl Scale {
    /// True if member `number` is in the sample.
    const fn includes(self, number: usize) -> bool {
        match self {
            Self::Full => true,
            Self::OneIn(every) => number.is_multiple_of(every),
        }
    }
}

/// 33 ranks are more than most cases have rows, so that some ranks own none.
const RANKS: [usize; 9] = [1, 2, 3, 4, 5, 7, 8, 16, 33];

/// Runs every mask × every number of ranks × every layout, a random one included.
pub fn matrix(subject: &dyn Subject, scale: Scale) -> Verdict {
    let members = (0..MASKS).flat_map(|mask| {
        let of_mask = move |ranks| (0..=LAYOUTS.len()).map(move |layout| (mask, ranks, layout));
        RANKS.into_iter().flat_map(of_mask)
    });
    for (number, (mask, ranks, layout)) in (1..).zip(members) {
        if !scale.includes(number) {
            continue;
        }
        let draw = &mut Draw::new(number as u64);
        let member = Configuration::drawn(&[(MASK, mask), (LAYOUT, layout)], draw);
        let case = member.case().in_dtype(draw.pick(subject.dtypes()));
        examine(subject, &judge(&case)?, &case, &member.setting(ranks))?;
    }
    Ok(())
}

/// Runs awkward sizes up to 113 × 203, each with one mask, a few ranks and every layout.
pub fn sizes(subject: &dyn Subject, scale: Scale) -> Verdict {
    let lengths = [(1, 1), (1, 65), (63, 63), (65, 65), (33, 17), (63, 7), (113, 203)];
    for (number, (q_len, kv_len)) in
        lengths.into_iter().enumerate().filter(|(number, _)| scale.includes(*number))
    {
        let draw = &mut Draw::new(number as u64);
        let dims =
            Dims { batch: 1, q_len, kv_len, q_heads: 2, kv_heads: 1, head_dim: 33, value_dim: 20 };
        let mask = draw.pick(&[1, 2, 3]);
        let mut case = Configuration::drawn(&[(MASK, mask)], draw).case_of(dims);
        case.spec.alignment = Alignment::BottomRight;
        for (turn, layout) in LAYOUTS.into_iter().enumerate() {
            let case = case.in_dtype(subject.dtypes()[(number + turn) % subject.dtypes().len()]);
            examine(subject, &judge(&case)?, &case, &Setting::new(draw.pick(&[2, 3, 5]), layout))?;
        }
    }
    Ok(())
}

/// Runs random cases on random settings, both drawn from the seed.
pub fn random_cases(subject: &dyn Subject, seeds: impl Iterator<Item = u64>) -> Verdict {
    for seed in seeds {
        let draw = &mut Draw::new(!seed);
        let case = Case::random(seed).in_dtype(draw.pick(subject.dtypes()));
        let ranks = draw.pick(&[1, 2, 3, 4, 6]);
        let setting = random_setting(&case, ranks, draw);
        examine(subject, &judge(&case)?, &case, &setting)?;
    }
    Ok(())
}

/// Draws a layout and a route.
pub fn random_setting(case: &Case, ranks: usize, draw: &mut Draw) -> Setting {
    let layout = match draw.below(5) {
        0 => None,
        1 => Some(random_layout(&case.spec.dims, ranks, draw)),
        named => Some(LAYOUTS[named - 2].clone()),
    };
    // ids of one side serve for both only if every rank owns the same rows of both
    let lone_ids = case.batch.q_segment_ids.is_some() != case.batch.kv_segment_ids.is_some();
    let layout = layout.filter(|layout| !(lone_ids && matches!(layout, Layout::Custom(_))));
    Setting { ranks, layout, route: draw.pick(&routes(ranks)), ..Setting::ALONE }
}

/// Returns the routes of a ring of this many ranks, and `None`. Routes over nodes have the largest
/// nodes that divide the ranks into at least two.
pub fn routes(ranks: usize) -> Vec<Option<Route>> {
    let divides = |size: &usize| ranks.is_multiple_of(*size);
    let node_ranks = (1..ranks).rev().find(divides).unwrap_or(1);
    let of_nodes = [
        Route::RailsUp { node_ranks },
        Route::RailsDown { node_ranks },
        Route::OncePerNode { node_ranks },
    ];
    std::iter::once(None).chain(Route::ALL.into_iter().chain(of_nodes).map(Some)).collect()
}

/// Ring sizes with several divisors.
const GRID_RANKS: [usize; 5] = [2, 3, 4, 6, 8];

/// Returns a setting for each grid of heads × queries × keys that `ranks` and a case admit, but the
/// ring; layouts in turn, from number `first` on.
pub fn strategy_settings(case: &Case, ranks: usize, first: usize) -> Vec<Setting> {
    let grids = HeadGrid::candidates(&case.spec, ranks, true);
    let strategies = grids.iter().map(HeadGrid::strategy);
    let setting = |(number, strategy): (usize, Strategy)| {
        let layout: Option<Layout> = LAYOUTS.get((first + number) % 4).cloned();
        Setting { ranks, layout, strategy, ..Setting::ALONE }
    };
    strategies.filter(|&strategy| strategy != Strategy::Ring).enumerate().map(setting).collect()
}

/// Returns a setting for each published strategy that `ranks` ranks and a case admit, with nodes of
/// every size that divides the ranks.
pub fn published_settings(case: &Case, ranks: usize) -> Vec<Setting> {
    let nodes = (1..ranks).filter(|&node_ranks| ranks.is_multiple_of(node_ranks));
    let once = nodes.map(|node_ranks| Strategy::OncePerNode { node_ranks });
    let all = [Strategy::Ring, Strategy::AllGather, Strategy::AllToAll, Strategy::PassQ];
    let admits = |strategy: &Strategy| HeadGrid::of(&case.spec.dims, ranks, *strategy).is_ok();
    let with = |strategy| Setting { ranks, strategy, ..Setting::ALONE };
    all.into_iter().chain(once).filter(admits).map(with).collect()
}

/// Computes random cases in all element types of the subject, over rings of several sizes.
pub fn strategies(subject: &dyn Subject, seeds: Range<u64>) -> Verdict {
    compute_grids(subject, seeds, |_| true)
}

/// As [`strategies`], only those that divide heads alone, for backends that compute no partial
/// results of key columns. The others must be refused.
pub fn head_strategies(subject: &dyn Subject, seeds: Range<u64>) -> Verdict {
    let is_of_heads = |strategy: Strategy| matches!(strategy, Strategy::HeadsRing { .. });
    compute_grids(subject, seeds.clone(), is_of_heads)?;
    for seed in seeds {
        let case = Case::random_heads(seed).in_dtype(subject.dtypes()[0]);
        let settings = strategy_settings(&case, 2, 0);
        for setting in settings.iter().filter(|setting| !is_of_heads(setting.strategy)) {
            match subject.run(&case, setting, 1) {
                Err(Error::Unsupported { .. }) => {}
                Err(error) => return Err(format!("{} on {setting}: {error}", case.name)),
                Ok(_) => return Err(format!("{} on {setting}: not refused", case.name)),
            }
        }
    }
    Ok(())
}

fn compute_grids(
    subject: &dyn Subject,
    seeds: Range<u64>,
    is_due: impl Fn(Strategy) -> bool,
) -> Verdict {
    let dtypes = subject.dtypes();
    for seed in seeds {
        let case = Case::random_heads(seed).in_dtype(dtypes[index(seed) % dtypes.len()]);
        let judge = judge(&case)?;
        let ranks = GRID_RANKS[index(seed) % GRID_RANKS.len()];
        let published = published_settings(&case, ranks);
        let all = strategy_settings(&case, ranks, index(seed)).into_iter().chain(published);
        for setting in all {
            if is_due(setting.strategy) {
                examine_twice(subject, &judge, &case, &setting)?;
            }
        }
    }
    for ranks in [2, 3, 4] {
        let dtype = dtypes[ranks % dtypes.len()];
        for setting in strategy_settings(&large_constant(dtype, 0.0), ranks, ranks) {
            if is_due(setting.strategy) {
                large_constants(subject, dtype, None, &setting)?;
            }
        }
    }
    Ok(())
}
