//! The backward pass of the local block in two parts, so that the last gradients have tiles to
//! overlap with.
//!
//! ```text
//! step 0           tiles of the local block's head rows   overlap the first block's arrival
//! steps 1 …        tiles of the blocks that arrive        overlap blocks and gradients
//! after the last   tiles of the local block's tail rows   overlap the last final gradients
//! ```
//! Without the tail no rank would compute while the last gradients are transferred. Each rank
//! splits its own rows when a plan is created; no message depends on it.

use annulus_core::{Rows, Spec, mask::Query};
use annulus_plan::{Group, Message, RankSchedule};

use super::block_parts::SplitSize;

/// Number of queries and of keys that are sampled to estimate work: head and tail are rounded to
/// tiles, so an error of some percent is of no consequence.
const SAMPLES: usize = 64;

/// Returns the number of rows of the local block that are attended to in step 0; all of them if
/// there is nothing to overlap after the last step.
///
/// Head and tail get work in proportion to the bytes of the transfers that they overlap.
pub(super) fn head_rows(
    spec: &Spec,
    schedule: &RankSchedule,
    shard: (&Rows, &Rows),
    split: SplitSize,
) -> u64 {
    let (queries, keys) = shard;
    let all = keys.len() as u64;
    let steps = &schedule.steps;
    let Some(last) = schedule.last_step() else { return all };
    let rows =
        |messages: &[Message]| messages.iter().map(|message| message.rows.count()).sum::<u64>();
    let bytes = |group: &Group, record: u64| rows(&group.sends).max(rows(&group.receives)) * record;
    let first = bytes(&steps[0].before, spec.kv_row_layout().bytes());
    let after = bytes(&steps[last].after, spec.gradient_row_layout().bytes());
    let tile = split.of(all);
    if after == 0 || all < 2 * tile {
        return all;
    }
    let share = first as f64 / (first + after) as f64;
    let rows = share_of_work(spec, queries, keys, share) * all as f64;
    // at least a tile each
    ((rows / tile as f64).round() as u64 * tile).clamp(tile, (all - 1) / tile * tile)
}

/// Returns the share of the keys that makes up the share `share` of the work, estimated by the
/// visible pairs of sampled queries and keys.
fn share_of_work(spec: &Spec, queries: &Rows, keys: &Rows, share: f64) -> f64 {
    let spread = |count: usize| {
        let samples = count.min(SAMPLES);
        (0..samples).map(move |sample| (2 * sample + 1) * count / (2 * samples))
    };
    let mut visible = vec![0u32; keys.len().min(SAMPLES)];
    let positions = keys.positions(0);
    for query in spread(queries.len()) {
        let row = queries.rows()[query];
        let position = queries.positions(0)[query];
        let segment = queries.segments(0).map(|segments| segments[query]);
        let bound = spec.mask.bound(&Query { batch: 0, head: 0, row, position });
        for (visible, key) in visible.iter_mut().zip(spread(keys.len())) {
            let in_segment = segment == keys.segments(0).map(|segments| segments[key]);
            *visible += u32::from(bound.contains(positions[key]) && in_segment);
        }
    }
    let all: u32 = visible.iter().sum();
    let mut left = share * f64::from(all);
    for (sample, &pairs) in visible.iter().enumerate() {
        if f64::from(pairs) > left {
            return (sample as f64 + left / f64::from(pairs)) / visible.len() as f64;
        }
        left -= f64::from(pairs);
    }
    // no pair is visible
    share
}

#[cfg(test)]
mod tests {
    use annulus_core::{Alignment, DType, Dims, Host, Order, mask::Causal};
    use annulus_plan::{Layout, RingShards, Route};

    use super::*;
    use crate::ring::plan::{Agreed, RingPlan};

    #[test]
    fn head_and_tail_have_the_work_that_overlaps_their_transfers() {
        let head = |causal: bool, layout: &Layout, route, rank, n: usize| {
            let spec = Spec::new(Dims::new(1, n, 2, 16), DType::F32);
            let spec = if causal {
                Spec { mask: std::sync::Arc::new(Causal::default()), ..spec }
            } else {
                spec
            };
            let coordinates = RingShards::plain(&spec.dims, Alignment::TopLeft, layout, 2);
            let agreed = Agreed {
                spec: spec.into(),
                layout: layout.clone(),
                route,
                order: Order::ascending(2),
                split: SplitSize { kv_tile: 64, kv_block: 0, whole_tiles: false },
                backward: true,
                posts_ahead: false,
                groups_in_order: false,
                reduces: false,
                receive_ahead: 1,
                numerics: String::new(),
                no_out_residual: None,
            };
            let plan = RingPlan::derive::<Host>(&agreed, rank, coordinates, None, &mut || ());
            let plan = plan.unwrap();
            (plan.program.head_rows, plan.keys.len() as u64)
        };
        // as many bytes of gradients as of keys and values; all queries attend to every key
        assert_eq!(head(false, &Layout::Contiguous, Route::RelayUp, 0, 1024), (256, 512));
        // half of the work is less than half of the rows: three times as many visible pairs have a
        // key of the first of the two chunks as have one of the second
        let (rows, all) = head(true, &Layout::Zigzag, Route::RelayDown, 0, 4096);
        assert!((576..=768).contains(&rows) && all == 2048, "{rows} of {all}");
        // rank 0 needs no block of rank 1, sends its own, and receives its final gradients
        let (rows, all) = head(true, &Layout::Contiguous, Route::RelayUp, 0, 1024);
        assert!(0 < rows && rows < all, "{rows} of {all}");
        // too short to be divided
        assert_eq!(head(false, &Layout::Contiguous, Route::RelayUp, 0, 30), (15, 15));
    }
}
