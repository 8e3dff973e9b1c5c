//! Comparison of a level with level 0 in f32, from the same inputs rounded to 16 bits.

use annulus::{Attention, DType, Dims, Error, Result};
use annulus_core::Alignment;
use annulus_cuda::{Cuda, Level};
use serde_json::json;

use crate::pass::{Numbers, Passes};

/// Results that are compared.
const NAMES: [&str; 5] = ["out", "lse", "dq", "dk", "dv"];

/// Names of all shapes.
pub(crate) const SHAPES: [&str; 5] = ["full", "causal", "window", "gqa", "cross"];

/// One attention.
struct Shape {
    name: &'static str,
    attention: Attention,
    dims: Dims,
}

/// Full, causal, window, grouped heads, and causal with other numbers of queries than of keys.
fn shapes(len: usize, heads: usize, dim: usize) -> [Shape; 5] {
    let kv_heads = (heads / 4).max(1);
    let square = Dims::new(1, len, kv_heads, dim);
    let full = Attention::new();
    let causal = Attention::new().causal(true);
    let window = Attention::new().sliding_window(len as u64 / 4, Some(len as u64 / 16));
    let cross = Attention::new().causal(true).align(Alignment::BottomRight);
    let [full_name, causal_name, window_name, grouped, crossed] = SHAPES;
    [
        Shape { name: full_name, attention: full, dims: square },
        Shape { name: causal_name, attention: causal.clone(), dims: square },
        Shape { name: window_name, attention: window, dims: square },
        Shape { name: grouped, attention: causal, dims: Dims { q_heads: heads, ..square } },
        Shape { name: crossed, attention: cross, dims: Dims { q_len: len / 3 + 7, ..square } },
    ]
}

/// ‖got − want‖ / ‖want‖ of all elements, and the largest of a row against the mean norm of a row:
/// one wrong row of thousands hardly changes the first.
fn errors(got: &[f64], want: &[f64], row: usize) -> [f64; 2] {
    let norm = |numbers: &[f64]| numbers.iter().map(|x| x * x).sum::<f64>();
    let rows = (want.len() / row).max(1) as f64;
    let mut sum = 0.0;
    let mut most = 0.0f64;
    for (got, want) in got.chunks(row).zip(want.chunks(row)) {
        let difference = got.iter().zip(want).map(|(got, want)| (got - want).powi(2)).sum::<f64>();
        sum += difference;
        // f64::max would ignore NaN
        most = if difference >= most || difference.is_nan() { difference } else { most };
    }
    let whole = norm(want).max(f64::MIN_POSITIVE);
    [(sum / whole).sqrt(), (most / (whole / rows)).sqrt()]
}

/// Results of two passes, which must have the same bits.
fn compute(passes: &mut Passes) -> Result<([Vec<f64>; 5], bool)> {
    let mut once = || {
        passes.forward()?;
        passes.backward()?;
        passes.results()
    };
    let first = once()?;
    let second = once()?;
    let bits = |numbers: &[f64]| numbers.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    let same = first.iter().zip(&second).all(|(first, second)| bits(first) == bits(second));
    Ok((first, same))
}

/// Verifies the shapes named in `only` of one element type, length and dim. Prints a line for each;
/// false if one is wrong.
pub(crate) fn verify(
    cuda: &Cuda,
    dtype: DType,
    len: usize,
    heads: usize,
    dim: usize,
    only: &[&str],
) -> Result<bool> {
    let bound = match dtype {
        DType::Bf16 => 5e-3,
        DType::F16 => 1e-3,
        _ => return Err(Error::invalid("dtypes", dtype, "bf16 or f16: f32 is the reference")),
    };
    let plain = cuda.clone().at_level(Level::Plain)?;
    let mut all_right = true;
    let chosen = |shape: &Shape| only.contains(&shape.name);
    for Shape { name, attention, dims } in shapes(len, heads, dim).into_iter().filter(chosen) {
        let numbers = Numbers::draw(dims, dtype);
        let mut passes = Passes::new(cuda, &attention, dtype, dims, &numbers)?;
        let (got, same_bits) = compute(&mut passes)?;
        drop(passes);
        let mut passes = Passes::new(&plain, &attention, DType::F32, dims, &numbers)?;
        passes.forward()?;
        passes.backward()?;
        let want = passes.results()?;
        let mut right = same_bits;
        let mut found = serde_json::Map::new();
        for (index, name) in NAMES.into_iter().enumerate() {
            // lse stays f32: only the order of sums and e^x differ
            let is_lse = name == "lse";
            let [whole, row] = errors(&got[index], &want[index], if is_lse { 1 } else { dim });
            let bound = if is_lse { 1e-4 } else { bound };
            right &= whole < bound && row < 8.0 * bound;
            found.insert(name.into(), json!([format!("{whole:.1e}"), format!("{row:.1e}")]));
        }
        all_right &= right;
        println!(
            "{}",
            json!({
                "what": "verify", "gpu": cuda.to_string(), "level": cuda.level().name(),
                "dtype": dtype.name(), "head_dim": dim, "n": len, "mask": name,
                "errors": found, "same_bits": same_bits, "ok": right,
            })
        );
    }
    Ok(all_right)
}
