//! `annulus decode`: a prefill, then token by token, over a KV cache that is sharded over ranks.

use std::{ops::Range, time::Instant};

use annulus::{Cache, CacheShape, Forward, comm::Descriptor};
use annulus_core::{DType, Element, Error, LEAF_ROWS, Result, Run, Runs, SinkShape, index};
use clap::Args;
use half::{bf16, f16};
use serde::{Deserialize, Serialize};

use crate::{
    arguments::{
        ring::TransportName,
        values::{count as from_one, page_rows, whole},
    },
    attend::{FileFlags, output},
    backend::BackendChoice,
    failure::{Failure, Outcome, of_file},
    file::{OutputFile, PlannedTensor, TensorPart},
    input::{Input, Share},
    job::Job,
    memory, message,
    report::{bytes, counted, grouped},
    say,
};

const EXAMPLES: &str = "Input tensors, by name:
  query [b, q, h, d]  key [b, k, hk, d]  value [b, k, hk, dv]     f64, f32, bf16 or f16; h = n·hk
  softmax_aux [sinks] or [h, sinks]                               floats
Queries are those of the last q rows: the first k - q rows are cached without queries.
OutputFile tensors: out, lse, of all queries.

Examples:
  annulus make --output tokens.safetensors --q-len 4096 --heads 8 --kv-heads 2
  annulus decode --input tokens.safetensors --output out.safetensors --causal --ranks 4 \\
    --prefill 4000 --prefill-chunk 512
  annulus decode --input tokens.safetensors --output out.safetensors --prefill 4090 --json
  mpirun -n 4 annulus decode --input tokens.safetensors --output out.safetensors --causal \\
    --prefill 4000

Rank r of P has the pages r, r + P, r + 2·P … of the keys and values. A token is one all-gather of
(out, max, sum), whose bytes do not depend on the number of cached rows. With --reproducible results
have the bits of `attend --reproducible`, and the bytes grow with the pages that queries attend to.";

/// Appends the rows of a safetensors file to a KV cache that is sharded over ranks, first a prefill
/// in chunks, then token by token, and attends with their queries
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct DecodeFlags {
    #[command(flatten)]
    files: FileFlags,
    /// First rows, which are appended in chunks; the others are appended one by one. Default: the
    /// rows without queries
    #[arg(long, help_heading = None, value_name = "ROWS", value_parser = whole)]
    prefill: Option<usize>,
    /// Rows of a chunk of the prefill. Default: all
    #[arg(long, help_heading = None, value_name = "ROWS", value_parser = from_one)]
    prefill_chunk: Option<usize>,
    /// Rows of a page, 1 to 2^32; at most all rows are in one. Default: 64. With --reproducible 256
    /// times a power of two; default: 256
    #[arg(long, help_heading = None, value_name = "ROWS", value_parser = page_rows)]
    page_rows: Option<usize>,
}

/// Runs `annulus decode`.
pub(crate) fn run(flags: &DecodeFlags) -> Outcome {
    flags.check_page_rows()?;
    let FileFlags { device, mask, runtime, .. } = &flags.files;
    if !mask.documents.is_empty() {
        let want = "none: a KV cache has one sequence for each batch row";
        return Err(Failure::usage("--documents", "packed documents", want));
    }
    if device.transport == TransportName::Nccl {
        let by = "the KV cache, whose messages are in host memory";
        return Err(Error::unsupported("transport nccl", by).into());
    }
    device.run_job("decode", runtime.deadline, |job, backend| flags.decode(job, backend))
}

