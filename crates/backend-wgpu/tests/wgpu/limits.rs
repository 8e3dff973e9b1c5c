//! Small devices: bindings smaller than a tensor, grids narrower than the workgroups, devices too
//! small for a tile.

use annulus::{
    Attention, Dims, Error, Layout, SinkShape, Spec,
    comm::threads::{self, each_rank},
};
use annulus_conformance::{Case, Draw, Judge, Masks, Setting, suite, wgpu::WgpuRing};
use annulus_core::DType;
use annulus_wgpu::{Gpu, KernelEdit, Options};

use super::{answer, gpu, open, ring, run};

/// A case of two GQA groups, two batch rows and a bias on all axes, long enough to be split.
fn long_case() -> Case {
    let dims = Dims { kv_heads: 2, value_dim: 7, ..Dims::new(2, 150, 4, 5) };
    let mut spec = Spec::new(dims, DType::F64);
    spec.sinks = Some(SinkShape { per_head: true, count: 1 });
    spec.bias = Some([2, 4, 150, 150]);
    Case::new("long", spec, Masks { causal: true, ..Masks::default() }, &mut Draw::new(5))
}

fn causal(name: &str, dims: Dims, dtype: DType) -> Case {
    let masks = Masks { causal: true, ..Masks::default() };
    Case::new(name, Spec::new(dims, DType::F64), masks, &mut Draw::new(8)).in_dtype(dtype)
}

