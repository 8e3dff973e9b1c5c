//! One rank's steps with everything worked out that does not depend on data: which bytes of which buffer go where.

use std::{ops::Range, sync::Arc};

use annulus_core::{Channel, Group, Hop, Message, Order, Route, RowSet, Schedule};

use super::{
    parts,
    split::{self, Homecoming},
};

/// Pairs of ranges of record numbers, `(into, from)`, of equal lengths.
pub(crate) type Places = Vec<(Range<u64>, Range<u64>)>;

/// One step of this rank, ready to run.
#[derive(Debug)]
pub(crate) struct Leg {
    /// Whose block.
    pub(crate) owner: usize,
    /// Which of the owner's local rows are here.
    pub(crate) rows: RowSet,
    /// Blocks of the next step: sent from the block of this step (or from the home block on a direct route).
    pub(crate) before: Transfers,
    /// The same, each rank's last block in parts.
    pub(crate) before_in_parts: Transfers,
    /// The rows of the parts in which this step's block comes then; none if it comes whole, or was here from the start.
    pub(crate) parts: Vec<RowSet>,
    /// Gradients, sent from what this step made.
    pub(crate) after: Transfers,
    /// Where the gradient that arrives for **this** step's block is added: into this step's fresh gradient.
    pub(crate) travelled: Places,
    /// Where homecomings that were posted after this step go: into the home gradient. One a message, in order.
    pub(crate) homecomings: Vec<Homecoming>,
}

/// The steps of a rank, and what becomes of its home block.
#[derive(Debug, Default)]
pub(crate) struct Way {
    /// Up to the last step in which there is anything to do.
    pub(crate) legs: Vec<Leg>,
    /// Rows of the home block whose gradients are made in step 0. The others' are made after the last step.
    pub(crate) early: u64,
    /// Where those go: into the home gradient.
    pub(crate) late: Homecoming,
}

/// One group of transfers. Tags count from 0 within a pass; the engine adds the pass's first tag.
#[derive(Debug, Default)]
pub(crate) struct Transfers {
    pub(crate) sends: Vec<Hop>,
    pub(crate) receives: Vec<Hop>,
}

impl Transfers {
    /// Payload bytes that this rank sends.
    pub(crate) fn bytes_sent(&self) -> u64 {
        self.sends.iter().map(Hop::bytes).sum()
    }
}

/// Works out the way of the rank at `place`, with `early` rows of the home block in step 0. What is sent is addressed to ranks; all else is about
/// places. `block_bytes` and `gradient_bytes` are those of one record.
pub(crate) fn way(schedule: &Schedule, order: &Order, place: usize, early: u64, block_bytes: u64, gradient_bytes: u64) -> Way {
    let steps = &schedule.steps[place];
    let steps = &steps[..split::last_step(schedule, place).map_or(1, |last| last + 1)];
    let mut legs = Vec::with_capacity(steps.len());
    let own = &steps[0].rows;
    let last_block = parts::last_block(schedule, place);
    let mut unwritten: RowSet = std::iter::once(early..own.count()).collect();
    for (step, here) in steps.iter().enumerate() {
        let source = if schedule.route == Route::Direct { own } else { &here.rows };
        let travelled = step
            .checked_sub(1)
            .and_then(|previous| steps[previous].after.receives.iter().find(|message| message.channel == Channel::Travel))
            .map(|message| pair(&here.rows, &message.rows))
            .unwrap_or_default();
        legs.push(Leg {
            owner: here.owner,
            rows: here.rows.clone(),
            before: transfers(&here.before, order, step, source, block_bytes),
            before_in_parts: transfers_in_parts(schedule, (place, step), order, source, block_bytes),
            parts: if last_block == Some(step) { row_parts(&here.rows) } else { Vec::new() },
            after: transfers(&here.after, order, step, &here.rows, gradient_bytes),
            travelled,
            homecomings: homecomings(&here.after).map(|message| Homecoming::divide(pair(own, &message.rows), &mut unwritten)).collect(),
        });
    }
    let late = vec![(early..own.count(), 0..own.count() - early)];
    Way { legs, early, late: Homecoming::divide(late, &mut unwritten) }
}

fn homecomings(group: &Group) -> impl Iterator<Item = &Message> {
    group.receives.iter().filter(|message| message.channel == Channel::Home)
}

/// The rows of a block's parts; none if it has but one.
fn row_parts(rows: &RowSet) -> Vec<RowSet> {
    let parts = parts::parts(rows.count());
    if parts.len() == 1 {
        return Vec::new();
    }
    parts.iter().map(|part| parts::cut(rows.ranges(), part).into_iter().collect()).collect()
}

fn transfers(group: &Group, order: &Order, step: usize, source: &RowSet, record_bytes: u64) -> Transfers {
    let hop = |message: &Message, places: &[Range<u64>]| hop(message, order, (step, 0), places, record_bytes);
    Transfers {
        sends: group.sends.iter().map(|message| hop(message, &source.places_of(&message.rows))).collect(),
        receives: group.receives.iter().map(|message| hop(message, std::slice::from_ref(&(0..message.rows.count())))).collect(),
    }
}

/// The transfers before a step, those of a block that is the last to reach its rank in parts.
fn transfers_in_parts(schedule: &Schedule, (place, step): (usize, usize), order: &Order, source: &RowSet, record_bytes: u64) -> Transfers {
    let group = &schedule.steps[place][step].before;
    let divided = |receiver: usize, message: &Message| {
        if parts::last_block(schedule, receiver) == Some(step + 1) {
            parts::parts(message.rows.count())
        } else {
            std::iter::once(0..message.rows.count()).collect()
        }
    };
    let mut transfers = Transfers::default();
    for message in &group.sends {
        let places = source.places_of(&message.rows);
        let parts = divided(message.peer, message).into_iter().enumerate();
        transfers.sends.extend(parts.map(|(number, part)| hop(message, order, (step, number), &parts::cut(&places, &part), record_bytes)));
    }
    for message in &group.receives {
        let parts = divided(place, message).into_iter().enumerate();
        transfers
            .receives
            .extend(parts.map(|(number, part)| {
                hop(message, order, (step, number), std::slice::from_ref(&(0..part.end - part.start)), record_bytes)
            }));
    }
    transfers
}

/// The hop of part `number` of a message: no message follows the parts in the same pass, so they may have the tags of steps to come.
fn hop(message: &Message, order: &Order, (step, number): (usize, usize), places: &[Range<u64>], record_bytes: u64) -> Hop {
    Hop {
        peer: order.rank(message.peer),
        channel: message.channel,
        tag: (step + number) as u64,
        step,
        ranges: places.iter().map(|place| place.start * record_bytes..place.end * record_bytes).collect::<Arc<[_]>>(),
    }
}

/// Places of `rows` in a buffer of exactly `whole`, beside their places in a buffer of exactly `rows`.
fn pair(whole: &RowSet, rows: &RowSet) -> Places {
    let mut from = 0;
    whole
        .places_of(rows)
        .into_iter()
        .map(|into| {
            let count = into.end - into.start;
            from += count;
            (into, from - count..from)
        })
        .collect()
}
