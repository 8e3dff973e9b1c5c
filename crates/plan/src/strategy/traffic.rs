//! Bytes that every rank sends under a strategy.

use std::{borrow::Cow, num::NonZeroUsize, ops::Range};

use super::{
    ExchangeFields, GroupLayout, HeadGrid, Strategy, exchange::backward_mode,
    group_layout::in_few_runs, memory,
};
use crate::{Choice, Layout, NeedsIndex, RingShards, RingTraffic, Route, Schedule};
use annulus_core::{
    BackwardMode, Batch, Channel, Dims, Error, Order, Placement, Result, Side, Spec,
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

/// A message of a pass, between ring indices.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PassMessage {
    pub(crate) is_backward: bool,
    /// Step in which it circulates, up to 2 · groups; `None` if members of a group exchange it.
    pub(crate) step: Option<usize>,
    /// True if it has gradients that follow a block.
    pub(crate) has_gradients: bool,
    pub(crate) from: usize,
    pub(crate) to: usize,
    pub(crate) bytes: u128,
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
    /// [`annulus_core::Error::InvalidArgument`] naming `ranks` for more than
    /// [`RingTraffic::MOST_RANKS`], or for a batch that does not fit the layout;
    /// [`annulus_core::Error::OutOfMemory`].
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
    /// given.
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
            is_given && ranks > 1
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
        let layout = GroupLayout::choose(&grid.spec_of(spec, 0), &grid, layout, placement, tick);
        let mut traffic = Self::without_bytes(spec, strategy, grid, options, layout);
        let (mut forward, mut backward) = (traffic.forward.clone(), traffic.backward.clone());
        traffic.ring_rows = traffic.for_each_message(spec, options, tick, &mut |message| {
            let of_pass = if message.is_backward { &mut backward } else { &mut forward };
            of_pass[message.from] += message.bytes;
        })?;
        Ok(Self { forward, backward, ..traffic })
    }

    /// Returns the memory of the form `grid` of a strategy on a layout, without the bytes of ranks.
    pub(super) fn without_bytes(
        spec: &Spec,
        strategy: Strategy,
        grid: HeadGrid,
        options: &TrafficOptions<'_>,
        layout: GroupLayout,
    ) -> Self {
        let backward = options.backward;
        let receive_ahead = options.receive_ahead_of(strategy);
        let memory_max_rank = memory::most_bytes(spec, &grid, &layout, receive_ahead, backward);
        let none = vec![0; grid.groups() * grid.members()];
        let (forward, backward) = (none.clone(), none);
        let ring_rows = RingRows::default();
        Self { strategy, grid, layout, forward, backward, ring_rows, memory_max_rank }
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

    /// Returns the ring steps by which receives of blocks are posted ahead, at least 1.
    pub(crate) fn receive_ahead(&self, options: &TrafficOptions<'_>) -> usize {
        options.receive_ahead_of(self.strategy).max(1)
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

    /// Calls `found` with every message of all passes: exchanges first, then
    /// rings. Returns the block rows of the rings in a forward pass.
    pub(crate) fn for_each_message(
        &self,
        spec: &Spec,
        options: &TrafficOptions<'_>,
        tick: &mut dyn FnMut(),
        found: &mut dyn FnMut(PassMessage),
    ) -> Result<RingRows> {
        let grid = &self.grid;
        self.exchange(&ExchangeFields::of_forward(spec, grid), false, spec, found);
        if options.backward {
            self.exchange(&ExchangeFields::of_backward(spec, grid), true, spec, found);
        }
        let mut rows = RingRows::default();
        if grid.groups() == 1 {
            return Ok(rows);
        }
        // heads with the same mask have the same rings
        let per_head = spec.mask.per_head();
        let alike = if per_head { 1 } else { grid.head_parts() };
        for first in grid.distinct_members(per_head) {
            let RingRows { sent, needed } =
                self.rings(first..first + alike, spec, options, tick, found)?;
            rows.sent += sent * alike as u128;
            rows.needed += needed * alike as u128;
        }
        Ok(rows)
    }

    /// Calls `found` with the messages between the members of each group before and after a pass:
    /// own rows of another member's heads, then another member's rows of the own heads.
    fn exchange(
        &self,
        fields: &ExchangeFields,
        is_backward: bool,
        spec: &Spec,
        found: &mut dyn FnMut(PassMessage),
    ) {
        let grid = &self.grid;
        let members = grid.members();
        let ranks = grid.groups() * members;
        let sides = [(Side::Q, spec.dims.q_len), (Side::Kv, spec.dims.kv_len)];
        let rows = |ring_index| {
            sides.map(|(side, len)| self.layout.of_ranks.shard(side, len, ring_index, ranks).len())
        };
        let rows: Vec<[u64; 2]> = (0..ranks).map(rows).collect();
        // bytes are proportional to rows
        let [before, after] = [&fields.inputs, &fields.outputs].map(|fields| {
            sides.map(|(side, _)| -> u128 {
                let of_side = fields.iter().filter(|field| field.side == side);
                of_side.map(|field| field.bytes(grid, 1)).sum()
            })
        });
        for from in 0..ranks {
            let own = grid.member(from);
            for other in (0..members).filter(|&other| other != own) {
                let to = grid.ring_index(grid.group(from), other);
                let has_keys = grid.shares(Side::Kv, own, other);
                for (row_bytes, [q, kv]) in [(before, rows[from]), (after, rows[to])] {
                    let keys = if has_keys { row_bytes[1] * u128::from(kv) } else { 0 };
                    let bytes = row_bytes[0] * u128::from(q) + keys;
                    if bytes > 0 {
                        let (step, has_gradients) = (None, false);
                        found(PassMessage { is_backward, step, has_gradients, from, to, bytes });
                    }
                }
            }
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

    /// Calls `found` with the messages of the rings of `members`, which are alike. Returns the
    /// block rows of one of them in a forward pass.
    fn rings(
        &self,
        members: Range<usize>,
        spec: &Spec,
        options: &TrafficOptions<'_>,
        tick: &mut dyn FnMut(),
        found: &mut dyn FnMut(PassMessage),
    ) -> Result<RingRows> {
        let TrafficOptions { backward, kv_tile, .. } = *options;
        let grid = &self.grid;
        let first = members.start;
        let spec = &grid.spec_of(spec, first);
        let layout = self.layout.of_member(grid, first);
        let route = self.route(spec, first, options, tick);
        // the bytes depend on the sets of rows alone, unless these are extended to tiles
        let layout = match spec.leaf_rows {
            None => in_few_runs(layout, options.sequences()),
            Some(_) => Cow::Borrowed(layout),
        };
        let shards = options.shards(spec, &layout, grid.groups())?;
        let mut post = |is_backward, step, has_gradients, ends: [usize; 2], bytes| {
            for member in members.clone() {
                let [from, to] = ends.map(|group| grid.ring_index(group, member));
                let step = Some(step);
                found(PassMessage { is_backward, step, has_gradients, from, to, bytes });
            }
        };
        let mask = spec.mask.as_ref();
        let heads = spec.dims.q_heads;
        let batch = spec.dims.batch;
        let needs = NeedsIndex::of_queries(mask, heads, batch, &shards, tick);
        let [block, gradient] = [spec.kv_row_layout(), spec.gradient_row_layout()];
        let one_pass = backward_mode(spec) == BackwardMode::OnePass;
        let mut sent = 0;
        let gradients = backward && one_pass;
        RingTraffic::for_each_message(&needs, route, gradients, tick, |message| {
            let rows = u128::from(message.rows.count());
            let ends = [message.from, message.to];
            if message.channel == Channel::Kv {
                sent += rows;
                post(false, message.step, false, ends, rows * u128::from(block.bytes()));
                if backward {
                    post(true, message.step, false, ends, rows * u128::from(block.bytes()));
                }
            } else {
                // under the tiles of the next step
                post(true, message.step + 1, true, ends, rows * u128::from(gradient.bytes()));
            }
        });
        if backward && !one_pass {
            let needs = NeedsIndex::of_keys(mask, heads, batch, &shards, tick);
            let (needs, row) = match spec.leaf_rows {
                Some(_) => (needs.in_tiles(kv_tile), spec.whole_query_row_layout(None)),
                None => (needs, spec.query_row_layout()),
            };
            let opposite = route.opposite();
            RingTraffic::for_each_message(&needs, opposite, false, tick, |message| {
                let step = grid.groups() + message.step;
                let bytes = u128::from(message.rows.count()) * u128::from(row.bytes());
                post(true, step, false, [message.from, message.to], bytes);
            });
        }
        Ok(RingRows { sent, needed: RingTraffic::rows_read(&needs, tick) })
    }

    /// Proves the ring of every member whose ring differs ([`Schedule::check`]). `options` are those
    /// with which the traffic was computed.
    ///
    /// # Errors
    /// [`Error::Internal`] with the first violation; as [`StrategyTraffic::of`].
    pub fn check(
        &self,
        spec: &Spec,
        options: &TrafficOptions<'_>,
        tick: &mut dyn FnMut(),
    ) -> Result<()> {
        let grid = &self.grid;
        for member in grid.distinct_members(spec.mask.per_head()) {
            let spec = grid.spec_of(spec, member);
            let route = self.route(&spec, member, options, tick);
            let layout = self.layout.of_member(grid, member);
            let shards = options.shards(&spec, layout, grid.groups())?;
            let Dims { q_heads, batch, .. } = spec.dims;
            let mask = spec.mask.as_ref();
            let two_pass = options.backward && backward_mode(&spec) == BackwardMode::TwoPass;
            let gradients = options.backward && !two_pass;
            let keys = NeedsIndex::of_queries(mask, q_heads, batch, &shards, tick);
            check_ring(&keys, route, gradients)?;
            if two_pass {
                let queries = NeedsIndex::of_keys(mask, q_heads, batch, &shards, tick);
                let queries = match spec.leaf_rows {
                    Some(_) => queries.in_tiles(options.kv_tile),
                    None => queries,
                };
                check_ring(&queries, route.opposite(), false)?;
            }
        }
        Ok(())
    }
}

fn check_ring(needs: &NeedsIndex<'_>, route: Route, gradients: bool) -> Result<()> {
    let needs = needs.to_needs();
    Schedule::build(&needs, route, gradients).check(&needs, gradients).map_err(Error::internal)
}
