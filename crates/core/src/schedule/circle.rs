//! Last users of positions on a circle of ranks that starts at any of them.

use std::ops::Range;

use super::painted::{Colour, Painting};

/// Paintings of the users of one node.
pub(super) struct Circle {
    /// By c: users below c, and at last all of them.
    below: Vec<Painting>,
}

impl Circle {
    pub(super) fn new<'a>(users: impl Iterator<Item = &'a [(usize, Range<i64>)]>) -> Self {
        let mut below = vec![Painting::default()];
        let mut painting = Painting::default();
        for (user, intervals) in users.enumerate() {
            painting.paint(user, intervals);
            below.push(painting.clone());
        }
        Self { below }
    }

    /// Returns the last user of a position in a circle from `start`, and up to where it is the
    /// same.
    pub(super) fn last(&self, start: usize, segment: usize, position: i64) -> Colour {
        let first = self.below[start].at(segment, position);
        if first.user.is_some() {
            return first;
        }
        let all = self.below[self.below.len() - 1].at(segment, position);
        Colour { end: first.end.min(all.end), user: all.user }
    }

    /// As [`Circle::last`] in a circle that ends with `owner`, which does not count.
    pub(super) fn last_but(&self, owner: usize, segment: usize, position: i64) -> Colour {
        let Colour { end, user } = self.last(owner, segment, position);
        Colour { end, user: user.filter(|&user| user != owner) }
    }
}
