//! Mutated schedules: a message or step dropped, duplicated, moved, swapped or changed, on one rank
//! or on both. The checker must detect all of them.

use std::collections::BTreeSet;

use super::{needs, random_needs, samples, some_routes};
use crate::{Group, Layout, Message, Needs, Route, Schedule, ViolationKind};
use annulus_core::{Channel, RowSet, mask};

/// Index of a message in a schedule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct MessageIndex {
    rank: usize,
    /// 2·step, + 1 for the group after the tiles.
    group: usize,
    is_send: bool,
    /// Index in the list of sends or receives.
    index: usize,
}

fn list(schedule: &mut Schedule, rank: usize, group: usize, is_send: bool) -> &mut Vec<Message> {
    let step = &mut schedule.steps[rank][group / 2];
    let Group { sends, receives } =
        if group.is_multiple_of(2) { &mut step.before } else { &mut step.after };
    if is_send { sends } else { receives }
}

fn at(schedule: &mut Schedule, at: MessageIndex) -> &mut Message {
    &mut list(schedule, at.rank, at.group, at.is_send)[at.index]
}

/// Returns all sends and receives, each with its counterpart.
fn message_ends(schedule: &Schedule) -> Vec<(MessageIndex, MessageIndex)> {
    let mut copy = schedule.clone();
    let ranks = copy.steps.len();
    let mut all = Vec::new();
    for rank in 0..ranks {
        for group in 0..2 * ranks {
            for is_send in [true, false] {
                for (index, message) in
                    list(&mut copy, rank, group, is_send).clone().into_iter().enumerate()
                {
                    let others = list(&mut copy, message.peer, group, !is_send);
                    let index_there = others
                        .iter()
                        .position(|other| *other == Message { peer: rank, ..message.clone() })
                        .unwrap();
                    let there = MessageIndex {
                        rank: message.peer,
                        group,
                        is_send: !is_send,
                        index: index_there,
                    };
                    all.push((MessageIndex { rank, group, is_send, index }, there));
                }
            }
        }
    }
    all
}

/// Returns the set with one row added or removed, for every row of the owner and one beyond.
fn with_a_row_changed(rows: &RowSet, held: u64) -> impl Iterator<Item = RowSet> {
    (0..=held).map(|row| {
        let one = std::iter::once(row..row + 1).collect();
        if rows.contains(row) { rows.difference(&one) } else { rows.union(&one) }
    })
}

fn changed(message: &Message, ranks: usize, held: u64) -> Vec<Message> {
    let peers = (0..=ranks)
        .filter(|&peer| peer != message.peer)
        .map(|peer| Message { peer, ..message.clone() });
    let owners = (0..=ranks)
        .filter(|&owner| owner != message.owner)
        .map(|owner| Message { owner, ..message.clone() });
    let channels = [Channel::Kv, Channel::PartialGrad, Channel::FinalGrad]
        .into_iter()
        .filter(|&channel| channel != message.channel);
    let channels = channels.map(|channel| Message { channel, ..message.clone() });
    let rows =
        with_a_row_changed(&message.rows, held).map(|rows| Message { rows, ..message.clone() });
    peers.chain(owners).chain(channels).chain(rows).collect()
}

/// Mutations of one schedule.
struct Mutations<'a> {
    schedule: &'a Schedule,
    needs: &'a Needs,
    mutants: usize,
    /// Kinds of the violations that were found.
    caught: BTreeSet<ViolationKind>,
}

