//! Backend calls of the passes over keys: dk and dv alone, all gradients in one pass, and dk and dv
//! from received queries.

use annulus_core::{
    BackwardInputs, Block, Error, Host, HostBuffer, HostView, Inputs, RankLeaves, RankShard,
    Result, Rows, Tick, Visibility,
};

use crate::{
    backward::{
        dkv::{DkvPass, QueryStatisticsSource},
        dq::backward_dq,
        fused::{exchange_dq, fuses_leaves, run_fused, run_fused_leaves},
        reduction::{GroupGradients, KvSplit},
    },
    forward::query_pass::keys_and_values,
    gather,
    simd::dispatch::Real,
    threads::team::Team,
    tile::{
        bias::ListBias,
        input::{Acc, TileInput, TileSource, array, elements_mut},
        prefetch::prefetch_first_tile,
        scores::Scores,
    },
    workspace::{
        bias_gradient::BiasGradient,
        leaves::KeyLeaves,
        records::{QueryRecord, bytes_mut},
        state::{DqLayout, PassState},
    },
};

/// Gradients that one call computes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Wanted {
    /// dk and dv.
    Dkv,
    /// dq, dk, dv and dbias.
    All,
}

/// Computes the contribution of this rank's queries to dk and dv of a block and, with
/// [`Wanted::All`], adds that of the block to dq and dbias.
fn attend_block<E: TileInput>(
    team: &Team,
    state: &mut PassState<Acc<E>>,
    inputs: &BackwardInputs<HostView<'_>>,
    block: &Block<'_, Host>,
    partial_grad: &mut HostBuffer,
    wanted: Wanted,
    tick: Tick<'_>,
) -> Result<()> {
    state.update_query_tiles(team, block.rows)?;
    let PassState {
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
        ..
    } = state;
    let PassState { arrivals, key_leaves, table_gradient, tile_list_bias, .. } = state;
    let tile_aligned = geometry.with_tile_aligned_strips();
    let plan = shard.leaves.as_deref();
    let (geometry, k_rows) = match (plan, wanted) {
        (None, Wanted::All) => (&tile_aligned, tile_aligned.key_block()),
        _ => (&*geometry, *k_rows),
    };
    let spec = &*shard.spec;
    let (k, v): (TileSource<'_, E>, TileSource<'_, E>) =
        keys_and_values(shard, &inputs.forward, block)?;
    prefetch_first_tile(spec.dims, block.rows.len(), [&k, &v]);
    let queries = &*shard.queries;
    let keys = block.rows;
    let visibility = shard.visibility(queries, keys);
    let bias = inputs.forward.bias.map(|bias| array("bias", bias)).transpose()?;
    let gradient_row_layout = spec.gradient_row_layout();
    let sums = elements_mut::<Acc<E>>(bytes_mut(partial_grad)?, keys.len(), &gradient_row_layout)?;
    let in_records = |gradient: &&BiasGradient<_>| plan.is_some() && gradient.in_records();
    let list_bias = ListBias::of(visibility.key_lists);
    let pass = DkvPass {
        geometry,
        k_rows,
        visibility,
        query_tiles,
        scores: Scores { spec, token: geometry.token, queries, keys, bias, list_bias },
        k,
        v,
        q: TileSource::tensor(array("q", inputs.forward.q)?),
        dout: TileSource::tensor(array("dout", inputs.dout)?),
        statistics: QueryStatisticsSource::Local(statistics),
        gradient_row_layout,
        add: false,
        bias_in_records: bias_gradient.as_ref().filter(in_records),
        table_gradient: table_gradient.as_ref(),
        list_gradient: tile_list_bias.as_ref(),
    };
    if let Some(plan) = plan {
        arrive(plan, key_leaves, queries, sums)?;
    }
    match (plan, wanted) {
        (None, Wanted::Dkv) => pass.run(team, scratch, sums, tick),
        (None, Wanted::All) => {
            exchange_dq(blocks, shared_dq);
            let to = GroupGradients {
                geometry,
                blocks,
                sums: shared_dq,
                block_index,
                q_rows: *q_rows,
                bias: bias_gradient.as_ref(),
                split: KvSplit::new(spec, geometry, team.threads(), keys.len()),
            };
            run_fused(&pass, (team, scratch), sums, &to, ordered, tick);
            exchange_dq(blocks, shared_dq);
        }
        (Some(plan), Wanted::Dkv) => {
            pass.run_leaves(team, scratch, (&plan.queries, key_leaves), sums, tick);
        }
        (Some(plan), Wanted::All) => {
            arrivals.arrive(shard, keys)?;
            let blocks = (&mut blocks[..], &block_index[..], *q_rows);
            let leaves = (&*arrivals, key_leaves);
            run_fused_leaves(&pass, plan, (team, scratch), sums, blocks, leaves, tick);
        }
    }
    Ok(())
}

/// Divides a block of queries into leaves. Without any leaf, dk and dv are 0.
fn arrive<A: Real>(
    plan: &RankLeaves,
    key_leaves: &mut KeyLeaves<A>,
    queries: &Rows,
    sums: &mut [A],
) -> Result<()> {
    if plan.queries.steps().is_empty() {
        sums.fill(A::ZERO);
    }
    key_leaves.arrive(plan, queries)
}

