//! All-gathers of a pass: one at its entry and one at its end, whatever the strategy.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use annulus::{Attention, Dims, LocalRing, Result, Tensors};
use annulus_comm::{forward_control, forward_transport, threads::Threads};
use annulus_core::{Control, Host, Transport};
use annulus_cpu::Cpu;
use ndarray::Array4;

const RANKS: usize = 4;

/// Counts the all-gathers of all ranks.
struct Counted {
    inner: Threads,
    started: Arc<AtomicUsize>,
}

impl Control for Counted {
    forward_control! {
        rank ranks placement try_all_gather stragglers abort heartbeat last_heard last_work
    }

    fn start_all_gather(&mut self, round: u64, bytes: &[u8]) -> Result<()> {
        self.started.fetch_add(1, Ordering::SeqCst);
        self.inner.start_all_gather(round, bytes)
    }
}

impl Transport<Host> for Counted {
    forward_transport! {
        post progress take pending bytes_sent posts_ahead runs_groups_in_order
    }
}

#[test]
fn a_pass_of_any_strategy_has_two_agreements() -> Result<()> {
    let x = Array4::<f32>::ones((1, 16, 4, 8));
    let tensors = Tensors::new(x.view(), x.view(), x.view());
    for strategy in ["ring", "heads:2", "heads:4", "grid:1x4", "grid:2x2"] {
        let started = Arc::new(AtomicUsize::new(0));
        let attention = Attention::new().causal(true).strategy(strategy.parse()?);
        let dims = Dims::new(1, 16, 4, 8);
        let mut ring = LocalRing::with_transports(&attention, dims, RANKS, |_, inner| {
            Ok((Cpu::new(1)?, Counted { inner, started: Arc::clone(&started) }))
        })?;
        let agreements = || started.swap(0, Ordering::SeqCst) as f64 / RANKS as f64;
        agreements();
        let forward = ring.forward(&tensors)?;
        assert_eq!(agreements(), 2.0, "{strategy}, forward");
        ring.backward(&tensors, &forward, x.view(), None)?;
        assert_eq!(agreements(), 2.0, "{strategy}, backward");
    }
    Ok(())
}
