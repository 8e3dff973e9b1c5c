//! Time of passes, by the device's timestamps or the host's clock; and a plain matrix product,
//! whose rate is the roof of the kernels.

use std::time::{Duration, Instant};

use annulus_bench::cpu_seconds;
use annulus_core::{Error, Result};
use annulus_wgpu::{
    Gpu, Stopwatch,
    wgpu::{
        BindGroup, BindGroupDescriptor, BindGroupEntry, Buffer, BufferDescriptor, BufferUsages,
        CommandEncoderDescriptor, ComputePassDescriptor, ComputePipeline,
        ComputePipelineDescriptor, ErrorFilter, PipelineCompilationOptions, ShaderModuleDescriptor,
        ShaderSource,
    },
};

/// 64 × 64 elements a workgroup, 4 × 4 an invocation, 16 terms of the sums at a time.
const WGSL: &str = "
@group(0) @binding(0) var<storage, read> a: array<vec4<f32>>;
@group(0) @binding(1) var<storage, read> b: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read_write> c: array<vec4<f32>>;
override size: u32;
var<workgroup> rows: array<vec4<f32>, 256>;
var<workgroup> columns: array<vec4<f32>, 256>;

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let line = size / 4u;
    let ty = lane / 16u;
    let tx = lane % 16u;
    var sums = array<vec4<f32>, 4>();
    for (var k = 0u; k < size; k = k + 16u) {
        workgroupBarrier();
        rows[lane] = a[(64u * group.y + lane / 4u) * line + k / 4u + lane % 4u];
        columns[lane] = b[(k + lane / 16u) * line + 16u * group.x + lane % 16u];
        workgroupBarrier();
        for (var n = 0u; n < 4u; n++) {
            let b0 = columns[16u * (4u * n) + tx];
            let b1 = columns[16u * (4u * n + 1u) + tx];
            let b2 = columns[16u * (4u * n + 2u) + tx];
            let b3 = columns[16u * (4u * n + 3u) + tx];
            for (var r = 0u; r < 4u; r++) {
                let four = rows[4u * (4u * ty + r) + n];
                sums[r] = fma(vec4<f32>(four.x), b0, sums[r]);
                sums[r] = fma(vec4<f32>(four.y), b1, sums[r]);
                sums[r] = fma(vec4<f32>(four.z), b2, sums[r]);
                sums[r] = fma(vec4<f32>(four.w), b3, sums[r]);
            }
        }
    }
    for (var r = 0u; r < 4u; r++) {
        c[(64u * group.y + 4u * ty + r) * line + 16u * group.x + tx] = sums[r];
    }
}
";

/// c ← a·b.
pub(crate) struct Product {
    pipeline: ComputePipeline,
    bindings: BindGroup,
    groups: u32,
    /// Last, so that it is dropped after the objects on it.
    gpu: Gpu,
}

impl Product {
    /// Creates a product of matrices of `size` × `size`; `size` is a multiple of 64.
    pub(crate) fn new(gpu: &Gpu, size: usize) -> Result<Self> {
        let device = gpu.device();
        let scope = device.push_error_scope(ErrorFilter::Validation);
        let matrix = |number: f32| -> Buffer {
            let usage = BufferUsages::STORAGE;
            let buffer = device.create_buffer(&BufferDescriptor {
                label: None,
                size: (size * size * 4) as u64,
                usage,
                mapped_at_creation: true,
            });
            if let Ok(mut view) = buffer.slice(..).get_mapped_range_mut() {
                view.slice(..).copy_from_slice(&number.to_le_bytes().repeat(size * size));
            }
            buffer.unmap();
            buffer
        };
        let module = device.create_shader_module(ShaderModuleDescriptor {
            label: Some("matmul"),
            source: ShaderSource::Wgsl(WGSL.into()),
        });
        let constants = [("size", size as f64)];
        let pipeline = device.create_compute_pipeline(&ComputePipelineDescriptor {
            label: Some("matmul"),
            layout: None,
            module: &module,
            entry_point: Some("main"),
            compilation_options: PipelineCompilationOptions {
                constants: &constants,
                ..Default::default()
            },
            cache: None,
        });
        let matrices = [matrix(0.5), matrix(2.0), matrix(0.0)];
        let entries: Vec<_> = (0..)
            .zip(&matrices)
            .map(|(binding, matrix)| BindGroupEntry {
                binding,
                resource: matrix.as_entire_binding(),
            })
            .collect();
        let layout = pipeline.get_bind_group_layout(0);
        let bindings = device.create_bind_group(&BindGroupDescriptor {
            label: None,
            layout: &layout,
            entries: &entries,
        });
        match pollster::block_on(scope.pop()) {
            Some(error) => Err(Error::Device { what: error.to_string() }),
            None => Ok(Self { gpu: gpu.clone(), pipeline, bindings, groups: (size / 64) as u32 }),
        }
    }

