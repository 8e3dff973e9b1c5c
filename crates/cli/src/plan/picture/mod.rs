//! Picture of a plan as SVG: tile map, work of each rank, predicted bytes, exchanges, step timeline
//! and legend.

mod map;

use annulus_core::{Batch, Runs, Spec};

use crate::{
    plan::{
        figures::Figures,
        ring::{MOST_DETAILED_RANKS, PlannedRing, Send, StepFigures, StepOfRank},
    },
    report::{bytes, count},
};

/// Margin of the picture.
const MARGIN: f64 = 32.0;
/// Width of the whole picture.
const WIDTH: f64 = 1240.0;
/// Side of the tile map.
const MAP: f64 = 560.0;
/// Height of the exchanges of a grid, between map and timeline.
const EXCHANGES: f64 = 90.0;
/// The least distance of text lines: of lower bars only some have a text.
const READABLE: f64 = 15.0;

/// Draws the plan of `spec`.
pub(super) fn draw(spec: &Spec, ring: &DrawnRing<'_>, figures: &Figures) -> String {
    let mut svg = Svg::default();
    let title = &figures.title();
    // a bold character is about 0.62 of its font size wide
    let size = ((WIDTH - 2.0 * MARGIN) / (0.62 * title.chars().count() as f64)).min(20.0);
    let bold = format!("font-size=\"{size:.1}\" fill=\"#111\" font-weight=\"600\"");
    svg.text(MARGIN, 46.0, &bold, title);
    svg.text(MARGIN, 70.0, "font-size=\"13\" fill=\"#555\"", &figures.subtitle());

    let top = 92.0;
    map::draw(&mut svg, area(MARGIN, top, MAP, MAP), spec, ring);
    let right = MARGIN + MAP + 44.0;
    let width = WIDTH - MARGIN - right;
    facts(&mut svg, right, top, spec, figures);
    legend(&mut svg, right, top + 112.0, ring);
    work(&mut svg, area(right, top + 222.0, width, MAP - 222.0), ring, figures);

    let mut below = top + MAP + 36.0;
    let width = WIDTH - 2.0 * MARGIN;
    let passes = figures.passes_in_words();
    if !passes.is_empty() {
        exchanges(&mut svg, area(MARGIN, below, width, EXCHANGES), &passes, ring.members);
        below += EXCHANGES;
    }
    let height = timeline_height(ring.groups());
    draw_timeline(&mut svg, area(MARGIN, below, width, height), ring);
    svg.finish(WIDTH, below + height + MARGIN, title)
}

/// Draws the predicted bytes and the work as text.
fn facts(svg: &mut Svg, x: f64, y: f64, spec: &Spec, figures: &Figures) {
    svg.text(x, y + 14.0, HEADING, "Predicted");
    let dims = spec.dims;
    let pairs = count(figures.pairs_total as f64);
    let tensors = format!(
        "batch {}, {} query heads, {} KV heads, dim {}, {}",
        dims.batch,
        dims.q_heads,
        dims.kv_heads,
        dims.head_dim,
        spec.dtype.name()
    );
    let lines = [
        ("forward", Some(figures.forward.in_words())),
        ("backward", figures.backward.map(|backward| backward.in_words())),
        ("work", Some(format!("{pairs} visible pairs, all heads and batch rows"))),
        ("tensors", Some(tensors)),
    ];
    let lines = lines.into_iter().filter_map(|(name, words)| Some((name, words?)));
    for (line, (name, words)) in lines.enumerate() {
        let y = y + 36.0 + 19.0 * line as f64;
        svg.text(x, y, NOTE, name);
        svg.text(x + 72.0, y, FIGURE, &words);
    }
}

