//! Reduction of final gradients into the local dK/dV.
//!
//! The first records of a row are copied, which initialises the row, and all others are added.

use std::ops::Range;

use annulus_core::{Arrived, BackwardPass, Reduction, Result, RowSet, Space};

/// Pairs `(into, from)` of ranges of record numbers, of equal lengths.
pub(crate) type RangePairs = Vec<(Range<u64>, Range<u64>)>;

/// A reduction of the gradient records of one message into the local dK/dV.
#[derive(Debug, Default)]
pub(crate) struct HomeReduce {
    /// Records that are the first of their rows.
    pub(crate) copied: RangePairs,
    /// All other records.
    pub(crate) added: RangePairs,
}

impl HomeReduce {
    /// Splits `pairs` by whether their rows are `unwritten`, and removes them from that set.
    pub(super) fn split(pairs: RangePairs, unwritten: &mut RowSet) -> Self {
        let mut reduce = Self::default();
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
                    reduce.added.push((next..copied.start, from_of(&(next..copied.start))));
                }
                next = copied.end;
                reduce.copied.push((copied.clone(), from_of(&copied)));
            }
            if next < into.end {
                reduce.added.push((next..into.end, from_of(&(next..into.end))));
            }
        }
        *unwritten =
            unwritten.difference(&reduce.copied.iter().map(|(into, _)| into.clone()).collect());
        reduce
    }

    /// Reduces the records of a buffer into the local dK/dV.
    pub(super) fn run<S: Space>(
        &self,
        pass: &mut impl BackwardPass<S>,
        local_dkv: &mut S::Buffer,
        arrived: &Arrived<S>,
    ) -> Result<()> {
        let Arrived { buffer, ready } = arrived;
        for (pairs, reduction) in [(&self.copied, Reduction::Copy), (&self.added, Reduction::Add)] {
            if !pairs.is_empty() {
                pass.reduce(local_dkv, buffer, ready, pairs, reduction)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(ranges: &[Range<u64>]) -> RowSet {
        ranges.iter().cloned().collect()
    }

    #[test]
    fn the_first_records_of_a_row_are_copied_and_all_others_added() {
        let mut unwritten = set(&[4..8, 10..20]);
        // a message with rows 2..6 and 7..12, as records 0..4 and 4..9
        let first = HomeReduce::split(vec![(2..6, 0..4), (7..12, 4..9)], &mut unwritten);
        assert_eq!(first.copied, [(4..6, 2..4), (7..8, 4..5), (10..12, 7..9)]);
        assert_eq!(first.added, [(2..4, 0..2), (8..10, 5..7)]);
        assert_eq!(unwritten, set(&[6..7, 12..20]));
        let again = HomeReduce::split(vec![(4..7, 0..3)], &mut unwritten);
        assert_eq!((again.copied, again.added), (vec![(6..7, 2..3)], vec![(4..6, 0..2)]));
        let rest = HomeReduce::split(vec![(12..20, 0..8)], &mut unwritten);
        assert!(rest.added.is_empty() && rest.copied == [(12..20, 0..8)] && unwritten.is_empty());
    }
}
