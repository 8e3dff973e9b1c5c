//! The wgpu backend over staged threads, at sizes for an adapter that computes on the CPU: samples
//! of random cases, of the matrix and of the sizes; every rule and level; small and lost devices;
//! bytes copied between host and device.
//!
//! Without a Vulkan, Metal or DX12 driver these tests print NOT RUN; with `ANNULUS_REQUIRE=wgpu`
//! they fail instead. `ANNULUS_REQUIRE=matrix` does the same for an adapter without cooperative
//! matrices. `ANNULUS_DEVICE` is the number of the adapter (default: 0).

mod absence;
mod decode;
mod devices;
mod features;
mod index_checks;
mod limits;
mod planted;
mod several;
mod tiles;
mod transfers;

use std::{
    sync::{Mutex, PoisonError},
    time::Duration,
};

use annulus::{
    Attention, Dims, Error,
    comm::{
        Deadline, Staged,
        ring::{Ring, RingOptions},
        threads::{self, Threads},
    },
};
use annulus_conformance::{
    Answer, Case, Setting,
    suite::{self, Poison, Scale},
    wgpu::WgpuRing,
};
use annulus_core::{DType, Inputs, Outputs, Result};
use annulus_plan::Layout;
use annulus_wgpu::{
    Adapter, Copier, Gpu, Level, Options, QueryTileSize, RegisterTile, Stopwatch, Tensor, Wgpu,
    WgpuSpace, wgpu::Features,
};

/// True if the absence of `what` is a failure.
fn is_required(what: &str) -> bool {
    std::env::var("ANNULUS_REQUIRE").unwrap_or_default().split(',').any(|name| name == what)
}

/// Number of the adapter.
fn number() -> usize {
    std::env::var("ANNULUS_DEVICE").map_or(0, |number| number.parse().expect("a number"))
}

/// Returns the adapter; `None` if there is none at all.
fn adapter() -> Option<Adapter> {
    let all = Gpu::list();
    if all.is_empty() {
        assert!(!is_required("wgpu"), "ANNULUS_REQUIRE has wgpu, and there is no adapter");
        eprintln!("NOT RUN: no Vulkan, Metal or DX12 adapter");
        return None;
    }
    Some(all.into_iter().nth(number()).expect("an adapter with this number"))
}

/// Returns a command that starts this program again, with the dynamic linker that started it if it
/// is not the system's (`scripts/with-lavapipe`): that linker is the executable of the process, and
/// its own arguments precede the name of this program in the command line.
#[cfg(target_os = "linux")]
fn this_program() -> std::process::Command {
    use std::{ffi::OsStr, os::unix::ffi::OsStrExt};
    let line = std::fs::read("/proc/self/cmdline").expect("the command line");
    let words: Vec<&OsStr> = line.split(|&byte| byte == 0).map(OsStr::from_bytes).collect();
    let name = std::env::args_os().next().expect("the name of this program");
    let number = words.iter().position(|&word| word == name).expect("its name in the command line");
    let mut command = std::process::Command::new(std::env::current_exe().expect("its executable"));
    if number > 0 {
        command.args(&words[1..=number]);
    }
    command
}

/// Opens the adapter; `None` if there is none.
fn open(options: &Options) -> Option<Gpu> {
    let options = Options { number: adapter()?.number, ..options.clone() };
    let gpu = Gpu::open(&options).expect("the adapter opens");
    // or tests of small devices would pass on a large one
    let limits = gpu.device().limits();
    let is_within = |limit: u64, most: Option<u64>| most.is_none_or(|most| limit <= most);
    assert!(is_within(limits.max_storage_buffer_binding_size, options.most_binding_bytes));
    assert!(is_within(limits.max_buffer_size, options.most_buffer_bytes));
    assert!(is_within(
        limits.max_compute_workgroups_per_dimension.into(),
        options.most_groups_a_line.map(u64::from)
    ));
    Some(gpu)
}

/// Returns the device that most tests share.
fn gpu() -> Option<Gpu> {
    gpu_at(Level::forced().expect("a level").unwrap_or(adapter()?.chosen))
}

/// Returns the device that tests share at a level.
fn gpu_at(level: Level) -> Option<Gpu> {
    gpu_with(level, None)
}

/// Returns the device that tests share at a level, which the adapter must have, and with a register
/// tile or that of the adapter. Tests share the kernels that it has compiled, too: drivers take
/// seconds for each.
fn gpu_with(level: Level, register_tile: Option<RegisterTile>) -> Option<Gpu> {
    gpu_of(level, register_tile, None)
}

