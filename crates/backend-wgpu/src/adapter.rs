//! The adapters of this machine, and what each can do.

use crate::{
    Gpu, Level,
    choice::{Kind, PROOFS, choose},
    level::Matrices,
};

/// An adapter of this machine, as [`Gpu::list`] finds them.
#[derive(Debug, Clone)]
pub struct Adapter {
    /// What [`crate::Options::number`] chooses it by.
    pub number: usize,
    /// Its name, as the driver says.
    pub name: String,
    /// Driver and its version.
    pub driver: String,
    /// Vulkan, Metal or DX12.
    pub api: String,
    /// Whether it computes on the processor.
    pub software: bool,
    /// Smallest and largest subgroup.
    pub subgroups: (u32, u32),
    /// The levels that it can run, any of which can be forced.
    pub levels: Vec<Level>,
    /// The one of them at which it computes if none is forced.
    pub chosen: Level,
    /// The file that shows the chosen level to be faster than those below it; `None` for [`Level::Plain`], which needs no proof.
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

/// The matrices that kernels can multiply on an adapter.
pub(crate) fn matrices(adapter: &wgpu::Adapter) -> Option<Matrices> {
    let info = adapter.get_info();
    Matrices::of_device(&adapter.cooperative_matrix_properties(), info.subgroup_min_size, info.subgroup_max_size)
}

impl Gpu {
    /// The adapters of this machine; none without a driver.
    pub fn list() -> Vec<Adapter> {
        let describe = |(number, adapter): (usize, wgpu::Adapter)| {
            let info = adapter.get_info();
            let levels = Level::of_device(adapter.features(), info.subgroup_min_size, matrices(&adapter));
            let proof = choose(PROOFS, Kind::of(&info), &levels);
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
