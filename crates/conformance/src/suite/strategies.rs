//! Strategies other than the ring, over every grid that ranks and heads admit.

use std::ops::Range;

use annulus_core::{Error, HeadGrid, Layout, Strategy, index};

use super::{
    LAYOUTS, Verdict, examine, judge,
    numeric::{large_constant, large_constants},
};
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

/// Computes random cases in all element types of the subject, over rings of several sizes.
///
/// # Errors
/// The first wrong answer.
pub fn strategies(subject: &dyn Subject, seeds: Range<u64>) -> Verdict {
    compute(subject, seeds, |_| true)
}

/// As [`strategies`], only those that divide heads alone, for backends that compute no partial
/// results of key columns. The others must be refused.
///
/// # Errors
/// The first wrong answer, or an answer where a refusal is due.
pub fn head_strategies(subject: &dyn Subject, seeds: Range<u64>) -> Verdict {
    let is_of_heads = |strategy: Strategy| matches!(strategy, Strategy::HeadsRing { .. });
    compute(subject, seeds.clone(), is_of_heads)?;
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

fn compute(subject: &dyn Subject, seeds: Range<u64>, is_due: impl Fn(Strategy) -> bool) -> Verdict {
    let dtypes = subject.dtypes();
    for seed in seeds {
        let case = Case::random_heads(seed).in_dtype(dtypes[index(seed) % dtypes.len()]);
        let judge = judge(&case)?;
        let ranks = RANKS[index(seed) % RANKS.len()];
        for setting in strategy_settings(&case, ranks, index(seed)) {
            if is_due(setting.strategy) {
                examine(subject, &judge, &case, &setting)?;
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
