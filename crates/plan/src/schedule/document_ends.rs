//! Ends of documents, from the segment ids of rows.

use annulus_core::Run;

/// Ends of documents, from the runs of their ids.
///
/// Consecutive documents of one row, which need no other row, are dealt as one. So the documents
/// depend on the ids alone, and not on the runs into which these are compressed: the ids 0 0 1 2 2
/// are the runs 0 0, 1 2 and 2, or 0 0, 1 and 2 2.
#[derive(Default)]
pub(super) struct DocumentEnds {
    ends: Vec<u64>,
    /// Id of the rows at the end, and their number.
    last: Option<(i64, u64)>,
    /// True if the last document in `ends` has rows of different ids.
    is_of_single_rows: bool,
}

impl DocumentEnds {
    /// Returns the ends of the documents that divide `rows` rows, ascending.
    pub(super) fn of(ids: &[Run], rows: u64) -> Vec<u64> {
        let mut all = Self::default();
        for run in ids.iter().filter(|run| run.count > 0) {
            if run.step == 0 || run.count == 1 {
                all.add_rows(run.start, run.count);
            } else {
                // only the first and the last row can have the id of rows of another run
                all.add_rows(run.start, 1);
                all.end_document();
                all.add_document(run.count - 2, true);
                all.add_rows(run.at(run.count - 1), 1);
            }
        }
        all.end_document();
        let end = all.ends.last().copied().unwrap_or(0);
        all.add_document(rows.saturating_sub(end), false);
        all.ends
    }

    fn add_rows(&mut self, id: i64, count: u64) {
        match &mut self.last {
            Some((last, rows)) if *last == id => *rows += count,
            _ => {
                self.end_document();
                self.last = Some((id, count));
            }
        }
    }

    fn end_document(&mut self) {
        if let Some((_, rows)) = self.last.take() {
            self.add_document(rows, rows == 1);
        }
    }

    fn add_document(&mut self, rows: u64, is_of_single_rows: bool) {
        if rows == 0 {
            return;
        }
        let begin = self.ends.last().copied().unwrap_or(0);
        if is_of_single_rows && self.is_of_single_rows {
            self.ends.pop();
        }
        self.ends.push(begin + rows);
        self.is_of_single_rows = is_of_single_rows;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documents_of_one_row_are_one_however_ids_are_compressed() {
        let run = |start, step, count| Run { start, step, count };
        let of = DocumentEnds::of;
        let want = [2, 4, 7];
        for runs in [
            &[run(0, 0, 2), run(1, 0, 1), run(2, 0, 1), run(3, 0, 3)][..],
            &[run(0, 0, 2), run(1, 1, 3), run(3, 0, 2)],
            &[run(0, 0, 1), run(0, 1, 4), run(3, 0, 2)],
            &[run(0, 0, 2), run(9, -2, 2), run(3, 0, 3)],
        ] {
            assert_eq!(of(runs, 7), want, "{runs:?}");
            assert_eq!(of(runs, 9), [2, 4, 7, 9], "rows without ids");
        }
        assert_eq!(of(&[run(5, 1, 6)], 6), [6]);
        assert_eq!(of(&[run(5, 1, 2), run(6, 0, 1), run(6, 1, 2)], 5), [1, 4, 5]);
        assert_eq!(of(&[], 3), [3]);
    }
}
