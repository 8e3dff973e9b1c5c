//! Ranks that are late at random: no rank waits forever, and no bit changes.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

use annulus::{
    Attention, Batch, BiasFunction, Dims, Division, Fingerprint, LocalRing, Result, Route, Runtime,
    Tensors,
    mask::{Key, Query},
};
use ndarray::{Array2, Array4};

const RANKS: usize = 12;
const ROWS: usize = 360;

/// A bias that keeps ranks for up to 0.6 ms at some of its pairs, in each pass at others.
#[derive(Debug)]
struct Delays {
    /// Number of the next pair, or `None` for no delays.
    pairs: Option<AtomicU64>,
}

/// Returns a number that looks random.
fn draw(seed: u64) -> u64 {
    let mixed = seed.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mixed = (mixed ^ (mixed >> 31)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed ^ (mixed >> 29)
}

impl BiasFunction for Delays {
    fn fingerprint(&self, into: Fingerprint) -> Fingerprint {
        into.text("delays")
    }

    fn bias(&self, query: &Query, key: &Key) -> f64 {
        if let Some(pairs) = &self.pairs {
            let drawn = draw(pairs.fetch_add(1, Ordering::Relaxed));
            if drawn.is_multiple_of(67) {
                thread::sleep(Duration::from_micros(drawn / 67 % 600));
            }
        }
        ((query.row + 3 * key.row) % 7) as f64 / 7.0
    }
}

/// Returns the ends of packed documents that fill the rows, a fifth of which are long.
fn ends(seed: u64) -> Vec<i64> {
    let mut ends = vec![0];
    let mut next = seed;
    while ends[ends.len() - 1] < ROWS as i64 {
        next = draw(next);
        let len = if next.is_multiple_of(5) { 40 + next % 160 } else { 1 + next % 25 };
        ends.push((ends[ends.len() - 1] + len as i64).min(ROWS as i64));
    }
    ends
}

fn gradients(
    ends: &[i64],
    route: Route,
    receive_ahead: usize,
    delays: Delays,
) -> Result<[Array4<f32>; 4]> {
    let dims = Dims::new(1, ROWS, 2, 8);
    let documents = Batch { cum_seqlens_q: Some(ends.to_vec()), ..Batch::default() };
    let attention = Attention::new().causal(true).bias_function(Arc::new(delays));
    let division = Division::new()
        .balanced(&attention, dims, &documents, RANKS)?
        .route(route)
        .receive_ahead(receive_ahead);
    let runtime = Runtime::new().threads(1);
    let mut ring = LocalRing::new((attention, division, runtime), dims, RANKS)?;
    let ids = (0..ROWS).map(|row| ends.partition_point(|&end| end <= row as i64) as i32);
    let ids = Array2::from_shape_fn((1, ROWS), {
        let ids: Vec<i32> = ids.collect();
        move |(_, row)| ids[row]
    });
    ring.update(&Batch {
        q_segment_ids: Some(ids.clone()),
        kv_segment_ids: Some(ids),
        ..Batch::default()
    })?;
    let tensor = |seed: u64| {
        Array4::from_shape_fn((1, ROWS, 2, 8), |(_, row, head, element)| {
            (draw(seed + (row * 16 + head * 8 + element) as u64) % 2000) as f32 / 1000.0 - 1.0
        })
    };
    let [q, k, v, dout] = [0, 1 << 20, 2 << 20, 3 << 20].map(tensor);
    let tensors = Tensors::new(q.view(), k.view(), v.view());
    let forward = ring.forward(&tensors)?;
    let backward = ring.backward(&tensors, &forward, dout.view(), None)?;
    Ok([forward.out, backward.dq, backward.dk, backward.dv])
}

#[test]
fn random_delays_change_no_bit() -> Result<()> {
    for (seed, route) in (0..).zip([Route::Direct, Route::RelayUp, Route::Direct, Route::RelayDown])
    {
        let ends = ends(seed);
        let want = gradients(&ends, route, 1, Delays { pairs: None })?;
        for receive_ahead in [1, 3] {
            let delays = Delays { pairs: Some(AtomicU64::new(seed << 32)) };
            let got = gradients(&ends, route, receive_ahead, delays)?;
            assert!(got == want, "{route:?}, {receive_ahead} ahead, {ends:?}");
        }
    }
    Ok(())
}