/// Adds the contribution of received queries to dk and dv of this rank's keys in `final_grad`.
pub(crate) fn backward_dkv_from_queries<E: TileInput>(
    team: &Team,
    state: &mut PassState<Acc<E>>,
    inputs: &Inputs<HostView<'_>>,
    block: &Block<'_, Host>,
    final_grad: &mut HostBuffer,
    tick: Tick<'_>,
) -> Result<()> {
    let PassState { shard, geometry, k_rows, scratch, query_tiles, .. } = state;
    let PassState { key_leaves, bias_gradient, received_mask, received_index, .. } = state;
    let spec = &*shard.spec;
    let record = QueryRecord::of(shard);
    let bytes = block.buffer.bytes();
    let queries = block.rows;
    let keys = &*shard.keys;
    let source = |field| TileSource::<E>::records(bytes, queries.len(), &record.layout, field);
    let bias_was_sent = record.bias::<Acc<E>>(bytes, queries.len())?;
    let mask_was_sent = record.mask(bytes, queries.len(), spec.dims.kv_len, received_mask)?;
    let own = shard.visibility(queries, keys);
    let key_lists = if queries.rows() == shard.queries.rows() {
        own.key_lists
    } else {
        reject_missing_rows(shard, bias_was_sent.is_some(), mask_was_sent)?;
        match &shard.received_lists {
            Some(lists) => {
                Some(lists.of_rows(queries.rows(), spec.dims.q_heads, received_index)?)
            }
            None => None,
        }
    };
    let attention_mask =
        if mask_was_sent { Some(&*received_mask) } else { shard.attention_mask.as_deref() };
    let visibility = Visibility { attention_mask, key_lists, ..own };
    let bias = match bias_was_sent {
        Some(bias) => Some(bias),
        None => inputs.bias.map(|bias| array("bias", bias)).transpose()?,
    };
    let gradient_row_layout = spec.gradient_row_layout();
    query_tiles.refill(team, scratch, &visibility, spec)?;
    let list_bias = ListBias::of(visibility.key_lists);
    let pass = DkvPass {
        geometry,
        k_rows: *k_rows,
        visibility,
        query_tiles,
        scores: Scores { spec, token: geometry.token, queries, keys, bias, list_bias },
        k: TileSource::tensor(array("k", inputs.k)?),
        v: TileSource::tensor(array("v", inputs.v)?),
        q: source(0)?,
        dout: source(1)?,
        statistics: QueryStatisticsSource::Received { bytes, record: &record },
        gradient_row_layout,
        add: shard.leaves.is_none(),
        bias_in_records: bias_gradient.as_ref().filter(|gradient| gradient.in_records()),
        table_gradient: None,
        list_gradient: None,
    };
    let layout = pass.gradient_row_layout.clone();
    let sums = elements_mut::<Acc<E>>(bytes_mut(final_grad)?, keys.len(), &layout)?;
    let Some(plan) = &shard.leaves else {
        pass.run(team, scratch, sums, tick);
        return Ok(());
    };
    arrive(plan, key_leaves, queries, sums)?;
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
    if shard.key_lists.is_some() && shard.received_lists.is_none() {
        return Err(Error::unsupported("key_lists", by));
    }
    match shard.spec.bias {
        Some([_, _, queries, _]) if queries != 1 && !has_bias => {
            Err(Error::unsupported("bias that differs between queries", by))
        }
        _ => Ok(()),
    }
}

/// Adds the contribution of a block of keys to dq and dbias, and writes that of this rank's queries
/// to dk and dv.
pub(crate) fn backward_fused<E: TileInput>(
    team: &Team,
    state: &mut PassState<Acc<E>>,
    inputs: &BackwardInputs<HostView<'_>>,
    block: &Block<'_, Host>,
    partial_grad: &mut HostBuffer,
    tick: Tick<'_>,
) -> Result<()> {
    if gather::backward::backward::<E>(team, state, inputs, block, partial_grad, &mut *tick)? {
        return Ok(());
    }
    if state.shard.leaves.is_some() {
        if !fuses_leaves(state, team.threads(), block.rows) {
            state.dq_layout = DqLayout::Strips;
            return backward_separate::<E>(team, state, inputs, block, Some(partial_grad), tick);
        }
        // one thread takes all blocks of a plane: they must be adjacent
        state.arrange_backward();
    }
    attend_block::<E>(team, state, inputs, block, partial_grad, Wanted::All, tick)
}

/// As [`backward_fused`], with one pass for dq and dbias, and another for dk and dv if they are
/// wanted.
pub(crate) fn backward_separate<E: TileInput>(
    team: &Team,
    state: &mut PassState<Acc<E>>,
    inputs: &BackwardInputs<HostView<'_>>,
    block: &Block<'_, Host>,
    partial_grad: Option<&mut HostBuffer>,
    tick: Tick<'_>,
) -> Result<()> {
    backward_dq::<E>(team, state, inputs, block, &mut *tick)?;
    match partial_grad {
        // no kernel follows one that was stopped
        Some(partial_grad) if tick().is_continue() => {
            attend_block::<E>(team, state, inputs, block, partial_grad, Wanted::Dkv, tick)
        }
        _ => Ok(()),
    }
}
