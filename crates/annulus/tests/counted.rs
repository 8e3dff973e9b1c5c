//! What ranks post, counted by a wrapper of the transport.
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
    Attention, Dims, Division, Layout, LocalRing, Plan, Result, Route, Setup, Tensors,
    bias::BiasFunction,
    mask::{Fingerprint, Key, Query},
    planning::{CustomLayout, Runs},
};
use annulus_comm::{forward_control, forward_transport, threads::Threads};
use annulus_core::{Control, Host, Incoming, Outgoing, Transport};
use annulus_cpu::Cpu;
use ndarray::Array4;

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

const RANKS: usize = 4;

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
        let mut ring = ring(&attention, Dims::new(1, 16, 4, 8), RANKS, &counts)?;
        let agreements = || counts.all_gathers.swap(0, Ordering::SeqCst) as f64 / RANKS as f64;
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

#[derive(Debug, Default)]
struct Watch {
    /// Keys of a rank.
    keys: u64,
    counts: Arc<Counts>,
    /// Bytes that rank 0 has posted at its last pair of step 0.
    seen: AtomicU64,
    is_done: AtomicBool,
}

/// A bias of 0 that keeps all ranks but 0 in their first tile.
#[derive(Debug)]
struct Stay(Arc<Watch>);

impl BiasFunction for Stay {
    fn fingerprint(&self, into: Fingerprint) -> Fingerprint {
        into.text("stay")
    }

    fn bias(&self, query: &Query, key: &Key) -> f64 {
        let watch = &self.0;
        let rank = query.row as usize / QUERIES;
        if rank > 0 {
            let start = Instant::now();
            while !watch.is_done.load(Ordering::SeqCst) && start.elapsed().as_secs() < 30 {
                thread::sleep(Duration::from_millis(1));
            }
        } else if key.row + 1 == watch.keys && query.row as usize + 1 == QUERIES {
            watch.seen.store(watch.counts.bytes_sent.load(Ordering::SeqCst), Ordering::SeqCst);
            watch.is_done.store(true, Ordering::SeqCst);
        }
        0.0
    }
}

/// Returns the blocks of `keys` keys that rank 0 has in flight at the end of step 0.
fn in_flight(keys: usize) -> Result<u64> {
    let watch = Arc::new(Watch { keys: keys as u64, ..Watch::default() });
    let attention = Setup::from((
        Attention::new().bias_function(Arc::new(Stay(Arc::clone(&watch)))).forward_only(true),
        Division::new().layout(Layout::Contiguous).route(Route::Direct).receive_ahead(RANKS - 1),
    ));
    let dims = Dims { kv_len: RANKS * keys, ..Dims::new(1, RANKS * QUERIES, 1, DIM) };
    let mut ring = ring(&attention, dims, RANKS, &watch.counts)?;
    let [q, kv] =
        [RANKS * QUERIES, RANKS * keys].map(|rows| Array4::<f32>::ones((1, rows, 1, DIM)));
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
