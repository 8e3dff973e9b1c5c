//! Ranks that are late.
//!
//! A neighbour that is late in a step: how far the rank before it computes meanwhile.
//!
//! ```text
//! late rank    … step 2 │ step 3, in whose first tile it stays, without a poll
//! early rank   … step 2, in whose first tile it waits for that │ step 3, step 4, …
//! ```
//! In a forward pass the late rank receives nothing while it stays, so each further block stays in
//! a buffer of the early rank, which ends its last step when all of its buffers hold blocks that it
//! must send. In a backward pass on the direct route it computes gradients of the early rank's keys
//! while it stays. The early rank waits for them at the end of the pass.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use annulus::{
    Attention, Batch, Dims, Division, Layout, LocalRing, Result, Route, Runtime, Setup, Tensors,
    bias::BiasFunction,
    mask::{Fingerprint, Key, Query},
};
use ndarray::Array4;

const RANKS: usize = 8;
/// Rows of a rank.
const ROWS: u64 = 4;
const EARLY: usize = 3;

/// The rank that is late, the step in which it stays, and the pass.
#[derive(Debug, Clone, Copy)]
struct Lateness {
    route: Route,
    late: usize,
    /// Step in which the late rank stays.
    step: usize,
    backward: bool,
}

/// The late rank receives the blocks that the early one sends.
const FORWARD: Lateness =
    Lateness { route: Route::RelayUp, late: EARLY + 1, step: 3, backward: false };
/// The late rank attends to the keys of the early one in the step in which it stays.
const BACKWARD: Lateness =
    Lateness { route: Route::Direct, late: EARLY + 2, step: 2, backward: true };

/// A bias of 0 that makes the late rank late, and records the step of the early one.
#[derive(Debug)]
struct Watch {
    of: Lateness,
    /// Step of the early rank at which the late one goes on.
    goal: usize,
    /// Longest stay.
    most: Duration,
    /// True in the pass that is watched.
    is_on: AtomicBool,
    is_late: AtomicBool,
    /// Highest step of the early rank so far, and that when the late rank went on.
    reached: AtomicUsize,
    seen: AtomicUsize,
}

impl BiasFunction for Watch {
    fn fingerprint(&self, into: Fingerprint) -> Fingerprint {
        into.text("watch")
    }

    fn bias(&self, query: &Query, key: &Key) -> f64 {
        let rank = (query.row / ROWS) as usize;
        let owner = (key.row / ROWS) as usize;
        let step = self.of.route.step(rank, owner, RANKS);
        if !self.is_on.load(Ordering::SeqCst) {
            return 0.0;
        }
        if rank == EARLY {
            self.reached.fetch_max(step, Ordering::SeqCst);
            if step == self.of.step - 1 {
                wait(Duration::from_secs(30), || self.is_late.load(Ordering::SeqCst));
            }
        } else if rank == self.of.late
            && step == self.of.step
            && !self.is_late.swap(true, Ordering::SeqCst)
        {
            wait(self.most, || self.reached.load(Ordering::SeqCst) >= self.goal);
            self.seen.store(self.reached.load(Ordering::SeqCst), Ordering::SeqCst);
        }
        0.0
    }
}

fn wait(most: Duration, until: impl Fn() -> bool) {
    let start = Instant::now();
    while !until() && start.elapsed() < most {
        thread::sleep(Duration::from_millis(1));
    }
}

