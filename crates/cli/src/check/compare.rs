//! Compares arrays with their expected values.

use annulus_core::{Element, Result, Runs};
use ndarray::{Array, Dimension};

use crate::input::Input;

/// Expected values of an array.
#[derive(Debug)]
pub(super) struct Expected {
    /// Shape.
    pub(super) shape: Vec<usize>,
    /// Values in row-major order.
    pub(super) numbers: Vec<f64>,
}

impl Expected {
    /// Reads the array `name` of a case's file.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if there is none; as [`crate::file::TensorFile::floats`].
    pub(super) fn whole(input: &Input, name: &str) -> Result<Self> {
        let rows = Self::entry_shape(input, name)?.first().map_or(0, |&len| len as u64);
        Self::rows(input, name, 0, &Runs::counting(0, rows))
    }

    /// Reads the rows `rows` along `axis` of the array `name` of a case's file.
    pub(super) fn rows(input: &Input, name: &str, axis: usize, rows: &Runs) -> Result<Self> {
        let mut shape = Self::entry_shape(input, name)?;
        let numbers = input.tensors().floats(name, axis, rows)?;
        if let Some(len) = shape.get_mut(axis) {
            *len = annulus_core::index(rows.len());
        }
        Ok(Self { shape, numbers })
    }

    fn entry_shape(input: &Input, name: &str) -> Result<Vec<usize>> {
        Ok(input.tensors().entry(name)?.shape.clone())
    }
}

/// Returns the largest absolute error of `got`. Infinite values must be equal, else the error is
/// infinite; so it is if the shapes differ. The error is NaN if any value is NaN.
pub(super) fn largest_error<T: Element, D: Dimension>(got: &Array<T, D>, want: &Expected) -> f64 {
    // one sink per head may have the shape [heads] or [heads, 1]: axes of length 1 do not count
    let without_ones =
        |shape: &[usize]| shape.iter().copied().filter(|&len| len != 1).collect::<Vec<_>>();
    if without_ones(got.shape()) != without_ones(&want.shape) {
        return f64::INFINITY;
    }
    let mut worst = 0.0;
    for (got, &want) in got.iter().zip(&want.numbers) {
        let got = got.to_f64();
        // ∞ − ∞ would be NaN
        let error = if got == want { 0.0 } else { (got - want).abs() };
        if error.is_nan() {
            return f64::NAN;
        }
        worst = f64::max(worst, error);
    }
    worst
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::{Array1, arr1};

    fn error<T: Element>(got: &[T], want: &[f64]) -> f64 {
        let got: Array1<T> = got.iter().copied().collect();
        largest_error(&got, &Expected { shape: vec![want.len()], numbers: want.to_vec() })
    }

    #[test]
    fn infinities_must_be_equal_and_nan_never_passes() {
        let none = f64::NEG_INFINITY;
        assert_eq!(error(&[1.0f32, f32::NEG_INFINITY], &[1.5, none]), 0.5);
        assert_eq!(error(&[0.0f64], &[none]), f64::INFINITY);
        assert_eq!(error(&[none], &[0.0]), f64::INFINITY);
        assert_eq!(error(&[f64::INFINITY], &[none]), f64::INFINITY);
        assert!(error(&[f64::NAN, 0.0], &[0.0, 1.0]).is_nan());
        assert!(error(&[f64::NAN], &[f64::NAN]).is_nan());
    }

    #[test]
    fn shapes_must_agree() {
        assert_eq!(error(&[0.0f64, 0.0], &[0.0, 0.0, 0.0]), f64::INFINITY);
        assert_eq!(error(&[0.0f64, 0.0], &[0.0, 0.0]), 0.0);
        let column = Expected { shape: vec![2, 1], numbers: vec![1.0, 2.0] };
        assert_eq!(largest_error(&arr1(&[1.0f64, 2.0]), &column), 0.0);
    }
}
