//! Figures of every strategy that ranks and heads admit.

use annulus_core::{
    Backend, HeadGrid, Layout, Result, Spec, Strategy, StrategyTraffic, TrafficOptions,
};
use serde::Serialize;

use super::figures::MOST_STEPPED_RANKS;
use crate::report::bytes;

/// Figures of one strategy.
#[derive(Debug, Clone, Serialize)]
pub(super) struct StrategyFigures {
    /// Name of the strategy, as `--strategy` takes it.
    pub(super) name: String,
    /// Parts into which heads, queries and keys are divided at the same time; a part of the
    /// queries receives the keys one after another.
    pub(super) grid: [usize; 3],
    /// Payload bytes of a forward pass.
    pub(super) bytes_sent_total: u128,
    /// Those of the rank that sends the most.
    pub(super) bytes_max_rank: u128,
    /// Payload bytes of a backward pass.
    backward_bytes_sent_total: u128,
    /// Those of the rank that sends the most.
    backward_bytes_max_rank: u128,
    /// Upper bound of the bytes of message buffers and of exchanged tensors on a rank.
    pub(super) memory_max_rank: u128,
}

/// Traffic of the strategies, and the one that is planned.
#[derive(Default)]
pub(super) struct Strategies {
    all: Vec<StrategyTraffic>,
    /// Index of the one that is planned.
    chosen: usize,
}

impl Strategies {
    /// Plans every strategy of `spec` with a forward and a backward pass. For more than
    /// [`MOST_STEPPED_RANKS`] ranks a ring is planned alone, because that takes a third of the time.
    ///
    /// # Errors
    /// [`annulus_core::Error::InvalidArgument`] naming `strategy` if it does not fit ranks and
    /// heads, [`annulus_core::Error::Unsupported`] of the reproducible order.
    pub(super) fn new(
        spec: &Spec,
        ranks: usize,
        layout: Option<&Layout>,
        strategy: Strategy,
    ) -> Result<Self> {
        if let Some(heads) = strategy.heads() {
            HeadGrid::new(&spec.dims, ranks, heads)?.check(spec, true)?;
        }
        if strategy == Strategy::Ring && ranks > MOST_STEPPED_RANKS {
            return Ok(Self { all: Vec::new(), chosen: 0 });
        }
        let kv_tile = annulus_cpu::Cpu::new(1)?.capabilities(spec)?.kv_tile;
        let options =
            TrafficOptions { backward: true, layout, route: None, placement: None, kv_tile };
        let all = StrategyTraffic::of_all(spec, ranks, &options, &mut || ());
        let wanted = match strategy.heads() {
            Some(heads) => Strategy::of_heads(heads),
            None => StrategyTraffic::cheapest(&all)?.strategy,
        };
        let chosen = all.iter().position(|of| of.strategy == wanted).unwrap_or(0);
        Ok(Self { all, chosen })
    }

    /// Returns the traffic of the strategy that is planned; `None` if it is the ring.
    pub(super) fn heads(&self) -> Option<&StrategyTraffic> {
        self.all.get(self.chosen).filter(|of| of.grid.members() > 1)
    }

    /// Returns the figures of all strategies that were planned.
    pub(super) fn figures(&self) -> Vec<StrategyFigures> {
        self.all.iter().map(StrategyFigures::of).collect()
    }
}

impl StrategyFigures {
    fn of(traffic: &StrategyTraffic) -> Self {
        let most = |bytes: &[u128]| bytes.iter().copied().max().unwrap_or(0);
        Self {
            name: traffic.strategy.to_string(),
            grid: [traffic.grid.members(), traffic.grid.groups(), 1],
            bytes_sent_total: traffic.forward.iter().sum(),
            bytes_max_rank: most(&traffic.forward),
            backward_bytes_sent_total: traffic.backward.iter().sum(),
            backward_bytes_max_rank: most(&traffic.backward),
            memory_max_rank: traffic.memory_max_rank,
        }
    }

    /// Describes the strategy in one line.
    pub(super) fn in_words(&self) -> String {
        format!(
            "{:<10} {} sent forward, {} backward, at most {} of buffers on a rank",
            self.name,
            bytes(self.bytes_sent_total),
            bytes(self.backward_bytes_sent_total),
            bytes(self.memory_max_rank)
        )
    }
}
