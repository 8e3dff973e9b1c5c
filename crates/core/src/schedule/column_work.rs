//! Visible pairs of the same queries with the keys of one column after another.
//!
//! A grid has a column for each part of the keys, whose rings have the queries of whole groups. The
//! queries are divided into runs once, not once for each column, and where the pairs of a segment
//! have a closed form, in as few runs as possible.

use super::{
    Choice, choice,
    work::{closed_form, sampled_pairs},
};
use crate::{
    RingShards, Spec,
    needs::{DistinctMasks, KeyIndex, SegmentNumbers, StridedRows},
};

/// Queries of the ranks of the rings of all columns, of masks that are equal in all heads and batch
/// rows.
pub(crate) struct ColumnQueries {
    /// Ids of queries and of the keys so far.
    segments: SegmentNumbers,
    /// By rank, in the runs in which queries are sampled.
    of_ranks: Vec<Vec<StridedRows>>,
    /// The same queries in fewer runs, if there are fewer.
    in_few_runs: Option<Vec<Vec<StridedRows>>>,
}

impl ColumnQueries {
    /// Reads the queries of the ring of one column. `in_few_runs` are shards with the same queries
    /// of each rank in another order. Returns `None` if masks or shards differ between heads or
    /// batch rows. The batch must not differ between ranks ([`Batch::differs_between_ranks`]), so
    /// that the shards of other columns do not differ between batch rows either.
    ///
    /// [`Batch::differs_between_ranks`]: crate::Batch::differs_between_ranks
    pub(crate) fn new(
        spec: &Spec,
        shards: &RingShards,
        in_few_runs: Option<&RingShards>,
    ) -> Option<Self> {
        let distinct = DistinctMasks::new(&*spec.mask, spec.dims.q_heads, spec.dims.batch, shards);
        if distinct.heads().len() != 1 || distinct.batches().len() != 1 {
            return None;
        }
        let mut segments = SegmentNumbers::new(shards);
        let mut rows = |shards: &RingShards| {
            shards.q.iter().map(|shard| segments.numbered_rows(shard, 0)).collect()
        };
        let of_ranks = rows(shards);
        let in_few_runs = in_few_runs.map(rows);
        Some(Self { segments, of_ranks, in_few_runs })
    }

    /// Counts the pairs of each rank with the keys of `shards`, as [`Work::estimate`] does.
    ///
    /// [`Work::estimate`]: super::Work::estimate
    pub(crate) fn estimate(
        &mut self,
        spec: &Spec,
        shards: &RingShards,
        tick: &mut dyn FnMut(),
    ) -> Vec<u128> {
        let mask = &*spec.mask;
        let distinct = DistinctMasks::new(mask, spec.dims.q_heads, spec.dims.batch, shards);
        let stride = choice::stride(spec, Choice::SAMPLES_OF_WORK);
        let keys = KeyIndex::of_all_ranks(shards, 0, &mut self.segments);
        let band = mask.band(0, 0);
        let of_segments = band.filter(|band| self.in_few_runs.is_some() && band.has_closed_form());
        // segments whose pairs have a closed form, whatever the runs of queries
        let is_closed: Vec<bool> = (0..self.segments.len())
            .map(|segment| of_segments.is_some() && keys.consecutive(segment).is_some())
            .collect();
        let all_closed = is_closed.iter().all(|&is_closed| is_closed);
        let mut pairs = vec![0; self.of_ranks.len()];
        for (rank, pairs) in pairs.iter_mut().enumerate() {
            if let (Some(band), Some(few)) = (&of_segments, &self.in_few_runs) {
                let closed = few[rank].iter().filter(|rows| is_closed[rows.segment]);
                *pairs += closed.filter_map(|rows| closed_form(band, &keys, rows)).sum::<u128>();
            }
            let others = self.of_ranks[rank].iter().filter(|rows| !is_closed[rows.segment]);
            for rows in others.take_while(|_| !all_closed) {
                *pairs += sampled_pairs(mask, [0, 0], &keys, rows, stride, tick);
            }
            *pairs *= u128::from(distinct.repeats());
            tick();
        }
        pairs
    }
}
