//! The gradient of the bias: Σ ∂L/∂s over everything that an element of the bias is broadcast along, always in the same order.
//!
//! ```text
//! five products   a tile's dS is added where it is made, in the order of the tasks (backward_turns.rs): pairs (batch row, kv head), then keys, ascend;
//!                 queries descend. What is summed along all queries is summed by each task for its own keys, and added when the task has ended
//! two passes      tasks over queries that share an element (an axis of it has length 1) have one *owner* and are worked one after another by one
//!                 thread: pairs, then queries ascend
//! ```

use std::{ops::Range, sync::Mutex};

use annulus_core::{Error, Result, Spec};
use ndarray::{ArrayViewMut4, s};

use crate::{
    backward_together::{lock, own},
    bias::bias_column,
    logits::Site,
    real::Real,
    scratch::Scratch,
    sight::TILE,
    workspace::QueryBlock,
};

/// Who owns the biases that a task over queries reads. Without a bias, or without a backward pass, every task owns itself.
pub(crate) const fn owner(spec: &Spec, backward: bool, batch: usize, kv_head: usize, block: usize, own: usize) -> usize {
    match spec.bias {
        Some(shape) if backward => Owners::new(spec, shape).index(batch, kv_head, block),
        _ => own,
    }
}

/// How owners are numbered.
#[derive(Debug, Clone, Copy)]
struct Owners {
    /// 1 where the bias is broadcast along them.
    batches: usize,
    kv_heads: usize,
    by_block: bool,
}

impl Owners {
    const fn new(spec: &Spec, [batches, heads, queries, _]: [usize; 4]) -> Self {
        Self { batches, kv_heads: if heads == 1 { 1 } else { spec.dims.kv_heads }, by_block: queries != 1 }
    }

    const fn index(self, batch: usize, kv_head: usize, block: usize) -> usize {
        let batch = if self.batches == 1 { 0 } else { batch };
        let kv_head = if self.kv_heads == 1 { 0 } else { kv_head };
        let block = if self.by_block { block } else { 0 };
        (block * self.batches + batch) * self.kv_heads + kv_head
    }
}

/// Query heads of a task that have sums of their own, if the bias has `heads` heads.
const fn own_heads(spec: &Spec, heads: usize) -> usize {
    if heads == 1 { 1 } else { spec.dims.group() }
}

/// One owner's sums: `[heads][queries][keys]`, or 1 in place of any that is broadcast.
#[derive(Debug)]
pub(crate) struct Part<A> {
    batch: usize,
    heads: Range<usize>,
    queries: Range<usize>,
    keys: usize,
    sums: Vec<A>,
}

/// The gradient of this rank's bias.
#[derive(Debug)]
pub(crate) struct BiasGradient<A> {
    owners: Owners,
    /// Rows of a block of queries.
    q_rows: usize,
    /// Query heads of a task that have sums of their own: those of a group, or 1 where the bias is broadcast along heads.
    heads: usize,
    /// Whether the bias is broadcast along keys.
    over_keys: bool,
    /// In the order of the owners.
    parts: Vec<Mutex<Part<A>>>,
}

impl<A: Real> BiasGradient<A> {
    /// For tasks of `q_rows` queries sorted by owner; `None` without a bias.
    pub(crate) fn new(spec: &Spec, blocks: &[QueryBlock<A>], q_rows: usize) -> Result<Option<Self>> {
        let Some(shape @ [batches, heads, queries, keys]) = spec.bias else { return Ok(None) };
        let group = spec.dims.group();
        let mut parts = Vec::new();
        for tasks in blocks.chunk_by(|a, b| a.owner == b.owner) {
            let first = &tasks[0];
            let own_heads = if heads == 1 { 0..1 } else { first.kv_head * group..(first.kv_head + 1) * group };
            let own_queries = if queries == 1 { 0..1 } else { first.rows.clone() };
            let len = own_heads.len() * own_queries.len() * keys;
            let mut sums = Vec::new();
            let asked = len as u64 * size_of::<A>() as u64;
            sums.try_reserve_exact(len).map_err(|_| Error::OutOfMemory { asked, free: None })?;
            sums.resize(len, A::ZERO);
            let batch = if batches == 1 { 0 } else { first.batch };
            parts.push(Mutex::new(Part { batch, heads: own_heads, queries: own_queries, keys, sums }));
        }
        Ok(Some(Self { owners: Owners::new(spec, shape), q_rows, heads: own_heads(spec, heads), over_keys: keys == 1, parts }))
    }

    /// The heads of a group, and keys, for which a task has sums along all queries: as lanes of a scratch.
    pub(crate) fn lanes(spec: &Spec, keys: usize) -> usize {
        match spec.bias {
            Some([_, heads, 1, _]) => keys * own_heads(spec, heads),
            _ => 0,
        }
    }

    /// Whether the bias is broadcast along queries.
    pub(crate) const fn over_queries(&self) -> bool {
        !self.owners.by_block
    }

    /// Whether it is broadcast along keys.
    pub(crate) const fn over_keys(&self) -> bool {
        self.over_keys
    }

    pub(crate) fn clear(&mut self) {
        self.parts.iter_mut().for_each(|part| own(part).sums.fill(A::ZERO));
    }

