//! The steps of large rings, as means over the steps of a pass.

use super::{
    network::Transfer,
    timed_step::{PairSeconds, TimedStep},
};
use crate::{BackwardMode, Work};

/// One ring over many groups: work and bytes of each group, in all steps together.
pub(super) struct MeanRing<'a> {
    pub(super) work: &'a Work,
    pub(super) seconds: PairSeconds,
}

impl MeanRing<'_> {
    /// Returns the steps of a forward pass in which each group sends so many bytes.
    pub(super) fn forward(&self, bytes: &[u128]) -> Vec<TimedStep> {
        self.steps(self.seconds.forward_pass(), bytes)
    }

    /// Returns the steps of a backward pass in which each group sends so many bytes.
    pub(super) fn backward(&self, mode: BackwardMode, bytes: &[u128]) -> Vec<TimedStep> {
        self.steps(self.seconds.backward_pass(mode), bytes)
    }

    /// Returns a mean step as often as there are other groups, in each of which a group sends equal
    /// messages to the next, and the step of the last block.
    fn steps(&self, pair_seconds: f64, bytes: &[u128]) -> Vec<TimedStep> {
        let groups = bytes.len();
        let compute = |group| self.work.of_rank(group) as f64 * pair_seconds / groups as f64;
        let compute: Vec<f64> = (0..groups).map(compute).collect();
        let transfer = |(from, &bytes): (usize, &u128)| {
            let to = (from + 1) % groups;
            Transfer { from, to, bytes: bytes as f64 / (groups - 1) as f64 }
        };
        let transfers = bytes.iter().enumerate().map(transfer);
        let transfers = transfers.filter(|transfer| transfer.bytes > 0.0).collect();
        let mean = TimedStep {
            compute: compute.clone(),
            transfers,
            repeats: groups - 1,
            ..TimedStep::idle(groups)
        };
        // no message moves under the tiles of the last block
        vec![mean, TimedStep { compute, ..TimedStep::idle(groups) }]
    }
}
