//! The parameters of an attention, a plan and a batch, as `annulus/_attention.py` passes them:
//! checked and complete, so that an error here is a defect of the package.

use std::{path::PathBuf, sync::Arc, time::Duration};

use annulus::{
    Alignment, Attention, BackwardMode, Batch, BiasOrder, CacheShape, CustomLayout, DType, Dims,
    Division, Error, Layout, Machine, Precision, Route, Run, Runs, Runtime, Setup, SinkShape,
    Strategy,
    ndarray::{Array2, Ix1, Ix2},
};
use pyo3::{prelude::*, types::PyDict};

use crate::{
    array::Array,
    errors::{invalid, raise},
    masks::{BiasFunction, Callback, Mask, dense_mask},
};

/// An attention and what is planned around it.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct Config<'py> {
    dtype: String,
    causal: bool,
    window_left: Option<u64>,
    window_right: Option<u64>,
    attention_sink_size: u64,
    chunk_size: Option<u64>,
    prefix_len: Option<u64>,
    mask: Option<Bound<'py, Mask>>,
    alignment: String,
    softmax_scale: Option<f64>,
    logits_soft_cap: Option<f64>,
    bias: Option<[usize; 4]>,
    bias_function: Option<Bound<'py, BiasFunction>>,
    bias_order: String,
    /// Per head, and number of sinks.
    softmax_aux: Option<(bool, usize)>,
    normalize_output: bool,
    dropout_prob: f64,
    dropout_seed: u64,
    logits_dtype: Option<String>,
    precision: String,
    reproducible: bool,
    backward_mode: String,
    forward_only: bool,
    local_gradients: bool,
    layout: Option<LayoutConfig>,
    route: Option<String>,
    /// Name, as `--strategy` of the command takes it.
    strategy: String,
    /// Path of a machine file.
    machine_path: Option<PathBuf>,
    /// Text of a machine file.
    machine_text: Option<String>,
    /// Arrays of a whole batch, for which a strategy is chosen.
    documents: Option<Bound<'py, PyDict>>,
    kv_block_size: Option<u64>,
    receive_ahead: Option<usize>,
    deadline: Option<f64>,
    arrival_deadline: Option<f64>,
}

/// A layout by name, or the rows of every rank: queries, then keys. Runs of rows are (first, step,
/// count).
#[derive(FromPyObject)]
enum LayoutConfig {
    Named(String),
    Custom(Vec<Vec<i64>>, Vec<Vec<i64>>),
    Runs(Vec<Vec<(i64, i64, u64)>>, Vec<Vec<(i64, i64, u64)>>),
}

