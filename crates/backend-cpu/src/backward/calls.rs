//! Backend calls of the passes over keys: dk and dv alone, all gradients in one pass, and dk and dv
//! from received queries.

use annulus_core::{
    BackwardInputs, Block, Error, Host, HostBuffer, Inputs, RankLeaves, RankShard, Result, Rows,
    Tick, Visibility,
};

use crate::{
    backward::{
        dkv::{DkvPass, QueryStatisticsSource},
        fused::{FusedMemory, run_fused},
        kv_split::KvSplit,
    },
    forward::query_pass::keys_and_values,
    simd::{dispatch::Real, float::Float},
    threads::team::Team,
    tile::{
        input::{Acc, Input, Source, array, elements_mut},
        scores::Scores,
    },
    workspace::{
        leaves::{GradientLeaves, query_leaves, unify},
        records::{QueryRecord, bytes_mut},
        scratch::Scratch,
        state::{State, Summed},
    },
};

/// Computes the contribution of this rank's queries to dk and dv of a block, into `partial_grad`.
pub(crate) fn backward_dkv<E: Input<Accumulator: Summed>>(
    team: &Team,
    state: &mut State<Acc<E>>,
    inputs: &BackwardInputs<'_, Host>,
    block: &Block<'_, Host>,
    partial_grad: &mut HostBuffer,
    tick: Tick<'_>,
) -> Result<()> {
    attend_block::<E>(team, state, inputs, block, partial_grad, false, tick)
}

/// Computes the contribution of this rank's queries to dk and dv of a block and, if `fused`, adds
/// that of the block to dq and dbias.
fn attend_block<E: Input<Accumulator: Summed>>(
    team: &Team,
    state: &mut State<Acc<E>>,
    inputs: &BackwardInputs<'_, Host>,
    block: &Block<'_, Host>,
    partial_grad: &mut HostBuffer,
    fused: bool,
    tick: Tick<'_>,
) -> Result<()> {
    let State {
        shard,
        geometry,
        q_rows,
        k_rows,
        blocks,
        shared_dq,
        block_index,
        scratch,
        statistics,
        bias_gradient,
        ordered,
        query_tiles,
        in_place,
        ..
    } = state;
    let tile_aligned = geometry.with_tile_aligned_strips();
    let (geometry, k_rows) =
        if fused { (&tile_aligned, tile_aligned.key_block()) } else { (&*geometry, *k_rows) };
    let spec = &*shard.spec;
    let (k, v): (Source<'_, E>, Source<'_, E>) =
        keys_and_values(shard, &inputs.forward, block, *in_place)?;
    let attention_mask = shard.attention_mask.as_deref();
    let queries = &*shard.queries;
    let keys = block.rows;
    let visibility = Visibility { mask: &*spec.mask, attention_mask, queries, keys };
    let bias = inputs.forward.bias.map(|bias| array("bias", bias)).transpose()?;
    let gradient_row_layout = spec.gradient_row_layout();
    let sums = elements_mut::<Acc<E>>(bytes_mut(partial_grad)?, keys.len(), &gradient_row_layout)?;
    query_tiles.refill(team, scratch, &visibility, spec)?;
    let pass = DkvPass {
        geometry,
        k_rows,
        visibility,
        query_tiles,
        scores: Scores { spec, token: geometry.token, queries, keys, bias },
        k,
        v,
        q: Source::tensor(array("q", inputs.forward.q)?),
        dout: Source::tensor(array("dout", inputs.dout)?),
        statistics: QueryStatisticsSource::Local(statistics),
        gradient_row_layout,
        queries: 0..queries.len(),
        add: false,
    };
    if fused {
        let split = KvSplit::new(spec, geometry, team.threads(), keys.len());
        let memory = FusedMemory {
            blocks,
            shared_dq,
            block_index,
            q_rows: *q_rows,
            bias: bias_gradient.as_ref(),
            ordered,
            split,
        };
        run_fused(&pass, team, scratch, sums, memory, tick);
    } else {
        pass.run(team, scratch, sums, tick);
    }
    Ok(())
}

