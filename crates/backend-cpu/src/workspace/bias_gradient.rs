//! Gradient of the bias: Σ ∂L/∂s over all pairs that an element is broadcast to, in a fixed order.
//!
//! ```text
//! fused pass:   a tile's dS is added where it is computed, in task order (`threads/`):
//!               planes (batch row, KV head), then keys ascend; queries descend.
//!               For a bias broadcast along queries each task sums over queries for its own keys,
//!               and adds the sums when it ends.
//! two passes:   tasks over queries that share an element (an axis has length 1) have one owner and
//!               run one after another on one thread: planes, then queries ascend.
//! leaves:       a bias with an element for each pair as in two passes. Other sums are parts of the
//!               partial results of leaves, one for each plane and head with an element of its own:
//!               over queries in the records of dk and dv, over keys beside dq. They are added over
//!               planes and heads at the end, both ascending.
//! ```

use std::{ops::Range, sync::Mutex};

use annulus_core::{BiasTable, ExactSum, Result, Spec, Tick, memory};
use ndarray::{ArrayViewMut4, Axis, s};

use crate::{
    simd::dispatch::Real,
    threads::ordered_reduction::{get_mut, lock},
    tile::{
        aligned::list_bytes,
        bias::{bias_column, is_consecutive},
        bias_table::TableTile,
        geometry::{QueryKeyPairs, TileCoord},
        scores::Scores,
        tile_mask::TILE,
    },
    workspace::{leaves::unify, query_block::QueryBlock},
};

/// Returns the owner of the dbias elements of a block of queries. Without a bias or a backward
/// pass, every block owns itself.
pub(crate) fn owner(
    spec: &Spec,
    backward: bool,
    batch: usize,
    kv_head: usize,
    block: usize,
    block_number: usize,
) -> usize {
    match spec.pair_bias() {
        Some(shape) if backward => OwnerIndex::new(spec, shape).index(batch, kv_head, block),
        _ => block_number,
    }
}

/// Numbering of the owners.
#[derive(Debug, Clone, Copy)]
struct OwnerIndex {
    /// Number of batch rows, or 1 if the bias is broadcast along them.
    batches: usize,
    kv_heads: usize,
    by_block: bool,
}

impl OwnerIndex {
    const fn new(spec: &Spec, [batches, heads, queries, _]: [usize; 4]) -> Self {
        Self {
            batches,
            kv_heads: if heads == 1 { 1 } else { spec.dims.kv_heads },
            by_block: queries != 1,
        }
    }

    const fn index(self, batch: usize, kv_head: usize, block: usize) -> usize {
        let batch = if self.batches == 1 { 0 } else { batch };
        let kv_head = if self.kv_heads == 1 { 0 } else { kv_head };
        let block = if self.by_block { block } else { 0 };
        (block * self.batches + batch) * self.kv_heads + kv_head
    }
}

/// Returns the number of query heads of a task with sums of their own, for a bias with `heads`
/// heads.
const fn own_heads(spec: &Spec, heads: usize) -> usize {
    if heads == 1 { 1 } else { spec.dims.group() }
}

/// Sums of one owner: `[heads][queries][keys]`, with length 1 for every broadcast axis.
#[derive(Debug)]
pub(crate) struct BiasPartial<A> {
    batch: usize,
    heads: Range<usize>,
    queries: Range<usize>,
    keys: usize,
    sums: Vec<A>,
}

/// Gradient of this rank's bias.
#[derive(Debug)]
pub(crate) struct BiasGradient<A> {
    owners: OwnerIndex,
    /// Rows of a block of queries.
    q_rows: usize,
    /// Query heads of a task with sums of their own: those of the group, or 1 if the bias is
    /// broadcast along heads.
    heads: usize,
    /// True if the bias is broadcast along keys.
    over_keys: bool,
    /// True if sums over an axis are parts of the partial results of leaves.
    in_leaves: bool,
    /// One per owner, in owner order.
    partials: Vec<Mutex<BiasPartial<A>>>,
}

impl<A: Real> BiasGradient<A> {
    /// Returns the heap bytes.
    pub(crate) fn bytes(&self) -> usize {
        let sums = |partial: &Mutex<BiasPartial<A>>| list_bytes(&lock(partial).sums);
        list_bytes(&self.partials) + self.partials.iter().map(sums).sum::<usize>()
    }

