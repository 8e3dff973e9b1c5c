//! The threads of one backend: the calling thread and a pool of its own.
//!
//! ```text
//! each thread:  while not stopped, take the next item from the shared iterator and work on it
//! caller:       the same; between tiles, and while it waits for the others, calls tick
//! ```
//! Items are taken in a fixed order. One thread works an item from end to end and owns the memory
//! that it writes, or adds to shared memory in item order (`ordered_reduction.rs`). The result
//! therefore depends neither on the thread count nor on timing. Only the calling thread calls
//! `tick`, because an MPI may allow calls from one thread only.
//!
//! A forked child has none of the threads: a team of the parent works there on the calling thread
//! alone, and leaks its pool when dropped.

use std::{
    mem,
    ops::ControlFlow,
    sync::{
        Condvar, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use annulus_core::{Error, Process, Result, Tick, memory};
use rayon::{ThreadPool, ThreadPoolBuilder};

/// Minimum time between two ticks, and maximum time that a thread waits for another before it
/// checks for a stop.
///
/// A trade-off: shorter reacts faster to messages and aborts, longer spends less time in `tick`.
pub(crate) const TICK_INTERVAL: Duration = Duration::from_micros(200);

/// The threads of one backend.
#[derive(Debug)]
pub(crate) struct Team {
    threads: usize,
    /// All threads but the calling one. `None` for a team of one.
    others: Option<ThreadPool>,
    /// Process that has the threads.
    process: Process,
}

/// Polled between tiles: ticks on the calling thread and reports a stop to every thread.
pub(crate) struct Ticker<'a> {
    stop: &'a AtomicBool,
    last: Instant,
    /// Present on the calling thread only.
    tick: Option<Tick<'a>>,
}

impl Ticker<'_> {
    /// Ticks if a tick is due; returns true if the work is to stop.
    pub(crate) fn should_stop(&mut self) -> bool {
        if let Some(tick) = &mut self.tick
            && self.last.elapsed() >= TICK_INTERVAL
        {
            if tick() == ControlFlow::Break(()) {
                self.stop.store(true, Ordering::Relaxed);
                self.tick = None;
            }
            self.last = Instant::now();
        }
        self.stop.load(Ordering::Relaxed)
    }
}

/// Counts the pool threads that are still working.
struct Busy {
    count: Mutex<usize>,
    changed: Condvar,
}

/// Decrements the count when dropped, also during a panic.
struct BusyGuard<'a>(&'a Busy);

impl Drop for BusyGuard<'_> {
    fn drop(&mut self) {
        *self.0.count.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        self.0.changed.notify_one();
    }
}

/// Default stack of a thread in bytes: the standard library's.
const STACK: usize = 2 << 20;

impl Team {
    pub(crate) fn new(threads: usize) -> Result<Self> {
        if threads == 0 {
            return Err(Error::invalid("threads", threads, "at least 1"));
        }
        let pool = || {
            // a thread that started with the last free memory would end the process
            memory::check_mapping("the threads of a rank", (threads - 1).saturating_mul(STACK))?;
            let builder = ThreadPoolBuilder::new()
                .num_threads(threads - 1)
                .thread_name(|index| format!("annulus-cpu-{}", index + 1));
            builder.build().map_err(|error| Error::Device {
                what: format!("{} threads could not be started: {error}", threads - 1),
            })
        };
        let others = if threads > 1 { Some(pool()?) } else { None };
        Ok(Self { threads, others, process: Process::current() })
    }

    pub(crate) const fn threads(&self) -> usize {
        self.threads
    }

    /// Returns the pool, unless it is that of the process which forked this one.
    fn pool(&self) -> Option<&ThreadPool> {
        self.others.as_ref().filter(|_| self.has_threads())
    }

    /// Returns false in a forked child of the process that made the team.
    pub(crate) fn has_threads(&self) -> bool {
        self.others.is_none() || self.process.is_current()
    }

