//! Classes, tile masks and lists of tiles compared with [`Visibility::pair`] of every pair.

use std::sync::Arc;

use proptest::prelude::*;

use super::*;
use crate::{
    Alignment, Batch, Dims, KeyLists, ListedPairs, RowSet, Runs, Shard, Side, TileBoundsTable,
    TransposedPairs,
    mask::{Causal, Dense, Everything, Predicate, SharedMask, Window, and, tests::any_mask},
};

pub(crate) const BATCH: usize = 2;
pub(crate) const HEADS: usize = 2;

/// Returns positions: consecutive, strided, in blocks that restart at 0, repeated or unordered.
fn numbers(len: usize) -> impl Strategy<Value = Vec<i64>> {
    let counting = (-9i64..9, 1i64..5).prop_map(move |(start, step)| {
        (0..len as i64).map(|i| start + step * i).collect::<Vec<_>>()
    });
    let blocks = prop::collection::vec(1usize..90, 1..6).prop_map(move |sizes| {
        sizes.iter().cycle().flat_map(|&size| 0..size as i64).take(len).collect::<Vec<_>>()
    });
    let stairs =
        (1i64..40).prop_map(move |width| (0..len as i64).map(|i| i / width).collect::<Vec<_>>());
    let unordered = prop::collection::vec(-20i64..20, len);
    prop_oneof![4 => counting, 2 => blocks, 1 => stairs, 1 => unordered]
}

/// Returns segment ids that are constant over runs of rows; some rows are padding.
fn segments(len: usize) -> impl Strategy<Value = Vec<i64>> {
    let runs = prop::collection::vec((-1i64..3, 1usize..150), 1..5);
    runs.prop_map(move |runs| {
        let ids: Vec<i64> =
            runs.iter().flat_map(|&(id, count)| std::iter::repeat_n(id, count)).collect();
        ids.into_iter().cycle().take(len).collect()
    })
}

/// Returns up to 200 of `total` rows: consecutive, strided or unordered, with equal or different
/// positions and ids in the two batch rows.
pub(crate) fn rows(total: usize, with_segments: bool) -> impl Strategy<Value = Rows> {
    (1usize..200, 0..3, any::<bool>(), any::<bool>()).prop_flat_map(
        move |(len, order, own_positions, own_segments)| {
            let lists = |own: bool| if own { BATCH } else { 1 };
            let count = if with_segments { lists(own_segments) } else { 0 };
            let shuffled = Just((0..total as u64).collect::<Vec<_>>()).prop_shuffle();
            let positions = prop::collection::vec(numbers(len), lists(own_positions));
            (shuffled, positions, prop::collection::vec(segments(len), count)).prop_map(
                move |(shuffled, positions, segments)| {
                    let mut rows = Rows::counting(700, 3).unwrap();
                    rows.refill(|into_rows, into_positions, into_segments| {
                        match order {
                            0 => into_rows.extend(5..5 + len as u64),
                            1 => into_rows.extend((0..len as u64).map(|row| 3 * row)),
                            _ => into_rows.extend(&shuffled[..len]),
                        }
                        into_positions.extend(positions.concat());
                        into_segments.extend(segments.concat());
                    })
                    .unwrap();
                    rows
                },
            )
        },
    )
}

/// Returns rows that count up from 0, at these positions, with these segment ids.
pub(crate) fn rows_at(
    positions: impl IntoIterator<Item = i64>,
    segments: impl IntoIterator<Item = i64>,
) -> Rows {
    let mut rows = Rows::default();
    rows.refill(|numbers, into_positions, ids| {
        into_positions.extend(positions);
        numbers.extend(0..into_positions.len() as u64);
        ids.extend(segments);
    })
    .unwrap();
    rows
}

/// Visibility without a dense mask.
pub(crate) fn visibility<'a>(
    mask: &'a dyn Mask,
    queries: &'a Rows,
    keys: &'a Rows,
) -> Visibility<'a> {
    Visibility { mask, attention_mask: None, key_lists: None, queries, keys }
}

