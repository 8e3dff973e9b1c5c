//! Visible pairs of the same queries with the keys of one column after another.
//!
//! A grid has a column for each part of the keys, whose rings have the queries of whole groups. The
//! queries are divided into runs once, not once for each column, and where the pairs of a segment
//! have a closed form, in as few runs as possible. Where they have none and a column has few keys
//! of the segment, the mask is evaluated once for all columns: the number of sampled queries that
//! attend to a position is a step function of the position.

use std::ops::Range;

use super::{
    Choice, choice,
    work::{closed_form, for_each_sample, sampled_pairs},
};
use crate::{
    Mask, RingShards, Spec,
    needs::{DistinctMasks, KeyIndex, SegmentNumbers, StridedRows},
};

/// Queries of the ranks of the rings of all columns, of masks that are equal in all heads and batch
/// rows.
pub(crate) struct ColumnQueries {
    /// Ids of queries and of the keys so far.
    segments: SegmentNumbers,
    /// By rank, in the runs in which queries are sampled.
    of_ranks: Vec<SampledQueries>,
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
        let mut rows = |shards: &RingShards| -> Vec<Vec<StridedRows>> {
            shards.q.iter().map(|shard| segments.numbered_rows(shard, 0)).collect()
        };
        let of_ranks = rows(shards);
        let in_few_runs = in_few_runs.map(rows);
        let stride = choice::stride(spec, Choice::SAMPLES_OF_WORK);
        let of_ranks = of_ranks.into_iter().map(|rows| SampledQueries::new(rows, stride));
        Some(Self { segments, of_ranks: of_ranks.collect(), in_few_runs })
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
        let keys = KeyIndex::of_all_ranks(shards, 0, &mut self.segments);
        let band = mask.band(0, 0);
        let of_segments = band.filter(|band| self.in_few_runs.is_some() && band.has_closed_form());
        // segments whose pairs have a closed form, whatever the runs of queries
        let is_closed: Vec<bool> = (0..self.segments.len())
            .map(|segment| of_segments.is_some() && keys.consecutive(segment).is_some())
            .collect();
        let mut pairs = vec![0; self.of_ranks.len()];
        for (rank, pairs) in pairs.iter_mut().enumerate() {
            if let (Some(band), Some(few)) = (&of_segments, &self.in_few_runs) {
                let closed = few[rank].iter().filter(|rows| is_closed[rows.segment]);
                *pairs += closed
                    .filter_map(|rows| closed_form(band, &keys, rows.segment, &rows.positions))
                    .sum::<u128>();
            }
            *pairs += self.of_ranks[rank].count(mask, &keys, &is_closed, tick);
            *pairs *= u128::from(distinct.repeats());
            tick();
        }
        pairs
    }
}

/// Queries of one rank, of which every `stride`-th of a run is sampled.
struct SampledQueries {
    stride: usize,
    /// Sorted by segment.
    rows: Vec<StridedRows>,
    segments: Vec<SegmentQueries>,
}

/// Queries of one rank and one segment.
struct SegmentQueries {
    segment: usize,
    /// Indices of [`SampledQueries::rows`].
    rows: Range<usize>,
    samples: u64,
    /// Computed when it is first used.
    attending: Option<AttendingQueries>,
}

impl SampledQueries {
    fn new(mut rows: Vec<StridedRows>, stride: usize) -> Self {
        rows.sort_by_key(|rows| rows.segment);
        let mut segments = Vec::new();
        let mut first = 0;
        for of_segment in rows.chunk_by(|a, b| a.segment == b.segment) {
            let samples = of_segment.iter().map(|rows| rows.count.div_ceil(stride as u64)).sum();
            let range = first..first + of_segment.len();
            first = range.end;
            let segment = of_segment[0].segment;
            segments.push(SegmentQueries { segment, rows: range, samples, attending: None });
        }
        Self { stride, rows, segments }
    }

    /// Counts the pairs with keys of the segments that are not `excluded`.
    fn count(
        &mut self,
        mask: &dyn Mask,
        keys: &KeyIndex,
        excluded: &[bool],
        tick: &mut dyn FnMut(),
    ) -> u128 {
        let Self { stride, rows, segments } = self;
        let mut pairs = 0;
        for of_segment in segments.iter_mut().filter(|of| !excluded[of.segment]) {
            let SegmentQueries { segment, samples, attending, .. } = of_segment;
            let rows = &rows[of_segment.rows.clone()];
            // consecutive keys may have a closed form, which is no sample
            let few = keys.consecutive(*segment).is_none() && keys.total(*segment) < *samples;
            if few {
                let attending = attending
                    .get_or_insert_with(|| AttendingQueries::of(mask, rows, *stride, tick));
                keys.for_each_key(*segment, |position| pairs += u128::from(attending.at(position)));
            } else {
                for rows in rows {
                    pairs += sampled_pairs(mask, [0, 0], keys, rows, *stride, tick);
                }
            }
        }
        pairs
    }
}

/// Number of queries that attend to each position.
struct AttendingQueries {
    /// Positions at which the number changes, ascending, with the number from there on.
    changes: Vec<(i64, u64)>,
}

impl AttendingQueries {
    /// Samples every `stride`-th query of `rows`, which represents the queries up to the next.
    fn of(mask: &dyn Mask, rows: &[StridedRows], stride: usize, tick: &mut dyn FnMut()) -> Self {
        let mut changes: Vec<(i64, u64)> = Vec::new();
        for rows in rows {
            for_each_sample(rows.count, stride, tick, |queries, index| {
                for range in mask.bound(&rows.query(0, 0, index)).ranges() {
                    changes.push((range.start, queries));
                    changes.push((range.end, queries.wrapping_neg()));
                }
            });
        }
        changes.sort_unstable_by_key(|(position, _)| *position);
        let mut attending = 0u64;
        for (_, change) in &mut changes {
            // no sum of all changes up to a position is negative
            attending = attending.wrapping_add(*change);
            *change = attending;
        }
        // the last of equal positions has the changes of all
        changes.dedup_by(|next, kept| {
            let is_same = next.0 == kept.0;
            if is_same {
                *kept = *next;
            }
            is_same
        });
        Self { changes }
    }

    /// Returns the number of queries that attend to a position.
    fn at(&self, position: i64) -> u64 {
        let after = self.changes.partition_point(|&(change, _)| change <= position);
        after.checked_sub(1).map_or(0, |last| self.changes[last].1)
    }
}
