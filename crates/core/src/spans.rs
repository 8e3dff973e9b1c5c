//! A few half-open intervals of key positions: what a mask lowers to for one query.

use std::ops::Range;

/// At most [`Spans::MOST`] sorted, disjoint, non-touching, non-empty half-open intervals of positions. Unbounded sides are `i64::MIN` and `i64::MAX`
/// (no position may be `i64::MAX`).
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Spans {
    ranges: [Range<i64>; Self::MOST],
    count: u8,
}

impl Spans {
    /// The most intervals; a mask that needs more is made into bits.
    pub const MOST: usize = 4;

    /// No key.
    pub const fn nothing() -> Self {
        Self { ranges: [0..0, 0..0, 0..0, 0..0], count: 0 }
    }

    /// Every key.
    pub const fn everything() -> Self {
        Self { ranges: [i64::MIN..i64::MAX, 0..0, 0..0, 0..0], count: 1 }
    }

    /// One interval; empty if `lo >= hi`.
    pub const fn one(lo: i64, hi: i64) -> Self {
        if lo < hi { Self { ranges: [lo..hi, 0..0, 0..0, 0..0], count: 1 } } else { Self::nothing() }
    }

    /// The intervals in ascending order.
    pub fn ranges(&self) -> &[Range<i64>] {
        &self.ranges[..usize::from(self.count)]
    }

    /// Whether `position` is in one of them.
    pub fn contains(&self, position: i64) -> bool {
        self.ranges().iter().any(|range| range.contains(&position))
    }

    /// Positions in both; `None` if that takes more than [`Spans::MOST`] intervals.
    pub fn and(&self, other: &Self) -> Option<Self> {
        let mut both = Self::nothing();
        for a in self.ranges() {
            for b in other.ranges() {
                both.push(a.start.max(b.start)..a.end.min(b.end))?;
            }
        }
        Some(both)
    }

    /// Positions in either; `None` if that takes more than [`Spans::MOST`] intervals.
    pub fn or(&self, other: &Self) -> Option<Self> {
        let mut either = Self::nothing();
        let (mut a, mut b) = (self.ranges(), other.ranges());
        loop {
            let next = match (a.first(), b.first()) {
                (Some(x), Some(y)) if x.start <= y.start => take_first(&mut a),
                (Some(_), None) => take_first(&mut a),
                (_, Some(_)) => take_first(&mut b),
                (None, None) => return Some(either),
            };
            either.push(next)?;
        }
    }

    /// Appends an interval that starts no earlier than the last, merging where they touch.
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

fn take_first(ranges: &mut &[Range<i64>]) -> Range<i64> {
    let first = ranges[0].clone();
    *ranges = &ranges[1..];
    first
}
