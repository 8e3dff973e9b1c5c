//! The checked options of an attention and a plan, and the setters of the simple ones.
//! Written from options.toml by `cargo xtask options`.

use annulus::{Alignment, Attention, BackwardMode, BiasOrder, Division, Precision, Result, Runtime};
use pyo3::{prelude::*, types::PyDict};

use crate::{
    config::{LayoutConfig, choice, seconds},
    masks::{BiasFunction, Mask},
};

/// An attention and what is planned around it.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct Config<'py> {
    pub(crate) dtype: String,
    pub(crate) causal: bool,
    pub(crate) window_left: Option<u64>,
    pub(crate) window_right: Option<u64>,
    pub(crate) attention_sink_size: u64,
    pub(crate) chunk_size: Option<u64>,
    pub(crate) prefix_len: Option<u64>,
    pub(crate) mask: Option<Bound<'py, Mask>>,
    pub(crate) alignment: String,
    pub(crate) bias_order: String,
    pub(crate) normalize_output: bool,
    pub(crate) softmax_scale: Option<f64>,
    pub(crate) logits_soft_cap: Option<f64>,
    pub(crate) bias: Option<[usize; 4]>,
    pub(crate) bias_function: Option<Bound<'py, BiasFunction>>,
    pub(crate) softmax_aux: Option<(bool, usize)>,
    pub(crate) logits_dtype: Option<String>,
    pub(crate) dropout_prob: f64,
    pub(crate) dropout_seed: u64,
    pub(crate) precision: String,
    pub(crate) backward_mode: String,
    pub(crate) forward_only: bool,
    pub(crate) local_gradients: bool,
    pub(crate) layout: Option<LayoutConfig>,
    pub(crate) route: Option<String>,
    pub(crate) deadline: Option<f64>,
    pub(crate) kv_block_size: Option<u64>,
    pub(crate) arrival_deadline: Option<f64>,
    pub(crate) reproducible: bool,
    pub(crate) strategy: String,
    pub(crate) machine: Option<(bool, String)>,
    pub(crate) documents: Option<Bound<'py, PyDict>>,
    pub(crate) receive_ahead: Option<usize>,
    pub(crate) second_derivatives: bool,
    pub(crate) return_statistics: bool,
    pub(crate) bias_table: Option<String>,
}

/// Names of `alignment`.
const ALIGNMENTS: [(&str, Alignment); 2] = [
    ("top_left", Alignment::TopLeft),
    ("bottom_right", Alignment::BottomRight),
];

/// Names of `bias_order`.
const BIAS_ORDERS: [(&str, BiasOrder); 2] = [
    ("after_soft_cap", BiasOrder::AfterSoftCap),
    ("before_soft_cap", BiasOrder::BeforeSoftCap),
];

/// Names of `precision`.
const PRECISIONS: [(&str, Precision); 3] = [
    ("highest", Precision::Highest),
    ("high", Precision::High),
    ("default", Precision::Default),
];

/// Names of `backward_mode`.
const BACKWARD_MODES: [(&str, BackwardMode); 2] = [
    ("one_pass", BackwardMode::OnePass),
    ("two_pass", BackwardMode::TwoPass),
];

impl Config<'_> {
    /// Sets the options of mathematics whose form is that of all languages.
    pub(crate) fn set_mathematics(&self, builder: Attention) -> Result<Attention> {
        Ok(builder
            .causal(self.causal)
            .attention_sink_size(self.attention_sink_size)
            .chunk_size(self.chunk_size)
            .prefix_len(self.prefix_len)
            .align(choice("alignment", &self.alignment, &ALIGNMENTS)?)
            .bias_order(choice("bias_order", &self.bias_order, &BIAS_ORDERS)?)
            .unnormalized(!self.normalize_output)
            .softmax_scale(self.softmax_scale)
            .logits_soft_cap(self.logits_soft_cap)
            .precision(choice("precision", &self.precision, &PRECISIONS)?)
            .backward_mode(choice("backward_mode", &self.backward_mode, &BACKWARD_MODES)?)
            .forward_only(self.forward_only)
            .local_gradients(self.local_gradients)
            .reproducible(self.reproducible)
            .second_derivatives(self.second_derivatives)
            .statistics(self.return_statistics))
    }

    /// Sets the options of division whose form is that of all languages.
    pub(crate) fn set_division(&self, builder: Division) -> Result<Division> {
        Ok(builder.kv_block_size(self.kv_block_size).receive_ahead(self.receive_ahead))
    }

    /// Sets the options of runtime whose form is that of all languages.
    pub(crate) fn set_runtime(&self, builder: Runtime) -> Result<Runtime> {
        Ok(builder
            .deadline(seconds("deadline", self.deadline)?)
            .arrival_deadline(seconds("arrival_deadline", self.arrival_deadline)?))
    }
}