/// Draws the legend of the colours: at most 8 evenly spaced ranks and steps.
fn legend(svg: &mut Svg, x: f64, y: f64, ring: &DrawnRing<'_>) {
    let (groups, steps) = (ring.groups(), ring.busy_steps);
    svg.text(x, y + 14.0, HEADING, "Colours");
    let spaced = |all: usize| {
        let shown = all.min(8);
        (0..shown).map(move |index| index * all.saturating_sub(1) / (shown - 1).max(1))
    };
    let of_ranks = spaced(groups).map(|of| (ring.rank(of), colour_of_place(of, groups)));
    let of_steps = spaced(steps).map(|step| (step, colour(0, groups, step, steps)));
    let lines: [(&str, Vec<(usize, String)>); 2] =
        [("hue: computing rank", of_ranks.collect()), ("lightness: ring step", of_steps.collect())];
    for (line, (name, swatches)) in lines.into_iter().enumerate() {
        let y = y + 25.0 * (line + 1) as f64;
        svg.text(x, y + 14.0, NOTE, name);
        for (index, (number, fill)) in swatches.into_iter().enumerate() {
            let left = x + 150.0 + 40.0 * index as f64;
            svg.rect(area(left, y, 14.0, 18.0), &fill, 1.0);
            svg.text(left + 17.0, y + 13.0, LABEL, &number.to_string());
        }
    }
    svg.text(x, y + 89.0, NOTE, "paler: partial tile");
    svg.rect(area(x + 150.0, y + 75.0, 36.0, 18.0), EMPTY, 1.0);
    svg.text(x + 196.0, y + 89.0, NOTE, "empty tile: neither computed nor sent");
}

/// Draws a bar for the work and the bytes of each rank.
fn work(svg: &mut Svg, room: Area, ring: &DrawnRing<'_>, figures: &Figures) {
    svg.text(room.x, room.y + 14.0, HEADING, "Work of each rank");
    let most = figures.work_max_over_mean;
    let bars = &figures.drawn_ranks;
    let sampled = if bars.len() < figures.ranks {
        format!("; 1 of {} ranks", figures.ranks.div_ceil(bars.len().max(1)))
    } else {
        String::new()
    };
    let subtitle =
        format!("visible pairs / mean; maximum {most:.3}; bytes sent in a forward pass{sampled}");
    svg.text(room.x, room.y + 33.0, NOTE, &subtitle);
    let (left, top) = (room.x + 46.0, room.y + 44.0);
    let height = ((room.y + room.height - top) / bars.len() as f64).min(26.0);
    let width = room.width - 206.0;
    let gap = if height >= 8.0 { 2.0 } else { 0.4 };
    let every = (READABLE / height).ceil().max(1.0) as usize;
    for (line, rank) in bars.iter().enumerate() {
        let y = top + line as f64 * height;
        let bar = area(left, y + gap / 2.0, width, height - gap);
        svg.rect(bar, EMPTY, 1.0);
        let fill = colour_of_place(ring.group(rank.rank), ring.groups());
        svg.rect(Area { width: width * rank.work_over_mean / most, ..bar }, &fill, 1.0);
        if line.is_multiple_of(every) {
            let baseline = y + height / 2.0 + 4.0;
            svg.text(left - 6.0, baseline, LABEL_LEFT, &format!("rank {}", rank.rank));
            let words = format!("{:.2} × mean, {}", rank.work_over_mean, bytes(rank.bytes_sent));
            svg.text(left + width + 8.0, baseline, LABEL, &words);
        }
    }
    // the mean: the end of all bars if the work were balanced
    let mean = area(left + width / most, top, 1.0, bars.len() as f64 * height);
    svg.rect(mean, "#111", 1.0);
}

/// Draws the parts of each pass of a grid: an exchange, the rings, and an exchange of results.
fn exchanges(svg: &mut Svg, room: Area, passes: &[[String; 3]], members: usize) {
    svg.text(room.x, room.y, HEADING, "Exchanges around the rings");
    let note =
        format!("map and steps: one of {members} rings, that of the first heads and key column");
    svg.text(room.x + 240.0, room.y, NOTE, &note);
    let width = room.width / 3.0;
    for (pass, parts) in passes.iter().enumerate() {
        let y = room.y + 12.0 + 28.0 * pass as f64;
        for (index, words) in parts.iter().enumerate() {
            let x = room.x + width * index as f64;
            let fill = if index == 1 { "#e3e8f0" } else { EMPTY };
            svg.rect(area(x, y, width - 6.0, 22.0), fill, 1.0);
            svg.text(x + 8.0, y + 15.0, "font-size=\"12\" fill=\"#333\"", words);
        }
    }
}

