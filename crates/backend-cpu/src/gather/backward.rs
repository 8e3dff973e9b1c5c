//! Backward pass over one block of keys by gathered rows.
//!
//! ```text
//! for each query block, query head, query:                                   parallel
//!     dq += Σ dS·k over its listed keys
//! for each range of keys, KV head, key, query head:                          parallel
//!     dk += Σ dS·q     dv += Σ P·dO     over the queries that list it, ascending
//! ```
//! Scores are computed twice, so that each sum has one writer and one order: seven products a pair,
//! where tiles take five.

use std::sync::Mutex;

use annulus_core::{
    BackwardInputs, Block, Element, Host, HostBuffer, HostView, Result, RowLayout, Tick,
};

use crate::{
    forward::query_pass::keys_and_values,
    gather::{
        block::{BIAS, GatherScratch, KEEP, ListedBlock, STATISTICS, contiguous, rule, widen},
        forward::PairTerms,
        rows::{Gathered, GradientRow, PairStatistics, ScoreRule},
    },
    simd::{dispatch::Real, element::Float},
    threads::{
        ordered_reduction::lock,
        team::{Team, Ticker},
    },
    tile::{
        geometry::Geometry,
        input::{Acc, TileInput, TileSource, array, elements_mut},
    },
    workspace::{
        query_block::QueryBlock, records::bytes_mut, scratch::ThreadScratch, state::PassState,
        statistics::RowStatistics,
    },
};

/// Keys of a task, at least.
const MIN_TASK_KEYS: usize = 64;

/// Tasks of each thread, so that threads end at about the same time.
const TASKS_PER_THREAD: usize = 4;

/// Adds the contribution of the block to dq, and writes that of this rank's queries to dk and dv.
/// Returns false if tiles are to do that.
pub(crate) fn backward<E: TileInput>(
    team: &Team,
    state: &mut PassState<Acc<E>>,
    inputs: &BackwardInputs<HostView<'_>>,
    block: &Block<'_, Host>,
    partial_grad: &mut HostBuffer,
    tick: Tick<'_>,
) -> Result<bool> {
    let PassState { shard, geometry, blocks, scratch, listed, statistics, .. } = state;
    let PassState { list_bias_gradient, .. } = state;
    if !listed.gathers::<Acc<E>>(shard, block.rows)? {
        return Ok(false);
    }
    let mut copies = [None, None, None, None];
    let [of_q, of_dout, of_k, of_v] = &mut copies;
    let (k, v) = keys_and_values(shard, &inputs.forward, block)?;
    let q = contiguous(TileSource::<E>::tensor(array("q", inputs.forward.q)?), of_q);
    let dout = contiguous(TileSource::<E>::tensor(array("dout", inputs.dout)?), of_dout);
    let [k, v] = [contiguous(k, of_k), contiguous(v, of_v)];
    let keys = block.rows.len();
    listed.transposed.refill(&listed.pairs, keys)?;
    scratch.iter_mut().try_for_each(|scratch| scratch.gather.allocate(geometry))?;
    let spec = &*shard.spec;
    let pass = GradientRows {
        geometry,
        rule: rule(spec),
        terms: PairTerms::new(spec, shard.key_lists.as_deref()),
        q,
        dout,
        k,
        v,
        listed,
        statistics,
        query_rows: shard.queries.rows(),
        key_rows: block.rows.rows(),
        record: spec.gradient_row_layout(),
    };
    // one task adds all terms of a query to the gradient of the list bias, in one order
    let has_bias = !list_bias_gradient.is_empty();
    let dbias = Mutex::new(&mut list_bias_gradient[..]);
    let dbias = has_bias.then_some(&dbias);
    let mut in_order: Vec<&mut QueryBlock<Acc<E>>> = blocks.iter_mut().collect();
    if has_bias {
        in_order.sort_by_key(|block| (block.rows.start, block.batch, block.kv_head));
    }
    let tasks = in_order.chunk_by_mut(|a, b| has_bias && a.rows.start == b.rows.start);
    team.run(scratch, tasks, Some(&mut *tick), |scratch, blocks, ticker| {
        blocks.iter_mut().for_each(|block| pass.add_dq(scratch, block, dbias, ticker));
    });
    let sums = elements_mut::<Acc<E>>(bytes_mut(partial_grad)?, keys, &pass.record)?;
    let record = annulus_core::index(pass.record.bytes()) / size_of::<Acc<E>>();
    let task_keys = keys.div_ceil(team.threads() * TASKS_PER_THREAD).max(MIN_TASK_KEYS);
    let tasks = sums.chunks_mut((record * task_keys).max(1)).enumerate();
    team.run(scratch, tasks, Some(tick), |scratch, (task, records), ticker| {
        pass.write_dkv(scratch, task * task_keys, (records, record), ticker);
    });
    Ok(true)
}

