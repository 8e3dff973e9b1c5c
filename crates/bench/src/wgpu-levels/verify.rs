//! Comparison of a level with the CPU backend in f32, from the same inputs.

use annulus::{
    Attention, Cpu, DType, Dims, Element, Plan, Result, Tensors, comm::threads, devices::wgpu_rank,
};
use annulus_core::Error;
use annulus_wgpu::Gpu;
use half::{bf16, f16};
use ndarray::Array4;
use serde_json::json;

use crate::comparison::{NAMES, Shape, Verification, are_within, errors, shapes};

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