/// Key lists of these queries with some of these keys, by head.
pub(crate) fn lists(queries: &Rows, keys: &Rows, seed: u64) -> KeyLists {
    let mut sorted: Vec<u32> = keys.rows().iter().map(|&row| row as u32).collect();
    sorted.sort_unstable();
    sorted.dedup();
    let mut offsets = vec![0];
    let mut listed = Vec::new();
    for list in 0..(HEADS * queries.len()) as u64 {
        let is_listed =
            |key: &u32| (list ^ seed).wrapping_mul(2 * u64::from(*key) + 7) >> 5 & 3 != 0;
        listed.extend(sorted.iter().copied().filter(is_listed));
        offsets.push(listed.len() as u64);
    }
    KeyLists::by_group([1, HEADS], offsets, listed).unwrap()
}

pub(crate) fn dense(q: usize, kv: usize) -> impl Strategy<Value = Option<DenseMask>> {
    let shape = (1..=BATCH, 1..=HEADS).prop_map(move |(b, h)| [b, h, q, kv]);
    prop::option::of((shape, any::<u64>(), 0..4u64).prop_map(|(shape, seed, kind)| {
        DenseMask::from_fn(shape, |[b, h, q, k]| match kind {
            0 => true,
            1 => q / 64 != k / 64,
            _ => {
                let pair = b as u64 + 3 * h as u64 + q as u64 * 31 + k as u64;
                pair.wrapping_mul(seed | 1) >> 62 != 0
            }
        })
    }))
}

/// Returns a mask, query rows, key rows and, in some cases, a dense mask of the queries.
pub(crate) fn problems() -> impl Strategy<Value = (SharedMask, (Rows, Rows), Option<DenseMask>)> {
    let sides = (any_mask(), any::<bool>(), any::<bool>()).prop_flat_map(
        |(mask, with_segments, with_dense)| {
            let sides = (rows(700, with_segments), rows(700, with_segments));
            (Just(mask), sides, Just(with_dense))
        },
    );
    sides.prop_flat_map(|(mask, (queries, keys), with_dense)| {
        let dense = if with_dense { dense(queries.len(), 700).boxed() } else { Just(None).boxed() };
        (Just(mask), Just((queries, keys)), dense)
    })
}

/// Computes the class of a tile from its pairs. Compares the pairs with `bits`, if any, and with
/// those of the batch row and head that represent them.
fn enumerated_class(
    visibility: &Visibility<'_>,
    tile: &QueryTile,
    keys: Range<usize>,
    bits: Option<&TileBits>,
) -> std::result::Result<TileClass, TestCaseError> {
    let QueryTile { batch, head, rows, .. } = tile;
    let distinct_batch = if visibility.per_batch() { *batch } else { 0 };
    let distinct_head = if visibility.per_head() { *head } else { 0 };
    let mut visible = 0;
    for (row, q) in rows.clone().enumerate() {
        for (index, k) in keys.clone().enumerate() {
            let pair = visibility.pair(*batch, *head, q, k);
            visible += usize::from(pair);
            prop_assert!(
                bits.is_none_or(|bits| bits.visible(row, index) == pair),
                "{batch} {head} {q} {k}"
            );
            prop_assert_eq!(pair, visibility.pair(distinct_batch, distinct_head, q, k));
        }
    }
    if let Some(bits) = bits {
        prop_assert_eq!(bits.lines().len(), rows.len() * bits.words());
        // no bits beyond the last key
        let set: u32 = bits.lines().iter().map(|word| word.count_ones()).sum();
        prop_assert_eq!(set as usize, visible);
    }
    Ok(match visible {
        0 => TileClass::Empty,
        _ if visible == rows.len() * keys.len() => TileClass::Full,
        _ => TileClass::Partial,
    })
}

