//! The picture of a ring: tile map, work of each rank, predicted bytes, step timeline and legend, as one SVG.

mod axis;
mod colour;
mod map;
mod svg;
mod timeline;
mod work;

use annulus_core::Spec;

use super::figures::Figures;
use crate::report::count;
use svg::{Anchor, Area, Svg};

/// Margin around everything.
const MARGIN: f64 = 32.0;
/// Width of the whole picture.
const WIDTH: f64 = 1240.0;
/// Side of the tile map.
const MAP: f64 = 560.0;

/// Draws the picture.
pub(super) fn draw(spec: &Spec, figures: &Figures) -> String {
    let mut svg = Svg::default();
    let title = figures.title();
    svg.heading((MARGIN, 46.0), 20.0, &title);
    svg.text((MARGIN, 70.0), 13.0, Anchor::Start, "#555", &figures.hops_in_words());

    let top = 92.0;
    map::draw(&mut svg, Area { x: MARGIN, y: top, width: MAP, height: MAP }, spec, figures);
    let right = MARGIN + MAP + 44.0;
    let width = WIDTH - MARGIN - right;
    facts(&mut svg, (right, top), spec, figures);
    legend(&mut svg, Area { x: right, y: top + 112.0, width, height: 84.0 }, figures.ranks);
    work::draw(&mut svg, Area { x: right, y: top + 222.0, width, height: MAP - 222.0 }, figures);

    let below = top + MAP + 36.0;
    timeline::draw(&mut svg, Area { x: MARGIN, y: below, width: WIDTH - 2.0 * MARGIN, height: timeline::height(figures.ranks) }, figures);
    svg.finish(WIDTH, below + timeline::height(figures.ranks) + MARGIN, &title)
}

/// Predicted bytes and work, in words.
fn facts(svg: &mut Svg, (x, y): (f64, f64), spec: &Spec, figures: &Figures) {
    svg.heading((x, y + 14.0), 15.0, "Predicted");
    let dims = spec.dims;
    let lines = [
        ("forward", figures.forward.in_words()),
        ("backward", figures.backward.in_words()),
        ("work", format!("{} visible pairs, all heads and batch rows", count(figures.pairs_total as f64))),
        (
            "tensors",
            format!("batch {}, {} query heads, {} key heads, dim {}, {}", dims.batch, dims.q_heads, dims.kv_heads, dims.head_dim, spec.dtype.name()),
        ),
    ];
    for (line, (name, words)) in lines.iter().enumerate() {
        let y = y + 36.0 + 19.0 * line as f64;
        svg.text((x, y), 12.0, Anchor::Start, "#555", name);
        svg.text((x + 72.0, y), 12.0, Anchor::Start, "#111", words);
    }
}

/// What colours mean.
fn legend(svg: &mut Svg, area: Area, ranks: usize) {
    svg.heading((area.x, area.y + 14.0), 15.0, "Colours");
    let swatches = ranks.min(8);
    let (size, names) = (22.0, 150.0);
    let x = area.x + names;
    svg.text((area.x, area.y + 39.0), 12.0, Anchor::Start, "#333", "hue: who computes");
    for place in 0..swatches {
        // of many ranks, evenly spaced ones
        let rank = place * (ranks - 1) / (swatches - 1).max(1);
        let swatch = Area { x: x + place as f64 * (size + 18.0), y: area.y + 25.0, width: size + 14.0, height: 18.0 };
        svg.rect(swatch, &colour::of_rank(rank, ranks), 1.0);
        svg.text((swatch.x + swatch.width / 2.0, swatch.y + 13.0), 11.0, Anchor::Middle, "#fff", &rank.to_string());
    }
    svg.text((area.x, area.y + 64.0), 12.0, Anchor::Start, "#333", "lightness: in which step");
    for place in 0..swatches {
        let step = place * (ranks - 1) / (swatches - 1).max(1);
        let swatch = Area { x: x + place as f64 * (size + 18.0), y: area.y + 50.0, width: size + 14.0, height: 18.0 };
        svg.rect(swatch, &colour::of(0, ranks, step), 1.0);
        svg.text((swatch.x + swatch.width / 2.0, swatch.y + 13.0), 11.0, Anchor::Middle, colour::ink(ranks, step), &step.to_string());
    }
    svg.text((area.x, area.y + 89.0), 12.0, Anchor::Start, "#333", "paler tile: partly visible");
    svg.rect(Area { x, y: area.y + 75.0, width: size + 14.0, height: 18.0 }, "#f1f1f1", 1.0);
    svg.text((x + size + 24.0, area.y + 89.0), 12.0, Anchor::Start, "#333", "nothing visible: neither computed nor sent for");
}
