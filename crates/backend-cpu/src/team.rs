//! The threads of one backend: the calling thread and, beside it, a pool of its own.
//!
//! Items of work are handed out one after another, in a fixed order, to whoever asks first. An item is worked by one thread from end to end and
//! owns what it writes, or takes its turn at it (`backward_turns.rs`), so neither the number of threads nor their timing can be seen in a result. Only
//! the calling thread calls `tick` (an MPI may forbid it to others): between tiles, and while it waits for the others.

use std::{
    ops::ControlFlow,
    sync::{
        Condvar, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use annulus_core::{Error, Result, Tick};
use rayon::{ThreadPool, ThreadPoolBuilder};

/// Least time between two ticks, and the longest that a thread waits for another without looking up.
pub(crate) const BEAT: Duration = Duration::from_micros(200);

/// The threads of one backend.
#[derive(Debug)]
pub(crate) struct Team {
    threads: usize,
    /// all but the calling thread; none if it works alone
    others: Option<ThreadPool>,
}

/// Told between tiles, so that the calling thread can tick and all can stop.
pub(crate) struct Pulse<'a> {
    stop: &'a AtomicBool,
    last: Instant,
    /// on the calling thread only
    tick: Option<Tick<'a>>,
}

impl Pulse<'_> {
    /// Whether to stop working.
    pub(crate) fn stopped(&mut self) -> bool {
        if let Some(tick) = &mut self.tick
            && self.last.elapsed() >= BEAT
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

/// How many of the others are still at work.
struct Busy {
    count: Mutex<usize>,
    changed: Condvar,
}

/// Counts itself out when dropped, be it by a panic.
struct Leaving<'a>(&'a Busy);

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        *self.0.count.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        self.0.changed.notify_one();
    }
}

impl Team {
    pub(crate) fn new(threads: usize) -> Result<Self> {
        if threads == 0 {
            return Err(Error::invalid("threads", threads, "at least 1"));
        }
        let pool = || {
            let builder = ThreadPoolBuilder::new().num_threads(threads - 1).thread_name(|index| format!("annulus-cpu-{}", index + 1));
            builder.build().map_err(|error| Error::Device { what: format!("{} threads could not be started: {error}", threads - 1) })
        };
        Ok(Self { threads, others: if threads > 1 { Some(pool()?) } else { None } })
    }

    pub(crate) const fn threads(&self) -> usize {
        self.threads
    }

    /// Calls `work` on every item, each thread with a scratch of its own. There is at least one scratch; threads without one stay idle.
    pub(crate) fn run<S: Send, I: Iterator + Send>(
        &self,
        scratch: &mut [S],
        items: I,
        mut tick: Option<Tick<'_>>,
        work: impl Fn(&mut S, I::Item, &mut Pulse<'_>) + Sync,
    ) {
        let Some((own, others)) = scratch.split_first_mut() else { return };
        let items = Mutex::new(items);
        let stop = AtomicBool::new(false);
        let labour = |scratch: &mut S, pulse: &mut Pulse<'_>| {
            while !pulse.stopped() {
                let item = items.lock().unwrap_or_else(PoisonError::into_inner).next();
                let Some(item) = item else { break };
                work(scratch, item, pulse);
            }
        };
        let tick: Option<Tick<'_>> = match &mut tick {
            Some(tick) => Some(&mut **tick),
            None => None,
        };
        let mut pulse = Pulse { stop: &stop, last: Instant::now(), tick };
        let Some(pool) = &self.others else { return labour(own, &mut pulse) };
        let busy = Busy { count: Mutex::new(others.len().min(self.threads - 1)), changed: Condvar::new() };
        pool.in_place_scope(|scope| {
            for scratch in others.iter_mut().take(self.threads - 1) {
                let (labour, busy, stop) = (&labour, &busy, &stop);
                scope.spawn(move |_| {
                    let _leaving = Leaving(busy);
                    labour(scratch, &mut Pulse { stop, last: Instant::now(), tick: None });
                });
            }
            labour(own, &mut pulse);
            let mut count = busy.count.lock().unwrap_or_else(PoisonError::into_inner);
            while *count > 0 {
                drop(count);
                pulse.stopped();
                count = busy.count.lock().unwrap_or_else(PoisonError::into_inner);
                if *count > 0 {
                    count = busy.changed.wait_timeout(count, BEAT).unwrap_or_else(PoisonError::into_inner).0;
                }
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_item_is_worked_once_whatever_the_threads() {
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
    fn a_break_stops_everybody_and_ticks_come_from_the_caller_only() {
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
            // without the break this would not end
            team.run(&mut scratch, 0.., Some(&mut tick), |(), _, _| std::thread::sleep(Duration::from_micros(50)));
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
        // one item for either thread; the caller's is done long before the other, which waits for ticks
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
