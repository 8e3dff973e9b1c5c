//! Merge of partial results over disjoint sets of keys.
//!
//! ```text
//! m = max over parts of mₚ      ℓ = Σ e^(mₚ − m)·ℓₚ      ties = Σ tiesₚ where mₚ = m
//! acc = Σ e^(mₚ − m)·accₚ       lse = m + ln ℓ           accₚ = ℓₚ·outₚ of a normalised output
//! ```
//! In f64. A part is a set of keys, or a sink, which has a score and no output. The maximum and the
//! sum are sent apart: lse alone has lost ln ℓ where the maximum is large.
//!
//! # Source
//! Milakov, Gimelshein 2018, Online normalizer calculation for softmax, §3.

/// Softmax statistics of one row over some keys and sinks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct MergedSoftmax {
    pub(crate) max: f64,
    pub(crate) sum: f64,
    /// Scores that are equal to the maximum.
    pub(crate) ties: f64,
}

impl MergedSoftmax {
    /// No part.
    pub(crate) const EMPTY: Self = Self { max: f64::NEG_INFINITY, sum: 0.0, ties: 0.0 };

    /// Returns the part of one sink.
    pub(crate) fn sink(score: f64) -> Self {
        if score == f64::NEG_INFINITY {
            Self::EMPTY
        } else {
            Self { max: score, sum: 1.0, ties: 1.0 }
        }
    }

    /// Adds a part to those before it. Returns the factors e^(m − m') of the accumulators of both;
    /// `None` if the part has no visible key and no sink, and the accumulator is unchanged.
    pub(crate) fn add(&mut self, part: Self) -> Option<[f64; 2]> {
        if part.sum == 0.0 {
            return None;
        }
        // e^(∞ − ∞) is undefined
        let is_nan = [self.max, part.max].iter().any(|&max| max.is_nan() || max == f64::INFINITY);
        let max = if is_nan { f64::NAN } else { self.max.max(part.max) };
        let factor = |of: f64| if of == max { 1.0 } else { (of - max).exp() };
        let ties = |of: &Self| if of.max == max { of.ties } else { 0.0 };
        let [rescale, weight] = [self.max, part.max].map(factor);
        let sum = self.sum * rescale + part.sum * weight;
        *self = Self { max, sum, ties: ties(self) + ties(&part) };
        Some([rescale, weight])
    }

    /// Returns the divisor of the accumulator; 1 without visible keys and sinks.
    pub(crate) fn normalizer(&self) -> f64 {
        if self.sum == 0.0 { 1.0 } else { self.sum }
    }

    pub(crate) fn lse(&self) -> f64 {
        self.max + self.sum.ln()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(scores: &[f64]) -> MergedSoftmax {
        let mut all = MergedSoftmax::EMPTY;
        scores.iter().for_each(|&score| {
            all.add(MergedSoftmax::sink(score));
        });
        all
    }

    #[test]
    fn empty_rows_nan_and_infinity() {
        let empty = of(&[f64::NEG_INFINITY; 3]);
        assert_eq!((empty.lse(), empty.normalizer()), (f64::NEG_INFINITY, 1.0));
        assert_eq!(of(&[]).add(MergedSoftmax::EMPTY), None);
        assert_eq!(of(&[f64::NEG_INFINITY, 2.5]).lse(), 2.5);
        for broken in [f64::NAN, f64::INFINITY] {
            let softmax = of(&[1.0, broken, f64::NEG_INFINITY]);
            assert!(softmax.lse().is_nan() && softmax.normalizer().is_nan());
            assert!(of(&[broken, 1.0]).lse().is_nan());
        }
        assert!((of(&[1.0, 1.0]).lse() - (1.0 + 2f64.ln())).abs() < 1e-15);
    }

    #[test]
    fn statistics_of_parts_are_those_of_all_scores() {
        let direct = |scores: &[f64]| {
            let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let sum = scores.iter().map(|score| (score - max).exp()).sum();
            let ties = scores.iter().filter(|&&score| score == max).count() as f64;
            if scores.is_empty() { MergedSoftmax::EMPTY } else { MergedSoftmax { max, sum, ties } }
        };
        let parts: [&[f64]; 5] = [&[], &[1.0, 3.0], &[3.0, 3.0, 0.5], &[], &[-700.0, 2.5]];
        let mut merged = MergedSoftmax::EMPTY;
        let factors = parts.map(|part| merged.add(direct(part)));
        assert_eq!(factors.map(|of| of.is_some()), [false, true, true, false, true]);
        let all = direct(&parts.concat());
        assert_eq!((merged.max, merged.ties), (all.max, 3.0));
        assert!((merged.sum - all.sum).abs() < 1e-14);
        // a larger maximum takes the place of those before it
        assert_eq!(merged.add(direct(&[4.0])), Some([(-1f64).exp(), 1.0]));
        assert_eq!((merged.max, merged.ties), (4.0, 1.0));
        merged.add(MergedSoftmax { max: f64::NAN, sum: f64::NAN, ties: 1.0 });
        assert!(merged.max.is_nan() && merged.sum.is_nan());
    }

    #[test]
    fn a_maximum_that_absorbs_the_logarithm_keeps_the_sum() {
        // three parts of 1, 2 and 4 keys at finfo(f32).min: the mean of all keys
        let low = f64::from(f32::MIN);
        let mut merged = MergedSoftmax::EMPTY;
        for keys in [1.0, 2.0, 4.0] {
            merged.add(MergedSoftmax { max: low, sum: keys, ties: keys });
        }
        assert_eq!((merged.sum, merged.lse()), (7.0, low));
    }
}
