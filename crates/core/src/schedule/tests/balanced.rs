//! Balanced layouts: rows and work of each rank, for packed documents of many distributions.

use std::sync::Arc;

use proptest::prelude::*;

use crate::{Batch, DType, Dims, Error, Layout, Mask, RingShards, Shard, Side, Spec, Work, mask};

fn spec(len: usize, mask: Arc<dyn Mask>) -> Spec {
    Spec { mask, ..Spec::new(Dims::new(1, len, 1, 1), DType::F32) }
}

/// A batch of documents of these lengths.
fn packed(lens: &[i64]) -> Batch {
    let ends = std::iter::once(0).chain(lens.iter().scan(0, |end, len| {
        *end += len;
        Some(*end)
    }));
    Batch { cum_seqlens_q: Some(ends.collect()), ..Batch::default() }
}

/// Work of each rank, counted from the rows of the layout.
fn work(spec: &Spec, batch: &Batch, layout: &Layout, ranks: usize) -> Work {
    let shards = |side| {
        let of_rank = |rank| {
            let rows = |side, len| -> Vec<u64> {
                layout.shard(side, len, rank, ranks).iter().map(i64::cast_unsigned).collect()
            };
            let q_rows = rows(Side::Q, spec.dims.q_len);
            let own = batch.select(&q_rows, &rows(Side::Kv, spec.dims.kv_len)).unwrap();
            Arc::new(Shard::local(&spec.dims, spec.alignment, layout, side, rank, ranks, &own))
        };
        (0..ranks).map(of_rank).collect()
    };
    let shards = RingShards { q: shards(Side::Q), kv: shards(Side::Kv) };
    Work::of(&*spec.mask, spec.dims.q_heads, spec.dims.batch, &shards)
}

/// Returns most over mean of rows.
fn rows_max_over_mean(layout: &Layout, len: usize, ranks: usize) -> f64 {
    let rows = (0..ranks).map(|rank| layout.shard(Side::Q, len, rank, ranks).len());
    rows.max().unwrap() as f64 * ranks as f64 / len as f64
}

/// Lengths of documents that fill `len` rows, each drawn from uniform numbers in 0..1.
fn documents(len: usize, mut draw: impl FnMut(&mut dyn FnMut() -> f64) -> f64) -> Vec<i64> {
    let mut state = 7u64;
    let mut uniform = move || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 11) as f64 / (1u64 << 53) as f64
    };
    let (mut lens, mut rest) = (Vec::new(), len as i64);
    while rest > 0 {
        let next = (draw(&mut uniform) as i64).clamp(1, rest);
        lens.push(next);
        rest -= next;
    }
    lens
}

#[test]
fn documents_of_any_distribution_are_balanced_within_two_percent() {
    const LEN: usize = 1 << 17;
    let normal = |uniform: &mut dyn FnMut() -> f64| {
        (-2.0 * (1.0 - uniform()).ln()).sqrt() * (std::f64::consts::TAU * uniform()).cos()
    };
    let mut one_long = vec![LEN as i64 / 3];
    one_long.extend(documents(LEN - LEN / 3, |uniform| 50.0 + 400.0 * uniform()));
    let distributions = [
        ("log-normal", documents(LEN, |uniform| (6.5 + 1.2 * normal(uniform)).exp())),
        ("Zipf", documents(LEN, |uniform| 64.0 / (1.0 - uniform()).powf(1.0 / 1.2))),
        ("bimodal", documents(LEN, |u| if u() < 0.8 { 100.0 + 300.0 * u() } else { 8192.0 })),
        ("one long", one_long),
        ("one", vec![LEN as i64]),
    ];
    let causal: Arc<dyn Mask> = Arc::new(mask::Causal::default());
    let window = mask::and(Arc::clone(&causal), Arc::new(mask::Window::new(Some(1000), None)));
    for (name, lens) in &distributions {
        for ranks in [8, 16, 64] {
            for (mask, masked) in [("causal", &causal), ("window", &window)] {
                let (spec, batch) = (spec(LEN, Arc::clone(masked)), packed(lens));
                let layout = Layout::balanced(&spec, &batch, ranks).unwrap();
                layout.validate(LEN, LEN, ranks).unwrap();
                let imbalance = work(&spec, &batch, &layout, ranks).max_over_mean();
                let rows = rows_max_over_mean(&layout, LEN, ranks);
                assert!(imbalance <= 1.02, "{name}, {mask}, {ranks} ranks: work {imbalance}");
                assert!(rows <= 1.02, "{name}, {mask}, {ranks} ranks: rows {rows}");
                assert_eq!(layout, Layout::balanced(&spec, &batch, ranks).unwrap());
            }
        }
    }
}

#[test]
fn a_causal_mask_without_documents_gives_the_zigzag_layout() {
    let spec = spec(4096, Arc::new(mask::Causal::default()));
    let layout = Layout::balanced(&spec, &Batch::default(), 8).unwrap();
    let rows = |layout: &Layout, rank| -> Vec<i64> {
        layout.shard(Side::Q, 4096, rank, 8).iter().collect()
    };
    let mut got: Vec<_> = (0..8).map(|rank| rows(&layout, rank)).collect();
    got.sort();
    let want: Vec<_> = (0..8).map(|rank| rows(&Layout::Zigzag, rank)).collect();
    assert_eq!(got, want);
}

#[test]
fn short_documents_stay_on_one_rank() {
    // 16 documents of 512 rows: as many rows and pairs for each of 8 ranks, and nothing is sent
    let batch = packed(&[512; 16]);
    let spec = spec(8192, Arc::new(mask::Causal::default()));
    let layout = Layout::balanced(&spec, &batch, 8).unwrap();
    for rank in 0..8 {
        let rows: Vec<i64> = layout.shard(Side::Kv, 8192, rank, 8).iter().collect();
        assert_eq!(rows, (1024 * rank as i64..1024 * (rank as i64 + 1)).collect::<Vec<_>>());
    }
}

#[test]
fn arguments_without_meaning_are_refused() {
    let spec = spec(10, Arc::new(mask::Everything));
    let error = |batch: &Batch, ranks| Layout::balanced(&spec, batch, ranks).unwrap_err();
    assert_eq!(error(&Batch::default(), 0).to_string(), "ranks: got 0, want at least 1");
    let refused = error(&packed(&[4, -1]), 2);
    assert!(
        matches!(&refused, Error::InvalidArgument { argument, .. } if argument == "cum_seqlens_q"),
        "{refused}"
    );
}

proptest! {
    #[test]
    fn every_row_has_one_rank(
        lens in prop::collection::vec(1i64..300, 0..40),
        keys in prop::option::of(0usize..500),
        ranks in 1usize..20,
    ) {
        let len = lens.iter().sum::<i64>() as usize;
        let mut spec = spec(len, Arc::new(mask::Causal::default()));
        let batch = if keys.is_some() { Batch::default() } else { packed(&lens) };
        spec.dims.kv_len = keys.unwrap_or(len);
        let layout = Layout::balanced(&spec, &batch, ranks).unwrap();
        layout.validate(len, spec.dims.kv_len, ranks).unwrap();
        let counts: Vec<u64> =
            (0..ranks).map(|rank| layout.shard(Side::Q, len, rank, ranks).len()).collect();
        let chunks = (len / 64 / ranks).max(1) as u64;
        let (least, most) = (counts.iter().min().unwrap(), counts.iter().max().unwrap());
        prop_assert!(most - least <= chunks, "{counts:?}");
    }
}
