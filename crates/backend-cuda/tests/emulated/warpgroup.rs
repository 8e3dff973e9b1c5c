//! Warpgroup forward on emulated GPUs of compute capability 9.0: the suite, the kernels that serve
//! a pass, and numbers that are not finite.

use annulus_conformance::{
    Case, Draw, Masks, Setting, Subject,
    suite::{self, Poison, Scale},
};
use annulus_core::{Backend, Batch, DType, DenseMask, Dims, Dropout, Error, Spec};
use annulus_cuda::{
    Cuda, Level,
    device::{Compiler, Stream, TensorMap},
};
use annulus_cuda_emulator as emulator;
use annulus_plan::Layout;
use ndarray::s;

use crate::{
    common::{OnMultiplesOfEight, verdicts},
    support::{blocks, compiler, emulated, hopper, hopper_on, on_warpgroups},
};

#[test]
fn unsupported_levels_are_refused_and_variants_name_the_kernels() {
    let spec =
        |dtype, head_dim| Spec::new(Dims { value_dim: 80, ..Dims::new(1, 8, 2, head_dim) }, dtype);
    let name = |cuda: &Cuda, spec: &Spec| cuda.forward_variant(spec).unwrap().to_string();
    let cuda = hopper(None).unwrap();
    assert_eq!(
        cuda.to_string(),
        "emulated GPU, compute capability 9.0, NVRTC 0.0, level warpgroup"
    );
    assert_eq!(name(&cuda, &spec(DType::Bf16, 72)), "bf16 128 warpgroup");
    // strides that are no multiples of 16 bytes; 32-bit products; unnormalized outputs
    assert_eq!(name(&cuda, &spec(DType::Bf16, 71)), "bf16 128");
    assert_eq!(name(&cuda, &spec(DType::F32, 72)), "f32 128");
    assert_eq!(name(&cuda, &Spec { normalize: false, ..spec(DType::F16, 72) }), "f16 128");
    // a score epilogue at 256 dims
    let capped = |dim| Spec { soft_cap: Some(2.0), ..spec(DType::Bf16, dim) };
    assert_eq!(name(&cuda, &spec(DType::Bf16, 136)), "bf16 256 warpgroup");
    assert_eq!(name(&cuda, &capped(136)), "bf16 256");
    assert_eq!(name(&cuda, &capped(128)), "bf16 128 warpgroup epilogue");
    assert_eq!(cuda.capabilities(&capped(128)).unwrap().kv_tile, 128);
    // of the forward and backward kernels' KV tiles, the larger
    let tile = |cuda: &Cuda, spec: &Spec| cuda.capabilities(spec).unwrap().kv_tile;
    let dims = [(DType::Bf16, 72, 176), (DType::F16, 256, 80), (DType::F32, 72, 64)];
    for (dtype, head_dim, want) in dims {
        assert_eq!(tile(&cuda, &spec(dtype, head_dim)), want, "{dtype} {head_dim}");
    }
    assert_eq!(tile(&cuda, &Spec::new(Dims::new(1, 8, 2, 64), DType::F16)), 128);
    assert_eq!(tile(&cuda, &Spec::new(Dims::new(1, 8, 2, 32), DType::F32)), 32);
    // the default of this GPU and compiler; refused by other architectures
    let hopper_symbols = emulator::hopper_compiler_symbols();
    let hopper_compiler = Compiler::with_symbols(hopper_symbols, None).unwrap();
    let by_default = Cuda::on(cuda.stream().clone(), hopper_compiler);
    assert_eq!(by_default.level(), Level::Warpgroup);
    let older = emulated().unwrap();
    assert_eq!(older.clone().at_level(Level::Plain).unwrap().level(), Level::Plain);
    let text = "cuda level warpgroup is not supported by emulated GPU (compute capability 8.0)";
    assert_eq!(older.at_level(Level::Warpgroup).unwrap_err().to_string(), text);
    // a compiler that supports 8.0 only compiles PTX for 9.0
    let portable = Cuda::on(Stream::new(cuda.stream().device()).unwrap(), compiler().unwrap());
    assert_eq!(
        (portable.level(), name(&portable, &spec(DType::Bf16, 72)).as_str()),
        (Level::Matrix, "bf16 128")
    );
    assert!(portable.at_level(Level::Warpgroup).is_err());
}

