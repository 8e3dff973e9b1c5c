//! Emulated streams and events: work is queued, and runs when an event is queried.

use std::{
    collections::VecDeque,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

/// An item of work. Closures return true on success.
pub(super) enum Work {
    /// Copy or kernel.
    Run(Box<dyn FnOnce() -> bool + Send>),
    /// Operation that is attempted until it completes (`Some(success)`), blocking what follows it.
    Attempt(Box<dyn FnMut() -> Option<bool> + Send>),
    /// Blocks what follows until the mark has passed.
    Wait(Arc<Mark>),
    /// Marks the event as passed.
    Record(Arc<Mark>),
}

/// One recording of an event.
#[derive(Default)]
pub(super) struct Mark {
    passed: AtomicBool,
    /// Time at which it passed.
    time: OnceLock<Instant>,
    /// Stream in which it was recorded.
    queue: Weak<Queue>,
}

/// Work of a stream, in order.
#[derive(Default)]
pub(super) struct Queue(Mutex<VecDeque<Work>>);

/// Result of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// An item was run.
    Done,
    /// No item could run.
    Nothing,
    /// An item failed.
    Failed,
}

impl Mark {
    pub(super) fn of(queue: &Arc<Queue>) -> Arc<Self> {
        let queue = Arc::downgrade(queue);
        Arc::new(Self { passed: AtomicBool::new(false), time: OnceLock::new(), queue })
    }

    /// Time at which it passed.
    pub(super) fn time(&self) -> Option<Instant> {
        self.time.get().copied()
    }

    pub(super) fn passed(&self) -> bool {
        self.passed.load(Ordering::Acquire)
    }

    /// Runs one item of the work before the mark.
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

    /// Number of items.
    pub(super) fn len(&self) -> usize {
        self.lock().len()
    }

    /// Runs one item, of this stream or of the stream that it waits for.
    pub(super) fn step(&self) -> Step {
        // items run under the lock, so that they run in order on any thread
        let mut queue = self.lock();
        match queue.pop_front() {
            None => Step::Nothing,
            Some(Work::Run(work)) => {
                if work() {
                    Step::Done
                } else {
                    Step::Failed
                }
            }
            Some(Work::Attempt(mut attempt)) => match attempt() {
                Some(true) => Step::Done,
                Some(false) => Step::Failed,
                None => {
                    queue.push_front(Work::Attempt(attempt));
                    Step::Nothing
                }
            },
            Some(Work::Record(mark)) => {
                mark.time.get_or_init(Instant::now);
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

    /// Runs all items.
    pub(super) fn drain(&self) -> Step {
        loop {
            match self.step() {
                Step::Done => {}
                other => return other,
            }
        }
    }

    /// Drops all items.
    pub(super) fn discard(&self) {
        let dropped = std::mem::take(&mut *self.lock());
        drop(dropped);
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Work>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
