//! Lists held against the class and the pairs of every single tile, and counted where they must be short.

use std::sync::Arc;

use proptest::prelude::*;

use super::*;
use crate::{
    DenseMask, Rows,
    mask::{Causal, Everything, Mask, Predicate, SharedMask, Window, and, tests::any_mask},
    visibility::tests::{BATCH, HEADS, dense, rows},
};

/// A list as (tile of the other side, set of bits), one tile after another; it must be in order, and its runs as long as can be.
fn expanded(
    list: &[TileRun],
    bitmasks: BitmaskPolicy,
) -> std::result::Result<Vec<(usize, u32)>, TestCaseError> {
    let mut tiles = Vec::new();
    for run in list {
        prop_assert!(
            run.count == 1
                || run.count > 1
                    && run.set == TileRun::EVERYTHING
                    && bitmasks != BitmaskPolicy::Always
        );
        tiles.extend((run.first..run.first + run.count).map(|tile| (tile as usize, run.set)));
    }
    prop_assert!(tiles.windows(2).all(|pair| pair[0].0 < pair[1].0), "{list:?}");
    let goes_on = |pair: &[TileRun]| {
        pair.iter().all(|run| run.set == TileRun::EVERYTHING)
            && pair[0].first + pair[0].count == pair[1].first
    };
    prop_assert!(!list.windows(2).any(goes_on), "{list:?}");
    Ok(tiles)
}

fn checked(visibility: &Visibility<'_>, tiling: &Tiling) -> std::result::Result<(), TestCaseError> {
    let (mut seen, mut by_keys) = (BlockSparseMask::default(), CsrTiles::default());
    // what an earlier filling left does not show
    let other = Tiling {
        batches: 0..1,
        heads: 0..1,
        queries: 0..visibility.queries.len(),
        tile: [3, 70],
        ..tiling.clone()
    };
    seen.refill(visibility, &other).unwrap();
    seen.by_keys(&mut by_keys).unwrap();
    seen.refill(visibility, tiling).unwrap();
    seen.by_keys(&mut by_keys).unwrap();
    let ([query_tiles, key_tiles], [tall, wide], words) =
        (tiling.tiles(), tiling.tile, tiling.words());
    prop_assert_eq!(seen.by_queries().starts().len(), tiling.planes() * query_tiles + 1);
    prop_assert_eq!(by_keys.starts().len(), tiling.planes() * key_tiles + 1);
    let (mut tile, mut bits, mut sets) = (QueryTile::default(), TileBits::default(), 0);
    for plane in 0..tiling.planes() {
        let (batch, head) = (
            tiling.batches.start + plane / tiling.heads.len(),
            tiling.heads.start + plane % tiling.heads.len(),
        );
        let mut turned = vec![Vec::new(); key_tiles];
        for query_tile in 0..query_tiles {
            let rows = tiling.rows_of(query_tile);
            visibility.query_tile(batch, head, rows.clone(), &mut tile);
            let mut want = Vec::new();
            for (key_tile, turned) in turned.iter_mut().enumerate() {
                let keys = tiling.keys_of(key_tile);
                let class = visibility.classify(&tile, keys.clone(), &mut bits);
                let is_whole = (rows.len(), keys.len()) == (tall, wide);
                let set = match (class, tiling.bitmasks) {
                    (TileClass::Empty, _) => continue,
                    (TileClass::Full, BitmaskPolicy::Partial) => TileRun::EVERYTHING,
                    (TileClass::Full, BitmaskPolicy::PartialOrTail) if is_whole => {
                        TileRun::EVERYTHING
                    }
                    _ => sets,
                };
                if set == sets {
                    let lines = &seen.bits()[sets as usize * tall * words..][..tall * words];
                    for (row, key) in
                        (0..tall).flat_map(|row| (0..64 * words).map(move |key| (row, key)))
                    {
                        let is_there = row < rows.len() && key < keys.len();
                        let pair = is_there
                            && visibility.pair(batch, head, rows.start + row, keys.start + key);
                        prop_assert_eq!(lines[row * words + key / 64] >> (key % 64) & 1 != 0, pair);
                    }
                    sets += 1;
                }
                want.push((key_tile, set));
                turned.push((query_tile, set));
            }
            prop_assert_eq!(
                expanded(
                    seen.by_queries().list(plane * query_tiles + query_tile),
                    tiling.bitmasks
                )?,
                want
            );
        }
        for (key_tile, want) in turned.into_iter().enumerate() {
            prop_assert_eq!(
                expanded(by_keys.list(plane * key_tiles + key_tile), tiling.bitmasks)?,
                want
            );
        }
    }
    prop_assert_eq!(seen.bits().len(), sets as usize * tall * words);
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn lists_are_what_every_tile_is(
        (mask, (queries, keys), dense) in (any_mask(), any::<bool>(), any::<bool>()).prop_flat_map(|(mask, with_segments, with_dense)| {
            (Just(mask), (rows(700, with_segments), rows(700, with_segments)), Just(with_dense))
        }).prop_flat_map(|(mask, (queries, keys), with_dense)| {
            let dense = if with_dense { dense(queries.len(), 700).boxed() } else { Just(None).boxed() };
            (Just(mask), Just((queries, keys)), dense)
        }),
        // tiles of a few rows are often seen whole beside others that are not seen at all
        tile in (prop_oneof![Just(32usize), 1usize..70, 1usize..5], prop_oneof![Just(32usize), Just(64), Just(128), 1usize..70, 1usize..5]),
        bitmasks in prop_oneof![Just(BitmaskPolicy::Partial), Just(BitmaskPolicy::PartialOrTail), Just(BitmaskPolicy::Always)],
        cut in prop::option::of((0usize..100, 0usize..100, 0usize..BATCH, 0usize..HEADS)),
    ) {
        let visibility = Visibility { mask: &*mask, attention_mask: dense.as_ref(), queries: &queries, keys: &keys };
        // everything, or a part
        let (from, batch, head) = cut.map_or(((0, 0), 0..BATCH, 0..HEADS), |(q, k, b, h)| ((q, k), b..BATCH, h..HEADS));
        let part = |from: usize, len: usize| from.min(len)..if cut.is_some() { len.min(from + 90) } else { len };
        let (queries, keys) = (part(from.0, queries.len()), part(from.1, keys.len()));
        checked(&visibility, &Tiling { batches: batch, heads: head, queries, keys, tile: tile.into(), bitmasks })?;
    }
}