impl DecodeFlags {
    fn decode(&self, job: &mut Job, backend: BackendChoice) -> Outcome {
        job.set_ranks(self.files.ranks, 1)?;
        let threads = job.threads(self.files.runtime.threads)?;
        let (input, sinks, dtype) = self.files.open(job)?;
        job.agree(check_tensors(&input))?;
        let steps = job.agree(self.steps(&input))?;
        let prefill_rows = steps.rows[..steps.prefills].last().map_or(0, |rows| rows.end);
        let fields = Descriptor::new()
            .field("q_len", input.dims.q_len as u64)
            .field("kv_len", input.dims.kv_len as u64)
            .field("prefill", prefill_rows as u64)
            .field("prefill_chunk", self.prefill_chunk.unwrap_or(0) as u64);
        job.require_same(fields)?;
        let decoding = Decoding { flags: self, input: &input, steps, sinks, backend, threads };
        let summary = match dtype {
            DType::F64 => decoding.run::<f64>(job),
            DType::F32 => decoding.run::<f32>(job),
            DType::Bf16 => decoding.run::<bf16>(job),
            DType::F16 => decoding.run::<f16>(job),
        }?;
        self.files.print(job, &summary, DecodeSummary::print);
        Ok(())
    }

    /// Returns the rows of each call.
    fn steps(&self, input: &Input) -> Outcome<DecodeSteps> {
        let (q_len, kv_len) = (input.dims.q_len, input.dims.kv_len);
        let Some(without_queries) = kv_len.checked_sub(q_len) else {
            let want = format!("at most the {kv_len} rows of key");
            return Err(of_file(&self.files.input, "query: q_len", q_len, want).into());
        };
        let prefill = self.prefill.unwrap_or(without_queries);
        if !(without_queries..=kv_len).contains(&prefill) {
            let want = format!("{without_queries} (the rows without queries) to {kv_len}");
            return Err(Failure::usage("--prefill", prefill, want));
        }
        let chunk = self.prefill_chunk.unwrap_or(prefill).max(1);
        let chunks = (0..prefill).step_by(chunk).map(|first| first..prefill.min(first + chunk));
        let chunks: Vec<Range<usize>> = chunks.collect();
        let prefills = chunks.len();
        let tokens = (prefill..kv_len).map(|row| row..row + 1);
        Ok(DecodeSteps {
            rows: chunks.into_iter().chain(tokens).collect(),
            prefills,
            without_queries,
        })
    }

    /// Returns the rows of a page, if they are given. A page that is longer than a cache of `rows`
    /// rows would take memory that no row fills.
    fn page_rows(&self, rows: usize) -> Option<u64> {
        let leaf = index(LEAF_ROWS);
        let all = if self.files.scores.reproducible {
            rows.div_ceil(leaf).next_power_of_two() * leaf
        } else {
            rows.max(1)
        };
        self.page_rows.map(|given| given.min(all) as u64)
    }

    fn check_page_rows(&self) -> Outcome {
        let leaf = index(LEAF_ROWS);
        let is_node = |rows: usize| rows.is_multiple_of(leaf) && (rows / leaf).is_power_of_two();
        match self.page_rows.filter(|&rows| self.files.scores.reproducible && !is_node(rows)) {
            Some(rows) => {
                let want = format!("{leaf} times a power of two with --reproducible");
                Err(Failure::usage("--page-rows", rows, want))
            }
            None => Ok(()),
        }
    }
}

/// Refuses tensors that would have no effect.
fn check_tensors(input: &Input) -> Outcome {
    input.not_cached().map_or(Ok(()), |name| {
        let what = format!("{}: {name}", message::path(input.path()));
        Err(Error::unsupported(what, "the KV cache").into())
    })
}

/// Arguments of one decoding.
struct Decoding<'a> {
    flags: &'a DecodeFlags,
    input: &'a Input,
    steps: DecodeSteps,
    sinks: Option<SinkShape>,
    backend: BackendChoice,
    /// Threads of each rank on the CPU.
    threads: usize,
}

