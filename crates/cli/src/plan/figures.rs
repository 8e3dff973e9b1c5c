//! Figures of a ring, which are printed, written as JSON or drawn.

use std::sync::Arc;

use annulus_core::{Error, Result, RowLayout, Shard, Spec};
use annulus_plan::{NeedsIndex, RingShards, RingTraffic, Route, StrategyTraffic, Traffic, Work};
use serde::Serialize;

use super::{
    Planned,
    between_nodes::BetweenNodes,
    division::{division_in_words, passes_in_words},
    leaves::{LeafFigures, QueryPass},
    limits::{MOST_DETAILED_RANKS, MOST_STEPPED_RANKS},
    program::Program,
    rank_figures::{
        RankFigures, drawn, extremes, most_work_over_mean, rank_figures, rank_figures_of,
    },
    step_figures::{StepFigures, StepSums, busy_steps, checked_schedule, steps},
    strategies::{GridFigures, PassBytes, Strategies, StrategyFigures},
};
use crate::report::{bytes, counted, grouped};

/// The most queries of a plan. The visible pairs are counted query by query, which takes about a
/// minute for 10⁹ queries in an optimised build, and some seconds for these.
const MOST_QUERIES: u64 = 1 << 28;

/// Figures of a ring.
#[derive(Debug, Serialize)]
pub(super) struct Figures {
    /// Number of ranks.
    pub(super) ranks: usize,
    /// Name of the strategy: the published one, if there is one.
    pub(super) strategy: String,
    /// Every strategy that ranks and heads admit, the ring first; for more than
    /// [`MOST_STEPPED_RANKS`] ranks the one that was given, or none for a ring.
    pub(super) strategies: Vec<StrategyFigures>,
    /// Number of ranks of a ring: of `steps`, `hops` and `direction`.
    pub(super) ring_ranks: usize,
    /// Name of the layout.
    pub(super) layout: &'static str,
    /// Name of the route: `relay-up` (r to r + 1), `relay-down` (r to r − 1), `direct` (owner to
    /// user), or `rails-up` and `rails-down` (over the ranks of nodes).
    pub(super) direction: &'static str,
    /// Blocks of a forward pass that are sent to other nodes, for several nodes and at most
    /// [`MOST_STEPPED_RANKS`] ranks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) between_nodes: Option<BetweenNodes>,
    /// Number of steps in which any rank sends a block.
    pub(super) hops: usize,
    /// Payload bytes of a forward pass.
    bytes_sent_total: u128,
    /// Payload bytes of a forward pass that sends every row to every rank.
    bytes_full_ring_total: u128,
    /// Work of the busiest rank divided by the mean.
    pub(super) work_max_over_mean: f64,
    /// Rows of the longest shard divided by the mean, of queries or keys.
    rows_max_over_mean: f64,
    /// Rows that rings send in a forward pass, divided by the rows that their ranks need of each
    /// other.
    redundancy: f64,
    /// Number of packed documents.
    #[serde(skip_serializing_if = "Option::is_none")]
    documents: Option<usize>,
    /// Partial results of leaves, of a reproducible order.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) leaves: Option<LeafFigures>,
    /// True if [`Schedule::check`](annulus_plan::Schedule::check) has proven the messages right,
    /// for a grid [`StrategyTraffic::check`] those of all ranks: up to [`MOST_DETAILED_RANKS`].
    pub(super) schedule_checked: bool,
    /// The mask in words.
    pub(super) mask: String,
    /// Number of queries.
    pub(super) q_len: usize,
    /// Number of keys.
    pub(super) kv_len: usize,
    /// Visible pairs, all heads and batch rows.
    pub(super) pairs_total: u128,
    /// Bytes of the forward pass.
    pub(super) forward: Bytes,
    /// Bytes of the backward pass: KV blocks again, and their gradients or, in the reproducible
    /// order, queries. Null of a plan that is forward only, as are all figures of a backward pass.
    pub(super) backward: Option<Bytes>,
    /// Bytes of the parts of a forward and, if there is one, of a backward pass, if the strategy is
    /// a grid.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) passes: Option<Vec<PassBytes>>,
    /// Figures of each rank; for more than [`MOST_STEPPED_RANKS`] ranks only of the first with the
    /// least and with the most of each figure, and of the rank of `program`.
    pub(super) per_rank: Vec<RankFigures>,
    /// Program of the requested rank.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) program: Option<Program>,
    /// Figures of at most [`MOST_STEPPED_RANKS`] ranks at equal distances, to be drawn.
    #[serde(skip)]
    pub(super) drawn_ranks: Vec<RankFigures>,
    /// Steps, for at most [`MOST_STEPPED_RANKS`] ranks; a document of more than
    /// [`MOST_DETAILED_RANKS`] has [`StepSums`] instead.
    #[serde(skip)]
    pub(super) steps: Vec<StepFigures>,
    /// The route of `direction`.
    #[serde(skip)]
    pub(super) route: Route,
    /// Shards of every rank of a ring.
    #[serde(skip)]
    pub(super) shards: RingShards,
    /// First row of each packed document, and the end of the last.
    #[serde(skip)]
    pub(super) starts: Option<Vec<i64>>,
}

