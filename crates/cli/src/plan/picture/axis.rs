//! How an axis of the tile map is cut: cells of neighbouring rows, coarse enough to be seen.

use std::ops::Range;

use annulus_core::{Shard, index};

/// About as many cells as an axis has.
const CELLS: usize = 96;
/// The most runs of neighbouring rows that each have a cell. Of more, evenly spaced ones are drawn:
/// a cell would be narrower than 4 pixels, and the tiles would be more than 16 384.
const MOST_RUNS: usize = 128;

/// One axis of the map.
#[derive(Debug)]
pub(super) struct Axis {
    /// The cells in order.
    pub(super) cells: Vec<Cell>,
    /// Whether rows stand in the order of the sequence; if not, they are grouped by rank.
    pub(super) in_sequence: bool,
    /// Cells that each drawn one stands for.
    pub(super) stride: usize,
}

/// Neighbouring rows of one rank.
#[derive(Debug, Clone)]
pub(super) struct Cell {
    /// The rank that holds them.
    pub(super) rank: usize,
    /// First and last row number, a few in between: what the cell is judged by.
    pub(super) samples: Vec<i64>,
    /// Row numbers that it spans.
    pub(super) rows: Range<i64>,
}

/// Rows that a cell is judged by.
const SAMPLES: u64 = 4;

impl Axis {
    /// Cuts the rows of all ranks. Rows that are dealt one by one are grouped by rank if they are too many to be seen.
    pub(super) fn new(shards: &[&Shard], len: usize) -> Self {
        let runs = || {
            shards
                .iter()
                .enumerate()
                .flat_map(|(rank, shard)| shard.rows.runs().iter().map(move |run| (rank, *run)))
        };
        let neighbours = runs().all(|(_, run)| run.step == 1 || run.count <= 1);
        let in_sequence = neighbours || len <= CELLS;
        // as many cells a run as make about CELLS in all
        let share = if len <= CELLS { usize::MAX } else { CELLS.div_ceil(runs().count().max(1)) };
        let mut cells = Vec::new();
        for (rank, run) in runs() {
            let parts = share.min(index(run.count)) as u64;
            for part in 0..parts {
                let edge = |part: u64| {
                    index((u128::from(run.count) * u128::from(part) / u128::from(parts)) as u64)
                        as u64
                };
                let (first, end) = (edge(part), edge(part + 1));
                let samples = SAMPLES.min(end - first);
                // the middles of equal parts
                let sample =
                    |at: u64| run.at(first + ((end - first) * (2 * at + 1)) / (2 * samples));
                cells.push(Cell {
                    rank,
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
