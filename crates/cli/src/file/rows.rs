//! Maps rows of a tensor to elements of the file, for reading and writing.

use annulus_core::Runs;

/// Calls `visit` with the first element and the number of elements of each contiguous range of the
/// rows `rows` along `axis` of a tensor of this shape, in the row-major order of the local tensor
/// with these rows. Adjacent ranges are merged.
///
/// # Errors
/// The first of `visit`.
pub(super) fn for_each_range<E>(
    shape: &[usize],
    axis: usize,
    rows: &Runs,
    mut visit: impl FnMut(u64, u64) -> Result<(), E>,
) -> Result<(), E> {
    // an empty tensor may have up to 2⁶³ lines, which must not be iterated over
    if shape.contains(&0) || rows.is_empty() {
        return Ok(());
    }
    let product = |lens: &[usize]| lens.iter().map(|&len| len as u64).product::<u64>();
    let len = shape[axis] as u64;
    let inner = product(&shape[axis + 1..]);
    // a range that the next one may continue: a whole tensor is one range
    let (mut start, mut held) = (0, 0);
    for line in 0..product(&shape[..axis]) {
        for run in rows.runs() {
            let (ranges, count) = if run.step == 1 { (1, run.count) } else { (run.count, 1) };
            for index in 0..ranges {
                let first = (line * len + run.at(index).cast_unsigned()) * inner;
                if start + held != first {
                    if held > 0 {
                        visit(start, held)?;
                    }
                    (start, held) = (first, 0);
                }
                held += count * inner;
            }
        }
    }
    visit(start, held)
}

#[cfg(test)]
mod tests {
    use super::*;
    use annulus_core::Run;

    #[test]
    fn adjacent_ranges_are_merged_and_lines_without_elements_not_iterated_over() {
        let of = |shape: &[usize], axis, runs: &[[i64; 3]]| {
            let mut rows = Runs::new();
            for &[start, step, count] in runs {
                rows.push_run(Run { start, step, count: count.cast_unsigned() });
            }
            let mut found = Vec::new();
            for_each_range(shape, axis, &rows, |first, count| {
                found.push((first, count));
                Ok::<(), ()>(())
            })
            .unwrap();
            found
        };
        assert_eq!(of(&[2, 5, 3], 1, &[[0, 1, 5]]), [(0, 30)]);
        assert_eq!(of(&[2, 5, 3], 1, &[[1, 1, 2]]), [(3, 6), (18, 6)]);
        assert_eq!(
            of(&[2, 5], 1, &[[4, 1, 1], [0, 2, 2]]),
            [(4, 1), (0, 1), (2, 1), (9, 1), (5, 1), (7, 1)]
        );
        assert_eq!(of(&[6], 0, &[[5, -2, 3]]), [(5, 1), (3, 1), (1, 1)]);
        assert_eq!(of(&[2, 5], 1, &[]), []);
        assert_eq!(of(&[1 << 40, 5, 0], 1, &[[0, 1, 5]]), []);
        assert_eq!(of(&[0, 5], 1, &[[0, 1, 5]]), []);
    }
}
