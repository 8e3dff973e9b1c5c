//! State that is kept across calls: accumulators and softmax statistics of every query, row
//! statistics for backward, and scratch for each thread.
//!
//! Memory beyond O(tile) per thread:
//!
//! * for each local query and query head, value_dim + 2 numbers. With a backward pass the vector is
//!   max(value_dim, head_dim) long, because dq accumulates in the same memory;
//! * about 100 bytes per 64 queries for the bounds of their keys;
//! * for a backward pass, 4 more numbers per query and head,
//!   about 100 bytes per query for its visibility and, with a bias, one number per element of
//!   dbias;
//! * in the reproducible order, value_dim + 2 numbers per query and head (3 if the output is not
//!   normalised) for each slot of the plan's merges ([`annulus_core::LeafMerges`]), and in a
//!   backward pass dk and dv of all local keys for each slot of its merges over queries;
//! * if the rank has up to [`KeptQueries::MAX_ROWS`] queries and a forward pass attends to several
//!   blocks, head_dim numbers per query and head: packed queries, allocated in the first such pass.
//!
//! K and V are never copied whole, nor is a longer Q, except one head at a time under sparse masks,
//! whose pairs are listed (`gather/`). Else the size depends neither on the thread count nor on the
//! mask: a new batch only changes the order of the query blocks and how many of them form a task.

use std::sync::{Arc, Mutex};

use annulus_core::{DType, DenseMask, QueryTile, RankShard, Result, Rows, memory};

use crate::{
    gather::block::ListedBlock,
    simd::{
        dispatch::{IsaToken, Real},
        isa::Isa,
    },
    threads::{ordered_reduction::OrderedReduction, team::Team},
    tile::{
        aligned::{Aligned, list_bytes},
        bias::ListBiasSums,
        geometry::{Geometry, NARROW_TASK_ROWS, WIDE_TASK_ROWS},
        scores::Scores,
        softmax::{Partial, PartialLens},
        tile_mask::TILE,
    },
    workspace::{
        bias_gradient::TableGradient,
        bias_gradient::{BiasGradient, owner},
        decode::{self, Decode},
        leaves::{BlockLeaves, KeyLeaves, LeafArrivals},
        query_block::{KeptQueries, QueryBlock, RowStatistics},
        query_tiles::QueryTileCache,
        scratch::ThreadScratch,
        tangents::TangentState,
    },
};

/// Evaluates `$call` with `$state` bound to the state of either accumulator type.
macro_rules! by_sums {
    ($states:expr, $state:ident => $call:expr) => {
        match $states {
            $crate::workspace::state::TypedState::F32($state) => $call,
            $crate::workspace::state::TypedState::F64($state) => $call,
        }
    };
}
pub(crate) use by_sums;

/// State of one plan on one rank, typed by its accumulators.
#[derive(Debug)]
pub struct CpuWorkspace {
    /// Threads of the backend that created it.
    pub(crate) team: Arc<Team>,
    pub(crate) dtype: DType,
    pub(crate) state: TypedState,
}

impl CpuWorkspace {
    /// Returns the type of out and dq.
    pub(crate) fn results_dtype(&self) -> DType {
        by_sums!(&self.state, state => state.shard.spec.results_dtype())
    }

    /// Returns the bytes of this workspace: accumulators, row statistics, and the scratch of every
    /// thread. The first pass of each kind adds lists of visible keys to it; later passes add
    /// nothing.
    pub fn bytes(&self) -> u64 {
        by_sums!(&self.state, state => state.bytes() as u64)
    }

    /// Returns the bytes of partial results of leaves that wait to be merged, in the reproducible
    /// order: those of a plan's prediction, with dims and rows rounded up, and their lists.
    pub fn leaf_bytes(&self) -> u64 {
        by_sums!(&self.state, state => state.leaf_bytes() as u64)
    }

    /// Returns the instruction set of the kernels that work in this workspace.
    pub const fn isa(&self) -> Isa {
        by_sums!(&self.state, state => state.geometry.token.isa())
    }
}

/// State by accumulator type.
#[derive(Debug)]
pub(crate) enum TypedState {
    F32(Box<PassState<f32>>),
    F64(Box<PassState<f64>>),
}

