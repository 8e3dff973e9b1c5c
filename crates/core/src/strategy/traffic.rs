//! Bytes that every rank sends under a strategy.

use std::{borrow::Cow, num::NonZeroUsize};

use super::{
    ExchangeFields, GroupLayout, HeadGrid, Strategy, exchange::backward_mode,
    group_layout::in_few_runs, memory,
};
use crate::{
    BackwardMode, Batch, Choice, Error, Layout, NeedsIndex, Order, Placement, Result, RingShards,
    RingTraffic, Route, Side, Spec, machine::MOST_STEPPED_RANKS,
};

/// Bytes that every rank sends under a strategy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StrategyTraffic {
    /// The strategy: the ring, one on a route of its own, heads × ring or a grid.
    pub strategy: Strategy,
    /// The grid of the strategy.
    pub grid: HeadGrid,
    /// Rows of ranks and groups.
    pub layout: GroupLayout,
    /// Payload bytes of a forward pass, by ring index.
    pub forward: Vec<u128>,
    /// Payload bytes of a backward pass, by ring index; 0 if there is none.
    pub backward: Vec<u128>,
    /// Block rows of the rings in a forward pass.
    pub ring_rows: RingRows,
    /// Upper bound of the bytes that a rank keeps between passes, besides the memory of its
    /// backend: message buffers and the tensors of its heads.
    pub memory_max_rank: u128,
}

/// Block rows of all rings of a strategy in a forward pass.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RingRows {
    /// Rows that are sent.
    pub sent: u128,
    /// Rows that ranks need of each other, each counted once for every rank that needs it.
    pub needed: u128,
}

/// Figures of the ring of one member over groups.
#[derive(Debug, Clone)]
pub(crate) struct MemberTraffic {
    pub(crate) forward: PassTraffic,
    /// Of no messages if there is no backward pass.
    pub(crate) backward: PassTraffic,
    pub(crate) rows: RingRows,
}

/// Messages of one ring in one pass.
#[derive(Debug, Clone)]
pub(crate) struct PassTraffic {
    /// Bytes that each group sends.
    pub(crate) bytes: Vec<u128>,
    /// Steps in which some group sends a message, at most as many as there are other groups.
    pub(crate) message_steps: usize,
    /// Bytes with which the messages of one group share the links of their receivers, besides
    /// `bytes`: see [`crowded_bytes`].
    pub(crate) crowded: u128,
}

/// Returns the bytes of final gradients of a one-pass backward that arrive together with a block
/// and a partial gradient, all sent by one group. On a relay under a window the last group is the
/// last user of whole shards, one in each of hops − 1 steps, whose owners still receive the blocks
/// and the partial gradients of others; other owners receive their rows in several steps. On a ring
/// without a window all final gradients move in the last step.
fn crowded_bytes(route: Route, groups: usize, hops: usize, shard: u128) -> u128 {
    let is_window = route.is_relay() && hops + 1 < groups;
    if is_window { hops.saturating_sub(1) as u128 * shard } else { 0 }
}

impl PassTraffic {
    fn none(groups: usize) -> Self {
        Self { bytes: vec![0; groups], message_steps: 0, crowded: 0 }
    }

    fn new(bytes: Vec<u128>, message_steps: usize) -> Self {
        let message_steps = message_steps.min(bytes.len().saturating_sub(1));
        Self { bytes, message_steps, crowded: 0 }
    }
}

/// Options of a plan that determine its traffic.
#[derive(Debug, Clone, Copy)]
pub struct TrafficOptions<'a> {
    /// True to plan a backward pass too.
    pub backward: bool,
    /// The layout of the ranks, or `None` to choose one.
    pub layout: Option<&'a Layout>,
    /// The route, or `None` to choose one. A strategy with another one is left out.
    pub route: Option<Route>,
    /// Route of a balanced layout ([`Choice::balanced`]), unless the strategy has its own.
    pub balanced_route: Option<Route>,
    /// Nodes of the ranks, if they are known.
    pub placement: Option<&'a Placement>,
    /// The KV tile of the backends, to multiples of which the query rows of a reproducible backward
    /// pass are sent.
    pub kv_tile: u64,
    /// Ring steps by which receives of blocks are posted ahead, at least 1.
    pub receive_ahead: usize,
    /// Segment ids, positions and packed lengths of all rows, if there are any. A dense mask does
    /// not count.
    pub batch: Option<&'a Batch>,
}

impl TrafficOptions<'static> {
    /// A forward pass whose layout and route are chosen, with KV tiles of one row and receives one
    /// step ahead.
    pub const FORWARD: Self = Self {
        backward: false,
        layout: None,
        route: None,
        balanced_route: None,
        placement: None,
        kv_tile: 1,
        receive_ahead: 1,
        batch: None,
    };
}

