//! Forward call of the backend: leaf by leaf in the reproducible order; otherwise split-KV decode
//! where the workspace has memory for it, else tiles.

use annulus_core::{Block, Host, Inputs, Result, Tick};

use crate::{
    forward::query_pass::QueryPass,
    threads::team::Team,
    tile::input::{Acc, Input},
    workspace::state::{State, Summed},
};

/// Attends to one block: updates softmax statistics and accumulators of all queries.
pub(crate) fn attend<E: Input<Accumulator: Summed>>(
    team: &Team,
    state: &mut State<Acc<E>>,
    inputs: &Inputs<'_, Host>,
    block: &Block<'_, Host>,
    tick: Tick<'_>,
) -> Result<()> {
    let task_rows = state.arrange_forward();
    let State { shard, geometry, blocks, scratch, decode, in_place, arrivals, .. } = state;
    let State { query_tiles, .. } = state;
    let pass =
        QueryPass::<E>::new(geometry, task_rows, shard, query_tiles, inputs, block, *in_place)?;
    QueryPass::<E>::invalidate_query_tiles(scratch);
    if let Some(leaves) = &shard.leaves {
        arrivals.refill(&leaves.keys, leaves.rows, block.rows)?;
        pass.attend_leaves(team, scratch, blocks, (task_rows, leaves, arrivals), tick);
        return Ok(());
    }
    if let Some(decode) = decode
        && decode.attend(&pass, team, scratch, blocks, &mut *tick)
    {
        return Ok(());
    }
    pass.attend_tiles(team, scratch, blocks, task_rows, tick);
    Ok(())
}
