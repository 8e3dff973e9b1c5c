//! An endpoint that counts the groups of transfers that it posts, and can kill its process at one
//! of them.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use annulus_core::{
    Arrived, Control, Error, Host, Incoming, MessageHeader, Outgoing, Result, Transport,
};

/// Groups posted since the last endpoint was created or [`forget_posts`] was called.
static POSTS: AtomicU64 = AtomicU64::new(0);

/// Returns the number of groups posted since then.
pub(crate) fn posts() -> u64 {
    POSTS.load(Ordering::Relaxed)
}

/// Resets the count to 0.
pub(crate) fn forget_posts() {
    POSTS.store(0, Ordering::Relaxed);
}

/// Forwards to `inner`. Before it posts group `kill_at`, counted from 0, it kills its process with
/// SIGKILL.
pub(crate) struct Mortal<T> {
    inner: T,
    kill_at: Option<u64>,
}

impl<T> Mortal<T> {
    pub(crate) fn new(inner: T, kill_at: Option<u64>) -> Self {
        forget_posts();
        Self { inner, kill_at }
    }
}

impl<T: Transport<Host>> Transport<Host> for Mortal<T> {
    fn control(&mut self) -> &mut dyn Control {
        self
    }

    fn post(
        &mut self,
        sends: &[Outgoing<'_, Host>],
        receives: &mut Vec<Incoming<Host>>,
    ) -> Result<()> {
        if Some(POSTS.fetch_add(1, Ordering::Relaxed)) == self.kill_at {
            let killed = rustix::process::kill_process(
                rustix::process::getpid(),
                rustix::process::Signal::KILL,
            );
            return Err(Error::Device {
                what: format!("this process could not be killed: {killed:?}"),
            });
        }
        self.inner.post(sends, receives)
    }

    fn progress(&mut self, patience: Duration) -> Result<()> {
        self.inner.progress(patience)
    }

    fn take(&mut self, header: &MessageHeader) -> Result<Option<Arrived<Host>>> {
        self.inner.take(header)
    }

    fn pending(&self) -> bool {
        self.inner.pending()
    }

    fn bytes_sent(&self) -> u64 {
        self.inner.bytes_sent()
    }
}

impl<T: Control> Control for Mortal<T> {
    annulus_comm::forward_control! {
        rank ranks start_all_gather try_all_gather stragglers abort heartbeat placement last_heard
        last_work
    }
}