/// A ring over groups of ranks. A ring over all ranks has groups of one rank.
pub(super) struct DrawnRing<'a> {
    ring: &'a PlannedRing<'a>,
    /// Ranks of a group.
    members: usize,
    /// Steps, whose ranks are groups; none of more ranks than are written.
    steps: &'a [StepFigures],
    /// Number of steps up to the last in which a rank computes or forwards a block; at least 1.
    busy_steps: usize,
    /// First row of each packed document, and the end of the last.
    starts: Option<&'a [i64]>,
    /// Position of query row 0, without documents.
    offset: i64,
}

impl<'a> DrawnRing<'a> {
    /// Returns the ring of a plan. `batch` has all rows.
    pub(in crate::plan) fn new(
        ring: &'a PlannedRing<'a>,
        figures: &'a Figures,
        batch: &'a Batch,
    ) -> Self {
        let starts = batch.cum_seqlens_q.as_deref();
        // packed documents are of as many queries as keys, which no alignment shifts
        let offset = ring.shards.q.iter().filter(|_| starts.is_none()).find_map(|shard| {
            Some(shard.positions.first()?.iter().next()? - shard.rows.iter().next()?)
        });
        Self {
            ring,
            members: figures.ranks / ring.ranks(),
            steps: &figures.steps,
            busy_steps: figures.busy_steps(),
            starts,
            offset: offset.unwrap_or(0),
        }
    }

    /// Returns the number of groups.
    fn groups(&self) -> usize {
        self.ring.ranks()
    }

    /// Returns the rank that is drawn for a group.
    const fn rank(&self, group: usize) -> usize {
        group * self.members
    }

    /// Returns the group of a rank.
    const fn group(&self, rank: usize) -> usize {
        rank / self.members
    }

    /// Iterates over the query rows of each group.
    fn queries(&self) -> impl Iterator<Item = &Runs> {
        self.ring.shards.q.iter().map(|shard| &shard.rows)
    }

    /// Iterates over the key rows of each group.
    fn keys(&self) -> impl Iterator<Item = &Runs> {
        self.ring.shards.kv.iter().map(|shard| &shard.rows)
    }

    /// Returns the step in which a group computes its queries over the keys of another.
    fn step(&self, group: usize, of_keys: usize) -> usize {
        self.ring.route.step(group, of_keys, self.groups())
    }
}

// Writes rectangles and text as SVG, and the colours of ranks and steps.
//
// Hue: the rank that computes; ranks of a grid that differ only in their heads have the same hue.
// Lightness: the ring step.

/// SVG document under construction. All lengths are in pixels.
#[derive(Debug, Default)]
struct Svg {
    body: String,
}

/// Rectangle.
#[derive(Debug, Clone, Copy)]
struct Area {
    /// Left edge.
    x: f64,
    /// Top edge.
    y: f64,
    width: f64,
    height: f64,
}

/// Returns the rectangle with this left and top edge.
const fn area(x: f64, y: f64, width: f64, height: f64) -> Area {
    Area { x, y, width, height }
}

/// Attributes of a heading.
const HEADING: &str = "font-size=\"15\" fill=\"#111\" font-weight=\"600\"";
/// Attributes of a text that explains.
const NOTE: &str = "font-size=\"12\" fill=\"#555\"";
/// Attributes of a figure.
const FIGURE: &str = "font-size=\"12\" fill=\"#111\"";
/// Attributes of a short dark text right of a point, left of it, or around it.
const LABEL: &str = "font-size=\"11\" fill=\"#333\"";
const LABEL_LEFT: &str = "font-size=\"11\" text-anchor=\"end\" fill=\"#333\"";
const LABEL_AROUND: &str = "font-size=\"11\" text-anchor=\"middle\" fill=\"#333\"";
/// Attributes of the title of an axis, around a point.
const AXIS: &str = "font-size=\"13\" text-anchor=\"middle\" fill=\"#333\"";
/// Attributes of a name on a coloured strip, around a point.
const ON_COLOUR: &str = "font-size=\"11\" text-anchor=\"middle\" fill=\"#fff\"";
/// Colour of what is empty.
const EMPTY: &str = "#f1f1f1";