/// As [`gpu_with`], also with these queries of a tile or those of the adapter.
fn gpu_of(
    level: Level,
    register_tile: Option<RegisterTile>,
    query_tile: Option<QueryTileSize>,
) -> Option<Gpu> {
    type Key = (Level, Option<RegisterTile>, Option<QueryTileSize>);
    static OPENED: Mutex<Vec<(Key, Gpu)>> = Mutex::new(Vec::new());
    let wanted = (level, register_tile, query_tile);
    // a test that failed while it opened a device has left the others
    let mut opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, gpu)) = opened.iter().find(|(key, _)| *key == wanted) {
        return Some(gpu.clone());
    }
    let gpu =
        open(&Options { level: Some(level), register_tile, query_tile, ..Options::default() })?;
    assert_eq!(gpu.level(), level);
    assert!(register_tile.is_none_or(|tile| gpu.register_tile() == tile));
    opened.push((wanted, gpu.clone()));
    Some(gpu)
}

/// Returns the device's answer.
fn run(gpu: &Gpu, case: &Case, setting: &Setting) -> Answer {
    suite::run(&WgpuRing::new(gpu.clone()), case, setting).expect("an answer")
}

/// Returns the device's answer, which must agree with the oracle's.
fn answer(gpu: &Gpu, case: &Case, setting: &Setting) -> Answer {
    suite::answer(&WgpuRing::new(gpu.clone()), case, setting).expect("a right answer")
}

const F32: &[DType] = &[DType::F32];
const F16: &[DType] = &[DType::F16];

#[test]
fn random_cases_hold_on_wgpu() {
    let Some(gpu) = gpu() else { return };
    suite::random_cases(&WgpuRing::new(gpu).only(F32), 0..40).unwrap();
}

#[test]
fn key_lists_hold_on_wgpu() {
    let Some(gpu) = gpu() else { return };
    suite::key_lists(&WgpuRing::on_host(gpu).only(F32), true, 400..420).unwrap();
}

#[test]
fn elements_of_two_bytes_hold_on_wgpu() {
    let Some(gpu) = gpu() else { return };
    for dtype in [DType::Bf16, DType::F16] {
        suite::random_cases(&WgpuRing::new(gpu.clone()).only(&[dtype]), 100..108).unwrap();
    }
}

#[test]
fn random_cases_hold_for_tensors_in_host_memory() {
    let Some(gpu) = gpu() else { return };
    suite::random_cases(&WgpuRing::on_host(gpu.clone()).only(F32), 0..16).unwrap();
    suite::random_cases(&WgpuRing::on_host(gpu).only(&[DType::Bf16]), 100..104).unwrap();
}

#[test]
fn a_sample_of_the_matrix_holds_on_wgpu() {
    let Some(gpu) = gpu() else { return };
    // each mask at least once: ranks and layouts change no kernel
    suite::matrix(&WgpuRing::new(gpu).only(F32), Scale::OneIn(23)).unwrap();
}

#[test]
fn a_sample_of_the_sizes_holds_on_wgpu() {
    let Some(gpu) = gpu() else { return };
    suite::sizes(&WgpuRing::new(gpu).only(F32), Scale::OneIn(3)).unwrap();
}

#[test]
fn the_numeric_rules_hold_on_wgpu() {
    let Some(gpu) = gpu() else { return };
    // one ring: what depends on the number of ranks is outside the kernels and tested on the CPU
    for setting in [Setting::ALONE, Setting::new(3, Layout::Zigzag)] {
        suite::numeric_rules_on(&WgpuRing::new(gpu.clone()).only(F32), DType::F32, &setting)
            .unwrap();
    }
}

#[test]
fn a_visible_nan_does_not_depend_on_the_ranks_on_wgpu() {
    let Some(gpu) = gpu() else { return };
    // all 13 settings would take a software driver minutes
    let settings = [
        Setting::ALONE,
        Setting::new(2, Layout::Contiguous),
        Setting::new(3, Layout::Striped),
        Setting::new(4, Layout::Zigzag),
    ];
    let subject = WgpuRing::new(gpu).only(F32);
    suite::nonfinite_on(&subject, Poison::Nan, DType::F32, &settings).unwrap();
}

#[test]
fn rows_that_are_independent_have_the_same_bits_on_wgpu() {
    let Some(gpu) = gpu() else { return };
    suite::independent_rows(&WgpuRing::new(gpu).only(F32)).unwrap();
}

#[test]
fn bits_repeat_on_wgpu() {
    let Some(gpu) = gpu() else { return };
    suite::same_bits_over_repeats(&WgpuRing::new(gpu), 3).unwrap();
}

#[test]
fn the_cpu_and_wgpu_share_a_ring() {
    let Some(gpu) = gpu() else { return };
    // the wire format belongs to the schedule: the mock device shares rings with the CPU, too
    suite::random_cases(&WgpuRing::mixed(gpu).only(F32), 200..212).unwrap();
}

