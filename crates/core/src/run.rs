//! Arithmetic runs: the compact form of row numbers, positions and segment ids.

/// `count` numbers `start, start + step, start + 2·step, …`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Run {
    /// The first number.
    pub start: i64,
    /// The difference of neighbours; 0 repeats the first.
    pub step: i64,
    /// How many.
    pub count: u64,
}

impl Run {
    /// The number at `index`.
    pub const fn at(&self, index: u64) -> i64 {
        self.start.wrapping_add(self.step.wrapping_mul(index.cast_signed()))
    }

    /// The indices of this run whose numbers lie in `lo..hi`, as a half-open range (numbers are monotone, so it is one range).
    pub fn indices_within(&self, lo: i64, hi: i64) -> std::ops::Range<u64> {
        if lo >= hi || self.count == 0 {
            return 0..0;
        }
        // in 128 bits: lo and hi may be i64::MIN and i64::MAX for "unbounded"
        let (start, step, count) =
            (i128::from(self.start), i128::from(self.step), i128::from(self.count));
        let (lo, hi) = (i128::from(lo), i128::from(hi));
        let ceil_div = |a: i128, b: i128| a.div_euclid(b) + i128::from(a.rem_euclid(b) != 0);
        let (first, end) = match step {
            0 if (lo..hi).contains(&start) => (0, count),
            0 => (0, 0),
            _ if step > 0 => (ceil_div(lo - start, step), ceil_div(hi - start, step)),
            _ => ((start - hi).div_euclid(-step) + 1, (start - lo).div_euclid(-step) + 1),
        };
        let clip = |x: i128| u64::try_from(x.clamp(0, count)).unwrap_or(0);
        let (first, end) = (clip(first), clip(end));
        first..end.max(first)
    }
}

/// A list of numbers as maximal runs, found greedily.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct Runs {
    runs: Vec<Run>,
    len: u64,
}

impl Runs {
    /// The empty list.
    pub const fn new() -> Self {
        Self { runs: Vec::new(), len: 0 }
    }

    /// `start, start + 1, …`, `count` of them.
    pub fn counting(start: i64, count: u64) -> Self {
        let mut runs = Self::new();
        runs.push_run(Run { start, step: 1, count });
        runs
    }

    /// Appends one number, growing the last run where it fits.
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

    /// Appends a whole run as it is.
    pub fn push_run(&mut self, run: Run) {
        if run.count > 0 {
            self.len += run.count;
            self.runs.push(run);
        }
    }

    /// How many numbers.
    pub const fn len(&self) -> u64 {
        self.len
    }

    /// Whether there are none.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The runs in order.
    pub fn runs(&self) -> &[Run] {
        &self.runs
    }

    /// The numbers in order.
    pub fn iter(&self) -> impl Iterator<Item = i64> + '_ {
        self.runs.iter().flat_map(|run| (0..run.count).map(move |index| run.at(index)))
    }
}

impl FromIterator<i64> for Runs {
    fn from_iter<I: IntoIterator<Item = i64>>(numbers: I) -> Self {
        let mut runs = Self::new();
        numbers.into_iter().for_each(|number| runs.push(number));
        runs
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn runs_give_back_the_numbers(numbers in prop::collection::vec(-5i64..5, 0..40)) {
            let runs: Runs = numbers.iter().copied().collect();
            prop_assert_eq!(runs.len(), numbers.len() as u64);
            prop_assert_eq!(runs.iter().collect::<Vec<_>>(), numbers.clone());
        }

        #[test]
        fn indices_within_are_exact(start in -20i64..20, step in -4i64..5, count in 0u64..12, lo in -60i64..60, hi in -60i64..60) {
            let run = Run { start, step, count };
            let range = run.indices_within(lo, hi);
            for index in 0..count {
                prop_assert_eq!(range.contains(&index), (lo..hi).contains(&run.at(index)));
            }
        }
    }

    #[test]
    fn extreme_numbers_do_not_overflow() {
        let runs: Runs = [i64::MIN, i64::MAX, 0].into_iter().collect();
        assert_eq!(runs.iter().collect::<Vec<_>>(), [i64::MIN, i64::MAX, 0]);
        assert_eq!(Run { start: 0, step: 3, count: 5 }.indices_within(i64::MIN, i64::MAX), 0..5);
        assert_eq!(Run { start: 0, step: -3, count: 5 }.indices_within(i64::MIN, i64::MAX), 0..5);
    }
}
