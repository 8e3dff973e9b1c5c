//! The backend on the emulated device as HIP: the program of AMD GPUs, in waves of 64.

use std::{ops::ControlFlow, sync::Arc, time::Duration};

use annulus::{Attention, LocalRing, Plan, Tensors};
use annulus_comm::Staged;
use annulus_conformance::{
    Case, Draw, Masks, Setting, Subject,
    suite::{self, Poison, Scale},
};
use annulus_core::{
    Backend, BackwardMode, Block, DType, Dims, Dropout, ForwardPass, HostView, HostViews, Inputs,
    Passes, RankShard, Result, RowSet, Rows, Spec, Workspace,
};
use annulus_cuda::{
    Cuda, Level,
    device::{Api, Architecture, Compiler, CudaCopier, CudaSpace, Device, Gpu, Stream, Symbols},
};
use annulus_cuda_emulator as emulator;
use annulus_plan::Layout;
use half::f16;
use ndarray::{Array4, ArrayView4, s};

use crate::{
    common::{hosted, staged, verdicts, wide},
    matrix_backward::{dims, large_scores, non_finite_elements_reach_visible_pairs, passes_hold},
    mistakes::Planted,
    support::{
        SCORE_OPTIONS, blocks, cache, every_feature, masked_rows_change_no_bit, next_device,
        orders_change_no_bit,
    },
};

/// Opens device `ordinal`, of a target such as 0x942, at its highest level.
pub(crate) fn hip_on<const TARGET: u32>(ordinal: usize) -> Result<Cuda> {
    on(emulator::hip_symbols::<TARGET>(), ordinal)
}

fn on(symbols: Symbols, ordinal: usize) -> Result<Cuda> {
    let device = Device::with_symbols(symbols, ordinal)?;
    let compiler = Compiler::with_symbols(emulator::hip_compiler_symbols(), Some(cache()))?;
    Ok(Cuda::on(Stream::new(&device)?, compiler))
}

/// As [`hip_on`], with a planted mistake.
pub(crate) fn planted_on<const TARGET: u32>(ordinal: usize, planted: Planted) -> Result<Cuda> {
    planted.plant(ordinal);
    Ok(hip_on::<TARGET>(ordinal)?.edited(planted.edit()))
}

/// As [`hip_on`] with the memory of the host, like an MI300A.
fn apu_on(ordinal: usize) -> Result<Cuda> {
    on(emulator::apu_symbols::<0x942>(), ordinal)
}

/// Devices at level plain.
fn plain() -> impl Subject {
    staged("emulated hip", Duration::ZERO, || {
        hip_on::<0x1100>(next_device())?.at_level(Level::Plain)
    })
}

/// Devices of a target at level matrix. Shuffles are exchanges of whole waves.
fn matrix<const TARGET: u32>() -> impl Subject {
    staged("emulated matrix cores", Duration::ZERO, || {
        let ordinal = next_device();
        emulator::plant(ordinal, emulator::WHOLE_WAVES);
        hip_on::<TARGET>(ordinal)?.at_level(Level::Matrix)
    })
}

verdicts! {
    random_cases_hold_as_hip: suite::random_cases(&plain(), 300..312);
    random_cases_hold_on_matrix_cores: suite::random_cases(&matrix::<0x942>(), 300..318);
    random_cases_hold_in_memory_shared_with_the_host:
        suite::random_cases(&hosted("emulated apu", || apu_on(next_device())), 306..312);
    a_sample_of_the_matrix_holds_as_hip: suite::matrix(&plain(), Scale::OneIn(123));
    a_sample_of_the_matrix_holds_on_matrix_cores:
        suite::matrix(&matrix::<0x90a>(), Scale::OneIn(123));
    a_visible_nan_does_not_depend_on_the_ranks_as_hip: suite::nonfinite_on(
        &plain(),
        Poison::NanAndInfinities,
        DType::F32,
        &[Setting::new(3, Layout::Zigzag)],
    );
    a_visible_nan_does_not_depend_on_the_ranks_on_matrix_cores: suite::nonfinite_on(
        &matrix::<0x942>(),
        Poison::NanAndInfinities,
        DType::F16,
        &[Setting::new(3, Layout::Zigzag)],
    );
    wide_heads_of_bf16_hold_as_hip: wide(&plain(), DType::Bf16, 128, true, false);
}

