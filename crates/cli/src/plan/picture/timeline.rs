//! The step timeline: a line a rank, a column a step. In each box a bar for the work, whose block it is, and what is sent meanwhile.

use super::{
    colour,
    svg::{Anchor, Area, Svg},
};
use crate::{
    plan::figures::{Figures, StepOfRank},
    report::bytes,
};

/// Height of a rank's line: tall enough for two lines of text, or for a bar only.
pub(super) fn line_height(ranks: usize) -> f64 {
    match ranks {
        0..=12 => 34.0,
        13..=24 => 18.0,
        _ => (480.0 / ranks as f64).max(3.0),
    }
}

/// Height of the whole timeline.
pub(super) fn height(ranks: usize) -> f64 {
    70.0 + line_height(ranks) * ranks as f64
}

/// Draws the timeline.
pub(super) fn draw(svg: &mut Svg, area: Area, figures: &Figures) {
    svg.heading((area.x, area.y + 14.0), 15.0, "Step by step");
    let says = "bar: pairs computed, against the busiest box; number: whose block; arrow: to whom a block goes meanwhile, and its bytes";
    svg.text((area.x, area.y + 33.0), 12.0, Anchor::Start, "#555", says);
    let (names, top) = (56.0, area.y + 62.0);
    let line = line_height(figures.ranks);
    let column = (area.width - names) / figures.steps.len().max(1) as f64;
    let most = figures.steps.iter().flat_map(|step| &step.ranks).map(|at| at.pairs).max().unwrap_or(0);
    let every_line = (14.0 / line).ceil().max(1.0) as usize;
    let every_column = (46.0 / column).ceil().max(1.0) as usize;
    for rank in (0..figures.ranks).step_by(every_line) {
        let y = top + (rank as f64 + 0.5) * line + 4.0;
        svg.text((area.x + names - 6.0, y), 11.0, Anchor::End, "#333", &format!("rank {rank}"));
    }
    for step in &figures.steps {
        let x = area.x + names + step.step as f64 * column;
        if step.step.is_multiple_of(every_column) {
            svg.text((x + column / 2.0, top - 6.0), 11.0, Anchor::Middle, "#333", &format!("step {}", step.step));
        }
        for at in &step.ranks {
            let gap = if line >= 10.0 && column >= 10.0 { 2.0 } else { 0.3 };
            let room = Area { x: x + gap / 2.0, y: top + at.rank as f64 * line + gap / 2.0, width: column - gap, height: line - gap };
            draw_box(svg, room, figures, step.step, at, most);
        }
    }
}

fn draw_box(svg: &mut Svg, room: Area, figures: &Figures, step: usize, at: &StepOfRank, most: u64) {
    svg.rect(room, "#f1f1f1", 1.0);
    let share = if most > 0 { at.pairs as f64 / most as f64 } else { 0.0 };
    if at.pairs > 0 {
        // what there is, is seen
        let width = (room.width * share).max(1.5);
        svg.rect(Area { width, ..room }, &colour::of(at.rank, figures.ranks, step), 1.0);
    }
    if room.width < 22.0 || room.height < 14.0 {
        return;
    }
    let two_lines = room.height >= 28.0;
    // the owner is written on the bar if the bar reaches under it
    let ink = if room.width * share > 26.0 { colour::ink(figures.ranks, step) } else { "#333" };
    let baseline = room.y + if two_lines { 13.0 } else { room.height / 2.0 + 4.0 };
    let owner = if at.rows == 0 { "–".to_owned() } else { at.owner.to_string() };
    svg.text((room.x + 5.0, baseline), 11.0, Anchor::Start, ink, &owner);
    let sent: u64 = at.sends.iter().map(|send| send.bytes).sum();
    if !two_lines || sent == 0 || room.width < 52.0 {
        return;
    }
    let to = match &at.sends[..] {
        [only] if room.width >= 84.0 => format!("→ {}: {}", only.to, bytes(sent)),
        [_] => format!("→ {}", bytes(sent)),
        several => format!("→ {} ranks: {}", several.len(), bytes(sent)),
    };
    let ink = if room.width * share > 8.0 * to.chars().count() as f64 { colour::ink(figures.ranks, step) } else { "#333" };
    svg.text((room.x + 5.0, room.y + room.height - 5.0), 10.0, Anchor::Start, ink, &to);
}
