//! Summary of an attention over files: times, rates and bytes, as text or JSON.

use annulus::Report;
use serde_json::{Value, json};

use crate::{
    failure::Failure,
    report::{bytes, count, counted, exact_bytes},
    stdout::say,
};

/// Figures of one rank.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct AttendFigures {
    /// Visible pairs of its queries, all heads and batch rows.
    pub(super) pairs: f64,
    /// Peak memory of its process, in bytes.
    pub(super) peak: Option<u64>,
    /// Reports of the forward pass and, if there was one, of the backward pass.
    pub(super) reports: Vec<Report>,
}

/// Figures of one pass of all ranks.
#[derive(Debug, Clone)]
pub(crate) struct PassSummary {
    name: &'static str,
    /// Floating-point operations of all ranks.
    flops: f64,
    /// Reports by rank.
    reports: Vec<Report>,
    /// GFLOP/s of each rank.
    rates: Vec<f64>,
}

/// Figures of the whole run.
#[derive(Debug)]
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
    pub(super) pairs: f64,
    /// Forward pass and, if there was one, backward pass.
    pub(super) passes: Vec<PassSummary>,
    /// Seconds from the start of the plan to the completed output file.
    pub(super) seconds: f64,
    /// Largest peak memory of a process, in bytes.
    pub(super) peak: Option<u64>,
    /// Path of the output file.
    pub(super) output: String,
    /// Bytes of its tensors.
    pub(super) output_bytes: u64,
    /// Error of writing the traces. The output file is complete in any case.
    pub(crate) untraced: Option<Failure>,
}

impl AttendFigures {
    /// Encodes the figures as numbers for an all-gather.
    pub(super) fn numbers(&self) -> Vec<f64> {
        let of_report = |report: &Report| {
            [
                report.seconds,
                report.waiting_seconds,
                report.bytes_sent as f64,
                report.bytes_predicted as f64,
            ]
        };
        let mut numbers = vec![self.pairs, self.peak.map_or(f64::NAN, |peak| peak as f64)];
        numbers.extend(self.reports.iter().flat_map(of_report));
        numbers
    }

    /// Decodes [`AttendFigures::numbers`]. Counts are exact up to 2⁵³.
    pub(super) fn of_numbers(numbers: &[f64]) -> Self {
        let of_numbers = |&[seconds, waiting_seconds, sent, predicted]: &[f64; 4]| {
            let mut report = Report::default();
            report.seconds = seconds;
            report.waiting_seconds = waiting_seconds;
            report.bytes_sent = sent as u64;
            report.bytes_predicted = predicted as u64;
            report
        };
        let (head, reports) = numbers.split_at(numbers.len().min(2));
        let peak = head.get(1).filter(|peak| !peak.is_nan()).map(|&peak| peak as u64);
        let reports = reports.as_chunks::<4>().0.iter().map(of_numbers).collect();
        Self { pairs: head.first().copied().unwrap_or_default(), peak, reports }
    }
}

impl PassSummary {
    /// Collects the figures of pass number `index` from those of all ranks.
    pub(super) fn new(
        name: &'static str,
        index: usize,
        flops_per_pair: f64,
        ranks: &[AttendFigures],
    ) -> Self {
        let of_rank =
            |rank: &AttendFigures| Some((*rank.reports.get(index)?, flops_per_pair * rank.pairs));
        let (reports, flops): (Vec<Report>, Vec<f64>) = ranks.iter().filter_map(of_rank).unzip();
        let rates = reports
            .iter()
            .zip(&flops)
            .map(|(report, flops)| rate(*flops, report.seconds))
            .collect();
        Self { name, flops: flops.iter().sum(), reports, rates }
    }

    fn each(&self, of: impl Fn(&Report) -> f64) -> Vec<f64> {
        self.reports.iter().map(of).collect()
    }

    /// Prints the time of the slowest rank, the rate and the bytes of all ranks, and the exposed
    /// communication as a share of the time of all ranks. For several ranks, a second line has the
    /// least, the mean and the most of each figure.
    fn print(&self) {
        let seconds = self.each(|report| report.seconds);
        let waiting = self.each(|report| report.waiting_seconds);
        let sum = |all: &[f64]| all.iter().sum::<f64>();
        let slowest = seconds.iter().copied().fold(0.0, f64::max);
        let share = |waiting: f64, seconds: f64| {
            if seconds > 0.0 { 100.0 * waiting / seconds } else { 0.0 }
        };
        say!(
            "{:<9} {slowest:.3} s, {:.1} GFLOP/s, sent {}, waiting {:.1} % of the time",
            self.name,
            rate(self.flops, slowest),
            against_prediction(self.bytes_sent(), self.bytes_predicted()),
            share(sum(&waiting), sum(&seconds))
        );
        if self.reports.len() > 1 {
            let shares: Vec<f64> = waiting
                .iter()
                .zip(&seconds)
                .map(|(&waiting, &seconds)| share(waiting, seconds))
                .collect();
            say!(
                "{:<9} per rank (least, mean, most): {} s, {} GFLOP/s, waiting {} %, sent {}",
                "",
                spread(&seconds, decimals(3)),
                spread(&self.rates, decimals(1)),
                spread(&shares, decimals(1)),
                spread(&self.each(|report| report.bytes_sent as f64), |number| bytes(
                    number as u64
                )),
            );
        }
    }

