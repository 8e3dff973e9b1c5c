//! Forward pass over one block of keys by gathered rows.
//!
//! ```text
//! for each query block (batch row, KV head, range of queries):               parallel
//!     for each query head of the KV head, for each query:
//!         (m, ℓ, acc) ← online softmax over the listed keys of the block
//! ```
//! A query does not depend on other queries, so that results depend neither on threads nor tasks.

use annulus_core::{Block, DropoutMask, Host, HostView, Inputs, KeyLists, Result, Spec, Tick};

use crate::{
    forward::query_pass::keys_and_values,
    gather::{
        block::{BIAS, GatherScratch, KEEP, ListedBlock, contiguous, rule, widen},
        rows::{AttendRow, Gathered, ScoreRule},
    },
    simd::{dispatch::Real, element::Float},
    threads::team::{Team, Ticker},
    tile::{
        geometry::Geometry,
        input::{Acc, TileInput, TileSource, array},
    },
    workspace::{query_block::QueryBlock, scratch::ThreadScratch, state::PassState},
};

/// Attends to the block with gathered rows; returns false if tiles are to do that.
pub(crate) fn attend<E: TileInput>(
    team: &Team,
    state: &mut PassState<Acc<E>>,
    inputs: &Inputs<HostView<'_>>,
    block: &Block<'_, Host>,
    tick: Tick<'_>,
) -> Result<bool> {
    let PassState { shard, geometry, blocks, scratch, listed, attended, .. } = state;
    if !listed.gathers::<Acc<E>>(shard, block.rows)? {
        return Ok(false);
    }
    let mut copies = [None, None, None];
    let [of_q, of_k, of_v] = &mut copies;
    let (k, v) = keys_and_values(shard, inputs, block)?;
    let q = contiguous(TileSource::<E>::tensor(array("q", inputs.q)?), of_q);
    let [k, v] = [contiguous(k, of_k), contiguous(v, of_v)];
    scratch.iter_mut().try_for_each(|scratch| scratch.gather.allocate(geometry))?;
    *attended = true;
    let terms = PairTerms::new(&shard.spec, shard.key_lists.as_deref());
    let pass = ForwardRows { geometry, rule: rule(&shard.spec), terms, q, k, v, listed };
    let rows = [shard.queries.rows(), block.rows.rows()];
    team.run(scratch, blocks.iter_mut(), Some(tick), |scratch, block, ticker| {
        pass.attend_block(scratch, block, rows, ticker);
    });
    Ok(true)
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

    /// Writes the dropout factors of pairs of (query row, key row). Returns false without dropout.
    pub(crate) fn keep<A: Real>(
        &self,
        [batch, head]: [usize; 2],
        pairs: impl Iterator<Item = [u64; 2]>,
        into: &mut [A],
    ) -> bool {
        let Some(mask) = &self.dropout else { return false };
        let (head, q_heads) = self.spec.whole_head(head);
        let scale = A::from_f64(mask.keep_scale());
        for (into, [i, j]) in into.iter_mut().zip(pairs) {
            *into = if mask.keep(batch, head, q_heads, i, j) { scale } else { A::ZERO };
        }
        true
    }

    /// Writes the list bias of pairs by their entries. Returns false if there is none.
    pub(crate) fn bias<A: Real>(
        &self,
        entries: impl Iterator<Item = usize>,
        into: &mut [A],
    ) -> bool {
        let Some(bias) = self.bias else { return false };
        into.iter_mut().zip(entries).for_each(|(into, entry)| *into = A::from_f64(bias[entry]));
        true
    }
}

struct ForwardRows<'a, E: TileInput> {
    geometry: &'a Geometry,
    rule: ScoreRule<Acc<E>>,
    terms: PairTerms<'a>,
    q: TileSource<'a, E>,
    k: TileSource<'a, E>,
    v: TileSource<'a, E>,
    listed: &'a ListedBlock,
}

impl<E: TileInput> ForwardRows<'_, E> {
    /// Attends with all queries and query heads of a block.
    fn attend_block(
        &self,
        scratch: &mut ThreadScratch<Acc<E>>,
        block: &mut QueryBlock<Acc<E>>,
        rows: [&[u64]; 2],
        ticker: &mut Ticker<'_>,
    ) {
        let geometry = self.geometry;
        for (group_head, head) in geometry.heads(block.kv_head).enumerate() {
            for strip in geometry.strips(block.rows.len()) {
                if ticker.should_stop() {
                    return;
                }
                let first = block.lane(group_head, strip.rows.start);
                for (lane, row) in strip.rows.clone().enumerate() {
                    let at = [block.batch, head, block.rows.start + row];
                    let place = [first, lane, strip.width];
                    self.attend_row(&mut scratch.gather, block, at, place, rows);
                }
            }
        }
    }

    /// Attends with one query: `[first lane of the strip, lane, lanes of the strip]`.
    fn attend_row(
        &self,
        scratch: &mut GatherScratch<Acc<E>>,
        block: &mut QueryBlock<Acc<E>>,
        [batch, head, query]: [usize; 3],
        [first, lane, width]: [usize; 3],
        [query_rows, key_rows]: [&[u64]; 2],
    ) {
        let geometry = self.geometry;
        let pairs = &self.listed.pairs;
        let of_query = pairs.pairs(pairs.list(batch, head, query));
        let sums = &mut block.partial.sums[first * geometry.value_rows()..];
        let column = || (0..geometry.dims.value_dim).map(|dim| dim * width + lane);
        let is_first = block.partial.max[first + lane] == -Acc::<E>::INFINITY;
        if of_query.is_empty() {
            if is_first {
                // a later tile of the strip may add to it
                column().for_each(|at| sums[at] = Acc::<E>::ZERO);
            }
            return;
        }
        let ([q, _], [_, out], _, _) = scratch.split();
        widen(self.q.plane(batch, head).slice(query).unwrap_or_default(), q);
        if is_first {
            out.fill(Acc::<E>::ZERO);
        } else {
            out.iter_mut().zip(column()).for_each(|(out, at)| *out = sums[at]);
        }
        let planes = [&self.k, &self.v].map(|source| source.plane(batch, block.kv_head));
        let mut max = block.partial.max[first + lane];
        let mut sum = block.partial.sum[first + lane];
        for (start, keys) in Gathered::parts(pairs.all_keys(), of_query) {
            let ([q, _], [_, out], scratch, mut lists) = scratch.split();
            let entries = pairs.entries(start..start + keys.rows.len());
            let rows = keys.rows.iter();
            let rows = rows.map(|&key| [query_rows[query], key_rows[key as usize]]);
            let keep = self.terms.keep([batch, head], rows, lists[KEEP]);
            let has_bias = self.terms.bias(entries.iter().map(|&e| e as usize), lists[BIAS]);
            let [keep_list, bias_list, ..] = lists.each_mut().map(|list| &**list);
            let row = AttendRow {
                keys,
                q,
                planes,
                rule: self.rule,
                bias: has_bias.then_some(bias_list),
                keep: keep.then_some(keep_list),
                scratch,
                out,
                max: &mut max,
                sum: &mut sum,
            };
            Acc::<E>::run_kernel(geometry.token, 1, row);
        }
        block.partial.max[first + lane] = max;
        block.partial.sum[first + lane] = sum;
        let (_, [_, out], ..) = scratch.split();
        out.iter().zip(column()).for_each(|(&out, at)| sums[at] = out);
    }
}