impl Decoding<'_> {
    fn run<T: Element>(&self, job: &mut Job) -> Outcome<DecodeSummary> {
        let Self { flags, input, steps, backend, .. } = self;
        let dims = input.dims;
        let start = job.synchronized_now()?;
        let attention = flags.files.attention(T::DTYPE, self.sinks);
        let prepared = attention.spec(dims).map_err(|error| input.named(error));
        let held = memory::Tensors::of(&dims, T::DTYPE, false).shared_by(job.processes());
        let prepared = prepared.and_then(|spec| {
            held.must_fit()?;
            output::planned(&spec, input, false)
        });
        let tensors = job.agree(prepared)?;
        let output = output::open(job, &flags.files.output, &tensors)?;

        let shape = CacheShape::new(dims.batch, dims.q_heads, dims.head_dim)
            .kv_heads(dims.kv_heads)
            .value_dim(dims.value_dim);
        let page_rows = flags.page_rows(dims.kv_len);
        let shape = page_rows.map_or(shape, |rows| shape.page_rows(rows));
        let runtime = flags.files.runtime();
        let endpoints = job.endpoints()?;
        let mut caches = job.run_phase(endpoints, |_, endpoint| {
            backend.cache(self.threads, endpoint, &attention, &runtime, shape)
        })?;
        let page_rows = caches.first().map_or(0, Cache::page_rows);
        let figures = job.run_phase(&mut caches, |rank, cache| {
            let output = Some(&output).filter(|_| rank == 0);
            let decoded = decode::<T>(cache, input, steps, self.sinks, output);
            decoded.map_err(|error| input.named(error))
        })?;
        let ranks = job.all_gather_values(&figures)?.concat();
        output::finish(job, output)?;
        Ok(DecodeSummary {
            ranks: ranks.len(),
            threads: self.threads,
            backend: backend.name(),
            dtype: T::DTYPE.name(),
            rows: dims.kv_len,
            page_rows,
            prefill_rows: steps.rows[..steps.prefills].iter().map(ExactSizeIterator::len).sum(),
            prefill: CallSummary::of(ranks.iter().map(|rank| rank.prefill)),
            tokens: TokenSummary::of(&ranks),
            per_rank: ranks.iter().map(Into::into).collect(),
            seconds: start.elapsed().as_secs_f64(),
            output: message::path(&flags.files.output),
            output_bytes: tensors.iter().map(PlannedTensor::bytes).sum(),
        })
    }
}

