//! The parameters of an attention, a plan and a batch, as `annulus/_attention.py` passes them:
//! checked and complete, so that an error here is a defect of the package.

use std::{path::Path, sync::Arc, time::Duration};

use annulus::{
    Attention, Batch, CacheShape, DType, Dims, Division, Error, Layout, Route, Runtime, Setup,
    SinkShape, Strategy,
    ndarray::{Array2, Ix1, Ix2},
    planning::{CustomLayout, Machine, Run, Runs},
};
use pyo3::{prelude::*, types::PyDict};

use crate::{
    array::Array,
    errors::{invalid, raise},
    masks::{Callback, dense_mask},
    option_fields::Config,
};

/// A layout by name, or the rows of every rank: queries, then keys. Runs of rows are (first, step,
/// count).
#[derive(FromPyObject)]
pub(crate) enum LayoutConfig {
    Named(String),
    Custom(Vec<Vec<i64>>, Vec<Vec<i64>>),
    Runs(Vec<Vec<(i64, i64, u64)>>, Vec<Vec<(i64, i64, u64)>>),
}

impl Config<'_> {
    /// Returns the setup, and the functions of Python's that its masks and biases call.
    pub(crate) fn setup(&self, py: Python<'_>) -> PyResult<(Setup, Vec<Arc<Callback>>)> {
        let mut callbacks = Vec::new();
        let attention = self.attention(py, &mut callbacks)?;
        let division = self.division(py)?;
        let runtime = self.set_runtime(py, Runtime::new())?;
        Ok((Setup { attention, division, runtime }, callbacks))
    }

    fn attention(&self, py: Python<'_>, callbacks: &mut Vec<Arc<Callback>>) -> PyResult<Attention> {
        let softmax_aux = self.softmax_aux.map(|(per_head, count)| SinkShape { per_head, count });
        let mut attention = self
            .set_mathematics(py, Attention::new())?
            .dtype(self.element(py)?)
            .sliding_window(self.window_left, self.window_right)
            .bias(self.bias)
            .softmax_aux(softmax_aux)
            .dropout(self.dropout_prob, self.dropout_seed);
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
        Ok(self
            .set_division(py, Division::new())?
            .layout(self.layout(py)?)
            .route(self.route(py)?)
            .strategy(self.strategy(py)?)
            .machine(self.machine(py)?)
            .documents(self.documents.as_ref().map(|given| batch(py, given)).transpose()?))
    }

    /// Returns the element type of q, k, v, out and their gradients.
    pub(crate) fn element(&self, py: Python<'_>) -> PyResult<DType> {
        dtype(py, "dtype", &self.dtype)
    }

    fn layout(&self, py: Python<'_>) -> PyResult<Option<Layout>> {
        let custom = |q, kv| Some(Layout::Custom(Arc::new(CustomLayout { q, kv })));
        let named = match &self.layout {
            None => return Ok(None),
            Some(LayoutConfig::Named(name)) => name,
            Some(LayoutConfig::Custom(q, kv)) => {
                let of_ranks = |ranks: &[Vec<i64>]| {
                    ranks.iter().map(|rows| rows.iter().copied().collect()).collect()
                };
                return Ok(custom(of_ranks(q), of_ranks(kv)));
            }
            Some(LayoutConfig::Runs(q, kv)) => return Ok(custom(rows_of(q), rows_of(kv))),
        };
        let layouts = [
            ("contiguous", Layout::Contiguous),
            ("zigzag", Layout::Zigzag),
            ("striped", Layout::Striped),
        ];
        layouts
            .into_iter()
            .find(|(name, _)| name == named)
            .map(|(_, layout)| Some(layout))
            .ok_or_else(|| invalid(py, "layout", named, "contiguous, zigzag, striped or rows"))
    }

    fn strategy(&self, py: Python<'_>) -> PyResult<Strategy> {
        self.strategy
            .parse()
            .map_err(|_| invalid(py, "strategy", &self.strategy, Strategy::EXPECTED))
    }

    fn machine(&self, py: Python<'_>) -> PyResult<Option<Machine>> {
        let Some((is_path, machine)) = &self.machine else { return Ok(None) };
        let read = if *is_path {
            annulus_machine_file::read(Path::new(machine))
        } else {
            annulus_machine_file::parse(machine, "machine")
        };
        read.map(Some).map_err(|error| match error {
            // of a dict
            Error::Io { path, what } if path == "machine" && !is_path => {
                invalid(py, "machine", what, "the fields of a machine file")
            }
            error => raise(py, &error),
        })
    }

    fn route(&self, py: Python<'_>) -> PyResult<Option<Route>> {
        // with the ranks of the nodes of the transport
        let routes = [
            ("relay_up", Route::RelayUp),
            ("relay_down", Route::RelayDown),
            ("direct", Route::Direct),
            ("rails_up", Route::RailsUp { node_ranks: 0 }),
            ("rails_down", Route::RailsDown { node_ranks: 0 }),
            ("once_per_node", Route::OncePerNode { node_ranks: 0 }),
        ];
        self.route.as_ref().map(|name| choice(py, "route", name, &routes)).transpose()
    }
}

/// Returns the value of a name.
pub(crate) fn choice<T: Copy>(
    py: Python<'_>,
    argument: &str,
    name: &str,
    all: &[(&str, T)],
) -> PyResult<T> {
    let found = all.iter().find(|(known, _)| *known == name).map(|(_, value)| *value);
    found.ok_or_else(|| {
        let names: Vec<&str> = all.iter().map(|(name, _)| *name).collect();
        invalid(py, argument, name, format!("one of {}", names.join(", ")))
    })
}

/// Returns the rows of ranks.
fn rows_of(ranks: &[Vec<(i64, i64, u64)>]) -> Vec<Runs> {
    let of_rank = |runs: &Vec<(i64, i64, u64)>| {
        let mut rows = Runs::new();
        for &(start, step, count) in runs {
            rows.push_run(Run { start, step, count });
        }
        rows
    };
    ranks.iter().map(of_rank).collect()
}

/// Reads a time in seconds.
pub(crate) fn seconds(
    py: Python<'_>,
    argument: &str,
    given: Option<f64>,
) -> PyResult<Option<Duration>> {
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
