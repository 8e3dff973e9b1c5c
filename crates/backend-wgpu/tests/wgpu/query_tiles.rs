//! Tiles of 64 queries of forward, which kernels with matrices have: the bits of those of 32, a sample
//! of the suite, and planted mistakes. By default small launches have 32.

use std::sync::Arc;

use annulus::{Dims, Layout, Spec};
use annulus_conformance::{
    Answer, Case, Draw, Judge, Masks, Setting, Subject,
    suite::{self, Scale},
    wgpu::WgpuRing,
};
use annulus_core::{Alibi, DType, Dropout};
use annulus_wgpu::{Gpu, KernelEdit, Level, Options, QueryTile};
use ndarray::s;

use super::{F16, adapter, gpu_of};

/// Opens level `matrix` with this tile; `None` if the adapter does not have the level, which
/// `the_matrix_level_holds_if_the_adapter_has_it` reports.
fn gpu_with_tile(tile: QueryTile) -> Option<Gpu> {
    let has_level = adapter()?.levels.contains(&Level::Matrix);
    let gpu = has_level.then(|| gpu_of(Level::Matrix, None, Some(tile))).flatten()?;
    assert_eq!(gpu.query_tile(), tile);
    Some(gpu)
}

/// The last tile of 64 queries has 22; a half of each causal tile attends to fewer keys.
const DIMS: Dims = Dims {
    batch: 1,
    q_len: 150,
    kv_len: 150,
    q_heads: 4,
    kv_heads: 2,
    head_dim: 100,
    value_dim: 92,
};

fn case(name: &str, dims: Dims, masks: Masks, change: impl FnOnce(&mut Spec)) -> Case {
    let mut spec = Spec::new(dims, DType::F64);
    change(&mut spec);
    Case::new(name, spec, masks, &mut Draw::new(17))
}

fn cases() -> Vec<(Case, Setting)> {
    let causal = || Masks { causal: true, ..Masks::default() };
    let all = Masks::default;
    let dropout = Some(Dropout { probability: 0.3, seed: 7 });
    let of_dims = |head_dim, value_dim| Dims { head_dim, value_dim, ..DIMS };
    let bias = Some([1, 4, 150, 150]);
    let mut with_bias = case("bias", DIMS, causal(), |spec| spec.bias = bias);
    let mut with_all = case("bias, soft cap and dropout", of_dims(64, 64), causal(), |spec| {
        spec.bias = bias;
        spec.soft_cap = Some(2.0);
        spec.dropout = dropout;
    });
    // a query, and pairs, that the bias alone masks
    for bias in [&mut with_bias, &mut with_all].into_iter().filter_map(|case| case.bias.as_mut()) {
        bias.slice_mut(s![.., .., 50, ..]).fill(f64::NEG_INFINITY);
        bias.slice_mut(s![.., 0, 60.., 7]).fill(f64::NEG_INFINITY);
    }
    let ring = Setting::new(3, Layout::Zigzag);
    let alone = [
        case("full", of_dims(64, 64), all(), |_| {}),
        // one element after another, and one group of 32
        case("unaligned dims", of_dims(33, 31), causal(), |_| {}),
        case("large dims", of_dims(200, 132), causal(), |_| {}),
        case("window", DIMS, Masks { window: Some([Some(40), Some(0)]), ..causal() }, |_| {}),
        case("soft cap", DIMS, causal(), |spec| spec.soft_cap = Some(2.0)),
        case("dropout", DIMS, causal(), |spec| spec.dropout = dropout),
        case("bias function", DIMS, causal(), |spec| {
            spec.bias_function = Some(Arc::new(Alibi::published(4)));
        }),
        with_bias,
        with_all,
    ];
    let of_ring = (case("three ranks", DIMS, causal(), |_| {}), ring);
    let alone = alone.into_iter().map(|case| (case, Setting::ALONE));
    let cases = alone.chain([of_ring]);
    cases.map(|(case, setting)| (case.in_dtype(DType::F16), setting)).collect()
}

fn answer(gpu: &Gpu, case: &Case, setting: &Setting) -> Answer {
    WgpuRing::new(gpu.clone()).run(case, setting, 1).expect("an answer").remove(0)
}

