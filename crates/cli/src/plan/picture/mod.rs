//! Picture of a plan as SVG: tile map, work of each rank, predicted bytes, exchanges, step timeline
//! and legend.

mod drawn_ring;
mod map;
mod svg;
mod timeline;

use annulus_core::Spec;

use super::figures::Figures;
use crate::report::{bytes, count};
pub(super) use drawn_ring::DrawnRing;
use svg::{
    Area, EMPTY, FIGURE, HEADING, LABEL, LABEL_LEFT, NOTE, Svg, area, colour, colour_of_place,
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
    let height = timeline::height(ring.groups());
    timeline::draw(&mut svg, area(MARGIN, below, width, height), ring);
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
