//! Bounds for the error of an answer: FlashAttention's rule, extended to every element type.
//!
//! ```text
//! |got − want| ≤ 2·(largest error of the plain computation in the same type)
//!              + 4·(its mean square error)^½ · min(1, 64/n)
//!              + (r·ε + (16 + 4·largest |lse|)·ε of the accumulator)
//!                · (magnitude of what is summed up)
//! ```
//! `want` is the oracle's number, n the count of numbers in the array. r is 2 in 16 bits, because
//! probabilities or dS, and results, are rounded to the type once each. Else r is 16, because the
//! type is that of the accumulator, and its sums round often.
//!
//! - The largest error of very few numbers (a dbias of one, a dsinks of two) is itself random. It
//!   is therefore taken over up to 16 computations of nearby inputs, and some standard deviations
//!   are added.
//! - The last term covers arrays that the plain computation happens to get exactly right.
//! - For f64 the plain computation would be the oracle itself. Its error is that of f32, scaled by
//!   the ratio of the two ε.

use std::collections::{BTreeMap, HashMap};

use annulus_core::{DType, Error, Result};
use ndarray::{ArrayD, ArrayView4, ArrayViewD, Axis};

use crate::{Answer, Case, Draw, RankAnswer, plain};

/// The oracle's answer to a case and the error that each array may have.
#[derive(Debug, Clone)]
pub struct Judge {
    want: Answer,
    bounds: HashMap<&'static str, f64>,
}

impl Judge {
    /// Computes the oracle's answer, and the bounds from plain computations.
    pub fn new(case: &Case) -> Result<Self> {
        let dtype = case.spec.dtype;
        let want = Answer::of(case.truth()?, case.spec.normalize);
        let (mut stand_in, ratio) = if dtype == DType::F64 {
            (case.in_dtype(DType::F32), epsilon(DType::F64) / epsilon(DType::F32))
        } else {
            (case.clone(), 1.0)
        };
        let mut errors: HashMap<&'static str, Errors> = HashMap::new();
        let draw = &mut Draw::new(1);
        loop {
            let plain = plain(&stand_in)?;
            let truth = Answer::of(stand_in.truth()?, case.spec.normalize);
            for ((name, got), (_, want)) in plain.arrays().into_iter().zip(truth.arrays()) {
                errors.entry(name).or_default().add(&got, &want);
            }
            if errors.values().all(Errors::are_enough) {
                break;
            }
            stand_in = stand_in.nearby(draw);
        }
        let floors = floors(case, &want);
        let bound = |(name, errors): (&'static str, Errors)| {
            (name, ratio * errors.bound() + floors.get(name).copied().unwrap_or(0.0))
        };
        let bounds = errors.into_iter().map(bound).collect();
        Ok(Self { want, bounds })
    }

    /// Returns the oracle's answer.
    pub const fn want(&self) -> &Answer {
        &self.want
    }

    /// Returns the largest error that an array of this name may have.
    pub fn bound(&self, name: &str) -> f64 {
        self.bounds.get(name).copied().unwrap_or(0.0)
    }

    /// Compares an answer with the oracle's.
    pub fn check(&self, got: &Answer) -> Result<(), String> {
        got.compare(&self.want, |name| self.bound(name))
    }
}

/// Plain computations of nearby inputs are repeated until every array has this many errors: enough
/// for the largest of them to be stable.
const NUMBERS: usize = 128;
/// Limit of these repetitions, which arrays of fewer than 8 numbers reach.
const COMPUTATIONS: usize = 16;

/// Errors of the plain computations in one array.
#[derive(Debug, Clone, Copy, Default)]
struct Errors {
    computations: usize,
    /// Numbers in one computation.
    numbers: usize,
    largest: f64,
    /// Sum of squares.
    squares: f64,
}

impl Errors {
    fn add(&mut self, got: &ArrayViewD<'_, f64>, want: &ArrayViewD<'_, f64>) {
        self.computations += 1;
        self.numbers = got.len();
        let apart = got
            .iter()
            .zip(want)
            .map(|(got, want)| if got == want { 0.0 } else { (got - want).abs() });
        for apart in apart.filter(|apart| apart.is_finite()) {
            self.largest = self.largest.max(apart);
            self.squares += apart * apart;
        }
    }

    const fn are_enough(&self) -> bool {
        self.numbers == 0
            || self.computations * self.numbers >= NUMBERS
            || self.computations == COMPUTATIONS
    }

    fn bound(self) -> f64 {
        let numbers = self.numbers.max(1) as f64;
        let deviation = (self.squares / (numbers * self.computations as f64)).sqrt();
        2.0 * self.largest + 4.0 * deviation * (64.0 / numbers).min(1.0)
    }
}

/// Returns the distance from 1 to the next larger number of `dtype`.
pub const fn epsilon(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => f64::EPSILON,
        DType::F32 => f32::EPSILON as f64,
        DType::Bf16 => 0.007_812_5,
        DType::F16 => 0.000_976_562_5,
    }
}

/// Returns by name some ε of the magnitude of the terms that each array sums.
fn floors(case: &Case, want: &Answer) -> HashMap<&'static str, f64> {
    let wide = epsilon(case.spec.dtype.accumulator());
    let most = |numbers: &mut dyn Iterator<Item = &f64>| {
        numbers.filter(|x| x.is_finite()).fold(0.0, |most: f64, x| most.max(x.abs()))
    };
    // a logit of size s has an error of s·ε, and so e^s has the relative error s·ε
    let sums = wide * (16.0 + 4.0 * most(&mut want.lse.iter()));
    let dtype = case.spec.dtype;
    let roundings = if dtype.bytes() == 2 { 2.0 } else { 16.0 };
    let narrow = roundings * epsilon(dtype) + sums;
    let norm = |tensor: ArrayView4<'_, f64>| {
        let length =
            |vector: ndarray::ArrayView1<'_, f64>| vector.iter().map(|x| x * x).sum::<f64>().sqrt();
        tensor
            .rows()
            .into_iter()
            .map(length)
            .filter(|length| length.is_finite())
            .fold(0.0, f64::max)
    };
    // dS is a sum of dO·V, dO·O and dlse
    let kept = case.spec.dropout.map_or(1.0, |dropout| 1.0 / (1.0 - dropout.probability));
    let ds = norm(case.dout.view()) * kept * (norm(case.v.view()) + norm(want.out.view()))
        + case.dlse.as_ref().map_or(0.0, |dlse| most(&mut dlse.iter()));
    let scale = case.spec.scale.abs();
    let sink_rows = (case.spec.dims.q_len as f64).sqrt();
    HashMap::from([
        ("out", narrow * most(&mut case.v.iter().chain(&want.out)) * kept),
        ("lse", sums * (1.0 + most(&mut want.lse.iter()))),
        ("max", sums * (1.0 + most(&mut want.max.iter()))),
        ("sum", sums * (1.0 + most(&mut want.sum.iter()))),
        ("dq", narrow * (scale * ds * most(&mut case.k.iter()) + most(&mut want.dq.iter()))),
        ("dk", narrow * (scale * ds * most(&mut case.q.iter()) + most(&mut want.dk.iter()))),
        ("dv", narrow * (kept * most(&mut case.dout.iter()) + most(&mut want.dv.iter()))),
        ("dbias", sums * (ds * sink_rows + most(&mut want.dbias.iter().flatten()))),
        ("dsoftmax_aux", sums * (ds * sink_rows + most(&mut want.dsinks.iter().flatten()))),
    ])
}

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
