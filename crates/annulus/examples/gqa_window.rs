//! A sliding window of 1,024 keys with 4 attention sinks, 32 query heads on 8 KV heads, in bf16:
//! the layer of a long-context language model.
//!
//! ```sh
//! cargo run --release -p annulus --example gqa_window
//! ```

use annulus::{Attention, DType, Dims, LocalRing, Result, Tensors, half::bf16, ndarray::Array4};

fn main() -> Result<()> {
    let len = 4096;
    let dims = Dims::new(1, len, 32, 64).kv_heads(8);
    let q = tensor(len, 32, 0.3);
    let k = tensor(len, 8, 0.7);
    let v = tensor(len, 8, 1.1);

    let attention = Attention::new()
        .dtype(DType::Bf16) // out is bf16 too; lse and all sums are f32
        .causal(true)
        .sliding_window(1023, 0) // itself and the 1,023 keys before
        .attention_sink_size(4) // and the first 4 keys, for every query
        .forward_only(true);
    let mut ring = LocalRing::new(&attention, dims, 2)?;
    println!("{ring}");
    let forward = ring.forward(&Tensors::new(q.view(), k.view(), v.view()))?;
    for (rank, report) in forward.reports.iter().enumerate() {
        println!(
            "rank {rank}: {:.0} ms, of which {:.0} ms waiting, {} bytes sent",
            report.seconds * 1e3,
            report.waiting_seconds * 1e3,
            report.bytes_sent
        );
    }
    assert!(forward.out.iter().all(|out| out.is_finite()));
    Ok(())
}

fn tensor(len: usize, heads: usize, step: f32) -> Array4<bf16> {
    Array4::from_shape_fn((1, len, heads, 64), |(_, i, h, c)| {
        bf16::from_f32((step * (i * 31 + h * 7 + c) as f32).sin())
    })
}
