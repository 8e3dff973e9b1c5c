//! Division of the queries of a call into rounds, so that messages are short.

use std::ops::Range;

/// Longest message in bytes, unless that of one query is longer. Queries of a longer prefill are
/// computed in several rounds, so that the memory for messages is at most ranks × 1 MiB; four times
/// as much in the reproducible order, whose messages differ and grow.
pub(super) const MESSAGE_BYTES: u64 = 1 << 20;

/// Tags of one round: one in the default order, two in the reproducible order.
pub(super) const ROUND_TAGS: u64 = 2;

/// Rounds of a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Rounds {
    /// Row numbers of all queries.
    rows: Range<u64>,
    /// Queries of all rounds but the last, which may have fewer.
    most: u64,
}

impl Rounds {
    /// Divides the queries with the row numbers `rows` into the fewest rounds of at most `longest`
    /// queries, at least 1.
    pub(super) fn new(rows: Range<u64>, longest: u64) -> Self {
        let queries = rows.end - rows.start;
        let rounds = queries.div_ceil(longest.max(1)).max(1);
        Self { rows, most: queries.div_ceil(rounds).max(1) }
    }

    /// Returns the number of queries.
    pub(super) const fn queries(&self) -> u64 {
        self.rows.end - self.rows.start
    }

    /// Returns the row numbers of all queries.
    pub(super) fn all(&self) -> Range<u64> {
        self.rows.clone()
    }

    /// Returns the number of rounds.
    pub(super) const fn count(&self) -> u64 {
        self.queries().div_ceil(self.most)
    }

    /// Returns the row numbers of the queries of a round. The first round is the longest.
    pub(super) fn rows(&self, round: u64) -> Range<u64> {
        let first = (self.rows.start + round * self.most).min(self.rows.end);
        first..(first + self.most).min(self.rows.end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queries_are_divided_evenly_into_the_fewest_rounds() {
        let rounds = |queries: u64, longest| {
            let rounds = Rounds::new(100..100 + queries, longest);
            (0..rounds.count()).map(|round| rounds.rows(round)).collect::<Vec<_>>()
        };
        assert_eq!(rounds(40, 12), [100..110, 110..120, 120..130, 130..140]);
        assert_eq!(rounds(7, 3), [100..103, 103..106, 106..107]);
        assert_eq!(rounds(3, 0), [100..101, 101..102, 102..103]);
        assert_eq!(rounds(3, u64::MAX), vec![100..103]);
        assert_eq!(rounds(0, 5), Vec::<Range<u64>>::new());
    }
}
