//! The definition of an attention by flags: its mask and its scores.

use std::sync::Arc;

use annulus::Attention;
use annulus_core::SinkShape;

pub(crate) use super::option_flags::{AlignmentName, MaskFlags, ScoreFlags};
use super::values::WindowSides;
use crate::report::counted;

impl MaskFlags {
    /// Adds the mask to a definition.
    pub(crate) fn apply(&self, attention: Attention) -> Attention {
        let WindowSides { left, right } =
            self.window.unwrap_or(WindowSides { left: None, right: None });
        let attention = self.set_mathematics(attention).sliding_window(left, right);
        match &self.neighborhood {
            Some(neighborhood) => attention.mask(Arc::new(neighborhood.clone())),
            None => attention,
        }
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
        if let Some(neighborhood) = &self.neighborhood {
            words.push(format!("neighborhood {neighborhood}"));
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

impl ScoreFlags {
    /// Sets them. `sinks` is the shape of the input's sink logits.
    pub(crate) fn apply(&self, attention: Attention, sinks: Option<SinkShape>) -> Attention {
        let (probability, seed) = self.dropout.zip(self.seed).unwrap_or_default();
        self.set_mathematics(attention)
            .softmax_scale(self.scale)
            .softmax_aux(sinks)
            .dropout(probability, seed)
    }
}
