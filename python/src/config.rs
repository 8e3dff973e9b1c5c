//! The parameters of an attention, a plan and a batch, as `_attention.py` passes them:
//! checked and complete, so that an error here is a defect of the package; and backends by name.

use std::{
    path::Path,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use annulus::{
    Attention, Batch, CacheShape, DType, Dims, Division, Error, Layout, Result, Route, Runtime,
    Setup, SinkShape, Strategy,
    backend::{AnyBackend, BackendName},
    bias::BiasTable,
    mask::KeyLists,
    ndarray::{Array2, Ix1, Ix2, Ix3},
    planning::{CustomLayout, Machine, Run, Runs},
};
use annulus_core::HomeProcess;
use bytemuck::Pod;
use pyo3::{prelude::*, types::PyDict};

use crate::{
    Raises,
    array::{array, dtype_of},
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
    pub(crate) fn setup(&self) -> Raises<(Setup, Vec<Arc<Callback>>)> {
        let mut callbacks = Vec::new();
        let attention = self.attention(&mut callbacks)?;
        let division = self.division()?;
        let runtime = self.set_runtime(Runtime::new())?;
        Ok((Setup { attention, division, runtime }, callbacks))
    }

    fn attention(&self, callbacks: &mut Vec<Arc<Callback>>) -> Result<Attention> {
        let softmax_aux = self.softmax_aux.map(|(per_head, count)| SinkShape { per_head, count });
        let mut attention = self
            .set_mathematics(Attention::new())?
            .dtype(self.element()?)
            .sliding_window(self.window_left, self.window_right)
            .bias(self.bias)
            .softmax_aux(softmax_aux)
            .dropout(self.dropout_prob, self.dropout_seed);
        if let Some(name) = &self.logits_dtype {
            attention = attention.logits_dtype(dtype_of("logits_dtype", name)?);
        }
        if let Some(mask) = &self.mask {
            attention = attention.mask(Arc::clone(&mask.get().mask));
            callbacks.extend(mask.get().callbacks.iter().cloned());
        }
        if let Some(table) = &self.bias_table {
            attention = attention.bias_table(table.parse::<BiasTable>()?);
        }
        if let Some(function) = &self.bias_function {
            attention = attention.bias_function(Arc::clone(&function.get().function));
            callbacks.extend(function.get().callbacks.iter().cloned());
        }
        Ok(attention)
    }

    fn division(&self) -> Raises<Division> {
        Ok(self
            .set_division(Division::new())?
            .layout(self.layout()?)
            .route(self.route()?)
            .strategy(self.strategy()?)
            .machine(self.machine()?)
            .documents(self.documents.as_ref().map(batch).transpose()?))
    }

    /// Returns the element type of q, k, v, out and their gradients.
    pub(crate) fn element(&self) -> Result<DType> {
        dtype_of("dtype", &self.dtype)
    }

    fn layout(&self) -> Result<Option<Layout>> {
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
        choice("layout", named, &layouts).map(Some)
    }

    fn strategy(&self) -> Result<Strategy> {
        let parsed = self.strategy.parse();
        parsed.map_err(|_| Error::invalid("strategy", &self.strategy, Strategy::EXPECTED))
    }

    fn machine(&self) -> Result<Option<Machine>> {
        let Some((is_path, machine)) = &self.machine else { return Ok(None) };
        let read = if *is_path {
            annulus_machine_file::read(Path::new(machine))
        } else {
            annulus_machine_file::parse(machine, "machine")
        };
        read.map(Some).map_err(|error| match error {
            // of a dict
            Error::Io { path, what } if path == "machine" && !is_path => {
                Error::invalid("machine", what, "the fields of a machine file")
            }
            error => error,
        })
    }

    fn route(&self) -> Result<Option<Route>> {
        // with the ranks of the nodes of the transport
        let routes = [
            ("relay_up", Route::RelayUp),
            ("relay_down", Route::RelayDown),
            ("direct", Route::Direct),
            ("rails_up", Route::RailsUp { node_ranks: 0 }),
            ("rails_down", Route::RailsDown { node_ranks: 0 }),
            ("once_per_node", Route::OncePerNode { node_ranks: 0 }),
        ];
        self.route.as_ref().map(|name| choice("route", name, &routes)).transpose()
    }
}

/// Returns the value of a name.
pub(crate) fn choice<T: Clone>(argument: &str, name: &str, all: &[(&str, T)]) -> Result<T> {
    let found = all.iter().find(|(known, _)| *known == name).map(|(_, value)| value.clone());
    found.ok_or_else(|| {
        let names: Vec<&str> = all.iter().map(|(name, _)| *name).collect();
        Error::invalid(argument, name, format!("one of {}", names.join(", ")))
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
pub(crate) fn seconds(argument: &str, given: Option<f64>) -> Result<Option<Duration>> {
    let time = given.map(Duration::try_from_secs_f64).transpose();
    let want = "a number of seconds, at least 1";
    time.map_err(|_| Error::invalid(argument, given.unwrap_or_default(), want))
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

/// Copies what a batch brings: ids as int32, positions and lengths as int64, the mask as bytes.
pub(crate) fn batch(given: &Bound<'_, PyDict>) -> Raises<Batch> {
    Ok(Batch {
        q_segment_ids: rows(given, "q_segment_ids", "i4")?,
        kv_segment_ids: rows(given, "kv_segment_ids", "i4")?,
        q_positions: rows(given, "q_positions", "i8")?,
        kv_positions: rows(given, "kv_positions", "i8")?,
        attention_mask: array(given, "attention_mask")?
            .map(|mask| dense_mask(&mask))
            .transpose()?,
        key_lists: key_lists(given)?.map(Arc::new),
        cum_seqlens_q: lengths(given, "cum_seqlens_q")?,
        cum_seqlens_k: lengths(given, "cum_seqlens_k")?,
    })
}

/// Copies key lists: offsets `[batch or 1, groups, queries + 1]`, and indices, or ranges from indices
/// to ends.
fn key_lists(given: &Bound<'_, PyDict>) -> Raises<Option<KeyLists>> {
    let (Some(offsets), Some(indices)) =
        (array(given, "key_list_offsets")?, array(given, "key_list_indices")?)
    else {
        return Ok(None);
    };
    let offsets = offsets.view_of::<i64, Ix3>("i8")?;
    let (batches, groups, _) = offsets.dim();
    let offsets = offsets.as_standard_layout();
    let planes = offsets.rows().into_iter().filter_map(|plane| plane.to_slice());
    let offsets = KeyLists::joined_offsets(planes)?;
    let keys = indices.view_of::<i64, Ix1>("i8")?.to_vec();
    let ends = lengths(given, "key_list_ends")?;
    let lists = KeyLists::from_arrays([batches, groups], &offsets, &keys, ends.as_deref())?;
    match array(given, "key_list_bias")? {
        Some(bias) => Ok(Some(lists.with_bias(bias.view::<f64, Ix1>()?.to_vec())?)),
        None => Ok(Some(lists)),
    }
}

/// Copies one number per batch row and row.
fn rows<T: Pod>(
    given: &Bound<'_, PyDict>,
    name: &'static str,
    typestr: &str,
) -> Raises<Option<Array2<T>>> {
    let Some(array) = array(given, name)? else { return Ok(None) };
    Ok(Some(array.view_of::<T, Ix2>(typestr)?.to_owned()))
}

fn lengths(given: &Bound<'_, PyDict>, name: &'static str) -> Raises<Option<Vec<i64>>> {
    let Some(array) = array(given, name)? else { return Ok(None) };
    Ok(Some(array.view_of::<i64, Ix1>("i8")?.to_vec()))
}

/// Name of a backend, and the number of a GPU.
pub(crate) type PyBackend = (String, Option<usize>);

/// Opened GPUs. They stay open until the process ends, so that plans share their compiled kernels.
static GPUS: Mutex<Vec<(BackendName, Option<usize>, AnyBackend)>> = Mutex::new(Vec::new());

/// Process that uses [`GPUS`]: its forked children can use no GPU, and may find the lock taken.
static HOME: HomeProcess = HomeProcess::unused();

/// Opens a backend. The threads of a CPU rank are `threads`, by default `cores()`.
pub(crate) fn open_backend(
    (name, device): &PyBackend,
    threads: Option<usize>,
    cores: impl FnOnce() -> usize,
) -> Result<AnyBackend> {
    let name: BackendName = name.parse()?;
    if name == BackendName::Cpu {
        return AnyBackend::open(name, *device, threads.unwrap_or_else(cores));
    }
    HOME.check("a GPU")?;
    HOME.note();
    let mut gpus = GPUS.lock().unwrap_or_else(PoisonError::into_inner);
    let opened = gpus.iter().find(|(of, number, _)| (of, number) == (&name, device));
    if let (Some((.., gpu)), None) = (opened, threads) {
        return Ok(gpu.clone());
    }
    let gpu = AnyBackend::open(name, *device, threads.unwrap_or(0))?;
    gpus.push((name, *device, gpu.clone()));
    Ok(gpu)
}
