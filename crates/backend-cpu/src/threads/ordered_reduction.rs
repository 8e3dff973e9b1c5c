//! Ordered reduction: threads add to shared accumulators (dq of a head, dbias) in task order.
//!
//! ```text
//! task n may work at step p   ⇔   every earlier task of its chain is beyond step p or has ended
//! ```
//! Tasks are numbered in the order in which they are handed out. All tasks go through the same
//! steps (tiles of queries) in the same order, and may skip some. A shared accumulator therefore
//! receives its terms in task order: the bits depend neither on the thread count nor on timing, and
//! no thread needs an accumulator of its own. Threads form a pipeline, one step apart at its start.
//!
//! There is no deadlock: a task waits only for tasks handed out before it, and the first active
//! task waits for none. A waiting thread still ticks, and returns on a stop. A task that ends, also
//! by a panic, leaves the queue.
//!
//! Mutex access without poison.

use std::{
    ops::RangeInclusive,
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
};

use crate::threads::team::{TICK_INTERVAL, Ticker};

/// Active tasks and waiting threads.
#[derive(Debug, Default)]
struct Queue {
    /// At most one task per thread.
    active: Vec<ActiveTask>,
    /// Number of waiting threads.
    waiting: usize,
}

#[derive(Debug, Clone, Copy)]
struct ActiveTask {
    task: usize,
    chain: usize,
    /// All steps before this one are complete.
    step: usize,
}

/// Queue of the active tasks, with a condition variable for those that wait.
#[derive(Debug)]
pub(crate) struct OrderedReduction {
    queue: Mutex<Queue>,
    changed: Condvar,
}

impl OrderedReduction {
    /// Creates a queue for the tasks of `threads` threads.
    pub(crate) fn new(threads: usize) -> Self {
        let queue = Queue { active: Vec::with_capacity(threads), waiting: 0 };
        Self { queue: Mutex::new(queue), changed: Condvar::new() }
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Enqueues task `task` behind those with smaller numbers. It shares accumulators with the
    /// tasks of the same chain. The thread that works on it holds its [`TaskSlot`].
    pub(crate) fn enqueue(&self, task: usize, chain: usize) {
        self.queue().active.push(ActiveTask { task, chain, step: 0 });
    }

    /// Returns the slot of an enqueued task.
    pub(crate) const fn slot(&self, task: usize, chain: usize) -> TaskSlot<'_> {
        TaskSlot { ordered: self, task, chain }
    }
}

/// Active task; dropping it ends the task.
#[derive(Debug)]
pub(crate) struct TaskSlot<'a> {
    ordered: &'a OrderedReduction,
    task: usize,
    chain: usize,
}

impl TaskSlot<'_> {
    /// Returns the task's number.
    pub(crate) const fn task(&self) -> usize {
        self.task
    }

    /// Completes all steps before the first of `steps`, then waits until all earlier tasks of the
    /// chain are beyond the last. Returns false on a stop.
    pub(crate) fn wait_for_steps(
        &self,
        steps: RangeInclusive<usize>,
        ticker: &mut Ticker<'_>,
    ) -> bool {
        self.complete_before(*steps.start());
        self.wait(ticker, |other| other.task < self.task && other.step <= *steps.end())
    }

    /// Completes all steps before `step`.
    pub(crate) fn complete_before(&self, step: usize) {
        let mut queue = self.ordered.queue();
        queue
            .active
            .iter_mut()
            .filter(|active| active.task == self.task)
            .for_each(|active| active.step = step);
        self.notify(queue);
    }

    /// Waits until all tasks of the chain before number `first` have ended. Returns false on a
    /// stop.
    pub(crate) fn wait_for_tasks_before(&self, first: usize, ticker: &mut Ticker<'_>) -> bool {
        self.wait(ticker, |other| other.task < first)
    }

    fn wait(&self, ticker: &mut Ticker<'_>, blocks: impl Fn(&ActiveTask) -> bool) -> bool {
        let mut queue = self.ordered.queue();
        while queue.active.iter().any(|other| other.chain == self.chain && blocks(other)) {
            queue.waiting += 1;
            queue = self
                .ordered
                .changed
                .wait_timeout(queue, TICK_INTERVAL)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
            queue.waiting -= 1;
            // release the lock: a tick may take long
            drop(queue);
            if ticker.should_stop() {
                return false;
            }
            queue = self.ordered.queue();
        }
        true
    }

    fn notify(&self, queue: MutexGuard<'_, Queue>) {
        let has_waiters = queue.waiting > 0;
        drop(queue);
        if has_waiters {
            self.ordered.changed.notify_all();
        }
    }
}

