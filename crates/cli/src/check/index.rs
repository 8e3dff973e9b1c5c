//! Index of a folder of cases in the format `annulus-cases-1`.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use annulus::{Alignment, Attention, BiasOrder};
use annulus_core::{DType, Dims, Error, Result};
use serde::Deserialize;

use crate::{failure::io, file::read_text, input::SinksForm, message};

/// Name of the format.
const FORMAT: &str = "annulus-cases-1";

/// The file `index.json`. Cases are parsed one by one, so that a malformed one fails alone.
#[derive(Debug, Deserialize)]
pub(super) struct Index {
    format: String,
    pub(super) cases: Vec<serde_json::Value>,
}

/// Case of an index.
#[derive(Debug, Deserialize)]
pub(super) struct Case {
    /// Name, required by the format. Callers read it before the case is parsed.
    #[serde(rename = "id")]
    _id: String,
    /// Safetensors file, relative to the folder of the index.
    pub(super) file: String,
    dims: CaseDims,
    params: Params,
    /// Tolerance of each expected array, by element type.
    pub(super) tolerance: BTreeMap<String, BTreeMap<String, f64>>,
}

#[derive(Debug, Deserialize)]
struct CaseDims {
    batch: usize,
    q_len: usize,
    kv_len: usize,
    q_heads: usize,
    kv_heads: usize,
    head_dim: usize,
    value_dim: usize,
}

#[derive(Debug, Deserialize)]
struct Params {
    causal: bool,
    sliding_window: Option<[Option<u64>; 2]>,
    attention_sink_size: u64,
    chunk_size: Option<u64>,
    logits_soft_cap: Option<f64>,
    softmax_scale: Option<f64>,
    normalize_output: bool,
    softmax_aux: Option<Sinks>,
    bias_order: Order,
    alignment: Align,
    dropout_prob: f64,
    dropout_seed: Option<u64>,
    /// Unknown parameters, which a later version of the format may add. They are refused.
    #[serde(flatten)]
    unknown: BTreeMap<String, serde_json::Value>,
}

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Sinks {
    Shared,
    PerHead,
}

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Order {
    BeforeSoftCap,
    AfterSoftCap,
}

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Align {
    TopLeft,
    BottomRight,
}

impl Index {
    /// Reads the index of a folder.
    ///
    /// # Errors
    /// [`Error::Io`] if it is missing, malformed or of another format.
    pub(super) fn read(folder: &Path) -> Result<Self> {
        let path = Self::path(folder);
        let text = read_text(&path)?;
        let mut json = serde_json::Deserializer::from_str(&text);
        let index: std::result::Result<Self, _> = serde_path_to_error::deserialize(&mut json);
        let wrong = |what: String| io(&path, format!("is not an index of cases: {what}"));
        let index = index.map_err(|error| wrong(message::of_json(&error)))?;
        json.end().map_err(|error| wrong(error.to_string()))?;
        if index.format == FORMAT {
            Ok(index)
        } else {
            Err(io(&path, format!("format: got {}, want {FORMAT}", message::name(&index.format))))
        }
    }

    /// Path of a folder's index.
    pub(super) fn path(folder: &Path) -> PathBuf {
        folder.join("index.json")
    }
}

impl Case {
    /// Parses a case of the index `path`.
    ///
    /// # Errors
    /// [`Error::Io`] naming the index, the case and the field.
    pub(super) fn read(path: &Path, id: &str, value: &serde_json::Value) -> Result<Self> {
        let case: std::result::Result<Self, _> = serde_path_to_error::deserialize(value);
        let wrong =
            |error| io(path, format!("case {}: {}", message::name(id), message::of_json(&error)));
        case.map_err(wrong)
    }

    /// Lengths.
    pub(super) const fn dims(&self) -> Dims {
        let CaseDims { batch, q_len, kv_len, q_heads, kv_heads, head_dim, value_dim } = self.dims;
        Dims { batch, q_len, kv_len, q_heads, kv_heads, head_dim, value_dim }
    }

    /// Form of its sink logits.
    pub(super) fn sinks_form(&self) -> Option<SinksForm> {
        self.params.softmax_aux.map(|sinks| match sinks {
            Sinks::Shared => SinksForm::Shared,
            Sinks::PerHead => SinksForm::PerHead,
        })
    }

    /// Returns the definition without the shapes of bias and sinks, which the file has.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for unknown parameters; [`Error::InvalidArgument`] for a dropout
    /// without a seed.
    pub(super) fn attention(&self, dtype: DType) -> Result<Attention> {
        let params = &self.params;
        if !params.unknown.is_empty() {
            let names = params.unknown.keys().map(String::as_str);
            return Err(Error::unsupported(
                format!("parameter {}", message::list(names)),
                "this version",
            ));
        }
        let mut attention = Attention::new().dtype(dtype).bias_order(match params.bias_order {
            Order::BeforeSoftCap => BiasOrder::BeforeSoftCap,
            Order::AfterSoftCap => BiasOrder::AfterSoftCap,
        });
        attention = attention.align(match params.alignment {
            Align::TopLeft => Alignment::TopLeft,
            Align::BottomRight => Alignment::BottomRight,
        });
        if params.causal {
            attention = attention.causal(true);
        }
        if let Some([left, right]) = params.sliding_window {
            // the attention sink is an exemption from the window
            attention = attention
                .sliding_window(left, right)
                .attention_sink_size(params.attention_sink_size);
        }
        if let Some(size) = params.chunk_size {
            attention = attention.chunk_size(size);
        }
        if let Some(cap) = params.logits_soft_cap {
            attention = attention.logits_soft_cap(cap);
        }
        if let Some(scale) = params.softmax_scale {
            attention = attention.softmax_scale(scale);
        }
        if !params.normalize_output {
            attention = attention.unnormalized(true);
        }
        match (params.dropout_prob, params.dropout_seed) {
            (0.0, _) => Ok(attention),
            (probability, Some(seed)) => Ok(attention.dropout(probability, seed)),
            (probability, None) => Err(Error::invalid(
                "dropout_seed",
                format!("none, with dropout_prob {probability}"),
                "a seed",
            )),
        }
    }
}
