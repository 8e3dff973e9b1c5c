//! One rank of a KV cache that is sharded over ranks, for decoding and chunked prefill.
//!
//! ```text
//! append    own pages of the new rows -> segments                  local, no messages
//! attend    out, max, sum of the queries over this rank's rows     the same queries on all ranks
//!           all-gather, merge in the order of ranks                one message to each rank
//! ```
//! Segments are in the memory of the backend, which writes rows into them
//! ([`Backend::write_block`]) and attends to them there. Messages are results of a few queries.
//! They are in host memory on every backend, so a cache takes any transport of host memory.
//!
//! The messages of a call depend on the queries alone, not on the number of cached rows. In the
//! reproducible order they grow with the number of pages that the queries attend to
//! (`tree_call.rs`).
//!
//! | file | content |
//! |---|---|
//! | this file | a cache; a call: agreement, rounds, bytes |
//! | `append.rs` | a new cache, appends and removals; the memory of the rows, in wire order |
//! | `page_set.rs` | rows of each rank; the pages that the queries of a call attend to |
//! | `partial_call.rs` | its division into rounds; a round in the default order, and its merge |
//! | `tree_call.rs` | a round in the reproducible order |
//! | `tree_messages.rs` | its messages |
//! | `page_tree.rs` | its merge |

mod append;
mod page_set;
mod page_tree;
mod partial_call;
mod tree_call;
mod tree_messages;

use std::{
    ops::Range,
    sync::Arc,
    time::{Duration, Instant},
};

use annulus_core::{
    AgreedLengths, Backend, Error, Host, HostBuffer, HostTensors, HostView, HostViewMut,
    MessageBalance, Outputs, Passes, RankShard, Result, RowSet, Rows, Space, Spec, Transport,
    Workspace, memory,
};

use self::{
    append::Segments,
    page_set::{Pages, counting, shard_of},
    page_tree::PageTree,
    partial_call::{MESSAGE_BYTES, ROUND_TAGS, RankPartialShape, Rounds},
};
use crate::{
    agreement::mid_call,
    calls::{Calls, Collective, Report, caught},
    profiler::span,
    ring::check::{self, Shapes},
};

/// Keys and values of one sequence (per batch row), appended row by row or in chunks, of which each
/// rank has every ranks-th page.
///
/// Appends are local. [`KvCache::attend`] takes `&mut self` and is collective: it succeeds on all
/// ranks or fails on all.
pub struct KvCache<B: Backend> {
    backend: B,
    transport: Box<dyn Transport<Host>>,
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
    buffers: CacheBuffers,
    /// True if the transports of all ranks post receives ahead.
    posts_ahead: bool,
    /// Proof of the messages of the call under way, if transports make use of it.
    lengths: Option<AgreedLengths>,
    calls: Calls,
}

/// Buffers of the messages of one round.
#[derive(Default)]
struct CacheBuffers {
    own: Option<HostBuffer>,
    /// One for each other rank.
    receives: Vec<HostBuffer>,
}

impl CacheBuffers {
    /// Allocates buffers of at least these bytes, unless there are.
    fn reserve(&mut self, sent: u64, received: u64, ranks: usize) -> Result<()> {
        let is_long = |buffer: &HostBuffer, bytes| Host::size(buffer) >= bytes;
        if self.own.as_ref().is_some_and(|own| is_long(own, sent))
            && self.receives.iter().all(|buffer| is_long(buffer, received))
        {
            return Ok(());
        }
        let own = Some(HostBuffer::zeroed(sent)?);
        let mut receives = memory::list("messages", ranks - 1)?;
        for _ in 1..ranks {
            receives.push(HostBuffer::zeroed(received)?);
        }
        *self = Self { own, receives };
        Ok(())
    }
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
    /// output, and the reproducible order on a backend that lacks it.
    ///
    /// [`Error::InvalidArgument`]: annulus_core::Error::InvalidArgument
    /// [`Error::Unsupported`]: annulus_core::Error::Unsupported
    /// [`Error::Refused`]: annulus_core::Error::Refused
    /// [`Error::RankMismatch`]: annulus_core::Error::RankMismatch
    pub fn new(
        backend: B,
        mut transport: Box<dyn Transport<Host>>,
        spec: Result<Spec>,
        page_rows: u64,
        deadline_variable: Option<Duration>,
    ) -> Result<Self> {
        let rank = transport.control().rank();
        let ranks = transport.control().ranks();
        let agreed = caught(|| {
            append::agree(&backend, transport.as_mut(), spec, page_rows, deadline_variable)
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
            buffers: CacheBuffers::default(),
            posts_ahead,
            lengths: None,
            calls: Calls::new(1),
        })
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

    /// Returns the bytes of this rank's segments and message buffers.
    pub fn buffer_bytes(&self) -> u64 {
        let buffers = self.buffers.own.iter().chain(&self.buffers.receives);
        self.segments.bytes() + buffers.map(Host::size).sum::<u64>()
    }
}

impl<B: Backend> Collective for KvCache<B> {
    type Space = Host;