impl Drop for TaskSlot<'_> {
    fn drop(&mut self) {
        let mut queue = self.ordered.queue();
        queue.active.retain(|active| active.task != self.task);
        self.notify(queue);
    }
}

/// Locks, ignoring poison: a panic ends the pass, and its results are never read.
pub(crate) fn lock<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the contents of a mutex that no other thread can hold.
pub(crate) fn get_mut<T>(shared: &mut Mutex<T>) -> &mut T {
    shared.get_mut().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::{ops::ControlFlow, time::Duration};

    use super::*;
    use crate::threads::team::Team;

    #[test]
    fn every_step_is_taken_in_task_order() {
        for threads in [1, 2, 3, 7] {
            let team = Team::new(threads).unwrap();
            let ordered = OrderedReduction::new(threads);
            let steps: Vec<_> = (0..9).map(|_| Mutex::new(Vec::new())).collect();
            let tasks = (0..40).inspect(|&task| ordered.enqueue(task, task % 2));
            team.run(&mut vec![(); threads], tasks, None, |(), task: usize, ticker| {
                let slot = ordered.slot(task, task % 2);
                // each task skips some steps, and not all the same ones
                for step in (0..steps.len()).filter(|step| !(step + task).is_multiple_of(5)) {
                    assert!(slot.wait_for_steps(step..=step, ticker));
                    if (task + step).is_multiple_of(7) {
                        std::thread::sleep(Duration::from_micros(300));
                    }
                    steps[step].lock().unwrap().push(task);
                }
            });
            for step in &steps {
                let step = step.lock().unwrap();
                for chain in [0, 1] {
                    let tasks = step.iter().filter(|&task| task % 2 == chain);
                    assert!(
                        tasks.clone().is_sorted() && tasks.count() == 16,
                        "{threads} threads: {step:?}"
                    );
                }
            }
            assert!(ordered.queue().active.is_empty());
        }
    }

    #[test]
    fn a_break_and_the_end_of_a_task_release_waiting_threads() {
        let team = Team::new(2).unwrap();
        let ordered = OrderedReduction::new(3);
        // a task without a thread blocks the others
        ordered.enqueue(0, 0);
        let mut tick = || ControlFlow::Break(());
        let tasks = (1..3).inspect(|&task| ordered.enqueue(task, 0));
        team.run(&mut [(), ()], tasks, Some(&mut tick), |(), task, ticker| {
            assert!(!ordered.slot(task, 0).wait_for_steps(0..=0, ticker));
        });
        drop(ordered.slot(0, 0));
        ordered.enqueue(3, 0);
        ordered.enqueue(4, 0);
        let finished = Mutex::new(Vec::new());
        team.run(&mut [(), ()], 3..5, None, |(), task, ticker| {
            let slot = ordered.slot(task, 0);
            slot.complete_before(usize::MAX);
            assert!(slot.wait_for_tasks_before(task, ticker));
            if task == 3 {
                std::thread::sleep(Duration::from_millis(1));
            }
            finished.lock().unwrap().push(task);
        });
        assert_eq!(finished.into_inner().unwrap(), [3, 4]);
    }
}