/// Tiles of four rows that begin at these multiples of four.
fn blocks(firsts: &[i64]) -> Rows {
    let mut rows = Rows::default();
    rows.refill(|rows, positions, _| {
        rows.extend(0..4 * firsts.len() as u64);
        positions.extend(firsts.iter().flat_map(|&first| 4 * first..4 * first + 4));
    })
    .unwrap();
    rows
}

proptest! {
    #[test]
    fn any_pattern_of_whole_cut_and_hidden_tiles_is_listed(
        queries in Just((0..14).collect::<Vec<i64>>()).prop_shuffle(), keys in Just((0..17).collect::<Vec<i64>>()).prop_shuffle(),
        seed in any::<u64>(), width in 1u64..6, kind in 0..3, wide in 1usize..4,
    ) {
        let hash = move |i: i64, j: i64| (seed ^ (i as u64 * 31 + j as u64 + 1)).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 61;
        let pattern = move |i: i64, j: i64| match hash(i / 4, j / 4) {
            0..4 => true,
            4 => (i + j) % 3 != 0,
            _ => false,
        };
        let mask: SharedMask = match kind {
            0 => Arc::new(Predicate::of_positions("pattern", pattern)),
            1 => Arc::new(Causal { offset: 3 }),
            _ => Arc::new(Window::new(Some(4 * width + 3), Some(4 * width))),
        };
        let (queries, keys) = (blocks(&queries), blocks(&keys));
        let visibility = Visibility { mask: &*mask, attention_mask: None, queries: &queries, keys: &keys };
        let (rows, columns) = (0..queries.len(), 0..keys.len());
        checked(&visibility, &Tiling { batches: 0..1, heads: 0..1, queries: rows, keys: columns, tile: [4, 4 * wide], bitmasks: BitmaskPolicy::Partial })?;
    }
}

/// Runs by queries, by keys, and sets of bits of one plane of so many rows in tiles of 64.
fn counts(mask: &dyn Mask, rows: &Rows) -> [usize; 3] {
    let visibility = Visibility { mask, attention_mask: None, queries: rows, keys: rows };
    let all = 0..rows.len();
    let tiling = Tiling {
        batches: 0..1,
        heads: 0..1,
        queries: all.clone(),
        keys: all,
        tile: [64, 64],
        bitmasks: BitmaskPolicy::Partial,
    };
    let (mut seen, mut by_keys) = (BlockSparseMask::default(), CsrTiles::default());
    seen.refill(&visibility, &tiling).unwrap();
    seen.by_keys(&mut by_keys).unwrap();
    [seen.by_queries().runs().len(), by_keys.runs().len(), seen.bits().len() / 64]
}

#[test]
fn lists_of_a_million_rows_are_as_long_as_rows() {
    let rows = Rows::counting(1 << 20, 0).unwrap();
    let tiles = 1 << 14;
    assert_eq!(counts(&Everything, &rows), [tiles, tiles, 0]);
    assert_eq!(counts(&Causal::default(), &rows), [2 * tiles - 1, 2 * tiles - 1, tiles]);
    // 4000 back: 62.5 tiles; all but the first tiles have a run between two edges
    let window = and(Arc::new(Causal::default()), Arc::new(Window::new(Some(4000), None)));
    let [by_queries, by_keys, sets] = counts(&*window, &rows);
    assert!(
        by_queries.max(by_keys) <= 4 * tiles && sets <= 3 * tiles,
        "{by_queries} {by_keys} {sets}"
    );
}

