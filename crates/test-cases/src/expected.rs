//! Expected arrays of a case, and the errors of an answer to it.

use std::collections::BTreeMap;

use annulus_core::{Error, Result};
use ndarray::{ArrayD, ArrayViewD, Axis};

use crate::{Answer, RankAnswer};

/// Expected arrays by name, each with its tolerance.
#[derive(Debug)]
pub struct Expected {
    pub(crate) arrays: BTreeMap<String, (ArrayD<f64>, f64)>,
}

/// Array whose error exceeds its tolerance.
#[derive(Debug, Clone, PartialEq)]
pub struct WrongArray {
    /// Name of the array.
    pub name: String,
    /// Its largest error; NaN or infinite where it cannot be compared.
    pub error: f64,
    /// The largest error that passes.
    pub tolerance: f64,
}

impl std::fmt::Display for WrongArray {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} error {:.3e} tolerance {:.3e}", self.name, self.error, self.tolerance)
    }
}

impl Expected {
    /// Names of the arrays.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.arrays.keys().map(String::as_str)
    }

    /// Returns the arrays of an answer that exceed their tolerance, as a NaN always does.
    pub fn wrong(&self, answer: &Answer) -> Result<Vec<WrongArray>> {
        self.wrong_by(answer, |_, array| array.view().to_owned())
    }

    /// As [`Expected::wrong`] for the rows of one rank.
    pub fn wrong_rows(&self, of_rank: &RankAnswer) -> Result<Vec<WrongArray>> {
        let RankAnswer { q_rows, kv_rows, answer } = of_rank;
        self.wrong_by(answer, |name, array| {
            let (axis, rows) = match name {
                "out" | "dq" => (1, q_rows),
                "dk" | "dv" => (1, kv_rows),
                "lse" | "max" | "sum" => (2, q_rows),
                // the gradient of a bias without a query axis is equal on all ranks
                "dbias" if array.len_of(Axis(2)) > 1 => (2, q_rows),
                _ => return array.clone(),
            };
            array.select(Axis(axis), rows)
        })
    }

    fn wrong_by(
        &self,
        answer: &Answer,
        rows: impl Fn(&str, &ArrayD<f64>) -> ArrayD<f64>,
    ) -> Result<Vec<WrongArray>> {
        let got: BTreeMap<&str, ArrayViewD<'_, f64>> = answer.arrays().into_iter().collect();
        let mut wrong = Vec::new();
        for (name, (want, tolerance)) in &self.arrays {
            let unknown = || Error::unsupported(format!("expected array {name}"), "this case");
            let got = got.get(name.as_str()).ok_or_else(unknown)?;
            let error = largest_error(got, &rows(name, want).view());
            let within = error <= *tolerance;
            if !within {
                wrong.push(WrongArray { name: name.clone(), error, tolerance: *tolerance });
            }
        }
        Ok(wrong)
    }

    /// Checks an answer.
    pub fn check(&self, answer: &Answer) -> std::result::Result<(), String> {
        match self.wrong(answer).map_err(|error| error.to_string())?.first() {
            None => Ok(()),
            Some(wrong) => Err(wrong.to_string()),
        }
    }
}

/// Returns the largest absolute error. Infinite values must be equal, else the error is infinite;
/// so it is if the shapes differ. The error is NaN if any value is NaN.
fn largest_error(got: &ArrayViewD<'_, f64>, want: &ArrayViewD<'_, f64>) -> f64 {
    // one sink per head may have the shape [heads] or [heads, 1]: axes of length 1 do not count
    let without_ones =
        |shape: &[usize]| shape.iter().copied().filter(|&len| len != 1).collect::<Vec<_>>();
    if without_ones(got.shape()) != without_ones(want.shape()) {
        return f64::INFINITY;
    }
    // ∞ − ∞ would be NaN
    let apart = |(got, want): (&f64, &f64)| if got == want { 0.0 } else { (got - want).abs() };
    let larger = |most: f64, apart: f64| if apart <= most || most.is_nan() { most } else { apart };
    got.iter().zip(want).map(apart).fold(0.0, larger)
}

#[cfg(test)]
mod tests {
    use ndarray::{arr1, arr2};

    use super::*;

    fn error(got: &[f64], want: &[f64]) -> f64 {
        largest_error(&arr1(got).view().into_dyn(), &arr1(want).view().into_dyn())
    }

    #[test]
    fn infinities_must_be_equal_and_nan_never_passes() {
        let none = f64::NEG_INFINITY;
        assert_eq!(error(&[1.0, none], &[1.5, none]), 0.5);
        assert_eq!(error(&[0.0], &[none]), f64::INFINITY);
        assert_eq!(error(&[none], &[0.0]), f64::INFINITY);
        assert_eq!(error(&[f64::INFINITY], &[none]), f64::INFINITY);
        assert!(error(&[f64::NAN, 0.0], &[0.0, 1.0]).is_nan());
        assert!(error(&[f64::NAN], &[f64::NAN]).is_nan());
    }

    #[test]
    fn shapes_must_agree() {
        assert_eq!(error(&[0.0, 0.0], &[0.0, 0.0, 0.0]), f64::INFINITY);
        let column = arr2(&[[1.0], [2.0]]);
        let error = largest_error(&arr1(&[1.0, 2.0]).view().into_dyn(), &column.view().into_dyn());
        assert_eq!(error, 0.0);
    }
}
