//! Register tiles: the suite with those that are not the adapter's default, and equal bits of all.

use annulus::{Dims, Layout, Spec};
use annulus_conformance::{
    Answer, Case, Draw, Masks, Setting, Subject,
    suite::{self, Scale},
    wgpu::WgpuRing,
};
use annulus_core::{BackwardMode, DType, Dropout};
use annulus_wgpu::{Level, Options, RegisterTile};

use super::{F32, adapter, decode, gpu_with, open};

/// Fewer cases of one row, the default of no adapter, which also gives the bits of the others.
#[test]
fn the_other_register_tiles_hold_at_every_level() {
    let Some(adapter) = adapter() else { return };
    let others = RegisterTile::ALL.into_iter().filter(|&tile| tile != adapter.register_tile);
    for tile in others {
        let is_default_of_some = tile != RegisterTile::OneRow;
        for &level in adapter.levels.iter().filter(|&&level| level != Level::Matrix) {
            let Some(gpu) = gpu_with(level, Some(tile)) else { return };
            let ring = WgpuRing::new(gpu.clone()).only(F32);
            suite::random_cases(&ring, 0..if is_default_of_some { 24 } else { 8 }).unwrap();
            if level == Level::Plain && is_default_of_some {
                let setting = Setting::new(3, Layout::Contiguous);
                suite::numeric_rules_on(&ring, DType::F32, &setting).unwrap();
                suite::same_bits_over_repeats(&ring, 2).unwrap();
                for dtype in [DType::F16, DType::Bf16] {
                    let ring = WgpuRing::new(gpu.clone()).only(&[dtype]);
                    suite::random_cases(&ring, 100..104).unwrap();
                }
                suite::matrix(&ring, Scale::OneIn(37)).unwrap();
                suite::sizes(&ring, Scale::OneIn(3)).unwrap();
            }
        }
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
}

fn case(name: &str, dtype: DType, dims: Dims, change: impl FnOnce(&mut Spec)) -> Case {
    let mut spec = Spec::new(dims, DType::F64);
    change(&mut spec);
    let causal = Masks { causal: true, ..Masks::default() };
    Case::new(name, spec, causal, &mut Draw::new(5)).in_dtype(dtype)
}

/// Cases of every kernel, with dims that are multiples of 4 or not. Few, because lavapipe compiles
/// each kernel for seconds.
fn cases() -> Vec<(Case, Setting)> {
    let dims = Dims {
        batch: 1,
        q_len: 70,
        kv_len: 75,
        q_heads: 4,
        kv_heads: 2,
        head_dim: 36,
        value_dim: 28,
    };
    let odd = Dims { head_dim: 33, value_dim: 67, ..dims };
    let large = Dims { q_len: 40, kv_len: 40, head_dim: 200, value_dim: 132, ..dims };
    let dropout = Some(Dropout { probability: 0.3, seed: 7 });
    let all_epilogues = |spec: &mut Spec| {
        spec.bias = Some([1, 4, 70, 75]);
        spec.soft_cap = Some(2.0);
        spec.dropout = dropout;
    };
    let alone = [
        case("f16", DType::F16, Dims { head_dim: 64, value_dim: 64, ..dims }, |_| {}),
        case("dropout", DType::F32, odd, |spec| spec.dropout = dropout),
        case("bias of keys", DType::F32, dims, |spec| spec.bias = Some([1, 4, 1, 75])),
        case("all epilogues", DType::F32, dims, all_epilogues),
        case("dims over 128", DType::F32, large, |_| {}),
    ];
    let ring = case("two passes", DType::F32, dims, |spec| spec.backward = BackwardMode::TwoPass);
    // three packed heads, bias and soft cap
    let decoded = decode::cases().into_iter().skip(2).take(1).map(|case| case.in_dtype(DType::F32));
    let of_three_ranks = (ring, Setting::new(3, Layout::Contiguous));
    let alone = alone.into_iter().chain(decoded).map(|case| (case, Setting::ALONE));
    alone.chain([of_three_ranks]).collect()
}

#[test]
fn all_register_tiles_give_the_same_bits() {
    let cases = cases();
    let answers = |tile| -> Option<Vec<Answer>> {
        let ring = WgpuRing::new(gpu_with(Level::Plain, Some(tile))?);
        let run = |(case, setting): &(Case, Setting)| {
            ring.run(case, setting, 1).expect("an answer").remove(0)
        };
        Some(cases.iter().map(run).collect())
    };
    let [Some(four), two, one] = RegisterTile::ALL.map(answers) else { return };
    for (tile, other) in [("2x4", two), ("1x4", one)] {
        let Some(other) = other else { return };
        for (((case, _), four), other) in cases.iter().zip(&four).zip(&other) {
            let same = other.same_bits(four);
            same.unwrap_or_else(|wrong| panic!("{tile}, {}: {wrong}", case.name));
        }
    }
}
