//! dq, and the gradient of the bias, from one block of keys.
//!
//! ```text
//! for each task (batch row, kv head, block of queries):
//!     for each tile of 64 keys of which the queries see some:
//!         for each strip of queries and each query head of the kv head:
//!             S = K·Qᵀ, made logits      dP = V·dOᵀ      dS from both      dbias += dS      dQᵀ += Kᵀ·dS
//! ```
//! dS leaves the tile nowhere but in these sums. dq is scaled when it is written.

use std::ops::Range;

use annulus_core::{BiasOrder, Block, Host, Inputs, Result, Saved, Tick};

use crate::{
    ahead::{Asking, Lines},
    bias_gradient::Part,
    forward::{Acc, QueryPass},
    gradient::{Differentiate, OfQueries},
    input::{Input, Source, array},
    logits::{Logits, Site},
    pack::{Panel, fill_lanes},
    pairs::pair_rows,
    products::{column_products, row_products},
    real::Real,
    scratch::{RowStatistics, Scratch, Tiles},
    sight::{Lanes, Sight, TILE},
    softmax::Multiply,
    statistics::Statistics,
    team::{Pulse, Team},
    workspace::{Order, QueryBlock, QueryTask, State, Summed},
};

/// Adds what one block of keys gives to dq and to the gradient of the bias.
pub(crate) fn attend_queries<E: Input<Accumulator: Summed>>(
    team: &Team,
    state: &mut State<Acc<E>>,
    inputs: &Inputs<'_, Host>,
    saved: &Saved<'_, Host>,
    block: &Block<'_, Host>,
    tick: Tick<'_>,
) -> Result<()> {
    state.sum_in(Order::Strips)?;
    let task_rows = state.arrange_backward();
    let State { local, geometry, blocks, scratch, statistics, bias_gradient, in_place, .. } = state;
    let pass = QueryPass::<E>::new(geometry, task_rows, local, inputs, block, *in_place)?;
    let pass = Gradients { pass, dout: Source::tensor(array("dout", saved.dout)?), statistics };
    QueryPass::<E>::look_anew(scratch);
    // tasks of one owner stay together: they add to the same part of the bias's gradient
    let mut parts = bias_gradient.as_mut().map(|gradient| gradient.parts());
    let (same, owned) = (QueryTask::same(task_rows), parts.is_some());
    let of_one = |a: &QueryBlock<_>, b: &QueryBlock<_>| if owned { a.owner == b.owner } else { same(a, b) };
    let tasks = blocks.chunk_by_mut(of_one).map(|blocks| (blocks, parts.as_mut().and_then(Iterator::next)));
    team.run(scratch, tasks, Some(tick), |scratch, (blocks, mut part), pulse| {
        for mut task in blocks.chunk_by_mut(&same).filter_map(QueryTask::new) {
            pass.add(scratch, &mut task, part.as_deref_mut(), pulse);
        }
    });
    Ok(())
}

struct Gradients<'a, E: Input> {
    pass: QueryPass<'a, E>,
    dout: Source<'a, E>,
    statistics: &'a Statistics<Acc<E>>,
}

