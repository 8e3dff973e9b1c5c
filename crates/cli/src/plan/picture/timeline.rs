//! Step timeline: one line per rank, of a grid per rank with the first heads; one column per ring
//! step. Each box has a bar for the work, the owner of the block, and the blocks that are sent. For
//! many ranks a box is the sum of several ranks and steps.

use super::{
    colour,
    svg::{Anchor, Area, Svg, at},
};
use crate::{
    plan::{
        limits::{MOST_DETAILED_RANKS, MOST_STEPPED_RANKS},
        program::Send,
        rings::Rings,
        step_figures::{StepFigures, StepOfRank},
    },
    report::{bytes, counted},
};

/// Number of lines and of columns of a timeline of groups: about 7 by 17 pixels each.
const GROUPS: usize = 64;

/// Height of a line, in pixels: for two lines of text, one line, or only a bar.
fn line_height(lines: usize) -> f64 {
    match lines {
        0..=12 => 34.0,
        13..=24 => 18.0,
        _ => (480.0 / lines as f64).max(3.0),
    }
}

/// Number of ranks of a line.
const fn ranks_per_line(ranks: usize) -> usize {
    if ranks <= MOST_DETAILED_RANKS { 1 } else { ranks.div_ceil(GROUPS) }
}

/// Height of the whole timeline.
pub(super) fn height(ranks: usize) -> f64 {
    if ranks > MOST_STEPPED_RANKS {
        return 40.0;
    }
    let lines = ranks.div_ceil(ranks_per_line(ranks));
    70.0 + line_height(lines) * lines as f64
}

/// Draws the timeline.
pub(super) fn draw(svg: &mut Svg, area: Area, rings: &Rings) {
    svg.heading(at(area.x, area.y + 14.0), 15.0, "Step by step");
    let places = rings.places();
    if places > MOST_STEPPED_RANKS {
        let note = format!("not drawn for more than {MOST_STEPPED_RANKS} ranks");
        return svg.text(at(area.x, area.y + 33.0), 12.0, Anchor::Start, "#555", &note);
    }
    let steps = &rings.steps[..rings.busy_steps];
    let per_line = ranks_per_line(places);
    let per_column = if per_line == 1 { 1 } else { steps.len().div_ceil(GROUPS).max(1) };
    let explanation = explanation(rings, per_line, per_column);
    svg.text(at(area.x, area.y + 33.0), 12.0, Anchor::Start, "#555", &explanation);
    let names = 56.0;
    let top = area.y + 62.0;
    let lines = places.div_ceil(per_line);
    let columns = steps.len().div_ceil(per_column);
    let line = line_height(lines);
    let column = (area.width - names) / columns.max(1) as f64;
    let every_line = (14.0 / line).ceil().max(1.0) as usize;
    let every_column = (46.0 / column).ceil().max(1.0) as usize;
    for number in (0..lines).step_by(every_line) {
        let y = top + (number as f64 + 0.5) * line + 4.0;
        svg.text(
            at(area.x + names - 6.0, y),
            11.0,
            Anchor::End,
            "#333",
            &format!("rank {}", rings.rank(number * per_line)),
        );
    }
    let grouped: Vec<Vec<StepOfRank>> =
        if per_line == 1 { Vec::new() } else { in_groups(rings, per_line, per_column, lines) };
    let columns: Vec<&[StepOfRank]> = match per_line {
        1 => steps.iter().map(|step| step.ranks.as_slice()).collect(),
        _ => grouped.iter().map(Vec::as_slice).collect(),
    };
    let most = columns.iter().copied().flatten().map(|of| of.pairs).max().unwrap_or(0);
    for (number, boxes) in columns.into_iter().enumerate() {
        let x = area.x + names + number as f64 * column;
        let step = number * per_column;
        if number.is_multiple_of(every_column) {
            svg.text(
                at(x + column / 2.0, top - 6.0),
                11.0,
                Anchor::Middle,
                "#333",
                &format!("step {step}"),
            );
        }
        for of_rank in boxes {
            let gap = if line >= 10.0 && column >= 10.0 { 2.0 } else { 0.3 };
            let number = rings.place(of_rank.rank) / per_line;
            let y = top + number as f64 * line + gap / 2.0;
            let room = Area { x: x + gap / 2.0, y, width: column - gap, height: line - gap };
            draw_box(svg, room, rings, step, of_rank, most);
        }
    }
}

