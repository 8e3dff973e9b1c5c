//! Compilation of kernels to compute pipelines.

use crate::kernels::{Access, Source};

/// A compiled kernel.
pub(crate) struct Pipeline {
    pub(crate) pipeline: wgpu::ComputePipeline,
    pub(crate) layout: wgpu::BindGroupLayout,
    /// Size of the uniform parameters in bytes.
    pub(crate) params: usize,
}

/// Compiles a kernel. Binding 0 is its parameters; the source's bindings follow.
pub(crate) fn compile(device: &wgpu::Device, name: &str, source: Source) -> Pipeline {
    let Source { wgsl, bindings, params } = source;
    let uniform = wgpu::BindGroupLayoutEntry {
        binding: 0,
        visibility: wgpu::ShaderStages::COMPUTE,
        ty: wgpu::BindingType::Buffer {
            ty: wgpu::BufferBindingType::Uniform,
            has_dynamic_offset: false,
            min_binding_size: None,
        },
        count: None,
    };
    let storage = |(number, access): (u32, &Access)| wgpu::BindGroupLayoutEntry {
        binding: number,
        ty: wgpu::BindingType::Buffer {
            ty: wgpu::BufferBindingType::Storage { read_only: *access == Access::Read },
            has_dynamic_offset: false,
            min_binding_size: None,
        },
        ..uniform
    };
    let entries: Vec<_> =
        std::iter::once(uniform).chain((1..).zip(&bindings).map(storage)).collect();
    let layout = device.create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor {
        label: Some(name),
        entries: &entries,
    });
    let whole = device.create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
        label: Some(name),
        bind_group_layouts: &[Some(&layout)],
        immediate_size: 0,
    });
    let text = wgpu::ShaderModuleDescriptor {
        label: Some(name),
        source: wgpu::ShaderSource::Wgsl(wgsl.into()),
    };
    let checks = wgpu::ShaderRuntimeChecks {
        force_loop_bounding: false,
        ..wgpu::ShaderRuntimeChecks::checked()
    };
    // SAFETY: only the check for endless loops is disabled. The sources are ours, and every
    // loop counts an unsigned variable up to a bound that is fixed before the loop.
    let module = unsafe { device.create_shader_module_trusted(text, checks) };
    let pipeline = device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
        label: Some(name),
        layout: Some(&whole),
        module: &module,
        entry_point: Some("main"),
        // kernels write workgroup memory before they read it
        compilation_options: wgpu::PipelineCompilationOptions {
            zero_initialize_workgroup_memory: false,
            ..Default::default()
        },
        cache: None,
    });
    Pipeline { pipeline, layout, params }
}