#[test]
fn every_dim_type_and_target_holds_on_matrix_cores() {
    let one = BackwardMode::OnePass;
    passes_hold(
        &matrix::<0x942>(),
        dims,
        &[
            (DType::F16, 64, true, one, 2),
            (DType::F16, 256, true, one, 1),
            // rows that cannot be loaded 16 bytes at a time
            (DType::Bf16, 71, false, one, 1),
        ],
    );
    // the sample of the matrix is of 0x90a
    passes_hold(&matrix::<0x950>(), dims, &[(DType::F16, 64, false, one, 1)]);
}

#[test]
fn options_hold_on_matrix_cores() {
    for (name, change) in &SCORE_OPTIONS {
        let few = Dims { q_len: 130, kv_len: 150, ..dims(40) };
        let mut spec = Spec::new(few, DType::F64);
        change(&mut spec);
        let masks = Masks { window: Some([Some(80), Some(60)]), ..Masks::default() };
        let case = Case::new(*name, spec, masks, &mut Draw::new(3)).in_dtype(DType::F16);
        suite::answer(&matrix::<0x90a>(), &case, &Setting::ALONE)
            .unwrap_or_else(|wrong| panic!("{name}: {wrong}"));
    }
    // a bias, slope, sinks and dropout of every head; several heads in a tile; ranges of keys
    for (q_len, kv_len, dim, dtype) in
        [(70, 150, 80, DType::Bf16), (10, 700, 40, DType::F16), (3, 150, 256, DType::F16)]
    {
        let dims = Dims { kv_len, kv_heads: 2, ..Dims::new(2, q_len, 6, dim) };
        let causal = Masks { causal: true, ..Masks::default() };
        let case = every_feature(dims, causal, dtype);
        suite::answer(&matrix::<0x942>(), &case, &Setting::ALONE)
            .unwrap_or_else(|wrong| panic!("{q_len} queries: {wrong}"));
    }
    for causal in [false, true] {
        suite::answer(&matrix::<0x942>(), &large_scores(dims(64), causal), &Setting::ALONE)
            .unwrap();
    }
}

#[test]
fn masked_elements_that_are_not_finite_change_nothing_on_matrix_cores() {
    for dim in [64, 256] {
        masked_rows_change_no_bit(&matrix::<0x942>(), DType::F16, [300, dim]).unwrap();
        let spec = Spec::new(Dims { kv_len: 300, ..dims(dim) }, DType::F64);
        non_finite_elements_reach_visible_pairs(&matrix::<0x942>(), spec);
    }
}

#[test]
fn the_order_of_threads_changes_no_bit_on_matrix_cores() {
    let masks = Masks { causal: true, ..Masks::default() };
    let spec = Spec::new(dims(128), DType::F64);
    let case = Case::new("orders", spec, masks, &mut Draw::new(3)).in_dtype(DType::F16);
    orders_change_no_bit(matrix::<0x942>, &case, 31..34);
}

/// Keys with probabilities of about 2⁻¹⁹ each, which is not a normal number of f16: one has a
/// hundred times the weight of the 4095 others.
fn small_probabilities() -> Case {
    let dims = Dims { kv_len: 4096, ..Dims::new(1, 16, 1, 64) };
    let mut case =
        Case::new("small", Spec::new(dims, DType::F64), Masks::default(), &mut Draw::new(3));
    case.spec.scale = 1.0;
    case.q.fill(0.25);
    case.k.fill(0.0);
    // a score of 13: e¹³ is 108 times the weight of all others
    case.k.index_axis_mut(ndarray::Axis(1), 7).fill(13.0 / 16.0);
    case.v.fill(1.0);
    case.v.index_axis_mut(ndarray::Axis(1), 7).fill(0.0);
    case.in_dtype(DType::F16)
}

/// Requires out, dK and dV of [`small_probabilities`] to within some roundings.
pub(crate) fn small_probabilities_count(subject: &dyn Subject) -> std::result::Result<(), String> {
    let case = small_probabilities();
    let answer = suite::answer(subject, &case, &Setting::ALONE)?;
    let want = 4095.0 / (4095.0 + 13f64.exp());
    let out = answer.out.slice(ndarray::s![0, 3, 0, ..]);
    let truth = case.truth().map_err(|error| error.to_string())?.backward;
    let of_key = |of: &ndarray::Array4<f64>| of.slice(ndarray::s![0, 100, 0, ..]).to_owned();
    for (what, got, want) in [
        ("out", out.to_owned(), ndarray::Array1::from_elem(64, want)),
        ("dk", of_key(&answer.dk), of_key(&truth.dk)),
        ("dv", of_key(&answer.dv), of_key(&truth.dv)),
    ] {
        let largest = want.fold(0.0, |largest: f64, x| largest.max(x.abs()));
        let error = (got - want).fold(0.0, |largest: f64, x| largest.max(x.abs()));
        if error > 0.02 * largest {
            return Err(format!("{what}[: an error of {error}, largest {largest}"));
        }
    }
    Ok(())
}

