//! One rank of a decoding: its cache, and the calls on it.

use std::{ops::Range, time::Instant};

use annulus::{Cache, Forward};
use annulus_core::{Dims, Element, Error, Result, SinkShape, memory};
use ndarray::{Array4, Axis, Slice};

use super::{rows_from, shifted, summary::DecodeFigures};
use crate::input::{Input, Share};

/// Rows of the calls of a decoding.
pub(super) struct DecodeSteps {
    /// Rows of keys that each call appends.
    pub(super) rows: Vec<Range<usize>>,
    /// Number of calls of the prefill, which come first.
    pub(super) prefills: usize,
    /// Number of first rows that have no queries.
    pub(super) without_queries: usize,
}

/// One rank.
pub(super) struct DecodeRank<T: Element> {
    cache: Cache,
    decoded: Decoded<T>,
}

/// Results and figures of a decoding on one rank.
pub(super) struct Decoded<T: Element> {
    /// Results of all queries, on rank 0.
    results: Option<DecodeResults<T>>,
    pub(super) page_rows: u64,
    pub(super) figures: DecodeFigures,
}

struct DecodeResults<T: Element> {
    out: Array4<T>,
    /// `[batch, heads, queries, 1]`.
    lse: Array4<T::Accumulator>,
}

impl<T: Element> DecodeRank<T> {
    /// Wraps an empty cache.
    pub(super) fn new(cache: Cache, keeps_results: bool, dims: &Dims) -> Result<Self> {
        let &Dims { batch, q_len, q_heads, value_dim, .. } = dims;
        let results = keeps_results.then(|| {
            Ok(DecodeResults {
                out: zeros("out", [batch, q_len, q_heads, value_dim])?,
                lse: zeros("lse", [batch, q_heads, q_len, 1])?,
            })
        });
        let page_rows = cache.page_rows();
        let figures = DecodeFigures::default();
        let decoded = Decoded { results: results.transpose()?, page_rows, figures };
        Ok(Self { cache, decoded })
    }

    /// Makes the calls of all steps.
    ///
    /// # Ordering
    /// Collective.
    pub(super) fn decode(
        mut self,
        input: &Input,
        steps: &DecodeSteps,
        sinks: Option<SinkShape>,
    ) -> Result<Decoded<T>> {
        for (number, rows) in steps.rows.iter().enumerate() {
            let begin = Instant::now();
            // rows without queries are appended without a message
            let has_queries = rows.end > steps.without_queries;
            let share = match self.append(input, steps, rows, sinks) {
                Ok(share) => share,
                // the other ranks wait for this one's call
                Err(error) if has_queries => return Err(self.cache.refuse(error)),
                Err(error) => return Err(error),
            };
            let figures = &mut self.decoded.figures;
            let calls =
                if number < steps.prefills { &mut figures.prefill } else { &mut figures.tokens };
            if !has_queries {
                calls.add(begin.elapsed().as_secs_f64(), [0, 0]);
                continue;
            }
            let tensors = share.tensors();
            let forward = self.cache.attend(tensors.q, tensors.softmax_aux)?;
            let sent = forward.reports.iter().map(|report| report.bytes_sent).sum();
            let predicted = forward.reports.iter().map(|report| report.bytes_predicted).sum();
            calls.add(begin.elapsed().as_secs_f64(), [sent, predicted]);
            self.decoded.keep(&forward, rows.end - steps.without_queries)?;
        }
        self.decoded.figures.rows = self.cache.local_len();
        self.decoded.figures.buffer_bytes = self.cache.buffer_bytes();
        Ok(self.decoded)
    }

    /// Reads the rows of a step and appends this rank's keys and values.
    fn append(
        &mut self,
        input: &Input,
        steps: &DecodeSteps,
        rows: &Range<usize>,
        sinks: Option<SinkShape>,
    ) -> Result<Share<T>> {
        let first_query = steps.without_queries;
        let queries = rows.start.max(first_query)..rows.end.max(first_query);
        let own = shifted(&self.cache.own_rows(rows.len())?, rows.start);
        let share = input.share::<T>(sinks, &rows_from(first_query, queries), &own)?;
        let tensors = share.tensors();
        self.cache.append_own(rows.len(), tensors.k, tensors.v)?;
        Ok(share)
    }
}

impl<T: Element> Decoded<T> {
    /// Keeps the results of the queries before query number `end`.
    fn keep(&mut self, forward: &Forward<T>, end: usize) -> Result<()> {
        let Some(results) = &mut self.results else { return Ok(()) };
        let count = forward.out.dim().1;
        let first = end.checked_sub(count).ok_or_else(|| Error::internal("too many queries"))?;
        let these = Slice::from(first..end);
        results.out.slice_axis_mut(Axis(1), these).assign(&forward.out);
        let lse = forward.lse.view().insert_axis(Axis(3));
        results.lse.slice_axis_mut(Axis(2), these).assign(&lse);
        Ok(())
    }

    /// Returns out and lse of all queries, on rank 0.
    pub(super) fn results(&self) -> Option<(&[T], &[T::Accumulator])> {
        let DecodeResults { out, lse } = self.results.as_ref()?;
        Some((out.as_slice()?, lse.as_slice()?))
    }
}

fn zeros<T: Element>(name: &str, shape: [usize; 4]) -> Result<Array4<T>> {
    let count = shape.iter().product();
    let values = memory::zeroed::<T>(name, count)?;
    Array4::from_shape_vec(shape, values).map_err(Error::internal)
}