impl Mutations<'_> {
    fn expect_detected(&mut self, what: impl std::fmt::Debug, mutate: impl FnOnce(&mut Schedule)) {
        let mut mutant = self.schedule.clone();
        mutate(&mut mutant);
        if mutant == *self.schedule {
            return; // the mutation swapped two equal messages
        }
        match mutant.check(self.needs, true) {
            Ok(()) => panic!("not caught: {what:?} of {:?} for {:?}", self.schedule, self.needs),
            Err(violation) => {
                assert!(!violation.to_string().is_empty());
                self.caught.insert(violation.kind);
            }
        }
        self.mutants += 1;
    }

    fn one_end(&mut self, here: MessageIndex) {
        let ranks = self.schedule.steps.len();
        let MessageIndex { rank, group, is_send, index } = here;
        let message = at(&mut self.schedule.clone(), here).clone();
        self.expect_detected(("drop", here), |mutant| {
            list(mutant, rank, group, is_send).remove(index);
        });
        self.expect_detected(("duplicate", here), |mutant| {
            list(mutant, rank, group, is_send).push(message.clone())
        });
        let held = self.needs.held[message.owner];
        for other in changed(&message, ranks, held) {
            self.expect_detected(("change", here, other.clone()), |mutant| {
                *at(mutant, here) = other
            });
        }
        for elsewhere in (0..2 * ranks).filter(|&elsewhere| elsewhere != group) {
            self.expect_detected(("move", here, elsewhere), |mutant| {
                let message = list(mutant, rank, group, is_send).remove(index);
                list(mutant, rank, elsewhere, is_send).push(message);
            });
        }
    }

    fn both_ends(&mut self, here: MessageIndex, there: MessageIndex) {
        let ranks = self.schedule.steps.len();
        let message = at(&mut self.schedule.clone(), here).clone();
        self.expect_detected(("drop both", here), |mutant| {
            for end in [here, there] {
                list(mutant, end.rank, end.group, end.is_send).remove(end.index);
            }
        });
        self.expect_detected(("duplicate both", here), |mutant| {
            for end in [here, there] {
                let message = at(mutant, end).clone();
                list(mutant, end.rank, end.group, end.is_send).push(message);
            }
        });
        self.expect_detected(("reverse", here), |mutant| {
            for end in [here, there] {
                let message = list(mutant, end.rank, end.group, end.is_send).remove(end.index);
                list(mutant, end.rank, end.group, !end.is_send).push(message);
            }
        });
        for elsewhere in (0..2 * ranks).filter(|&elsewhere| elsewhere != here.group) {
            self.expect_detected(("move both", here, elsewhere), |mutant| {
                for end in [here, there] {
                    let message = list(mutant, end.rank, end.group, end.is_send).remove(end.index);
                    list(mutant, end.rank, elsewhere, end.is_send).push(message);
                }
            });
        }
        let held = self.needs.held[message.owner];
        for rows in with_a_row_changed(&message.rows, held) {
            self.expect_detected(("rows of both", here, &rows), |mutant| {
                [here, there].into_iter().for_each(|end| at(mutant, end).rows = rows.clone());
            });
            if message.channel == Channel::Kv {
                // the receiver computes on the rows that it receives
                self.expect_detected(("rows of both and of the step", here, &rows), |mutant| {
                    [here, there].into_iter().for_each(|end| at(mutant, end).rows = rows.clone());
                    let receiver = if here.is_send { there } else { here };
                    mutant.steps[receiver.rank][receiver.group / 2 + 1].rows = rows.clone();
                });
            }
        }
        for channel in [Channel::PartialGrad, Channel::FinalGrad] {
            if message.channel != channel {
                self.expect_detected(("channel of both", here, channel), |mutant| {
                    [here, there].into_iter().for_each(|end| at(mutant, end).channel = channel);
                });
            }
        }
    }

    fn swaps(&mut self, ends: &[(MessageIndex, MessageIndex)]) {
        for (i, &(a, a_there)) in ends.iter().enumerate() {
            for &(b, b_there) in &ends[..i] {
                // the order of messages in one list is arbitrary
                let same_list = (a.rank, a.group, a.is_send) == (b.rank, b.group, b.is_send);
                if !same_list {
                    self.expect_detected(("swap", a, b), |mutant| {
                        let message = at(mutant, a).clone();
                        *at(mutant, a) = std::mem::replace(at(mutant, b), message);
                    });
                }
                if a.is_send && b.is_send && a.group != b.group {
                    self.expect_detected(("swap both ends", a, b), |mutant| {
                        let messages = [a, a_there, b, b_there].map(|end| at(mutant, end).clone());
                        // move each message to the group of the other, on its own ranks
                        for end in [a, a_there, b, b_there] {
                            at(mutant, end).peer = usize::MAX;
                        }
                        for (end, message, group) in [
                            (a, 0, b.group),
                            (a_there, 1, b.group),
                            (b, 2, a.group),
                            (b_there, 3, a.group),
                        ] {
                            list(mutant, end.rank, group, end.is_send)
                                .push(messages[message].clone());
                        }
                        for steps in &mut mutant.steps {
                            for group in steps
                                .iter_mut()
                                .flat_map(|step| [&mut step.before, &mut step.after])
                            {
                                group.sends.retain(|message| message.peer != usize::MAX);
                                group.receives.retain(|message| message.peer != usize::MAX);
                            }
                        }
                    });
                }
            }
        }
    }

    fn steps(&mut self) {
        let ranks = self.schedule.steps.len();
        for rank in 0..ranks {
            for t in 0..ranks {
                let step = &self.schedule.steps[rank][t];
                let held = self.needs.held[step.owner];
                for rows in with_a_row_changed(&step.rows, held) {
                    self.expect_detected(("rows of step", rank, t, &rows), |mutant| {
                        mutant.steps[rank][t].rows = rows.clone()
                    });
                }
                for owner in (0..ranks).filter(|&owner| owner != step.owner) {
                    self.expect_detected(("owner of step", rank, t, owner), |mutant| {
                        mutant.steps[rank][t].owner = owner
                    });
                }
                for other in 0..t {
                    self.expect_detected(("swap steps", rank, t, other), |mutant| {
                        mutant.steps[rank].swap(t, other)
                    });
                }
            }
            self.expect_detected(("drop step", rank), |mutant| {
                mutant.steps[rank].truncate(ranks - 1)
            });
            self.expect_detected(("swap ranks", rank), |mutant| mutant.steps.rotate_left(1));
        }
        self.expect_detected("drop rank", |mutant| mutant.steps.truncate(ranks - 1));
    }
}

