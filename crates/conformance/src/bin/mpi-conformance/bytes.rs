//! Bytes sent: the transport's count, the schedule's prediction, and a count from every visible
//! pair.
//!
//! The last is derived from [`Mask::visible`], documents and the layouts' definitions only. On a
//! relay a row is forwarded to its last user, and its gradient from the first user to the last and
//! then to the owner. On a direct route each is sent to, and returned by, every user.

use std::collections::BTreeSet;

use annulus::{Attention, Batch, Dims, Division, Layout, Plan, Route, Tensors};
use annulus_comm::mpi::{Mpi, Settings};
use annulus_core::{
    Mask, Result, index,
    mask::{Causal, Key, Query, Window},
};
use ndarray::{Array2, Array4};

use crate::harness::{Harness, Verdict, ensure};

/// Rows of a rank; even, so that the chunks of a zigzag layout have one size.
const SHARD: usize = 16;

/// Masks, layout, and the bytes sent as a fraction of a full ring's.
struct Scenario {
    name: &'static str,
    attention: Attention,
    mask: Box<dyn Mask>,
    /// Returns the document of a row.
    document: fn(usize) -> i32,
    layout: Layout,
    /// (numerator, denominator); `None` if not published.
    share: Option<(usize, usize)>,
    /// Steps in which blocks are sent; `None` if not checked.
    hops: Option<usize>,
}

fn scenarios(ranks: usize) -> [Scenario; 4] {
    let causal = |name, document, layout, share| Scenario {
        name,
        attention: Attention::new().causal(true),
        mask: Box::new(Causal::default()),
        document,
        layout,
        share,
        hops: None,
    };
    let window = SHARD as u64;
    [
        Scenario {
            hops: Some(ranks - 1),
            ..causal("causal, contiguous", |_| 0, Layout::Contiguous, Some((1, 2)))
        },
        causal("causal, zigzag", |_| 0, Layout::Zigzag, Some((3, 4))),
        Scenario {
            attention: Attention::new().sliding_window(window, 0),
            mask: Box::new(Window::new(Some(window), Some(0))),
            hops: Some(1),
            ..causal("window, contiguous", |_| 0, Layout::Contiguous, Some((1, ranks)))
        },
        // documents of 25 rows cross the ends of shards
        causal("packed documents, contiguous", |row| (row / 25) as i32, Layout::Contiguous, None),
    ]
}

/// Bytes of a forward and of a backward pass, summed over ranks where not stated otherwise.
type Bytes = [u64; 2];

pub(crate) fn all(harness: &mut Harness, settings: &Settings) -> Verdict {
    let ranks = harness.ranks();
    if ranks == 1 {
        return Ok(());
    }
    for scenario in scenarios(ranks) {
        let measured = measure(&scenario, settings, ranks).map_err(|error| error.to_string());
        harness.share(
            measured.as_ref().map(drop).map_err(|wrong| format!("{}: {wrong}", scenario.name)),
        )?;
        let (route, hops, [sent, predicted]) = measured?;
        let sum = |harness: &mut Harness, mine: Bytes| -> std::result::Result<Bytes, String> {
            let all = harness.gather(&mine.map(u64::to_le_bytes).concat())?;
            let number = |bytes: &Vec<u8>, pass: usize| {
                bytes[8 * pass..].first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes))
            };
            Ok([0, 1].map(|pass| all.iter().map(|bytes| number(bytes, pass)).sum()))
        };
        let sent = sum(harness, sent)?;
        let predicted = sum(harness, predicted)?;
        let counted = count(&scenario, route, ranks);
        // blocks and gradients are f32, so a full ring's backward is twice its forward
        let full = ((ranks - 1) * ranks * SHARD) as u64 * ROW_BYTES;
        let shared = |(part, whole): (usize, usize)| {
            [full, 2 * full].map(|full| full * part as u64 / whole as u64)
        };
        let right = sent == predicted
            && sent == counted
            && sent[0] > 0
            && scenario.share.is_none_or(|share| sent == shared(share))
            && scenario.hops.is_none_or(|want| hops == want);
        let what = || {
            let Scenario { name, share, .. } = &scenario;
            format!(
                "{name}, {route:?}: sent {sent:?}, predicted {predicted:?}, counted {counted:?}, \
                 {hops} hops; {share:?} of {full}"
            )
        };
        harness.share(ensure(right, what))?;
    }
    Ok(())
}

