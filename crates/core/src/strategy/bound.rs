//! Lower bounds of the bytes and the time of a grid, by which grids are left out of a choice.
//!
//! ```text
//! exchange   rows · (members − 1) · bytes of a row, of queries; of keys with the members of a
//!            column: exact, whatever the layout
//! ring       queries of a group need as many keys as its busiest query attends to, and so at least
//!            visible pairs / rows of the group; over all groups at least
//!                pairs / rows of the largest group − rows of all
//!            keys are received, in a backward pass also their gradients sent
//! time       the mean over ranks of the tiles and of the exchange, which overlaps no tiles; of
//!            many ranks, whose exchange is predicted as a sum over rounds, this sum with the rows
//!            of the mean rank, and the ring's bytes over the fastest link or as a delay of tiles
//! ```
//! The best grid has at most the bytes of any other, so a grid with a larger bound than those of
//! one that was computed is not the best. Grids are computed in the order of their bounds until one
//! exceeds the best.

use super::{ExchangeFields, HeadGrid, TrafficOptions, exchange::backward_mode};
use crate::{
    BackwardMode, Dims, Layout, Machine, Result, Side, Spec, Work,
    machine::{ExchangeRounds, Exchanged, MOST_STEPPED_RANKS, agreement, pair_seconds},
};

/// Figures of a spec and its ranks that bound all grids.
pub(crate) struct Bounds<'a> {
    spec: &'a Spec,
    options: &'a TrafficOptions<'a>,
    ranks: usize,
    /// Visible pairs of a head and batch row, in the mean; `None` if they have no closed form.
    pairs: Option<u128>,
}

impl<'a> Bounds<'a> {
    pub(crate) fn new(spec: &'a Spec, ranks: usize, options: &'a TrafficOptions<'a>) -> Self {
        let Dims { q_heads, batch, .. } = spec.dims;
        let pairs = options.batch.is_none().then(|| Work::closed_form_total(spec)).flatten();
        let pairs = pairs.map(|pairs| pairs / (q_heads as u128 * batch as u128).max(1));
        Self { spec, options, ranks, pairs }
    }

    /// Returns the bytes that the exchange of a grid sends in all passes, exactly.
    pub(crate) fn exchange_bytes(&self, grid: &HeadGrid) -> u128 {
        let Self { spec, options, .. } = *self;
        let forward = ExchangeFields::of_forward(spec, grid);
        let backward = options.backward.then(|| ExchangeFields::of_backward(spec, grid));
        let fields = std::iter::once(forward).chain(backward);
        let bytes = |fields: ExchangeFields| {
            let all = fields.inputs.into_iter().chain(fields.outputs);
            let of = all.map(|field| match field.side {
                Side::Q => field.bytes(grid, spec.dims.q_len as u64) * (grid.members() as u128 - 1),
                Side::Kv => {
                    field.bytes(grid, spec.dims.kv_len as u64) * (grid.head_parts() as u128 - 1)
                }
            });
            of.sum::<u128>()
        };
        fields.map(bytes).sum()
    }

    /// Returns the fewest bytes that the rings of a grid can send in all passes.
    fn ring_bytes(&self, grid: &HeadGrid) -> u128 {
        let Self { spec, options, .. } = *self;
        let (Some(pairs), true) = (self.pairs, grid.groups() > 1) else { return 0 };
        let rows = (pairs / self.most_rows(grid)).saturating_sub(spec.dims.kv_len as u128);
        let member = spec.of_member(grid, 0);
        let block = rows * u128::from(member.kv_row_layout().bytes());
        let one_pass = backward_mode(spec) == BackwardMode::OnePass;
        let of_backward = match (options.backward, one_pass) {
            (false, _) => 0,
            (true, true) => block + rows * u128::from(member.gradient_row_layout().bytes()),
            (true, false) => block,
        };
        (block + of_backward) * grid.head_parts() as u128
    }

