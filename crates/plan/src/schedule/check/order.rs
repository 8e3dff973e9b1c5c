//! Delivery of all messages: each has a send and a receive, their order matches, and no ranks
//! deadlock.
//!
//! The model is the strictest transport that is allowed:
//!
//! * A send is synchronous: it completes only when its receive is posted.
//! * There are no tags: the n-th send from a to b is matched with the n-th receive of b from a.
//! * A rank posts a group only when its previous group is complete.

use std::{cmp::Ordering, collections::VecDeque};

use super::super::{Message, Schedule};
use super::{MessageEnd, Violation, ViolationKind};
use annulus_core::Channel;

pub(super) fn check(schedule: &Schedule) -> Result<(), Violation> {
    check_pairs(schedule)?;
    check_progress(schedule)
}

/// Checks that sends and receives of the same rows are equally many.
fn check_pairs(schedule: &Schedule) -> Result<(), Violation> {
    let mut ends: Vec<MessageEnd<'_>> = schedule.messages().map(|(_, end)| end).collect();
    ends.sort_by(compare_ends);
    for same in ends.chunk_by(|a, b| compare_ends(a, b).is_eq()) {
        let sends = same.iter().filter(|end| end.is_send).count();
        let receives = same.len() - sends;
        if sends != receives {
            let unpaired = same.iter().find(|end| end.is_send == (sends > receives));
            let what = "message without its send or receive";
            let violation = |end: &MessageEnd<'_>| end.violation(ViolationKind::Unpaired, what);
            return unpaired.map_or(Ok(()), |end| Err(violation(end)));
        }
    }
    Ok(())
}

/// Orders sends and receives by sender, receiver, channel, owner and rows.
fn compare_ends(a: &MessageEnd<'_>, b: &MessageEnd<'_>) -> Ordering {
    fn fields(end: &MessageEnd<'_>) -> (usize, usize, Channel, usize) {
        (end.from(), end.to(), end.message.channel, end.message.owner)
    }
    fn rows<'a>(end: &MessageEnd<'a>) -> impl Iterator<Item = (u64, u64)> + use<'a> {
        end.message.rows.ranges().iter().map(|range| (range.start, range.end))
    }
    fields(a).cmp(&fields(b)).then_with(|| rows(a).cmp(rows(b)))
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
        Some(rank) => {
            let step = (next[rank] - 1) / 2;
            let what =
                format!("deadlock: rank {rank} and its peers wait for each other in step {step}");
            Err(Violation::new(ViolationKind::CyclicWait, what))
        }
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
    let sent = MessageEnd::sent(from, at_sender / 2, send);
    if (send.channel, send.owner, &send.rows) != (receive.channel, receive.owner, &receive.rows) {
        Err(sent.violation(ViolationKind::Overtaken, "messages are matched in the wrong order"))
    } else if at_sender != at_receiver {
        let what = "send and receive are in different groups";
        Err(sent.violation(ViolationKind::GroupMismatch, what))
    } else {
        Ok(())
    }
}