    fn bytes_sent(&self) -> u64 {
        self.reports.iter().map(|report| report.bytes_sent).sum()
    }

    fn bytes_predicted(&self) -> u64 {
        self.reports.iter().map(|report| report.bytes_predicted).sum()
    }

    fn json(&self) -> Value {
        let of_rank = |(report, rate): (&Report, &f64)| {
            json!({
                "seconds": report.seconds,
                "gflops": rate,
                "waiting_seconds": report.waiting_seconds,
                "bytes_sent": report.bytes_sent,
                "bytes_predicted": report.bytes_predicted,
            })
        };
        let slowest = self.each(|report| report.seconds).into_iter().fold(0.0, f64::max);
        json!({
            "pass": self.name,
            "seconds": slowest,
            "gflops": rate(self.flops, slowest),
            "bytes_sent": self.bytes_sent(),
            "bytes_predicted": self.bytes_predicted(),
            "per_rank": self.reports.iter().zip(&self.rates).map(of_rank).collect::<Vec<_>>(),
        })
    }
}

impl AttendSummary {
    /// Prints the summary as text.
    pub(crate) fn print(&self) {
        let Self { backend, strategy, layout, route, dtype, .. } = self;
        let ranks = counted(self.ranks as u64, "rank", "ranks");
        let threads = counted(self.threads as u64, "thread", "threads");
        let pairs = format!(
            "{} visible pair{}",
            count(self.pairs),
            if self.pairs == 1.0 { "" } else { "s" }
        );
        let strategy = if strategy == "ring" { String::new() } else { format!("{strategy}, ") };
        say!(
            "{ranks} of {threads}, {backend}, {strategy}{layout} layout, {route} route, {dtype}, \
             {pairs}"
        );
        self.passes.iter().for_each(PassSummary::print);
        let memory =
            self.peak.map(|peak| format!(", peak memory {}", bytes(peak))).unwrap_or_default();
        say!(
            "wrote {} ({}), total time {:.3} s{memory}",
            self.output,
            bytes(self.output_bytes),
            self.seconds
        );
    }

    /// Formats the summary as one line of JSON.
    pub(crate) fn json(&self) -> String {
        json!({
            "ranks": self.ranks,
            "threads": self.threads,
            "backend": self.backend,
            "strategy": self.strategy,
            "layout": self.layout,
            "route": self.route,
            "dtype": self.dtype,
            "visible_pairs": self.pairs,
            "passes": self.passes.iter().map(PassSummary::json).collect::<Vec<_>>(),
            "seconds": self.seconds,
            "peak_bytes": self.peak,
            "output": self.output,
            "output_bytes": self.output_bytes,
        })
        .to_string()
    }

    /// True if in every pass every rank sent exactly the bytes that its schedule predicts.
    pub(crate) fn bytes_as_predicted(&self) -> bool {
        self.passes
            .iter()
            .flat_map(|pass| &pass.reports)
            .all(|report| report.bytes_sent == report.bytes_predicted)
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
    let (least, most) = numbers
        .iter()
        .fold((f64::INFINITY, f64::NEG_INFINITY), |(a, b), &number| (a.min(number), b.max(number)));
    let mean = numbers.iter().sum::<f64>() / numbers.len().max(1) as f64;
    [least, mean, most].map(written).join(", ")
}

/// Returns a formatter for numbers with `digits` decimals.
fn decimals(digits: usize) -> impl Fn(f64) -> String {
    move |number| format!("{number:.digits$}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_encoded_and_decoded_without_loss() {
        let mut report = Report::default();
        report.seconds = 0.25;
        report.waiting_seconds = 0.125;
        report.bytes_sent = 1 << 40;
        report.bytes_predicted = 7;
        for (peak, reports) in
            [(None, vec![report]), (Some(3 << 33), vec![report, Report::default()])]
        {
            let figures = AttendFigures { pairs: 1e15, peak, reports };
            assert_eq!(AttendFigures::of_numbers(&figures.numbers()), figures);
        }
    }

    #[test]
    fn a_spread_has_least_mean_and_most() {
        assert_eq!(spread(&[2.0, 1.0, 6.0], decimals(1)), "1.0, 3.0, 6.0");
        assert_eq!(spread(&[4.0], decimals(0)), "4, 4, 4");
    }

    #[test]
    fn bytes_are_in_binary_units_and_in_full() {
        assert_eq!(
            against_prediction(37_748_736, 37_748_736),
            "36.0 MiB (37 748 736 bytes) as predicted"
        );
        assert_eq!(against_prediction(0, 0), "0 B as predicted");
        assert_eq!(
            against_prediction(1024, 2048),
            "1.00 KiB (1 024 bytes), but 2.00 KiB (2 048 bytes) predicted"
        );
    }
}
