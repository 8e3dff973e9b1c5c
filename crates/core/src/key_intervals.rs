//! Key intervals: what a mask lowers to for one query.

use std::ops::Range;

/// At most [`KeyIntervals::MAX`] half-open intervals of key positions.
///
/// They are sorted, disjoint, non-touching and not empty. An unbounded side is `i64::MIN` or
/// `i64::MAX`, which is no position. They are stored inline, so that lowering a mask does not
/// allocate.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct KeyIntervals {
    ranges: [Range<i64>; Self::MAX],
    count: u8,
}

impl KeyIntervals {
    /// Maximum number of intervals. A mask that needs more is evaluated pair by pair.
    ///
    /// Two suffice for a window with exempt first keys; four leave room for combinations of masks.
    pub const MAX: usize = 4;

    /// Returns the empty set.
    pub const fn nothing() -> Self {
        Self { ranges: [0..0, 0..0, 0..0, 0..0], count: 0 }
    }

    /// Returns the set of all positions.
    pub const fn everything() -> Self {
        Self { ranges: [i64::MIN..i64::MAX, 0..0, 0..0, 0..0], count: 1 }
    }

    /// Returns the interval `lo..hi`; the empty set if `lo >= hi`.
    pub const fn one(lo: i64, hi: i64) -> Self {
        if lo < hi {
            Self { ranges: [lo..hi, 0..0, 0..0, 0..0], count: 1 }
        } else {
            Self::nothing()
        }
    }

    /// Returns the intervals in ascending order.
    pub fn ranges(&self) -> &[Range<i64>] {
        &self.ranges[..usize::from(self.count)]
    }

    /// Returns true if `position` is in one of the intervals.
    pub fn contains(&self, position: i64) -> bool {
        self.ranges().iter().any(|range| range.contains(&position))
    }

    /// Returns the intersection; `None` if it needs more than [`KeyIntervals::MAX`] intervals.
    pub fn and(&self, other: &Self) -> Option<Self> {
        if let ([a], [b]) = (self.ranges(), other.ranges()) {
            return Some(Self::one(a.start.max(b.start), a.end.min(b.end)));
        }
        // common case, the intervals of neighbouring rows: each overlaps only its counterpart
        if self.count == other.count
            && self.pairwise(other, |a, b, next_a, next_b| {
                a.end <= next_b.start && b.end <= next_a.start
            })
        {
            let mut both = Self::nothing();
            for (a, b) in self.ranges().iter().zip(other.ranges()) {
                both.push(a.start.max(b.start)..a.end.min(b.end))?;
            }
            return Some(both);
        }
        let mut both = Self::nothing();
        for a in self.ranges() {
            for b in other.ranges() {
                both.push(a.start.max(b.start)..a.end.min(b.end))?;
            }
        }
        Some(both)
    }

    /// Returns the union; `None` if it needs more than [`KeyIntervals::MAX`] intervals.
    pub fn or(&self, other: &Self) -> Option<Self> {
        if let ([a], [b]) = (self.ranges(), other.ranges()) {
            return Some(match (a.end < b.start, b.end < a.start) {
                (true, _) => Self { ranges: [a.clone(), b.clone(), 0..0, 0..0], count: 2 },
                (_, true) => Self { ranges: [b.clone(), a.clone(), 0..0, 0..0], count: 2 },
                _ => Self::one(a.start.min(b.start), a.end.max(b.end)),
            });
        }
        let mut either = Self::nothing();
        for_each_merged(self.ranges(), other.ranges(), |range| either.push(range).is_some())
            .then_some(either)
    }

