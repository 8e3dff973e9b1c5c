//! Subjects of the suite: anything that can compute a case over a ring.

use std::sync::Arc;

use annulus::{Attention, Backward, Division, Forward, LocalRing, Runtime, Setup, Tensors};
use annulus_core::{
    Batch, DType, Dims, Element, Error, LEAF_ROWS, Layout, Result, Route, Strategy,
};
use half::{bf16, f16};
use ndarray::{Array, Dimension};

use crate::{Answer, Case, Masks};

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
    ///
    /// # Errors
    /// The errors of the implementation.
    fn run(&self, case: &Case, setting: &Setting, times: usize) -> Result<Vec<Answer>>;
}

/// The facade on whole tensors: [`Attention`] → [`LocalRing`], one CPU thread a rank.
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

fn run_facade(
    case: &Case,
    setting: &Setting,
    times: usize,
    plan: PlanRing<'_>,
) -> Result<Vec<Answer>> {
    match case.spec.dtype {
        DType::F64 => run_plan::<f64>(case, setting, times, plan),
        DType::F32 => run_plan::<f32>(case, setting, times, plan),
        DType::Bf16 => run_plan::<bf16>(case, setting, times, plan),
        DType::F16 => run_plan::<f16>(case, setting, times, plan),
    }
}

/// Returns an error unless the bytes sent are those that the schedule predicts.
pub(crate) fn check_bytes(pass: &str, report: &annulus::Report) -> Result<()> {
    if report.bytes_sent == report.bytes_predicted {
        return Ok(());
    }
    Err(Error::Device {
        what: format!(
            "{pass} sent {} bytes, the schedule predicts {}",
            report.bytes_sent, report.bytes_predicted
        ),
    })
}

/// The options of a case, as a user sets them.
pub(crate) fn attention(case: &Case) -> Attention {
    let spec = &case.spec;
    let attention = Attention::new()
        .dtype(spec.dtype)
        .align(spec.alignment)
        .softmax_scale(spec.scale)
        .logits_soft_cap(spec.soft_cap)
        .bias(spec.bias)
        .bias_order(spec.bias_order)
        .softmax_aux(spec.sinks)
        .logits_dtype(spec.logits_dtype)
        .precision(spec.precision)
        .backward_mode(spec.backward)
        .unnormalized(!spec.normalize);
    let attention = match &spec.bias_function {
        Some(function) => attention.bias_function(Arc::clone(function)),
        None => attention,
    };
    let attention = match spec.dropout {
        Some(dropout) => attention.dropout(dropout.probability, dropout.seed),
        None => attention,
    };
    masked(attention, &case.masks)
}

/// Sets the masks of a case as options.
fn masked(attention: Attention, masks: &Masks) -> Attention {
    let [left, right] = masks.window.unwrap_or_default();
    // an attention sink size without a window is refused
    let windowed = left.is_some() || right.is_some();
    let attention = attention
        .causal(masks.causal)
        .sliding_window(left, right)
        .attention_sink_size(if windowed { masks.first_visible } else { 0 })
        .chunk_size(masks.chunk)
        .prefix_len(masks.prefix);
    masks.objects.iter().fold(attention, |attention, mask| attention.mask(Arc::clone(mask)))
}

/// The options of a case and setting, as a user sets them.
pub(crate) fn options(case: &Case, setting: &Setting) -> Setup {
    let attention = attention(case).reproducible(case.spec.leaf_rows.is_some());
    let division = Division::new()
        .layout(setting.layout.clone())
        .route(setting.route)
        .strategy(setting.strategy)
        .receive_ahead(setting.receive_ahead);
    Setup::from((attention, division))
}

fn run_plan<T: Element>(
    case: &Case,
    setting: &Setting,
    times: usize,
    plan: PlanRing<'_>,
) -> Result<Vec<Answer>> {
    if let Some(rows) = case.spec.leaf_rows.filter(|&rows| rows != LEAF_ROWS) {
        return Err(Error::unsupported(format!("leaves of {rows} rows"), "the facade"));
    }
    let mut plan = plan(&options(case, setting), case.spec.dims, setting.ranks)?;
    if case.batch != Batch::default() {
        plan.update(&case.batch)?;
    }
    let (q, k, v, dout) = (
        narrow::<T, _>(&case.q),
        narrow::<T, _>(&case.k),
        narrow::<T, _>(&case.v),
        narrow::<T, _>(&case.dout),
    );
    let bias = case.bias.as_ref().map(narrow::<T::Accumulator, _>);
    let sinks = case.sinks.as_ref().map(narrow::<T::Accumulator, _>);
    let dlse = case.dlse.as_ref().map(narrow::<T::Accumulator, _>);
    let tensors = Tensors {
        bias: bias.as_ref().map(|bias| bias.view()),
        softmax_aux: sinks.as_ref().map(|sinks| sinks.view()),
        ..Tensors::new(q.view(), k.view(), v.view())
    };
    let once = |plan: &mut LocalRing| {
        let mut forward = plan.forward(&tensors)?;
        forward.out_residual.take_if(|_| !setting.out_residual);
        let backward =
            plan.backward(&tensors, &forward, dout.view(), dlse.as_ref().map(|dlse| dlse.view()))?;
        for (pass, reports) in [("forward", &forward.reports), ("backward", &backward.reports)] {
            reports.iter().try_for_each(|report| check_bytes(pass, report))?;
        }
        Ok(answer(&forward, &backward))
    };
    (0..times).map(|_| once(&mut plan)).collect()
}

/// Widens the results of the facade to f64.
pub fn answer<T: Element>(forward: &Forward<T>, backward: &Backward<T>) -> Answer {
    Answer {
        out: widen(&forward.out),
        lse: widen(&forward.lse),
        max: forward.max.as_ref().map(widen).unwrap_or_default(),
        sum: forward.sum.as_ref().map(widen).unwrap_or_default(),
        ties: forward.ties.as_ref().map(widen),
        dq: widen(&backward.dq),
        dk: widen(&backward.dk),
        dv: widen(&backward.dv),
        dbias: backward.dbias.as_ref().map(widen),
        dsinks: backward.dsoftmax_aux.as_ref().map(widen),
    }
}

/// Rounds to an element type.
pub fn narrow<T: Element, D: Dimension>(array: &Array<f64, D>) -> Array<T, D> {
    array.mapv(T::from_f64)
}

/// Widens to f64.
pub fn widen<T: Element, D: Dimension>(array: &Array<T, D>) -> Array<f64, D> {
    array.mapv(T::to_f64)
}
