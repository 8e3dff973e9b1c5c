//! Tiles of rows dealt to ranks, of which as few are cut as the balance of pairs permits.
//!
//! ```text
//! tiles = the rows, cut at multiples of 64; each rank gets k = ⌊rows / (64·ranks)⌋ of them
//! light rows = those of the tiles with the fewest pairs, which are cut when they are needed
//! while the tile with the most pairs and k − 1 light tiles exceed the limit:
//!     for the next ranks: as many of its last rows as fit the limit, and of the rows before them;
//!         light rows up to a tile; k − 1 light tiles; light rows up to the rows of the rank
//!     the rest of the tile and light rows become a tile
//! the other ranks: light rows up to the rows of the rank, if that is no multiple of 64
//! deal the other tiles in rounds, and exchange them (ChunkDeal)
//! ```
//! A tile of queries costs a kernel as many tiles of keys as its busiest query attends to, so cuts
//! are made where they are needed and where they are cheap. A rank with a cut tile of many keys has
//! as many of its rows as its limit permits, because a second part costs as many key tiles as the
//! first. Light rows attend to few tiles of keys.
//!
//! # The bound
//! Let a query attend to c tiles of keys, which are 64·c pairs, and a rank have at most B pairs. A
//! tile of queries of which the busiest attends to m tiles of keys costs m. The c of its queries
//! add up to at most 64·m, and to at most B/64. So a query costs at least
//!
//! ```text
//! c · max(1/64, 64·c / B)        the sum over a tile: at most 64·m / 64 = m if 64·64·m ≤ B,
//!                                else at most (B / 64) · (64·m / B) = m
//! ```
//! tiles in any layout: more than c/64, its share of a full tile, if a tile of such queries has
//! more than B pairs. This does not count the pairs of the other rows of the rank.

use std::{collections::VecDeque, ops::Range};

use super::{
    chunk_deal::{Chunk, ChunkDeal, Limits, most_first},
    query_work::QueryWork,
};
use crate::index;

/// Rows of a tile of the CPU kernels.
pub(super) const TILE_ROWS: u64 = 64;

/// Chunks that are dealt to ranks, by rank.
pub(super) type RankChunks = Vec<(usize, Chunk)>;

/// Rows and ranks among which tiles are dealt.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shares {
    pub(super) rows: u64,
    pub(super) ranks: usize,
}

impl Shares {
    /// Returns the first of the rows of a rank, if they were contiguous.
    pub(super) const fn begin(self, rank: usize) -> u64 {
        // the product of a row number and a number of ranks may exceed 64 bits
        (self.rows as u128 * rank as u128 / self.ranks as u128) as u64
    }

    /// Returns the whole tiles of every rank.
    pub(super) const fn tiles(self) -> u64 {
        self.rows / self.ranks as u64 / TILE_ROWS
    }

    /// Returns the rows of a rank that fill no tile.
    const fn tail(self, rank: usize) -> u64 {
        self.begin(rank + 1) - self.begin(rank) - self.tiles() * TILE_ROWS
    }
}

/// Tiles and light rows that are not dealt.
pub(super) struct TileDeal<'a> {
    pairs: &'a QueryWork,
    shares: Shares,
    limits: Limits,
    /// Pairs of the queries before each whole tile, and of all of these tiles.
    before: &'a [u128],
    /// Whole tiles, those with the most pairs first.
    by_work: Vec<usize>,
    /// The part of `by_work` in which tiles may be left.
    left: Range<usize>,
    is_dealt: Vec<bool>,
    /// Light rows of cut tiles.
    light: VecDeque<Chunk>,
    /// Tiles of several chunks.
    mixed: Vec<Vec<Chunk>>,
    dealt: RankChunks,
}

impl<'a> TileDeal<'a> {
    /// Deals tiles of `shares`, of which every rank gets at least one.
    pub(super) fn new(pairs: &'a QueryWork, shares: Shares, limits: Limits) -> Self {
        let tiles = index(shares.rows / TILE_ROWS);
        let before = pairs.before_tiles(shares.rows);
        // of equal ones the last first, so that light rows are taken from the end
        let work: Vec<u128> = before.windows(2).rev().map(|sums| sums[1] - sums[0]).collect();
        let by_work: Vec<usize> = most_first(&work).iter().map(|last| tiles - 1 - last).collect();
        let rest = tiles as u64 * TILE_ROWS..shares.rows;
        let work = pairs.between(&rest);
        let light = if rest.is_empty() { None } else { Some(Chunk { rows: rest, work }) };
        Self {
            pairs,
            shares,
            limits,
            before,
            left: 0..by_work.len(),
            is_dealt: vec![false; by_work.len()],
            by_work,
            light: light.into_iter().collect(),
            mixed: Vec::new(),
            dealt: Vec::with_capacity(tiles + shares.ranks),
        }
    }