/// Order of the query blocks, which is the order of the tasks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BlockOrder {
    /// Head by head, so that a head's keys stay in the cache. Late queries come first within a
    /// head: they are the long tasks under a causal mask, and long tasks at the end would leave
    /// threads idle.
    Heads,
    /// All heads of a range of rows before the next rows. With narrow masks the rows that the next
    /// head reads are then still in nearby cache lines and pages.
    Rows,
    /// By owner, then by batch row, KV head and rows.
    Owners,
}

/// Layout of dq in [`QueryBlock::sums`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DqLayout {
    /// `[heads of the group][strips][dims][lanes]`: written by the dq pass, with queries in lanes.
    Strips,
    /// `[heads of the group][rows][dims, whole vectors]`: written by the fused pass, with keys in
    /// lanes.
    Rows,
}

/// State of a workspace with accumulators of type `A`.
#[derive(Debug)]
pub(crate) struct PassState<A> {
    pub(crate) shard: RankShard,
    pub(crate) geometry: Geometry,
    pub(crate) backward: bool,
    /// True if queries attend to few of this rank's own keys; see [`is_narrow`].
    narrow: bool,
    /// Rows of a [`QueryBlock`].
    pub(crate) q_rows: usize,
    /// Rows of a [`crate::workspace::query_block::QueryTask`] under a wide mask, a multiple of
    /// `q_rows`. Under a narrow mask a task is one block.
    wide_rows: usize,
    /// Keys of a task of the passes over keys.
    pub(crate) k_rows: usize,
    pub(crate) blocks: Vec<QueryBlock<A>>,
    block_order: BlockOrder,
    /// One per block. Holds the block's dq behind a lock while threads of the fused backward share
    /// it, and is empty otherwise; see [`crate::backward::fused`].
    pub(crate) shared_dq: Vec<Mutex<Aligned<A>>>,
    pub(crate) ordered: OrderedReduction,
    /// Index into `blocks`:
    /// `block_index[(block of rows · batch + batch row) · kv_heads + kv head]`.
    pub(crate) block_index: Vec<usize>,
    pub(crate) scratch: Vec<ThreadScratch<A>>,
    pub(crate) statistics: RowStatistics<A>,
    pub(crate) bias_gradient: Option<BiasGradient<A>>,
    /// Gradient of a bias that is a table.
    pub(crate) table_gradient: Option<TableGradient>,
    /// Layout of dq in the current backward pass.
    pub(crate) dq_layout: DqLayout,
    /// Visibility of each tile of queries, for the passes over keys.
    pub(crate) query_tiles: QueryTileCache,
    /// Present for workspaces of few queries without a backward pass.
    pub(crate) decode: Option<Decode<A>>,
    /// True if the forward pass has attended to a block.
    pub(crate) attended: bool,
    /// Leaves of the block that is attended to, in the reproducible order.
    pub(crate) arrivals: LeafArrivals,
    /// Partial dK and dV, in the reproducible order.
    pub(crate) key_leaves: KeyLeaves<A>,
    /// Dense mask of the queries that were received last.
    pub(crate) received_mask: DenseMask,
    /// Numbers of received queries in [`RankShard::received_lists`].
    pub(crate) received_index: Vec<usize>,
    /// Pairs of a sparse mask in the block that is computed on.
    pub(crate) listed: ListedBlock<A>,
    /// Gradient of the bias of the key lists, one number for each listed pair.
    pub(crate) list_bias_gradient: Vec<A>,
    /// The same, of blocks that tiles compute.
    pub(crate) tile_list_bias: Option<ListBiasSums<A>>,
    /// State of second derivatives, made by the first pass of that kind.
    pub(crate) tangents: Option<Box<TangentState<A>>>,
}

/// True if the mask is narrow (sliding window, short documents), judged by the tile of
/// queries in the middle and this rank's own keys.
///
/// Narrow: the 512 queries in the middle attend to tiles that hold at most 1,024 keys, and at most
/// half of all keys. `tile` is scratch.
fn is_narrow(shard: &RankShard, tile: &mut QueryTile) -> bool {
    let queries = shard.queries.len();
    let keys = shard.keys.len();
    if !may_be_narrow(shard) {
        return false;
    }
    let visibility = shard.visibility(&shard.queries, &shard.keys);
    let first = queries / 2 / NARROW_TASK_ROWS * NARROW_TASK_ROWS;
    visibility.query_tile(0, 0, first..queries.min(first + NARROW_TASK_ROWS), tile);
    let visible_keys: usize = visibility.key_tiles(tile, TILE).map(|keys| keys.len()).sum();
    visible_keys <= 2 * NARROW_TASK_ROWS && 2 * visible_keys <= keys
}

