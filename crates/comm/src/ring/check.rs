//! Checks before anything moves: of a call's tensors against the plan, and by descriptors of
//! collective calls what must be equal on all ranks, field by field, so that an error names the
//! difference. Also the text of a plan.

use std::fmt::{self, Debug, Display, Write};

use annulus_core::{
    Backend, BackwardInputs, BackwardMode, Batch, Capabilities, DType, DenseMask, Error,
    Fingerprint, Gradients, Inputs, Outputs, Placement, RankShard, Result, Space, Spec,
    TangentInputs, TangentOutputs, Transport,
};
use annulus_plan::{Machine, Strategy};

use super::{Ring, RingOptions, program, reduce};
use crate::agreement::{self, Descriptor};

/// Dtype and shape of a tensor.
type Described = (DType, [usize; 4]);

/// Shapes of this rank's tensors.
pub(crate) struct Shapes {
    q: Described,
    k: Described,
    v: Described,
    out: Described,
    dq: Described,
    dout: Described,
    lse: Described,
    bias: Option<Described>,
    sinks: Option<Described>,
    normalize: bool,
    /// Statistics by row and by head.
    statistics: Option<[Described; 2]>,
    /// Name of the backend if it has no rounding residual of out.
    no_out_residual: Option<&'static str>,
}

impl Shapes {
    pub(crate) fn of(shard: &RankShard) -> Self {
        Self::new(&shard.spec, shard.queries.len(), shard.keys.len())
    }

    /// Returns the shapes of the tensors of a rank with these rows.
    pub(crate) fn new(spec: &Spec, q_rows: usize, kv_rows: usize) -> Self {
        let dims = &spec.dims;
        let dtype = spec.dtype;
        let sums = spec.dtype.accumulator();
        Self {
            q: (dtype, [dims.batch, q_rows, dims.q_heads, dims.head_dim]),
            k: (dtype, [dims.batch, kv_rows, dims.kv_heads, dims.head_dim]),
            v: (dtype, [dims.batch, kv_rows, dims.kv_heads, dims.value_dim]),
            out: (spec.results_dtype(), [dims.batch, q_rows, dims.q_heads, dims.value_dim]),
            dq: (spec.results_dtype(), [dims.batch, q_rows, dims.q_heads, dims.head_dim]),
            dout: (dtype, [dims.batch, q_rows, dims.q_heads, dims.value_dim]),
            lse: (sums, [dims.batch, dims.q_heads, q_rows, 1]),
            bias: spec.bias.map(|[b, h, q, k]| (sums, [b, h, if q == 1 { 1 } else { q_rows }, k])),
            sinks: spec.sinks.map(|sinks| {
                (sums, [if sinks.per_head { dims.q_heads } else { 1 }, sinks.count, 1, 1])
            }),
            normalize: spec.normalize,
            statistics: spec.statistics.then(|| {
                let of_rows = [dims.batch, dims.q_heads, q_rows, Spec::SCORE_STATISTICS];
                [(sums, of_rows), (sums, [dims.q_heads, Spec::SCORE_STATISTICS, 2, 1])]
            }),
            no_out_residual: None,
        }
    }

    /// Refuses `out_residual` if `no_out_residual` names a backend, which has none.
    pub(crate) const fn on(self, no_out_residual: Option<&'static str>) -> Self {
        Self { no_out_residual, ..self }
    }

    pub(crate) fn inputs(&self, got: &Inputs<Described>) -> Result<()> {
        check_tensor("q", got.q, self.q)?;
        self.keys_values(got.k, got.v)?;
        check_optional("bias", got.bias, self.bias)?;
        check_optional("softmax_aux", got.sinks, self.sinks)
    }

    pub(crate) fn keys_values(&self, k: Described, v: Described) -> Result<()> {
        check_tensor("k", k, self.k)?;
        check_tensor("v", v, self.v)
    }

    /// Checks the queries and sinks of a KV cache.
    pub(crate) fn queries(&self, q: Described, sinks: Option<Described>) -> Result<()> {
        check_tensor("q", q, self.q)?;
        check_optional("softmax_aux", sinks, self.sinks)
    }

    /// Checks the results of a KV cache.
    pub(crate) fn results(&self, out: Described, lse: Described) -> Result<()> {
        check_tensor("out", out, self.out)?;
        check_tensor("lse", lse, self.lse)
    }

