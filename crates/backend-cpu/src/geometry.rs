//! How rows are cut into blocks (one task each) and blocks into strips (one register tile wide).

use std::ops::Range;

use annulus_core::{DType, Dims, Spec};

use crate::{
    isa::{Isa, Path},
    logits::Site,
    pack::{Form, padded},
    real::Real,
    sight::TILE,
};

/// Lanes of a task, where it is one: enough that a widened tile of keys serves many queries.
pub(crate) const LANES: usize = 2048;

/// The same where queries see few keys: then what the next heads need of the same rows is still near, in lines of memory and in pages.
pub(crate) const NARROW_LANES: usize = 512;

/// Lanes of all heads of a task: what is packed for them should stay in the second-level cache.
const GROUP_LANES: usize = 2048;

/// Elements of the keys and values of [`Geometry::keys_together`].
const TOGETHER: usize = 1 << 17;

/// The most tiles of keys of [`Geometry::keys_together`].
const MOST_TOGETHER: usize = 8;

/// A part of a block that lies in the lanes of one register tile.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Strip {
    /// Rows of the block.
    pub(crate) rows: Range<usize>,
    /// 64-byte vectors.
    pub(crate) vectors: usize,
    /// Lanes, of which the first `rows.len()` are used.
    pub(crate) width: usize,
}

/// Lengths of one rank's share that all kernels need.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Geometry {
    pub(crate) dims: Dims,
    pub(crate) path: Path,
    /// Elements of a vector.
    vector: usize,
    /// Vectors of a whole strip.
    strip_vectors: usize,
    /// Whether operands of products are pairs of bf16.
    pub(crate) pairs: bool,
}

impl Geometry {
    pub(crate) const fn new<A: Real>(spec: &Spec, path: Path) -> Self {
        let pairs = matches!(path.isa(), Isa::Avx512Bf16) && matches!(spec.dtype, DType::Bf16);
        Self { dims: spec.dims, path, vector: A::WIDTH, strip_vectors: path.most_vectors(), pairs }
    }

    /// Lines of a strip of packed lanes of vectors of length `dim`.
    pub(crate) const fn depth(&self, dim: usize) -> usize {
        if self.pairs { dim.div_ceil(2) } else { dim }
    }

    /// What panels hold that are summed along their rows too, where `crossed`.
    pub(crate) const fn form(&self, crossed: bool) -> Form {
        match (self.pairs, crossed) {
            (false, _) => Form::Exact,
            (true, false) => Form::Pairs,
            (true, true) => Form::CrossedPairs,
        }
    }

    /// The same with strips of which several make up a tile of [`crate::sight::TILE`] lanes.
    pub(crate) const fn of_whole_tiles(self) -> Self {
        let mut strip_vectors = self.path.most_vectors();
        while !TILE.is_multiple_of(strip_vectors * self.vector) {
            strip_vectors -= 1;
        }
        Self { strip_vectors, ..self }
    }

    /// Lanes of a whole strip.
    pub(crate) const fn strip_lanes(&self) -> usize {
        self.strip_vectors * self.vector
    }

    /// Keys, whole tiles of them, for which a tile of queries is taken in once where dq, dk and dv are made together: so many that taking it in, and
    /// adding to its dq, weigh little, and that what is packed and summed for them still streams from a near cache.
    pub(crate) fn keys_together(&self) -> usize {
        let tiles = TOGETHER / (self.head_rows() + self.value_rows()) / TILE;
        TILE * tiles.clamp(1, MOST_TOGETHER)
    }

    /// Elements of a vector of length head_dim that is whole vectors.
    pub(crate) const fn query_width(&self) -> usize {
        self.dims.head_dim.next_multiple_of(self.vector)
    }

    /// Lanes of `rows` rows: whole vectors.
    pub(crate) const fn lanes(&self, rows: usize) -> usize {
        rows.next_multiple_of(self.vector)
    }

    /// The strips of a block of `rows` rows. Where they lie does not depend on the size of the block, as long as it is whole strips.
    pub(crate) fn strips(&self, rows: usize) -> impl ExactSizeIterator<Item = Strip> + use<> {
        let (vector, lanes) = (self.vector, self.strip_lanes());
        (0..rows.div_ceil(lanes)).map(move |index| {
            let rows = index * lanes..rows.min((index + 1) * lanes);
            let vectors = rows.len().div_ceil(vector);
            Strip { rows, vectors, width: vectors * vector }
        })
    }

    /// Rows of a task, so that `rows` rows of every (batch row, key head) make a few tasks for every thread where they can; no more than `most`, or a
    /// strip.
    pub(crate) fn block_rows(&self, rows: usize, heads: usize, threads: usize, most: usize) -> usize {
        let strip = self.strip_lanes();
        let planes = self.dims.batch * self.dims.kv_heads;
        let mut strips = (most / strip).max(1);
        while strips > 1 && (strips * strip * heads > GROUP_LANES || rows.div_ceil(strips * strip) * planes < 4 * threads) {
            strips /= 2;
        }
        strips * strip
    }

    /// The elements of a strip in a task's strips of `dim` lines.
    pub(crate) const fn lanes_of(&self, site: &Site, dim: usize) -> Range<usize> {
        let first = site.strip * self.strip_lanes() * dim;
        first..first + site.width * dim
    }

    /// Query heads that read key head `kv_head`.
    pub(crate) const fn heads(&self, kv_head: usize) -> Range<usize> {
        let group = self.dims.group();
        kv_head * group..(kv_head + 1) * group
    }

    /// Rows of a strip of q, k or their gradients.
    pub(crate) const fn head_rows(&self) -> usize {
        padded(self.dims.head_dim)
    }

    /// Rows of a strip of v, out or their gradients.
    pub(crate) const fn value_rows(&self) -> usize {
        padded(self.dims.value_dim)
    }
}
