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
        reduction::{KeyTask, PlaneLeaves},
    },
    simd::dispatch::Real,
    threads::team::Team,
    tile::{
        input::{Acc, Input},
        tile_mask::TILE,
    },
    workspace::{
        key_leaves::KeyLeaves,
        leaves::Arrivals,
        query_block::QueryBlock,
        scratch::Scratch,
        state::{State, Summed},
    },
};

/// Products of a tile in the separate passes, and in the fused one.
const PRODUCTS: [usize; 2] = [7, 5];

/// True if the fused pass can compute the gradients of a block, and takes less time than separate
/// passes. Those divide a plane among threads, and the fused one does not.
pub(super) fn fuses_leaves<A: Real>(state: &State<A>, threads: usize, keys: &Rows) -> bool {
    let State { shard, geometry, k_rows, bias_gradient, .. } = state;
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

/// Runs all tasks. `records` are the gradient records.
pub(super) fn run_fused_leaves<E: Input<Accumulator: Summed>>(
    pass: &DkvPass<'_, E>,
    plan: &RankLeaves,
    (team, scratch): (&Team, &mut [Scratch<Acc<E>>]),
    records: &mut [Acc<E>],
    memory: LeafMemory<'_, Acc<E>>,
    tick: Tick<'_>,
) {
    let LeafMemory { blocks, block_index, q_rows, arrivals, key_leaves } = memory;
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
        let mut dq = PlaneLeaves {
            token: pass.geometry.token,
            width: pass.geometry.padded_head_dim(),
            group: dims.group(),
            plane: (plane, planes),
            blocks,
            block_index,
            q_rows,
        };
        for leaf in arrivals.leaves() {
            if let Some(step) = leaf.closes {
                dq.close_leaf(&plan.keys, step);
            }
            for first in leaf.keys.clone().step_by(pass.k_rows) {
                let keys = first..leaf.keys.end.min(first + pass.k_rows);
                let Scratch { rows_key, .. } = scratch;
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

/// Memory of a workspace for [`run_fused_leaves`].
pub(super) struct LeafMemory<'a, A> {
    /// In the order of planes.
    pub(super) blocks: &'a mut [QueryBlock<A>],
    pub(super) block_index: &'a [usize],
    pub(super) q_rows: usize,
    pub(super) arrivals: &'a Arrivals,
    pub(super) key_leaves: &'a mut KeyLeaves<A>,
}