    /// Returns the union, or a superset if the union needs more than [`KeyIntervals::MAX`]
    /// intervals. The superset closes the narrowest gaps.
    pub fn cover(&self, other: &Self) -> Self {
        // common case, the intervals of neighbouring rows: each touches only its counterpart
        let touch = |a: &Range<i64>, b: &Range<i64>| a.start <= b.end && b.start <= a.end;
        if self.count == other.count
            && self.ranges().iter().zip(other.ranges()).all(|(a, b)| touch(a, b))
            && self.pairwise(other, |a, b, next_a, next_b| {
                a.end.max(b.end) < next_a.start.min(next_b.start)
            })
        {
            let mut cover = self.clone();
            for (a, b) in cover.ranges.iter_mut().zip(other.ranges()) {
                *a = a.start.min(b.start)..a.end.max(b.end);
            }
            return cover;
        }
        if let Some(either) = self.or(other) {
            return either;
        }
        // merge all intervals of both in order, then close the narrowest gaps
        let mut all = [const { 0..0 }; 2 * Self::MAX];
        let mut count = 0;
        for_each_merged(self.ranges(), other.ranges(), |range| {
            if count > 0 && range.start <= all[count - 1].end {
                all[count - 1].end = all[count - 1].end.max(range.end);
            } else {
                all[count] = range;
                count += 1;
            }
            true
        });
        while count > Self::MAX {
            let mut nearest = 1;
            for i in 2..count {
                let gap = |i: usize| all[i].start.abs_diff(all[i - 1].end);
                nearest = if gap(i) < gap(nearest) { i } else { nearest };
            }
            all[nearest - 1].end = all[nearest].end;
            all[nearest..count].rotate_left(1);
            count -= 1;
        }
        let [first, second, third, fourth, ..] = all;
        Self { ranges: [first, second, third, fourth], count: count as u8 }
    }

    /// Replaces the set by [`KeyIntervals::cover`] of both. Neighbouring rows of most masks have
    /// one interval each, which is updated in place.
    pub(crate) fn extend_cover(&mut self, other: &Self) {
        if let (1, [b]) = (self.count, other.ranges())
            && let [a, ..] = &mut self.ranges
            && a.start <= b.end
            && b.start <= a.end
        {
            *a = a.start.min(b.start)..a.end.max(b.end);
        } else {
            *self = self.cover(other);
        }
    }

    /// Replaces the set by the intersection of both, or by the empty set if that needs more than
    /// [`KeyIntervals::MAX`] intervals. One interval each is intersected in place.
    pub(crate) fn intersect(&mut self, other: &Self) {
        if let (1, [b]) = (self.count, other.ranges())
            && let [a, ..] = &mut self.ranges
            && a.start.max(b.start) < a.end.min(b.end)
        {
            *a = a.start.max(b.start)..a.end.min(b.end);
        } else {
            *self = self.and(other).unwrap_or(Self::nothing());
        }
    }

    /// Returns true if `holds(a, b, next_a, next_b)` for all counterparts a, b and their
    /// successors.
    fn pairwise(
        &self,
        other: &Self,
        holds: impl Fn(&Range<i64>, &Range<i64>, &Range<i64>, &Range<i64>) -> bool,
    ) -> bool {
        self.ranges()
            .windows(2)
            .zip(other.ranges().windows(2))
            .all(|(a, b)| holds(&a[0], &b[0], &a[1], &b[1]))
    }

    /// Appends an interval that starts no earlier than the last one, and merges the two if they
    /// touch. Returns `None` if there are too many.
    fn push(&mut self, range: Range<i64>) -> Option<()> {
        if range.start >= range.end {
            return Some(());
        }
        let count = usize::from(self.count);
        match self.ranges[..count].last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => {
                *self.ranges.get_mut(count)? = range;
                self.count += 1;
            }
        }
        Some(())
    }
}

