//! The checks that any [`Subject`] must pass. Each is a function that returns the first failure.

mod bits;
mod key_lists;
pub mod kv_cache;
mod matrix;
pub mod messages;
mod nonfinite;
mod numeric;
mod pairwise;

pub use bits::{
    independent_rows, reproducible_accuracy, reproducible_bits, reproducible_gradients,
    reproducible_ranks, same_bits_over_repeats, same_bits_received_ahead, same_bits_under_delay,
};
pub use key_lists::{dense_twin, key_lists, listed, listed_cases, lists, reproducible_lists};
pub use kv_cache::{kv_cache, kv_cache_copies, kv_cache_segments};
pub use matrix::{
    Scale, head_strategies, matrix, published_settings, random_cases, random_setting, routes,
    sizes, strategies, strategy_settings,
};
pub use nonfinite::{Poison, infinite_scores, infinite_scores_on, nonfinite, nonfinite_on};
pub use numeric::out_residual;
pub use numeric::{numeric_rules, numeric_rules_on};
pub use pairwise::{Configuration, pairwise, pairwise_cases};

use annulus_core::BiasTable;
use annulus_plan::Layout;
use ndarray::Array4;

use crate::{Answer, Case, Draw, Judge, Setting, Subject};

/// `Ok`, or the failure as text.
pub type Verdict = Result<(), String>;

/// The layouts that have a name, in the order in which the suite numbers them.
pub const LAYOUTS: [Layout; 3] = [Layout::Contiguous, Layout::Zigzag, Layout::Striped];

/// Returns the case with a bias table of any kind, as random as the case. Window and grid are small,
/// so that offsets are clipped.
#[must_use]
pub fn with_bias_table(mut case: Case, draw: &mut Draw) -> Case {
    let table = match draw.below(5) {
        0 => BiasTable::clipped(draw.pick(&[0, 3, 40]), draw.pick(&[0, 5, 100])),
        1 => BiasTable::t5(true, 8, draw.pick(&[5, 20])),
        2 => BiasTable::t5(false, draw.pick(&[2, 16]), 40),
        3 => BiasTable::grid(&[(5, draw.pick(&[2, 5])), (7, draw.pick(&[3, 7]))]),
        _ => BiasTable::grid(&[(3, 2), (2, 2), (4, 4)]),
    };
    let table = table.expect("a table of few entries");
    let table = if draw.once_in(3) { table.shared_by_heads() } else { table };
    let shape = table.shape(case.spec.dims.q_heads);
    let mut values: Array4<f64> = draw.tensor(shape);
    if draw.once_in(3) {
        values.mapv_inplace(|x| if draw.once_in(5) { f64::NEG_INFINITY } else { x });
    }
    case.name = format!("{table} in {}", case.name);
    case.spec.bias = Some(shape);
    case.spec.bias_table = Some(table);
    case.bias = Some(values);
    case
}

/// Runs a case once.
pub fn run(subject: &dyn Subject, case: &Case, setting: &Setting) -> Result<Answer, String> {
    let context = || format!("{}: {} on {setting}", subject.name(), case.name);
    let failed = |error| format!("{}: {error}", context());
    let answers = subject.run(case, setting, 1).map_err(failed)?;
    answers.into_iter().next().ok_or_else(|| format!("{}: no answer", context()))
}

/// Runs a case once and compares its answer with the oracle's.
pub(crate) fn examine(
    subject: &dyn Subject,
    judge: &Judge,
    case: &Case,
    setting: &Setting,
) -> Verdict {
    let answer = run(subject, case, setting)?;
    judge
        .check(&answer)
        .map_err(|wrong| format!("{}: {} on {setting}: {wrong}", subject.name(), case.name))
}

/// Runs a case once, compares its answer with the oracle's and returns it.
pub fn answer(subject: &dyn Subject, case: &Case, setting: &Setting) -> Result<Answer, String> {
    let answer = run(subject, case, setting)?;
    let context = |wrong| format!("{}: {} on {setting}: {wrong}", subject.name(), case.name);
    judge(case)?.check(&answer).map_err(context)?;
    Ok(answer)
}

/// Runs a case twice on one plan and compares both answers with the oracle's.
pub fn examine_twice(
    subject: &dyn Subject,
    judge: &Judge,
    case: &Case,
    setting: &Setting,
) -> Verdict {
    let context = |wrong| format!("{}: {} on {setting}: {wrong}", subject.name(), case.name);
    let answers = subject.run(case, setting, 2).map_err(|error| context(error.to_string()))?;
    answers.iter().try_for_each(|answer| judge.check(answer)).map_err(context)
}

/// Creates the judge of a case.
pub fn judge(case: &Case) -> Result<Judge, String> {
    Judge::new(case).map_err(|error| format!("{}: {error}", case.name))
}

/// Returns an error unless `holds`.
pub(crate) fn ensure(holds: bool, what: impl FnOnce() -> String) -> Verdict {
    if holds { Ok(()) } else { Err(what()) }
}
