//! Rows of layouts and their checks. Shards of layouts are compared with the definition, which is
//! evaluated for each row on the whole batch.

use std::sync::Arc;

use ndarray::Array2;
use proptest::prelude::*;

use super::*;
use annulus_core::{RowSet, Rows};

const BATCH: usize = 2;

/// Any combination of the fields of a batch. Both sides have equal lengths if a field is given for
/// one side only.
fn problem() -> impl Strategy<Value = (Dims, Batch)> {
    let sizes = prop::collection::vec((0i64..7, 0i64..7), 0..6);
    // a field is given for: 0 no side, 1 q, 2 k, 3 both
    (sizes, (0i64..5, 0i64..5), 0u8..4, 0u8..4, 0u8..4, any::<u64>()).prop_map(
        |(sizes, spare, packed, with_ids, with_positions, seed)| {
            let one_sided = matches!(packed, 1 | 2) || matches!(with_ids, 1 | 2);
            let ends = |k: bool| -> Vec<i64> {
                let size = |pair: &(i64, i64)| if k && !one_sided { pair.1 } else { pair.0 };
                std::iter::once(0)
                    .chain(sizes.iter().scan(0, |sum, pair| {
                        *sum += size(pair);
                        Some(*sum)
                    }))
                    .collect()
            };
            let len = |k: bool| {
                (ends(k).last().copied().unwrap_or(0)
                    + if k && !one_sided { spare.1 } else { spare.0 }) as usize
            };
            let dims = Dims { q_len: len(false), kv_len: len(true), ..Dims::new(BATCH, 0, 1, 4) };
            let mut state = seed;
            let mut random = |below: u64| {
                state =
                    state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
                ((state >> 33) % below) as i64
            };
            let mut ids = |len| Array2::from_shape_fn((BATCH, len), |_| random(4) as i32 - 1);
            let q_ids = ids(dims.q_len);
            let k_ids = ids(dims.kv_len);
            let mut positions = |len| Array2::from_shape_fn((BATCH, len), |_| random(50) - 25);
            let q_positions = positions(dims.q_len);
            let k_positions = positions(dims.kv_len);
            let batch = Batch {
                q_segment_ids: (with_ids & 1 != 0).then_some(q_ids),
                kv_segment_ids: (with_ids & 2 != 0).then_some(k_ids),
                q_positions: (with_positions & 1 != 0).then_some(q_positions),
                kv_positions: (with_positions & 2 != 0).then_some(k_positions),
                attention_mask: None,
                key_lists: None,
                cum_seqlens_q: (packed & 1 != 0).then(|| ends(false)),
                cum_seqlens_k: (packed & 2 != 0).then(|| ends(true)),
            };
            (dims, batch)
        },
    )
}

/// Any layout, including custom layouts with unordered rows. Sides of equal lengths have equal
/// layouts.
fn layout(dims: Dims) -> impl Strategy<Value = (Layout, usize)> {
    let custom = move |ranks: usize| {
        // rank and sort key of each row
        let rows = prop::collection::vec((0..ranks, any::<u64>()), dims.q_len.max(dims.kv_len));
        rows.prop_map(move |assigned| {
            let shards = |len: usize| -> Vec<Runs> {
                (0..ranks)
                    .map(|rank| {
                        let mut rows: Vec<usize> =
                            (0..len).filter(|&row| assigned[row].0 == rank).collect();
                        rows.sort_by_key(
                            |&row| if rank % 3 == 0 { row as u64 } else { assigned[row].1 },
                        );
                        // descending, as a run of step −1
                        if rank % 3 == 1 {
                            rows.sort_unstable_by(|a, b| b.cmp(a))
                        }
                        rows.into_iter().map(|row| row as i64).collect()
                    })
                    .collect()
            };
            Layout::Custom(Arc::new(CustomLayout {
                q: shards(dims.q_len),
                kv: shards(dims.kv_len),
            }))
        })
    };
    (1usize..7).prop_flat_map(move |ranks| {
        let layout = prop_oneof![
            Just(Layout::Contiguous),
            Just(Layout::Zigzag),
            Just(Layout::Striped),
            custom(ranks)
        ];
        (layout, Just(ranks))
    })
}

