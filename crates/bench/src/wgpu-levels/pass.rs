//! One problem with all tensors on the device, and a rank's plan for it at every level.

use annulus::{
    Attention, DType, Dims, Ring, RingOptions,
    comm::{Staged, threads},
};
use annulus_core::{BackwardInputs, Error, Gradients, Inputs, Outputs, Result};
use annulus_wgpu::{Copier, Gpu, Tensor, Wgpu, WgpuSpace};
use ndarray::Array4;

/// Sizes, element type and mask.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Problem {
    pub(crate) heads: usize,
    pub(crate) len: usize,
    pub(crate) dim: usize,
    pub(crate) dtype: DType,
    pub(crate) causal: bool,
}

impl Problem {
    /// Useful FLOPs of a forward pass; a backward pass has 2.5 times as many.
    pub(crate) fn forward_flops(&self) -> f64 {
        4.0 * self.heads as f64 * (self.len as f64).powi(2) * self.dim as f64
            / if self.causal { 2.0 } else { 1.0 }
    }
}

/// A pass to be timed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum What {
    Forward,
    /// Reads the outputs of the last forward pass.
    Backward,
}

/// Plans that share a device, inputs and outputs.
pub(crate) struct Passes {
    rings: Vec<Ring<Wgpu>>,
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

impl Passes {
    /// Creates a plan for each of `gpus`, one device at different levels. There are as many KV
    /// heads as query heads; inputs are uniform random numbers of unit variance.
    pub(crate) fn new(gpus: &[&Gpu], problem: &Problem) -> Result<Self> {
        let Problem { heads, len, dim, dtype, causal } = *problem;
        let attention = Attention::new().dtype(dtype);
        let attention = attention.causal(causal);
        let ring = |gpu: &Gpu| {
            let transport =
                threads::ring(1).into_iter().next().ok_or_else(|| Error::invalid("ranks", 0, 1))?;
            let transport =
                Box::new(Staged::<_, WgpuSpace>::new(transport, Copier::new(gpu.clone())));
            let options = RingOptions { backward: true, ..RingOptions::default() };
            Ring::new(
                Wgpu::new(gpu.clone()),
                transport,
                attention.spec(Dims::new(1, len, heads, dim)),
                options,
            )
        };
        let rings = gpus.iter().map(|gpu| ring(gpu)).collect::<Result<Vec<_>>>()?;
        let gpu = *gpus.first().ok_or_else(|| Error::invalid("levels", 0, "at least one"))?;
        let shape = [1, len, heads, dim];
        // random, so that the scores of a row differ
        let mut state = 1_u64;
        let mut random = || {
            let numbers = Array4::from_shape_simple_fn(shape, || {
                state = state
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1_442_695_040_888_963_407);
                ((state >> 40) as f64 / f64::from(1 << 24) - 0.5) * 12_f64.sqrt()
            });
            Tensor::upload_rounded(gpu, numbers.view(), dtype)
        };
        let q = random()?;
        let k = random()?;
        let v = random()?;
        let dout = random()?;
        let zeros = || Tensor::zeros(gpu, shape, dtype);
        let lse = Tensor::zeros(gpu, [1, heads, len, 1], DType::F32)?;
        Ok(Self {
            rings,
            q,
            k,
            v,
            dout,
            out: zeros()?,
            lse,
            dq: zeros()?,
            dk: zeros()?,
            dv: zeros()?,
        })
    }

    /// Queues a pass of plan number `plan`.
    pub(crate) fn run(&mut self, plan: usize, what: What) -> Result<()> {
        let ring = self
            .rings
            .get_mut(plan)
            .ok_or_else(|| Error::invalid("plan", plan, "a smaller number"))?;
        let inputs = Inputs { q: &self.q, k: &self.k, v: &self.v, bias: None, sinks: None };
        match what {
            What::Forward => {
                let mut outputs = Outputs {
                    out: &mut self.out,
                    lse: &mut self.lse,
                    max: None,
                    sum: None,
                    ties: None,
                    out_residual: None,
                };
                ring.forward(&inputs, &mut outputs).map(drop)
            }
            What::Backward => {
                let inputs = BackwardInputs {
                    forward: inputs,
                    out: &self.out,
                    max: &self.lse,
                    sum: None,
                    ties: None,
                    dout: &self.dout,
                    dlse: None,
                    out_residual: None,
                };
                let mut gradients = Gradients {
                    dq: &mut self.dq,
                    dk: &mut self.dk,
                    dv: &mut self.dv,
                    dbias: None,
                    dsinks: None,
                };
                ring.backward(&inputs, &mut gradients).map(drop)
            }
        }
    }
}
