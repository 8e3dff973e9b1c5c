//! Flags of the options of an attention.
//! Written from options.toml by `cargo xtask options`.

use std::{path::PathBuf, time::Duration};

use annulus::{Alignment, Attention, Division, Precision, Strategy, mask::Neighborhood};
use clap::{Args, ValueEnum};

use super::values::{
    LayoutName, WindowSides, count, count_u64, finite, layout, positive, probability, silence,
    strategy, threads, whole_u64,
};
use crate::input::SinksForm;

/// Mask flags. A pair is visible if every condition holds.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Mask (a pair is visible if every condition holds)")]
pub(crate) struct MaskFlags {
    /// Causal mask: visible if j <= i
    #[arg(long)]
    pub(crate) causal: bool,
    /// Sliding window: visible if i-L <= j <= i+R; a side may be `none`; one number is for both
    /// sides
    #[arg(long, value_name = "L,R", allow_hyphen_values = true)]
    pub(crate) window: Option<WindowSides>,
    /// Exempt the first N keys from the window (attention sinks of StreamingLLM); needs --window
    #[arg(long, value_name = "N", value_parser = whole_u64, requires = "window")]
    pub(crate) first_visible: Option<u64>,
    /// Chunked causal: visible if i and j are in the same chunk of C rows and j <= i
    #[arg(long, value_name = "C", value_parser = count_u64)]
    pub(crate) chunk: Option<u64>,
    /// Prefix-LM: visible if j < N or j <= i
    #[arg(long, value_name = "N", value_parser = whole_u64, conflicts_with = "causal")]
    pub(crate) prefix: Option<u64>,
    /// Window on a grid of one to three axes whose points are the rows, as 64x128:7x5; options:
    /// dilation=2x1, causal=0x1, periodic=0x1, edge=clip (default: shift)
    #[arg(long, value_name = "SHAPE:WINDOW[:OPTION=...]")]
    pub(crate) neighborhood: Option<Neighborhood>,
    /// Alignment of query positions to key positions for different lengths
    #[arg(long, value_enum, default_value = "top-left")]
    pub(crate) align: AlignmentName,
    /// Packed documents of these lengths, which fill the sequence: visible only within a document,
    /// whose positions start at 0
    #[arg(long, value_name = "LEN,LEN,...", value_parser = count, value_delimiter = ',')]
    pub(crate) documents: Vec<usize>,
}

impl MaskFlags {
    /// Sets the flags of mathematics that no other flag and no file changes.
    pub(crate) fn set_mathematics(&self, builder: Attention) -> Attention {
        builder
            .causal(self.causal)
            .attention_sink_size(self.first_visible.unwrap_or(0))
            .chunk_size(self.chunk)
            .prefix_len(self.prefix)
            .align(self.align.into())
    }
}

/// Flags of the scores and probabilities.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Scores and probabilities")]
pub(crate) struct ScoreFlags {
    /// Softmax scale, the factor of q·k. Default: 1/sqrt(head_dim)
    #[arg(long, value_name = "X", value_parser = finite, allow_hyphen_values = true)]
    pub(crate) scale: Option<f64>,
    /// Soft cap of the scores: X·tanh(score/X)
    #[arg(long, value_name = "X", value_parser = positive, allow_hyphen_values = true)]
    pub(crate) soft_cap: Option<f64>,
    /// Form of softmax_aux: sink logits shared by all heads, or one set per head
    #[arg(long, value_enum)]
    pub(crate) sinks: Option<SinksForm>,
    /// Dropout: set each softmax probability to 0 with probability P
    #[arg(long, value_name = "P", value_parser = probability,
        requires = "seed", allow_hyphen_values = true)]
    pub(crate) dropout: Option<f64>,
    /// Seed of the dropout
    #[arg(long, value_name = "N", value_parser = whole_u64, requires = "dropout")]
    pub(crate) seed: Option<u64>,
    /// Precision of matrix products: on the CPU `default` may round probabilities of bf16 inputs to
    /// bf16; matrix units of GPUs round those of 16-bit inputs at every precision
    #[arg(long, value_enum, default_value = "highest")]
    pub(crate) precision: PrecisionName,
    /// The same bits for any number of ranks, layout, transport and threads, on machines whose
    /// `annulus doctor` shows the same numerics. Only --backend cpu
    #[arg(long)]
    pub(crate) reproducible: bool,
}

impl ScoreFlags {
    /// Sets the flags of mathematics that no other flag and no file changes.
    pub(crate) fn set_mathematics(&self, builder: Attention) -> Attention {
        builder
            .logits_soft_cap(self.soft_cap)
            .precision(self.precision.into())
            .reproducible(self.reproducible)
    }
}

/// Flags of the outputs that a KV cache does not have.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Scores and probabilities")]
pub(crate) struct OutputFlags {
    /// Write the unnormalized output, and the softmax statistics max and sum
    #[arg(long)]
    pub(crate) unnormalized: bool,
    /// Write statistics of the scores: by row, and by head over all ranks
    #[arg(long)]
    pub(crate) statistics: bool,
}

