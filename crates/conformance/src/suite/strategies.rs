//! Strategies other than the ring, over every grid that ranks and heads admit.

use std::ops::Range;

use annulus_core::{DType, HeadGrid, Layout, Strategy, index};

use super::{LAYOUTS, Verdict, examine, judge};
use crate::{Case, Setting, Subject};

/// Ring sizes with several divisors.
const RANKS: [usize; 5] = [2, 3, 4, 6, 8];

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

/// Computes random cases in all element types, over rings of several sizes.
///
/// # Errors
/// The first wrong answer.
pub fn strategies(subject: &dyn Subject, seeds: Range<u64>) -> Verdict {
    for seed in seeds {
        let dtypes = [DType::F32, DType::F64, DType::Bf16, DType::F16];
        let case = Case::random_heads(seed).in_dtype(dtypes[index(seed % 4)]);
        let judge = judge(&case)?;
        let ranks = RANKS[index(seed) % RANKS.len()];
        for setting in strategy_settings(&case, ranks, index(seed)) {
            examine(subject, &judge, &case, &setting)?;
        }
    }
    Ok(())
}