impl<E: Input<Accumulator: Summed>> Gradients<'_, E> {
    /// One task.
    fn add(
        &self,
        scratch: &mut Scratch<Acc<E>>,
        task: &mut QueryTask<'_, Acc<E>>,
        mut part: Option<&mut Part<Acc<E>>>,
        pulse: &mut Pulse<'_>,
    ) {
        scratch.filled.fill(false);
        for heads in self.pass.alike(task.kv_head) {
            self.pass.look(scratch, task.batch, heads.start, &task.rows);
            let whole = std::mem::take(&mut scratch.whole);
            for keys in self.pass.visibility.key_tiles(&whole, TILE) {
                if pulse.stopped() {
                    break;
                }
                self.add_keys(scratch, task, part.as_deref_mut(), &heads, &keys);
            }
            scratch.whole = whole;
        }
    }

    /// One tile of keys, for all strips and the given heads of a task.
    fn add_keys(
        &self,
        scratch: &mut Scratch<Acc<E>>,
        task: &mut QueryTask<'_, Acc<E>>,
        mut part: Option<&mut Part<Acc<E>>>,
        heads: &Range<usize>,
        keys: &Range<usize>,
    ) {
        let mut filled = false;
        for (index, strip) in self.pass.geometry.strips(task.rows.len()).enumerate() {
            let Scratch { sight, bits, parts, .. } = scratch;
            if !sight.look(Lanes::Queries, &self.pass.visibility, &parts[index], keys.clone(), bits) {
                continue;
            }
            if !std::mem::replace(&mut filled, true) {
                self.pass.fill_keys(scratch, task.batch, task.kv_head, keys);
            }
            for head in heads.clone() {
                let site = self.pass.site(task.batch, head, &task.rows, index, &strip, keys);
                self.fill_queries(scratch, &site);
                let (block, first) = task.block(strip.rows.start);
                self.add_tile(scratch, block, part.as_deref_mut(), first, &site);
            }
        }
    }

    /// Transposes q and dout of a strip of one head, once a task, and loads what is known of its rows.
    fn fill_queries(&self, scratch: &mut Scratch<Acc<E>>, site: &Site) {
        let geometry = self.pass.geometry;
        if !std::mem::replace(&mut scratch.filled[site.strip], true) {
            let of_q = &mut scratch.lanes_head[geometry.lanes_of(site, geometry.depth(geometry.dims.head_dim))];
            fill_lanes(geometry.path, &self.pass.q, (site.batch, site.head), site.queries.clone(), site.width, of_q, geometry.pairs);
            let of_dout = &mut scratch.lanes_value[geometry.lanes_of(site, geometry.depth(geometry.dims.value_dim))];
            fill_lanes(geometry.path, &self.dout, (site.batch, site.head), site.queries.clone(), site.width, of_dout, geometry.pairs);
        }
        let line = site.batch * geometry.dims.q_heads + site.head;
        self.statistics.load(line, site.queries.clone(), &mut scratch.statistics);
        // lanes without a query: weights of 0
        scratch.statistics.lse[site.queries.len()..site.width].fill(Acc::<E>::INFINITY);
        scratch.statistics.max[site.queries.len()..site.width].fill(Acc::<E>::INFINITY);
    }

    /// One tile of one head; `first` is the strip's first row in the block.
    fn add_tile(
        &self,
        scratch: &mut Scratch<Acc<E>>,
        block: &mut QueryBlock<Acc<E>>,
        part: Option<&mut Part<Acc<E>>>,
        first: usize,
        site: &Site,
    ) {
        let geometry = self.pass.geometry;
        let logits = &self.pass.logits;
        let Scratch { rows_head, rows_value, lanes_head, lanes_value, tiles, statistics, sight, sight_of_head, ahead, .. } = scratch;
        sight_of_head.clone_from(sight);
        let sight = sight_of_head;
        let of_q = &lanes_head[geometry.lanes_of(site, geometry.depth(geometry.dims.head_dim))];
        let of_dout = &lanes_value[geometry.lanes_of(site, geometry.depth(geometry.dims.value_dim))];
        let [k, v] = [&self.pass.k, &self.pass.v].map(|source| Lines::of(source.plane(block.batch, block.kv_head)));
        let mut asking = ahead.asking([k, v], Lines::default());
        let operands = Operands { s: (rows_head, of_q), dp: (rows_value, of_dout) };
        differentiate(logits, site, sight, operands, statistics, tiles, &mut asking);

        let span = site.span(sight.rows());
        // a bias before the soft cap goes through it
        let before = logits.spec.bias_order == BiasOrder::BeforeSoftCap;
        if before {
            apply_slope(logits, site, &span, tiles);
        }
        if let Some(part) = part {
            part.add(site, sight.rows(), &tiles.s, logits.keys.rows());
        }
        if !before {
            apply_slope(logits, site, &span, tiles);
        }
        if geometry.pairs {
            pair_rows(geometry.path, site.vectors, sight.rows(), &mut tiles.s);
        }
        let depth = geometry.head_rows();
        let lane = block.lane(site.head % geometry.dims.group(), first);
        let sums = &mut block.sums[lane * depth..(lane + site.width) * depth];
        column_products((geometry.path, site.vectors), sight, rows_head, &tiles.s[span], sums, None, &mut asking);
    }
}

/// What is multiplied for a tile: rows and lanes of the logits, and of dp.
pub(crate) struct Operands<'a, A> {
    pub(crate) s: (&'a Panel<A>, &'a [A]),
    pub(crate) dp: (&'a Panel<A>, &'a [A]),
}

/// Makes ds in `tiles.s`, the weights of dout in `tiles.dp`, and ∂s/∂x in `tiles.slope` where it is not 1, for the visible rows of a tile.
pub(crate) fn differentiate<A: Real>(
    logits: &Logits<'_, A>,
    site: &Site,
    sight: &mut Sight,
    operands: Operands<'_, A>,
    statistics: &RowStatistics<A>,
    tiles: &mut Tiles<A>,
    asking: &mut Asking<'_>,
) {
    let (path, vectors) = (logits.path, site.vectors);
    let (panel, lanes) = operands.s;
    row_products((path, vectors), sight, panel, lanes, &mut tiles.s, None, asking);
    logits.finish(site, sight, &mut tiles.s, Some(&mut tiles.slope), &mut tiles.extra);
    let (panel, lanes) = operands.dp;
    row_products((path, vectors), sight, panel, lanes, &mut tiles.dp, None, asking);
    let span = site.span(sight.rows());
    let keep = logits.fill_keep(site, sight.rows(), &mut tiles.extra).then(|| &tiles.extra[span.clone()]);
    let by_row = site.lanes == Lanes::Keys;
    // where queries are rows, only those of the visible ones are read
    let used = if by_row { sight.rows().clone() } else { 0..site.width };
    let queries = OfQueries {
        by_row,
        lse: &statistics.lse[used.clone()],
        max: &statistics.max[used.clone()],
        delta: &statistics.delta[used.clone()],
        share: &statistics.share[used],
    };
    let (s, dp) = (&mut tiles.s[span.clone()], &mut tiles.dp[span]);
    let normalize = logits.spec.normalize;
    let unit = logits.unit();
    A::run_kernel(path, vectors, Differentiate { s, unit, dp, keep, queries, normalize, words: sight.words() });
}

/// ds ← ds·∂s/∂x where there is a soft cap.
pub(crate) fn apply_slope<A: Real>(logits: &Logits<'_, A>, site: &Site, span: &Range<usize>, tiles: &mut Tiles<A>) {
    if logits.has_slope() {
        A::run(logits.path, site.vectors, Multiply { tile: &mut tiles.s[span.clone()], by: &tiles.slope[span.clone()] });
    }
}
