//! What stays between calls: the running softmax (or dq) of every query, row statistics, and a scratch for each thread.
//!
//! Memory beyond O(tile) a thread: for every local query and head value_dim + 2 numbers (head_dim + 2 where that is more and there is a backward
//! pass, which sums dq in the same memory). A backward pass adds 2 numbers (4 where out is not normalised) for every query and head, about 100 bytes
//! for what every query sees, and as many numbers as the bias has, if there is one. q, k and v are never copied whole. None of this depends on the number
//! of threads, nor on what the mask lets queries see: another batch changes the order of the blocks and how many of them are a task.

use std::{ops::Range, sync::Mutex};

use annulus_core::{DType, Error, Hulls, Local, QueryTile, Result, Visibility};

use crate::{
    aligned::Aligned,
    backward_turns::Turns,
    bias_gradient::{BiasGradient, owner},
    decode::{self, Decode},
    geometry::{Geometry, LANES, NARROW_LANES},
    isa::{Isa, Path},
    pack::padded,
    real::Real,
    scratch::Scratch,
    sight::TILE,
    statistics::Statistics,
};

/// Everything of one plan on one rank, for the element type of its sums.
#[derive(Debug)]
pub struct Workspace {
    pub(crate) spec_dtype: DType,
    pub(crate) sums: Sums,
}

impl Workspace {
    /// The instruction set whose tiles work in it.
    pub const fn isa(&self) -> Isa {
        match &self.sums {
            Sums::F32(state) => state.geometry.path.isa(),
            Sums::F64(state) => state.geometry.path.isa(),
        }
    }
}

/// By the type of sums.
#[derive(Debug)]
pub(crate) enum Sums {
    F32(Box<State<f32>>),
    F64(Box<State<f64>>),
}

/// Types of sums that a workspace can have.
pub(crate) trait Summed: Real {
    fn wrap(state: State<Self>) -> Sums;
    fn state(workspace: &mut Workspace) -> Result<&mut State<Self>>;
}

macro_rules! summed {
    ($($type:ty => $variant:ident, not $other:ident);*) => { $(
        impl Summed for $type {
            fn wrap(state: State<Self>) -> Sums {
                Sums::$variant(Box::new(state))
            }

            fn state(workspace: &mut Workspace) -> Result<&mut State<Self>> {
                match &mut workspace.sums {
                    Sums::$variant(state) => Ok(state),
                    Sums::$other(_) => Err(Error::Device { what: "a workspace whose sums are of another type".to_owned() }),
                }
            }
        }
    )* };
}

summed!(f32 => F32, not F64; f64 => F64, not F32);

/// Sums of the query heads of one key head, for some rows of one batch row.
#[derive(Debug)]
pub(crate) struct QueryBlock<A> {
    pub(crate) batch: usize,
    pub(crate) kv_head: usize,
    /// Local query rows.
    pub(crate) rows: Range<usize>,
    /// Lanes of one head.
    lanes: usize,
    /// Blocks of one owner write the same biases' gradients.
    pub(crate) owner: usize,
    /// Oᵀ before division: `[heads of the group][strips][dims][lanes]`; or dq before scaling, in some [`Order`].
    pub(crate) sums: Aligned<A>,
    /// Running maximum `[heads of the group][lanes]`.
    pub(crate) max: Aligned<A>,
    /// Running sum.
    pub(crate) sum: Aligned<A>,
    /// How many logits share the maximum; empty where out is normalised.
    pub(crate) ties: Aligned<A>,
}

impl<A> QueryBlock<A> {
    /// Lanes of strip `strip` of head `head` of the group, in `max`, `sum` and `ties`.
    pub(crate) const fn lane(&self, head: usize, first_row: usize) -> usize {
        head * self.lanes + first_row
    }
}

/// A task of the passes over queries: blocks of one (batch row, kv head) whose rows follow each other.
pub(crate) struct QueryTask<'a, A> {
    pub(crate) batch: usize,
    pub(crate) kv_head: usize,
    pub(crate) rows: Range<usize>,
    /// All of them but the last have as many rows as the first.
    blocks: &'a mut [QueryBlock<A>],
}

impl<'a, A> QueryTask<'a, A> {
    /// Whether blocks belong to the same task, where tasks have `rows` rows: whole blocks.
    pub(crate) fn same(rows: usize) -> impl Fn(&QueryBlock<A>, &QueryBlock<A>) -> bool + Clone {
        let of = move |block: &QueryBlock<A>| (block.batch, block.kv_head, block.rows.start / rows);
        move |a, b| of(a) == of(b)
    }

    /// The task of these blocks; `None` if there are none.
    pub(crate) fn new(blocks: &'a mut [QueryBlock<A>]) -> Option<Self> {
        let (first, last) = (blocks.first()?, blocks.last()?);
        Some(Self { batch: first.batch, kv_head: first.kv_head, rows: first.rows.start..last.rows.end, blocks })
    }

