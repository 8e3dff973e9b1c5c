//! Forward call of the backend: leaf by leaf in the reproducible order; otherwise split-KV decode
//! where the workspace has memory for it, else tiles.

use annulus_core::{Block, Host, Inputs, Outputs, Result, Tick};

use crate::{
    forward::{outputs::OutputRows, query_pass::QueryPass},
    threads::team::Team,
    tile::input::{Acc, Input},
    workspace::{
        leaves::ArrivingKeys,
        state::{BlockOrder, State, Summed},
    },
};

/// Attends to one block: updates softmax statistics and accumulators of all queries.
///
/// With `outputs`, those of the pass whose last block it is, returns true if it has written them,
/// unless it was stopped.
pub(crate) fn attend<E: Input<Accumulator: Summed>>(
    team: &Team,
    state: &mut State<Acc<E>>,
    inputs: &Inputs<'_, Host>,
    block: &Block<'_, Host>,
    outputs: Option<&mut Outputs<'_, Host>>,
    tick: Tick<'_>,
) -> Result<bool> {
    let (task_rows, task_order) = state.arrange_forward();
    if outputs.is_none() && state.decode.is_none() {
        // more blocks may follow
        state.keep_queries()?;
    }
    state.update_query_tiles(team, block.rows)?;
    let State { shard, geometry, blocks, scratch, decode, arrivals, .. } = state;
    let State { query_tiles, attended, .. } = state;
    let mut pass = QueryPass::<E>::new(geometry, task_rows, shard, query_tiles, inputs, block)?;
    pass.is_only_block = !std::mem::replace(attended, true);
    if let Some(leaves) = &shard.leaves {
        arrivals.refill(&leaves.keys, leaves.rows, block.rows)?;
        let arriving = ArrivingKeys { merges: &leaves.keys, arrivals };
        pass.attend_leaves(team, scratch, blocks, (task_rows, arriving), tick);
        return Ok(false);
    }
    if let Some(decode) = decode
        && decode.attend(&pass, team, scratch, blocks, &mut *tick)
    {
        return Ok(false);
    }
    // if tasks were long, rows of one head would be written apart from those of the next head,
    // with which they share pages and cache lines; partial results are not in the inputs' type
    let has_outputs = task_order == BlockOrder::Rows && !shard.spec.partial;
    let outputs = outputs.filter(|_| has_outputs).map(OutputRows::of).transpose()?;
    let has_outputs = outputs.is_some();
    pass.attend_tiles(team, scratch, blocks, task_rows, outputs, tick);
    Ok(has_outputs)
}
