//! Cases of the format `annulus-cases-1`: inputs, parameters, and expected arrays that other
//! implementations computed.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
};

use annulus_core::{
    Alignment, Batch, BiasOrder, DType, DenseMask, Dims, Dropout, Error, Result, SinkShape, Spec,
};
use ndarray::{Array, Array2, Array4, ArrayD, Dimension, IxDyn};
use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use serde::Deserialize;

use crate::{Answer, Case, Masks};

/// A case and its expected arrays.
#[derive(Debug)]
pub struct Golden {
    /// Inputs and parameters.
    pub case: Case,
    /// `out lse dq dk dv` and, if there are such inputs, `dbias dsoftmax_aux`.
    pub expected: HashMap<String, ArrayD<f64>>,
    /// Largest |got − want| of each when computed in f32.
    pub tolerance_f32: HashMap<String, f64>,
    /// Largest |got − want| of each when computed in f64.
    pub tolerance_f64: HashMap<String, f64>,
}

/// Returns the folder of the cases: `ANNULUS_GOLDEN`, or the folder `shared/golden` beside the
/// workspace or one of its parents; `None` with `ANNULUS_GOLDEN=skip`.
///
/// # Errors
/// [`Error::Io`] if there is no such folder.
pub fn folder() -> Result<Option<PathBuf>> {
    match std::env::var("ANNULUS_GOLDEN") {
        Ok(skip) if skip == "skip" => return Ok(None),
        // relative to the workspace
        Ok(folder) => {
            return Ok(Some(Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(folder)));
        }
        Err(_) => {}
    }
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let found = here
        .ancestors()
        .map(|parent| parent.join("shared/golden"))
        .find(|folder| folder.join("index.json").is_file());
    let missing = || {
        io(here, "no shared/golden here or above; set ANNULUS_GOLDEN to its folder, or to `skip`")
    };
    found.map(Some).ok_or_else(missing)
}

/// Reads every case of a folder.
///
/// # Errors
/// [`Error::Io`] if a file is missing or not of the format.
pub fn read(folder: &Path) -> Result<Vec<Golden>> {
    let path = folder.join("index.json");
    let text = std::fs::read(&path).map_err(|error| io(&path, error))?;
    let index: Index = serde_json::from_slice(&text).map_err(|error| io(&path, error))?;
    if index.format != "annulus-cases-1" {
        return Err(io(&path, format!("format {}, want annulus-cases-1", index.format)));
    }
    index.cases.into_iter().map(|entry| entry.read(folder)).collect()
}

