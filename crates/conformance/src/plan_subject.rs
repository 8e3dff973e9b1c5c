//! One rank of the facade, such as an MPI process: a [`Plan`] of its own rows.

use annulus::{Attention, Plan};
use annulus_core::{DType, Dims, Result};
use annulus_test_cases::facade::compute_rank;

use crate::{Answer, Case, Setting, Subject, ring_subject::assemble, subject::options};

/// This process's rank of the plan that `plan(attention, dims)` returns. Rows of other ranks are 0
/// in an answer.
pub struct PlanSubject<F> {
    name: String,
    dtypes: Vec<DType>,
    plan: F,
}

impl<F: Fn(&Attention, Dims) -> Result<Plan>> PlanSubject<F> {
    /// Creates a subject of this name for these element types.
    pub fn new(name: impl Into<String>, dtypes: &[DType], plan: F) -> Self {
        Self { name: name.into(), dtypes: dtypes.to_vec(), plan }
    }
}

impl<F: Fn(&Attention, Dims) -> Result<Plan>> Subject for PlanSubject<F> {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn dtypes(&self) -> &[DType] {
        &self.dtypes
    }

    fn run(&self, case: &Case, setting: &Setting, times: usize) -> Result<Vec<Answer>> {
        let attention = options(case, setting).layout(setting.layout.clone());
        let mut plan = (self.plan)(&attention, case.spec.dims)?;
        let answers = compute_rank(case, &mut plan, times)?;
        Ok(answers.iter().map(|answer| assemble(case, std::iter::once(answer))).collect())
    }
}
