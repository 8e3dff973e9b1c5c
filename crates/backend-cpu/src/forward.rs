//! The forward pass over one block of keys.
//!
//! ```text
//! for each task (batch row, kv head, block of queries):
//!     for each tile of 64 keys of which the queries see some:
//!         for each strip of queries and each query head of the kv head:
//!             S = K·Qᵀ, made logits;  (m, sum, S) ← fold;  Oᵀ ← Oᵀ·e^{m − m'} + Vᵀ·S
//! ```
//! Queries lie in lanes, so maximum, sum and correction are vectors and nothing is summed across lanes.
//!
//! # Source
//! Dao et al. 2022, algorithm 1; the running softmax of Milakov and Gimelshein 2018.

use std::ops::Range;

use annulus_core::{Block, Host, Inputs, Result, Tick, Visibility};

use crate::{
    ahead::{Ahead, Lines},
    geometry::{Geometry, Strip},
    input::{Input, Source, array, device},
    logits::{Logits, Site},
    pack::fill_lanes,
    pairs::pair_rows,
    products::{column_products, row_products},
    real::Real,
    scratch::Scratch,
    sight::{Lanes, Sight, TILE},
    softmax::{Fold, Multiply},
    team::{Pulse, Team},
    workspace::{QueryBlock, QueryTask, State, Summed},
};

/// The sum type of an input type.
pub(crate) type Acc<E> = <E as annulus_core::Element>::Accumulator;

/// Every row has seen nothing: what was summed of values then means nothing, and is zeroed when the first tile of a strip is about to be added, while
/// that strip is near.
pub(crate) fn begin<A: Real>(team: &Team, state: &mut State<A>) {
    team.run(&mut state.scratch, state.blocks.iter_mut(), None, |_, block, _| {
        block.max.fill(-A::INFINITY);
        block.sum.fill(A::ZERO);
        block.ties.fill(A::ZERO);
    });
}

/// Folds one block into the running softmax.
pub(crate) fn attend<E: Input<Accumulator: Summed>>(
    team: &Team,
    state: &mut State<Acc<E>>,
    inputs: &Inputs<'_, Host>,
    block: &Block<'_, Host>,
    tick: Tick<'_>,
) -> Result<()> {
    let task_rows = state.arrange_forward();
    let State { local, geometry, blocks, scratch, decode, in_place, .. } = state;
    let pass = QueryPass::<E>::new(geometry, task_rows, local, inputs, block, *in_place)?;
    QueryPass::<E>::look_anew(scratch);
    if let Some(decode) = decode
        && decode.attend(&pass, team, scratch, blocks, &mut *tick)
    {
        return Ok(());
    }
    let tasks = blocks.chunk_by_mut(QueryTask::same(task_rows)).filter_map(QueryTask::new);
    team.run(scratch, tasks, Some(tick), |scratch, mut task, pulse| pass.fold(scratch, &mut task, pulse));
    Ok(())
}

/// Keys and values of a block: those in its records or, `in_place`, the caller's own.
pub(crate) fn keys_and_values<'a, 'i: 'a, 'b: 'a, E: Input>(
    local: &annulus_core::Local,
    inputs: &Inputs<'i, Host>,
    block: &Block<'b, Host>,
    in_place: bool,
) -> Result<(Source<'a, E>, Source<'a, E>)> {
    if in_place {
        if block.rows.rows() != local.keys.rows() {
            return Err(device("a block of other rows than this rank's, where no other rank has any"));
        }
        return Ok((Source::tensor(array("k", inputs.k)?), Source::tensor(array("v", inputs.v)?)));
    }
    let record = local.spec.kv_record();
    let source = |field| Source::records(block.buffer.bytes(), block.rows.len(), &record, field);
    Ok((source(0)?, source(1)?))
}

/// What all tasks of a pass over queries read.
pub(crate) struct QueryPass<'a, E: Input> {
    pub(crate) geometry: &'a Geometry,
    pub(crate) visibility: Visibility<'a>,
    pub(crate) logits: Logits<'a, Acc<E>>,
    pub(crate) q: Source<'a, E>,
    pub(crate) k: Source<'a, E>,
    pub(crate) v: Source<'a, E>,
    /// Strips of one head of a whole task.
    strips: usize,
}

