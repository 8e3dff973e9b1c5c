//! Estimates: the work of long sequences, and the steps of large rings.

use super::*;
use crate::{RingShards, WorkMatrix};

#[test]
fn work_of_long_sequences_is_estimated() {
    let dims = Dims::new(1, 50_000, 1, 64);
    let causal: mask::SharedMask = Arc::new(mask::Causal::default());
    let spec = Spec { mask: causal, ..Spec::new(dims, DType::F32) };
    for layout in [Layout::Contiguous, Layout::Zigzag] {
        let shards = RingShards::plain(&dims, spec.alignment, &layout, 4);
        let exact = WorkMatrix::of(spec.mask.as_ref(), 1, 1, &shards);
        let estimate = WorkMatrix::estimate(&spec, &shards, &mut || ());
        for (exact, estimate) in exact.pairs.iter().flatten().zip(estimate.pairs.iter().flatten()) {
            let (exact, estimate) = (*exact as f64, *estimate as f64);
            assert!((exact - estimate).abs() <= 1e-3 * exact, "{exact} {estimate}");
        }
    }
}

#[test]
fn large_rings_have_mean_steps() {
    let ranks = 300;
    let spec = Spec::new(Dims::new(1, 2 * ranks, 1, 64), DType::F32);
    let predicted = predict(&machine(link(0.5, 1e30), 1e30), &spec, ranks, &BOTH);
    is_near(predicted.forward.seconds, agreements(ranks, 0.5) + 0.5 * 299.0);
    let predicted = predict(&machine(link(1e-30, 1e30), 1e6), &spec, ranks, &BOTH);
    let flops = 2.0 * 600.0 * 4.0 * 64.0;
    is_near(predicted.forward.seconds, flops / 1e6);
    is_near(predicted.backward.seconds, 2.5 * flops / 1e6);
    // 2 rows a rank
    let predicted = predict(&machine(link(1e-30, 1e6), 1e30), &spec, ranks, &BOTH);
    let bytes = 299.0 * 2.0 * 2.0 * 64.0 * 4.0;
    is_near(predicted.forward.seconds, bytes / 1e6);
    is_near(predicted.bytes.between_nodes, 3.0 * 300.0 * bytes);
}
