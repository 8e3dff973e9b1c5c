//! The checker of schedules. It proves, without running a schedule, that all messages are
//! delivered, that every rank has the rows it needs, and that every gradient contribution reaches
//! its owner once.
//!
//! The checker shares no code with the builder except [`Route`], which defines the owner of every
//! rank's block in every step.
//!
//! [`Route`]: super::Route
//!
//! # Delivery
//! Each message has a send and a receive, their order matches, and no ranks
//! deadlock.
//!
//! The model is the strictest transport that is allowed:
//!
//! * A send is synchronous: it completes only when its receive is posted.
//! * There are no tags: the n-th send from a to b is matched with the n-th receive of b from a.
//! * A rank posts a group only when its previous group is complete.

mod gradients;

use std::{cmp::Ordering, collections::VecDeque};

use annulus_core::{Channel, RowSet};

use crate::{
    Needs,
    schedule::{Message, Schedule, Step},
};

impl Schedule {
    /// Proves that the schedule computes the attention that `needs` describes:
    ///
    /// * Every rank receives every row that it needs exactly once.
    /// * Every message has a send and a receive, and is delivered even by a transport with
    ///   synchronous sends and without tags.
    /// * A rank sends only rows that it has and that some rank needs.
    /// * With `gradients`: the owner of a row receives the contribution of each rank that needs the
    ///   row exactly once.
    ///
    /// # Errors
    /// The first [`Violation`] found.
    pub fn check(&self, needs: &Needs, gradients: bool) -> Result<(), Violation> {
        self.check_shape(needs)?;
        self.check_messages(needs, gradients)?;
        check_order(self)?;
        for rank in 0..self.steps.len() {
            self.check_blocks(needs, rank)?;
        }
        if gradients {
            for owner in 0..self.steps.len() {
                gradients::check(self, needs, owner)?;
            }
        }
        Ok(())
    }

    fn check_shape(&self, needs: &Needs) -> Result<(), Violation> {
        let ranks = needs.held.len();
        if self.steps.len() != ranks {
            let got = self.steps.len();
            let what = format!("the schedule has {got} ranks, the needs have {ranks}");
            return Err(Violation::new(ViolationKind::Ranks, what));
        }
        for (rank, steps) in self.steps.iter().enumerate() {
            if steps.len() != ranks {
                let what = format!("rank {rank} has {} steps, expected {ranks}", steps.len());
                return Err(Violation::new(ViolationKind::Steps, what));
            }
            for (step, &Step { owner, .. }) in steps.iter().enumerate() {
                let want = self.route.owner(rank, step, ranks);
                if owner != want {
                    let what = format!(
                        "rank {rank} computes on the block of rank {owner} in step {step}, \
                         expected that of rank {want}"
                    );
                    return Err(Violation::new(ViolationKind::Owner, what));
                }
            }
        }
        Ok(())
    }

    /// Checks that each message is well formed and in a group for its channel.
    fn check_messages(&self, needs: &Needs, gradients: bool) -> Result<(), Violation> {
        for (before_tiles, end) in self.messages() {
            let message = end.message;
            let held = needs.held.get(message.owner).copied().unwrap_or(0);
            let no_such_rows = message.rows.ranges().last().is_none_or(|last| last.end > held);
            if message.peer == end.rank || message.peer >= self.steps.len() || no_such_rows {
                return Err(end.violation(ViolationKind::Malformed, "malformed message"));
            }
            let is_block = message.channel == Channel::Kv;
            if before_tiles != is_block || !(gradients || before_tiles) {
                return Err(end.violation(ViolationKind::Group, "message in the wrong group"));
            }
        }
        Ok(())
    }

    /// Checks the blocks of one rank: each step computes on the rows that have arrived for it,
    /// every needed row arrives, and the rank sends only rows that it has and receives only rows
    /// that are needed.
    fn check_blocks(&self, needs: &Needs, rank: usize) -> Result<(), Violation> {
        let steps = &self.steps[rank];
        let no_rows = RowSet::new();
        let mut attended = vec![&no_rows; steps.len()];
        for (t, step) in steps.iter().enumerate() {
            let mut arrived = if t == 0 { RowSet::all(needs.held[rank]) } else { RowSet::new() };
            for message in t.checked_sub(1).into_iter().flat_map(|t| &steps[t].before.receives) {
                let received = MessageEnd::received(rank, t - 1, message);
                if message.owner != step.owner || !message.rows.intersection(&arrived).is_empty() {
                    let what = "message that the next step does not use";
                    return Err(received.violation(ViolationKind::Misdelivered, what));
                }
                let forwarded = step.before.sends.iter().filter(|sent| sent.owner == message.owner);
                let used = forwarded.fold(needs.of(rank, message.owner).clone(), |used, sent| {
                    used.union(&sent.rows)
                });
                if !used.contains_all(&message.rows) {
                    let what = "rows sent that no rank needs";
                    return Err(received.violation(ViolationKind::Needless, what));
                }
                arrived = arrived.union(&message.rows);
            }
            if step.rows != arrived {
                let (attended, arrived) = (step.rows.ranges(), arrived.ranges());
                let what = format!(
                    "rank {rank} computes on rows {attended:?} in step {t}, but {arrived:?} arrived"
                );
                return Err(Violation::new(ViolationKind::Present, what));
            }
            attended[step.owner] = &step.rows;
            for message in &step.before.sends {
                let own = RowSet::all(needs.held[rank]);
                let held = [(rank, &own), (step.owner, &step.rows)]
                    .into_iter()
                    .find(|&(owner, _)| owner == message.owner);
                if !held.map_or(&no_rows, |(_, rows)| rows).contains_all(&message.rows) {
                    let what = "rows sent by a rank that does not have them";
                    let sent = MessageEnd::sent(rank, t, message);
                    return Err(sent.violation(ViolationKind::NotHeld, what));
                }
            }
        }
        if let Some(message) = steps.last().and_then(|step| step.before.receives.first()) {
            let received = MessageEnd::received(rank, steps.len() - 1, message);
            let what = "message after the last step";
            return Err(received.violation(ViolationKind::Misdelivered, what));
        }
        for (owner, attended) in attended.iter().enumerate() {
            let missing = needs.of(rank, owner).difference(attended);
            if !missing.is_empty() {
                let missing = missing.ranges();
                let what = format!(
                    "rank {rank} never receives rows {missing:?} of rank {owner}, which it needs"
                );
                return Err(Violation::new(ViolationKind::Missing, what));
            }
        }
        Ok(())
    }
}

