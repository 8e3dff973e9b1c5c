//! Failures of ranks, not of messages: slow, panicking, killed and stopped ranks. And ranks that
//! are away and have not failed: busy between two calls, suspended within one, or stopped by a
//! debugger.
//!
//! [`Mortal`] counts the transfers that it posts, and can kill or stop its process at one of them.

use std::{
    process::Command,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use annulus::{Attention, Dims, Division, Layout, Plan, Runtime, Setup};
use annulus_comm::{
    Deadline, Silence, barrier,
    mpi::{Launch, Mpi, Settings},
};
use annulus_core::{Control, Error, Host, Incoming, Outgoing, Result, Transport};
use rustix::process::{Signal, getpid, kill_process};

use crate::{Harness, Verdict, bits, ensure, passes};

const DIMS: Dims =
    Dims { batch: 1, q_len: 24, kv_len: 24, q_heads: 2, kv_heads: 1, head_dim: 4, value_dim: 4 };
/// Deadline of the plans that lose or wait for a rank.
const DEADLINE: Duration = Duration::from_secs(1);
/// Deadline of the ring with a slow rank, which is silent for half of it.
const SLOW_DEADLINE: Duration = Duration::from_secs(3);

/// The last rank is silent for half of the deadline: every rank that watches it warns of it once,
/// at a quarter, and nothing fails.
pub(crate) fn slow(harness: &mut Harness, settings: &Settings) -> Verdict {
    let last = harness.ranks() - 1;
    let warnings: Arc<Mutex<Vec<Silence>>> = Arc::default();
    let warned = Arc::clone(&warnings);
    let mut watches_last = false;
    let wait = || -> Result<Duration> {
        let mut endpoint = Deadline::<_, Host>::new(Mpi::world(settings.clone())?, SLOW_DEADLINE)?
            .with_warning(move |silence| {
                warned.lock().unwrap_or_else(PoisonError::into_inner).push(silence)
            });
        watches_last = endpoint.watched().is_none_or(|watched| watched.contains(&last));
        barrier(&mut endpoint, 1)?;
        let started = Instant::now();
        if harness.rank() == last {
            std::thread::sleep(SLOW_DEADLINE / 2);
        }
        barrier(&mut endpoint, 2)?;
        Ok(started.elapsed())
    };
    let waited = wait().map_err(|error| error.to_string());
    let warnings = warnings.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let expected = match &warnings[..] {
        [Silence { peer, waited, .. }] => {
            *peer == last && (SLOW_DEADLINE / 4..SLOW_DEADLINE / 2).contains(waited)
        }
        warnings => warnings.is_empty() && (harness.rank() == last || !watches_last),
    };
    harness
        .share(ensure(expected && waited.is_ok(), || format!("{waited:?}, warnings {warnings:?}")))
}

/// The last rank panics while the others wait for it.
pub(crate) fn panic(harness: &mut Harness, settings: &Settings) -> Verdict {
    let mut transport = Mpi::world(settings.clone()).map_err(|error| error.to_string())?;
    let last = harness.ranks() - 1;
    assert!(harness.rank() != last, "rank {last} panics on purpose");
    barrier::<Host>(&mut transport, 1).map_err(|error| error.to_string())?;
    harness.share(Ok(()))
}

/// Round of the agreement on the first call of a plan.
const FIRST_ENTRY: u64 = 2;

/// Rank 1 is killed before its first, a middle or its last transfer of a pass, or stopped for ever,
/// there or after it has entered a pass for which the last rank is late; every other rank reports
/// the loss and exits without `MPI_Finalize`.
pub(crate) fn lost(
    launch: Launch,
    mut harness: Harness,
    settings: &Settings,
    pass: &str,
    moment: &str,
) -> Verdict {
    // with full attention every rank posts the same number of sends and receives
    let attention = |deadline| {
        Setup::from((Attention::new(), Division::new(), Runtime::new().deadline(deadline)))
    };
    let counts = plan(settings, None, &attention(Duration::from_secs(30)))
        .and_then(|mut plan| posted(&mut plan))
        .map_err(|error| error.to_string());
    harness.share(counts.as_ref().map(drop).map_err(Clone::clone))?;
    let [forward, both] = counts?;
    let at = |transfer, end| (Moment::Transfer(transfer), end);
    let end = match (pass, moment) {
        ("forward", "first") => at(0, End::Killed),
        ("forward", "middle") => at(forward / 2, End::Killed),
        ("forward", "last") => at(forward - 1, End::Killed),
        ("forward", "stopped") => at(forward / 2, End::Stopped),
        ("backward", "first") => at(forward, End::Killed),
        ("backward", "middle") => at(forward.midpoint(both), End::Killed),
        ("backward", "last") => at(both - 1, End::Killed),
        ("entry", "stopped") => (Moment::Entry(FIRST_ENTRY), End::Stopped),
        _ => {
            let want = "forward|backward first|middle|last, forward stopped or entry stopped";
            return Err(format!("want {want}"));
        }
    };
    let is_late = pass == "entry" && harness.rank() == harness.ranks() - 1;
    let end = (harness.rank() == 1).then_some(end);
    let mut plan = plan(settings, end, &attention(DEADLINE)).map_err(|error| error.to_string())?;
    if is_late {
        std::thread::sleep(DEADLINE * 2);
    }
    let started = Instant::now();
    let result = posted(&mut plan).map(drop);
    let took = started.elapsed();
    let named = match &result {
        Err(Error::Timeout { peer: 1, .. } | Error::PeerLost { peer: 1, .. }) => true,
        Err(Error::Aborted { what, .. }) => what.contains("rank 1 ") && what.contains("step "),
        _ => false,
    };
    let right = named && took <= DEADLINE + Duration::from_secs(1);
    println!(
        "{} rank {}: {result:?} after {took:?}",
        if right { "survivor" } else { "WRONG" },
        harness.rank()
    );
    // endpoints wait for no rank after a failure; the harness has not failed, so it is not dropped
    drop(plan);
    std::mem::forget(harness);
    launch.abandon();
    std::process::exit(i32::from(!right))
}

fn plan(settings: &Settings, end: Option<(Moment, End)>, setup: &Setup) -> Result<Plan> {
    let transport = Mortal::new(Mpi::world(settings.clone())?, end);
    let setup = setup.clone().map_division(|division| division.layout(Layout::Contiguous));
    Plan::new(setup, DIMS, transport)
}

/// Runs forward and backward of full attention; returns the number of sends and receives posted
/// after each.
fn posted(plan: &mut Plan) -> Result<[u64; 2]> {
    let mut after_forward = 0;
    passes(plan, || after_forward = transfers())?;
    Ok([after_forward, transfers()])
}

/// The last rank, then the first one, makes a call two deadlines after the others: nothing fails.
/// With an arrival deadline the others make their call again.
pub(crate) fn away(harness: &mut Harness, settings: &Settings) -> Verdict {
    let last = harness.ranks() - 1;
    for arrival_deadline in [None, Some(DEADLINE)] {
        let attention = Setup::from((
            Attention::new(),
            Division::new(),
            Runtime::new().deadline(DEADLINE).arrival_deadline(arrival_deadline),
        ));
        let late = |plan: &mut Plan, late: usize| {
            if harness.rank() == late {
                thread::sleep(DEADLINE * 2);
            }
            // a plan is refused until the late rank has come, but no longer
            let mut timeouts = 0;
            loop {
                match bits(plan) {
                    Err(Error::ArrivalTimeout { .. }) if timeouts < 10 => timeouts += 1,
                    result => return result.map(|bits| (bits, timeouts)),
                }
            }
        };
        let work = || -> Result<Verdict> {
            let mut plan = plan(settings, None, &attention)?;
            let first = bits(&mut plan)?;
            for rank in [last, 0] {
                let (bits, timeouts) = late(&mut plan, rank)?;
                let waits = arrival_deadline.is_some() && harness.rank() != rank;
                let expected = if waits { 1..=2 } else { 0..=0 };
                if bits != first || !expected.contains(&timeouts) {
                    let equal = bits == first;
                    return Ok(Err(format!("equal bits: {equal}, {timeouts} timeouts")));
                }
            }
            Ok(Ok(()))
        };
        let verdict = work().unwrap_or_else(|error| Err(error.to_string()));
        harness.share(verdict.map_err(|wrong| format!("{arrival_deadline:?}: {wrong}")))?;
    }
    Ok(())
}

/// All ranks are stopped within a pass for longer than the deadline, as a scheduler or a paused
/// machine does it: the same bits.
pub(crate) fn suspended(harness: &mut Harness, settings: &Settings) -> Verdict {
    let work = || -> Result<Verdict> {
        let attention =
            Setup::from((Attention::new(), Division::new(), Runtime::new().deadline(DEADLINE)));
        let first = bits(&mut plan(settings, None, &attention)?)?;
        let end = (Moment::Transfer(2), End::Suspended(DEADLINE * 5 / 2));
        let bits = bits(&mut plan(settings, Some(end), &attention)?)?;
        Ok(ensure(bits == first, || "other bits after a suspension".to_owned()))
    };
    harness.share(work().unwrap_or_else(|error| Err(error.to_string())))
}

/// One rank is stopped within a pass for longer than the deadline, as by a debugger, and
/// `ANNULUS_DEADLINE` is 0: the others wait, and get the same bits.
pub(crate) fn debugged(harness: &mut Harness, settings: &Settings) -> Verdict {
    let variable = std::env::var(Runtime::DEADLINE_VARIABLE);
    ensure(variable.as_deref() == Ok("0"), || {
        format!("{}: got {variable:?}, want 0", Runtime::DEADLINE_VARIABLE)
    })?;
    let stopped = harness.rank() == harness.ranks() - 1;
    let work = || -> Result<Verdict> {
        let attention =
            Setup::from((Attention::new(), Division::new(), Runtime::new().deadline(DEADLINE)));
        let first = bits(&mut plan(settings, None, &attention)?)?;
        let end = (Moment::Transfer(2), End::Suspended(DEADLINE * 5 / 2));
        let started = Instant::now();
        let bits = bits(&mut plan(settings, stopped.then_some(end), &attention)?)?;
        let waited = started.elapsed();
        let is_same = bits == first;
        Ok(ensure(is_same && waited > DEADLINE * 2, || {
            format!("the same bits: {is_same}, after {waited:?}")
        }))
    };
    harness.share(work().unwrap_or_else(|error| Err(error.to_string())))
}

/// Sends and receives posted since the last endpoint was created.
///
/// The schedule of a pass determines their number, but not the number of groups: a receive is
/// posted when a buffer is free, a send when its block has arrived, together or one after the
/// other.
static TRANSFERS: AtomicU64 = AtomicU64::new(0);

/// Returns the number of sends and receives posted since then.
fn transfers() -> u64 {
    TRANSFERS.load(Ordering::Relaxed)
}

/// Time after which a process that stops for ever is killed, so that its job ends: several
/// deadlines of the ranks that wait for it.
const FOR_EVER: Duration = Duration::from_secs(5);

/// Moment at which a process ends or stops.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Moment {
    /// Before it posts the group with this send or receive, counted from 0.
    Transfer(u64),
    /// After it has entered the call whose agreement is this round.
    Entry(u64),
}