impl<'a, E: Input<Accumulator: Summed>> QueryPass<'a, E> {
    pub(crate) fn new<'i: 'a, 'b: 'a>(
        geometry: &'a Geometry,
        task_rows: usize,
        local: &'a annulus_core::Local,
        inputs: &Inputs<'i, Host>,
        block: &Block<'b, Host>,
        in_place: bool,
    ) -> Result<Self> {
        let spec = &*local.spec;
        let attention_mask = local.attention_mask.as_deref();
        let (queries, keys) = (&*local.queries, block.rows);
        let bias = inputs.bias.map(|bias| array::<Acc<E>>("bias", bias)).transpose()?;
        let (k, v) = keys_and_values(local, inputs, block, in_place)?;
        Ok(Self {
            geometry,
            visibility: Visibility { mask: &*spec.mask, attention_mask, queries, keys },
            logits: Logits { spec, path: geometry.path, queries, keys, bias },
            q: Source::tensor(array("q", inputs.q)?),
            k,
            v,
            strips: task_rows / geometry.strip_lanes(),
        })
    }

    /// Heads of the group that see alike, together; or one by one.
    pub(crate) fn alike(&self, kv_head: usize) -> impl Iterator<Item = Range<usize>> + use<E> {
        let heads = self.geometry.heads(kv_head);
        let step = if self.visibility.per_head() { 1 } else { heads.len() };
        heads.clone().step_by(step).map(move |first| first..first + step)
    }

    /// Works out what the rows of a task see: all of them, and each strip; unless that is known from a task whose rows see alike.
    pub(crate) fn look(&self, scratch: &mut Scratch<Acc<E>>, batch: usize, head: usize, rows: &Range<usize>) {
        let of_batch = if self.visibility.per_batch() { batch } else { 0 };
        let of_head = if self.visibility.per_head() { head } else { 0 };
        let looked = (of_batch, of_head, rows.clone());
        if scratch.looked.as_ref() == Some(&looked) {
            return;
        }
        self.visibility.query_tile(of_batch, of_head, rows.clone(), &mut scratch.whole);
        for (strip, part) in self.geometry.strips(rows.len()).zip(&mut scratch.parts) {
            self.visibility.query_tile(of_batch, of_head, rows.start + strip.rows.start..rows.start + strip.rows.end, part);
        }
        scratch.looked = Some(looked);
        scratch.sights.clear();
    }

    /// Forgets what an earlier pass has seen: masks and positions may have changed.
    pub(crate) fn look_anew(scratch: &mut [Scratch<Acc<E>>]) {
        scratch.iter_mut().for_each(|scratch| scratch.looked = None);
    }

    /// Where a tile lies whose queries are strip number `index` of a task.
    pub(crate) fn site(&self, batch: usize, head: usize, rows: &Range<usize>, index: usize, strip: &Strip, keys: &Range<usize>) -> Site {
        Site {
            batch,
            head,
            queries: rows.start + strip.rows.start..rows.start + strip.rows.end,
            keys: keys.clone(),
            lanes: Lanes::Queries,
            strip: head % self.geometry.dims.group() * self.strips + index,
            vectors: strip.vectors,
            width: strip.width,
        }
    }

    /// Takes in a tile of keys and values.
    pub(crate) fn fill_keys(&self, scratch: &mut Scratch<Acc<E>>, batch: usize, kv_head: usize, keys: &Range<usize>) {
        let path = self.geometry.path;
        scratch.rows_head.fill(path, &self.k, batch, kv_head, keys.clone());
        scratch.rows_value.fill(path, &self.v, batch, kv_head, keys.clone());
        // mostly the next
        scratch.ahead.rows = keys.end..(keys.end + TILE).min(self.visibility.keys.len());
    }

    /// One task.
    fn fold(&self, scratch: &mut Scratch<Acc<E>>, task: &mut QueryTask<'_, Acc<E>>, pulse: &mut Pulse<'_>) {
        scratch.filled.fill(false);
        for heads in self.alike(task.kv_head) {
            self.look(scratch, task.batch, heads.start, &task.rows);
            let whole = std::mem::take(&mut scratch.whole);
            scratch.sights.rewind();
            for keys in self.visibility.key_tiles(&whole, TILE) {
                if pulse.stopped() {
                    break;
                }
                self.fold_keys(scratch, task, &heads, &keys);
            }
            scratch.whole = whole;
        }
    }

