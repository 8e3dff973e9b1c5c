//! Subjects of the suite: anything that can compute a case over a ring; the facade, whole and one
//! rank of it.

use annulus::{Division, LocalRing, Plan, Runtime, Setup};
use annulus_core::{DType, Dims, Error, LEAF_ROWS, Result};
use annulus_plan::{Layout, Route, Strategy};
use annulus_test_cases::facade::{RankAnswer, attention, compute, compute_rank};
use ndarray::{Array3, Array4, Axis, RemoveAxis};

use crate::{Answer, Case};

/// The ranks, layout and route on which a case is computed.
#[derive(Debug, Clone)]
pub struct Setting {
    /// Ranks, at least 1.
    pub ranks: usize,
    /// `None`: chosen from the mask.
    pub layout: Option<Layout>,
    /// `None`: chosen from the mask by the library.
    pub route: Option<Route>,
    /// Division of the attention among the ranks.
    pub strategy: Strategy,
    /// `None`: the default of the library.
    pub receive_ahead: Option<usize>,
    /// False to drop the rounding residual of out between the passes.
    pub out_residual: bool,
}

impl Setting {
    /// One rank.
    pub const ALONE: Self = Self {
        ranks: 1,
        layout: None,
        route: None,
        strategy: Strategy::Ring,
        receive_ahead: None,
        out_residual: true,
    };

    /// `ranks` ranks with this layout.
    pub const fn new(ranks: usize, layout: Layout) -> Self {
        Self { ranks, layout: Some(layout), ..Self::ALONE }
    }
}

impl std::fmt::Display for Setting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let layout = self.layout.as_ref().map_or("auto", Layout::name);
        let Self { ranks, route, strategy, receive_ahead, .. } = self;
        write!(f, "{ranks} ranks, {layout}, {route:?}, {strategy}, ahead {receive_ahead:?}")?;
        if self.out_residual { Ok(()) } else { write!(f, ", no residual of out") }
    }
}

/// An implementation under test.
pub trait Subject {
    /// Returns its name, for failures.
    fn name(&self) -> String;

    /// Returns the element types that it can compute.
    fn dtypes(&self) -> &[DType] {
        &[DType::F32, DType::F64, DType::Bf16, DType::F16]
    }

    /// Plans once, then computes forward and backward `times` times.
    fn run(&self, case: &Case, setting: &Setting, times: usize) -> Result<Vec<Answer>>;
}

/// The facade on whole tensors: [`Setup`] → [`LocalRing`], one CPU thread a rank.
#[derive(Debug, Clone, Copy)]
pub struct Facade;

impl Subject for Facade {
    fn name(&self) -> String {
        "annulus::LocalRing".into()
    }

    fn run(&self, case: &Case, setting: &Setting, times: usize) -> Result<Vec<Answer>> {
        let plan = |setup: &Setup, dims, ranks| {
            let runtime = Runtime::new().threads(1);
            LocalRing::new((&setup.attention, &setup.division, runtime), dims, ranks)
        };
        run_facade(case, setting, times, &plan)
    }
}

/// As [`Facade`], on the backend and transport of `plan(setup, dims, ranks)`.
pub struct FacadeOn<F> {
    name: String,
    dtypes: Vec<DType>,
    plan: F,
}

impl<F: Fn(&Setup, Dims, usize) -> Result<LocalRing>> FacadeOn<F> {
    /// Creates a subject of this name for these element types.
    pub fn new(name: impl Into<String>, dtypes: &[DType], plan: F) -> Self {
        Self { name: name.into(), dtypes: dtypes.to_vec(), plan }
    }
}

impl<F: Fn(&Setup, Dims, usize) -> Result<LocalRing>> Subject for FacadeOn<F> {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn dtypes(&self) -> &[DType] {
        &self.dtypes
    }

    fn run(&self, case: &Case, setting: &Setting, times: usize) -> Result<Vec<Answer>> {
        run_facade(case, setting, times, &self.plan)
    }
}

/// Plans a ring of this process.
type PlanRing<'a> = &'a dyn Fn(&Setup, Dims, usize) -> Result<LocalRing>;

