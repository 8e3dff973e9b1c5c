//! Sink scores of one head.

use ndarray::ArrayView4;

use crate::simd::dispatch::Real;

/// Returns the sink scores of one head.
pub(crate) fn sink_line<A: Real>(
    sinks: Option<ArrayView4<'_, A>>,
    head: usize,
) -> impl Iterator<Item = f64> + Clone {
    let count = sinks.map_or(0, |sinks| sinks.dim().1);
    (0..count).filter_map(move |sink| {
        sinks.map(|sinks| sinks[[if sinks.dim().0 == 1 { 0 } else { head }, sink, 0, 0]].to_f64())
    })
}
