//! Sends of later steps on a direct route: how many are in flight while no receiver takes any.
//!
//! ```text
//! rank 0        step 0, of many tiles: sends to rank 1, 2 and 3, of which none is taken
//! other ranks   stay in the first tile of step 0, without a poll, until rank 0 is at its last pair
//! ```

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use annulus::{
    Attention, BiasFunction, Dims, Division, Fingerprint, Layout, Result, Route, Setup, Tensors,
    mask::{Key, Query},
};
use ndarray::Array4;

use crate::{Counts, ring};

const RANKS: usize = 4;
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
