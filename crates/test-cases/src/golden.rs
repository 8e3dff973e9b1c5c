//! Cases of the format `annulus-cases-1`: inputs, parameters, and expected arrays that other
//! implementations computed. Tests and `annulus check` read them here.
//!
//! `index.json` has the parameters and tolerances, and a safetensors file for each case has its
//! inputs in f32 and its expected arrays.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use annulus_core::{
    Alignment, Batch, BiasOrder, DType, DenseMask, Dims, Dropout, Error, Result, SinkShape, Spec,
};
use ndarray::{Array, Array2, Array4, ArrayD, Axis, Dimension, Ix1, Ix2, IxDyn};
use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use serde::Deserialize;

use crate::{Case, Expected, Judge, Masks};

/// Name of the format.
const FORMAT: &str = "annulus-cases-1";

/// Returns the folder of the cases: `ANNULUS_GOLDEN`, or the folder `shared/golden` beside the
/// workspace or one of its parents; `None` with `ANNULUS_GOLDEN=skip`.
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

/// The index of a folder. Cases are parsed one by one, so that a malformed one fails alone.
#[derive(Debug)]
pub struct Index {
    folder: PathBuf,
    cases: Vec<serde_json::Value>,
}

impl Index {
    /// Reads the index of a folder.
    pub fn read(folder: &Path) -> Result<Self> {
        #[derive(Deserialize)]
        struct Whole {
            format: String,
            cases: Vec<serde_json::Value>,
        }
        let path = Self::path(folder);
        let text = read_file(&path)?;
        let wrong = |what: String| io(&path, format!("is not an index of cases: {what}"));
        let mut json = serde_json::Deserializer::from_slice(&text);
        let whole: std::result::Result<Whole, _> = serde_path_to_error::deserialize(&mut json);
        let Whole { format, cases } = whole.map_err(|error| wrong(of_json(&error)))?;
        json.end().map_err(|error| wrong(error.to_string()))?;
        if format != FORMAT {
            return Err(io(&path, format!("format: got {format}, want {FORMAT}")));
        }
        Ok(Self { folder: folder.to_owned(), cases })
    }

    /// Path of a folder's index.
    pub fn path(folder: &Path) -> PathBuf {
        folder.join("index.json")
    }

    /// Returns the id of every case; `None` if a malformed one has none.
    pub fn ids(&self) -> impl Iterator<Item = Option<&str>> {
        self.cases.iter().map(|case| case.get("id")?.as_str())
    }

    /// Reads case `number` of the index with its file.
    pub fn golden(&self, number: usize) -> Result<Golden> {
        let value = self.cases.get(number).unwrap_or(&serde_json::Value::Null);
        let entry: std::result::Result<Entry, _> = serde_path_to_error::deserialize(value);
        let entry = entry.map_err(|error| {
            let id = value.get("id").and_then(serde_json::Value::as_str).unwrap_or_default();
            io(&Self::path(&self.folder), format!("case {id}: {}", of_json(&error)))
        })?;
        entry.read(&self.folder)
    }
}

/// Formats an error of a JSON text, after the path of the invalid value.
fn of_json(error: &serde_path_to_error::Error<serde_json::Error>) -> String {
    match error.path().to_string().as_str() {
        // the whole text, and one that ends too early
        "." | "?" => error.inner().to_string(),
        path => format!("{path}: {}", error.inner()),
    }
}

/// Reads every case of a folder.
pub fn read(folder: &Path) -> Result<Vec<Golden>> {
    let index = Index::read(folder)?;
    (0..index.cases.len()).map(|number| index.golden(number)).collect()
}

/// A case and its expected arrays.
#[derive(Debug)]
pub struct Golden {
    /// Inputs and parameters.
    pub case: Case,
    /// `out lse dq dk dv` and, if there are such inputs, `dbias dsoftmax_aux`.
    arrays: BTreeMap<String, ArrayD<f64>>,
    /// Largest |got − want| of each array, by element type.
    tolerance: BTreeMap<String, BTreeMap<String, f64>>,
}