#[test]
fn the_matrix_level_gives_the_same_bits_with_tiles_of_64_queries() {
    let [Some(of_32), Some(of_64)] = QueryTile::ALL.map(gpu_with_tile) else { return };
    for (case, setting) in cases() {
        let want = answer(&of_32, &case, &setting);
        let judge = Judge::new(&case).expect("a truth");
        judge.check(&want).unwrap_or_else(|wrong| panic!("{}: {wrong}", case.name));
        let same = answer(&of_64, &case, &setting).same_bits(&want);
        same.unwrap_or_else(|wrong| panic!("{}: {wrong}", case.name));
    }
    let of_any_size = of_64.with_smaller_subgroups().expect("the same device");
    assert_eq!(of_any_size.query_tile(), QueryTile::Of64);
    let edit = KernelEdit {
        kernel: "forward",
        from: "let matrices_are_owned = matrix_rounds ==",
        to: "let matrices_are_owned = 64u + matrix_rounds ==",
    };
    let in_memory = of_any_size.edited(edit).expect("the same device");
    let (case, setting) = cases().remove(0);
    let want = answer(&of_32, &case, &setting);
    for (name, gpu) in [("the largest subgroups", &of_any_size), ("smaller ones", &in_memory)] {
        let same = answer(gpu, &case, &setting).same_bits(&want);
        same.unwrap_or_else(|wrong| panic!("the path of {name}: {wrong}"));
    }
}

#[test]
fn the_matrix_level_holds_with_tiles_of_64_queries() {
    let Some(gpu) = gpu_with_tile(QueryTile::Of64) else { return };
    let ring = WgpuRing::new(gpu).only(F16);
    // bits that are those of tiles of 32 need no more:
    // `the_matrix_level_holds_if_the_adapter_has_it`
    suite::random_cases(&ring, 300..308).unwrap();
    suite::matrix(&ring, Scale::OneIn(241)).unwrap();
    suite::sizes(&ring, Scale::OneIn(23)).unwrap();
    suite::numeric_rules_on(&ring, DType::F16, &Setting::new(3, Layout::Contiguous)).unwrap();
}

/// A mistake in what the kernel of 64 queries has alone, wrong for the causal case of these dims.
#[derive(Clone, Copy)]
struct Mistake {
    what: &'static str,
    from: &'static str,
    to: &'static str,
}

const fn mistake(what: &'static str, from: &'static str, to: &'static str) -> Mistake {
    Mistake { what, from, to }
}

/// In kernels of all forms.
const ANY: &[Mistake] = &[
    mistake(
        "the upper half has no tile mask of its own",
        "word = mask_word(mask_index, lane);",
        "word = mask_word(mask_index, lane % 32u);",
    ),
    mistake(
        "the tile masks of all tiles are the first",
        "params.bits + 64u * mask_index + row",
        "params.bits + row",
    ),
    mistake(
        "tiles begin 32 queries apart",
        "let first = 64u * tile_index;",
        "let first = 32u * tile_index;",
    ),
    mistake(
        "the second 32 values are the first",
        "(matrix_column + 0u) + 320u + k]",
        "(matrix_column + 0u) + k]",
    ),
    mistake("the last keys are not loaded", "right_half[stored_at + 432u] = k_3;", ""),
    mistake(
        "each chunk has the first elements of keys",
        "k_step, k_end), c + element",
        "k_step, k_end), element",
    ),
];

/// In kernels that hold queries in matrices.
const HELD: &[Mistake] = &[
    mistake(
        "the last queries are not loaded",
        "left_half[stored_q + 480u] =",
        "left_half[stored_q + 0u] =",
    ),
    mistake(
        "each chunk of a product has the first elements of queries",
        "coopMultiplyAdd(q_0_8,",
        "coopMultiplyAdd(q_0_0,",
    ),
];

/// In kernels that load queries again for each tile of keys.
const RELOADED: &[Mistake] = &[mistake(
    "the last queries are not loaded",
    "own_half[own_at + 1008u] =",
    "own_half[own_at + 0u] =",
)];

/// In kernels that keep queries of up to 64 elements in workgroup memory.
const KEPT: &[Mistake] = &[mistake(
    "the last queries are not loaded",
    "own_half[own_at + ((c >> 6u) << 4u) + 1008u] =",
    "own_half[own_at] =",
)];

