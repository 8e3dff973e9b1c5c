//! In which order threads add to sums that they share: dq of one head, or the gradient of a bias.
//!
//! ```text
//! task n may work at place p   ⇔   every task before n with which it shares sums is beyond p, or has ended
//! ```
//! Tasks are numbered in the order in which they are handed out. All of them go through the same places, tiles of queries, in the same order, or through
//! some of these. So a shared sum has its terms in the order of the tasks, whoever works at them: the bits depend neither on the number of threads nor on
//! their timing, and nobody needs sums of its own. Threads run one behind the other, a place apart at the start and mostly more from then on.
//!
//! Nobody waits for ever: a task waits only for those handed out before it, and the first of those at work waits for none. Whoever waits still
//! ticks, and stops when all are to stop; a task that ends, be it by a panic, leaves the line.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use crate::team::{BEAT, Pulse};

/// The tasks at work.
#[derive(Debug, Default)]
struct Line {
    /// No more than there are threads.
    working: Vec<Working>,
    /// How many threads wait.
    waiting: usize,
}

#[derive(Debug, Clone, Copy)]
struct Working {
    task: usize,
    chain: usize,
    /// All places before this one are done.
    place: usize,
}

/// Whose turn it is.
#[derive(Debug)]
pub(crate) struct Turns {
    line: Mutex<Line>,
    changed: Condvar,
}

impl Turns {
    /// For the tasks that so many threads work at.
    pub(crate) fn new(threads: usize) -> Self {
        let line = Line { working: Vec::with_capacity(threads), waiting: 0 };
        Self { line: Mutex::new(line), changed: Condvar::new() }
    }

    fn line(&self) -> MutexGuard<'_, Line> {
        self.line.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that task number `task` is handed out, after those with smaller numbers. It shares sums with those of the same chain. Whoever works at it
    /// takes its [`Turn`].
    pub(crate) fn hand_out(&self, task: usize, chain: usize) {
        self.line().working.push(Working { task, chain, place: 0 });
    }

    /// The turn of a task that was handed out.
    pub(crate) const fn turn(&self, task: usize, chain: usize) -> Turn<'_> {
        Turn { turns: self, task, chain }
    }
}

/// A task at work; when dropped, it has ended.
#[derive(Debug)]
pub(crate) struct Turn<'a> {
    turns: &'a Turns,
    task: usize,
    chain: usize,
}

impl Turn<'_> {
    /// The number of the task.
    pub(crate) const fn task(&self) -> usize {
        self.task
    }

    /// Says that all places before `place` are done, and waits until those before this task are beyond it; false if all are to stop.
    pub(crate) fn reach(&self, place: usize, pulse: &mut Pulse<'_>) -> bool {
        self.pass(place);
        self.wait(pulse, |other| other.task < self.task && other.place <= place)
    }

    /// Says that all places before `place` are done.
    pub(crate) fn pass(&self, place: usize) {
        let mut line = self.turns.line();
        line.working.iter_mut().filter(|working| working.task == self.task).for_each(|working| working.place = place);
        self.tell(line);
    }

    /// Waits until all tasks before task number `first` have ended; false if all are to stop.
    pub(crate) fn wait_for_end(&self, first: usize, pulse: &mut Pulse<'_>) -> bool {
        self.wait(pulse, |other| other.task < first)
    }

    fn wait(&self, pulse: &mut Pulse<'_>, blocks: impl Fn(&Working) -> bool) -> bool {
        let mut line = self.turns.line();
        while line.working.iter().any(|other| other.chain == self.chain && blocks(other)) {
            line.waiting += 1;
            line = self.turns.changed.wait_timeout(line, BEAT).unwrap_or_else(PoisonError::into_inner).0;
            line.waiting -= 1;
            // a tick may take its time: nobody is to wait for it
            drop(line);
            if pulse.stopped() {
                return false;
            }
            line = self.turns.line();
        }
        true
    }

    fn tell(&self, line: MutexGuard<'_, Line>) {
        let anybody = line.waiting > 0;
        drop(line);
        if anybody {
            self.turns.changed.notify_all();
        }
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut line = self.turns.line();
        line.working.retain(|working| working.task != self.task);
        self.tell(line);
    }
}

#[cfg(test)]
mod tests {
    use std::{ops::ControlFlow, time::Duration};

    use super::*;
    use crate::team::Team;

    #[test]
    fn every_place_is_worked_at_in_the_order_of_the_tasks() {
        for threads in [1, 2, 3, 7] {
            let team = Team::new(threads).unwrap();
            let turns = Turns::new(threads);
            let places: Vec<_> = (0..9).map(|_| Mutex::new(Vec::new())).collect();
            let tasks = (0..40).inspect(|&task| turns.hand_out(task, task % 2));
            team.run(&mut vec![(); threads], tasks, None, |(), task: usize, pulse| {
                let turn = turns.turn(task, task % 2);
                // some places are left out, and not the same by all
                for place in (0..places.len()).filter(|place| !(place + task).is_multiple_of(5)) {
                    assert!(turn.reach(place, pulse));
                    if (task + place).is_multiple_of(7) {
                        std::thread::sleep(Duration::from_micros(300));
                    }
                    places[place].lock().unwrap().push(task);
                }
            });
            for place in &places {
                let place = place.lock().unwrap();
                for chain in [0, 1] {
                    let tasks = place.iter().filter(|&task| task % 2 == chain);
                    assert!(tasks.clone().is_sorted() && tasks.count() == 16, "{threads} threads: {place:?}");
                }
            }
            assert!(turns.line().working.is_empty());
        }
    }

    #[test]
    fn a_break_and_an_end_free_who_waits() {
        let team = Team::new(2).unwrap();
        let turns = Turns::new(3);
        // a task that nobody works at blocks the others
        turns.hand_out(0, 0);
        let mut tick = || ControlFlow::Break(());
        let tasks = (1..3).inspect(|&task| turns.hand_out(task, 0));
        team.run(&mut [(), ()], tasks, Some(&mut tick), |(), task, pulse| {
            assert!(!turns.turn(task, 0).reach(0, pulse));
        });
        drop(turns.turn(0, 0));
        turns.hand_out(3, 0);
        turns.hand_out(4, 0);
        let seen = Mutex::new(Vec::new());
        team.run(&mut [(), ()], 3..5, None, |(), task, pulse| {
            let turn = turns.turn(task, 0);
            turn.pass(usize::MAX);
            assert!(turn.wait_for_end(task, pulse));
            if task == 3 {
                std::thread::sleep(Duration::from_millis(1));
            }
            seen.lock().unwrap().push(task);
        });
        assert_eq!(seen.into_inner().unwrap(), [3, 4]);
    }
}
