//! Fused backward: dq, dk, dv and dbias of one block of keys in one pass.
//!
//! ```text
//! for each task (batch row, KV head, range of keys):                         parallel
//!     for each key block of up to 512 keys:
//!         for each tile of 64 queries that attend to some of them, late queries first:
//!             wait until the tasks before this one have passed the tile (`threads/`)
//!             for each query head of the KV head, for each tile of 64 keys:
//!                 S, dP, dS, P as in `dkv.rs`
//!                 dVᵀ += dOᵀ·P     dKᵀ += Qᵀ·dS     dQ += dS·K     dbias += dS
//! ```
//! Scores and their gradients are computed once: five products per tile, where separate dq and dkv
//! passes take seven. dq, dk and dv have the terms of those passes in the same order (dq: keys
//! ascend, 64 to a chain; dk and dv: queries descend), so that the bits are equal.
//!
//! Each thread works whole (batch row, KV head) planes as long as there is one for every thread.
//! Threads that share a remaining plane split its keys and accumulate into one dq in a fixed task
//! order, so that the result does not depend on the thread count and needs no dq per thread. Late
//! queries come first: under a causal mask a task of late keys is short, and it starts where tasks
//! of early keys have already passed.
//!
//! # Source
//! Dao et al. 2022, algorithm 4, with an ordered reduction in place of atomic additions.
//!
//! Fused backward in the reproducible order: dq, dk and dv of a ring of one rank.
//!
//! ```text
//! for each (batch row, KV head) plane:                                       parallel
//!     for each leaf of keys:
//!         for each range of its keys that is a task, for each leaf of queries:
//!             as in `fused.rs`:  dq += …, dk = …, dv = …
//!             merge dk and dv with the leaves of queries before
//!         merge dq with the leaves of keys before
//! ```
//! Five products per tile. dq, dk and dv have the bits of the separate passes, which a ring of
//! several ranks takes: the kernels sum the same terms in the same order, and the merges are those
//! of the same trees.

use std::sync::Mutex;

use annulus_core::{RankLeaves, Rows, Tick};

use crate::{
    backward::{
        dkv::{ArrivingQueries, DkvPass},
        reduction::{GroupGradients, KeyTask, PlaneLeaves, TaskReduction},
    },
    simd::dispatch::Real,
    threads::{
        ordered_reduction::{OrderedReduction, get_mut, lock},
        team::Team,
    },
    tile::{
        aligned::Aligned,
        input::{Acc, TileInput},
        tile_mask::TILE,
    },
    workspace::{
        leaves::{KeyLeaves, LeafArrivals},
        query_block::QueryBlock,
        scratch::ThreadScratch,
        state::PassState,
    },
};

/// Moves each block's dq behind a lock for the pass, or back.
pub(super) fn exchange_dq<A>(blocks: &mut [QueryBlock<A>], shared_dq: &mut [Mutex<Aligned<A>>]) {
    let pairs = blocks.iter_mut().zip(shared_dq);
    pairs
        .for_each(|(block, shared_dq)| std::mem::swap(&mut block.partial.sums, get_mut(shared_dq)));
}

/// Runs all tasks. `records` are the gradient records.
pub(super) fn run_fused<E: TileInput>(
    pass: &DkvPass<'_, E>,
    (team, scratch): (&Team, &mut [ThreadScratch<Acc<E>>]),
    records: &mut [Acc<E>],
    to: &GroupGradients<'_, Acc<E>>,
    ordered: &OrderedReduction,
    tick: Tick<'_>,
) {
    let split = to.split;
    let kv_heads = pass.geometry.dims.kv_heads;
    let chain = |plane| if split.chained { 0 } else { plane };
    let tasks = split.tasks().inspect(|&(task, plane, _)| ordered.enqueue(task, chain(plane)));
    // tasks write disjoint elements of the same records, under a lock held once per key block
    let records = Mutex::new(records);
    team.run(scratch, tasks, Some(tick), |scratch, (task, plane, keys), ticker| {
        let slot = ordered.slot(task, chain(plane));
        let mut reduction = TaskReduction { to, slot, plane, keys_in_place: None };
        let batch = plane / kv_heads;
        let kv_head = plane % kv_heads;
        for first in keys.clone().step_by(pass.k_rows) {
            let task = KeyTask { batch, kv_head, keys: first..keys.end.min(first + pass.k_rows) };
            reduction.keys_in_place = pass.keys_in_place(&task);
            if reduction.keys_in_place.is_none() {
                let ThreadScratch { rows_key, .. } = scratch;
                rows_key.fill(pass.geometry.token, &pass.k, batch, kv_head, task.keys.clone());
            }
            DkvPass::<E>::begin(scratch);
            let queries = 0..pass.visibility.queries.len();
            pass.accumulate(scratch, &task, &queries, Some(&mut reduction), ticker);
            if ticker.should_stop()
                || !reduction.finish(scratch, &task, pass.visibility.keys, ticker)
            {
                return;
            }
            pass.complete(scratch, &task);
            pass.write(scratch, &task, pass.scale(), &mut lock(&records));
        }
    });
}

