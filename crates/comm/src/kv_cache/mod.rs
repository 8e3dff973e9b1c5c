//! One rank of a KV cache that is sharded over ranks, for decoding and chunked prefill.
//!
//! ```text
//! append    own pages of the new rows -> segments                  local, no messages
//! attend    out, lse of the queries over the rows of this rank     the same queries on all ranks
//!           all-gather of (out, lse), merge in the order of ranks  one message to each rank
//! ```
//! The messages of a call depend on the queries alone, not on the number of cached rows. In the
//! reproducible order they grow with the number of pages (`tree_call.rs`).
//!
//! | file | content |
//! |---|---|
//! | `create.rs` | checks and agreement of a new cache |
//! | `pages.rs` | rows of each rank |
//! | `segments.rs` | their memory, in wire order |
//! | `partials.rs` | messages, and their merge |
//! | `tree_call.rs` | a round of a call in the reproducible order |
//! | `tree_messages.rs` | its messages |
//! | `page_tree.rs` | its merge |

mod create;
mod page_tree;
mod pages;
mod partials;
mod segments;
mod tree_call;
mod tree_messages;

use std::{
    ops::Range,
    sync::Arc,
    time::{Duration, Instant},
};

use annulus_core::{
    AgreedLengths, Backend, Channel, Dims, Error, ForwardPass, HostTensors, HostView, HostViewMut,
    Inputs, MessageBalance, MessageHeader, Outputs, Passes, RankShard, Result, Rows, Runs, Space,
    Spec, Transport, Workspace,
};

use self::{
    page_tree::PageTree,
    pages::Pages,
    partials::{PartialShape, Results},
    segments::{KeysValues, Segments},
};
use crate::{
    agreement::{self, mid_call},
    ring::{
        PassKind, Report, caught, check::Shapes, describe, entry::Entries, in_flight::InFlight,
        program::Transfers, step_events::Observer,
    },
    span::span,
};

/// Longest message in bytes, unless that of one query is longer. Queries of a longer prefill are
/// computed in several rounds, so that the memory for messages is at most ranks × 1 MiB; four times
/// as much in the reproducible order, whose messages differ and grow.
const MESSAGE_BYTES: u64 = 1 << 20;

/// Tags of one round: one in the default order, two in the reproducible order.
const ROUND_TAGS: u64 = 2;

/// Keys and values of one sequence (per batch row), appended row by row or in chunks, of which each
/// rank has every ranks-th page.
///
/// Appends are local. [`KvCache::attend`] takes `&mut self` and is collective: it succeeds on all
/// ranks or fails on all.
pub struct KvCache<B: Backend> {
    backend: B,
    transport: Box<dyn Transport<B::Space>>,
    /// The attention, with its sinks.
    spec: Spec,
    /// The attention of the workspace: without sinks, which are merged once.
    local_spec: Arc<Spec>,
    rank: usize,
    ranks: usize,
    pages: Pages,
    /// Cached rows of all ranks.
    len: u64,
    segments: Segments<B::Space>,
    workspace: Option<B::Workspace>,
    /// Merge of the pages, in the reproducible order.
    tree: Option<PageTree<B>>,
    buffers: Buffers<B::Space>,
    /// True if the transports of all ranks post receives ahead.
    posts_ahead: bool,
    /// Proof of the messages of the call under way, if transports make use of it.
    lengths: Option<AgreedLengths>,
    entries: Entries,
    next_tag: u64,
    /// Error that ended the cache.
    poisoned: Option<String>,
}

/// Buffers of the messages of one round.
struct Buffers<S: Space> {
    /// Bytes of each.
    bytes: u64,
    own: Option<S::Buffer>,
    /// One for each other rank.
    receives: Vec<S::Buffer>,
}

/// Tensors of [`KvCache::attend`].
pub struct Attend<'a> {
    /// Queries of the last cached rows, `[b, queries, q_heads, d]`.
    pub q: HostView<'a>,
    /// Sinks, `[q_heads|1, sinks, 1, 1]`, in the accumulator's type.
    pub sinks: Option<HostView<'a>>,
    /// `[b, queries, q_heads, dv]`, written.
    pub out: HostViewMut<'a>,
    /// `[b, q_heads, queries, 1]`, in the accumulator's type, written.
    pub lse: HostViewMut<'a>,
}

