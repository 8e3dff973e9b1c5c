//! Measures `LocalRing::update` with new segment ids relative to one forward pass, for 65,536
//! tokens in packed documents.
//!
//! ```text
//! cargo run --release -p annulus-bench --features plan --bin replan
//! ```
//!
//! Prints one JSON line per document length: seconds of the update (median of 9), seconds of the
//! forward pass, and their ratio.

use std::time::Instant;

use annulus::{Attention, Batch, Dims, LocalRing, Result, Tensors};
use ndarray::{Array2, Array4};

const TOKENS: usize = 65_536;
const HEADS: usize = 8;
const DIM: usize = 64;
const RANKS: usize = 4;

fn main() -> Result<()> {
    let x = Array4::<f32>::from_shape_fn((1, TOKENS, HEADS, DIM), |(_, i, h, c)| {
        ((i * 31 + h * 17 + c * 7) % 97) as f32 / 97.0 - 0.5
    });
    let tensors = Tensors::new(x.view(), x.view(), x.view());
    for document in [1024, 4096] {
        let mut plan = LocalRing::new(
            Attention::new().causal(true).forward_only(true),
            Dims::new(1, TOKENS, HEADS, DIM),
            RANKS,
        )?;
        // documents that start at other rows in each batch, so that the first and last differ in
        // length
        let ids = |shift: usize| {
            Array2::from_shape_fn((1, TOKENS), |(_, i)| ((i + shift * 131) / document) as i32)
        };
        let mut updates = Vec::new();
        for round in 0..9 {
            let batch = Batch {
                q_segment_ids: Some(ids(round)),
                kv_segment_ids: Some(ids(round)),
                ..Batch::default()
            };
            let start = Instant::now();
            plan.update(&batch)?;
            updates.push(start.elapsed().as_secs_f64());
        }
        updates.sort_by(f64::total_cmp);
        let update = updates[updates.len() / 2];
        let start = Instant::now();
        plan.forward(&tensors)?;
        let forward = start.elapsed().as_secs_f64();
        println!(
            "{{\"what\":\"replan\",\"tokens\":{TOKENS},\"ranks\":{RANKS},\"document\":{document},\
             \"update_s\":{update:.6},\"forward_s\":{forward:.3},\"ratio\":{:.5}}}",
            update / forward
        );
    }
    Ok(())
}
