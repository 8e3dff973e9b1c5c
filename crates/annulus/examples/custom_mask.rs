//! A mask of one's own, in two ways: a closure, and a type with intervals, whose empty and full
//! tiles cost nothing.
//!
//! ```sh
//! cargo run --release -p annulus --example custom_mask
//! ```

use std::sync::Arc;

use annulus::{
    Attention, Dims, LocalRing, Result, Tensors,
    mask::{Fingerprint, Key, KeyIntervals, Mask, Predicate, Query},
    ndarray::Array4,
};

/// Every query attends to itself, to the 7 keys before and to the 7 keys after.
#[derive(Debug)]
struct Band;

impl Mask for Band {
    /// Ranks refuse to plan with masks of different fingerprints.
    fn fingerprint(&self, into: Fingerprint) -> Fingerprint {
        into.text("band of 7")
    }

    fn visible(&self, query: &Query, key: &Key) -> bool {
        query.position.abs_diff(key.position) <= 7
    }

    /// The same as intervals of key positions.
    fn intervals(&self, query: &Query) -> Option<KeyIntervals> {
        Some(KeyIntervals::one(query.position - 7, query.position + 8))
    }
}

fn main() -> Result<()> {
    let dims = Dims::new(1, 200, 2, 16);
    let x = Array4::<f32>::from_shape_fn((1, 200, 2, 16), |(_, i, h, c)| {
        (0.3 * (i * 31 + h * 7 + c) as f32).sin()
    });
    let tensors = Tensors::new(x.view(), x.view(), x.view());

    let band = LocalRing::new(Attention::new().mask(Arc::new(Band)), dims, 2)?.forward(&tensors)?;

    // ranks compare closures by name: different closures need different names
    let closure = Predicate::of_positions("band of 7", |i, j| i.abs_diff(j) <= 7);
    let same =
        LocalRing::new(Attention::new().mask(Arc::new(closure)), dims, 2)?.forward(&tensors)?;
    assert_eq!(band.lse, same.lse);

    // masks combine: visible only if all allow it
    let attention = Attention::new().mask(Arc::new(Band)).causal(true);
    let causal = LocalRing::new(&attention, dims, 2)?.forward(&tensors)?;
    println!(
        "lse of query 100: {} with 15 keys, {} with 8",
        band.lse[[0, 0, 100]],
        causal.lse[[0, 0, 100]]
    );
    assert!(causal.lse[[0, 0, 100]] < band.lse[[0, 0, 100]]);
    Ok(())
}
