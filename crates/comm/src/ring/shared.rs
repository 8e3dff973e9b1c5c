//! What all ranks derive alike from everybody's rows: who needs what, and the schedule that brings it.

use std::sync::Arc;

use annulus_core::{BackwardMode, Coordinates, DenseMask, Error, Local, Needs, Order, Result, Route, RowSet, Rows, Schedule, Shard, Spec};

use super::legs::{self, Leg};

/// What all ranks derive alike from a batch.
pub(super) struct Shared {
    pub(super) coordinates: Coordinates,
    /// This rank's part of the schedule of keys and values, with gradients.
    pub(super) legs: Vec<Leg>,
    /// This rank's part of the second pass of a two-pass backward: queries travel.
    pub(super) query_legs: Vec<Leg>,
    /// The most rows of any block of keys that comes to this rank.
    pub(super) most_received: u64,
    /// The most rows of any block of queries that comes to this rank.
    pub(super) most_queries_received: u64,
}

impl Shared {
    /// `coordinates`, and what is derived from them, go by the places of ranks on the ring.
    pub(super) fn derive(spec: &Spec, route: Route, order: &Order, place: usize, coordinates: Coordinates, backward: bool) -> Self {
        let (mask, heads, batch) = (spec.mask.as_ref(), spec.dims.q_heads, spec.dims.batch);
        // all ranks' steps are made and all but this rank's dropped: kept, they would be ranks³ for the ranks of one process
        let [kv_bytes, gradient_bytes] = [spec.kv_record(), spec.gradient_record()].map(|record| record.bytes());
        let legs = legs::legs(&schedule(spec, route, &coordinates, backward), order, place, kv_bytes, gradient_bytes);
        let query_legs = if backward && spec.backward == BackwardMode::TwoPass {
            let needs = Needs::of_keys(mask, heads, batch, &coordinates);
            legs::legs(&Schedule::build(&needs, reverse(route), false), order, place, spec.query_record().bytes(), 0)
        } else {
            Vec::new()
        };
        let most = |legs: &[Leg]| legs.iter().skip(1).map(|leg| leg.rows.count()).max().unwrap_or(0);
        let (most_received, most_queries_received) = (most(&legs), most(&query_legs));
        Self { coordinates, legs, query_legs, most_received, most_queries_received }
    }

    pub(super) fn local(&self, spec: &Arc<Spec>, place: usize, attention_mask: Option<Arc<DenseMask>>) -> Local {
        let rows = |shard: &Shard| {
            let mut rows = Rows::default();
            shard.expand(&RowSet::all(shard.rows.len()), &mut rows);
            Arc::new(rows)
        };
        let own = |shards: &[Arc<Shard>]| shards[place].rows.len();
        Local {
            spec: Arc::clone(spec),
            queries: rows(&self.coordinates.q[place]),
            keys: rows(&self.coordinates.kv[place]),
            attention_mask,
            most_block_rows: self.most_received.max(own(&self.coordinates.kv)),
            most_query_rows: self.most_queries_received.max(own(&self.coordinates.q)),
        }
    }
}

/// Keys and values travel: forward, one-pass backward with gradients, first pass of a two-pass backward.
pub(super) fn schedule(spec: &Spec, route: Route, coordinates: &Coordinates, backward: bool) -> Schedule {
    let needs = Needs::of_queries(spec.mask.as_ref(), spec.dims.q_heads, spec.dims.batch, coordinates);
    Schedule::build(&needs, route, backward && spec.backward == BackwardMode::OnePass)
}

/// Writes the shards of both sides for the other ranks.
pub(super) fn encode_shards(shards: [Shard; 2]) -> Vec<u8> {
    let mut message = Vec::new();
    for encoded in shards.iter().map(Shard::encode) {
        message.extend((encoded.len() as u64).to_le_bytes());
        message.extend(encoded);
    }
    message
}

/// Reads what every rank wrote with [`encode_shards`], and puts it in the order of places.
pub(super) fn decode_shards(messages: &[Vec<u8>], order: &Order) -> Result<Coordinates> {
    let mut coordinates = Coordinates { q: Vec::new(), kv: Vec::new() };
    for (peer, message) in messages.iter().enumerate() {
        let broken = || Error::Comm { peer, step: 0, what: "the ids of its rows came broken".into() };
        let mut rest = &message[..];
        for shards in [&mut coordinates.q, &mut coordinates.kv] {
            let (len, after) = rest.split_first_chunk::<8>().ok_or_else(broken)?;
            let len = usize::try_from(u64::from_le_bytes(*len)).map_err(|_| broken())?;
            let (encoded, after) = after.split_at_checked(len).ok_or_else(broken)?;
            shards.push(Arc::new(Shard::decode(encoded)?));
            rest = after;
        }
    }
    Ok(Coordinates { q: order.by_place(coordinates.q), kv: order.by_place(coordinates.kv) })
}

/// Queries find the keys that they see against the direction in which keys find their queries.
const fn reverse(route: Route) -> Route {
    match route {
        Route::RelayUp => Route::RelayDown,
        Route::RelayDown => Route::RelayUp,
        Route::Direct => Route::Direct,
    }
}
