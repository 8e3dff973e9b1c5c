//! Overlap of the last block that arrives, and of the last gradients.
//!
//! # Parts of the last block
//! The last KV block that a rank receives, if it is not forwarded, is split into up to four
//! messages, so that computing on one part overlaps receiving the next.
//!
//! Every other block arrives while the tiles of the block before it are computed. Where the network
//! is slower than those tiles, a rank would wait for the whole last block before it computes on it:
//! on two ranks that is half of the pass.
//!
//! ```text
//! network   ├──── 1/2 ────┼─ 1/4 ─┼ 1/8 ┼ 1/8 ┤
//! tiles     ├─ the block before ─┤├──── 1/2 ────┼─ 1/4 ─┼ 1/8 ┼ 1/8 ┤
//! ```
//! Sender and receiver derive the parts from the schedule. The parts halve, so that little is left
//! to compute when the last arrives, and so that all parts but the first need no more memory than
//! half a block.
//!
//! # Tail of the local block
//! The backward pass of the local block is in two parts, so that the last gradients have tiles to
//! overlap with.
//!
//! ```text
//! step 0           tiles of the local block's head rows   overlap the first block's arrival
//! steps 1 …        tiles of the blocks that arrive        overlap blocks and gradients
//! after the last   tiles of the local block's tail rows   overlap the last final gradients
//! ```
//! Without the tail no rank would compute while the last gradients are transferred. Each rank
//! splits its own rows when a plan is created; no message depends on it.

use std::ops::Range;

use annulus_core::{RowSet, Rows, Spec, mask::Query};
use annulus_plan::{Group, Message, RankSchedule};

/// Maximum number of parts of a block: the last one is then an eighth of it. A further part would
/// hide little more, and would cost one more message.
pub(super) const MAX_PARTS: usize = 4;

/// Returns the number of tags that a pass over `ranks` ranks uses: one per step, and those of
/// parts.
pub(crate) const fn tags(ranks: usize) -> u64 {
    (ranks + MAX_PARTS) as u64
}

/// Rows at multiples of which a block is split if it has less than two KV tiles. Records have at
/// least one byte per row, so parts still begin at multiples of 8 bytes.
const SHORT_TILE: u64 = 8;

/// Rows at multiples of which blocks are split, agreed between the ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SplitSize {
    /// Largest KV tile of the backends.
    pub(crate) kv_tile: u64,
    /// Largest [`super::RingOptions::kv_block_size`], 0 if no rank has one.
    pub(crate) kv_block: u64,
    /// True if no KV tile of row numbers may be divided, as in the reproducible order. A block may
    /// lack masked rows, so that its tiles have different numbers of rows.
    pub(crate) whole_tiles: bool,
}

impl SplitSize {
    /// Returns the default for these tiles: the block size of the options is that of KV blocks.
    pub(super) const fn of_tiles(self) -> Self {
        Self { kv_block: 0, ..self }
    }

    /// Returns the number of rows at multiples of which a block of `rows` rows is split: the given
    /// block size, rounded up to KV tiles; by default a KV tile, or [`SHORT_TILE`] in a block that
    /// has less than two of them.
    pub(super) const fn of(self, rows: u64) -> u64 {
        if self.kv_block > 0 {
            self.kv_block.div_ceil(self.kv_tile).saturating_mul(self.kv_tile)
        } else if rows >= 2 * self.kv_tile {
            self.kv_tile
        } else {
            SHORT_TILE
        }
    }
}

/// Splits a block of `rows` rows into parts; one part if it is too short for more.
pub(super) fn parts(rows: u64, split: SplitSize) -> Vec<Range<u64>> {
    let tile = split.of(rows);
    let mut start = 0;
    let mut parts = Vec::with_capacity(MAX_PARTS);
    for eighths in [4, 6, 7] {
        let end = rows * eighths / 8 / tile * tile;
        if start < end {
            parts.push(start..end);
            start = end;
        }
    }
    parts.push(start..rows);
    parts
}

/// Splits a block of these local rows into parts of its records.
///
/// With [`SplitSize::whole_tiles`] each cut is moved back to a row that is a multiple of the KV
/// tile. Shards then consist of whole tiles, so that local rows and row numbers have the same ones.
pub(super) fn parts_of(rows: &RowSet, split: SplitSize) -> Vec<Range<u64>> {
    let mut parts = parts(rows.count(), split);
    if !split.whole_tiles {
        return parts;
    }
    let mut start = 0;
    for part in &mut parts {
        part.start = start;
        part.end = tile_start(rows, part.end, split.kv_tile).max(start);
        start = part.end;
    }
    parts.retain(|part| !part.is_empty());
    parts
}

/// Returns the number of rows before the KV tile that holds row number `record` of a block; all
/// rows if there is no such row.
fn tile_start(rows: &RowSet, record: u64, kv_tile: u64) -> u64 {
    let mut before = 0;
    let row = rows.ranges().iter().find_map(|range| {
        let row = range.start + (record - before);
        before += range.end - range.start;
        (row < range.end).then_some(row)
    });
    let first = row.map_or(u64::MAX, |row| row / kv_tile * kv_tile);
    rows.ranges().iter().map(|range| range.end.min(first).saturating_sub(range.start)).sum()
}

