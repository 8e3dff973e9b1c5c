//! Ranks that are late, and what ranks post before they wait.
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
//!
//! Messages that ranks post, counted by a wrapper of the transport.
//!
//! * All-gathers of a pass: one at its entry and one at its end, whatever the strategy.
//! * Receives that a rank posts before its first tile on the direct route: as many as its buffers
//!   hold, each of which has the size of its blocks.
//! * Sends of later steps on a direct route: how many are in flight while no receiver takes any.
//!
//! ```text
//! rank 0        step 0, of many tiles: sends to rank 1, 2 and 3, of which none is taken
//! other ranks   stay in the first tile of step 0, without a poll, until rank 0 is at its last pair
//! ```

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use annulus::{
    Attention, Batch, Dims, Division, Layout, LocalRing, Plan, Result, Route, Runtime, Setup,
    Tensors,
    bias::BiasFunction,
    mask::{Fingerprint, Key, Query},
    planning::{CustomLayout, Runs},
};
use annulus_comm::{forward_control, forward_transport, threads::Threads};
use annulus_core::{Control, Host, Incoming, Outgoing, Transport};
use annulus_cpu::Cpu;
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

const COUNTED_RANKS: usize = 4;

#[test]
fn a_pass_of_any_strategy_has_two_agreements() -> Result<()> {
    let x = Array4::<f32>::ones((1, 16, 4, 8));
    let tensors = Tensors::new(x.view(), x.view(), x.view());
    for strategy in ["ring", "heads:2", "heads:4", "grid:1x4", "grid:2x2"] {
        let counts = Arc::new(Counts::default());
        let attention = Setup::from((
            Attention::new().causal(true),
            Division::new().strategy(strategy.parse()?),
        ));
        let mut ring = ring(&attention, Dims::new(1, 16, 4, 8), COUNTED_RANKS, &counts)?;
        let agreements =
            || counts.all_gathers.swap(0, Ordering::SeqCst) as f64 / COUNTED_RANKS as f64;
        agreements();
        let forward = ring.forward(&tensors)?;
        assert_eq!(agreements(), 2.0, "{strategy}, forward");
        ring.backward(&tensors, &forward, x.view(), None)?;
        assert_eq!(agreements(), 2.0, "{strategy}, backward");
    }
    Ok(())
}

const POSTING_RANKS: usize = 5;

/// A bias of 0 that notes how many receives rank 0 has posted at its first pair.
#[derive(Debug)]
struct FirstPair {
    counts: Arc<Counts>,
    receives: Arc<AtomicUsize>,
}

impl BiasFunction for FirstPair {
    fn fingerprint(&self, into: Fingerprint) -> Fingerprint {
        into.text("first pair")
    }

    fn bias(&self, query: &Query, _: &Key) -> f64 {
        if query.row == 0 {
            let posted = self.counts.receives.load(Ordering::SeqCst);
            // at later pairs it is not 0
            let ordering = Ordering::SeqCst;
            let _ = self.receives.compare_exchange(0, posted, ordering, ordering);
        }
        0.0
    }
}

/// Returns the receives that rank 0 has posted at its first pair, if the ranks have so many keys,
/// and the bytes of its buffers in keys.
fn posted_and_buffers(keys: [u64; POSTING_RANKS], receive_ahead: usize) -> Result<(usize, u64)> {
    let counts = Arc::new(Counts::default());
    let receives = Arc::new(AtomicUsize::new(0));
    let first_pair = FirstPair { counts: Arc::clone(&counts), receives: Arc::clone(&receives) };
    let mut next = 0;
    let shards = keys.map(|keys| {
        next += keys;
        Runs::counting((next - keys) as i64, keys)
    });
    let queries = (0..POSTING_RANKS as i64).map(|row| Runs::counting(row, 1));
    let layout = CustomLayout { q: queries.collect(), kv: shards.into() };
    let attention = Setup::from((
        Attention::new().bias_function(Arc::new(first_pair)).forward_only(true),
        Division::new()
            .layout(Layout::Custom(layout.into()))
            .route(Route::Direct)
            .receive_ahead(receive_ahead),
    ));
    let kv_len = next as usize;
    let dims = Dims { kv_len, ..Dims::new(1, POSTING_RANKS, 1, 8) };
    let mut ring = ring(&attention, dims, POSTING_RANKS, &counts)?;
    let [q, kv] = [POSTING_RANKS, kv_len].map(|rows| Array4::<f32>::ones((1, rows, 1, 8)));
    ring.forward(&Tensors::new(q.view(), kv.view(), kv.view()))?;
    let bytes = ring.plans().next().map_or(0, |plan| plan.buffer_bytes());
    // keys and values of f32
    Ok((receives.load(Ordering::SeqCst), bytes / (2 * 8 * 4)))
}

