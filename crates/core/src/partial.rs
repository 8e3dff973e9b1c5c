//! Partial results of attention: the online softmax of one query row over some of its keys, and the
//! merge of two of them.
//!
//! ```text
//! m   = max(m₁, m₂)
//! acc = acc₁·e^{m₁ − m} + acc₂·e^{m₂ − m}
//! sum = sum₁·e^{m₁ − m} + sum₂·e^{m₂ − m}
//! ```
//!
//! Over disjoint sets of keys, the merge is a commutative monoid, so keys may be split and merged
//! in any way. It never panics, and results with finite sums merge without NaN, for two reasons:
//!
//! * The factor of the larger maximum is the constant 1 instead of e^{m − m}, so two maxima of −∞
//!   need no ∞ − ∞.
//! * A missing element of the shorter `acc` is 0, so the identity needs no dim.

use crate::Element;

/// Unnormalised partial result of one query row: acc = Σ e^{s_j − max}·v_j, sum = Σ e^{s_j − max}.
///
/// A final `(out, lse)` is the partial result with max = lse and sum = 1, see
/// [`Partial::from_out`]. `T` is f32 or f64, the types of accumulators.
///
/// # Examples
/// ```
/// use annulus_core::Partial;
///
/// // scores 1 and 3 with values 10 and 20, computed separately
/// let one = Partial::new(vec![10.0], 1.0, 1.0);
/// let other = Partial::new(vec![20.0], 3.0, 1.0);
/// let (out, lse) = one.merge(&other).out();
/// let (a, b) = (1f64.exp(), 3f64.exp());
/// assert!((out[0] - (10.0 * a + 20.0 * b) / (a + b)).abs() < 1e-14);
/// assert!((lse - (a + b).ln()).abs() < 1e-15);
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Partial<T> {
    acc: Vec<T>,
    max: T,
    sum: T,
}

impl<T: Element<Accumulator = T>> Partial<T> {
    /// Returns the partial result of no keys: acc = 0, max = −∞, sum = 0.
    pub fn identity() -> Self {
        Self { acc: Vec::new(), max: T::from_f64(f64::NEG_INFINITY), sum: T::from_f64(0.0) }
    }

    /// Creates a partial result from accumulator and softmax statistics.
    ///
    /// # Shapes
    /// acc `[dv]`.
    pub const fn new(acc: Vec<T>, max: T, sum: T) -> Self {
        Self { acc, max, sum }
    }

    /// Creates a partial result from a final row, out `[dv]` and lse.
    ///
    /// lse = −∞ denotes a row without visible keys. Its accumulator is 0, except that NaN is kept.
    pub fn from_out(out: Vec<T>, lse: T) -> Self {
        let is_empty = lse.to_f64() == f64::NEG_INFINITY;
        let zero_or_nan = |x: T| if x.to_f64().is_nan() { x } else { T::from_f64(0.0) };
        let acc = if is_empty { out.into_iter().map(zero_or_nan).collect() } else { out };
        Self { acc, max: lse, sum: T::from_f64(if is_empty { 0.0 } else { 1.0 }) }
    }

    /// Returns the accumulator Σ e^{s_j − max}·v_j, `[dv]`.
    pub fn acc(&self) -> &[T] {
        &self.acc
    }

    /// Returns the row maximum; −∞ without keys.
    pub const fn max(&self) -> T {
        self.max
    }

    /// Returns the row sum Σ e^{s_j − max}.
    pub const fn sum(&self) -> T {
        self.sum
    }

    /// Merges the partial results of two disjoint sets of keys.
    ///
    /// The merge is exact if one side is the identity, commutative bit for bit, and associative
    /// within 4 ulp of the sum of magnitudes. f32 is computed in f64 and rounded once.
    ///
    /// # Source
    /// Milakov, Gimelshein 2018, Online normalizer calculation for softmax, §3; Dao et al. 2022,
    /// FlashAttention, §3.1.
    #[must_use]
    pub fn merge(&self, other: &Self) -> Self {
        let own_max = self.max.to_f64();
        let other_max = other.max.to_f64();
        let is_nan = own_max.is_nan() || other_max.is_nan();
        let max = if is_nan { f64::NAN } else { own_max.max(other_max) };
        let own_factor = exp_difference(own_max, max);
        let other_factor = exp_difference(other_max, max);
        let add = |x: T, y: T| rounded(x.to_f64() * own_factor + y.to_f64() * other_factor);
        let element = |acc: &[T], index: usize| acc.get(index).copied().unwrap_or(T::from_f64(0.0));
        let dim = self.acc.len().max(other.acc.len());
        Self {
            acc: (0..dim)
                .map(|index| add(element(&self.acc, index), element(&other.acc, index)))
                .collect(),
            max: rounded(max),
            sum: add(self.sum, other.sum),
        }
    }

    /// Returns the final row: out = acc / sum, lse = max + ln sum; (0, −∞) without keys.
    pub fn out(&self) -> (Vec<T>, T) {
        let sum = self.sum.to_f64();
        // without keys, acc is 0 or NaN: division by 1 returns it unchanged
        let divisor = if sum == 0.0 { 1.0 } else { sum };
        let out = self.acc.iter().map(|x| rounded(x.to_f64() / divisor)).collect();
        (out, rounded(self.max.to_f64() + sum.ln()))
    }
}

/// Computes e^{from − to} for from ≤ to; 1 if they are equal, also if both are infinite.
///
/// The relative error of e^d is the absolute error of d, so rounding a large difference d would
/// cost |d| / 2 ulp. The rounding error of d is computed exactly and applied to first order.
///
/// # Source
/// Two-Diff of Shewchuk 1997, Adaptive Precision Floating-Point Arithmetic and Fast Robust
/// Geometric Predicates, §2.3, after Knuth's TwoSum.
fn exp_difference(from: f64, to: f64) -> f64 {
    if from == to {
        return 1.0;
    }
    let difference = from - to;
    let virtual_to = from - difference;
    let rounding_error = (from - (difference + virtual_to)) + (virtual_to - to);
    let power = difference.exp();
    if power > 0.0 { power + power * rounding_error } else { power }
}

/// Rounds to `T`. Replaces every NaN by one NaN, so that the merge is commutative bit for bit.
fn rounded<T: Element>(value: f64) -> T {
    T::from_f64(if value.is_nan() { f64::NAN } else { value })
}

#[cfg(test)]
mod tests;