/// End of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    /// By SIGKILL.
    Killed,
    /// By SIGSTOP, without a SIGCONT.
    Stopped,
    /// None: it is stopped for this time.
    Suspended(Duration),
}

impl End {
    /// Kills or stops this process. Returns once it was continued.
    fn bring(self) -> Result<()> {
        let failed = |what: &dyn std::fmt::Debug| Error::Device {
            what: format!("this process could not be {self:?}: {what:?}"),
        };
        let (signal, later) = match self {
            Self::Killed => (Signal::KILL, None),
            Self::Stopped => (Signal::STOP, Some(("KILL", FOR_EVER))),
            Self::Suspended(time) => (Signal::STOP, Some(("CONT", time))),
        };
        if let Some((name, after)) = later {
            // a process of its own, because this one is stopped
            let script =
                format!("sleep {}; kill -{name} {}", after.as_secs_f64(), std::process::id());
            Command::new("sh").args(["-c", &script]).spawn().map_err(|error| failed(&error))?;
        }
        kill_process(getpid(), signal).map_err(|error| failed(&error))
    }
}

/// Forwards to `inner`, and ends or stops its process at a moment.
pub(crate) struct Mortal<T> {
    inner: T,
    end: Option<(Moment, End)>,
}

impl<T> Mortal<T> {
    pub(crate) fn new(inner: T, end: Option<(Moment, End)>) -> Self {
        TRANSFERS.store(0, Ordering::Relaxed);
        Self { inner, end }
    }

