//! An endpoint that counts the transfers that it posts, and can kill or stop its process at one of
//! them.

use std::{
    process::Command,
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use annulus_core::{Control, Error, Host, Incoming, Outgoing, Result, Transport};
use rustix::process::{Signal, getpid, kill_process};

/// Sends and receives posted since the last endpoint was created or [`forget_transfers`] was
/// called.
///
/// The schedule of a pass determines their number, but not the number of groups: a receive is
/// posted when a buffer is free, a send when its block has arrived, together or one after the other.
static TRANSFERS: AtomicU64 = AtomicU64::new(0);

/// Returns the number of sends and receives posted since then.
pub(crate) fn transfers() -> u64 {
    TRANSFERS.load(Ordering::Relaxed)
}

/// Resets the count to 0.
pub(crate) fn forget_transfers() {
    TRANSFERS.store(0, Ordering::Relaxed);
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
        forget_transfers();
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