#[test]
fn layouts_that_tma_does_not_support_are_refused() {
    let cuda = hopper(None).unwrap();
    let map = |address, row, rows| {
        TensorMap::new(cuda.stream().device(), address, [24, 100, 2, 1], [row, 48, 9600], rows)
    };
    map(4096, 96, 128).unwrap();
    for (address, row, rows) in
        [(4104, 96, 128), (4096, 90, 128), (4096, 1 << 40, 128), (4096, 96, 0), (4096, 96, 257)]
    {
        let error = map(address, row, rows).unwrap_err();
        assert!(
            matches!(&error, Error::InvalidArgument { argument, .. } if argument == "tensor map"),
            "{error}"
        );
    }
}

/// A case of two tiles of queries, and of more tiles of keys than stages, of which the last one
/// ends within a word of the tile mask.
fn several_tiles(dim: usize, masks: Masks) -> Case {
    let value_dim = dim / 2 + 8;
    let dims = Dims { kv_len: 390, kv_heads: 1, value_dim, ..Dims::new(1, 203, 2, dim) };
    Case::new(format!("dim {dim}"), Spec::new(dims, DType::F64), masks, &mut Draw::new(dim as u64))
}

#[test]
fn every_dim_holds_on_warpgroups() {
    let causal = Masks { causal: true, ..Masks::default() };
    let window = Masks { window: Some([Some(150), Some(40)]), ..Masks::default() };
    for (dim, dtype, masks) in [
        (64, DType::Bf16, causal.clone()),
        (64, DType::F16, Masks::default()),
        (128, DType::F16, window),
        (256, DType::Bf16, causal),
        (256, DType::Bf16, Masks::default()),
    ] {
        verdict(&on_warpgroups(None), &several_tiles(dim, masks).in_dtype(dtype)).unwrap();
    }
}

fn warpgroups() -> impl Subject {
    OnMultiplesOfEight(on_warpgroups(None))
}

verdicts! {
    random_cases_hold_on_warpgroups: suite::random_cases(&warpgroups(), 200..260);
    a_sample_of_the_matrix_holds_on_warpgroups: suite::matrix(&warpgroups(), Scale::OneIn(123));
    awkward_sizes_hold_on_warpgroups: suite::sizes(&warpgroups(), Scale::OneIn(2));
}

#[test]
fn the_numeric_rules_hold_on_warpgroups() {
    // bf16 has the kernels of f16, and fewer numbers beyond its range
    let setting = Setting::new(2, Layout::Zigzag);
    suite::numeric_rules_on(&warpgroups(), DType::F16, &setting).unwrap();
}

#[test]
fn a_visible_nan_does_not_depend_on_the_ranks_on_warpgroups() {
    let settings = [Setting::ALONE, Setting::new(2, Layout::Contiguous)];
    suite::nonfinite_on(&warpgroups(), Poison::NanAndInfinities, DType::Bf16, &settings).unwrap();
}