    /// Returns true if the tile with the most pairs exceeds the limit together with the lightest
    /// other tiles of a rank.
    pub(super) fn must_cut(&self) -> bool {
        let most = self.by_work.first().map_or(0, |&tile| self.tile(tile).work);
        most + self.lightest(index(self.shares.tiles()) - 1) > self.limits.balanced
    }

    /// Deals all tiles. `None` if tiles cannot be cut such that no rank exceeds the limit and all
    /// have their rows; else the whole tiles may still exceed the limit.
    pub(super) fn run(mut self) -> Option<RankChunks> {
        let served = self.cut_heavy_tiles()?;
        let ranks = served..self.shares.ranks;
        let tails = ranks.clone().map(|rank| self.take_light(self.shares.tail(rank), rank));
        let sums = tails.collect::<Option<Vec<u128>>>()?;
        // whole again, or parts of which each 64 rows are a tile
        while !self.light.is_empty() {
            self.add_mixed(None);
        }
        let left = self.by_work[self.left.clone()].iter().copied();
        let whole: Vec<usize> = left.filter(|&tile| !self.is_dealt[tile]).collect();
        let of_mixed = |chunks: &Vec<Chunk>| chunks.iter().map(|chunk| chunk.work).sum();
        let work = whole.iter().map(|&tile| self.tile(tile).work);
        let work: Vec<u128> = work.chain(self.mixed.iter().map(of_mixed)).collect();
        if work.len() as u64 != self.shares.tiles() * ranks.len() as u64 {
            return None;
        }
        let mut deal = ChunkDeal::new(&work, sums);
        deal.exchange(&work, self.limits);
        for (rank, tiles) in ranks.zip(&deal.ranks) {
            for &tile in tiles {
                match whole.get(tile) {
                    Some(&tile) => self.dealt.push((rank, self.tile(tile))),
                    None => {
                        let chunks = self.mixed[tile - whole.len()].drain(..);
                        self.dealt.extend(chunks.map(|chunk| (rank, chunk)));
                    }
                }
            }
        }
        Some(self.dealt)
    }

    /// Gives all rows of the first ranks, with parts of the tiles that fit no rank. Returns the
    /// number of these ranks; `None` if the others would have too many pairs.
    fn cut_heavy_tiles(&mut self) -> Option<usize> {
        let ranks = self.shares.ranks;
        let mut left = self.pairs.before(self.shares.rows);
        let mut rank = 0;
        while let Some(tile) = self.heaviest() {
            // no light rows are taken from it
            self.is_dealt[tile] = true;
            let begin = tile as u64 * TILE_ROWS;
            let mut rest = begin..begin + TILE_ROWS;
            let first = rank;
            while let Some(rows) = self.rows_that_fit(&rest, rank) {
                left = left.saturating_sub(self.serve(rank, rest.end - rows..rest.end)?);
                rest.end -= rows;
                rest.start = rest.start.min(rest.end / TILE_ROWS * TILE_ROWS);
                rank += 1;
                if rank >= ranks || left > self.limits.balanced * (ranks - rank) as u128 {
                    return None;
                }
            }
            if rank == first {
                self.is_dealt[tile] = false;
                break;
            }
            if !rest.is_empty() {
                let work = self.pairs.between(&rest);
                self.add_mixed(Some(Chunk { rows: rest, work }));
            }
        }
        Some(rank)
    }

    /// Returns the most of the last rows that fit the limit of `rank` together with light rows, at
    /// least one; `None` if those of a whole tile fit. They are of `rest`, which are of one tile,
    /// and of the tile before it, if that is not dealt.
    fn rows_that_fit(&mut self, rest: &Range<u64>, rank: usize) -> Option<u64> {
        let tail = self.shares.tail(rank);
        self.open_light(TILE_ROWS + tail);
        let end = rest.end;
        let tile_before = (rest.start / TILE_ROWS).checked_sub(1);
        let begin = match tile_before.filter(|&tile| !self.is_dealt[index(tile)]) {
            Some(_) => end - TILE_ROWS,
            None => rest.start,
        };
        let lightest = self.lightest(index(self.shares.tiles()) - 1);
        let before_end = self.pairs.before(end);
        let work = |rows: u64| {
            let heavy = before_end - self.pairs.before(end - rows);
            lightest + heavy + self.light_work(TILE_ROWS - rows + tail)
        };
        let limit = self.limits.balanced;
        let mut too_many = [u128::from(end - begin), work(end - begin)];
        if begin == end || too_many[1] <= limit {
            return None;
        }
        // pairs are almost linear in the rows, so that interpolation finds the number at once
        let mut fitting = [0, work(0)];
        while fitting[0] + 1 < too_many[0] {
            let [rows, pairs] = [0, 1].map(|of: usize| too_many[of].saturating_sub(fitting[of]));
            let more = limit.saturating_sub(fitting[1]) * rows / pairs.max(1);
            let count = fitting[0] + more.clamp(1, rows - 1);
            let found = [count, work(count as u64)];
            if found[1] <= limit { fitting = found } else { too_many = found }
        }
        Some((fitting[0] as u64).max(1))
    }