impl Svg {
    /// Adds a filled rectangle.
    fn rect(&mut self, area: Area, fill: &str, opacity: f64) {
        let [x, y, width, height] = [area.x, area.y, area.width, area.height].map(short);
        let opacity = match opacity {
            1.0 => String::new(),
            _ => format!(" fill-opacity=\"{}\"", short(opacity)),
        };
        self.body += &format!(
            "<rect x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\" fill=\"{fill}\"\
             {opacity}/>\n"
        );
    }

    /// Adds a text with its baseline at (x, y).
    fn text(&mut self, x: f64, y: f64, attributes: &str, text: &str) {
        let [x, y] = [x, y].map(short);
        let text = escape(text);
        self.body += &format!("<text x=\"{x}\" y=\"{y}\" {attributes}>{text}</text>\n");
    }

    /// Adds a text that is rotated to read upwards.
    fn upward(&mut self, x: f64, y: f64, attributes: &str, text: &str) {
        let turn = format!("{attributes} transform=\"rotate(-90 {} {})\"", short(x), short(y));
        self.text(x, y, &turn, text);
    }

    /// Returns the document.
    fn finish(self, width: f64, height: f64, title: &str) -> String {
        let [width, height] = [width, height].map(short);
        let title = escape(title);
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
             viewBox=\"0 0 {width} {height}\" shape-rendering=\"crispEdges\" \
             font-family=\"DejaVu Sans, Helvetica, Arial, sans-serif\">\n<title>{title}</title>\n\
             <rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n{}</svg>\n",
            self.body
        )
    }
}