/// Scores of up to 2·10¹¹, where an ulp of the score exceeds the range of 2ˣ: a key has the weight
/// 1 / n if it is one of n largest, else 0. The largest are in the first tile, the last, all, or
/// in different blocks.
#[test]
fn huge_scores_have_the_weights_of_the_definition() {
    let dims = Dims { q_len: 5, kv_len: 300, ..Dims::new(1, 5, 1, 16) };
    for (name, scale, size, largest, ranks) in [
        ("in the first tile", 0.7, 256.0, &[3, 40][..], 1),
        ("in the last tile", 0.7, 16384.0, &[290], 1),
        ("in all tiles", 0.3, 16384.0, &[7, 150, 299], 1),
        ("in two blocks", 50.0, 16384.0, &[7, 299], 2),
    ] {
        let spec = Spec { scale, ..Spec::new(dims, DType::F64) };
        let mut case = Case::new(name, spec, Masks::default(), &mut Draw::new(4));
        case.q.fill(size);
        // the other keys' scores are less by a 128th
        case.k.fill(size * (1.0 - 1.0 / 128.0));
        for &key in largest {
            case.k.slice_mut(s![0, key, .., ..]).fill(size);
        }
        let case = case.in_dtype(DType::Bf16);
        let setting = Setting::new(ranks, Layout::Contiguous);
        let out = suite::run(&on_warpgroups(None), &case, &setting).unwrap().out;
        for ((_, i, _, x), &got) in out.indexed_iter() {
            let sum: f64 = largest.iter().map(|&key| case.v[[0, key, 0, x]]).sum();
            let want = sum / largest.len() as f64;
            assert!((got - want).abs() < 0.02, "{name}: out[{i}, {x}]: got {got}, want {want}");
        }
    }
}

/// Blocks that `forward_warpgroup` and `forward_matrix` launch for `queries` queries of `heads`
/// heads, with a mask per head or without one.
fn blocks_of(queries: usize, heads: usize, per_head: bool) -> Result<[u64; 2], String> {
    let dims = Dims { q_len: queries, kv_len: 20, kv_heads: 1, ..Dims::new(1, 20, heads, 8) };
    let spec = Spec::new(dims, DType::F64);
    let mut case = Case::new("few", spec, Masks::default(), &mut Draw::new(6));
    if per_head {
        let mask = DenseMask::from_fn([1, heads, queries, 20], |[_, h, i, j]| (i + j + h) % 3 > 0);
        case.batch = Batch { attention_mask: Some(mask), ..Batch::default() };
    }
    let kernels = ["forward_warpgroup", "forward_matrix"];
    blocks(&case.in_dtype(DType::Bf16), &Setting::ALONE, kernels, |ordinal| {
        hopper_on(ordinal, None, Cuda::MIN_WARPGROUP_ROWS)
    })
}

#[test]
fn few_queries_run_on_mma_sync() {
    // less than a tile; a tile of one head, of eight packed heads, of two
    assert_eq!(blocks_of(127, 1, false), Ok([0, 1]));
    assert_eq!(blocks_of(128, 1, false), Ok([1, 0]));
    assert_eq!(blocks_of(16, 8, false), Ok([1, 0]));
    assert_eq!(blocks_of(64, 2, false), Ok([1, 0]));
    assert_eq!(blocks_of(63, 2, false), Ok([0, 1]));
    // heads with masks of their own are not packed
    assert_eq!(blocks_of(64, 2, true), Ok([0, 2]));
}

/// Compares a case whose non-finite values in late partial tiles, in reused stages, are visible to
/// some queries only.
fn non_finite_verdict(
    subject: &dyn Subject,
    name: &str,
    change: impl FnOnce(&mut Spec),
) -> Result<(), String> {
    let dims = Dims { kv_len: 390, ..Dims::new(1, 90, 1, 16) };
    let masks = Masks { window: Some([None, Some(300)]), ..Masks::default() };
    let mut spec = Spec::new(dims, DType::F64);
    change(&mut spec);
    let mut case = Case::new(name, spec, masks, &mut Draw::new(9)).in_dtype(DType::Bf16);
    // rows from 60 on attend to key 360, in the third tile; rows from 85 on to key 385, in the
    // fourth
    case.v[[0, 360, 0, 3]] = f64::NAN;
    case.v[[0, 385, 0, 7]] = f64::INFINITY;
    let out = suite::run(subject, &case, &Setting::ALONE)?.out;
    let want = case.truth().map_err(|error| error.to_string())?.forward.out;
    for (index, (got, want)) in out.iter().zip(&want).enumerate() {
        if !(got == want || (got - want).abs() < 0.05 || (got.is_nan() && want.is_nan())) {
            return Err(format!("{name}: out[{index}]: got {got}, want {want}"));
        }
    }
    assert!(
        out[[0, 59, 0, 3]].is_finite()
            && out[[0, 60, 0, 3]].is_nan()
            && out[[0, 84, 0, 7]].is_finite()
    );
    assert!(!out[[0, 85, 0, 7]].is_finite());
    Ok(())
}

