//! Tile map: queries down, keys across. The colour of a tile is that of its rank and ring step.

use std::ops::Range;

use annulus_core::{Mask, Runs, Spec, index, mask::Key, mask::Query};

use super::{
    rings::Rings,
    svg::{Anchor, Area, Svg, area, at, colour, colour_of_place},
};

/// Approximate number of cells of an axis: about 6 pixels each.
const CELLS: usize = 96;
/// The most runs of rows with a cell each: more would be narrower than 4 pixels, and make more than
/// 16 384 tiles. Of more runs, evenly spaced ones are drawn.
const MOST_RUNS: usize = 128;

/// Axis of the map.
#[derive(Debug)]
struct Axis {
    /// Cells in order.
    cells: Vec<Cell>,
    /// True if rows are in the order of the sequence; else they are grouped by owner.
    in_sequence: bool,
    /// Number of cells that each drawn cell represents.
    stride: usize,
}

/// Neighbouring rows of one owner.
#[derive(Debug, Clone)]
struct Cell {
    /// Index of their owner: a group of queries, or a place of keys.
    owner: usize,
    /// Row numbers at which visibility is evaluated.
    samples: Vec<i64>,
    /// Range of row numbers that it spans.
    rows: Range<i64>,
}

/// The most sampled rows of a cell.
const SAMPLES: u64 = 4;

impl Axis {
    /// Divides the rows of all owners. If rows alternate between owners and are too many for a cell
    /// each, they are grouped by owner.
    fn new(rows: &[Runs], len: usize) -> Self {
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

/// Width of the strips that show the owners of rows.
const STRIP: f64 = 16.0;

/// Draws the map into `area`, including the strips and the labels of the axes.
pub(super) fn draw(svg: &mut Svg, room: Area, spec: &Spec, rings: &Rings) {
    let queries = Axis::new(&rings.queries, spec.dims.q_len);
    let keys = Axis::new(&rings.keys, spec.dims.kv_len);
    let margin = 20.0 + STRIP;
    let plot = area(room.x + margin, room.y + margin, room.width - margin, room.height - margin);
    let middle = at(plot.x + plot.width / 2.0, plot.y + plot.height / 2.0);
    let above = at(middle.x, room.y + 11.0);
    let keys_in_words = format!("keys, {} →", order_of(&keys));
    svg.text(above, 13.0, Anchor::Middle, "#333", &keys_in_words);
    let queries_in_words = format!("← queries, {}", order_of(&queries));
    svg.upward(at(room.x + 11.0, middle.y), 13.0, "#333", &queries_in_words);
    svg.rect(plot, "#f1f1f1", 1.0);
    let places = rings.places();
    let of_place =
        |place| Owner { ranks: rings.ranks_of_place(place), fill: colour_of_place(place, places) };
    let above = Area { y: plot.y - STRIP - 2.0, height: STRIP, ..plot };
    strip(svg, &keys, above, true, &of_place);
    let of_group = |group| {
        let ranks = rings.ranks_of_group(group);
        Owner { fill: colour_of_place(rings.place(ranks.start), places), ranks }
    };
    let left = Area { x: plot.x - STRIP - 2.0, width: STRIP, ..plot };
    strip(svg, &queries, left, false, &of_group);
    if queries.cells.is_empty() || keys.cells.is_empty() {
        svg.text(middle, 13.0, Anchor::Middle, "#333", "no rows");
        return;
    }
    draw_tiles(svg, plot, [&queries, &keys], spec, rings);
}

/// Describes the order of rows on an axis.
fn order_of(axis: &Axis) -> String {
    let order = if axis.in_sequence { "in sequence" } else { "grouped by rank" };
    if axis.stride == 1 {
        order.to_owned()
    } else {
        format!("{order}, 1 of {} runs of rows", axis.stride)
    }
}

/// Draws the tiles that are not empty into `plot`.
fn draw_tiles(svg: &mut Svg, plot: Area, [queries, keys]: [&Axis; 2], spec: &Spec, rings: &Rings) {
    let height = plot.height / queries.cells.len() as f64;
    let width = plot.width / keys.cells.len() as f64;
    let steps = rings.busy_steps;
    let positions = Positions { starts: rings.starts.as_deref(), offset: rings.offset };
    for (row, cell) in queries.cells.iter().enumerate() {
        let visible = |key: &Cell| visible_share(spec.mask.as_ref(), cell, key, &positions);
        let mut tiles = keys
            .cells
            .iter()
            .enumerate()
            .map(|(column, key)| (column, key.owner, quantised(visible(key))))
            .peekable();
        while let Some((first, owner, share)) = tiles.next() {
            // neighbouring tiles of one owner and shade are one rectangle
            let mut end = first + 1;
            while tiles.next_if(|&(_, next, other)| next == owner && other == share).is_some() {
                end += 1;
            }
            if share > 0 {
                let (place, step) = rings.computed(cell.owner, owner);
                let left = plot.x + first as f64 * width;
                let tile =
                    area(left, plot.y + row as f64 * height, (end - first) as f64 * width, height);
                // from 0.4 on, so that a tile with few visible pairs still has a colour
                let opacity = 0.4 + 0.6 * f64::from(share) / f64::from(SHADES);
                svg.rect(tile, &colour(place, rings.places(), step, steps), opacity);
            }
        }
    }
}

/// Number of shades of a tile.
const SHADES: u8 = 4;

/// Rounds a share to a shade: 0 for an empty tile, at least 1 for any other.
fn quantised(share: f64) -> u8 {
    if share > 0.0 { ((share * f64::from(SHADES)).round() as u8).clamp(1, SHADES) } else { 0 }
}

/// Positions of rows.
struct Positions<'a> {
    /// First row of each packed document, and the end of the last.
    starts: Option<&'a [i64]>,
    /// Position of query row 0, without documents.
    offset: i64,
}

impl Positions<'_> {
    /// Returns the key rows that a query row may attend to by its document. The first has position
    /// 0.
    fn document(&self, row: i64) -> Range<i64> {
        let Some(starts) = self.starts else { return 0..i64::MAX };
        let after = starts.partition_point(|&start| start <= row);
        match (starts.get(after.wrapping_sub(1)), starts.get(after)) {
            (Some(&start), Some(&end)) => start..end,
            _ => 0..0,
        }
    }
}

