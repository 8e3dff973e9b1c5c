//! Summary of an attention over files: times, rates and bytes, as text or JSON.

use annulus::Report;
use serde::{Deserialize, Serialize};

use crate::{
    failure::Failure,
    report::{bytes, count, counted, exact_bytes},
    say,
};

/// Figures of one rank.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct AttendFigures {
    /// Visible pairs of its queries, all heads and batch rows.
    pub(super) pairs: f64,
    /// Peak memory of its process, in bytes.
    pub(super) peak: Option<u64>,
    /// Figures of the forward pass and, if there was one, of the backward pass.
    pub(super) passes: Vec<PassFigures>,
}

/// Figures of one pass of one rank.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(super) struct PassFigures {
    seconds: f64,
    gflops: f64,
    waiting_seconds: f64,
    bytes_sent: u64,
    bytes_predicted: u64,
}

impl PassFigures {
    /// Returns the figures of a pass of `flops` floating-point operations.
    pub(super) fn new(report: &Report, flops: f64) -> Self {
        Self {
            seconds: report.seconds,
            gflops: rate(flops, report.seconds),
            waiting_seconds: report.waiting_seconds,
            bytes_sent: report.bytes_sent,
            bytes_predicted: report.bytes_predicted,
        }
    }
}

/// Figures of one pass of all ranks.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct PassSummary {
    #[serde(rename = "pass")]
    name: &'static str,
    /// Seconds of the slowest rank.
    seconds: f64,
    gflops: f64,
    bytes_sent: u64,
    bytes_predicted: u64,
    per_rank: Vec<PassFigures>,
}

/// Figures of the whole run.
#[derive(Debug, Serialize)]
pub(crate) struct AttendSummary {
    /// Ranks of the ring.
    pub(super) ranks: usize,
    /// Threads per rank.
    pub(super) threads: usize,
    /// Backend and transport of its blocks.
    pub(super) backend: String,
    /// Name of the strategy.
    pub(super) strategy: String,
    /// Name of the layout.
    pub(super) layout: &'static str,
    /// Name of the route.
    pub(super) route: &'static str,
    /// Name of the element type.
    pub(super) dtype: &'static str,
    /// Visible pairs, all heads and batch rows.
    pub(super) visible_pairs: f64,
    /// Forward pass and, if there was one, backward pass.
    pub(super) passes: Vec<PassSummary>,
    /// Seconds from the start of the plan to the completed output file.
    pub(super) seconds: f64,
    /// Largest peak memory of a process.
    pub(super) peak_bytes: Option<u64>,
    /// Path of the output file.
    pub(super) output: String,
    /// Bytes of its tensors.
    pub(super) output_bytes: u64,
    /// Error of writing the traces. The output file is complete in any case.
    #[serde(skip)]
    pub(crate) untraced: Option<Failure>,
}

impl PassSummary {
    /// Collects the figures of pass number `index`, of `flops` operations of all ranks.
    pub(super) fn new(
        name: &'static str,
        index: usize,
        flops: f64,
        ranks: &[AttendFigures],
    ) -> Self {
        let per_rank: Vec<PassFigures> =
            ranks.iter().filter_map(|rank| rank.passes.get(index).copied()).collect();
        let seconds = per_rank.iter().map(|of| of.seconds).fold(0.0, f64::max);
        Self {
            name,
            seconds,
            gflops: rate(flops, seconds),
            bytes_sent: per_rank.iter().map(|of| of.bytes_sent).sum(),
            bytes_predicted: per_rank.iter().map(|of| of.bytes_predicted).sum(),
            per_rank,
        }
    }