    /// Returns an upper bound of the query rows of a group.
    fn most_rows(&self, grid: &HeadGrid) -> u128 {
        let all = (self.spec.dims.q_len as u128).max(1);
        let is_even = match self.options.layout {
            None | Some(Layout::Contiguous | Layout::Zigzag | Layout::Striped) => {
                self.spec.leaf_rows.is_none()
            }
            Some(_) => false,
        };
        // a rank has the mean, and one row more for each of its at most two chunks
        let of_rank = all / self.ranks.max(1) as u128 + 2;
        if is_even { all.min(of_rank * grid.members() as u128) } else { all }
    }

    /// Returns the fewest bytes that a grid can send in all passes.
    pub(crate) fn bytes(&self, grid: &HeadGrid) -> u128 {
        self.exchange_bytes(grid) + self.ring_bytes(grid)
    }

    /// Returns the least seconds that a grid can take on a machine.
    ///
    /// # Errors
    /// [`crate::Error::InvalidArgument`] naming `machine` if it has no rate of the element type.
    pub(crate) fn seconds(&self, grid: &HeadGrid, machine: &Machine) -> Result<f64> {
        let Self { spec, options, ranks, .. } = *self;
        let compute = self.compute_seconds(machine)?;
        let links = || machine.inside_node.iter().chain(&machine.between_nodes);
        let bandwidth = links().map(|link| link.bandwidth).fold(0.0, f64::max);
        let bytes = self.exchange_bytes(grid) as f64 / ranks.max(1) as f64;
        let exchange = if bandwidth > 0.0 { bytes / bandwidth } else { 0.0 };
        // a message with each other member before and after each pass, if every rank has rows
        let passes = if options.backward { 2 } else { 1 };
        let rounds = if spec.dims.q_len < ranks { 0 } else { passes * 2 * (grid.members() - 1) };
        let latency = links().map(|link| link.latency).fold(f64::INFINITY, f64::min);
        let latencies = if rounds > 0 { rounds as f64 * latency } else { 0.0 };
        Ok((compute + exchange + latencies) * ESTIMATED)
    }

    /// Returns the least seconds that a grid of many ranks can take on a machine, whose ranks have
    /// the rows of `layout`.
    pub(crate) fn seconds_of_many(
        &self,
        grid: &HeadGrid,
        machine: &Machine,
        layout: &Layout,
    ) -> Result<f64> {
        // pairs of queries with consecutive keys are counted, not estimated
        let is_counted = matches!(layout.without_leaves(), Layout::Contiguous | Layout::Zigzag);
        let share = if is_counted { 1.0 } else { ESTIMATED };
        let ring = self.ring_seconds(grid, machine, self.compute_seconds(machine)? * share);
        Ok((ring + self.rounds_seconds(grid, machine)) * ROUNDED)
    }

    /// Returns the mean over ranks of the seconds of all tiles.
    fn compute_seconds(&self, machine: &Machine) -> Result<f64> {
        let Self { spec, options, ranks, .. } = *self;
        let Dims { q_heads, batch, .. } = spec.dims;
        let pairs = self.pairs.unwrap_or(0) as f64 * (q_heads * batch) as f64;
        Ok(pairs * pair_seconds(spec, machine, options.backward)? / ranks.max(1) as f64)
    }

    /// Returns the least seconds of the rings of many ranks, whose tiles take `compute` seconds in
    /// the mean. In mean steps every byte that a rank sends or receives delays its tiles.
    fn ring_seconds(&self, grid: &HeadGrid, machine: &Machine, compute: f64) -> f64 {
        let bytes = self.ring_bytes(grid) as f64 / self.ranks.max(1) as f64;
        let links = machine.inside_node.iter().chain(&machine.between_nodes);
        let bandwidth = links.map(|link| link.bandwidth).fold(0.0, f64::max);
        let messages = if bytes > 0.0 { bytes / bandwidth } else { 0.0 };
        if grid.groups() <= MOST_STEPPED_RANKS {
            return compute.max(messages);
        }
        (compute + 2.0 * bytes * machine.message_overhead).max(messages)
    }