    fn calls_and_transport(&mut self) -> (&mut Calls, &mut dyn Transport<Host>) {
        (&mut self.calls, self.transport.as_mut())
    }
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

/// A call whose memory is allocated.
struct PreparedCall {
    rounds: Rounds,
    /// Sum of [`MessageBalance`]; 0 for one rank.
    balance: u64,
}

impl<B: Backend<Space: HostTensors>> KvCache<B> {
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
        self.calls.alive()?;
        let queries = tensors.q.shape()[1];
        span!("attend", queries, rank = self.rank);
        let start = Instant::now();
        let checked = caught(|| self.prepare(&tensors));
        let agreed = self.agree_on_call(&checked, queries);
        self.lengths = self.entered(agreed)?;
        let PreparedCall { rounds, .. } = checked?;
        self.run(start, self.bytes_predicted(queries), |cache| {
            let first_tag = cache.calls.take_tags(rounds.count() * ROUND_TAGS);
            cache.attend_rounds(tensors, &rounds, first_tag).map_err(mid_call)
        })
    }

    /// Refuses the call of [`KvCache::attend`] that the other ranks make, on a rank that cannot
    /// make it. Returns `why`, or the error of a dead cache.
    ///
    /// # Ordering
    /// Collective, in place of [`KvCache::attend`].
    pub fn refuse(&mut self, why: Error) -> Error {
        self.refuse_call(why)
    }

    /// Returns the payload bytes that this rank sends in a call with so many queries. They do not
    /// depend on the number of cached rows, and it receives as many. In the reproducible order they
    /// grow with the number of pages that the queries attend to.
    pub fn bytes_predicted(&self, queries: usize) -> u64 {
        self.bytes_predicted_at(self.len, queries)
    }

    /// As [`KvCache::bytes_predicted`], after `len` rows have been cached. In the reproducible
    /// order it is 0 for more queries than rows, a call that is refused.
    pub fn bytes_predicted_at(&self, len: u64, queries: usize) -> u64 {
        let queries = queries as u64;
        if self.spec.leaf_rows.is_none() {
            let query = RankPartialShape::query_bytes(&self.spec.dims, self.spec.dtype);
            return (self.ranks as u64 - 1).saturating_mul(queries).saturating_mul(query);
        }
        let Some(first) = len.checked_sub(queries) else { return 0 };
        let rounds = self.rounds(first..len);
        let sent = |round| self.tree_messages(rounds.rows(round), len).bytes_sent();
        (0..rounds.count()).map(sent).fold(0, u64::saturating_add)
    }

    fn check(&self, tensors: &Attend<'_>) -> Result<()> {
        let queries = tensors.q.shape()[1];
        let shapes = Shapes::new(&self.spec, queries, 0);
        let sinks = tensors.sinks.as_ref().map(Host::describe);
        shapes.queries(Host::describe(&tensors.q), sinks)?;
        let [out, lse] = [&tensors.out, &tensors.lse].map(Host::describe_mut);
        shapes.results(out, lse)?;
        if queries as u64 > self.len {
            let want = format!("at most the {} cached rows", self.len);
            return Err(Error::invalid("q", format!("{queries} queries"), want));
        }
        Ok(())
    }

