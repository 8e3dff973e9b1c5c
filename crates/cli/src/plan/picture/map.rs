//! Tile map: queries down, keys across. The colour of a tile is that of its rank and ring step.

use std::ops::Range;

use annulus_core::{Mask, Runs, Spec, mask::Query};

use super::{
    DrawnRing, {AXIS, Area, EMPTY, ON_COLOUR, Svg, area, colour, colour_of_place},
};

/// Approximate number of cells of an axis: about 6 pixels each.
const CELLS: usize = 96;
/// The most runs of rows with a cell each: more would be narrower than 4 pixels, and make more than
/// 16 384 tiles. Of more runs, evenly spaced ones are drawn.
const MOST_RUNS: usize = 128;
/// The most query rows of a tile whose visible keys are counted.
const SAMPLES: u64 = 4;
/// Width of the strips that show the owners of rows.
const STRIP: f64 = 16.0;
/// Number of shades of a tile.
const SHADES: f64 = 4.0;

/// Axis of the map.
#[derive(Debug)]
struct Axis {
    /// Cells in order.
    cells: Vec<Cell>,
    /// Order of the rows in words.
    order: String,
}

/// Neighbouring rows of one owner.
#[derive(Debug, Clone)]
struct Cell {
    /// Group that owns them.
    owner: usize,
    /// Numbers of some rows: the middles of equal parts.
    samples: Vec<i64>,
    /// Range of row numbers that it spans.
    rows: Range<i64>,
}

impl Axis {
    /// Divides the rows of all owners. If rows alternate between owners and are too many for a cell
    /// each, they are grouped by owner.
    fn new<'a>(rows: impl Iterator<Item = &'a Runs>, len: usize) -> Self {
        let runs: Vec<_> = rows
            .enumerate()
            .flat_map(|(owner, rows)| rows.runs().iter().map(move |run| (owner, *run)))
            .filter(|(_, run)| run.count > 0)
            .collect();
        let neighbours = runs.iter().all(|(_, run)| run.step == 1 || run.count <= 1);
        let in_sequence = neighbours || len <= CELLS;
        // cells per run, for about CELLS together
        let share = if len <= CELLS { len } else { CELLS.div_ceil(runs.len()) } as u64;
        let mut cells = Vec::new();
        for &(owner, run) in &runs {
            let parts = share.min(run.count);
            for part in 0..parts {
                let edge = |part: u64| {
                    (u128::from(run.count) * u128::from(part) / u128::from(parts)) as u64
                };
                let [first, end] = [edge(part), edge(part + 1)];
                let samples = SAMPLES.min(end - first);
                let sample =
                    |index| run.at(first + (end - first) * (2 * index + 1) / (2 * samples));
                let samples = (0..samples).map(sample).collect();
                cells.push(Cell { owner, samples, rows: run.at(first)..run.at(end - 1) + 1 });
            }
        }
        if in_sequence {
            cells.sort_by_key(|cell| cell.rows.start);
        }
        let stride = if len > CELLS { runs.len().div_ceil(MOST_RUNS).max(1) } else { 1 };
        let mut order = if in_sequence { "in sequence" } else { "grouped by rank" }.to_owned();
        if stride > 1 {
            order += &format!(", 1 of {stride} runs of rows");
        }
        Self { cells: cells.into_iter().step_by(stride).collect(), order }
    }
}

/// Draws the map into `area`, including the strips and the labels of the axes.
pub(super) fn draw(svg: &mut Svg, room: Area, spec: &Spec, ring: &DrawnRing<'_>) {
    let queries = Axis::new(ring.queries(), spec.dims.q_len);
    let keys = Axis::new(ring.keys(), spec.dims.kv_len);
    let margin = 20.0 + STRIP;
    let plot = area(room.x + margin, room.y + margin, room.width - margin, room.height - margin);
    let [x, y] = [plot.x + plot.width / 2.0, plot.y + plot.height / 2.0];
    svg.text(x, room.y + 11.0, AXIS, &format!("keys, {} →", keys.order));
    svg.upward(room.x + 11.0, y, AXIS, &format!("← queries, {}", queries.order));
    svg.rect(plot, EMPTY, 1.0);
    let above = Area { y: plot.y - STRIP - 2.0, height: STRIP, ..plot };
    strip(svg, &keys, above, true, ring);
    let left = Area { x: plot.x - STRIP - 2.0, width: STRIP, ..plot };
    strip(svg, &queries, left, false, ring);
    if queries.cells.is_empty() || keys.cells.is_empty() {
        return svg.text(x, y, AXIS, "no rows");
    }
    draw_tiles(svg, plot, [&queries, &keys], spec, ring);
}

