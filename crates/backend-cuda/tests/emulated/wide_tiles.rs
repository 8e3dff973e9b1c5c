//! Wide tiles of the forward pass on warpgroups: three consumers at 64 dims, tiles of 176 and of 80
//! keys, whose masks do not fill 64-bit words.

use annulus_conformance::{
    Case, Draw, Masks, Subject,
    suite::{self, Scale},
};
use annulus_core::{Backend, DType, Dims, Spec};
use annulus_cuda::Cuda;

use crate::{
    common::multiples::OnMultiplesOfEight,
    persistent::{Launch, packed, verdict as verdict_of_launch},
    support::{hopper, masked_rows_change_no_bit, on_wide_tiles},
    warpgroup::{non_finite_verdict, verdict},
};

#[test]
fn scores_with_an_epilogue_have_the_other_tiles() {
    let spec = |head_dim| Spec::new(Dims::new(1, 8, 2, head_dim), DType::Bf16);
    let wide = hopper(None).unwrap().with_wide_tiles(true);
    let name = |cuda: &Cuda, spec: &Spec| cuda.forward_variant(spec).unwrap().to_string();
    let capped = |dim| Spec { soft_cap: Some(2.0), ..spec(dim) };
    let with_tiles = |spec: &Spec| (name(&wide, spec), wide.capabilities(spec).unwrap().kv_tile);
    assert_eq!(with_tiles(&spec(64)), ("bf16 64 warpgroup wide".into(), 128));
    assert_eq!(with_tiles(&spec(128)), ("bf16 128 warpgroup wide".into(), 176));
    assert_eq!(with_tiles(&spec(256)), ("bf16 256 warpgroup wide".into(), 80));
    assert_eq!(with_tiles(&capped(128)), ("bf16 128 warpgroup".into(), 128));
    assert_eq!(with_tiles(&capped(256)), ("bf16 256".into(), 64));
    let narrow = hopper(None).unwrap().with_wide_tiles(false);
    assert_eq!(
        [64, 128, 256].map(|dim| name(&narrow, &spec(dim))),
        ["bf16 64 warpgroup", "bf16 128 warpgroup", "bf16 256 warpgroup"]
    );
    // the default
    let chosen = hopper(None).unwrap();
    assert_eq!(name(&chosen, &spec(128)), "bf16 128 warpgroup wide");
}

/// A case of two tiles of queries, and of more tiles of keys than stages, of which the last one
/// ends within a word of the tile mask.
fn several_tiles(dim: usize, masks: Masks) -> Case {
    let dims = Dims {
        batch: 1,
        q_len: 203,
        kv_len: 390,
        q_heads: 2,
        kv_heads: 1,
        head_dim: dim,
        value_dim: dim / 2 + 8,
    };
    Case::new(format!("dim {dim}"), Spec::new(dims, DType::F64), masks, &mut Draw::new(dim as u64))
}

#[test]
fn every_dim_holds_on_wide_tiles() {
    let causal = Masks { causal: true, ..Masks::default() };
    let window = Masks { window: Some([Some(150), Some(40)]), ..Masks::default() };
    for dim in [64, 128, 256] {
        for (dtype, masks) in [
            (DType::Bf16, causal.clone()),
            (DType::F16, window.clone()),
            (DType::Bf16, Masks::default()),
        ] {
            verdict(&on_wide_tiles(None), &several_tiles(dim, masks).in_dtype(dtype))
                .unwrap_or_else(|wrong| panic!("{dtype} {dim}: {wrong}"));
        }
    }
}

fn wide_tiles() -> impl Subject {
    OnMultiplesOfEight(on_wide_tiles(None))
}

#[test]
fn random_cases_hold_on_wide_tiles() {
    suite::random_cases(&wide_tiles(), 300..340).unwrap();
}

#[test]
fn a_sample_of_the_matrix_holds_on_wide_tiles() {
    suite::matrix(&wide_tiles(), Scale::OneIn(67)).unwrap();
}

#[test]
fn awkward_sizes_hold_on_wide_tiles() {
    suite::sizes(&wide_tiles(), Scale::OneIn(4)).unwrap();
}

#[test]
fn packed_heads_hold_on_wide_tiles() {
    // 40 queries of four heads fill 160 of the 192 rows of a tile
    assert_eq!(verdict_of_launch(&packed(DType::Bf16), Launch::alone(None, true)), Ok(2));
}

#[test]
fn masked_non_finite_values_change_nothing_on_wide_tiles() {
    non_finite_verdict(&on_wide_tiles(None), "plain", |_| ()).unwrap();
}

#[test]
fn masked_rows_that_are_not_finite_change_no_bit_on_wide_tiles() {
    masked_rows_change_no_bit(&wide_tiles(), DType::F16, [300, 64]).unwrap();
}
