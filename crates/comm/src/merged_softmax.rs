//! Merge of normalised outputs over disjoint sets of keys.
//!
//! ```text
//! m   = max over parts of lse            ℓ   = Σ e^(lse − m)
//! out = Σ e^(lse − m)·out / ℓ            lse = m + ln ℓ
//! ```
//! In f64. A part is a set of keys, or a sink, which has a score and no output.
//!
//! # Source
//! Milakov, Gimelshein 2018, Online normalizer calculation for softmax, §3.

/// Softmax statistics of one row over the lse of the parts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct MergedSoftmax {
    max: f64,
    sum: f64,
}

impl MergedSoftmax {
    /// No part.
    pub(crate) const EMPTY: Self = Self { max: f64::NEG_INFINITY, sum: 0.0 };

    pub(crate) fn of(scores: impl Iterator<Item = f64> + Clone) -> Self {
        // `f64::max` ignores NaN, which the sum keeps
        let max = scores.clone().fold(f64::NEG_INFINITY, f64::max);
        let of_max = Self { max, sum: 0.0 };
        let sum = scores.map(|score| of_max.weight(score).unwrap_or(0.0)).sum();
        Self { max, sum }
    }

    /// Adds a part to those before it. Returns the factors of the accumulator and of the part's
    /// output; `None` if the part has no visible key, and the accumulator is unchanged.
    pub(crate) fn add(&mut self, score: f64) -> Option<[f64; 2]> {
        let before = *self;
        self.max = before.max.max(score);
        let rescale = before.weight_under(self.max);
        let weight = self.weight(score)?;
        self.sum = before.sum * rescale + weight;
        Some([rescale, weight])
    }

    /// Returns the factor of a part's output; `None` if it has no visible key.
    pub(crate) fn weight(&self, score: f64) -> Option<f64> {
        (score != f64::NEG_INFINITY).then(|| (score - self.max).exp())
    }

    /// Returns the divisor of the accumulator; 1 without visible keys and sinks.
    pub(crate) fn normalizer(&self) -> f64 {
        if self.sum == 0.0 { 1.0 } else { self.sum }
    }

    pub(crate) fn lse(&self) -> f64 {
        self.max + self.sum.ln()
    }

    /// Returns the factor of an accumulator with this maximum under a larger one.
    fn weight_under(&self, max: f64) -> f64 {
        if self.max == max { 1.0 } else { (self.max - max).exp() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn empty_rows_nan_and_infinity() {
        let of = |scores: &[f64]| MergedSoftmax::of(scores.iter().copied());
        let empty = of(&[f64::NEG_INFINITY; 3]);
        assert_eq!((empty.lse(), empty.normalizer()), (f64::NEG_INFINITY, 1.0));
        assert_eq!(empty.weight(f64::NEG_INFINITY), None);
        assert_eq!(of(&[f64::NEG_INFINITY, 2.5]).lse(), 2.5);
        for broken in [f64::NAN, f64::INFINITY] {
            let softmax = of(&[1.0, broken, f64::NEG_INFINITY]);
            assert!(softmax.lse().is_nan() && softmax.normalizer().is_nan());
        }
        let mut infinite = of(&[1.0]);
        infinite.add(f64::INFINITY);
        assert!(infinite.lse().is_nan());
        assert!((of(&[1.0, 1.0]).lse() - (1.0 + 2f64.ln())).abs() < 1e-15);
    }

    #[test]
    fn parts_in_turn_are_parts_at_once() {
        let parts = [(f64::NEG_INFINITY, 7.0), (0.5, 3.0), (-700.0, 1e9), (2.0, -1.0), (1.5, 4.0)];
        let all = MergedSoftmax::of(parts.iter().map(|part| part.0));
        let at_once: f64 =
            parts.iter().filter_map(|&(score, out)| Some(all.weight(score)? * out)).sum();
        let mut softmax = MergedSoftmax::EMPTY;
        let mut in_turn = 0.0;
        for (score, out) in parts {
            if let Some([rescale, weight]) = softmax.add(score) {
                in_turn = in_turn * rescale + weight * out;
            }
        }
        assert!((softmax.lse() - all.lse()).abs() < 1e-15);
        let [a, b] = [in_turn / softmax.normalizer(), at_once / all.normalizer()];
        assert!((a - b).abs() < 1e-14, "{a} {b}");
    }
}
