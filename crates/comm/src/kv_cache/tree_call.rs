//! A round of a call in the reproducible order.
//!
//! ```text
//! for each page of this rank:  (m, acc, ℓ) of the queries     -> a record for each rank
//! reduce-scatter of the records: each rank receives those of its score rows, of all pages
//! the tree over all pages, sinks, division, rounding            `page_tree.rs`
//! all-gather of the results
//! ```
//! Pages are those that any query of the round attends to (`page_set.rs`).

use std::{
    ops::Range,
    sync::Arc,
    time::{Duration, Instant},
};

use annulus_core::{
    Arrived, Backend, Dims, Error, ForwardPass, Host, HostBuffer, HostTensors, HostView,
    HostViewMut, Inputs, LeafMerges, MessageHeader, Outputs, RankLeaves, RankShard, Result, Rows,
    Spec, Workspace, index, memory,
};

use super::{
    KvCache,
    page_set::PageSet,
    page_set::Pages,
    page_tree::PageTree,
    partial_call::Rounds,
    tree_messages::{PageResult, TreeMessages, too_short},
};
use crate::ring::{PassKind, in_flight::InFlight, step_events::Observer};

impl<B: Backend<Space: HostTensors>> KvCache<B> {
    /// Returns the messages of a round with the queries at the row numbers `queries`, to a cache of
    /// `len` rows.
    pub(super) fn tree_messages(&self, queries: Range<u64>, len: u64) -> TreeMessages {
        let Spec { dims, dtype, .. } = self.spec;
        let count = queries.end - queries.start;
        let visible = Arc::new(PageSet::visible(&self.spec, self.pages, len, queries));
        TreeMessages { dims, dtype, pages: self.pages, visible, queries: count }
    }

    /// Allocates what a call with these rounds needs.
    pub(super) fn prepare_tree(&mut self, rounds: &Rounds) -> Result<()> {
        let rows = rounds.rows(0);
        let of_queries = self.query_rows(&rows)?;
        let shard = page_shard(&self.local_spec, &of_queries, self.pages, 0, self.len)?;
        self.attend_to_shard(&shard)?;
        // the longest round, with the pages of all rounds: as much as any round needs
        let of_call = self.tree_messages(rounds.all(), self.len);
        let messages = TreeMessages { queries: rows.end - rows.start, ..of_call };
        let own = messages.rows_of(self.pages.rank);
        let own_rows = own.end - own.start;
        let visible = &messages.visible;
        PageTree::prepare(&mut self.tree, &self.backend, &self.spec, own_rows, visible)?;
        // messages grow with the pages: allocated for at most twice as many
        let bytes = [messages.send_bytes(), messages.receive_bytes()];
        let [sent, received] = bytes.map(u64::next_power_of_two);
        self.buffers.reserve(sent, received, self.ranks)
    }

    /// Computes the queries `q`, which have the row numbers `rows`, over this rank's pages,
    /// exchanges the results and merges them.
    pub(super) fn tree_round(
        &mut self,
        q: HostView<'_>,
        rows: Range<u64>,
        sinks: Option<&HostView<'_>>,
        results: Outputs<HostViewMut<'_>>,
        tag: u64,
    ) -> Result<Duration> {
        let none = || Error::internal("a KV cache without memory for a call");
        let of_queries = &self.query_rows(&rows)?;
        let messages = self.tree_messages(rows, self.len);
        let Self { backend, transport, segments, workspace, tree, buffers, .. } = self;
        let (local_spec, pages, len) = (&self.local_spec, self.pages, self.len);
        let workspace = workspace.as_mut().ok_or_else(none)?;
        let observer = Observer::of_messages(None, self.rank, PassKind::Forward, Instant::now());
        let mut in_flight = InFlight::new(transport.as_mut(), tag, self.lengths, observer);

        let mut own = buffers.own.take().ok_or_else(none)?;
        let records = own.bytes_mut().ok_or_else(none)?;
        let mut page_results = PageResults::new(&messages)?;
        for (index, page) in (0..).zip(messages.visible.numbers_of(pages.rank)) {
            let block = segments.block(page / pages.ranks)?;
            let shard = page_shard(local_spec, of_queries, pages, page, len)?;
            workspace.update(&shard)?;
            // the rank's rows are blocks: none is in the tensors of the call
            let Dims { batch, kv_heads, head_dim, value_dim, .. } = messages.dims;
            let empty = |dim| HostView::of_bytes(&[], messages.dtype, [batch, 0, kv_heads, dim]);
            let [k, v] = [empty(head_dim)?, empty(value_dim)?];
            let inputs = Inputs::new(q.reborrow(), k, v);
            let mut pass = workspace.forward(inputs, &mut || in_flight.tick())?;
            pass.attend(&block, &mut || in_flight.tick())?;
            pass.finish(&mut page_results.outputs()?, &mut || in_flight.tick())?;
            in_flight.check()?;
            messages.write_page(index, &page_results.of_page()?, records)?;
        }

        let source = (own, ());
        let receives = &mut buffers.receives;
        in_flight
            .post(&messages.page_transfers(), Some(&source), |_| receives.pop().ok_or_else(none))?;
        let arrived = in_flight.wait_all()?;
        let mut own = source.0;
        if let Some(tree) = tree {
            tree.attend_to(&messages.visible)?;
            let region = messages.pages_to(pages.rank, pages.rank);
            let region = index(region.start)..index(region.end);
            let bytes = own.bytes().get(region).ok_or_else(too_short)?;
            tree.gather(backend, &messages, pages.rank, bytes)?;
            for (header, message) in &arrived {
                let bytes = message.buffer.bytes().get(..index(header.bytes()));
                tree.gather(backend, &messages, header.peer as u64, bytes.ok_or_else(too_short)?)?;
            }
            let bytes = own.bytes_mut().ok_or_else(none)?;
            tree.merge(&messages, sinks, bytes, &mut || in_flight.tick())?;
            in_flight.check()?;
        }
        receives.extend(arrived.into_iter().map(|(_, message)| message.buffer));

        let source = (own, ());
        in_flight.post(&messages.result_transfers(), Some(&source), |_| {
            receives.pop().ok_or_else(none)
        })?;
        let arrived = in_flight.wait_all()?;
        write_results(&messages, (pages.rank, &source.0), &arrived, results)?;
        receives.extend(arrived.into_iter().map(|(_, message)| message.buffer));
        buffers.own = Some(source.0);
        Ok(in_flight.waited())
    }
}

