//! One thread per rank: a whole ring in one process.

use std::{
    panic::{self, AssertUnwindSafe},
    sync::{
        Mutex, PoisonError,
        mpsc::{Sender, channel},
    },
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
    let has_memory = |_| memory::check_mapping("the thread of a rank", STACK + START);
    each_thread(slots.len(), &has_memory, &|rank| {
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

/// Runs `work(rank)` for `0..ranks` as [`each_rank`] describes. `may_start` is called before the
/// thread of each rank.
///
/// A rank whose thread did not start sends nothing, and the others would wait for it until their
/// deadline. So each thread waits for a signal, which is sent once all have started.
fn each_thread(
    ranks: usize,
    may_start: &dyn Fn(usize) -> Result<()>,
    work: &(dyn Fn(usize) -> Result<()> + Sync),
) -> Result<()> {
    let panicked = || Err(Error::internal("the thread of a rank panicked"));
    if ranks == 1 {
        return panic::catch_unwind(AssertUnwindSafe(|| work(0))).unwrap_or_else(|_| panicked());
    }
    let (arrive, arrivals) = channel();
    let results: Vec<Result<()>> = thread::scope(|scope| {
        let start = |rank| {
            // A thread that starts with the last free memory would end the process, so the size of
            // its mappings is tried first. Threads start one after another, because the trial, or
            // the heap of a thread, would take the memory of another one.
            may_start(rank)?;
            let (begin, begins) = channel::<()>();
            let arrive = arrive.clone();
            let body = move || {
                arrive.send(()).unwrap_or_default();
                begins.recv().is_ok().then(|| work(rank))
            };
            let thread = thread::Builder::new().name(format!("rank {rank}"));
            let thread = thread.spawn_scoped(scope, body).map_err(|error| Error::Device {
                what: format!("the thread of rank {rank} did not start: {error}"),
            })?;
            arrivals.recv().unwrap_or_default();
            Ok((begin, thread))
        };
        let started: Vec<Result<_>> = (0..ranks).map(start).collect();
        let all_started = started.iter().all(Result::is_ok);
        // without the signal, the drop of its sender ends a thread
        let signal = |(begin, thread): (Sender<()>, _)| {
            if all_started {
                begin.send(()).unwrap_or_default();
            }
            thread
        };
        // collected, so that all threads begin before the first is joined
        let threads: Vec<Result<thread::ScopedJoinHandle<'_, Option<Result<()>>>>> =
            started.into_iter().map(|thread| thread.map(signal)).collect();
        let join = |thread: Result<thread::ScopedJoinHandle<'_, _>>| {
            let result = thread.map(|thread| thread.join().unwrap_or_else(|_| Some(panicked())));
            result.transpose()
        };
        threads.into_iter().filter_map(join).map(Result::flatten).collect()
    });
    // the first that a rank detected itself, or else the first
    let failed = results.into_iter().filter_map(Result::err).min_by_key(is_echo);
    failed.map_or(Ok(()), Err)
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
    fn no_rank_begins_if_the_thread_of_one_does_not_start() {
        let begun = Mutex::new(Vec::new());
        let may_start = |rank| if rank == 2 { Err(Error::internal("full")) } else { Ok(()) };
        let work = |rank| Ok(begun.lock().unwrap_or_else(PoisonError::into_inner).push(rank));
        assert_eq!(each_thread(4, &may_start, &work), Err(Error::internal("full")));
        assert!(begun.into_inner().is_ok_and(|begun| begun.is_empty()));
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
