//! When a message of a step may begin, and which rank waits for it when.
//!
//! ```text
//! in step    begins when both ranks have begun its step, which ends on both after it
//! block      posted up to `ahead` steps before its step; the receiver begins the next step when it
//!            has arrived, and nobody waits for its send, but for its buffer
//! partial    gradient that follows a block: the receiver ends the step with it; the sender waits
//!            for it some steps later
//! final      gradient of own rows: posted once the receiver has a buffer; it waits for it at the
//!            end, and the sender some steps later
//! ```
//! With blocks as the ring engine moves them:
//!
//! ```text
//! receive    once block j − buffers, whose buffer it takes, has been computed on and sent on
//! forward    once it has arrived; on a relay, not before step − receive_ahead
//! local      on a route that keeps the local block, once the sends before have ended, or in its
//!            step
//! sum        of the gradients of a block: is sent before the one is computed that takes its buffer
//! final      is received once the one that had its buffer has arrived, and all before that
//! ```

use crate::{Channel, Schedule, Step, block_buffers, gradient_buffers};

/// When a message begins, and who waits for it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Pace {
    /// Both ranks begin and end it in its step: of exchanges, agreements and mean steps.
    InStep,
    /// A block that circulates.
    Block(BlockPace),
    /// A partial gradient, for which the receiver waits at the end of the step.
    PartialGradient {
        /// Steps after which the sender waits for it, at least 1.
        sent: usize,
    },
    /// A final gradient, for which the receiver waits at the end of the ring.
    FinalGradient {
        /// As of a partial gradient.
        sent: usize,
        /// Buffers of the receiver for final gradients.
        buffers: usize,
    },
}

/// When the message of a block begins.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct BlockPace {
    /// Steps before its own in which both ranks may post it.
    pub(super) ahead: usize,
    /// Steps before its own in which the receiver computes on the block whose buffer it takes;
    /// `None` if its buffer is free from the begin.
    pub(super) frees: Option<usize>,
    /// True if it is sent from the local block that its rank keeps, false if from a buffer.
    pub(super) from_local: bool,
    /// True if it arrives in parts, under the tiles of the next step.
    pub(super) in_parts: bool,
}

/// When the blocks of one circulation begin.
pub(super) struct BlockPaces {
    /// Steps by which blocks are posted ahead, at least 1; `None` if from the begin.
    ahead: Option<usize>,
    /// By step: true if blocks of the next step are sent by their owners.
    from_local: Vec<bool>,
    /// By rank and step: [`BlockPace::frees`] of the block that is received.
    frees: Vec<Vec<Option<usize>>>,
}

impl BlockPaces {
    pub(super) fn new(schedule: &Schedule, receive_ahead: usize) -> Self {
        let ranks = schedule.steps.len();
        let route = schedule.route;
        let keeps_local = route.keeps_local(ranks);
        let frees = |rank: usize| {
            let steps = &schedule.steps[rank];
            let received = steps.iter().enumerate().filter_map(|(step, of)| {
                let rows: u64 = of.before.receives.iter().map(|message| message.rows.count()).sum();
                // the block of the next step
                (!of.before.receives.is_empty()).then_some((step + 1, rows))
            });
            // on a relay the local block is in the first buffer
            let local = steps.first().filter(|_| !keeps_local).map(|of| (0, of.rows.count()));
            let blocks: Vec<(usize, u64)> = local.into_iter().chain(received).collect();
            let rows: Vec<u64> = blocks.iter().map(|&(_, rows)| rows).collect();
            let buffers = block_buffers(&rows, receive_ahead, keeps_local).len();
            let mut frees = vec![None; steps.len()];
            for (&(earlier, _), &(step, _)) in blocks.iter().zip(blocks.iter().skip(buffers)) {
                frees[step - 1] = Some(step - 1 - earlier);
            }
            frees
        };
        Self {
            ahead: (!keeps_local).then_some(receive_ahead.max(1)),
            from_local: (0..ranks)
                .map(|step| keeps_local && !route.forwards(step + 1, ranks))
                .collect(),
            frees: (0..ranks).map(frees).collect(),
        }
    }

    /// Returns when the block that is posted for `step` begins, and is received by rank `to`.
    pub(super) fn pace(&self, to: usize, step: usize, in_parts: bool) -> Pace {
        let of = |frees: &Vec<Option<usize>>| frees.get(step).copied().flatten();
        Pace::Block(BlockPace {
            ahead: self.ahead.map_or(step, |ahead| step.min(ahead - 1)),
            frees: self.frees.get(to).and_then(of),
            from_local: self.from_local.get(step).is_some_and(|&local| local),
            in_parts,
        })
    }
}

/// When the gradients of one circulation must have been sent and received.
pub(super) struct GradientPaces {
    /// By rank and step: steps after which it waits for the sum that it sends after the step.
    sent: Vec<Vec<usize>>,
    /// By rank: buffers for final gradients.
    buffers: Vec<usize>,
}

impl GradientPaces {
    pub(super) fn new(schedule: &Schedule, receive_ahead: usize) -> Self {
        let further = schedule.route.keeps_local(schedule.steps.len());
        let of_rank = |steps: &Vec<Step>| {
            let has_sum = |step: &usize| *step > 0 && !steps[*step].rows.is_empty();
            let sums: Vec<usize> = (0..steps.len()).filter(has_sum).collect();
            let sum_rows: Vec<u64> = sums.iter().map(|&step| steps[step].rows.count()).collect();
            let messages = steps.iter().flat_map(|step| &step.after.receives);
            let finals = messages.filter(|message| message.channel == Channel::FinalGrad);
            let final_rows: Vec<u64> = finals.map(|message| message.rows.count()).collect();
            let [of_sums, of_finals] =
                gradient_buffers(&sum_rows, &final_rows, receive_ahead, further);
            // the sum of step s is sent in step s + 1
            let sent = later(&sums, of_sums.len(), steps.len()).into_iter().map(|later| later - 1);
            (sent.collect(), of_finals.len())
        };
        let (sent, buffers) = schedule.steps.iter().map(of_rank).unzip();
        Self { sent, buffers }
    }

    /// Returns the pace of a gradient that rank `from` sends to rank `to` after a step.
    pub(super) fn pace(&self, channel: Channel, [from, to]: [usize; 2], step: usize) -> Pace {
        let sent = self.sent.get(from).and_then(|steps| steps.get(step)).copied();
        let sent = sent.unwrap_or(1).max(1);
        match channel {
            Channel::FinalGrad => {
                let buffers = self.buffers.get(to).copied().unwrap_or(1);
                Pace::FinalGradient { sent, buffers }
            }
            _ => Pace::PartialGradient { sent },
        }
    }
}

/// Returns, for each of `steps` steps, the number of steps until the `distance`-th one after it of
/// `of`, which are ascending: more than there are left if there is none, 1 for steps that are not
/// in `of`.
fn later(of: &[usize], distance: usize, steps: usize) -> Vec<usize> {
    let mut later = vec![1; steps];
    for (index, &step) in of.iter().enumerate() {
        later[step] = of.get(index + distance).map_or(steps + 1, |next| next - step);
    }
    later
}
