//! Step timeline: one line per rank of the ring, one column per ring step. Each box has a bar for the work, the owner of the block, and the blocks that are sent.

use super::{
    DrawnRing, {Area, EMPTY, HEADING, LABEL, LABEL_AROUND, LABEL_LEFT, NOTE, Svg, area, colour},
};
use crate::{
    plan::ring::{MOST_DETAILED_RANKS, Send, StepOfRank},
    report::bytes,
};

/// Height of a line: for two lines of text, one line, or only a bar.
fn line_height(lines: usize) -> f64 {
    match lines {
        0..=12 => 34.0,
        13..=24 => 18.0,
        _ => (480.0 / lines as f64).max(3.0),
    }
}

/// Height of the whole timeline.
pub(super) fn height(ranks: usize) -> f64 {
    if ranks > MOST_DETAILED_RANKS { 40.0 } else { 70.0 + line_height(ranks) * ranks as f64 }
}

/// Draws the timeline.
pub(super) fn draw(svg: &mut Svg, room: Area, ring: &DrawnRing<'_>) {
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
