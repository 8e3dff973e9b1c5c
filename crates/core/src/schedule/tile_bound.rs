//! The least number of tiles of a balanced layout.
//!
//! A query with n pairs attends to at least n / 64 tiles of keys, and a tile of 64 queries costs as
//! many as its busiest query. So the cost of a layout is an integral over levels l of the number of
//! its query tiles that have a query with at least l pairs. Let R be the number of queries with at
//! least l pairs, l' the fewest pairs of these, and B the most pairs of a rank:
//!
//! ```text
//! tiles of a rank     at most β = B / (64 · l') tiles of these queries, of which k = ⌊β⌋ are whole
//! R ≤ 64 · k · ranks  R / 64 tiles: whole ones may suffice
//! else                k tiles on each rank, and (R / 64 − k · ranks) / (β − k) ranks with a part
//!                     of a tile, which costs as much as a whole one
//! ```
//! Under a full mask within documents all queries of a long document have the same pairs. If one
//! and a third of its tiles are the work of a rank, most ranks must have a part of a tile, which
//! costs up to twice the tiles.
//!
//! With a tile of more than B pairs the bound of `tile_deal.rs` holds too: a query costs at least
//! n · 64 · n / B. The larger of both is returned.

use super::{
    balanced::{limits_of, whole_rows},
    query_work::QueryWork,
    tile_deal::TILE_ROWS,
};
use crate::{Batch, Layout, Result, Spec};

/// The most queries whose pairs are sorted.
const MOST_QUERIES: usize = 1 << 22;

impl Layout {
    /// Returns the least number of tiles of 64 queries and 64 keys with a visible pair of any
    /// layout in which no rank has more than 1.02 times the mean of the pairs, divided by the
    /// number of tiles that the pairs would fill: 1 if the bound proves nothing, or for more than
    /// 2²² queries. `batch` is that of all rows.
    ///
    /// # Errors
    /// As [`Layout::balanced`].
    pub fn least_tiles(spec: &Spec, batch: &Batch, ranks: usize) -> Result<f64> {
        let whole = whole_rows(spec, batch, ranks)?;
        if spec.dims.q_len > MOST_QUERIES {
            return Ok(1.0);
        }
        let pairs = QueryWork::new(spec, &whole)?;
        let before = pairs.before_each(0..=spec.dims.q_len as u64);
        let mut pairs: Vec<u128> = before.windows(2).map(|sums| sums[1] - sums[0]).collect();
        let total = before.last().copied().unwrap_or(0);
        let limit = limits_of(total, ranks).balanced;
        pairs.sort_unstable_by(|a, b| b.cmp(a));
        Ok(least_tiles(&pairs, limit as f64, ranks))
    }
}

/// Returns the bound for queries with these pairs, descending, and `most` pairs of a rank.
fn least_tiles(pairs: &[u128], most: f64, ranks: usize) -> f64 {
    let total: f64 = pairs.iter().map(|&pairs| pairs as f64).sum();
    if total == 0.0 || most == 0.0 {
        return 1.0;
    }
    let tile = TILE_ROWS as f64;
    let ranks = ranks as f64;
    let tiles = |rows: f64, fewest: f64| {
        let of_rank = most / (tile * fewest);
        let whole = of_rank.floor();
        let rest = rows / tile - whole * ranks;
        if rest <= 0.0 {
            return rows / tile;
        }
        let with_part = (rest / (of_rank - whole)).min(ranks);
        (whole * ranks + with_part).max(rows / tile)
    };
    let mut by_level = 0.0;
    let mut rows = 0;
    for equal in pairs.chunk_by(|a, b| a == b) {
        rows += equal.len();
        let next = pairs.get(rows).copied().unwrap_or(0);
        let fewest = equal[0] as f64;
        by_level += (fewest - next as f64) * tiles(rows as f64, fewest);
    }
    let by_query: f64 =
        pairs.iter().map(|&of| of as f64 * (tile * of as f64 / most).max(1.0)).sum();
    (by_level * tile).max(by_query) / total
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One document of `rows` queries that attend to all of its keys, and `short` queries of one
    /// pair.
    fn queries(rows: usize, short: usize) -> Vec<u128> {
        [vec![rows as u128; rows], vec![1; short]].concat()
    }

    #[test]
    fn a_part_of_a_tile_costs_a_tile() {
        // 16 tiles, of which a rank may have 4/3: with 12 ranks each has one whole tile, and all 12
        // a third of one, so that 24 tiles do the work of 16
        let pairs = queries(1024, 0);
        let most = 64.0 * 1024.0 * 4.0 / 3.0;
        assert!((least_tiles(&pairs, most, 12) - 1.5).abs() < 1e-9);
        // 13 ranks: 3 tiles in parts of a third, on 9 of them
        assert!((least_tiles(&pairs, most, 13) - 22.0 / 16.0).abs() < 1e-9);
        // whole tiles suffice
        assert_eq!(least_tiles(&pairs, most, 16), 1.0);
        assert_eq!(least_tiles(&pairs, 2.0 * most, 8), 1.0);
        // light queries fill what is left at no cost
        let with_light = least_tiles(&queries(1024, 64), most, 12);
        assert!((with_light - 1.5).abs() < 1e-3, "{with_light}");
    }

    #[test]
    fn a_tile_that_exceeds_a_rank_costs_each_of_its_parts() {
        // 16 tiles on 32 ranks of half a tile each
        assert!((least_tiles(&queries(1024, 0), 32.0 * 1024.0, 32) - 2.0).abs() < 1e-9);
        assert_eq!(least_tiles(&[], 1.0, 4), 1.0);
        assert_eq!(least_tiles(&[0; 70], 0.0, 4), 1.0);
    }
}
