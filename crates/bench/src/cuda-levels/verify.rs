//! Comparison of a level with level `plain` in f32, from the same inputs rounded to 16 bits.

use annulus::{DType, Error, Result};
use annulus_cuda::Level;
use serde_json::json;

use crate::{
    Setup,
    comparison::{NAMES, Shape, Verification, are_within, errors, shapes},
    pass::{Numbers, Passes},
};

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

/// Verifies the chosen masks of one element type, length and dim. Prints a line for each; false if
/// one is wrong.
pub(crate) fn verify(setup: &Setup, problem: &Verification<'_>) -> Result<bool> {
    let Setup { name: level, cuda } = setup;
    let &Verification { dtype, len, heads, dim, masks, mistake } = problem;
    let bound = match dtype {
        DType::Bf16 => 5e-3,
        DType::F16 => 1e-3,
        _ => return Err(Error::invalid("dtypes", dtype, "bf16 or f16: f32 is the reference")),
    };
    let plain = cuda.clone().at_level(Level::Plain)?;
    let mut all_right = true;
    let references = shapes(len, heads, dim, mistake);
    for (shape, reference) in shapes(len, heads, dim, 0).into_iter().zip(references) {
        let Shape { name, attention, dims } = shape;
        if !masks.contains(&name) {
            continue;
        }
        let numbers = Numbers::draw(dims, dtype);
        let mut passes = Passes::new(cuda, &attention, dtype, dims, &numbers)?;
        let (got, same_bits) = compute(&mut passes)?;
        drop(passes);
        let mut passes = Passes::new(&plain, &reference.attention, DType::F32, dims, &numbers)?;
        passes.forward()?;
        passes.backward()?;
        let want = passes.results()?;
        let mut right = same_bits;
        let mut found = serde_json::Map::new();
        for (index, name) in NAMES.into_iter().enumerate() {
            // lse stays f32: only the order of sums and e^x differ
            let is_lse = name == "lse";
            let errors = errors(&got[index], &want[index], if is_lse { 1 } else { dim });
            let bound = if is_lse { 1e-4 } else { bound };
            right &= are_within(errors, bound);
            found.insert(name.into(), json!(errors.map(|error| format!("{error:.1e}"))));
        }
        all_right &= right;
        println!(
            "{}",
            json!({
                "what": "verify", "gpu": cuda.to_string(), "level": level,
                "dtype": dtype.name(), "head_dim": dim, "n": len, "mask": name,
                "errors": found, "same_bits": same_bits, "ok": right,
            })
        );
    }
    Ok(all_right)
}
