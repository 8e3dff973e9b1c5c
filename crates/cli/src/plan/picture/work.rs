//! Bar chart of the work and the bytes sent of each rank.

use super::{
    colour,
    svg::{Anchor, Area, Svg, at},
};
use crate::{
    plan::{frame::Frame, rings::Rings},
    report::bytes,
};

/// The least distance of text lines, in pixels: of lower bars only some have a text.
const READABLE: f64 = 15.0;

/// Draws one bar for each rank into `area`.
pub(super) fn draw(svg: &mut Svg, area: Area, rings: &Rings, frame: &Frame) {
    svg.heading(at(area.x, area.y + 14.0), 15.0, "Work of each rank");
    let most = frame.work_max_over_mean;
    let bars = &frame.bars;
    let sampled = if bars.len() < frame.ranks {
        format!("; 1 of {} ranks", frame.ranks.div_ceil(bars.len().max(1)))
    } else {
        String::new()
    };
    let subtitle =
        format!("visible pairs / mean; maximum {most:.3}; bytes sent in a forward pass{sampled}");
    svg.text(at(area.x, area.y + 33.0), 12.0, Anchor::Start, "#555", &subtitle);
    let names = 46.0;
    let figures_width = 160.0;
    let top = area.y + 44.0;
    let height = ((area.y + area.height - top) / bars.len() as f64).min(26.0);
    let width = area.width - names - figures_width;
    let every = (READABLE / height).ceil().max(1.0) as usize;
    for (line, rank) in bars.iter().enumerate() {
        let y = top + line as f64 * height;
        let length = if most > 0.0 { width * rank.work_over_mean / most } else { 0.0 };
        let gap = if height >= 8.0 { 2.0 } else { 0.4 };
        svg.rect(
            Area { x: area.x + names, y: y + gap / 2.0, width, height: height - gap },
            "#f1f1f1",
            1.0,
        );
        let bar = Area { x: area.x + names, y: y + gap / 2.0, width: length, height: height - gap };
        svg.rect(bar, &colour::of_place(rings.place(rank.rank), rings.places()), 1.0);
        if line.is_multiple_of(every) {
            let baseline = y + height / 2.0 + 4.0;
            svg.text(
                at(area.x + names - 6.0, baseline),
                11.0,
                Anchor::End,
                "#333",
                &format!("rank {}", rank.rank),
            );
            let words = format!("{:.2} × mean, {}", rank.work_over_mean, bytes(rank.bytes_sent));
            svg.text(
                at(area.x + names + width + 8.0, baseline),
                11.0,
                Anchor::Start,
                "#333",
                &words,
            );
        }
    }
    // the mean: the end of all bars if the work were balanced
    if most > 0.0 {
        let x = area.x + names + width / most;
        svg.line(at(x, top), at(x, top + bars.len() as f64 * height), "#111");
    }
}
