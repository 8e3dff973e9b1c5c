//! Whether an array is what was expected.

use annulus_core::Element;

/// Largest error of `got`, with the rules of the cases: −∞ must meet −∞, and NaN never passes. Infinite or NaN where that fails.
pub(super) fn largest_error<'a, T: Element>(got: impl IntoIterator<Item = &'a T>, want: &[f64]) -> f64 {
    let mut worst = 0.0;
    let mut count = 0;
    for (got, &want) in got.into_iter().zip(want) {
        count += 1;
        let got = got.to_f64();
        // equal infinities differ by nothing; any other difference with an infinity is infinite, with a NaN it is NaN
        let error = if got == want { 0.0 } else { (got - want).abs() };
        if error.is_nan() {
            return f64::NAN;
        }
        worst = f64::max(worst, error);
    }
    if count == want.len() { worst } else { f64::INFINITY }
}

#[cfg(test)]
mod tests {
    use super::largest_error;

    #[test]
    fn infinities_meet_and_nan_never_passes() {
        let none = f64::NEG_INFINITY;
        assert_eq!(largest_error(&[1.0f32, f32::NEG_INFINITY], &[1.5, none]), 0.5);
        assert_eq!(largest_error(&[0.0f64], &[none]), f64::INFINITY);
        assert_eq!(largest_error(&[none], &[0.0]), f64::INFINITY);
        assert_eq!(largest_error(&[f64::INFINITY], &[none]), f64::INFINITY);
        assert!(largest_error(&[f64::NAN, 0.0], &[0.0, 1.0]).is_nan());
        assert!(largest_error(&[f64::NAN], &[f64::NAN]).is_nan());
        assert_eq!(largest_error(&[0.0f64], &[0.0, 0.0]), f64::INFINITY);
    }
}