    /// The block that holds row number `row` of the task, and its number in the block.
    pub(crate) fn block(&mut self, row: usize) -> (&mut QueryBlock<A>, usize) {
        let rows = self.blocks[0].rows.len();
        (&mut self.blocks[row / rows], row % rows)
    }
}

/// In which order blocks lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Arrangement {
    /// Head by head, so that keys stay in the cache; of each head the long causal tasks, those of late queries, first.
    Heads,
    /// All heads of some rows before the next rows: where queries see few keys, what the next head needs is still near.
    Rows,
    /// By owner; then by batch row, kv head and rows.
    Owners,
}

/// How dq lies in [`QueryBlock::sums`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Order {
    /// `[heads of the group][strips][dims][lanes]`
    Strips,
    /// `[heads of the group][rows][dims, whole vectors]`
    Rows,
}

/// A workspace whose sums are of type `A`.
#[derive(Debug)]
pub(crate) struct State<A> {
    pub(crate) local: Local,
    pub(crate) geometry: Geometry,
    pub(crate) backward: bool,
    /// Whether queries see few keys, as far as this rank's own tell.
    narrow: bool,
    /// Rows of a [`QueryBlock`].
    pub(crate) q_rows: usize,
    /// Rows of a [`QueryTask`] where queries see many keys; else it is one block.
    wide_rows: usize,
    /// Keys of a task of the passes over keys.
    pub(crate) k_rows: usize,
    pub(crate) blocks: Vec<QueryBlock<A>>,
    arrangement: Arrangement,
    /// One for each block, empty but while threads share what these have summed: see [`crate::backward_together`].
    pub(crate) lent: Vec<Mutex<Aligned<A>>>,
    pub(crate) turns: Turns,
    /// `places[(block of rows · batch + batch row) · kv_heads + kv head]`: where that block is in `blocks`.
    pub(crate) places: Vec<usize>,
    pub(crate) scratch: Vec<Scratch<A>>,
    pub(crate) statistics: Statistics<A>,
    pub(crate) bias_gradient: Option<BiasGradient<A>>,
    /// Unknown before the first block of a backward pass.
    pub(crate) order: Option<Order>,
    /// What each tile of queries sees, for the passes over keys.
    pub(crate) seen: Seen,
    /// For few queries that are not differentiated.
    pub(crate) decode: Option<Decode<A>>,
    /// Whether this rank's own keys and values are read where the caller has them.
    pub(crate) in_place: bool,
}

/// Whether the queries in the middle see few of this rank's own keys, in few tiles: a narrow window, short documents. `tile` is scratch.
fn is_narrow(local: &Local, tile: &mut QueryTile) -> bool {
    let (queries, keys) = (local.queries.len(), local.keys.len());
    if queries < 2 * NARROW_LANES || keys < 2 * NARROW_LANES {
        return false;
    }
    let visibility =
        Visibility { mask: &*local.spec.mask, attention_mask: local.attention_mask.as_deref(), queries: &local.queries, keys: &local.keys };
    let first = queries / 2 / NARROW_LANES * NARROW_LANES;
    visibility.query_tile(0, 0, first..queries.min(first + NARROW_LANES), tile);
    let seen: usize = visibility.key_tiles(tile, TILE).map(|keys| keys.len()).sum();
    seen <= 2 * NARROW_LANES && 2 * seen <= keys
}

/// Allocates nothing.
fn sort<A>(blocks: &mut [QueryBlock<A>], arrangement: Arrangement, wide_rows: usize) {
    match arrangement {
        Arrangement::Heads => blocks
            .sort_unstable_by_key(|block| (block.batch, block.kv_head, std::cmp::Reverse(block.rows.start / wide_rows), block.rows.start)),
        Arrangement::Rows => blocks.sort_unstable_by_key(|block| (block.batch, block.rows.start, block.kv_head)),
        Arrangement::Owners => blocks.sort_unstable_by_key(|block| (block.owner, block.batch, block.kv_head, block.rows.start)),
    }
}

/// What each tile of queries sees.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    pub(crate) hulls: Hulls,
    /// `[batches][heads][per_head]`
    pub(crate) tiles: Vec<QueryTile>,
    /// Batch rows, or 1 if they see alike.
    pub(crate) batches: usize,
    /// Query heads, or 1 if they see alike.
    pub(crate) heads: usize,
    /// Tiles of one head.
    pub(crate) per_head: usize,
}

