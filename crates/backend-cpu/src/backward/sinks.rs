//! Gradients of the sinks, from the statistics of the rows.
//!
//! ```text
//! da_t = −Σ_i e^{a_t − lse_i}·delta_i − [a_t = max_i]·share_i        for each sink a_t
//! ```

use std::ops::Range;

use annulus_core::Element;
use ndarray::ArrayView4;

use crate::{
    forward::sink_line::sink_line, simd::dispatch::Real, workspace::statistics::RowStatistics,
};

/// Computes the contribution of the local rows `rows` to the gradients of the sinks
/// `[q_heads|1, sinks, 1, 1]`, in f64: batch rows and heads ascend, then rows.
pub(super) fn sink_gradients<A: Real>(
    statistics: &RowStatistics<A>,
    heads: usize,
    sinks: ArrayView4<'_, A>,
    rows: Range<usize>,
) -> impl Iterator<Item = f64> {
    let (lines, count, ..) = sinks.dim();
    let planes = statistics.lse.len().checked_div(statistics.rows).unwrap_or(0);
    (0..lines).flat_map(move |line| (0..count).map(move |sink| (line, sink))).map(
        move |(line, sink)| {
            let mut sum = 0.0;
            for plane in (0..planes).filter(|plane| lines == 1 || plane % heads == line) {
                let score =
                    sink_line(Some(sinks), plane % heads).nth(sink).unwrap_or(f64::NEG_INFINITY);
                // a sink of −∞ has no weight
                if score == f64::NEG_INFINITY {
                    continue;
                }
                for row in rows.clone() {
                    let [lse, max, delta, share] = statistics.of(plane, row).map(Element::to_f64);
                    let max_term =
                        if !statistics.max.is_empty() && score == max { share } else { 0.0 };
                    sum -= (score - lse).exp() * delta + max_term;
                }
            }
            sum
        },
    )
}