/// Non-finite values affect only the queries that attend to them: also if the next tile's scores
/// need an epilogue or its probabilities dropout, while the product of the tile before is in
/// flight.
#[test]
fn masked_non_finite_values_change_nothing_in_a_later_tile() {
    type Change = fn(&mut Spec);
    let changes: [(&str, Change); 4] = [
        ("plain", |_| ()),
        ("soft cap", |spec| spec.soft_cap = Some(3.0)),
        ("dropout", |spec| spec.dropout = Some(Dropout { probability: 0.3, seed: 5 })),
        ("rounded scores", |spec| spec.logits_dtype = DType::Bf16),
    ];
    for (name, change) in changes {
        non_finite_verdict(&on_warpgroups(None), name, change).unwrap();
    }
}

/// Blocks of the kernels without and with an epilogue.
fn kernels_of(change: impl FnOnce(&mut Spec)) -> Result<[u64; 2], String> {
    let mut spec = Spec::new(Dims::new(1, 20, 1, 8), DType::F64);
    change(&mut spec);
    let case = Case::new("epilogue", spec, Masks::default(), &mut Draw::new(6));
    let kernels = ["forward_warpgroup", "forward_warpgroup_epilogue"];
    let open = |ordinal| hopper_on(ordinal, None, 0);
    blocks(&case.in_dtype(DType::Bf16), &Setting::ALONE, kernels, open)
}

#[test]
fn only_scores_with_an_epilogue_run_in_its_kernel() {
    assert_eq!(kernels_of(|_| ()), Ok([1, 0]));
    assert_eq!(kernels_of(|spec| spec.scale = 0.3), Ok([1, 0]));
    assert_eq!(kernels_of(|spec| spec.scale = -0.3), Ok([0, 1]));
    assert_eq!(kernels_of(|spec| spec.soft_cap = Some(2.0)), Ok([0, 1]));
    assert_eq!(kernels_of(|spec| spec.logits_dtype = DType::Bf16), Ok([0, 1]));
    let dropout = Some(Dropout { probability: 0.3, seed: 5 });
    assert_eq!(kernels_of(|spec| spec.dropout = dropout), Ok([0, 1]));
}

/// Head and value dim of two panels.
pub(crate) const TWO_PANELS: [usize; 2] = [72, 80];

/// A case with many keys, so that stages are reused, and `queries` queries; or with `few` of both,
/// so that one more visible key changes the result.
pub(crate) fn case([head_dim, value_dim]: [usize; 2], queries: usize, few: bool) -> Case {
    let (q_len, kv_len) = if few { (70, 70) } else { (queries, 390) };
    let dims = Dims { batch: 1, q_len, kv_len, q_heads: 1, kv_heads: 1, head_dim, value_dim };
    // some tiles are full, the last one partial
    let masks =
        Masks { causal: few, window: (!few).then_some([None, Some(300)]), ..Masks::default() };
    Case::new("stages", Spec::new(dims, DType::F64), masks, &mut Draw::new(5)).in_dtype(DType::F16)
}

pub(crate) fn verdict(subject: &dyn Subject, case: &Case) -> Result<(), String> {
    suite::answer(subject, case, &Setting::ALONE).map(drop)
}
