//! Biases computed from positions, such as ALiBi, without a tensor of O(q_len · kv_len) elements.

use std::{fmt, sync::Arc};

use crate::{
    Fingerprint,
    mask::{Key, Query},
};

/// An additive bias that is a function of query and key positions.
pub trait BiasFunction: std::fmt::Debug + Send + Sync {
    /// Adds all that the bias depends on to a fingerprint: its name and its parameters. If the
    /// fingerprints of ranks differ, creating a plan fails.
    fn fingerprint(&self, into: Fingerprint) -> Fingerprint;

    /// Returns the bias of one pair; −∞ masks it.
    fn bias(&self, query: &Query, key: &Key) -> f64;

    /// Returns the slopes by query head (0 beyond the last) if the bias is −slope·|i' − j'|, which
    /// devices compute without the host.
    fn distance_slopes(&self) -> Option<&[f64]> {
        None
    }
}

/// Attention with linear biases: −slope\[head\]·|i' − j'|.
///
/// # Source
/// Press et al. 2022.
#[derive(Debug, Clone, PartialEq)]
pub struct Alibi {
    /// Slope of each query head.
    pub slopes: Vec<f64>,
}

impl Alibi {
    /// Creates the published slopes of `heads` heads: 2^(−8·(h+1)/n), h < n, for the largest power
    /// of two n ≤ heads, then every second of those for 2n heads.
    pub fn published(heads: usize) -> Self {
        let geometric =
            |count: usize| (1..=count).map(move |h| (-8.0 * h as f64 / count as f64).exp2());
        let power = if heads == 0 { 0 } else { 1 << heads.ilog2() };
        let slopes = geometric(power).chain(geometric(2 * power).step_by(2)).take(heads).collect();
        Self { slopes }
    }
}

impl BiasFunction for Alibi {
    fn fingerprint(&self, into: Fingerprint) -> Fingerprint {
        let into = into.text("alibi").number(self.slopes.len() as u64);
        self.slopes.iter().fold(into, |into, slope| into.number(slope.to_bits()))
    }

    fn bias(&self, query: &Query, key: &Key) -> f64 {
        // a head without a slope has no bias
        let slope = self.slopes.get(query.head).copied().unwrap_or(0.0);
        -slope * query.position.abs_diff(key.position) as f64
    }

    fn distance_slopes(&self) -> Option<&[f64]> {
        Some(&self.slopes)
    }
}

type Function = dyn Fn(usize, i64, i64) -> f64 + Send + Sync;

/// A bias defined by a closure of (head, i', j') and identified by a name.
///
/// Ranks compare only the **name**. Closures that differ need different names, and the name must
/// contain the values that a closure captures.
///
/// # Examples
/// ```
/// use annulus_core::{BiasFunction, PositionBias, mask::{Key, Query}};
/// let decay = PositionBias::new("decay 0.1", |_head, i, j| -0.1 * i.abs_diff(j) as f64);
/// let query = Query { batch: 0, head: 0, row: 9, position: 9 };
/// assert_eq!(decay.bias(&query, &Key { row: 4, position: 4 }), -0.5);
/// ```
#[derive(Clone)]
pub struct PositionBias {
    name: String,
    function: Arc<Function>,
}

impl PositionBias {
    /// Creates the bias `function(head, i', j')`.
    pub fn new(
        name: impl Into<String>,
        function: impl Fn(usize, i64, i64) -> f64 + Send + Sync + 'static,
    ) -> Self {
        Self { name: name.into(), function: Arc::new(function) }
    }
}

impl fmt::Debug for PositionBias {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PositionBias").field("name", &self.name).finish()
    }
}

impl BiasFunction for PositionBias {
    fn fingerprint(&self, into: Fingerprint) -> Fingerprint {
        into.text("position bias").text(&self.name)
    }

    fn bias(&self, query: &Query, key: &Key) -> f64 {
        (self.function)(query.head, query.position, key.position)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bias(function: &dyn BiasFunction, head: usize, i: i64, j: i64) -> f64 {
        function.bias(&Query { batch: 0, head, row: 0, position: i }, &Key { row: 0, position: j })
    }

    fn assert_slopes(got: &[f64], want: &[f64]) {
        assert_eq!(got.len(), want.len());
        for (got, want) in got.iter().zip(want) {
            assert!((got - want).abs() < 1e-12, "{got} is not {want}");
        }
    }

    #[test]
    fn alibi_has_the_published_slopes() {
        // 8 heads: 1/2, 1/4, … 1/256
        let eight: Vec<f64> = (1..=8).map(|h| 0.5f64.powi(h)).collect();
        assert_slopes(&Alibi::published(8).slopes, &eight);
        // 12 heads: those of 8 heads, then the 1st, 3rd, 5th and 7th of 16 heads: 2^-0.5 to 2^-3.5
        let twelve: Vec<f64> =
            eight.iter().copied().chain((0..4).map(|h| (-0.5 - f64::from(h)).exp2())).collect();
        assert_slopes(&Alibi::published(12).slopes, &twelve);
        assert_slopes(&Alibi::published(1).slopes, &[2f64.powi(-8)]);
        assert_slopes(&Alibi::published(3).slopes, &[2f64.powi(-4), 2f64.powi(-8), 2f64.powi(-2)]);
        assert_slopes(&Alibi::published(0).slopes, &[]);
    }

    #[test]
    fn alibi_is_symmetric_and_does_not_overflow() {
        let alibi = Alibi { slopes: vec![0.5, 0.25] };
        assert_eq!(
            [bias(&alibi, 0, 3, 9), bias(&alibi, 1, 9, 3), bias(&alibi, 1, -2, -2)],
            [-3.0, -1.5, 0.0]
        );
        assert_eq!(bias(&alibi, 0, i64::MAX / 4, -(i64::MAX / 4)), -(i64::MAX as f64) / 4.0);
        // a head without a slope
        assert_eq!(bias(&alibi, 2, 0, 100), 0.0);
    }

    #[test]
    fn closures_are_distinguished_by_name() {
        let a = PositionBias::new("a", |head, i, j| (head as i64 + i - j) as f64);
        let b = PositionBias::new("b", |_, _, _| 0.0);
        assert_eq!(bias(&a, 2, 7, 4), 5.0);
        assert_ne!(format!("{a:?}"), format!("{b:?}"));
    }
}
