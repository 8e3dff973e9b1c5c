//! Schedules with one thing wrong: an operation dropped, duplicated, moved, swapped or changed, on one end or on both. All are caught.

use std::collections::BTreeSet;

use super::{needs, random_needs, samples};
use crate::{Channel, Group, Layout, Message, Needs, Route, RowSet, Schedule, mask};

/// Where a message stands: rank, group (2·step, + 1 after the tiles), whether it is a send, and its place in the list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Place {
    rank: usize,
    group: usize,
    is_send: bool,
    index: usize,
}

fn list(schedule: &mut Schedule, rank: usize, group: usize, is_send: bool) -> &mut Vec<Message> {
    let step = &mut schedule.steps[rank][group / 2];
    let Group { sends, receives } = if group.is_multiple_of(2) { &mut step.before } else { &mut step.after };
    if is_send { sends } else { receives }
}

fn at(schedule: &mut Schedule, place: Place) -> &mut Message {
    &mut list(schedule, place.rank, place.group, place.is_send)[place.index]
}

/// All messages, each with its other end.
fn places(schedule: &Schedule) -> Vec<(Place, Place)> {
    let mut copy = schedule.clone();
    let ranks = copy.steps.len();
    let mut all = Vec::new();
    for rank in 0..ranks {
        for group in 0..2 * ranks {
            for is_send in [true, false] {
                for (index, message) in list(&mut copy, rank, group, is_send).clone().into_iter().enumerate() {
                    let others = list(&mut copy, message.peer, group, !is_send);
                    let index_there = others.iter().position(|other| *other == Message { peer: rank, ..message.clone() }).unwrap();
                    let there = Place { rank: message.peer, group, is_send: !is_send, index: index_there };
                    all.push((Place { rank, group, is_send, index }, there));
                }
            }
        }
    }
    all
}

/// The set with one row more or less, for every row that there may be.
fn with_a_row_changed(rows: &RowSet, held: u64) -> impl Iterator<Item = RowSet> {
    (0..=held).map(|row| {
        let one = std::iter::once(row..row + 1).collect();
        if rows.contains(row) { rows.difference(&one) } else { rows.union(&one) }
    })
}

fn changed(message: &Message, ranks: usize, held: u64) -> Vec<Message> {
    let peers = (0..=ranks).filter(|&peer| peer != message.peer).map(|peer| Message { peer, ..message.clone() });
    let owners = (0..=ranks).filter(|&owner| owner != message.owner).map(|owner| Message { owner, ..message.clone() });
    let channels = [Channel::Block, Channel::Travel, Channel::Home].into_iter().filter(|&channel| channel != message.channel);
    let channels = channels.map(|channel| Message { channel, ..message.clone() });
    let rows = with_a_row_changed(&message.rows, held).map(|rows| Message { rows, ..message.clone() });
    peers.chain(owners).chain(channels).chain(rows).collect()
}

/// Counts the mutants of one schedule and notes what they were caught for.
struct Hunt<'a> {
    schedule: &'a Schedule,
    needs: &'a Needs,
    mutants: usize,
    caught: BTreeSet<String>,
}

