//! Rings with a part removed, so that the rest can be timed: tiles that compute nothing or never
//! tick, and a transport that sends nothing.

use std::{
    ops::ControlFlow,
    thread,
    time::{Duration, Instant},
};

use annulus_core::{
    Arrived, Block, Control, Host, Incoming, MessageHeader, Outgoing, Result, Tick, Transport,
};

use crate::wrapped_tiles::TileCalls;

/// The work of the tiles of a timed ring.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Tiles {
    /// The CPU backend's.
    Real,
    /// A wait without a core, as if a device computed: this many seconds for each key of a block in
    /// forward, 2.5 times as many in backward.
    Paced(f64),
    /// None.
    Absent,
}

/// The execution of the tiles of a timed ring.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pace {
    pub(crate) tiles: Tiles,
    /// True if the tiles call the ring's tick.
    pub(crate) ticks: bool,
}

/// Interval of the ticks of a paced tile: the least interval of the CPU's tiles.
const TICK_EVERY: Duration = Duration::from_micros(200);

impl TileCalls for Pace {
    /// Does `work`, or waits instead, with the ring's tick or one that does nothing.
    fn run(
        &self,
        block: &Block<'_, Host>,
        products: f64,
        tick: Tick<'_>,
        work: impl FnOnce(Tick<'_>) -> Result<()>,
    ) -> Result<()> {
        let mut none = || ControlFlow::Continue(());
        let tick = if self.ticks { tick } else { &mut none };
        match self.tiles {
            Tiles::Real => work(tick),
            Tiles::Paced(seconds) => {
                let start = Instant::now();
                let whole = Duration::from_secs_f64(seconds * products * block.rows.len() as f64);
                while let Some(left) = whole.checked_sub(start.elapsed())
                    && tick().is_continue()
                {
                    thread::sleep(left.min(TICK_EVERY));
                }
                Ok(())
            }
            Tiles::Absent => Ok(()),
        }
    }
}

/// A transport without messages: a send ends at once, and a receive arrives at once with the bytes
/// that its buffer had. All-gathers use the inner transport.
pub(crate) struct NoMessages<T> {
    inner: T,
    arrived: Vec<Incoming<Host>>,
}

impl<T> NoMessages<T> {
    pub(crate) const fn new(inner: T) -> Self {
        Self { inner, arrived: Vec::new() }
    }
}

impl<T: Transport<Host>> Transport<Host> for NoMessages<T> {
    fn control(&mut self) -> &mut dyn Control {
        self
    }

    fn post(&mut self, _: &[Outgoing<'_, Host>], receives: &mut Vec<Incoming<Host>>) -> Result<()> {
        self.arrived.append(receives);
        Ok(())
    }

    fn progress(&mut self, timeout: Duration) -> Result<()> {
        self.inner.progress(if self.arrived.is_empty() { timeout } else { Duration::ZERO })
    }

    fn take(&mut self, header: &MessageHeader) -> Result<Option<Arrived<Host>>> {
        let found = self.arrived.iter().position(|incoming| incoming.header == *header);
        Ok(found.map(|found| Arrived { buffer: self.arrived.swap_remove(found).buffer, ready: () }))
    }

    annulus_core::messages_are_blocks! {}

    fn pending(&self) -> bool {
        false
    }

    fn bytes_sent(&self) -> u64 {
        0
    }

    fn posts_ahead(&self) -> bool {
        false
    }

    fn runs_groups_in_order(&self) -> bool {
        false
    }
}

impl<T: Control> Control for NoMessages<T> {
    annulus_comm::forward_control! {
        rank ranks start_all_gather try_all_gather stragglers abort heartbeat placement last_heard
        last_work
    }
}