impl<B: Backend<Space: HostTensors>> KvCache<B> {
    /// Rows of a page by default: one KV tile of the kernels.
    pub const PAGE_ROWS: u64 = 64;

    /// Creates an empty cache, after an agreement of all ranks. An error in `spec` enters the
    /// agreement too. The lengths of the spec have no meaning. `deadline_variable` is the deadline
    /// that the environment sets, 0 for none.
    ///
    /// # Ordering
    /// Collective over the transport's ranks.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`], [`Error::Unsupported`] here and [`Error::Refused`] on the other
    /// ranks; [`Error::RankMismatch`] on all ranks. Unsupported are a bias tensor, unnormalised
    /// output, the reproducible order on a backend that lacks it, and blocks in device memory.
    pub fn new(
        backend: B,
        mut transport: Box<dyn Transport<B::Space>>,
        spec: Result<Spec>,
        page_rows: u64,
        deadline_variable: Option<Duration>,
    ) -> Result<Self> {
        let rank = transport.control().rank();
        let ranks = transport.control().ranks();
        let agreed = caught(|| {
            create::agree(&backend, transport.as_mut(), spec, page_rows, deadline_variable)
        });
        let (spec, posts_ahead) = agreed.inspect_err(|error| {
            if error.is_fatal() {
                transport.control().abort(error);
            }
        })?;
        let pages = Pages { rows: page_rows, ranks: ranks as u64, rank: rank as u64 };
        let is_tree = spec.leaf_rows.is_some();
        let segments = Segments::new(pages, spec.kv_row_layout(), is_tree);
        let local_spec = if is_tree {
            page_tree::page_spec(&spec)
        } else {
            Spec { sinks: None, ..spec.clone() }
        };
        Ok(Self {
            backend,
            transport,
            local_spec: Arc::new(local_spec),
            spec,
            rank,
            ranks,
            pages,
            len: 0,
            segments,
            workspace: None,
            tree: None,
            buffers: Buffers { bytes: 0, own: None, receives: Vec::new() },
            posts_ahead,
            lengths: None,
            entries: Entries::new(1),
            next_tag: 1,
            poisoned: None,
        })
    }

    /// Appends rows that every rank has: this rank copies those of its pages.
    ///
    /// # Shapes
    /// k `[b, rows, kv_heads, d]`, v `[b, rows, kv_heads, dv]`: the same rows on every rank.
    ///
    /// # Ordering
    /// Local. [`KvCache::attend`] checks that all ranks have appended as many rows.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`], [`Error::OutOfMemory`]: nothing was appended.
    /// [`Error::Poisoned`].
    pub fn append(&mut self, k: &HostView<'_>, v: &HostView<'_>) -> Result<()> {
        let count = k.shape()[1];
        self.check_rows(k, v, count)?;
        let local = self.reserve(count)?;
        let len = self.len;
        let numbers = self.pages.runs(local.clone());
        let sources = numbers.flat_map(|run| {
            let first = annulus_core::index(run.start.cast_unsigned() - len);
            first..first + annulus_core::index(run.count)
        });
        self.segments.write(local, &KeysValues { k: k.reborrow(), v: v.reborrow() }, sources)?;
        self.len += count as u64;
        Ok(())
    }

    /// Appends `count` rows, of which this rank has those of its pages only
    /// ([`KvCache::own_rows`]).
    ///
    /// # Shapes
    /// k `[b, own rows, kv_heads, d]`, v `[b, own rows, kv_heads, dv]`, in ascending order.
    ///
    /// # Ordering
    /// As [`KvCache::append`]: `count` is the same on every rank.
    ///
    /// # Errors
    /// As [`KvCache::append`].
    pub fn append_own(&mut self, count: usize, k: &HostView<'_>, v: &HostView<'_>) -> Result<()> {
        let own = self.own_rows(count)?.len();
        self.check_rows(k, v, annulus_core::index(own))?;
        let local = self.reserve(count)?;
        self.segments.write(local, &KeysValues { k: k.reborrow(), v: v.reborrow() }, 0..)?;
        self.len += count as u64;
        Ok(())
    }

    /// Returns the rows of this rank among the next `count` rows, counted from 0.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the cache cannot have so many rows.
    pub fn own_rows(&self, count: usize) -> Result<Runs> {
        let local = self.local_rows(count)?;
        let mut rows = Runs::new();
        self.pages.runs(local).for_each(|run| {
            let start = run.start - self.len.cast_signed();
            rows.push_run(annulus_core::Run { start, ..run });
        });
        Ok(rows)
    }

