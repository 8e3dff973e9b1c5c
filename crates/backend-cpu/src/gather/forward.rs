//! Forward pass over one block of keys by listed rows.
//!
//! ```text
//! for each (batch row, KV head):
//!     pack its K and V, the rows that have pairs                             parallel
//!     for each range of queries, each query head of the KV head:             parallel
//!         for each four queries, or query if their lists differ:
//!             (m, ℓ, acc) ← online softmax over the listed keys of the block
//!         in the last block, after each strip of queries:  write its rows of the outputs
//! ```
//! A query does not depend on other queries, so that results depend neither on threads nor tasks.

use annulus_core::{
    Block, DropoutMask, Host, HostView, HostViewMut, Inputs, KeyLists, ListedPairs, Outputs,
    Result, Spec, Tick,
};
use ndarray::ArrayView4;

use crate::{
    forward::{
        outputs::{OutputAxis, OutputRows, StripOutput},
        query_pass::keys_and_values,
    },
    gather::{
        block::{BIAS, GatherScratch, KEEP, ListedBlock, contiguous, rule},
        operands::{GROUP, MergedList, MergedLists, PackRows, RowsView},
        rows::{AttendRows, Others, PART, ScoreRule},
    },
    simd::{dispatch::Real, element::Float},
    threads::team::{Team, Ticker},
    tile::{
        geometry::{Geometry, Strip},
        input::{Acc, Plane, TileInput, TileSource, array},
        pack::{LaneRows, PackLanes},
    },
    workspace::{query_block::QueryBlock, scratch::ThreadScratch, state::PassState},
};

/// Attends to the block with listed rows; returns `None` if tiles are to do that. With `outputs`,
/// those of the pass whose last block it is, writes them unless it is stopped, and returns true.
pub(crate) fn attend<E: TileInput<Accumulator: TileInput<Accumulator = Acc<E>>>>(
    team: &Team,
    state: &mut PassState<Acc<E>>,
    inputs: &Inputs<HostView<'_>>,
    block: &Block<'_, Host>,
    outputs: Option<&mut Outputs<HostViewMut<'_>>>,
    tick: Tick<'_>,
) -> Result<Option<bool>> {
    let PassState { shard, geometry, blocks, scratch, listed, attended, .. } = state;
    if !listed.gathers(shard, block.rows)? {
        return Ok(None);
    }
    let mut copies = [None, None, None];
    let [of_q, of_k, of_v] = &mut copies;
    let (k, v) = keys_and_values(shard, inputs, block)?;
    let q = contiguous(TileSource::<E>::tensor(array("q", inputs.q)?), of_q);
    let [k, v] = [contiguous(k, of_k), contiguous(v, of_v)];
    let sinks = inputs.sinks.map(|sinks| array("softmax_aux", sinks)).transpose()?;
    scratch.iter_mut().try_for_each(|scratch| scratch.gather.allocate(geometry))?;
    let is_only_block = !std::mem::replace(attended, true);
    // partial results are not in the inputs' type
    let outputs = outputs.filter(|_| !shard.spec.partial).map(OutputRows::of).transpose()?;
    let has_outputs = outputs.is_some();
    let group = geometry.dims.group();
    let rows_of_block = blocks.iter().map(|block| block.rows.len()).max().unwrap_or(1);
    let parts = outputs.into_iter().flat_map(|outputs| outputs.parts(OutputAxis::Batch, 1));
    let parts = parts.flat_map(move |outputs| outputs.parts(OutputAxis::Heads, group));
    let mut parts = parts
        .flat_map(move |outputs| outputs.parts(OutputAxis::Rows, rows_of_block))
        .map(Some)
        .chain(std::iter::repeat_with(|| None));
    let mut in_order: Vec<&mut QueryBlock<Acc<E>>> = blocks.iter_mut().collect();
    in_order.sort_by_key(|block| (block.batch, block.kv_head, block.rows.start));
    let plane_of = |block: &QueryBlock<_>| (block.batch, block.kv_head);
    let ListedBlock { pairs, merged, keys, rows: [rows, _], .. } = listed;
    let terms = PairTerms::new(&shard.spec, shard.key_lists.as_deref());
    let dims = [geometry.dims.head_dim, geometry.dims.value_dim];
    for blocks in in_order.chunk_by_mut(|a, b| plane_of(a) == plane_of(b)) {
        let (batch, kv_head) = plane_of(blocks[0]);
        let planes = [&k, &v].map(|source| source.plane(batch, kv_head));
        rows.fill((geometry.token, team, &mut *scratch), planes, keys, dims)?;
        let pass = ForwardRows {
            geometry,
            rule: rule(&shard.spec),
            terms: &terms,
            q: &q,
            rows: rows.view(),
            pairs,
            merged,
            row_numbers: [shard.queries.rows(), block.rows.rows()],
            keys,
            normalize: shard.spec.normalize,
            sinks,
        };
        let tasks = blocks.iter_mut().zip(&mut parts);
        team.run(scratch, tasks, Some(&mut *tick), |scratch, (block, mut outputs), ticker| {
            // no later call reads the accumulator: it need not leave the second-level cache
            let has_near_sums = is_only_block
                && outputs.is_some()
                && scratch.near_sums.len() >= block.partial.sums.len();
            if has_near_sums {
                std::mem::swap(&mut block.partial.sums, &mut scratch.near_sums);
            }
            pass.attend_block(scratch, block, outputs.as_mut(), ticker);
            if has_near_sums {
                std::mem::swap(&mut block.partial.sums, &mut scratch.near_sums);
            }
        });
    }
    Ok(Some(has_outputs))
}

