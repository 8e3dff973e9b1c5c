//! GQA packing: every per-head feature is correct, the output is bitwise that of unpacked heads,
//! and fewer blocks are launched.
//!
//! Tile scheduler of the forward pass on warpgroups: tiles are computed once whatever the number of
//! blocks, and packed heads keep their bits.

use std::time::Duration;

use annulus_conformance::{Answer, Case, Draw, Judge, Masks, Setting, Subject, suite};
use annulus_core::{Alignment, Batch, DType, DenseMask, Dims, Spec};
use annulus_cuda_emulator as emulator;
use ndarray::{Array2, Axis};

use crate::{
    common::staged,
    mistakes::Planted,
    support::{blocks, emulated_on, every_feature, hopper_on, next_device, plain},
};

/// Dims with few queries, as in decoding.
fn dims(q_len: usize, q_heads: usize, kv_heads: usize) -> Dims {
    Dims { batch: 2, q_len, kv_len: 97, q_heads, kv_heads, head_dim: 24, value_dim: 40 }
}

/// A case in which every head has its own bias, slope, sinks and dropout, with masked pairs in many
/// tiles.
fn full(dims: Dims, dtype: DType) -> Case {
    let window = Some([Some(80), None]);
    let masks = Masks { causal: true, window, first_visible: 2, ..Masks::default() };
    every_feature(dims, masks, dtype)
}

fn holds(case: &Case) -> Answer {
    suite::answer(&plain(), case, &Setting::ALONE).expect("a right answer")
}

/// Gives each query head of a case its own copy of keys and values.
fn apart(case: &Case) -> Case {
    let Dims { q_heads, kv_heads, .. } = case.spec.dims;
    let mut apart = case.clone();
    apart.spec.dims.kv_heads = q_heads;
    let heads: Vec<usize> = (0..q_heads).map(|head| head * kv_heads / q_heads).collect();
    [&mut apart.k, &mut apart.v].into_iter().for_each(|x| *x = x.select(Axis(2), &heads));
    apart
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
        holds(&full(dims, dtype));
    }
}

#[test]
fn wide_heads_and_unaligned_rows_hold_with_gqa_packing() {
    for (head_dim, value_dim, dtype) in
        [(256, 72, DType::Bf16), (129, 33, DType::F16), (100, 128, DType::Bf16)]
    {
        holds(&full(Dims { head_dim, value_dim, batch: 1, ..dims(9, 4, 2) }, dtype));
    }
}

#[test]
fn a_nan_in_a_packed_tile_reaches_only_rows_that_attend_to_it() {
    let mut case = full(dims(7, 4, 2), DType::Bf16);
    (case.spec.dropout, case.spec.bias_function) = (None, None);
    // the last key is visible to the last query only
    case.v[[0, 96, 0, 3]] = f64::NAN;
    case.q[[1, 2, 1, 0]] = f64::NAN;
    let got = suite::run(&plain(), &case, &Setting::ALONE).unwrap();
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
    let [shared, apart] = [&case, &apart(&case)].map(holds);
    assert!(shared.out == apart.out && shared.lse == apart.lse && shared.dq == apart.dq);
}