    /// Removes the rows from `len` on. Their memory is reused. `len` above the number of rows is
    /// refused.
    ///
    /// # Ordering
    /// Local, as [`KvCache::append`].
    ///
    /// # Errors
    /// [`Error::InvalidArgument`].
    pub fn truncate(&mut self, len: u64) -> Result<()> {
        if len > self.len {
            let want = format!("at most the {} cached rows", self.len);
            return Err(Error::invalid("len", len, want));
        }
        self.len = len;
        Ok(())
    }

    /// Computes out and lse of queries that are the last cached rows: of n queries, query i has the
    /// row number and the position len − n + i.
    ///
    /// # Shapes
    /// [`Attend`]. All ranks pass the same queries and sinks, and get the same bits.
    ///
    /// # Ordering
    /// Collective.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] and [`Error::OutOfMemory`] here and [`Error::Refused`] elsewhere;
    /// [`Error::RankMismatch`] if ranks have different numbers of cached rows or of queries:
    /// nothing was written, and the cache can still be used. [`Error::ArrivalTimeout`]: likewise;
    /// make the same call again. [`Error::Comm`], [`Error::Timeout`], [`Error::PeerLost`],
    /// [`Error::Aborted`], [`Error::Device`]: the cache is dead.
    pub fn attend(&mut self, tensors: Attend<'_>) -> Result<Report> {
        self.alive()?;
        let queries = tensors.q.shape()[1];
        span!("attend", queries, rank = self.rank);
        let start = Instant::now();
        let checked = self.check(&tensors).and_then(|()| self.prepare(queries));
        let agreed = self.agree_on_call(checked, queries);
        self.lengths = self.remember(agreed)?;
        let mut waiting = start.elapsed();
        let first_tag = self.next_tag;
        let rounds = self.rounds(queries);
        self.next_tag += rounds * ROUND_TAGS;
        let sent_before = self.transport.bytes_sent();
        let result = caught(|| self.attend_rounds(tensors, rounds, first_tag)).map_err(mid_call);
        if let Err(error) = &result {
            self.transport.control().abort(error);
        }
        let closing = Instant::now();
        let result = result.and_then(|waited| self.close_call().map(|()| waited));
        waiting += self.remember(result)? + closing.elapsed();
        Ok(Report {
            seconds: start.elapsed().as_secs_f64(),
            waiting_seconds: waiting.as_secs_f64(),
            bytes_sent: self.transport.bytes_sent() - sent_before,
            bytes_predicted: self.bytes_predicted(queries),
        })
    }

    /// Refuses the call of [`KvCache::attend`] that the other ranks make, on a rank that cannot
    /// make it. Returns `why`, or the error of a dead cache.
    ///
    /// # Ordering
    /// Collective, in place of [`KvCache::attend`].
    pub fn refuse(&mut self, why: Error) -> Error {
        if let Err(poisoned) = self.alive() {
            return poisoned;
        }
        let agreed = self.entries.enter(self.transport.as_mut(), &Err(why.clone()));
        self.remember(agreed).err().unwrap_or(why)
    }

    /// Returns the number of cached rows of all ranks.
    pub const fn len(&self) -> u64 {
        self.len
    }

    /// Returns true if no rows are cached.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the number of cached rows of this rank.
    pub const fn local_len(&self) -> u64 {
        self.pages.local_len(self.len)
    }

    /// Returns the rows of a page.
    pub const fn page_rows(&self) -> u64 {
        self.pages.rows
    }

    /// Returns this rank.
    pub const fn rank(&self) -> usize {
        self.rank
    }

    /// Returns the number of ranks.
    pub const fn ranks(&self) -> usize {
        self.ranks
    }

    /// Returns the definition of the attention. Its lengths have no meaning.
    pub const fn spec(&self) -> &Spec {
        &self.spec
    }

    /// Returns the payload bytes that this rank sends in a call with so many queries. They do not
    /// depend on the number of cached rows, and it receives as many. In the reproducible order they
    /// grow with the number of pages.
    pub fn bytes_predicted(&self, queries: usize) -> u64 {
        self.bytes_predicted_at(self.len, queries)
    }