/// True if there are enough rows for a narrow mask.
fn may_be_narrow(shard: &RankShard) -> bool {
    shard.queries.len().min(shard.keys.len()) >= 2 * NARROW_TASK_ROWS
}

/// Returns the slots of partial results that the shard's leaves need, of queries and of keys.
fn leaf_slots(shard: &RankShard) -> [usize; 2] {
    shard.leaves.as_ref().map_or([0; 2], |leaves| [leaves.keys.slots(), leaves.queries.slots()])
}

/// Sorts in place, without allocating.
fn sort<A>(blocks: &mut [QueryBlock<A>], block_order: BlockOrder, wide_rows: usize) {
    match block_order {
        BlockOrder::Heads => blocks.sort_unstable_by_key(|block| {
            (
                block.batch,
                block.kv_head,
                std::cmp::Reverse(block.rows.start / wide_rows),
                block.rows.start,
            )
        }),
        BlockOrder::Rows => {
            blocks.sort_unstable_by_key(|block| (block.batch, block.rows.start, block.kv_head))
        }
        BlockOrder::Owners => blocks.sort_unstable_by_key(|block| {
            (block.owner, block.batch, block.kv_head, block.rows.start)
        }),
    }
}

impl<A: Real> PassState<A> {
    pub(crate) fn new(
        shard: &RankShard,
        token: IsaToken,
        threads: usize,
        backward: bool,
    ) -> Result<Self> {
        let spec = &shard.spec;
        let geometry = Geometry::new::<A>(spec, token);
        let dims = spec.dims;
        // with the two-pass backward, a dbias sum over queries and keys is accumulated block by
        // block: the size of a block must not depend on the thread count
        let block_threads =
            if backward && matches!(spec.pair_bias(), Some([_, _, 1, 1])) { 1 } else { threads };
        let block_rows =
            |most| geometry.block_rows(shard.queries.len(), dims.group(), block_threads, most);
        // the mask may change with the batch: wide tasks consist of whole narrow ones, so that one
        // allocation serves both
        let q_rows = block_rows(NARROW_TASK_ROWS);
        // the partial results of a leaf are merged every few tiles: those of a task, and the
        // gradients of its keys, have to fit a near cache. For the fused pass, a task is part of a
        // leaf, whose rows are a power of two
        let [wide, most_k_rows] = match spec.leaf_rows {
            Some(rows) => {
                let key_block = 1 << geometry.key_block().ilog2();
                [WIDE_TASK_ROWS / 2, annulus_core::index(rows).min(key_block)]
            }
            None => [WIDE_TASK_ROWS; 2],
        };
        let wide_rows = block_rows(wide) / q_rows * q_rows;
        let most_keys = annulus_core::index(shard.most_block_rows).max(shard.keys.len());
        let k_rows = geometry.block_rows(most_keys, 1, threads, most_k_rows);
        let acc_rows = if backward {
            geometry.head_rows().max(geometry.value_rows()).max(geometry.padded_head_dim())
        } else {
            geometry.value_rows()
        };
        let batches = if shard.queries.is_empty() { 0 } else { dims.batch };
        let all_blocks = batches * dims.kv_heads * shard.queries.len().div_ceil(q_rows);
        let [slots, _] = leaf_slots(shard);
        let mut blocks = memory::list("the workspace", all_blocks)?;
        // in the order of their owners, in which `BiasGradient::new` creates its partial sums
        for batch in 0..batches {
            for kv_head in 0..dims.kv_heads {
                for first in (0..shard.queries.len()).step_by(q_rows) {
                    let rows = first..shard.queries.len().min(first + q_rows);
                    let owner = owner(spec, backward, batch, kv_head, first / q_rows, blocks.len());
                    let lanes = geometry.lanes(rows.len());
                    let all = lanes * dims.group();
                    let only = |is_needed: bool| if is_needed { all } else { 0 };
                    let lens = PartialLens {
                        sums: all * acc_rows,
                        rows: all,
                        ties: only(!spec.normalize),
                        score_sum: only(spec.statistics),
                        max_product: only(Scores::<A>::has_max_product(shard)),
                    };
                    blocks.push(QueryBlock {
                        batch,
                        kv_head,
                        rows,
                        lanes,
                        owner,
                        partial: Partial::new(lens)?,
                        leaves: BlockLeaves::new(slots, lens)?,
                        kept_q: KeptQueries::default(),
                    });
                }
            }
        }
        let block_order = BlockOrder::Owners;
        sort(&mut blocks, block_order, wide_rows);
        let block_index = memory::filled("the workspace", blocks.len(), 0)?;
        let bias_gradient = if backward { BiasGradient::new(spec, &blocks, q_rows)? } else { None };
        let table_gradient = if backward { TableGradient::new(spec)? } else { None };
        let statistics = if backward {
            RowStatistics::new(spec, shard.queries.len())?
        } else {
            RowStatistics::default()
        };
        let decode_queries = if decode::is_decode::<A>(token, spec, shard.queries.len(), backward) {
            shard.queries.len()
        } else {
            0
        };
        let decode = if decode_queries > 0 {
            Some(Decode::new(&geometry, decode_queries, most_keys)?)
        } else {
            None
        };
        let mut scratch: Vec<ThreadScratch<A>> = (0..threads)
            .map(|_| {
                ThreadScratch::new(spec, &geometry, wide_rows, k_rows, backward, decode_queries)
            })
            .collect::<Result<_>>()?;
        if may_be_narrow(shard) {
            let most = blocks.iter().map(|block| block.partial.sums.len()).max().unwrap_or(0);
            for scratch in &mut scratch {
                scratch.near_sums = Aligned::zeroed(most)?;
            }
        }
        let mut shared_dq = memory::list("the workspace", if backward { blocks.len() } else { 0 })?;
        for _ in blocks.iter().filter(|_| backward) {
            shared_dq.push(Mutex::new(Aligned::zeroed(0)?));
        }
        let ordered = OrderedReduction::new(threads);
        let shard = shard.clone();
        let query_tiles = QueryTileCache::default();
        let dq_layout = DqLayout::Rows;
        let key_leaves = match &shard.leaves {
            Some(leaves) if backward => {
                let bias_lanes = scratch.first().map_or(0, |scratch| scratch.sums_bias.len());
                KeyLeaves::new(spec, &geometry, leaves, shard.keys.len(), k_rows, bias_lanes)?
            }
            _ => KeyLeaves::default(),
        };
        let mut state = Self {
            shard,
            geometry,
            backward,
            narrow: false,
            q_rows,
            wide_rows,
            k_rows,
            blocks,
            block_order,
            shared_dq,
            ordered,
            block_index,
            scratch,
            statistics,
            bias_gradient,
            table_gradient,
            dq_layout,
            query_tiles,
            decode,
            attended: false,
            arrivals: LeafArrivals::default(),
            key_leaves,
            received_mask: DenseMask::default(),
            received_index: Vec::new(),
            listed: ListedBlock::default(),
            list_bias_gradient: Vec::new(),
            tile_list_bias: None,
            tangents: None,
        };
        state.index_blocks();
        state.update_narrow();
        Ok(state)
    }

