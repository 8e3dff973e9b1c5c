//! The steps of large rings, as means over the steps of a pass.
//!
//! ```text
//! messages   steps in which some group sends a message: of a trimmed ring (a window) few
//! pass       messages · (mean tiles and bytes), then mean tiles under which no message moves
//! mean       tiles / (messages + 1), bytes / messages
//! crowded    messages take as much longer as bytes share links unevenly: final gradients of a
//!            window (`PassTraffic::crowded`)
//! ```

use super::{
    network::Transfer,
    timed_step::{PairSeconds, TimedStep},
};
use crate::{BackwardMode, Work, strategy::PassTraffic};

/// One ring over many groups: work of each group, in all steps together.
pub(super) struct MeanRing<'a> {
    pub(super) work: &'a Work,
    pub(super) seconds: PairSeconds,
}

impl MeanRing<'_> {
    /// Returns the steps of a forward pass with this traffic.
    pub(super) fn forward(&self, traffic: &PassTraffic) -> Vec<TimedStep> {
        self.steps(self.seconds.forward_pass(), traffic)
    }

    /// Returns the steps of a backward pass with this traffic.
    pub(super) fn backward(&self, mode: BackwardMode, traffic: &PassTraffic) -> Vec<TimedStep> {
        self.steps(self.seconds.backward_pass(mode), traffic)
    }

    /// Returns a mean step as often as there are steps with messages, in each of which a group
    /// sends equal messages to the next, and the step of the last block.
    fn steps(&self, pair_seconds: f64, traffic: &PassTraffic) -> Vec<TimedStep> {
        let PassTraffic { bytes, message_steps, crowded } = traffic;
        let groups = bytes.len();
        let steps = (message_steps + 1) as f64;
        let compute = |group| self.work.of_rank(group) as f64 * pair_seconds / steps;
        let compute: Vec<f64> = (0..groups).map(compute).collect();
        let transfer = |(from, &bytes): (usize, &u128)| {
            Transfer::in_step(from, (from + 1) % groups, bytes as f64 / *message_steps as f64)
        };
        let transfers = bytes.iter().enumerate().map(transfer);
        // no message moves under the tiles of the last block
        let last = TimedStep { compute: compute.clone(), ..TimedStep::idle(groups) };
        if *message_steps == 0 {
            return vec![last];
        }
        let transfers = transfers.filter(|transfer| transfer.bytes > 0.0).collect();
        let repeats = *message_steps;
        let most = bytes.iter().copied().max().unwrap_or(0).max(1);
        let sharing = 1.0 + *crowded as f64 / most as f64;
        vec![TimedStep { compute, transfers, repeats, sharing, ..TimedStep::idle(groups) }, last]
    }
}