/// Estimates the visible share of a tile from a few of its query rows.
fn visible_share(mask: &dyn Mask, queries: &Cell, keys: &Cell, positions: &Positions<'_>) -> f64 {
    let of_query = |&row: &i64| {
        let document = positions.document(row);
        let position = row - document.start + positions.offset;
        let query = Query { batch: 0, head: 0, row: row.cast_unsigned(), position };
        if let Some(intervals) = mask.intervals(&query) {
            let of_keys = keys.rows.start.max(document.start)..keys.rows.end.min(document.end);
            let visible = |range: &Range<i64>| {
                let row = |position: i64| position.saturating_add(document.start);
                (row(range.end).min(of_keys.end) - row(range.start).max(of_keys.start)).max(0)
            };
            return intervals.ranges().iter().map(visible).sum::<i64>() as f64
                / (keys.rows.end - keys.rows.start) as f64;
        }
        let visible = |&&row: &&i64| {
            let position = row - document.start;
            document.contains(&row)
                && mask.visible(&query, &Key { row: row.cast_unsigned(), position })
        };
        keys.samples.iter().filter(visible).count() as f64 / keys.samples.len() as f64
    };
    queries.samples.iter().map(of_query).sum::<f64>() / queries.samples.len() as f64
}

/// Owner of rows on an axis.
struct Owner {
    /// Ranks that have the rows.
    ranks: Range<usize>,
    fill: String,
}

impl Owner {
    /// Returns the ranks in words: `3`, or `4–7`.
    fn name(&self) -> String {
        match self.ranks.len() {
            1 => self.ranks.start.to_string(),
            _ => format!("{}–{}", self.ranks.start, self.ranks.end - 1),
        }
    }
}

/// Draws the owners of rows along one side of the map.
fn strip(svg: &mut Svg, axis: &Axis, area: Area, across: bool, of: &dyn Fn(usize) -> Owner) {
    let cells = axis.cells.len() as f64;
    let mut first = 0;
    for rows in axis.cells.chunk_by(|a, b| a.owner == b.owner) {
        let start = first as f64 / cells;
        let share = rows.len() as f64 / cells;
        let owner = of(rows[0].owner);
        first += rows.len();
        let part = if across {
            Area { x: area.x + start * area.width, width: share * area.width, ..area }
        } else {
            Area { y: area.y + start * area.height, height: share * area.height, ..area }
        };
        svg.rect(part, &owner.fill, 1.0);
        let name = owner.name();
        let middle = at(part.x + part.width / 2.0, part.y + part.height / 2.0 + 4.0);
        let room = if across { part.width } else { part.height };
        // a digit is about 7 pixels wide
        if room < 16.0f64.max(7.0 * name.chars().count() as f64) {
            continue;
        }
        if across || owner.ranks.len() == 1 {
            svg.text(middle, 11.0, Anchor::Middle, "#fff", &name);
        } else {
            let middle = at(part.x + part.width / 2.0 + 4.0, part.y + part.height / 2.0);
            svg.upward(middle, 11.0, "#fff", &name);
        }
    }
}
