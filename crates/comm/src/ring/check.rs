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

    pub(crate) fn inputs<S: Space>(&self, inputs: &Inputs<'_, S>) -> Result<()> {
        check_tensor("q", S::describe(&inputs.q), self.q)?;
        self.keys_values::<S>(&inputs.k, &inputs.v)?;
        check_optional("bias", inputs.bias.as_ref().map(S::describe), self.bias)?;
        self.sinks::<S>(inputs.sinks.as_ref())
    }

    pub(crate) fn keys_values<S: Space>(&self, k: &S::View<'_>, v: &S::View<'_>) -> Result<()> {
        check_tensor("k", S::describe(k), self.k)?;
        check_tensor("v", S::describe(v), self.v)
    }

    fn sinks<S: Space>(&self, sinks: Option<&S::View<'_>>) -> Result<()> {
        check_optional("softmax_aux", sinks.map(S::describe), self.sinks)
    }

    /// Checks the queries and sinks of a KV cache.
    pub(crate) fn queries<S: Space>(
        &self,
        q: &S::View<'_>,
        sinks: Option<&S::View<'_>>,
    ) -> Result<()> {
        check_tensor("q", S::describe(q), self.q)?;
        self.sinks::<S>(sinks)
    }

    /// Checks the results of a KV cache.
    pub(crate) fn results<S: Space>(
        &self,
        out: &S::ViewMut<'_>,
        lse: &S::ViewMut<'_>,
    ) -> Result<()> {
        check_tensor("out", S::describe_mut(out), self.out)?;
        check_tensor("lse", S::describe_mut(lse), self.lse)
    }

    pub(crate) fn outputs<S: Space>(&self, outputs: &Outputs<'_, S>) -> Result<()> {
        let unnormalized = (!self.normalize).then_some(self.lse);
        let [max, sum] = [&outputs.max, &outputs.sum].map(|of| of.as_ref().map(S::describe_mut));
        // of a normalised output: both, or none
        let wanted = if max.or(sum).is_some() { Some(self.lse) } else { unnormalized };
        check_tensor("out", S::describe_mut(&outputs.out), self.out)?;
        check_tensor("lse", S::describe_mut(&outputs.lse), self.lse)?;
        check_optional("max", max, wanted)?;
        check_optional("sum", sum, wanted)?;
        check_optional("ties", outputs.ties.as_ref().map(S::describe_mut), unnormalized)?;
        self.out_residual(outputs.out_residual.as_ref().map(S::describe_mut))
    }

    pub(crate) fn backward_inputs<S: Space>(&self, inputs: &BackwardInputs<'_, S>) -> Result<()> {
        self.inputs(&inputs.forward)?;
        let unnormalized = (!self.normalize).then_some(self.lse);
        let sum = inputs.sum.as_ref().map(S::describe);
        // of a normalised output `max` may be lse, without a sum
        let name = if self.normalize && sum.is_none() { "lse" } else { "max" };
        check_tensor("out", S::describe(&inputs.out), self.out)?;
        check_tensor(name, S::describe(&inputs.max), self.lse)?;
        check_optional("sum", sum, sum.map(|_| self.lse).or(unnormalized))?;
        check_optional("ties", inputs.ties.as_ref().map(S::describe), unnormalized)?;
        self.out_residual(inputs.out_residual.as_ref().map(S::describe))?;
        check_tensor("dout", S::describe(&inputs.dout), self.dout)?;
        inputs
            .dlse
            .as_ref()
            .map_or(Ok(()), |dlse| check_tensor("dlse", S::describe(dlse), self.lse))
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

    pub(crate) fn gradients<S: Space>(&self, gradients: &Gradients<'_, S>) -> Result<()> {
        check_tensor("dq", S::describe_mut(&gradients.dq), self.dq)?;
        check_tensor("dk", S::describe_mut(&gradients.dk), self.k)?;
        check_tensor("dv", S::describe_mut(&gradients.dv), self.v)?;
        check_optional("dbias", gradients.dbias.as_ref().map(S::describe_mut), self.bias)?;
        check_optional("dsoftmax_aux", gradients.dsinks.as_ref().map(S::describe_mut), self.sinks)
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
