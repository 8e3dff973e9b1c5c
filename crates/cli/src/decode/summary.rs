//! Summary of a decoding: times, and bytes of a token, as text or JSON.

use serde_json::{Value, json};

use crate::{
    report::{bytes, counted, grouped},
    stdout::say,
};

/// Calls of one rank of the same kind.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct CallFigures {
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
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct DecodeFigures {
    pub(super) prefill: CallFigures,
    pub(super) tokens: CallFigures,
    /// Cached rows.
    pub(super) rows: u64,
    /// Bytes of keys, values and message buffers.
    pub(super) buffer_bytes: u64,
}

/// Figures of the whole run.
#[derive(Debug)]
pub(super) struct DecodeSummary {
    /// Threads of each rank.
    pub(super) threads: usize,
    /// Name of the backend.
    pub(super) backend: &'static str,
    /// Name of the element type.
    pub(super) dtype: &'static str,
    /// Cached rows of all ranks.
    pub(super) rows: usize,
    /// Rows of a page.
    pub(super) page_rows: u64,
    /// Rows of the prefill.
    pub(super) prefill_rows: usize,
    /// Figures by rank.
    pub(super) ranks: Vec<DecodeFigures>,
    /// Seconds from the start to the completed output file.
    pub(super) seconds: f64,
    /// Path of the output file.
    pub(super) output: String,
    /// Bytes of its tensors.
    pub(super) output_bytes: u64,
}

impl CallFigures {
    /// Adds a call with the payload bytes sent and predicted.
    pub(super) fn add(&mut self, seconds: f64, [sent, predicted]: [u64; 2]) {
        self.least_sent = if self.count == 0 { sent } else { self.least_sent.min(sent) };
        self.most_sent = self.most_sent.max(sent);
        self.count += 1;
        self.seconds += seconds;
        self.sent += sent;
        self.predicted += predicted;
    }

    fn numbers(&self) -> [f64; 6] {
        let Self { count, seconds, sent, least_sent, most_sent, predicted } = *self;
        let [count, sent, least_sent, most_sent, predicted] =
            [count, sent, least_sent, most_sent, predicted].map(|number| number as f64);
        [count, seconds, sent, least_sent, most_sent, predicted]
    }

    fn of_numbers(&[count, seconds, sent, least_sent, most_sent, predicted]: &[f64; 6]) -> Self {
        let [count, sent, least_sent, most_sent, predicted] =
            [count, sent, least_sent, most_sent, predicted].map(|number| number as u64);
        Self { count, seconds, sent, least_sent, most_sent, predicted }
    }
}

impl DecodeFigures {
    /// Numbers of one rank.
    const NUMBERS: usize = 14;

    /// Encodes the figures as numbers for an all-gather.
    pub(super) fn numbers(&self) -> [f64; Self::NUMBERS] {
        let mut numbers = [0.0; Self::NUMBERS];
        numbers[..6].copy_from_slice(&self.prefill.numbers());
        numbers[6..12].copy_from_slice(&self.tokens.numbers());
        numbers[12..].copy_from_slice(&[self.rows as f64, self.buffer_bytes as f64]);
        numbers
    }

    /// Decodes [`DecodeFigures::numbers`] of all ranks. Counts are exact up to 2⁵³.
    pub(super) fn of_numbers(all: &[f64]) -> Vec<Self> {
        let of_rank = |numbers: &[f64; Self::NUMBERS]| {
            let calls = numbers.as_chunks::<6>().0;
            Self {
                prefill: CallFigures::of_numbers(&calls[0]),
                tokens: CallFigures::of_numbers(&calls[1]),
                rows: numbers[12] as u64,
                buffer_bytes: numbers[13] as u64,
            }
        };
        all.as_chunks::<{ Self::NUMBERS }>().0.iter().map(of_rank).collect()
    }
}

/// Sums over ranks of the calls of one kind.
struct Total {
    /// Calls of a rank.
    count: u64,
    /// Seconds of the slowest rank.
    seconds: f64,
    sent: u64,
    /// Payload bytes of all ranks in the calls with the least and the most.
    of_a_call: [u64; 2],
    predicted: u64,
}

