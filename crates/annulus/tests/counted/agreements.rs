//! All-gathers of a pass: one at its entry and one at its end, whatever the strategy.

use std::sync::{Arc, atomic::Ordering};

use annulus::{Attention, Dims, Division, Result, Setup, Tensors};
use ndarray::Array4;

use crate::{Counts, ring};

const RANKS: usize = 4;

#[test]
fn a_pass_of_any_strategy_has_two_agreements() -> Result<()> {
    let x = Array4::<f32>::ones((1, 16, 4, 8));
    let tensors = Tensors::new(x.view(), x.view(), x.view());
    for strategy in ["ring", "heads:2", "heads:4", "grid:1x4", "grid:2x2"] {
        let counts = Arc::new(Counts::default());
        let attention = Setup::from((
            Attention::new().causal(true),
            Division::new().strategy(strategy.parse()?),
        ));
        let mut ring = ring(&attention, Dims::new(1, 16, 4, 8), RANKS, &counts)?;
        let agreements = || counts.all_gathers.swap(0, Ordering::SeqCst) as f64 / RANKS as f64;
        agreements();
        let forward = ring.forward(&tensors)?;
        assert_eq!(agreements(), 2.0, "{strategy}, forward");
        ring.backward(&tensors, &forward, x.view(), None)?;
        assert_eq!(agreements(), 2.0, "{strategy}, backward");
    }
    Ok(())
}