impl Hunt<'_> {
    fn expect_caught(&mut self, what: impl std::fmt::Debug, mutate: impl FnOnce(&mut Schedule)) {
        let mut mutant = self.schedule.clone();
        mutate(&mut mutant);
        if mutant == *self.schedule {
            return; // two equal messages swapped
        }
        match mutant.check(self.needs, true) {
            Ok(()) => panic!("not caught: {what:?} of {:?} for {:?}", self.schedule, self.needs),
            Err(violation) => {
                assert!(!violation.to_string().is_empty());
                let name = format!("{violation:?}");
                self.caught.insert(name.split([' ', '(']).next().unwrap().to_owned());
            }
        }
        self.mutants += 1;
    }

    fn one_end(&mut self, here: Place) {
        let ranks = self.schedule.steps.len();
        let Place { rank, group, is_send, index } = here;
        let message = at(&mut self.schedule.clone(), here).clone();
        self.expect_caught(("drop", here), |mutant| {
            list(mutant, rank, group, is_send).remove(index);
        });
        self.expect_caught(("duplicate", here), |mutant| list(mutant, rank, group, is_send).push(message.clone()));
        let held = self.needs.held[message.owner];
        for other in changed(&message, ranks, held) {
            self.expect_caught(("change", here, other.clone()), |mutant| *at(mutant, here) = other);
        }
        for elsewhere in (0..2 * ranks).filter(|&elsewhere| elsewhere != group) {
            self.expect_caught(("move", here, elsewhere), |mutant| {
                let message = list(mutant, rank, group, is_send).remove(index);
                list(mutant, rank, elsewhere, is_send).push(message);
            });
        }
    }

    fn both_ends(&mut self, here: Place, there: Place) {
        let ranks = self.schedule.steps.len();
        let message = at(&mut self.schedule.clone(), here).clone();
        self.expect_caught(("drop both", here), |mutant| {
            for end in [here, there] {
                list(mutant, end.rank, end.group, end.is_send).remove(end.index);
            }
        });
        self.expect_caught(("duplicate both", here), |mutant| {
            for end in [here, there] {
                let message = at(mutant, end).clone();
                list(mutant, end.rank, end.group, end.is_send).push(message);
            }
        });
        self.expect_caught(("reverse", here), |mutant| {
            for end in [here, there] {
                let message = list(mutant, end.rank, end.group, end.is_send).remove(end.index);
                list(mutant, end.rank, end.group, !end.is_send).push(message);
            }
        });
        for elsewhere in (0..2 * ranks).filter(|&elsewhere| elsewhere != here.group) {
            self.expect_caught(("move both", here, elsewhere), |mutant| {
                for end in [here, there] {
                    let message = list(mutant, end.rank, end.group, end.is_send).remove(end.index);
                    list(mutant, end.rank, elsewhere, end.is_send).push(message);
                }
            });
        }
        let held = self.needs.held[message.owner];
        for rows in with_a_row_changed(&message.rows, held) {
            self.expect_caught(("rows of both", here, &rows), |mutant| {
                [here, there].into_iter().for_each(|end| at(mutant, end).rows = rows.clone());
            });
            if message.channel == Channel::Block {
                // as if it had been planned so: the receiver attends what it gets
                self.expect_caught(("rows of both and of the step", here, &rows), |mutant| {
                    [here, there].into_iter().for_each(|end| at(mutant, end).rows = rows.clone());
                    let receiver = if here.is_send { there } else { here };
                    mutant.steps[receiver.rank][receiver.group / 2 + 1].rows = rows.clone();
                });
            }
        }
        for channel in [Channel::Travel, Channel::Home] {
            if message.channel != channel {
                self.expect_caught(("channel of both", here, channel), |mutant| {
                    [here, there].into_iter().for_each(|end| at(mutant, end).channel = channel);
                });
            }
        }
    }

    fn swaps(&mut self, places: &[(Place, Place)]) {
        for (i, &(a, a_there)) in places.iter().enumerate() {
            for &(b, b_there) in &places[..i] {
                // within one list the order means nothing
                let same_list = (a.rank, a.group, a.is_send) == (b.rank, b.group, b.is_send);
                if !same_list {
                    self.expect_caught(("swap", a, b), |mutant| {
                        let message = at(mutant, a).clone();
                        *at(mutant, a) = std::mem::replace(at(mutant, b), message);
                    });
                }
                if a.is_send && b.is_send && a.group != b.group {
                    self.expect_caught(("swap both ends", a, b), |mutant| {
                        let messages = [a, a_there, b, b_there].map(|end| at(mutant, end).clone());
                        // each into the other's group, by its own ranks
                        for end in [a, a_there, b, b_there] {
                            at(mutant, end).peer = usize::MAX;
                        }
                        for (end, message, group) in [(a, 0, b.group), (a_there, 1, b.group), (b, 2, a.group), (b_there, 3, a.group)] {
                            list(mutant, end.rank, group, end.is_send).push(messages[message].clone());
                        }
                        for steps in &mut mutant.steps {
                            for group in steps.iter_mut().flat_map(|step| [&mut step.before, &mut step.after]) {
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
                    self.expect_caught(("rows of step", rank, t, &rows), |mutant| mutant.steps[rank][t].rows = rows.clone());
                }
                for owner in (0..ranks).filter(|&owner| owner != step.owner) {
                    self.expect_caught(("owner of step", rank, t, owner), |mutant| mutant.steps[rank][t].owner = owner);
                }
                for other in 0..t {
                    self.expect_caught(("swap steps", rank, t, other), |mutant| mutant.steps[rank].swap(t, other));
                }
            }
            self.expect_caught(("drop step", rank), |mutant| mutant.steps[rank].truncate(ranks - 1));
            self.expect_caught(("swap ranks", rank), |mutant| mutant.steps.rotate_left(1));
        }
        self.expect_caught("drop rank", |mutant| mutant.steps.truncate(ranks - 1));
    }
}

#[test]
fn every_mutation_is_caught() {
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
    let (mut mutants, mut caught) = (0, BTreeSet::new());
    for needs in &bases {
        for route in Route::ALL {
            let schedule = Schedule::build(needs, route, true);
            assert_eq!(schedule.check(needs, true), Ok(()));
            let mut hunt = Hunt { schedule: &schedule, needs, mutants: 0, caught: std::mem::take(&mut caught) };
            let places = places(&schedule);
            for &(here, there) in &places {
                hunt.one_end(here);
                if here.is_send {
                    hunt.both_ends(here, there);
                }
            }
            hunt.swaps(&places);
            hunt.steps();
            mutants += hunt.mutants;
            caught = hunt.caught;
        }
    }
    assert!(mutants > 50_000, "{mutants}");
    // no check is idle
    let all = [
        "Apart",
        "Contributions",
        "CountedTwice",
        "CyclicWait",
        "Group",
        "Kept",
        "Meaningless",
        "Misdelivered",
        "Missing",
        "Needless",
        "NotHeld",
        "Overtaken",
        "Owner",
        "Present",
        "Ranks",
        "Steps",
        "Unborn",
        "Unpaired",
    ];
    assert_eq!(caught.iter().map(String::as_str).collect::<Vec<_>>(), all);
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
fn a_schedule_that_posts_all_homecomings_first_waits_for_ever() {
    let needs = Needs::everything(vec![1; 3]);
    let mut schedule = Schedule::build(&needs, Route::RelayUp, true);
    for steps in &mut schedule.steps {
        let homecomings: Vec<Message> = steps
            .iter_mut()
            .flat_map(|step| {
                let (home, others) =
                    std::mem::take(&mut step.after.receives).into_iter().partition(|message| message.channel == Channel::Home);
                step.after.receives = others;
                let home: Vec<Message> = home;
                home
            })
            .collect();
        steps[0].after.receives.extend(homecomings);
    }
    assert!(matches!(schedule.check(&needs, true), Err(crate::Violation::CyclicWait { .. })));
}
