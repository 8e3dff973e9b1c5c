//! What all ranks must have alike, field by field, so that a difference is named instead of felt.

use std::fmt::{Debug, Display, Write};

use annulus_core::{BackwardMode, Batch, DType, DenseMask, Fingerprint, Placement, Spec};

use super::RingOptions;
use crate::agreement::Descriptor;

/// How much of a field's text travels for the error message; the digest is of all of it.
const SHOWN: usize = 60;

/// The fields of a plan. `arithmetic` and `narrowing` are the backend's, `placement` the transport's.
pub(super) fn plan(
    spec: &Spec,
    options: &RingOptions,
    (arithmetic, narrowing): (&str, Option<DType>),
    placement: Option<&Placement>,
) -> Descriptor {
    let dims = &spec.dims;
    let (probability, seed) = spec.dropout.map_or((0.0, 0), |dropout| (dropout.probability, dropout.seed));
    let lengths = [
        ("batch", dims.batch),
        ("q_len", dims.q_len),
        ("kv_len", dims.kv_len),
        ("q_heads", dims.q_heads),
        ("kv_heads", dims.kv_heads),
        ("head_dim", dims.head_dim),
        ("value_dim", dims.value_dim),
    ];
    let d = lengths.into_iter().fold(Descriptor::new(), |d, (name, length)| d.field(name, length as u64));
    let d = text(d, "dtype", spec.dtype);
    let d = debug(d, "mask", &spec.mask);
    let d = debug(d, "alignment", &spec.alignment);
    let d = float(d, "softmax_scale", spec.scale);
    let d = debug(d, "logits_soft_cap", &spec.soft_cap);
    let extents = ["bias batch", "bias q_heads", "bias q_len", "bias kv_len"];
    let d = extents.into_iter().enumerate().fold(d, |d, (axis, name)| debug(d, name, &spec.bias.map(|shape| shape[axis])));
    let d = debug(d, "bias_function", &spec.bias_function);
    let d = debug(d, "bias_order", &spec.bias_order);
    let d = debug(d, "softmax_aux count", &spec.sinks.map(|sinks| sinks.count));
    let d = debug(d, "softmax_aux per_head", &spec.sinks.map(|sinks| sinks.per_head));
    let d = d.field("normalize_output", u64::from(spec.normalize));
    let d = float(d, "dropout_prob", probability).field("dropout_seed", seed);
    let d = text(d, "logits_dtype", spec.logits_dtype);
    let d = debug(d, "precision", &spec.precision);
    let d = debug(d, "backward_mode", &spec.backward);
    let d = debug(d, "layout", &options.layout);
    let d = debug(d, "route", &options.route);
    // only there must one rank find another's largest logit to the bit
    let exact = options.backward && spec.backward == BackwardMode::TwoPass && !spec.normalize;
    let d = text(d, "backend", if exact { arithmetic } else { "any" });
    let d = debug(d, "weights rounded to", &narrowing);
    let d = debug(d, "placement", &placement.map(Placement::nodes));
    d.field("backward", u64::from(options.backward)).field("local_gradients", u64::from(options.local_gradients))
}

/// What must be alike of a batch whose rows differ by rank.
pub(super) fn batch(batch: &Batch) -> Descriptor {
    let d = Descriptor::new()
        .field("q_segment_ids given", u64::from(batch.q_segment_ids.is_some()))
        .field("kv_segment_ids given", u64::from(batch.kv_segment_ids.is_some()))
        .field("q_positions given", u64::from(batch.q_positions.is_some()))
        .field("kv_positions given", u64::from(batch.kv_positions.is_some()));
    let d = debug(d, "cum_seqlens_q", &batch.cum_seqlens_q);
    let d = debug(d, "cum_seqlens_k", &batch.cum_seqlens_k);
    let shape = batch.attention_mask.as_ref().map(DenseMask::shape);
    debug(d, "attention_mask", &shape.map(|[batch, heads, _, keys]| [batch, heads, keys]))
}

/// Which call it is.
pub(super) fn call(name: &str) -> Descriptor {
    text(Descriptor::new(), "call", name)
}

fn float(d: Descriptor, name: &'static str, value: f64) -> Descriptor {
    d.field_as(name, value.to_bits(), value)
}

fn debug(d: Descriptor, name: &'static str, value: &dyn Debug) -> Descriptor {
    text(d, name, format_args!("{value:?}"))
}

fn text(d: Descriptor, name: &'static str, value: impl Display) -> Descriptor {
    let mut text = String::new();
    // writing to a string does not fail
    let written = write!(text, "{value}");
    debug_assert!(written.is_ok());
    let digest = Fingerprint::new().bytes(text.as_bytes()).finish();
    d.field_as(name, digest, text.chars().take(SHOWN).collect::<String>())
}
