//! Compiles the tile kernels of the wgpu backend with the first Vulkan driver, without a device
//! that runs: it makes pipelines and submits nothing. `scripts/wgpu-compile` runs it on Mesa's RADV
//! and ANV for GPUs that are not there, and tabulates the statistics that they print.
//!
//! ```text
//! wgpu-compile [--spirv FOLDER | --full-tiles | --usual] [--register-tile 4x4|2x4]
//!              [--only WORDS] [f32|f16|bf16]...
//! ```
//! Default: all types; the register tile that the backend chooses for the adapter, or 4 × 4 with
//! `--spirv`. With `--full-tiles` it compiles what the kernels execute on full tiles, with
//! `--usual` the simplest and the most general kernels, for compilers that take seconds, with
//! `--only` those whose name contains the words. With `--spirv` it writes each kernel as a SPIR-V
//! module, and needs no driver. wgpu itself submits work when it opens a device, so this uses
//! wgpu-hal.

use std::{borrow::Cow, mem::ManuallyDrop, path::Path, process::ExitCode};

use annulus::DType;
use annulus_core::{Error, Result};
use annulus_wgpu::{
    KernelText, Level, RegisterTile,
    wgpu::{
        self, Features,
        hal::{
            self, Adapter as _, Device as _, Instance as _,
            vulkan::{Api, Device},
        },
        naga::{
            Module,
            back::spv,
            front::wgsl,
            valid::{Capabilities, ModuleInfo, ValidationFlags, Validator},
        },
    },
};

/// Dims of heads and values.
const DIMS: [usize; 3] = [64, 128, 256];

/// Device features that kernels above [`Level::Plain`] use.
const OPTIONAL: Features = Features::SUBGROUP
    .union(Features::SHADER_F16)
    .union(Features::EXPERIMENTAL_COOPERATIVE_MATRIX)
    .union(Features::SHADER_INT64);

fn failed(what: impl std::fmt::Display) -> Error {
    Error::Device { what: what.to_string() }
}

/// The device of the first adapter.
struct Opened {
    /// Name of the adapter.
    name: String,
    /// Version of its driver.
    driver: String,
    /// Highest level of the kernels that the adapter can run.
    level: Level,
    /// Register tile that the backend chooses for the adapter.
    register_tile: RegisterTile,
    device: hal::OpenDevice<Api>,
}

fn open() -> Result<Opened> {
    let descriptor = hal::InstanceDescriptor {
        name: "annulus",
        flags: wgpu::InstanceFlags::empty(),
        memory_budget_thresholds: wgpu::MemoryBudgetThresholds::default(),
        backend_options: wgpu::BackendOptions::default(),
        telemetry: None,
        display: None,
    };
    // SAFETY: the Vulkan loader and its drivers are trusted.
    let instance = unsafe { hal::vulkan::Instance::init(&descriptor) }.map_err(failed)?;
    // SAFETY: the instance was made by this API.
    let adapters = unsafe { instance.enumerate_adapters(None) };
    let adapter = adapters.first().ok_or_else(|| failed("no Vulkan driver"))?;
    let features = adapter.features & OPTIONAL;
    let hints = wgpu::MemoryHints::default();
    // SAFETY: features and limits are those of the adapter.
    let opened = unsafe { adapter.adapter.open(features, &adapter.capabilities.limits, &hints) };
    let mut offered = adapter.capabilities.cooperative_matrix_properties.iter();
    let level = if features == OPTIONAL && offered.any(is_of_kernels) {
        Level::Matrix
    } else {
        Level::Plain
    };
    Ok(Opened {
        level,
        register_tile: RegisterTile::of_adapter(&adapter.info),
        device: opened.map_err(failed)?,
        name: adapter.info.name.clone(),
        driver: adapter.info.driver_info.clone(),
    })
}

/// True for the matrices of [`KernelText::of_passes`].
fn is_of_kernels(offer: &wgpu::CooperativeMatrixProperties) -> bool {
    let types = (offer.ab_type, offer.cr_type);
    [offer.m_size, offer.n_size, offer.k_size] == [16; 3]
        && types == (wgpu::CooperativeScalarType::F16, wgpu::CooperativeScalarType::F32)
}

fn parse(kernel: &KernelText) -> Result<(Module, ModuleInfo)> {
    let module = wgsl::parse_str(&kernel.wgsl).map_err(failed)?;
    let info = Validator::new(ValidationFlags::all(), Capabilities::all())
        .validate(&module)
        .map_err(|error| failed(error.emit_to_string(&kernel.wgsl)))?;
    Ok((module, info))
}

/// Writes a kernel as the SPIR-V module that a driver of Vulkan 1.3 gets.
fn write_module(folder: &Path, kernel: &KernelText) -> Result<()> {
    let by_wgpu = || {
        let (module, info) = parse(kernel)?;
        let options = spv::Options {
            lang_version: (1, 6),
            emit_int_div_checks: false,
            force_loop_bounding: false,
            ..spv::Options::default()
        };
        spv::write_vec(&module, &info, &options, None).map_err(failed)
    };
    let words = kernel.module().unwrap_or_else(by_wgpu)?;
    let bytes: Vec<u8> = words.into_iter().flat_map(u32::to_le_bytes).collect();
    let path = folder.join(kernel.name.replace(' ', "-") + ".spv");
    std::fs::write(&path, bytes).map_err(|error| failed(format!("{}: {error}", path.display())))
}