impl Total {
    fn of(ranks: &[DecodeFigures], calls: impl Fn(&DecodeFigures) -> CallFigures) -> Self {
        let all: Vec<CallFigures> = ranks.iter().map(calls).collect();
        let sum = |of: fn(&CallFigures) -> u64| all.iter().map(of).sum();
        Self {
            count: all.first().map_or(0, |calls| calls.count),
            seconds: all.iter().map(|calls| calls.seconds).fold(0.0, f64::max),
            sent: sum(|calls| calls.sent),
            of_a_call: [sum(|calls| calls.least_sent), sum(|calls| calls.most_sent)],
            predicted: sum(|calls| calls.predicted),
        }
    }

    fn seconds_of_a_call(&self) -> f64 {
        if self.count == 0 { 0.0 } else { self.seconds / self.count as f64 }
    }

    fn json(&self) -> Value {
        json!({
            "calls": self.count,
            "seconds": self.seconds,
            "bytes_sent": self.sent,
            "bytes_predicted": self.predicted,
        })
    }
}

impl DecodeSummary {
    fn totals(&self) -> [Total; 2] {
        let ranks = &self.ranks;
        [Total::of(ranks, |rank| rank.prefill), Total::of(ranks, |rank| rank.tokens)]
    }

    /// Prints the summary as text.
    pub(super) fn print(&self) {
        let [prefill, tokens] = self.totals();
        let rows = |rows: usize| counted(rows as u64, "row", "rows");
        say!(
            "{} of {}, {}, {}, {} cached in pages of {}",
            counted(self.ranks.len() as u64, "rank", "ranks"),
            counted(self.threads as u64, "thread", "threads"),
            self.backend,
            self.dtype,
            rows(self.rows),
            grouped(self.page_rows)
        );
        say!(
            "prefill   {} in {}: {:.3} s, sent {}",
            rows(self.prefill_rows),
            counted(prefill.count, "call", "calls"),
            prefill.seconds,
            bytes(prefill.sent)
        );
        say!(
            "tokens    {}: {:.3} ms and {} each, {} predicted",
            grouped(tokens.count),
            1e3 * tokens.seconds_of_a_call(),
            bytes(tokens.of_a_call[1]),
            bytes(tokens.predicted / tokens.count.max(1))
        );
        say!(
            "wrote {} ({}), total time {:.3} s",
            self.output,
            bytes(self.output_bytes),
            self.seconds
        );
    }

    /// Formats the summary as one line of JSON. Bytes are those of all ranks.
    pub(super) fn json(&self) -> String {
        let [prefill, tokens] = self.totals();
        let of_rank =
            |rank: &DecodeFigures| json!({ "rows": rank.rows, "buffer_bytes": rank.buffer_bytes });
        let mut of_tokens = tokens.json();
        let [least, most] = tokens.of_a_call;
        of_tokens["seconds_per_token"] = json!(tokens.seconds_of_a_call());
        of_tokens["bytes_per_token_least"] = json!(least);
        of_tokens["bytes_per_token_most"] = json!(most);
        json!({
            "ranks": self.ranks.len(),
            "threads": self.threads,
            "backend": self.backend,
            "dtype": self.dtype,
            "rows": self.rows,
            "page_rows": self.page_rows,
            "prefill_rows": self.prefill_rows,
            "prefill": prefill.json(),
            "tokens": of_tokens,
            "per_rank": self.ranks.iter().map(of_rank).collect::<Vec<_>>(),
            "seconds": self.seconds,
            "output": self.output,
            "output_bytes": self.output_bytes,
        })
        .to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_encoded_and_decoded_without_loss() {
        let mut first =
            DecodeFigures { rows: 7, buffer_bytes: 1 << 40, ..DecodeFigures::default() };
        first.prefill.add(0.5, [3, 3]);
        [[9, 9], [7, 8]].into_iter().for_each(|bytes| first.tokens.add(0.25, bytes));
        let second = DecodeFigures { tokens: first.prefill, ..first };
        let numbers = [first.numbers(), second.numbers()].concat();
        assert_eq!(DecodeFigures::of_numbers(&numbers), [first, second]);
        let tokens = Total::of(&[first, first], |rank| rank.tokens);
        assert_eq!((tokens.of_a_call, tokens.sent, tokens.predicted), ([14, 18], 32, 34));
        assert_eq!((tokens.count, tokens.seconds_of_a_call()), (2, 0.25));
    }
}