/// What a pair has besides its product: dropout and list bias.
pub(crate) struct PairTerms<'a> {
    spec: &'a Spec,
    dropout: Option<DropoutMask>,
    bias: Option<&'a [f64]>,
}

impl<'a> PairTerms<'a> {
    pub(crate) fn new(spec: &'a Spec, lists: Option<&'a KeyLists>) -> Self {
        let bias = lists.and_then(KeyLists::bias);
        Self { spec, dropout: spec.dropout.map(DropoutMask::new), bias }
    }

    /// Returns the scale of the scores.
    pub(crate) const fn scale(&self) -> f64 {
        self.spec.scale
    }

    /// Writes the dropout factors of the pairs (query row, key row) of each row of a group,
    /// `[GROUP][PART]`. Returns false without dropout.
    pub(crate) fn keep<A: Real, P: Iterator<Item = [u64; 2]>>(
        &self,
        [batch, head]: [usize; 2],
        rows: impl Iterator<Item = P>,
        into: &mut [A],
    ) -> bool {
        let Some(mask) = &self.dropout else { return false };
        let (head, q_heads) = self.spec.whole_head(head);
        let scale = A::from_f64(mask.keep_scale());
        for (into, pairs) in into.chunks_exact_mut(PART).zip(rows) {
            for (into, [i, j]) in into.iter_mut().zip(pairs) {
                *into = if mask.keep(batch, head, q_heads, i, j) { scale } else { A::ZERO };
            }
        }
        true
    }

    /// Writes the list bias of the pairs of one query by their entries. Returns false if there is
    /// none.
    pub(crate) fn bias<A: Real>(&self, entries: impl Iterator<Item = u32>, into: &mut [A]) -> bool {
        let Some(bias) = self.bias else { return false };
        let terms = entries.map(|entry| A::from_f64(bias[entry as usize]));
        into.iter_mut().zip(terms).for_each(|(into, term)| *into = term);
        true
    }

    /// Returns true if pairs have a list bias.
    pub(crate) const fn has_bias(&self) -> bool {
        self.bias.is_some()
    }
}

struct ForwardRows<'a, 'r, E: TileInput> {
    geometry: &'a Geometry,
    rule: ScoreRule<Acc<E>>,
    terms: &'a PairTerms<'a>,
    q: &'r TileSource<'a, E>,
    /// K and V.
    rows: RowsView<'r, Acc<E>>,
    pairs: &'a ListedPairs,
    merged: &'a MergedLists,
    /// Row numbers of the queries, and of the keys of the block.
    row_numbers: [&'a [u64]; 2],
    /// Index in the block of each listed key.
    keys: &'a [u32],
    normalize: bool,
    /// `[heads|1, sinks, 1, 1]`
    sinks: Option<ArrayView4<'a, Acc<E>>>,
}

impl<E: TileInput<Accumulator: TileInput<Accumulator = Acc<E>>>> ForwardRows<'_, '_, E> {
    /// Attends with all queries and query heads of a block, whose `outputs` are written.
    fn attend_block(
        &self,
        scratch: &mut ThreadScratch<Acc<E>>,
        block: &mut QueryBlock<Acc<E>>,
        mut outputs: Option<&mut OutputRows<'_, E>>,
        ticker: &mut Ticker<'_>,
    ) {
        for (group_head, head) in self.geometry.heads(block.kv_head).enumerate() {
            for strip in self.geometry.strips(block.rows.len()) {
                if ticker.should_stop() {
                    return;
                }
                self.attend_strip(&mut scratch.gather, block, [group_head, head], &strip);
                if let Some(outputs) = &mut outputs {
                    outputs.write_strip(&StripOutput {
                        geometry: self.geometry,
                        normalize: self.normalize,
                        sinks: self.sinks,
                        block,
                        group_head,
                        strip: &strip,
                        batch: 0,
                        head: group_head,
                        first_row: strip.rows.start,
                        next: None,
                    });
                }
            }
        }
    }