    pub(crate) fn outputs(&self, got: &Outputs<Described>) -> Result<()> {
        let unnormalized = (!self.normalize).then_some(self.lse);
        // of a normalised output: both, or none
        let wanted = if got.max.or(got.sum).is_some() { Some(self.lse) } else { unnormalized };
        check_tensor("out", got.out, self.out)?;
        check_tensor("lse", got.lse, self.lse)?;
        check_optional("max", got.max, wanted)?;
        check_optional("sum", got.sum, wanted)?;
        check_optional("ties", got.ties, unnormalized)?;
        let [statistics, head_statistics] = self.statistics.map_or([None; 2], |of| of.map(Some));
        check_optional("statistics", got.statistics, statistics)?;
        check_optional("head_statistics", got.head_statistics, head_statistics)?;
        self.out_residual(got.out_residual)
    }

    pub(crate) fn backward_inputs(&self, got: &BackwardInputs<Described>) -> Result<()> {
        self.inputs(&got.forward)?;
        let unnormalized = (!self.normalize).then_some(self.lse);
        // of a normalised output `max` may be lse, without a sum
        let name = if self.normalize && got.sum.is_none() { "lse" } else { "max" };
        check_tensor("out", got.out, self.out)?;
        check_tensor(name, got.max, self.lse)?;
        check_optional("sum", got.sum, got.sum.map(|_| self.lse).or(unnormalized))?;
        check_optional("ties", got.ties, unnormalized)?;
        self.out_residual(got.out_residual)?;
        check_tensor("dout", got.dout, self.dout)?;
        check_optional("dlse", got.dlse, got.dlse.map(|_| self.lse))
    }

    /// Checks the rounding residual of out.
    fn out_residual(&self, got: Option<Described>) -> Result<()> {
        let Some(got) = got else { return Ok(()) };
        if !has_residual(self.out.0) {
            let want = format!("nothing: out of {} is not rounded to 16 bits", self.out.0);
            return Err(Error::invalid("out_residual", describe(got), want));
        }
        match self.no_out_residual {
            Some(backend) => {
                Err(Error::unsupported("out_residual", format!("the {backend} backend")))
            }
            None => check_tensor("out_residual", got, self.out),
        }
    }

    /// Checks a JVP or, with `gradients`, a double backward.
    pub(crate) fn tangents(
        &self,
        inputs: &TangentInputs<Described>,
        outputs: &TangentOutputs<Described>,
        gradients: Option<&Gradients<Described>>,
    ) -> Result<()> {
        self.tangent_inputs(inputs)?;
        self.tangent_outputs(outputs)?;
        match gradients {
            Some(_) if inputs.dout.is_none() => {
                Err(Error::invalid("dout", "nothing", "a tensor shaped as out"))
            }
            Some(gradients) => self.gradients(gradients),
            None if inputs.dout.is_some() || inputs.dlse.is_some() => {
                Err(Error::invalid("dout", "a tensor", "nothing: it is not of a JVP"))
            }
            None => Ok(()),
        }
    }

    fn tangent_inputs(&self, got: &TangentInputs<Described>) -> Result<()> {
        self.inputs(&got.primal)?;
        let Inputs { q, k, v, bias, sinks } = got.tangent;
        check_tensor("tangent of q", q, self.q)?;
        check_tensor("tangent of k", k, self.k)?;
        check_tensor("tangent of v", v, self.v)?;
        // absent ones are 0
        check_optional("tangent of bias", bias, self.bias.filter(|_| bias.is_some()))?;
        check_optional("tangent of softmax_aux", sinks, self.sinks.filter(|_| sinks.is_some()))?;
        check_optional("dout", got.dout, got.dout.map(|_| self.dout))?;
        check_optional("dlse", got.dlse, got.dlse.map(|_| self.lse))
    }

    fn tangent_outputs(&self, got: &TangentOutputs<Described>) -> Result<()> {
        check_tensor("tangent of out", got.out_tangent, self.out)?;
        check_tensor("tangent of lse", got.lse_tangent, self.lse)?;
        check_optional("out", got.out, got.out.map(|_| self.out))?;
        check_optional("lse", got.lse, got.lse.map(|_| self.lse))
    }

