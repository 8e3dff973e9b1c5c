//! Descriptors of collective calls: what must be equal on all ranks, field by field, so that an
//! error names the difference.
//! Also the text of a plan.

use std::fmt::{self, Debug, Display, Write};

use annulus_core::{
    Backend, BackwardMode, Batch, Capabilities, DenseMask, Error, Fingerprint, Placement, Result,
    Space, Spec, Transport,
};
use annulus_plan::{Machine, Strategy};

use super::{Ring, RingOptions, program};
use crate::agreement::{self, Descriptor};

/// Characters of a field's text that are sent for the error message. The digest covers all of it.
const SHOWN: usize = 60;

/// Agreed values of the fields of a plan that may differ between ranks.
pub(crate) struct Combined {
    pub(crate) kv_tile: u64,
    pub(crate) kv_block_size: u64,
    /// True if every transport posts ahead.
    pub(crate) posts_ahead: bool,
    /// True if any transport runs groups in order.
    pub(crate) groups_in_order: bool,
}

/// Agrees with all ranks on a plan, in all-gather 0 of the transport. `checked` has the capabilities
/// of the backend; `page_rows` is 0 but for a KV cache.
pub(crate) fn agree<S: Space>(
    transport: &mut dyn Transport<S>,
    checked: Result<(&Spec, &Capabilities, Strategy)>,
    options: &RingOptions,
    page_rows: u64,
) -> Result<Combined> {
    let described = checked.map(|(spec, capabilities, strategy)| {
        let plan = plan(spec, options, strategy, capabilities).field("page_rows", page_rows);
        debug(plan, "placement", &transport.placement().map(Placement::nodes))
            .largest("announces messages", u64::from(!transport.posts_ahead()))
            .largest("runs groups in order", u64::from(transport.runs_groups_in_order()))
    });
    match agreement::enter(transport, 0, &described)?[..] {
        [kv_tile, kv_block_size, announces, in_order] => Ok(Combined {
            kv_tile,
            kv_block_size,
            posts_ahead: announces == 0,
            groups_in_order: in_order != 0,
        }),
        _ => Err(Error::internal("an agreement on other fields than those of a plan")),
    }
}

/// Describes a plan. The capabilities are the backend's.
fn plan(
    spec: &Spec,
    options: &RingOptions,
    strategy: Strategy,
    capabilities: &Capabilities,
) -> Descriptor {
    let dims = &spec.dims;
    let (probability, seed) =
        spec.dropout.map_or((0.0, 0), |dropout| (dropout.probability, dropout.seed));
    let lengths = [
        ("batch", dims.batch),
        ("q_len", dims.q_len),
        ("kv_len", dims.kv_len),
        ("q_heads", dims.q_heads),
        ("kv_heads", dims.kv_heads),
        ("head_dim", dims.head_dim),
        ("value_dim", dims.value_dim),
    ];
    let d = lengths
        .into_iter()
        .fold(Descriptor::new(), |d, (name, length)| d.field(name, length as u64));
    let d = text(d, "dtype", spec.dtype);
    let d = identity(d, "mask", spec.mask.fingerprint(Fingerprint::new()), &spec.mask);
    let d = debug(d, "alignment", &spec.alignment);
    let d = float(d, "softmax_scale", spec.scale);
    let d = debug(d, "logits_soft_cap", &spec.soft_cap);
    let extents = ["bias batch", "bias q_heads", "bias q_len", "bias kv_len"];
    let d = extents
        .into_iter()
        .enumerate()
        .fold(d, |d, (axis, name)| debug(d, name, &spec.bias.map(|shape| shape[axis])));
    let function = spec.bias_function.as_ref();
    let fingerprint = function.map(|function| function.fingerprint(Fingerprint::new().number(1)));
    let fingerprint = fingerprint.unwrap_or_default();
    let d = identity(d, "bias_function", fingerprint, &spec.bias_function);
    let d = debug(d, "bias_order", &spec.bias_order);
    let d = debug(d, "softmax_aux count", &spec.sinks.map(|sinks| sinks.count));
    let d = debug(d, "softmax_aux per_head", &spec.sinks.map(|sinks| sinks.per_head));
    let d = d.field("normalize_output", u64::from(spec.normalize));
    let d = float(d, "dropout_prob", probability).field("dropout_seed", seed);
    let d = text(d, "logits_dtype", spec.logits_dtype);
    let d = debug(d, "precision", &spec.precision);
    let d = debug(d, "backward_mode", &spec.backward);
    // before the strategy, which is chosen by it
    let machine = options.machine.as_deref().map(Machine::fingerprint);
    let shown = machine.map_or("none".to_owned(), |digest| format!("fingerprint {digest:016x}"));
    let d = text(d, "machine", shown);
    let d = text(d, "strategy", strategy);
    let d = debug(d, "layout", &options.layout);
    let d = debug(d, "route", &options.route);
    let d = debug(d, "reproducible leaf rows", &spec.leaf_rows);
    // only there must one rank reproduce bits of another: all results, or the row maximum
    let exact = spec.leaf_rows.is_some()
        || options.backward && spec.backward == BackwardMode::TwoPass && !spec.normalize;
    let d = text(d, "backend", if exact { &capabilities.numerics_id } else { "any" });
    let d = debug(d, "probabilities rounded to", &capabilities.probs_dtype);
    let variable = options.deadline_variable.map(|deadline| deadline.as_secs_f64());
    let d = debug(d, "ANNULUS_DEADLINE", &variable);
    d.field("partial", u64::from(spec.partial))
        .field("backward", u64::from(options.backward))
        .field("local_gradients", u64::from(options.local_gradients))
        .field("receive_ahead", options.receive_ahead_steps() as u64)
        .largest("kv_tile", capabilities.kv_tile)
        .largest("kv_block_size", options.kv_block_size.unwrap_or_default())
}

