//! Sets of local row indices as sorted, disjoint, non-touching half-open ranges.

use std::ops::Range;

/// A set of local row indices of one rank.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct RowSet {
    ranges: Vec<Range<u64>>,
}

impl RowSet {
    /// The empty set.
    pub const fn new() -> Self {
        Self { ranges: Vec::new() }
    }

    /// The rows `0..count`.
    pub fn all(count: u64) -> Self {
        std::iter::once(0..count).collect()
    }

    /// The ranges in ascending order.
    pub fn ranges(&self) -> &[Range<u64>] {
        &self.ranges
    }

    /// How many rows.
    pub fn count(&self) -> u64 {
        self.ranges.iter().map(|range| range.end - range.start).sum()
    }

    /// Whether there are none.
    pub const fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// Whether `row` is in the set.
    pub fn contains(&self, row: u64) -> bool {
        let after = self.ranges.partition_point(|range| range.end <= row);
        self.ranges.get(after).is_some_and(|range| range.start <= row)
    }

    /// The rows in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = u64> + '_ {
        self.ranges.iter().cloned().flatten()
    }

    /// Rows of either.
    pub fn union(&self, other: &Self) -> Self {
        self.ranges.iter().chain(&other.ranges).cloned().collect()
    }

    /// Rows of both.
    pub fn intersection(&self, other: &Self) -> Self {
        let mut ranges = Vec::new();
        let (mut i, mut j) = (0, 0);
        while let (Some(a), Some(b)) = (self.ranges.get(i), other.ranges.get(j)) {
            let (start, end) = (a.start.max(b.start), a.end.min(b.end));
            if start < end {
                ranges.push(start..end);
            }
            if a.end <= b.end { i += 1 } else { j += 1 }
        }
        Self { ranges }
    }

    /// Rows of `self` that are not in `other`.
    pub fn difference(&self, other: &Self) -> Self {
        let mut ranges = Vec::new();
        for range in &self.ranges {
            let mut start = range.start;
            for hole in
                &other.ranges[other.ranges.partition_point(|hole| hole.end <= range.start)..]
            {
                if hole.start >= range.end {
                    break;
                }
                if start < hole.start {
                    ranges.push(start..hole.start);
                }
                start = start.max(hole.end);
            }
            if start < range.end {
                ranges.push(start..range.end);
            }
        }
        Self { ranges }
    }

    /// Whether every row of `other` is here.
    pub fn contains_all(&self, other: &Self) -> bool {
        other.difference(self).is_empty()
    }

    /// Where the rows `part` (a subset of `self`) lie in a buffer that holds exactly the rows of `self` in ascending order:
    /// ranges of places, in order.
    pub fn record_ranges(&self, part: &Self) -> Vec<Range<u64>> {
        let mut places: Vec<Range<u64>> = Vec::new();
        let (mut before, mut i) = (0, 0);
        for range in &part.ranges {
            while let Some(own) = self.ranges.get(i).filter(|own| own.end <= range.start) {
                before += own.end - own.start;
                i += 1;
            }
            if let Some(own) = self.ranges.get(i) {
                let start = before + (range.start - own.start);
                let end = start + (range.end - range.start);
                match places.last_mut() {
                    Some(last) if last.end == start => last.end = end,
                    _ => places.push(start..end),
                }
            }
        }
        places
    }
}

impl FromIterator<Range<u64>> for RowSet {
    /// Any ranges, in any order, overlapping or empty.
    fn from_iter<I: IntoIterator<Item = Range<u64>>>(ranges: I) -> Self {
        let mut all: Vec<Range<u64>> =
            ranges.into_iter().filter(|range| range.start < range.end).collect();
        all.sort_unstable_by_key(|range| range.start);
        let mut merged: Vec<Range<u64>> = Vec::with_capacity(all.len());
        for range in all {
            match merged.last_mut() {
                Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
                _ => merged.push(range),
            }
        }
        Self { ranges: merged }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    fn set() -> impl Strategy<Value = (RowSet, BTreeSet<u64>)> {
        prop::collection::vec((0u64..40, 0u64..8), 0..8).prop_map(|pairs| {
            let ranges: Vec<_> = pairs.iter().map(|&(start, count)| start..start + count).collect();
            (ranges.iter().cloned().collect(), ranges.into_iter().flatten().collect())
        })
    }

    proptest! {
        #[test]
        fn behaves_as_a_set((a, x) in set(), (b, y) in set()) {
            let rows = |set: &RowSet| set.iter().collect::<BTreeSet<_>>();
            prop_assert_eq!(rows(&a), x.clone());
            prop_assert_eq!(a.count(), x.len() as u64);
            prop_assert_eq!(rows(&a.union(&b)), &x | &y);
            prop_assert_eq!(rows(&a.intersection(&b)), &x & &y);
            prop_assert_eq!(rows(&a.difference(&b)), &x - &y);
            prop_assert_eq!(a.contains_all(&b), x.is_superset(&y));
            for row in 0..50 {
                prop_assert_eq!(a.contains(row), x.contains(&row));
            }
            for window in a.ranges().windows(2) {
                prop_assert!(window[0].end < window[1].start);
            }
        }

        #[test]
        fn places_point_at_the_rows((a, x) in set(), (b, _) in set()) {
            let part = a.intersection(&b);
            let order: Vec<u64> = x.into_iter().collect();
            let found: Vec<u64> = a.record_ranges(&part).into_iter().flatten().map(|place| order[place as usize]).collect();
            prop_assert_eq!(found, part.iter().collect::<Vec<_>>());
        }
    }
}