/// Bytes of one pass.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct Bytes {
    /// Sent by all ranks.
    pub(super) sent: u128,
    /// Sent if every row went to every rank.
    pub(super) full_ring: u128,
}

/// JSON document of the figures.
#[derive(Debug, Serialize)]
struct Document<'a> {
    #[serde(flatten)]
    figures: &'a Figures,
    /// Note that the steps are sums, or that there are none.
    #[serde(skip_serializing_if = "Option::is_none")]
    note: Option<String>,
    steps: Steps<'a>,
}

/// Steps of a document.
#[derive(Debug, Serialize)]
#[serde(untagged)]
enum Steps<'a> {
    /// Every rank of every step.
    Detailed(&'a [StepFigures]),
    /// Sums, for more than [`MOST_DETAILED_RANKS`] ranks.
    Summed(Vec<StepSums>),
}

impl Figures {
    /// Replaces the figures of one ring by those of all ranks under the chosen one of `strategies`.
    /// Steps stay those of the ring.
    pub(super) fn of_all_heads(
        self,
        spec: &Spec,
        rank: Option<usize>,
        strategies: &Strategies,
    ) -> Self {
        let all = strategies.figures();
        let Some((traffic, GridFigures { pairs, balance, passes, is_checked, .. })) =
            strategies.grid()
        else {
            return Self { strategies: all, ..self };
        };
        let per_rank = rank_figures_of(spec, traffic, pairs, self.backward.is_some());
        let ranks = per_rank.len();
        let most = most_work_over_mean(&per_rank);
        let [forward, backward] = bytes_of_grid(spec, traffic);
        Self {
            ranks,
            backward: self.backward.map(|_| backward),
            strategy: traffic.strategy.published_on(ranks).to_string(),
            strategies: all,
            layout: traffic.layout.of_ranks.name(),
            bytes_sent_total: forward.sent,
            bytes_full_ring_total: forward.full_ring,
            work_max_over_mean: most,
            rows_max_over_mean: balance.rows_max_over_mean,
            redundancy: balance.redundancy,
            pairs_total: pairs.iter().sum(),
            forward,
            passes: Some(passes.clone()),
            schedule_checked: *is_checked,
            per_rank: if ranks <= MOST_STEPPED_RANKS {
                per_rank
            } else {
                extremes(&per_rank, rank)
            },
            ..self
        }
    }