impl Golden {
    /// Returns the expected arrays of a computation in `dtype`, with their tolerances.
    ///
    /// The file has the arrays of its f32 inputs, computed in f64, and tolerances for f32 and f64.
    /// In 16 bits the inputs are rounded first: the oracle computes the arrays of the rounded
    /// inputs, and a [`Judge`] bounds the errors.
    pub fn expected(&self, dtype: DType) -> Result<Expected> {
        if dtype.bytes() == 2 {
            let judge = Judge::new(&self.case.in_dtype(dtype))?;
            let arrays = judge.want().arrays().into_iter();
            // ties are no output of the facade
            let arrays = arrays.filter(|&(name, _)| name != "ties");
            let arrays = arrays
                .map(|(name, array)| (name.to_owned(), (array.to_owned(), judge.bound(name))));
            return Ok(Expected { arrays: arrays.collect() });
        }
        let tolerances = self.tolerance.get(dtype.name()).filter(|all| !all.is_empty());
        let none = || {
            let by = "this case, which has no tolerance for it";
            Error::unsupported(format!("dtype {}", dtype.name()), by)
        };
        let arrays = tolerances.ok_or_else(none)?.iter().filter_map(|(name, &tolerance)| {
            Some((name.clone(), (self.arrays.get(name)?.clone(), tolerance)))
        });
        Ok(Expected { arrays: arrays.collect() })
    }
}

#[derive(Deserialize)]
struct Entry {
    id: String,
    /// Safetensors file, relative to the folder of the index.
    file: String,
    dims: Lengths,
    params: Params,
    tolerance: BTreeMap<String, BTreeMap<String, f64>>,
}

#[derive(Deserialize, Clone, Copy)]
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
struct Params {
    causal: bool,
    sliding_window: Option<[Option<u64>; 2]>,
    attention_sink_size: u64,
    chunk_size: Option<u64>,
    logits_soft_cap: Option<f64>,
    softmax_scale: Option<f64>,
    normalize_output: bool,
    softmax_aux: Option<SinksForm>,
    bias_order: Order,
    alignment: Align,
    dropout_prob: f64,
    dropout_seed: Option<u64>,
    /// Parameters that a later version of the format may add. They are refused.
    #[serde(flatten)]
    unknown: BTreeMap<String, serde_json::Value>,
}

#[derive(Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum SinksForm {
    Shared,
    PerHead,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Order {
    BeforeSoftCap,
    AfterSoftCap,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Align {
    TopLeft,
    BottomRight,
}

impl Entry {
    fn read(self, folder: &Path) -> Result<Golden> {
        if !self.params.unknown.is_empty() {
            let names: Vec<&str> = self.params.unknown.keys().map(String::as_str).collect();
            let what = format!("parameter {}", names.join(", "));
            return Err(Error::unsupported(what, "this version"));
        }
        let path = folder.join(&self.file);
        let bytes = read_file(&path)?;
        let tensors = SafeTensors::deserialize(&bytes).map_err(|error| io(&path, error))?;
        let file = File { path: &path, tensors };
        let names = self.tolerance.values().flat_map(BTreeMap::keys);
        let arrays = names
            .map(|name| Ok((name.clone(), file.need(name, number)?)))
            .collect::<Result<_>>()?;
        let case = self.case(&file)?;
        Ok(Golden { case, arrays, tolerance: self.tolerance })
    }

    fn case(&self, file: &File<'_>) -> Result<Case> {
        let Lengths { batch, q_len, kv_len, q_heads, kv_heads, head_dim, value_dim } = self.dims;
        let dims = Dims { batch, q_len, kv_len, q_heads, kv_heads, head_dim, value_dim };
        let sinks = self.sinks(file)?;
        let bias: Option<Array4<f64>> =
            file.get("bias", number)?.map(|bias| file.shaped(bias)).transpose()?;
        let mut case = Case {
            name: self.id.clone(),
            spec: self.spec(dims, bias.as_ref(), sinks.as_ref())?,
            masks: Masks::default(),
            batch: Batch::default(),
            q: file.sized("query", [batch, q_len, q_heads, head_dim])?,
            k: file.sized("key", [batch, kv_len, kv_heads, head_dim])?,
            v: file.sized("value", [batch, kv_len, kv_heads, value_dim])?,
            bias,
            sinks,
            dout: file.sized("dout", [batch, q_len, q_heads, value_dim])?,
            dlse: file.get("dlse", number)?.map(|dlse| file.shaped(dlse)).transpose()?,
        };
        case.batch = file.batch()?;
        let Params {
            causal,
            sliding_window: window,
            attention_sink_size: first_visible,
            chunk_size: chunk,
            ..
        } = self.params;
        Ok(case.masked(Masks { causal, window, first_visible, chunk, ..Masks::default() }))
    }

    fn sinks(&self, file: &File<'_>) -> Result<Option<Array2<f64>>> {
        let form = self.params.softmax_aux;
        let sinks: Option<ArrayD<f64>> = file.get("softmax_aux", number)?;
        let (Some(sinks), Some(form)) = (&sinks, form) else {
            let alike = sinks.is_some() == form.is_some();
            let wrong = || io(file.path, "softmax_aux is in the file or in the index alone");
            return if alike { Ok(None) } else { Err(wrong()) };
        };
        if sinks.ndim() == 2 {
            return Ok(Some(file.shaped(sinks.clone())?));
        }
        let line: Array<f64, Ix1> = file.shaped(sinks.clone())?;
        Ok(Some(line.insert_axis(Axis(if form == SinksForm::Shared { 0 } else { 1 }))))
    }

    fn spec(
        &self,
        dims: Dims,
        bias: Option<&Array4<f64>>,
        sinks: Option<&Array2<f64>>,
    ) -> Result<Spec> {
        let params = &self.params;
        let plain = Spec::new(dims, DType::F64);
        let dropout = match (params.dropout_prob, params.dropout_seed) {
            (0.0, _) => None,
            (probability, Some(seed)) => Some(Dropout { probability, seed }),
            (probability, None) => {
                let got = format!("none, with dropout_prob {probability}");
                return Err(Error::invalid("dropout_seed", got, "a seed"));
            }
        };
        let per_head = params.softmax_aux == Some(SinksForm::PerHead);
        Ok(Spec {
            alignment: match params.alignment {
                Align::TopLeft => Alignment::TopLeft,
                Align::BottomRight => Alignment::BottomRight,
            },
            scale: params.softmax_scale.unwrap_or(plain.scale),
            soft_cap: params.logits_soft_cap,
            bias: bias.map(|bias| bias.dim().into()),
            bias_order: match params.bias_order {
                Order::BeforeSoftCap => BiasOrder::BeforeSoftCap,
                Order::AfterSoftCap => BiasOrder::AfterSoftCap,
            },
            sinks: sinks.map(|sinks| SinkShape { per_head, count: sinks.ncols() }),
            normalize: params.normalize_output,
            dropout,
            ..plain
        })
    }
}

struct File<'a> {
    path: &'a Path,
    tensors: SafeTensors<'a>,
}

