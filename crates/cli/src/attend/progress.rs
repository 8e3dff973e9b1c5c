//! Progress bar on a terminal: counts the blocks, or parts of blocks, on which the ranks of this
//! process have computed. It observes plans by their step events.

use std::time::Duration;

use annulus::{
    Setup,
    comm::ring::{Activity, StepEvent},
};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::report;

/// Progress bar. It is hidden where standard error is not a terminal.
#[derive(Debug)]
pub(crate) struct Progress(ProgressBar);

impl Progress {
    /// Creates a bar on the terminal of standard error. Messages are printed above it.
    pub(crate) fn on_terminal() -> Self {
        let bar = ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::stderr());
        // the tick needs a thread, whose failure to start would end the program: only if visible
        if !bar.is_hidden() {
            bar.enable_steady_tick(Duration::from_millis(200));
        }
        report::set_progress_bar(Some(bar.clone()));
        Self(bar)
    }

    /// Creates a bar that is never drawn.
    pub(crate) fn hidden() -> Self {
        Self(ProgressBar::hidden())
    }

    /// Starts a phase in which the ranks of this process compute on `blocks` blocks. Without blocks
    /// only the elapsed time is shown.
    pub(crate) fn phase(&self, name: &'static str, blocks: usize) {
        let template = if blocks > 0 {
            "{msg:9} {wide_bar} {pos}/{len} blocks {elapsed}"
        } else {
            "{msg:9} {spinner} {elapsed}"
        };
        if let Ok(style) = ProgressStyle::with_template(template) {
            self.0.set_style(style);
        }
        self.0.set_message(name);
        self.0.set_length(blocks as u64);
        self.0.set_position(0);
    }

    /// Advances the bar with every block of the plans of `setup`. Without a visible bar plans make
    /// no events.
    pub(crate) fn observe(&self, setup: Setup) -> Setup {
        if self.0.is_hidden() { setup } else { advance(setup, self.0.clone()) }
    }

    /// Removes the bar.
    pub(crate) fn finish(&self) {
        self.0.finish_and_clear();
        report::set_progress_bar(None);
    }
}

fn advance(setup: Setup, bar: ProgressBar) -> Setup {
    let observe = move |event: StepEvent| {
        if event.activity == Activity::Compute {
            bar.inc(1);
        }
    };
    setup.map_runtime(|runtime| runtime.on_step(observe))
}

#[cfg(test)]
mod tests {
    use annulus::{
        Attention, Dims, Division, Plan, Strategy, Tensors,
        comm::threads::{each_rank, ring},
    };
    use ndarray::Array4;

    use super::*;
    use crate::attend::run::blocks;

    /// Returns (counted, planned) numbers of blocks of a forward and of a backward pass.
    fn counted(setup: &Setup, ranks: usize, len: usize) -> [(u64, usize); 2] {
        let dims = Dims::new(1, len, 2, 8);
        let bar = ProgressBar::hidden();
        let setup = advance(setup.clone(), bar.clone());
        let mut plans =
            each_rank(ring(ranks), |_, endpoint| Plan::new(&setup, dims, endpoint)).unwrap();
        let [of_forward, of_backward] = blocks(plans.iter());
        let tensors: Vec<Array4<f32>> = plans
            .iter()
            .map(|plan| Array4::from_elem((1, plan.q_rows().len() as usize, 2, 8), 0.5))
            .collect();
        let forwards = each_rank(plans.iter_mut().zip(&tensors), |_, (plan, x)| {
            plan.forward(&Tensors::new(x.view(), x.view(), x.view()))
        })
        .unwrap();
        let in_forward = bar.position();
        each_rank(
            plans.iter_mut().zip(tensors.iter().zip(&forwards)),
            |_, (plan, (x, forward))| {
                plan.backward(&Tensors::new(x.view(), x.view(), x.view()), forward, x.view(), None)
            },
        )
        .unwrap();
        [(in_forward, of_forward), (bar.position() - in_forward, of_backward)]
    }

    #[test]
    fn the_bar_ends_full() {
        // long enough that the last block of each rank is split into four messages
        for ranks in [1, 3, 4] {
            for setup in [
                Attention::new().into(),
                Attention::new().causal(true).into(),
                Attention::new().sliding_window(40, 0).into(),
                Attention::new().causal(true).reproducible(true).into(),
                Setup::from((
                    Attention::new().causal(true),
                    Division::new().strategy(Strategy::AllGather),
                )),
            ] {
                for (got, want) in counted(&setup, ranks, 512 * ranks) {
                    assert_eq!(got, want as u64, "{ranks} ranks, {setup:?}");
                }
            }
        }
        // the local block, one from each of the others, the last in four parts
        assert_eq!(counted(&Setup::default(), 3, 1536)[0].1, 3 * (1 + 1 + 4));
    }
}
