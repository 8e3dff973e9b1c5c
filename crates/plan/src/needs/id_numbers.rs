//! Dense numbers for segment ids, in the order in which they are first looked up.
//!
//! Ids of packed documents are 0, 1, 2, …, so that a table by id has few entries without a number,
//! and a look-up is one access. Other ids are in a hash table.

use std::{
    collections::HashMap,
    hash::{BuildHasherDefault, Hasher},
};

use annulus_core::{Run, Runs, index};

/// Entries of the table for each id, at most.
const ENTRIES_PER_ID: u64 = 4;

/// Entry of an id without a number.
const NONE: usize = usize::MAX;

/// Numbers of segment ids.
#[derive(Default)]
pub(super) struct IdNumbers {
    /// Numbers of the ids below its length.
    of_small: Vec<usize>,
    /// Numbers of the other ids.
    of_others: HashMap<i64, usize, BuildHasherDefault<IdHasher>>,
    count: usize,
}

impl IdNumbers {
    /// Creates numbers for ids, of which most are in `lists`.
    pub(crate) fn of_lists<'a>(lists: impl Iterator<Item = &'a Runs>) -> Self {
        let mut ids = 0;
        let mut end = 0;
        let mut add = |run: &Run| {
            let (count, largest) = match run.step {
                0 => (1, run.start),
                _ => (run.count, run.start.max(run.at(run.count - 1))),
            };
            ids += count;
            // padding, whose ids are negative, has no number
            end = end.max(largest.saturating_add(1).max(0).cast_unsigned());
        };
        lists.for_each(|list| list.runs().iter().filter(|run| run.count > 0).for_each(&mut add));
        let is_dense = end / ENTRIES_PER_ID <= ids;
        let of_small = if is_dense { vec![NONE; index(end)] } else { Vec::new() };
        Self { of_small, ..Self::default() }
    }

    /// Returns the number of ids that have a number.
    pub(crate) const fn len(&self) -> usize {
        self.count
    }

    /// Returns the number of an id; `None` if it has none.
    pub(crate) fn get(&self, id: i64) -> Option<usize> {
        match self.index(id) {
            Some(index) => Some(self.of_small[index]).filter(|&number| number != NONE),
            None => self.of_others.get(&id).copied(),
        }
    }

    /// Returns the number of an id, the next one if it has none.
    #[inline]
    pub(crate) fn number(&mut self, id: i64) -> usize {
        let next = self.count;
        let number = match self.index(id) {
            Some(index) => {
                let number = &mut self.of_small[index];
                if *number == NONE {
                    *number = next;
                }
                *number
            }
            None => *self.of_others.entry(id).or_insert(next),
        };
        if number == next {
            self.count += 1;
        }
        number
    }

    /// Returns the index of an id in the table.
    fn index(&self, id: i64) -> Option<usize> {
        usize::try_from(id).ok().filter(|&id| id < self.of_small.len())
    }
}

/// Hash function of segment ids: a multiplication, because a plan looks up thousands of them.
#[derive(Default)]
struct IdHasher(u64);

impl Hasher for IdHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.write_i64(byte.into()));
    }

    fn write_i64(&mut self, id: i64) {
        // Fibonacci hashing; the table uses the high bits and the low bits
        let product = (self.0 ^ id.cast_unsigned()).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        self.0 = product ^ (product >> 32);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_numbered_in_the_order_of_their_look_ups() {
        let run = |start, step, count| Run { start, step, count };
        let dense = vec![run(0, 1, 4), run(4, 0, 9), run(-1, 0, 3), run(9, 0, 1)];
        for (runs, entries) in [
            (dense.clone(), 10),
            (vec![run(3, -1, 4)], 4),
            // too few ids for a table, and none
            (vec![run(0, 0, 5), run(100, 0, 1)], 0),
            (vec![run(i64::MAX, 0, 1)], 0),
            (vec![run(-1, 0, 7)], 0),
            (Vec::new(), 0),
        ] {
            let mut list = Runs::new();
            runs.iter().for_each(|&run| list.push_run(run));
            let mut numbers = IdNumbers::of_lists([&list].into_iter());
            assert_eq!(numbers.of_small.len(), entries, "{runs:?}");
            // also ids that are in no list
            for (number, id) in [7, 0, i64::MAX, 100, 9, -5].into_iter().enumerate() {
                assert_eq!((numbers.get(id), numbers.len()), (None, number));
                assert_eq!(numbers.number(id), number);
                assert_eq!((numbers.number(id), numbers.get(id)), (number, Some(number)));
            }
            assert_eq!(numbers.len(), 6);
        }
    }
}
