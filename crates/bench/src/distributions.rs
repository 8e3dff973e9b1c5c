//! Packed documents, whose lengths are drawn from four distributions.

use annulus::Batch;

/// Mean lengths of the distributions: exp(6.5 + 1.2² / 2), 64 · 1.2 / 0.2, and those of the two
/// uniform ones. The long document of the last one does not count.
const MEANS: [f64; 4] = [1366.5, 384.0, 0.8 * 250.0 + 0.2 * 4096.0, 250.0];

/// Returns the lengths of documents of `rows` rows, by distribution; with `mean`, in a unit in
/// which this is their mean before they are rounded to whole rows.
pub fn distributions(rows: usize, seed: u64, mean: Option<f64>) -> [(&'static str, Vec<usize>); 4] {
    let normal = |uniform: &mut dyn FnMut() -> f64| {
        (-2.0 * (1.0 - uniform()).ln()).sqrt() * (std::f64::consts::TAU * uniform()).cos()
    };
    let [units_log_normal, units_zipf, units_bimodal, units_short] =
        MEANS.map(|of| mean.map_or(1.0, |mean| mean / of));
    let mut one_long = vec![rows / 3];
    one_long.extend(documents(rows - rows / 3, seed, |uniform| {
        units_short * (50.0 + 400.0 * uniform())
    }));
    let log_normal = |uniform: &mut dyn FnMut() -> f64| (6.5 + 1.2 * normal(uniform)).exp();
    let zipf = |uniform: &mut dyn FnMut() -> f64| 64.0 / (1.0 - uniform()).powf(1.0 / 1.2);
    let bimodal = |uniform: &mut dyn FnMut() -> f64| {
        if uniform() < 0.8 { 100.0 + 300.0 * uniform() } else { 4096.0 }
    };
    [
        ("log-normal", documents(rows, seed, |uniform| units_log_normal * log_normal(uniform))),
        ("Zipf", documents(rows, seed, |uniform| units_zipf * zipf(uniform))),
        ("bimodal", documents(rows, seed, |uniform| units_bimodal * bimodal(uniform))),
        ("one long", one_long),
    ]
}

/// Returns the batch of documents of these lengths, one after another.
pub fn packed(lens: &[usize]) -> Batch {
    let ends = lens.iter().scan(0i64, |end, &len| {
        *end += len as i64;
        Some(*end)
    });
    Batch { cum_seqlens_q: Some(std::iter::once(0).chain(ends).collect()), ..Batch::default() }
}

/// Draws lengths until they fill `rows` rows, from uniform numbers in 0..1.
fn documents(
    rows: usize,
    seed: u64,
    mut draw: impl FnMut(&mut dyn FnMut() -> f64) -> f64,
) -> Vec<usize> {
    let mut state = seed;
    let mut uniform = move || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 11) as f64 / (1u64 << 53) as f64
    };
    let mut lens = Vec::new();
    let mut rest = rows;
    while rest > 0 {
        let next = (draw(&mut uniform) as usize).clamp(1, rest);
        lens.push(next);
        rest -= next;
    }
    lens
}
