//! GQA packing: every per-head feature is correct, the output is bitwise that of unpacked heads,
//! and fewer blocks are launched.

use std::{sync::Arc, time::Duration};

use annulus_conformance::{Answer, Case, Draw, Judge, Masks, Setting, Subject};
use annulus_core::{Alibi, Alignment, Batch, DType, DenseMask, Dims, Dropout, SinkShape, Spec};
use annulus_cuda_emulator as emulator;
use ndarray::{Array2, Array4, Axis};

use crate::{
    common::staged,
    support::{emulated_on, next_device, plain},
};

/// Dims with few queries, as in decoding.
pub(crate) fn dims(q_len: usize, q_heads: usize, kv_heads: usize) -> Dims {
    Dims { batch: 2, q_len, kv_len: 97, q_heads, kv_heads, head_dim: 24, value_dim: 40 }
}

/// A case in which every head has its own bias, slope, sinks and dropout, with masked pairs in many
/// tiles.
pub(crate) fn full(dims: Dims, dtype: DType) -> Case {
    let Dims { batch, q_len, kv_len, q_heads, .. } = dims;
    let draw = &mut Draw::new(q_len as u64);
    let masks = Masks {
        causal: true,
        window: Some([Some(80), None]),
        first_visible: 2,
        ..Masks::default()
    };
    let mut case =
        Case::new(format!("packed {q_len} of {q_heads}"), Spec::new(dims, DType::F64), masks, draw);
    case.spec.alignment = Alignment::BottomRight;
    case.spec.bias = Some([1, q_heads, q_len, kv_len]);
    case.spec.bias_function = Some(Arc::new(Alibi::published(q_heads)));
    case.spec.sinks = Some(SinkShape { per_head: true, count: 2 });
    case.spec.dropout = Some(Dropout { probability: 0.3, seed: 77 });
    case.spec.soft_cap = Some(5.0);
    case.dlse = Some(draw.tensor((batch, q_heads, q_len)));
    case.draw_tensors(draw);
    // a bias of −∞ masks the pair, for one head only
    case.bias.iter_mut().flatten().step_by(17).for_each(|bias| *bias = f64::NEG_INFINITY);
    case.in_dtype(dtype)
}

fn answer(subject: &dyn Subject, case: &Case) -> Answer {
    subject
        .run(case, &Setting::ALONE, 1)
        .unwrap_or_else(|error| panic!("{}: {error}", case.name))
        .remove(0)
}

fn verdict(subject: &dyn Subject, case: &Case) -> Result<(), String> {
    Judge::new(case)
        .map_err(|error| error.to_string())?
        .check(&answer(subject, case))
        .map_err(|wrong| format!("{}: {wrong}", case.name))
}

#[test]
fn per_head_features_hold_with_gqa_packing() {
    // one full tile, two tiles, left-over rows (3 · 21 = 63), two heads of 32 queries, one KV head
    for (dims, dtype) in [
        (dims(1, 4, 1), DType::Bf16),
        (dims(33, 8, 2), DType::F16),
        (dims(40, 6, 2), DType::Bf16),
        (dims(32, 4, 1), DType::F16),
        (dims(5, 7, 1), DType::Bf16),
    ] {
        verdict(&plain(), &full(dims, dtype)).unwrap();
    }
}

#[test]
fn wide_heads_and_unaligned_rows_hold_with_gqa_packing() {
    for (head_dim, value_dim, dtype) in
        [(256, 72, DType::Bf16), (129, 33, DType::F16), (100, 128, DType::Bf16)]
    {
        verdict(&plain(), &full(Dims { head_dim, value_dim, batch: 1, ..dims(9, 4, 2) }, dtype))
            .unwrap();
    }
}

#[test]
fn a_nan_in_a_packed_tile_reaches_only_rows_that_attend_to_it() {
    let mut case = full(dims(7, 4, 2), DType::Bf16);
    (case.spec.dropout, case.spec.bias_function) = (None, None);
    // the last key is visible to the last query only
    case.v[[0, 96, 0, 3]] = f64::NAN;
    case.q[[1, 2, 1, 0]] = f64::NAN;
    let got = answer(&plain(), &case);
    for ((b, i, h, x), value) in got.out.indexed_iter() {
        let hidden =
            case.bias.as_ref().is_some_and(|bias| bias[[0, h, i, 96]] == f64::NEG_INFINITY);
        let seen = (b, i, x) == (0, 6, 3) && h < 2 && !hidden || (b, i, h) == (1, 2, 1);
        assert_eq!(value.is_nan(), seen, "out[{b}, {i}, {h}, {x}] = {value}");
    }
}

#[test]
fn packing_changes_no_bit() {
    let case = full(dims(33, 8, 2), DType::Bf16);
    let shared = answer(&plain(), &case);
    // each query head gets its own copy of keys and values
    let mut apart = case.clone();
    apart.spec.dims.kv_heads = 8;
    let repeated = |tensor: &Array4<f64>| tensor.select(Axis(2), &[0, 0, 0, 0, 1, 1, 1, 1]);
    (apart.k, apart.v) = (repeated(&case.k), repeated(&case.v));
    let apart = answer(&plain(), &apart);
    assert!(shared.out == apart.out && shared.lse == apart.lse && shared.dq == apart.dq);
}

/// Returns the number of thread blocks of the forward kernel for a case.
fn blocks(case: &Case) -> Result<u64, String> {
    let ordinal = next_device();
    let before = emulator::blocks(ordinal, "forward_matrix");
    let subject = staged("one emulated gpu", Duration::ZERO, move || emulated_on(ordinal));
    verdict(&subject, case)?;
    Ok(emulator::blocks(ordinal, "forward_matrix") - before)
}

#[test]
fn packed_heads_launch_fewer_blocks() {
    let plain = |dims: Dims| {
        Case::new("blocks", Spec::new(dims, DType::F64), Masks::default(), &mut Draw::new(3))
            .in_dtype(DType::Bf16)
    };
    // batch rows × tiles × groups of packed heads
    assert_eq!(blocks(&plain(dims(5, 8, 2))), Ok(2 * 2));
    assert_eq!(blocks(&plain(dims(80, 6, 2))), Ok(2 * 2 * 2));
    // no group; no tile saved
    assert_eq!(blocks(&plain(dims(20, 8, 8))), Ok(2 * 8));
    assert_eq!(blocks(&plain(dims(200, 4, 1))), Ok(2 * 2 * 4));
    // a per-head mask needs lists of tiles per head
    let mut by_head = plain(dims(20, 8, 2));
    let mask = DenseMask::from_fn([1, 8, 20, 97], |[_, h, i, j]| (i + j) % (h + 2) == 0);
    by_head.batch = Batch { attention_mask: Some(mask), ..Batch::default() };
    assert_eq!(blocks(&by_head), Ok(2 * 8));
    // a mask shared by all heads has one list
    let mut ids = plain(dims(5, 8, 2));
    ids.batch.q_segment_ids = Some(Array2::from_shape_fn((2, 5), |(b, i)| ((b + i) % 2) as i32));
    ids.batch.kv_segment_ids = Some(Array2::from_shape_fn((2, 97), |(_, j)| (j % 2) as i32));
    assert_eq!(blocks(&ids), Ok(2 * 2));
}
