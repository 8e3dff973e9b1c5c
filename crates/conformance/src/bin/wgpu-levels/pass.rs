//! One rank's plan, with all tensors on the device.

use annulus::{
    Attention, DType, Dims, Ring, RingOptions,
    comm::{Staged, threads},
};
use annulus_core::{Error, Gradients, Inputs, Outputs, Result, Saved};
use annulus_wgpu::{Copier, Gpu, Tensor, Wgpu, WgpuSpace};
use ndarray::Array4;

/// A plan, its inputs and what it writes.
pub(crate) struct Pass {
    ring: Ring<Wgpu>,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    out: Tensor,
    lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
}

impl Pass {
    /// As many key heads as query heads, of random numbers of unit variance.
    pub(crate) fn new(gpu: &Gpu, heads: usize, len: usize, dim: usize, dtype: DType, causal: bool) -> Result<Self> {
        let transport = threads::ring(1).into_iter().next().ok_or_else(|| Error::invalid("ranks", 0, 1))?;
        let attention = Attention::new().dtype(dtype);
        let attention = if causal { attention.causal() } else { attention };
        let transport = Box::new(Staged::<_, WgpuSpace>::new(transport, Copier::new(gpu.clone())));
        let options = RingOptions { backward: true, ..RingOptions::default() };
        let ring = Ring::new(Wgpu::new(gpu.clone()), transport, attention.spec(Dims::new(1, len, heads, dim)), options)?;
        let shape = [1, len, heads, dim];
        // numbers that look like any: the logits of a row differ
        let mut state = 1_u64;
        let mut random = || {
            let numbers = Array4::from_shape_simple_fn(shape, || {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                ((state >> 40) as f64 / f64::from(1 << 24) - 0.5) * 12_f64.sqrt()
            });
            Tensor::upload_rounded(gpu, numbers.view(), dtype)
        };
        let (q, k, v, dout) = (random()?, random()?, random()?, random()?);
        let zeros = || Tensor::zeros(gpu, shape, dtype);
        let lse = Tensor::zeros(gpu, [1, heads, len, 1], DType::F32)?;
        Ok(Self { ring, q, k, v, dout, out: zeros()?, lse, dq: zeros()?, dk: zeros()?, dv: zeros()? })
    }

    pub(crate) fn forward(&mut self) -> Result<()> {
        let inputs = Inputs { q: &self.q, k: &self.k, v: &self.v, bias: None, sinks: None };
        let mut outputs = Outputs { out: &mut self.out, lse: &mut self.lse, max: None, sum: None, ties: None };
        self.ring.forward(&inputs, &mut outputs).map(drop)
    }

    /// Of what the last forward pass wrote.
    pub(crate) fn backward(&mut self) -> Result<()> {
        let inputs = Inputs { q: &self.q, k: &self.k, v: &self.v, bias: None, sinks: None };
        let saved = Saved { out: &self.out, lse: &self.lse, max: None, ties: None, dout: &self.dout, dlse: None };
        let mut gradients = Gradients { dq: &mut self.dq, dk: &mut self.dk, dv: &mut self.dv, dbias: None, dsinks: None };
        self.ring.backward(&inputs, &saved, &mut gradients).map(drop)
    }
}
