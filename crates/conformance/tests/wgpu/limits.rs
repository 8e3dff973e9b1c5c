//! Small devices: bindings smaller than a tensor, grids narrower than the workgroups, devices too
//! small for a tile.

use annulus::{
    Attention, Dims, Error, Layout, SinkShape, Spec,
    comm::threads::{self, each_rank},
};
use annulus_conformance::{Answer, Case, Draw, Judge, Masks, Setting, Subject, wgpu::WgpuRing};
use annulus_core::{DType, Dropout, Result};
use annulus_wgpu::{
    Gpu, Level, Options, Translation,
    wgpu::naga::{
        self,
        back::spv,
        proc::BoundsCheckPolicies,
        valid::{Capabilities, ValidationFlags, Validator},
    },
};

use super::{adapter, gpu, gpu_at, open, ring};

/// A case of two GQA groups, two batch rows and a bias on all axes, long enough to be split.
fn long_case() -> Case {
    let dims = Dims {
        batch: 2,
        q_len: 150,
        kv_len: 150,
        q_heads: 4,
        kv_heads: 2,
        head_dim: 5,
        value_dim: 7,
    };
    let mut spec = Spec::new(dims, DType::F64);
    spec.sinks = Some(SinkShape { per_head: true, count: 1 });
    spec.bias = Some([2, 4, 150, 150]);
    Case::new("long", spec, Masks { causal: true, ..Masks::default() }, &mut Draw::new(5))
}

#[test]
fn tensors_larger_than_a_binding_are_processed_in_parts() {
    let Some(whole) = gpu() else { return };
    // the bias alone has 720 000 bytes
    let Some(small) = open(&Options { most_binding_bytes: Some(80 << 10), ..Options::default() })
    else {
        return;
    };
    let case = long_case().in_dtype(DType::F32);
    for setting in [Setting::ALONE, Setting::new(2, Layout::Zigzag)] {
        let [want, got] = [whole.clone(), small.clone()]
            .map(|gpu| WgpuRing::new(gpu).run(&case, &setting, 1).unwrap().remove(0));
        let judge = Judge::new(&case).unwrap();
        judge.check(&want).unwrap();
        judge.check(&got).unwrap();
    }
}

#[test]
fn accumulators_larger_than_a_buffer_are_divided() {
    // in f32 the accumulators of O and dQ have 256 000 bytes, in f16 the queries half of that
    let Some(small) = open(&Options { most_buffer_bytes: Some(150_000), ..Options::default() })
    else {
        return;
    };
    let dims = Dims { kv_heads: 1, ..Dims::new(2, 200, 4, 40) };
    let case = Case::new(
        "divided",
        Spec::new(dims, DType::F64),
        Masks { causal: true, ..Masks::default() },
        &mut Draw::new(8),
    );
    let case = case.in_dtype(DType::F16);
    let answer = WgpuRing::new(small).run(&case, &Setting::ALONE, 1).unwrap().remove(0);
    Judge::new(&case).unwrap().check(&answer).unwrap();
}

/// Large commands in small: wgpu limits a buffer to 2^31 − 1 bytes on most adapters. Queries of
/// more than 2^30 bytes (`bench --ns 140000 --heads 8 --kv-heads 1 --ds 256`) exceed it if they are
/// rounded up to a power of two, and accumulators of 2^31 bytes (`bench --dtype f16 --ns 131072
/// --heads 32 --ds 128`) are one byte too many.
#[test]
fn queries_above_half_a_buffer_and_accumulators_of_one_byte_more_than_a_buffer_are_computed() {
    let dims = |heads| Dims { kv_heads: 1, ..Dims::new(1, 72, heads, 32) };
    for (name, dims, dtype, most_buffer_bytes) in [
        ("queries of 73 728 bytes", dims(8), DType::F32, (1 << 17) - 1),
        ("accumulators of 147 456 bytes", dims(16), DType::F16, 147_455),
    ] {
        let options = Options { most_buffer_bytes: Some(most_buffer_bytes), ..Options::default() };
        let Some(small) = open(&options) else { return };
        let spec = Spec::new(dims, DType::F64);
        let masks = Masks { causal: true, ..Masks::default() };
        let case = Case::new(name, spec, masks, &mut Draw::new(10)).in_dtype(dtype);
        let answers = WgpuRing::on_host(small).run(&case, &Setting::ALONE, 1);
        let answer = answers.unwrap_or_else(|error| panic!("{name}: {error}")).remove(0);
        Judge::new(&case).unwrap().check(&answer).unwrap();
    }
}

#[test]
fn submissions_of_bounded_work_give_the_same_bits() {
    let Some(whole) = gpu() else { return };
    // above the work of every workgroup, below that of every launch
    let flops = Some(12_000_000);
    let Some(slow) = open(&Options { most_part_flops: flops, ..Options::default() }) else {
        return;
    };
    let case = long_case().in_dtype(DType::F32);
    let [want, got] = [whole, slow]
        .map(|gpu| WgpuRing::new(gpu).run(&case, &Setting::ALONE, 1).unwrap().remove(0));
    Judge::new(&case).unwrap().check(&got).unwrap();
    assert_eq!(want, got);
}