#[test]
fn the_level_is_the_chosen_one_unless_another_is_forced() {
    let Some(adapter) = adapter() else { return };
    assert!(adapter.levels.contains(&adapter.chosen) && adapter.levels[0] == Level::Plain);
    let default_level = Level::forced().unwrap().unwrap_or(adapter.chosen);
    assert_eq!(open(&Options::default()).map(|gpu| gpu.level()), Some(default_level));
    let Some(plain) = open(&Options { level: Some(Level::Plain), ..Options::default() }) else {
        return;
    };
    assert_eq!(plain.level(), Level::Plain);
    // a level above the lowest is chosen only with a record
    assert_eq!(adapter.record.is_some(), adapter.chosen != Level::Plain);
}

#[test]
fn the_matrix_level_holds_if_the_adapter_has_it() {
    let Some(adapter) = adapter() else { return };
    let number = adapter.number;
    let options = Options { number, level: Some(Level::Matrix), ..Options::default() };
    if !adapter.levels.contains(&Level::Matrix) {
        assert!(
            !is_required("matrix"),
            "ANNULUS_REQUIRE has matrix, and {} has none",
            adapter.name
        );
        assert!(matches!(
            Gpu::open(&options),
            Err(Error::Unsupported { what, by }) if what.contains("matrix") && by == adapter.name
        ));
        return;
    }
    let Some(gpu) = gpu_at(Level::Matrix) else { return };
    let ring = WgpuRing::new(gpu.clone()).only(F16);
    suite::random_cases(&ring, 300..312).unwrap();
    suite::matrix(&ring, Scale::OneIn(61)).unwrap();
    suite::sizes(&ring, Scale::OneIn(7)).unwrap();
    suite::numeric_rules_on(&ring, DType::F16, &Setting::new(3, annulus::Layout::Contiguous))
        .unwrap();
    suite::same_bits_over_repeats(&ring, 3).unwrap();
    // ranks that would round probabilities differently are refused
    let Some(plain) = gpu_at(Level::Plain) else { return };
    let errors = threads::each_rank(threads::ring(2), |rank, transport| {
        let gpu = if rank == 0 { &plain } else { &gpu };
        Ok(self::ring(gpu, transport, &Attention::new().dtype(DType::F16), Dims::new(1, 8, 1, 8))
            .err())
    });
    let errors = errors.expect("every rank answers");
    let fields: Vec<_> = errors
        .into_iter()
        .map(|error| match error {
            Some(Error::RankMismatch { field, .. }) => field,
            other => panic!("{other:?}"),
        })
        .collect();
    assert!(fields.iter().all(|field| field.contains("rounded")), "{fields:?}");
    // element types without matrices
    suite::random_cases(&WgpuRing::new(gpu).only(&[DType::F32, DType::Bf16]), 0..4).unwrap();
}

/// Longest silence of a rank: a driver may take seconds to compile a kernel.
const DEADLINE: Duration = Duration::from_secs(30);

/// Creates one rank's ring over a device of its own or a shared one.
fn ring(gpu: &Gpu, transport: Threads, attention: &Attention, dims: Dims) -> Result<Ring<Wgpu>> {
    let staged = Staged::<_, WgpuSpace>::new(transport, Copier::new(gpu.clone()));
    let transport = Box::new(Deadline::new(staged, DEADLINE)?);
    Ring::new(
        Wgpu::new(gpu.clone()),
        transport,
        attention.spec(dims),
        RingOptions { backward: true, ..RingOptions::default() },
    )
}

fn forward(gpu: &Gpu, ring: &mut Ring<Wgpu>, dims: Dims) -> Result<()> {
    let rows = annulus_core::index(ring.q_rows().len());
    let tensor = |heads, dim| Tensor::zeros(gpu, [dims.batch, rows, heads, dim], DType::F32);
    let q = tensor(dims.q_heads, dims.head_dim)?;
    let k = tensor(dims.kv_heads, dims.head_dim)?;
    let v = tensor(dims.kv_heads, dims.value_dim)?;
    let mut out = tensor(dims.q_heads, dims.value_dim)?;
    let mut lse = Tensor::zeros(gpu, [dims.batch, dims.q_heads, rows, 1], DType::F32)?;
    ring.forward(&Inputs::new(&q, &k, &v), &mut Outputs::new(&mut out, &mut lse))?;
    let lse = lse.download::<f32>()?;
    assert!(lse.iter().all(|lse| (lse - (dims.kv_len as f32).ln()).abs() < 1e-5));
    Ok(())
}

