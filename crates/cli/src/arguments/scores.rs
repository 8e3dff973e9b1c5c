//! Flags of the scores and probabilities, shared by `attend` and `decode`.

use annulus::Attention;
use annulus_core::SinkShape;
use clap::Args;

use super::values::{PrecisionName, finite, positive, probability, whole_u64};
use crate::input::SinksForm;

/// Flags of the scores and probabilities.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Scores and probabilities")]
pub(crate) struct ScoreFlags {
    /// Softmax scale, the factor of q·k. Default: 1/sqrt(head dim)
    #[arg(long, value_name = "X", value_parser = finite, allow_hyphen_values = true)]
    scale: Option<f64>,
    /// Soft cap of the scores: X·tanh(score/X)
    #[arg(long, value_name = "X", value_parser = positive, allow_hyphen_values = true)]
    pub(crate) soft_cap: Option<f64>,
    /// Form of softmax_aux: sink logits shared by all heads, or one set per head
    #[arg(long, value_enum)]
    pub(crate) sinks: Option<SinksForm>,
    /// Dropout: set each softmax probability to 0 with probability P
    #[arg(long, value_name = "P", value_parser = probability, requires = "seed",
        allow_hyphen_values = true)]
    dropout: Option<f64>,
    /// Seed of the dropout
    #[arg(long, value_name = "N", requires = "dropout", value_parser = whole_u64)]
    seed: Option<u64>,
    /// Precision of matrix products: on the CPU `default` may round probabilities of bf16 inputs to
    /// bf16; matrix units of GPUs round those of 16-bit inputs at every precision
    #[arg(long, value_enum, default_value = "highest")]
    precision: PrecisionName,
}

impl ScoreFlags {
    /// Sets them. `sinks` is the shape of the input's sink logits.
    pub(crate) fn apply(&self, attention: Attention, sinks: Option<SinkShape>) -> Attention {
        let (probability, seed) = self.dropout.zip(self.seed).unwrap_or_default();
        attention
            .precision(self.precision.into())
            .softmax_scale(self.scale)
            .logits_soft_cap(self.soft_cap)
            .softmax_aux(sinks)
            .dropout(probability, seed)
    }
}