#[test]
fn small_probabilities_of_f16_count_where_subnormal_numbers_are_flushed() {
    for subject in [&matrix::<0x90a>() as &dyn Subject, &matrix::<0x942>()] {
        small_probabilities_count(subject).unwrap();
    }
}

#[test]
fn level_matrix_serves_16_bit_elements_on_cdna_gpus() {
    let open = |ordinal| hip_on::<0x942>(ordinal);
    let hip = open(next_device()).unwrap();
    assert_eq!(
        hip.to_string(),
        "emulated GPU, gfx942:sramecc+:xnack-, hipRTC 0, HIP 0, level matrix"
    );
    let error = hip_on::<0x1100>(next_device()).unwrap().at_level(Level::Matrix).unwrap_err();
    assert_eq!(
        error.to_string(),
        "hip level matrix is not supported by emulated GPU (gfx1100:sramecc+:xnack-)"
    );
    let error = hip.clone().at_level(Level::Warpgroup).unwrap_err();
    assert!(error.to_string().starts_with("hip level warpgroup is not supported"), "{error}");

    // what it does not serve is computed at level plain, chosen with the plan
    let variant = |change: fn(&mut Spec), dtype| {
        let mut spec = Spec::new(Dims::new(1, 8, 2, 64), dtype);
        change(&mut spec);
        hip.forward_variant(&spec).unwrap().to_string()
    };
    let dropped = |spec: &mut Spec| spec.dropout = Some(Dropout { probability: 0.98, seed: 1 });
    assert_eq!(variant(|_| (), DType::F16), "f16 64 mfma");
    assert_eq!(variant(|_| (), DType::F32), "f32 64");
    assert_eq!(variant(|spec| spec.normalize = false, DType::Bf16), "bf16 64");
    assert_eq!(variant(dropped, DType::F16), "f16 64");
    assert_eq!(variant(dropped, DType::Bf16), "bf16 64 mfma");
    let kernels =
        ["forward_matrix", "forward_decode", "forward", "backward_queries_matrix", "backward_keys"];
    let launched = |queries, dtype| {
        let dims = Dims { kv_len: 130, kv_heads: 1, ..Dims::new(1, queries, 2, 64) };
        let spec = Spec::new(dims, DType::F64);
        let case = Case::new("kernels", spec, Masks::default(), &mut Draw::new(3));
        blocks(&case.in_dtype(dtype), &Setting::ALONE, kernels, open).unwrap()
    };
    assert_eq!(launched(130, DType::Bf16), [3, 0, 0, 4, 0]);
    assert_eq!(launched(17, DType::Bf16), [1, 0, 0, 2, 0]);
    assert_eq!(launched(16, DType::Bf16), [0, 1, 0, 2, 0]);
    assert_eq!(launched(130, DType::F32), [0, 0, 6, 0, 3]);
}

#[test]
fn compilers_serve_gpus_of_their_own_interface() {
    let hip = hip_on::<0x942>(next_device()).unwrap();
    let spec = Spec::new(Dims::new(1, 8, 2, 64), DType::F16);
    let capabilities = hip.capabilities(&spec).unwrap();
    assert_eq!(capabilities.name, "hip");
    assert!(capabilities.numerics_id.starts_with("hip, hipRTC"), "{}", capabilities.numerics_id);
    let nvrtc = Compiler::with_symbols(emulator::compiler_symbols(), None).unwrap();
    let error = nvrtc.target(&Gpu::Amd("gfx90a".into())).unwrap_err();
    assert_eq!(error.to_string(), "gfx90a is not supported by NVRTC 0.0");
    let hiprtc = Compiler::with_symbols(emulator::hip_compiler_symbols(), None).unwrap();
    let error = hiprtc.target(&Architecture { major: 8, minor: 0 }.into()).unwrap_err();
    assert!(error.to_string().starts_with("compute capability 8.0 is not supported by hipRTC"));
    assert_eq!(hiprtc.api(), Api::Hip);
}

/// Tensors of a rank of one head of 64 dims, contiguous in no axis: q, k, v and dout.
fn strided(whole: &[Array4<f16>; 4]) -> [ArrayView4<'_, f16>; 4] {
    // [b, h, d, n], every other row of an odd number of them
    whole
        .each_ref()
        .map(|whole| whole.view().permuted_axes([0, 3, 1, 2]).slice_move(s![.., ..;-2, .., ..]))
}