/// Compares all tiles with their pairs. Returns the numbers of empty, full and partial tiles.
fn checked(
    visibility: &Visibility<'_>,
    height: usize,
    width: usize,
) -> std::result::Result<[usize; 3], TestCaseError> {
    let mut tile = QueryTile::default();
    let mut bits = TileBits::default();
    let mut bounds = TileBoundsTable::default();
    let mut counts = [0; 3];
    bounds.refill(visibility, BATCH, HEADS, height).unwrap();
    for batch in 0..BATCH {
        for head in 0..HEADS {
            for q0 in (0..visibility.queries.len()).step_by(height) {
                let rows = q0..visibility.queries.len().min(q0 + height);
                bounds.cover(batch, head, rows.clone(), &mut tile);
                let covered: Vec<_> = visibility.key_tiles(&tile, width).collect();
                visibility.query_tile(batch, head, rows.clone(), &mut tile);
                let listed: Vec<_> = visibility.key_tiles(&tile, width).collect();
                for k0 in (0..visibility.keys.len()).step_by(width) {
                    let keys = k0..visibility.keys.len().min(k0 + width);
                    let class = visibility.classify(&tile, keys.clone(), &mut bits);
                    let mask = (class == TileClass::Partial).then_some(&bits);
                    let want = enumerated_class(visibility, &tile, keys.clone(), mask)?;
                    prop_assert_eq!(class, want);
                    counts[want as usize] += 1;
                    if class != TileClass::Empty {
                        prop_assert!(listed.contains(&keys) && covered.contains(&keys));
                        let count =
                            bounds.count_query_tiles(batch, head, &rows, visibility.keys, &keys);
                        prop_assert_eq!(count, 1);
                        prop_assert!(
                            bounds
                                .query_tiles(batch, head, visibility.keys, keys.clone())
                                .any(|tile| tile == rows)
                        );
                    }
                    let all = 0..visibility.queries.len();
                    prop_assert_eq!(
                        bounds.count_query_tiles(batch, head, &all, visibility.keys, &keys),
                        bounds.query_tiles(batch, head, visibility.keys, keys).count()
                    );
                }
                prop_assert!(listed.is_sorted_by_key(|keys| keys.start));
            }
        }
    }
    Ok(counts)
}

