//! Key intervals: what a mask lowers to for one query.

use std::ops::Range;

use smallvec::SmallVec;

/// Intervals that are stored inline. A window with exempt first keys has two; four leave room for
/// combinations of masks, so that lowering these does not allocate.
const INLINE: usize = 4;

/// A set of key positions as half-open intervals, of any number.
///
/// They are sorted, disjoint, non-touching and not empty. An unbounded side is `i64::MIN` or
/// `i64::MAX`, which is no position. Up to four are stored inline.
///
/// # Examples
/// ```
/// use annulus_core::KeyIntervals;
/// let rows: KeyIntervals = [10..13, 0..3, 2..5].into_iter().collect();
/// assert_eq!(rows.ranges(), [0..5, 10..13]);
/// assert_eq!(rows.and(&KeyIntervals::one(4, 11)).ranges(), [4..5, 10..11]);
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct KeyIntervals {
    ranges: SmallVec<[Range<i64>; INLINE]>,
}

impl KeyIntervals {
    /// Returns the empty set.
    pub fn nothing() -> Self {
        Self { ranges: SmallVec::new() }
    }

    /// Returns the set of all positions.
    pub fn everything() -> Self {
        Self::one(i64::MIN, i64::MAX)
    }

    /// Returns the interval `lo..hi`; the empty set if `lo >= hi`.
    #[inline]
    pub fn one(lo: i64, hi: i64) -> Self {
        let mut ranges = SmallVec::new();
        if lo < hi {
            ranges.push(lo..hi);
        }
        Self { ranges }
    }

    /// Returns the intervals in ascending order.
    #[inline]
    pub fn ranges(&self) -> &[Range<i64>] {
        &self.ranges
    }

    /// Returns true if `position` is in one of the intervals.
    pub fn contains(&self, position: i64) -> bool {
        self.overlaps(position, position)
    }

    /// Returns the intersection. O(intervals of both).
    #[must_use]
    pub fn and(&self, other: &Self) -> Self {
        if let ([a], [b]) = (self.ranges(), other.ranges()) {
            return Self::one(a.start.max(b.start), a.end.min(b.end));
        }
        let mut both = Self::nothing();
        let (mut left, mut right) = (self.ranges(), other.ranges());
        while let ([a, rest @ ..], [b, others @ ..]) = (left, right) {
            both.push(a.start.max(b.start)..a.end.min(b.end));
            // the interval that ends first overlaps nothing further
            if a.end <= b.end { left = rest } else { right = others }
        }
        both
    }

    /// Returns the union. O(intervals of both).
    #[must_use]
    pub fn or(&self, other: &Self) -> Self {
        let mut either = Self::nothing();
        let (mut left, mut right) = (self.ranges(), other.ranges());
        loop {
            let from = match (left.first(), right.first()) {
                (Some(a), Some(b)) if a.start <= b.start => &mut left,
                (Some(_), None) => &mut left,
                (_, Some(_)) => &mut right,
                (None, None) => return either,
            };
            if let Some((first, rest)) = from.split_first() {
                either.push(first.clone());
                *from = rest;
            }
        }
    }

    /// Adds the positions of `other`. In place while each of its intervals extends one of these,
    /// as the intervals of neighbouring rows do.
    pub(crate) fn extend(&mut self, other: &Self) {
        let mut at = match other.ranges() {
            [] => return,
            [first, ..] if self.ranges.len() > INLINE => {
                self.ranges.partition_point(|range| range.end < first.start)
            }
            _ => 0,
        };
        for b in other.ranges() {
            while self.ranges.get(at).is_some_and(|a| a.end < b.start) {
                at += 1;
            }
            match &mut self.ranges[at..] {
                [a, rest @ ..]
                    if a.start <= b.end && rest.first().is_none_or(|next| b.end < next.start) =>
                {
                    *a = a.start.min(b.start)..a.end.max(b.end);
                }
                // intervals extended so far are part of the union
                _ => {
                    *self = self.or(other);
                    return;
                }
            }
        }
    }

    /// Retains the positions that are in `other` too. One interval each is intersected in place.
    pub(crate) fn intersect(&mut self, other: &Self) {
        if let ([a], [b]) = (&mut self.ranges[..], other.ranges())
            && a.start.max(b.start) < a.end.min(b.end)
        {
            *a = a.start.max(b.start)..a.end.min(b.end);
        } else if !self.ranges.is_empty() {
            *self = self.and(other);
        }
    }

    /// Returns true if a position of `first..=last` is in one of the intervals.
    #[inline]
    pub(crate) fn overlaps(&self, first: i64, last: i64) -> bool {
        self.reaching(first).is_some_and(|range| range.start <= last)
    }