/// Results of a pass over strided tensors in host memory; and of the device, bytes that were copied
/// to it and from it, and copies within it.
fn host_pass(open: fn(usize) -> Result<Cuda>) -> Result<([Array4<f16>; 4], [u64; 3])> {
    let ordinal = next_device();
    let draw = &mut Draw::new(5);
    let whole = [(); 4].map(|()| draw.tensor((1, 2, 64, 141)).mapv(f16::from_f64));
    let [q, k, v, dout] = strided(&whole);
    let dims = Dims::new(1, 71, 2, 64);
    let mut plan =
        LocalRing::from_plans(Attention::new().dtype(DType::F16), dims, 1, |_, setup, inner| {
            let cuda = open(ordinal)?;
            let copier = CudaCopier::new(cuda.stream().device())?;
            let staged = Staged::<_, HostViews<CudaSpace>>::new(inner, copier);
            Plan::with_backend(setup, dims, cuda.on_host(), staged)
        })?;
    let tensors = Tensors::new(q, k, v);
    let forward = plan.forward(&tensors)?;
    let backward = plan.backward(&tensors, &forward, dout, None)?;
    let counts = [
        emulator::bytes_to_device(ordinal),
        emulator::bytes_to_host(ordinal),
        emulator::device_copies(ordinal),
    ];
    Ok(([forward.out, backward.dq, backward.dk, backward.dv], counts))
}

#[test]
fn tensors_in_memory_shared_with_the_host_are_not_copied() {
    let (copied, counts) = host_pass(hip_on::<0x942>).unwrap();
    let tensor = 71 * 2 * 64 * 2;
    let statistics = 71 * 2 * 4;
    // to the device q, k, v of each pass, out, dout, max, sum, and lists of tiles; from it out, lse,
    // max, sum, dq, dk, dv
    let lists = counts[0] - (8 * tensor + 2 * statistics);
    assert_eq!(counts[1..], [4 * tensor + 3 * statistics, 0]);
    let name = apu_on(next_device()).unwrap().to_string();
    assert!(name.ends_with(", level matrix, memory shared with the host"), "{name}");
    let (shared, counts) = host_pass(apu_on).unwrap();
    assert_eq!(counts, [lists, 0, 0]);
    assert!(copied.iter().zip(&shared).all(|(copied, shared)| copied == shared));
}

/// Work that is queued after each call of a forward pass on tensors in host memory.
fn queued_by(cuda: Cuda, ordinal: usize) -> Result<[usize; 2]> {
    let dims = Dims::new(1, 70, 2, 64);
    let rows = Arc::new(Rows::counting(70, 0)?);
    let shard = RankShard {
        spec: Arc::new(Spec::new(dims, DType::F16)),
        queries: Arc::clone(&rows),
        keys: Arc::clone(&rows),
        attention_mask: None,
        key_lists: None,
        received_lists: None,
        most_block_rows: 70,
        most_query_rows: 70,
        leaves: None,
    };
    let tensor = Array4::from_elem((1, 70, 2, 64), f16::ONE);
    let view = || HostView::F16(tensor.view());
    let tick = &mut || ControlFlow::Continue(());
    let backend = cuda.on_host();
    let mut workspace = backend.workspace(&shard, Passes::Forward)?;
    let inputs = Inputs { q: view(), k: view(), v: view(), bias: None, sinks: None };
    let mut pass = workspace.forward(inputs, tick)?;
    let mut buffer = backend.allocate(70 * shard.spec.kv_row_layout().bytes())?;
    let ready = &pass.local_kv(&mut buffer, &RowSet::all(70))?;
    let packed = emulator::queued(ordinal);
    pass.attend(&Block { buffer: &buffer, ready, rows: &rows, first_local: Some(0) }, tick)?;
    Ok([packed, emulator::queued(ordinal)])
}

/// Whoever forgets the pass may free the tensors that its kernels read.
#[test]
fn no_work_on_memory_shared_with_the_host_is_left_when_a_call_returns() {
    let ordinal = next_device();
    assert_eq!(queued_by(apu_on(ordinal).unwrap(), ordinal).unwrap(), [0, 0]);
    let ordinal = next_device();
    let [packed, attended] = queued_by(hip_on::<0x942>(ordinal).unwrap(), ordinal).unwrap();
    assert!(packed > 0 && attended > packed, "{packed} {attended}");
}
