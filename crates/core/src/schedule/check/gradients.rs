//! Whose contributions does every message carry, and does each come home exactly once?
//!
//! One owner's rows at a time are followed along their way. Rows that no message, step or need tells apart are one cell; for a cell a
//! set of ranks is kept, those whose contributions its travelling sum contains.

use super::super::Schedule;
use super::{Transfer, Violation};
use crate::{Channel, Needs, RowSet};

pub(super) fn check(schedule: &Schedule, needs: &Needs, owner: usize) -> Result<(), Violation> {
    let ranks = schedule.steps.len();
    let users: Vec<usize> = (0..ranks).map(|step| schedule.route.user(owner, step, ranks)).collect();
    let cells = Cells::new(schedule, needs, owner, &users);
    let (mut sums, mut home, mut kept) = (cells.nobody(), cells.nobody(), None);
    for (t, &rank) in users.iter().enumerate() {
        // the rank adds its own contribution, if it needs the row, to what has arrived; the owner's own never travels
        if t > 0 {
            cells.within(needs.of(rank, owner)).for_each(|cell| sums.insert(cell, rank));
        }
        let mut later = cells.nobody();
        let step = &schedule.steps[rank][t];
        for message in &step.after.sends {
            let sent = || Transfer::sent(rank, t, message);
            let expected = if message.channel == Channel::Travel { users.get(t + 1) } else { Some(&owner) };
            if message.owner != owner || !step.rows.contains_all(&message.rows) {
                return Err(Violation::NotHeld(sent()));
            }
            if expected != Some(&message.peer) {
                return Err(Violation::Misdelivered(sent()));
            }
            let to = if message.channel == Channel::Travel { &mut later } else { &mut home };
            for cell in cells.within(&message.rows) {
                if !sums.holds_any(cell) {
                    return Err(Violation::Unborn(sent()));
                }
                if !to.unite(cell, sums.of(cell)) {
                    return Err(Violation::CountedTwice(sent()));
                }
            }
        }
        let sent = step.after.sends.iter().fold(RowSet::new(), |sent, message| sent.union(&message.rows));
        let unsent = (0..cells.count()).find(|&cell| sums.holds_any(cell) && !sent.contains(cells.row(cell)));
        kept = kept.or(unsent.map(|cell| Violation::Kept { rank, step: t, owner, row: cells.row(cell) }));
        sums = later;
    }
    let mut wanted = cells.nobody();
    for &user in users.iter().filter(|&&user| user != owner) {
        cells.within(needs.of(user, owner)).for_each(|cell| wanted.insert(cell, user));
    }
    match (0..cells.count()).find(|&cell| wanted.of(cell) != home.of(cell)) {
        Some(cell) => Err(Violation::Contributions { owner, row: cells.row(cell), got: home.members(cell), want: wanted.members(cell) }),
        // nobody's contribution is lost, yet a sum went to a rank that had no use for it
        None => kept.map_or(Ok(()), Err),
    }
}

/// The owner's rows, cut wherever anything that is said of them begins or ends.
struct Cells {
    cuts: Vec<u64>,
    ranks: usize,
}

impl Cells {
    fn new(schedule: &Schedule, needs: &Needs, owner: usize, users: &[usize]) -> Self {
        let sent = users.iter().enumerate().flat_map(|(t, &rank)| &schedule.steps[rank][t].after.sends).map(|message| &message.rows);
        let sets = users.iter().map(|&user| needs.of(user, owner)).chain(sent);
        let mut cuts: Vec<u64> = sets.flat_map(RowSet::ranges).flat_map(|range| [range.start, range.end]).collect();
        cuts.sort_unstable();
        cuts.dedup();
        Self { cuts, ranks: users.len() }
    }

    fn count(&self) -> usize {
        self.cuts.len().saturating_sub(1)
    }

    /// The first row of a cell.
    fn row(&self, cell: usize) -> u64 {
        self.cuts[cell]
    }

    /// The cells of which `rows` consists.
    fn within<'a>(&'a self, rows: &'a RowSet) -> impl Iterator<Item = usize> + 'a {
        let place = |row| self.cuts.partition_point(|&cut| cut < row);
        rows.ranges().iter().flat_map(move |range| place(range.start)..place(range.end))
    }

    fn nobody(&self) -> Contributors {
        let words = self.ranks.div_ceil(64).max(1);
        Contributors { words, bits: vec![0; self.count() * words] }
    }
}

/// A set of ranks for every cell.
struct Contributors {
    words: usize,
    bits: Vec<u64>,
}

impl Contributors {
    fn of(&self, cell: usize) -> &[u64] {
        &self.bits[cell * self.words..][..self.words]
    }

    fn of_mut(&mut self, cell: usize) -> &mut [u64] {
        &mut self.bits[cell * self.words..][..self.words]
    }

    fn insert(&mut self, cell: usize, rank: usize) {
        self.of_mut(cell)[rank / 64] |= 1 << (rank % 64);
    }

    fn holds_any(&self, cell: usize) -> bool {
        self.of(cell).iter().any(|&word| word != 0)
    }

    fn members(&self, cell: usize) -> usize {
        self.of(cell).iter().map(|word| word.count_ones() as usize).sum()
    }

    /// Adds a set; false if some rank was in both.
    fn unite(&mut self, cell: usize, other: &[u64]) -> bool {
        self.of_mut(cell).iter_mut().zip(other).fold(true, |distinct, (word, &more)| {
            let both = *word & more;
            *word |= more;
            distinct && both == 0
        })
    }
}