fn dims(ranks: usize) -> Dims {
    Dims {
        batch: 1,
        q_len: SHARD * ranks,
        kv_len: SHARD * ranks,
        q_heads: 2,
        kv_heads: 1,
        head_dim: 3,
        value_dim: 5,
    }
}

/// Bytes of a row's keys and values, or of their gradients: one KV head of 3 and 5 numbers of f32.
const ROW_BYTES: u64 = (3 + 5) * 4;

/// Runs forward and backward. Returns the route, the steps in which blocks are sent, and this
/// rank's bytes: sent, then predicted.
fn measure(
    scenario: &Scenario,
    settings: &Settings,
    ranks: usize,
) -> Result<(Route, usize, [Bytes; 2])> {
    let dims = dims(ranks);
    let mut plan = Plan::new(
        (&scenario.attention, Division::new().layout(scenario.layout.clone())),
        dims,
        Mpi::world(settings.clone())?,
    )?;
    let rows: Vec<i64> = plan.q_rows().iter().collect();
    let ids = Array2::from_shape_fn((1, rows.len()), |(_, local)| {
        (scenario.document)(index(rows[local].cast_unsigned()))
    });
    plan.update(&Batch {
        q_segment_ids: Some(ids.clone()),
        kv_segment_ids: Some(ids),
        ..Batch::default()
    })?;
    let tensor = |heads, dim| Array4::<f32>::from_elem((1, rows.len(), heads, dim), 0.5);
    let q = tensor(2, 3);
    let k = tensor(1, 3);
    let v = tensor(1, 5);
    let dout = tensor(2, 5);
    let tensors = Tensors::new(q.view(), k.view(), v.view());
    let forward = plan.forward(&tensors)?;
    let backward = plan.backward(&tensors, &forward, dout.view(), None)?;
    let reports = [forward.reports[0], backward.reports[0]];
    let bytes =
        [reports.map(|report| report.bytes_sent), reports.map(|report| report.bytes_predicted)];
    Ok((plan.route(), plan.schedule().hops(), bytes))
}

/// Counts the bytes that must be sent, row by row.
fn count(scenario: &Scenario, route: Route, ranks: usize) -> Bytes {
    let len = SHARD * ranks;
    let owner = |row: usize| match scenario.layout {
        Layout::Zigzag => {
            let chunk = row / (SHARD / 2);
            chunk.min(2 * ranks - 1 - chunk)
        }
        _ => row / SHARD,
    };
    let distance = |from: usize, to: usize| match route {
        Route::RelayDown => (from + ranks - to) % ranks,
        _ => (to + ranks - from) % ranks,
    };
    let mut rows: Bytes = [0, 0];
    for key in 0..len {
        let visible = |query: &usize| {
            let q = Query { batch: 0, head: 0, row: *query as u64, position: *query as i64 };
            let k = Key { row: key as u64, position: key as i64 };
            (scenario.document)(*query) == (scenario.document)(key) && scenario.mask.visible(&q, &k)
        };
        let users: BTreeSet<usize> = (0..len)
            .filter(visible)
            .map(|query| distance(owner(key), owner(query)))
            .filter(|&distance| distance > 0)
            .collect();
        let (Some(&first), Some(&last)) = (users.first(), users.last()) else { continue };
        let [blocks, gradients] = match route {
            Route::Direct => [users.len(), users.len()],
            _ => [last, last - first + 1],
        };
        rows = [rows[0] + blocks as u64, rows[1] + (blocks + gradients) as u64];
    }
    rows.map(|rows| rows * ROW_BYTES)
}