    /// Returns true if all positions of `first..=last` are in the intervals.
    #[inline]
    pub(crate) fn covers(&self, first: i64, last: i64) -> bool {
        self.reaching(first).is_some_and(|range| range.start <= first && last < range.end)
    }

    /// Returns the first interval that ends after `position`.
    #[inline]
    fn reaching(&self, position: i64) -> Option<&Range<i64>> {
        match self.ranges() {
            [only] => (position < only.end).then_some(only),
            ranges => ranges.get(ranges.partition_point(|range| range.end <= position)),
        }
    }

    /// Returns the heap bytes.
    pub(crate) fn bytes(&self) -> usize {
        if self.ranges.spilled() { self.ranges.capacity() * size_of::<Range<i64>>() } else { 0 }
    }

    /// Appends an interval that starts no earlier than the last one, and merges the two if they
    /// touch.
    #[inline]
    pub(crate) fn push(&mut self, range: Range<i64>) {
        if range.start >= range.end {
            return;
        }
        match self.ranges.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => self.ranges.push(range),
        }
    }
}

/// Collects the union of intervals in any order.
impl FromIterator<Range<i64>> for KeyIntervals {
    fn from_iter<I: IntoIterator<Item = Range<i64>>>(ranges: I) -> Self {
        let mut all: SmallVec<[Range<i64>; INLINE]> = ranges.into_iter().collect();
        all.sort_unstable_by_key(|range| range.start);
        let mut union = Self::nothing();
        all.into_iter().for_each(|range| union.push(range));
        union
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Returns the union of up to eight intervals within −20..20 or with unbounded sides.
    fn any_intervals() -> impl Strategy<Value = KeyIntervals> {
        let end = prop_oneof![8 => -20i64..20, 1 => Just(i64::MIN), 1 => Just(i64::MAX)];
        let length = prop_oneof![5 => 0i64..4, 1 => 0i64..40];
        prop::collection::vec((end.clone(), length, end), 0..9).prop_map(|intervals| {
            let range = |(start, length, far): (i64, i64, i64)| match far {
                i64::MIN | i64::MAX => start.min(far)..start.max(far),
                _ => start..start.saturating_add(length),
            };
            intervals.into_iter().map(range).collect()
        })
    }

    fn probes() -> impl Iterator<Item = i64> {
        (-45..65).chain([i64::MIN, i64::MIN / 4, i64::MAX / 4, i64::MAX - 1])
    }

    fn is_canonical(intervals: &KeyIntervals) -> bool {
        intervals.ranges().iter().all(|range| range.start < range.end)
            && intervals.ranges().windows(2).all(|pair| pair[0].end < pair[1].start)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(1000))]
        #[test]
        fn and_is_the_intersection_and_or_the_union(a in any_intervals(), b in any_intervals()) {
            let (both, either) = (a.and(&b), a.or(&b));
            prop_assert!(is_canonical(&both) && is_canonical(&either));
            for p in probes() {
                prop_assert_eq!(both.contains(p), a.contains(p) && b.contains(p));
                prop_assert_eq!(either.contains(p), a.contains(p) || b.contains(p));
            }
            let mut changed = a.clone();
            changed.intersect(&b);
            prop_assert_eq!(&changed, &both);
            changed.clone_from(&a);
            changed.extend(&b);
            prop_assert_eq!(&changed, &either);
            prop_assert_eq!(both, b.and(&a));
            prop_assert_eq!(either, b.or(&a));
        }

        #[test]
        fn overlaps_and_covers_are_those_of_the_positions(
            a in any_intervals(),
            first in -25i64..25,
            count in 1i64..6,
        ) {
            let mut positions = first..first + count;
            let last = positions.end - 1;
            prop_assert_eq!(a.overlaps(first, last), positions.clone().any(|p| a.contains(p)));
            prop_assert_eq!(a.covers(first, last), positions.all(|p| a.contains(p)));
        }
    }

    #[test]
    fn many_intervals_lose_none() {
        let comb = |from: i64, length: i64| -> KeyIntervals {
            (0..100).map(|i| from + 10 * i..from + 10 * i + length).collect()
        };
        let mut all = KeyIntervals::nothing();
        (0..9).for_each(|from| all.extend(&comb(from, 1)));
        assert_eq!(all, comb(0, 9));
        assert_eq!(all.or(&comb(9, 1)), KeyIntervals::one(0, 1000));
        assert_eq!(all.and(&comb(5, 9)).ranges().len(), 199);
        assert!(all.bytes() > 0 && KeyIntervals::everything().bytes() == 0);
    }
}