impl TrafficOptions<'_> {
    /// Returns the ring steps by which a strategy posts receives of blocks ahead.
    fn receive_ahead_of(&self, strategy: Strategy) -> usize {
        strategy.receive_ahead().map_or(self.receive_ahead, NonZeroUsize::get)
    }

    /// Returns the shards of a ring over `groups` ranks with this layout.
    pub(crate) fn shards(&self, spec: &Spec, layout: &Layout, groups: usize) -> Result<RingShards> {
        match self.batch {
            None => Ok(RingShards::plain(&spec.dims, spec.alignment, layout, groups)),
            Some(batch) => RingShards::of_batch(&spec.dims, spec.alignment, layout, groups, batch),
        }
    }

    /// Returns the ranks of a node, if all nodes have as many and they are neighbours.
    fn node_ranks(&self, ranks: usize) -> Option<usize> {
        let placement = self.placement.filter(|placement| placement.nodes().len() == ranks)?;
        let order = match self.layout {
            Some(_) => Order::ascending(ranks),
            None => placement.order(),
        };
        placement.node_ranks(&order)
    }

    /// Returns the number of packed sequences, 0 without any.
    pub(super) fn sequences(&self) -> usize {
        let starts = self
            .batch
            .and_then(|batch| batch.cum_seqlens_q.as_deref().or(batch.cum_seqlens_k.as_deref()));
        starts.map_or(0, |starts| starts.len().saturating_sub(1))
    }
}

impl StrategyTraffic {
    /// Computes the traffic of `grid`. Calls `tick` between steps of a long computation.
    ///
    /// Dims, layout and batch must have been validated.
    ///
    /// # Errors
    /// [`crate::Error::InvalidArgument`] naming `ranks` for more than [`RingTraffic::MOST_RANKS`],
    /// or for a batch that does not fit the layout; [`crate::Error::OutOfMemory`].
    pub fn of(
        spec: &Spec,
        grid: HeadGrid,
        options: &TrafficOptions<'_>,
        tick: &mut dyn FnMut(),
    ) -> Result<Self> {
        let strategy = grid.strategy();
        Self::of_form(spec, strategy, grid, options, tick)
    }

    /// Returns the traffic of the ring on the routes of [`Strategy::AllGather`] and, if there are
    /// several nodes with as many ranks each, [`Strategy::OncePerNode`]. None if another route is
    /// given, or if there are more ranks than are predicted step by step.
    ///
    /// # Errors
    /// As [`StrategyTraffic::of`].
    pub fn of_routes(
        spec: &Spec,
        ranks: usize,
        options: &TrafficOptions<'_>,
        tick: &mut dyn FnMut(),
    ) -> Result<Vec<Self>> {
        let once_per_node = options.node_ranks(ranks).filter(|&node_ranks| node_ranks > 1);
        let once_per_node = once_per_node.map(|node_ranks| Strategy::OncePerNode { node_ranks });
        let is_open = |strategy: &Strategy| {
            let is_given = options.route.is_none() || options.route == strategy.route();
            is_given && (2..=MOST_STEPPED_RANKS).contains(&ranks)
        };
        std::iter::once(Strategy::AllGather)
            .chain(once_per_node)
            .filter(is_open)
            .map(|strategy| {
                let grid = HeadGrid::new(&spec.dims, ranks, 1)?;
                Self::of_form(spec, strategy, grid, options, tick)
            })
            .collect()
    }

    /// Returns the traffic of one strategy, in bytes and rows of each rank. It keeps its name if it
    /// is a ring on a route of its own. [`Strategy::OncePerNode`] without a number takes the ranks
    /// of a node from the placement.
    ///
    /// # Errors
    /// As [`StrategyTraffic::of`]; [`Error::InvalidArgument`] naming `strategy` if it does not fit
    /// ranks, heads or nodes, or for [`Strategy::Auto`].
    pub fn of_strategy(
        spec: &Spec,
        ranks: usize,
        strategy: Strategy,
        options: &TrafficOptions<'_>,
        tick: &mut dyn FnMut(),
    ) -> Result<Self> {
        let refused = |want: &str| Err(Error::invalid("strategy", strategy, want));
        let Some(grid) = HeadGrid::of(&spec.dims, ranks, strategy)? else {
            return refused("one that was chosen, not auto");
        };
        let strategy = match strategy {
            Strategy::OncePerNode { node_ranks } => {
                let node_ranks = Some(node_ranks).filter(|&given| given > 0);
                match node_ranks.or_else(|| options.node_ranks(ranks)) {
                    Some(node_ranks) if (Route::OncePerNode { node_ranks }).fits(ranks) => {
                        Strategy::OncePerNode { node_ranks }
                    }
                    _ => return refused("several nodes with as many ranks each"),
                }
            }
            Strategy::AllGather => strategy,
            _ => grid.strategy(),
        };
        Self::of_form(spec, strategy, grid, options, tick)
    }