impl Config<'_> {
    /// Returns the setup, and the functions of Python's that its masks and biases call.
    pub(crate) fn setup(&self, py: Python<'_>) -> PyResult<(Setup, Vec<Arc<Callback>>)> {
        let mut callbacks = Vec::new();
        let attention = self.attention(py, &mut callbacks)?;
        Ok((Setup::from((attention, self.division(py)?, self.runtime(py)?)), callbacks))
    }

    fn attention(&self, py: Python<'_>, callbacks: &mut Vec<Arc<Callback>>) -> PyResult<Attention> {
        let mut attention = Attention::new()
            .dtype(self.element(py)?)
            .causal(self.causal)
            .sliding_window(self.window_left, self.window_right)
            .attention_sink_size(self.attention_sink_size)
            .chunk_size(self.chunk_size)
            .prefix_len(self.prefix_len)
            .align(self.alignment(py)?)
            .softmax_scale(self.softmax_scale)
            .logits_soft_cap(self.logits_soft_cap)
            .bias(self.bias)
            .bias_order(self.bias_order(py)?)
            .softmax_aux(self.softmax_aux.map(|(per_head, count)| SinkShape { per_head, count }))
            .unnormalized(!self.normalize_output)
            .dropout(self.dropout_prob, self.dropout_seed)
            .precision(self.precision(py)?)
            .reproducible(self.reproducible)
            .backward_mode(self.backward_mode(py)?)
            .forward_only(self.forward_only)
            .local_gradients(self.local_gradients);
        if let Some(name) = &self.logits_dtype {
            attention = attention.logits_dtype(dtype(py, "logits_dtype", name)?);
        }
        if let Some(mask) = &self.mask {
            attention = attention.mask(mask.get().shared());
            callbacks.extend(mask.get().callbacks().iter().cloned());
        }
        if let Some(function) = &self.bias_function {
            attention = attention.bias_function(function.get().shared());
            callbacks.extend(function.get().callbacks().iter().cloned());
        }
        Ok(attention)
    }

    fn division(&self, py: Python<'_>) -> PyResult<Division> {
        Ok(Division::new()
            .layout(self.layout(py)?)
            .route(self.route(py)?)
            .strategy(self.strategy(py)?)
            .machine(self.machine(py)?)
            .documents(self.documents.as_ref().map(|given| batch(py, given)).transpose()?)
            .kv_block_size(self.kv_block_size)
            .receive_ahead(self.receive_ahead))
    }

    fn runtime(&self, py: Python<'_>) -> PyResult<Runtime> {
        Ok(Runtime::new()
            .deadline(seconds(py, "deadline", self.deadline)?)
            .arrival_deadline(seconds(py, "arrival_deadline", self.arrival_deadline)?))
    }

    /// Returns the element type of q, k, v, out and their gradients.
    pub(crate) fn element(&self, py: Python<'_>) -> PyResult<DType> {
        dtype(py, "dtype", &self.dtype)
    }

    fn alignment(&self, py: Python<'_>) -> PyResult<Alignment> {
        match self.alignment.as_str() {
            "top_left" => Ok(Alignment::TopLeft),
            "bottom_right" => Ok(Alignment::BottomRight),
            other => Err(invalid(py, "alignment", other, "top_left or bottom_right")),
        }
    }

    fn bias_order(&self, py: Python<'_>) -> PyResult<BiasOrder> {
        match self.bias_order.as_str() {
            "after_soft_cap" => Ok(BiasOrder::AfterSoftCap),
            "before_soft_cap" => Ok(BiasOrder::BeforeSoftCap),
            other => Err(invalid(py, "bias_order", other, "after_soft_cap or before_soft_cap")),
        }
    }

    fn precision(&self, py: Python<'_>) -> PyResult<Precision> {
        match self.precision.as_str() {
            "highest" => Ok(Precision::Highest),
            "high" => Ok(Precision::High),
            "default" => Ok(Precision::Default),
            other => Err(invalid(py, "precision", other, "highest, high or default")),
        }
    }

    fn backward_mode(&self, py: Python<'_>) -> PyResult<BackwardMode> {
        match self.backward_mode.as_str() {
            "one_pass" => Ok(BackwardMode::OnePass),
            "two_pass" => Ok(BackwardMode::TwoPass),
            other => Err(invalid(py, "backward_mode", other, "one_pass or two_pass")),
        }
    }

    fn layout(&self, py: Python<'_>) -> PyResult<Option<Layout>> {
        let named = match &self.layout {
            None => return Ok(None),
            Some(LayoutConfig::Named(name)) => name,
            Some(LayoutConfig::Custom(q, kv)) => {
                let runs = |ranks: &[Vec<i64>]| {
                    ranks.iter().map(|rows| rows.iter().copied().collect()).collect()
                };
                let custom = CustomLayout { q: runs(q), kv: runs(kv) };
                return Ok(Some(Layout::Custom(Arc::new(custom))));
            }
            Some(LayoutConfig::Runs(q, kv)) => {
                let runs = |ranks: &[Vec<(i64, i64, u64)>]| {
                    let of_rank = |runs: &Vec<(i64, i64, u64)>| {
                        let mut rows = Runs::new();
                        for &(start, step, count) in runs {
                            rows.push_run(Run { start, step, count });
                        }
                        rows
                    };
                    ranks.iter().map(of_rank).collect()
                };
                let custom = CustomLayout { q: runs(q), kv: runs(kv) };
                return Ok(Some(Layout::Custom(Arc::new(custom))));
            }
        };
        match named.as_str() {
            "contiguous" => Ok(Some(Layout::Contiguous)),
            "zigzag" => Ok(Some(Layout::Zigzag)),
            "striped" => Ok(Some(Layout::Striped)),
            other => Err(invalid(py, "layout", other, "contiguous, zigzag, striped or rows")),
        }
    }

    fn strategy(&self, py: Python<'_>) -> PyResult<Strategy> {
        self.strategy
            .parse()
            .map_err(|_| invalid(py, "strategy", &self.strategy, Strategy::EXPECTED))
    }

    fn machine(&self, py: Python<'_>) -> PyResult<Option<Machine>> {
        let read = match (&self.machine_path, &self.machine_text) {
            (Some(path), _) => annulus_machine_file::read(path),
            (None, Some(text)) => annulus_machine_file::parse(text, "machine"),
            (None, None) => return Ok(None),
        };
        read.map(Some).map_err(|error| match error {
            // of a dict
            Error::Io { path, what } if path == "machine" && self.machine_path.is_none() => {
                invalid(py, "machine", what, "the fields of a machine file")
            }
            error => raise(py, &error),
        })
    }

    fn route(&self, py: Python<'_>) -> PyResult<Option<Route>> {
        match self.route.as_deref() {
            None => Ok(None),
            Some("relay_up") => Ok(Some(Route::RelayUp)),
            Some("relay_down") => Ok(Some(Route::RelayDown)),
            Some("direct") => Ok(Some(Route::Direct)),
            // with the ranks of the nodes of the transport
            Some("rails_up") => Ok(Some(Route::RailsUp { node_ranks: 0 })),
            Some("rails_down") => Ok(Some(Route::RailsDown { node_ranks: 0 })),
            Some("once_per_node") => Ok(Some(Route::OncePerNode { node_ranks: 0 })),
            Some(other) => {
                let want = "relay_up, relay_down, direct, rails_up, rails_down or once_per_node";
                Err(invalid(py, "route", other, want))
            }
        }
    }
}

