//! Backward pass over one block of keys by listed rows.
//!
//! ```text
//! for each (batch row, KV head):
//!     pack its K and V, the rows that have pairs                             parallel
//!     for each query head of the KV head:
//!         pack its Q and dO, the rows that have pairs                        parallel
//!         for each range of queries:                                         parallel
//!             dq += Σ dS·k     over the keys of each query
//!         for each range of keys:                                            parallel
//!             dk += Σ dS·q     dv += Σ P·dO     over the queries of each key, ascending
//! ```
//! Scores are computed twice, so that each sum has one writer and one order: seven products a pair,
//! where tiles take five.

use std::{ops::Range, sync::Mutex};

use annulus_core::{
    BackwardInputs, Block, Element, Host, HostBuffer, HostView, Result, RowLayout, Tick,
};

use crate::{
    forward::query_pass::keys_and_values,
    gather::{
        block::{
            BIAS, BIAS_GRADIENT, GatherScratch, KEEP, ListedBlock, STATISTICS, contiguous, rule,
        },
        forward::PairTerms,
        operands::{GROUP, MergedList, RowsView},
        rows::{GradientRows, Others, PART, PairStatistics, ScoreRule},
    },
    simd::element::Float,
    threads::{
        ordered_reduction::lock,
        team::{Team, Ticker},
    },
    tile::{
        geometry::Geometry,
        input::{Acc, TileInput, TileSource, array, elements_mut},
        tile_mask::TILE,
    },
    workspace::{
        query_block::{QueryBlock, RowStatistics},
        records::bytes_mut,
        scratch::ThreadScratch,
        state::PassState,
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
    if !listed.gathers(shard, block.rows)? {
        return Ok(false);
    }
    listed.transpose(shard)?;
    let mut copies = [None, None, None, None];
    let [of_q, of_dout, of_k, of_v] = &mut copies;
    let (k, v) = keys_and_values(shard, &inputs.forward, block)?;
    let q = contiguous(TileSource::<E>::tensor(array("q", inputs.forward.q)?), of_q);
    let dout = contiguous(TileSource::<E>::tensor(array("dout", inputs.dout)?), of_dout);
    let [k, v] = [contiguous(k, of_k), contiguous(v, of_v)];
    scratch.iter_mut().try_for_each(|scratch| scratch.gather.allocate(geometry))?;
    let spec = &*shard.spec;
    let mut rows = std::mem::take(&mut listed.rows);
    let pass = GradientPass {
        geometry,
        rule: rule(spec),
        terms: PairTerms::new(spec, shard.key_lists.as_deref()),
        by_query: [&q, &dout],
        by_key: [&k, &v],
        listed,
        statistics,
        query_rows: shard.queries.rows(),
        key_rows: block.rows.rows(),
        record: spec.gradient_row_layout(),
    };
    let has_bias = !list_bias_gradient.is_empty();
    let dbias = Mutex::new(&mut list_bias_gradient[..]);
    let dbias = has_bias.then_some(&dbias);
    let sums = elements_mut(bytes_mut(partial_grad)?, block.rows.len(), &pass.record)?;
    let mut in_order: Vec<&mut QueryBlock<Acc<E>>> = blocks.iter_mut().collect();
    in_order.sort_by_key(|block| (block.batch, block.kv_head, block.rows.start));
    let plane_of = |block: &QueryBlock<_>| (block.batch, block.kv_head);
    let dims = [geometry.dims.head_dim, geometry.dims.value_dim];
    if in_order.is_empty() {
        sums.fill(Acc::<E>::ZERO);
    }
    let [of_keys, of_queries] = &mut rows;
    for blocks in in_order.chunk_by_mut(|a, b| plane_of(a) == plane_of(b)) {
        let (batch, kv_head) = plane_of(blocks[0]);
        let planes = pass.by_key.map(|source| source.plane(batch, kv_head));
        of_keys.fill((geometry.token, team, &mut *scratch), planes, &listed.keys, dims)?;
        for (group_head, head) in geometry.heads(kv_head).enumerate() {
            let planes = pass.by_query.map(|source| source.plane(batch, head));
            of_queries.fill(
                (geometry.token, team, &mut *scratch),
                planes,
                &listed.queries,
                dims,
            )?;
            let views = [of_queries.view(), of_keys.view()];
            let heads = [group_head, head];
            team.run(scratch, blocks.iter_mut(), Some(&mut *tick), |scratch, block, ticker| {
                pass.add_dq(&mut scratch.gather, block, heads, views, dbias, ticker);
            });
            let views = [of_keys.view(), of_queries.view()];
            let tasks = pass.key_tasks(team.threads(), sums);
            team.run(scratch, tasks, Some(&mut *tick), |scratch, task, ticker| {
                pass.add_dkv(scratch, [batch, head], task, views, ticker);
            });
        }
    }
    listed.rows = rows;
    Ok(true)
}

/// Gradient of the list bias, by entry of the key lists.
type ListBiasGradient<'a, A> = Mutex<&'a mut [A]>;

struct GradientPass<'a, E: TileInput> {
    geometry: &'a Geometry,
    rule: ScoreRule<Acc<E>>,
    terms: PairTerms<'a>,
    /// Q and dO.
    by_query: [&'a TileSource<'a, E>; 2],
    /// K and V.
    by_key: [&'a TileSource<'a, E>; 2],
    listed: &'a ListedBlock<Acc<E>>,
    statistics: &'a RowStatistics<Acc<E>>,
    query_rows: &'a [u64],
    key_rows: &'a [u64],
    record: RowLayout,
}