/// Makes the pipeline of a kernel.
fn compile(device: &Device, kernel: &KernelText) -> Result<()> {
    let words = kernel.module().transpose()?;
    let shader = match &words {
        Some(words) => hal::ShaderInput::SpirV(words),
        None => {
            let (module, info) = parse(kernel)?;
            let module = Cow::Owned(module);
            hal::ShaderInput::Naga(hal::NagaShader { module, info, debug_source: None })
        }
    };
    let uniform = std::iter::once(wgpu::BufferBindingType::Uniform);
    let storage =
        kernel.read_only.iter().map(|&read_only| wgpu::BufferBindingType::Storage { read_only });
    let entries: Vec<_> = (0..)
        .zip(uniform.chain(storage))
        .map(|(binding, ty)| wgpu::BindGroupLayoutEntry {
            binding,
            visibility: wgpu::ShaderStages::COMPUTE,
            ty: wgpu::BindingType::Buffer { ty, has_dynamic_offset: false, min_binding_size: None },
            count: None,
        })
        .collect();
    let layout = hal::BindGroupLayoutDescriptor {
        label: None,
        flags: hal::BindGroupLayoutFlags::empty(),
        entries: &entries,
    };
    // as the backend compiles them by default, but on Metal
    let runtime_checks = annulus_wgpu::runtime_checks(false);
    // SAFETY: the module is valid, the layout is that of its bindings, and nothing is executed.
    unsafe {
        let layout = device.create_bind_group_layout(&layout).map_err(failed)?;
        let whole = hal::PipelineLayoutDescriptor {
            label: None,
            flags: hal::PipelineLayoutFlags::empty(),
            bind_group_layouts: &[Some(&layout)],
            immediate_size: 0,
        };
        let whole = device.create_pipeline_layout(&whole).map_err(failed)?;
        let descriptor = hal::ShaderModuleDescriptor { label: None, runtime_checks };
        let module = device.create_shader_module(&descriptor, shader).map_err(failed)?;
        let stage = hal::ProgrammableStage {
            module: &module,
            entry_point: "main",
            constants: &Default::default(),
            zero_initialize_workgroup_memory: false,
        };
        let pipeline =
            hal::ComputePipelineDescriptor { label: None, layout: &whole, stage, cache: None };
        device.create_compute_pipeline(&pipeline).map_err(failed)?;
    }
    Ok(())
}

/// Arguments of the program.
#[derive(Default)]
struct Arguments {
    /// Folder for SPIR-V modules.
    spirv: Option<String>,
    full_tiles: bool,
    usual: bool,
    register_tile: Option<RegisterTile>,
    only: String,
    types: Vec<String>,
}

impl Arguments {
    fn parse() -> Result<Self> {
        let mut arguments = Self::default();
        let mut words = std::env::args().skip(1);
        while let Some(word) = words.next() {
            let mut value =
                || words.next().ok_or_else(|| failed(format!("{word} requires a value")));
            match word.as_str() {
                "--spirv" => arguments.spirv = Some(value()?),
                "--full-tiles" => arguments.full_tiles = true,
                "--usual" => arguments.usual = true,
                "--register-tile" => {
                    let name = value()?;
                    let named = RegisterTile::ALL.into_iter().find(|tile| tile.name() == name);
                    let unknown = || failed(format!("no register tile {name}"));
                    arguments.register_tile = Some(named.ok_or_else(unknown)?);
                }
                "--only" => arguments.only = value()?,
                "f32" | "f16" | "bf16" => arguments.types.push(word),
                _ => return Err(failed(format!("unknown argument {word}"))),
            }
        }
        Ok(arguments)
    }

    /// Generates the kernels; with this register tile unless the arguments name one.
    fn kernels(&self, default_tile: RegisterTile) -> impl Iterator<Item = KernelText> {
        let wanted =
            |dtype: &DType| self.types.is_empty() || self.types.contains(&dtype.to_string());
        let dtypes = [DType::F32, DType::F16, DType::Bf16].into_iter().filter(wanted);
        let kernels = dtypes.flat_map(|dtype| DIMS.map(|dim| (dtype, dim)));
        let register_tile = self.register_tile.unwrap_or(default_tile);
        let kernels = kernels.flat_map(move |(dtype, dim)| {
            let all = KernelText::of_passes(dtype, dim, register_tile).into_iter();
            all.map(move |kernel| if self.full_tiles { kernel.of_full_tiles(dim) } else { kernel })
        });
        let is_usual = |name: &str| ["simple", "general"].iter().any(|of| name.ends_with(of));
        kernels
            .filter(move |kernel| !self.usual || is_usual(&kernel.name))
            .filter(|kernel| kernel.name.contains(&self.only))
    }
}

fn run() -> Result<()> {
    let arguments = Arguments::parse()?;
    if let Some(folder) = &arguments.spirv {
        let mut kernels = arguments.kernels(RegisterTile::FourRows);
        return kernels.try_for_each(|of| write_module(Path::new(folder), &of));
    }
    // never dropped: wgpu-hal panics if a layout is left, and the process ends
    let opened = ManuallyDrop::new(open()?);
    // to the same stream as the driver's statistics, so that they are in order
    let default_tile = opened.register_tile;
    let tile = arguments.register_tile.unwrap_or(default_tile).name();
    eprintln!("ADAPTER {}, register tile {tile}: {}", opened.name, opened.driver);
    for kernel in arguments.kernels(default_tile).filter(|kernel| kernel.level <= opened.level) {
        eprintln!("KERNEL {}", kernel.name);
        compile(&opened.device.device, &kernel)?;
    }
    Ok(())
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("wgpu-compile: {error}");
            ExitCode::FAILURE
        }
    }
}
