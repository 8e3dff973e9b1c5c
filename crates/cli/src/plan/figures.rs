//! Figures of a plan, which are printed, written as JSON or drawn.

use std::{cmp::Reverse, collections::BTreeSet};

use annulus_core::{Error, Result, RowLayout, Side, Spec};
use annulus_plan::{Route, StrategyTraffic};
use serde::Serialize;

use super::{
    PlanFlags,
    program::{LeafFigures, Program},
    ring::{
        BetweenNodes, MOST_DETAILED_RANKS, MOST_LISTED_RANKS, PlannedRing, StepFigures, busy_steps,
    },
    strategies::{PassBytes, Strategies, StrategyFigures},
};
use crate::arguments::mask::MaskFlags;

/// The most queries of a plan. The visible pairs are counted query by query, which takes about a
/// minute for 10⁹ queries in an optimised build, and some seconds for these.
const MOST_QUERIES: u64 = 1 << 28;

/// Figures of all ranks, and of the ring of those with the first heads and the first key column.
#[derive(Debug, Serialize)]
pub(super) struct Figures {
    /// Number of ranks.
    pub(super) ranks: usize,
    /// Name of the strategy: the published one, if there is one.
    pub(super) strategy: String,
    /// Every strategy that ranks and heads admit, the ring first; for more than
    /// [`MOST_LISTED_RANKS`] ranks only the one that was given.
    pub(super) strategies: Vec<StrategyFigures>,
    /// Number of ranks of a ring: of `steps`, `hops` and `direction`.
    pub(super) ring_ranks: usize,
    /// Name of the layout.
    pub(super) layout: &'static str,
    /// Name of the route: `relay-up` (r to r + 1), `relay-down` (r to r − 1), `direct` (owner to
    /// user), or `rails-up` and `rails-down` (over the ranks of nodes).
    direction: &'static str,
    /// Blocks of a forward pass that are sent to other nodes, for several nodes and at most
    /// [`MOST_LISTED_RANKS`] ranks.
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
    pub(super) rows_max_over_mean: f64,
    /// Rows that rings send in a forward pass, divided by the rows that their ranks need of each
    /// other.
    pub(super) redundancy: f64,
    /// Number of packed documents.
    #[serde(skip_serializing_if = "Option::is_none")]
    documents: Option<usize>,
    /// Partial results of leaves, of a reproducible order.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) leaves: Option<LeafFigures>,
    /// True if [`Schedule::check`](annulus_plan::Schedule::check) has proven the messages right,
    /// for a grid [`StrategyTraffic::check`] those of all rings: up to [`MOST_DETAILED_RANKS`].
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
    /// Figures of each rank; for more than [`MOST_LISTED_RANKS`] ranks only of the first with the
    /// least and with the most of each figure, and of the rank of `program`.
    pub(super) per_rank: Vec<RankFigures>,
    /// Program of the requested rank.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) program: Option<Program>,
    /// Figures of at most [`MOST_LISTED_RANKS`] ranks at equal distances, to be drawn.
    #[serde(skip)]
    pub(super) drawn_ranks: Vec<RankFigures>,
    /// Steps of the ring, if it has at most [`MOST_DETAILED_RANKS`] ranks.
    #[serde(skip)]
    pub(super) steps: Vec<StepFigures>,
    /// The route of `direction`.
    #[serde(skip)]
    pub(super) route: Route,
    /// Parts of heads, queries and keys.
    #[serde(skip)]
    pub(super) grid: [usize; 3],
}

/// Bytes of one pass.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct Bytes {
    /// Sent by all ranks.
    pub(super) sent: u128,
    /// Sent if every row went to every rank.
    pub(super) full_ring: u128,
}

/// Figures of one rank.
#[derive(Debug, Clone, Serialize)]
pub(super) struct RankFigures {
    /// The rank.
    pub(super) rank: usize,
    /// Query rows that it owns.
    pub(super) q_rows: u64,
    /// Key rows that it owns.
    pub(super) kv_rows: u64,
    /// Visible pairs of its queries, all heads and batch rows.
    pub(super) pairs: u128,
    /// Its pairs divided by the mean of all ranks.
    pub(super) work_over_mean: f64,
    /// Payload bytes that it sends in a forward pass.
    pub(super) bytes_sent: u128,
    /// Payload bytes that it sends in a backward pass.
    pub(super) backward_bytes_sent: Option<u128>,
}

/// JSON document of the figures.
#[derive(Debug, Serialize)]
struct Document<'a> {
    #[serde(flatten)]
    figures: &'a Figures,
    /// Notes of what is not in the document.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    notes: Vec<String>,
    steps: &'a [StepFigures],
}

