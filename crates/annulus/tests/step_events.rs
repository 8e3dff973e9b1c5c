//! Step events of a ring whose last message is taken between two polls of the sender.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
    time::Duration,
};

use annulus::{
    Activity, Attention, Dims, Division, LocalRing, Plan, Result, Runtime, Setup, Tensors,
};
use annulus_comm::{forward_control, forward_transport, threads::Threads};
use annulus_core::{Control, Host, Transport};
use annulus_cpu::Cpu;
use ndarray::Array4;

/// A transport that says after each poll that sends are pending, as one does whose receiver takes
/// the message a little later: to the deadlines around it, and to the poll of the ring.
struct Late {
    inner: Threads,
    asked: AtomicU32,
}

impl Control for Late {
    forward_control! {
        rank ranks placement start_all_gather try_all_gather stragglers abort heartbeat last_heard
        last_work
    }
}

impl Transport<Host> for Late {
    forward_transport! {
        post take bytes_sent posts_ahead runs_groups_in_order
    }

    fn progress(&mut self, timeout: Duration) -> Result<()> {
        self.asked.store(0, Ordering::Relaxed);
        Transport::<Host>::progress(&mut self.inner, timeout)
    }

    fn pending(&self) -> bool {
        self.asked.fetch_add(1, Ordering::Relaxed) < 2 || Transport::<Host>::pending(&self.inner)
    }
}

#[test]
fn the_last_message_of_a_pass_has_an_event() {
    let sent = Arc::new(AtomicU64::new(0));
    let sum = Arc::clone(&sent);
    let attention = Setup::from((
        Attention::new(),
        Division::new(),
        Runtime::new().on_step(move |event| {
            if event.activity == Activity::Send {
                sum.fetch_add(event.bytes, Ordering::Relaxed);
            }
        }),
    ));
    let mut ring =
        LocalRing::from_plans(&attention, Dims::new(1, 64, 2, 8), 2, |_, setup, inner| {
            Plan::with_backend(
                setup,
                Dims::new(1, 64, 2, 8),
                Cpu::new(1)?,
                Late { inner, asked: AtomicU32::new(0) },
            )
        })
        .unwrap();
    let x = Array4::<f32>::ones((1, 64, 2, 8));
    let forward = ring.forward(&Tensors::new(x.view(), x.view(), x.view())).unwrap();
    let predicted: u64 = forward.reports.iter().map(|report| report.bytes_predicted).sum();
    assert!(predicted > 0);
    assert_eq!(sent.load(Ordering::Relaxed), predicted);
}