/// Compares the listed pairs, by query and by key, with the definition.
fn check_listed_pairs(visibility: &Visibility<'_>) -> Result<(), TestCaseError> {
    let Visibility { queries, keys, .. } = visibility;
    let mut pairs = ListedPairs::default();
    match visibility.key_lists {
        Some(_) => pairs.refill(visibility, BATCH).unwrap(),
        None => pairs.refill_from_intervals(visibility, [BATCH, HEADS]).unwrap(),
    }
    let mut transposed = TransposedPairs::default();
    transposed.refill(&pairs, keys.len()).unwrap();
    let mut tiles = std::collections::BTreeSet::new();
    let mut all = 0;
    for (b, h) in (0..BATCH).flat_map(|b| (0..HEADS).map(move |h| (b, h))) {
        for q in 0..queries.len() {
            let mut got = pairs.all_keys()[pairs.pairs(pairs.list(b, h, q))].to_vec();
            got.sort_unstable();
            let visible = |k: &usize| visibility.pair(b, h, q, *k);
            let want: Vec<u32> = (0..keys.len()).filter(visible).map(|k| k as u32).collect();
            all += want.len() as u64;
            tiles.extend(want.iter().map(|k| (pairs.list(b, h, q) / queries.len(), q / 8, k / 8)));
            prop_assert_eq!(got, want);
        }
        for k in 0..keys.len() {
            let of_key = transposed.pairs(transposed.list(b, h, k));
            let visible = |q: &usize| visibility.pair(b, h, *q, k);
            let want: Vec<u32> = (0..queries.len()).filter(visible).map(|q| q as u32).collect();
            prop_assert_eq!(&transposed.all_queries()[of_key.clone()], want);
            for pair in transposed.numbers(of_key) {
                prop_assert_eq!(pairs.all_keys()[*pair as usize], k as u32);
            }
        }
    }
    prop_assert_eq!(pairs.count_all(BATCH), all);
    prop_assert_eq!(pairs.count_tiles(8, keys.len()).unwrap(), tiles.len() as u64);
    let before = pairs.all_keys().to_vec();
    let ids = pairs.compact(keys.len()).unwrap();
    prop_assert!(ids.is_sorted_by(|a, b| a < b));
    let after: Vec<u32> = pairs.all_keys().iter().map(|&key| ids[key as usize]).collect();
    prop_assert_eq!(before, after);
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    #[test]
    fn tiles_match_their_pairs(
        (mask, (queries, keys), dense) in problems(),
        height in prop_oneof![Just(64usize), 1usize..100],
        width in prop_oneof![Just(64usize), Just(128), 1usize..200],
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
        checked(&visibility, height, width)?;
        if lists.is_some() || !visibility.per_head() {
            check_listed_pairs(&visibility)?;
        }
    }

    /// Shards of a packed batch as in a plan; the block of keys has all rows or some.
    #[test]
    fn tiles_of_packed_shards_match_their_pairs(
        sizes in prop::collection::vec((0i64..60, 0i64..60), 1..5),
        spare in (0usize..20, 0usize..20),
        mask in any_mask(),
        layout in 0usize..3,
        bottom_right in any::<bool>(),
        ranks in 1usize..5,
        trim in 0u64..30,
    ) {
        let ends = |pick: fn(&(i64, i64)) -> i64| -> Vec<i64> {
            let running_sums = sizes.iter().scan(0, |sum, pair| {
                *sum += pick(pair);
                Some(*sum)
            });
            std::iter::once(0).chain(running_sums).collect()
        };
        let q_ends = ends(|pair| pair.0);
        let k_ends = ends(|pair| pair.1);
        let last = |ends: &[i64]| ends.last().copied().unwrap_or(0) as usize;
        let dims = Dims {
            q_len: last(&q_ends) + spare.0,
            kv_len: last(&k_ends) + spare.1,
            ..Dims::new(BATCH, 0, HEADS, 8)
        };
        let batch = Batch {
            cum_seqlens_q: Some(q_ends),
            cum_seqlens_k: Some(k_ends),
            ..Batch::default()
        };
        let alignment = if bottom_right { Alignment::BottomRight } else { Alignment::TopLeft };
        // contiguous, striped, zigzag
        let owner = |row: usize, len: usize| match layout {
            0 => row * ranks / len,
            1 => row % ranks,
            _ => {
                let chunk = row * 2 * ranks / len;
                chunk.min(2 * ranks - 1 - chunk)
            }
        };
        let shard = |side, rank| {
            let len = dims.len(side);
            let own = (0..len).filter(|&row| owner(row, len) == rank);
            let rows: Runs = own.map(|row| row as i64).collect();
            Shard::of_rows(&dims, alignment, side, rows, &batch)
        };
        let mut queries = Rows::default();
        let q = shard(Side::Q, 0);
        q.expand(&RowSet::all(q.rows.len()), &mut queries).unwrap();
        let mut keys = Rows::default();
        let kv = shard(Side::Kv, ranks - 1);
        let all = kv.rows.len();
        let some: RowSet = [0..all.min(10), trim.min(all)..all].into_iter().collect();
        kv.expand(&some, &mut keys).unwrap();
        checked(&visibility(&*mask, &queries, &keys), 16, 24)?;
    }
}

#[test]
fn common_masks_have_the_expected_classes() {
    let rows = Rows::counting(1024, 0).unwrap();
    let count = |mask: SharedMask| {
        checked(&visibility(&*mask, &rows, &rows), 64, 64)
            .unwrap_or_else(|error| panic!("{error}"))
            .map(|count| count / (BATCH * HEADS))
    };
    // [empty, full, partial]
    assert_eq!(count(Arc::new(Everything)), [0, 256, 0]);
    assert_eq!(count(Arc::new(Causal::default())), [120, 120, 16]);
    assert_eq!(
        count(and(Arc::new(Causal::default()), Arc::new(Window::new(Some(127), None)))),
        [120 + 91, 15, 16 + 14]
    );
}

