//! What a job says when it is done.

use annulus::Report;

use crate::{memory::peak_bytes, report::say};

/// The figures of one pass over the ring.
#[derive(Debug, Clone)]
pub(crate) struct Pass {
    name: &'static str,
    seconds: f64,
    flops: f64,
    bytes_sent: u64,
    bytes_predicted: u64,
    waiting_share: f64,
}

/// The figures of a job.
#[derive(Debug, Clone)]
pub(crate) struct Summary {
    /// What was computed, on what.
    pub(super) head: String,
    /// Forward, and backward if there was one.
    pub(super) passes: Vec<Pass>,
    /// From the first byte read to the last written.
    pub(super) seconds: f64,
    /// The file and its size.
    pub(super) output: String,
}

impl Pass {
    /// Sums up what the ranks report: the slowest one's time, all bytes, and the share of all ranks' time that was spent waiting.
    pub(super) fn new(name: &'static str, reports: &[Report], flops: f64) -> Self {
        let sum = |of: fn(&Report) -> f64| reports.iter().map(of).sum::<f64>();
        let seconds = reports.iter().map(|report| report.seconds).fold(0.0, f64::max);
        let total = sum(|report| report.seconds);
        Self {
            name,
            seconds,
            flops,
            bytes_sent: reports.iter().map(|report| report.bytes_sent).sum(),
            bytes_predicted: reports.iter().map(|report| report.bytes_predicted).sum(),
            waiting_share: if total > 0.0 { sum(|report| report.waiting_seconds) / total } else { 0.0 },
        }
    }
}

impl Summary {
    /// Prints it.
    pub(crate) fn print(&self) {
        say!("{}", self.head);
        for Pass { name, seconds, flops, bytes_sent, bytes_predicted, waiting_share } in &self.passes {
            let rate = if *seconds > 0.0 { flops / seconds / 1e9 } else { 0.0 };
            say!(
                "{name:<9} {seconds:.3} s, {rate:.1} GFLOP/s, sent {bytes_sent} bytes of {bytes_predicted} predicted, waiting {:.1} % of the time",
                100.0 * waiting_share
            );
        }
        let memory = peak_bytes().map(|bytes| format!(", peak memory {} MiB", bytes >> 20)).unwrap_or_default();
        say!("wrote {} in {:.3} s in all{memory}", self.output, self.seconds);
    }

    /// Whether every pass sent exactly the bytes that its schedule predicts.
    pub(crate) fn bytes_as_predicted(&self) -> bool {
        self.passes.iter().all(|pass| pass.bytes_sent == pass.bytes_predicted)
    }
}
