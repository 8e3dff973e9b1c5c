//! Sets of local rows as sorted, disjoint, non-touching half-open ranges.

use std::ops::Range;

/// A set of local rows of one rank.
#[derive(Debug, Default, PartialEq, Eq, Hash)]
pub struct RowSet {
    ranges: Vec<Range<u64>>,
}

impl Clone for RowSet {
    fn clone(&self) -> Self {
        Self { ranges: self.ranges.clone() }
    }

    /// Reuses the memory, so that a ring step does not allocate.
    fn clone_from(&mut self, source: &Self) {
        self.ranges.clone_from(&source.ranges);
    }
}

impl RowSet {
    /// Creates the empty set.
    pub const fn new() -> Self {
        Self { ranges: Vec::new() }
    }

    /// Creates the set of rows `0..count`.
    pub fn all(count: u64) -> Self {
        std::iter::once(0..count).collect()
    }

    /// Returns the ranges in ascending order.
    pub fn ranges(&self) -> &[Range<u64>] {
        &self.ranges
    }

    /// Returns the number of rows.
    pub fn count(&self) -> u64 {
        self.ranges.iter().map(|range| range.end - range.start).sum()
    }

    /// Returns true if the set is empty.
    pub const fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// Returns true if `row` is in the set. O(log ranges).
    pub fn contains(&self, row: u64) -> bool {
        let after = self.ranges.partition_point(|range| range.end <= row);
        self.ranges.get(after).is_some_and(|range| range.start <= row)
    }

    /// Returns the rows in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = u64> + '_ {
        self.ranges.iter().cloned().flatten()
    }

    /// Returns the rows of the set that are in `rows`, in ascending order. O(log ranges) before the
    /// first one.
    pub fn rows_within(&self, rows: Range<u64>) -> impl Iterator<Item = u64> + '_ {
        let first = self.ranges.partition_point(|range| range.end <= rows.start);
        self.ranges[first..]
            .iter()
            .take_while(move |range| range.start < rows.end)
            .flat_map(move |range| range.start.max(rows.start)..range.end.min(rows.end))
    }

    /// Returns the rows that are in `self` or in `other`.
    pub fn union(&self, other: &Self) -> Self {
        self.ranges.iter().chain(&other.ranges).cloned().collect()
    }

    /// Adds the rows of `other`. Allocates only if there are further ones.
    pub fn unite(&mut self, other: &Self) {
        if !self.contains_all(other) {
            *self = self.union(other);
        }
    }

    /// Removes the rows that are not in `other`. Allocates only if there are some.
    pub fn intersect(&mut self, other: &Self) {
        if !other.contains_all(self) {
            *self = self.intersection(other);
        }
    }

    /// Returns the rows that are in `self` and in `other`.
    pub fn intersection(&self, other: &Self) -> Self {
        let mut ranges = Vec::new();
        let mut i = 0;
        let mut j = 0;
        while let (Some(a), Some(b)) = (self.ranges.get(i), other.ranges.get(j)) {
            let both = a.start.max(b.start)..a.end.min(b.end);
            if !both.is_empty() {
                ranges.push(both);
            }
            if a.end <= b.end { i += 1 } else { j += 1 }
        }
        Self { ranges }
    }

    /// Returns the rows of `self` that are not in `other`.
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

    /// Returns true if every row of `other` is in `self`.
    pub fn contains_all(&self, other: &Self) -> bool {
        let mut own = &self.ranges[..];
        // ranges of `self` do not touch, so that one of them contains all of a range of `other`
        other.ranges.iter().all(|range| {
            own = &own[own.iter().take_while(|own| own.end <= range.start).count()..];
            own.first().is_some_and(|own| own.start <= range.start && range.end <= own.end)
        })
    }

    /// Returns the record numbers of the rows `part`, a subset of `self`, in a buffer that holds
    /// one record per row of `self` in ascending order.
    pub fn record_ranges(&self, part: &Self) -> Vec<Range<u64>> {
        let mut records: Vec<Range<u64>> = Vec::new();
        // number of rows in the ranges of `self` before range i
        let mut before = 0;
        let mut i = 0;
        for range in &part.ranges {
            while let Some(own) = self.ranges.get(i).filter(|own| own.end <= range.start) {
                before += own.end - own.start;
                i += 1;
            }
            if let Some(own) = self.ranges.get(i) {
                let start = before + (range.start - own.start);
                let end = start + (range.end - range.start);
                match records.last_mut() {
                    Some(last) if last.end == start => last.end = end,
                    _ => records.push(start..end),
                }
            }
        }
        records
    }
}

impl FromIterator<Range<u64>> for RowSet {
    /// Creates the union of any ranges, which may be unordered, overlapping or empty.
    fn from_iter<I: IntoIterator<Item = Range<u64>>>(ranges: I) -> Self {
        let mut all: Vec<Range<u64>> =
            ranges.into_iter().filter(|range| range.start < range.end).collect();
        if all.is_sorted_by(|a, b| a.end < b.start) {
            return Self { ranges: all };
        }
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
        fn operations_match_those_of_a_btree_set((a, x) in set(), (b, y) in set()) {
            let rows = |set: &RowSet| set.iter().collect::<BTreeSet<_>>();
            prop_assert_eq!(rows(&a), x.clone());
            prop_assert_eq!(a.count(), x.len() as u64);
            prop_assert_eq!(rows(&a.union(&b)), &x | &y);
            prop_assert_eq!(rows(&a.intersection(&b)), &x & &y);
            prop_assert_eq!(rows(&a.difference(&b)), &x - &y);
            prop_assert_eq!(a.contains_all(&b), x.is_superset(&y));
            let [mut both, mut common] = [a.clone(), a.clone()];
            both.unite(&b);
            common.intersect(&b);
            prop_assert_eq!((both, common), (a.union(&b), a.intersection(&b)));
            for row in 0..50 {
                prop_assert_eq!(a.contains(row), x.contains(&row));
                for end in row..50 {
                    let within: Vec<_> = a.rows_within(row..end).collect();
                    prop_assert_eq!(within, x.range(row..end).copied().collect::<Vec<_>>());
                }
            }
            for window in a.ranges().windows(2) {
                prop_assert!(window[0].end < window[1].start);
            }
        }

        #[test]
        fn records_are_those_of_the_rows((a, x) in set(), (b, _) in set()) {
            let part = a.intersection(&b);
            let row_of_record: Vec<u64> = x.into_iter().collect();
            let records = a.record_ranges(&part).into_iter().flatten();
            let rows: Vec<u64> = records.map(|record| row_of_record[record as usize]).collect();
            prop_assert_eq!(rows, part.iter().collect::<Vec<_>>());
        }
    }
}