    /// Returns the seconds of the agreements and exchanges of all passes of many ranks, of which
    /// each has the rows of the mean rank.
    fn rounds_seconds(&self, grid: &HeadGrid, machine: &Machine) -> f64 {
        let Self { spec, options, ranks, .. } = *self;
        let node_ranks = machine.node_ranks(ranks, options.placement);
        let rounds = ExchangeRounds { grid, machine, node_ranks };
        let rows = [spec.dims.q_len, spec.dims.kv_len].map(|rows| (rows / ranks.max(1)) as u64);
        let agreed = 2.0 * agreement(grid, machine, node_ranks).seconds;
        let merge_bandwidth = machine.merge_bandwidth.filter(|_| grid.columns() > 1);
        let of_pass = |fields: ExchangeFields, is_forward: bool| {
            let [inputs, outputs] =
                [&fields.inputs, &fields.outputs].map(|fields| Exchanged { fields, rows });
            let partial = fields.partial(is_forward).iter().map(|field| field.bytes(grid, rows[0]));
            let partial = partial.sum::<u128>() as f64;
            let merge = merge_bandwidth.map_or(0.0, |bandwidth| partial / bandwidth);
            agreed
                + rounds.of_messages(&inputs).seconds
                + rounds.of_partial(&outputs, merge).seconds
        };
        let forward = of_pass(ExchangeFields::of_forward(spec, grid), true);
        let backward =
            options.backward.then(|| of_pass(ExchangeFields::of_backward(spec, grid), false));
        forward + backward.unwrap_or(0.0)
    }
}

/// Share of the seconds of many ranks that is compared: predictions add them in another order.
const ROUNDED: f64 = 1.0 - 1e-9;

/// Share of the seconds of tiles that is compared: predictions estimate the work of some layouts
/// from 16,384 queries, each of which represents those up to the next. Under a causal mask they
/// find one part in 16,384 less.
const ESTIMATED: f64 = 1.0 - 1.0 / 8192.0;

