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

const MISTAKES: &[Mistake] = &[
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

#[test]
fn the_matrix_level_catches_planted_mistakes_in_tiles_of_64_queries() {
    let Some(gpu) = gpu_with_tile(QueryTile::Of64) else { return };
    let causal = Masks { causal: true, ..Masks::default() };
    let case = case("causal", DIMS, causal, |_| {}).in_dtype(DType::F16);
    let judge = Judge::new(&case).expect("a truth");
    judge.check(&answer(&gpu, &case, &Setting::ALONE)).expect("a right answer");
    for &Mistake { what, from, to } in MISTAKES {
        let edited = gpu.edited(KernelEdit { kernel: "forward", from, to }).expect("the device");
        let judged = judge.check(&answer(&edited, &case, &Setting::ALONE));
        assert!(judged.is_err(), "{what}: the answer is right");
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
