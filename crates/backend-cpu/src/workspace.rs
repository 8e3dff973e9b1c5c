//! What stays between calls: the running softmax (or dq) of every query, row statistics, and a scratch for each thread.
//!
//! Memory beyond O(tile) a thread: for every local query and head value_dim + 2 numbers (head_dim + 2 where that is more and there is a backward
//! pass, which sums dq in the same memory). A backward pass adds 2 numbers (4 where out is not normalised) for every query and head, about 100 bytes
//! for what every query sees, and as many numbers as the bias has, if there is one. q, k and v are never copied whole.

use std::ops::Range;

use annulus_core::{DType, Error, Hulls, Local, QueryTile, Result, Visibility};

use crate::{
    aligned::Aligned,
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

/// A task of the passes over queries: the query heads of one key head, some rows of one batch row.
#[derive(Debug)]
pub(crate) struct QueryBlock<A> {
    pub(crate) batch: usize,
    pub(crate) kv_head: usize,
    /// Local query rows.
    pub(crate) rows: Range<usize>,
    /// Lanes of one head.
    lanes: usize,
    /// Blocks of one owner write the same biases' gradients; they lie together and are worked one after another.
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
    /// Whether queries see few keys, as far as this rank's own tell; only without backward.
    narrow: bool,
    /// Rows of a [`QueryBlock`].
    pub(crate) q_rows: usize,
    /// Keys of a task of the passes over keys.
    pub(crate) k_rows: usize,
    /// Sorted by owner; without a bias by batch row, kv head, and from late rows to early ones; where `narrow`, by batch row, rows, and kv head.
    pub(crate) blocks: Vec<QueryBlock<A>>,
    /// `places[(block of rows · batch + batch row) · kv_heads + kv head]`: where that block is in `blocks`.
    places: Vec<usize>,
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

/// Whether the queries in the middle see few of this rank's own keys, in few tiles: a narrow window, short documents.
fn is_narrow(local: &Local) -> bool {
    let (queries, keys) = (local.queries.len(), local.keys.len());
    if queries < 2 * NARROW_LANES || keys < 2 * NARROW_LANES {
        return false;
    }
    let visibility =
        Visibility { mask: &*local.spec.mask, attention_mask: local.attention_mask.as_deref(), queries: &local.queries, keys: &local.keys };
    let first = queries / 2 / NARROW_LANES * NARROW_LANES;
    let mut tile = QueryTile::default();
    visibility.query_tile(0, 0, first..queries.min(first + NARROW_LANES), &mut tile);
    let seen: usize = visibility.key_tiles(&tile, TILE).map(|keys| keys.len()).sum();
    seen <= 2 * NARROW_LANES && 2 * seen <= keys
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
        // where queries share a bias, tasks wait for each other anyway
        let helpers = if backward && spec.bias.is_some() { 1 } else { threads };
        let narrow = !backward && is_narrow(local);
        let most = if narrow { NARROW_LANES } else { LANES };
        let q_rows = geometry.block_rows(local.queries.len(), dims.group(), helpers, most);
        let most_keys = annulus_core::index(local.most_block_rows).max(local.keys.len());
        let k_rows = geometry.block_rows(most_keys, 1, threads, LANES);
        let depth = if backward { padded(dims.head_dim.max(dims.value_dim)).max(geometry.query_width()) } else { padded(dims.value_dim) };
        let mut blocks = Vec::new();
        // head by head, so that keys stay in the cache; of each head the long causal tasks, those of late queries, first
        for batch in 0..dims.batch {
            for kv_head in 0..dims.kv_heads {
                for first in (0..local.queries.len()).step_by(q_rows).rev() {
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
        if narrow {
            // all heads of some rows before the next rows
            blocks.sort_by_key(|block| (block.batch, block.rows.start, block.kv_head));
        } else {
            blocks.sort_by_key(|block| (block.owner, block.rows.start, block.batch, block.kv_head));
        }
        let mut places = vec![0; blocks.len()];
        for (place, block) in blocks.iter().enumerate() {
            places[(block.rows.start / q_rows * dims.batch + block.batch) * dims.kv_heads + block.kv_head] = place;
        }
        let bias_gradient = if backward { BiasGradient::new(spec, &blocks)? } else { None };
        let statistics = if backward { Statistics::new(spec, local.queries.len())? } else { Statistics::default() };
        let few = if decode::wanted::<A>(path, spec, local.queries.len(), backward) { local.queries.len() } else { 0 };
        let decode = if few > 0 { Some(Decode::new(&geometry, few, most_keys)?) } else { None };
        let scratch = (0..threads).map(|_| Scratch::new(&geometry, q_rows, k_rows, backward, few)).collect::<Result<_>>()?;
        let local = local.clone();
        let seen = Seen::default();
        let (order, in_place) = (None, false);
        Ok(Self {
            local,
            geometry,
            backward,
            narrow,
            q_rows,
            k_rows,
            blocks,
            places,
            scratch,
            statistics,
            bias_gradient,
            order,
            seen,
            decode,
            in_place,
        })
    }

    /// Takes in another batch if this memory serves it; else false, and nothing is changed.
    pub(crate) fn update(&mut self, local: &Local) -> bool {
        let fits = self.local.queries.len() == local.queries.len()
            && self.local.keys.len() == local.keys.len()
            && self.local.most_block_rows == local.most_block_rows
            // packed documents may come after others: the same sizes of memory, but cut in another way
            && self.narrow == (!self.backward && is_narrow(local));
        if fits {
            self.local = local.clone();
        }
        fits
    }

    /// The blocks of rows `index · q_rows ..`, in order of batch row and kv head.
    pub(crate) fn blocks_of_rows(&self, index: usize) -> impl Iterator<Item = &QueryBlock<A>> {
        let planes = self.geometry.dims.batch * self.geometry.dims.kv_heads;
        self.places[index * planes..(index + 1) * planes].iter().map(|&place| &self.blocks[place])
    }
}
