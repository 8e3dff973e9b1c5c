//! Compilation of kernels to compute pipelines.

use annulus_core::{Error, Result};

use crate::{
    errors::device_error,
    kernels::{Access, Source, matrices},
    memory_model::{self, Translation},
};

/// A change of the text of the kernels with one name, by which tests plant a mistake
/// ([`crate::Gpu::edited`]).
#[doc(hidden)]
#[derive(Debug, Clone, Copy)]
pub struct KernelEdit {
    /// Name of the kernels.
    pub kernel: &'static str,
    /// Text to replace, wherever it occurs.
    pub from: &'static str,
    /// Text in its place.
    pub to: &'static str,
}

impl KernelEdit {
    /// Returns the changed text.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the text to replace does not occur.
    pub(crate) fn apply(&self, wgsl: &str) -> Result<String> {
        if !wgsl.contains(self.from) {
            let got = format!("{}: {}", self.kernel, self.from);
            return Err(Error::invalid("edit", got, "a text that the kernel contains"));
        }
        Ok(wgsl.replace(self.from, self.to))
    }
}

/// Translation of a kernel's WGSL to SPIR-V in place of wgpu's, by which tests compile kernels with
/// checks of indices that wgpu does not offer ([`crate::Options::translate`]).
#[doc(hidden)]
pub type Translate = fn(&str) -> std::result::Result<Translation, String>;

/// Checks and translation with which the text of a kernel is compiled.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Compilation {
    /// See [`runtime_checks`].
    pub(crate) checked: bool,
    /// See [`crate::Options::translate`].
    pub(crate) translate: Option<Translate>,
}

/// A compiled kernel.
pub(crate) struct Pipeline {
    pub(crate) pipeline: wgpu::ComputePipeline,
    pub(crate) layout: wgpu::BindGroupLayout,
    /// Size of the uniform parameters in bytes.
    pub(crate) params: usize,
}

/// Returns the checks of a kernel's indices and divisions, as the backend compiles it.
///
/// # Bounds
/// With `checked`, indices are clamped by the shader. Otherwise indices of buffers are bounded by
/// the device, as Vulkan's robust buffer access and DX12 do, and those of workgroup memory are not:
/// they are computed from the invocation's index, and from loop counters with constant bounds.
#[doc(hidden)]
pub fn runtime_checks(checked: bool) -> wgpu::ShaderRuntimeChecks {
    wgpu::ShaderRuntimeChecks {
        bounds_checks: checked,
        int_div_checks: checked,
        force_loop_bounding: false,
        ..wgpu::ShaderRuntimeChecks::checked()
    }
}

/// Compiles a kernel. Binding 0 is its parameters; the source's bindings follow.
///
/// # Errors
/// [`Error::Device`] if a translation fails.
pub(crate) fn compile(
    device: &wgpu::Device,
    name: &str,
    source: Source,
    compilation: Compilation,
) -> Result<Pipeline> {
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
    let module = compile_module(device, name, wgsl, compilation)?;
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
    Ok(Pipeline { pipeline, layout, params })
}

/// Compiles the text of a kernel.
fn compile_module(
    device: &wgpu::Device,
    name: &str,
    wgsl: String,
    compilation: Compilation,
) -> Result<wgpu::ShaderModule> {
    let is_vulkan = device.adapter_info().backend == wgpu::Backend::Vulkan;
    let translation = match compilation.translate {
        Some(translate) => Some(translate(&wgsl)),
        None if is_vulkan && wgsl.starts_with(matrices::ENABLED) => {
            Some(memory_model::translate(&wgsl, compilation.checked))
        }
        None => None,
    };
    if let Some(translation) = translation {
        let Translation { spirv, workgroup_size } = translation.map_err(device_error)?;
        let descriptor = wgpu::ShaderModuleDescriptorPassthrough {
            label: Some(name),
            entry_points: vec![wgpu::PassthroughShaderEntryPoint {
                name: "main".into(),
                workgroup_size: workgroup_size.into(),
            }]
            .into(),
            spirv: Some(spirv.into()),
            ..Default::default()
        };
        // SAFETY: a translation of a text for which the proof below holds.
        return Ok(unsafe { device.create_shader_module_passthrough(descriptor) });
    }
    let text = wgpu::ShaderModuleDescriptor {
        label: Some(name),
        source: wgpu::ShaderSource::Wgsl(wgsl.into()),
    };
    let checks = runtime_checks(compilation.checked);
    // SAFETY: the sources are ours. Every loop counts an unsigned variable up to a bound that is
    // fixed before the loop. Indices are within their arrays, and buffers are bounded by the device
    // if they are not checked. Divisors are numbers of tiles, heads, rows or elements, not 0 in any
    // launch.
    Ok(unsafe { device.create_shader_module_trusted(text, checks) })
}