#[test]
fn an_unsupported_problem_is_an_error_at_plan_time() {
    let Some(gpu) = gpu() else { return };
    let plan = |attention: Attention, dims| {
        let [transport] = <[Threads; 1]>::try_from(threads::ring(1)).expect("one rank");
        ring(&gpu, transport, &attention, dims).err()
    };
    let dims = Dims::new(1, 8, 2, 8);
    let refused = |attention: Attention, dims, text: &str| {
        let error = plan(attention, dims);
        assert!(
            matches!(&error, Some(Error::Unsupported { what, .. }) if what.contains(text)),
            "{error:?}"
        );
    };
    refused(Attention::new().dtype(DType::F64), dims, "f64");
    refused(Attention::new().reproducible(true), dims, "reproducible");
    refused(Attention::new(), Dims { head_dim: 257, ..dims }, "257");
    refused(Attention::new(), Dims { value_dim: 300, ..dims }, "300");
    assert_eq!(plan(Attention::new(), Dims { head_dim: 256, value_dim: 255, ..dims }), None);
    let elsewhere = Gpu::open(&Options { number: 1000, ..Options::default() });
    assert!(matches!(elsewhere, Err(Error::Unsupported { what, .. }) if what.contains("1000")));
}

#[test]
fn a_stopwatch_measures_time_if_the_device_has_timestamps() {
    let Some(gpu) = gpu() else { return };
    let watch = Stopwatch::start(&gpu).expect("a stopwatch");
    assert_eq!(watch.is_some(), gpu.device().features().contains(Features::TIMESTAMP_QUERY));
    assert_eq!(watch.is_some(), Stopwatch::is_there(&gpu));
    assert_eq!(Ok(watch.is_some()), Stopwatch::runs(&gpu));
    let Some(watch) = watch else { return };
    let before = std::time::Instant::now();
    suite::random_cases(&WgpuRing::new(gpu).only(F32), 0..1).unwrap();
    let passed = watch.stop().expect("its time").expect("a clock that runs");
    // more than zero, and at most the host's time plus its waits before and after
    assert!(
        passed > Duration::ZERO && passed < before.elapsed() + Duration::from_secs(60),
        "{passed:?}"
    );
}

/// Mistakes that Vulkan's validation layers must report, or their silence over the other tests
/// would mean nothing. Ignored by default: `scripts/wgpu-test` runs each under
/// `scripts/with-validation` and requires that it is reported. The commands are recorded and never
/// submitted, so no driver executes them.
#[cfg(target_os = "linux")]
mod validation {
    use annulus_wgpu::wgpu::{
        BufferDescriptor, BufferUsages,
        hal::{
            BufferCopy, CommandEncoder as _, CommandEncoderDescriptor, Device as _, api::Vulkan,
            vulkan,
        },
    };

    use super::gpu;

    const BYTES: u64 = 256;

    /// Records commands on a buffer of [`BYTES`] bytes without wgpu's checks and barriers.
    fn record(commands: impl FnOnce(&mut vulkan::CommandEncoder, &vulkan::Buffer)) {
        let Some(gpu) = gpu() else { return };
        let buffer = gpu.device().create_buffer(&BufferDescriptor {
            label: None,
            size: BYTES,
            usage: BufferUsages::COPY_SRC | BufferUsages::COPY_DST,
            mapped_at_creation: false,
        });
        // SAFETY: none of the three is destroyed through its handle, and each outlives its handle.
        let (device, queue, buffer) = unsafe {
            (
                gpu.device().as_hal::<Vulkan>().expect("a device of Vulkan"),
                gpu.queue().as_hal::<Vulkan>().expect("its queue"),
                buffer.as_hal::<Vulkan>().expect("its buffer"),
            )
        };
        let descriptor = CommandEncoderDescriptor { label: None, queue: &*queue };
        // SAFETY: the encoder and the buffer are of this device, and what is recorded is discarded.
        unsafe {
            let mut encoder = device.create_command_encoder(&descriptor).expect("an encoder");
            encoder.begin_encoding(None).expect("it begins");
            commands(&mut encoder, &buffer);
            encoder.discard_encoding();
        }
    }

    #[test]
    #[ignore = "a mistake: SYNC-HAZARD-WRITE-AFTER-WRITE"]
    fn two_writes_without_a_barrier() {
        record(|encoder, buffer| {
            for _ in 0..2 {
                // SAFETY: the range is within the buffer, and the commands never run.
                unsafe { encoder.clear_buffer(buffer, 0..BYTES) };
            }
        });
    }

    #[test]
    #[ignore = "a mistake: VUID-vkCmdCopyBuffer-size"]
    fn a_copy_beyond_the_end_of_a_buffer() {
        record(|encoder, buffer| {
            let size = BYTES.try_into().expect("not zero");
            let beyond = BufferCopy { src_offset: 0, dst_offset: BYTES / 2, size };
            // SAFETY: the commands never run.
            unsafe { encoder.copy_buffer_to_buffer(buffer, buffer, std::iter::once(beyond)) };
        });
    }
}