/// Products of a tile in the separate passes, and in the fused one.
const PRODUCTS: [usize; 2] = [7, 5];

/// True if the fused pass can compute the gradients of a block, and takes less time than separate
/// passes. Those divide a plane among threads, and the fused one does not.
pub(super) fn fuses_leaves<A: Real>(state: &PassState<A>, threads: usize, keys: &Rows) -> bool {
    let PassState { shard, geometry, k_rows, bias_gradient, .. } = state;
    let Some(plan) = &shard.leaves else { return false };
    let planes = geometry.dims.batch * geometry.dims.kv_heads;
    let [separate, fused] = PRODUCTS;
    let is_shorter = planes.div_ceil(threads) * threads * fused <= planes * separate;
    // a task is whole tiles of one leaf
    let divides = k_rows.is_multiple_of(TILE) && plan.rows.is_multiple_of(*k_rows as u64);
    let ascends = (0..).zip(keys.rows()).all(|(index, &row)| index == row);
    let is_empty = shard.queries.is_empty() || keys.is_empty();
    is_shorter && divides && ascends && !is_empty && bias_gradient.is_none()
}

/// Runs all tasks. `records` are the gradient records. Blocks lie in the order of planes; see
/// [`PassState::block_index`] and [`PassState::q_rows`].
pub(super) fn run_fused_leaves<E: TileInput>(
    pass: &DkvPass<'_, E>,
    plan: &RankLeaves,
    (team, scratch): (&Team, &mut [ThreadScratch<Acc<E>>]),
    records: &mut [Acc<E>],
    (blocks, block_index, q_rows): (&mut [QueryBlock<Acc<E>>], &[usize], usize),
    (arrivals, key_leaves): (&LeafArrivals, &mut KeyLeaves<Acc<E>>),
    tick: Tick<'_>,
) {
    let dims = pass.geometry.dims;
    let planes = dims.batch * dims.kv_heads;
    let arriving = ArrivingQueries { merges: &plan.queries, steps: &key_leaves.steps };
    // tasks write disjoint elements of the same records, under a lock held once per task
    let records = Mutex::new(records);
    let blocks = blocks.chunks_mut(blocks.len() / planes);
    let tasks = key_leaves.tasks.len() / planes;
    let leaves = key_leaves.tasks.chunks_mut(tasks);
    let tasks = blocks.zip(leaves).enumerate();
    team.run(scratch, tasks, Some(tick), |scratch, (plane, (blocks, leaves)), ticker| {
        let (batch, kv_head) = (plane / dims.kv_heads, plane % dims.kv_heads);
        let geometry = pass.geometry;
        let first_block = plane * blocks.len();
        let mut dq = PlaneLeaves { geometry, first_block, blocks, block_index, q_rows };
        for leaf in arrivals.leaves() {
            if let Some(step) = leaf.closes {
                dq.blocks.iter_mut().for_each(|block| block.close_dq_leaf(&plan.keys, step));
            }
            for first in leaf.keys.clone().step_by(pass.k_rows) {
                let keys = first..leaf.keys.end.min(first + pass.k_rows);
                let ThreadScratch { rows_key, .. } = scratch;
                rows_key.fill(pass.geometry.token, &pass.k, batch, kv_head, keys.clone());
                let task = KeyTask { batch, kv_head, keys };
                let leaves = (arriving, &mut leaves[first / pass.k_rows]);
                let dq = Some(&mut dq as _);
                if !pass.accumulate_leaves(scratch, &task, leaves, dq, &records, ticker) {
                    return;
                }
            }
        }
    });
}