/// Selects the elements `part` of the concatenation of `ranges`.
pub(super) fn slice(ranges: &[Range<u64>], part: &Range<u64>) -> Vec<Range<u64>> {
    let mut before = 0;
    let mut kept = Vec::new();
    for range in ranges {
        let count = range.end - range.start;
        let from = part.start.clamp(before, before + count);
        let to = part.end.clamp(before, before + count);
        if from < to {
            kept.push(range.start + (from - before)..range.start + (to - before));
        }
        before += count;
    }
    kept
}

/// Number of queries and of keys that are sampled to estimate work: head and tail are rounded to
/// tiles, so an error of some percent is of no consequence.
const SAMPLES: usize = 64;

/// Returns the number of rows of the local block that are attended to in step 0; all of them if
/// there is nothing to overlap after the last step.
///
/// Head and tail get work in proportion to the bytes of the transfers that they overlap.
pub(super) fn head_rows(
    spec: &Spec,
    schedule: &RankSchedule,
    shard: (&Rows, &Rows),
    split: SplitSize,
) -> u64 {
    let (queries, keys) = shard;
    let all = keys.len() as u64;
    let steps = &schedule.steps;
    let Some(last) = schedule.last_step() else { return all };
    let rows =
        |messages: &[Message]| messages.iter().map(|message| message.rows.count()).sum::<u64>();
    let bytes = |group: &Group, record: u64| rows(&group.sends).max(rows(&group.receives)) * record;
    let first = bytes(&steps[0].before, spec.kv_row_layout().bytes());
    let after = bytes(&steps[last].after, spec.gradient_row_layout().bytes());
    let tile = split.of(all);
    if after == 0 || all < 2 * tile {
        return all;
    }
    let share = first as f64 / (first + after) as f64;
    let rows = share_of_work(spec, queries, keys, share) * all as f64;
    // at least a tile each
    ((rows / tile as f64).round() as u64 * tile).clamp(tile, (all - 1) / tile * tile)
}

/// Returns the share of the keys that makes up the share `share` of the work, estimated by the
/// visible pairs of sampled queries and keys.
fn share_of_work(spec: &Spec, queries: &Rows, keys: &Rows, share: f64) -> f64 {
    let spread = |count: usize| {
        let samples = count.min(SAMPLES);
        (0..samples).map(move |sample| (2 * sample + 1) * count / (2 * samples))
    };
    let mut visible = vec![0u32; keys.len().min(SAMPLES)];
    let positions = keys.positions(0);
    for query in spread(queries.len()) {
        let row = queries.rows()[query];
        let position = queries.positions(0)[query];
        let segment = queries.segments(0).map(|segments| segments[query]);
        let bound = spec.mask.bound(&Query { batch: 0, head: 0, row, position });
        for (visible, key) in visible.iter_mut().zip(spread(keys.len())) {
            let in_segment = segment == keys.segments(0).map(|segments| segments[key]);
            *visible += u32::from(bound.contains(positions[key]) && in_segment);
        }
    }
    let all: u32 = visible.iter().sum();
    let mut left = share * f64::from(all);
    for (sample, &pairs) in visible.iter().enumerate() {
        if f64::from(pairs) > left {
            return (sample as f64 + left / f64::from(pairs)) / visible.len() as f64;
        }
        left -= f64::from(pairs);
    }
    // no pair is visible
    share
}

#[cfg(test)]
mod tests {
    use annulus_core::{Alignment, Dims, Order, mask::Causal};
    use annulus_plan::{Layout, RingShards, Route};

    use super::*;

    fn tiles_of(kv_tile: u64) -> SplitSize {
        SplitSize { kv_tile, kv_block: 0, whole_tiles: false }
    }

    #[test]
    fn a_block_size_replaces_the_default_and_keeps_tiles_whole() {
        let of = |kv_block| SplitSize { kv_tile: 64, kv_block, whole_tiles: false };
        assert_eq!(parts(1024, of(64)), parts(1024, tiles_of(64)));
        assert_eq!(parts(1024, of(200)), [0..512, 512..768, 768..1024]);
        assert_eq!(parts(1024, of(500)), [0..512, 512..1024]);
        assert_eq!(parts(1024, of(1000)), std::slice::from_ref(&(0..1024)));
        assert_eq!(parts(100, of(1)), [0..64, 64..100]);
        assert_eq!(parts(1024, of(u64::MAX)), std::slice::from_ref(&(0..1024)));
    }

