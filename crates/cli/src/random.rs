//! Counter-based random numbers: each depends only on a seed, a tensor's name and an element's
//! index, so a file does not depend on the order in which it is written.

/// Stream of the numbers of one tensor.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RandomStream {
    key: u64,
}

impl RandomStream {
    /// Creates the stream of the tensor `name` for `seed`.
    pub(crate) fn new(seed: u64, name: &str) -> Self {
        let name = annulus_core::Fingerprint::new().bytes(name.as_bytes()).finish();
        Self { key: mix(seed ^ mix(name)) }
    }

    /// Returns 64 uniform bits.
    pub(crate) fn bits(self, index: u64) -> u64 {
        mix(self.key.wrapping_add(index.wrapping_mul(0x9e37_79b9_7f4a_7c15)))
    }

    /// Returns a uniform number in `[0, 1)`.
    pub(crate) fn uniform(self, index: u64) -> f64 {
        (self.bits(index) >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Returns a standard normal number. Elements 2i and 2i + 1 are the cosine and the sine branch
    /// of one pair of uniform numbers.
    ///
    /// # Source
    /// Box and Muller 1958.
    pub(crate) fn normal(self, index: u64) -> f64 {
        let u = self.uniform(index & !1);
        let v = self.uniform(index | 1);
        let (sin, cos) = (v * std::f64::consts::TAU).sin_cos();
        (-2.0 * (1.0 - u).ln()).sqrt() * if index.is_multiple_of(2) { cos } else { sin }
    }
}

/// Mixes 64 bits bijectively: the finalizer of SplitMix64.
///
/// # Source
/// Steele, Lea and Flood 2014 (SplitMix64), with Stafford's constants.
const fn mix(x: u64) -> u64 {
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_normal_and_streams_differ() {
        let stream = RandomStream::new(7, "query");
        let n = 20_000;
        let numbers: Vec<f64> = (0..n).map(|index| stream.normal(index)).collect();
        let mean = numbers.iter().sum::<f64>() / n as f64;
        let moment = |power| numbers.iter().map(|x| (x - mean).powi(power)).sum::<f64>() / n as f64;
        assert!(mean.abs() < 0.03, "{mean}");
        assert!(
            (moment(2) - 1.0).abs() < 0.05
                && moment(3).abs() < 0.1
                && (moment(4) - 3.0).abs() < 0.3
        );
        let neighbours = numbers.windows(2).map(|pair| pair[0] * pair[1]).sum::<f64>() / n as f64;
        assert!(neighbours.abs() < 0.03, "{neighbours}");
        assert_ne!(stream.bits(0), RandomStream::new(8, "query").bits(0));
        assert_ne!(stream.bits(0), RandomStream::new(7, "key").bits(0));
    }
}
