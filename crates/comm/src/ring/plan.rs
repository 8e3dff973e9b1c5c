//! The plan of one rank: what every rank derives alike from the rows of all ranks, and its own
//! steps.

use std::{sync::Arc, time::Instant};

use annulus_core::{
    AgreedLengths, Backend, BackwardMode, DenseMask, Error, KeyLists, LeafMerges, Order,
    RankLeaves, RankShard, ReceivedLists, Result, RowLayout, RowSet, Rows, Shard, Space, Spec,
    leaves_of,
};
use annulus_plan::{Layout, NeedsIndex, RankNeeds, RankSchedule, RingShards, Route, Schedule};

use super::{
    Ring,
    leaf_owners::LeafOwners,
    overlap::{self, SplitSize},
    program::{MessageGroup, RankProgram, RankStep, RecordSizes},
    step_events::{CirculationKind, Observer, StepWatch},
};

/// Maximum number of ranks of which debug builds check the schedule of all ranks, in O(ranks³)
/// time.
const MOST_CHECKED_RANKS: usize = 64;

/// Settings of a ring, equal on all ranks.
pub(super) struct Agreed {
    pub(super) spec: Arc<Spec>,
    pub(super) layout: Layout,
    pub(super) route: Route,
    /// The route that was asked for.
    pub(super) given_route: Option<Route>,
    /// Rank of each ring index.
    pub(super) order: Order,
    /// Rows at multiples of which blocks are split.
    pub(super) split: SplitSize,
    /// True if the plan serves backward passes.
    pub(super) backward: bool,
    /// True if the transports of all ranks post receives ahead.
    pub(super) posts_ahead: bool,
    /// True if the transport of a rank runs groups in order.
    pub(super) groups_in_order: bool,
    /// True if a backward pass sums dsinks and a shared dbias over ranks.
    pub(super) reduces: bool,
    /// Ring steps by which the receive of a block is posted ahead: at least 1, and no more than
    /// there are blocks to receive.
    pub(super) receive_ahead: usize,
    /// Fingerprint of this rank's arithmetic. Equal on all ranks only if the order is reproducible.
    pub(super) numerics: String,
    /// True if the plan serves JVPs and, with `backward`, double backwards.
    pub(super) second_derivatives: bool,
    /// Name of this rank's backend if it has no rounding residual of out.
    pub(super) no_out_residual: Option<&'static str>,
}

impl Agreed {
    /// Returns the queries that are sent together. In the reproducible order the rows of a tile of
    /// queries are the terms of one sum, in which a masked row has its place.
    pub(super) fn query_tile(&self) -> u64 {
        if self.spec.leaf_rows.is_some() { self.split.kv_tile } else { 1 }
    }

    /// Returns true if queries are sent to other ranks: in a two-pass backward.
    pub(super) fn sends_queries(&self, ranks: usize) -> bool {
        self.backward && self.spec.backward == BackwardMode::TwoPass && ranks > 1
    }
}

/// Rows that the lists of all ranks need, as far as this rank takes part.
pub(super) struct ListedNeeds {
    /// Of keys.
    pub(super) keys: RankNeeds,
    /// Of queries, in a two-pass backward: an owner of keys needs those with a pair among them.
    pub(super) queries: RankNeeds,
    /// Lists of the queries of others.
    pub(super) received: Option<Arc<ReceivedLists>>,
}

/// The plan of a batch.
pub(super) struct RingPlan {
    /// Route of the blocks: that of the plan or, with key lists, the direct one.
    pub(super) route: Route,
    /// Rows that key lists need.
    listed: Option<ListedNeeds>,
    /// Shards of all ranks, by ring index.
    pub(super) shards: RingShards,
    /// Steps of keys and values, and of their gradients.
    pub(super) program: RankProgram,
    /// Steps with tangents beside keys and values, and of their gradients, of a plan with second
    /// derivatives.
    pub(super) tangents: Option<RankProgram>,
    /// Steps of the queries: the second pass of a two-pass backward.
    pub(super) query_steps: Vec<RankStep>,
    /// Wire format of a query row.
    pub(super) query_row: RowLayout,
    /// Query rows of this rank.
    pub(super) queries: Arc<Rows>,
    /// Key rows of this rank.
    pub(super) keys: Arc<Rows>,
    /// Maximum rows of a KV block that this rank receives.
    pub(super) most_received: u64,
    /// Maximum rows of a query block that this rank receives.
    pub(super) most_queries_received: u64,
    /// Proof that all ranks derive the same messages, once they have agreed on them, if transports
    /// make use of it.
    pub(super) lengths: Option<AgreedLengths>,
    /// Leaves in the order of their arrival, if the order is reproducible.
    leaves: Option<Arc<RankLeaves>>,
    /// Owners of the leaves of queries, if dsinks is summed over them.
    pub(super) q_leaves: Option<Arc<LeafOwners>>,
    /// Owners of the leaves of keys, if dbias is summed over them.
    pub(super) kv_leaves: Option<Arc<LeafOwners>>,
    spec: Arc<Spec>,
}

