//! Packed documents with a window: tokens attend to their own document only, and a new batch brings
//! documents of other lengths to the same plan.
//!
//! ```sh
//! cargo run --release -p annulus --example packed_documents
//! ```

use annulus::{
    Attention, Batch, Dims, LocalRing, Result, Tensors,
    ndarray::{Array2, Array4},
};

fn main() -> Result<()> {
    let len = 600;
    let x = Array4::<f32>::from_shape_fn((1, len, 2, 32), |(_, i, h, c)| {
        (0.3 * (i * 31 + h * 7 + c) as f32).sin()
    });
    let tensors = Tensors::new(x.view(), x.view(), x.view());
    let attention = Attention::new().causal(true).sliding_window(127, 0);
    let mut ring = LocalRing::new(&attention, Dims::new(1, len, 2, 32), 3)?;

    for lengths in [[250, 50, 300], [100, 400, 100]] {
        // documents 0, 1 and 2; a negative id would be padding
        let ids = lengths.iter().zip(0..).flat_map(|(&len, id)| std::iter::repeat_n(id, len));
        let q_segment_ids = Array2::from_shape_vec((1, len), ids.collect()).ok();
        ring.update(&Batch { q_segment_ids, ..Batch::default() })?;
        let forward = ring.forward(&tensors)?;
        // the first token of a document attends to itself alone, so its output is its value
        let second = lengths[0];
        assert!((forward.out[[0, second, 0, 5]] - x[[0, second, 0, 5]]).abs() < 1e-6);
        println!("documents of {lengths:?}: lse of the last token {}", forward.lse[[0, 0, 599]]);
    }
    Ok(())
}
