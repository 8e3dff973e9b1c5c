//! Delivery of all messages: each has a send and a receive, their order matches, and no ranks
//! deadlock.
//!
//! The model is the strictest transport that is allowed:
//!
//! * A send is synchronous: it completes only when its receive is posted.
//! * There are no tags: the n-th send from a to b is matched with the n-th receive of b from a.
//! * A rank posts a group only when its previous group is complete.

use std::collections::VecDeque;

use super::super::{Message, Schedule};
use super::{Transfer, Violation};
use crate::{Channel, RowSet};

pub(super) fn check(schedule: &Schedule) -> Result<(), Violation> {
    check_pairs(schedule)?;
    check_progress(schedule)
}

/// Checks that sends and receives of the same rows are equally many.
fn check_pairs(schedule: &Schedule) -> Result<(), Violation> {
    // from, to, channel, owner, rows
    type Key<'a> = (usize, usize, Channel, usize, &'a [std::ops::Range<u64>]);
    let mut ends: Vec<(Key<'_>, bool, usize)> = schedule
        .messages()
        .map(|(is_send, rank, step, _, message)| {
            let (from, to) = if is_send { (rank, message.peer) } else { (message.peer, rank) };
            ((from, to, message.channel, message.owner, message.rows.ranges()), is_send, step)
        })
        .collect();
    let by_rows = |a: &[std::ops::Range<u64>], b: &[std::ops::Range<u64>]| {
        a.iter()
            .map(|range| (range.start, range.end))
            .cmp(b.iter().map(|range| (range.start, range.end)))
    };
    ends.sort_by(|(a, ..), (b, ..)| {
        (a.0, a.1, a.2, a.3).cmp(&(b.0, b.1, b.2, b.3)).then_with(|| by_rows(a.4, b.4))
    });
    for same in ends.chunk_by(|(a, ..), (b, ..)| a == b) {
        let (sends, receives): (Vec<&(Key<'_>, bool, usize)>, Vec<_>) =
            same.iter().partition(|(_, is_send, _)| *is_send);
        if sends.len() != receives.len() {
            let ((from, to, channel, owner, rows), _, step) =
                if sends.len() > receives.len() { *sends[0] } else { *receives[0] };
            let rows: RowSet = rows.iter().cloned().collect();
            return Err(Violation::Unpaired(Transfer { from, to, step, channel, owner, rows }));
        }
    }
    Ok(())
}

/// Messages that are posted and not yet matched, each with the index of its group in the order
/// A(0) B(0) A(1) …
type Unmatched<'a> = VecDeque<(usize, &'a Message)>;

/// Posts the groups of every rank in order, each when the previous is complete, until all groups
/// are complete or no rank can continue.
fn check_progress(schedule: &Schedule) -> Result<(), Violation> {
    let ranks = schedule.steps.len();
    let mut sends: Vec<Unmatched<'_>> = vec![Unmatched::new(); ranks * ranks];
    let mut receives = sends.clone();
    // transfers of each rank's current group that are not complete
    let mut open = vec![0usize; ranks];
    // index of each rank's next group
    let mut next = vec![0usize; ranks];
    let mut ready: Vec<usize> = (0..ranks).collect();
    while let Some(rank) = ready.pop() {
        let steps = &schedule.steps[rank];
        while open[rank] == 0 && next[rank] < 2 * steps.len() {
            let index = next[rank];
            next[rank] += 1;
            let step = &steps[index / 2];
            let group = if index.is_multiple_of(2) { &step.before } else { &step.after };
            open[rank] = group.sends.len() + group.receives.len();
            let own_sends =
                group.sends.iter().map(|message| (message, rank * ranks + message.peer));
            own_sends.for_each(|(message, link)| sends[link].push_back((index, message)));
            let own_receives =
                group.receives.iter().map(|message| (message, message.peer * ranks + rank));
            own_receives.for_each(|(message, link)| receives[link].push_back((index, message)));
            let links = group.sends.iter().map(|message| rank * ranks + message.peer);
            for link in
                links.chain(group.receives.iter().map(|message| message.peer * ranks + rank))
            {
                while let (Some(&(at_sender, send)), Some(&(at_receiver, receive))) =
                    (sends[link].front(), receives[link].front())
                {
                    sends[link].pop_front();
                    receives[link].pop_front();
                    check_match(link / ranks, at_sender, send, at_receiver, receive)?;
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

/// Checks that a matched send and receive are one message, in the same group on both ranks.
fn check_match(
    from: usize,
    at_sender: usize,
    send: &Message,
    at_receiver: usize,
    receive: &Message,
) -> Result<(), Violation> {
    let transfer = || Transfer::sent(from, at_sender / 2, send);
    if (send.channel, send.owner, &send.rows) != (receive.channel, receive.owner, &receive.rows) {
        Err(Violation::Overtaken(transfer()))
    } else if at_sender != at_receiver {
        Err(Violation::GroupMismatch(transfer()))
    } else {
        Ok(())
    }
}