    /// As [`KvCache::bytes_predicted`], after `len` rows have been cached.
    pub fn bytes_predicted_at(&self, len: u64, queries: usize) -> u64 {
        if self.spec.leaf_rows.is_none() {
            let query = PartialShape::query_bytes(&self.spec.dims, self.spec.dtype);
            return (self.ranks as u64 - 1).saturating_mul(queries as u64).saturating_mul(query);
        }
        let queries = queries as u64;
        let sent = |queries| self.tree_messages(queries, len).bytes_sent();
        let most = self.round_queries(queries, len);
        // all rounds but the last one have `most` queries
        (queries / most).saturating_mul(sent(most)).saturating_add(sent(queries % most))
    }

    /// Returns the bytes of this rank's segments and message buffers.
    pub fn buffer_bytes(&self) -> u64 {
        let buffers = self.buffers.own.iter().chain(&self.buffers.receives);
        self.segments.bytes() + buffers.map(B::Space::size).sum::<u64>()
    }

    /// Returns the local rows of the next `count` rows.
    fn local_rows(&self, count: usize) -> Result<Range<u64>> {
        let most = i64::MAX as u64 / 4;
        let len = self.len.checked_add(count as u64).filter(|&len| len <= most);
        let len = len.ok_or_else(|| {
            Error::invalid("k", format!("{count} rows"), format!("at most {most} cached rows"))
        })?;
        Ok(self.pages.local_len(self.len)..self.pages.local_len(len))
    }

    /// Allocates memory for the next `count` rows. Returns the local rows.
    fn reserve(&mut self, count: usize) -> Result<Range<u64>> {
        self.alive()?;
        let local = self.local_rows(count)?;
        self.segments.reserve(&self.backend, local.end)?;
        Ok(local)
    }

    fn check_rows(&self, k: &HostView<'_>, v: &HostView<'_>, rows: usize) -> Result<()> {
        Shapes::new(&self.spec, 0, rows).keys_values::<B::Space>(k, v)
    }

    fn check(&self, tensors: &Attend<'_>) -> Result<()> {
        let queries = tensors.q.shape()[1];
        let shapes = Shapes::new(&self.spec, queries, 0);
        shapes.queries::<B::Space>(&tensors.q, tensors.sinks.as_ref())?;
        shapes.results::<B::Space>(&tensors.out, &tensors.lse)?;
        if queries as u64 > self.len {
            let want = format!("at most the {} cached rows", self.len);
            return Err(Error::invalid("q", format!("{queries} queries"), want));
        }
        Ok(())
    }

    /// Allocates what a call with so many queries needs.
    fn prepare(&mut self, queries: usize) -> Result<()> {
        if queries == 0 {
            return Ok(());
        }
        self.segments.list_rows(self.local_len())?;
        let rows = self.round_rows(queries, 0);
        if self.spec.leaf_rows.is_some() {
            return self.prepare_tree(&rows, queries);
        }
        let shard = self.shard(self.query_rows(&rows, queries)?);
        self.attend_to_shard(&shard)?;
        let bytes = self.partial_shape(index_len(&rows)).bytes();
        if self.buffers.bytes < bytes {
            let mut receives = annulus_core::memory::list("messages", self.ranks - 1)?;
            let own = self.backend.allocate(bytes)?;
            for _ in 1..self.ranks {
                receives.push(self.backend.allocate(bytes)?);
            }
            self.buffers = Buffers { bytes, own: Some(own), receives };
        }
        Ok(())
    }

    /// Returns the rounds of a call: the fewest whose messages are short enough.
    fn rounds(&self, queries: usize) -> u64 {
        (queries as u64).div_ceil(self.longest_round(self.len))
    }

    /// Returns the most queries of a round over `len` cached rows, at least 1.
    fn longest_round(&self, len: u64) -> u64 {
        if self.spec.leaf_rows.is_some() {
            return self.tree_messages(1, len).most_queries(MESSAGE_BYTES);
        }
        let query = PartialShape::query_bytes(&self.spec.dims, self.spec.dtype);
        (MESSAGE_BYTES / query.max(1)).max(1)
    }

    /// Returns the queries of the first rounds of a call with `queries`, at least 1.
    fn round_queries(&self, queries: u64, len: u64) -> u64 {
        let rounds = queries.div_ceil(self.longest_round(len));
        queries.div_ceil(rounds.max(1)).max(1)
    }

