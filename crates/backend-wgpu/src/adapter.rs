//! Adapters of this machine and their capabilities.

use crate::{
    Gpu, Level,
    choice::{AdapterKind, PROOFS, choose},
    level::Matrices,
};

/// An adapter of this machine, as returned by [`Gpu::list`].
#[derive(Debug, Clone)]
pub struct Adapter {
    /// Index for [`crate::Options::number`].
    pub number: usize,
    /// Name reported by the driver.
    pub name: String,
    /// Driver and its version.
    pub driver: String,
    /// Vulkan, Metal or DX12.
    pub api: String,
    /// True for an adapter that computes on the CPU.
    pub software: bool,
    /// Smallest and largest subgroup size.
    pub subgroups: (u32, u32),
    /// Levels that the adapter can run; any of them can be requested.
    pub levels: Vec<Level>,
    /// Level that is used by default.
    pub chosen: Level,
    /// Record file of the measurement that justifies `chosen`; `None` for [`Level::Plain`].
    pub record: Option<&'static str>,
}

fn instance() -> wgpu::Instance {
    let mut descriptor = wgpu::InstanceDescriptor::new_without_display_handle();
    descriptor.backends = wgpu::Backends::VULKAN | wgpu::Backends::METAL | wgpu::Backends::DX12;
    wgpu::Instance::new(descriptor)
}

pub(crate) fn adapters() -> Vec<wgpu::Adapter> {
    pollster::block_on(instance().enumerate_adapters(wgpu::Backends::all()))
}

/// Returns the cooperative matrices that the kernels can use on an adapter.
pub(crate) fn matrices(adapter: &wgpu::Adapter) -> Option<Matrices> {
    let info = adapter.get_info();
    Matrices::of_device(
        &adapter.cooperative_matrix_properties(),
        info.subgroup_min_size,
        info.subgroup_max_size,
    )
}

impl Gpu {
    /// Lists the adapters of this machine; empty without a driver.
    pub fn list() -> Vec<Adapter> {
        let describe = |(number, adapter): (usize, wgpu::Adapter)| {
            let info = adapter.get_info();
            let levels =
                Level::of_device(adapter.features(), info.subgroup_min_size, matrices(&adapter));
            let proof = choose(PROOFS, AdapterKind::of(&info), &levels);
            Adapter {
                number,
                name: info.name,
                driver: format!("{} {}", info.driver, info.driver_info),
                api: info.backend.to_string(),
                software: info.device_type == wgpu::DeviceType::Cpu,
                subgroups: (info.subgroup_min_size, info.subgroup_max_size),
                levels,
                chosen: proof.map_or(Level::Plain, |proof| proof.level),
                record: proof.map(|proof| proof.record),
            }
        };
        adapters().into_iter().enumerate().map(describe).collect()
    }
}