    /// As [`StrategyTraffic::of`], of the form `grid` of a strategy.
    fn of_form(
        spec: &Spec,
        strategy: Strategy,
        grid: HeadGrid,
        options: &TrafficOptions<'_>,
        tick: &mut dyn FnMut(),
    ) -> Result<Self> {
        RingTraffic::check_ranks(grid.groups() * grid.members())?;
        let TrafficOptions { layout, placement, .. } = *options;
        let layout = GroupLayout::choose(&spec.of_member(&grid, 0), &grid, layout, placement, tick);
        let without = Self::without_bytes(spec, strategy, grid, options, layout);
        without.counted(spec, options, tick)
    }

    /// Returns the memory of the form `grid` of a strategy on a layout, without the bytes of ranks,
    /// which a prediction of many ranks does not need.
    pub(crate) fn without_bytes(
        spec: &Spec,
        strategy: Strategy,
        grid: HeadGrid,
        options: &TrafficOptions<'_>,
        layout: GroupLayout,
    ) -> Self {
        let backward = options.backward;
        let receive_ahead = options.receive_ahead_of(strategy);
        let memory_max_rank = memory::most_bytes(spec, &grid, &layout, receive_ahead, backward);
        let (forward, backward) = (Vec::new(), Vec::new());
        let ring_rows = RingRows::default();
        Self { strategy, grid, layout, forward, backward, ring_rows, memory_max_rank }
    }

    /// Counts the bytes of ranks.
    pub(crate) fn counted(
        mut self,
        spec: &Spec,
        options: &TrafficOptions<'_>,
        tick: &mut dyn FnMut(),
    ) -> Result<Self> {
        let grid = self.grid;
        self.add_exchange(spec, options.backward);
        // heads with the same mask have the same rings
        let distinct = |member: usize| match (spec.mask.per_head(), grid.column(member)) {
            (true, _) => member,
            (false, column) => grid.of_column(column).start,
        };
        let mut rings: Vec<MemberTraffic> = Vec::new();
        for member in 0..grid.members() {
            let of_member = spec.of_member(&grid, member);
            rings.push(match rings.get(distinct(member)) {
                Some(same) => same.clone(),
                None => self.of_ring(&of_member, member, options, tick)?,
            });
        }
        for ring_index in 0..self.forward.len() {
            let MemberTraffic { forward, backward, .. } = &rings[grid.member(ring_index)];
            self.forward[ring_index] += forward.bytes[grid.group(ring_index)];
            self.backward[ring_index] += backward.bytes[grid.group(ring_index)];
        }
        for MemberTraffic { rows, .. } in &rings {
            self.ring_rows.sent += rows.sent;
            self.ring_rows.needed += rows.needed;
        }
        Ok(self)
    }

    /// Returns the traffic of every grid over which `spec` can be divided, the ring first.
    ///
    /// # Errors
    /// As [`StrategyTraffic::of`].
    pub fn of_all(
        spec: &Spec,
        ranks: usize,
        options: &TrafficOptions<'_>,
        tick: &mut dyn FnMut(),
    ) -> Result<Vec<Self>> {
        HeadGrid::candidates(spec, ranks, options.backward)
            .into_iter()
            .map(|grid| Self::of(spec, grid, options, tick))
            .collect()
    }

    /// Returns the ring steps by which receives of blocks are posted ahead.
    pub(crate) fn receive_ahead(&self, options: &TrafficOptions<'_>) -> usize {
        options.receive_ahead_of(self.strategy)
    }

    /// Returns the bytes that all ranks send in all passes.
    pub fn total(&self) -> u128 {
        self.forward.iter().chain(&self.backward).sum()
    }

    /// Returns the bytes of the rank that sends the most in all passes.
    pub fn most(&self) -> u128 {
        let ranks = self.forward.iter().zip(&self.backward);
        ranks.map(|(forward, backward)| forward + backward).max().unwrap_or(0)
    }

    fn add_exchange(&mut self, spec: &Spec, backward: bool) {
        let grid = &self.grid;
        let ranks = grid.groups() * grid.members();
        let fields =
            [ExchangeFields::of_forward(spec, grid), ExchangeFields::of_backward(spec, grid)];
        for group in 0..grid.groups() {
            let rows = |member| {
                let of = |side, len| {
                    let ring_index = grid.ring_index(group, member);
                    self.layout.of_ranks.shard(side, len, ring_index, ranks).len()
                };
                [of(Side::Q, spec.dims.q_len), of(Side::Kv, spec.dims.kv_len)]
            };
            let rows: Vec<[u64; 2]> = (0..grid.members()).map(rows).collect();
            let [forward, of_backward] =
                fields.each_ref().map(|fields| fields.bytes_sent_by_members(grid, &rows));
            self.forward.extend(forward);
            self.backward.extend(of_backward.iter().map(|&sent| if backward { sent } else { 0 }));
        }
    }