/// Gradient of the list bias, by entry of the key lists.
type ListBiasGradient<'a, A> = Mutex<&'a mut [A]>;

struct GradientRows<'a, E: TileInput> {
    geometry: &'a Geometry,
    rule: ScoreRule<Acc<E>>,
    terms: PairTerms<'a>,
    q: TileSource<'a, E>,
    dout: TileSource<'a, E>,
    k: TileSource<'a, E>,
    v: TileSource<'a, E>,
    listed: &'a ListedBlock,
    statistics: &'a RowStatistics<Acc<E>>,
    query_rows: &'a [u64],
    key_rows: &'a [u64],
    record: RowLayout,
}

impl<E: TileInput> GradientRows<'_, E> {
    /// Adds to dq of all queries and query heads of a block.
    fn add_dq(
        &self,
        scratch: &mut ThreadScratch<Acc<E>>,
        block: &mut QueryBlock<Acc<E>>,
        dbias: Option<&ListBiasGradient<'_, Acc<E>>>,
        ticker: &mut Ticker<'_>,
    ) {
        let width = self.geometry.padded_head_dim();
        let group_heads = self.geometry.heads(block.kv_head).enumerate();
        for (group_head, head) in group_heads {
            let first = block.lane(group_head, 0) * width;
            let rows = block.partial.sums[first..].chunks_exact_mut(width.max(1));
            for (row, dq) in rows.take(block.rows.len()).enumerate() {
                if row.is_multiple_of(16) && ticker.should_stop() {
                    return;
                }
                let at = [block.batch, head, block.kv_head, block.rows.start + row];
                self.add_dq_row(&mut scratch.gather, at, dq, dbias);
            }
        }
    }

    fn add_dq_row(
        &self,
        scratch: &mut GatherScratch<Acc<E>>,
        [batch, head, kv_head, query]: [usize; 4],
        dq: &mut [Acc<E>],
        dbias: Option<&ListBiasGradient<'_, Acc<E>>>,
    ) {
        let pairs = &self.listed.pairs;
        let of_query = pairs.pairs(pairs.list(batch, head, query));
        if of_query.is_empty() {
            return;
        }
        let ([q, dout], ..) = scratch.split();
        widen(self.q.plane(batch, head).slice(query).unwrap_or_default(), q);
        widen(self.dout.plane(batch, head).slice(query).unwrap_or_default(), dout);
        let planes = [&self.k, &self.v].map(|source| source.plane(batch, kv_head));
        let line = batch * self.geometry.dims.q_heads + head;
        let &[max, inverse_sum, delta, _] = &self.statistics.of(line, query..query + 1)[0];
        for (start, keys) in Gathered::parts(pairs.all_keys(), of_query) {
            let (own, _, scratch, lists) = scratch.split();
            let entries = pairs.entries(start..start + keys.rows.len());
            let rows = keys.rows.iter();
            let rows = rows.map(|&key| [self.query_rows[query], self.key_rows[key as usize]]);
            let keep = self.terms.keep([batch, head], rows, lists[KEEP]);
            let has_bias = self.terms.bias(entries.iter().map(|&e| e as usize), lists[BIAS]);
            let [keep_list, bias_list, .., of_bias] = lists;
            let of_bias = &mut of_bias[..keys.rows.len()];
            of_bias.fill(Acc::<E>::ZERO);
            let row = GradientRow {
                other: keys,
                own: own.map(|row| &*row),
                planes,
                rule: self.rule,
                bias: has_bias.then_some(bias_list),
                keep: keep.then_some(keep_list),
                statistics: PairStatistics::One([max, inverse_sum, delta]),
                scratch,
                out: &mut *dq,
                out_value: None,
                dbias: dbias.map(|_| &mut *of_bias),
            };
            Acc::<E>::run_kernel(self.geometry.token, 1, row);
            if let Some(dbias) = dbias {
                let mut dbias = lock(dbias);
                let terms = entries.iter().zip(&*of_bias);
                terms.for_each(|(&entry, &ds)| dbias[entry as usize] += ds);
            }
        }
    }

    /// Writes dk and dv of the keys from `first` on to their records, of `record` elements each.
    fn write_dkv(
        &self,
        scratch: &mut ThreadScratch<Acc<E>>,
        first: usize,
        (records, record): (&mut [Acc<E>], usize),
        ticker: &mut Ticker<'_>,
    ) {
        let dims = self.geometry.dims;
        let scale = Acc::<E>::from_f64(self.terms.scale());
        let at = |field, batch, kv_head| {
            annulus_core::index(self.record.offset(field, batch, kv_head)) / size_of::<Acc<E>>()
        };
        for batch in 0..dims.batch {
            for kv_head in 0..dims.kv_heads {
                let offsets = [at(0, batch, kv_head), at(1, batch, kv_head)];
                for (row, record) in records.chunks_exact_mut(record).enumerate() {
                    if row.is_multiple_of(16) && ticker.should_stop() {
                        return;
                    }
                    self.sum_dkv(&mut scratch.gather, [batch, kv_head, first + row]);
                    let (_, [dk, dv], ..) = scratch.gather.split();
                    let of_dk = &mut record[offsets[0]..][..dims.head_dim];
                    of_dk.iter_mut().zip(dk).for_each(|(into, dk)| *into = scale * *dk);
                    record[offsets[1]..][..dims.value_dim].copy_from_slice(&dv[..dims.value_dim]);
                }
            }
        }
    }

    /// Computes dk, not scaled, and dv of one key of one KV head in the sums of the scratch.
    fn sum_dkv(&self, scratch: &mut GatherScratch<Acc<E>>, [batch, kv_head, key]: [usize; 3]) {
        let ([k, v], sums, ..) = scratch.split();
        sums.into_iter().for_each(|sums| sums.fill(Acc::<E>::ZERO));
        widen(self.k.plane(batch, kv_head).slice(key).unwrap_or_default(), k);
        widen(self.v.plane(batch, kv_head).slice(key).unwrap_or_default(), v);
        let transposed = &self.listed.transposed;
        for head in self.geometry.heads(kv_head) {
            let of_key = transposed.pairs(batch, head, key);
            let planes = [&self.q, &self.dout].map(|source| source.plane(batch, head));
            let line = batch * self.geometry.dims.q_heads + head;
            let statistics = self.statistics.of(line, 0..self.statistics.rows);
            for (start, queries) in Gathered::parts(transposed.all_queries(), of_key) {
                let (own, [dk, dv], scratch, mut lists) = scratch.split();
                let rows = queries.rows.iter();
                let rows = rows.map(|&query| [self.query_rows[query as usize], self.key_rows[key]]);
                let keep = self.terms.keep([batch, head], rows, lists[KEEP]);
                let pairs = transposed.numbers(start..start + queries.rows.len());
                let entries = self.listed.pairs.entries(0..self.listed.pairs.len());
                let entries = pairs.iter().map(|&pair| entries[pair as usize] as usize);
                let has_bias = self.terms.bias(entries, lists[BIAS]);
                for (at, &query) in queries.rows.iter().enumerate() {
                    let &[max, inverse_sum, delta, _] = &statistics[query as usize];
                    for (list, number) in (STATISTICS..).zip([max, inverse_sum, delta]) {
                        lists[list][at] = number;
                    }
                }
                let [keep_list, bias_list, max, inverse_sum, delta, _] =
                    lists.each_mut().map(|list| &**list);
                let row = GradientRow {
                    other: queries,
                    own: own.map(|row| &*row),
                    planes,
                    rule: self.rule,
                    bias: has_bias.then_some(bias_list),
                    keep: keep.then_some(keep_list),
                    statistics: PairStatistics::Each([max, inverse_sum, delta]),
                    scratch,
                    out: dk,
                    out_value: Some(dv),
                    dbias: None,
                };
                Acc::<E>::run_kernel(self.geometry.token, 1, row);
            }
        }
    }
}
