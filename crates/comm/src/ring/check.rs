//! Checks of a call's tensors against the plan, before anything moves.

use annulus_core::{
    BackwardInputs, BackwardMode, Batch, Capabilities, DType, Error, Gradients, Inputs, Outputs,
    RankShard, Result, Space, Spec,
};

use super::{RingOptions, reduce};

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
            "a bias tensor with a query axis in a two-pass backward over several ranks",
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
    if sends_bare_queries(spec, ranks) && batch.attention_mask.is_some() {
        return Err(Error::unsupported(
            "attention_mask in a two-pass backward over several ranks",
            "the ring",
        ));
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
