//! Strategies other than the ring, for tensors in host memory: their exchanges are messages in host
//! memory, the blocks of their rings are on the device.

use annulus::{
    LocalRing, Plan,
    comm::{Checksum, Staged},
};
use annulus_conformance::{FacadeOn, suite};
use annulus_core::{DType, HostViews};
use annulus_wgpu::{Copier, Options, Wgpu, WgpuSpace};

use super::open;

#[test]
fn strategies_are_the_oracle() {
    let Some(gpu) = open(&Options::default()) else { return };
    // two element types: each has its own kernels, which a driver compiles for seconds
    let facade =
        FacadeOn::new("facade on wgpu", &[DType::F32, DType::Bf16], |attention, dims, ranks| {
            LocalRing::from_plans(attention, dims, ranks, |_, setup, endpoint| {
                let copier = Copier::new(gpu.clone());
                let staged =
                    Staged::<_, HostViews<WgpuSpace>>::new(Checksum::new(endpoint), copier);
                Plan::with_backend(setup, dims, Wgpu::on_host(gpu.clone()), staged)
            })
        });
    suite::strategies(&facade, 0..6).unwrap();
}