/// Explains the boxes of `per_line` ranks and `per_column` steps.
fn explanation(rings: &Rings, per_line: usize, per_column: usize) -> String {
    let idle = match rings.steps.len() - rings.busy_steps {
        0 => String::new(),
        1 => "; the last step is empty".to_owned(),
        idle => format!("; the last {idle} steps are empty"),
    };
    let bar = "bar: visible pairs, relative to the largest box";
    if per_line == 1 {
        return format!(
            "{bar}; number: owner of the block; arrow: receiver and bytes of the block sent{idle}"
        );
    }
    let steps = counted(per_column as u64, "step", "steps");
    format!(
        "{bar}; more than {MOST_DETAILED_RANKS} ranks: a box is {per_line} ranks and {steps}{idle}"
    )
}

/// Sums the boxes of `per_line` neighbouring ranks and `per_column` successive steps, by column. A
/// sum has the first rank of its line, which determines its colour, and no text.
fn in_groups(
    rings: &Rings,
    per_line: usize,
    per_column: usize,
    lines: usize,
) -> Vec<Vec<StepOfRank>> {
    let column = |steps: &[StepFigures]| {
        let empty = |line| StepOfRank {
            rank: rings.rank(line * per_line),
            owner: 0,
            rows: 0,
            pairs: 0,
            sends: Vec::new(),
        };
        let mut boxes: Vec<StepOfRank> = (0..lines).map(empty).collect();
        for of_rank in steps.iter().flat_map(|step| &step.ranks) {
            if let Some(sum) = boxes.get_mut(rings.place(of_rank.rank) / per_line) {
                sum.pairs += of_rank.pairs;
                sum.rows += of_rank.rows;
            }
        }
        boxes
    };
    rings.steps[..rings.busy_steps].chunks(per_column).map(column).collect()
}

/// Draws one box into `room`, with the bar relative to `most` pairs.
fn draw_box(
    svg: &mut Svg,
    room: Area,
    rings: &Rings,
    step: usize,
    of_rank: &StepOfRank,
    most: u128,
) {
    svg.rect(room, "#f1f1f1", 1.0);
    // text is above the bar or left of it: text on a bar would be half on its colour
    let text = match (room.width, room.height) {
        (22.0.., 28.0..) => TextPosition::Above,
        (40.0.., 14.0..) => TextPosition::Left,
        _ => TextPosition::Hidden,
    };
    let bar = match text {
        TextPosition::Above => Area { y: room.y + 15.0, height: room.height - 15.0, ..room },
        TextPosition::Left => Area { x: room.x + 22.0, width: room.width - 22.0, ..room },
        TextPosition::Hidden => room,
    };
    if of_rank.pairs > 0 {
        // at least 1.5 pixels, so that the least work is visible
        let width = (bar.width * of_rank.pairs as f64 / most as f64).max(1.5);
        svg.rect(
            Area { width, ..bar },
            &colour::of(rings.place(of_rank.rank), rings.places(), step, rings.busy_steps),
            1.0,
        );
    }
    let owner = if of_rank.rows == 0 { "–".to_owned() } else { of_rank.owner.to_string() };
    match text {
        TextPosition::Above => {
            let baseline = room.y + 11.5;
            svg.text(at(room.x + 4.0, baseline), 11.0, Anchor::Start, "#111", &owner);
            if let Some(words) = sends_in_words(&of_rank.sends, room.width) {
                svg.text(
                    at(room.x + room.width - 4.0, baseline),
                    10.0,
                    Anchor::End,
                    "#444",
                    &words,
                );
            }
        }
        TextPosition::Left => svg.text(
            at(room.x + 4.0, room.y + room.height / 2.0 + 4.0),
            11.0,
            Anchor::Start,
            "#111",
            &owner,
        ),
        TextPosition::Hidden => {}
    }
}

/// Position of a box's text relative to its bar.
enum TextPosition {
    Above,
    Left,
    Hidden,
}

/// Describes the blocks that are sent, as far as there is room beside the owner.
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