    /// Prints the time of the slowest rank, the rate and the bytes of all ranks, and the exposed
    /// communication as a share of the time of all ranks. For several ranks, a second line has the
    /// least, the mean and the most of each figure.
    fn print(&self) {
        let Self { name, seconds, gflops, per_rank, .. } = self;
        let each = |of: fn(&PassFigures) -> f64| per_rank.iter().map(of).collect::<Vec<f64>>();
        let share = |waiting: f64, all: f64| if all > 0.0 { 100.0 * waiting / all } else { 0.0 };
        let all = each(|of| of.seconds);
        let waiting = each(|of| of.waiting_seconds);
        say!(
            "{name:<9} {seconds:.3} s, {gflops:.1} GFLOP/s, sent {}, waiting {:.1} % of the time",
            against_prediction(self.bytes_sent, self.bytes_predicted),
            share(waiting.iter().sum(), all.iter().sum())
        );
        if per_rank.len() > 1 {
            let shares: Vec<f64> =
                waiting.iter().zip(&all).map(|(&waiting, &all)| share(waiting, all)).collect();
            say!(
                "{:<9} per rank (least, mean, most): {} s, {} GFLOP/s, waiting {} %, sent {}",
                "",
                spread(&all, |of| format!("{of:.3}")),
                spread(&each(|of| of.gflops), |of| format!("{of:.1}")),
                spread(&shares, |of| format!("{of:.1}")),
                spread(&each(|of| of.bytes_sent as f64), |of| bytes(of as u64)),
            );
        }
    }
}

impl AttendSummary {
    /// Prints the summary as text.
    pub(crate) fn print(&self) {
        let Self { backend, strategy, layout, route, dtype, .. } = self;
        let ranks = counted(self.ranks as u64, "rank", "ranks");
        let threads = counted(self.threads as u64, "thread", "threads");
        let pairs = count(self.visible_pairs);
        let plural = if self.visible_pairs == 1.0 { "" } else { "s" };
        let strategy = if strategy == "ring" { String::new() } else { format!("{strategy}, ") };
        say!(
            "{ranks} of {threads}, {backend}, {strategy}{layout} layout, {route} route, {dtype}, \
             {pairs} visible pair{plural}"
        );
        self.passes.iter().for_each(PassSummary::print);
        let memory = self.peak_bytes.map(|peak| format!(", peak memory {}", bytes(peak)));
        say!(
            "wrote {} ({}), total time {:.3} s{}",
            self.output,
            bytes(self.output_bytes),
            self.seconds,
            memory.unwrap_or_default()
        );
    }

    /// True if in every pass every rank sent exactly the bytes that its schedule predicts.
    pub(crate) fn bytes_as_predicted(&self) -> bool {
        let mut ranks = self.passes.iter().flat_map(|pass| &pass.per_rank);
        ranks.all(|of| of.bytes_sent == of.bytes_predicted)
    }
}

fn rate(flops: f64, seconds: f64) -> f64 {
    if seconds > 0.0 { flops / seconds / 1e9 } else { 0.0 }
}

/// Formats the bytes sent, and the bytes predicted if they differ.
fn against_prediction(sent: u64, predicted: u64) -> String {
    if sent == predicted {
        return format!("{} as predicted", exact_bytes(sent));
    }
    format!("{}, but {} predicted", exact_bytes(sent), exact_bytes(predicted))
}

/// Formats the least, the mean and the most of some numbers.
fn spread(numbers: &[f64], written: impl Fn(f64) -> String) -> String {
    let least = numbers.iter().copied().fold(f64::INFINITY, f64::min);
    let most = numbers.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let mean = numbers.iter().sum::<f64>() / numbers.len().max(1) as f64;
    [least, mean, most].map(written).join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spread_has_least_mean_and_most() {
        assert_eq!(spread(&[2.0, 1.0, 6.0], |of| format!("{of:.1}")), "1.0, 3.0, 6.0");
    }

    #[test]
    fn bytes_are_in_binary_units_and_in_full() {
        let many = 37_748_736;
        assert_eq!(against_prediction(many, many), "36.0 MiB (37 748 736 bytes) as predicted");
        assert_eq!(against_prediction(0, 0), "0 B as predicted");
        assert_eq!(
            against_prediction(1024, 2048),
            "1.00 KiB (1 024 bytes), but 2.00 KiB (2 048 bytes) predicted"
        );
    }
}
