//! What a program observes of passes: functions that a profiler's ranges call, tracing spans, and
//! step events. Hooks and subscribers belong to the process, so one test runs at a time.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
    thread::{self, ThreadId},
    time::Duration,
};

use annulus::{
    Attention, Dims, Division, LocalRing, Plan, Result, Runtime, Setup, Tensors,
    backend::Cpu,
    comm::{profiler::set_range_hooks, ring::Activity},
    ndarray::Array4,
};
use annulus_comm::{forward_control, forward_transport, threads::Threads};
use annulus_core::{Control, Host, Transport};

type Calls = Arc<Mutex<Vec<(ThreadId, bool, &'static str)>>>;

/// Only one test runs at a time.
fn alone() -> MutexGuard<'static, ()> {
    static TESTS: Mutex<()> = Mutex::new(());
    TESTS.lock().unwrap_or_else(PoisonError::into_inner)
}

#[test]
fn ranges_nest_on_each_thread_and_cover_passes_steps_and_waits() {
    let _alone = alone();
    let calls = Calls::default();
    let (begins, ends) = (Arc::clone(&calls), Arc::clone(&calls));
    let record = |calls: &Calls, begins: bool, name| {
        calls.lock().unwrap().push((thread::current().id(), begins, name));
    };
    set_range_hooks(
        move |name| {
            record(&begins, true, name);
            assert_ne!(name, "wait", "a panic of the host's function is ignored");
        },
        move |name| record(&ends, false, name),
    )
    .unwrap();
    let again = set_range_hooks(|_| {}, |_| {}).unwrap_err();
    assert!(again.to_string().starts_with("range hooks: got a second pair"), "{again}");

    let dims = Dims::new(1, 64, 2, 8);
    let mut ring = LocalRing::from_plans(Attention::new(), dims, 2, |_, setup, endpoint| {
        Plan::with_backend(setup, dims, Cpu::new(1)?, endpoint)
    })
    .unwrap();
    let x = Array4::<f32>::ones((1, 64, 2, 8));
    let tensors = Tensors::new(x.view(), x.view(), x.view());
    let forward = ring.forward(&tensors).unwrap();
    ring.backward(&tensors, &forward, x.view(), None).unwrap();
    drop(ring);

    let mut open: HashMap<ThreadId, Vec<&str>> = HashMap::new();
    let mut counts: HashMap<&str, usize> = HashMap::new();
    for &(thread, begins, name) in calls.lock().unwrap().iter() {
        let stack = open.entry(thread).or_default();
        if begins {
            let is_pass = ["forward", "backward"].contains(&name);
            assert_eq!(stack.is_empty(), is_pass, "{name} within {stack:?}");
            *counts.entry(name).or_default() += 1;
            stack.push(name);
        } else {
            assert_eq!(stack.pop(), Some(name));
        }
    }
    assert!(open.values().all(Vec::is_empty));
    // two ranks; two steps of a pass each
    assert_eq!((counts["forward"], counts["backward"]), (2, 2));
    assert_eq!(counts["step"], 8);
    assert!(counts["wait"] > 0);
}

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
    let _alone = alone();
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

/// Tracing spans of a pass, as a subscriber receives them.
#[cfg(feature = "tracing")]
mod spans {
    use tracing::{Event, Metadata, Subscriber, span};

    use super::*;

    /// Records the names of annulus' spans.
    #[derive(Default)]
    struct SpanNames {
        opened: Arc<Mutex<Vec<&'static str>>>,
        next: AtomicU64,
    }

    impl Subscriber for SpanNames {
        fn enabled(&self, metadata: &Metadata<'_>) -> bool {
            metadata.target() == "annulus"
        }

        fn new_span(&self, span: &span::Attributes<'_>) -> span::Id {
            self.opened.lock().unwrap().push(span.metadata().name());
            span::Id::from_u64(self.next.fetch_add(1, Ordering::Relaxed) + 1)
        }

        fn record(&self, _: &span::Id, _: &span::Record<'_>) {}
        fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}
        fn event(&self, _: &Event<'_>) {}
        fn enter(&self, _: &span::Id) {}
        fn exit(&self, _: &span::Id) {}
    }

    #[test]
    fn every_pass_step_and_wait_has_a_span() {
        let _alone = alone();
        let names = SpanNames::default();
        let opened = Arc::clone(&names.opened);
        tracing::subscriber::set_global_default(names).unwrap();
        let x = Array4::<f32>::ones((1, 48, 1, 8));
        let tensors = Tensors::new(x.view(), x.view(), x.view());
        let mut ring = LocalRing::new(Attention::new(), Dims::new(1, 48, 1, 8), 3).unwrap();
        let forward = ring.forward(&tensors).unwrap();
        let count = |name| opened.lock().unwrap().iter().filter(|&&other| other == name).count();
        // full attention on 3 ranks: each has 1 pass, 3 steps and at least 2 waits
        assert_eq!((count("pass"), count("step")), (3, 9));
        assert!(count("wait") >= 6, "{}", count("wait"));
        ring.backward(&tensors, &forward, x.view(), None).unwrap();
        assert_eq!((count("pass"), count("step")), (6, 18));
    }
}
