//! Backend calls of the passes over keys: dk and dv alone, all gradients in one pass, and dk and dv
//! from received queries.

use annulus_core::{
    BackwardInputs, Block, Error, Host, HostBuffer, Inputs, RankShard, Result, Tick, Visibility,
    memory,
};

use crate::{
    backward::{
        dkv::{DkvPass, QueryStatisticsSource},
        fused::{FusedMemory, run_fused},
        kv_split::KvSplit,
    },
    forward::query_pass::keys_and_values,
    simd::float::Float,
    threads::team::Team,
    tile::{
        input::{Acc, Input, Source, array, elements_mut},
        scores::Scores,
    },
    workspace::{
        leaves::query_leaves,
        records::{QueryRecord, bytes_mut},
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
        add: false,
        bias_in_records: None,
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
    let State { shard, geometry, k_rows, scratch, query_tiles, .. } = state;
    let State { key_leaves, bias_gradient, received_mask, .. } = state;
    let spec = &*shard.spec;
    let record = QueryRecord::of(shard);
    let bytes = block.buffer.bytes();
    let queries = block.rows;
    let keys = &*shard.keys;
    let source = |field| Source::<E>::records(bytes, queries.len(), &record.layout, field);
    let bias_was_sent = record.bias::<Acc<E>>(bytes, queries.len())?;
    let mask_was_sent = record.mask(bytes, queries.len(), spec.dims.kv_len, received_mask)?;
    if queries.rows() != shard.queries.rows() {
        reject_missing_rows(shard, bias_was_sent.is_some(), mask_was_sent)?;
    }
    let attention_mask =
        if mask_was_sent { Some(&*received_mask) } else { shard.attention_mask.as_deref() };
    let visibility = Visibility { mask: &*spec.mask, attention_mask, queries, keys };
    let bias = match bias_was_sent {
        Some(bias) => Some(bias),
        None => inputs.bias.map(|bias| array("bias", bias)).transpose()?,
    };
    let gradient_row_layout = spec.gradient_row_layout();
    query_tiles.refill(team, scratch, &visibility, spec)?;
    let pass = DkvPass {
        geometry,
        k_rows: *k_rows,
        visibility,
        query_tiles,
        scores: Scores { spec, token: geometry.token, queries, keys, bias },
        k: Source::tensor(array("k", inputs.k)?),
        v: Source::tensor(array("v", inputs.v)?),
        q: source(0)?,
        dout: source(1)?,
        statistics: QueryStatisticsSource::Received { bytes, record: &record },
        gradient_row_layout,
        add: shard.leaves.is_none(),
        bias_in_records: bias_gradient.as_ref().filter(|gradient| gradient.in_records()),
    };
    let layout = pass.gradient_row_layout.clone();
    let sums = elements_mut::<Acc<E>>(bytes_mut(final_grad)?, keys.len(), &layout)?;
    let Some(plan) = &shard.leaves else {
        pass.run(team, scratch, sums, tick);
        return Ok(());
    };
    if plan.queries.steps().is_empty() {
        sums.fill(Acc::<E>::ZERO);
    }
    key_leaves.steps.clear();
    for (leaf, queries) in query_leaves(queries, plan.rows)? {
        let number = key_leaves.next;
        if plan.queries.steps().get(number).is_none_or(|step| step.leaf != leaf) {
            return Err(Error::internal(format!("leaf {leaf} of queries arrives out of order")));
        }
        key_leaves.next += 1;
        memory::reserve("the leaves of a block", &mut key_leaves.steps, 1)?;
        key_leaves.steps.push((number, queries));
    }
    pass.run_leaves(team, scratch, (&plan.queries, key_leaves), sums, tick);
    Ok(())
}

/// Rejects passes over queries of other ranks that need rows of a dense mask or of a bias which
/// were not sent: a rank holds these for its own queries only.
fn reject_missing_rows(shard: &RankShard, has_bias: bool, has_mask: bool) -> Result<()> {
    let by = "the two-pass backward of the cpu backend, for queries of other ranks";
    if shard.attention_mask.is_some() && !has_mask {
        return Err(Error::unsupported("attention_mask", by));
    }
    match shard.spec.bias {
        Some([_, _, queries, _]) if queries != 1 && !has_bias => {
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
