//! A caller's mask that panics on one rank: every rank returns an error without delay, and later
//! calls of the plan return `Error::Poisoned`.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use annulus::{Attention, Dims, Error, LocalRing, Tensors, mask::Predicate};
use ndarray::Array4;

#[test]
fn a_panicking_mask_is_an_error_and_not_a_hang() {
    let mask = Predicate::of_positions("panics at query 13", |query, key| {
        assert!(query != 13, "thirteen");
        key <= query
    });
    let mut plan =
        LocalRing::new(Attention::new().mask(Arc::new(mask)), Dims::new(1, 16, 2, 8), 4).unwrap();
    let x = Array4::<f32>::ones((1, 16, 2, 8));
    let tensors = Tensors::new(x.view(), x.view(), x.view());
    let start = Instant::now();
    let error = plan.forward(&tensors).unwrap_err();
    assert!(matches!(&error, Error::Internal { what } if what.contains("thirteen")), "{error}");
    assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
    let again = plan.forward(&tensors).unwrap_err();
    assert!(matches!(again, Error::Poisoned { .. }), "{again}");
}
