//! Exact attention with gradients on [candle](candle_core) tensors, in one process or sharded over
//! the ranks of MPI.
//!
//! ```text
//! out = softmax(scale·QKᵀ + bias, masked, with sinks)·V         memory O(sequence length)
//! ```
//!
//! [`attention`] is one operator of candle's graph: `loss.backward()` gives the gradients of q, k,
//! v, of the bias and of the sinks. [`Options`] has the mathematics ([`annulus::Attention`]), the
//! tensors other than q, k and v, and the ranks.
//!
//! # Examples
//! ```
//! use annulus_candle::{Options, annulus::Attention, attention};
//! use candle_core::{Device, Tensor, Var};
//!
//! let q = Var::randn(0f32, 1.0, (1, 512, 8, 64), &Device::Cpu)?;     // [batch, seq, heads, dim]
//! let k = Tensor::randn(0f32, 1.0, (1, 512, 2, 64), &Device::Cpu)?;  // 4 query heads a KV head
//! let v = k.affine(0.5, 0.1)?;
//! let options = Options::new(Attention::new().causal(true).sliding_window(127, 0));
//! let out = attention(&q, &k, &v, &options)?;
//! let gradients = out.sqr()?.sum_all()?.backward()?;
//! assert_eq!(gradients.get(&q).unwrap().dims(), q.dims());
//! # Ok::<(), candle_core::Error>(())
//! ```
#![forbid(unsafe_code)]

mod operator;
mod options;

pub use annulus;
use candle_core::{DType, Result, Tensor};
pub use options::Options;

/// Computes attention of queries `q` over keys `k` and values `v`.
///
/// The tensors are read with the strides that they have. Each KV head serves q_heads / kv_heads
/// query heads without being repeated in memory. The gradients of the tensors that candle tracks
/// are computed in one backward pass, from out and the softmax statistics, which the graph keeps.
///
/// # Shapes
/// q `[batch, q_len, q_heads, dim]` · k `[batch, kv_len, kv_heads, dim]` · v `[batch, kv_len,
/// kv_heads, value_dim]` · out `[batch, q_len, q_heads, value_dim]`, contiguous. One of f32, f64,
/// bf16 and f16, on the CPU. With [`Options::over`], seq counts the rows of this rank.
///
/// # Ordering
/// Over several ranks, this call and the backward pass are collective: every rank's graph has the
/// same operators in the same order.
///
/// # Errors
/// An error names the argument: a shape, a type or a device that does not fit, a combination that
/// the library refuses, a failed rank. The gradient has no derivative: a backward pass through it
/// is an error.
///
/// # Source
/// Dao 2023, FlashAttention-2; Liu et al. 2023, Ring Attention with Blockwise Transformers.
pub fn attention(q: &Tensor, k: &Tensor, v: &Tensor, options: &Options) -> Result<Tensor> {
    match q.dtype() {
        DType::F32 => operator::attend::<f32>(q, k, v, options),
        DType::F64 => operator::attend::<f64>(q, k, v, options),
        DType::BF16 => operator::attend::<annulus::half::bf16>(q, k, v, options),
        DType::F16 => operator::attend::<annulus::half::f16>(q, k, v, options),
        other => Err(operator::invalid("q", other.as_str(), "f32, f64, bf16 or f16")),
    }
}

/// The page of the crate, run as a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
