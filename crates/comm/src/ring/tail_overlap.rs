//! The local block's backward in two parts, so that the last gradients have tiles to overlap with.
//!
//! ```text
//! step 0            tiles of the head rows of the local block    ← overlap the first block's arrival
//! steps 1 …         tiles of the blocks that arrive              ← overlap blocks, and gradients of the step before
//! after the last    tiles of the tail rows of the local block    ← overlap the last gradients on their way home
//! ```
//! Without the tail the last gradients would travel while no rank computes. Each rank splits its
//! own rows when a plan is made; no message depends on it.

use std::ops::Range;

use annulus_core::{
    Arrived, BackwardPass, Error, Group, Message, Reduction, Result, RowSet, Rows, Schedule, Space,
    Spec, mask::Query,
};

use super::{block_parts::split_rows, plan::RingPlan, program::RangePairs};

/// Number of queries and of keys that are sampled to estimate work.
const SAMPLES: usize = 64;

/// Returns the number of rows of the local block that are attended to in step 0; all of them if
/// there is nothing to overlap after the last step.
///
/// Head and tail get work in proportion to the bytes of the transfers that they overlap.
pub(super) fn head_rows(
    spec: &Spec,
    schedule: &Schedule,
    ring_index: usize,
    shard: (&Rows, &Rows),
    kv_tile: u64,
) -> u64 {
    let (queries, keys) = shard;
    let all = keys.len() as u64;
    let steps = &schedule.steps[ring_index];
    let Some(last) = last_step(schedule, ring_index) else { return all };
    let rows =
        |messages: &[Message]| messages.iter().map(|message| message.rows.count()).sum::<u64>();
    let bytes = |group: &Group, record: u64| rows(&group.sends).max(rows(&group.receives)) * record;
    let first = bytes(&steps[0].before, spec.kv_row_layout().bytes());
    let after = bytes(&steps[last].after, spec.gradient_row_layout().bytes());
    let tile = split_rows(all, kv_tile);
    if after == 0 || all < 2 * tile {
        return all;
    }
    let share = first as f64 / (first + after) as f64;
    let rows = share_of_work(spec, queries, keys, share) * all as f64;
    // at least a tile each
    ((rows / tile as f64).round() as u64 * tile).clamp(tile, (all - 1) / tile * tile)
}