#[test]
fn packed_heads_launch_fewer_blocks() {
    let plain = |dims: Dims| {
        Case::new("blocks", Spec::new(dims, DType::F64), Masks::default(), &mut Draw::new(3))
            .in_dtype(DType::Bf16)
    };
    let blocks = |case: &Case| {
        blocks(case, &Setting::ALONE, ["forward_matrix"], emulated_on).map(|[count]| count)
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

/// Two passes of one plan on warpgroups, perhaps with a planted mistake, in launches of at most
/// `most` blocks. Returns the answers if they are right, and the blocks of the forward kernel.
pub(crate) fn passes(
    case: &Case,
    planted: Option<Planted>,
    most: usize,
) -> Result<(Vec<Answer>, u64), String> {
    let ordinal = next_device();
    let subject = staged("one emulated gpu", Duration::ZERO, move || {
        Ok(hopper_on(ordinal, planted, 0)?.with_forward_blocks(most))
    });
    let answers = subject.run(case, &Setting::ALONE, 2).map_err(|error| error.to_string())?;
    let judge = Judge::new(case).map_err(|error| error.to_string())?;
    answers.iter().try_for_each(|answer| judge.check(answer))?;
    Ok((answers, emulator::blocks(ordinal, "forward_warpgroup")))
}

fn blocks_of(case: &Case, most: usize) -> Result<u64, String> {
    passes(case, None, most).map(|(_, launched)| launched)
}

fn case(name: &str, dims: Dims, masks: Masks, change: impl FnOnce(&mut Spec)) -> Case {
    let mut spec = Spec::new(dims, DType::F64);
    change(&mut spec);
    Case::new(name, spec, masks, &mut Draw::new(11)).in_dtype(DType::Bf16)
}

/// Tiles of 192 queries with 2, 3 and 4 tiles of keys, for each of two heads that share none.
pub(crate) fn stairs() -> Case {
    let dims = Dims::new(1, 450, 2, 16);
    case("stairs", dims, Masks { causal: true, ..Masks::default() }, |_| ())
}

/// Full tiles only.
pub(crate) fn full_tiles() -> Case {
    let dims = Dims { q_len: 250, ..Dims::new(1, 300, 1, 16) };
    case("full tiles", dims, Masks::default(), |_| ())
}

/// Queries of which the first four tiles attend to nothing, and the last to one tile of keys.
pub(crate) fn mostly_empty() -> Case {
    let dims = Dims { q_len: 900, kv_len: 60, ..Dims::new(1, 60, 1, 16) };
    let masks = Masks { causal: true, ..Masks::default() };
    case("empty tiles", dims, masks, |spec| spec.alignment = Alignment::BottomRight)
}

/// 40 queries of four heads of one KV head: packed, they fill 160 of the 192 rows of a tile.
fn packed(dtype: DType) -> Case {
    let dims = Dims { batch: 2, q_len: 40, kv_len: 150, q_heads: 4, kv_heads: 1, ..stairs_dims() };
    let masks = Masks { causal: true, first_visible: 2, ..Masks::default() };
    let mut spec = Spec::new(dims, DType::F64);
    spec.alignment = Alignment::BottomRight;
    Case::new("packed heads", spec, masks, &mut Draw::new(12)).in_dtype(dtype)
}

const fn stairs_dims() -> Dims {
    Dims { batch: 1, q_len: 300, kv_len: 300, q_heads: 2, kv_heads: 2, head_dim: 24, value_dim: 40 }
}

#[test]
fn every_tile_is_computed_once_by_any_number_of_blocks() {
    for (case, tiles) in [(stairs(), 6), (mostly_empty(), 5)] {
        let (want, launched) = passes(&case, None, usize::MAX).unwrap();
        assert_eq!(launched, 2 * tiles, "{}", case.name);
        for most in [1, 2, 4] {
            let (got, launched) = passes(&case, None, most).unwrap();
            assert_eq!(launched, 2 * most as u64);
            got.iter().for_each(|answer| answer.same_bits(&want[0]).unwrap());
        }
    }
}

#[test]
fn packed_heads_hold_on_warpgroups() {
    for (dtype, most, tiles) in [(DType::Bf16, usize::MAX, 2), (DType::F16, 1, 1)] {
        assert_eq!(blocks_of(&packed(dtype), most), Ok(2 * tiles));
    }
    // groups of three leave two rows of a tile over
    let dims = Dims { q_len: 45, kv_len: 70, q_heads: 3, kv_heads: 1, ..stairs_dims() };
    let masks = Masks { causal: true, ..Masks::default() };
    blocks_of(&case("three heads", dims, masks, |_| ()), 2).unwrap();
}

#[test]
fn score_options_are_those_of_each_packed_head() {
    let dims = Dims { q_len: 20, kv_len: 140, q_heads: 8, kv_heads: 2, ..stairs_dims() };
    let masks = Masks { causal: true, window: Some([Some(90), None]), ..Masks::default() };
    blocks_of(&every_feature(dims, masks, DType::Bf16), 1).unwrap();
}

#[test]
fn packing_changes_no_bit_on_warpgroups() {
    let case = packed(DType::Bf16);
    let [(want, _), (got, _)] = [&case, &apart(&case)].map(|case| passes(case, None, 2).unwrap());
    assert!(got[0].out == want[0].out && got[0].lse == want[0].lse && got[0].dq == want[0].dq);
}
