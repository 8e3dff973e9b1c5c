//! Arithmetic runs: the compact representation of row numbers, positions and segment ids.
//!
//! Ranks exchange segment ids and positions exactly, as runs, not as summaries of fixed groups of
//! rows. So blocks are trimmed to single rows, and a packed document is one run.

/// An arithmetic sequence: `count` numbers `start, start + step, start + 2·step, …`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Run {
    /// First number.
    pub start: i64,
    /// Difference of consecutive numbers. 0 repeats the first.
    pub step: i64,
    /// Number of elements.
    pub count: u64,
}

impl Run {
    /// Returns the number at `index`. It wraps around on overflow.
    pub const fn at(&self, index: u64) -> i64 {
        self.start.wrapping_add(self.step.wrapping_mul(index.cast_signed()))
    }

    /// Returns the indices of the numbers in `lo..hi`. They form one range, because the sequence is
    /// monotone.
    pub fn indices_within(&self, lo: i64, hi: i64) -> std::ops::Range<u64> {
        if lo >= hi || self.count == 0 {
            return 0..0;
        }
        // 128 bits, because lo and hi may be i64::MIN and i64::MAX, which mean "unbounded"
        let start = i128::from(self.start);
        let step = i128::from(self.step);
        let count = i128::from(self.count);
        let lo = i128::from(lo);
        let hi = i128::from(hi);
        let ceil_div = |a: i128, b: i128| a.div_euclid(b) + i128::from(a.rem_euclid(b) != 0);
        let (first, end) = match step {
            0 if (lo..hi).contains(&start) => (0, count),
            0 => (0, 0),
            _ if step > 0 => (ceil_div(lo - start, step), ceil_div(hi - start, step)),
            _ => ((start - hi).div_euclid(-step) + 1, (start - lo).div_euclid(-step) + 1),
        };
        let clamp = |x: i128| u64::try_from(x.clamp(0, count)).unwrap_or(0);
        clamp(first)..clamp(end).max(clamp(first))
    }
}

/// A list of numbers, stored as arithmetic runs. [`Runs::push`] extends the last run if possible.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct Runs {
    runs: Vec<Run>,
    len: u64,
}

impl Runs {
    /// Creates the empty list.
    pub const fn new() -> Self {
        Self { runs: Vec::new(), len: 0 }
    }

    /// Creates the empty list, with memory for some runs.
    pub fn with_capacity(runs: usize) -> Self {
        Self { runs: Vec::with_capacity(runs), len: 0 }
    }

    /// Creates the list of `count` numbers `start, start + 1, …`.
    pub fn counting(start: i64, count: u64) -> Self {
        let mut runs = Self::new();
        runs.push_run(Run { start, step: 1, count });
        runs
    }

    /// Appends one number. Extends the last run if the number continues it.
    pub fn push(&mut self, number: i64) {
        self.len += 1;
        match self.runs.last_mut() {
            Some(last) if last.count == 1 => {
                if let Some(step) = number.checked_sub(last.start) {
                    *last = Run { start: last.start, step, count: 2 };
                    return;
                }
                self.runs.push(Run { start: number, step: 1, count: 1 });
            }
            Some(last) if last.at(last.count - 1).checked_add(last.step) == Some(number) => {
                last.count += 1
            }
            _ => self.runs.push(Run { start: number, step: 1, count: 1 }),
        }
    }

    /// Appends a run without merging it with the last.
    pub fn push_run(&mut self, run: Run) {
        if run.count > 0 {
            self.len += run.count;
            self.runs.push(run);
        }
    }

    /// Returns the same numbers in ascending order as runs of consecutive ones, if this list has
    /// the rows of neighbours in a striped layout:
    ///
    /// ```text
    /// s, s + p, s + 2p, …                              s, s + 1, …, s + n − 1
    /// s + 1, s + 1 + p, s + 1 + 2p, …        becomes   s + p, s + p + 1, …, s + p + n − 1
    /// …                                                …
    /// s + n − 1, s + n − 1 + p, …                      (a single run if n = p)
    /// ```
    pub fn in_blocks(&self) -> Option<Self> {
        let Run { start, step: period, count: blocks } = *self.runs.first()?;
        let width = self.runs.len() as u64;
        if width < 2 || period < 2 || width > period.unsigned_abs() {
            return None;
        }
        let is_stripe = |(index, run): (u64, &Run)| {
            run.start == start + index.cast_signed()
                && (run.step == period || run.count == 1)
                && (run.count == blocks || run.count + 1 == blocks)
        };
        let is_descending = self.runs.is_sorted_by(|one, next| one.count >= next.count);
        if !is_descending || !(0..).zip(&self.runs).all(is_stripe) {
            return None;
        }
        if width == period.unsigned_abs() {
            return Some(Self::counting(start, self.len));
        }
        let in_last = self.runs.iter().filter(|run| run.count == blocks).count() as u64;
        let mut rows = Self::new();
        for block in 0..blocks {
            let count = if block + 1 == blocks { in_last } else { width };
            let start = start + period * block.cast_signed();
            rows.push_run(Run { start, step: 1, count });
        }
        Some(rows)
    }