impl OutputFlags {
    /// Sets the flags of mathematics that no other flag and no file changes.
    pub(crate) fn set_mathematics(&self, builder: Attention) -> Attention {
        builder.unnormalized(self.unnormalized).statistics(self.statistics)
    }
}

/// Flags of the division among ranks.
#[derive(Debug, Clone, Args)]
pub(crate) struct DivisionFlags {
    /// Assignment of rows to ranks; auto chooses it from the mask, balanced also from --documents,
    /// segment ids, positions and packed lengths of the input
    #[arg(long, value_name = "NAME", value_parser = layout(), default_value = "auto")]
    pub(crate) layout: LayoutName,
    /// Division of the attention among ranks: ring; heads:H, an all-to-all over heads in groups of
    /// H ranks and a ring over the groups; grid:QxK, Q query parts and K key columns, whose partial
    /// results are merged; grid:HxQxK, heads too; all-gather or once-per-node, a ring on another
    /// route; all-to-all, which is heads:P; pass-q, which is grid:1xP; or auto, the one with the
    /// least predicted time on --machine or, without one, that sends the fewest bytes
    #[arg(long, value_name = "NAME", value_parser = strategy, default_value = "ring")]
    pub(crate) strategy: Strategy,
    /// Machine file, which `annulus measure` writes, by which --strategy auto chooses
    #[arg(long, value_name = "FILE")]
    pub(crate) machine: Option<PathBuf>,
    /// Ring steps by which a rank posts the receive of a block ahead of the step that computes on
    /// it, equal on all ranks. Each step but the first takes the memory of one more block, and in a
    /// backward pass of its gradients; with 2, a rank does not wait for a neighbour that is late by
    /// less than a step. On a direct route, as many receives are posted as fit into that memory.
    /// Results are the same, bit for bit. Default: 1, and 4 on a balanced layout
    #[arg(long, value_name = "STEPS", value_parser = count)]
    pub(crate) receive_ahead: Option<usize>,
}

impl DivisionFlags {
    /// Sets the flags of division that no other flag and no file changes.
    pub(crate) fn set_division(&self, builder: Division) -> Division {
        builder.receive_ahead(self.receive_ahead)
    }
}

/// Flags of the run.
#[derive(Debug, Clone, Args)]
pub(crate) struct RuntimeFlags {
    /// Deadline: fail after S seconds without a message or heartbeat of a peer, or if a rank begins
    /// a call S seconds after another. ANNULUS_DEADLINE in the environment replaces it
    #[arg(long, value_name = "S", value_parser = silence,
        default_value = "120", allow_hyphen_values = true)]
    pub(crate) deadline: Duration,
    /// Threads per rank, 1 to 1024; all ranks together at most 128 per core. Default: the cores
    /// divided by the ranks
    #[arg(long, value_name = "N", value_parser = threads)]
    pub(crate) threads: Option<usize>,
}

/// Names of the values of Alignment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum AlignmentName {
    /// Query i has position i.
    TopLeft,
    /// Query i has position i + kv_len − q_len.
    BottomRight,
}

impl From<AlignmentName> for Alignment {
    fn from(name: AlignmentName) -> Self {
        match name {
            AlignmentName::TopLeft => Self::TopLeft,
            AlignmentName::BottomRight => Self::BottomRight,
        }
    }
}

/// Names of the values of Precision.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum PrecisionName {
    /// No product is rounded, except on matrix units of GPUs: 16-bit probabilities.
    Highest,
    /// Products may be split in three terms.
    High,
    /// Probabilities of bf16 inputs may be rounded to bf16 before they are multiplied.
    Default,
}

impl From<PrecisionName> for Precision {
    fn from(name: PrecisionName) -> Self {
        match name {
            PrecisionName::Highest => Self::Highest,
            PrecisionName::High => Self::High,
            PrecisionName::Default => Self::Default,
        }
    }
}

/// Options of the library and the flags that set them.
pub(super) const FLAGS: &[(&str, &str)] = &[
    ("dtype", "--dtype"),
    ("causal", "--causal"),
    ("sliding_window", "--window"),
    ("attention_sink_size", "--first-visible"),
    ("chunk_size", "--chunk"),
    ("prefix_len", "--prefix"),
    ("mask", "--neighborhood"),
    ("alignment", "--align"),
    ("bias_order", "--bias-order"),
    ("unnormalized", "--unnormalized"),
    ("softmax_scale", "--scale"),
    ("logits_soft_cap", "--soft-cap"),
    ("sinks", "--sinks"),
    ("dropout_prob", "--dropout"),
    ("dropout_seed", "--seed"),
    ("precision", "--precision"),
    ("layout", "--layout"),
    ("deadline", "--deadline"),
    ("threads", "--threads"),
    ("reproducible", "--reproducible"),
    ("strategy", "--strategy"),
    ("machine", "--machine"),
    ("documents", "--documents"),
    ("backend", "--backend"),
    ("device", "--device"),
    ("receive_ahead", "--receive-ahead"),
    ("statistics", "--statistics"),
    ("bias_table", "--bias-table"),
];
