//! Statistics of the scores by head: maximum and mean over the rows of all ranks.
//!
//! ```text
//! per rank and head     maximum, exact sum and number of its rows with a visible key
//! all-gather            368 bytes for each head
//! mean                  sum over ranks / rows over ranks
//! ```
//! The sums are exact, so that results do not depend on the number of ranks, the layout or the order
//! of the rows: they have the same bits wherever the rows have them.
//!
//! # Source
//! Kulisch and Miranker 1981, Computer Arithmetic in Theory and Practice: sums in fixed point.

use annulus_core::{Error, ExactSum, HostViewMut, Result, Space, Spec, Transport, memory};

use crate::{agreement::all_gather, calls::Entries};

const COUNT: usize = Spec::SCORE_STATISTICS;

/// Heads of one all-gather: 46 KiB of each rank.
const HEADS_PER_GATHER: usize = 128;

/// Rows that are read at once.
const ROWS_AT_ONCE: usize = 1 << 12;

/// Writes `heads` `[q_heads, 3, 2, 1]` from this rank's `rows` `[batch, q_heads, rows, 3]` and those
/// of all other ranks.
///
/// # Ordering
/// Collective.
///
/// # Errors
/// Those of the transport; [`Error::OutOfMemory`].
pub(crate) fn write<S: Space>(
    transport: &mut dyn Transport<S>,
    entries: &mut Entries,
    rows: &mut HostViewMut<'_>,
    heads: &mut HostViewMut<'_>,
) -> Result<()> {
    let mut all = own_rows(rows)?;
    if transport.control().ranks() > 1 {
        for part in all.chunks_mut(HEADS_PER_GATHER) {
            let numbers = part.iter().flat_map(HeadRows::numbers);
            let bytes: Vec<u8> = numbers.flat_map(f64::to_le_bytes).collect();
            let gathered = all_gather(transport, entries.round(), &bytes)?;
            part.fill(HeadRows::EMPTY);
            for (peer, bytes) in gathered.iter().enumerate() {
                let (numbers, rest) = bytes.as_chunks::<8>();
                if numbers.len() != part.len() * HeadRows::NUMBERS || !rest.is_empty() {
                    let what = format!("{} bytes of statistics", bytes.len());
                    return Err(Error::Comm { peer, step: 0, what });
                }
                let numbers: Vec<f64> = numbers.iter().map(|&of| f64::from_le_bytes(of)).collect();
                let of_heads = numbers.chunks_exact(HeadRows::NUMBERS);
                part.iter_mut().zip(of_heads).for_each(|(head, numbers)| head.add(numbers));
            }
        }
    }
    heads.write_each(all.iter().flat_map(HeadRows::results));
    Ok(())
}

/// Sums up the rows of this rank.
fn own_rows(rows: &mut HostViewMut<'_>) -> Result<Vec<HeadRows>> {
    let [_, heads, per_head, _] = rows.shape();
    let mut all = memory::filled("statistics by head", heads, HeadRows::EMPTY)?;
    // head of the next row, and the rows of it that are left
    let mut head = 0;
    let mut left = per_head;
    rows.map_widened(ROWS_AT_ONCE * COUNT, |numbers| {
        for statistics in numbers.as_chunks::<COUNT>().0 {
            if left == 0 {
                head = (head + 1) % heads;
                left = per_head;
            }
            all[head].add_row(statistics);
            left -= 1;
        }
        Ok(())
    })?;
    Ok(all)
}

/// Sums over the rows of one head that have a visible key.
#[derive(Debug, Clone, Copy, PartialEq)]
struct HeadRows {
    count: f64,
    max: [f64; COUNT],
    sum: [ExactSum; COUNT],
}

impl HeadRows {
    const EMPTY: Self =
        Self { count: 0.0, max: [f64::NEG_INFINITY; COUNT], sum: [ExactSum::ZERO; COUNT] };
    /// Numbers of 8 bytes in a message.
    const NUMBERS: usize = 1 + COUNT * (1 + ExactSum::NUMBERS);

    fn add_row(&mut self, statistics: &[f64; COUNT]) {
        let [_, max_score, _] = statistics;
        if *max_score == f64::NEG_INFINITY {
            return;
        }
        self.count += 1.0;
        for (index, &x) in statistics.iter().enumerate() {
            self.max[index] = maximum(self.max[index], x);
            self.sum[index].add(x);
        }
    }

    fn numbers(&self) -> impl Iterator<Item = f64> {
        let Self { count, max, sum } = *self;
        let sums = sum.into_iter().flat_map(|sum| sum.numbers());
        std::iter::once(count).chain(max).chain(sums)
    }

    /// Adds those of another rank, in the order of [`HeadRows::numbers`].
    fn add(&mut self, numbers: &[f64]) {
        let Some((&[count, ref max @ ..], sums)) = numbers.split_first_chunk::<{ 1 + COUNT }>()
        else {
            return;
        };
        self.count += count;
        for (into, &from) in self.max.iter_mut().zip(max) {
            *into = maximum(*into, from);
        }
        for (into, from) in self.sum.iter_mut().zip(sums.chunks_exact(ExactSum::NUMBERS)) {
            into.merge(&ExactSum::of_numbers(from));
        }
    }

    /// Returns the maximum and the mean of each statistic.
    fn results(&self) -> impl Iterator<Item = f64> {
        let Self { count, max, sum } = *self;
        max.into_iter().zip(sum).flat_map(move |(max, sum)| [max, sum.total() / count])
    }
}

/// Returns the larger number, or NaN if one is NaN.
fn maximum(a: f64, b: f64) -> f64 {
    if a.is_nan() || a > b { a } else { b }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_without_a_key_do_not_count() {
        let mut rows = HeadRows::EMPTY;
        let empty: Vec<f64> = rows.results().collect();
        assert!(empty[0] == f64::NEG_INFINITY && empty[1].is_nan());
        rows.add_row(&[1.0, 2.0, 0.5]);
        rows.add_row(&[f64::NEG_INFINITY, f64::NEG_INFINITY, 0.7]);
        rows.add_row(&[4.0, -1.0, 0.25]);
        let mut all = HeadRows::EMPTY;
        for _ in 0..2 {
            all.add(&rows.numbers().collect::<Vec<_>>());
        }
        assert_eq!(all.count, 4.0);
        assert_eq!(all.results().collect::<Vec<_>>(), [4.0, 2.5, 2.0, 0.5, 0.5, 0.375]);
    }
}
