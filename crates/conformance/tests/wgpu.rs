//! The wgpu backend over staged threads, at sizes for a device that is none: samples of the matrix, of random cases and of the sizes, and every rule.
//! Without a Vulkan, Metal or DX12 driver nothing can be examined; then these tests say so, and with `ANNULUS_REQUIRE=wgpu` they fail.
#![cfg(feature = "wgpu")]

use std::sync::OnceLock;

use annulus_conformance::{
    suite::{self, Scale},
    wgpu::WgpuRing,
};
use annulus_wgpu::{Gpu, Options};

/// The device that all tests share, or nothing where there is none.
fn gpu() -> Option<Gpu> {
    static OPENED: OnceLock<Option<Gpu>> = OnceLock::new();
    OPENED
        .get_or_init(|| match Gpu::open(&Options::default()) {
            Ok(gpu) => Some(gpu),
            Err(error) => {
                let required = std::env::var("ANNULUS_REQUIRE").unwrap_or_default();
                assert!(!required.split(',').any(|name| name == "wgpu"), "ANNULUS_REQUIRE has wgpu: {error}");
                eprintln!("NOT RUN: {error}");
                None
            }
        })
        .clone()
}

#[test]
fn a_thin_slice() {
    let Some(gpu) = gpu() else { return };
    println!("{} {:?}", gpu.name(), gpu.level());
    let start = std::time::Instant::now();
    let ring = WgpuRing::new(gpu);
    for seed in 0..40 {
        let verdict = suite::random_cases(&ring, std::iter::once(seed));
        println!("{seed} {:?} {:?}", start.elapsed(), verdict);
    }
    suite::matrix(&ring, Scale::OneIn(29)).unwrap();
}