/// Computes position and segment id of one row by the table of `docs/semantics.md`.
fn naive(
    dims: &Dims,
    alignment: Alignment,
    side: Side,
    batch: &Batch,
    b: usize,
    row: usize,
) -> (i64, Option<i64>) {
    let (explicit, own_ids, other_ids) = match side {
        Side::Q => (&batch.q_positions, &batch.q_segment_ids, &batch.kv_segment_ids),
        Side::Kv => (&batch.kv_positions, &batch.kv_segment_ids, &batch.q_segment_ids),
    };
    let ids = own_ids.as_ref().or(other_ids.as_ref());
    let q_ends = batch.cum_seqlens_q.as_ref().or(batch.cum_seqlens_k.as_ref());
    let k_ends = batch.cum_seqlens_k.as_ref().or(batch.cum_seqlens_q.as_ref());
    let bottom_right = side == Side::Q && alignment == Alignment::BottomRight;
    let mut position = row as i64;
    let mut sequence = None;
    match (q_ends, k_ends) {
        (Some(q_ends), Some(k_ends)) => {
            let own = match side {
                Side::Q => q_ends,
                Side::Kv => k_ends,
            };
            sequence = (0..own.len() - 1).find(|&s| (own[s]..own[s + 1]).contains(&(row as i64)));
            if let Some(s) = sequence {
                position -= own[s];
                if bottom_right {
                    position += (k_ends[s + 1] - k_ends[s]) - (q_ends[s + 1] - q_ends[s]);
                }
            }
        }
        _ if bottom_right => position += dims.kv_len as i64 - dims.q_len as i64,
        _ => {}
    }
    if let Some(explicit) = explicit {
        position = explicit[[b, row]];
    }
    let packed = q_ends.map(|_| sequence.map_or(-1, |s| s as i64));
    let id = ids.map(|ids| i64::from(ids[[b, row]]));
    let segment = match (packed, id) {
        (None, None) => None,
        (Some(only), None) | (None, Some(only)) => Some(only),
        (Some(packed), Some(id)) if packed < 0 || id < 0 => Some(-1),
        (Some(packed), Some(id)) => Some((packed << 32) + id),
    };
    (position, segment)
}

fn sets(len: u64) -> impl Strategy<Value = RowSet> {
    prop::collection::vec((0..=len, 0u64..6), 0..5).prop_map(move |ranges| {
        ranges.into_iter().map(|(start, count)| start..(start + count).min(len)).collect()
    })
}

proptest! {
    #[test]
    fn shards_match_the_table_of_the_semantics(
        ((dims, batch), (layout, ranks)) in problem()
            .prop_flat_map(|(dims, batch)| (Just((dims, batch)), layout(dims))),
        bottom_right in any::<bool>(), set in sets(40),
    ) {
        let alignment = if bottom_right { Alignment::BottomRight } else { Alignment::TopLeft };
        let mut expanded = Rows::counting(9, 9).unwrap();
        let mut subset = Rows::default();
        for rank in 0..ranks {
            let rows = |side, len| {
                let shard = layout.shard(side, len, rank, ranks);
                shard.iter().map(i64::cast_unsigned).collect::<Vec<_>>()
            };
            let q_rows = rows(Side::Q, dims.q_len);
            let kv_rows = rows(Side::Kv, dims.kv_len);
            let local = batch.select(&q_rows, &kv_rows).unwrap();
            prop_assert_eq!(local.validate(&dims, q_rows.len(), kv_rows.len()), Ok(()));
            prop_assert_eq!(layout.validate_batch(&local, &dims, rank, ranks), Ok(()));
            for (side, rows) in [(Side::Q, &q_rows), (Side::Kv, &kv_rows)] {
                let shard = layout.local_shard(&dims, alignment, side, rank, ranks, &local);
                shard.expand(&RowSet::all(rows.len() as u64), &mut expanded).unwrap();
                prop_assert_eq!(expanded.rows(), &rows[..]);
                let clipped =
                    |range: &std::ops::Range<u64>| range.start..range.end.min(rows.len() as u64);
                let part: RowSet = set.ranges().iter().map(clipped).collect();
                shard.expand(&part, &mut subset).unwrap();
                let want: Vec<u64> = part.iter().map(|index| rows[index as usize]).collect();
                prop_assert_eq!(subset.rows(), want);
                for b in 0..BATCH {
                    let want: Vec<_> = rows
                        .iter()
                        .map(|&row| naive(&dims, alignment, side, &batch, b, row as usize))
                        .collect();
                    let got = |rows: &Rows, index: usize| {
                        (rows.positions(b)[index], rows.segments(b).map(|ids| ids[index]))
                    };
                    for (index, want) in want.iter().enumerate() {
                        let row = rows[index];
                        prop_assert_eq!(
                            got(&expanded, index), *want, "{:?} {:?} row {}", &batch, side, row
                        );
                    }
                    for (index, from) in part.iter().enumerate() {
                        prop_assert_eq!(got(&subset, index), want[from as usize]);
                    }
                }
                // encoding and decoding are inverse
                let bytes = shard.encode();
                prop_assert_eq!(Shard::decode(&bytes), Ok(shard));
            }
        }
    }

    #[test]
    fn bad_bytes_are_an_error_and_never_a_panic(
        (dims, batch) in problem(),
        cut in any::<prop::sample::Index>(),
        at in any::<prop::sample::Index>(),
        byte in any::<u8>(),
        noise in prop::collection::vec(any::<u8>(), 0..40),
    ) {
        let layout = Layout::Zigzag;
        let shard = layout.local_shard(&dims, Alignment::TopLeft, Side::Q, 0, 1, &batch);
        let mut bytes = shard.encode();
        prop_assert!(Shard::decode(&bytes[..cut.index(bytes.len())]).is_err());
        let at = at.index(bytes.len());
        bytes[at] = byte;
        for bytes in [&bytes, &noise] {
            match Shard::decode(bytes) {
                // other bytes may be a valid shard
                Ok(shard) => prop_assert_eq!(Shard::decode(&shard.encode()), Ok(shard)),
                Err(error) => prop_assert_eq!(error.code(), 1),
            }
        }
    }
}

