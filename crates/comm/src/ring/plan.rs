//! The plan of one rank: what all ranks derive alike from everybody's rows, and this rank's part.

use std::sync::Arc;

use annulus_core::{
    BackwardMode, DenseMask, Error, Layout, Needs, Order, RankShard, Result, RingShards, Route,
    RowSet, Rows, Schedule, Shard, Space, Spec,
};

use super::{
    program::{RankProgram, RankStep, RecordSizes},
    tail_overlap,
};

/// What all ranks have agreed upon for the life of the ring.
pub(super) struct Agreed {
    pub(super) spec: Arc<Spec>,
    pub(super) layout: Layout,
    pub(super) route: Route,
    /// Rank of each ring index.
    pub(super) order: Order,
    /// Largest KV tile of all backends, in rows.
    pub(super) kv_tile: u64,
    /// True if the plan serves backward passes.
    pub(super) backward: bool,
}

/// The plan of a batch.
pub(super) struct RingPlan {
    /// Shards of all ranks, by ring index.
    pub(super) shards: RingShards,
    /// Steps of keys and values, and of their gradients.
    pub(super) program: RankProgram,
    /// Steps of the queries: the second pass of a two-pass backward.
    pub(super) query_steps: Vec<RankStep>,
    /// Query rows of this rank.
    pub(super) queries: Arc<Rows>,
    /// Key rows of this rank.
    pub(super) keys: Arc<Rows>,
    /// Maximum rows of a KV block that this rank receives.
    pub(super) most_received: u64,
    /// Maximum rows of a query block that this rank receives.
    pub(super) most_queries_received: u64,
    spec: Arc<Spec>,
}

impl RingPlan {
    /// Derives the plan of the rank at `ring_index`.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub(super) fn derive<S: Space>(
        agreed: &Agreed,
        ring_index: usize,
        shards: RingShards,
    ) -> Result<Self> {
        let Agreed { spec, route, order, kv_tile, backward, .. } = agreed;
        let rows = |shard: &Shard| {
            let mut rows = Rows::default();
            shard.expand(&RowSet::all(shard.rows.len()), &mut rows).map(|()| Arc::new(rows))
        };
        let (queries, keys) = (rows(&shards.q[ring_index])?, rows(&shards.kv[ring_index])?);
        // The steps of all ranks are derived, and all but this rank's dropped: kept, they would
        // take O(ranks³) for the ranks of one process.
        let schedule = kv_schedule(agreed, &shards);
        // O(ranks³), and no input can violate it: in debug builds only
        if cfg!(debug_assertions) {
            let needs = kv_needs(spec, &shards);
            let gradients = gradients_travel(agreed);
            schedule.check(&needs, gradients).map_err(Error::internal)?;
        }
        let head_rows = if S::HAS_PARTS {
            let shard = (&*queries, &*keys);
            tail_overlap::head_rows(spec, &schedule, ring_index, shard, *kv_tile)
        } else {
            keys.len() as u64
        };
        let sizes = RecordSizes {
            block: spec.kv_row_layout().bytes(),
            gradient: spec.gradient_row_layout().bytes(),
            kv_tile: *kv_tile,
        };
        let program = RankProgram::new(&schedule, order, ring_index, head_rows, sizes);
        let query_steps = if *backward && spec.backward == BackwardMode::TwoPass {
            let (mask, dims) = (spec.mask.as_ref(), &spec.dims);
            let needs = Needs::of_keys(mask, dims.q_heads, dims.batch, &shards);
            let schedule = Schedule::build(&needs, reverse(*route), false);
            let sizes = RecordSizes {
                block: spec.query_row_layout().bytes(),
                gradient: 0,
                kv_tile: *kv_tile,
            };
            let all = queries.len() as u64;
            RankProgram::new(&schedule, order, ring_index, all, sizes).steps
        } else {
            Vec::new()
        };
        let most = |steps: &[RankStep]| {
            steps.iter().skip(1).map(|step| step.rows.count()).max().unwrap_or(0)
        };
        let (most_received, most_queries_received) = (most(&program.steps), most(&query_steps));
        Ok(Self {
            shards,
            program,
            query_steps,
            queries,
            keys,
            most_received,
            most_queries_received,
            spec: Arc::clone(spec),
        })
    }

    /// Returns this rank's shard as its backend gets it.
    pub(super) fn rank_shard(&self, attention_mask: Option<Arc<DenseMask>>) -> RankShard {
        RankShard {
            spec: Arc::clone(&self.spec),
            queries: Arc::clone(&self.queries),
            keys: Arc::clone(&self.keys),
            attention_mask,
            most_block_rows: self.most_received.max(self.keys.len() as u64),
            most_query_rows: self.most_queries_received.max(self.queries.len() as u64),
        }
    }

    /// Bytes of so many KV records.
    pub(super) fn kv_bytes(&self, rows: u64) -> u64 {
        rows * self.spec.kv_row_layout().bytes()
    }

    /// Bytes of the local KV block.
    pub(super) fn local_kv_bytes(&self) -> u64 {
        self.kv_bytes(self.keys.len() as u64)
    }

    /// Bytes of the local query block.
    pub(super) fn local_query_bytes(&self) -> u64 {
        self.queries.len() as u64 * self.spec.query_row_layout().bytes()
    }

    /// Bytes of so many gradient records.
    pub(super) fn gradient_bytes(&self, rows: u64) -> u64 {
        rows * self.spec.gradient_row_layout().bytes()
    }
}