    /// Ends or stops this process if `is_now` is true of the moment of its end.
    fn reach(&self, is_now: impl FnOnce(Moment) -> bool) -> Result<()> {
        match self.end {
            Some((moment, end)) if is_now(moment) => end.bring(),
            _ => Ok(()),
        }
    }
}

impl<T: Transport<Host>> Transport<Host> for Mortal<T> {
    annulus_comm::forward_transport! {
        progress take pending bytes_sent posts_ahead runs_groups_in_order
    }

    fn post(
        &mut self,
        sends: &[Outgoing<'_, Host>],
        receives: &mut Vec<Incoming<Host>>,
    ) -> Result<()> {
        let count = (sends.len() + receives.len()) as u64;
        let first = TRANSFERS.fetch_add(count, Ordering::Relaxed);
        self.reach(
            |moment| matches!(moment, Moment::Transfer(at) if (first..first + count).contains(&at)),
        )?;
        self.inner.post(sends, receives)
    }
}

impl<T: Control> Control for Mortal<T> {
    annulus_comm::forward_control! {
        rank ranks try_all_gather stragglers abort heartbeat placement last_heard last_work
    }

    fn start_all_gather(&mut self, round: u64, bytes: &[u8]) -> Result<()> {
        self.inner.start_all_gather(round, bytes)
    }

    fn start_entry(&mut self, round: u64, bytes: &[u8]) -> Result<()> {
        self.inner.start_entry(round, bytes)?;
        self.reach(|moment| moment == Moment::Entry(round))
    }
}
