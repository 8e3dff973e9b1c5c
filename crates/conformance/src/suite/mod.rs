//! The checks that any [`Subject`] must pass, each a function that says what is wrong.

mod determinism;
mod matrix;
mod metamorphic;
mod nonfinite;
mod numeric;
mod pairwise;

pub use determinism::{same_bits_over_repeats, same_bits_under_delay};
pub use matrix::{Scale, matrix, random_cases, sizes};
pub use metamorphic::metamorphic;
pub use nonfinite::{Poison, infinite_scores, infinite_scores_on, nonfinite, nonfinite_on};
pub use numeric::{numeric_rules, numeric_rules_on};
pub use pairwise::{Configuration, pairwise, pairwise_cases};

use annulus_core::Layout;

use crate::{Answer, Case, Judge, Setting, Subject};

/// Nothing, or what is wrong.
pub type Verdict = Result<(), String>;

/// The layouts that have a name.
pub const LAYOUTS: [Layout; 3] = [Layout::Contiguous, Layout::Zigzag, Layout::Striped];

/// Runs a case once.
pub(crate) fn run(subject: &dyn Subject, case: &Case, setting: &Setting) -> Result<Answer, String> {
    let place = || format!("{}: {} on {setting}", subject.name(), case.name);
    let answers = subject.run(case, setting, 1).map_err(|error| format!("{}: {error}", place()))?;
    answers.into_iter().next().ok_or_else(|| format!("{}: no answer", place()))
}

/// Runs a case once and holds it against the oracle.
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

/// Makes a judge.
pub(crate) fn judge(case: &Case) -> Result<Judge, String> {
    Judge::new(case).map_err(|error| format!("{}: {error}", case.name))
}

/// An error unless `holds`.
pub(crate) fn ensure(holds: bool, what: impl FnOnce() -> String) -> Verdict {
    if holds { Ok(()) } else { Err(what()) }
}
