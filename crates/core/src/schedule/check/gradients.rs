//! Contributions of gradients: each reaches the owner of its row exactly once.
//!
//! The rows of one owner are followed over all steps. Rows that every message and every need treats
//! alike form one interval. For each interval the checker keeps the set of ranks whose
//! contributions the partial gradient contains.

use super::super::Schedule;
use super::{Transfer, Violation};
use crate::{Channel, Needs, RowSet};

pub(super) fn check(schedule: &Schedule, needs: &Needs, owner: usize) -> Result<(), Violation> {
    let ranks = schedule.steps.len();
    let users: Vec<usize> =
        (0..ranks).map(|step| schedule.route.user(owner, step, ranks)).collect();
    let intervals = RowIntervals::new(schedule, needs, owner, &users);
    let mut partial = intervals.no_contributors();
    let mut reached_owner = intervals.no_contributors();
    let mut kept = None;
    for (t, &rank) in users.iter().enumerate() {
        // a rank that needs a row adds its contribution to the partial gradient that has arrived;
        // the owner's own contribution (t = 0) is never sent
        if t > 0 {
            intervals
                .within(needs.of(rank, owner))
                .for_each(|interval| partial.insert(interval, rank));
        }
        let mut next = intervals.no_contributors();
        let step = &schedule.steps[rank][t];
        for message in &step.after.sends {
            let sent = || Transfer::sent(rank, t, message);
            let expected = if message.channel == Channel::PartialGrad {
                users.get(t + 1)
            } else {
                Some(&owner)
            };
            if message.owner != owner || !step.rows.contains_all(&message.rows) {
                return Err(Violation::NotHeld(sent()));
            }
            if expected != Some(&message.peer) {
                return Err(Violation::Misdelivered(sent()));
            }
            let to = if message.channel == Channel::PartialGrad {
                &mut next
            } else {
                &mut reached_owner
            };
            for interval in intervals.within(&message.rows) {
                if partial.is_empty(interval) {
                    return Err(Violation::NoContribution(sent()));
                }
                if !to.unite(interval, partial.of(interval)) {
                    return Err(Violation::CountedTwice(sent()));
                }
            }
        }
        let sent =
            step.after.sends.iter().fold(RowSet::new(), |sent, message| sent.union(&message.rows));
        let unsent = (0..intervals.count()).find(|&interval| {
            !partial.is_empty(interval) && !sent.contains(intervals.first_row(interval))
        });
        kept = kept.or(unsent.map(|interval| Violation::Kept {
            rank,
            step: t,
            owner,
            row: intervals.first_row(interval),
        }));
        partial = next;
    }
    let mut expected = intervals.no_contributors();
    for &user in users.iter().filter(|&&user| user != owner) {
        intervals
            .within(needs.of(user, owner))
            .for_each(|interval| expected.insert(interval, user));
    }
    let differs = |&interval: &usize| expected.of(interval) != reached_owner.of(interval);
    match (0..intervals.count()).find(differs) {
        Some(interval) => Err(Violation::Contributions {
            owner,
            row: intervals.first_row(interval),
            got: reached_owner.count(interval),
            want: expected.count(interval),
        }),
        // no contribution is lost, but a partial gradient was sent to a rank that does not send it
        // on
        None => kept.map_or(Ok(()), Err),
    }
}

/// The owner's rows, divided at every end of a range of a need or a message.
struct RowIntervals {
    /// Interval i contains the rows `bounds[i]..bounds[i + 1]`.
    bounds: Vec<u64>,
    ranks: usize,
}

impl RowIntervals {
    fn new(schedule: &Schedule, needs: &Needs, owner: usize, users: &[usize]) -> Self {
        let sent = users
            .iter()
            .enumerate()
            .flat_map(|(t, &rank)| &schedule.steps[rank][t].after.sends)
            .map(|message| &message.rows);
        let sets = users.iter().map(|&user| needs.of(user, owner)).chain(sent);
        let mut bounds: Vec<u64> =
            sets.flat_map(RowSet::ranges).flat_map(|range| [range.start, range.end]).collect();
        bounds.sort_unstable();
        bounds.dedup();
        Self { bounds, ranks: users.len() }
    }

    fn count(&self) -> usize {
        self.bounds.len().saturating_sub(1)
    }

    fn first_row(&self, interval: usize) -> u64 {
        self.bounds[interval]
    }

    /// Returns the intervals of which `rows` consists.
    fn within<'a>(&'a self, rows: &'a RowSet) -> impl Iterator<Item = usize> + 'a {
        let index = |row| self.bounds.partition_point(|&bound| bound < row);
        rows.ranges().iter().flat_map(move |range| index(range.start)..index(range.end))
    }

    fn no_contributors(&self) -> Contributors {
        let words = self.ranks.div_ceil(64).max(1);
        Contributors { words, bits: vec![0; self.count() * words] }
    }
}

/// A set of ranks for every interval, as bits.
struct Contributors {
    /// Words of one set.
    words: usize,
    bits: Vec<u64>,
}

impl Contributors {
    fn of(&self, interval: usize) -> &[u64] {
        &self.bits[interval * self.words..][..self.words]
    }

    fn of_mut(&mut self, interval: usize) -> &mut [u64] {
        &mut self.bits[interval * self.words..][..self.words]
    }

    fn insert(&mut self, interval: usize, rank: usize) {
        self.of_mut(interval)[rank / 64] |= 1 << (rank % 64);
    }

    fn is_empty(&self, interval: usize) -> bool {
        self.of(interval).iter().all(|&word| word == 0)
    }

    fn count(&self, interval: usize) -> usize {
        self.of(interval).iter().map(|word| word.count_ones() as usize).sum()
    }

    /// Adds a set. Returns false if it contains a rank that is already a member.
    fn unite(&mut self, interval: usize, other: &[u64]) -> bool {
        self.of_mut(interval).iter_mut().zip(other).fold(true, |distinct, (word, &more)| {
            let both = *word & more;
            *word |= more;
            distinct && both == 0
        })
    }
}
