//! A bias that is a function of positions, such as ALiBi, so that no `[q_len, kv_len]` tensor exists.

use crate::mask::{Key, Query};

/// An additive bias computed from who looks at whom. It is part of what ranks agree on: `Debug` must tell all that it depends on.
pub trait BiasFunction: std::fmt::Debug + Send + Sync {
    /// The bias of one pair; −∞ hides it.
    fn bias(&self, query: &Query, key: &Key) -> f64;
}

/// Attention with linear biases: −slope\[head\]·|i' − j'|.
///
/// # Source
/// Press et al. 2022.
#[derive(Debug, Clone, PartialEq)]
pub struct Alibi {
    /// One slope a query head.
    pub slopes: Vec<f64>,
}

impl Alibi {
    /// The published slopes for `heads` heads: 2^(−8·(h+1)/n) for the largest power of two n ≤ heads, then every other one of 2n's.
    pub fn published(heads: usize) -> Self {
        let geometric = |count: usize| (1..=count).map(move |h| (-8.0 * h as f64 / count as f64).exp2());
        let power = if heads == 0 { 0 } else { 1 << heads.ilog2() };
        let slopes = geometric(power).chain(geometric(2 * power).step_by(2)).take(heads).collect();
        Self { slopes }
    }
}

impl BiasFunction for Alibi {
    fn bias(&self, query: &Query, key: &Key) -> f64 {
        // a head without a slope has none
        let slope = self.slopes.get(query.head).copied().unwrap_or(0.0);
        -slope * query.position.abs_diff(key.position) as f64
    }
}
