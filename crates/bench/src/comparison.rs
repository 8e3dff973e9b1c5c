//! Attentions whose results two backends must agree on, and measures of the difference.

use annulus::{Attention, DType, Dims};
use annulus_core::Alignment;

/// Results that are compared.
pub(crate) const NAMES: [&str; 5] = ["out", "lse", "dq", "dk", "dv"];

/// Names of all shapes.
pub(crate) const SHAPES: [&str; 7] = ["full", "causal", "window", "gqa", "cross", "cap", "decode"];

/// Problems to be verified.
pub(crate) struct Verification<'a> {
    pub(crate) dtype: DType,
    pub(crate) len: usize,
    pub(crate) heads: usize,
    pub(crate) dim: usize,
    /// Names of the masks.
    pub(crate) masks: &'a [&'static str],
    /// Keys that the window of the reference is too long, to show that it is found.
    pub(crate) mistake: u64,
}

/// One attention.
pub(crate) struct Shape {
    pub(crate) name: &'static str,
    pub(crate) attention: Attention,
    pub(crate) dims: Dims,
}

/// Full, causal, window, grouped heads, causal with other numbers of queries than of keys, soft
/// cap, and one query of grouped heads. The window is `mistake` keys too long.
pub(crate) fn shapes(len: usize, heads: usize, dim: usize, mistake: u64) -> [Shape; 7] {
    let kv_heads = (heads / 4).max(1);
    let square = Dims::new(1, len, kv_heads, dim);
    let full = Attention::new();
    let causal = Attention::new().causal(true);
    let window = Attention::new().sliding_window(len as u64 / 4 + mistake, Some(len as u64 / 16));
    let cross = Attention::new().causal(true).align(Alignment::BottomRight);
    let grouped_dims = Dims { q_heads: heads, ..square };
    let capped = causal.clone().logits_soft_cap(20.0);
    let [full_name, causal_name, window_name, grouped, crossed, cap_name, decode] = SHAPES;
    [
        Shape { name: full_name, attention: full.clone(), dims: square },
        Shape { name: causal_name, attention: causal.clone(), dims: square },
        Shape { name: window_name, attention: window, dims: square },
        Shape { name: grouped, attention: causal, dims: grouped_dims },
        Shape { name: crossed, attention: cross, dims: Dims { q_len: len / 3 + 7, ..square } },
        Shape { name: cap_name, attention: capped, dims: square },
        Shape { name: decode, attention: full, dims: Dims { q_len: 1, ..grouped_dims } },
    ]
}

/// ‖got − want‖ / ‖want‖ of all elements, and the largest of a row against the mean norm of a row:
/// one wrong row of thousands hardly changes the first.
pub(crate) fn errors(got: &[f64], want: &[f64], row: usize) -> [f64; 2] {
    let norm = |numbers: &[f64]| numbers.iter().map(|x| x * x).sum::<f64>();
    let rows = (want.len() / row).max(1) as f64;
    let mut sum = 0.0;
    let mut most = 0.0f64;
    for (got, want) in got.chunks(row).zip(want.chunks(row)) {
        let difference = got.iter().zip(want).map(|(got, want)| (got - want).powi(2)).sum::<f64>();
        sum += difference;
        // f64::max would ignore NaN
        most = if difference >= most || difference.is_nan() { difference } else { most };
    }
    let whole = norm(want).max(f64::MIN_POSITIVE);
    [(sum / whole).sqrt(), (most / (whole / rows)).sqrt()]
}
