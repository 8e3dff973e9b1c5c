//! One call each, with the parameter names that the field's libraries use.

use std::sync::Arc;

use annulus_core::{Batch, Dims, Element, Layout, Result};
use ndarray::{ArrayView2, ArrayView4};

use crate::{Attention, Forward, Tensors};

/// The parameters of [`flash_attention`] and [`ring_attention`], named as in the libraries that users come from. `Default` is full attention.
#[derive(Debug, Clone, Default)]
pub struct Options<'a, A> {
    /// j' ≤ i'.
    pub causal: bool,
    /// (left, right), `None` = unbounded on that side.
    pub sliding_window: Option<(Option<u64>, Option<u64>)>,
    /// First keys that are exempt from the window.
    pub attention_sink_size: u64,
    /// Chunked causal.
    pub chunk_size: Option<u64>,
    /// cap·tanh(x/cap).
    pub logits_soft_cap: Option<f64>,
    /// 1/√head_dim if `None`.
    pub softmax_scale: Option<f64>,
    /// Share of weights dropped.
    pub dropout_prob: f64,
    /// Seed of dropout.
    pub dropout_seed: u64,
    /// Returns out undivided, with max and sum.
    pub unnormalized_output: bool,
    /// `[batch|1, q_heads|1, q_len|1, kv_len|1]`.
    pub bias: Option<ArrayView4<'a, A>>,
    /// `[1, sinks]` shared by all heads, or `[q_heads, sinks]`.
    pub softmax_aux: Option<ArrayView2<'a, A>>,
    /// A mask object, and-ed with the rest.
    pub mask_builder: Option<Arc<dyn annulus_core::Mask>>,
    /// Segment ids, positions, dense mask, packed lengths.
    pub batch: Batch,
}

/// Attention over whole tensors on this process's CPU.
///
/// # Shapes
/// q `[batch, q_len, q_heads, d]` · k `[batch, kv_len, kv_heads, d]` · v `[batch, kv_len, kv_heads, dv]`; see [`Forward`] for what comes back.
/// # Errors
/// [`annulus_core::Error::InvalidArgument`] naming the parameter.
/// # Examples
/// ```
/// use annulus::{Options, flash_attention};
/// use ndarray::Array4;
///
/// let x = Array4::<f32>::ones((1, 8, 2, 4));
/// let forward = flash_attention(x.view(), x.view(), x.view(), &Options { causal: true, ..Options::default() })?;
/// assert!((forward.lse[[0, 0, 0]] - 2.0).abs() < 1e-6); // the first query sees one key: lse = q·k/√d
/// # Ok::<(), annulus::Error>(())
/// ```
pub fn flash_attention<T: Element>(
    q: ArrayView4<'_, T>,
    k: ArrayView4<'_, T>,
    v: ArrayView4<'_, T>,
    options: &Options<'_, T::Accumulator>,
) -> Result<Forward<T>> {
    ring_attention(q, k, v, options, 1, None)
}

/// As [`flash_attention`], over an in-process ring of `ranks` ranks: the same result up to rounding, in the memory of its blocks.
///
/// # Errors
/// As [`flash_attention`].
/// # Examples
/// ```
/// use annulus::{Options, ring_attention};
/// use ndarray::Array4;
///
/// let x = Array4::<f32>::ones((1, 8, 2, 4));
/// let forward = ring_attention(x.view(), x.view(), x.view(), &Options::default(), 3, None)?;
/// assert!((forward.out[[0, 7, 1, 3]] - 1.0).abs() < 1e-6);
/// # Ok::<(), annulus::Error>(())
/// ```
pub fn ring_attention<T: Element>(
    q: ArrayView4<'_, T>,
    k: ArrayView4<'_, T>,
    v: ArrayView4<'_, T>,
    options: &Options<'_, T::Accumulator>,
    ranks: usize,
    layout: impl Into<Option<Layout>>,
) -> Result<Forward<T>> {
    let (batch, q_len, q_heads, head_dim) = q.dim();
    let (_, kv_len, kv_heads, value_dim) = v.dim();
    let dims = Dims { batch, q_len, kv_len, q_heads, kv_heads, head_dim, value_dim };
    let mut plan = options.attention::<T>().plan(dims, ranks, layout)?;
    if options.batch != Batch::default() {
        plan.update(&options.batch)?;
    }
    plan.forward(&Tensors { q, k, v, bias: options.bias, sinks: options.softmax_aux })
}

impl<A> Options<'_, A> {
    fn attention<T: Element>(&self) -> Attention {
        let mut attention = Attention::new().dtype(T::DTYPE).forward_only().first_visible(self.attention_sink_size);
        if self.causal {
            attention = attention.causal();
        }
        if let Some((left, right)) = self.sliding_window {
            attention = attention.window(left, right);
        }
        if let Some(chunk) = self.chunk_size {
            attention = attention.chunk(chunk);
        }
        if let Some(cap) = self.logits_soft_cap {
            attention = attention.soft_cap(cap);
        }
        if let Some(scale) = self.softmax_scale {
            attention = attention.scale(scale);
        }
        if self.dropout_prob != 0.0 {
            attention = attention.dropout(self.dropout_prob, self.dropout_seed);
        }
        if self.unnormalized_output {
            attention = attention.unnormalized();
        }
        if let Some(bias) = &self.bias {
            attention = attention.bias(bias.dim().into());
        }
        if let Some(sinks) = &self.softmax_aux {
            let (heads, count) = sinks.dim();
            attention = if heads == 1 { attention.shared_sinks(count) } else { attention.sinks_per_head(count) };
        }
        if let Some(mask) = &self.mask_builder {
            attention = attention.mask(Arc::clone(mask));
        }
        attention
    }
}
