//! What all ranks derive alike from everybody's rows: who needs what, and the schedule that brings it.

use std::sync::Arc;

use annulus_core::{
    BackwardMode, Coordinates, DenseMask, Error, Local, Needs, Order, Result, Route, RowSet, Rows, Schedule, Shard, Space, Spec,
};

use super::{
    legs::{self, Leg, Way},
    split,
};

/// What all ranks derive alike from a batch.
pub(super) struct Shared {
    pub(super) coordinates: Coordinates,
    /// This rank's part of the schedule of keys and values, with gradients.
    pub(super) way: Way,
    /// This rank's part of the second pass of a two-pass backward: queries travel.
    pub(super) query_legs: Vec<Leg>,
    /// This rank's rows.
    pub(super) queries: Arc<Rows>,
    pub(super) keys: Arc<Rows>,
    /// The most rows of any block of keys that comes to this rank.
    pub(super) most_received: u64,
    /// The most rows of any block of queries that comes to this rank.
    pub(super) most_queries_received: u64,
}

impl Shared {
    /// `coordinates`, and what is derived from them, go by the places of ranks on the ring.
    pub(super) fn derive<S: Space>(
        spec: &Spec,
        route: Route,
        order: &Order,
        place: usize,
        coordinates: Coordinates,
        backward: bool,
    ) -> Self {
        let (mask, heads, batch) = (spec.mask.as_ref(), spec.dims.q_heads, spec.dims.batch);
        let rows = |shard: &Shard| {
            let mut rows = Rows::default();
            shard.expand(&RowSet::all(shard.rows.len()), &mut rows);
            Arc::new(rows)
        };
        let (queries, keys) = (rows(&coordinates.q[place]), rows(&coordinates.kv[place]));
        // all ranks' steps are made and all but this rank's dropped: kept, they would be ranks³ for the ranks of one process
        let schedule = schedule(spec, route, &coordinates, backward);
        let early = if S::HAS_PARTS { split::early_rows(spec, &schedule, place, &queries, &keys) } else { keys.len() as u64 };
        let way = legs::way(&schedule, order, place, early, spec.kv_record().bytes(), spec.gradient_record().bytes());
        let query_legs = if backward && spec.backward == BackwardMode::TwoPass {
            let needs = Needs::of_keys(mask, heads, batch, &coordinates);
            legs::way(&Schedule::build(&needs, reverse(route), false), order, place, queries.len() as u64, spec.query_record().bytes(), 0)
                .legs
        } else {
            Vec::new()
        };
        let most = |legs: &[Leg]| legs.iter().skip(1).map(|leg| leg.rows.count()).max().unwrap_or(0);
        let (most_received, most_queries_received) = (most(&way.legs), most(&query_legs));
        Self { coordinates, way, query_legs, queries, keys, most_received, most_queries_received }
    }

    pub(super) fn local(&self, spec: &Arc<Spec>, attention_mask: Option<Arc<DenseMask>>) -> Local {
        Local {
            spec: Arc::clone(spec),
            queries: Arc::clone(&self.queries),
            keys: Arc::clone(&self.keys),
            attention_mask,
            most_block_rows: self.most_received.max(self.keys.len() as u64),
            most_query_rows: self.most_queries_received.max(self.queries.len() as u64),
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