    /// Returns the route of the ring of one member, given or chosen; `spec` is that of the member.
    /// Without given rails that fit, these are chosen without members only: the ranks of a ring
    /// over groups may be on any nodes.
    pub fn route(
        &self,
        spec: &Spec,
        member: usize,
        options: &TrafficOptions<'_>,
        tick: &mut dyn FnMut(),
    ) -> Route {
        let of_nodes = options
            .placement
            .filter(|_| self.grid.members() == 1)
            .and_then(|placement| placement.node_ranks(&self.layout.order));
        let chosen = |tick: &mut dyn FnMut()| {
            let layout = self.layout.of_member(&self.grid, member);
            // by ring index, in which the ranks of a node are neighbours
            let placed = of_nodes.map(|size| {
                Placement::new((0..self.grid.groups()).map(|index| index / size).collect())
            });
            let groups = self.grid.groups();
            Choice::auto(spec, groups, Some(layout), placed.as_ref(), tick).route
        };
        let given = self.strategy.route().or(options.route).or(options.balanced_route);
        let given = given.map(|route| route.with_node_ranks(of_nodes.unwrap_or(0)));
        given.filter(|route| route.fits(self.grid.groups())).unwrap_or_else(|| chosen(tick))
    }

    /// Returns the figures of the ring of one member. `spec` is that of the member.
    pub(crate) fn of_ring(
        &self,
        spec: &Spec,
        member: usize,
        options: &TrafficOptions<'_>,
        tick: &mut dyn FnMut(),
    ) -> Result<MemberTraffic> {
        let TrafficOptions { backward, kv_tile, .. } = *options;
        let groups = self.grid.groups();
        if groups == 1 {
            let rows = RingRows::default();
            let none = PassTraffic::none(1);
            return Ok(MemberTraffic { forward: none.clone(), backward: none, rows });
        }
        let layout = self.layout.of_member(&self.grid, member);
        let route = self.route(spec, member, options, tick);
        // the bytes depend on the sets of rows alone, unless these are extended to tiles
        let layout = match spec.leaf_rows {
            None => in_few_runs(layout, options.sequences()),
            Some(_) => Cow::Borrowed(layout),
        };
        let shards = options.shards(spec, &layout, groups)?;
        let mask = spec.mask.as_ref();
        let heads = spec.dims.q_heads;
        let batch = spec.dims.batch;
        let needs = NeedsIndex::of_queries(mask, heads, batch, &shards, tick);
        let traffic = RingTraffic::of(&needs, route, tick);
        let sent = traffic.total().block_rows;
        let rows = RingRows { sent, needed: RingTraffic::rows_read(&needs, tick) };
        let RingTraffic { of_rank: traffic, hops } = traffic;
        let block = spec.kv_row_layout();
        let kv = |rows: u128| rows * u128::from(block.bytes());
        let bytes = traffic.iter().map(|sent| kv(sent.block_rows)).collect();
        let forward = PassTraffic::new(bytes, hops);
        let backward = if !backward {
            PassTraffic::none(groups)
        } else if backward_mode(spec) == BackwardMode::OnePass {
            let gradient = spec.gradient_row_layout();
            let bytes = traffic.iter().map(|sent| sent.bytes(&block, &gradient)).collect();
            let longest = needs.held().iter().copied().max().unwrap_or(0);
            let shard = u128::from(longest) * u128::from(gradient.bytes());
            let crowded = crowded_bytes(route, groups, hops, shard);
            // the last gradients move a step after the last block
            let steps = if hops == 0 { 0 } else { hops + 1 };
            PassTraffic { crowded, ..PassTraffic::new(bytes, steps) }
        } else {
            let needs = NeedsIndex::of_keys(mask, heads, batch, &shards, tick);
            let (needs, row) = match spec.leaf_rows {
                Some(_) => (needs.in_tiles(kv_tile), spec.whole_query_row_layout(None)),
                None => (needs, spec.query_row_layout()),
            };
            let queries = RingTraffic::of(&needs, route.opposite(), tick);
            let of_queries = |rows: u128| rows * u128::from(row.bytes());
            let sent = traffic.iter().zip(&queries.of_rank);
            let bytes = sent
                .map(|(keys, queries)| kv(keys.block_rows) + of_queries(queries.block_rows))
                .collect();
            PassTraffic::new(bytes, hops + queries.hops)
        };
        Ok(MemberTraffic { forward, backward, rows })
    }
}