    /// Calls `work` on every item, on each thread with its own element of `scratch`.
    ///
    /// `scratch` has at least one element. Threads beyond its length stay idle.
    pub(crate) fn run<S: Send, I: Iterator + Send>(
        &self,
        scratch: &mut [S],
        items: I,
        mut tick: Option<Tick<'_>>,
        work: impl Fn(&mut S, I::Item, &mut Ticker<'_>) + Sync,
    ) {
        let Some((own, others)) = scratch.split_first_mut() else { return };
        let items = Mutex::new(items);
        let stop = AtomicBool::new(false);
        let work_items = |scratch: &mut S, ticker: &mut Ticker<'_>| {
            while !ticker.should_stop() {
                let item = items.lock().unwrap_or_else(PoisonError::into_inner).next();
                let Some(item) = item else { break };
                work(scratch, item, ticker);
            }
        };
        let tick: Option<Tick<'_>> = match &mut tick {
            Some(tick) => Some(&mut **tick),
            None => None,
        };
        let mut ticker = Ticker { stop: &stop, last: Instant::now(), tick };
        let Some(pool) = self.pool() else { return work_items(own, &mut ticker) };
        let busy =
            Busy { count: Mutex::new(others.len().min(self.threads - 1)), changed: Condvar::new() };
        pool.in_place_scope(|scope| {
            for scratch in others.iter_mut().take(self.threads - 1) {
                let work_items = &work_items;
                let busy = &busy;
                let stop = &stop;
                scope.spawn(move |_| {
                    let _guard = BusyGuard(busy);
                    work_items(scratch, &mut Ticker { stop, last: Instant::now(), tick: None });
                });
            }
            work_items(own, &mut ticker);
            let mut count = busy.count.lock().unwrap_or_else(PoisonError::into_inner);
            while *count > 0 {
                drop(count);
                ticker.should_stop();
                count = busy.count.lock().unwrap_or_else(PoisonError::into_inner);
                if *count > 0 {
                    count = busy
                        .changed
                        .wait_timeout(count, TICK_INTERVAL)
                        .unwrap_or_else(PoisonError::into_inner)
                        .0;
                }
            }
        });
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        // ending a pool locks its threads
        if !self.has_threads() {
            mem::forget(self.others.take());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_item_is_worked_once_by_any_number_of_threads() {
        for threads in 1..=3 {
            let team = Team::new(threads).unwrap();
            let mut done = vec![0u32; 100];
            let mut scratch = vec![0u32; threads];
            team.run(&mut scratch, done.iter_mut(), None, |count, item, _| {
                *item += 1;
                *count += 1;
            });
            assert!(done.iter().all(|&count| count == 1));
            assert_eq!(scratch.iter().sum::<u32>(), 100);
        }
        assert_eq!(Team::new(0).unwrap_err().code(), 1);
    }

    #[test]
    fn a_break_stops_all_threads_and_only_the_caller_ticks() {
        for threads in 1..=3 {
            let team = Team::new(threads).unwrap();
            let caller = std::thread::current().id();
            let mut ticks = 0;
            let mut tick = || {
                assert_eq!(std::thread::current().id(), caller);
                ticks += 1;
                if ticks < 3 { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
            };
            let mut scratch = vec![(); threads];
            // without the break this call would not return
            team.run(&mut scratch, 0.., Some(&mut tick), |(), _, _| {
                std::thread::sleep(Duration::from_micros(50))
            });
            assert_eq!(ticks, 3);
        }
    }

    #[test]
    fn the_caller_ticks_while_it_waits() {
        let team = Team::new(2).unwrap();
        let ticks = std::sync::atomic::AtomicU32::new(0);
        let mut tick = || {
            ticks.fetch_add(1, Ordering::Relaxed);
            ControlFlow::Continue(())
        };
        let caller = std::thread::current().id();
        // one item per thread: the caller finishes long before the other thread, which waits for
        // ticks
        let barrier = std::sync::Barrier::new(2);
        team.run(&mut [(), ()], 0..2, Some(&mut tick), |(), _, _| {
            barrier.wait();
            while std::thread::current().id() != caller && ticks.load(Ordering::Relaxed) < 3 {
                std::thread::yield_now();
            }
        });
        assert!(ticks.into_inner() >= 3);
    }
}
