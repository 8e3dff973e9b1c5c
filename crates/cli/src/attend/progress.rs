//! A progress bar, on a terminal only, that moves when blocks arrive.

use std::time::{Duration, Instant};

use annulus_core::{Arrived, Control, Error, Hop, Incoming, Outgoing, Placement, Result, Space, Transport};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// The bar. Clones share it; it draws nothing where standard error is no terminal.
#[derive(Debug, Clone)]
pub(crate) struct Progress {
    bar: ProgressBar,
}

impl Progress {
    /// A bar that is drawn on a terminal.
    pub(crate) fn on_terminal() -> Self {
        let bar = ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::stderr());
        bar.enable_steady_tick(Duration::from_millis(200));
        Self { bar }
    }

    /// A bar that is never drawn.
    pub(crate) fn nowhere() -> Self {
        Self { bar: ProgressBar::hidden() }
    }

    /// Starts a phase in which `blocks` blocks will arrive at the ranks of this process. If none will, only the time is shown.
    pub(crate) fn phase(&self, name: &'static str, blocks: usize) {
        let template = if blocks > 0 { "{msg:9} {wide_bar} {pos}/{len} blocks {elapsed}" } else { "{msg:9} {spinner} {elapsed}" };
        if let Ok(style) = ProgressStyle::with_template(template) {
            self.bar.set_style(style);
        }
        self.bar.set_message(name);
        self.bar.set_length(blocks as u64);
        self.bar.set_position(0);
    }

    /// Wipes the bar.
    pub(crate) fn finish(&self) {
        self.bar.finish_and_clear();
    }
}

/// A transport that moves the bar with every block it delivers, and changes nothing.
#[derive(Debug)]
pub(crate) struct Watched<T> {
    inner: T,
    progress: Progress,
}

impl<T> Watched<T> {
    /// Watches `inner`.
    pub(crate) const fn new(inner: T, progress: Progress) -> Self {
        Self { inner, progress }
    }
}

impl<S: Space, T: Transport<S>> Transport<S> for Watched<T> {
    fn control(&mut self) -> &mut dyn Control {
        self.inner.control()
    }

    fn post(&mut self, sends: &[Outgoing<'_, S>], receives: &mut Vec<Incoming<S>>) -> Result<()> {
        self.inner.post(sends, receives)
    }

    fn progress(&mut self, patience: Duration) -> Result<()> {
        self.inner.progress(patience)
    }

    fn take(&mut self, hop: &Hop) -> Result<Option<Arrived<S>>> {
        let taken = self.inner.take(hop)?;
        if taken.is_some() {
            self.progress.bar.inc(1);
        }
        Ok(taken)
    }

    fn pending(&self) -> bool {
        self.inner.pending()
    }

    fn bytes_sent(&self) -> u64 {
        self.inner.bytes_sent()
    }
}

impl<T: Control> Control for Watched<T> {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn ranks(&self) -> usize {
        self.inner.ranks()
    }

    fn offer(&mut self, round: u64, bytes: &[u8]) -> Result<()> {
        self.inner.offer(round, bytes)
    }

    fn collect(&mut self, round: u64) -> Result<Option<Vec<Vec<u8>>>> {
        self.inner.collect(round)
    }

    fn missing(&self, round: u64) -> Vec<usize> {
        self.inner.missing(round)
    }

    fn abort(&mut self, error: &Error) {
        self.inner.abort(error);
    }

    fn beat(&mut self, working: bool) {
        self.inner.beat(working);
    }

    fn placement(&self) -> Option<&Placement> {
        self.inner.placement()
    }

    fn last_heard(&self, peer: usize) -> Instant {
        self.inner.last_heard(peer)
    }

    fn last_work(&self) -> Instant {
        self.inner.last_work()
    }
}