/// Rows of the calls of a decoding.
struct DecodeSteps {
    /// Rows of keys that each call appends.
    rows: Vec<Range<usize>>,
    /// Number of calls of the prefill, which come first.
    prefills: usize,
    /// Number of first rows that have no queries.
    without_queries: usize,
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
fn decode<T: Element>(
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

/// Calls of one rank of the same kind.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
struct CallFigures {
    count: u64,
    seconds: f64,
    /// Payload bytes sent in all calls, and in those with the least and the most.
    sent: u64,
    least_sent: u64,
    most_sent: u64,
    /// Payload bytes predicted for all calls.
    predicted: u64,
}

/// Figures of one rank.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
struct DecodeFigures {
    prefill: CallFigures,
    tokens: CallFigures,
    /// Cached rows.
    rows: u64,
    /// Bytes of keys, values and message buffers.
    buffer_bytes: u64,
}

/// Calls of all ranks of the same kind. Bytes are those of all ranks.
#[derive(Debug, Serialize)]
struct CallSummary {
    /// Calls of a rank.
    calls: u64,
    /// Seconds of the slowest rank.
    seconds: f64,
    bytes_sent: u64,
    bytes_predicted: u64,
}

/// Calls of single tokens.
#[derive(Debug, Serialize)]
struct TokenSummary {
    #[serde(flatten)]
    calls: CallSummary,
    seconds_per_token: f64,
    bytes_per_token_least: u64,
    bytes_per_token_most: u64,
}

/// Memory of one rank.
#[derive(Debug, Serialize)]
struct RankMemory {
    rows: u64,
    buffer_bytes: u64,
}

/// Figures of the whole run.
#[derive(Debug, Serialize)]
struct DecodeSummary {
    /// Number of ranks.
    ranks: usize,
    /// Threads of each rank.
    threads: usize,
    /// Name of the backend.
    backend: &'static str,
    /// Name of the element type.
    dtype: &'static str,
    /// Cached rows of all ranks.
    rows: usize,
    /// Rows of a page.
    page_rows: u64,
    /// Rows of the prefill.
    prefill_rows: usize,
    prefill: CallSummary,
    tokens: TokenSummary,
    per_rank: Vec<RankMemory>,
    /// Seconds from the start to the completed output file.
    seconds: f64,
    /// Path of the output file.
    output: String,
    /// Bytes of its tensors.
    output_bytes: u64,
}

impl CallFigures {
    /// Adds a call with the payload bytes sent and predicted.
    fn add(&mut self, seconds: f64, [sent, predicted]: [u64; 2]) {
        self.least_sent = if self.count == 0 { sent } else { self.least_sent.min(sent) };
        self.most_sent = self.most_sent.max(sent);
        self.count += 1;
        self.seconds += seconds;
        self.sent += sent;
        self.predicted += predicted;
    }
}

impl CallSummary {
    /// Sums up the calls of all ranks.
    fn of(ranks: impl Iterator<Item = CallFigures>) -> Self {
        let mut all = Self { calls: 0, seconds: 0.0, bytes_sent: 0, bytes_predicted: 0 };
        for rank in ranks {
            all.calls = rank.count;
            all.seconds = all.seconds.max(rank.seconds);
            all.bytes_sent += rank.sent;
            all.bytes_predicted += rank.predicted;
        }
        all
    }
}

impl TokenSummary {
    /// Sums up the tokens of all ranks.
    fn of(ranks: &[DecodeFigures]) -> Self {
        let calls = CallSummary::of(ranks.iter().map(|rank| rank.tokens));
        Self {
            seconds_per_token: calls.seconds / calls.calls.max(1) as f64,
            bytes_per_token_least: ranks.iter().map(|rank| rank.tokens.least_sent).sum(),
            bytes_per_token_most: ranks.iter().map(|rank| rank.tokens.most_sent).sum(),
            calls,
        }
    }
}

impl From<&DecodeFigures> for RankMemory {
    fn from(&DecodeFigures { rows, buffer_bytes, .. }: &DecodeFigures) -> Self {
        Self { rows, buffer_bytes }
    }
}

impl DecodeSummary {
    /// Prints the summary as text.
    fn print(&self) {
        let Self { prefill, tokens, .. } = self;
        let rows = |rows: usize| counted(rows as u64, "row", "rows");
        say!(
            "{} of {}, {}, {}, {} cached in pages of {}",
            counted(self.ranks as u64, "rank", "ranks"),
            counted(self.threads as u64, "thread", "threads"),
            self.backend,
            self.dtype,
            rows(self.rows),
            grouped(self.page_rows)
        );
        say!(
            "prefill   {} in {}: {:.3} s, sent {}",
            rows(self.prefill_rows),
            counted(prefill.calls, "call", "calls"),
            prefill.seconds,
            bytes(prefill.bytes_sent)
        );
        say!(
            "tokens    {}: {:.3} ms and {} each, {} predicted",
            grouped(tokens.calls.calls),
            1e3 * tokens.seconds_per_token,
            bytes(tokens.bytes_per_token_most),
            bytes(tokens.calls.bytes_predicted / tokens.calls.calls.max(1))
        );
        say!(
            "wrote {} ({}), total time {:.3} s",
            self.output,
            bytes(self.output_bytes),
            self.seconds
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_of_all_ranks_are_summed_up() {
        let mut rank = DecodeFigures::default();
        [[9, 9], [7, 8]].into_iter().for_each(|bytes| rank.tokens.add(0.25, bytes));
        let tokens = TokenSummary::of(&[rank, rank]);
        assert_eq!((tokens.bytes_per_token_least, tokens.bytes_per_token_most), (14, 18));
        assert_eq!((tokens.calls.bytes_sent, tokens.calls.bytes_predicted), (32, 34));
        assert_eq!((tokens.calls.calls, tokens.seconds_per_token), (2, 0.25));
    }
}