    #[test]
    fn parts_halve_and_cover_all_rows() {
        assert_eq!(parts(1024, tiles_of(64)), [0..512, 512..768, 768..896, 896..1024]);
        assert_eq!(parts(200, tiles_of(64)), [0..64, 64..128, 128..200]);
        assert_eq!(parts(128, tiles_of(64)), [0..64, 64..128]);
        assert_eq!(parts(50, tiles_of(32)), [0..24, 24..32, 32..40, 40..50]);
        assert_eq!(parts(200, tiles_of(32)), [0..96, 96..128, 128..160, 160..200]);
        assert_eq!(parts(50, tiles_of(64)), [0..24, 24..32, 32..40, 40..50]);
        assert_eq!(parts(16, tiles_of(64)), [0..8, 8..16]);
        assert_eq!(parts(15, tiles_of(64)), [0..8, 8..15]);
        assert_eq!(parts(9, tiles_of(64)), std::slice::from_ref(&(0..9)));
        for rows in 1..1000 {
            let parts = parts(rows, tiles_of(64));
            assert!(
                parts.len() <= MAX_PARTS && parts.iter().all(|part| !part.is_empty()),
                "{rows}"
            );
            assert!(
                parts[0].start == 0
                    && parts[parts.len() - 1].end == rows
                    && parts.windows(2).all(|two| two[0].end == two[1].start),
                "{rows}"
            );
            // the first part is at least a quarter of the block
            assert!(rows < 16 || parts[0].end * 4 >= rows, "{rows}");
        }
    }

    #[test]
    fn cuts_are_moved_to_whole_tiles() {
        let split = SplitSize { kv_tile: 64, kv_block: 0, whole_tiles: true };
        let cut = |ranges: &[[u64; 2]]| {
            let rows: RowSet = ranges.iter().map(|&[start, end]| start..end).collect();
            let parts = parts_of(&rows, split);
            assert!(parts.windows(2).all(|two| two[0].end == two[1].start));
            assert_eq!((parts[0].start, parts[parts.len() - 1].end), (0, rows.count()));
            let all: Vec<u64> = rows.iter().collect();
            let cuts: Vec<usize> = parts[1..].iter().map(|part| part.start as usize).collect();
            for &cut in &cuts {
                assert_ne!(all[cut - 1] / 64, all[cut] / 64, "{ranges:?} {parts:?}");
            }
            cuts
        };
        assert_eq!(cut(&[[0, 1024]]), [512, 768, 896]);
        assert_eq!(cut(&[[30, 1054]]), [482, 738, 866]);
        // two ranges of one tile, tiles of few rows, and a block of one tile
        assert_eq!(cut(&[[0, 500], [505, 1029]]), [507, 763, 891]);
        assert_eq!(cut(&[[0, 3], [64, 67], [128, 131], [192, 195], [256, 259]]), [6]);
        assert!(cut(&[[3, 60]]).is_empty());
        for first in 0..130 {
            cut(&[[first, first + 300], [first + 310, first + 333], [700, 900]]);
        }
    }

    #[test]
    fn a_part_is_selected_across_ranges() {
        let ranges = [10..14, 20..21, 30..40];
        assert_eq!(slice(&ranges, &(0..15)), ranges);
        assert_eq!(slice(&ranges, &(2..6)), [12..14, 20..21, 30..31]);
        assert_eq!(slice(&ranges, &(3..5)), [13..14, 20..21]);
        assert_eq!(slice(&ranges, &(5..5)), []);
    }
    use annulus_core::{DType, Host};

    use crate::ring::plan::{Agreed, RingPlan};

    #[test]
    fn head_and_tail_have_the_work_that_overlaps_their_transfers() {
        let head = |causal: bool, layout: &Layout, route, rank, n: usize| {
            let spec = Spec::new(Dims::new(1, n, 2, 16), DType::F32);
            let spec = if causal {
                Spec { mask: std::sync::Arc::new(Causal::default()), ..spec }
            } else {
                spec
            };
            let coordinates = RingShards::plain(&spec.dims, Alignment::TopLeft, layout, 2);
            let agreed = Agreed {
                spec: spec.into(),
                layout: layout.clone(),
                route,
                given_route: Some(route),
                order: Order::ascending(2),
                split: SplitSize { kv_tile: 64, kv_block: 0, whole_tiles: false },
                backward: true,
                posts_ahead: false,
                groups_in_order: false,
                reduces: false,
                receive_ahead: 1,
                numerics: String::new(),
                second_derivatives: false,
                no_out_residual: None,
            };
            let plan = RingPlan::derive::<Host>(&agreed, rank, coordinates, None, None, &mut || ());
            let plan = plan.unwrap();
            (plan.program.head_rows, plan.keys.len() as u64)
        };
        // as many bytes of gradients as of keys and values; all queries attend to every key
        assert_eq!(head(false, &Layout::Contiguous, Route::RelayUp, 0, 1024), (256, 512));
        // half of the work is less than half of the rows: three times as many visible pairs have a
        // key of the first of the two chunks as have one of the second
        let (rows, all) = head(true, &Layout::Zigzag, Route::RelayDown, 0, 4096);
        assert!((576..=768).contains(&rows) && all == 2048, "{rows} of {all}");
        // rank 0 needs no block of rank 1, sends its own, and receives its final gradients
        let (rows, all) = head(true, &Layout::Contiguous, Route::RelayUp, 0, 1024);
        assert!(0 < rows && rows < all, "{rows} of {all}");
        // too short to be divided
        assert_eq!(head(false, &Layout::Contiguous, Route::RelayUp, 0, 30), (15, 15));
    }
}
