//! Shards cut into pieces that can be reasoned about as a whole: one segment id, evenly spaced positions.

use std::{collections::HashMap, ops::Range};

use crate::{Coordinates, Mask, Run, Runs, Shard};

/// Consecutive local rows of one class whose row numbers and positions are arithmetic runs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Piece {
    /// The first local row.
    pub(crate) first: u64,
    /// How many, at least 1.
    pub(crate) count: u64,
    /// Numbers in the unsharded sequence.
    pub(crate) rows: Run,
    /// Positions.
    pub(crate) positions: Run,
    /// Queries and keys see each other only within a class.
    pub(crate) class: usize,
}

/// Which heads and batch rows must be asked: the first stands for all where they do not differ.
pub(crate) struct Views {
    heads: usize,
    batch: usize,
    repeats: u64,
}

impl Views {
    pub(crate) fn new(mask: &dyn Mask, heads: usize, batch: usize, coordinates: &Coordinates) -> Self {
        let differs = |shard: &Shard| shard.positions.len() > 1 || shard.segments.len() > 1;
        let per_batch = mask.per_batch() || coordinates.q.iter().chain(&coordinates.kv).any(|shard| differs(shard));
        let (asked_heads, asked_batch) = (if mask.per_head() { heads } else { heads.min(1) }, if per_batch { batch } else { batch.min(1) });
        let repeats = heads.saturating_mul(batch) as u64 / asked_heads.saturating_mul(asked_batch).max(1) as u64;
        Self { heads: asked_heads, batch: asked_batch, repeats }
    }

    /// For how many pairs of a head and a batch row each that is asked stands.
    pub(crate) const fn repeats(&self) -> u64 {
        self.repeats
    }

    pub(crate) const fn heads(&self) -> Range<usize> {
        0..self.heads
    }

    pub(crate) const fn batches(&self) -> Range<usize> {
        0..self.batch
    }
}

/// Segment ids as dense numbers, in one batch row: those of keys, for no other can be seen.
pub(crate) struct Classes {
    /// `None`: one side has no ids, so everything is in class 0
    of_id: Option<HashMap<i64, usize>>,
}

impl Classes {
    pub(crate) fn new(coordinates: &Coordinates) -> Self {
        let ids = |shards: &[std::sync::Arc<Shard>]| shards.iter().any(|shard| !shard.segments.is_empty());
        Self { of_id: (ids(&coordinates.q) && ids(&coordinates.kv)).then(HashMap::new) }
    }

    /// How many there are. Grows with every shard of keys.
    pub(crate) fn len(&self) -> usize {
        self.of_id.as_ref().map_or(1, HashMap::len)
    }

    /// The keys of `shard` that anybody may see, learning their ids.
    pub(crate) fn key_pieces(&mut self, shard: &Shard, batch: usize) -> Vec<Piece> {
        let of_id = &mut self.of_id;
        pieces(shard, batch, of_id.is_some(), |id| {
            Some(of_id.as_mut().map_or(0, |of_id| {
                let next = of_id.len();
                *of_id.entry(id).or_insert(next)
            }))
        })
    }

    /// The queries of `shard` that have keys of their id.
    pub(crate) fn query_pieces(&self, shard: &Shard, batch: usize) -> Vec<Piece> {
        pieces(shard, batch, self.of_id.is_some(), |id| self.of_id.as_ref().map_or(Some(0), |of_id| of_id.get(&id).copied()))
    }
}

fn pieces(shard: &Shard, batch: usize, with_ids: bool, mut class_of: impl FnMut(i64) -> Option<usize>) -> Vec<Piece> {
    fn list(lists: &[Runs], batch: usize) -> &[Run] {
        let batch = if lists.len() > 1 { batch } else { 0 };
        lists.get(batch).map(Runs::runs).unwrap_or_default()
    }
    let same_id = [Run { start: 0, step: 0, count: shard.rows.len() }];
    let (mut rows, mut positions) = (Cursor::new(shard.rows.runs()), Cursor::new(list(&shard.positions, batch)));
    let mut ids = Cursor::new(if with_ids { list(&shard.segments, batch) } else { &same_id });
    let (mut all, mut first) = (Vec::new(), 0);
    let mut last = None;
    while let (Some(row), Some(position), Some(id)) = (rows.rest(), positions.rest(), ids.rest()) {
        let count = row.count.min(position.count).min(if id.step == 0 { id.count } else { 1 });
        // neighbours mostly share their id: one look-up serves them all
        let class = match last {
            Some((before, class)) if before == id.start => class,
            _ if id.start < 0 => None,
            _ => class_of(id.start),
        };
        last = Some((id.start, class));
        if let Some(class) = class {
            all.push(Piece { first, count, rows: Run { count, ..row }, positions: Run { count, ..position }, class });
        }
        first += count;
        [&mut rows, &mut positions, &mut ids].into_iter().for_each(|cursor| cursor.skip(count));
    }
    all
}

/// A place in a list of runs.
struct Cursor<'a> {
    runs: &'a [Run],
    used: u64,
}

impl<'a> Cursor<'a> {
    const fn new(runs: &'a [Run]) -> Self {
        Self { runs, used: 0 }
    }

    /// What is left of the current run.
    fn rest(&self) -> Option<Run> {
        self.runs.first().map(|run| Run { start: run.at(self.used), step: run.step, count: run.count - self.used })
    }

    fn skip(&mut self, count: u64) {
        self.used += count;
        if self.runs.first().is_some_and(|run| run.count == self.used) {
            self.runs = &self.runs[1..];
            self.used = 0;
        }
    }
}

/// How many numbers of an ascending (or constant) run are less than `bound`.
pub(crate) fn below(run: &Run, bound: i64) -> u64 {
    if bound <= run.start {
        return 0;
    }
    // bound > start, so that the difference is right as an unsigned number however far they are apart
    let distance = bound.wrapping_sub(run.start).cast_unsigned();
    match run.step.cast_unsigned() {
        0 => run.count,
        1 => distance.min(run.count),
        step => distance.div_ceil(step).min(run.count),
    }
}