impl RingPlan {
    /// Returns the observer of one circulation of a pass that began at `start`.
    pub(super) fn observer<'a>(
        &self,
        watch: &'a mut StepWatch,
        circulation: CirculationKind,
        start: Instant,
        agreed: &Agreed,
        ring_index: usize,
    ) -> Observer<'a> {
        let indices = [agreed.order.rank(ring_index), ring_index];
        watch.observer(circulation, start, &agreed.spec, &self.shards, indices)
    }

    /// Derives the plan of the rank at `ring_index` for a batch whose dense mask has the shape
    /// `attention_mask`, and whose key lists need the rows `listed`. Calls `tick` after every few
    /// microseconds of work, or after the caller's mask has been evaluated some times.
    pub(super) fn derive<S: Space>(
        agreed: &Agreed,
        ring_index: usize,
        shards: RingShards,
        attention_mask: Option<[usize; 4]>,
        listed: Option<ListedNeeds>,
        tick: &mut dyn FnMut(),
    ) -> Result<Self> {
        let Agreed { spec, order, split, backward, .. } = agreed;
        let sends_queries = shards.q.len() > 1;
        let query_row = if spec.leaf_rows.is_some() && sends_queries {
            spec.whole_query_row_layout(attention_mask)
        } else {
            spec.query_row_layout()
        };
        let rows = |shard: &Shard| {
            let mut rows = Rows::default();
            shard.expand(&RowSet::all(shard.rows.len()), &mut rows).map(|()| Arc::new(rows))
        };
        let queries = rows(&shards.q[ring_index])?;
        let keys = rows(&shards.kv[ring_index])?;
        let mut derive = |gradients| match &listed {
            Some(needs) => Ok(RankSchedule::of_needs(&needs.keys, gradients)),
            None => {
                let needs = kv_needs(spec, &shards, tick);
                let route = agreed.route;
                let schedule = RankSchedule::derive(&needs, route, gradients, ring_index, tick);
                // in debug builds only, because no input can violate it
                if cfg!(debug_assertions) && needs.ranks() <= MOST_CHECKED_RANKS {
                    check_schedule(&needs, gradients, ring_index, &schedule)?;
                }
                Ok::<_, Error>(schedule)
            }
        };
        let gradients = gradients_travel(agreed);
        let schedule = derive(gradients)?;
        // a double backward sends gradients, also of a plan whose backward pass sends queries
        let of_tangents = if agreed.second_derivatives && *backward && !gradients {
            Some(derive(true)?)
        } else {
            None
        };
        let head_rows = |schedule: &RankSchedule| {
            if S::HAS_PARTS {
                let shard = (&*queries, &*keys);
                overlap::head_rows(spec, schedule, shard, split.of_tiles())
            } else {
                keys.len() as u64
            }
        };
        let sizes = RecordSizes {
            block: spec.kv_row_layout().bytes(),
            gradient: spec.gradient_row_layout().bytes(),
            split: *split,
        };
        let program = RankProgram::new(&schedule, order, head_rows(&schedule), sizes);
        let tangents = agreed.second_derivatives.then(|| {
            let schedule = of_tangents.as_ref().unwrap_or(&schedule);
            let block = spec.tangent_row_layout().bytes();
            let sizes = RecordSizes { block, ..sizes };
            RankProgram::new(schedule, order, head_rows(schedule), sizes)
        });
        let query_steps = if *backward && spec.backward == BackwardMode::TwoPass {
            query_steps(agreed, ring_index, &shards, &query_row, listed.as_ref(), tick)
        } else {
            Vec::new()
        };
        let most = |steps: &[RankStep]| {
            steps.iter().skip(1).map(|step| step.rows.count()).max().unwrap_or(0)
        };
        let leaves = spec.leaf_rows.map(|rows| {
            Ok(RankLeaves {
                rows,
                keys: leaf_merges(rows, &program.steps, &shards.kv)?,
                queries: leaf_merges(rows, &query_steps, &shards.q)?,
                sends_queries,
            })
        });
        let owners = |is_needed: bool, shards: &[Arc<Shard>]| {
            let leaf_rows = spec.leaf_rows.filter(|_| *backward && is_needed);
            let owners = leaf_rows.map(|rows| LeafOwners::new(rows, shards, ring_index));
            Ok::<_, Error>(owners.transpose()?.map(Arc::new))
        };
        Ok(Self {
            q_leaves: owners(spec.sinks.is_some(), &shards.q)?,
            kv_leaves: owners(matches!(spec.pair_bias(), Some([_, _, 1, 1])), &shards.kv)?,
            leaves: leaves.transpose()?.map(Arc::new),
            lengths: None,
            route: schedule.route,
            listed,
            most_received: most(&program.steps),
            most_queries_received: most(&query_steps),
            shards,
            program,
            tangents,
            query_steps,
            query_row,
            queries,
            keys,
            spec: Arc::clone(spec),
        })
    }

    /// Keeps the proof of all ranks that this plan's messages match, if transports make use of it.
    pub(super) fn agree_on_lengths(&mut self, agreed: &Agreed, lengths: AgreedLengths) {
        self.lengths = agreed.posts_ahead.then_some(lengths);
    }

    /// Returns the bytes of the partial results of leaves that wait to be merged.
    pub(super) fn leaf_bytes(&self, backward: bool) -> u64 {
        self.leaves.as_ref().map_or(0, |leaves| {
            leaves.bytes(&self.spec, self.queries.len() as u64, backward)
                + leaves.gradient_bytes(&self.spec, self.keys.len() as u64)
        })
    }

    /// Returns the input of this rank's backend.
    pub(super) fn rank_shard(
        &self,
        attention_mask: Option<Arc<DenseMask>>,
        key_lists: Option<Arc<KeyLists>>,
    ) -> RankShard {
        RankShard {
            spec: Arc::clone(&self.spec),
            queries: Arc::clone(&self.queries),
            keys: Arc::clone(&self.keys),
            attention_mask,
            received_lists: self.listed.as_ref().and_then(|needs| needs.received.clone()),
            key_lists,
            most_block_rows: self.most_received.max(self.keys.len() as u64),
            most_query_rows: self.most_queries_received.max(self.queries.len() as u64),
            leaves: self.leaves.clone(),
        }
    }

    /// Returns true if ranks sum dsinks, or dbias with one row and one column, leaf by leaf, or that
    /// of a table exactly.
    pub(super) fn has_leaf_sums(&self) -> bool {
        self.q_leaves.is_some() || self.kv_leaves.is_some() || self.spec.sums_bias_exactly()
    }

    /// Returns the bytes of the local query block.
    pub(super) fn local_query_bytes(&self) -> u64 {
        self.queries.len() as u64 * self.query_row.bytes()
    }

    /// Returns the bytes of `rows` gradient records.
    pub(super) fn gradient_bytes(&self, rows: u64) -> u64 {
        rows * self.spec.gradient_row_layout().bytes()
    }
}

