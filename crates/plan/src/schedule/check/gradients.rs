//! Contributions of gradients: each reaches the owner of its row exactly once.
//!
//! The rows of one owner are followed over all steps. Consecutive rows that no message and no need
//! separates form one interval. For each interval the checker keeps the set of ranks whose
//! contributions the partial gradient contains.

use super::super::{Schedule, Step};
use super::{MessageEnd, Violation, ViolationKind};
use crate::Needs;
use annulus_core::{Channel, RowSet};

pub(super) fn check(schedule: &Schedule, needs: &Needs, owner: usize) -> Result<(), Violation> {
    let ranks = schedule.steps.len();
    let users: Vec<usize> =
        (0..ranks).map(|step| schedule.route.user(owner, step, ranks)).collect();
    let intervals = RowIntervals::new(schedule, needs, owner, &users);
    let mut sums = PartialSums::new(&intervals, owner);
    let mut kept = None;
    for (t, &rank) in users.iter().enumerate() {
        // a rank that needs a row adds its contribution to the partial gradient that has arrived;
        // the owner's own contribution (t = 0) is never sent
        if t > 0 {
            sums.add(rank, needs.of(rank, owner));
        }
        let step = &schedule.steps[rank][t];
        sums.send(rank, t, step, users.get(t + 1).copied())?;
        let first_kept = sums.first_unsent(step);
        let of_row = |row| {
            let what = format!(
                "rank {rank} does not send the gradient of rank {owner}'s row {row} in step {t}"
            );
            Violation::new(ViolationKind::Kept, what)
        };
        kept = kept.or(first_kept.map(of_row));
        sums.advance();
    }
    sums.check_owner(needs, &users)?;
    // no contribution is lost, but a partial gradient was sent to a rank that does not send it on
    kept.map_or(Ok(()), Err)
}

/// Contributors to the gradients of one owner's rows, in one step.
struct PartialSums<'a> {
    intervals: &'a RowIntervals,
    owner: usize,
    /// Contributors to the partial gradients of the current rank.
    partial: Contributors,
    /// Contributors to the partial gradients that the next rank has received.
    next: Contributors,
    /// Contributors to the final gradients that the owner has received.
    reached_owner: Contributors,
}

impl<'a> PartialSums<'a> {
    fn new(intervals: &'a RowIntervals, owner: usize) -> Self {
        Self {
            intervals,
            owner,
            partial: intervals.no_contributors(),
            next: intervals.no_contributors(),
            reached_owner: intervals.no_contributors(),
        }
    }

    /// Adds the contribution of `rank` to `rows`.
    fn add(&mut self, rank: usize, rows: &RowSet) {
        self.intervals.within(rows).for_each(|interval| self.partial.insert(interval, rank));
    }

    /// Delivers the gradients that `rank` sends in step `t`: partial gradients to `next_user`,
    /// final gradients to the owner.
    fn send(
        &mut self,
        rank: usize,
        t: usize,
        step: &Step,
        next_user: Option<usize>,
    ) -> Result<(), Violation> {
        for message in &step.after.sends {
            let sent = MessageEnd::sent(rank, t, message);
            if message.owner != self.owner || !step.rows.contains_all(&message.rows) {
                let what = "rows sent by a rank that does not have them";
                return Err(sent.violation(ViolationKind::NotHeld, what));
            }
            let (expected, target) = if message.channel == Channel::PartialGrad {
                (next_user, &mut self.next)
            } else {
                (Some(self.owner), &mut self.reached_owner)
            };
            if expected != Some(message.peer) {
                let what = "gradient for another rank than the next one";
                return Err(sent.violation(ViolationKind::Misdelivered, what));
            }
            for interval in self.intervals.within(&message.rows) {
                if self.partial.is_empty(interval) {
                    let what = "gradient without contributions";
                    return Err(sent.violation(ViolationKind::NoContribution, what));
                }
                if !target.unite(interval, self.partial.of(interval)) {
                    let what = "contribution sent twice";
                    return Err(sent.violation(ViolationKind::CountedTwice, what));
                }
            }
        }
        Ok(())
    }

    /// Returns the first row whose partial gradient the current rank does not send.
    fn first_unsent(&self, step: &Step) -> Option<u64> {
        let sent =
            step.after.sends.iter().fold(RowSet::new(), |sent, message| sent.union(&message.rows));
        (0..self.intervals.count())
            .filter(|&interval| !self.partial.is_empty(interval))
            .map(|interval| self.intervals.first_row(interval))
            .find(|&row| !sent.contains(row))
    }

    /// Continues with the next rank.
    fn advance(&mut self) {
        let received = std::mem::replace(&mut self.next, self.intervals.no_contributors());
        self.partial = received;
    }

    /// Checks that the owner has received the contributions of all other users.
    fn check_owner(&self, needs: &Needs, users: &[usize]) -> Result<(), Violation> {
        let intervals = self.intervals;
        let mut expected = intervals.no_contributors();
        for &user in users.iter().filter(|&&user| user != self.owner) {
            intervals
                .within(needs.of(user, self.owner))
                .for_each(|interval| expected.insert(interval, user));
        }
        let differs = |&interval: &usize| expected.of(interval) != self.reached_owner.of(interval);
        (0..intervals.count()).find(differs).map_or(Ok(()), |interval| {
            let (owner, row) = (self.owner, intervals.first_row(interval));
            let [got, want] = [&self.reached_owner, &expected].map(|of| of.count(interval));
            let what = format!(
                "the owner of row {row}, rank {owner}, receives {got} contributions, \
                 expected {want}"
            );
            Err(Violation::new(ViolationKind::Contributions, what))
        })
    }
}

/// The owner's rows, divided at both ends of every range of the needs and messages.
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