#[test]
fn receives_are_posted_as_far_ahead_as_blocks_fit_into_the_memory_of_the_largest() -> Result<()> {
    // the 6 keys of rank 0, and two buffers of 6; so few are not divided into parts
    assert_eq!(posted_and_buffers([6; POSTING_RANKS], 1)?, (2, 18));
    assert_eq!(posted_and_buffers([6; POSTING_RANKS], 3)?, (4, 30));
    // 9 + 2 + 3 + 1 keys in the memory of two blocks of 9
    for others in [[9, 2, 3, 1], [1, 9, 3, 2], [3, 2, 1, 9]] {
        let [a, b, c, d] = others;
        assert_eq!(posted_and_buffers([6, a, b, c, d], 1)?, (4, 21), "{others:?}");
    }
    // 7 + 6 + 5 + 4 keys do not fit into the memory of two blocks of 7, nor do three of them
    assert_eq!(posted_and_buffers([6, 7, 6, 5, 4], 1)?.0, 2);
    Ok(())
}

/// Queries of a rank.
const QUERIES: usize = 4;
const DIM: usize = 64;

/// Bytes of rank 0 in flight.
#[derive(Debug, Default)]
struct SendWindow {
    /// Keys of a rank.
    keys: u64,
    counts: Arc<Counts>,
    /// Bytes that rank 0 has posted at its last pair of step 0.
    seen: AtomicU64,
    is_done: AtomicBool,
}

/// A bias of 0 that keeps all ranks but 0 in their first tile.
#[derive(Debug)]
struct Stay(Arc<SendWindow>);

impl BiasFunction for Stay {
    fn fingerprint(&self, into: Fingerprint) -> Fingerprint {
        into.text("stay")
    }

    fn bias(&self, query: &Query, key: &Key) -> f64 {
        let watch = &self.0;
        let rank = query.row as usize / QUERIES;
        if rank > 0 {
            wait(Duration::from_secs(30), || watch.is_done.load(Ordering::SeqCst));
        } else if key.row + 1 == watch.keys && query.row as usize + 1 == QUERIES {
            watch.seen.store(watch.counts.bytes_sent.load(Ordering::SeqCst), Ordering::SeqCst);
            watch.is_done.store(true, Ordering::SeqCst);
        }
        0.0
    }
}

/// Returns the blocks of `keys` keys that rank 0 has in flight at the end of step 0.
fn in_flight(keys: usize) -> Result<u64> {
    let watch = Arc::new(SendWindow { keys: keys as u64, ..SendWindow::default() });
    let attention = Setup::from((
        Attention::new().bias_function(Arc::new(Stay(Arc::clone(&watch)))).forward_only(true),
        Division::new()
            .layout(Layout::Contiguous)
            .route(Route::Direct)
            .receive_ahead(COUNTED_RANKS - 1),
    ));
    let dims =
        Dims { kv_len: COUNTED_RANKS * keys, ..Dims::new(1, COUNTED_RANKS * QUERIES, 1, DIM) };
    let mut ring = ring(&attention, dims, COUNTED_RANKS, &watch.counts)?;
    let [q, kv] = [COUNTED_RANKS * QUERIES, COUNTED_RANKS * keys]
        .map(|rows| Array4::<f32>::ones((1, rows, 1, DIM)));
    ring.forward(&Tensors::new(q.view(), kv.view(), kv.view()))?;
    // keys and values of f32
    let block = (keys * 2 * DIM * 4) as u64;
    assert_eq!(watch.counts.bytes_sent.load(Ordering::SeqCst), 3 * block);
    Ok(watch.seen.load(Ordering::SeqCst) / block)
}

#[test]
fn long_blocks_are_sent_one_after_another_and_short_ones_at_once() {
    // blocks of 8, 2 and 1 MiB; the window has 4 MiB
    assert_eq!(in_flight(16_384), Ok(1));
    assert_eq!(in_flight(4_096), Ok(2));
    assert_eq!(in_flight(2_048), Ok(3));
}