impl<B: Backend> Ring<B> {
    /// Returns the number of [`Activity::Compute`](super::Activity::Compute) events of a forward
    /// and of a backward pass: one for each block, or part of one, that this rank computes on.
    pub fn blocks_computed(&self) -> [usize; 2] {
        let RingPlan { program, query_steps, .. } = &self.plan;
        let arrives = |transfers: &MessageGroup| !transfers.receives.is_empty();
        let in_parts = |steps: &[RankStep]| -> usize {
            let later = steps.windows(2).filter(|pair| arrives(&pair[0].kv_in_parts));
            1 + later.map(|pair| pair[1].parts.len().max(1)).sum::<usize>()
        };
        let forward = in_parts(&program.steps);
        let backward = if self.has_two_passes() {
            forward + in_parts(query_steps)
        } else {
            let later = program.steps.iter().filter(|step| arrives(&step.kv)).count();
            1 + later + usize::from(program.tail_rows() > 0)
        };
        [forward, backward]
    }
}

/// Derives the schedule of keys and values of all ranks: of forward, of a one-pass backward with
/// gradients, and of the first pass of a two-pass backward.
pub(super) fn kv_schedule(agreed: &Agreed, plan: &RingPlan) -> Schedule {
    let needs = match &plan.listed {
        Some(needs) => needs.keys.to_needs(),
        None => kv_needs(&agreed.spec, &plan.shards, &mut || ()).to_needs(),
    };
    Schedule::build(&needs, plan.route, gradients_travel(agreed))
}

