//! Where the chosen rows of a tensor lie: the one walk that reading and writing share.
//!
//! ```text
//!  rows 0..6 of 9         one piece, one row of 6·inner elements
//!  rows 0, 3, 6 of 9      one piece, three rows of inner elements, 3·inner apart
//! ```

use annulus_core::Runs;

/// Rows at equal distances, in elements of the whole tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Piece {
    /// The first element.
    pub(super) first: u64,
    /// Rows.
    pub(super) rows: usize,
    /// Elements of a row.
    pub(super) row: usize,
    /// Elements from the start of a row to that of the next.
    pub(super) stride: u64,
}

impl Piece {
    /// Elements of all its rows.
    pub(super) const fn elements(&self) -> usize {
        self.rows * self.row
    }

    /// The same elements in pieces that have at most `most` of them, and span at most `span`.
    pub(super) fn split(self, most: usize, span: usize) -> impl Iterator<Item = Self> {
        let most = most.max(1);
        // of a long row a part at a time, else as many rows as fit
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

/// Calls `piece` for every piece of the rows `rows` along `axis` of a tensor of this shape, in the
/// order of a local tensor whose axis has `rows.len()` rows. Rows that touch are one row.
///
/// # Errors
/// The first of `piece`.
pub(super) fn pieces<E>(
    shape: &[usize],
    axis: usize,
    rows: &Runs,
    mut piece: impl FnMut(Piece) -> Result<(), E>,
) -> Result<(), E> {
    // lines without elements may be very many
    if shape.contains(&0) || rows.is_empty() {
        return Ok(());
    }
    let product = |lens: &[usize]| lens.iter().map(|&len| len as u64).product::<u64>();
    let (outer, len, inner) =
        (product(&shape[..axis]), shape[axis] as u64, product(&shape[axis + 1..]));
    let one = |first: u64, count: u64| Piece {
        first,
        rows: 1,
        row: annulus_core::index(count),
        stride: count,
    };
    // dense pieces that touch become one: a whole tensor is one read
    let mut pending: Option<(u64, u64)> = None;
    for line in 0..outer {
        for run in rows.runs() {
            let first = |index: u64| (line * len + run.at(index).cast_unsigned()) * inner;
            if run.step > 1 && run.count > 1 {
                if let Some((start, held)) = pending.take() {
                    piece(one(start, held))?;
                }
                let stride = run.step.cast_unsigned() * inner;
                piece(Piece {
                    first: first(0),
                    rows: annulus_core::index(run.count),
                    row: annulus_core::index(inner),
                    stride,
                })?;
                continue;
            }
            // ascending rows are one stretch, any others a row each
            let (stretches, count) =
                if run.step == 1 { (1, run.count * inner) } else { (run.count, inner) };
            for stretch in 0..stretches {
                let first = first(stretch);
                match &mut pending {
                    Some((start, held)) if *start + *held == first => *held += count,
                    _ => {
                        if let Some((start, held)) = pending.replace((first, count)) {
                            piece(one(start, held))?;
                        }
                    }
                }
            }
        }
    }
    pending.map_or(Ok(()), |(start, held)| piece(one(start, held)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use annulus_core::Run;

    fn of(shape: &[usize], axis: usize, runs: &[Run]) -> Vec<Piece> {
        let mut rows = Runs::new();
        runs.iter().for_each(|&run| rows.push_run(run));
        let mut found = Vec::new();
        pieces(shape, axis, &rows, |piece| {
            found.push(piece);
            Ok::<(), ()>(())
        })
        .unwrap();
        found
    }

    /// The elements of pieces, in order.
    fn elements(pieces: &[Piece]) -> Vec<u64> {
        let rows = |piece: &Piece| {
            (0..piece.rows as u64)
                .map(move |row| piece.first + row * piece.stride)
                .collect::<Vec<_>>()
        };
        pieces
            .iter()
            .flat_map(|piece| {
                rows(piece).into_iter().flat_map(|first| first..first + piece.row as u64)
            })
            .collect()
    }

    #[test]
    fn touching_pieces_are_one_and_others_keep_their_order() {
        let run = |start, step, count| Run { start, step, count };
        let dense = |first, row| Piece { first, rows: 1, row, stride: row as u64 };
        assert_eq!(of(&[2, 5, 3], 1, &[run(0, 1, 5)]), [dense(0, 30)]);
        assert_eq!(of(&[2, 5, 3], 1, &[run(1, 1, 2)]), [dense(3, 6), dense(18, 6)]);
        let strided = |first| Piece { first, rows: 2, row: 1, stride: 2 };
        assert_eq!(
            of(&[2, 5], 1, &[run(4, 1, 1), run(0, 2, 2)]),
            [dense(4, 1), strided(0), dense(9, 1), strided(5)]
        );
        assert_eq!(elements(&of(&[6], 0, &[run(5, -2, 3)])), [5, 3, 1]);
        assert_eq!(of(&[2, 5], 1, &[]), []);
    }

    #[test]
    fn lines_without_elements_are_not_walked() {
        let all = [Run { start: 0, step: 1, count: 5 }];
        assert_eq!(of(&[1 << 40, 5, 0], 1, &all), []);
        assert_eq!(of(&[1 << 40, 0, 4], 1, &[]), []);
        assert_eq!(of(&[0, 5], 1, &all), []);
    }

    #[test]
    fn split_pieces_have_the_same_elements_and_keep_to_both_limits() {
        for piece in [
            Piece { first: 3, rows: 1, row: 23, stride: 23 },
            Piece { first: 5, rows: 7, row: 4, stride: 9 },
            Piece { first: 0, rows: 13, row: 1, stride: 2 },
        ] {
            for most in 1..30 {
                for span in 1..70 {
                    let parts: Vec<Piece> = piece.split(most, span).collect();
                    assert_eq!(elements(&parts), elements(&[piece]), "{piece:?} {most} {span}");
                    assert!(parts.iter().all(|part| part.elements() <= most));
                    let spanned =
                        |part: &Piece| (part.rows as u64 - 1) * part.stride + part.row as u64;
                    assert!(
                        parts.iter().all(|part| part.rows == 1 || spanned(part) <= span as u64),
                        "{parts:?} {span}"
                    );
                }
            }
        }
    }
}
