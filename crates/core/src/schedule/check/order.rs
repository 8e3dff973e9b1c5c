//! Do all messages get through? Each has two ends; nobody waits in a circle; nothing overtakes.
//!
//! The model is the strictest that a transport may be: sends are synchronous (done only when the receive is posted), there are no tags
//! (the n-th send from a to b meets the n-th receive at b from a), and a rank posts a group only when its last one is done.

use std::collections::VecDeque;

use super::super::{Message, Schedule};
use super::{Transfer, Violation};
use crate::{Channel, RowSet};

pub(super) fn check(schedule: &Schedule) -> Result<(), Violation> {
    check_pairs(schedule)?;
    check_progress(schedule)
}

/// Each send has one receive of the same rows somewhere, and each receive a send.
fn check_pairs(schedule: &Schedule) -> Result<(), Violation> {
    type Key<'a> = (usize, usize, Channel, usize, &'a [std::ops::Range<u64>]);
    let mut ends: Vec<(Key<'_>, bool, usize)> = schedule
        .messages()
        .map(|(is_send, rank, step, _, message)| {
            let (from, to) = if is_send { (rank, message.peer) } else { (message.peer, rank) };
            ((from, to, message.channel, message.owner, message.rows.ranges()), is_send, step)
        })
        .collect();
    let by_rows = |a: &[std::ops::Range<u64>], b: &[std::ops::Range<u64>]| {
        a.iter().map(|range| (range.start, range.end)).cmp(b.iter().map(|range| (range.start, range.end)))
    };
    ends.sort_by(|(a, ..), (b, ..)| (a.0, a.1, a.2, a.3).cmp(&(b.0, b.1, b.2, b.3)).then_with(|| by_rows(a.4, b.4)));
    for same in ends.chunk_by(|(a, ..), (b, ..)| a == b) {
        let (sends, receives): (Vec<&(Key<'_>, bool, usize)>, Vec<_>) = same.iter().partition(|(_, is_send, _)| *is_send);
        if sends.len() != receives.len() {
            let ((from, to, channel, owner, rows), _, step) = if sends.len() > receives.len() { *sends[0] } else { *receives[0] };
            let rows: RowSet = rows.iter().cloned().collect();
            return Err(Violation::Unpaired(Transfer { from, to, step, channel, owner, rows }));
        }
    }
    Ok(())
}

/// Posted and not yet met: in which group (numbered A(0) B(0) A(1) …), and what.
type Waiting<'a> = VecDeque<(usize, &'a Message)>;

/// Lets every rank post its groups in order, the next when the last is done, until all are done or none can go on.
fn check_progress(schedule: &Schedule) -> Result<(), Violation> {
    let ranks = schedule.steps.len();
    let mut sends: Vec<Waiting<'_>> = vec![Waiting::new(); ranks * ranks];
    let mut receives = sends.clone();
    // transfers of each rank's current group that are not done, and the group after it
    let (mut open, mut next) = (vec![0usize; ranks], vec![0usize; ranks]);
    let mut ready: Vec<usize> = (0..ranks).collect();
    while let Some(rank) = ready.pop() {
        let steps = &schedule.steps[rank];
        while open[rank] == 0 && next[rank] < 2 * steps.len() {
            let place = next[rank];
            next[rank] += 1;
            let step = &steps[place / 2];
            let group = if place % 2 == 0 { &step.before } else { &step.after };
            open[rank] = group.sends.len() + group.receives.len();
            let own_sends = group.sends.iter().map(|message| (message, rank * ranks + message.peer));
            own_sends.for_each(|(message, link)| sends[link].push_back((place, message)));
            let own_receives = group.receives.iter().map(|message| (message, message.peer * ranks + rank));
            own_receives.for_each(|(message, link)| receives[link].push_back((place, message)));
            let links = group.sends.iter().map(|message| rank * ranks + message.peer);
            for link in links.chain(group.receives.iter().map(|message| message.peer * ranks + rank)) {
                while let (Some(&(at_sender, send)), Some(&(at_receiver, receive))) = (sends[link].front(), receives[link].front()) {
                    sends[link].pop_front();
                    receives[link].pop_front();
                    meet(link / ranks, at_sender, send, at_receiver, receive)?;
                    for end in [link / ranks, link % ranks] {
                        open[end] -= 1;
                        if open[end] == 0 && end != rank {
                            ready.push(end);
                        }
                    }
                }
            }
        }
    }
    match (0..ranks).find(|&rank| open[rank] > 0) {
        Some(rank) => Err(Violation::CyclicWait { rank, step: (next[rank] - 1) / 2 }),
        None => Ok(()),
    }
}

fn meet(from: usize, at_sender: usize, send: &Message, at_receiver: usize, receive: &Message) -> Result<(), Violation> {
    let transfer = || Transfer::sent(from, at_sender / 2, send);
    if (send.channel, send.owner, &send.rows) != (receive.channel, receive.owner, &receive.rows) {
        Err(Violation::Overtaken(transfer()))
    } else if at_sender != at_receiver {
        Err(Violation::Apart(transfer()))
    } else {
        Ok(())
    }
}