/// In kernels that keep queries of 65 to 128 elements there.
const KEPT_CHUNKS: &[Mistake] = &[
    mistake(
        "each chunk of a product has the first elements of queries",
        "(matrix_row + 0u) + ((c >> 6u) << 4u) + k]",
        "(matrix_row + 0u) + k]",
    ),
    mistake(
        "the last queries are not loaded",
        "own_half[own_at + ((c >> 6u) << 4u) + 1904u] =",
        "own_half[own_at + ((c >> 6u) << 4u)] =",
    ),
];

/// Requires that the causal case of these dims is right, and wrong with each of the mistakes.
fn catch(gpu: &Gpu, dims: Dims, dtype: DType, mistakes: &[Mistake]) {
    let causal = Masks { causal: true, ..Masks::default() };
    let case = case("causal", dims, causal, |_| {}).in_dtype(dtype);
    let judge = Judge::new(&case).expect("a truth");
    judge.check(&answer(gpu, &case, &Setting::ALONE)).expect("a right answer");
    for &Mistake { what, from, to } in mistakes {
        let edited = gpu.edited(KernelEdit { kernel: "forward", from, to }).expect("the device");
        let judged = judge.check(&answer(&edited, &case, &Setting::ALONE));
        assert!(judged.is_err(), "{what}: the answer is right");
    }
}

/// Workgroup memory too small for queries of more than 64 elements, in kernels for subgroups of any
/// size, whose matrices hold no queries: they load such queries again for each tile of keys.
const SMALL_MEMORY: u32 = 32 << 10;

/// Workgroup memory with which they keep queries of 128 elements.
const LARGE_MEMORY: u32 = 48 << 10;

fn gpu_with_memory(workgroup_bytes: u32) -> Option<Gpu> {
    let has_matrices = adapter()?.levels.contains(&Level::Matrix);
    let options = Options {
        level: Some(Level::Matrix),
        query_tile: Some(QueryTile::Of64),
        workgroup_bytes: Some(workgroup_bytes),
        ..Options::default()
    };
    has_matrices.then(|| super::open(&options)).flatten()
}

#[test]
fn the_matrix_level_catches_planted_mistakes_in_tiles_of_64_queries() {
    let Some(gpu) = gpu_with_memory(SMALL_MEMORY) else { return };
    catch(&gpu, DIMS, DType::F16, &[ANY, HELD].concat());
    let of_any_size = gpu.with_smaller_subgroups().expect("the same device");
    catch(&of_any_size, DIMS, DType::F16, RELOADED);
    let dims = Dims { head_dim: 60, value_dim: 52, ..DIMS };
    catch(&of_any_size, dims, DType::F16, KEPT);
}

/// lavapipe gives a kernel the workgroup memory that it declares, beyond the limit of 32 KiB that
/// it reports, which validation layers report as an error.
#[test]
#[ignore = "exceeds the workgroup memory that lavapipe reports: scripts/wgpu-test runs it"]
fn the_matrix_level_keeps_queries_of_128_elements() {
    let Some(gpu) = gpu_with_memory(LARGE_MEMORY) else { return };
    let gpu = gpu.with_smaller_subgroups().expect("the same device");
    catch(&gpu, DIMS, DType::F16, KEPT_CHUNKS);
    let Some(of_32) = gpu_with_tile(QueryTile::Of32) else { return };
    let dropout = Some(Dropout { probability: 0.3, seed: 7 });
    for dims in [DIMS, Dims { head_dim: 128, value_dim: 128, ..DIMS }] {
        let causal = Masks { causal: true, ..Masks::default() };
        let case = case("kept", dims, causal, |spec| spec.dropout = dropout).in_dtype(DType::F16);
        let want = answer(&of_32, &case, &Setting::ALONE);
        let same = answer(&gpu, &case, &Setting::ALONE).same_bits(&want);
        same.unwrap_or_else(|wrong| panic!("{dims:?}: {wrong}"));
    }
}

#[test]
fn the_matrix_level_has_the_query_tile_that_is_forced() {
    let Some(gpu) = gpu_with_tile(QueryTile::Of64) else { return };
    // other handles to a device keep it
    assert_eq!(gpu.at(Level::Matrix).map(|gpu| gpu.query_tile()), Ok(QueryTile::Of64));
    let options = Options { level: Some(Level::Matrix), ..Options::default() };
    let by_default = super::open(&options).expect("the adapter").query_tile();
    let software = adapter().expect("the adapter").software;
    let wanted = QueryTile::forced().unwrap();
    assert!(!software || by_default == wanted.unwrap_or(QueryTile::Of32));
}