    /// Allocates the sums for blocks of `q_rows` queries sorted by owner; `None` without a bias.
    pub(crate) fn new(
        spec: &Spec,
        blocks: &[QueryBlock<A>],
        q_rows: usize,
    ) -> Result<Option<Self>> {
        let Some(shape @ [batches, heads, queries, keys]) = spec.pair_bias() else {
            return Ok(None);
        };
        let group = spec.dims.group();
        let in_leaves = spec.leaf_rows.is_some();
        let owned = if in_leaves && (queries == 1 || keys == 1) { &[] } else { blocks };
        let mut partials = Vec::new();
        for tasks in owned.chunk_by(|a, b| a.owner == b.owner) {
            let first = &tasks[0];
            let own_heads =
                if heads == 1 { 0..1 } else { first.kv_head * group..(first.kv_head + 1) * group };
            let own_queries = if queries == 1 { 0..1 } else { first.rows.clone() };
            let len = own_heads.len() * own_queries.len() * keys;
            let sums = memory::filled("partial sums of dbias", len, A::ZERO)?;
            let batch = if batches == 1 { 0 } else { first.batch };
            partials.push(Mutex::new(BiasPartial {
                batch,
                heads: own_heads,
                queries: own_queries,
                keys,
                sums,
            }));
        }
        Ok(Some(Self {
            owners: OwnerIndex::new(spec, shape),
            q_rows,
            heads: own_heads(spec, heads),
            over_keys: keys == 1,
            in_leaves,
            partials,
        }))
    }

    /// Returns the number of sums over all queries that a task holds in scratch, for `keys` keys:
    /// one per head of the group and key.
    pub(crate) fn lanes(spec: &Spec, keys: usize) -> usize {
        match spec.pair_bias() {
            Some([_, heads, 1, _]) => keys * own_heads(spec, heads),
            _ => 0,
        }
    }

    /// True if the bias is broadcast along queries.
    pub(crate) const fn over_queries(&self) -> bool {
        !self.owners.by_block
    }

    /// True if the bias is broadcast along heads.
    pub(crate) const fn is_shared_by_heads(&self) -> bool {
        self.owners.kv_heads == 1 && self.heads == 1
    }

    /// True if the bias is broadcast along keys.
    pub(crate) const fn over_keys(&self) -> bool {
        self.over_keys
    }

    /// True if the sums over queries are parts of the records of dk and dv.
    pub(crate) const fn in_records(&self) -> bool {
        self.in_leaves && self.over_queries()
    }

    /// True if the sums over keys are beside dq in the query blocks.
    pub(crate) const fn in_blocks(&self) -> bool {
        self.in_leaves && self.over_keys && !self.over_queries()
    }

    /// Returns the element of dbias, as batch row and head, to which the sum number `index` of a
    /// KV head contributes.
    pub(crate) const fn element(
        &self,
        batch: usize,
        kv_head: usize,
        index: usize,
    ) -> (usize, usize) {
        let batch = if self.owners.batches == 1 { 0 } else { batch };
        let head = if self.owners.kv_heads == 1 && self.heads == 1 { 0 } else { kv_head };
        (batch, head * self.heads + index)
    }

    /// Zeroes all sums.
    pub(crate) fn clear(&mut self) {
        self.partials.iter_mut().for_each(|partial| get_mut(partial).sums.fill(A::ZERO));
    }

    /// Iterates over the sums of each owner, in owner order. `None` if blocks have no owner.
    pub(crate) fn partials(&mut self) -> Option<impl Iterator<Item = &mut BiasPartial<A>>> {
        let owned = !(self.in_leaves && (self.over_queries() || self.over_keys));
        owned.then(|| self.partials.iter_mut().map(get_mut))
    }

    /// Writes dbias. Owners cover every element, except that there are none without local queries;
    /// dbias is then 0. Ticks after every [`TILE`] queries; ends early if the tick breaks.
    pub(crate) fn write(&self, mut into: ArrayViewMut4<'_, A>, tick: Tick<'_>) {
        if self.partials.is_empty() {
            into.fill(A::ZERO);
        }
        for partial in &self.partials {
            let partial = lock(partial);
            let len = partial.queries.len() * partial.keys;
            for (head, sums) in partial.heads.clone().zip(partial.sums.chunks_exact(len.max(1))) {
                let mut into = into.slice_mut(s![partial.batch, head, partial.queries.clone(), ..]);
                let tiles = sums.chunks(TILE * partial.keys.max(1));
                for (mut into, sums) in into.axis_chunks_iter_mut(Axis(0), TILE).zip(tiles) {
                    if tick().is_break() {
                        return;
                    }
                    match into.as_slice_mut() {
                        Some(into) => into.copy_from_slice(sums),
                        None => into.iter_mut().zip(sums).for_each(|(into, &sum)| *into = sum),
                    }
                }
            }
        }
    }