    /// Returns the queries of a round. The first round is the longest.
    fn round_rows(&self, queries: usize, round: u64) -> Range<u64> {
        let most = self.round_queries(queries as u64, self.len);
        let first = (round * most).min(queries as u64);
        first..(first + most).min(queries as u64)
    }

    fn partial_shape(&self, queries: usize) -> PartialShape {
        PartialShape { dims: self.spec.dims, dtype: self.spec.dtype, queries }
    }

    /// Lists the queries `rows` of a call with `queries`.
    fn query_rows(&self, rows: &Range<u64>, queries: usize) -> Result<Arc<Rows>> {
        let first = self.len - queries as u64;
        let numbers = Runs::counting((first + rows.start).cast_signed(), rows.end - rows.start);
        let all = annulus_core::RowSet::all(numbers.len());
        let mut of_queries = Rows::default();
        let shard = annulus_core::Shard {
            positions: vec![numbers.clone()],
            rows: numbers,
            segments: Vec::new(),
        };
        shard.expand(&all, &mut of_queries)?;
        Ok(Arc::new(of_queries))
    }

    /// Returns the input of the workspace for these queries.
    fn shard(&self, queries: Arc<Rows>) -> RankShard {
        RankShard {
            spec: Arc::clone(&self.local_spec),
            most_query_rows: queries.len() as u64,
            queries,
            keys: Arc::default(),
            attention_mask: None,
            most_block_rows: self.segments.segment_rows(),
            leaves: None,
        }
    }

    /// Adapts the workspace.
    fn attend_to_shard(&mut self, shard: &RankShard) -> Result<()> {
        match &mut self.workspace {
            Some(workspace) => workspace.update(shard),
            None => {
                self.workspace = Some(self.backend.workspace(shard, Passes::Forward)?);
                Ok(())
            }
        }
    }

    /// Runs all rounds. Returns the exposed communication.
    fn attend_rounds(
        &mut self,
        tensors: Attend<'_>,
        rounds: u64,
        first_tag: u64,
    ) -> Result<Duration> {
        let Attend { q, sinks, mut out, mut lse } = tensors;
        let queries = q.shape()[1];
        let mut waited = Duration::ZERO;
        for round in 0..rounds {
            let rows = self.round_rows(queries, round);
            let range = annulus_core::index(rows.start)..annulus_core::index(rows.end);
            let results = Results {
                out: out.reborrow().slice(1, range.clone()),
                lse: lse.reborrow().slice(2, range.clone()),
            };
            let q = q.reborrow().slice(1, range);
            let tag = first_tag + round * ROUND_TAGS;
            let sinks = sinks.as_ref();
            waited += if self.spec.leaf_rows.is_some() {
                let of_queries = self.query_rows(&rows, queries)?;
                self.tree_round(q, &of_queries, sinks, results, tag)?
            } else {
                if round > 0 {
                    let shard = self.shard(self.query_rows(&rows, queries)?);
                    self.attend_to_shard(&shard)?;
                }
                self.round(q, sinks, results, tag)?
            };
        }
        Ok(waited)
    }

    /// Computes the queries `q` over this rank's rows, exchanges the results and merges them.
    fn round(
        &mut self,
        q: HostView<'_>,
        sinks: Option<&HostView<'_>>,
        results: Results<'_>,
        tag: u64,
    ) -> Result<Duration> {
        let none = || Error::internal("a KV cache without memory for a call");
        let shape = self.partial_shape(q.shape()[1]);
        let transfers = self.transfers(shape.bytes());
        let Self { transport, segments, workspace, buffers, spec, rank, lengths, .. } = self;
        let workspace = workspace.as_mut().ok_or_else(none)?;
        let event = B::Space::host_event().ok_or_else(none)?;
        let observer = Observer::of_messages(None, *rank, PassKind::Forward, Instant::now());
        let mut in_flight = InFlight::new(transport.as_mut(), tag, *lengths, observer);

        let mut own = buffers.own.take().ok_or_else(none)?;
        let message = B::Space::host_bytes_mut(&mut own).ok_or_else(none)?;
        let Results { out, lse } = shape.results(message)?;
        // the rank's rows are blocks: none is in the tensors of the call
        let Dims { batch, kv_heads, head_dim, value_dim, .. } = spec.dims;
        let empty = |dim| HostView::of_bytes(&[], spec.dtype, [batch, 0, kv_heads, dim]);
        let [k, v] = [empty(head_dim)?, empty(value_dim)?];
        let [q, k, v] = [q.reborrow(), k.reborrow(), v.reborrow()];
        let mut pass = workspace.forward(Inputs { q, k, v, bias: None, sinks: None })?;
        for block in segments.blocks(&event) {
            pass.attend(&block, &mut || in_flight.tick())?;
            in_flight.check()?;
        }
        pass.finish(&mut Outputs { out, lse, max: None, sum: None, ties: None })?;

        let source = (own, event.clone());
        let receives = &mut buffers.receives;
        in_flight.post(&transfers, Some(&source), |_| receives.pop().ok_or_else(none))?;
        let mut arrived = in_flight.wait_all()?;
        arrived.sort_unstable_by_key(|(header, _)| header.peer);
        let before = arrived.partition_point(|(header, _)| header.peer < *rank);
        let mut messages = Vec::with_capacity(arrived.len() + 1);
        for (_, message) in &arrived {
            messages.push(B::Space::host_bytes(&message.buffer).ok_or_else(none)?);
        }
        messages.insert(before, B::Space::host_bytes(&source.0).ok_or_else(none)?);
        shape.merge(&messages, sinks, results)?;
        buffers.receives.extend(arrived.into_iter().map(|(_, message)| message.buffer));
        buffers.own = Some(source.0);
        Ok(in_flight.waited())
    }

