//! Lists compared with the class and the pairs of every tile, and their lengths for long sequences.

use std::sync::Arc;

use proptest::prelude::*;

use super::*;
use crate::{
    DenseMask, ListedKeys, Rows,
    mask::{Causal, Everything, Mask, Predicate, SharedMask, Window, and},
    visibility::tests::{BATCH, HEADS, lists, problems, rows_at, visibility},
};

/// Expands a list to one (tile of the other side, bitmask) per tile. Checks that the list is in
/// order and that its runs are maximal.
fn expanded(
    list: &[TileRun],
    bitmasks: BitmaskPolicy,
) -> std::result::Result<Vec<(usize, u32)>, TestCaseError> {
    let mut tiles = Vec::new();
    for run in list {
        prop_assert!(
            run.count == 1
                || run.count > 1
                    && run.bitmask == TileRun::FULL
                    && bitmasks != BitmaskPolicy::Always
        );
        tiles.extend((run.first..run.first + run.count).map(|tile| (tile as usize, run.bitmask)));
    }
    prop_assert!(tiles.windows(2).all(|pair| pair[0].0 < pair[1].0), "{list:?}");
    let continues = |pair: &[TileRun]| {
        pair.iter().all(|run| run.bitmask == TileRun::FULL)
            && pair[0].first + pair[0].count == pair[1].first
    };
    prop_assert!(!list.windows(2).any(continues), "{list:?}");
    Ok(tiles)
}

/// Compares one bitmask with the pairs of its tile. Bits beyond the last query or key must be 0.
fn check_bitmask(
    visibility: &Visibility<'_>,
    tiling: &Tiling,
    tile: &QueryTile,
    keys: Range<usize>,
    bits: &[u64],
) -> std::result::Result<(), TestCaseError> {
    let words = tiling.words();
    for row in 0..tiling.tile[0] {
        for key in 0..64 * words {
            let q = tile.rows.start + row;
            let k = keys.start + key;
            let exists = tile.rows.contains(&q) && keys.contains(&k);
            let pair = exists && visibility.pair(tile.batch, tile.head, q, k);
            prop_assert_eq!(bits[row * words + key / 64] >> (key % 64) & 1 != 0, pair);
        }
    }
    Ok(())
}

