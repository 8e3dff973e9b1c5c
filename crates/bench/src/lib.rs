//! Parameters, clocks, random inputs and comparisons that the programs share.

use std::{collections::BTreeMap, str::FromStr};

use annulus::{Attention, DType, Dims, Error, Result};
use annulus_core::Alignment;
use ndarray::Array4;
use rustix::time::{ClockId, clock_gettime};
use serde_json::{Map, Value, json};

/// Parameters of a program by name, `name=value`.
#[derive(Debug)]
pub struct Parameters(BTreeMap<String, String>);

impl Parameters {
    /// Parses the words of a command line.
    pub fn parse(words: impl IntoIterator<Item = String>, names: &[&str]) -> Result<Self> {
        let mut all = BTreeMap::new();
        for word in words {
            let (name, value) = word.split_once('=').unwrap_or((&word, ""));
            if !names.contains(&name) || value.is_empty() {
                let want = format!("one of {}, = and a value", names.join(", "));
                return Err(Error::invalid("argument", &word, want));
            }
            all.insert(name.to_owned(), value.to_owned());
        }
        Ok(Self(all))
    }

    /// Returns the value of a parameter, if it is given.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str)
    }

    /// Parses a list; `otherwise` if it is not given.
    pub fn list<T>(
        &self,
        name: &str,
        otherwise: &str,
        parse: impl Fn(&str) -> Option<T>,
    ) -> Result<Vec<T>> {
        let text = self.get(name).unwrap_or(otherwise);
        let wrong = || Error::invalid(name, text, format!("a list such as {otherwise}"));
        let words = text.split(',').filter(|word| !word.is_empty());
        words.map(|word| parse(word).ok_or_else(wrong)).collect()
    }

    /// Parses a number; `otherwise` if it is not given.
    pub fn number<T: FromStr>(&self, name: &str, otherwise: T) -> Result<T> {
        let Some(text) = self.get(name) else { return Ok(otherwise) };
        text.parse().map_err(|_| Error::invalid(name, text, "a number"))
    }

    /// Parses a number from 1.
    pub fn count(&self, name: &str, otherwise: usize) -> Result<usize> {
        match self.number(name, otherwise)? {
            0 => Err(Error::invalid(name, 0, "a number above 0")),
            count => Ok(count),
        }
    }

    /// Parses a list of numbers.
    pub fn numbers(&self, name: &str, otherwise: &str) -> Result<Vec<usize>> {
        self.list(name, otherwise, |word| word.parse().ok())
    }

    /// Parses a list of names of some of `all`.
    pub fn named<T: Copy, const N: usize>(
        &self,
        name: &str,
        otherwise: &str,
        all: [T; N],
        of: impl Fn(T) -> &'static str,
    ) -> Result<Vec<T>> {
        self.list(name, otherwise, |word| all.into_iter().find(|&item| of(item) == word))
    }

    /// Parses the list `dtypes`.
    pub fn dtypes(&self, otherwise: &str) -> Result<Vec<DType>> {
        let all = [DType::F64, DType::F32, DType::Bf16, DType::F16];
        self.named("dtypes", otherwise, all, DType::name)
    }
}

/// Returns the CPU time of all threads of this process, in seconds.
pub fn cpu_seconds() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

/// Returns the median; of an even number, the mean of the middle two; NaN of none.
pub fn median(mut numbers: Vec<f64>) -> f64 {
    numbers.sort_by(f64::total_cmp);
    let middle = numbers.len() / 2;
    match numbers.len() {
        0 => f64::NAN,
        len if len % 2 == 1 => numbers[middle],
        _ => (numbers[middle - 1] + numbers[middle]) / 2.0,
    }
}

/// Returns a generator of uniform numbers between 0 and 1 (Knuth's MMIX).
pub fn uniform(mut state: u64) -> impl FnMut() -> f64 {
    move || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 40) as f64 + 0.5) / f64::from(1 << 24)
    }
}

