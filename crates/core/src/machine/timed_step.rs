//! One step of a pass on all ranks, and the seconds of its tiles.

use super::network::Transfer;
use crate::{BackwardMode, ComputeRate, Spec};

/// One step of all ranks, by ring index.
#[derive(Debug, Clone, Default)]
pub(super) struct TimedStep {
    /// Seconds of the tiles of each rank.
    pub(super) compute: Vec<f64>,
    /// Messages that move while the tiles are computed, or earlier.
    pub(super) transfers: Vec<Transfer>,
    /// Number of times that the step is executed: 1, but for a mean step, all of whose messages
    /// begin and end in it.
    pub(super) repeats: usize,
    /// Factor of the seconds of the messages of a mean step: above 1 if links are shared unevenly.
    pub(super) sharing: f64,
    /// True if ranks wait for all messages before the next step: the last step of a ring.
    pub(super) ends_ring: bool,
}

/// Matrix products of a pass over the tiles of a pair of ranks.
const FORWARD_PRODUCTS: f64 = 2.0;
/// S, dP, dQ, dK, dV.
pub(super) const BACKWARD_PRODUCTS: f64 = 5.0;
/// S, dP, dQ, of a backward pass over blocks of keys and values.
pub(super) const KV_PASS_PRODUCTS: f64 = 3.0;
/// S, dP, dK, dV, of a backward pass over blocks of queries.
pub(super) const QUERY_PASS_PRODUCTS: f64 = 4.0;

impl TimedStep {
    /// Creates a step without tiles and messages.
    pub(super) fn idle(ranks: usize) -> Self {
        Self {
            compute: vec![0.0; ranks],
            transfers: Vec::new(),
            repeats: 1,
            sharing: 1.0,
            ends_ring: false,
        }
    }
}

/// Seconds of one visible pair, for each product of its tiles.
#[derive(Debug, Clone, Copy)]
pub(super) struct PairSeconds {
    forward: f64,
    pub(super) backward: f64,
}

impl PairSeconds {
    /// A product has 2 · dim FLOPs for each pair; dims of keys and values count half each.
    pub(super) fn new(spec: &Spec, rate: &ComputeRate) -> Self {
        let flops = (spec.dims.head_dim + spec.dims.value_dim) as f64;
        Self { forward: flops / rate.forward, backward: flops / rate.backward }
    }

    pub(super) const fn forward_pass(&self) -> f64 {
        FORWARD_PRODUCTS * self.forward
    }

    pub(super) fn backward_pass(&self, mode: BackwardMode) -> f64 {
        self.backward
            * match mode {
                BackwardMode::OnePass => BACKWARD_PRODUCTS,
                BackwardMode::TwoPass => KV_PASS_PRODUCTS + QUERY_PASS_PRODUCTS,
            }
    }
}
