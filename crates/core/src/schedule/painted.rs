//! Map from positions to the latest users that attend to them.
//!
//! Users are painted over the positions in ascending order, so that the colour of a position is the
//! largest user so far. A user's intervals replace the colours below them, so the map keeps at most
//! two more segments per interval.

use std::{collections::BTreeMap, ops::Range};

/// Map from positions of segments to colours.
#[derive(Default, Clone)]
pub(super) struct Painting {
    /// End and colour of the interval that starts at a segment and position.
    intervals: BTreeMap<(usize, i64), (i64, usize)>,
}

/// The colour from a position on.
pub(super) struct Colour {
    /// The position up to which it is the same.
    pub(super) end: i64,
    /// `None`: no colour.
    pub(super) user: Option<usize>,
}

impl Painting {
    pub(super) fn paint(&mut self, user: usize, intervals: &[(usize, Range<i64>)]) {
        for (segment, range) in intervals {
            self.paint_interval(user, *segment, range);
        }
    }

    fn paint_interval(&mut self, user: usize, segment: usize, range: &Range<i64>) {
        let begin = (segment, range.start);
        let below = self.intervals.range_mut(..begin).next_back();
        if let Some((&(other, _), value)) = below
            && other == segment
            && value.0 > range.start
        {
            let (end, colour) = *value;
            value.0 = range.start;
            if end > range.end {
                self.intervals.insert((segment, range.end), (end, colour));
            }
        }
        while let Some((&covered, &(end, colour))) =
            self.intervals.range(begin..(segment, range.end)).next()
        {
            self.intervals.remove(&covered);
            if end > range.end {
                self.intervals.insert((segment, range.end), (end, colour));
            }
        }
        self.intervals.insert(begin, (range.end, user));
    }

    /// Returns the colour at a position, and where it ends at the earliest.
    pub(super) fn at(&self, segment: usize, position: i64) -> Colour {
        let here = (segment, position);
        if let Some((&(other, _), &(end, user))) = self.intervals.range(..=here).next_back()
            && other == segment
            && end > position
        {
            return Colour { end, user: Some(user) };
        }
        let next = self.intervals.range(here..).next();
        let end = next
            .filter(|&(&(other, _), _)| other == segment)
            .map_or(i64::MAX, |(&(_, start), _)| start);
        Colour { end, user: None }
    }
}