/// Calls `accept` with the intervals of both lists in the order of their starts. Stops and returns
/// false as soon as it returns false.
fn for_each_merged<'a>(
    mut a: &'a [Range<i64>],
    mut b: &'a [Range<i64>],
    mut accept: impl FnMut(Range<i64>) -> bool,
) -> bool {
    loop {
        let from = match (a.first(), b.first()) {
            (Some(x), Some(y)) if x.start <= y.start => &mut a,
            (Some(_), None) => &mut a,
            (_, Some(_)) => &mut b,
            (None, None) => return true,
        };
        if let Some((first, rest)) = from.split_first() {
            *from = rest;
            if !accept(first.clone()) {
                return false;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Returns the union of up to six intervals within −20..20 or with unbounded sides, as far as
    /// they fit.
    fn any_intervals() -> impl Strategy<Value = KeyIntervals> {
        let end = prop_oneof![8 => -20i64..20, 1 => Just(i64::MIN), 1 => Just(i64::MAX)];
        prop::collection::vec((end.clone(), end), 0..6).prop_map(|pairs| {
            pairs.into_iter().fold(KeyIntervals::nothing(), |all, (a, b)| {
                all.or(&KeyIntervals::one(a.min(b), a.max(b))).unwrap_or(all)
            })
        })
    }

    fn probes() -> impl Iterator<Item = i64> {
        (-25..25).chain([i64::MIN, i64::MIN / 4, i64::MAX / 4, i64::MAX - 1])
    }

    /// Counts the intervals of the positions for which `inside` is true. The probes include
    /// positions around every end.
    fn count(inside: impl Fn(i64) -> bool) -> usize {
        let line: Vec<bool> = probes().take(50).map(inside).collect();
        usize::from(line[0]) + line.windows(2).filter(|pair| !pair[0] && pair[1]).count()
    }

    fn is_canonical(intervals: &KeyIntervals) -> bool {
        intervals.ranges().iter().all(|range| range.start < range.end)
            && intervals.ranges().windows(2).all(|pair| pair[0].end < pair[1].start)
    }

    proptest! {
        #[test]
        fn and_is_the_intersection_and_or_the_union(a in any_intervals(), b in any_intervals()) {
            let both = |p| a.contains(p) && b.contains(p);
            let either = |p| a.contains(p) || b.contains(p);
            for (got, want) in [(a.and(&b), &both as &dyn Fn(i64) -> bool), (a.or(&b), &either)] {
                match got {
                    Some(got) => {
                        prop_assert!(is_canonical(&got));
                        probes().for_each(|p| assert_eq!(got.contains(p), want(p)));
                    }
                    None => prop_assert!(count(want) > KeyIntervals::MAX),
                }
            }
            let mut intersection = a.clone();
            intersection.intersect(&b);
            prop_assert_eq!(intersection, a.and(&b).unwrap_or(KeyIntervals::nothing()));
            prop_assert_eq!(a.and(&b), b.and(&a));
            prop_assert_eq!(a.or(&b), b.or(&a));
        }

        #[test]
        fn cover_contains_both_and_is_the_union_if_it_fits(
            a in any_intervals(),
            b in any_intervals(),
        ) {
            let cover = a.cover(&b);
            let mut extended = a.clone();
            extended.extend_cover(&b);
            prop_assert_eq!(&extended, &cover);
            prop_assert!(is_canonical(&cover));
            probes().for_each(|p| assert!(cover.contains(p) || !(a.contains(p) || b.contains(p))));
            if let Some(exact) = a.or(&b) {
                prop_assert_eq!(cover, exact);
            }
        }
    }

    #[test]
    fn five_intervals_do_not_fit() {
        let many = |from: i64| {
            (0..4).fold(KeyIntervals::nothing(), |all, i| {
                all.or(&KeyIntervals::one(from + 4 * i, from + 4 * i + 1)).unwrap_or(all)
            })
        };
        assert_eq!(many(0).ranges().len(), 4);
        assert_eq!(many(0).or(&many(2)), None);
        // eight single positions 0, 2, 4, … 14: the gaps are equal, so the first ones are closed
        assert_eq!(many(0).cover(&many(2)).ranges(), [0..9, 10..11, 12..13, 14..15]);
        let holes = KeyIntervals::everything()
            .and(&KeyIntervals::one(-5, 30))
            .and_then(|all| all.or(&KeyIntervals::one(40, 50)));
        assert_eq!(holes.map(|intervals| intervals.ranges().len()), Some(2));
        // an intersection of seven intervals
        let comb = |from: i64| {
            (0..4).fold(KeyIntervals::nothing(), |all, i| {
                all.or(&KeyIntervals::one(from + 10 * i, from + 10 * i + 9)).unwrap_or(all)
            })
        };
        assert_eq!(comb(0).and(&comb(5)), None);
    }
}