#[test]
fn malformed_bytes_are_refused() {
    let count_all = [0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01];
    let refused = |bytes: &[u8]| match Shard::decode(bytes) {
        Err(Error::InvalidArgument { argument, got, .. }) if argument == "shard" => got,
        other => panic!("{bytes:?} gave {other:?}"),
    };
    assert!(refused(&[]).contains("the end"));
    assert!(refused(&[9]).contains("version"));
    // 2⁶⁴ − 1 runs; 2⁶⁴ − 1 numbers in a run; a number of more than 64 bits; a run that overflows
    // 64 bits; an empty run
    assert!(refused(&[&[1], &count_all[..]].concat()).contains("a count of"));
    assert!(refused(&[&[1, 1, 0, 2], &count_all[..]].concat()).contains("Run"));
    assert!(refused(&[&[1], &[0xff; 12][..]].concat()).contains("64 bits"));
    assert!(refused(&[&[1, 1, 0], &count_all[..], &[3]].concat()).contains("Run"));
    assert!(refused(&[1, 1, 0, 2, 0]).contains("Run"));
    // rows −1, 0; two rows but one position; no positions; trailing bytes
    assert!(refused(&[1, 1, 1, 2, 2, 1, 1, 0, 2, 2, 0]).contains("Run"));
    assert!(refused(&[1, 1, 0, 2, 2, 1, 1, 0, 2, 1, 0]).contains("a list of 1"));
    assert!(refused(&[1, 1, 0, 2, 2, 0, 0]).contains("no positions"));
    assert!(refused(&[1, 0, 1, 0, 0, 7]).contains("1 trailing bytes"));
    assert_eq!(Shard::decode(&[1, 0, 1, 0, 0]).map(|shard| shard.rows.len()), Ok(0));
}

#[test]
fn typical_shards_take_a_few_bytes() {
    let dims = Dims::new(1, 65_536, 1, 64);
    let lens: Vec<i64> = (0..=128).map(|sequence| sequence * 512).collect();
    let packed = Batch { cum_seqlens_q: Some(lens), ..Batch::default() };
    let bytes = |layout: &Layout, batch: &Batch| {
        layout.local_shard(&dims, Alignment::TopLeft, Side::Q, 1, 4, batch).encode().len()
    };
    for layout in [Layout::Contiguous, Layout::Zigzag, Layout::Striped] {
        assert!(bytes(&layout, &Batch::default()) < 40, "{layout:?}");
        // positions and ids of 32 sequences or 128 parts of sequences
        assert!(bytes(&layout, &packed) < 1600, "{layout:?}");
    }
}

const LAYOUTS: [Layout; 3] = [Layout::Contiguous, Layout::Zigzag, Layout::Striped];

fn custom(q: Vec<Runs>, kv: Vec<Runs>) -> Layout {
    Layout::Custom(Arc::new(CustomLayout { q, kv }))
}

fn runs(rows: &[i64]) -> Runs {
    rows.iter().copied().collect()
}

/// Returns the same rows as a custom layout, whose check does not use the layout's formula.
fn as_custom(layout: &Layout, len: usize, ranks: usize) -> Layout {
    let shards = |side| (0..ranks).map(|rank| layout.shard(side, len, rank, ranks)).collect();
    custom(shards(Side::Q), shards(Side::Kv))
}

