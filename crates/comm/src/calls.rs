//! Collective calls: what every engine (ring, grid, KV cache) does around the work of a call.
//!
//! ```text
//! alive     an engine that has failed, or of a parent process, refuses all calls
//! enter     all ranks make the same call with valid arguments, or none starts
//! work      messages and tiles; an error here ends the engine on all ranks
//! close     the call has succeeded on all ranks, or fails on all
//! ```
//! An engine that works within a call of another, as the ring of a grid, has no entry and no end of
//! its own.
//!
//! The entry is the agreement of all ranks, which waits for late ranks. One that ends at the
//! arrival deadline has changed nothing, but the other ranks have this rank's contribution to its
//! all-gather, or will get it. So the all-gather is kept, and continued by the next call:
//!
//! | the entry that ended | the next call |
//! |---|---|
//! | of a call | is the same call again |
//! | of a call that this rank refused | finishes that entry, then enters itself |

use std::{
    panic::{self, AssertUnwindSafe},
    time::{Duration, Instant},
};

use annulus_core::{Error, Process, Result, Space, Transport};

use crate::agreement::{self, Descriptor};

/// Times and bytes of one pass on one rank.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
#[non_exhaustive]
pub struct Report {
    /// Wall-clock time of the call.
    pub seconds: f64,
    /// Exposed communication: time in which this rank waited for others.
    pub waiting_seconds: f64,
    /// Payload bytes that this rank sent, counted at the transport.
    pub bytes_sent: u64,
    /// Payload bytes that this rank sends by the schedule.
    pub bytes_predicted: u64,
}

/// State of an engine between calls.
pub(crate) struct Calls {
    pub(crate) entries: Entries,
    /// Tag of the next message, the same on all ranks.
    pub(crate) next_tag: u64,
    /// Error that ended the engine.
    poisoned: Option<String>,
    /// Process that made the engine.
    process: Process,
}

impl Calls {
    /// Starts after `rounds` all-gathers of the transport.
    pub(crate) fn new(rounds: u64) -> Self {
        let entries = Entries::new(rounds);
        Self { entries, next_tag: 1, poisoned: None, process: Process::current() }
    }

    /// Takes `count` tags. Returns the first.
    pub(crate) const fn take_tags(&mut self, count: u64) -> u64 {
        self.next_tag += count;
        self.next_tag - count
    }

    /// Returns an error if the engine is dead, or was made before this process was forked.
    pub(crate) fn alive(&self) -> Result<()> {
        self.process.check("plan")?;
        self.poisoned.as_ref().map_or(Ok(()), |first| Err(Error::Poisoned { first: first.clone() }))
    }

    /// Records a fatal error, which ends the engine.
    pub(crate) fn remember<T>(&mut self, result: Result<T>) -> Result<T> {
        if let Err(error) = &result
            && error.is_fatal()
        {
            self.poisoned = Some(error.to_string());
        }
        result
    }
}

/// An engine that all ranks call alike.
pub(crate) trait Collective {
    /// Memory of the blocks that its transport moves.
    type Space: Space;

    /// Returns the state of the calls and the transport of all ranks.
    fn calls_and_transport(&mut self) -> (&mut Calls, &mut dyn Transport<Self::Space>);

    /// Records a fatal error of an entry, and sends it to all ranks if it is this rank's own, as of
    /// a pass that the program cancels: the others may not have made the call yet, and would wait
    /// for this rank in it. A lost rank is missed by each rank that waits for it; an abort would
    /// end calls before this one on ranks that are about to return from them.
    fn entered<T>(&mut self, result: Result<T>) -> Result<T> {
        let (calls, transport) = self.calls_and_transport();
        if let Err(error @ Error::Device { .. }) = &result {
            transport.control().abort(error);
        }
        calls.remember(result)
    }

    /// Does the work of a call that all ranks have entered, which began at `start`, and agrees with
    /// them that it has succeeded. `work` returns its exposed communication.
    fn run(
        &mut self,
        start: Instant,
        bytes_predicted: u64,
        work: impl FnOnce(&mut Self) -> Result<Duration>,
    ) -> Result<Report> {
        // the wait for an all-gather is exposed communication
        let mut gathering = start.elapsed();
        let sent_before = self.calls_and_transport().1.bytes_sent();
        let result = caught(|| work(self));
        let closing = Instant::now();
        let (calls, transport) = self.calls_and_transport();
        if let Err(error) = &result {
            // the pass has not returned its buffers to the stock, so any error ends the engine
            calls.poisoned = Some(error.to_string());
            transport.control().abort(error);
        }
        let closed = result.and_then(|waited| {
            if transport.control().ranks() > 1 {
                agreement::close(&mut *transport, calls.entries.round(), Ok(()))?;
            }
            Ok(waited)
        });
        let waited = calls.remember(closed)?;
        gathering += closing.elapsed();
        Ok(Report {
            seconds: start.elapsed().as_secs_f64(),
            waiting_seconds: (waited + gathering).as_secs_f64(),
            bytes_sent: transport.bytes_sent() - sent_before,
            bytes_predicted,
        })
    }

