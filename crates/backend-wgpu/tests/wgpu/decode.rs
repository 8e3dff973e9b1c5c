//! Few queries and many keys: packed query heads, and ranges of keys that are merged.

use annulus::{Dims, Layout, SinkShape, Spec};
use annulus_conformance::{Case, Draw, Judge, Masks, Setting, Subject, wgpu::WgpuRing};
use annulus_core::{DType, Dropout};
use annulus_wgpu::{Level, Options};

use super::{adapter, gpu, gpu_at, open};

/// The last queries of a causal sequence.
fn at_the_end(dims: &Dims) -> Masks {
    let before = (dims.kv_len - dims.q_len) as u64;
    Masks { window: Some([None, Some(before)]), ..Masks::default() }
}

fn case(name: &str, dims: Dims, change: impl FnOnce(&mut Spec, &mut Masks)) -> Case {
    let mut spec = Spec::new(dims, DType::F64);
    let mut masks = at_the_end(&dims);
    change(&mut spec, &mut masks);
    Case::new(name, spec, masks, &mut Draw::new(dims.q_len as u64))
}

/// Cases whose tiles have several heads, several ranges of at least 256 keys, or both.
pub(super) fn cases() -> Vec<Case> {
    let token = Dims { kv_heads: 1, q_len: 1, kv_len: 1100, ..Dims::new(1, 1, 8, 16) };
    vec![
        case("one token, 8 packed heads", token, |_, _| {}),
        case("no group", Dims { kv_heads: 8, batch: 2, ..token }, |_, _| {}),
        // 10 queries of 3 heads in a tile, of whose rows two are unused; no fours
        case(
            "3 packed heads, bias, soft cap, sinks",
            Dims {
                batch: 2,
                q_len: 13,
                kv_len: 600,
                q_heads: 6,
                kv_heads: 2,
                value_dim: 7,
                ..token
            },
            |spec, _| {
                spec.bias = Some([2, 6, 13, 600]);
                spec.soft_cap = Some(3.0);
                spec.sinks = Some(SinkShape { per_head: true, count: 2 });
            },
        ),
        case(
            "unnormalised",
            Dims { q_len: 2, kv_len: 530, q_heads: 4, kv_heads: 2, ..token },
            |spec, _| spec.normalize = false,
        ),
        case("dropout", Dims { q_len: 3, kv_len: 520, q_heads: 4, ..token }, |spec, _| {
            spec.dropout = Some(Dropout { probability: 0.3, seed: 7 });
        }),
        // queries that attend to keys of some ranges only, and lists of other lengths
        case("a window", Dims { q_len: 40, kv_len: 600, q_heads: 2, ..token }, |_, masks| {
            masks.window = Some([Some(3), Some(500)]);
        }),
    ]
}

/// Requires that the device's answer agrees with the oracle's.
fn holds(ring: &WgpuRing, case: &Case, setting: &Setting) {
    let answer = ring.run(case, setting, 1).expect("an answer").remove(0);
    let judged = Judge::new(case).expect("a truth").check(&answer);
    judged.unwrap_or_else(|wrong| panic!("{}: {wrong}", case.name));
}

#[test]
fn few_queries_and_many_keys_hold() {
    let Some(gpu) = gpu() else { return };
    let ring = WgpuRing::new(gpu);
    for (number, case) in cases().iter().enumerate() {
        holds(&ring, &case.in_dtype(DType::F32), &Setting::ALONE);
        if number == 0 {
            holds(&ring, &case.in_dtype(DType::F32), &Setting::new(2, Layout::Contiguous));
            holds(&ring, &case.in_dtype(DType::Bf16), &Setting::ALONE);
        }
    }
}

#[test]
fn ranges_of_several_chunks_and_submissions_hold() {
    // keys are divided into chunks, which are merged into the state one after the other; a
    // submission has some ranges of a chunk
    let options = Options {
        most_binding_bytes: Some(100 << 10),
        most_part_flops: Some(8_000_000),
        ..Options::default()
    };
    let Some(small) = open(&options) else { return };
    let ring = WgpuRing::new(small);
    for case in &cases()[..2] {
        holds(&ring, &case.in_dtype(DType::F32), &Setting::ALONE);
    }
}

#[test]
fn the_matrix_level_holds_for_few_queries() {
    if !adapter().is_some_and(|adapter| adapter.levels.contains(&Level::Matrix)) {
        return;
    }
    let Some(gpu) = gpu_at(Level::Matrix) else { return };
    let ring = WgpuRing::new(gpu);
    // f32 has no matrices, but reductions by shuffles
    for (case, dtype) in [(0, DType::F16), (2, DType::F16), (0, DType::F32)] {
        holds(&ring, &cases()[case].in_dtype(dtype), &Setting::ALONE);
    }
}
