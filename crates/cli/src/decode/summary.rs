//! Summary of a decoding: times, and bytes of a token, as text or JSON.

use serde::{Deserialize, Serialize};

use crate::{
    report::{bytes, counted, grouped},
    stdout::say,
};

/// Calls of one rank of the same kind.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
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
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub(super) struct DecodeFigures {
    pub(super) prefill: CallFigures,
    pub(super) tokens: CallFigures,
    /// Cached rows.
    pub(super) rows: u64,
    /// Bytes of keys, values and message buffers.
    pub(super) buffer_bytes: u64,
}

/// Calls of all ranks of the same kind. Bytes are those of all ranks.
#[derive(Debug, Serialize)]
pub(super) struct CallSummary {
    /// Calls of a rank.
    calls: u64,
    /// Seconds of the slowest rank.
    seconds: f64,
    bytes_sent: u64,
    bytes_predicted: u64,
}

/// Calls of single tokens.
#[derive(Debug, Serialize)]
pub(super) struct TokenSummary {
    #[serde(flatten)]
    calls: CallSummary,
    seconds_per_token: f64,
    bytes_per_token_least: u64,
    bytes_per_token_most: u64,
}

/// Memory of one rank.
#[derive(Debug, Serialize)]
pub(super) struct RankMemory {
    rows: u64,
    buffer_bytes: u64,
}

/// Figures of the whole run.
#[derive(Debug, Serialize)]
pub(super) struct DecodeSummary {
    /// Number of ranks.
    pub(super) ranks: usize,
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
    pub(super) prefill: CallSummary,
    pub(super) tokens: TokenSummary,
    pub(super) per_rank: Vec<RankMemory>,
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
}

impl CallSummary {
    /// Sums up the calls of all ranks.
    pub(super) fn of(ranks: impl Iterator<Item = CallFigures>) -> Self {
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
    pub(super) fn of(ranks: &[DecodeFigures]) -> Self {
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
    pub(super) fn print(&self) {
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
