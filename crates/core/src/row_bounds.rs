//! Compact description of the positions and segment ids of a list of rows, by which most tiles are
//! classified without reading their rows.
//!
//! Refilling a list computes two descriptions in one pass:
//!
//! * **Strided runs** are exact: consecutive rows of one segment whose positions ascend by a
//!   constant step.
//! * **Bounds** are the least and greatest position and segment id of each chunk of 64 rows and of
//!   each group of 4096.

use std::ops::Range;

use crate::{Result, memory};

/// Consecutive rows of one segment at positions `position, position + step, …`, up to the first
/// row of the next run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct StridedRun {
    /// Local index of the first row.
    pub(crate) first: usize,
    /// Position of the first row.
    pub(crate) position: i64,
    /// Difference of consecutive positions, at least 0.
    pub(crate) step: i64,
    /// Segment id; 0 without segment ids.
    pub(crate) segment: i64,
}

impl StridedRun {
    /// Returns the position of the last of `count` rows, at least one.
    pub(crate) const fn last(&self, count: usize) -> i64 {
        self.position.saturating_add(self.step.saturating_mul(count as i64 - 1))
    }
}

/// Bounds of the positions and segment ids of some rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Bounds {
    /// Least and greatest position.
    pub(crate) positions: (i64, i64),
    /// Least and greatest segment id; unbounded without segment ids.
    pub(crate) segments: (i64, i64),
}

impl Bounds {
    /// Bounds of no rows: the identity of [`Bounds::union`].
    pub(crate) const NONE: Self =
        Self { positions: (i64::MAX, i64::MIN), segments: (i64::MAX, i64::MIN) };

    /// Returns the bounds of the rows of both.
    pub(crate) fn union(self, other: Self) -> Self {
        let both = |a: (i64, i64), b: (i64, i64)| (a.0.min(b.0), a.1.max(b.1));
        Self {
            positions: both(self.positions, other.positions),
            segments: both(self.segments, other.segments),
        }
    }
}

/// Rows per chunk. 64 is the usual width of a key tile, so most tiles are one or two chunks.
pub(crate) const CHUNK: usize = 64;
/// Rows per group: 64 chunks, so that a scan of a long sequence visits 1/64 of its chunks.
pub(crate) const GROUP: usize = 64 * CHUNK;
/// Least number of rows with an equal step other than 0 or 1 that start a run. Indices in such a
/// run take a division, which costs more than comparing a few rows one by one.
const MIN_STRIDED_ROWS: usize = 8;

/// Bounds of one chunk, and the index of the run that contains its first row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Chunk {
    bounds: Bounds,
    first_run: usize,
}

/// Strided runs and bounds of one list of rows.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct RowBounds {
    len: usize,
    runs: Vec<StridedRun>,
    chunks: Vec<Chunk>,
    groups: Vec<Bounds>,
}

impl RowBounds {
    /// Computes runs and bounds of rows at `positions` with the ids `segments` (empty, or one per
    /// row). Reuses its memory.
    pub(crate) fn refill(&mut self, positions: &[i64], segments: &[i64]) -> Result<()> {
        self.len = positions.len();
        self.runs.clear();
        self.chunks.clear();
        self.groups.clear();
        const WHAT: &str = "bounds of the rows";
        memory::reserve(WHAT, &mut self.chunks, self.len.div_ceil(CHUNK))?;
        memory::reserve(WHAT, &mut self.groups, self.len.div_ceil(GROUP))?;
        for first in (0..self.len).step_by(CHUNK) {
            let rows = first..self.len.min(first + CHUNK);
            let chunk = if self.continues_last_run(positions, segments, rows.clone()) {
                // positions ascend within one segment, so the first and the last row are the bounds
                let bounds = Bounds {
                    positions: (positions[first], positions[rows.end - 1]),
                    segments: segment_bounds(segments.get(first)),
                };
                Chunk { bounds, first_run: self.runs.len() - 1 }
            } else {
                memory::reserve(WHAT, &mut self.runs, rows.len())?;
                self.push_runs(positions, segments, rows)
            };
            self.chunks.push(chunk);
        }
        self.groups.extend(self.chunks.chunks(GROUP / CHUNK).map(union_of));
        Ok(())
    }

