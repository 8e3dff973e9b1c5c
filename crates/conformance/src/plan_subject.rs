//! One rank of the facade, such as an MPI process: a [`Plan`] of its own rows.

use annulus::{Plan, Setup, Tensors};
use annulus_core::{Batch, DType, Dims, Element, Result, Runs, index};
use half::{bf16, f16};
use ndarray::{Array4, Axis};

use crate::{
    Answer, Case, Setting, Subject,
    ring_subject::{RankAnswer, assemble},
    subject::{answer, check_bytes, narrow, options},
};

/// This process's rank of the plan that `plan(attention, dims)` returns. Rows of other ranks are 0
/// in an answer.
pub struct PlanSubject<F> {
    name: String,
    dtypes: Vec<DType>,
    plan: F,
}

impl<F: Fn(&Setup, Dims) -> Result<Plan>> PlanSubject<F> {
    /// Creates a subject of this name for these element types.
    pub fn new(name: impl Into<String>, dtypes: &[DType], plan: F) -> Self {
        Self { name: name.into(), dtypes: dtypes.to_vec(), plan }
    }

    fn compute<T: Element>(
        &self,
        case: &Case,
        setting: &Setting,
        times: usize,
    ) -> Result<Vec<Answer>> {
        let mut plan = (self.plan)(&options(case, setting), case.spec.dims)?;
        let tensors = OwnTensors::<T>::of(case, &plan);
        if case.batch != Batch::default() {
            let rows = |runs: &Runs| runs.iter().map(i64::cast_unsigned).collect::<Vec<_>>();
            plan.update(&case.batch.select(&rows(plan.q_rows()), &rows(plan.kv_rows()))?)?;
        }
        let answers = (0..times).map(|_| tensors.compute(&mut plan));
        answers.map(|answer| Ok(assemble(case, std::iter::once(&answer?)))).collect()
    }
}

impl<F: Fn(&Setup, Dims) -> Result<Plan>> Subject for PlanSubject<F> {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn dtypes(&self) -> &[DType] {
        &self.dtypes
    }

    fn run(&self, case: &Case, setting: &Setting, times: usize) -> Result<Vec<Answer>> {
        match case.spec.dtype {
            DType::F64 => self.compute::<f64>(case, setting, times),
            DType::F32 => self.compute::<f32>(case, setting, times),
            DType::Bf16 => self.compute::<bf16>(case, setting, times),
            DType::F16 => self.compute::<f16>(case, setting, times),
        }
    }
}

/// The tensors of one rank's rows.
struct OwnTensors<T: Element> {
    q_rows: Vec<usize>,
    kv_rows: Vec<usize>,
    q: Array4<T>,
    k: Array4<T>,
    v: Array4<T>,
    dout: Array4<T>,
    bias: Option<Array4<T::Accumulator>>,
    sinks: Option<ndarray::Array2<T::Accumulator>>,
    dlse: Option<ndarray::Array3<T::Accumulator>>,
}

impl<T: Element> OwnTensors<T> {
    fn of(case: &Case, plan: &Plan) -> Self {
        let rows = |runs: &Runs| -> Vec<usize> {
            runs.iter().map(|row| index(row.cast_unsigned())).collect()
        };
        let [q_rows, kv_rows] = [rows(plan.q_rows()), rows(plan.kv_rows())];
        let of =
            |tensor: &Array4<f64>, rows: &[usize]| narrow::<T, _>(&tensor.select(Axis(1), rows));
        let bias = case.bias.as_ref().map(|bias| {
            let is_shared = bias.len_of(Axis(2)) == 1;
            narrow(&if is_shared { bias.clone() } else { bias.select(Axis(2), &q_rows) })
        });
        let dlse = case.dlse.as_ref().map(|dlse| narrow(&dlse.select(Axis(2), &q_rows)));
        Self {
            q: of(&case.q, &q_rows),
            k: of(&case.k, &kv_rows),
            v: of(&case.v, &kv_rows),
            dout: of(&case.dout, &q_rows),
            bias,
            sinks: case.sinks.as_ref().map(narrow),
            dlse,
            q_rows,
            kv_rows,
        }
    }

    fn compute(&self, plan: &mut Plan) -> Result<RankAnswer> {
        let tensors = Tensors {
            bias: self.bias.as_ref().map(|bias| bias.view()),
            softmax_aux: self.sinks.as_ref().map(|sinks| sinks.view()),
            ..Tensors::new(self.q.view(), self.k.view(), self.v.view())
        };
        let dlse = self.dlse.as_ref().map(|dlse| dlse.view());
        let forward = plan.forward(&tensors)?;
        let backward = plan.backward(&tensors, &forward, self.dout.view(), dlse)?;
        for (pass, report) in [("forward", &forward.reports), ("backward", &backward.reports)] {
            report.iter().try_for_each(|report| check_bytes(pass, report))?;
        }
        let [q_rows, kv_rows] = [self.q_rows.clone(), self.kv_rows.clone()];
        Ok(RankAnswer { q_rows, kv_rows, answer: answer(&forward, &backward) })
    }
}
