//! Last users of all rows of a relay: which user, of those that need a row, is the last on its way.
//!
//! Ranks are numbered in the direction of the relay. For a row of owner o at position p:
//!
//! ```text
//! last user = the largest user u < o that attends to p, after P − o + u steps; if there is none,
//!             the largest user u > o that attends to p, after u − o steps
//! ```
//! Users are painted over the positions in ascending order, so that the colour of a position is the
//! largest user so far. A user's intervals replace the colours below them, so the map keeps at most
//! two more segments per interval.

use std::{collections::BTreeMap, ops::Range};

use super::Route;
use crate::needs::{BatchNeeds, StridedRows, ascending, count_below};

/// Rows of one owner whose last user is the same.
pub(super) struct LastUsers {
    pub(super) owner: usize,
    /// Step in which the last user computes on the rows, at least 1.
    pub(super) step: usize,
    pub(super) rows: u64,
}

/// Calls `found` for all rows that are sent on the relay `route`, in groups of rows with the same
/// owner and last user, until it returns false. Calls `tick` after each owner.
pub(super) fn for_each_last_user(
    needs: &BatchNeeds,
    route: Route,
    tick: &mut dyn FnMut(),
    mut found: impl FnMut(LastUsers) -> bool,
) {
    let ranks = needs.users.len();
    // ring index of the rank with this number in the direction of the relay
    let index = |number: usize| if route == Route::RelayDown { ranks - 1 - number } else { number };
    let mut all = Painting::default();
    (0..ranks).for_each(|user| all.paint(user, &needs.users[index(user)]));
    let mut before = Painting::default();
    for owner in 0..ranks {
        tick();
        let mut goes_on = true;
        for rows in &needs.owners[index(owner)] {
            for_each_colour(&before, &all, owner, rows, |user, count| {
                let step = (user + ranks - owner) % ranks;
                let last = LastUsers { owner: index(owner), step, rows: count };
                goes_on = goes_on && found(last);
            });
        }
        if !goes_on {
            return;
        }
        before.paint(owner, &needs.users[index(owner)]);
    }
}

/// Calls `found` with the last user of rows of `rows` and their number. A user before the owner,
/// with its colour in `before`, has priority over one after it, in `all`.
fn for_each_colour(
    before: &Painting,
    all: &Painting,
    owner: usize,
    rows: &StridedRows,
    mut found: impl FnMut(usize, u64),
) {
    let run = ascending(&rows.positions);
    let mut index = 0;
    while index < run.count {
        let position = run.at(index);
        let first = before.at(rows.segment, position);
        // `all` contains the users before the owner too, so it is of use only beyond their colours
        let (end, user) = if first.user.is_some() {
            (first.end, first.user)
        } else {
            let second = all.at(rows.segment, position);
            (first.end.min(second.end), second.user.filter(|&user| user > owner))
        };
        let next = count_below(&run, end).max(index + 1);
        if let Some(user) = user {
            found(user, next - index);
        }
        index = next;
    }
}

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