    /// Gives a rank the rows of a cut tile, and light rows. Returns their pairs; `None` if there
    /// are too few light rows.
    fn serve(&mut self, rank: usize, rows: Range<u64>) -> Option<u128> {
        let count = rows.end - rows.start;
        for tile in rows.start / TILE_ROWS..=(rows.end - 1) / TILE_ROWS {
            self.is_dealt[index(tile)] = true;
        }
        let heavy = self.pairs.between(&rows);
        self.dealt.push((rank, Chunk { rows, work: heavy }));
        let light = TILE_ROWS - count + self.shares.tail(rank);
        let mut work = heavy + self.take_light(light, rank)?;
        for _ in 1..self.shares.tiles() {
            let tile = self.next_light()?;
            work += tile.work;
            self.dealt.push((rank, tile));
        }
        Some(work)
    }

    /// Makes a tile of `chunk` and light rows.
    fn add_mixed(&mut self, chunk: Option<Chunk>) {
        let rows = chunk.as_ref().map_or(0, |chunk| chunk.rows.end - chunk.rows.start);
        let mut chunks: Vec<Chunk> = chunk.into_iter().collect();
        self.open_light(TILE_ROWS - rows);
        self.pop_light(TILE_ROWS - rows, |chunk| chunks.push(chunk));
        self.mixed.push(chunks);
    }

    /// Returns a whole tile.
    fn tile(&self, tile: usize) -> Chunk {
        let begin = tile as u64 * TILE_ROWS;
        let work = self.before[tile + 1] - self.before[tile];
        Chunk { rows: begin..begin + TILE_ROWS, work }
    }

    /// Returns the tile with the most pairs of those that are left.
    fn heaviest(&mut self) -> Option<usize> {
        while !self.left.is_empty() && self.is_dealt[self.by_work[self.left.start]] {
            self.left.start += 1;
        }
        self.by_work[self.left.clone()].first().copied()
    }

    /// Takes the tile with the fewest pairs of those that are left.
    fn next_light(&mut self) -> Option<Chunk> {
        while !self.left.is_empty() {
            self.left.end -= 1;
            let tile = self.by_work[self.left.end];
            if !self.is_dealt[tile] {
                self.is_dealt[tile] = true;
                return Some(self.tile(tile));
            }
        }
        None
    }

    /// Returns the pairs of the `count` tiles with the fewest of those that are left.
    fn lightest(&self, count: usize) -> u128 {
        let tiles = self.by_work[self.left.clone()].iter().rev();
        let left = tiles.filter(|&&tile| !self.is_dealt[tile]);
        left.take(count).map(|&tile| self.before[tile + 1] - self.before[tile]).sum()
    }

    /// Cuts tiles until there are at least `rows` light rows.
    fn open_light(&mut self, rows: u64) {
        let mut open: u64 = self.light.iter().map(|chunk| chunk.rows.end - chunk.rows.start).sum();
        while open < rows {
            let Some(tile) = self.next_light() else { break };
            self.light.push_back(tile);
            open += TILE_ROWS;
        }
    }

    /// Returns the pairs of the first `rows` light rows.
    fn light_work(&self, rows: u64) -> u128 {
        let mut left = rows;
        let mut work = 0;
        for chunk in &self.light {
            let count = left.min(chunk.rows.end - chunk.rows.start);
            let begin = chunk.rows.start;
            work += if chunk.rows.end - begin == count {
                chunk.work
            } else {
                self.pairs.between(&(begin..begin + count))
            };
            left -= count;
            if left == 0 {
                break;
            }
        }
        work
    }

    /// Gives light rows to a rank. Returns their pairs; `None` if there are too few.
    fn take_light(&mut self, rows: u64, rank: usize) -> Option<u128> {
        self.open_light(rows);
        let mut dealt = std::mem::take(&mut self.dealt);
        let mut work = 0;
        let missing = self.pop_light(rows, |chunk| {
            work += chunk.work;
            dealt.push((rank, chunk));
        });
        self.dealt = dealt;
        (missing == 0).then_some(work)
    }

    /// Removes the first `rows` light rows. Returns the number that is missing.
    fn pop_light(&mut self, rows: u64, mut found: impl FnMut(Chunk)) -> u64 {
        let mut left = rows;
        while left > 0 {
            let Some(chunk) = self.light.pop_front() else { break };
            let count = chunk.rows.end - chunk.rows.start;
            if count > left {
                let middle = chunk.rows.start + left;
                let work = self.pairs.between(&(chunk.rows.start..middle));
                let rest = Chunk { rows: middle..chunk.rows.end, work: chunk.work - work };
                self.light.push_front(rest);
                found(Chunk { rows: chunk.rows.start..middle, work });
                return 0;
            }
            left -= count;
            found(chunk);
        }
        left
    }
}