/// Formats a number with at most two decimals and without trailing zeros.
fn short(number: f64) -> String {
    let text = format!("{number:.2}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// Lightness of the first and of the last step, in percent: dark enough for white text, and light
/// enough to differ from the background.
const LIGHTNESS: (f64, f64) = (38.0, 84.0);

/// Returns the colour of `place` of `places` in step `step` of `steps`.
fn colour(place: usize, places: usize, step: usize, steps: usize) -> String {
    let share = step as f64 / steps.saturating_sub(1).max(1) as f64;
    shade(place, places, LIGHTNESS.0 + (LIGHTNESS.1 - LIGHTNESS.0) * share.min(1.0))
}

/// Returns the colour of a place without a step.
fn colour_of_place(place: usize, places: usize) -> String {
    shade(place, places, 50.0)
}

/// Returns the hue of a place as a colour of CSS. The first is blue, which contrasts with white.
fn shade(place: usize, places: usize, lightness: f64) -> String {
    let turn = place as f64 / places.max(1) as f64;
    let hue = (215.0 + 360.0 * turn) % 360.0;
    format!("hsl({},62%,{}%)", short(hue), short(lightness))
}

/// Height of a line: for two lines of text, one line, or only a bar.
fn line_height(lines: usize) -> f64 {
    match lines {
        0..=12 => 34.0,
        13..=24 => 18.0,
        _ => (480.0 / lines as f64).max(3.0),
    }
}

/// Height of the whole timeline.
fn timeline_height(ranks: usize) -> f64 {
    if ranks > MOST_DETAILED_RANKS { 40.0 } else { 70.0 + line_height(ranks) * ranks as f64 }
}

/// Draws the step timeline: one line per rank of the ring, one column per ring step. Each box has a
/// bar for the work, the owner of the block, and the blocks that are sent.
fn draw_timeline(svg: &mut Svg, room: Area, ring: &DrawnRing<'_>) {
    svg.text(room.x, room.y + 14.0, HEADING, "Step by step");
    let groups = ring.groups();
    if groups > MOST_DETAILED_RANKS {
        let text = format!("not drawn for more than {MOST_DETAILED_RANKS} ranks");
        return svg.text(room.x, room.y + 33.0, NOTE, &text);
    }
    let idle = match ring.steps.len() - ring.busy_steps {
        0 => String::new(),
        1 => "; the last step is empty".to_owned(),
        idle => format!("; the last {idle} steps are empty"),
    };
    let explanation = format!(
        "bar: visible pairs, relative to the largest box; number: owner of the block; arrow: \
         receiver and bytes of the block sent{idle}"
    );
    svg.text(room.x, room.y + 33.0, NOTE, &explanation);
    let steps = &ring.steps[..ring.busy_steps];
    let (left, top) = (room.x + 56.0, room.y + 62.0);
    let line = line_height(groups);
    let column = (room.x + room.width - left) / steps.len().max(1) as f64;
    for group in (0..groups).step_by((14.0 / line).ceil().max(1.0) as usize) {
        let y = top + (group as f64 + 0.5) * line + 4.0;
        svg.text(left - 6.0, y, LABEL_LEFT, &format!("rank {}", ring.rank(group)));
    }
    let every_column = (46.0 / column).ceil().max(1.0) as usize;
    let gap = if line >= 10.0 && column >= 10.0 { 2.0 } else { 0.3 };
    let pairs = steps.iter().flat_map(|step| &step.ranks).map(|of_rank| of_rank.pairs);
    let most = pairs.max().unwrap_or(0);
    for (number, step) in steps.iter().enumerate() {
        let x = left + number as f64 * column;
        if number.is_multiple_of(every_column) {
            svg.text(x + column / 2.0, top - 6.0, LABEL_AROUND, &format!("step {number}"));
        }
        for of_rank in &step.ranks {
            let y = top + of_rank.rank as f64 * line + gap / 2.0;
            let room = area(x + gap / 2.0, y, column - gap, line - gap);
            let fill = colour(of_rank.rank, groups, number, ring.busy_steps);
            draw_box(svg, room, &fill, ring, of_rank, most);
        }
    }
}

/// Draws one box into `room`, with the bar relative to `most` pairs. Text is above the bar, or left
/// of it if the box is low, or absent: text on a bar would be half on its colour.
fn draw_box(
    svg: &mut Svg,
    room: Area,
    fill: &str,
    ring: &DrawnRing<'_>,
    of_rank: &StepOfRank,
    most: u128,
) {
    svg.rect(room, EMPTY, 1.0);
    let Area { x, y, width, height } = room;
    let is_high = width >= 22.0 && height >= 28.0;
    let is_wide = width >= 40.0 && height >= 14.0;
    let (bar, baseline) = match (is_high, is_wide) {
        (true, _) => (area(x, y + 15.0, width, height - 15.0), y + 11.5),
        (_, true) => (area(x + 22.0, y, width - 22.0, height), y + height / 2.0 + 4.0),
        _ => (room, y),
    };
    if of_rank.pairs > 0 {
        // at least 1.5 pixels, so that the least work is visible
        let width = (bar.width * of_rank.pairs as f64 / most as f64).max(1.5);
        svg.rect(Area { width, ..bar }, fill, 1.0);
    }
    if is_high || is_wide {
        let owner = ring.rank(of_rank.owner).to_string();
        let owner = if of_rank.rows == 0 { "–" } else { &owner };
        svg.text(x + 4.0, baseline, LABEL, owner);
    }
    if is_high && width >= 76.0 && !of_rank.sends.is_empty() {
        let attributes = "font-size=\"10\" text-anchor=\"end\" fill=\"#444\"";
        let words = sends_in_words(&of_rank.sends, ring, width);
        svg.text(x + width - 4.0, baseline, attributes, &words);
    }
}

/// Describes the blocks that are sent, as far as there is room beside the owner.
fn sends_in_words(sends: &[Send], ring: &DrawnRing<'_>, width: f64) -> String {
    let sent = bytes(sends.iter().map(|send| send.bytes).sum::<u128>());
    match sends {
        [only] if width >= 110.0 => format!("→ {}: {sent}", ring.rank(only.to)),
        [_] => format!("→ {sent}"),
        several if width >= 130.0 => format!("→ {} ranks: {sent}", several.len()),
        several => format!("→ {}×", several.len()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short_text_is_escaped_and_colours_differ() {
        let numbers = [1.0, 0.25, -0.1, 100.0].map(short);
        assert_eq!(numbers, ["1", "0.25", "-0.1", "100"]);
        assert_eq!(escape("a<b & \"c\""), "a&lt;b &amp; &quot;c&quot;");
        assert_eq!(colour(0, 4, 0, 4), "hsl(215,62%,38%)");
        assert_ne!(colour(0, 4, 0, 4), colour(0, 4, 3, 4));
        assert_ne!(colour(0, 4, 0, 4), colour(1, 4, 0, 4));
    }
}