/// Schedule of keys and values: of forward, of a one-pass backward with gradients, and of the first
/// pass of a two-pass backward.
pub(super) fn kv_schedule(agreed: &Agreed, shards: &RingShards) -> Schedule {
    Schedule::build(&kv_needs(&agreed.spec, shards), agreed.route, gradients_travel(agreed))
}

/// The keys that each rank's queries attend to.
fn kv_needs(spec: &Spec, shards: &RingShards) -> Needs {
    Needs::of_queries(spec.mask.as_ref(), spec.dims.q_heads, spec.dims.batch, shards)
}

fn gradients_travel(agreed: &Agreed) -> bool {
    agreed.backward && agreed.spec.backward == BackwardMode::OnePass
}

/// Encodes the shards of both sides for the other ranks.
pub(super) fn encode_shards(shards: [Shard; 2]) -> Vec<u8> {
    let mut message = Vec::new();
    for encoded in shards.iter().map(Shard::encode) {
        message.extend((encoded.len() as u64).to_le_bytes());
        message.extend(encoded);
    }
    message
}

/// Decodes every rank's [`encode_shards`], in ring order.
pub(super) fn decode_shards(messages: &[Vec<u8>], order: &Order) -> Result<RingShards> {
    let mut coordinates = RingShards { q: Vec::new(), kv: Vec::new() };
    for (peer, message) in messages.iter().enumerate() {
        let broken =
            || Error::Comm { peer, step: 0, what: "the ids of its rows are malformed".into() };
        let mut rest = &message[..];
        for shards in [&mut coordinates.q, &mut coordinates.kv] {
            let (len, after) = rest.split_first_chunk::<8>().ok_or_else(broken)?;
            let len = usize::try_from(u64::from_le_bytes(*len)).map_err(|_| broken())?;
            let (encoded, after) = after.split_at_checked(len).ok_or_else(broken)?;
            shards.push(Arc::new(Shard::decode(encoded)?));
            rest = after;
        }
    }
    Ok(RingShards {
        q: order.by_ring_index(coordinates.q),
        kv: order.by_ring_index(coordinates.kv),
    })
}

/// Queries travel against the direction in which keys travel to the queries that attend to them.
const fn reverse(route: Route) -> Route {
    match route {
        Route::RelayUp => Route::RelayDown,
        Route::RelayDown => Route::RelayUp,
        Route::Direct => Route::Direct,
    }
}