/// Compares all lists and bitmasks with the class and the pairs of every tile.
fn checked(visibility: &Visibility<'_>, tiling: &Tiling) -> std::result::Result<(), TestCaseError> {
    let mut block_sparse = BlockSparseMask::default();
    let mut by_keys = CsrTiles::default();
    // no trace of an earlier pass remains
    let other = Tiling {
        batches: 0..1,
        heads: 0..1,
        queries: 0..visibility.queries.len(),
        tile: [3, 70],
        ..tiling.clone()
    };
    block_sparse.refill(visibility, &other).unwrap();
    block_sparse.by_keys(&mut by_keys).unwrap();
    block_sparse.refill(visibility, tiling).unwrap();
    block_sparse.by_keys(&mut by_keys).unwrap();
    let [query_tiles, key_tiles] = tiling.tiles();
    let [tall, wide] = tiling.tile;
    prop_assert_eq!(block_sparse.by_queries().starts().len(), tiling.planes() * query_tiles + 1);
    prop_assert_eq!(by_keys.starts().len(), tiling.planes() * key_tiles + 1);
    let mut tile = QueryTile::default();
    let mut bits = TileBits::default();
    let mut bitmasks = 0;
    for plane in 0..tiling.planes() {
        let batch = tiling.batches.start + plane / tiling.heads.len();
        let head = tiling.heads.start + plane % tiling.heads.len();
        let mut transposed = vec![Vec::new(); key_tiles];
        for query_tile in 0..query_tiles {
            let rows = tiling.rows_of(query_tile);
            visibility.query_tile(batch, head, rows.clone(), &mut tile);
            let mut want = Vec::new();
            for (key_tile, transposed) in transposed.iter_mut().enumerate() {
                let keys = tiling.keys_of(key_tile);
                let class = visibility.classify(&tile, keys.clone(), &mut bits);
                let is_whole = (rows.len(), keys.len()) == (tall, wide);
                let bitmask = match (class, tiling.bitmasks) {
                    (TileClass::Empty, _) => continue,
                    (TileClass::Full, BitmaskPolicy::Partial) => TileRun::FULL,
                    (TileClass::Full, BitmaskPolicy::PartialOrTail) if is_whole => TileRun::FULL,
                    _ => bitmasks,
                };
                if bitmask == bitmasks {
                    let size = tall * tiling.words();
                    let bits = &block_sparse.bits()[bitmasks as usize * size..][..size];
                    check_bitmask(visibility, tiling, &tile, keys, bits)?;
                    bitmasks += 1;
                }
                want.push((key_tile, bitmask));
                transposed.push((query_tile, bitmask));
            }
            prop_assert_eq!(
                expanded(
                    block_sparse.by_queries().list(plane * query_tiles + query_tile),
                    tiling.bitmasks
                )?,
                want
            );
        }
        for (key_tile, want) in transposed.into_iter().enumerate() {
            prop_assert_eq!(
                expanded(by_keys.list(plane * key_tiles + key_tile), tiling.bitmasks)?,
                want
            );
        }
    }
    prop_assert_eq!(block_sparse.bits().len(), bitmasks as usize * tall * tiling.words());
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn lists_match_the_class_of_every_tile(
        (mask, (queries, keys), dense) in problems(),
        // small tiles are often full next to empty ones
        height in prop_oneof![Just(32usize), 1usize..70, 1usize..5],
        width in prop_oneof![Just(32usize), Just(64), Just(128), 1usize..70, 1usize..5],
        bitmasks in prop_oneof![
            Just(BitmaskPolicy::Partial),
            Just(BitmaskPolicy::PartialOrTail),
            Just(BitmaskPolicy::Always)
        ],
        part in prop::option::of((0usize..100, 0usize..100, 0usize..BATCH, 0usize..HEADS)),
        listed in prop::option::of(any::<u64>()),
    ) {
        let lists = listed.map(|seed| lists(&queries, &keys, seed));
        let visibility = Visibility {
            mask: &*mask,
            attention_mask: dense.as_ref(),
            key_lists: lists.as_ref().map(|lists| ListedKeys::new(lists, HEADS)),
            queries: &queries,
            keys: &keys,
        };
        // all rows, heads and batch rows, or some
        let (first_query, first_key, first_batch, first_head) = part.unwrap_or_default();
        let rows = |first: usize, len: usize| {
            first.min(len)..if part.is_some() { len.min(first + 90) } else { len }
        };
        let tiling = Tiling {
            batches: first_batch..BATCH,
            heads: first_head..HEADS,
            queries: rows(first_query, queries.len()),
            keys: rows(first_key, keys.len()),
            tile: [height, width],
            bitmasks,
        };
        checked(&visibility, &tiling)?;
    }
}

/// Returns tiles of `size` rows with ascending positions, each from one of `firsts` on.
fn blocks(size: i64, firsts: &[i64]) -> Rows {
    rows_at(firsts.iter().flat_map(|&first| first..first + size), [])
}

proptest! {
    #[test]
    fn lists_match_any_pattern_of_full_partial_and_empty_tiles(
        queries in Just((0..14).map(|tile| 4 * tile).collect::<Vec<i64>>()).prop_shuffle(),
        keys in Just((0..17).map(|tile| 4 * tile).collect::<Vec<i64>>()).prop_shuffle(),
        seed in any::<u64>(),
        width in 1u64..6,
        kind in 0..3,
        wide in 1usize..4,
    ) {
        let hash = move |i: i64, j: i64| {
            (seed ^ (i as u64 * 31 + j as u64 + 1)).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 61
        };
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
        let (queries, keys) = (blocks(4, &queries), blocks(4, &keys));
        let visibility = visibility(&*mask, &queries, &keys);
        checked(&visibility, &plane(&visibility, [4, 4 * wide]))?;
    }
}

/// Returns the tiling of all rows in one plane, with bitmasks for partial tiles only.
fn plane(visibility: &Visibility<'_>, tile: [usize; 2]) -> Tiling {
    Tiling {
        batches: 0..1,
        heads: 0..1,
        queries: 0..visibility.queries.len(),
        keys: 0..visibility.keys.len(),
        tile,
        bitmasks: BitmaskPolicy::Partial,
    }
}

/// Returns the numbers of runs by queries, runs by keys and bitmasks of `rows` × `rows` in tiles
/// of 64.
fn counts(mask: &dyn Mask, rows: &Rows) -> [usize; 3] {
    let visibility = visibility(mask, rows, rows);
    let mut block_sparse = BlockSparseMask::default();
    let mut by_keys = CsrTiles::default();
    block_sparse.refill(&visibility, &plane(&visibility, [64, 64])).unwrap();
    block_sparse.by_keys(&mut by_keys).unwrap();
    [block_sparse.by_queries().runs().len(), by_keys.runs().len(), block_sparse.bits().len() / 64]
}