/// Compares an answer with the expected arrays.
///
/// # Errors
/// The first array whose error is above its tolerance, as text.
pub fn check(
    answer: &Answer,
    expected: &HashMap<String, ArrayD<f64>>,
    tolerance: &HashMap<String, f64>,
) -> Result<(), String> {
    let arrays: HashMap<&str, _> = answer.arrays().into_iter().collect();
    for (name, want) in expected {
        let name = if name == "dsoftmax_aux" { "dsinks" } else { name };
        let got = arrays.get(name).ok_or_else(|| format!("no {name}"))?;
        if got.len() != want.len() {
            return Err(format!("{name} has the shape {:?}, want {:?}", got.shape(), want.shape()));
        }
        let apart = |(got, want): (&f64, &f64)| if got == want { 0.0 } else { (got - want).abs() };
        let most =
            got.iter().zip(want).map(apart).fold(0.0, |most, apart| {
                if apart.is_nan() { f64::INFINITY } else { most.max(apart) }
            });
        let bound = tolerance
            .get(if name == "dsinks" { "dsoftmax_aux" } else { name })
            .copied()
            .unwrap_or(0.0);
        if most > bound {
            return Err(format!("{name} has the error {most:e}, at most {bound:e}"));
        }
    }
    Ok(())
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Index {
    format: String,
    cases: Vec<Entry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    id: String,
    file: String,
    dims: Lengths,
    params: Params,
    tolerance: HashMap<String, HashMap<String, f64>>,
}

#[derive(Deserialize, Clone, Copy)]
#[serde(deny_unknown_fields)]
struct Lengths {
    batch: usize,
    q_len: usize,
    kv_len: usize,
    q_heads: usize,
    kv_heads: usize,
    head_dim: usize,
    value_dim: usize,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Params {
    causal: bool,
    sliding_window: Option<[Option<u64>; 2]>,
    attention_sink_size: u64,
    chunk_size: Option<u64>,
    logits_soft_cap: Option<f64>,
    softmax_scale: Option<f64>,
    normalize_output: bool,
    softmax_aux: Option<String>,
    bias_order: String,
    alignment: String,
    dropout_prob: f64,
    dropout_seed: Option<u64>,
}

impl Entry {
    fn read(self, folder: &Path) -> Result<Golden> {
        let path = folder.join(&self.file);
        let bytes = std::fs::read(&path).map_err(|error| io(&path, error))?;
        let tensors = SafeTensors::deserialize(&bytes).map_err(|error| io(&path, error))?;
        let file = File { path: &path, tensors };
        let tolerance = |dtype: &str| {
            self.tolerance
                .get(dtype)
                .cloned()
                .ok_or_else(|| io(&path, format!("no tolerance for {dtype}")))
        };
        let tolerance_f32 = tolerance("f32")?;
        let tolerance_f64 = tolerance("f64")?;
        let expected = tolerance_f64
            .keys()
            .map(|name| Ok((name.clone(), file.need(name, number)?)))
            .collect::<Result<_>>()?;
        Ok(Golden { case: self.case(&file)?, expected, tolerance_f32, tolerance_f64 })
    }

    fn case(&self, file: &File<'_>) -> Result<Case> {
        let sinks: Option<ArrayD<f64>> = file.get("softmax_aux", number)?;
        let sinks = match (sinks, self.params.softmax_aux.as_deref()) {
            (Some(sinks), Some("shared")) => {
                Some(file.shaped::<_, ndarray::Ix1>(sinks)?.insert_axis(ndarray::Axis(0)))
            }
            (Some(sinks), Some("per_head")) => Some(file.shaped(sinks)?),
            (None, None) => None,
            (sinks, kind) => {
                return Err(io(file.path, format!("softmax_aux {kind:?} with sinks {sinks:?}")));
            }
        };
        let bias: Option<Array4<f64>> =
            file.get("bias", number)?.map(|bias| file.shaped(bias)).transpose()?;
        let mut case = Case {
            name: self.id.clone(),
            spec: self.spec(file, bias.as_ref(), sinks.as_ref())?,
            masks: Masks::default(),
            batch: Batch::default(),
            q: file.shaped(file.need("query", number)?)?,
            k: file.shaped(file.need("key", number)?)?,
            v: file.shaped(file.need("value", number)?)?,
            bias,
            sinks,
            dout: file.shaped(file.need("dout", number)?)?,
            dlse: file.get("dlse", number)?.map(|dlse| file.shaped(dlse)).transpose()?,
        };
        let pairs = |name: &str| {
            file.get(name, integer)?.map(|ids| file.shaped::<_, ndarray::Ix2>(ids)).transpose()
        };
        let ids = |name: &str| -> Result<Option<Array2<i32>>> {
            let narrow = |id: i64| i32::try_from(id).map_err(|error| io(file.path, error));
            let Some(ids) = pairs(name)? else { return Ok(None) };
            let narrowed = ids.iter().map(|&id| narrow(id)).collect::<Result<Vec<_>>>()?;
            Array2::from_shape_vec(ids.dim(), narrowed)
                .map(Some)
                .map_err(|error| io(file.path, error))
        };
        let lens = |name: &str| -> Result<Option<Vec<i64>>> {
            Ok(file.get(name, integer)?.map(|lens| lens.into_iter().collect()))
        };
        let mask: Option<Array4<i64>> =
            file.get("attention_mask", integer)?.map(|mask| file.shaped(mask)).transpose()?;
        case.batch = Batch {
            q_segment_ids: ids("q_segment_ids")?,
            kv_segment_ids: ids("kv_segment_ids")?,
            q_positions: pairs("q_positions")?,
            kv_positions: pairs("kv_positions")?,
            attention_mask: mask.map(|mask| DenseMask::from_integers(mask.view())),
            cum_seqlens_q: lens("cum_seqlens_q")?,
            cum_seqlens_k: lens("cum_seqlens_k")?,
        };
        let Params {
            causal,
            sliding_window: window,
            attention_sink_size: first_visible,
            chunk_size: chunk,
            ..
        } = self.params;
        Ok(case.masked(Masks { causal, window, first_visible, chunk, ..Masks::default() }))
    }

    fn spec(
        &self,
        file: &File<'_>,
        bias: Option<&Array4<f64>>,
        sinks: Option<&Array2<f64>>,
    ) -> Result<Spec> {
        let Lengths { batch, q_len, kv_len, q_heads, kv_heads, head_dim, value_dim } = self.dims;
        let params = &self.params;
        let plain = Spec::new(
            Dims { batch, q_len, kv_len, q_heads, kv_heads, head_dim, value_dim },
            DType::F64,
        );
        let alignment = match params.alignment.as_str() {
            "top_left" => Alignment::TopLeft,
            "bottom_right" => Alignment::BottomRight,
            other => return Err(io(file.path, format!("alignment {other}"))),
        };
        let bias_order = match params.bias_order.as_str() {
            "before_soft_cap" => BiasOrder::BeforeSoftCap,
            "after_soft_cap" => BiasOrder::AfterSoftCap,
            other => return Err(io(file.path, format!("bias_order {other}"))),
        };
        let per_head = params.softmax_aux.as_deref() == Some("per_head");
        let dropout =
            Dropout { probability: params.dropout_prob, seed: params.dropout_seed.unwrap_or(0) };
        Ok(Spec {
            alignment,
            scale: params.softmax_scale.unwrap_or(plain.scale),
            soft_cap: params.logits_soft_cap,
            bias: bias.map(|bias| bias.dim().into()),
            bias_order,
            sinks: sinks.map(|sinks| SinkShape { per_head, count: sinks.ncols() }),
            normalize: params.normalize_output,
            dropout: (params.dropout_prob > 0.0).then_some(dropout),
            ..plain
        })
    }
}

struct File<'a> {
    path: &'a Path,
    tensors: SafeTensors<'a>,
}

impl File<'_> {
    fn get<T>(
        &self,
        name: &str,
        element: fn(Dtype, &[u8]) -> Option<T>,
    ) -> Result<Option<ArrayD<T>>> {
        let Ok(tensor) = self.tensors.tensor(name) else { return Ok(None) };
        let wrong = || io(self.path, format!("{name} has elements of type {:?}", tensor.dtype()));
        let elements = elements(&tensor, element).ok_or_else(wrong)?;
        ArrayD::from_shape_vec(IxDyn(tensor.shape()), elements)
            .map(Some)
            .map_err(|error| io(self.path, error))
    }

    fn need<T>(&self, name: &str, element: fn(Dtype, &[u8]) -> Option<T>) -> Result<ArrayD<T>> {
        self.get(name, element)?.ok_or_else(|| io(self.path, format!("no tensor {name}")))
    }

    fn shaped<T, D: Dimension>(&self, tensor: ArrayD<T>) -> Result<Array<T, D>> {
        tensor.into_dimensionality().map_err(|error| io(self.path, error))
    }
}

fn elements<T>(tensor: &TensorView<'_>, element: fn(Dtype, &[u8]) -> Option<T>) -> Option<Vec<T>> {
    let bytes = tensor.dtype().bitsize() / 8;
    tensor.data().chunks_exact(bytes).map(|chunk| element(tensor.dtype(), chunk)).collect()
}

fn number(dtype: Dtype, bytes: &[u8]) -> Option<f64> {
    match dtype {
        Dtype::F32 => Some(f64::from(f32::from_le_bytes(bytes.try_into().ok()?))),
        Dtype::F64 => Some(f64::from_le_bytes(bytes.try_into().ok()?)),
        _ => None,
    }
}

fn integer(dtype: Dtype, bytes: &[u8]) -> Option<i64> {
    match dtype {
        Dtype::BOOL | Dtype::U8 => bytes.first().map(|&byte| i64::from(byte)),
        Dtype::I32 => Some(i64::from(i32::from_le_bytes(bytes.try_into().ok()?))),
        Dtype::I64 => Some(i64::from_le_bytes(bytes.try_into().ok()?)),
        _ => None,
    }
}

fn io(path: &Path, what: impl ToString) -> Error {
    Error::Io { path: path.display().to_string(), what: what.to_string() }
}