    /// Returns true if all `rows` belong to the last run.
    ///
    /// The loop over the rows has no branch, so that it is vectorised and limited by memory
    /// bandwidth.
    fn continues_last_run(&self, positions: &[i64], segments: &[i64], rows: Range<usize>) -> bool {
        let Some(last) = self.runs.last() else { return false };
        let before = &positions[rows.start - 1..rows.end - 1];
        let here = &positions[rows.clone()];
        let off_step = here
            .iter()
            .zip(before)
            .fold(0, |off, (here, before)| off | (here.wrapping_sub(*before) ^ last.step));
        let off_segment = segments
            .get(rows)
            .unwrap_or_default()
            .iter()
            .fold(0, |off, segment| off | (segment ^ last.segment));
        off_step | off_segment == 0
    }

    /// Appends the runs of `rows`, one chunk.
    fn push_runs(&mut self, positions: &[i64], segments: &[i64], rows: Range<usize>) -> Chunk {
        let mut bounds = Bounds::NONE;
        let first_row = rows.start;
        let mut first_run = 0;
        for row in rows {
            let position = positions[row];
            let segment = segments.get(row).copied().unwrap_or(0);
            let continues = self.runs.last().is_some_and(|last| {
                segment == last.segment
                    && positions[row - 1].checked_add(last.step) == Some(position)
            });
            if !continues {
                let step = step_from(&positions[row..]);
                self.runs.push(StridedRun { first: row, position, step, segment });
            }
            if row == first_row {
                first_run = self.runs.len() - 1;
            }
            bounds = bounds.union(Bounds {
                positions: (position, position),
                segments: segment_bounds(segments.get(row)),
            });
        }
        Chunk { bounds, first_run }
    }

    /// Returns bounds of `rows`: the union of the bounds of all chunks that they touch.
    pub(crate) fn of(&self, rows: &Range<usize>) -> Bounds {
        union_of(&self.chunks[rows.start / CHUNK..rows.end.div_ceil(CHUNK)])
    }

    /// Returns the bounds of the rows `group·GROUP .. (group + 1)·GROUP`.
    pub(crate) fn of_group(&self, group: usize) -> Bounds {
        self.groups[group]
    }

    /// Divides `rows` into strided runs. Returns each part with a run that starts at its first row.
    pub(crate) fn strided_runs(
        &self,
        rows: Range<usize>,
    ) -> impl Iterator<Item = (Range<usize>, StridedRun)> + '_ {
        let of_chunk =
            self.chunks.get(rows.start / CHUNK).map_or(self.runs.len(), |chunk| chunk.first_run);
        // the last run that starts at or before the first row
        let from = of_chunk
            + self.runs[of_chunk..]
                .iter()
                .take(CHUNK)
                .take_while(|run| run.first <= rows.start)
                .count()
                .saturating_sub(1);
        self.runs[from..].iter().enumerate().map_while(move |(index, run)| {
            let next = self.runs.get(from + index + 1);
            let end = next.map_or(self.len, |next| next.first).min(rows.end);
            let first = run.first.max(rows.start);
            let position =
                run.position.wrapping_add(run.step.wrapping_mul((first - run.first) as i64));
            (first < end).then_some((first..end, StridedRun { first, position, ..*run }))
        })
    }
}

fn union_of(chunks: &[Chunk]) -> Bounds {
    chunks.iter().fold(Bounds::NONE, |all, chunk| all.union(chunk.bounds))
}

/// Returns the bounds of one segment id. Without an id they are unbounded, so that they overlap
/// with every id.
fn segment_bounds(segment: Option<&i64>) -> (i64, i64) {
    segment.map_or((i64::MIN, i64::MAX), |&segment| (segment, segment))
}