proptest! {
    #[test]
    fn shards_partition_the_rows_evenly(len in 0usize..200, ranks in 1usize..70) {
        for layout in &LAYOUTS {
            layout.validate(len, len, ranks).unwrap();
            as_custom(layout, len, ranks).validate(len, len, ranks).unwrap();
            let counts: Vec<u64> =
                (0..ranks).map(|rank| layout.shard(Side::Q, len, rank, ranks).len()).collect();
            let least = counts.iter().min().unwrap();
            let most = counts.iter().max().unwrap();
            // chunks differ by at most one row, and a zigzag shard has two chunks
            let chunks = if matches!(layout, Layout::Zigzag) { 2 } else { 1 };
            prop_assert!(most - least <= chunks, "{layout:?} {counts:?}");
            let of_leaves = as_custom(&layout.at_leaves(8), len, ranks);
            of_leaves.validate(len, len, ranks).unwrap();
            of_leaves.validate_leaves(len, len, 8).unwrap();
        }
    }
}

#[test]
fn shards_have_the_documented_rows() {
    let rows = |layout: &Layout, rank| layout.shard(Side::Q, 8, rank, 2).iter().collect::<Vec<_>>();
    assert_eq!(
        (rows(&Layout::Contiguous, 0), rows(&Layout::Contiguous, 1)),
        (vec![0, 1, 2, 3], vec![4, 5, 6, 7])
    );
    assert_eq!(
        (rows(&Layout::Zigzag, 0), rows(&Layout::Zigzag, 1)),
        (vec![0, 1, 6, 7], vec![2, 3, 4, 5])
    );
    assert_eq!(
        (rows(&Layout::Striped, 0), rows(&Layout::Striped, 1)),
        (vec![0, 2, 4, 6], vec![1, 3, 5, 7])
    );
    let custom = custom(vec![runs(&[3, 1]), runs(&[0, 2])], vec![runs(&[]), runs(&[0])]);
    custom.validate(4, 1, 2).unwrap();
    assert_eq!(custom.shard(Side::Q, 4, 0, 2).iter().collect::<Vec<_>>(), [3, 1]);
    assert!(custom.shard(Side::Kv, 1, 0, 2).is_empty());
}

#[test]
fn long_sequences_are_divided_without_overflow() {
    let len = 1usize << 40;
    for layout in &LAYOUTS {
        let total: u64 = (0..48).map(|rank| layout.shard(Side::Q, len, rank, 48).len()).sum();
        assert_eq!(total, len as u64);
    }
}

#[test]
fn errors_state_the_fault_of_a_layout() {
    let message = |layout: &Layout, q_len, kv_len, ranks| {
        layout.validate(q_len, kv_len, ranks).unwrap_err().to_string()
    };
    assert_eq!(message(&Layout::Contiguous, 4, 4, 0), "ranks: got 0, want at least 1");
    let most = "ranks: got 1048577, want at most 1048576";
    assert_eq!(message(&Layout::Zigzag, 4, 4, MOST_RANKS + 1), most);
    let good = runs(&[0, 1]);
    let one = |rows: &[i64]| custom(vec![good.clone()], vec![runs(rows)]);
    one(&[1, 0]).validate(2, 2, 1).unwrap();
    assert_eq!(message(&one(&[0, 1]), 2, 2, 3), "layout: got 1 shards of q, want 3, one per rank");
    for (rows, q_len, kv_len, got) in [
        (&[0, 0][..], 2, 2, "kv row 0 twice, want every kv row of 0..2 once"),
        (&[0, 2], 2, 2, "kv row 2, want every kv row of 0..2 once"),
        (&[-1, 0], 2, 2, "kv row -1, want every kv row of 0..2 once"),
        (&[0], 2, 2, "no rank for kv row 1, want every kv row of 0..2 once"),
        (&[], 3, 0, "no rank for q row 2, want every q row of 0..3 once"),
    ] {
        assert_eq!(message(&one(rows), q_len, kv_len, 1), format!("layout: got {got}"));
    }
    // a run that overflows, and a length for which no machine has memory
    let mut endless = Runs::new();
    endless.push_run(Run { start: 0, step: 1, count: u64::MAX });
    assert_eq!(
        message(&custom(vec![endless], vec![runs(&[])]), 2, 0, 1),
        "layout: got q row 2, want every q row of 0..2 once"
    );
    let vast = custom(vec![runs(&[])], vec![runs(&[])]).validate(usize::MAX, 0, 1);
    assert!(matches!(vast, Err(Error::OutOfMemory { .. })), "{vast:?}");
}