    /// One tile of keys, for all strips and the given heads of a task.
    fn fold_keys(&self, scratch: &mut Scratch<Acc<E>>, task: &mut QueryTask<'_, Acc<E>>, heads: &Range<usize>, keys: &Range<usize>) {
        let mut tiles = 0;
        for (index, strip) in self.geometry.strips(task.rows.len()).enumerate() {
            let Scratch { sight, sights, bits, parts, .. } = scratch;
            let look = |sight: &mut Sight| sight.look(Lanes::Queries, &self.visibility, &parts[index], keys.clone(), bits);
            if !sights.next(sight, look) {
                continue;
            }
            if tiles == 0 {
                self.fill_keys(scratch, task.batch, task.kv_head, keys);
            }
            tiles += heads.len();
            for head in heads.clone() {
                let site = self.site(task.batch, head, &task.rows, index, &strip, keys);
                if !std::mem::replace(&mut scratch.filled[site.strip], true) {
                    let lanes = &mut scratch.lanes_head[self.geometry.lanes_of(&site, self.depth())];
                    let Geometry { path, pairs, .. } = *self.geometry;
                    fill_lanes(path, &self.q, (site.batch, head), site.queries.clone(), site.width, lanes, pairs);
                    self.expect_queries(&mut scratch.ahead, &task.rows, heads, &site);
                }
                let (block, first) = task.block(strip.rows.start);
                self.fold_tile(scratch, block, first, &site);
            }
        }
        // as many tiles as now will mostly be worked on while the next keys are waited for
        scratch.ahead.spread(tiles, TILE + self.geometry.value_rows());
    }

    /// Notes which queries are mostly filled next: those of the next head, then of the next strip.
    fn expect_queries(&self, ahead: &mut Ahead, rows: &Range<usize>, heads: &Range<usize>, site: &Site) {
        let next = site.queries.end..rows.end.min(site.queries.end + self.geometry.strip_lanes());
        (ahead.head, ahead.queries) = if site.head + 1 < heads.end { (site.head + 1, site.queries.clone()) } else { (heads.start, next) };
    }

    /// Lines of a strip of queries.
    const fn depth(&self) -> usize {
        self.geometry.depth(self.geometry.dims.head_dim)
    }

    /// One tile of one head; `first` is the strip's first row in the block.
    fn fold_tile(&self, scratch: &mut Scratch<Acc<E>>, block: &mut QueryBlock<Acc<E>>, first: usize, site: &Site) {
        let (path, vectors) = (self.geometry.path, site.vectors);
        let Scratch { rows_head, rows_value, lanes_head, tiles, largest, rescale, sight, sight_of_head, ahead, .. } = scratch;
        sight_of_head.clone_from(sight);
        let sight = sight_of_head;
        let queries = &lanes_head[self.geometry.lanes_of(site, self.depth())];
        let largest = &mut largest[..site.width];
        let wanted = self.logits.plain(sight).then_some(&mut *largest);
        let [k, v] = [&self.k, &self.v].map(|source| Lines::of(source.plane(block.batch, block.kv_head)));
        let q = Lines::of(self.q.plane(block.batch, ahead.head));
        let mut asking = ahead.asking([k, v], q);
        let known = row_products((path, vectors), sight, rows_head, queries, &mut tiles.s, wanted, &mut asking);
        self.logits.finish(site, sight, &mut tiles.s, None, &mut tiles.extra);

        let first = block.lane(site.head % self.geometry.dims.group(), first);
        let lanes = first..first + site.width;
        let span = site.span(sight.rows());
        let ties = (!self.logits.spec.normalize).then(|| &mut block.ties[lanes.clone()]);
        let rescale = &mut rescale[..site.width];
        let weights = &mut tiles.s[span.clone()];
        let (max, sum) = (&mut block.max[lanes.clone()], &mut block.sum[lanes.clone()]);
        let depth = self.geometry.value_rows();
        let sums = &mut block.sums[lanes.start * depth..lanes.end * depth];
        if max.iter().all(|&max| max == -Acc::<E>::INFINITY) {
            sums.fill(Acc::<E>::ZERO);
        }
        let (unit, largest) = (self.logits.unit(), known.then_some(&*largest));
        let moved = Acc::<E>::run_kernel(path, vectors, Fold { tile: weights, unit, largest, max, sum, ties, rescale });
        if self.logits.fill_keep(site, sight.rows(), &mut tiles.extra) {
            Acc::<E>::run(path, vectors, Multiply { tile: weights, by: &tiles.extra[span.clone()] });
        }
        if self.geometry.pairs {
            pair_rows(path, vectors, sight.rows(), &mut tiles.s);
        }
        let weights = &tiles.s[span];
        // where no maximum has moved, all factors are 1
        column_products((path, vectors), sight, rows_value, weights, sums, moved.then_some(&*rescale), &mut asking);
    }
}