/// Returns the step of the run that starts at the first of `positions`.
fn step_from(positions: &[i64]) -> i64 {
    let step_at = |i: usize| positions.get(i + 1).and_then(|next| next.checked_sub(positions[i]));
    match step_at(0) {
        Some(step @ 0..=1) => step,
        Some(step) if step > 1 && (1..MIN_STRIDED_ROWS).all(|i| step_at(i) == Some(step)) => step,
        // a run of one row, unless the next position is one more
        _ => 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Returns positions in runs of steps −1, 0, 1, 4 and 7, short and long, and segment ids that
    /// are constant over a few rows or many.
    fn lists() -> impl Strategy<Value = (Vec<i64>, Vec<i64>)> {
        let runs = prop::collection::vec(
            (-50i64..50, prop_oneof![Just(-1i64), Just(0), Just(1), Just(4), Just(7)], 1usize..90),
            0..6,
        );
        let segments = prop::collection::vec((-1i64..3, 1usize..120), 0..6);
        (runs, segments, any::<bool>()).prop_map(|(runs, segments, with_segments)| {
            let positions: Vec<i64> = runs
                .iter()
                .flat_map(|&(start, step, count)| (0..count as i64).map(move |i| start + step * i))
                .collect();
            let ids = segments
                .iter()
                .flat_map(|&(id, count)| std::iter::repeat_n(id, count))
                .chain(std::iter::repeat(5));
            let segments =
                if with_segments { ids.take(positions.len()).collect() } else { Vec::new() };
            (positions, segments)
        })
    }

    proptest! {
        #[test]
        fn runs_equal_the_list_and_bounds_contain_it(
            (positions, segments) in lists(),
            (before, _) in lists(),
            cut in 0usize..600,
            count in 0usize..200,
        ) {
            let mut row_bounds = RowBounds::default();
            // no trace of an earlier list remains
            row_bounds.refill(&before, &[]).unwrap();
            row_bounds.refill(&positions, &segments).unwrap();
            let rows = cut.min(positions.len())..(cut + count).min(positions.len());
            let segment = |row: usize| segments.get(row).copied().unwrap_or(0);
            let mut next = rows.start;
            for (part, run) in row_bounds.strided_runs(rows.clone()) {
                prop_assert_eq!(part.start, next);
                next = part.end;
                for (i, row) in part.enumerate() {
                    prop_assert_eq!(run.position + run.step * i as i64, positions[row]);
                    prop_assert_eq!(run.segment, segment(row));
                }
            }
            prop_assert_eq!(next, rows.end);
            if !rows.is_empty() {
                let first = rows.start / CHUNK * CHUNK;
                let end = rows.end.next_multiple_of(CHUNK).min(positions.len());
                let bounds = row_bounds.of(&rows);
                let of_chunks = positions[first..end].iter().copied();
                prop_assert_eq!(Some(bounds.positions.0), of_chunks.clone().min());
                prop_assert_eq!(Some(bounds.positions.1), of_chunks.max());
                let ids = segments.get(first..end).unwrap_or_default().iter().copied();
                prop_assert_eq!(bounds.segments.0, ids.clone().min().unwrap_or(i64::MIN));
                prop_assert_eq!(bounds.segments.1, ids.max().unwrap_or(i64::MAX));
            }
        }
    }

    #[test]
    fn common_lists_have_few_runs() {
        let runs = |positions: Vec<i64>| {
            let mut row_bounds = RowBounds::default();
            row_bounds.refill(&positions, &[]).unwrap();
            row_bounds.strided_runs(0..positions.len()).count()
        };
        assert_eq!(runs((7..1000).collect()), 1);
        assert_eq!(runs((0..1000).map(|i| 3 + 8 * i).collect()), 1);
        assert_eq!(runs(vec![4; 100]), 1);
        // zigzag
        assert_eq!(runs((0..100).chain(700..800).collect()), 2);
        let mut row_bounds = RowBounds::default();
        row_bounds.refill(&(0..10_000).collect::<Vec<_>>(), &[]).unwrap();
        assert_eq!(
            (0..3).map(|group| row_bounds.of_group(group).positions).collect::<Vec<_>>(),
            [(0, 4095), (4096, 8191), (8192, 9999)]
        );
    }
}