    /// Returns the number of elements.
    pub const fn len(&self) -> u64 {
        self.len
    }

    /// Returns true if the list is empty.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the runs in order.
    pub fn runs(&self) -> &[Run] {
        &self.runs
    }

    /// Returns the numbers in order.
    pub fn iter(&self) -> impl Iterator<Item = i64> + '_ {
        self.runs.iter().flat_map(|run| (0..run.count).map(move |index| run.at(index)))
    }
}

impl FromIterator<i64> for Runs {
    fn from_iter<I: IntoIterator<Item = i64>>(numbers: I) -> Self {
        let mut runs = Self::new();
        for_each_run(numbers, |run| runs.push_run(run));
        runs
    }
}

/// Calls `found` with the runs of a list, found greedily. The current run is kept in registers, so
/// a long run costs no memory accesses.
pub(crate) fn for_each_run(numbers: impl IntoIterator<Item = i64>, mut found: impl FnMut(Run)) {
    let mut run = Run { start: 0, step: 0, count: 0 };
    let mut last = 0i64;
    for number in numbers {
        match (run.count, number.checked_sub(last)) {
            (1, Some(step)) => run = Run { step, count: 2, ..run },
            (2.., Some(step)) if step == run.step => run.count += 1,
            (count, _) => {
                if count > 0 {
                    found(run);
                }
                run = Run { start: number, step: 1, count: 1 };
            }
        }
        last = number;
    }
    if run.count > 0 {
        found(run);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn runs_contain_the_numbers_pushed(numbers in prop::collection::vec(-5i64..5, 0..40)) {
            let runs: Runs = numbers.iter().copied().collect();
            prop_assert_eq!(runs.len(), numbers.len() as u64);
            prop_assert_eq!(runs.iter().collect::<Vec<_>>(), numbers.clone());
        }

        #[test]
        fn indices_within_are_exact(
            start in -20i64..20,
            step in -4i64..5,
            count in 0u64..12,
            lo in -60i64..60,
            hi in -60i64..60,
        ) {
            let run = Run { start, step, count };
            let range = run.indices_within(lo, hi);
            for index in 0..count {
                prop_assert_eq!(range.contains(&index), (lo..hi).contains(&run.at(index)));
            }
        }
    }

    proptest! {
        #[test]
        fn stripes_of_neighbours_are_blocks(
            period in 2i64..9,
            width in 2i64..9,
            blocks in 1i64..5,
            in_last in 1i64..9,
            start in 0i64..20,
        ) {
            let (width, in_last) = (width.min(period), in_last.min(width).min(period));
            let mut stripes = Runs::new();
            for index in 0..width {
                let count = if index < in_last { blocks } else { blocks - 1 };
                let run = Run { start: start + index, step: period, count: count as u64 };
                stripes.push_run(run);
            }
            let mut want: Vec<i64> = stripes.iter().collect();
            want.sort_unstable();
            let Some(found) = stripes.in_blocks() else {
                // of one stripe alone
                prop_assert!(stripes.runs().len() < 2);
                return Ok(());
            };
            prop_assert_eq!(found.iter().collect::<Vec<_>>(), want);
            let expected = if stripes.runs().len() as i64 == period { 1 } else { blocks };
            prop_assert_eq!(found.runs().len() as i64, expected);
        }
    }

    #[test]
    fn other_runs_are_no_blocks() {
        let runs = |all: &[(i64, i64, u64)]| {
            let mut runs = Runs::new();
            for &(start, step, count) in all {
                runs.push_run(Run { start, step, count });
            }
            runs.in_blocks()
        };
        assert_eq!(runs(&[]), None);
        assert_eq!(runs(&[(0, 4, 3)]), None);
        assert_eq!(runs(&[(0, 4, 3), (2, 4, 3)]), None, "a gap");
        assert_eq!(runs(&[(0, 4, 2), (1, 4, 3)]), None, "the second is longer");
        assert_eq!(runs(&[(0, 4, 3), (1, 4, 1)]), None, "the second lacks two");
        assert_eq!(runs(&[(0, 4, 3), (1, 5, 3)]), None, "two periods");
        assert_eq!(runs(&[(0, 1, 3), (3, 1, 3)]), None, "contiguous");
        assert_eq!(runs(&[(0, 2, 3), (1, 2, 3), (2, 2, 3)]), None, "a row twice");
    }

    #[test]
    fn extreme_numbers_do_not_overflow() {
        let runs: Runs = [i64::MIN, i64::MAX, 0].into_iter().collect();
        assert_eq!(runs.iter().collect::<Vec<_>>(), [i64::MIN, i64::MAX, 0]);
        assert_eq!(Run { start: 0, step: 3, count: 5 }.indices_within(i64::MIN, i64::MAX), 0..5);
        assert_eq!(Run { start: 0, step: -3, count: 5 }.indices_within(i64::MIN, i64::MAX), 0..5);
    }
}
