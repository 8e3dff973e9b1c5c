//! Divides an axis of the tile map into cells of neighbouring rows.

use std::ops::Range;

use annulus_core::{Runs, index};

/// Approximate number of cells of an axis: about 6 pixels each.
const CELLS: usize = 96;
/// The most runs of rows with a cell each: more would be narrower than 4 pixels, and make more than
/// 16 384 tiles. Of more runs, evenly spaced ones are drawn.
const MOST_RUNS: usize = 128;

/// Axis of the map.
#[derive(Debug)]
pub(super) struct Axis {
    /// Cells in order.
    pub(super) cells: Vec<Cell>,
    /// True if rows are in the order of the sequence; else they are grouped by owner.
    pub(super) in_sequence: bool,
    /// Number of cells that each drawn cell represents.
    pub(super) stride: usize,
}

/// Neighbouring rows of one owner.
#[derive(Debug, Clone)]
pub(super) struct Cell {
    /// Index of their owner: a group of queries, or a place of keys.
    pub(super) owner: usize,
    /// Row numbers at which visibility is evaluated.
    pub(super) samples: Vec<i64>,
    /// Range of row numbers that it spans.
    pub(super) rows: Range<i64>,
}

/// The most sampled rows of a cell.
const SAMPLES: u64 = 4;

impl Axis {
    /// Divides the rows of all owners. If rows alternate between owners and are too many for a cell
    /// each, they are grouped by owner.
    pub(super) fn new(rows: &[Runs], len: usize) -> Self {
        let runs = || {
            rows.iter()
                .enumerate()
                .flat_map(|(owner, rows)| rows.runs().iter().map(move |run| (owner, *run)))
        };
        let neighbours = runs().all(|(_, run)| run.step == 1 || run.count <= 1);
        let in_sequence = neighbours || len <= CELLS;
        // cells per run, for about CELLS together
        let share = if len <= CELLS { usize::MAX } else { CELLS.div_ceil(runs().count().max(1)) };
        let mut cells = Vec::new();
        for (owner, run) in runs() {
            let parts = share.min(index(run.count)) as u64;
            for part in 0..parts {
                let edge = |part: u64| {
                    index((u128::from(run.count) * u128::from(part) / u128::from(parts)) as u64)
                        as u64
                };
                let first = edge(part);
                let end = edge(part + 1);
                let samples = SAMPLES.min(end - first);
                // the middles of equal parts
                let sample =
                    |index: u64| run.at(first + ((end - first) * (2 * index + 1)) / (2 * samples));
                cells.push(Cell {
                    owner,
                    samples: (0..samples).map(sample).collect(),
                    rows: run.at(first)..run.at(end - 1) + 1,
                });
            }
        }
        if in_sequence {
            cells.sort_by_key(|cell| cell.rows.start);
        }
        let drawn_runs = runs().filter(|(_, run)| run.count > 0).count();
        let stride =
            if len > CELLS && drawn_runs > MOST_RUNS { drawn_runs.div_ceil(MOST_RUNS) } else { 1 };
        Self { cells: cells.into_iter().step_by(stride).collect(), in_sequence, stride }
    }
}
