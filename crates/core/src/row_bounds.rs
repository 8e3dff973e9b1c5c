//! What a list of rows looks like from afar, so that most tiles are classified without looking at their rows.
//!
//! Two views, made in one pass when rows are refilled. **Stretches** say the list exactly: neighbouring rows whose positions rise by one step and
//! whose segment id is the same. **Extents** bound it: least and greatest position and segment id of every 64 rows, and of every 4096.

use std::ops::Range;

use crate::{Result, memory};

/// Neighbouring rows at positions `position, position + step, …` with one segment id. It ends where the next begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct StridedRun {
    /// Local index of its first row.
    pub(crate) first: usize,
    /// Position of its first row.
    pub(crate) position: i64,
    /// 0 or more.
    pub(crate) step: i64,
    /// Segment id; 0 if there are none.
    pub(crate) segment: i64,
}

/// Bounds of positions and segment ids of some rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Bounds {
    /// Least and greatest position.
    pub(crate) positions: (i64, i64),
    /// Least and greatest segment id; unbounded if there are none.
    pub(crate) segments: (i64, i64),
}

impl Bounds {
    /// Of no rows.
    pub(crate) const NONE: Self =
        Self { positions: (i64::MAX, i64::MIN), segments: (i64::MAX, i64::MIN) };

    /// Of the rows of both.
    pub(crate) fn with(self, other: Self) -> Self {
        let both = |a: (i64, i64), b: (i64, i64)| (a.0.min(b.0), a.1.max(b.1));
        Self {
            positions: both(self.positions, other.positions),
            segments: both(self.segments, other.segments),
        }
    }
}

/// Rows a chunk.
pub(crate) const CHUNK: usize = 64;
/// Rows a group of chunks.
pub(crate) const GROUP: usize = 64 * CHUNK;
/// A step other than 0 or 1 is taken up only for this many rows: indices by division cost more than a few comparisons.
const FEW: usize = 8;

/// The outline of one list of rows.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct RowBounds {
    len: usize,
    stretches: Vec<StridedRun>,
    /// per chunk: its extent, and which stretch its first row is in
    chunks: Vec<(Bounds, usize)>,
    groups: Vec<Bounds>,
}

impl RowBounds {
    /// Describes rows at `positions` with the segment ids `segments` (none, or as many). Keeps its memory.
    pub(crate) fn refill(&mut self, positions: &[i64], segments: &[i64]) -> Result<()> {
        self.len = positions.len();
        self.stretches.clear();
        self.chunks.clear();
        self.groups.clear();
        const WHAT: &str = "outlines of the rows";
        memory::reserve(WHAT, &mut self.chunks, self.len.div_ceil(CHUNK))?;
        memory::reserve(WHAT, &mut self.groups, self.len.div_ceil(GROUP))?;
        for first in (0..self.len).step_by(CHUNK) {
            let rows = first..self.len.min(first + CHUNK);
            let chunk = if self.goes_on(positions, segments, rows.clone()) {
                // ascending and of one segment: the ends say all
                let extent = Bounds {
                    positions: (positions[first], positions[rows.end - 1]),
                    segments: bounds_of(segments.get(first)),
                };
                (extent, self.stretches.len() - 1)
            } else {
                memory::reserve(WHAT, &mut self.stretches, rows.len())?;
                self.describe(positions, segments, rows)
            };
            self.chunks.push(chunk);
        }
        self.groups.extend(
            self.chunks
                .chunks(GROUP / CHUNK)
                .map(|chunks| chunks.iter().fold(Bounds::NONE, |all, chunk| all.with(chunk.0))),
        );
        Ok(())
    }