    /// Updates `narrow` for the current batch.
    fn update_narrow(&mut self) {
        if let Some(scratch) = self.scratch.first_mut() {
            self.narrow = is_narrow(&self.shard, &mut scratch.task_tile);
        }
    }

    /// Sorts the blocks for a forward pass; returns the rows of its tasks, and their order.
    pub(crate) fn arrange_forward(&mut self) -> (usize, BlockOrder) {
        let (rows, order) = if self.narrow {
            (self.q_rows, BlockOrder::Rows)
        } else {
            (self.wide_rows, BlockOrder::Heads)
        };
        self.arrange(order);
        (rows, order)
    }

    /// Sorts the blocks for the dq pass; returns the rows of its tasks. With a bias, the blocks of
    /// an owner are adjacent.
    pub(crate) fn arrange_backward(&mut self) -> usize {
        self.arrange(if self.bias_gradient.is_some() {
            BlockOrder::Owners
        } else {
            BlockOrder::Heads
        });
        // q and dO are packed beside dq, which is merged as often
        if self.shard.leaves.is_some() { self.q_rows } else { self.wide_rows }
    }

    /// Prepares the visibility of this rank's queries for a pass over a block with the rows `keys`,
    /// and invalidates what the scratch of every thread holds of the last block.
    pub(crate) fn update_query_tiles(&mut self, team: &Team, keys: &Rows) -> Result<()> {
        let Self { shard, scratch, query_tiles, .. } = self;
        let visibility = shard.visibility(&shard.queries, keys);
        query_tiles.update(team, scratch, &visibility, &shard.spec)?;
        scratch.iter_mut().for_each(ThreadScratch::clear_key_caches);
        Ok(())
    }

