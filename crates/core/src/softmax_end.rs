//! Final softmax statistics of a row, sinks included.
//!
//! ```text
//! m' = max(m, max_t a_t)       ℓ' = ℓ·e^{m − m'} + Σ_t e^{a_t − m'}       lse = m' + ln ℓ'
//! ```
//! A sink is a score without a value: it adds to the sum but not to the accumulator.

/// Final softmax statistics of one row, sinks included.
#[derive(Debug, Clone, Copy, Default)]
pub struct SoftmaxEnd {
    /// True if a key was visible. Otherwise the accumulator is unspecified.
    pub summed: bool,
    /// Logarithm of the sum of all e^s; −∞ without keys and sinks.
    pub lse: f64,
    /// Largest score.
    pub max: f64,
    /// Sum of all e^{s − max}.
    pub sum: f64,
    /// Number of keys and sinks whose score is `max`.
    pub ties: f64,
    /// Factor of the accumulator before the division.
    pub rescale: f64,
}

impl SoftmaxEnd {
    /// Adds `sinks` to the maximum, sum and ties of the keys.
    pub fn of(
        seen_max: f64,
        seen_sum: f64,
        ties: f64,
        sinks: impl Iterator<Item = f64> + Clone,
    ) -> Self {
        let max = sinks.clone().fold(seen_max, |max, sink| if sink > max { sink } else { max });
        if max == f64::NEG_INFINITY
            && seen_sum == 0.0
            && sinks.clone().all(|sink| sink == f64::NEG_INFINITY)
        {
            return Self { summed: false, lse: max, max, sum: 0.0, ties: 0.0, rescale: 0.0 };
        }
        // rescales from the keys' maximum to the final one; 0 if no key was visible
        let rescale = if seen_max == max { 1.0 } else { (seen_max - max).exp() };
        let reached = sinks.clone().filter(|&sink| sink == max).count() as f64;
        let ties = if seen_max == max { ties + reached } else { reached };
        let sum = seen_sum * rescale + sinks.map(|sink| (sink - max).exp()).sum::<f64>();
        if sum.is_nan() {
            // a NaN score is never the maximum, and a later block may have reset the accumulator: a
            // factor of NaN makes the row NaN, whatever the accumulator holds
            return Self {
                summed: true,
                lse: f64::NAN,
                max: f64::NAN,
                sum,
                ties: 0.0,
                rescale: f64::NAN,
            };
        }
        let summed = seen_max != f64::NEG_INFINITY || seen_sum != 0.0;
        Self { summed, lse: max + sum.ln(), max, sum, ties, rescale }
    }

    /// Returns the entropy −Σ p·ln p over keys and sinks, of a row whose keys have the maximum m,
    /// the sum ℓ and the `score_sum` Σ e^{s − m}·(s − m); 0 without keys and sinks.
    ///
    /// ```text
    /// H = lse − Σ p·s = ln ℓ' − Σ e^{s − m'}·(s − m') / ℓ'
    /// ```
    /// The second form has no difference of large numbers.
    pub fn entropy(&self, seen: [f64; 2], score_sum: f64, sinks: impl Iterator<Item = f64>) -> f64 {
        if self.sum == 0.0 {
            return 0.0;
        }
        let of_keys = self.rescale * rebased_score_sum(score_sum, seen, self.max);
        let of_sink = |sink: f64| (sink - self.max).exp() * (sink - self.max);
        let sinks = sinks.filter(|&sink| sink != f64::NEG_INFINITY);
        self.sum.ln() - (of_keys + sinks.map(of_sink).sum::<f64>()) / self.sum
    }
}

/// Returns Σ e^{s − m}·(s − m') of scores with the maximum and the sum `[m, ℓ]`, from `score_sum`,
/// Σ e^{s − m}·(s − m); 0 without scores.
pub fn rebased_score_sum(score_sum: f64, [max, sum]: [f64; 2], to: f64) -> f64 {
    if sum == 0.0 { 0.0 } else { score_sum + sum * (max - to) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sinks_end_a_row() {
        let nothing = SoftmaxEnd::of(f64::NEG_INFINITY, 0.0, 0.0, std::iter::empty());
        assert!(!nothing.summed && nothing.lse == f64::NEG_INFINITY);
        let no_sink =
            SoftmaxEnd::of(f64::NEG_INFINITY, 0.0, 0.0, std::iter::once(f64::NEG_INFINITY));
        assert!(!no_sink.summed && no_sink.lse == f64::NEG_INFINITY);
        let only = SoftmaxEnd::of(f64::NEG_INFINITY, 0.0, 0.0, [1.0, 1.0].into_iter());
        assert!(
            !only.summed
                && only.rescale == 0.0
                && only.ties == 2.0
                && (only.lse - (1.0 + 2f64.ln())).abs() < 1e-12
        );
        let both = SoftmaxEnd::of(1.0f64, 2.0, 1.0, [1.0, 0.0].into_iter());
        assert!(
            both.summed
                && both.ties == 2.0
                && both.max == 1.0
                && (both.sum - (3.0 + (-1f64).exp())).abs() < 1e-12
        );
        let nan = SoftmaxEnd::of(f64::NEG_INFINITY, f64::NAN, 0.0, std::iter::once(0.0));
        assert!(nan.summed && nan.lse.is_nan() && nan.sum.is_nan());
        // a maximum of +∞, and a sink that is NaN or +∞, too
        let infinite = SoftmaxEnd::of(f64::INFINITY, f64::NAN, 1.0, std::iter::empty());
        let sinks = [f64::NAN, f64::INFINITY]
            .map(|sink| SoftmaxEnd::of(1.0f64, 1.0, 1.0, std::iter::once(sink)));
        for end in [nan, infinite].into_iter().chain(sinks) {
            assert!(end.summed && end.ties == 0.0);
            assert!([end.lse, end.max, end.sum, end.rescale].iter().all(|x| x.is_nan()), "{end:?}");
        }
    }
}