/// Returns the last step in which this rank computes, sends or receives.
pub(super) fn last_step(schedule: &Schedule, ring_index: usize) -> Option<usize> {
    let idle = |group: &Group| group.sends.is_empty() && group.receives.is_empty();
    schedule.steps[ring_index]
        .iter()
        .rposition(|step| !(step.rows.is_empty() && idle(&step.before) && idle(&step.after)))
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
        let (row, position) = (queries.rows()[query], queries.positions(0)[query]);
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

/// A reduction of gradient records into the local dK/dV.
#[derive(Debug, Default)]
pub(crate) struct HomeReduce {
    /// First records of their rows: copied.
    pub(crate) copied: RangePairs,
    /// All others.
    pub(crate) added: RangePairs,
}

impl HomeReduce {
    /// Splits `pairs` by whether their rows are `unwritten`, and removes them from that set.
    pub(super) fn split(pairs: RangePairs, unwritten: &mut RowSet) -> Self {
        let mut home = Self::default();
        for (into, from) in pairs {
            let mut next = into.start;
            let from_of = |rows: &Range<u64>| {
                from.start + (rows.start - into.start)..from.start + (rows.end - into.start)
            };
            let begin = unwritten.ranges().partition_point(|range| range.end <= into.start);
            for range in
                unwritten.ranges()[begin..].iter().take_while(|range| range.start < into.end)
            {
                let copied = range.start.max(into.start)..range.end.min(into.end);
                if next < copied.start {
                    home.added.push((next..copied.start, from_of(&(next..copied.start))));
                }
                next = copied.end;
                home.copied.push((copied.clone(), from_of(&copied)));
            }
            if next < into.end {
                home.added.push((next..into.end, from_of(&(next..into.end))));
            }
        }
        *unwritten =
            unwritten.difference(&home.copied.iter().map(|(into, _)| into.clone()).collect());
        home
    }

    /// Reduces the records of a buffer into the local dK/dV.
    pub(super) fn run<S: Space>(
        &self,
        pass: &mut impl BackwardPass<S>,
        home: &mut S::Buffer,
        arrived: &Arrived<S>,
    ) -> Result<()> {
        let Arrived { buffer, ready } = arrived;
        for (pairs, reduction) in [(&self.copied, Reduction::Copy), (&self.added, Reduction::Add)] {
            if !pairs.is_empty() {
                pass.reduce(home, buffer, ready, pairs, reduction)?;
            }
        }
        Ok(())
    }
}

impl RingPlan {
    /// Returns the number of tail rows of the local block.
    pub(super) fn tail_rows(&self) -> u64 {
        self.keys.len() as u64 - self.program.head_rows
    }

    /// Returns the tail as local rows.
    pub(super) fn tail_set(&self) -> RowSet {
        std::iter::once(self.program.head_rows..self.keys.len() as u64).collect()
    }

    /// Returns the tail's records in a buffer with the whole local block.
    pub(super) fn tail_of<S: Space>(&self, local_kv: &S::Buffer) -> Result<S::Buffer> {
        let tail = self.kv_bytes(self.program.head_rows)..self.local_kv_bytes();
        S::part(local_kv, tail).ok_or_else(|| Error::internal("a block that cannot be split"))
    }
}

#[cfg(test)]
mod tests {
    use annulus_core::{
        Alignment, DType, Dims, Host, Layout, Order, RingShards, Route, mask::Causal,
    };

    use super::*;
    use crate::ring::plan::Agreed;

    fn set(ranges: &[Range<u64>]) -> RowSet {
        ranges.iter().cloned().collect()
    }

    #[test]
    fn the_first_records_of_a_row_are_written_and_all_others_added() {
        let mut unwritten = set(&[4..8, 10..20]);
        // rows 2..6 and 7..12 came, as records 0..4 and 4..9
        let home = HomeReduce::split(vec![(2..6, 0..4), (7..12, 4..9)], &mut unwritten);
        assert_eq!(home.copied, [(4..6, 2..4), (7..8, 4..5), (10..12, 7..9)]);
        assert_eq!(home.added, [(2..4, 0..2), (8..10, 5..7)]);
        assert_eq!(unwritten, set(&[6..7, 12..20]));
        let again = HomeReduce::split(vec![(4..7, 0..3)], &mut unwritten);
        assert_eq!((again.copied, again.added), (vec![(6..7, 2..3)], vec![(4..6, 0..2)]));
        let rest = HomeReduce::split(vec![(12..20, 0..8)], &mut unwritten);
        assert!(rest.added.is_empty() && rest.copied == [(12..20, 0..8)] && unwritten.is_empty());
    }

    #[test]
    fn both_parts_have_the_work_of_what_they_hide() {
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
                kv_tile: 64,
                backward: true,
            };
            let plan = RingPlan::derive::<Host>(&agreed, rank, coordinates).unwrap();
            (plan.program.head_rows, plan.keys.len() as u64)
        };
        // as many bytes of gradients as of keys and values; every key is seen by all
        assert_eq!(head(false, &Layout::Contiguous, Route::RelayUp, 0, 1024), (256, 512));
        // the first of the two chunks is seen by 3 times as many queries as the second: 0.5 = (3 of 4)·(x of the chunk, all of its queries seen …)
        let (rows, all) = head(true, &Layout::Zigzag, Route::RelayDown, 0, 4096);
        assert!((576..=768).contains(&rows) && all == 2048, "{rows} of {all}");
        // rank 0 needs no block of rank 1's, and sends one; gradients of its own come home
        let (rows, all) = head(true, &Layout::Contiguous, Route::RelayUp, 0, 1024);
        assert!(0 < rows && rows < all, "{rows} of {all}");
        // too short to be divided
        assert_eq!(head(false, &Layout::Contiguous, Route::RelayUp, 0, 30), (15, 15));
    }
}