    fn arrange(&mut self, block_order: BlockOrder) {
        if std::mem::replace(&mut self.block_order, block_order) != block_order {
            sort(&mut self.blocks, block_order, self.wide_rows);
            self.index_blocks();
        }
    }

    /// Allocates memory to keep packed queries for later calls of a forward pass, if there are few.
    pub(crate) fn keep_queries(&mut self) -> Result<()> {
        let rows = self.geometry.packed_rows(self.geometry.dims.head_dim);
        if self.shard.queries.len() > KeptQueries::<A>::MAX_ROWS {
            return Ok(());
        }
        self.blocks
            .iter_mut()
            .try_for_each(|block| block.kept_q.allocate(block.partial.max.len(), rows))
    }

    fn index_blocks(&mut self) {
        let dims = self.geometry.dims;
        for (index, block) in self.blocks.iter().enumerate() {
            self.block_index[(block.rows.start / self.q_rows * dims.batch + block.batch)
                * dims.kv_heads
                + block.kv_head] = index;
        }
    }

    /// Returns the bytes of this state.
    ///
    /// Counted is all heap memory whose size depends on lengths, heads or dims: accumulators, row
    /// statistics, scratch of each thread, sums of dbias, lists of visible keys, a dense mask that
    /// was received. The last two grow in the first pass of each kind. Not counted: fixed sizes,
    /// the stacks of threads, and the coordinates that the workspace shares with the ring.
    fn bytes(&self) -> usize {
        list_bytes(&self.blocks)
            + list_bytes(&self.shared_dq)
            + list_bytes(&self.block_index)
            + list_bytes(&self.scratch)
            + self.blocks.iter().map(QueryBlock::bytes).sum::<usize>()
            + self.scratch.iter().map(ThreadScratch::bytes).sum::<usize>()
            + list_bytes(&self.statistics.lines)
            + self.bias_gradient.as_ref().map_or(0, BiasGradient::bytes)
            + self.table_gradient.as_ref().map_or(0, TableGradient::bytes)
            + self.query_tiles.bytes()
            + self.decode.as_ref().map_or(0, Decode::bytes)
            + self.arrivals.bytes()
            + self.key_leaves.bytes()
            + self.received_mask.bytes()
            + list_bytes(&self.received_index)
            + self.listed.bytes()
            + list_bytes(&self.list_bias_gradient)
            + self.tile_list_bias.as_ref().map_or(0, ListBiasSums::bytes)
            + self.tangents.as_ref().map_or(0, |tangents| tangents.bytes())
    }

    /// Returns the bytes of partial results of leaves.
    fn leaf_bytes(&self) -> usize {
        let of_queries = self.blocks.iter().map(|block| block.leaves.bytes()).sum::<usize>();
        of_queries + self.key_leaves.bytes()
    }

    /// Adopts a new batch and returns true if this memory fits it; otherwise returns false and
    /// changes nothing.
    pub(crate) fn update(&mut self, shard: &RankShard) -> bool {
        let fits = self.shard.queries.len() == shard.queries.len()
            && self.shard.keys.len() == shard.keys.len()
            && self.shard.most_block_rows == shard.most_block_rows
            && Scores::<A>::has_max_product(&self.shard) == Scores::<A>::has_max_product(shard)
            && leaf_slots(&self.shard)
                .iter()
                .zip(leaf_slots(shard))
                .all(|(&have, want)| have >= want);
        if fits {
            self.shard = shard.clone();
            self.listed.begin();
            self.update_narrow();
        }
        fits
    }

    /// Iterates over the blocks of rows `index · q_rows ..`, in the order of batch row and KV head.
    pub(crate) fn blocks_of_rows(&self, index: usize) -> impl Iterator<Item = &QueryBlock<A>> {
        let planes = self.geometry.dims.batch * self.geometry.dims.kv_heads;
        self.block_index[index * planes..(index + 1) * planes]
            .iter()
            .map(|&index| &self.blocks[index])
    }
}
