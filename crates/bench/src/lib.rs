//! Parameters, clocks, random inputs and comparisons that the programs share.

pub mod comparison;

use std::{collections::BTreeMap, str::FromStr};

use annulus::{DType, Dims, Error, Result};
use ndarray::Array4;
use rustix::time::{ClockId, clock_gettime};

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