// Errors of schedules.

/// Error that [`Schedule::check`] finds in a schedule, with ranks as ring indices.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what}")]
pub struct Violation {
    /// The property that does not hold.
    pub kind: ViolationKind,
    what: String,
}

impl Violation {
    pub(super) fn new(kind: ViolationKind, what: impl Into<String>) -> Self {
        Self { kind, what: what.into() }
    }
}

/// Property of a schedule that does not hold.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum ViolationKind {
    /// Schedule and needs have the same number of ranks.
    Ranks,
    /// A rank has as many steps as there are ranks.
    Steps,
    /// A step computes on the block of the owner that the route requires.
    Owner,
    /// A message is sent to another rank of the ring, of rows that their owner has, and not of
    /// none.
    Malformed,
    /// Blocks are in the group before the tiles, gradients of a backward pass in that after them.
    Group,
    /// There are as many sends as receives of the same rows.
    Unpaired,
    /// Ranks that wait for each group to be complete before they post the next do not deadlock.
    CyclicWait,
    /// Without tags, the receiver matches each send with its own receive.
    Overtaken,
    /// Send and receive are in the same group.
    GroupMismatch,
    /// A step computes on the rows that have arrived for it.
    Present,
    /// A row arrives once, and is part of the block of the receiver's next step.
    Misdelivered,
    /// A rank sends rows that it has in that step.
    NotHeld,
    /// A rank receives all rows that it needs.
    Missing,
    /// Rows are sent that the receiver or a later rank needs.
    Needless,
    /// A gradient is sent for rows to which a rank has contributed.
    NoContribution,
    /// A contribution reaches its receiver in one message.
    CountedTwice,
    /// A rank sends the partial gradients that it has.
    Kept,
    /// The contributions to a row that reach its owner are those of all ranks that need the row.
    Contributions,
}

/// One send or receive of a schedule.
#[derive(Debug, Clone, Copy)]
pub(super) struct MessageEnd<'a> {
    pub(super) message: &'a Message,
    pub(super) is_send: bool,
    /// Rank whose list contains the message.
    pub(super) rank: usize,
    pub(super) step: usize,
}

impl<'a> MessageEnd<'a> {
    /// Returns the send of `rank` in a group of step `step`.
    pub(super) const fn sent(rank: usize, step: usize, message: &'a Message) -> Self {
        Self { message, is_send: true, rank, step }
    }

    /// Returns the receive of `rank` in a group of step `step`.
    pub(super) const fn received(rank: usize, step: usize, message: &'a Message) -> Self {
        Self { message, is_send: false, rank, step }
    }

    /// Returns the sender.
    pub(super) const fn from(&self) -> usize {
        if self.is_send { self.rank } else { self.message.peer }
    }

    /// Returns the receiver.
    pub(super) const fn to(&self) -> usize {
        if self.is_send { self.message.peer } else { self.rank }
    }

    /// Returns the violation of a property by this message, `what` it is.
    pub(super) fn violation(&self, kind: ViolationKind, what: &str) -> Violation {
        let Message { channel, owner, rows, .. } = self.message;
        let (from, to, step, rows) = (self.from(), self.to(), self.step, rows.ranges());
        let message =
            format!("{channel:?} {from} → {to} in step {step}, rows {rows:?} of rank {owner}");
        Violation::new(kind, format!("{what}: {message}"))
    }
}

impl Schedule {
    /// Returns all sends and receives, in the order A(0) B(0) A(1) … of each rank; true for those
    /// in a group before the tiles.
    pub(super) fn messages(&self) -> impl Iterator<Item = (bool, MessageEnd<'_>)> {
        self.steps.iter().enumerate().flat_map(|(rank, steps)| {
            steps.iter().enumerate().flat_map(move |(step, groups)| {
                let groups = [(true, &groups.before), (false, &groups.after)];
                groups.into_iter().flat_map(move |(before_tiles, group)| {
                    let sends = group.sends.iter();
                    let sends = sends.map(move |message| MessageEnd::sent(rank, step, message));
                    let receives = group.receives.iter();
                    let receives =
                        receives.map(move |message| MessageEnd::received(rank, step, message));
                    sends.chain(receives).map(move |end| (before_tiles, end))
                })
            })
        })
    }
}

/// Checks that all messages are delivered, in the order in which ranks post them.
fn check_order(schedule: &Schedule) -> Result<(), Violation> {
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