/// The options of a case and setting, as a user sets them.
pub(crate) fn options(case: &Case, setting: &Setting) -> Setup {
    let division = Division::new()
        .layout(setting.layout.clone())
        .route(setting.route)
        .strategy(setting.strategy)
        .receive_ahead(setting.receive_ahead);
    Setup::from((attention(case), division))
}

/// Computes a case by the ring that `plan(setup, dims, ranks)` plans.
pub(crate) fn run_facade(
    case: &Case,
    setting: &Setting,
    times: usize,
    plan: PlanRing<'_>,
) -> Result<Vec<Answer>> {
    if let Some(rows) = case.spec.leaf_rows.filter(|&rows| rows != LEAF_ROWS) {
        return Err(Error::unsupported(format!("leaves of {rows} rows"), "the facade"));
    }
    let mut ring = plan(&options(case, setting), case.spec.dims, setting.ranks)?;
    compute(case, &mut ring, times, setting.out_residual)
}

/// This process's rank of the plan that `plan(setup, dims)` returns. Rows of other ranks are 0
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
}

impl<F: Fn(&Setup, Dims) -> Result<Plan>> Subject for PlanSubject<F> {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn dtypes(&self) -> &[DType] {
        &self.dtypes
    }

    fn run(&self, case: &Case, setting: &Setting, times: usize) -> Result<Vec<Answer>> {
        let mut plan = (self.plan)(&options(case, setting), case.spec.dims)?;
        let answers = compute_rank(case, &mut plan, times)?;
        Ok(answers.iter().map(|answer| assemble(case, std::iter::once(answer))).collect())
    }
}

/// Copies the rows of every rank to their row numbers in the whole sequence.
pub(crate) fn assemble<'a>(case: &Case, answers: impl Iterator<Item = &'a RankAnswer>) -> Answer {
    fn put<D: RemoveAxis>(
        whole: &mut ndarray::Array<f64, D>,
        axis: usize,
        rows: &[usize],
        part: &ndarray::Array<f64, D>,
    ) {
        for (local, &row) in rows.iter().enumerate() {
            whole.index_axis_mut(Axis(axis), row).assign(&part.index_axis(Axis(axis), local));
        }
    }
    let Dims { batch, q_len, q_heads, value_dim, .. } = case.spec.dims;
    let statistics = || Array3::zeros((batch, q_heads, q_len));
    let mut whole = Answer {
        out: Array4::zeros((batch, q_len, q_heads, value_dim)),
        lse: statistics(),
        max: statistics(),
        sum: statistics(),
        ties: (!case.spec.normalize).then(statistics),
        dq: Array4::zeros(case.q.raw_dim()),
        dk: Array4::zeros(case.k.raw_dim()),
        dv: Array4::zeros(case.v.raw_dim()),
        dbias: case.bias.as_ref().map(|bias| Array4::zeros(bias.raw_dim())),
        dsinks: None,
    };
    if let Some(lists) = case.batch.key_lists.as_ref().filter(|lists| lists.bias().is_some()) {
        let [batches, groups, queries] = lists.shape();
        whole.dbias = Some(Array4::zeros((batches, groups, queries, case.spec.dims.kv_len)));
    }
    for RankAnswer { q_rows, kv_rows, answer } in answers {
        put(&mut whole.out, 1, q_rows, &answer.out);
        put(&mut whole.lse, 2, q_rows, &answer.lse);
        put(&mut whole.max, 2, q_rows, &answer.max);
        put(&mut whole.sum, 2, q_rows, &answer.sum);
        if let (Some(whole), Some(part)) = (&mut whole.ties, &answer.ties) {
            put(whole, 2, q_rows, part);
        }
        put(&mut whole.dq, 1, q_rows, &answer.dq);
        put(&mut whole.dk, 1, kv_rows, &answer.dk);
        put(&mut whole.dv, 1, kv_rows, &answer.dv);
        if let (Some(whole), Some(part)) = (&mut whole.dbias, &answer.dbias) {
            let over_queries = case.spec.bias.is_some_and(|shape| shape[2] == 1);
            if over_queries { whole.assign(part) } else { put(whole, 2, q_rows, part) }
        }
        // already summed over ranks: the same on each
        whole.dsinks.clone_from(&answer.dsinks);
    }
    whole
}
