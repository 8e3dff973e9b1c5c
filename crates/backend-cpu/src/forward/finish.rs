//! Epilogue of the forward pass: adds the sinks, once, divides and writes the rows.
//!
//! Runs after the last block of the pass, unless the tasks of that block have written the outputs
//! ([`crate::forward::tiles`]).

use annulus_core::{HostView, HostViewMut, Inputs, Outputs, Result, Tick};

use crate::{
    forward::outputs::{NextStrip, OutputAxis, OutputRows, StripOutput, strip_sums},
    simd::dispatch::Real,
    threads::team::Team,
    tile::input::{Acc, TileInput, array},
    workspace::state::PassState,
};

/// Adds the sinks and writes the outputs. The workspace is unchanged. Ticks between ranges of rows,
/// and with sinks, of which there may be many, between strips.
pub(crate) fn finish<E: TileInput>(
    team: &Team,
    state: &mut PassState<Acc<E>>,
    inputs: &Inputs<HostView<'_>>,
    outputs: &mut Outputs<HostViewMut<'_>>,
    tick: Tick<'_>,
) -> Result<()> {
    finish_leaves(team, state, &mut *tick);
    let sinks = inputs.sinks.map(|sinks| array::<Acc<E>>("softmax_aux", sinks)).transpose()?;
    let outputs = OutputRows::<E>::of(outputs)?;
    let items = outputs.parts(OutputAxis::Rows, state.q_rows).enumerate();
    let mut scratch = std::mem::take(&mut state.scratch);
    let state_read = &*state;
    let geometry = &state_read.geometry;
    let group = geometry.dims.group();
    team.run(&mut scratch, items, Some(tick), |_, (index, mut outputs), ticker| {
        // all heads of a range of rows before the next rows: they are adjacent in the outputs
        for strip in geometry.strips(outputs.rows()) {
            let mut blocks = state_read.blocks_of_rows(index).peekable();
            while let Some(block) = blocks.next() {
                if sinks.is_some() && ticker.should_stop() {
                    return;
                }
                for group_head in 0..group {
                    let head = geometry.heads(block.kv_head).start + group_head;
                    let sums = match blocks.peek() {
                        _ if group_head + 1 < group => {
                            strip_sums(geometry, block, group_head + 1, &strip)
                        }
                        Some(next) => strip_sums(geometry, next, 0, &strip),
                        None => &[],
                    };
                    let next_head = Some(head + 1).filter(|&head| head < geometry.dims.q_heads);
                    outputs.write_strip(&StripOutput {
                        geometry,
                        normalize: state_read.shard.spec.normalize,
                        sinks,
                        block,
                        group_head,
                        strip: &strip,
                        batch: block.batch,
                        head,
                        first_row: strip.rows.start,
                        next: Some(NextStrip { sums, head: next_head }),
                    });
                }
            }
        }
    });
    state.scratch = scratch;
    Ok(())
}

/// Closes the last leaf, so that the root of the tree is the result of every query. Does nothing if
/// the order is not reproducible.
fn finish_leaves<A: Real>(team: &Team, state: &mut PassState<A>, tick: Tick<'_>) {
    let PassState { shard, geometry, blocks, scratch, arrivals, .. } = state;
    let Some(plan) = &shard.leaves else { return };
    team.run(scratch, blocks.iter_mut(), Some(tick), |_, block, _| {
        if let Some(step) = arrivals.open() {
            block.close_forward_leaf(geometry, &plan.keys, step);
        }
        block.finish_forward_leaves();
    });
}
