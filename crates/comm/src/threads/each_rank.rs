//! One thread per rank: a whole ring in one process.

use std::{
    panic::{self, AssertUnwindSafe},
    sync::{Condvar, Mutex, PoisonError},
    thread,
};

use annulus_core::{Error, Result, memory};

/// Runs `work(rank, item)` for every item, each on its own thread, or on the calling one if there
/// is only one item. Returns all results, or the most informative error.
///
/// An error that a rank detected itself takes precedence over one that only repeats another rank's
/// ([`Error::Refused`], [`Error::Aborted`], [`Error::PeerLost`]).
///
/// # Ordering
/// Local. Returns when every thread has ended, so `work` may borrow.
///
/// # Errors
/// Those of `work`; [`Error::Device`] if a thread did not start, before `work` has begun on any;
/// [`Error::Internal`] if one panicked.
///
/// # Examples
/// ```
/// use annulus_comm::threads::{each_rank, ring};
/// use annulus_core::Control;
///
/// let ranks = each_rank(ring(3), |_, endpoint| Ok(endpoint.rank()))?;
/// assert_eq!(ranks, [0, 1, 2]);
/// # Ok::<(), annulus_core::Error>(())
/// ```
pub fn each_rank<I: Send, T: Send>(
    items: impl IntoIterator<Item = I>,
    work: impl Fn(usize, I) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    // The threads are started and joined by code that is compiled once, not for every type of item
    // and result: callers instantiate this function for each backend and element type.
    let slots: Vec<_> = items.into_iter().map(|item| Mutex::new((Some(item), None::<T>))).collect();
    each_thread(slots.len(), &|rank| {
        let slot = &slots[rank];
        let item = slot.lock().unwrap_or_else(PoisonError::into_inner).0.take();
        let value = work(rank, item.ok_or_else(|| Error::internal("a rank began twice"))?)?;
        slot.lock().unwrap_or_else(PoisonError::into_inner).1 = Some(value);
        Ok(())
    })?;
    let values = slots.into_iter().map(|slot| {
        let (_, value) = slot.into_inner().unwrap_or_else(PoisonError::into_inner);
        value.ok_or_else(|| Error::internal("a rank ended without a result"))
    });
    values.collect()
}

/// Runs `work(rank)` for `0..ranks` as [`each_rank`] describes.
fn each_thread(ranks: usize, work: &(dyn Fn(usize) -> Result<()> + Sync)) -> Result<()> {
    let panicked = || Err(Error::internal("the thread of a rank panicked"));
    if ranks == 1 {
        return panic::catch_unwind(AssertUnwindSafe(|| work(0))).unwrap_or_else(|_| panicked());
    }
    let gate = Gate::default();
    let results: Vec<Result<()>> = thread::scope(|scope| {
        let start = |rank| {
            // A thread that starts with the last free memory would end the process, so the size of
            // its mappings is tried first. Threads start one after another, because the trial, or
            // the heap of a thread, would take the memory of another one.
            memory::check_mapping("the thread of a rank", STACK + START)?;
            let gate = &gate;
            let thread = thread::Builder::new()
                .name(format!("rank {rank}"))
                .spawn_scoped(scope, move || gate.is_opened().then(|| work(rank)));
            let thread = thread.map_err(|error| Error::Device {
                what: format!("the thread of rank {rank} did not start: {error}"),
            })?;
            gate.wait_for_next();
            Ok(thread)
        };
        // collected, so that all threads start before the first is joined
        let threads: Vec<_> = (0..ranks).map(start).collect();
        // A rank whose thread did not start sends nothing, and the others would wait for it until
        // their deadline. So no rank begins before all threads have started.
        gate.decide(threads.iter().all(Result::is_ok));
        let wait = |thread: Result<thread::ScopedJoinHandle<'_, Option<Result<()>>>>| {
            let result = thread.map(|thread| thread.join().unwrap_or_else(|_| Some(panicked())));
            result.transpose()
        };
        threads.into_iter().filter_map(wait).map(Result::flatten).collect()
    });
    // the first that a rank detected itself, or else the first
    let failed = results.into_iter().filter_map(Result::err).min_by_key(is_echo);
    failed.map_or(Ok(()), Err)
}

/// Holds threads back until it is decided whether they run.
#[derive(Default)]
struct Gate {
    state: Mutex<GateState>,
    changed: Condvar,
}

#[derive(Default)]
struct GateState {
    /// True if a thread has arrived since the last [`Gate::wait_for_next`].
    has_arrived: bool,
    decision: Option<bool>,
}

impl Gate {
    /// Waits until the next thread has arrived. Each thread that was started does.
    fn wait_for_next(&self) {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let state = self.changed.wait_while(state, |state| !state.has_arrived);
        state.unwrap_or_else(PoisonError::into_inner).has_arrived = false;
    }

    fn decide(&self, open: bool) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).decision = Some(open);
        self.changed.notify_all();
    }

    /// Arrives, and waits for the decision, which always comes: the thread that makes it only
    /// starts threads before it.
    fn is_opened(&self) -> bool {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.has_arrived = true;
        self.changed.notify_all();
        let state = self.changed.wait_while(state, |state| state.decision.is_none());
        state.unwrap_or_else(PoisonError::into_inner).decision.unwrap_or(false)
    }
}

/// Default stack of a Rust thread, in bytes.
const STACK: usize = 2 << 20;

/// Bytes for the signal stack of a thread and its first allocations, which take some tens of KiB.
const START: usize = 1 << 18;

/// Returns true if an error only repeats what another rank detected.
const fn is_echo(error: &Error) -> bool {
    matches!(error, Error::Refused { .. } | Error::Aborted { .. } | Error::PeerLost { .. })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_of_the_rank_that_failed_takes_precedence() {
        let work = |rank, ()| match rank {
            1 => Err(Error::PeerLost { peer: 2, step: 0 }),
            2 => Err(Error::invalid("bias", 1, 2)),
            _ => Ok(rank),
        };
        assert_eq!(each_rank([(); 4], work), Err(Error::invalid("bias", 1, 2)));
        assert_eq!(each_rank([3, 4], |rank, item| Ok(rank + item)), Ok(vec![3, 5]));
    }

    #[test]
    fn threads_run_only_if_the_gate_opens() {
        for open in [false, true] {
            let gate = Gate::default();
            let ran = thread::scope(|scope| {
                let start = |_| {
                    let thread = scope.spawn(|| gate.is_opened());
                    gate.wait_for_next();
                    thread
                };
                let threads: Vec<_> = (0..3).map(start).collect();
                gate.decide(open);
                threads.into_iter().map(|thread| thread.join()).collect::<Vec<_>>()
            });
            assert!(ran.into_iter().all(|ran| ran.is_ok_and(|ran| ran == open)));
        }
    }

    #[test]
    fn a_panic_is_an_error() {
        let result = each_rank([0, 1], |_, item| {
            if item == 1 { std::panic::resume_unwind(Box::new("a panic")) } else { Ok(()) }
        });
        assert!(matches!(result, Err(Error::Internal { .. })));
        // also of a single rank, which runs on the calling thread
        let result: Result<Vec<()>> =
            each_rank([0], |_, _| std::panic::resume_unwind(Box::new("a panic")));
        assert!(matches!(result, Err(Error::Internal { .. })));
    }
}
