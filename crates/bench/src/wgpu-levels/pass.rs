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
use annulus_core::{BackwardInputs, Error, Gradients, Inputs, Outputs};
use annulus_wgpu::{Copier, Gpu, Tensor, Wgpu, WgpuSpace};
use half::{bf16, f16};
use ndarray::Array4;
use serde_json::json;

use crate::comparison::{NAMES, Shape, Verification, are_within, errors, shapes};

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

/// Inputs q, k, v and dout with a standard normal distribution, rounded to `dtype`.
fn draw(dims: Dims, dtype: DType) -> [Array4<f64>; 4] {
    let Dims { batch, q_len, kv_len, q_heads, kv_heads, head_dim, value_dim } = dims;
    let mut state = 1_u64;
    let mut uniform = || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 40) as f64 + 0.5) / f64::from(1 << 24)
    };
    // Box and Muller 1958
    let mut normal = || {
        let (radius, angle) = (uniform(), uniform());
        dtype.round((-2.0 * radius.ln()).sqrt() * (std::f64::consts::TAU * angle).cos())
    };
    [
        (batch, q_len, q_heads, head_dim),
        (batch, kv_len, kv_heads, head_dim),
        (batch, kv_len, kv_heads, value_dim),
        (batch, q_len, q_heads, value_dim),
    ]
    .map(|shape| Array4::from_shape_simple_fn(shape, &mut normal))
}

/// Computes out, lse, dq, dk and dv.
fn compute<T: Element>(plan: &mut Plan, numbers: &[Array4<f64>; 4]) -> Result<[Vec<f64>; 5]> {
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
) -> Result<([Vec<f64>; 5], bool)> {
    let attention = attention.clone().dtype(T::DTYPE);
    let (backend, transport) = wgpu_rank(gpu, threads::ring(1).remove(0));
    let mut plan = Plan::with_backend(&attention, dims, backend, transport)?;
    let first = compute::<T>(&mut plan, numbers)?;
    let second = compute::<T>(&mut plan, numbers)?;
    let bits =
        |numbers: &[Vec<f64>; 5]| numbers.iter().flatten().map(|x| x.to_bits()).collect::<Vec<_>>();
    let same = bits(&first) == bits(&second);
    Ok((first, same))
}

/// Verifies the chosen masks of one element type, length and dim. Prints a line for each; false if
/// one is wrong.
pub(crate) fn verify(gpu: &Gpu, problem: &Verification<'_>) -> Result<bool> {
    let &Verification { dtype, len, heads, dim, masks, mistake } = problem;
    let (run, bound): (fn(&Gpu, &Attention, Dims, &_) -> _, f64) = match dtype {
        DType::F32 => (compute_twice::<f32>, 2e-5),
        DType::Bf16 => (compute_twice::<bf16>, 5e-3),
        DType::F16 => (compute_twice::<f16>, 1e-3),
        DType::F64 => return Err(Error::unsupported("f64", "wgpu")),
    };
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let mut all_right = true;
    let references = shapes(len, heads, dim, mistake);
    for (shape, reference) in shapes(len, heads, dim, 0).into_iter().zip(references) {
        let Shape { name, attention, dims } = shape;
        if !masks.contains(&name) {
            continue;
        }
        let numbers = draw(dims, dtype);
        let (got, same_bits) = run(gpu, &attention, dims, &numbers)?;
        let transport = threads::ring(1).remove(0);
        let attention = reference.attention.dtype(DType::F32);
        let mut plan = Plan::with_backend(&attention, dims, Cpu::new(threads)?, transport)?;
        let want = compute::<f32>(&mut plan, &numbers)?;
        let mut right = same_bits;
        let mut found = serde_json::Map::new();
        for (index, name) in NAMES.into_iter().enumerate() {
            let is_lse = name == "lse";
            let errors = errors(&got[index], &want[index], if is_lse { 1 } else { dim });
            // lse stays f32: only the order of sums and e^x differ
            let bound = if is_lse { bound.min(1e-4) } else { bound };
            right &= are_within(errors, bound);
            found.insert(name.into(), json!(errors.map(|error| format!("{error:.1e}"))));
        }
        all_right &= right;
        println!(
            "{}",
            json!({
                "what": "verify", "device": gpu.name(), "level": gpu.level().name(),
                "query_tile": gpu.query_tile().name(),
                "dtype": dtype.name(), "dim": dim, "len": len, "mask": name,
                "errors": found, "same_bits": same_bits, "ok": right,
            })
        );
    }
    Ok(all_right)
}