    pub(crate) fn gradients(&self, got: &Gradients<Described>) -> Result<()> {
        check_tensor("dq", got.dq, self.dq)?;
        check_tensor("dk", got.dk, self.k)?;
        check_tensor("dv", got.dv, self.v)?;
        check_optional("dbias", got.dbias, self.bias)?;
        check_optional("dsoftmax_aux", got.dsinks, self.sinks)
    }
}

/// Returns true if out of this type has a rounding residual: in 16 bits.
pub(crate) const fn has_residual(dtype: DType) -> bool {
    matches!(dtype, DType::Bf16 | DType::F16)
}

/// Refuses a JVP or, if `is_double`, a double backward of a plan that is not made for it.
pub(crate) fn plan_of_tangents(options: [bool; 2], is_double: bool) -> Result<()> {
    let [second_derivatives, backward] = options;
    if !second_derivatives {
        let want = "true: it was not set when the plan was made";
        return Err(Error::invalid("second_derivatives", false, want));
    }
    if is_double && !backward { Err(forward_only()) } else { Ok(()) }
}

/// Returns the error of a backward pass of a plan without one.
pub(crate) fn forward_only() -> Error {
    Error::invalid("backward", "a plan made for forward only", "a plan made with backward")
}

/// Checks dtype and shape of a tensor.
fn check_tensor(name: &str, got: Described, want: Described) -> Result<()> {
    if got == want { Ok(()) } else { Err(Error::invalid(name, describe(got), describe(want))) }
}

/// Checks a tensor that is present if and only if the plan has one.
fn check_optional(name: &str, got: Option<Described>, want: Option<Described>) -> Result<()> {
    match (got, want) {
        (Some(got), Some(want)) => check_tensor(name, got, want),
        (None, None) => Ok(()),
        (Some(got), None) => Err(Error::invalid(name, describe(got), "nothing: the plan has none")),
        (None, Some(want)) => Err(Error::invalid(name, "nothing", describe(want))),
    }
}

fn describe((dtype, shape): Described) -> String {
    format!("{dtype} {shape:?}")
}

/// Refuses what a two-pass backward does not support over several ranks: the bias and mask rows of
/// a query are not sent with it, except in the reproducible order.
pub(crate) fn two_pass(spec: &Spec, ranks: usize) -> Result<()> {
    if sends_bare_queries(spec, ranks) && spec.bias.is_some_and(|shape| shape[2] != 1) {
        return Err(Error::unsupported(
            "bias with a query axis in a two-pass backward over several ranks",
            "the ring",
        ));
    }
    Ok(())
}

/// True if queries are sent without their bias and mask rows.
fn sends_bare_queries(spec: &Spec, ranks: usize) -> bool {
    spec.backward == BackwardMode::TwoPass && ranks > 1 && spec.leaf_rows.is_none()
}

/// As [`two_pass`], of a batch.
pub(crate) fn two_pass_mask(spec: &Spec, batch: &Batch, ranks: usize) -> Result<()> {
    if batch.attention_mask.is_some() && sends_bare_queries(spec, ranks) {
        let what = "attention_mask in a two-pass backward over several ranks";
        return Err(Error::unsupported(what, "the ring"));
    }
    Ok(())
}

/// Refuses a reproducible attention that the backend does not compute.
pub(crate) fn reproducible(spec: &Spec, capabilities: &Capabilities) -> Result<()> {
    let Some(rows) = spec.leaf_rows else { return Ok(()) };
    let Capabilities { name, kv_tile, .. } = capabilities;
    if !capabilities.reproducible {
        return Err(Error::unsupported("reproducible", format!("the {name} backend")));
    }
    if rows % (*kv_tile).max(1) != 0 {
        return Err(Error::unsupported(
            format!("leaves of {rows} rows"),
            format!("the {name} backend, whose KV tile has {kv_tile} rows"),
        ));
    }
    Ok(())
}

/// Refuses second derivatives that the backend or the ring does not compute.
pub(crate) fn second_derivatives(
    spec: &Spec,
    options: &RingOptions,
    capabilities: &Capabilities,
) -> Result<()> {
    if !options.second_derivatives {
        return Ok(());
    }
    let by = if !capabilities.second_derivatives {
        format!("the {} backend", capabilities.name)
    } else if spec.leaf_rows.is_some() {
        "the reproducible order (reproducible)".to_owned()
    } else if !spec.normalize {
        "an output that is not normalised (unnormalized)".to_owned()
    } else {
        return Ok(());
    };
    Err(Error::unsupported("second_derivatives", by))
}

