//! Causal grouped-query attention over 4 ranks in this process, forward and backward.
//!
//! ```sh
//! cargo run --release -p annulus --example attention
//! ```

use annulus::{Attention, Dims, LocalRing, Result, Tensors, ndarray::Array4};

fn main() -> Result<()> {
    // batch, length, query heads, head dim; 2 heads of keys and values for 8 of queries
    let dims = Dims::new(1, 1000, 8, 64).kv_heads(2);
    let q = tensor(1000, 8, 64, 0.3);
    let k = tensor(1000, 2, 64, 0.7);
    let v = tensor(1000, 2, 64, 1.1);
    let dout = tensor(1000, 8, 64, 0.9); // ∂L/∂out, of the layers that follow

    let mut ring = LocalRing::new(Attention::new().causal(true), dims, 4)?;
    println!("{ring}");
    let tensors = Tensors::new(q.view(), k.view(), v.view());
    let forward = ring.forward(&tensors)?;
    let gradients = ring.backward(&tensors, &forward, dout.view(), None)?;

    println!("out {:?}, lse {:?}", forward.out.dim(), forward.lse.dim());
    println!("dq {:?}, dk {:?}", gradients.dq.dim(), gradients.dk.dim());

    // one rank computes the same, up to the order of rounding
    let mut alone = LocalRing::new(Attention::new().causal(true), dims, 1)?;
    let difference = (&alone.forward(&tensors)?.out - &forward.out).mapv(f32::abs);
    let largest = difference.fold(0.0, |largest: f32, &x| largest.max(x));
    println!("largest difference from one rank: {largest:e}");
    assert!(largest < 1e-5);
    Ok(())
}

fn tensor(len: usize, heads: usize, dim: usize, step: f32) -> Array4<f32> {
    Array4::from_shape_fn((1, len, heads, dim), |(_, i, h, c)| {
        (step * (i * 31 + h * 7 + c) as f32).sin()
    })
}