#[test]
fn tensors_larger_than_a_binding_are_processed_in_parts() {
    // the bias alone has 720 000 bytes
    let Some(small) = open(&Options { most_binding_bytes: Some(80 << 10), ..Options::default() })
    else {
        return;
    };
    let case = long_case().in_dtype(DType::F32);
    for setting in [Setting::ALONE, Setting::new(2, Layout::Zigzag)] {
        answer(&small, &case, &setting);
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
    let case = causal("divided", dims, DType::F16);
    answer(&small, &case, &Setting::ALONE);
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
        let case = causal(name, dims, dtype);
        suite::answer(&WgpuRing::on_host(small), &case, &Setting::ALONE).unwrap();
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
    let [want, got] = [whole, slow].map(|gpu| answer(&gpu, &case, &Setting::ALONE));
    assert_eq!(want, got);
}

#[test]
fn gradients_of_sinks_are_summed_in_submissions_of_bounded_work() {
    // 64 rows a submission, of which there are five
    let Some(slow) = open(&Options { most_part_flops: Some(1), ..Options::default() }) else {
        return;
    };
    let mistakes = [
        ("select(gradient[own], 0.0, is_first)", "0.0"),
        ("var row = params.row_first + lane", "var row = lane"),
        ("params.group_first + workgroup.x", "workgroup.x"),
        ("select(own_head, params.step_first, params.sinks_head == 0u)", "own_head"),
    ];
    for per_head in [true, false] {
        let mut spec = Spec::new(Dims::new(2, 150, 4, 5), DType::F64);
        spec.sinks = Some(SinkShape { per_head, count: 2 });
        // each head has its own step only if heads share the sinks
        let mistakes = if per_head { &mistakes[..3] } else { &mistakes };
        let masks = Masks { causal: true, ..Masks::default() };
        let case = Case::new("sinks", spec, masks, &mut Draw::new(12)).in_dtype(DType::F32);
        mistakes_are_wrong(&slow, &case, "sinks", mistakes);
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
    let dims = Dims { kv_heads: 4, value_dim: 7, ..Dims::new(2, 100, 8, 5) };
    let case = causal("wide", dims, DType::F32);
    answer(&narrow, &case, &Setting::ALONE);
}

#[test]
fn every_tile_of_a_long_row_is_computed() {
    // Mesa before 23 leaves loops early: here after about 15 000 keys, with longer vectors after a
    // few thousand
    let Some(gpu) = gpu() else { return };
    let dims = Dims { kv_len: 17_000, value_dim: 2, ..Dims::new(1, 1, 1, 64) };
    holds(&gpu, dims);
    holds(&gpu, Dims { q_len: 17_000, kv_len: 1, ..dims });
}

/// Runs forward and backward and compares the answer with the oracle's.
fn holds(gpu: &Gpu, dims: Dims) {
    let case = Case::new("long", Spec::new(dims, DType::F64), Masks::default(), &mut Draw::new(7))
        .in_dtype(DType::F32);
    answer(gpu, &case, &Setting::ALONE);
}

#[test]
fn limits_that_are_too_small_are_an_error_at_plan_time_on_every_rank() {
    let Some(plenty) = gpu() else { return };
    // one tile of these keys is 32 rows of 32 KiB in one binding
    let dims = Dims::new(1, 64, 32, 128);
    for (most_binding_bytes, most_buffer_bytes) in [(Some(64 << 10), None), (None, Some(256 << 10))]
    {
        let options = Options { most_binding_bytes, most_buffer_bytes, ..Options::default() };
        let Some(poor) = open(&options) else { return };
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

/// Requires a right answer, and wrong ones of a kernel with any of these texts changed.
fn mistakes_are_wrong(
    gpu: &Gpu,
    case: &Case,
    kernel: &'static str,
    mistakes: &[(&'static str, &'static str)],
) {
    let judge = Judge::new(case).expect("a truth");
    answer(gpu, case, &Setting::ALONE);
    for &(from, to) in mistakes {
        let wrong = gpu.edited(KernelEdit { kernel, from, to }).expect("the same device");
        assert!(judge.check(&run(&wrong, case, &Setting::ALONE)).is_err(), "{to}");
    }
}

/// A case of `count` sinks and few rows.
fn sinks_case(name: &str, count: usize, dims: Dims, normalize: bool) -> Case {
    let mut spec = Spec::new(dims, DType::F64);
    spec.sinks = Some(SinkShape { per_head: false, count });
    spec.normalize = normalize;
    let masks = Masks { causal: true, ..Masks::default() };
    Case::new(name, spec, masks, &mut Draw::new(14)).in_dtype(DType::F32)
}

/// Mesa before 23 leaves the loops of a kernel after 65,535 iterations, without an error: with more
/// than 32,767 sinks the two loops of the forward epilogue were left too early.
#[test]
fn more_sinks_than_iterations_of_a_software_adapter_are_added() {
    let Some(gpu) = gpu() else { return };
    for normalize in [true, false] {
        let dims = Dims { kv_len: 32, ..Dims::new(1, 3, 1, 8) };
        let case = sinks_case("many sinks", 70_000, dims, normalize);
        answer(&gpu, &case, &Setting::ALONE);
    }
}

#[test]
fn many_sinks_give_the_same_bits_in_submissions_of_bounded_work() {
    let Some(whole) = gpu() else { return };
    // 5,859 steps of a workgroup: fewer than one row takes, more than 70 rows of one sink take
    let flops = Some(12_000_000);
    let Some(slow) = open(&Options { most_part_flops: flops, ..Options::default() }) else {
        return;
    };
    let mistakes = [
        ("params.group_first + workgroup.x", "workgroup.x"),
        ("row_max = bitcast<f32>(lse[to])", "row_max = statistics[at]"),
        ("params.step_first > params.sinks", "false"),
        ("params.step_end < 2u * params.sinks", "false"),
        ("var t = term_first", "var t = 0u"),
    ];
    for normalize in [true, false] {
        let case = sinks_case("sinks", 10_000, Dims::new(2, 70, 2, 5), normalize);
        let want = answer(&whole, &case, &Setting::ALONE);
        assert_eq!(want, run(&slow, &case, &Setting::ALONE));
        for (from, to) in mistakes {
            let wrong = slow.edited(KernelEdit { kernel: "finish_rows", from, to }).unwrap();
            assert_ne!(want, run(&wrong, &case, &Setting::ALONE), "{to}");
        }
    }
}

#[test]
fn gradients_of_a_bias_without_axes_are_summed_in_ranges_of_rows() {
    // 64 rows a launch, of which there are three
    let Some(slow) = open(&Options { most_part_flops: Some(1), ..Options::default() }) else {
        return;
    };
    let mut spec = Spec::new(Dims::new(2, 150, 2, 5), DType::F64);
    spec.bias = Some([2, 2, 1, 1]);
    // without sinks an equal bias of all keys changes nothing
    spec.sinks = Some(SinkShape { per_head: false, count: 1 });
    let masks = Masks { causal: true, ..Masks::default() };
    let case = Case::new("bias", spec, masks, &mut Draw::new(15)).in_dtype(DType::F32);
    let mistakes = [
        ("select(gradient[own], 0.0, params.row_first == 0u)", "0.0"),
        ("var row = params.row_first + lane", "var row = lane"),
    ];
    mistakes_are_wrong(&slow, &case, "bias_rows", &mistakes);
}