    /// Adds the visible rows of a dS tile with keys in lanes, whose keys have the global rows
    /// `key_rows`.
    ///
    /// The terms go to the sums of the tile's queries or, for a bias broadcast along queries, to
    /// `lanes`: the sums of the task, in which the tile's first key is number `lane`.
    pub(crate) fn add(
        &self,
        coord: &TileCoord,
        kv_head: usize,
        rows: &Range<usize>,
        tile: &[A],
        key_rows: &[u64],
        (lanes, lane): (&mut [A], usize),
    ) {
        let lines = rows.clone().map(|row| (row, &tile[row * coord.width..][..key_rows.len()]));
        if self.over_queries() {
            let first = coord.head % self.heads * (lanes.len() / self.heads) + lane;
            let sums = &mut lanes[first..first + key_rows.len()];
            lines.for_each(|(_, line)| sums.iter_mut().zip(line).for_each(|(sum, &ds)| *sum += ds));
            return;
        }
        let is_consecutive = is_consecutive(key_rows);
        let mut lines = lines.peekable();
        // a tile may span blocks of different owners
        while let Some(&(row, _)) = lines.peek() {
            let block = (coord.queries.start + row) / self.q_rows;
            let mut partial = lock(&self.partials[self.owners.index(coord.batch, kv_head, block)]);
            while let Some((row, line)) =
                lines.next_if(|&(row, _)| (coord.queries.start + row) / self.q_rows == block)
            {
                let sums = partial.row_sums(coord.head, coord.queries.start + row);
                match sums {
                    [sum] => *sum += total(line),
                    _ if is_consecutive => {
                        let sums = &mut sums[annulus_core::index(key_rows[0])..];
                        sums.iter_mut().zip(line).for_each(|(sum, &ds)| *sum += ds);
                    }
                    _ => key_rows
                        .iter()
                        .zip(line)
                        .for_each(|(&key, &ds)| sums[annulus_core::index(key)] += ds),
                }
            }
        }
    }

    /// Adds a task's sums over all queries, for its keys with the global rows `key_rows`.
    pub(crate) fn add_sums(&self, sums: &[A], (batch, kv_head): (usize, usize), key_rows: &[u64]) {
        let Some(partial) = self.partials.get(self.owners.index(batch, kv_head, 0)) else { return };
        let mut partial = lock(partial);
        for (index, lanes) in sums.chunks_exact(sums.len() / self.heads).enumerate() {
            let sums = partial.row_sums(kv_head * self.heads + index, 0);
            for (lanes, key_rows) in lanes[..key_rows.len()].chunks(TILE).zip(key_rows.chunks(TILE))
            {
                match sums {
                    // tile by tile, so that the sum does not depend on the partition of keys into
                    // tasks
                    [sum] => *sum += total(lanes),
                    _ => key_rows
                        .iter()
                        .zip(lanes)
                        .for_each(|(&key, &ds)| sums[annulus_core::index(key)] += ds),
                }
            }
        }
    }
}

/// Sums a row with sixteen partial sums, which the compiler vectorises.
fn total<A: Real>(line: &[A]) -> A {
    const SUMS: usize = 16;
    let mut sums = [A::ZERO; SUMS];
    for line in line.chunks(SUMS) {
        sums.iter_mut().zip(line).for_each(|(sum, &ds)| *sum += ds);
    }
    sums.into_iter().fold(A::ZERO, |total, sum| total + sum)
}

impl<A: Real> BiasPartial<A> {
    /// As [`unify`] of the sums.
    pub(crate) fn unify(&mut self) {
        unify(&mut self.sums);
    }

    /// Returns the sums of one query, or the shared ones if the axis is broadcast.
    fn row_sums(&mut self, head: usize, query: usize) -> &mut [A] {
        let head = if self.heads.contains(&head) { head - self.heads.start } else { 0 };
        let index = if self.queries.contains(&query) { query - self.queries.start } else { 0 };
        &mut self.sums[(head * self.queries.len() + index) * self.keys..][..self.keys]
    }

