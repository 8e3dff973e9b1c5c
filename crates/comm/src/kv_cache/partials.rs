//! Messages of the reduction: the normalised output and the softmax statistics of some queries over
//! the keys of one rank, and their merge (`merged_softmax.rs`).
//!
//! ```text
//! message   max, sum [b, q_heads, queries], accumulator's type · out [b, queries, q_heads, dv]
//! ```
//! Sums are in f64 and in the order of ranks, so that all ranks have the same bits.
//!
//! # Source
//! Milakov, Gimelshein 2018, Online normalizer calculation for softmax, §3; the reduction of
//! split-KV decoding in FlashDecoding (Dao et al. 2023), over ranks.

use annulus_core::{DType, Dims, Error, HostView, HostViewMut, Result, index, memory};

use crate::merged_softmax::MergedSoftmax;

/// Shape of the messages of some queries.
#[derive(Debug, Clone, Copy)]
pub(super) struct PartialShape {
    pub(super) dims: Dims,
    pub(super) dtype: DType,
    /// Queries of the message.
    pub(super) queries: usize,
}

/// Output and lse of some queries.
pub(super) struct Results<'a> {
    pub(super) out: HostViewMut<'a>,
    pub(super) lse: HostViewMut<'a>,
}

/// Tensors of a message.
pub(super) struct PartialResults<'a> {
    pub(super) out: HostViewMut<'a>,
    pub(super) max: HostViewMut<'a>,
    pub(super) sum: HostViewMut<'a>,
}

/// A message, widened.
struct Part {
    max: Vec<f64>,
    sum: Vec<f64>,
    out: Vec<f64>,
}

impl PartialShape {
    /// Returns the bytes of a message.
    pub(super) fn bytes(&self) -> u64 {
        (self.queries as u64).saturating_mul(Self::query_bytes(&self.dims, self.dtype))
    }

    /// Returns the bytes of one query, of all batch rows and heads.
    pub(super) fn query_bytes(dims: &Dims, dtype: DType) -> u64 {
        let rows = dims.batch as u64 * dims.q_heads as u64;
        let statistics = 2 * dtype.accumulator().bytes() as u64;
        rows * (dims.value_dim as u64 * dtype.bytes() as u64 + statistics)
    }

    /// Returns the tensors of a message for writing.
    pub(super) fn results<'a>(&self, message: &'a mut [u8]) -> Result<PartialResults<'a>> {
        let bytes = message.get_mut(..index(self.bytes())).ok_or_else(too_short)?;
        let statistic = self.statistic_bytes();
        let (max, rest) = bytes.split_at_mut_checked(statistic).ok_or_else(too_short)?;
        let (sum, out) = rest.split_at_mut_checked(statistic).ok_or_else(too_short)?;
        let sums = self.dtype.accumulator();
        Ok(PartialResults {
            out: HostViewMut::of_bytes(out, self.dtype, self.out_shape())?,
            max: HostViewMut::of_bytes(max, sums, self.statistic_shape())?,
            sum: HostViewMut::of_bytes(sum, sums, self.statistic_shape())?,
        })
    }

    /// Merges the messages of all ranks, in their order, and the sinks `[q_heads|1, count, 1, 1]`.
    pub(super) fn merge(
        &self,
        messages: &[&[u8]],
        sinks: Option<&HostView<'_>>,
        results: Results<'_>,
    ) -> Result<()> {
        let sinks_shape = sinks.map(HostView::shape);
        let mut parts = Vec::with_capacity(messages.len());
        for message in messages {
            let bytes = message.get(..index(self.bytes())).ok_or_else(too_short)?;
            let statistic = self.statistic_bytes();
            let (max, rest) = bytes.split_at_checked(statistic).ok_or_else(too_short)?;
            let (sum, out) = rest.split_at_checked(statistic).ok_or_else(too_short)?;
            let sums = self.dtype.accumulator();
            let max = HostView::of_bytes(max, sums, self.statistic_shape())?.widened()?;
            let sum = HostView::of_bytes(sum, sums, self.statistic_shape())?.widened()?;
            let out = HostView::of_bytes(out, self.dtype, self.out_shape())?.widened()?;
            parts.push(Part { max, sum, out });
        }
        let sinks = sinks.map(HostView::widened).transpose()?.unwrap_or_default();
        let Dims { batch, q_heads, value_dim, .. } = self.dims;
        // sinks of one head, or of all
        let per_head = sinks_shape.is_some_and(|[rows, ..]| rows > 1);
        let count = if per_head { sinks.len() / q_heads } else { sinks.len() };
        let mut out = memory::filled("the results", index(self.results_len()), 0.0)?;
        let mut lse = memory::filled("lse", batch * q_heads * self.queries, 0.0)?;
        for (plane, row) in (0..batch * q_heads)
            .flat_map(|plane| (0..self.queries).map(move |query| (plane, query)))
            .map(|(plane, query)| (plane, plane * self.queries + query))
        {
            let head = plane % q_heads;
            let first_sink = if per_head { head * count } else { 0 };
            let sinks = &sinks[first_sink..first_sink + count];
            let query = row % self.queries;
            let first = ((plane / q_heads * self.queries + query) * q_heads + head) * value_dim;
            let elements = first..first + value_dim;
            let acc = &mut out[elements.clone()];
            let mut softmax = MergedSoftmax::EMPTY;
            for part in &parts {
                // the cache has no use for ties
                let [max, sum] = [&part.max, &part.sum].map(|list| list[row]);
                let added = softmax.add(MergedSoftmax { max, sum, ties: 0.0 });
                let Some([rescale, weight]) = added else { continue };
                let out = part.out[elements.clone()].iter().map(|x| weight * sum * x);
                acc.iter_mut().zip(out).for_each(|(acc, x)| *acc = *acc * rescale + x);
            }
            for &sink in sinks {
                let Some([rescale, _]) = softmax.add(MergedSoftmax::sink(sink)) else { continue };
                acc.iter_mut().for_each(|acc| *acc *= rescale);
            }
            acc.iter_mut().for_each(|acc| *acc /= softmax.normalizer());
            lse[row] = softmax.lse();
        }
        let Results { out: mut all, lse: mut statistics } = results;
        all.write(&out);
        statistics.write(&lse);
        Ok(())
    }

    fn statistic_bytes(&self) -> usize {
        self.statistic_shape().iter().product::<usize>() * self.dtype.accumulator().bytes()
    }

    fn results_len(&self) -> u64 {
        self.out_shape().iter().map(|&length| length as u64).product()
    }

    const fn statistic_shape(&self) -> [usize; 4] {
        [self.dims.batch, self.dims.q_heads, self.queries, 1]
    }

    const fn out_shape(&self) -> [usize; 4] {
        [self.dims.batch, self.queries, self.dims.q_heads, self.dims.value_dim]
    }
}

fn too_short() -> Error {
    Error::internal("a message that is shorter than its partial results")
}