/// Reads a time in seconds.
fn seconds(py: Python<'_>, argument: &str, given: Option<f64>) -> PyResult<Option<Duration>> {
    let time = given.map(Duration::try_from_secs_f64).transpose();
    time.map_err(|_| {
        invalid(py, argument, given.unwrap_or_default(), "a number of seconds, at least 1")
    })
}

/// Lengths of the whole tensors.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct Lengths {
    batch: usize,
    q_len: usize,
    kv_len: usize,
    q_heads: usize,
    kv_heads: usize,
    head_dim: usize,
    value_dim: usize,
}

impl From<Lengths> for CacheShape {
    /// The numbers of rows have no meaning.
    fn from(lengths: Lengths) -> Self {
        let Lengths { batch, q_heads, kv_heads, head_dim, value_dim, .. } = lengths;
        Self::new(batch, q_heads, head_dim).kv_heads(kv_heads).value_dim(value_dim)
    }
}

impl From<Lengths> for Dims {
    fn from(lengths: Lengths) -> Self {
        let Lengths { batch, q_len, kv_len, q_heads, kv_heads, head_dim, value_dim } = lengths;
        Self { batch, q_len, kv_len, q_heads, kv_heads, head_dim, value_dim }
    }
}

/// Returns the element type of a NumPy name.
fn dtype(py: Python<'_>, argument: &str, name: &str) -> PyResult<DType> {
    match name {
        "float64" => Ok(DType::F64),
        "float32" => Ok(DType::F32),
        "bfloat16" => Ok(DType::Bf16),
        "float16" => Ok(DType::F16),
        other => Err(invalid(py, argument, other, "float64, float32, bfloat16 or float16")),
    }
}

/// Copies what a batch brings: ids as int32, positions and lengths as int64, the mask as bytes.
pub(crate) fn batch(py: Python<'_>, given: &Bound<'_, PyDict>) -> PyResult<Batch> {
    let mask = array(given, "attention_mask")?;
    Ok(Batch {
        q_segment_ids: ids(given, "q_segment_ids")?,
        kv_segment_ids: ids(given, "kv_segment_ids")?,
        q_positions: positions(given, "q_positions")?,
        kv_positions: positions(given, "kv_positions")?,
        attention_mask: mask.map(|mask| dense_mask(py, "attention_mask", mask)).transpose()?,
        cum_seqlens_q: lengths(given, "cum_seqlens_q")?,
        cum_seqlens_k: lengths(given, "cum_seqlens_k")?,
    })
}

fn array<'py>(
    given: &Bound<'py, PyDict>,
    name: &'static str,
) -> PyResult<Option<Bound<'py, PyAny>>> {
    Ok(given.get_item(name)?.filter(|array| !array.is_none()))
}

fn ids(given: &Bound<'_, PyDict>, name: &'static str) -> PyResult<Option<Array2<i32>>> {
    let Some(object) = array(given, name)? else { return Ok(None) };
    let array = Array::new(name, object)?;
    Ok(Some(array.view::<i32, Ix2>()?.to_owned()))
}

fn positions(given: &Bound<'_, PyDict>, name: &'static str) -> PyResult<Option<Array2<i64>>> {
    let Some(object) = array(given, name)? else { return Ok(None) };
    let array = Array::new(name, object)?;
    Ok(Some(array.view::<i64, Ix2>()?.to_owned()))
}

fn lengths(given: &Bound<'_, PyDict>, name: &'static str) -> PyResult<Option<Vec<i64>>> {
    let Some(object) = array(given, name)? else { return Ok(None) };
    let array = Array::new(name, object)?;
    Ok(Some(array.view::<i64, Ix1>()?.to_vec()))
}