    /// Returns the messages of a round: one to each rank, the nearest first.
    fn transfers(&self, bytes: u64) -> Transfers {
        let header = |peer| MessageHeader {
            peer,
            channel: Channel::Kv,
            tag: 0,
            step: 0,
            ranges: std::iter::once(0..bytes).collect(),
            agreed: None,
        };
        let distances = 1..self.ranks;
        let to = distances.clone().map(|distance| (self.rank + distance) % self.ranks);
        let from = distances.map(|distance| (self.rank + self.ranks - distance) % self.ranks);
        Transfers { sends: to.map(header).collect(), receives: from.map(header).collect() }
    }

    /// Agrees with all ranks on a call with so many queries. Returns the proof of its messages, if
    /// transports make use of it.
    fn agree_on_call(
        &mut self,
        checked: Result<()>,
        queries: usize,
    ) -> Result<Option<AgreedLengths>> {
        if self.ranks == 1 {
            checked.and_then(|()| self.transport.progress(Duration::ZERO))?;
            return Ok(None);
        }
        let described = checked.map(|()| {
            describe::call("attend")
                .field("cached rows", self.len)
                .field("queries", queries as u64)
                .sum("balance of messages", self.message_balance(queries).sum())
        });
        let totals = self.entries.enter(self.transport.as_mut(), &described)?;
        let lengths = totals.first().copied().and_then(AgreedLengths::of_total);
        Ok(lengths.filter(|_| self.posts_ahead))
    }

    /// Returns the balance of the messages of a call with so many queries.
    fn message_balance(&self, queries: usize) -> MessageBalance {
        let mut balance = MessageBalance::of_rank(self.rank);
        for round in 0..self.rounds(queries) {
            let rows = self.round_rows(queries, round);
            let lists = if self.spec.leaf_rows.is_some() {
                let messages = self.tree_messages(rows.end - rows.start, self.len);
                vec![messages.page_transfers(), messages.result_transfers()]
            } else {
                vec![self.transfers(self.partial_shape(index_len(&rows)).bytes())]
            };
            lists.iter().for_each(|transfers| transfers.add_to(&mut balance, round));
        }
        balance
    }

    /// Agrees with all ranks that the call has succeeded.
    fn close_call(&mut self) -> Result<()> {
        if self.ranks == 1 {
            return Ok(());
        }
        let round = self.entries.round();
        agreement::close(self.transport.as_mut(), round, Ok(()))
    }

    /// Returns an error if the cache is dead.
    fn alive(&self) -> Result<()> {
        self.poisoned.as_ref().map_or(Ok(()), |first| Err(Error::Poisoned { first: first.clone() }))
    }

    /// Records a fatal error, which ends the cache.
    fn remember<T>(&mut self, result: Result<T>) -> Result<T> {
        if let Err(error) = &result
            && error.is_fatal()
        {
            self.poisoned = Some(error.to_string());
        }
        result
    }
}

fn index_len(rows: &Range<u64>) -> usize {
    annulus_core::index(rows.end - rows.start)
}