/// Computes candidates in the order of their bounds, until a bound exceeds the best of the costs
/// that `evaluate` returned; `None` is the cost of one that cannot be chosen. Returns the indices
/// of those that were computed, ascending.
pub(crate) fn best_first<K: PartialOrd + Copy>(
    bounds: &[K],
    mut evaluate: impl FnMut(usize) -> Result<Option<K>>,
) -> Result<Vec<usize>> {
    let mut order: Vec<usize> = (0..bounds.len()).collect();
    order.sort_by(|&a, &b| bounds[a].partial_cmp(&bounds[b]).unwrap_or(std::cmp::Ordering::Equal));
    let mut best: Option<K> = None;
    let mut computed = Vec::new();
    for index in order {
        if best.is_some_and(|best| bounds[index] > best) {
            break;
        }
        if let Some(cost) = evaluate(index)?
            && best.is_none_or(|best| cost < best)
        {
            best = Some(cost);
        }
        computed.push(index);
    }
    computed.sort_unstable();
    Ok(computed)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::{
        ComputeRate, DType, Link, Prediction, StrategyTraffic,
        mask::{self, SharedMask},
        needs::samples::Sample,
    };

    fn specs() -> Vec<Spec> {
        let causal: SharedMask = Arc::new(mask::Causal::default());
        let window = mask::and(causal.clone(), Arc::new(mask::Window::new(Some(100), None)));
        let masks = [causal, window, Arc::new(mask::Everything), Arc::new(Sample::Parity)];
        let mut specs = Vec::new();
        for (index, mask) in masks.into_iter().enumerate() {
            for (q_heads, kv_heads) in [(8, 8), (8, 2), (2, 1)] {
                for (q_len, kv_len) in [(480, 480), (24, 960)] {
                    let dims = Dims { q_len, ..Dims::new(1, kv_len, q_heads, 16) };
                    let dims = dims.kv_heads(kv_heads);
                    let spec = Spec { mask: Arc::clone(&mask), ..Spec::new(dims, DType::F32) };
                    let leaf_rows = (index == 0).then_some(64);
                    specs.push(Spec { leaf_rows, ..spec.clone() });
                    specs.push(spec);
                }
            }
        }
        specs
    }

    fn options(backward: bool) -> TrafficOptions<'static> {
        TrafficOptions { backward, kv_tile: 64, ..TrafficOptions::FORWARD }
    }

    #[test]
    fn grids_send_at_least_their_bounds_and_the_choice_is_that_of_all() {
        let tick = &mut || ();
        let mut left_out = 0;
        for spec in specs() {
            for ranks in [2, 6, 8, 16, 24] {
                let options = options(ranks != 6);
                let all = StrategyTraffic::of_all(&spec, ranks, &options, tick).unwrap();
                let bounds = Bounds::new(&spec, ranks, &options);
                for of in &all {
                    let bound = bounds.bytes(&of.grid);
                    assert!(bound <= of.total(), "{:?} {spec:?}", of.grid);
                    // without a ring the bytes are those of the exchange
                    assert!(of.grid.groups() > 1 || bound == of.total(), "{:?}", of.grid);
                }
                let admits = |_: &HeadGrid| true;
                let few = StrategyTraffic::of_fewest_bytes(&spec, ranks, &options, &admits, tick);
                let (few, chosen) = few.unwrap();
                left_out += all.len() - few.len();
                let want = StrategyTraffic::choose(&all, &spec, &options, tick).unwrap();
                assert_eq!(few[chosen], all[want], "{ranks} ranks, {spec:?}");
            }
        }
        assert!(left_out > 1000, "{left_out}");
    }

    #[test]
    fn grids_take_at_least_their_bounds_and_the_fastest_is_that_of_all() {
        let tick = &mut || ();
        let mut left_out = 0;
        let link = |latency, bandwidth| Link { latency, bandwidth, is_full_duplex: true };
        for (number, spec) in specs().into_iter().enumerate() {
            for ranks in [2, 8, 24] {
                let options = options(ranks != 2);
                let flops = [1e9, 1e12][number % 2];
                let rate = ComputeRate {
                    dtype: DType::F32,
                    head_dim: 16,
                    forward: flops,
                    backward: flops,
                    token: None,
                };
                let machine = Machine {
                    ranks_per_node: 4,
                    inside_node: Some(link(1e-6, 1e10)),
                    between_nodes: Some(link(1e-5, 1e8)),
                    node_bandwidth: Some(2e8),
                    message_overhead: 1e-10,
                    overlap: [1.0, 0.25][number % 2],
                    merge_bandwidth: Some(1e9),
                    rates: vec![rate],
                    // the buffers of some grids do not fit
                    memory: [1 << 40, 300_000][number % 3 % 2],
                };
                let mut all = StrategyTraffic::of_all(&spec, ranks, &options, tick).unwrap();
                let bounds = Bounds::new(&spec, ranks, &options);
                for of in &all {
                    let got = Prediction::of(of, &spec, &options, &machine, tick).unwrap();
                    let bound = bounds.seconds(&of.grid, &machine).unwrap();
                    assert!(bound > 0.0 || spec.mask.band(0, 0).is_none());
                    assert!(bound <= got.seconds(), "{:?} {bound} {spec:?}", of.grid);
                }
                all.extend(StrategyTraffic::of_routes(&spec, ranks, &options, tick).unwrap());
                let (chosen, _) = machine.choose(&all, &spec, &options, tick).unwrap();
                let few = machine.fastest(&spec, ranks, &options, &|_| true, tick).unwrap();
                left_out += all.len() - few.all.len();
                assert_eq!(few.all[few.chosen], all[chosen], "{ranks} ranks, {spec:?}");
            }
        }
        assert!(left_out > 20, "{left_out}");
    }
}