/// Returns inputs q, k, v and dout `[batch, row, head, dim]` with a standard normal distribution,
/// rounded to `dtype`.
///
/// # Source
/// Box and Muller 1958.
pub fn draw(dims: Dims, dtype: DType) -> [Array4<f64>; 4] {
    let Dims { batch, q_len, kv_len, q_heads, kv_heads, head_dim, value_dim } = dims;
    let mut uniform = uniform(1);
    let mut normal = || {
        let (radius, angle) = (uniform(), uniform());
        dtype.round((-2.0 * radius.ln()).sqrt() * (std::f64::consts::TAU * angle).cos())
    };
    [
        (batch, q_len, q_heads, head_dim),
        (batch, kv_len, kv_heads, head_dim),
        (batch, kv_len, kv_heads, value_dim),
        (batch, q_len, q_heads, value_dim),
    ]
    .map(|shape| Array4::from_shape_simple_fn(shape, &mut normal))
}

/// Results that are compared.
const NAMES: [&str; 5] = ["out", "lse", "dq", "dk", "dv"];

/// Values of [`NAMES`].
pub type Results = [Vec<f64>; 5];

/// Names of all shapes.
pub const SHAPES: [&str; 7] = ["full", "causal", "window", "gqa", "cross", "cap", "decode"];

/// Problems to be verified.
#[derive(Debug, Clone, Copy)]
pub struct Verification<'a> {
    /// Element type.
    pub dtype: DType,
    /// Number of keys.
    pub len: usize,
    /// Query heads of grouped shapes.
    pub heads: usize,
    /// Dim of heads and values.
    pub dim: usize,
    /// Names of the masks.
    pub masks: &'a [&'static str],
    /// Keys that the window of the reference is too long, to show that it is found.
    pub mistake: u64,
}

/// One attention.
#[derive(Debug)]
pub struct Shape {
    name: &'static str,
    /// Mask and scores.
    pub attention: Attention,
    /// Lengths.
    pub dims: Dims,
}

impl Verification<'_> {
    /// Verifies the chosen masks. `compute` returns the results of an attention, true if a second
    /// pass has the same bits, and the results of the reference, which is the second argument.
    /// `bound` is that of [`errors`]. Prints a line for each mask with the fields of `line`; false
    /// if one is wrong.
    pub fn run(
        &self,
        bound: f64,
        line: &Map<String, Value>,
        mut compute: impl FnMut(&Shape, &Attention) -> Result<(Results, bool, Results)>,
    ) -> Result<bool> {
        let Self { len, heads, dim, masks, mistake, .. } = *self;
        let mut all_right = true;
        let references = shapes(len, heads, dim, mistake);
        let both = shapes(len, heads, dim, 0).into_iter().zip(references);
        for (shape, reference) in both.filter(|(shape, _)| masks.contains(&shape.name)) {
            let (got, same_bits, want) = compute(&shape, &reference.attention)?;
            let mut right = same_bits;
            let mut found = Map::new();
            for (index, name) in NAMES.into_iter().enumerate() {
                let is_lse = name == "lse";
                let errors = errors(&got[index], &want[index], if is_lse { 1 } else { dim });
                // lse stays f32: only the order of sums and e^x differ
                let bound = if is_lse { bound.min(1e-4) } else { bound };
                right &= are_within(errors, bound);
                found.insert(name.into(), json!(errors.map(|error| format!("{error:.1e}"))));
            }
            all_right &= right;
            let mut line = line.clone();
            for (name, value) in [
                ("what", json!("verify")),
                ("dtype", json!(self.dtype.name())),
                ("mask", json!(shape.name)),
                ("errors", Value::Object(found)),
                ("same_bits", json!(same_bits)),
                ("ok", json!(right)),
            ] {
                line.insert(name.to_owned(), value);
            }
            println!("{}", Value::Object(line));
        }
        Ok(all_right)
    }
}

/// True if two results have the same bits.
pub fn have_same_bits(first: &Results, second: &Results) -> bool {
    let bits = |of: &Results| of.iter().flatten().map(|x| x.to_bits()).collect::<Vec<_>>();
    bits(first) == bits(second)
}

