//! Sums whose bits do not depend on the order of their terms.
//!
//! ```text
//! sum = Σ digits[i] · 2^(32·i − 192)      a term adds to three digits; carries wait in their upper half
//! ```
//!
//! # Source
//! Kulisch and Miranker 1981, Computer Arithmetic in Theory and Practice: sums in fixed point.

const DIGITS: usize = 12;
/// Exponent of the lowest bit: below those of f32.
const LOWEST: i32 = -192;

/// Exact sum of numbers between 2⁻¹⁴⁰ and 2¹⁸⁰ in magnitude, among them all f32 but the subnormal
/// ones; smaller ones are truncated to a multiple of 2⁻¹⁹², larger ones count as infinite.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ExactSum {
    /// Digit i counts 2^(32·i − 192).
    digits: [i64; DIGITS],
    /// Sum of all that is not finite.
    not_finite: f64,
}

impl ExactSum {
    /// Sum of nothing.
    pub const ZERO: Self = Self { digits: [0; DIGITS], not_finite: 0.0 };

    /// Adds one number.
    #[inline]
    pub fn add(&mut self, x: f64) {
        const MANTISSA: u32 = f64::MANTISSA_DIGITS - 1;
        if x == 0.0 {
            return;
        }
        let bits = x.abs().to_bits();
        let biased = i32::try_from(bits >> MANTISSA).unwrap_or(i32::MAX);
        let fraction = bits & ((1 << MANTISSA) - 1);
        let mantissa = if biased == 0 { fraction } else { fraction | 1 << MANTISSA };
        let offset = biased.max(1) - 1075 - LOWEST;
        let first = usize::try_from(offset.max(0) / 32).unwrap_or(0);
        if !x.is_finite() || first + 3 > DIGITS {
            self.not_finite += x.signum() * f64::INFINITY;
            return;
        }
        let wide = if offset < 0 {
            u128::from(mantissa.checked_shr(offset.unsigned_abs()).unwrap_or(0))
        } else {
            u128::from(mantissa) << (offset % 32)
        };
        for (index, digit) in self.digits[first..first + 3].iter_mut().enumerate() {
            #[expect(clippy::cast_possible_truncation, reason = "takes 32 bits")]
            let part = i64::from((wide >> (32 * index)) as u32);
            *digit += if x < 0.0 { -part } else { part };
        }
    }

    /// Returns the sum, correct to two units in the last place.
    pub fn total(&self) -> f64 {
        if self.not_finite != 0.0 {
            return self.not_finite;
        }
        let (digits, carry) = self.carried(1);
        let is_negative = carry < 0;
        let digits = if is_negative { self.carried(-1).0 } else { digits };
        let mut place = 2f64.powi(LOWEST);
        let terms = digits.map(|digit| {
            let term = digit as f64 * place;
            place *= 2f64.powi(32);
            term
        });
        let size: f64 = terms.iter().rev().sum();
        if is_negative { -size } else { size }
    }

    /// Adds another sum.
    pub fn merge(&mut self, other: &Self) {
        self.digits.iter_mut().zip(other.digits).for_each(|(digit, other)| *digit += other);
        self.not_finite += other.not_finite;
    }

    /// Number of [`ExactSum::numbers`].
    pub const NUMBERS: usize = DIGITS + 2;

    /// Returns the sum as integers of less than 2³³ in magnitude, which may be added up themselves:
    /// exactly, of up to 2²⁰ sums. The last number is what is not finite.
    pub fn numbers(&self) -> [f64; Self::NUMBERS] {
        let (digits, carry) = self.carried(1);
        std::array::from_fn(|index| match digits.get(index) {
            Some(&digit) => digit as f64,
            None if index == DIGITS => carry as f64,
            None => self.not_finite,
        })
    }

    /// Returns the sum of [`ExactSum::numbers`], or of sums of them.
    #[expect(clippy::cast_possible_truncation, reason = "the numbers are integers below 2^53")]
    pub fn of_numbers(numbers: &[f64]) -> Self {
        let mut sum = Self::ZERO;
        if let Some((digits, &[carry, not_finite])) = numbers.split_first_chunk::<DIGITS>() {
            sum.digits = digits.map(|digit| digit as i64);
            sum.digits[DIGITS - 1] += (carry as i64) << 32;
            sum.not_finite = not_finite;
        }
        sum
    }

    /// Returns the digits of `sign` · the sum, each from 0 to 2³² − 1, and the carry of the
    /// last, which is negative if that is.
    fn carried(&self, sign: i64) -> ([i64; DIGITS], i64) {
        let mut carry = 0;
        let digits = self.digits.map(|digit| {
            let digit = sign * digit + carry;
            carry = digit >> 32;
            digit & 0xffff_ffff
        });
        (digits, carry)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_exact_in_any_order() {
        let terms = [1e30, 1.0, -1e30, 2f64.powi(-120), -3.5, 1e-3, 7e8, -7e8, f64::from(f32::MIN)];
        let sum = |order: &mut dyn Iterator<Item = f64>| {
            let mut sum = ExactSum::ZERO;
            order.for_each(|x| sum.add(x));
            sum
        };
        let forward = sum(&mut terms.into_iter());
        assert_eq!(forward, sum(&mut terms.into_iter().rev()));
        // in parts, whose numbers are added up
        let parts = [0..3, 3..9].map(|part| sum(&mut terms[part].iter().copied()).numbers());
        let added: [f64; ExactSum::NUMBERS] = std::array::from_fn(|i| parts[0][i] + parts[1][i]);
        assert_eq!(ExactSum::of_numbers(&added).total(), forward.total());
        assert_eq!(forward.total(), f64::from(f32::MIN));
        let rest = sum(&mut terms.into_iter().take(8));
        assert!((rest.total() - (1.0 - 3.5 + 1e-3)).abs() < 1e-15, "{}", rest.total());
        assert_eq!(sum(&mut [2f64.powi(-120), -1.5].into_iter()).total(), -1.5);
        assert_eq!(sum(&mut [2f64.powi(-120), 0.0].into_iter()).total(), 2f64.powi(-120));
        for (x, want) in [(1e300, f64::INFINITY), (f64::NEG_INFINITY, f64::NEG_INFINITY)] {
            assert_eq!(sum(&mut [x, 1.0].into_iter()).total(), want);
        }
        assert!(sum(&mut [f64::INFINITY, f64::NEG_INFINITY].into_iter()).total().is_nan());
        assert!(sum(&mut [f64::NAN, 1.0].into_iter()).total().is_nan());
    }
}
