//! Fused backward: dq, dk, dv and dbias of one block of keys in one pass.
//!
//! ```text
//! for each task (batch row, KV head, range of keys):                         parallel
//!     for each key block of up to 512 keys:
//!         for each tile of 64 queries that attend to some of them, late queries first:
//!             wait until the tasks before this one have passed the tile (`threads/`)
//!             for each query head of the KV head, for each tile of 64 keys:
//!                 S, dP, dS, P as in `backward_dkv`
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

use std::sync::Mutex;

use annulus_core::Tick;

use crate::{
    backward::{
        dkv::DkvPass,
        kv_split::KvSplit,
        reduction::{KeyTask, SharedGradients, TaskReduction},
    },
    threads::{
        lock::{get_mut, lock},
        ordered_reduction::OrderedReduction,
        team::Team,
    },
    tile::{
        aligned::Aligned,
        input::{Acc, Input},
    },
    workspace::{
        bias_gradient::BiasGradient, query_block::QueryBlock, scratch::Scratch, state::Summed,
    },
};

/// Runs all tasks. `records` are the gradient records.
pub(super) fn run_fused<E: Input<Accumulator: Summed>>(
    pass: &DkvPass<'_, E>,
    team: &Team,
    scratch: &mut [Scratch<Acc<E>>],
    records: &mut [Acc<E>],
    memory: FusedMemory<'_, Acc<E>>,
    tick: Tick<'_>,
) {
    let FusedMemory { blocks, shared_dq, block_index, q_rows, bias, ordered, split } = memory;
    // each block's dq moves behind a lock, and back after the pass
    blocks
        .iter_mut()
        .zip(&mut *shared_dq)
        .for_each(|(block, shared_dq)| std::mem::swap(&mut block.sums, get_mut(shared_dq)));
    let to = &SharedGradients {
        token: pass.geometry.token,
        width: pass.geometry.padded_head_dim(),
        group: pass.geometry.dims.group(),
        batch_and_kv_heads: (pass.geometry.dims.batch, pass.geometry.dims.kv_heads),
        blocks,
        sums: shared_dq,
        block_index,
        q_rows,
        bias,
        split,
    };
    let chain = |plane| if split.chained { 0 } else { plane };
    let tasks = split.tasks().inspect(|&(task, plane, _)| ordered.enqueue(task, chain(plane)));
    // tasks write disjoint elements of the same records, under a lock held once per key block
    let records = Mutex::new(records);
    team.run(scratch, tasks, Some(tick), |scratch, (task, plane, keys), ticker| {
        let mut reduction = TaskReduction {
            to,
            slot: ordered.slot(task, chain(plane)),
            plane,
            keys_in_place: None,
        };
        let batch = plane / to.batch_and_kv_heads.1;
        let kv_head = plane % to.batch_and_kv_heads.1;
        for first in keys.clone().step_by(pass.k_rows) {
            let task = KeyTask { batch, kv_head, keys: first..keys.end.min(first + pass.k_rows) };
            reduction.keys_in_place = pass.keys_in_place(&task);
            if reduction.keys_in_place.is_none() {
                let Scratch { rows_key, .. } = scratch;
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
    blocks
        .iter_mut()
        .zip(shared_dq)
        .for_each(|(block, shared_dq)| std::mem::swap(&mut block.sums, get_mut(shared_dq)));
}

/// Memory of a workspace for [`run_fused`].
pub(super) struct FusedMemory<'a, A> {
    pub(crate) blocks: &'a mut [QueryBlock<A>],
    /// One per block.
    pub(crate) shared_dq: &'a mut [Mutex<Aligned<A>>],
    pub(crate) block_index: &'a [usize],
    pub(crate) q_rows: usize,
    pub(crate) bias: Option<&'a BiasGradient<A>>,
    pub(crate) ordered: &'a OrderedReduction,
    pub(crate) split: KvSplit,
}