    /// Whether all `rows` belong to the last stretch. Branch-free over the rows, so that it runs at the speed of memory.
    fn goes_on(&self, positions: &[i64], segments: &[i64], rows: Range<usize>) -> bool {
        let Some(last) = self.stretches.last() else { return false };
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

    /// Appends the stretches of `rows`.
    fn describe(
        &mut self,
        positions: &[i64],
        segments: &[i64],
        rows: Range<usize>,
    ) -> (Bounds, usize) {
        let mut extent = Bounds::NONE;
        let first = rows.start;
        let mut first_in = 0;
        for row in rows {
            let (position, segment) = (positions[row], segments.get(row).copied().unwrap_or(0));
            let goes_on = self.stretches.last().is_some_and(|last| {
                segment == last.segment
                    && positions[row - 1].checked_add(last.step) == Some(position)
            });
            if !goes_on {
                self.stretches.push(StridedRun {
                    first: row,
                    position,
                    step: step_from(&positions[row..]),
                    segment,
                });
            }
            if row == first {
                first_in = self.stretches.len() - 1;
            }
            extent = extent.with(Bounds {
                positions: (position, position),
                segments: bounds_of(segments.get(row)),
            });
        }
        (extent, first_in)
    }

    /// Bounds of the rows `rows`, perhaps with some of their neighbours in the same chunks.
    pub(crate) fn extent(&self, rows: &Range<usize>) -> Bounds {
        self.chunks[rows.start / CHUNK..rows.end.div_ceil(CHUNK)]
            .iter()
            .fold(Bounds::NONE, |all, chunk| all.with(chunk.0))
    }

    /// Bounds of group `group`: the rows `group·GROUP .. (group + 1)·GROUP`.
    pub(crate) fn group(&self, group: usize) -> Bounds {
        self.groups[group]
    }

    /// The rows `rows` as stretches, cut to fit: which of them, and the stretch from there on.
    pub(crate) fn stretches(
        &self,
        rows: Range<usize>,
    ) -> impl Iterator<Item = (Range<usize>, StridedRun)> + '_ {
        let from =
            self.chunks.get(rows.start / CHUNK).map_or(self.stretches.len(), |chunk| chunk.1);
        let tail = &self.stretches[from..];
        let from = from
            + tail
                .iter()
                .take(CHUNK)
                .take_while(|stretch| stretch.first <= rows.start)
                .count()
                .saturating_sub(1);
        self.stretches[from..].iter().enumerate().map_while(move |(place, stretch)| {
            let end = self
                .stretches
                .get(from + place + 1)
                .map_or(self.len, |next| next.first)
                .min(rows.end);
            let first = stretch.first.max(rows.start);
            let position = stretch
                .position
                .wrapping_add(stretch.step.wrapping_mul((first - stretch.first) as i64));
            (first < end).then_some((first..end, StridedRun { first, position, ..*stretch }))
        })
    }
}

/// One id's bounds; those of a row without one meet every id.
fn bounds_of(segment: Option<&i64>) -> (i64, i64) {
    segment.map_or((i64::MIN, i64::MAX), |&segment| (segment, segment))
}

/// The step by which positions rise from the first of them on.
fn step_from(positions: &[i64]) -> i64 {
    let step_at = |i: usize| positions.get(i + 1).and_then(|next| next.checked_sub(positions[i]));
    match step_at(0) {
        Some(step @ 0..=1) => step,
        Some(step) if step > 1 && (1..FEW).all(|i| step_at(i) == Some(step)) => step,
        // alone
        _ => 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Lists as they come: runs of steps −1, 0, 1, 4, … of a few rows or of many, with segment ids that stay for a while.
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
        fn stretches_say_the_list_and_extents_bound_it((positions, segments) in lists(), (before, _) in lists(), cut in 0usize..600, count in 0usize..200) {
            let mut outline = RowBounds::default();
            // refilling leaves nothing behind
            outline.refill(&before, &[]).unwrap();
            outline.refill(&positions, &segments).unwrap();
            let rows = cut.min(positions.len())..(cut + count).min(positions.len());
            let segment = |row: usize| segments.get(row).copied().unwrap_or(0);
            let mut next = rows.start;
            for (part, stretch) in outline.stretches(rows.clone()) {
                prop_assert_eq!(part.start, next);
                next = part.end;
                for (i, row) in part.enumerate() {
                    prop_assert_eq!(stretch.position + stretch.step * i as i64, positions[row]);
                    prop_assert_eq!(stretch.segment, segment(row));
                }
            }
            prop_assert_eq!(next, rows.end);
            let chunked = rows.start / CHUNK * CHUNK..rows.end.next_multiple_of(CHUNK).min(positions.len());
            if !rows.is_empty() {
                let extent = outline.extent(&rows);
                prop_assert_eq!(Some(extent.positions.0), positions[chunked.clone()].iter().copied().min());
                prop_assert_eq!(Some(extent.positions.1), positions[chunked.clone()].iter().copied().max());
                let ids = segments.get(chunked).unwrap_or_default().iter().copied();
                prop_assert_eq!(extent.segments.0, ids.clone().min().unwrap_or(i64::MIN));
                prop_assert_eq!(extent.segments.1, ids.max().unwrap_or(i64::MAX));
            }
        }
    }

    #[test]
    fn usual_lists_are_one_stretch() {
        let stretches = |positions: Vec<i64>| {
            let mut outline = RowBounds::default();
            outline.refill(&positions, &[]).unwrap();
            outline.stretches(0..positions.len()).count()
        };
        assert_eq!(stretches((7..1000).collect()), 1);
        assert_eq!(stretches((0..1000).map(|i| 3 + 8 * i).collect()), 1);
        assert_eq!(stretches(vec![4; 100]), 1);
        // zigzag
        assert_eq!(stretches((0..100).chain(700..800).collect()), 2);
        // groups are bounded too
        let mut outline = RowBounds::default();
        outline.refill(&(0..10_000).collect::<Vec<_>>(), &[]).unwrap();
        assert_eq!(
            (0..3).map(|group| outline.group(group).positions).collect::<Vec<_>>(),
            [(0, 4095), (4096, 8191), (8192, 9999)]
        );
    }
}
