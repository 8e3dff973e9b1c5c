//! Bytes over the wire: what the transport counted, what the schedule predicts, and what a count of every visible pair says must be sent.
//!
//! The last is derived from [`Mask::visible`], documents and the layouts' definitions alone: on a relay a row goes as far as its last user, its
//! gradient from the first user to the last and home; on a direct route each goes to, and comes from, every user.

use std::collections::BTreeSet;

use annulus::{Attention, Batch, Cpu, Dims, Layout, Plan, Route, Tensors};
use annulus_comm::mpi::{Mpi, Settings};
use annulus_core::{
    Mask, Result, index,
    mask::{Causal, Key, Query, Window},
};
use ndarray::{Array2, Array4};

use crate::harness::{Harness, Verdict, ensure};

/// Rows of a rank; even, so that a zigzag has chunks of one size.
const SHARD: usize = 16;

/// Who sees whom, how rows are dealt, and what part of the full ring is sent.
struct Scenario {
    name: &'static str,
    attention: Attention,
    mask: Box<dyn Mask>,
    /// The document of a row, or one for all.
    document: fn(usize) -> i32,
    layout: Layout,
    /// (numerator, denominator), and the steps in which blocks are sent.
    share: Option<(usize, usize)>,
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
        // documents of 25 rows lie across the edges of shards
        causal("packed documents, contiguous", |row| (row / 25) as i32, Layout::Contiguous, None),
    ]
}

/// The bytes of a forward and of a backward pass, over all ranks.
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
            let number = |bytes: &Vec<u8>, place: usize| {
                bytes[8 * place..].first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes))
            };
            Ok([0, 1].map(|place| all.iter().map(|bytes| number(bytes, place)).sum()))
        };
        let (sent, predicted) = (sum(harness, sent)?, sum(harness, predicted)?);
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
                "{name}, {route:?}: sent {sent:?}, predicted {predicted:?}, counted {counted:?}, {hops} hops; {share:?} of {full}"
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

/// Keys and values of a row, or their gradients: one head of 3 and 5 numbers of f32.
const ROW_BYTES: u64 = (3 + 5) * 4;

/// Forward and backward: the route, the steps with transfers of blocks, and this rank's bytes, sent and predicted.
fn measure(
    scenario: &Scenario,
    settings: &Settings,
    ranks: usize,
) -> Result<(Route, usize, [Bytes; 2])> {
    let dims = dims(ranks);
    let mut plan = Plan::new(
        &scenario.attention.clone().layout(scenario.layout.clone()),
        dims,
        Cpu::new(1)?,
        Mpi::world(settings.clone())?,
    )?;
    let rows: Vec<i64> = plan.q_rows().iter().collect();
    let ids = Array2::from_shape_fn((1, rows.len()), |(_, place)| {
        (scenario.document)(index(rows[place].cast_unsigned()))
    });
    plan.update(&Batch {
        q_segment_ids: Some(ids.clone()),
        kv_segment_ids: Some(ids),
        ..Batch::default()
    })?;
    let tensor = |heads, dim| Array4::<f32>::from_elem((1, rows.len(), heads, dim), 0.5);
    let (q, k, v, dout) = (tensor(2, 3), tensor(1, 3), tensor(1, 5), tensor(2, 5));
    let tensors = Tensors::new(q.view(), k.view(), v.view());
    let forward = plan.forward(&tensors)?;
    let backward = plan.backward(&tensors, &forward, dout.view(), None)?;
    let reports = [forward.reports[0], backward.reports[0]];
    let bytes =
        [reports.map(|report| report.bytes_sent), reports.map(|report| report.bytes_predicted)];
    Ok((plan.ring().route(), plan.ring().schedule().hops(), bytes))
}

/// What must be sent, row by row.
fn count(scenario: &Scenario, route: Route, ranks: usize) -> Bytes {
    let len = SHARD * ranks;
    let holder = |row: usize| match scenario.layout {
        Layout::Zigzag => {
            let chunk = row / (SHARD / 2);
            chunk.min(2 * ranks - 1 - chunk)
        }
        _ => row / SHARD,
    };
    let distance = |from: usize, to: usize| if route == Route::RelayDown { from + ranks - to } else { to + ranks - from } % ranks;
    let mut rows: Bytes = [0, 0];
    for key in 0..len {
        let sees = |query: &usize| {
            let (q, k) = (
                Query { batch: 0, head: 0, row: *query as u64, position: *query as i64 },
                Key { row: key as u64, position: key as i64 },
            );
            (scenario.document)(*query) == (scenario.document)(key) && scenario.mask.visible(&q, &k)
        };
        let users: BTreeSet<usize> = (0..len)
            .filter(sees)
            .map(|query| distance(holder(key), holder(query)))
            .filter(|&far| far > 0)
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
