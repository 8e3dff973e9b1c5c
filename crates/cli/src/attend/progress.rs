//! Progress bar on a terminal: counts the blocks that the ranks of this process receive.
//!
//! A block may be split into several messages. The bar counts it once, by its sender, channel and
//! ring step.

use std::{
    collections::BTreeSet,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use annulus_core::{Arrived, Channel, Control, Host, MessageHeader, Result, Space, Transport};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::report;

/// Progress bar, shared by its clones. It is hidden where standard error is not a terminal.
#[derive(Debug, Clone)]
pub(crate) struct Progress {
    bar: ProgressBar,
    /// Number of the phase. A rank clears its set of counted blocks when it changes.
    phase: Arc<AtomicU64>,
}

impl Progress {
    /// Creates a bar on the terminal of standard error. Messages are printed above it.
    pub(crate) fn on_terminal() -> Self {
        let bar = ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::stderr());
        // the tick needs a thread, whose failure to start would end the program: only if visible
        if !bar.is_hidden() {
            bar.enable_steady_tick(Duration::from_millis(200));
        }
        report::set_progress_bar(Some(bar.clone()));
        Self { bar, phase: Arc::default() }
    }

    /// Creates a bar that is never drawn.
    pub(crate) fn hidden() -> Self {
        Self { bar: ProgressBar::hidden(), phase: Arc::default() }
    }

    /// Starts a phase in which the ranks of this process receive `blocks` blocks. Without blocks
    /// only the elapsed time is shown.
    pub(crate) fn phase(&self, name: &'static str, blocks: usize) {
        let template = if blocks > 0 {
            "{msg:9} {wide_bar} {pos}/{len} blocks {elapsed}"
        } else {
            "{msg:9} {spinner} {elapsed}"
        };
        if let Ok(style) = ProgressStyle::with_template(template) {
            self.bar.set_style(style);
        }
        self.phase.fetch_add(1, Ordering::Relaxed);
        self.bar.set_message(name);
        self.bar.set_length(blocks as u64);
        self.bar.set_position(0);
    }

    /// Removes the bar.
    pub(crate) fn finish(&self) {
        self.bar.finish_and_clear();
        report::set_progress_bar(None);
    }

    /// Number of blocks received in this phase.
    #[cfg(test)]
    pub(super) fn blocks(&self) -> usize {
        annulus_core::index(self.bar.position())
    }
}

/// Transport that advances the bar with every block it delivers.
#[derive(Debug)]
pub(crate) struct Watched<T> {
    inner: T,
    progress: Progress,
    /// Phase of `counted`.
    phase: u64,
    /// Blocks of which a message has arrived: sender, channel and ring step.
    counted: BTreeSet<(usize, Channel, usize)>,
}

impl<T> Watched<T> {
    /// Wraps `inner`.
    pub(crate) const fn new(inner: T, progress: Progress) -> Self {
        Self { inner, progress, phase: 0, counted: BTreeSet::new() }
    }

    fn count(&mut self, header: &MessageHeader) {
        let phase = self.progress.phase.load(Ordering::Relaxed);
        if phase != self.phase {
            self.phase = phase;
            self.counted.clear();
        }
        if self.counted.insert((header.peer, header.channel, header.step)) {
            self.progress.bar.inc(1);
        }
    }
}

impl<S: Space, T: Transport<S>> Transport<S> for Watched<T> {
    annulus_comm::forward_transport! {
        of S: post progress post_host pending bytes_sent posts_ahead runs_groups_in_order
    }

    fn take(&mut self, header: &MessageHeader) -> Result<Option<Arrived<S>>> {
        let taken = self.inner.take(header)?;
        if taken.is_some() {
            self.count(header);
        }
        Ok(taken)
    }

    fn take_host(&mut self, header: &MessageHeader) -> Result<Option<Arrived<Host>>> {
        let taken = self.inner.take_host(header)?;
        if taken.is_some() {
            self.count(header);
        }
        Ok(taken)
    }
}

impl<T: Control> Control for Watched<T> {
    annulus_comm::forward_control! {
        rank ranks start_all_gather try_all_gather stragglers abort heartbeat placement last_heard
        last_work
    }
}

#[cfg(test)]
mod tests {
    use annulus::{
        Attention, Dims, Plan, Tensors,
        comm::threads::{each_rank, ring},
    };
    use ndarray::Array4;

    use super::*;
    use crate::attend::ranks::blocks;

    /// Returns (received, planned) numbers of blocks of a forward and of a backward pass.
    fn arrived(attention: &Attention, ranks: usize, len: usize) -> [(usize, usize); 2] {
        let dims = Dims::new(1, len, 2, 8);
        let progress = Progress::hidden();
        let mut plans = each_rank(ring(ranks), |_, endpoint| {
            Plan::new(attention, dims, Watched::new(endpoint, progress.clone()))
        })
        .unwrap();
        let [of_forward, of_backward] = blocks(plans.iter());
        let tensors: Vec<Array4<f32>> = plans
            .iter()
            .map(|plan| Array4::from_elem((1, plan.q_rows().len() as usize, 2, 8), 0.5))
            .collect();
        progress.phase("forward", of_forward);
        let forwards = each_rank(plans.iter_mut().zip(&tensors), |_, (plan, x)| {
            plan.forward(&Tensors::new(x.view(), x.view(), x.view()))
        })
        .unwrap();
        let in_forward = progress.blocks();
        progress.phase("backward", of_backward);
        each_rank(
            plans.iter_mut().zip(tensors.iter().zip(&forwards)),
            |_, (plan, (x, forward))| {
                plan.backward(&Tensors::new(x.view(), x.view(), x.view()), forward, x.view(), None)
            },
        )
        .unwrap();
        [(in_forward, of_forward), (progress.blocks(), of_backward)]
    }

    #[test]
    fn a_block_in_several_messages_is_counted_once() {
        // long enough that the last block of each rank is split into four messages
        for ranks in [1, 3, 4] {
            for attention in [
                Attention::new(),
                Attention::new().causal(true),
                Attention::new().sliding_window(40, 0),
            ] {
                for (got, want) in arrived(&attention, ranks, 512 * ranks) {
                    assert_eq!(got, want, "{ranks} ranks, {attention:?}");
                }
            }
        }
        assert!(arrived(&Attention::new(), 3, 1536)[0].1 == 6);
    }
}