/// Keys of a task: their numbers in the lists, their indices in the block, and the records of the
/// latter.
struct KeyRange<'a, A> {
    numbers: Range<usize>,
    first: usize,
    records: &'a mut [A],
}

/// Rows of one list: their place in the scratch, and the list with the number of its first pair.
struct RowsOfList<'a> {
    at: usize,
    list: MergedList<'a>,
    first_pair: usize,
}

impl<E: TileInput> GradientPass<'_, E> {
    /// Adds to dq of all queries of a block, of one query head, from `rows`: Q and dO, and K and V.
    fn add_dq(
        &self,
        scratch: &mut GatherScratch<Acc<E>>,
        block: &mut QueryBlock<Acc<E>>,
        [group_head, head]: [usize; 2],
        rows: [RowsView<'_, Acc<E>>; 2],
        dbias: Option<&ListBiasGradient<'_, Acc<E>>>,
        ticker: &mut Ticker<'_>,
    ) {
        let ListedBlock { pairs, merged, queries: listed, .. } = self.listed;
        if listed.is_empty() {
            return;
        }
        let width = self.geometry.padded_head_dim();
        let plane = pairs.list(block.batch, head, 0) / pairs.queries();
        for strip in self.geometry.strips(block.rows.len()) {
            if ticker.should_stop() {
                return;
            }
            let queries = strip.rows_from(block.rows.start);
            let at = block.lane(group_head, strip.rows.start) * width;
            let dq = &mut block.partial.sums[at..][..strip.width * width];
            for first in (0..queries.len()).step_by(GROUP) {
                let query = queries.start + first;
                let at = [block.batch, head, query];
                if let Some(list) = merged.get(plane, query) {
                    let of = RowsOfList { at: first, list, first_pair: 0 };
                    self.add_dq_rows(scratch, at, of, rows, dq, dbias);
                    continue;
                }
                for at in first..queries.len().min(first + GROUP) {
                    let query = queries.start + at;
                    let of_query = pairs.pairs(pairs.list(block.batch, head, query));
                    let first_pair = of_query.start;
                    let list = MergedList::of_row(&pairs.all_keys()[of_query]);
                    let of = RowsOfList { at, list, first_pair };
                    let at = [block.batch, head, query];
                    self.add_dq_rows(scratch, at, of, rows, dq, dbias);
                }
            }
        }
    }

    fn add_dq_rows(
        &self,
        scratch: &mut GatherScratch<Acc<E>>,
        [batch, head, query]: [usize; 3],
        RowsOfList { at, list, first_pair }: RowsOfList<'_>,
        [queries, keys]: [RowsView<'_, Acc<E>>; 2],
        dq: &mut [Acc<E>],
        dbias: Option<&ListBiasGradient<'_, Acc<E>>>,
    ) {
        let [dim, _] = keys.dims;
        let own = (queries, numbers_of_group(&self.listed.queries, query));
        let line = batch * self.geometry.dims.q_heads + head;
        let group = query..self.statistics.rows.min(query + list.rows());
        let mut of_group = [[Acc::<E>::ZERO; GROUP]; 3];
        for (l, row) in self.statistics.of(line, group.clone()).iter().enumerate() {
            of_group.iter_mut().zip(row).for_each(|(into, &number)| into[l] = number);
        }
        for (range, list) in list.parts(PART) {
            let (_, _, scratch, mut lists) = scratch.split();
            let number = |&key: &u32| self.key_rows[self.listed.keys[key as usize] as usize];
            let key_rows = list.elements.iter().map(number);
            let rows = self.query_rows[group.clone()].iter();
            let rows = rows.map(|&i| key_rows.clone().map(move |j| [i, j]));
            let keep = self.terms.keep([batch, head], rows, lists[KEEP]);
            let pairs = first_pair + range.start..first_pair + range.end;
            let has_bias = self.terms.has_bias();
            let entries = if has_bias { self.listed.pairs.entries(pairs) } else { &[] };
            self.terms.bias(entries.iter().copied(), lists[BIAS]);
            let [keep_list, bias_list, of_bias, ..] = lists.each_mut();
            let rows = GradientRows {
                others: Others { list, rows: keys },
                own,
                rule: self.rule,
                bias: has_bias.then_some(&**bias_list),
                keep: keep.then_some(&**keep_list),
                statistics: PairStatistics::Own(of_group.each_ref().map(|list| &list[..])),
                scratch,
                out: &mut dq[at * dim..],
                out_value: None,
                dbias: dbias.map(|_| &mut **of_bias),
            };
            rows.run_rows(self.geometry.token);
            if let Some(dbias) = dbias {
                let mut dbias = lock(dbias);
                let terms = entries.iter().zip(&*lists[BIAS_GRADIENT]);
                terms.for_each(|(&entry, &ds)| dbias[entry as usize] += ds);
            }
        }
    }

    /// Iterates over the tasks of the keys, each of which owns their records.
    fn key_tasks<'s>(
        &'s self,
        threads: usize,
        sums: &'s mut [Acc<E>],
    ) -> impl Iterator<Item = KeyRange<'s, Acc<E>>> + Send {
        let keys = &self.listed.keys;
        let record = self.record_len();
        let of_task = keys.len().div_ceil(threads * TASKS_PER_THREAD).max(MIN_TASK_KEYS);
        let of_task = of_task.next_multiple_of(GROUP);
        let mut rest = sums;
        let mut first = 0;
        (0..keys.len().max(1)).step_by(of_task).map(move |number| {
            let numbers = number..keys.len().min(number + of_task);
            let end = keys.get(numbers.end).map(|&key| key as usize);
            let count = end.map_or(rest.len() / record, |end| end - first);
            let (records, later) = std::mem::take(&mut rest).split_at_mut(count * record);
            rest = later;
            let range = KeyRange { numbers, first, records };
            first += count;
            range
        })
    }

    /// Returns the elements of a record.
    fn record_len(&self) -> usize {
        annulus_core::index(self.record.bytes()) / size_of::<Acc<E>>()
    }

    /// Adds the terms of one query head to dk and dv of a task's keys, from `rows`: K and V, and Q
    /// and dO. The first head of a KV head overwrites them.
    fn add_dkv(
        &self,
        scratch: &mut ThreadScratch<Acc<E>>,
        [batch, head]: [usize; 2],
        KeyRange { numbers, first, records }: KeyRange<'_, Acc<E>>,
        rows: [RowsView<'_, Acc<E>>; 2],
        ticker: &mut Ticker<'_>,
    ) {
        let dims = self.geometry.dims;
        let kv_head = head / dims.group();
        let is_first = head.is_multiple_of(dims.group());
        let scale = Acc::<E>::from_f64(self.terms.scale());
        let record = self.record_len();
        let fields = [0, 1].map(|field| {
            let at = self.record.offset(field, batch, kv_head);
            annulus_core::index(at) / size_of::<Acc<E>>()
        });
        let mut next = first;
        for tile in numbers.clone().step_by(TILE) {
            if ticker.should_stop() {
                return;
            }
            let tile = tile..numbers.end.min(tile + TILE);
            self.sum_dkv(&mut scratch.gather, [batch, head], &tile, rows);
            let (_, sums, ..) = scratch.gather.split();
            for (row, &key) in self.listed.keys[tile].iter().enumerate() {
                let key = key as usize;
                let parts = fields.iter().zip([dims.head_dim, dims.value_dim]);
                let factors = [scale, Acc::<E>::ONE];
                for (((&field, dim), factor), (sums, padded)) in
                    parts.zip(factors).zip(sums.iter().zip(rows[0].dims))
                {
                    let of_key = |key: usize| (key - first) * record + field;
                    if is_first {
                        (next..key).for_each(|key| {
                            records[of_key(key)..][..dim].fill(Acc::<E>::ZERO);
                        });
                    }
                    let into = &mut records[of_key(key)..][..dim];
                    let terms = sums[row * padded..].iter().map(|&sum| factor * sum);
                    let pairs = into.iter_mut().zip(terms);
                    match is_first {
                        true => pairs.for_each(|(into, term)| *into = term),
                        false => pairs.for_each(|(into, term)| *into += term),
                    }
                }
                next = key + 1;
            }
        }
        if is_first {
            for record in records[(next - first) * record..].chunks_exact_mut(record) {
                for (field, dim) in fields.into_iter().zip([dims.head_dim, dims.value_dim]) {
                    record[field..][..dim].fill(Acc::<E>::ZERO);
                }
            }
        }
    }

    /// Computes dk, not scaled, and dv of up to [`TILE`] keys in the sums of the scratch.
    fn sum_dkv(
        &self,
        scratch: &mut GatherScratch<Acc<E>>,
        [batch, head]: [usize; 2],
        numbers: &Range<usize>,
        rows: [RowsView<'_, Acc<E>>; 2],
    ) {
        let ListedBlock { transposed, merged_by_key, keys, .. } = self.listed;
        let (_, sums, ..) = scratch.split();
        sums.into_iter().for_each(|sums| sums.fill(Acc::<E>::ZERO));
        let plane = transposed.list(batch, head, 0) / keys.len();
        for first in (0..numbers.len()).step_by(GROUP) {
            let key = numbers.start + first;
            if let Some(list) = merged_by_key.get(plane, key) {
                let of = RowsOfList { at: first, list, first_pair: 0 };
                self.sum_dkv_rows(scratch, [batch, head, key], of, rows);
                continue;
            }
            for at in first..numbers.len().min(first + GROUP) {
                let key = numbers.start + at;
                let of_key = transposed.pairs(transposed.list(batch, head, key));
                let first_pair = of_key.start;
                let list = MergedList::of_row(&transposed.all_queries()[of_key]);
                let of = RowsOfList { at, list, first_pair };
                self.sum_dkv_rows(scratch, [batch, head, key], of, rows);
            }
        }
    }

    fn sum_dkv_rows(
        &self,
        scratch: &mut GatherScratch<Acc<E>>,
        [batch, head, key]: [usize; 3],
        RowsOfList { at, list, first_pair }: RowsOfList<'_>,
        [own, queries]: [RowsView<'_, Acc<E>>; 2],
    ) {
        let [dim, value_dim] = queries.dims;
        let ListedBlock { pairs, transposed, keys, queries: query_ids, .. } = self.listed;
        let line = batch * self.geometry.dims.q_heads + head;
        let statistics = self.statistics.of(line, 0..self.statistics.rows);
        let group = &keys[key..keys.len().min(key + list.rows())];
        let own_numbers = std::array::from_fn(|l| (key + l).min(keys.len() - 1) as u32);
        for (range, list) in list.parts(PART) {
            let (_, [dk, dv], scratch, mut lists) = scratch.split();
            let ids = list.elements.iter().map(|&query| query_ids[query as usize] as usize);
            let numbers = ids.clone().map(|query| self.query_rows[query]);
            let rows = group.iter().map(|&key| {
                let row = self.key_rows[key as usize];
                numbers.clone().map(move |query| [query, row])
            });
            let keep = self.terms.keep([batch, head], rows, lists[KEEP]);
            let has_bias = self.terms.has_bias();
            if has_bias {
                let pair = transposed.numbers(first_pair + range.start..first_pair + range.end);
                let entries = pairs.entries(0..pairs.len());
                let entries = pair.iter().map(|&pair| entries[pair as usize]);
                self.terms.bias(entries, lists[BIAS]);
            }
            for (at, query) in ids.enumerate() {
                let &[max, inverse_sum, delta, _] = &statistics[query];
                for (list, number) in (STATISTICS..).zip([max, inverse_sum, delta]) {
                    lists[list][at] = number;
                }
            }
            let [keep_list, bias_list, _, max, inverse_sum, delta] =
                lists.each_mut().map(|list| &**list);
            let rows = GradientRows {
                others: Others { list, rows: queries },
                own: (own, own_numbers),
                rule: self.rule,
                bias: has_bias.then_some(bias_list),
                keep: keep.then_some(keep_list),
                statistics: PairStatistics::Listed([max, inverse_sum, delta]),
                scratch,
                out: &mut dk[at * dim..],
                out_value: Some(&mut dv[at * value_dim..]),
                dbias: None,
            };
            rows.run_rows(self.geometry.token);
        }
    }
}

/// Returns the numbers, in the ascending list `queries`, of the queries of the group that begins
/// with `query`. Of one that is not in the list it is that of another: all its pairs are masked.
fn numbers_of_group(queries: &[u32], query: usize) -> [u32; GROUP] {
    let mut next = queries.partition_point(|&listed| (listed as usize) < query);
    std::array::from_fn(|l| {
        let number = next.min(queries.len().saturating_sub(1)) as u32;
        next += usize::from(queries.get(next).is_some_and(|&at| at as usize == query + l));
        number
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queries_without_pairs_have_no_number_of_their_own() {
        let queries = [0, 1, 2, 3, 5, 7, 12];
        assert_eq!(numbers_of_group(&queries, 0), [0, 1, 2, 3]);
        // 4 and 6 are not listed
        assert_eq!(numbers_of_group(&queries, 4), [4, 4, 5, 5]);
        let last = numbers_of_group(&queries, 12);
        assert!(last[0] == 6 && last.iter().all(|&number| (number as usize) < queries.len()));
    }
}
