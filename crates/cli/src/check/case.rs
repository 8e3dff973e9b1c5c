//! One case in one element type: reads it once and computes it on every ring, forward and backward.

use std::time::Duration;

use annulus::{Division, LocalRing, Runtime, Setup};
use annulus_core::{DType, Error, Result};
use annulus_plan::{HeadGrid, Strategy};
use annulus_test_cases::{Answer, Case, Expected, WrongArray, facade, golden::Index};
use ndarray::Dimension;
use serde::{Deserialize, Serialize};

use crate::{
    arguments::values::LayoutName, backend::BackendChoice, failure, job::RankEndpoint, message,
};

/// Deadline of the rings. Cases compute in well under a second, and kernels compile in less than a
/// minute, so a longer silence is a deadlock.
const DEADLINE: Duration = Duration::from_secs(120);

/// Ring to compute on.
#[derive(Debug, Clone, Copy)]
pub(super) struct CheckedRing {
    /// Number of ranks.
    pub(super) ranks: usize,
    /// Layout.
    pub(super) layout: LayoutName,
    /// Division of the attention among the ranks.
    pub(super) strategy: Strategy,
    /// Threads of each rank.
    pub(super) threads: usize,
    /// True to compute in the reproducible order, and to compare the bits with the first ring's.
    pub(super) reproducible: bool,
}

impl CheckedRing {
    /// Returns the setup of a case on this ring.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the strategy cannot divide the heads, so that a folder of cases
    /// with different heads can be checked.
    pub(super) fn setup(&self, case: &Case) -> Result<Setup> {
        let dims = case.spec.dims;
        HeadGrid::of(&dims, self.ranks, self.strategy).map_err(|error| {
            Error::unsupported(format!("strategy {}", self.strategy), error.to_string())
        })?;
        let attention = facade::attention(case).reproducible(self.reproducible);
        let division = Division::new().strategy(self.strategy);
        let batch = || Ok(case.batch.clone());
        let division = self.layout.apply(division, &attention, dims, self.ranks, batch)?;
        let runtime = Runtime::new().deadline(DEADLINE).arrival_deadline(DEADLINE);
        Ok(Setup::from((attention, division, runtime)))
    }
}

/// Result of one case on one ring, or on one rank of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Verdict {
    /// Every array is within its tolerance.
    Passed,
    /// Lines for the arrays that exceed their tolerance, or whose bits differ from those of the
    /// first ring.
    Wrong(Vec<String>),
    /// The computation failed.
    Failed {
        /// Text of the error.
        what: String,
        /// True for [`Error::Unsupported`].
        unsupported: bool,
        /// True if the error only repeats that of another rank.
        echo: bool,
    },
}

impl Verdict {
    /// Returns the verdict of the arrays that exceed their tolerance.
    pub(super) fn of(wrong: &[WrongArray]) -> Self {
        if wrong.is_empty() {
            return Self::Passed;
        }
        Self::Wrong(wrong.iter().map(|array| message::one_line(&array.to_string())).collect())
    }
}

impl From<Error> for Verdict {
    fn from(error: Error) -> Self {
        Self::Failed {
            what: failure::text(&error),
            unsupported: matches!(error, Error::Unsupported { .. }),
            echo: failure::is_echo(&error),
        }
    }
}

/// Case with its expected arrays.
pub(super) struct Loaded {
    pub(super) case: Case,
    pub(super) expected: Expected,
}

impl Loaded {
    /// Reads case `number` of the index, to be computed in `dtype`.
    pub(super) fn read(index: &Index, number: usize, dtype: DType) -> Result<Self> {
        let golden = index.golden(number)?;
        Ok(Self { case: golden.case.in_dtype(dtype), expected: golden.expected(dtype)? })
    }
}

/// Computes case `number` in `dtype` on every ring and returns a verdict for each.
pub(super) fn run(
    index: &Index,
    number: usize,
    dtype: DType,
    rings: &[CheckedRing],
    backend: &BackendChoice,
) -> Vec<Verdict> {
    let loaded = match Loaded::read(index, number, dtype) {
        Ok(loaded) => loaded,
        Err(error) => return vec![error.into(); rings.len()],
    };
    let mut first = None;
    let mut judge = |ring| loaded.judge(ring, backend, &mut first);
    rings.iter().map(|ring| judge(ring).unwrap_or_else(Verdict::from)).collect()
}

impl Loaded {
    /// Computes the case on a ring, and compares the results with the expected ones. `first` is
    /// the result of the first reproducible ring, which the bits of later ones must equal.
    fn judge(
        &self,
        ring: &CheckedRing,
        backend: &BackendChoice,
        first: &mut Option<Answer>,
    ) -> Result<Verdict> {
        let setup = ring.setup(&self.case)?;
        let dims = self.case.spec.dims;
        let mut plan = LocalRing::from_plans(setup, dims, ring.ranks, |_, setup, endpoint| {
            let endpoint = RankEndpoint::Thread(Box::new(endpoint));
            backend.plan(ring.threads, endpoint, setup, dims)
        })?;
        let mut verdict = Verdict::Passed;
        for answer in facade::compute(&self.case, &mut plan, 1, true)? {
            verdict = Verdict::of(&self.expected.wrong(&answer)?);
            if verdict == Verdict::Passed && ring.reproducible {
                let different = first.as_ref().and_then(|first| first_difference(&answer, first));
                verdict = different.map_or(Verdict::Passed, |line| Verdict::Wrong(vec![line]));
                first.get_or_insert(answer);
            }
        }
        Ok(verdict)
    }
}

/// Describes the first element whose bits differ between `answer` and `first`.
fn first_difference(answer: &Answer, first: &Answer) -> Option<String> {
    // widening is exact, and keeps the sign of zero and the bits of a NaN apart
    answer.arrays().into_iter().zip(first.arrays()).find_map(|((name, got), (_, first))| {
        got.indexed_iter().zip(&first).find_map(|((index, &got), &first)| {
            let different = got.to_bits() != first.to_bits();
            let index = || index.as_array_view().to_vec();
            different.then(|| format!("{name}{:?} is {got}, on the first ring {first}", index()))
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use annulus_core::{Dims, Spec};
    use annulus_test_cases::{Draw, Masks};

    #[test]
    fn the_first_element_with_other_bits_is_found() {
        let spec = Spec::new(Dims::new(1, 4, 2, 2), DType::F64);
        let case = Case::new("bits", spec, Masks::default(), &mut Draw::new(1));
        let first = Answer::of(case.truth().unwrap(), true);
        assert_eq!(first_difference(&first, &first), None);
        let mut negated = first.clone();
        negated.lse[[0, 1, 2]] = 0.0;
        let mut first_zero = first.clone();
        first_zero.lse[[0, 1, 2]] = -0.0;
        let want = "lse[0, 1, 2] is 0, on the first ring -0";
        assert_eq!(first_difference(&negated, &first_zero).as_deref(), Some(want));
        let mut other = first.clone();
        other.dk[[0, 3, 1, 1]] = 7.0;
        let found = first_difference(&other, &first).unwrap();
        assert!(found.starts_with("dk[0, 3, 1, 1] is 7, "), "{found}");
    }
}