#[test]
fn key_tiles_outside_a_window_are_skipped() {
    let rows = Rows::counting(65_536, 0).unwrap();
    let mask = and(
        Arc::new(Causal::default()),
        Arc::new(Window { first_visible: 3, ..Window::new(Some(1000), None) }),
    );
    let visibility = visibility(&*mask, &rows, &rows);
    let mut tile = QueryTile::default();
    visibility.query_tile(0, 0, 40_000..40_064, &mut tile);
    let tiles: Vec<_> = visibility.key_tiles(&tile, 64).collect();
    assert_eq!(tiles.first(), Some(&(0..64)));
    // from 40 000 − 1000 to 40 063
    assert_eq!(tiles[1], 38_976..39_040);
    assert_eq!(tiles.last(), Some(&(40_000..40_064)));
    assert_eq!(tiles.len(), 1 + (40_064 - 38_976) / 64);
    // a width that divides neither groups nor chunks: the tile before the window has a chunk in
    // common with it
    let wide: Vec<_> = visibility.key_tiles(&tile, 1000).collect();
    assert_eq!(wide, [0..1000, 38_000..39_000, 39_000..40_000, 40_000..41_000]);
    let mut bounds = TileBoundsTable::default();
    bounds.refill(&visibility, 1, 1, 64).unwrap();
    let queries: Vec<_> = bounds.query_tiles(0, 0, &rows, 40_000..40_064).collect();
    assert_eq!(queries.first(), Some(&(40_000..40_064)));
    assert_eq!(queries.last(), Some(&(41_024..41_088)));
}

#[test]
fn a_query_tile_of_a_rank_without_keys_has_segment_ids() {
    let with = |ids: &[i64]| rows_at(0..ids.len() as i64, ids.iter().copied());
    let queries = with(&[0, 1, -1]);
    let none = with(&[]);
    let keys = with(&[1, 1]);
    let mut tile = QueryTile::default();
    let mut bits = TileBits::default();
    let visibility = |keys| visibility(&Everything, &queries, keys);
    visibility(&none).query_tile(0, 0, 0..3, &mut tile);
    assert_eq!(visibility(&none).key_tiles(&tile, 64).count(), 0);
    assert_eq!(visibility(&keys).classify(&tile, 0..2, &mut bits), TileClass::Partial);
    assert_eq!([0, 1, 2].map(|row| bits.line(row)[0]), [0, 3, 0]);
}

#[test]
fn a_predicate_is_evaluated_only_within_the_bounds_of_the_other_masks() {
    let partial = Predicate::of_positions("partial", |i, j| {
        assert!(j <= i, "evaluated for a pair that the causal mask masks");
        (i + j) % 2 == 0
    });
    let mask = and(Arc::new(partial), Arc::new(Causal::default()));
    let rows = Rows::counting(200, 0).unwrap();
    let visibility = visibility(&*mask, &rows, &rows);
    let mut tile = QueryTile::default();
    let mut bits = TileBits::default();
    let mut classes = Vec::new();
    visibility.query_tile(0, 0, 64..128, &mut tile);
    for k0 in [0, 64, 128] {
        classes.push(visibility.classify(&tile, k0..k0 + 64, &mut bits));
    }
    assert_eq!(classes, [TileClass::Partial, TileClass::Partial, TileClass::Empty]);
    let bits = Arc::new(DenseMask::from_fn([1, 1, 200, 200], |_| true));
    let dense = and(Arc::new(Dense(bits)), Arc::new(Causal::default()));
    let visibility = Visibility { mask: &*dense, ..visibility };
    visibility.query_tile(0, 0, 64..128, &mut tile);
    assert_eq!(visibility.key_tiles(&tile, 64).collect::<Vec<_>>(), [0..64, 64..128]);
}