/// Rings of devices that differ in the checks of indices in their kernels. An answer with other
/// bits than the first one's is an error.
struct OtherChecks(Vec<WgpuRing>);

impl OtherChecks {
    /// Kernels without checks, and with indices that are clamped to the array or, if `zeroed`, with
    /// accesses beyond it that read 0 and are not written. `None` without an adapter.
    fn new(level: Level, dtypes: &[DType], zeroed: bool) -> Option<Self> {
        let options = Options {
            level: Some(level),
            check_bounds: true,
            translate: zeroed.then_some(read_zero_skip_write),
            ..Options::default()
        };
        let ring = |gpu: Option<Gpu>| Some(WgpuRing::new(gpu?).only(dtypes));
        Some(Self(vec![ring(gpu_at(level))?, ring(open(&options))?]))
    }
}

impl Subject for OtherChecks {
    fn name(&self) -> String {
        format!("{}, with and without checks of indices", self.0[0].name())
    }

    fn dtypes(&self) -> &[DType] {
        self.0[0].dtypes()
    }

    fn run(&self, case: &Case, setting: &Setting, times: usize) -> Result<Vec<Answer>> {
        let answers = self.0.iter().map(|ring| ring.run(case, setting, times));
        let answers = answers.collect::<Result<Vec<_>>>()?;
        for (number, others) in answers.iter().enumerate().skip(1) {
            for (other, first) in others.iter().zip(&answers[0]) {
                other.same_bits(first).map_err(|why| {
                    Error::internal(format!(
                        "{} on {setting}: device {number} of {} has other bits: {why}",
                        case.name,
                        self.0.len()
                    ))
                })?;
            }
        }
        Ok(answers.into_iter().next().unwrap_or_default())
    }
}

/// Translates a kernel with indices checked by `ReadZeroSkipWrite`. naga has no such check for
/// atomic operations: the kernels of a bias have one on a tile mask, so that their arrays in
/// workgroup memory are clamped, and copies of 2-byte elements one on a buffer.
fn read_zero_skip_write(wgsl: &str) -> std::result::Result<Translation, String> {
    use naga::proc::BoundsCheckPolicy::{ReadZeroSkipWrite, Restrict};
    let module = naga::front::wgsl::parse_str(wgsl).map_err(|error| error.to_string())?;
    let info = Validator::new(ValidationFlags::all(), Capabilities::all())
        .validate(&module)
        .map_err(|error| error.emit_to_string(wgsl))?;
    let translate = |index, buffer| {
        let options = spv::Options {
            lang_version: (1, 4),
            force_loop_bounding: false,
            bounds_check_policies: BoundsCheckPolicies { index, buffer, ..Default::default() },
            ..spv::Options::default()
        };
        spv::write_vec(&module, &info, &options, None).map_err(|error| error.to_string())
    };
    let on_tile_mask = wgsl.contains("atomicAnd(&visible_bits");
    let on_buffer = wgsl.contains("sink: array<atomic<u32>>");
    let spirv = translate(
        if on_tile_mask { Restrict } else { ReadZeroSkipWrite },
        if on_buffer { Restrict } else { ReadZeroSkipWrite },
    )?;
    let [entry_point] = &module.entry_points[..] else {
        return Err("a kernel has one entry point".to_owned());
    };
    Ok(Translation { spirv, workgroup_size: entry_point.workgroup_size })
}

/// Requires the same bits whatever the checks of indices, of cases with and without a score
/// epilogue.
fn checks_change_no_bit(level: Level, dtypes: &[DType], zeroed: bool) {
    let Some(devices) = OtherChecks::new(level, dtypes, zeroed) else { return };
    // no dim, length or number of tiles is a multiple of a tile's
    let dims = Dims { q_len: 41, value_dim: 35, ..Dims::new(1, 70, 3, 9) };
    let simple = Spec::new(dims, DType::F64);
    let general = Spec {
        bias: Some([1, 3, 41, 70]),
        soft_cap: Some(2.0),
        dropout: Some(Dropout { probability: 0.3, seed: 7 }),
        ..simple.clone()
    };
    let masks = Masks { causal: true, ..Masks::default() };
    for (name, spec) in [("simple", simple), ("general", general)] {
        let case = Case::new(name, spec, masks.clone(), &mut Draw::new(9));
        for &dtype in dtypes {
            let case = case.in_dtype(dtype);
            let answer = devices.run(&case, &Setting::ALONE, 1).expect("the same bits").remove(0);
            let judged = Judge::new(&case).expect("a truth").check(&answer);
            judged.unwrap_or_else(|why| panic!("{}, {}: {why}", level.name(), case.name));
        }
    }
}

