//! Gradients of the sinks, from the statistics of the rows.
//!
//! ```text
//! da_t = −Σ_i e^{a_t − max_i}/sum_i·delta_i − [a_t = max_i]·share_i        for each sink a_t
//! ```

use std::ops::Range;

use annulus_core::Element;
use ndarray::ArrayView4;

use crate::{simd::dispatch::Real, threads::team::Ticker, workspace::decode::RowStatistics};

/// The sinks of a backward pass, and what their gradients are computed from.
pub(super) struct SinkGradients<'a, A> {
    pub(super) statistics: &'a RowStatistics<A>,
    /// Query heads.
    pub(super) heads: usize,
    /// `[q_heads|1, sinks, 1, 1]`.
    pub(super) sinks: ArrayView4<'a, A>,
    /// Local rows whose contribution is computed.
    pub(super) rows: Range<usize>,
}

impl<A: Real> SinkGradients<'_, A> {
    /// Computes the gradient of sink number `index` in the order of the tensor, in f64: batch rows
    /// and heads ascend, then rows. The result is not read if `ticker` stops.
    pub(super) fn of(&self, index: usize, ticker: &mut Ticker<'_>) -> f64 {
        let Self { statistics, heads, sinks, rows } = self;
        let (lines, count, ..) = sinks.dim();
        let (line, sink) = (index / count, index % count);
        let score = sinks[[line, sink, 0, 0]].to_f64();
        // a sink of −∞ has no weight
        if score == f64::NEG_INFINITY {
            return 0.0;
        }
        let planes = statistics.max.len().checked_div(statistics.rows).unwrap_or(0);
        let mut sum = 0.0;
        for plane in (0..planes).filter(|plane| lines == 1 || plane % heads == line) {
            if ticker.should_stop() {
                break;
            }
            for row in rows.clone() {
                let [max, inverse_sum, delta, share] =
                    statistics.of(plane, row).map(Element::to_f64);
                // 0 of a normalised output
                let max_term = if score == max { share } else { 0.0 };
                sum -= (score - max).exp() * inverse_sum * delta + max_term;
            }
        }
        sum
    }
}