#[test]
fn lists_of_packed_documents_are_as_long_as_rows() {
    // documents of lengths that no tile divides, from a few rows to a quarter of all
    let len = 1 << 18;
    let lengths = [30, 70_001, 500, 3, 4097].into_iter().cycle();
    let ids =
        (0i64..).zip(lengths).flat_map(|(id, count)| std::iter::repeat_n(id, count)).take(len);
    let mut rows = Rows::default();
    rows.refill(|rows, positions, segments| {
        segments.extend(ids);
        rows.extend(0..len as u64);
        positions.extend(0..len as i64);
    })
    .unwrap();
    let tiles = len / 64;
    for mask in [&Everything as &dyn Mask, &Causal::default()] {
        let [by_queries, by_keys, sets] = counts(mask, &rows);
        // the tiles of rows and of columns in which a document ends are cut all along
        assert!(
            by_queries.max(by_keys) <= 8 * tiles && sets <= 4 * tiles,
            "{by_queries} {by_keys} {sets}"
        );
    }
}

#[test]
fn a_tile_that_is_not_seen_ends_a_run() {
    let at = |firsts: &[i64]| {
        let mut rows = Rows::default();
        rows.refill(|rows, positions, _| {
            rows.extend(0..64 * firsts.len() as u64);
            positions.extend(firsts.iter().flat_map(|&first| first..first + 64));
        })
        .unwrap();
        rows
    };
    let (queries, keys) = (at(&[500, 0, 600]), at(&[0, 64, 1000, 128]));
    let visibility = Visibility {
        mask: &Causal::default(),
        attention_mask: None,
        queries: &queries,
        keys: &keys,
    };
    let (rows, columns) = (0..queries.len(), 0..keys.len());
    let tiling = Tiling {
        batches: 0..1,
        heads: 0..1,
        queries: rows,
        keys: columns,
        tile: [64, 64],
        bitmasks: BitmaskPolicy::Partial,
    };
    let (mut seen, mut by_keys) = (BlockSparseMask::default(), CsrTiles::default());
    seen.refill(&visibility, &tiling).unwrap();
    seen.by_keys(&mut by_keys).unwrap();
    let whole = |first, count| TileRun { first, count, set: TileRun::EVERYTHING };
    let cut = TileRun { first: 0, count: 1, set: 0 };
    assert_eq!(
        [0, 1, 2].map(|list| seen.by_queries().list(list)),
        [&[whole(0, 2), whole(3, 1)][..], &[cut], &[whole(0, 2), whole(3, 1)]]
    );
    let apart = [whole(0, 1), whole(2, 1)];
    let first = [whole(0, 1), TileRun { first: 1, ..cut }, whole(2, 1)];
    assert_eq!([0, 1, 2, 3].map(|list| by_keys.list(list)), [&first[..], &apart, &[], &apart]);
}

#[test]
fn the_tree_looks_into_few_of_many_tiles() {
    let rows = Rows::counting(1 << 20, 0).unwrap();
    let visibility =
        Visibility { mask: &Causal::default(), attention_mask: None, queries: &rows, keys: &rows };
    let (mut tree, mut tile) = (TileTree::default(), QueryTile::default());
    tree.refill(&visibility, 0, 0..rows.len(), 64);
    visibility.query_tile(0, 0, 640_000..640_064, &mut tile);
    let ranges: Vec<_> = tree.ranges(&visibility, &tile).collect();
    // 10 000 tiles seen whole in a few ranges, then the one with the diagonal
    assert!(ranges.len() <= 7 * 5 + 1, "{ranges:?}");
    assert_eq!(
        ranges.iter().filter(|(_, is_full)| *is_full).map(|(range, _)| range.len()).sum::<usize>(),
        10_000
    );
    assert_eq!(ranges.last(), Some(&(10_000..10_001, false)));
    // a dense mask is asked of every tile
    let all = DenseMask::from_fn([1, 1, 1, 1], |_| true);
    let visibility = Visibility { attention_mask: Some(&all), ..visibility };
    assert_eq!(tree.ranges(&visibility, &tile).count(), 10_001);
}

#[test]
fn more_tiles_than_have_numbers_are_an_error() {
    assert_eq!(narrow(u32::MAX as usize - 1), Ok(u32::MAX - 1));
    let error = narrow(u32::MAX as usize).unwrap_err();
    assert!(
        matches!(&error, Error::Unsupported { what, .. } if what.contains("4294967295")),
        "{error}"
    );
}
