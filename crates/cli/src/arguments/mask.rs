//! Flags of the mask, shared by `attend` and `plan`.

use annulus::{Alignment, Attention};
use clap::{Args, ValueEnum};

use super::values::{Window, count, count_u64, whole_u64};
use crate::report::counted;

/// Mask flags. A pair is visible if every condition holds.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Mask (a pair is visible if every condition holds)")]
pub(crate) struct MaskFlags {
    /// Causal mask: visible if j <= i
    #[arg(long)]
    pub(crate) causal: bool,
    /// Sliding window: visible if i-L <= j <= i+R; a side may be `none`; one number is for both
    /// sides
    #[arg(long, value_name = "L,R", allow_hyphen_values = true)]
    pub(crate) window: Option<Window>,
    /// Exempt the first N keys from the window (attention sinks of StreamingLLM); needs --window
    #[arg(long, value_name = "N", requires = "window", value_parser = whole_u64)]
    pub(crate) first_visible: Option<u64>,
    /// Chunked causal: visible if i and j are in the same chunk of C rows and j <= i
    #[arg(long, value_name = "C", value_parser = count_u64)]
    pub(crate) chunk: Option<u64>,
    /// Prefix-LM: visible if j < N or j <= i
    #[arg(long, value_name = "N", conflicts_with = "causal", value_parser = whole_u64)]
    pub(crate) prefix: Option<u64>,
    /// Packed documents of these lengths, which fill the sequence: visible only within a document,
    /// whose positions start at 0
    #[arg(long, value_name = "LEN,LEN,...", value_delimiter = ',', value_parser = count)]
    pub(crate) documents: Vec<usize>,
    /// Alignment of query positions to key positions for different lengths
    #[arg(long, value_enum, default_value = "top-left")]
    pub(crate) align: AlignmentName,
}

/// Names of alignments.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub(crate) enum AlignmentName {
    /// Query i has the position of key i.
    #[default]
    TopLeft,
    /// The last query has the position of the last key.
    BottomRight,
}

impl MaskFlags {
    /// Adds the mask to a definition.
    pub(crate) fn apply(&self, attention: Attention) -> Attention {
        let Window { left, right } = self.window.unwrap_or(Window { left: None, right: None });
        attention
            .causal(self.causal)
            .sliding_window(left, right)
            .attention_sink_size(self.first_visible.unwrap_or(0))
            .chunk_size(self.chunk)
            .prefix_len(self.prefix)
            .align(match self.align {
                AlignmentName::TopLeft => Alignment::TopLeft,
                AlignmentName::BottomRight => Alignment::BottomRight,
            })
    }

    /// Describes the mask in words.
    pub(crate) fn describe(&self) -> String {
        let mut words = Vec::new();
        if self.causal {
            words.push("causal".to_owned());
        }
        if let Some(window) = self.window {
            words.push(format!("window {window}"));
        }
        if let Some(count) = self.first_visible {
            words.push(format!("first {count} visible"));
        }
        if let Some(size) = self.chunk {
            words.push(format!("chunks of {size}"));
        }
        if let Some(len) = self.prefix {
            words.push(format!("prefix {len}"));
        }
        if words.is_empty() {
            words.push("full".to_owned());
        }
        if !self.documents.is_empty() {
            words.push(counted(self.documents.len() as u64, "document", "documents"));
        }
        if self.align == AlignmentName::BottomRight {
            words.push("bottom-right".to_owned());
        }
        words.join(", ")
    }
}
