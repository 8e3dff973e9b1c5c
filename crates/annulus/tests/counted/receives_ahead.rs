//! Receives that a rank posts before its first tile on the direct route: as many as its buffers
//! hold, each of which has the size of its blocks.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use annulus::{
    Attention, BiasFunction, CustomLayout, Dims, Division, Fingerprint, Layout, Result, Route,
    Runs, Setup, Tensors,
    mask::{Key, Query},
};
use ndarray::Array4;

use crate::{Counts, ring};

const RANKS: usize = 5;

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
fn posted_and_buffers(keys: [u64; RANKS], receive_ahead: usize) -> Result<(usize, u64)> {
    let counts = Arc::new(Counts::default());
    let receives = Arc::new(AtomicUsize::new(0));
    let first_pair = FirstPair { counts: Arc::clone(&counts), receives: Arc::clone(&receives) };
    let mut next = 0;
    let shards = keys.map(|keys| {
        next += keys;
        Runs::counting((next - keys) as i64, keys)
    });
    let queries = (0..RANKS as i64).map(|row| Runs::counting(row, 1));
    let layout = CustomLayout { q: queries.collect(), kv: shards.into() };
    let attention = Setup::from((
        Attention::new().bias_function(Arc::new(first_pair)).forward_only(true),
        Division::new()
            .layout(Layout::Custom(layout.into()))
            .route(Route::Direct)
            .receive_ahead(receive_ahead),
    ));
    let kv_len = next as usize;
    let dims = Dims { kv_len, ..Dims::new(1, RANKS, 1, 8) };
    let mut ring = ring(&attention, dims, RANKS, &counts)?;
    let [q, kv] = [RANKS, kv_len].map(|rows| Array4::<f32>::ones((1, rows, 1, 8)));
    ring.forward(&Tensors::new(q.view(), kv.view(), kv.view()))?;
    let bytes = ring.plans().next().map_or(0, |plan| plan.buffer_bytes());
    // keys and values of f32
    Ok((receives.load(Ordering::SeqCst), bytes / (2 * 8 * 4)))
}

#[test]
fn receives_are_posted_as_far_ahead_as_blocks_fit_into_the_memory_of_the_largest() -> Result<()> {
    // the 6 keys of rank 0, and two buffers of 6; so few are not divided into parts
    assert_eq!(posted_and_buffers([6; RANKS], 1)?, (2, 18));
    assert_eq!(posted_and_buffers([6; RANKS], 3)?, (4, 30));
    // 9 + 2 + 3 + 1 keys in the memory of two blocks of 9
    for others in [[9, 2, 3, 1], [1, 9, 3, 2], [3, 2, 1, 9]] {
        let [a, b, c, d] = others;
        assert_eq!(posted_and_buffers([6, a, b, c, d], 1)?, (4, 21), "{others:?}");
    }
    // 7 + 6 + 5 + 4 keys do not fit into the memory of two blocks of 7, nor do three of them
    assert_eq!(posted_and_buffers([6, 7, 6, 5, 4], 1)?.0, 2);
    Ok(())
}