    /// The sums of each owner, in their order.
    pub(crate) fn parts(&mut self) -> impl Iterator<Item = &mut Part<A>> {
        self.parts.iter_mut().map(own)
    }

    /// Writes the sums. All of them are 0 if there are no local queries; else every element is somebody's.
    pub(crate) fn write(&self, mut into: ArrayViewMut4<'_, A>) {
        if self.parts.is_empty() {
            into.fill(A::ZERO);
        }
        for part in &self.parts {
            let part = lock(part);
            let len = part.queries.len() * part.keys;
            for (head, sums) in part.heads.clone().zip(part.sums.chunks_exact(len.max(1))) {
                let mut into = into.slice_mut(s![part.batch, head, part.queries.clone(), ..]);
                match into.as_slice_mut() {
                    Some(into) => into.copy_from_slice(sums),
                    None => into.iter_mut().zip(sums).for_each(|(into, &sum)| *into = sum),
                }
            }
        }
    }

    /// Adds what the visible rows of a tile of keys in lanes give: to the sums of its queries or, where the bias is broadcast along these, to `lanes`, the
    /// sums of the task, of which the tile's first key is number `lane`. `key_rows` are the numbers of the tile's keys.
    pub(crate) fn add(
        &self,
        site: &Site,
        kv_head: usize,
        rows: &Range<usize>,
        tile: &[A],
        key_rows: &[u64],
        (lanes, lane): (&mut [A], usize),
    ) {
        let lines = rows.clone().map(|row| (row, &tile[row * site.width..][..key_rows.len()]));
        if self.over_queries() {
            let first = site.head % self.heads * (lanes.len() / self.heads) + lane;
            let sums = &mut lanes[first..first + key_rows.len()];
            lines.for_each(|(_, line)| sums.iter_mut().zip(line).for_each(|(sum, &ds)| *sum += ds));
            return;
        }
        let counts_up = counts_up(key_rows);
        let mut lines = lines.peekable();
        // a tile may lie across blocks
        while let Some(&(row, _)) = lines.peek() {
            let block = (site.queries.start + row) / self.q_rows;
            let mut part = lock(&self.parts[self.owners.index(site.batch, kv_head, block)]);
            while let Some((row, line)) = lines.next_if(|&(row, _)| (site.queries.start + row) / self.q_rows == block) {
                let sums = part.line(site.head, site.queries.start + row);
                match sums {
                    [sum] => *sum += total(line),
                    _ if counts_up => {
                        let sums = &mut sums[annulus_core::index(key_rows[0])..];
                        sums.iter_mut().zip(line).for_each(|(sum, &ds)| *sum += ds);
                    }
                    _ => key_rows.iter().zip(line).for_each(|(&key, &ds)| sums[annulus_core::index(key)] += ds),
                }
            }
        }
    }

    /// Adds the sums that a task has along all queries, for its keys, of numbers `key_rows`.
    pub(crate) fn add_sums(&self, scratch: &Scratch<A>, (batch, kv_head): (usize, usize), key_rows: &[u64]) {
        let Some(part) = self.parts.get(self.owners.index(batch, kv_head, 0)) else { return };
        let mut part = lock(part);
        let lanes = &scratch.sums_bias;
        for (place, lanes) in lanes.chunks_exact(lanes.len() / self.heads).enumerate() {
            let sums = part.line(kv_head * self.heads + place, 0);
            for (lanes, key_rows) in lanes[..key_rows.len()].chunks(TILE).zip(key_rows.chunks(TILE)) {
                match sums {
                    // by tiles, so that the sum does not depend on how keys are cut into tasks
                    [sum] => *sum += total(lanes),
                    _ => key_rows.iter().zip(lanes).for_each(|(&key, &ds)| sums[annulus_core::index(key)] += ds),
                }
            }
        }
    }
}

/// Whether each number is one more than that before.
fn counts_up(rows: &[u64]) -> bool {
    rows.first().is_some_and(|&first| rows.iter().zip(first..).all(|(&row, want)| row == want))
}

/// Their sum, in sums of every sixteenth.
fn total<A: Real>(line: &[A]) -> A {
    const SUMS: usize = 16;
    let mut sums = [A::ZERO; SUMS];
    for line in line.chunks(SUMS) {
        sums.iter_mut().zip(line).for_each(|(sum, &ds)| *sum += ds);
    }
    sums.into_iter().fold(A::ZERO, |total, sum| total + sum)
}

impl<A: Real> Part<A> {
    /// The sums of one query, if they have their own.
    fn line(&mut self, head: usize, query: usize) -> &mut [A] {
        let head = if self.heads.contains(&head) { head - self.heads.start } else { 0 };
        let place = if self.queries.contains(&query) { query - self.queries.start } else { 0 };
        &mut self.sums[(head * self.queries.len() + place) * self.keys..][..self.keys]
    }

    /// Adds what the visible rows of a tile of queries in lanes give; `key_rows` are the numbers of the block's keys.
    pub(crate) fn add(&mut self, site: &Site, rows: &Range<usize>, tile: &[A], key_rows: &[u64]) {
        let (queries, keys) = site.offsets(rows);
        for query in queries {
            let len = self.keys;
            let line = self.line(site.head, site.queries.start + query);
            for key in keys.clone() {
                line[bias_column(len, key_rows[site.keys.start + key])] += tile[site.element(query, key)];
            }
        }
    }
}
