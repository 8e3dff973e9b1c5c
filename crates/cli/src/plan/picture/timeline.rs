//! The step timeline: a line a rank, a column a step. In each box a bar for the work, whose block it is, and what is sent meanwhile.

use super::{
    colour,
    svg::{Anchor, Area, Svg},
};
use crate::{
    plan::figures::{Figures, Send, StepOfRank},
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
    let steps = &figures.steps[..figures.busy_steps()];
    let idle = figures.steps.len() - steps.len();
    let idle = match idle {
        0 => String::new(),
        1 => "; in the last step nothing is left to do".to_owned(),
        _ => format!("; in the last {idle} steps nothing is left to do"),
    };
    let says =
        "bar: pairs computed, against the busiest box; number: whose block it is; arrow: to whom a block goes meanwhile, and its bytes";
    svg.text((area.x, area.y + 33.0), 12.0, Anchor::Start, "#555", &format!("{says}{idle}"));
    let (names, top) = (56.0, area.y + 62.0);
    let line = line_height(figures.ranks);
    let column = (area.width - names) / steps.len().max(1) as f64;
    let most = figures.steps.iter().flat_map(|step| &step.ranks).map(|at| at.pairs).max().unwrap_or(0);
    let every_line = (14.0 / line).ceil().max(1.0) as usize;
    let every_column = (46.0 / column).ceil().max(1.0) as usize;
    for rank in (0..figures.ranks).step_by(every_line) {
        let y = top + (rank as f64 + 0.5) * line + 4.0;
        svg.text((area.x + names - 6.0, y), 11.0, Anchor::End, "#333", &format!("rank {rank}"));
    }
    for step in steps {
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
    // text has a place of its own, above the bar or left of it, so that it never stands half on a colour
    let place = match (room.width, room.height) {
        (22.0.., 28.0..) => Place::Above,
        (40.0.., 14.0..) => Place::Left,
        _ => Place::Nowhere,
    };
    let bar = match place {
        Place::Above => Area { y: room.y + 15.0, height: room.height - 15.0, ..room },
        Place::Left => Area { x: room.x + 22.0, width: room.width - 22.0, ..room },
        Place::Nowhere => room,
    };
    if at.pairs > 0 {
        // what there is, is seen
        let width = (bar.width * at.pairs as f64 / most as f64).max(1.5);
        svg.rect(Area { width, ..bar }, &colour::of(at.rank, figures.ranks, step, figures.busy_steps()), 1.0);
    }
    let owner = if at.rows == 0 { "–".to_owned() } else { at.owner.to_string() };
    match place {
        Place::Above => {
            let baseline = room.y + 11.5;
            svg.text((room.x + 4.0, baseline), 11.0, Anchor::Start, "#111", &owner);
            if let Some(words) = sends_in_words(&at.sends, room.width) {
                svg.text((room.x + room.width - 4.0, baseline), 10.0, Anchor::End, "#444", &words);
            }
        }
        Place::Left => svg.text((room.x + 4.0, room.y + room.height / 2.0 + 4.0), 11.0, Anchor::Start, "#111", &owner),
        Place::Nowhere => {}
    }
}

/// Where the text of a box stands.
enum Place {
    Above,
    Left,
    Nowhere,
}

/// What is sent, as far as there is room for it beside the owner.
fn sends_in_words(sends: &[Send], width: f64) -> Option<String> {
    let sent = bytes(sends.iter().map(|send| send.bytes).sum());
    let words = match sends {
        [] => return None,
        [only] if width >= 110.0 => format!("→ {}: {sent}", only.to),
        [_] => format!("→ {sent}"),
        several if width >= 130.0 => format!("→ {} ranks: {sent}", several.len()),
        several => format!("→ {}×", several.len()),
    };
    (width >= 76.0).then_some(words)
}
