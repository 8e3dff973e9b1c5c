//! Local order of the rows of a rank, in which its runs fill whole tiles.
//!
//! ```text
//! runs of whole tiles
//! while there are other runs:
//!     the one with the most rows beyond whole tiles, then those that fill its last tile best
//! runs that do not fill their last tile, at the end
//! ```
//! If later queries of a document have more pairs, the rows that fill no tile are its first ones,
//! which attend to few tiles of keys ([`first_rows_apart`]).
//!
//! A tile of a kernel is 64 consecutive local rows. Rows of two documents in one tile cost the key
//! tiles of both, and rows of one run in two tiles cost its key tiles twice.

use annulus_core::Run;

/// Rows of a tile of the CPU kernels.
pub(super) const TILE_ROWS: u64 = 64;

/// Orders the runs of a rank such that as many tiles as possible end with a run.
pub(super) fn tile_order(runs: &mut [Run]) {
    let beyond = |run: &Run| run.count % TILE_ROWS;
    // free rows of the last tile
    let free = |run: &Run| (TILE_ROWS - beyond(run)) % TILE_ROWS;
    if runs.iter().all(|run| free(run) == 0) {
        return;
    }
    runs.sort_by_key(free);
    // end of the runs that fill whole tiles, before those that do not
    let mut filled = runs.partition_point(|run| free(run) == 0);
    let mut begin = filled;
    while let Some(first) = runs.get(begin) {
        let mut left = free(first);
        let mut end = begin + 1;
        while let Some(fitting) = runs[end..].iter().position(|run| beyond(run) <= left) {
            left -= beyond(&runs[end + fitting]);
            runs[end..=end + fitting].rotate_right(1);
            end += 1;
        }
        if left == 0 {
            runs[filled..end].rotate_right(end - begin);
            filled += end - begin;
        }
        begin = end;
    }
}

/// Divides runs of more than a tile such that all but their first rows fill whole tiles.
pub(super) fn first_rows_apart(runs: Vec<Run>) -> Vec<Run> {
    let divided = |run: Run| {
        let first = run.count % TILE_ROWS;
        let [head, rest] = [(0, first), (first, run.count - first)].map(|(begin, count)| Run {
            start: run.start + begin.cast_signed() * run.step,
            count,
            ..run
        });
        [head, rest].into_iter().filter(|run| run.count > 0)
    };
    runs.into_iter().flat_map(divided).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Orders runs as the module describes it, with a list for each tile.
    fn plain_order(runs: Vec<Run>) -> Vec<Run> {
        let beyond = |run: &Run| run.count % TILE_ROWS;
        let (mut ordered, mut parts): (Vec<Run>, Vec<Run>) =
            runs.into_iter().partition(|run| beyond(run) == 0);
        parts.sort_by_key(|run| std::cmp::Reverse(beyond(run)));
        let mut rest = Vec::new();
        while !parts.is_empty() {
            let mut tile = vec![parts.remove(0)];
            let mut free = TILE_ROWS - beyond(&tile[0]);
            while let Some(fitting) = parts.iter().position(|run| beyond(run) <= free) {
                let run = parts.remove(fitting);
                free -= beyond(&run);
                tile.push(run);
            }
            if free == 0 { &mut ordered } else { &mut rest }.append(&mut tile);
        }
        ordered.append(&mut rest);
        ordered
    }

    proptest! {
        #[test]
        fn the_order_is_that_of_lists_of_tiles(
            counts in prop::collection::vec(1u64..200, 0..12),
            unit in prop::sample::select(&[1, 16, 64][..]),
        ) {
            let counts: Vec<u64> =
                counts.iter().map(|&count| count.next_multiple_of(unit)).collect();
            let run = |(start, &count): (i64, &u64)| Run { start, step: 1, count };
            let mut runs: Vec<Run> = (0..).zip(&counts).map(run).collect();
            let want = plain_order(runs.clone());
            tile_order(&mut runs);
            prop_assert_eq!(runs, want);
        }
    }

    #[test]
    fn runs_fill_whole_tiles() {
        let counts = |counts: &[u64]| -> Vec<u64> {
            let run = |&count: &u64| Run { start: 0, step: 1, count };
            let mut runs: Vec<Run> = counts.iter().map(run).collect();
            tile_order(&mut runs);
            runs.iter().map(|run| run.count).collect()
        };
        assert_eq!(counts(&[10, 64, 54, 128]), [64, 128, 54, 10]);
        // 40 + 24 and 100 + 20 + 8
        assert_eq!(counts(&[24, 100, 20, 40, 8]), [40, 24, 100, 20, 8]);
        // the last tile is not full
        assert_eq!(counts(&[50, 30, 14, 64]), [64, 50, 14, 30]);
        assert_eq!(counts(&[]), []);
    }

    #[test]
    fn the_first_rows_of_a_run_fill_no_tile() {
        let runs = [(0, 150), (200, 64), (300, 20)];
        let runs = runs.map(|(start, count)| Run { start, step: 1, count }).to_vec();
        let apart: Vec<(i64, u64)> =
            first_rows_apart(runs).iter().map(|run| (run.start, run.count)).collect();
        assert_eq!(apart, [(0, 22), (22, 128), (200, 64), (300, 20)]);
    }
}