#[test]
fn shaders_with_and_without_checks_of_indices_give_the_same_bits() {
    let Some(adapter) = adapter() else { return };
    for &level in adapter.levels.iter().filter(|&&level| level != Level::Matrix) {
        let all = [DType::F32, DType::F16, DType::Bf16];
        checks_change_no_bit(level, if level == adapter.chosen { &all } else { &all[..1] }, false);
    }
}

#[test]
fn shaders_whose_accesses_beyond_an_array_read_0_give_the_same_bits() {
    let Some(adapter) = adapter() else { return };
    // only Vulkan takes SPIR-V
    if adapter.api.eq_ignore_ascii_case("vulkan") {
        checks_change_no_bit(adapter.chosen, &[DType::F32], true);
    }
}

#[test]
fn the_matrix_level_gives_the_same_bits_without_checks_of_indices() {
    let Some(adapter) = adapter() else { return };
    // without: `the_matrix_level_holds_if_the_adapter_has_it`
    if adapter.levels.contains(&Level::Matrix) {
        checks_change_no_bit(Level::Matrix, &[DType::F16], false);
    }
}

#[test]
fn workgroups_beyond_one_axis_of_the_grid_use_a_second_axis() {
    // the default limit is 65 535; the query tiles are 64 workgroups, and no kernel has more than
    // 20 × 20
    let Some(narrow) = open(&Options { most_groups_a_line: Some(20), ..Options::default() }) else {
        return;
    };
    assert_eq!(narrow.device().limits().max_compute_workgroups_per_dimension, 20);
    let dims = Dims {
        batch: 2,
        q_len: 100,
        kv_len: 100,
        q_heads: 8,
        kv_heads: 4,
        head_dim: 5,
        value_dim: 7,
    };
    let case = Case::new(
        "wide",
        Spec::new(dims, DType::F64),
        Masks { causal: true, ..Masks::default() },
        &mut Draw::new(6),
    );
    let case = case.in_dtype(DType::F32);
    let answer = WgpuRing::new(narrow).run(&case, &Setting::ALONE, 1).unwrap().remove(0);
    Judge::new(&case).unwrap().check(&answer).unwrap();
}

#[test]
fn more_than_65_535_workgroups_use_a_second_axis() {
    let Some(gpu) = gpu() else { return };
    // a workgroup copies 64 elements: 66 000 workgroups for the keys alone
    let dims = Dims {
        batch: 1,
        q_len: 1,
        kv_len: 16_500,
        q_heads: 8,
        kv_heads: 8,
        head_dim: 32,
        value_dim: 2,
    };
    holds(gpu, dims);
}

#[test]
fn every_tile_of_a_long_row_is_computed() {
    // Mesa before 23 leaves loops early: here after about 15 000 keys, with longer vectors after a
    // few thousand
    let Some(gpu) = gpu() else { return };
    let dims = Dims {
        batch: 1,
        q_len: 1,
        kv_len: 17_000,
        q_heads: 1,
        kv_heads: 1,
        head_dim: 64,
        value_dim: 2,
    };
    holds(gpu.clone(), dims);
    holds(gpu, Dims { q_len: 17_000, kv_len: 1, ..dims });
}

/// Runs forward and backward and compares the answer with the oracle's.
fn holds(gpu: Gpu, dims: Dims) {
    let case = Case::new("long", Spec::new(dims, DType::F64), Masks::default(), &mut Draw::new(7))
        .in_dtype(DType::F32);
    let answer = WgpuRing::new(gpu).run(&case, &Setting::ALONE, 1).expect("an answer").remove(0);
    Judge::new(&case).expect("a truth").check(&answer).expect("the truth");
}

#[test]
fn limits_that_are_too_small_are_an_error_at_plan_time_on_every_rank() {
    let Some(plenty) = gpu() else { return };
    // one tile of these keys is 32 rows of 32 KiB in one binding
    let dims = Dims {
        batch: 1,
        q_len: 64,
        kv_len: 64,
        q_heads: 32,
        kv_heads: 32,
        head_dim: 128,
        value_dim: 128,
    };
    let Some(small) = open(&Options { most_binding_bytes: Some(64 << 10), ..Options::default() })
    else {
        return;
    };
    let Some(little) = open(&Options { most_buffer_bytes: Some(256 << 10), ..Options::default() })
    else {
        return;
    };
    for poor in [small, little] {
        let errors = each_rank(threads::ring(2), |rank, transport| {
            let gpu = if rank == 1 { &poor } else { &plenty };
            Ok(ring(gpu, transport, &Attention::new(), dims).err())
        })
        .expect("every rank answers");
        assert!(
            matches!(&errors[1], Some(Error::Unsupported { .. } | Error::OutOfMemory { .. })),
            "{:?}",
            errors[1]
        );
        assert!(errors[0].is_some(), "{errors:?}");
    }
}