/// Describes a batch, but for the rows, which differ by rank.
pub(crate) fn batch(batch: &Batch) -> Descriptor {
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

/// Describes a call of a pass.
pub(crate) fn call(name: &str) -> Descriptor {
    text(Descriptor::new(), "call", name)
}

fn float(d: Descriptor, name: &'static str, value: f64) -> Descriptor {
    d.field_as(name, value.to_bits(), value)
}

fn debug(d: Descriptor, name: &'static str, value: &dyn Debug) -> Descriptor {
    text(d, name, format_args!("{value:?}"))
}

/// Adds a caller's object: its fingerprint is compared, its `Debug` is shown.
fn identity(
    d: Descriptor,
    name: &'static str,
    fingerprint: Fingerprint,
    value: &dyn Debug,
) -> Descriptor {
    let text: String = format!("{value:?}").chars().take(SHOWN).collect();
    d.field_as(name, fingerprint.finish(), text)
}

fn text(d: Descriptor, name: &'static str, value: impl Display) -> Descriptor {
    let mut text = String::new();
    // writing to a string does not fail
    let written = write!(text, "{value}");
    debug_assert!(written.is_ok());
    let digest = Fingerprint::new().bytes(text.as_bytes()).finish();
    d.field_as(name, digest, text.chars().take(SHOWN).collect::<String>())
}

impl<B: Backend> fmt::Display for Ring<B> {
    /// Writes mask, ranks, layout, route, and what this rank receives and sends: `Causal { offset:
    /// 0 }, 8 ranks, zigzag, relay-down, 7 hops, 1.3 GiB sent forward, 2.6 GiB backward`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let program = &self.plan.program;
        let hops = program.steps.iter().filter(|step| !step.kv.receives.is_empty()).count();
        let forward = program::kv_bytes_sent(&program.steps);
        write!(
            f,
            "{:?}, {} ranks, {}, {}, {hops} hops, {} sent forward",
            self.spec().mask,
            self.ranks,
            self.layout().name(),
            self.route().name(),
            BinaryBytes(forward),
        )?;
        if self.agreed.backward {
            let queries = program::kv_bytes_sent(&self.plan.query_steps);
            let backward = forward + program.gradient_bytes_sent() + queries;
            write!(f, ", {} backward", BinaryBytes(backward))?;
        }
        Ok(())
    }
}

/// A number of bytes in the largest binary unit of which it has one.
struct BinaryBytes(u64);

impl fmt::Display for BinaryBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
        match (self.0.max(1).ilog2() / 10) as usize {
            0 => write!(f, "{} B", self.0),
            unit => {
                write!(f, "{:.1} {}", self.0 as f64 / (1u64 << (10 * unit)) as f64, units[unit - 1])
            }
        }
    }
}

impl<B: Backend> fmt::Debug for Ring<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ring")
            .field("rank", &self.rank)
            .field("ranks", &self.ranks)
            .field("layout", &self.layout().name())
            .field("route", &self.route())
            .finish_non_exhaustive()
    }
}
