//! The step timeline: a line a rank, a column a step. In each box a bar for the work, whose block
//! it is, and what is sent meanwhile. Of many ranks a box is the sum of several ranks and steps.

use super::{
    colour,
    svg::{Anchor, Area, Svg},
};
use crate::{
    plan::figures::{Figures, MOST_DETAILED_RANKS, Send, StepFigures, StepOfRank},
    report::{bytes, counted},
};

/// Lines, and columns, of a timeline of more ranks than are drawn one by one.
const GROUPS: usize = 64;

/// Height of a line: tall enough for two lines of text, or for a bar only.
fn line_height(lines: usize) -> f64 {
    match lines {
        0..=12 => 34.0,
        13..=24 => 18.0,
        _ => (480.0 / lines as f64).max(3.0),
    }
}

/// Ranks that share a line.
const fn ranks_per_line(ranks: usize) -> usize {
    if ranks <= MOST_DETAILED_RANKS { 1 } else { ranks.div_ceil(GROUPS) }
}

/// Height of the whole timeline.
pub(super) fn height(ranks: usize) -> f64 {
    let lines = ranks.div_ceil(ranks_per_line(ranks));
    70.0 + line_height(lines) * lines as f64
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
    let says = "bar: pairs computed, against the busiest box; number: whose block it is; arrow: to whom a block goes meanwhile, and its bytes";
    let per_line = ranks_per_line(figures.ranks);
    let per_column = if per_line == 1 { 1 } else { steps.len().div_ceil(GROUPS).max(1) };
    let says = if per_line == 1 {
        format!("{says}{idle}")
    } else {
        let steps = counted(per_column as u64, "step", "steps");
        format!(
            "bar: pairs computed, against the busiest box; a box is {per_line} ranks and {steps}, for there are more than {MOST_DETAILED_RANKS} ranks{idle}"
        )
    };
    svg.text((area.x, area.y + 33.0), 12.0, Anchor::Start, "#555", &says);
    let (names, top) = (56.0, area.y + 62.0);
    let lines = figures.ranks.div_ceil(per_line);
    let columns = steps.len().div_ceil(per_column);
    let line = line_height(lines);
    let column = (area.width - names) / columns.max(1) as f64;
    let every_line = (14.0 / line).ceil().max(1.0) as usize;
    let every_column = (46.0 / column).ceil().max(1.0) as usize;
    for number in (0..lines).step_by(every_line) {
        let y = top + (number as f64 + 0.5) * line + 4.0;
        svg.text(
            (area.x + names - 6.0, y),
            11.0,
            Anchor::End,
            "#333",
            &format!("rank {}", number * per_line),
        );
    }
    let grouped: Vec<Vec<StepOfRank>> =
        if per_line == 1 { Vec::new() } else { in_groups(steps, per_line, per_column, lines) };
    let columns: Vec<&[StepOfRank]> = match per_line {
        1 => steps.iter().map(|step| step.ranks.as_slice()).collect(),
        _ => grouped.iter().map(Vec::as_slice).collect(),
    };
    let most = columns.iter().copied().flatten().map(|at| at.pairs).max().unwrap_or(0);
    for (number, boxes) in columns.into_iter().enumerate() {
        let (x, step) = (area.x + names + number as f64 * column, number * per_column);
        if number.is_multiple_of(every_column) {
            svg.text(
                (x + column / 2.0, top - 6.0),
                11.0,
                Anchor::Middle,
                "#333",
                &format!("step {step}"),
            );
        }
        for at in boxes {
            let gap = if line >= 10.0 && column >= 10.0 { 2.0 } else { 0.3 };
            let y = top + (at.rank / per_line) as f64 * line + gap / 2.0;
            let room = Area { x: x + gap / 2.0, y, width: column - gap, height: line - gap };
            draw_box(svg, room, figures, step, at, most);
        }
    }
}

/// Sums the boxes of `per_line` neighbouring ranks and `per_column` successive steps, column by
/// column. A sum carries the first rank of its line, whose colour it has, and no text.
fn in_groups(
    steps: &[StepFigures],
    per_line: usize,
    per_column: usize,
    lines: usize,
) -> Vec<Vec<StepOfRank>> {
    let column = |steps: &[StepFigures]| {
        let empty = |line| StepOfRank {
            rank: line * per_line,
            owner: 0,
            rows: 0,
            pairs: 0,
            sends: Vec::new(),
        };
        let mut boxes: Vec<StepOfRank> = (0..lines).map(empty).collect();
        for at in steps.iter().flat_map(|step| &step.ranks) {
            if let Some(sum) = boxes.get_mut(at.rank / per_line) {
                sum.pairs += at.pairs;
                sum.rows += at.rows;
            }
        }
        boxes
    };
    steps.chunks(per_column).map(column).collect()
}

fn draw_box(
    svg: &mut Svg,
    room: Area,
    figures: &Figures,
    step: usize,
    at: &StepOfRank,
    most: u128,
) {
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
        svg.rect(
            Area { width, ..bar },
            &colour::of(at.rank, figures.ranks, step, figures.busy_steps()),
            1.0,
        );
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
        Place::Left => svg.text(
            (room.x + 4.0, room.y + room.height / 2.0 + 4.0),
            11.0,
            Anchor::Start,
            "#111",
            &owner,
        ),
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
    let sent = bytes(sends.iter().map(|send| send.bytes).sum::<u128>());
    let words = match sends {
        [] => return None,
        [only] if width >= 110.0 => format!("→ {}: {sent}", only.to),
        [_] => format!("→ {sent}"),
        several if width >= 130.0 => format!("→ {} ranks: {sent}", several.len()),
        several => format!("→ {}×", several.len()),
    };
    (width >= 76.0).then_some(words)
}