impl File<'_> {
    fn batch(&self) -> Result<Batch> {
        let pairs =
            |name: &str| self.get(name, integer)?.map(|ids| self.shaped::<_, Ix2>(ids)).transpose();
        let ids = |name: &str| -> Result<Option<Array2<i32>>> {
            let narrow = |id: i64| i32::try_from(id).map_err(|error| io(self.path, error));
            let Some(ids) = pairs(name)? else { return Ok(None) };
            let narrowed = ids.iter().map(|&id| narrow(id)).collect::<Result<Vec<_>>>()?;
            Array2::from_shape_vec(ids.dim(), narrowed)
                .map(Some)
                .map_err(|error| io(self.path, error))
        };
        let lens = |name: &str| -> Result<Option<Vec<i64>>> {
            Ok(self.get(name, integer)?.map(|lens| lens.into_iter().collect()))
        };
        let mask: Option<Array4<i64>> =
            self.get("attention_mask", integer)?.map(|mask| self.shaped(mask)).transpose()?;
        Ok(Batch {
            q_segment_ids: ids("q_segment_ids")?,
            kv_segment_ids: ids("kv_segment_ids")?,
            q_positions: pairs("q_positions")?,
            kv_positions: pairs("kv_positions")?,
            attention_mask: mask.map(|mask| DenseMask::from_integers(mask.view())),
            key_lists: None,
            cum_seqlens_q: lens("cum_seqlens_q")?,
            cum_seqlens_k: lens("cum_seqlens_k")?,
        })
    }

    /// Reads an input of this shape.
    fn sized(&self, name: &str, want: [usize; 4]) -> Result<Array4<f64>> {
        let tensor = self.need(name, number)?;
        if tensor.shape() != want {
            let got = tensor.shape();
            return Err(io(self.path, format!("{name}: got shape {got:?}, want {want:?}")));
        }
        self.shaped(tensor)
    }

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

fn read_file(path: &Path) -> Result<Vec<u8>> {
    let is_file = std::fs::metadata(path).map_err(|error| io(path, error))?.is_file();
    if !is_file {
        return Err(io(path, "is not a regular file"));
    }
    std::fs::read(path).map_err(|error| io(path, error))
}

fn io(path: &Path, what: impl ToString) -> Error {
    Error::Io { path: path.display().to_string(), what: what.to_string() }
}