#[test]
fn every_mutation_is_detected() {
    let causal = mask::Causal::default();
    let window = mask::Window::new(Some(2), Some(2));
    let bases = [
        needs(&mask::Everything, &samples::plain(5, &Layout::Contiguous, 2)),
        needs(&causal, &samples::plain(7, &Layout::Zigzag, 3)),
        needs(&causal, &samples::plain(8, &Layout::Contiguous, 4)),
        needs(&window, &samples::plain(9, &Layout::Contiguous, 4)),
        needs(&causal, &samples::packed(11, 5, 1, &Layout::Striped, 4)),
        random_needs(4, 11),
        random_needs(5, 2),
        random_needs(6, 5),
    ];
    let mut mutants = 0;
    let mut caught = BTreeSet::new();
    for needs in &bases {
        for route in some_routes(needs.held.len()) {
            let schedule = Schedule::build(needs, route, true);
            assert_eq!(schedule.check(needs, true), Ok(()));
            let mut mutations = Mutations {
                schedule: &schedule,
                needs,
                mutants: 0,
                caught: std::mem::take(&mut caught),
            };
            let ends = message_ends(&schedule);
            for &(here, there) in &ends {
                mutations.one_end(here);
                if here.is_send {
                    mutations.both_ends(here, there);
                }
            }
            mutations.swaps(&ends);
            mutations.steps();
            mutants += mutations.mutants;
            caught = mutations.caught;
        }
    }
    assert!(mutants > 50_000, "{mutants}");
    // every kind of violation occurs
    assert_eq!(caught.first(), Some(&ViolationKind::Ranks));
    assert_eq!(caught.last(), Some(&ViolationKind::Contributions));
    assert_eq!(caught.len(), 18, "{caught:?}");
}

#[test]
fn gradients_in_a_forward_pass_are_refused_and_their_absence_in_backward() {
    let needs = Needs::everything(vec![2; 3]);
    for route in Route::ALL {
        assert!(Schedule::build(&needs, route, true).check(&needs, false).is_err());
        assert!(Schedule::build(&needs, route, false).check(&needs, true).is_err());
    }
}

#[test]
fn a_schedule_that_receives_all_final_gradients_first_deadlocks() {
    let needs = Needs::everything(vec![1; 3]);
    let mut schedule = Schedule::build(&needs, Route::RelayUp, true);
    for steps in &mut schedule.steps {
        let final_gradients: Vec<Message> = steps
            .iter_mut()
            .flat_map(|step| {
                let (final_gradients, others) = std::mem::take(&mut step.after.receives)
                    .into_iter()
                    .partition(|message| message.channel == Channel::FinalGrad);
                step.after.receives = others;
                let final_gradients: Vec<Message> = final_gradients;
                final_gradients
            })
            .collect();
        steps[0].after.receives.extend(final_gradients);
    }
    let violation = schedule.check(&needs, true).unwrap_err();
    assert_eq!(violation.kind, ViolationKind::CyclicWait, "{violation}");
}