/// Draws the tiles that are not empty into `plot`.
fn draw_tiles(
    svg: &mut Svg,
    plot: Area,
    [queries, keys]: [&Axis; 2],
    spec: &Spec,
    ring: &DrawnRing<'_>,
) {
    let height = plot.height / queries.cells.len() as f64;
    let width = plot.width / keys.cells.len() as f64;
    for (row, cell) in queries.cells.iter().enumerate() {
        let shade = |key: &Cell| {
            let share = visible_share(spec.mask.as_ref(), cell, key, ring);
            // 0 for an empty tile, at least 1 for any other
            if share > 0.0 { (share * SHADES).round().clamp(1.0, SHADES) } else { 0.0 }
        };
        let tiles: Vec<(usize, f64)> =
            keys.cells.iter().map(|key| (key.owner, shade(key))).collect();
        let mut first = 0;
        // neighbouring tiles of one owner and shade are one rectangle
        for tiles in tiles.chunk_by(|a, b| a == b) {
            let (owner, shade) = tiles[0];
            if shade > 0.0 {
                let step = ring.step(cell.owner, owner);
                let x = plot.x + first as f64 * width;
                let y = plot.y + row as f64 * height;
                let fill = colour(cell.owner, ring.groups(), step, ring.busy_steps);
                // from 0.4 on, so that a tile with few visible pairs still has a colour
                let opacity = 0.4 + 0.6 * shade / SHADES;
                svg.rect(area(x, y, tiles.len() as f64 * width, height), &fill, opacity);
            }
            first += tiles.len();
        }
    }
}

/// Returns the key rows that a query row may attend to by its document. The first has position 0.
fn document(ring: &DrawnRing<'_>, row: i64) -> Range<i64> {
    let Some(starts) = ring.starts else { return 0..i64::MAX };
    let after = starts.partition_point(|&start| start <= row);
    match (starts.get(after.wrapping_sub(1)), starts.get(after)) {
        (Some(&start), Some(&end)) => start..end,
        _ => 0..0,
    }
}

/// Estimates the visible share of a tile from a few of its query rows. The masks of flags all have
/// intervals.
fn visible_share(mask: &dyn Mask, queries: &Cell, keys: &Cell, ring: &DrawnRing<'_>) -> f64 {
    let of_query = |&row: &i64| {
        let document = document(ring, row);
        let position = row - document.start + ring.offset;
        let query = Query { batch: 0, head: 0, row: row.cast_unsigned(), position };
        let of_keys = keys.rows.start.max(document.start)..keys.rows.end.min(document.end);
        let visible = |range: &Range<i64>| {
            let row = |position: i64| position.saturating_add(document.start);
            (row(range.end).min(of_keys.end) - row(range.start).max(of_keys.start)).max(0)
        };
        let intervals = mask.intervals(&query);
        let rows = intervals.map_or(0, |all| all.ranges().iter().map(visible).sum::<i64>());
        rows as f64 / (keys.rows.end - keys.rows.start) as f64
    };
    queries.samples.iter().map(of_query).sum::<f64>() / queries.samples.len() as f64
}

/// Draws the owners of rows along one side of the map.
fn strip(svg: &mut Svg, axis: &Axis, area: Area, across: bool, ring: &DrawnRing<'_>) {
    let cells = axis.cells.len() as f64;
    let mut first = 0;
    for rows in axis.cells.chunk_by(|a, b| a.owner == b.owner) {
        let start = first as f64 / cells;
        let share = rows.len() as f64 / cells;
        let owner = rows[0].owner;
        first += rows.len();
        let part = if across {
            Area { x: area.x + start * area.width, width: share * area.width, ..area }
        } else {
            Area { y: area.y + start * area.height, height: share * area.height, ..area }
        };
        svg.rect(part, &colour_of_place(owner, ring.groups()), 1.0);
        let name = ring.rank(owner).to_string();
        let [x, y] = [part.x + part.width / 2.0, part.y + part.height / 2.0];
        let room = if across { part.width } else { part.height };
        // a digit is about 7 pixels wide
        if room >= 16.0f64.max(7.0 * name.chars().count() as f64) {
            svg.text(x, y + 4.0, ON_COLOUR, &name);
        }
    }
}
