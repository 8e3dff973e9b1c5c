//! What ranks post, counted by a wrapper of the transport.

mod agreements;
mod receives_ahead;
mod send_window;

use std::sync::{
    Arc,
    atomic::{AtomicU64, AtomicUsize, Ordering},
};

use annulus::{Dims, LocalRing, Plan, Result, Setup};
use annulus_comm::{forward_control, forward_transport, threads::Threads};
use annulus_core::{Control, Host, Incoming, Outgoing, Transport};
use annulus_cpu::Cpu;

/// Messages so far.
#[derive(Debug, Default)]
struct Counts {
    /// All-gathers that all ranks have started.
    all_gathers: AtomicUsize,
    /// Bytes of the sends that rank 0 has posted.
    bytes_sent: AtomicU64,
    /// Receives that rank 0 has posted.
    receives: AtomicUsize,
}

/// Counts messages.
struct Counted {
    inner: Threads,
    counts: Arc<Counts>,
}

/// Creates a ring of threads whose messages are counted.
fn ring(setup: &Setup, dims: Dims, ranks: usize, counts: &Arc<Counts>) -> Result<LocalRing> {
    LocalRing::from_plans(setup, dims, ranks, |_, setup, inner| {
        Plan::with_backend(setup, dims, Cpu::new(1)?, Counted { inner, counts: Arc::clone(counts) })
    })
}

impl Control for Counted {
    forward_control! {
        rank ranks placement try_all_gather stragglers abort heartbeat last_heard last_work
    }

    fn start_all_gather(&mut self, round: u64, bytes: &[u8]) -> Result<()> {
        self.counts.all_gathers.fetch_add(1, Ordering::SeqCst);
        self.inner.start_all_gather(round, bytes)
    }
}

impl Transport<Host> for Counted {
    forward_transport! {
        progress take pending bytes_sent posts_ahead runs_groups_in_order
    }

    fn post(
        &mut self,
        sends: &[Outgoing<'_, Host>],
        receives: &mut Vec<Incoming<Host>>,
    ) -> Result<()> {
        if self.inner.rank() == 0 {
            let bytes: u64 = sends.iter().map(|send| send.header.bytes()).sum();
            self.counts.bytes_sent.fetch_add(bytes, Ordering::SeqCst);
            self.counts.receives.fetch_add(receives.len(), Ordering::SeqCst);
        }
        self.inner.post(sends, receives)
    }
}
