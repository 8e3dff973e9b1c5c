//! Where the chosen rows of a tensor lie: the one walk that reading and writing share.

use annulus_core::Runs;

/// Calls `piece(first element, elements)` for every contiguous piece of the rows `rows` along `axis` of a tensor of this shape, in the
/// order of a local tensor whose axis has `rows.len()` rows.
pub(super) fn pieces<E>(shape: &[usize], axis: usize, rows: &Runs, mut piece: impl FnMut(u64, usize) -> Result<(), E>) -> Result<(), E> {
    let product = |lens: &[usize]| lens.iter().map(|&len| len as u64).product::<u64>();
    let (outer, len, inner) = (product(&shape[..axis]), shape[axis] as u64, product(&shape[axis + 1..]));
    // pieces that touch become one: a whole tensor is one read
    let mut pending: Option<(u64, u64)> = None;
    let mut push = |first: u64, count: u64| -> Result<(), E> {
        if count == 0 {
            return Ok(());
        }
        match &mut pending {
            Some((start, held)) if *start + *held == first => *held += count,
            _ => {
                if let Some((start, held)) = pending.replace((first, count)) {
                    piece(start, annulus_core::index(held))?;
                }
            }
        }
        Ok(())
    };
    for line in 0..outer {
        for run in rows.runs() {
            let mut rows = |row: i64, count: u64| push((line * len + row.cast_unsigned()) * inner, count * inner);
            if run.step == 1 {
                rows(run.start, run.count)?;
            } else {
                (0..run.count).try_for_each(|index| rows(run.at(index), 1))?;
            }
        }
    }
    match pending {
        Some((start, held)) => piece(start, annulus_core::index(held)),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use annulus_core::Run;

    fn of(shape: &[usize], axis: usize, runs: &[Run]) -> Vec<(u64, usize)> {
        let mut rows = Runs::new();
        runs.iter().for_each(|&run| rows.push_run(run));
        let mut found = Vec::new();
        pieces(shape, axis, &rows, |first, count| {
            found.push((first, count));
            Ok::<(), ()>(())
        })
        .unwrap();
        found
    }

    #[test]
    fn touching_pieces_are_one_and_others_keep_their_order() {
        let run = |start, step, count| Run { start, step, count };
        assert_eq!(of(&[2, 5, 3], 1, &[run(0, 1, 5)]), [(0, 30)]);
        assert_eq!(of(&[2, 5, 3], 1, &[run(1, 1, 2)]), [(3, 6), (18, 6)]);
        assert_eq!(of(&[2, 5], 1, &[run(4, 1, 1), run(0, 2, 2)]), [(4, 1), (0, 1), (2, 1), (9, 1), (5, 1), (7, 1)]);
        assert_eq!(of(&[2, 5], 1, &[]), []);
        assert_eq!(of(&[0, 5], 1, &[run(0, 1, 5)]), []);
    }
}