    /// Refuses the call that the other ranks make, on a rank that cannot make it. Returns `why`, or
    /// the error of a dead engine.
    fn refuse_call(&mut self, why: Error) -> Error {
        let (calls, transport) = self.calls_and_transport();
        if let Err(poisoned) = calls.alive() {
            return poisoned;
        }
        let agreed = calls.entries.enter(transport, &Err(why.clone()));
        self.entered(agreed).err().unwrap_or(why)
    }

    /// Ends the engine on all ranks if a change of its state failed fatally: they would wait for
    /// this rank in the next call.
    fn or_end<T>(&mut self, result: Result<T>) -> Result<T> {
        let (calls, transport) = self.calls_and_transport();
        if let Err(error) = &result
            && error.is_fatal()
        {
            transport.control().abort(error);
        }
        calls.remember(result)
    }
}

/// Runs `work` and turns a panic in it (a caller's mask or bias function may panic) into an error,
/// so that the other ranks do not wait for this one.
///
/// # Errors
/// Those of `work`; [`Error::Internal`] with the message of a panic.
pub fn caught<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    panic::catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        let message = panic
            .downcast_ref::<&str>()
            .map(|text| (*text).to_owned())
            .or_else(|| panic.downcast_ref::<String>().cloned());
        let message = message.unwrap_or_else(|| "no message".to_owned());
        Err(Error::internal(format!("panicked: {message}")))
    })
}

/// Numbers of the all-gathers of a plan, and its entry that ended at the arrival deadline.
pub(crate) struct Entries {
    next_round: u64,
    pending: Option<PendingEntry>,
}

/// An entry that ended at the arrival deadline.
struct PendingEntry {
    round: u64,
    /// Contribution of this rank.
    contribution: Vec<u8>,
    /// True if this rank refused the call.
    is_refusal: bool,
}

impl Entries {
    /// Starts with all-gather `next_round`.
    pub(crate) const fn new(next_round: u64) -> Self {
        Self { next_round, pending: None }
    }

    /// Returns the number of the next all-gather.
    pub(crate) const fn round(&mut self) -> u64 {
        self.next_round += 1;
        self.next_round - 1
    }

    /// Agrees with all ranks on a call, which this rank makes with `local` or refuses. Returns the
    /// largest value of each [`Descriptor::largest`] field.
    pub(crate) fn enter<S: Space>(
        &mut self,
        transport: &mut dyn Transport<S>,
        local: &Result<Descriptor>,
    ) -> Result<Vec<u64>> {
        let contribution = agreement::contribution(local);
        if let Some(refusal) = self.pending.take_if(|entry| entry.is_refusal) {
            self.finish(transport, refusal)?;
        }
        let entry = match self.pending.take() {
            Some(pending) if pending.contribution == contribution => pending,
            Some(pending) => {
                self.pending = Some(pending);
                let want = "the one that ended at the arrival deadline, again";
                return Err(local
                    .as_ref()
                    .err()
                    .cloned()
                    .unwrap_or_else(|| Error::invalid("call", "another call", want)));
            }
            None => {
                let round = self.round();
                transport.start_entry(round, &contribution)?;
                PendingEntry { round, contribution, is_refusal: local.is_err() }
            }
        };
        let rank = transport.rank();
        let gathered = self.finish(transport, entry);
        agreement::conclude(rank, local, gathered)
    }

    /// Finishes the all-gather of an entry, or keeps it if it ends at the arrival deadline.
    fn finish<S: Space>(
        &mut self,
        transport: &mut dyn Transport<S>,
        entry: PendingEntry,
    ) -> Result<Vec<Vec<u8>>> {
        let gathered = agreement::finish_all_gather(transport, entry.round);
        if matches!(gathered, Err(Error::ArrivalTimeout { .. })) {
            self.pending = Some(entry);
        }
        gathered
    }
}