#[test]
fn lists_of_a_million_rows_have_linear_length() {
    let rows = Rows::counting(1 << 20, 0).unwrap();
    let tiles = 1 << 14;
    assert_eq!(counts(&Everything, &rows), [tiles, tiles, 0]);
    assert_eq!(counts(&Causal::default(), &rows), [2 * tiles - 1, 2 * tiles - 1, tiles]);
    // a window of 62.5 tiles: at most two partial tiles at its start, full tiles, one at its end
    let window = and(Arc::new(Causal::default()), Arc::new(Window::new(Some(4000), None)));
    let [by_queries, by_keys, bitmasks] = counts(&*window, &rows);
    assert!(
        by_queries.max(by_keys) <= 4 * tiles && bitmasks <= 3 * tiles,
        "{by_queries} {by_keys} {bitmasks}"
    );
}

#[test]
fn lists_of_packed_documents_have_linear_length() {
    // lengths that are not multiples of a tile, from three rows to a quarter of all
    let len = 1 << 18;
    let lengths = [30, 70_001, 500, 3, 4097].into_iter().cycle();
    let ids =
        (0i64..).zip(lengths).flat_map(|(id, count)| std::iter::repeat_n(id, count)).take(len);
    let rows = rows_at(0..len as i64, ids);
    let tiles = len / 64;
    for mask in [&Everything as &dyn Mask, &Causal::default()] {
        let [by_queries, by_keys, bitmasks] = counts(mask, &rows);
        // all tiles of a query or key tile in which a document ends are partial
        assert!(
            by_queries.max(by_keys) <= 8 * tiles && bitmasks <= 4 * tiles,
            "{by_queries} {by_keys} {bitmasks}"
        );
    }
}

#[test]
fn an_empty_tile_ends_a_run() {
    let (queries, keys) = (blocks(64, &[500, 0, 600]), blocks(64, &[0, 64, 1000, 128]));
    let causal = Causal::default();
    let visibility = visibility(&causal, &queries, &keys);
    let mut block_sparse = BlockSparseMask::default();
    let mut by_keys = CsrTiles::default();
    block_sparse.refill(&visibility, &plane(&visibility, [64, 64])).unwrap();
    block_sparse.by_keys(&mut by_keys).unwrap();
    let full = |first, count| TileRun { first, count, bitmask: TileRun::FULL };
    let partial = TileRun { first: 0, count: 1, bitmask: 0 };
    assert_eq!(
        [0, 1, 2].map(|list| block_sparse.by_queries().list(list)),
        [&[full(0, 2), full(3, 1)][..], &[partial], &[full(0, 2), full(3, 1)]]
    );
    let without_partial = [full(0, 1), full(2, 1)];
    let with_partial = [full(0, 1), TileRun { first: 1, ..partial }, full(2, 1)];
    assert_eq!(
        [0, 1, 2, 3].map(|list| by_keys.list(list)),
        [&with_partial[..], &without_partial, &[], &without_partial]
    );
}

#[test]
fn the_tree_returns_few_ranges_for_many_tiles() {
    let rows = Rows::counting(1 << 20, 0).unwrap();
    let causal = Causal::default();
    let visibility = visibility(&causal, &rows, &rows);
    let mut tree = TileTree::default();
    let mut tile = QueryTile::default();
    tree.refill(&visibility, 0, 0..rows.len(), 64);
    visibility.query_tile(0, 0, 640_000..640_064, &mut tile);
    let ranges: Vec<_> = tree.ranges(&visibility, &tile).collect();
    // 10 000 full tiles in a few ranges, then the tile of the diagonal
    assert!(ranges.len() <= 7 * 5 + 1, "{ranges:?}");
    let full = ranges.iter().filter(|range| range.is_full);
    assert_eq!(full.map(|range| range.tiles.len()).sum::<usize>(), 10_000);
    assert_eq!(ranges.last(), Some(&TileRange { tiles: 10_000..10_001, is_full: false }));
    // with a dense mask, every tile is returned by itself
    let all = DenseMask::from_fn([1, 1, 1, 1], |_| true);
    let visibility = Visibility { attention_mask: Some(&all), ..visibility };
    assert_eq!(tree.ranges(&visibility, &tile).count(), 10_001);
}

#[test]
fn indices_beyond_32_bits_are_an_error() {
    assert_eq!(checked_index(u32::MAX as usize - 1), Ok(u32::MAX - 1));
    let error = checked_index(u32::MAX as usize).unwrap_err();
    assert!(
        matches!(&error, Error::Unsupported { what, .. } if what.contains("4294967295")),
        "{error}"
    );
}