/// Adds the contribution of received queries to dk and dv of this rank's keys in `final_grad`.
pub(crate) fn backward_dkv_from_queries<E: Input<Accumulator: Summed>>(
    team: &Team,
    state: &mut State<Acc<E>>,
    inputs: &Inputs<'_, Host>,
    block: &Block<'_, Host>,
    final_grad: &mut HostBuffer,
    tick: Tick<'_>,
) -> Result<()> {
    let State { shard, geometry, k_rows, scratch, query_tiles, gradient_leaves, .. } = state;
    let spec = &*shard.spec;
    let queries_are_local = block.rows.rows() == shard.queries.rows();
    reject_missing_rows(shard, queries_are_local)?;
    let record = spec.query_row_layout();
    let bytes = block.buffer.bytes();
    let source = |field| Source::<E>::records(bytes, block.rows.len(), &record, field);
    let attention_mask = shard.attention_mask.as_deref();
    let queries = block.rows;
    let keys = &*shard.keys;
    let visibility = Visibility { mask: &*spec.mask, attention_mask, queries, keys };
    let bias = inputs.bias.map(|bias| array("bias", bias)).transpose()?;
    let gradient_row_layout = spec.gradient_row_layout();
    query_tiles.refill(team, scratch, &visibility, spec)?;
    let mut pass = DkvPass {
        geometry,
        k_rows: *k_rows,
        visibility,
        query_tiles,
        scores: Scores { spec, token: geometry.token, queries, keys, bias },
        k: Source::tensor(array("k", inputs.k)?),
        v: Source::tensor(array("v", inputs.v)?),
        q: source(0)?,
        dout: source(1)?,
        statistics: QueryStatisticsSource::Received { bytes, record: QueryRecord::of(spec) },
        gradient_row_layout,
        queries: 0..queries.len(),
        add: true,
    };
    if let Some(plan) = &shard.leaves {
        let call = LeafCall { plan, leaves: gradient_leaves, rows: queries };
        return add_query_leaves(&mut pass, (team, scratch), call, final_grad, tick);
    }
    let layout = pass.gradient_row_layout.clone();
    let sums = elements_mut::<Acc<E>>(bytes_mut(final_grad)?, keys.len(), &layout)?;
    pass.run(team, scratch, sums, tick);
    Ok(())
}

/// Leaves of a block of queries, and the state of the tree over them.
struct LeafCall<'a> {
    plan: &'a RankLeaves,
    leaves: &'a mut GradientLeaves,
    rows: &'a Rows,
}

/// Computes dk and dv of each leaf of the block into `current`, and merges it with those that wait
/// for it. After the last leaf of the pass `current` is the root.
fn add_query_leaves<E: Input<Accumulator: Summed>>(
    pass: &mut DkvPass<'_, E>,
    (team, scratch): (&Team, &mut [Scratch<Acc<E>>]),
    call: LeafCall<'_>,
    current: &mut HostBuffer,
    tick: Tick<'_>,
) -> Result<()> {
    let LeafCall { plan, leaves, rows } = call;
    let layout = pass.gradient_row_layout.clone();
    let keys = pass.visibility.keys.len();
    pass.add = false;
    let steps = plan.queries.steps();
    if steps.is_empty() {
        elements_mut::<Acc<E>>(bytes_mut(current)?, keys, &layout)?.fill(Acc::<E>::ZERO);
    }
    for (leaf, queries) in query_leaves(rows, plan.rows)? {
        let number = leaves.next;
        let Some(step) = steps.get(number).filter(|step| step.leaf == leaf) else {
            return Err(Error::internal(format!("leaf {leaf} of queries arrives out of order")));
        };
        leaves.next += 1;
        pass.queries = queries;
        let sums = elements_mut::<Acc<E>>(bytes_mut(current)?, keys, &layout)?;
        pass.run(team, scratch, sums, &mut *tick);
        for merge in plan.queries.merges(number) {
            let stored = bytes_mut(&mut leaves.slots[merge.slot])?;
            let stored = elements_mut::<Acc<E>>(stored, keys, &layout)?;
            add(team, scratch, sums, stored);
        }
        match step.store {
            Some(slot) => std::mem::swap(current, &mut leaves.slots[slot]),
            None => unify(sums),
        }
    }
    Ok(())
}

/// Elements that a thread adds at a time: 256 KiB of f32, of each operand.
const ADDED: usize = 1 << 16;

/// Adds `stored` to `sums`.
fn add<A: Real>(team: &Team, scratch: &mut [Scratch<A>], sums: &mut [A], stored: &[A]) {
    let chunks = sums.chunks_mut(ADDED).zip(stored.chunks(ADDED));
    team.run(scratch, chunks, None, |_, (sums, stored), _| {
        sums.iter_mut().zip(stored).for_each(|(sum, &stored)| *sum += stored);
    });
}

/// Rejects passes over received queries that need rows of a dense mask or of a full bias: a rank
/// holds these for its own queries only.
fn reject_missing_rows(shard: &RankShard, queries_are_local: bool) -> Result<()> {
    let by = "the two-pass backward of the cpu backend, for queries of other ranks";
    if queries_are_local {
        return Ok(());
    }
    if shard.attention_mask.is_some() {
        return Err(Error::unsupported("attention_mask", by));
    }
    match shard.spec.bias {
        Some([_, _, queries, _]) if queries != 1 => {
            Err(Error::unsupported("a bias that differs between queries", by))
        }
        _ => Ok(()),
    }
}

/// Adds the contribution of a block of keys to dq and dbias, and writes that of this rank's queries
/// to dk and dv.
pub(crate) fn backward_fused<E: Input<Accumulator: Summed>>(
    team: &Team,
    state: &mut State<Acc<E>>,
    inputs: &BackwardInputs<'_, Host>,
    block: &Block<'_, Host>,
    partial_grad: &mut HostBuffer,
    tick: Tick<'_>,
) -> Result<()> {
    attend_block::<E>(team, state, inputs, block, partial_grad, true, tick)
}
