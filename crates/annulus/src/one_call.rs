//! Attention in one call, with the parameter names of other libraries.

use std::sync::Arc;

use annulus_core::{Batch, Dims, Element, Result, SinkShape};
use annulus_plan::Layout;
use ndarray::{ArrayView2, ArrayView4};

use crate::{Attention, Division, Forward, LocalRing, Tensors};

/// Parameters of [`flash_attention`] and [`ring_attention`], named as in other libraries.
///
/// The default is full attention. The methods of [`Attention`] define each parameter.
#[derive(Debug, Clone, Default)]
pub struct Options<'a, A> {
    /// Causal mask: j' ≤ i'. See [`Attention::causal`].
    pub causal: bool,
    /// Window (left, right); `None` opens a side. See [`Attention::sliding_window`].
    pub sliding_window: Option<(Option<u64>, Option<u64>)>,
    /// Number of first keys that are exempt from the window. Refused without a window.
    pub attention_sink_size: u64,
    /// Chunk of chunked causal attention. See [`Attention::chunk_size`].
    pub chunk_size: Option<u64>,
    /// Soft cap: cap·tanh(x/cap).
    pub logits_soft_cap: Option<f64>,
    /// Factor of q·k. Default: 1/√head_dim.
    pub softmax_scale: Option<f64>,
    /// Probability of dropout, 0 ≤ p < 1.
    pub dropout_prob: f64,
    /// Seed of dropout. No effect at probability 0.
    pub dropout_seed: u64,
    /// Unnormalised output, with max and sum. See [`Attention::unnormalized`].
    pub unnormalized_output: bool,
    /// Additive bias, `[batch|1, q_heads|1, q_len|1, kv_len|1]`.
    pub bias: Option<ArrayView4<'a, A>>,
    /// Sinks, `[1, sinks]` shared by all heads or `[q_heads, sinks]`.
    pub softmax_aux: Option<ArrayView2<'a, A>>,
    /// Mask of the caller's, one more condition. See [`Attention::mask`].
    pub mask_builder: Option<Arc<dyn annulus_core::Mask>>,
    /// Segment ids, positions, dense mask and packed lengths of this batch.
    pub batch: Batch,
    /// Assignment of rows to ranks. Default: chosen by the mask.
    pub layout: Option<Layout>,
}

/// Computes attention over whole tensors on this machine's CPU.
///
/// It plans anew in every call; programs with many passes keep a [`crate::LocalRing`].
///
/// # Shapes
/// q `[batch, q_len, q_heads, d]` · k `[batch, kv_len, kv_heads, d]` ·
/// v `[batch, kv_len, kv_heads, dv]` · result as [`Forward`].
///
/// # Ordering
/// Local.
///
/// # Errors
/// [`annulus_core::Error::InvalidArgument`], which names the parameter;
/// [`annulus_core::Error::OutOfMemory`].
///
/// # Source
/// Dao et al. 2022, FlashAttention, algorithm 1.
///
/// # Examples
/// ```
/// use annulus::{Options, flash_attention};
/// use ndarray::Array4;
///
/// let x = Array4::<f32>::ones((1, 8, 2, 4));
/// let options = Options { causal: true, ..Options::default() };
/// let forward = flash_attention(x.view(), x.view(), x.view(), &options)?;
/// // one key is visible to the first query: lse = q·k/√d
/// assert!((forward.lse[[0, 0, 0]] - 2.0).abs() < 1e-6);
/// # Ok::<(), annulus::Error>(())
/// ```
pub fn flash_attention<T: Element>(
    q: ArrayView4<'_, T>,
    k: ArrayView4<'_, T>,
    v: ArrayView4<'_, T>,
    options: &Options<'_, T::Accumulator>,
) -> Result<Forward<T>> {
    ring_attention(q, k, v, options, 1)
}

/// Computes attention as [`flash_attention`] does, over an in-process ring of `ranks` ranks.
///
/// The result is the same up to the order of rounding.
///
/// # Shapes
/// As [`flash_attention`].
///
/// # Ordering
/// Local: all ranks are threads of this process.
///
/// # Errors
/// As [`flash_attention`].
///
/// # Source
/// Liu et al. 2023, Ring Attention with Blockwise Transformers.
///
/// # Examples
/// ```
/// use annulus::{Options, ring_attention};
/// use ndarray::Array4;
///
/// let x = Array4::<f32>::ones((1, 8, 2, 4));
/// let forward = ring_attention(x.view(), x.view(), x.view(), &Options::default(), 3)?;
/// assert!((forward.out[[0, 7, 1, 3]] - 1.0).abs() < 1e-6);
/// # Ok::<(), annulus::Error>(())
/// ```
pub fn ring_attention<T: Element>(
    q: ArrayView4<'_, T>,
    k: ArrayView4<'_, T>,
    v: ArrayView4<'_, T>,
    options: &Options<'_, T::Accumulator>,
    ranks: usize,
) -> Result<Forward<T>> {
    let (batch, q_len, q_heads, head_dim) = q.dim();
    let (_, kv_len, kv_heads, value_dim) = v.dim();
    let dims = Dims { batch, q_len, kv_len, q_heads, kv_heads, head_dim, value_dim };
    let division = Division::new().layout(options.layout.clone());
    let mut ring = LocalRing::new((options.attention::<T>(), division), dims, ranks)?;
    if options.batch != Batch::default() {
        ring.update(&options.batch)?;
    }
    ring.forward(&Tensors { q, k, v, bias: options.bias, softmax_aux: options.softmax_aux })
}

impl<A> Options<'_, A> {
    fn attention<T: Element>(&self) -> Attention {
        let (left, right) = self.sliding_window.unwrap_or_default();
        let attention = Attention::new()
            .dtype(T::DTYPE)
            .forward_only(true)
            .causal(self.causal)
            .sliding_window(left, right)
            .attention_sink_size(self.attention_sink_size)
            .chunk_size(self.chunk_size)
            .logits_soft_cap(self.logits_soft_cap)
            .softmax_scale(self.softmax_scale)
            .dropout(self.dropout_prob, self.dropout_seed)
            .unnormalized(self.unnormalized_output)
            .bias(self.bias.as_ref().map(|bias| bias.dim().into()))
            .softmax_aux(self.softmax_aux.as_ref().map(|sinks| match sinks.dim() {
                (1, count) => SinkShape::shared(count),
                (_, count) => SinkShape::per_head(count),
            }));
        self.mask_builder.iter().fold(attention, |all, mask| all.mask(Arc::clone(mask)))
    }
}
