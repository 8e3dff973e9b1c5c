//! What is known of one query row after some of its keys: the running softmax, and how two of them become one.
//!
//! ```text
//! m = max(m₁, m₂)      acc = acc₁·e^{m₁ − m} + acc₂·e^{m₂ − m}      sum = sum₁·e^{m₁ − m} + sum₂·e^{m₂ − m}
//! ```
//!
//! Over disjoint sets of keys this is a commutative monoid, so keys may be cut and folded in any way. It is total: nothing makes it panic, and finite
//! sums never make a NaN. Two choices see to that. The factor of the larger maximum is the number 1 and not e⁰ of a difference, so −∞
//! meets −∞ without ∞ − ∞. A missing element of the shorter `acc` is 0, so the identity needs no dim.

use crate::Element;

/// One row's running softmax, unnormalised: acc = Σ e^{s_j − max}·v_j, sum = Σ e^{s_j − max}.
///
/// A finished `(out, lse)` is the same thing with max = lse and sum = 1, see [`Partial::from_out`]. `T` is f32 or f64: accumulators are
/// never narrower.
///
/// # Examples
/// ```
/// use annulus_core::Partial;
///
/// // logits 1 and 3 with values 10 and 20, met one by one
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
    /// What is known before any key: (0, −∞).
    pub fn identity() -> Self {
        Self { acc: Vec::new(), max: T::from_f64(f64::NEG_INFINITY), sum: T::from_f64(0.0) }
    }

    /// From a running softmax.
    ///
    /// # Shapes
    /// acc `[dv]`.
    pub const fn new(acc: Vec<T>, max: T, sum: T) -> Self {
        Self { acc, max, sum }
    }

    /// From a finished row; lse = −∞ says that it saw nothing, and `out` is then 0 wherever it is not NaN.
    pub fn from_out(out: Vec<T>, lse: T) -> Self {
        let nothing = lse.to_f64() == f64::NEG_INFINITY;
        let zero_or_nan = |x: T| if x.to_f64().is_nan() { x } else { T::from_f64(0.0) };
        let acc = if nothing { out.into_iter().map(zero_or_nan).collect() } else { out };
        Self { acc, max: lse, sum: T::from_f64(if nothing { 0.0 } else { 1.0 }) }
    }

    /// Σ e^{s_j − max}·v_j, `[dv]`.
    pub fn acc(&self) -> &[T] {
        &self.acc
    }

    /// The largest logit; −∞ before any key.
    pub const fn max(&self) -> T {
        self.max
    }

    /// Σ e^{s_j − max}.
    pub const fn sum(&self) -> T {
        self.sum
    }

    /// Folds two disjoint sets of keys into one.
    ///
    /// Exact where one side is the identity; commutative to the bit; associative within 4 ulp (of the sum of magnitudes, where elements of acc
    /// cancel). f32 is computed in f64 and rounded once.
    ///
    /// # Source
    /// Milakov, Gimelshein 2018, §3; Dao et al. 2022, §3.1.
    #[must_use]
    pub fn merge(&self, other: &Self) -> Self {
        let (a, b) = (self.max.to_f64(), other.max.to_f64());
        let max = if a.is_nan() || b.is_nan() { f64::NAN } else { a.max(b) };
        let (for_self, for_other) = (factor(a, max), factor(b, max));
        let join = |x: T, y: T| rounded(x.to_f64() * for_self + y.to_f64() * for_other);
        let element = |acc: &[T], index: usize| acc.get(index).copied().unwrap_or(T::from_f64(0.0));
        let dim = self.acc.len().max(other.acc.len());
        Self {
            acc: (0..dim)
                .map(|index| join(element(&self.acc, index), element(&other.acc, index)))
                .collect(),
            max: rounded(max),
            sum: join(self.sum, other.sum),
        }
    }

    /// The finished row: out = acc / sum, lse = max + ln sum; (0, −∞) where nothing was seen.
    pub fn out(&self) -> (Vec<T>, T) {
        let sum = self.sum.to_f64();
        // nothing seen: acc is 0 already, and a NaN in it stays
        let divisor = if sum == 0.0 { 1.0 } else { sum };
        let out = self.acc.iter().map(|x| rounded(x.to_f64() / divisor)).collect();
        (out, rounded(self.max.to_f64() + sum.ln()))
    }
}

/// e^{from − to} for to ≥ from, or 1 where they are equal, be it ±∞.
///
/// The difference is rounded, and e to its power would be wrong by as many ulp as it is large; what the rounding lost is put back to first order.
fn factor(from: f64, to: f64) -> f64 {
    if from == to {
        return 1.0;
    }
    let difference = from - to;
    let virtual_to = from - difference;
    let lost = (from - (difference + virtual_to)) + (virtual_to - to);
    let power = difference.exp();
    if power > 0.0 { power + power * lost } else { power }
}

/// Rounds, and gives every NaN the same bits, so that commuted sums are the same to the bit.
fn rounded<T: Element>(value: f64) -> T {
    T::from_f64(if value.is_nan() { f64::NAN } else { value })
}

#[cfg(test)]
mod tests;