/// Returns the step that the early rank reaches while the late one stays, until `goal` or for
/// `most`.
fn reached(of: Lateness, receive_ahead: usize, goal: usize, most: Duration) -> Result<usize> {
    let watch = Arc::new(Watch {
        of,
        goal,
        most,
        is_on: AtomicBool::new(!of.backward),
        is_late: AtomicBool::new(false),
        reached: AtomicUsize::new(0),
        seen: AtomicUsize::new(0),
    });
    let rows = RANKS * ROWS as usize;
    let mut ring = LocalRing::new(
        (
            Attention::new()
                .bias_function(Arc::clone(&watch) as Arc<dyn BiasFunction>)
                .forward_only(!of.backward),
            Division::new().layout(Layout::Contiguous).route(of.route).receive_ahead(receive_ahead),
            Runtime::new().threads(1),
        ),
        Dims::new(1, rows, 1, 8),
        RANKS,
    )?;
    let x = Array4::<f32>::ones((1, rows, 1, 8));
    let tensors = Tensors::new(x.view(), x.view(), x.view());
    let forward = ring.forward(&tensors)?;
    if of.backward {
        watch.is_on.store(true, Ordering::SeqCst);
        ring.backward(&tensors, &forward, x.view(), None)?;
    }
    Ok(watch.seen.load(Ordering::SeqCst))
}

#[test]
fn each_buffer_lets_a_rank_compute_one_step_beyond_a_late_neighbour() {
    for ahead in 1..=3 {
        let goal = FORWARD.step + ahead;
        let reached = reached(FORWARD, ahead, goal, Duration::from_secs(30)).unwrap();
        assert!(reached >= goal, "{ahead} ahead: step {reached}");
    }
    // one buffer less: not even in 300 ms, many times a step; with more than one the late rank may
    // have posted a receive of a block that the early one would else keep
    let goal = FORWARD.step + 2;
    let reached = reached(FORWARD, 1, goal, Duration::from_millis(300)).unwrap();
    assert_eq!(reached, FORWARD.step + 1);
}

#[test]
fn no_step_waits_for_final_gradients() {
    for ahead in 1..=2 {
        let reached = reached(BACKWARD, ahead, RANKS - 1, Duration::from_secs(30)).unwrap();
        assert_eq!(reached, RANKS - 1, "{ahead} ahead");
    }
}

/// Returns the buffers of each rank's plan, in bytes.
fn buffer_bytes(setup: impl Into<Setup>) -> Vec<u64> {
    let dims = Dims::new(1, RANKS * ROWS as usize, 1, 8);
    let ring = LocalRing::new(setup, dims, RANKS).expect("a ring");
    ring.plans().map(|plan| plan.buffer_bytes()).collect()
}

#[test]
fn each_step_ahead_takes_one_more_block_and_up_to_the_fourth_its_gradients() {
    // keys and values of f32, or dK and dV
    let block = ROWS * 2 * 8 * 4;
    for route in Route::ALL {
        for forward_only in [true, false] {
            let bytes = |receive_ahead: usize| {
                let division = Division::new().layout(Layout::Contiguous).route(route);
                let division = division.receive_ahead(receive_ahead);
                buffer_bytes((Attention::new().forward_only(forward_only), division))
            };
            let one = bytes(1);
            for steps in 2..=5 {
                // sums that are sent; and final gradients, of which a relay has one a pass
                let kinds = if route == Route::Direct { 2 } else { 1 };
                let gradients = if forward_only { 0 } else { kinds * (steps.min(4) - 1) };
                let more = (steps - 1 + gradients) as u64 * block;
                assert_eq!(bytes(steps), one.iter().map(|one| one + more).collect::<Vec<_>>());
            }
            // there are no more blocks to receive than those of the other ranks
            assert_eq!(bytes(RANKS - 1), bytes(1000));
        }
    }
}

#[test]
fn a_balanced_layout_receives_four_steps_ahead_unless_told_otherwise() {
    let dims = Dims::new(1, RANKS * ROWS as usize, 1, 8);
    let documents = Batch { cum_seqlens_q: Some(vec![0, 9, 14, 32]), ..Batch::default() };
    let attention = Attention::new().causal(true);
    let balanced = Division::new().balanced(&attention, dims, &documents, RANKS).unwrap();
    let bytes = |steps: usize| buffer_bytes((&attention, balanced.clone().receive_ahead(steps)));
    assert_eq!(buffer_bytes((&attention, &balanced)), bytes(4));
    assert_ne!(bytes(1), bytes(4));
}