/// Refuses a bias table that the backend does not compute.
pub(crate) fn bias_table(spec: &Spec, capabilities: &Capabilities) -> Result<()> {
    if spec.bias_table.is_some() && !capabilities.bias_table {
        return Err(Error::unsupported("bias_table", format!("the {} backend", capabilities.name)));
    }
    Ok(())
}

/// Refuses row statistics that the backend or the ring does not compute.
pub(crate) fn statistics<S: Space>(
    spec: &Spec,
    options: &RingOptions,
    capabilities: &Capabilities,
) -> Result<()> {
    if !spec.statistics {
        return Ok(());
    }
    let by = if !capabilities.statistics {
        format!("the {} backend", capabilities.name)
    } else if !S::HOST_TENSORS {
        "tensors in device memory".to_owned()
    } else if options.second_derivatives {
        "a plan with second derivatives (second_derivatives)".to_owned()
    } else {
        return Ok(());
    };
    Err(Error::unsupported("statistics", by))
}

/// Refuses a ring that would have to sum gradients in device memory over ranks.
pub(crate) fn reduction<S: Space>(spec: &Spec, options: &RingOptions, ranks: usize) -> Result<()> {
    if !S::HOST_TENSORS && reduce::is_needed(spec, options, ranks) {
        return Err(Error::unsupported(
            "the sum over ranks of dsinks, or of dbias broadcast over queries, in device memory \
             (set local_gradients and sum the parts, or pass tensors in host memory)",
            "the ring",
        ));
    }
    Ok(())
}

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

/// Agrees with all ranks on a plan, in all-gather 0 of the transport. `checked` has the
/// capabilities of the backend; `page_rows` is 0 but for a KV cache.
pub(crate) fn agree_on_plan<S: Space>(
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
    let table = spec.bias_table.as_ref();
    let of_table = table.map(|table| table.fingerprint(Fingerprint::new().number(1)));
    let d = identity(d, "bias_table", of_table.unwrap_or_default(), &spec.bias_table);
    let function = spec.bias_function.as_ref();
    let fingerprint = function.map(|function| function.fingerprint(Fingerprint::new().number(1)));
    let fingerprint = fingerprint.unwrap_or_default();
    let d = identity(d, "bias_function", fingerprint, &spec.bias_function);
    let d = debug(d, "bias_order", &spec.bias_order);
    let d = debug(d, "softmax_aux count", &spec.sinks.map(|sinks| sinks.count));
    let d = debug(d, "softmax_aux per_head", &spec.sinks.map(|sinks| sinks.per_head));
    let d = d.field("normalize_output", u64::from(spec.normalize));
    let d = d.field("statistics", u64::from(spec.statistics));
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
        .field("second_derivatives", u64::from(options.second_derivatives))
        .field("local_gradients", u64::from(options.local_gradients))
        .field("receive_ahead", options.receive_ahead_steps() as u64)
        .largest("kv_tile", capabilities.kv_tile)
        .largest("kv_block_size", options.kv_block_size.unwrap_or_default())
}

/// Describes a batch, but for the rows, which differ by rank.
pub(crate) fn describe_batch(batch: &Batch) -> Descriptor {
    let d = Descriptor::new()
        .field("q_segment_ids given", u64::from(batch.q_segment_ids.is_some()))
        .field("kv_segment_ids given", u64::from(batch.kv_segment_ids.is_some()))
        .field("q_positions given", u64::from(batch.q_positions.is_some()))
        .field("kv_positions given", u64::from(batch.kv_positions.is_some()));
    let d = debug(d, "cum_seqlens_q", &batch.cum_seqlens_q);
    let d = debug(d, "cum_seqlens_k", &batch.cum_seqlens_k);
    let shape = batch.attention_mask.as_ref().map(DenseMask::shape);
    let d = debug(d, "attention_mask", &shape.map(|[batch, heads, _, keys]| [batch, heads, keys]));
    let lists = batch.key_lists.as_ref();
    let shape = lists.map(|lists| lists.shape()).map(|[batch, groups, _]| [batch, groups]);
    let d = debug(d, "key_lists", &shape);
    d.field("key_list_bias given", u64::from(lists.is_some_and(|lists| lists.bias().is_some())))
}

/// Describes a call of a pass.
pub(crate) fn describe_call(name: &str) -> Descriptor {
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