    /// Queues one product.
    pub(crate) fn run(&self) -> Result<()> {
        let mut encoder =
            self.gpu.device().create_command_encoder(&CommandEncoderDescriptor::default());
        {
            let mut pass = encoder.begin_compute_pass(&ComputePassDescriptor::default());
            pass.set_pipeline(&self.pipeline);
            pass.set_bind_group(0, &self.bindings, &[]);
            pass.dispatch_workgroups(self.groups, self.groups, 1);
        }
        self.gpu.queue().submit([encoder.finish()]);
        Ok(())
    }
}

/// Mean times of one repetition.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Took {
    /// Device time by its timestamps, or time by the host's clock if it writes none.
    pub(crate) seconds: f64,
    /// CPU time of all threads of this process, in seconds; on a software adapter also of the
    /// threads that compute.
    pub(crate) cpu: f64,
    /// Clock of `seconds`: "device" or "host".
    pub(crate) clock: &'static str,
}

/// Returns the number of repetitions that take about `seconds`. The first run compiles the kernels
/// and is not timed.
pub(crate) fn repetitions(
    gpu: &Gpu,
    seconds: f64,
    mut work: impl FnMut() -> Result<()>,
) -> Result<u32> {
    work()?;
    gpu.synchronize()?;
    let start = Instant::now();
    work()?;
    gpu.synchronize()?;
    let once = start.elapsed().max(Duration::from_micros(1)).as_secs_f64();
    Ok((seconds / once).ceil().clamp(1.0, 1000.0) as u32)
}

/// Measures the mean over `times` repetitions.
pub(crate) fn time(gpu: &Gpu, times: u32, mut work: impl FnMut() -> Result<()>) -> Result<Took> {
    gpu.synchronize()?;
    let watch = Stopwatch::start(gpu)?;
    let start = Instant::now();
    let before = cpu_seconds();
    (0..times).try_for_each(|_| work())?;
    gpu.synchronize()?;
    let host = start.elapsed();
    let cpu = cpu_seconds() - before;
    let device = watch.map_or(Ok(None), Stopwatch::stop)?;
    let (all, clock) = device.map_or((host, "host"), |device| (device, "device"));
    let each = |all: f64| all / f64::from(times);
    Ok(Took { seconds: each(all.as_secs_f64()), cpu: each(cpu), clock })
}

#[cfg(test)]
mod tests {
    use annulus_wgpu::Options;

    use super::*;

    #[test]
    fn a_device_whose_timestamps_are_0_is_timed_by_the_host() {
        if Gpu::list().is_empty() {
            let required = std::env::var("ANNULUS_REQUIRE")
                .is_ok_and(|words| words.split(',').any(|word| word == "wgpu"));
            assert!(!required, "ANNULUS_REQUIRE has wgpu, and there is no adapter");
            eprintln!("NOT RUN: no Vulkan, Metal or DX12 adapter");
            return;
        }
        let gpu = Gpu::open(&Options::default()).unwrap();
        let pause = Duration::from_millis(2);
        let work = || {
            std::thread::sleep(pause);
            Ok(())
        };
        if Stopwatch::runs(&gpu).unwrap() {
            assert_eq!(time(&gpu, 2, work).unwrap().clock, "device");
        }
        let took = time(&gpu.without_clock().unwrap(), 2, work).unwrap();
        assert_eq!(took.clock, "host");
        assert!(took.seconds >= pause.as_secs_f64(), "{took:?}");
    }
}