/// Reads the results of all ranks and writes them to the outputs.
fn write_results(
    messages: &TreeMessages,
    (rank, own): (u64, &HostBuffer),
    arrived: &[(MessageHeader, Arrived<Host>)],
    results: Outputs<HostViewMut<'_>>,
) -> Result<()> {
    let rows = index(messages.rows_of(messages.pages.ranks - 1).end);
    let mut out = memory::filled("the results", rows * messages.dims.value_dim, 0.0)?;
    let mut lse = memory::filled("lse", rows, 0.0)?;
    let of_ranks = arrived.iter().map(|(header, message)| (header.peer as u64, &message.buffer));
    for (rank, buffer) in of_ranks.chain([(rank, own)]) {
        messages.read_results(rank, buffer.bytes(), &mut out, &mut lse)?;
    }
    let Outputs { out: mut all, lse: mut statistics, .. } = results;
    all.write(&out);
    statistics.write(&lse);
    Ok(())
}

/// Memory of the results of one page, used for one page after another.
struct PageResults {
    messages: TreeMessages,
    /// acc `[b, queries, q_heads, dv]`, then max, sum, lse and ties `[b, q_heads, queries]`.
    numbers: HostBuffer,
}

impl PageResults {
    fn new(messages: &TreeMessages) -> Result<Self> {
        let numbers = HostBuffer::zeroed(Self::bytes(messages, messages.dims.value_dim + 4))?;
        Ok(Self { messages: messages.clone(), numbers })
    }

    /// Returns the bytes of `count` numbers of each score row.
    fn bytes(messages: &TreeMessages, count: usize) -> u64 {
        let rows = messages.rows_of(messages.pages.ranks - 1).end;
        rows * (count * messages.dtype.accumulator().bytes()) as u64
    }

    /// Returns the outputs of a pass.
    fn outputs(&mut self) -> Result<Outputs<HostViewMut<'_>>> {
        let Dims { batch, q_heads, value_dim, .. } = self.messages.dims;
        let queries = index(self.messages.queries);
        let sums = self.messages.dtype.accumulator();
        let acc_bytes = index(Self::bytes(&self.messages, value_dim));
        let statistic_bytes = index(Self::bytes(&self.messages, 1));
        let numbers = self.numbers.bytes_mut().ok_or_else(too_short)?;
        let (acc, statistics) = numbers.split_at_mut(acc_bytes);
        let mut statistics = statistics.chunks_exact_mut(statistic_bytes);
        let mut statistic = || {
            let bytes = statistics.next().ok_or_else(too_short)?;
            HostViewMut::of_bytes(bytes, sums, [batch, q_heads, queries, 1])
        };
        Ok(Outputs {
            out: HostViewMut::of_bytes(acc, sums, [batch, queries, q_heads, value_dim])?,
            max: Some(statistic()?),
            sum: Some(statistic()?),
            lse: statistic()?,
            ties: Some(statistic()?),
            out_residual: None,
            statistics: None,
            head_statistics: None,
        })
    }

    /// Returns the page's part of the messages.
    fn of_page(&self) -> Result<PageResult<'_>> {
        let acc_bytes = index(Self::bytes(&self.messages, self.messages.dims.value_dim));
        let statistic_bytes = index(Self::bytes(&self.messages, 1));
        let (acc, statistics) = self.numbers.bytes().split_at(acc_bytes);
        let mut statistics = statistics.chunks_exact(statistic_bytes);
        let mut statistic = || statistics.next().ok_or_else(too_short);
        Ok(PageResult { acc, max: statistic()?, sum: statistic()? })
    }
}

/// Returns the input of the workspace for these queries and page `page`, counted over all ranks, of
/// a cache of `len` rows.
fn page_shard(
    spec: &Arc<Spec>,
    queries: &Arc<Rows>,
    pages: Pages,
    page: u64,
    len: u64,
) -> Result<RankShard> {
    let leaf_rows = spec.leaf_rows.unwrap_or(pages.rows);
    let first = page * pages.rows;
    // the last page has the leaves that it has rows of
    let end = (first + pages.rows).min(len.max(first));
    let leaves = RankLeaves {
        rows: leaf_rows,
        keys: LeafMerges::of_arrivals(first / leaf_rows..end.div_ceil(leaf_rows))?,
        queries: LeafMerges::default(),
        sends_queries: false,
    };
    Ok(RankShard {
        spec: Arc::clone(spec),
        queries: Arc::clone(queries),
        keys: Arc::default(),
        attention_mask: None,
        key_lists: None,
        received_lists: None,
        most_block_rows: pages.rows,
        most_query_rows: queries.len() as u64,
        leaves: Some(Arc::new(leaves)),
    })
}