/// Full, causal, window, grouped heads, causal with other numbers of queries than of keys, soft
/// cap, and one query of grouped heads. The window is `mistake` keys too long.
fn shapes(len: usize, heads: usize, dim: usize, mistake: u64) -> [Shape; 7] {
    let kv_heads = (heads / 4).max(1);
    let square = Dims::new(1, len, kv_heads, dim);
    let full = Attention::new();
    let causal = Attention::new().causal(true);
    let window = Attention::new().sliding_window(len as u64 / 4 + mistake, Some(len as u64 / 16));
    let cross = Attention::new().causal(true).align(Alignment::BottomRight);
    let grouped_dims = Dims { q_heads: heads, ..square };
    let capped = causal.clone().logits_soft_cap(20.0);
    let [full_name, causal_name, window_name, grouped, crossed, cap_name, decode] = SHAPES;
    [
        Shape { name: full_name, attention: full.clone(), dims: square },
        Shape { name: causal_name, attention: causal.clone(), dims: square },
        Shape { name: window_name, attention: window, dims: square },
        Shape { name: grouped, attention: causal, dims: grouped_dims },
        Shape { name: crossed, attention: cross, dims: Dims { q_len: len / 3 + 7, ..square } },
        Shape { name: cap_name, attention: capped, dims: square },
        Shape { name: decode, attention: full, dims: Dims { q_len: 1, ..grouped_dims } },
    ]
}

/// Bound of the error of a row against that of the whole: rows are sums of few roundings, whose
/// errors scatter about their mean.
const WORST_ROW: f64 = 2.0;

/// ‖got − want‖ / ‖want‖ of all elements, and the largest error of a row against the largest norm
/// of a row: one wrong row of thousands hardly changes the first.
///
/// Rounding is relative to the terms of a sum, and rows differ in them by an order of magnitude:
/// under a causal mask the first outputs are means of few values. Against the mean norm of a row
/// their rounding would look like an error. Against its own norm a sum whose terms cancel would.
fn errors(got: &[f64], want: &[f64], row: usize) -> [f64; 2] {
    let square = |numbers: &[f64]| numbers.iter().map(|x| x * x).sum::<f64>();
    let mut sum = 0.0;
    let mut most = 0.0f64;
    let mut largest = f64::MIN_POSITIVE;
    for (got, want) in got.chunks(row).zip(want.chunks(row)) {
        let difference = got.iter().zip(want).map(|(got, want)| (got - want).powi(2)).sum::<f64>();
        sum += difference;
        largest = largest.max(square(want));
        // f64::max would ignore NaN
        most = if difference >= most || difference.is_nan() { difference } else { most };
    }
    let whole = square(want).max(f64::MIN_POSITIVE);
    [(sum / whole).sqrt(), (most / largest).sqrt()]
}

/// True if [`errors`] are within the bound of the whole.
fn are_within(errors: [f64; 2], bound: f64) -> bool {
    let [whole, row] = errors;
    whole < bound && row < WORST_ROW * bound
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROW: usize = 64;

    /// Rows whose norms fall like those of outputs under a causal mask: 8 / √(number of keys).
    fn rows() -> Vec<f64> {
        let element =
            |at: usize| (at as f64 * 0.7).sin() * (2.0 / (1.0 + (at / ROW) as f64)).sqrt();
        (0..4000 * ROW).map(element).collect()
    }

    #[test]
    fn rounding_is_within_the_bound() {
        let want = rows();
        let got: Vec<f64> = want.iter().map(|&x| DType::Bf16.round(x)).collect();
        assert!(are_within(errors(&got, &want, ROW), 5e-3), "{:?}", errors(&got, &want, ROW));
        let got: Vec<f64> = want.iter().map(|&x| DType::F16.round(x)).collect();
        assert!(are_within(errors(&got, &want, ROW), 1e-3));
    }

    #[test]
    fn a_wrong_row_of_ordinary_size_is_found() {
        let want = rows();
        // a row of ordinary size among the last ones: 0, another one, or NaN
        let row = 3000 * ROW..3001 * ROW;
        for wrong in [vec![0.0; ROW], want[..ROW].to_vec(), vec![f64::NAN; ROW]] {
            let mut got = want.clone();
            got[row.clone()].copy_from_slice(&wrong);
            assert!(!are_within(errors(&got, &want, ROW), 5e-3), "{:?}", &wrong[..2]);
        }
    }
}
