//! The backend against the oracle: every feature, every type, any split into blocks, any thread
//! count. This file: test problems, and comparisons with the oracle's results.

#![allow(clippy::unwrap_used, reason = "a test")]

mod accuracy;
mod calls;
mod forward_only;
mod ranks;
mod short_calls;
mod threads;
mod tiles;

use std::{collections::HashMap, sync::Arc};

use annulus_core::{
    DType, Dims, Spec,
    mask::{Causal, ChunkedCausal, Everything, Prefix, SharedMask, Window, and},
};
use annulus_test_cases::{Answer, Case, Draw, Masks};

/// Returns a case of this spec with random tensors, of which some biases and sinks are −∞.
pub(crate) fn case(spec: Spec, draw: &mut Draw) -> Case {
    let mask = Arc::clone(&spec.mask);
    let Dims { batch, q_heads, q_len, .. } = spec.dims;
    let mut case = Case::new("", spec, Masks::default(), draw);
    case.masks.objects.push(Arc::clone(&mask));
    case.spec.mask = mask;
    if let Some(bias) = &mut case.bias {
        bias.mapv_inplace(|x| if draw.once_in(9) { f64::NEG_INFINITY } else { x });
    }
    if let Some(sinks) = &mut case.sinks {
        sinks.mapv_inplace(|x| if draw.once_in(9) { f64::NEG_INFINITY } else { x });
    }
    [&mut case.v, &mut case.dout].into_iter().for_each(|tensor| *tensor *= 0.5);
    case.dlse = draw.once_in(2).then(|| draw.tensor((batch, q_heads, q_len)));
    case.in_dtype(case.spec.dtype)
}

/// Returns a random combination of features, with lengths of several tiles, and masks that have
/// intervals.
pub(crate) fn any_features(seed: u64, dtype: DType) -> Case {
    let mut case = Case::random_long(seed).in_dtype(dtype);
    let Masks { causal, window, first_visible, chunk, prefix, objects } = case.masks.clone();
    let causal =
        (causal && prefix.is_none()).then(|| -> SharedMask { Arc::new(Causal::default()) });
    let window = window.map(|[left, right]| -> SharedMask {
        Arc::new(Window { first_visible, ..Window::new(left, right) })
    });
    let chunk = chunk.map(|size| -> SharedMask { Arc::new(ChunkedCausal { size }) });
    let prefix = prefix.map(|len| -> SharedMask { Arc::new(Prefix { len }) });
    let masks = [causal, window, chunk, prefix].into_iter().flatten().chain(objects);
    case.spec.mask = masks.fold(Arc::new(Everything), and);
    case
}

/// Returns the oracle's results.
pub(crate) fn oracle(case: &Case) -> Answer {
    Answer::of(case.truth().unwrap(), case.spec.normalize)
}

/// Asserts that every number is within `tolerance` × max(1, largest finite number of its array) of
/// `want`, or equally non-finite.
pub(crate) fn assert_close(got: &Answer, want: &Answer, tolerance: f64, what: &str) {
    let arrays: HashMap<_, _> = want.arrays().into_iter().collect();
    let within = |name: &str| {
        let finite = arrays[name].iter().filter(|x| x.is_finite());
        tolerance * finite.fold(1.0, |largest: f64, x| largest.max(x.abs()))
    };
    got.compare(want, within).unwrap_or_else(|error| panic!("{what}: {error}"));
}
