//! One rank of a decoding: its cache, and the calls on it.

use std::{ops::Range, time::Instant};

use annulus::{Cache, Forward};
use annulus_core::{Element, Error, Result, Run, Runs, SinkShape};

use super::summary::DecodeFigures;
use crate::{
    file::{OutputFile, TensorPart},
    input::{Input, Share},
};

/// Rows of the calls of a decoding.
pub(super) struct DecodeSteps {
    /// Rows of keys that each call appends.
    pub(super) rows: Vec<Range<usize>>,
    /// Number of calls of the prefill, which come first.
    pub(super) prefills: usize,
    /// Number of first rows that have no queries.
    pub(super) without_queries: usize,
}

impl DecodeSteps {
    /// Returns the queries of the rows of a call.
    fn queries(&self, rows: &Range<usize>) -> Runs {
        let [first, end] =
            [rows.start, rows.end].map(|row| row.saturating_sub(self.without_queries));
        Runs::counting(first as i64, (end - first) as u64)
    }
}

/// Makes the calls of all steps on an empty cache, and writes their results to `output` if there is
/// one, on rank 0.
///
/// # Ordering
/// Collective.
pub(super) fn decode<T: Element>(
    cache: &mut Cache,
    input: &Input,
    steps: &DecodeSteps,
    sinks: Option<SinkShape>,
    output: Option<&OutputFile>,
) -> Result<DecodeFigures> {
    let mut figures = DecodeFigures::default();
    for (number, rows) in steps.rows.iter().enumerate() {
        let begin = Instant::now();
        let queries = steps.queries(rows);
        let share = append::<T>(cache, input, rows, &queries, sinks);
        let calls =
            if number < steps.prefills { &mut figures.prefill } else { &mut figures.tokens };
        // rows without queries are appended without a message
        if queries.is_empty() {
            share?;
            calls.add(begin.elapsed().as_secs_f64(), [0, 0]);
            continue;
        }
        // the other ranks wait for this one's call
        let share = share.map_err(|error| cache.refuse(error))?;
        let tensors = share.tensors();
        let forward: Forward<T> = cache.attend(tensors.q, tensors.softmax_aux)?;
        let sent = forward.reports.iter().map(|report| report.bytes_sent).sum();
        let predicted = forward.reports.iter().map(|report| report.bytes_predicted).sum();
        calls.add(begin.elapsed().as_secs_f64(), [sent, predicted]);
        if let Some(output) = output {
            let dense = || Error::internal("results are not dense");
            let out = forward.out.as_slice().ok_or_else(dense)?;
            let lse = forward.lse.as_slice().ok_or_else(dense)?;
            output.write_rows("out", 1, &[TensorPart { rows: &queries, values: out }])?;
            output.write_rows("lse", 2, &[TensorPart { rows: &queries, values: lse }])?;
        }
    }
    figures.rows = cache.local_len();
    figures.buffer_bytes = cache.buffer_bytes();
    Ok(figures)
}

/// Reads the rows of a step and appends this rank's keys and values.
fn append<T: Element>(
    cache: &mut Cache,
    input: &Input,
    rows: &Range<usize>,
    queries: &Runs,
    sinks: Option<SinkShape>,
) -> Result<Share<T>> {
    let mut own = Runs::new();
    for run in cache.own_rows(rows.len())?.runs() {
        own.push_run(Run { start: run.start + rows.start as i64, ..*run });
    }
    let share = input.share::<T>(sinks, queries, &own)?;
    let tensors = share.tensors();
    cache.append_own(rows.len(), tensors.k, tensors.v)?;
    Ok(share)
}