    /// Plans the ring of `spec`. With a rank, the figures contain that rank's program.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for more queries than [`MOST_QUERIES`], or for a rank outside the
    /// ring.
    pub(super) fn new(spec: &Spec, planned: Planned) -> Result<Self> {
        let Planned { strategy, ranks, backward: has_backward, layout, route, node_ranks, .. } =
            planned;
        let Planned { batch: documents, mask, rank, .. } = planned;
        check_queries(spec)?;
        check_rank(rank, ranks)?;
        let tick = &mut || ();
        let shards = RingShards::of_batch(&spec.dims, spec.alignment, &layout, ranks, &documents)?;
        let heads = spec.dims.q_heads;
        let batch = spec.dims.batch;
        let needs = NeedsIndex::of_queries(spec.mask.as_ref(), heads, batch, &shards, tick);
        let traffic = RingTraffic::of(&needs, route, tick);
        let work = Work::of(spec.mask.as_ref(), heads, batch, &shards);
        let block = spec.kv_row_layout();
        let gradient = spec.gradient_row_layout();
        let forward = |traffic: Traffic| traffic.block_rows * u128::from(block.bytes());
        let backward = |traffic: Traffic| traffic.bytes(&block, &gradient);
        let query_pass = QueryPass::new(spec, route, &shards)?;
        let query_pass = query_pass.as_ref();
        let of_queries = query_pass.map(QueryPass::bytes_of_ranks);
        let all = rank_figures(&shards, &work, |rank| {
            let sent = traffic.of_rank.get(rank).copied().unwrap_or_default();
            let of_backward = || match &of_queries {
                Some(queries) => forward(sent) + queries.get(rank).copied().unwrap_or(0),
                None => backward(sent),
            };
            (forward(sent), has_backward.then(of_backward))
        });
        let program = rank.map(|rank| {
            let queries = query_pass.filter(|_| has_backward);
            Program::derive(spec, &needs, route, rank, has_backward, queries)
        });
        let leaves = query_pass
            .map(|queries| LeafFigures::new(spec, &needs, route, &shards, queries, has_backward))
            .transpose()?;
        let full = Traffic::full_ring(needs.held(), true);
        let total = traffic.total();
        let pass = |of: &dyn Fn(Traffic) -> u128| Bytes { sent: of(total), full_ring: of(full) };
        let forward_bytes = pass(&forward);
        let backward = || match query_pass.zip(of_queries.as_ref()) {
            Some((pass, queries)) => Bytes {
                sent: forward_bytes.sent + queries.iter().sum::<u128>(),
                full_ring: forward_bytes.full_ring + pass.bytes_of_full_ring(),
            },
            None => pass(&backward),
        };
        let few = ranks <= MOST_STEPPED_RANKS;
        let schedule = few.then(|| checked_schedule(&needs, route, has_backward)).transpose()?;
        let between_nodes = schedule.as_ref().zip(node_ranks).map(|(schedule, node_ranks)| {
            let between = BetweenNodes::new(node_ranks, schedule, query_pass, [&block, &gradient]);
            if has_backward { between } else { between.forward_only() }
        });
        let steps = schedule.map_or_else(Vec::new, |schedule| steps(spec, &schedule, &shards));
        Ok(Self {
            between_nodes,
            ranks,
            strategy: strategy.published_on(ranks).to_string(),
            strategies: Vec::new(),
            ring_ranks: ranks,
            layout: layout.name(),
            direction: route.name(),
            hops: traffic.hops,
            bytes_sent_total: forward_bytes.sent,
            bytes_full_ring_total: forward_bytes.full_ring,
            work_max_over_mean: work.max_over_mean(),
            rows_max_over_mean: rows_max_over_mean(&shards),
            redundancy: redundancy(total.block_rows, &needs),
            documents: documents.cum_seqlens_q.as_ref().map(|starts| starts.len() - 1),
            leaves,
            schedule_checked: ranks <= MOST_DETAILED_RANKS,
            mask,
            q_len: spec.dims.q_len,
            kv_len: spec.dims.kv_len,
            pairs_total: work.total(),
            forward: forward_bytes,
            backward: has_backward.then(backward),
            passes: None,
            drawn_ranks: drawn(&all),
            per_rank: if few { all } else { extremes(&all, rank) },
            program,
            steps,
            route,
            shards,
            starts: documents.cum_seqlens_q,
        })
    }

