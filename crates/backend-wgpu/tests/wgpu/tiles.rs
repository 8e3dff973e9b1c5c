//! Tiles of 64 queries of forward, which kernels with matrices have: the bits of those of 32, and a
//! sample of the suite. By default small launches have 32.
//!
//! Register tiles: the suite with those that are not the adapter's default, and equal bits of all.

use std::sync::Arc;

use annulus::{Dims, Layout, Spec};
use annulus_conformance::{Answer, Case, Draw, Masks, Setting, suite, wgpu::WgpuRing};
use annulus_core::{Alibi, BackwardMode, DType, Dropout};
use annulus_wgpu::{Gpu, Level, Options, QueryTileSize, RegisterTile};
use ndarray::s;

use crate::{F16, F32, adapter, answer, decode, gpu_of, gpu_with, open, run};

/// Opens level `matrix` with this tile; `None` if the adapter does not have the level, which
/// `the_matrix_level_holds_if_the_adapter_has_it` reports.
fn gpu_with_tile(tile: QueryTileSize) -> Option<Gpu> {
    let has_level = adapter()?.levels.contains(&Level::Matrix);
    let gpu = has_level.then(|| gpu_of(Level::Matrix, None, Some(tile))).flatten()?;
    assert_eq!(gpu.query_tile(), tile);
    Some(gpu)
}

/// The last tile of 64 queries has 22; a half of each causal tile attends to fewer keys.
const DIMS: Dims = Dims { kv_heads: 2, value_dim: 92, ..Dims::new(1, 150, 4, 100) };

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

#[test]
fn the_matrix_level_gives_the_same_bits_with_tiles_of_64_queries() {
    let [Some(of_32), Some(of_64)] = QueryTileSize::ALL.map(gpu_with_tile) else { return };
    for (case, setting) in cases() {
        let want = answer(&of_32, &case, &setting);
        let same = run(&of_64, &case, &setting).same_bits(&want);
        same.unwrap_or_else(|wrong| panic!("{}: {wrong}", case.name));
    }
}

#[test]
fn the_matrix_level_holds_with_tiles_of_64_queries() {
    let Some(gpu) = gpu_with_tile(QueryTileSize::Of64) else { return };
    let ring = WgpuRing::new(gpu).only(F16);
    // bits that are those of tiles of 32 need no more:
    // `the_matrix_level_holds_if_the_adapter_has_it`
    suite::random_cases(&ring, 300..308).unwrap();
    suite::numeric_rules_on(&ring, DType::F16, &Setting::new(3, Layout::Contiguous)).unwrap();
}

#[test]
fn the_matrix_level_has_the_query_tile_that_is_forced() {
    let Some(gpu) = gpu_with_tile(QueryTileSize::Of64) else { return };
    // other handles to a device keep it
    assert_eq!(gpu.at(Level::Matrix).map(|gpu| gpu.query_tile()), Ok(QueryTileSize::Of64));
    let options = Options { level: Some(Level::Matrix), ..Options::default() };
    let by_default = super::open(&options).expect("the adapter").query_tile();
    let software = adapter().expect("the adapter").software;
    let wanted = QueryTileSize::forced().unwrap();
    assert!(!software || by_default == wanted.unwrap_or(QueryTileSize::Of32));
}

/// Few cases: all tiles give the same bits, and `scripts/wgpu-test` runs more with the other tile
/// that is the default of some adapters.
#[test]
fn the_other_register_tiles_hold() {
    let Some(adapter) = adapter() else { return };
    let others = RegisterTile::ALL.into_iter().filter(|&tile| tile != adapter.register_tile);
    for tile in others {
        let Some(gpu) = gpu_with(Level::Plain, Some(tile)) else { return };
        let ring = WgpuRing::new(gpu).only(F32);
        suite::random_cases(&ring, 0..8).unwrap();
        let setting = Setting::new(3, Layout::Contiguous);
        suite::numeric_rules_on(&ring, DType::F32, &setting).unwrap();
    }
}

#[test]
fn the_register_tile_is_that_of_the_adapter_unless_another_is_forced() {
    let Some(adapter) = adapter() else { return };
    let default_tile = RegisterTile::forced().unwrap().unwrap_or(adapter.register_tile);
    let Some(gpu) = open(&Options::default()) else { return };
    assert_eq!(gpu.register_tile(), default_tile);
    for tile in RegisterTile::ALL {
        let Some(gpu) = gpu_with(Level::Plain, Some(tile)) else { return };
        // other handles to a device keep it
        assert_eq!(gpu.at(Level::Plain).map(|gpu| gpu.register_tile()), Ok(tile));
    }
    let refused = Options { register_tile: Some(RegisterTile::OneRow), ..Options::default() };
    let refused = Gpu::open(&refused).expect_err("a tile of single kernels");
    assert_eq!(refused.to_string(), "register_tile: got 1x4, want 4x4 or 2x4");
}

fn causal_case(name: &str, dtype: DType, dims: Dims, change: impl FnOnce(&mut Spec)) -> Case {
    case(name, dims, Masks { causal: true, ..Masks::default() }, change).in_dtype(dtype)
}

/// Cases of every kernel, with dims that are multiples of 4 or not. Few, because lavapipe compiles
/// each kernel for seconds.
fn cases_of_register_tiles() -> Vec<(Case, Setting)> {
    let dims = Dims { kv_len: 75, kv_heads: 2, value_dim: 28, ..Dims::new(1, 70, 4, 36) };
    let odd = Dims { head_dim: 33, value_dim: 67, ..dims };
    let large = Dims { q_len: 40, kv_len: 40, head_dim: 200, value_dim: 132, ..dims };
    let dropout = Some(Dropout { probability: 0.3, seed: 7 });
    let all_epilogues = |spec: &mut Spec| {
        spec.bias = Some([1, 4, 70, 75]);
        spec.soft_cap = Some(2.0);
        spec.dropout = dropout;
    };
    let alone = [
        causal_case("f16", DType::F16, Dims { head_dim: 64, value_dim: 64, ..dims }, |_| {}),
        causal_case("dropout", DType::F32, odd, |spec| spec.dropout = dropout),
        causal_case("bias of keys", DType::F32, dims, |spec| spec.bias = Some([1, 4, 1, 75])),
        causal_case("all epilogues", DType::F32, dims, all_epilogues),
        causal_case("dims over 128", DType::F32, large, |_| {}),
    ];
    let ring =
        causal_case("two passes", DType::F32, dims, |spec| spec.backward = BackwardMode::TwoPass);
    // three packed heads, bias and soft cap
    let decoded = decode::cases().into_iter().skip(2).take(1).map(|case| case.in_dtype(DType::F32));
    let of_three_ranks = (ring, Setting::new(3, Layout::Contiguous));
    let alone = alone.into_iter().chain(decoded).map(|case| (case, Setting::ALONE));
    alone.chain([of_three_ranks]).collect()
}

#[test]
fn all_register_tiles_give_the_same_bits() {
    let cases = cases_of_register_tiles();
    let answers = |tile| -> Option<Vec<Answer>> {
        let gpu = gpu_with(Level::Plain, Some(tile))?;
        Some(cases.iter().map(|(case, setting)| run(&gpu, case, setting)).collect())
    };
    let [Some(four), Some(two)] = RegisterTile::ALL.map(answers) else { return };
    for (((case, _), four), two) in cases.iter().zip(&four).zip(&two) {
        two.same_bits(four).unwrap_or_else(|wrong| panic!("{}: {wrong}", case.name));
    }
}