    /// Checks the tensors of a call, divides it into rounds and allocates what they need.
    fn prepare(&mut self, tensors: &Attend<'_>) -> Result<PreparedCall> {
        self.check(tensors)?;
        let queries = tensors.q.shape()[1] as u64;
        let rounds = self.rounds(self.len - queries..self.len);
        if queries > 0 {
            self.segments.list_rows(self.local_len())?;
            if self.spec.leaf_rows.is_some() {
                self.prepare_tree(&rounds)?;
            } else {
                self.prepare_partials(&rounds)?;
            }
        }
        let balance = if self.ranks == 1 { 0 } else { self.message_balance(&rounds).sum() };
        Ok(PreparedCall { rounds, balance })
    }

    /// Divides the queries with the row numbers `rows`, the last ones of a cache, into rounds.
    fn rounds(&self, rows: Range<u64>) -> Rounds {
        let longest = if self.spec.leaf_rows.is_some() {
            self.tree_messages(rows.clone(), rows.end).most_queries(MESSAGE_BYTES)
        } else {
            MESSAGE_BYTES / RankPartialShape::query_bytes(&self.spec.dims, self.spec.dtype).max(1)
        };
        Rounds::new(rows, longest)
    }

    /// Lists the queries with the row numbers `rows`.
    pub(super) fn query_rows(&self, rows: &Range<u64>) -> Result<Arc<Rows>> {
        let mut of_queries = Rows::default();
        let all = RowSet::all(rows.end - rows.start);
        shard_of(counting(rows)).expand(&all, &mut of_queries)?;
        Ok(Arc::new(of_queries))
    }

    /// Adapts the workspace.
    pub(super) fn attend_to_shard(&mut self, shard: &RankShard) -> Result<()> {
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
        rounds: &Rounds,
        first_tag: u64,
    ) -> Result<Duration> {
        let Attend { q, sinks, mut out, mut lse } = tensors;
        let mut waited = Duration::ZERO;
        for round in 0..rounds.count() {
            let rows = rounds.rows(round);
            let [first, end] =
                [rows.start, rows.end].map(|row| annulus_core::index(row - rounds.all().start));
            let results = Outputs::new(
                out.reborrow().slice(1, first..end),
                lse.reborrow().slice(2, first..end),
            );
            let q = q.reborrow().slice(1, first..end);
            let tag = first_tag + round * ROUND_TAGS;
            let sinks = sinks.as_ref();
            waited += if self.spec.leaf_rows.is_some() {
                self.tree_round(q, rows, sinks, results, tag)?
            } else {
                if round > 0 {
                    self.attend_to_queries(&rows)?;
                }
                self.partial_round(q, sinks, results, tag)?
            };
        }
        Ok(waited)
    }

    /// Agrees with all ranks on a call with so many queries. Returns the proof of its messages, if
    /// transports make use of it.
    fn agree_on_call(
        &mut self,
        checked: &Result<PreparedCall>,
        queries: usize,
    ) -> Result<Option<AgreedLengths>> {
        let checked = checked.as_ref().map_err(Error::clone);
        if self.ranks == 1 {
            checked.and_then(|_| self.transport.progress(Duration::ZERO))?;
            return Ok(None);
        }
        let described = checked.map(|prepared| {
            check::describe_call("attend")
                .field("cached rows", self.len)
                .field("queries", queries as u64)
                .sum("balance of messages", prepared.balance)
        });
        let totals = self.calls.entries.enter(self.transport.as_mut(), &described)?;
        let lengths = totals.first().copied().and_then(AgreedLengths::of_total);
        Ok(lengths.filter(|_| self.posts_ahead))
    }

    /// Returns the balance of the messages of a call.
    fn message_balance(&self, rounds: &Rounds) -> MessageBalance {
        let mut balance = MessageBalance::of_rank(self.rank);
        for round in 0..rounds.count() {
            let rows = rounds.rows(round);
            let lists = if self.spec.leaf_rows.is_some() {
                let messages = self.tree_messages(rows, self.len);
                vec![messages.page_transfers(), messages.result_transfers()]
            } else {
                let queries = annulus_core::index(rows.end - rows.start);
                vec![self.partial_transfers(self.partial_shape(queries).bytes())]
            };
            lists.iter().for_each(|transfers| transfers.add_to(&mut balance, round));
        }
        balance
    }
}
