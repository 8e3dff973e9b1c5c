//! Streams and events: work that is queued, and done when somebody asks after an event.

use std::{
    collections::VecDeque,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, Ordering},
    },
};

/// A piece of work: whether it went well.
pub(super) enum Work {
    /// Copies, fills, kernels.
    Do(Box<dyn FnOnce() -> bool + Send>),
    /// What is tried until it is done (`Some`: whether it went well) and holds up what comes after it.
    Until(Box<dyn FnMut() -> Option<bool> + Send>),
    /// Nothing after this before the mark has passed.
    Wait(Arc<Mark>),
    /// The mark has passed.
    Pass(Arc<Mark>),
}

/// One recording of an event.
#[derive(Default)]
pub(super) struct Mark {
    passed: AtomicBool,
    /// Where it will pass.
    queue: Weak<Queue>,
}

/// A stream's work.
#[derive(Default)]
pub(super) struct Queue(Mutex<VecDeque<Work>>);

/// What came of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// Something was done.
    Done,
    /// There was nothing to do.
    Nothing,
    /// Work failed.
    Failed,
}

impl Mark {
    pub(super) fn of(queue: &Arc<Queue>) -> Arc<Self> {
        Arc::new(Self { passed: AtomicBool::new(false), queue: Arc::downgrade(queue) })
    }

    pub(super) fn passed(&self) -> bool {
        self.passed.load(Ordering::Acquire)
    }

    /// Does one piece of the work before it.
    pub(super) fn step(&self) -> Step {
        if self.passed() {
            return Step::Nothing;
        }
        self.queue.upgrade().map_or(Step::Nothing, |queue| queue.step())
    }
}

impl Queue {
    pub(super) fn push(&self, work: Work) {
        self.lock().push_back(work);
    }

    /// Does one piece of work, here or where this waits for.
    pub(super) fn step(&self) -> Step {
        // work runs under the lock: in order, whoever asks
        let mut queue = self.lock();
        match queue.pop_front() {
            None => Step::Nothing,
            Some(Work::Do(work)) => {
                if work() {
                    Step::Done
                } else {
                    Step::Failed
                }
            }
            Some(Work::Until(mut attempt)) => match attempt() {
                Some(true) => Step::Done,
                Some(false) => Step::Failed,
                None => {
                    queue.push_front(Work::Until(attempt));
                    Step::Nothing
                }
            },
            Some(Work::Pass(mark)) => {
                mark.passed.store(true, Ordering::Release);
                Step::Done
            }
            Some(Work::Wait(mark)) if mark.passed() => Step::Done,
            Some(Work::Wait(mark)) => {
                queue.push_front(Work::Wait(Arc::clone(&mark)));
                drop(queue);
                mark.step()
            }
        }
    }

    /// Does all work.
    pub(super) fn drain(&self) -> Step {
        loop {
            match self.step() {
                Step::Done => {}
                other => return other,
            }
        }
    }

    /// Drops all work.
    pub(super) fn discard(&self) {
        let dropped = std::mem::take(&mut *self.lock());
        drop(dropped);
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Work>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