impl<A: Real> State<A> {
    pub(crate) fn new(local: &Local, path: Path, threads: usize, backward: bool) -> Result<Self> {
        let spec = &local.spec;
        let geometry = Geometry::new::<A>(spec, path);
        let dims = spec.dims;
        // in two passes, a sum over queries and keys goes block by block: their size must not depend on the number of threads
        let helpers = if backward && matches!(spec.bias, Some([_, _, 1, 1])) { 1 } else { threads };
        let block_rows = |most| geometry.block_rows(local.queries.len(), dims.group(), helpers, most);
        // what is seen may change from batch to batch: blocks are such that either kind of task is some of them
        let q_rows = block_rows(NARROW_LANES);
        let wide_rows = block_rows(LANES) / q_rows * q_rows;
        let most_keys = annulus_core::index(local.most_block_rows).max(local.keys.len());
        let k_rows = geometry.block_rows(most_keys, 1, threads, LANES);
        let depth = if backward { padded(dims.head_dim.max(dims.value_dim)).max(geometry.query_width()) } else { padded(dims.value_dim) };
        let mut blocks = Vec::new();
        // in the order of their owners, in which the parts of the bias's gradient are made
        for batch in 0..dims.batch {
            for kv_head in 0..dims.kv_heads {
                for first in (0..local.queries.len()).step_by(q_rows) {
                    let rows = first..local.queries.len().min(first + q_rows);
                    let owner = owner(spec, backward, batch, kv_head, first / q_rows, blocks.len());
                    let lanes = geometry.lanes(rows.len());
                    let all = lanes * dims.group();
                    let ties = Aligned::zeroed(if spec.normalize { 0 } else { all })?;
                    let sums = Aligned::zeroed(all * depth)?;
                    let (max, sum) = (Aligned::zeroed(all)?, Aligned::zeroed(all)?);
                    blocks.push(QueryBlock { batch, kv_head, rows, lanes, owner, sums, max, sum, ties });
                }
            }
        }
        let arrangement = Arrangement::Owners;
        sort(&mut blocks, arrangement, wide_rows);
        let places = vec![0; blocks.len()];
        let bias_gradient = if backward { BiasGradient::new(spec, &blocks, q_rows)? } else { None };
        let statistics = if backward { Statistics::new(spec, local.queries.len())? } else { Statistics::default() };
        let few = if decode::wanted::<A>(path, spec, local.queries.len(), backward) { local.queries.len() } else { 0 };
        let decode = if few > 0 { Some(Decode::new(&geometry, few, most_keys)?) } else { None };
        let scratch = (0..threads).map(|_| Scratch::new(spec, &geometry, wide_rows, k_rows, backward, few)).collect::<Result<_>>()?;
        let lent = blocks.iter().filter(|_| backward).map(|_| Aligned::zeroed(0).map(Mutex::new)).collect::<Result<_>>()?;
        let turns = Turns::new(threads);
        let local = local.clone();
        let seen = Seen::default();
        let (order, in_place) = (None, false);
        let mut state = Self {
            local,
            geometry,
            backward,
            narrow: false,
            q_rows,
            wide_rows,
            k_rows,
            blocks,
            arrangement,
            lent,
            turns,
            places,
            scratch,
            statistics,
            bias_gradient,
            order,
            seen,
            decode,
            in_place,
        };
        state.find_places();
        state.look_how_far();
        Ok(state)
    }

    /// Finds out what kind of tasks suits what queries see.
    fn look_how_far(&mut self) {
        if let Some(scratch) = self.scratch.first_mut() {
            self.narrow = is_narrow(&self.local, &mut scratch.whole);
        }
    }

    /// Puts blocks into the order of the forward pass; the rows of its tasks.
    pub(crate) fn arrange_forward(&mut self) -> usize {
        self.arrange(if self.narrow { Arrangement::Rows } else { Arrangement::Heads });
        if self.narrow { self.q_rows } else { self.wide_rows }
    }

    /// Puts blocks into the order of the backward pass over queries: with a bias, those of an owner lie together. The rows of its tasks.
    pub(crate) fn arrange_backward(&mut self) -> usize {
        self.arrange(if self.bias_gradient.is_some() { Arrangement::Owners } else { Arrangement::Heads });
        self.wide_rows
    }

    fn arrange(&mut self, arrangement: Arrangement) {
        if std::mem::replace(&mut self.arrangement, arrangement) != arrangement {
            sort(&mut self.blocks, arrangement, self.wide_rows);
            self.find_places();
        }
    }

    fn find_places(&mut self) {
        let dims = self.geometry.dims;
        for (place, block) in self.blocks.iter().enumerate() {
            self.places[(block.rows.start / self.q_rows * dims.batch + block.batch) * dims.kv_heads + block.kv_head] = place;
        }
    }

    /// Takes in another batch if this memory serves it; else false, and nothing is changed.
    pub(crate) fn update(&mut self, local: &Local) -> bool {
        let fits = self.local.queries.len() == local.queries.len()
            && self.local.keys.len() == local.keys.len()
            && self.local.most_block_rows == local.most_block_rows;
        if fits {
            self.local = local.clone();
            self.look_how_far();
        }
        fits
    }

    /// The blocks of rows `index · q_rows ..`, in order of batch row and kv head.
    pub(crate) fn blocks_of_rows(&self, index: usize) -> impl Iterator<Item = &QueryBlock<A>> {
        let planes = self.geometry.dims.batch * self.geometry.dims.kv_heads;
        self.places[index * planes..(index + 1) * planes].iter().map(|&place| &self.blocks[place])
    }
}
