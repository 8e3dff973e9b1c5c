//! One problem with all tensors on the device, and a rank's plan for it at every level.
//! And the comparison of a level with the CPU backend.

use annulus::{
    Attention, DType, Dims, Element, Plan, Result, Tensors,
    backend::{Cpu, wgpu_rank},
    comm::{
        Staged,
        ring::{Ring, RingOptions},
        threads,
    },
};
use annulus_bench::{
    draw, uniform, {Results, Verification, have_same_bits},
};
use annulus_core::{BackwardInputs, Error, Gradients, Inputs, Outputs};
use annulus_wgpu::{Copier, Gpu, Tensor, Wgpu, WgpuSpace};
use half::{bf16, f16};
use ndarray::Array4;
use serde_json::json;

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
        let mut uniform = uniform(1);
        let mut random = || {
            let number = || (uniform() - 0.5) * 12_f64.sqrt();
            let numbers = Array4::from_shape_simple_fn(shape, number);
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
                    statistics: None,
                    head_statistics: None,
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

/// Computes out, lse, dq, dk and dv.
fn compute<T: Element>(plan: &mut Plan, numbers: &[Array4<f64>; 4]) -> Result<Results> {
    let [q, k, v, dout] = numbers.each_ref().map(|numbers| numbers.mapv(T::from_f64));
    let tensors = Tensors::new(q.view(), k.view(), v.view());
    let forward = plan.forward(&tensors)?;
    let backward = plan.backward(&tensors, &forward, dout.view(), None)?;
    let widened = |array: &Array4<T>| array.iter().map(|&x| T::to_f64(x)).collect::<Vec<_>>();
    Ok([
        widened(&forward.out),
        forward.lse.iter().map(|&x| x.to_f64()).collect(),
        widened(&backward.dq),
        widened(&backward.dk),
        widened(&backward.dv),
    ])
}

/// Computes twice on the device, and returns true beside the results if their bits are equal.
fn compute_twice<T: Element>(
    gpu: &Gpu,
    attention: &Attention,
    dims: Dims,
    numbers: &[Array4<f64>; 4],
) -> Result<(Results, bool)> {
    let attention = attention.clone().dtype(T::DTYPE);
    let (backend, transport) = wgpu_rank(gpu, threads::ring(1).remove(0));
    let mut plan = Plan::with_backend(&attention, dims, backend, transport)?;
    let first = compute::<T>(&mut plan, numbers)?;
    let second = compute::<T>(&mut plan, numbers)?;
    let same = have_same_bits(&first, &second);
    Ok((first, same))
}

/// Verifies the chosen masks of one element type, length and dim. Prints a line for each; false if
/// one is wrong.
pub(crate) fn verify(gpu: &Gpu, problem: &Verification<'_>) -> Result<bool> {
    let Verification { dtype, len, dim, .. } = *problem;
    let (run, bound): (fn(&Gpu, &Attention, Dims, &_) -> _, f64) = match dtype {
        DType::F32 => (compute_twice::<f32>, 2e-5),
        DType::Bf16 => (compute_twice::<bf16>, 5e-3),
        DType::F16 => (compute_twice::<f16>, 1e-3),
        DType::F64 => return Err(Error::unsupported("dtype f64", "wgpu")),
    };
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let mut line = serde_json::Map::new();
    line.insert("device".into(), json!(gpu.name()));
    line.insert("level".into(), json!(gpu.level().name()));
    line.insert("query_tile".into(), json!(gpu.query_tile().name()));
    line.insert("dim".into(), json!(dim));
    line.insert("len".into(), json!(len));
    problem.run(bound, &line, |shape, reference| {
        let numbers = draw(shape.dims, dtype);
        let (got, same_bits) = run(gpu, &shape.attention, shape.dims, &numbers)?;
        let attention = reference.clone().dtype(DType::F32);
        let transport = threads::ring(1).remove(0);
        let mut plan = Plan::with_backend(&attention, shape.dims, Cpu::new(threads)?, transport)?;
        Ok((got, same_bits, compute::<f32>(&mut plan, &numbers)?))
    })
}