    /// Describes the strategy in one line.
    pub(super) fn strategy_in_words(&self) -> String {
        let Self { strategy, ranks, ring_ranks, .. } = self;
        if ranks == ring_ranks {
            return strategy.clone();
        }
        division_in_words(strategy, self.grid())
    }

    /// Describes the parts of each pass of a grid; of a ring none.
    pub(super) fn passes_in_words(&self) -> Vec<[String; 3]> {
        self.passes.iter().flat_map(|of| passes_in_words(self.grid(), of)).collect()
    }

    /// Returns the parts of heads, queries and keys.
    fn grid(&self) -> [usize; 3] {
        let chosen = self.strategies.iter().find(|of| of.name == self.strategy);
        chosen.map_or([self.ranks / self.ring_ranks, self.ring_ranks, 1], |of| of.grid)
    }

    /// Number of steps up to the last in which a rank computes or forwards a block; at least 1.
    pub(super) fn busy_steps(&self) -> usize {
        // a relay is busy up to its last hop
        let of_route = if self.route.is_relay() { self.hops + 1 } else { self.ranks };
        busy_steps(&self.steps).unwrap_or(of_route)
    }

    /// True if every step of every rank is written and drawn.
    pub(super) const fn is_detailed(&self) -> bool {
        self.ranks <= MOST_DETAILED_RANKS
    }

    /// Formats the figures as JSON.
    pub(super) fn json(&self) -> String {
        let detailed = self.is_detailed();
        let note = if self.ranks <= MOST_STEPPED_RANKS {
            format!("steps are summed over ranks: more than {MOST_DETAILED_RANKS} ranks")
        } else {
            format!(
                "no steps, and only the ranks with the least and the most of each figure: more \
                 than {MOST_STEPPED_RANKS} ranks. --rank adds the program of one rank"
            )
        };
        let steps = if detailed {
            Steps::Detailed(&self.steps)
        } else {
            Steps::Summed(self.steps.iter().map(StepSums::of).collect())
        };
        let document = Document { figures: self, note: (!detailed).then_some(note), steps };
        // cannot fail: all numbers are finite and all keys are strings
        serde_json::to_string_pretty(&document).map(|text| text + "\n").unwrap_or_default()
    }

    /// Describes the ring in one line.
    pub(super) fn title(&self) -> String {
        self.title_of(self.ranks, self.layout)
    }

    /// As [`Figures::title`], with other ranks and their layout.
    pub(super) fn title_of(&self, ranks: usize, layout: &str) -> String {
        let queries = counted(self.q_len as u64, "query", "queries");
        let keys = counted(self.kv_len as u64, "key", "keys");
        let ranks = counted(ranks as u64, "rank", "ranks");
        format!("{} · {queries} × {keys} · {ranks} · {layout} layout", self.mask)
    }

    /// Describes the balance of rows, and the rows sent, in one line.
    pub(super) fn rows_in_words(&self) -> String {
        let Self { rows_max_over_mean, redundancy, .. } = self;
        format!(
            "the longest shard has {rows_max_over_mean:.3} times the mean; {redundancy:.3} rows \
             sent for each row that a rank needs"
        )
    }

    /// Describes the route in one line, after the name of a strategy that has its own.
    pub(super) fn route_in_words(&self) -> String {
        let hops = self.hops_in_words();
        match self.strategy.as_str() {
            "ring" => hops,
            name => format!("{name}: {hops}"),
        }
    }