    /// Attends with the queries of one strip.
    fn attend_strip(
        &self,
        scratch: &mut GatherScratch<Acc<E>>,
        block: &mut QueryBlock<Acc<E>>,
        [group_head, head]: [usize; 2],
        strip: &Strip,
    ) {
        let (geometry, batch) = (self.geometry, block.batch);
        let queries = strip.rows_from(block.rows.start);
        let list = self.pairs.list(batch, head, queries.start);
        let last = self.pairs.pairs(list + queries.len() - 1);
        if self.pairs.pairs(list).start == last.end {
            return;
        }
        let [dim, value_dim] = self.rows.dims;
        let first = block.lane(group_head, strip.rows.start);
        let lanes = first..first + strip.width;
        let (q, [_, out], ..) = scratch.split();
        let plane = self.q.plane(batch, head);
        let kernel = PackRows { planes: [plane; 2], ids: queries.clone(), dims: [dim, 0], into: q };
        Acc::<E>::run_kernel(geometry.token, 1, kernel);
        let value_rows = geometry.value_rows();
        let sums = &mut block.partial.sums[first * value_rows..lanes.end * value_rows];
        let out = &mut out[..strip.width * value_dim];
        let is_empty = |&max: &Acc<E>| max == -Acc::<E>::INFINITY;
        if block.partial.max[lanes.clone()].iter().all(is_empty) {
            out.fill(Acc::<E>::ZERO);
        } else {
            let rows = LaneRows {
                rows: &mut *out,
                stride: value_dim,
                count: strip.width,
                dim: geometry.dims.value_dim,
                scale: Acc::<E>::ONE,
                add: false,
            };
            rows.write(geometry.token, sums, strip.width);
        }
        for row in (0..queries.len()).step_by(GROUP) {
            let lane = first + row;
            let at = [batch, head, queries.start + row];
            match self.merged.get(list / self.pairs.queries(), at[2]) {
                Some(list) => self.attend_rows(scratch, block, at, [row, lane], (list, 0)),
                None => {
                    for l in 0..GROUP.min(queries.len() - row) {
                        let at = [batch, head, at[2] + l];
                        let pairs = self.pairs.pairs(self.pairs.list(batch, head, at[2]));
                        let entry = pairs.start;
                        let list = MergedList::of_row(&self.pairs.all_keys()[pairs]);
                        let place = [row + l, lane + l];
                        self.attend_rows(scratch, block, at, place, (list, entry));
                    }
                }
            }
        }
        let (_, [_, out], ..) = scratch.split();
        let dim = geometry.dims.value_dim;
        let plane = Plane::Vectors { elements: &*out, stride: value_dim, dim };
        let sums = &mut block.partial.sums[first * value_rows..lanes.end * value_rows];
        let kernel =
            PackLanes::<Acc<E>> { plane, rows: 0..queries.len(), width: strip.width, strip: sums };
        Acc::<E>::run_kernel(geometry.token, 1, kernel);
    }

    /// Attends with the queries of one list, whose pairs begin at number `first_pair`. `place`:
    /// the row in the strip, and the lane.
    fn attend_rows(
        &self,
        scratch: &mut GatherScratch<Acc<E>>,
        block: &mut QueryBlock<Acc<E>>,
        [batch, head, query]: [usize; 3],
        [row, lane]: [usize; 2],
        (list, first_pair): (MergedList<'_>, usize),
    ) {
        let [dim, value_dim] = self.rows.dims;
        let [query_rows, key_rows] = self.row_numbers;
        for (range, list) in list.parts(PART) {
            let (q, [_, out], scratch, mut lists) = scratch.split();
            let group = &query_rows[query..query_rows.len().min(query + list.rows())];
            let number = |&key: &u32| key_rows[self.keys[key as usize] as usize];
            let keys = list.elements.iter().map(number);
            let rows = group.iter().map(|&i| keys.clone().map(move |j| [i, j]));
            let keep = self.terms.keep([batch, head], rows, lists[KEEP]);
            let pairs = first_pair + range.start..first_pair + range.end;
            let entries = if self.terms.has_bias() { self.pairs.entries(pairs) } else { &[] };
            let has_bias = self.terms.bias(entries.iter().copied(), lists[BIAS]);
            let [keep_list, bias_list, ..] = lists.each_mut().map(|list| &**list);
            let rows = AttendRows {
                keys: Others { list, rows: self.rows },
                q: &q[row * dim..],
                rule: self.rule,
                bias: has_bias.then_some(bias_list),
                keep: keep.then_some(keep_list),
                scratch,
                out: &mut out[row * value_dim..],
                max: &mut block.partial.max[lane..],
                sum: &mut block.partial.sum[lane..],
            };
            rows.run_rows(self.geometry.token);
        }
    }
}
