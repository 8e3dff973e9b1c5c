//! A ring of two ranks on one GPU (Vulkan, Metal or DX12): tensors in host memory, blocks in device
//! memory.
//!
//! ```sh
//! cargo run --release -p annulus --features wgpu --example gpu
//! ```

use annulus::{
    Attention, Dims, LocalRing, Plan, Result, Tensors,
    backend::{
        wgpu::{Gpu, Options},
        wgpu_rank,
    },
    ndarray::Array4,
};

fn main() -> Result<()> {
    let gpu = Gpu::open(&Options::default())?;
    println!("{}", gpu.name());
    let attention = Attention::new().causal(true);
    let dims = Dims::new(1, 512, 4, 64);
    let mut ring = LocalRing::from_plans(&attention, dims, 2, |_, setup, endpoint| {
        let (backend, transport) = wgpu_rank(&gpu, endpoint);
        Plan::with_backend(setup, dims, backend, transport)
    })?;

    let x = Array4::<f32>::from_shape_fn((1, 512, 4, 64), |(_, i, h, c)| {
        (0.3 * (i * 31 + h * 7 + c) as f32).sin()
    });
    let tensors = Tensors::new(x.view(), x.view(), x.view());
    let forward = ring.forward(&tensors)?;
    let gradients = ring.backward(&tensors, &forward, x.view(), None)?;

    let mut cpu = LocalRing::new(&attention, dims, 1)?;
    let difference = (&cpu.forward(&tensors)?.out - &forward.out).mapv(f32::abs);
    let largest = difference.fold(0.0, |largest: f32, &x| largest.max(x));
    println!("dq {:?}; largest difference from the CPU: {largest:e}", gradients.dq.dim());
    assert!(largest < 1e-4);
    Ok(())
}
