//! Maps rows of a tensor to elements of the file, for reading and writing.
//!
//! `inner` is the product of the lengths after the axis of the rows.
//!
//! ```text
//!  rows 0..6 of 9         1 row of 6·inner elements
//!  rows 0, 3, 6 of 9      3 rows of inner elements, stride 3·inner
//! ```

use annulus_core::Runs;

/// Rows at a constant stride, in elements of the whole tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct StridedElements {
    /// Index of the first element.
    pub(super) first: u64,
    /// Number of rows.
    pub(super) rows: usize,
    /// Elements of a row.
    pub(super) row: usize,
    /// Elements from the start of a row to the start of the next.
    pub(super) stride: u64,
}

impl StridedElements {
    /// Number of elements of all rows.
    pub(super) const fn elements(&self) -> usize {
        self.rows * self.row
    }

    /// Splits the rows into parts of at most `most` elements that span at most `span` elements with
    /// their gaps.
    pub(super) fn split(self, most: usize, span: usize) -> impl Iterator<Item = Self> {
        let most = most.max(1);
        // parts of a row if it is longer than `most`, else as many rows as fit
        let parts = if self.row > most { self.row.div_ceil(most) } else { 1 };
        let by_span = 1
            + (span.saturating_sub(self.row) as u64)
                .checked_div(self.stride)
                .unwrap_or(u64::MAX - 1);
        let rows = if parts > 1 {
            1
        } else {
            (most / self.row.max(1)).min(annulus_core::index(by_span)).max(1)
        };
        (0..self.rows).step_by(rows).flat_map(move |row| {
            (0..parts).map(move |part| {
                let begin = part * most;
                Self {
                    first: self.first + row as u64 * self.stride + begin as u64,
                    rows: rows.min(self.rows - row),
                    row: if parts > 1 { most.min(self.row - begin) } else { self.row },
                    stride: self.stride,
                }
            })
        })
    }
}

/// Calls `visit` for the rows `rows` along `axis` of a tensor of this shape, in the row-major order
/// of the local tensor with these rows. Adjacent rows are merged into one.
///
/// # Errors
/// The first of `visit`.
pub(super) fn for_each_strided<E>(
    shape: &[usize],
    axis: usize,
    rows: &Runs,
    mut visit: impl FnMut(StridedElements) -> Result<(), E>,
) -> Result<(), E> {
    // an empty tensor may have up to 2⁶³ lines, which must not be iterated over
    if shape.contains(&0) || rows.is_empty() {
        return Ok(());
    }
    let product = |lens: &[usize]| lens.iter().map(|&len| len as u64).product::<u64>();
    let outer = product(&shape[..axis]);
    let len = shape[axis] as u64;
    let inner = product(&shape[axis + 1..]);
    let dense = |first: u64, count: u64| StridedElements {
        first,
        rows: 1,
        row: annulus_core::index(count),
        stride: count,
    };
    // (first, count) of dense elements that the next run may continue: a whole tensor is one read
    let mut pending: Option<(u64, u64)> = None;
    for line in 0..outer {
        for run in rows.runs() {
            let first = |index: u64| (line * len + run.at(index).cast_unsigned()) * inner;
            if run.step > 1 && run.count > 1 {
                if let Some((start, held)) = pending.take() {
                    visit(dense(start, held))?;
                }
                let stride = run.step.cast_unsigned() * inner;
                visit(StridedElements {
                    first: first(0),
                    rows: annulus_core::index(run.count),
                    row: annulus_core::index(inner),
                    stride,
                })?;
                continue;
            }
            // contiguous rows are one range, descending rows one range each
            let (ranges, count) =
                if run.step == 1 { (1, run.count * inner) } else { (run.count, inner) };
            for range in 0..ranges {
                let first = first(range);
                match &mut pending {
                    Some((start, held)) if *start + *held == first => *held += count,
                    _ => {
                        if let Some((start, held)) = pending.replace((first, count)) {
                            visit(dense(start, held))?;
                        }
                    }
                }
            }
        }
    }
    pending.map_or(Ok(()), |(start, held)| visit(dense(start, held)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use annulus_core::Run;

    fn of(shape: &[usize], axis: usize, runs: &[Run]) -> Vec<StridedElements> {
        let mut rows = Runs::new();
        runs.iter().for_each(|&run| rows.push_run(run));
        let mut found = Vec::new();
        for_each_strided(shape, axis, &rows, |strided| {
            found.push(strided);
            Ok::<(), ()>(())
        })
        .unwrap();
        found
    }

    /// Returns the elements in order.
    fn elements(all: &[StridedElements]) -> Vec<u64> {
        let rows = |strided: &StridedElements| {
            (0..strided.rows as u64)
                .map(move |row| strided.first + row * strided.stride)
                .collect::<Vec<_>>()
        };
        all.iter()
            .flat_map(|strided| {
                rows(strided).into_iter().flat_map(|first| first..first + strided.row as u64)
            })
            .collect()
    }

    #[test]
    fn adjacent_rows_are_merged_and_others_keep_their_order() {
        let run = |start, step, count| Run { start, step, count };
        let dense = |first, row| StridedElements { first, rows: 1, row, stride: row as u64 };
        assert_eq!(of(&[2, 5, 3], 1, &[run(0, 1, 5)]), [dense(0, 30)]);
        assert_eq!(of(&[2, 5, 3], 1, &[run(1, 1, 2)]), [dense(3, 6), dense(18, 6)]);
        let strided = |first| StridedElements { first, rows: 2, row: 1, stride: 2 };
        assert_eq!(
            of(&[2, 5], 1, &[run(4, 1, 1), run(0, 2, 2)]),
            [dense(4, 1), strided(0), dense(9, 1), strided(5)]
        );
        assert_eq!(elements(&of(&[6], 0, &[run(5, -2, 3)])), [5, 3, 1]);
        assert_eq!(of(&[2, 5], 1, &[]), []);
    }

    #[test]
    fn lines_without_elements_are_not_iterated_over() {
        let all = [Run { start: 0, step: 1, count: 5 }];
        assert_eq!(of(&[1 << 40, 5, 0], 1, &all), []);
        assert_eq!(of(&[1 << 40, 0, 4], 1, &[]), []);
        assert_eq!(of(&[0, 5], 1, &all), []);
    }

    #[test]
    fn parts_have_the_same_elements_within_both_limits() {
        for strided in [
            StridedElements { first: 3, rows: 1, row: 23, stride: 23 },
            StridedElements { first: 5, rows: 7, row: 4, stride: 9 },
            StridedElements { first: 0, rows: 13, row: 1, stride: 2 },
        ] {
            for most in 1..30 {
                for span in 1..70 {
                    let parts: Vec<StridedElements> = strided.split(most, span).collect();
                    assert_eq!(elements(&parts), elements(&[strided]), "{strided:?} {most} {span}");
                    assert!(parts.iter().all(|part| part.elements() <= most));
                    let spanned = |part: &StridedElements| {
                        (part.rows as u64 - 1) * part.stride + part.row as u64
                    };
                    assert!(
                        parts.iter().all(|part| part.rows == 1 || spanned(part) <= span as u64),
                        "{parts:?} {span}"
                    );
                }
            }
        }
    }
}
