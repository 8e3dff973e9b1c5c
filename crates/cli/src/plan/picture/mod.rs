//! Picture of a plan as SVG: tile map, work of each rank, predicted bytes, exchanges, step timeline
//! and legend.

mod axis;
mod colour;
mod map;
mod svg;
mod timeline;
mod work;

use annulus_core::Spec;

use super::{frame::Frame, rings::Rings};
use crate::report::count;
use svg::{Anchor, Area, Point, Svg, at};

/// Margin of the picture, in pixels like all lengths here.
const MARGIN: f64 = 32.0;
/// Width of the whole picture.
const WIDTH: f64 = 1240.0;
/// Side of the tile map.
const MAP: f64 = 560.0;

/// Height of the exchanges of a grid, between map and timeline.
const EXCHANGES: f64 = 90.0;

/// Draws the plan of `spec`.
pub(super) fn draw(spec: &Spec, rings: &Rings, frame: &Frame) -> String {
    let mut svg = Svg::default();
    let title = &frame.title;
    // a bold character is about 0.62 of its font size wide
    let size = ((WIDTH - 2.0 * MARGIN) / (0.62 * title.chars().count() as f64)).min(20.0);
    svg.heading(at(MARGIN, 46.0), size, title);
    svg.text(at(MARGIN, 70.0), 13.0, Anchor::Start, "#555", &frame.subtitle);

    let top = 92.0;
    map::draw(&mut svg, Area { x: MARGIN, y: top, width: MAP, height: MAP }, spec, rings);
    let right = MARGIN + MAP + 44.0;
    let width = WIDTH - MARGIN - right;
    facts(&mut svg, at(right, top), spec, frame);
    legend(&mut svg, Area { x: right, y: top + 112.0, width, height: 84.0 }, rings);
    let bars = Area { x: right, y: top + 222.0, width, height: MAP - 222.0 };
    work::draw(&mut svg, bars, rings, frame);

    let mut below = top + MAP + 36.0;
    if !frame.passes.is_empty() {
        exchanges(
            &mut svg,
            Area { x: MARGIN, y: below, width: WIDTH - 2.0 * MARGIN, height: EXCHANGES },
            frame,
            rings.parts,
        );
        below += EXCHANGES;
    }
    timeline::draw(
        &mut svg,
        Area {
            x: MARGIN,
            y: below,
            width: WIDTH - 2.0 * MARGIN,
            height: timeline::height(rings.places()),
        },
        rings,
    );
    svg.finish(WIDTH, below + timeline::height(rings.places()) + MARGIN, title)
}

/// Draws the predicted bytes and the work as text.
fn facts(svg: &mut Svg, Point { x, y }: Point, spec: &Spec, frame: &Frame) {
    svg.heading(at(x, y + 14.0), 15.0, "Predicted");
    let dims = spec.dims;
    let backward = frame.backward.map(|backward| ("backward", backward.in_words()));
    let lines = [Some(("forward", frame.forward.in_words())), backward].into_iter().flatten();
    let lines = lines.chain([
        (
            "work",
            format!("{} visible pairs, all heads and batch rows", count(frame.pairs_total as f64)),
        ),
        (
            "tensors",
            format!(
                "batch {}, {} query heads, {} KV heads, dim {}, {}",
                dims.batch,
                dims.q_heads,
                dims.kv_heads,
                dims.head_dim,
                spec.dtype.name()
            ),
        ),
    ]);
    for (line, (name, words)) in lines.enumerate() {
        let y = y + 36.0 + 19.0 * line as f64;
        svg.text(at(x, y), 12.0, Anchor::Start, "#555", name);
        svg.text(at(x + 72.0, y), 12.0, Anchor::Start, "#111", &words);
    }
}

/// Draws the parts of each pass of a grid: an exchange, the rings, and an exchange of results.
/// `parts` are those of the heads.
fn exchanges(svg: &mut Svg, area: Area, frame: &Frame, parts: usize) {
    svg.heading(at(area.x, area.y), 15.0, "Exchanges around the rings");
    if parts > 1 {
        let note = format!(
            "map and steps: 1 of {parts} ranks, those with the first heads; the ranks after each \
             have the same rows"
        );
        svg.text(at(area.x + 240.0, area.y), 12.0, Anchor::Start, "#555", &note);
    }
    let width = area.width / 3.0;
    for (pass, parts) in frame.passes.iter().enumerate() {
        let y = area.y + 12.0 + 28.0 * pass as f64;
        for (index, words) in parts.iter().enumerate() {
            let fill = if index == 1 { "#e3e8f0" } else { "#f1f1f1" };
            let x = area.x + width * index as f64;
            svg.rect(Area { x, y, width: width - 6.0, height: 22.0 }, fill, 1.0);
            svg.text(at(x + 8.0, y + 15.0), 12.0, Anchor::Start, "#333", words);
        }
    }
}

/// Draws the legend of the colours.
fn legend(svg: &mut Svg, area: Area, rings: &Rings) {
    let places = rings.places();
    let steps = rings.busy_steps;
    svg.heading(at(area.x, area.y + 14.0), 15.0, "Colours");
    let size = 22.0;
    let names = 150.0;
    let x = area.x + names;
    let mut swatches = |y: f64,
                        count: usize,
                        name: &dyn Fn(usize) -> usize,
                        colour: &dyn Fn(usize) -> (String, &'static str)| {
        let shown = count.min(8);
        for index in 0..shown {
            // evenly spaced ones, if there are more than 8
            let number = index * count.saturating_sub(1) / (shown - 1).max(1);
            let swatch =
                Area { x: x + index as f64 * (size + 18.0), y, width: size + 14.0, height: 18.0 };
            let (fill, ink) = colour(number);
            svg.rect(swatch, &fill, 1.0);
            svg.text(
                at(swatch.x + swatch.width / 2.0, swatch.y + 13.0),
                11.0,
                Anchor::Middle,
                ink,
                &name(number).to_string(),
            );
        }
    };
    swatches(area.y + 25.0, places, &|place| rings.rank(place), &|place| {
        (colour::of_place(place, places), "#fff")
    });
    swatches(area.y + 50.0, steps, &|step| step, &|step| {
        (colour::of(0, places, step, steps), colour::ink(step, steps))
    });
    svg.text(at(area.x, area.y + 39.0), 12.0, Anchor::Start, "#333", "hue: computing rank");
    svg.text(at(area.x, area.y + 64.0), 12.0, Anchor::Start, "#333", "lightness: ring step");
    svg.text(at(area.x, area.y + 89.0), 12.0, Anchor::Start, "#333", "paler: partial tile");
    svg.rect(Area { x, y: area.y + 75.0, width: size + 14.0, height: 18.0 }, "#f1f1f1", 1.0);
    svg.text(
        at(x + size + 24.0, area.y + 89.0),
        12.0,
        Anchor::Start,
        "#333",
        "empty tile: neither computed nor sent",
    );
}