    /// Describes the route in one line.
    pub(super) fn hops_in_words(&self) -> String {
        let route = match self.route {
            Route::RelayUp => "each rank relays blocks to the next rank (relay-up)",
            Route::RelayDown => "each rank relays blocks to the previous rank (relay-down)",
            Route::Direct => "owners send blocks directly to the ranks that use them (direct)",
            Route::RailsUp { .. } => {
                "blocks pass the ranks of a node, then all move to the next node (rails-up)"
            }
            Route::RailsDown { .. } => {
                "blocks pass the ranks of a node, then all move to the previous node (rails-down)"
            }
            Route::OncePerNode { .. } => {
                "owners send blocks once to each node, whose ranks relay them (once-per-node)"
            }
        };
        match self.hops {
            0 if self.ring_ranks < self.ranks.min(2) => "no hop: nothing circulates".to_owned(),
            0 => "no hop: every rank owns all rows that it needs".to_owned(),
            1 => format!("1 hop; {route}"),
            hops => format!("{} hops; {route}", grouped(hops as u64)),
        }
    }
}

/// Returns the rows of the longest shard divided by the mean, of queries or keys; 1 if there are
/// none.
fn rows_max_over_mean(shards: &RingShards) -> f64 {
    let of_side = |side: &[Arc<Shard>]| {
        let rows = || side.iter().map(|shard| shard.rows.len());
        let total: u64 = rows().sum();
        let most = rows().max().unwrap_or_default();
        if total == 0 { 1.0 } else { most as f64 * side.len() as f64 / total as f64 }
    };
    of_side(&shards.q).max(of_side(&shards.kv))
}

/// Returns the rows sent divided by the rows that ranks need of each other; 1 if they need none.
fn redundancy(sent: u128, needs: &NeedsIndex<'_>) -> f64 {
    let read = RingTraffic::rows_read(needs, &mut || ());
    if read == 0 { 1.0 } else { sent as f64 / read as f64 }
}

/// Returns the bytes of a forward and of a backward pass of a grid, beside those of a full ring.
pub(super) fn bytes_of_grid(spec: &Spec, traffic: &StrategyTraffic) -> [Bytes; 2] {
    let full_ring = |rows: usize, row: &RowLayout| {
        (traffic.forward.len() as u128 - 1) * rows as u128 * u128::from(row.bytes())
    };
    let block = full_ring(spec.dims.kv_len, &spec.kv_row_layout());
    let backward = match spec.leaf_rows {
        Some(_) => full_ring(spec.dims.q_len, &spec.query_row_layout()),
        None => full_ring(spec.dims.kv_len, &spec.gradient_row_layout()),
    };
    let sent = |bytes: &[u128]| bytes.iter().sum();
    [
        Bytes { sent: sent(&traffic.forward), full_ring: block },
        Bytes { sent: sent(&traffic.backward), full_ring: block + backward },
    ]
}

/// Checks that there is a rank of this number.
pub(super) fn check_rank(rank: Option<usize>, ranks: usize) -> Result<()> {
    match rank.filter(|&rank| rank >= ranks) {
        Some(rank) => Err(Error::invalid("rank", rank, format!("a rank of 0 to {}", ranks - 1))),
        None => Ok(()),
    }
}

/// Checks that the pairs of every query can be counted in some seconds.
///
/// # Errors
/// [`Error::InvalidArgument`] for more queries than [`MOST_QUERIES`].
pub(super) fn check_queries(spec: &Spec) -> Result<()> {
    // equal heads are counted once
    let heads = if spec.mask.per_head() { spec.dims.q_heads as u64 } else { 1 };
    if spec.dims.q_len as u64 * heads <= MOST_QUERIES {
        return Ok(());
    }
    let want = format!("at most {MOST_QUERIES}, because plan counts the pairs of each query");
    Err(Error::invalid("q_len", spec.dims.q_len, want))
}

impl Bytes {
    /// Formats the bytes sent and their share of the full ring's.
    pub(super) fn in_words(self) -> String {
        let Self { sent, full_ring } = self;
        let share = if full_ring > 0 {
            format!(
                ", {:.3} of the full ring's {}",
                sent as f64 / full_ring as f64,
                bytes(full_ring)
            )
        } else {
            String::new()
        };
        format!("{} sent{share}", bytes(sent))
    }
}
