//! Distribution of cached rows over ranks.
//!
//! ```text
//! row      0 … R−1   R … 2R−1   2R …                    R rows of a page
//! page     0         1          2      …
//! rank     0         1          2      …   P−1  0  1    page mod P
//! ```
//! A row number alone determines rank and local row, so that no rank stores a table of pages, and
//! the ranks' numbers of rows differ by at most one page after any sequence of appends.

use std::ops::Range;

use annulus_core::{Run, Runs};

/// Pages of one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Pages {
    /// Rows of a page, at least 1.
    pub(super) rows: u64,
    pub(super) ranks: u64,
    pub(super) rank: u64,
}

impl Pages {
    /// Returns the number of rows of this rank among the rows `0..len`.
    pub(super) const fn local_len(&self, len: u64) -> u64 {
        let whole_pages = len / self.rows;
        let rounds = whole_pages / self.ranks;
        // the last round of pages: whole ones, then one that is being filled
        let last_rank = whole_pages % self.ranks;
        let last_page = if self.rank < last_rank {
            self.rows
        } else if self.rank == last_rank {
            len % self.rows
        } else {
            0
        };
        rounds * self.rows + last_page
    }

    /// Returns the number of the local page `page` among the pages of all ranks.
    const fn number(&self, page: u64) -> u64 {
        page * self.ranks + self.rank
    }

    /// Returns the row numbers of the local rows `local`, as one run per page.
    pub(super) fn runs(&self, local: Range<u64>) -> impl Iterator<Item = Run> + use<> {
        let pages = *self;
        let rows = self.rows;
        let mut next = local.start;
        std::iter::from_fn(move || {
            let row_of_page = next % rows;
            let count = (rows - row_of_page).min(local.end.checked_sub(next)?);
            let start = pages.number(next / rows) * rows + row_of_page;
            next += count;
            (count > 0).then_some(Run { start: start.cast_signed(), step: 1, count })
        })
    }

    /// Returns the row numbers of the local rows `local`.
    pub(super) fn row_numbers(&self, local: Range<u64>) -> Runs {
        let mut numbers = Runs::new();
        self.runs(local).for_each(|run| numbers.push_run(run));
        numbers
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn pages_are_dealt_to_the_ranks_in_turn() {
        let rows = |rank, len| {
            let pages = Pages { rows: 3, ranks: 2, rank };
            pages.row_numbers(0..pages.local_len(len)).iter().collect::<Vec<_>>()
        };
        assert_eq!(rows(0, 11), [0, 1, 2, 6, 7, 8]);
        assert_eq!(rows(1, 11), [3, 4, 5, 9, 10]);
        assert_eq!((rows(0, 0), rows(1, 3), rows(0, 2)), (vec![], vec![], vec![0, 1]));
        assert_eq!(Pages { rows: 3, ranks: 2, rank: 1 }.number(1), 3);
    }

    proptest! {
        #[test]
        fn every_row_is_on_one_rank_and_ranks_differ_by_a_page(
            rows in 1u64..70,
            ranks in 1u64..17,
            appends in proptest::collection::vec(0u64..300, 0..12),
        ) {
            let mut len = 0;
            let mut cached = vec![Vec::new(); ranks as usize];
            for count in appends {
                for (rank, numbers) in (0..).zip(&mut cached) {
                    let pages = Pages { rows, ranks, rank };
                    let local = pages.local_len(len)..pages.local_len(len + count);
                    numbers.extend(pages.row_numbers(local).iter());
                }
                len += count;
                let of_rank = |rank| Pages { rows, ranks, rank }.local_len(len);
                let most = (0..ranks).map(of_rank).max().unwrap_or(0);
                let fewest = (0..ranks).map(of_rank).min().unwrap_or(0);
                prop_assert!(most - fewest <= rows);
            }
            for (rank, numbers) in (0..).zip(&cached) {
                // the appends of a rank are its rows in ascending order
                let pages = Pages { rows, ranks, rank };
                let all = pages.row_numbers(0..pages.local_len(len));
                prop_assert!(all.iter().eq(numbers.iter().copied()));
            }
            let mut all: Vec<i64> = cached.concat();
            all.sort_unstable();
            prop_assert!(all.into_iter().eq(0..len.cast_signed()));
        }
    }
}
