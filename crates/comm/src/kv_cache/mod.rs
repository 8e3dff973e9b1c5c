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
//! | `append.rs` | a new cache, appends and removals; the memory of the rows, in wire order |
//! | `page_set.rs` | rows of each rank; the pages that the queries of a call attend to |
//! | `call.rs` | a call: agreement, rounds, bytes |
//! | `partial_call.rs` | its division into rounds; a round in the default order, and its merge |
//! | `tree_call.rs` | a round in the reproducible order |
//! | `tree_messages.rs` | its messages |
//! | `page_tree.rs` | its merge |

mod append;
mod call;
mod page_set;
mod page_tree;
mod partial_call;
mod tree_call;
mod tree_messages;

use std::{sync::Arc, time::Duration};

use annulus_core::{
    AgreedLengths, Backend, Host, HostBuffer, HostTensors, Result, Space, Spec, Transport,
};

pub use self::call::Attend;
use self::{append::Segments, page_set::Pages, page_tree::PageTree};
use crate::calls::{Calls, Collective, caught};

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
struct CacheBuffers {
    /// Bytes of each.
    bytes: u64,
    own: Option<HostBuffer>,
    /// One for each other rank.
    receives: Vec<HostBuffer>,
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
            buffers: CacheBuffers { bytes: 0, own: None, receives: Vec::new() },
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
