//! Flags that say who sees whom: shared by `attend` and `plan`.

use annulus::{Alignment, Attention};
use clap::{Args, ValueEnum};

use super::values::{Window, count_u64, whole_u64};
use crate::failure::{Failure, Outcome};

/// The mask flags. All conditions are and-ed.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Mask (all conditions are and-ed)")]
pub(crate) struct MaskFlags {
    /// Hide keys after the query: visible when j <= i
    #[arg(long)]
    pub(crate) causal: bool,
    /// Sliding window: visible when i-L <= j <= i+R; a side may be `none`; one number stands for both
    #[arg(long, value_name = "L,R", allow_hyphen_values = true)]
    pub(crate) window: Option<Window>,
    /// Exempt the first N keys from the window (attention sinks of streaming models); needs --window
    #[arg(long, value_name = "N", value_parser = whole_u64)]
    pub(crate) first_visible: Option<u64>,
    /// Chunked causal: visible when i and j are in the same chunk of C rows and j <= i
    #[arg(long, value_name = "C", value_parser = count_u64)]
    pub(crate) chunk: Option<u64>,
    /// Prefix-LM: visible when j < N or j <= i
    #[arg(long, value_name = "N", conflicts_with = "causal", value_parser = whole_u64)]
    pub(crate) prefix: Option<u64>,
    /// Where queries stand among the keys when lengths differ
    #[arg(long, value_enum, default_value = "top-left")]
    pub(crate) align: AlignmentName,
}

/// Alignments by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub(crate) enum AlignmentName {
    /// Query i stands at key i.
    #[default]
    TopLeft,
    /// The last query stands at the last key.
    BottomRight,
}

impl MaskFlags {
    /// Adds the flags to a definition.
    pub(crate) fn apply(&self, attention: Attention) -> Attention {
        let (left, right) =
            self.window.map_or((None, None), |Window { left, right }| (left, right));
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

    /// Refuses a flag that does nothing without another one.
    ///
    /// # Errors
    /// [`Failure::Usage`] naming both.
    pub(crate) fn check(&self) -> Outcome {
        if self.first_visible.is_some() && self.window.is_none() {
            return Err(Failure::usage(
                "--first-visible",
                "no --window",
                "a --window, which the first keys are exempt from",
            ));
        }
        Ok(())
    }

    /// The flags as one would say them.
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
        if self.align == AlignmentName::BottomRight {
            words.push("bottom-right".to_owned());
        }
        words.join(", ")
    }
}