impl Figures {
    /// Computes the figures of the strategy that is planned. `ring` is that of the first heads and
    /// key column. With `--rank`, the figures contain the program of that rank.
    ///
    /// # Errors
    /// Those of [`LeafFigures::new`]; an internal error if the messages are wrong.
    pub(super) fn new(
        flags: &PlanFlags,
        spec: &Spec,
        strategies: &Strategies,
        ring: &PlannedRing<'_>,
        node_ranks: Option<usize>,
    ) -> Result<Self> {
        let PlanFlags { rank, mask: MaskFlags { documents, .. }, .. } = flags;
        let traffic = strategies.planned();
        let StrategyTraffic { grid, layout, .. } = traffic;
        let is_grid = grid.members() > 1;
        let has_backward = ring.backward;
        let all = rank_figures(spec, strategies, has_backward);
        let ranks = all.len();
        let [forward, backward] = bytes_of_passes(spec, traffic);
        let work = all.iter().map(|of| of.work_over_mean).fold(0.0, f64::max);
        let pairs_total = strategies.pairs.iter().sum();
        let schedule = ring.schedule()?;
        let nodes = schedule.as_ref().zip(node_ranks.filter(|_| !is_grid));
        let leaves = ring.queries.as_ref().map(|pass| LeafFigures::new(ring, pass));
        Ok(Self {
            ranks,
            strategy: traffic.strategy.published_on(ranks).to_string(),
            strategies: strategies.figures(),
            ring_ranks: grid.groups(),
            layout: layout.of_ranks.name(),
            direction: ring.route.name(),
            between_nodes: nodes
                .map(|(schedule, node_ranks)| BetweenNodes::new(node_ranks, ring, schedule)),
            hops: ring.hops(),
            bytes_sent_total: forward.sent,
            bytes_full_ring_total: forward.full_ring,
            work_max_over_mean: if pairs_total == 0 { 1.0 } else { work },
            rows_max_over_mean: strategies.balance.rows_max_over_mean,
            redundancy: strategies.balance.redundancy,
            documents: (!documents.is_empty()).then_some(documents.len()),
            leaves: leaves.transpose()?,
            schedule_checked: ranks <= MOST_DETAILED_RANKS,
            mask: flags.mask.describe(),
            q_len: spec.dims.q_len,
            kv_len: spec.dims.kv_len,
            pairs_total,
            forward,
            backward: has_backward.then_some(backward),
            passes: is_grid.then(|| PassBytes::of(traffic, spec, has_backward)),
            drawn_ranks: all.iter().step_by(ranks.div_ceil(MOST_LISTED_RANKS)).cloned().collect(),
            per_rank: if ranks <= MOST_LISTED_RANKS { all } else { extremes(&all, *rank) },
            program: rank.map(|rank| Program::new(ring, grid.group(rank))),
            steps: schedule.map_or_else(Vec::new, |schedule| ring.steps(&schedule)),
            route: ring.route,
            grid: [grid.head_parts(), grid.groups(), grid.columns()],
        })
    }

    /// Number of steps up to the last in which a rank computes or forwards a block; at least 1.
    pub(super) fn busy_steps(&self) -> usize {
        // a relay is busy up to its last hop
        let of_route = if self.route.is_relay() { self.hops + 1 } else { self.ring_ranks };
        busy_steps(&self.steps).unwrap_or(of_route)
    }

    /// Returns the JSON document.
    pub(super) fn document(&self) -> impl Serialize {
        let no_steps = (self.ring_ranks > MOST_DETAILED_RANKS).then(|| {
            format!(
                "no steps: more than {MOST_DETAILED_RANKS} ranks; --rank adds the program of one"
            )
        });
        let extremes = (self.ranks > MOST_LISTED_RANKS).then(|| {
            format!(
                "only the ranks with the least and the most of each figure: more than \
                 {MOST_LISTED_RANKS} ranks"
            )
        });
        let notes: Vec<String> = no_steps.into_iter().chain(extremes).collect();
        Document { figures: self, notes, steps: &self.steps }
    }
}

/// Returns the figures of every rank.
fn rank_figures(spec: &Spec, strategies: &Strategies, has_backward: bool) -> Vec<RankFigures> {
    let StrategyTraffic { layout, forward, backward, .. } = strategies.planned();
    let pairs = &strategies.pairs;
    let ranks = pairs.len();
    let mean = pairs.iter().sum::<u128>() as f64 / ranks as f64;
    let of_rank = |(rank, &pairs): (usize, &u128)| {
        let rows = |side, len| layout.of_ranks.shard(side, len, rank, ranks).len();
        RankFigures {
            rank,
            q_rows: rows(Side::Q, spec.dims.q_len),
            kv_rows: rows(Side::Kv, spec.dims.kv_len),
            pairs,
            work_over_mean: if mean > 0.0 { pairs as f64 / mean } else { 0.0 },
            bytes_sent: forward[rank],
            backward_bytes_sent: has_backward.then(|| backward[rank]),
        }
    };
    pairs.iter().enumerate().map(of_rank).collect()
}

/// Selects the first ranks with the least and the most pairs and bytes, and `rank`.
fn extremes(all: &[RankFigures], rank: Option<usize>) -> Vec<RankFigures> {
    let keys: [fn(&RankFigures) -> u128; 3] =
        [|of| of.pairs, |of| of.bytes_sent, |of| of.backward_bytes_sent.unwrap_or_default()];
    let mut shown: BTreeSet<usize> = rank.into_iter().collect();
    for key in keys {
        shown.extend(all.iter().min_by_key(|of| key(of)).map(|of| of.rank));
        shown.extend(all.iter().min_by_key(|of| Reverse(key(of))).map(|of| of.rank));
    }
    shown.into_iter().filter_map(|rank| all.get(rank).cloned()).collect()
}

/// Returns the bytes of a forward and of a backward pass, beside those of a full ring.
fn bytes_of_passes(spec: &Spec, traffic: &StrategyTraffic) -> [Bytes; 2] {
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