    /// Adds the visible rows of a dS tile with queries in lanes. `key_rows` are the global rows of
    /// the block's keys.
    pub(crate) fn add(
        &mut self,
        coord: &TileCoord,
        rows: &Range<usize>,
        tile: &[A],
        key_rows: &[u64],
    ) {
        let QueryKeyPairs { queries, keys } = coord.pairs(rows);
        for query in queries {
            let len = self.keys;
            let line = self.row_sums(coord.head, coord.queries.start + query);
            for key in keys.clone() {
                line[bias_column(len, key_rows[coord.keys.start + key])] +=
                    tile[coord.element(query, key)];
            }
        }
    }
}

// Gradient of a bias that is a table: Σ ∂L/∂s over all pairs of an entry.
//
// The sums are exact ([`ExactSum`]), so that they depend neither on the order in which threads add
// nor on their number. Terms are sums over the diagonals of a tile, in the accumulator's type. In
// the reproducible order a tile may hold other queries on another number of ranks, so terms are
// single elements.

/// Gradient of this rank's table.
#[derive(Debug)]
pub(crate) struct TableGradient {
    table: BiasTable,
    /// True if the terms are single elements.
    by_element: bool,
    /// Sums of each head with a row of its own.
    heads: Vec<Mutex<Vec<ExactSum>>>,
}

impl TableGradient {
    /// Allocates the sums; `None` if the bias is not a table.
    pub(crate) fn new(spec: &Spec) -> Result<Option<Self>> {
        let Some(table) = spec.bias_table.clone() else { return Ok(None) };
        let [_, heads, _, entries] = table.shape(spec.dims.q_heads);
        let sums = || memory::filled("sums of dbias", entries, ExactSum::ZERO).map(Mutex::new);
        let heads = (0..heads).map(|_| sums()).collect::<Result<_>>()?;
        Ok(Some(Self { table, by_element: spec.leaf_rows.is_some(), heads }))
    }

    /// Returns the heap bytes.
    pub(crate) fn bytes(&self) -> usize {
        let sums = self.heads.iter().map(|sums| list_bytes(&lock(sums)));
        list_bytes(&self.heads) + sums.sum::<usize>()
    }

    /// Zeroes all sums.
    pub(crate) fn clear(&mut self) {
        self.heads.iter_mut().for_each(|sums| get_mut(sums).fill(ExactSum::ZERO));
    }

    /// Adds the rows `rows` of a dS tile, which is 0 for masked pairs.
    pub(crate) fn add<A: Real>(
        &self,
        scores: &Scores<'_, A>,
        coord: &TileCoord,
        rows: &Range<usize>,
        ds: &[A],
    ) {
        let table = &self.table;
        let head = if self.heads.len() == 1 { 0 } else { coord.head };
        let of_tile = TableTile::new(table, (scores.queries, scores.keys), coord, rows);
        let Some(diagonals) = of_tile.diagonals().filter(|_| !self.by_element) else {
            let mut sums = lock(&self.heads[head]);
            of_tile.each_pair(|element, entry| sums[entry].add(ds[element].to_f64()));
            return;
        };
        let line = diagonals.sums((scores.token, coord.vectors), &ds[coord.span(rows)]);
        let mut sums = lock(&self.heads[head]);
        if let Some(entry) = diagonals.only_entry(table) {
            sums[entry].add(line.iter().map(|sum| sum.to_f64()).sum());
            return;
        }
        // neighbours that share an entry are one term
        let mut open = (diagonals.entry(table, 0), 0.0);
        for (t, &sum) in line[..diagonals.len()].iter().enumerate() {
            let entry = diagonals.entry(table, t);
            if entry != open.0 {
                sums[open.0].add(open.1);
                open = (entry, 0.0);
            }
            open.1 += sum.to_f64();
        }
        sums[open.0].add(open.1);
    }

    /// Writes dbias `[1, heads|1, 1, entries]`.
    pub(crate) fn write<A: Real>(&mut self, mut into: ArrayViewMut4<'_, A>) {
        let sums = self.heads.iter_mut().flat_map(|sums| get_mut(sums).iter());
        into.iter_mut().zip(sums).for_each(|(into, sum)| *into = A::from_f64(sum.total()));
    }

    /// Appends the numbers of the sums, in the order of dbias.
    pub(crate) fn add_terms(&mut self, into: &mut Vec<f64>) -> Result<()> {
        for sums in &mut self.heads {
            let sums = get_mut(sums);
            memory::reserve("the sums of dbias", into, sums.len() * ExactSum::NUMBERS)?;
            into.extend(sums.iter().flat_map(ExactSum::numbers));
        }
        Ok(())
    }
}