/// Derives the steps in which queries circulate, the second pass of a two-pass backward.
fn query_steps(
    agreed: &Agreed,
    ring_index: usize,
    shards: &RingShards,
    query_row: &RowLayout,
    listed: Option<&ListedNeeds>,
    tick: &mut dyn FnMut(),
) -> Vec<RankStep> {
    let Agreed { spec, route, order, split, .. } = agreed;
    let mask = spec.mask.as_ref();
    let schedule = match listed {
        Some(needs) => RankSchedule::of_needs(&needs.queries, false),
        None => {
            let needs = NeedsIndex::of_keys(mask, spec.dims.q_heads, spec.dims.batch, shards, tick);
            let needs = needs.in_tiles(agreed.query_tile());
            // a query shard is sent in the opposite direction of the keys, because its users are
            // the owners of the keys that it attends to
            RankSchedule::derive(&needs, route.opposite(), false, ring_index, tick)
        }
    };
    let split = spec.leaf_rows.map_or(*split, |rows| SplitSize { kv_tile: rows, ..*split });
    let sizes = RecordSizes { block: query_row.bytes(), gradient: 0, split: split.of_tiles() };
    let all = shards.q[ring_index].rows.len();
    RankProgram::new(&schedule, order, all, sizes).steps
}

/// Derives the keys that each rank's queries attend to.
fn kv_needs<'a>(spec: &'a Spec, shards: &RingShards, tick: &mut dyn FnMut()) -> NeedsIndex<'a> {
    let mask = spec.mask.as_ref();
    NeedsIndex::of_queries(mask, spec.dims.q_heads, spec.dims.batch, shards, tick)
}

/// Derives the merges of the leaves of `leaf_rows` rows that arrive in these steps.
fn leaf_merges(leaf_rows: u64, steps: &[RankStep], shards: &[Arc<Shard>]) -> Result<LeafMerges> {
    let mut arrivals = Vec::new();
    for step in steps {
        let rows = &shards[step.owner].rows;
        leaves_of(rows, &step.rows, leaf_rows, |leaf| arrivals.push(leaf));
    }
    LeafMerges::of_arrivals(arrivals)
}

/// Checks the schedule of all ranks, and that `derived` is that of the rank at `ring_index`.
fn check_schedule(
    needs: &NeedsIndex<'_>,
    gradients: bool,
    ring_index: usize,
    derived: &RankSchedule,
) -> Result<()> {
    let needs = needs.to_needs();
    let schedule = Schedule::build(&needs, derived.route, gradients);
    schedule.check(&needs, gradients).map_err(Error::internal)?;
    if schedule.of_rank(ring_index) == *derived {
        Ok(())
    } else {
        Err(Error::internal(format!("the steps of ring index {ring_index} are not the schedule's")))
    }
}

/// Returns true if partial gradients are sent: in a one-pass backward.
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
    let mut gathered = RingShards { q: Vec::new(), kv: Vec::new() };
    for (peer, message) in messages.iter().enumerate() {
        let broken =
            || Error::Comm { peer, step: 0, what: "the ids of its rows are malformed".into() };
        let mut rest = &message[..];
        for shards in [&mut gathered.q, &mut gathered.kv] {
            let (len, after) = rest.split_first_chunk::<8>().ok_or_else(broken)?;
            let len = usize::try_from(u64::from_le_bytes(*len)).map_err(|_| broken())?;
            let (encoded, after) = after.split_at_checked(len).ok_or_else(broken)?;
            shards.push(Arc::new(Shard::decode(encoded)?));
            rest = after;
        }
    }
    Ok(RingShards { q: order.by_ring_index(gathered.q), kv: order.by_ring_index(gathered.kv) })
}

/// When groups are posted.
#[derive(Clone, Copy)]
pub(super) struct GroupPace {
    /// Steps by which a receive is posted ahead, at least 1.
    pub(super) ahead: usize,
    /// True if a group is posted whole, and after those before it.
    pub(super) whole_groups: bool,
    /// True if the route sends from the local block in later steps than step 0.
    pub(super) keeps_local: bool,
}

impl GroupPace {
    /// Returns the pace of a pass whose only messages are blocks.
    pub(super) fn new(agreed: &Agreed, plan: &RingPlan) -> Self {
        let &Agreed { receive_ahead: ahead, groups_in_order: whole_groups, .. } = agreed;
        let keeps_local = plan.route.keeps_local(agreed.order.ranks().len());
        Self { ahead, whole_groups, keeps_local }
    }

    /// Returns the pace of a pass that also sends gradients: their groups follow those of blocks,
    /// so where the order counts, none of these comes early.
    pub(super) const fn with_gradients(self) -> Self {
        Self { ahead: if self.whole_groups { 1 } else { self.ahead }, ..self }
    }

    /// Returns true if no step, but buffers alone, bound how far ahead groups are posted.
    pub(super) const fn is_unbounded(self) -> bool {
        self.keeps_local && !self.whole_groups
    }
}
