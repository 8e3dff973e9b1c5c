//! Scores and probabilities of the flags, shared by `attend` and `decode`.

use annulus::Attention;
use annulus_core::SinkShape;

pub(crate) use super::option_flags::ScoreFlags;

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
