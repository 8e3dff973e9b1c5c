//! The gradients of the logits of 64 queries × 64 keys, and what they give to dq: dQ += dS·K.
//!
//! Keys lie in lanes where logits are made, and dq wants sums along keys: the strips of a tile are put side by side, so that a row of queries meets all 64
//! keys in one chain of multiply-adds.

use std::ops::Range;

use annulus_core::Result;

use crate::{
    aligned::Aligned,
    geometry::Geometry,
    isa::{Job, Kernel, Path},
    lanes::{strip, strip_mut, unrolled},
    logits::Site,
    pack::Panel,
    pairs::{VisibleLine, narrow_rows, words, words_mut},
    real::Real,
    sight::{Sight, TILE},
    vector::Vector,
};

/// dS of 64 queries × 64 keys, put together from strips of keys.
#[derive(Debug)]
pub(crate) struct WholeTile<A> {
    elements: Aligned<A>,
    /// Elements of a row: 64, or half as many words.
    stride: usize,
    /// The visible keys of each query.
    words: [u64; TILE],
}

impl<A: Real> WholeTile<A> {
    pub(crate) fn new(geometry: &Geometry, wanted: bool) -> Result<Self> {
        let stride = geometry.depth(TILE);
        Ok(Self { elements: Aligned::zeroed(if wanted { TILE * stride } else { 0 })?, stride, words: [0; TILE] })
    }

    /// Nobody sees anything.
    pub(crate) fn clear(&mut self) {
        self.elements.fill(A::ZERO);
        self.words.fill(0);
    }

    /// Takes the visible rows of a strip whose first key is key number `lane` of the tile.
    pub(crate) fn take(&mut self, path: Path, site: &Site, sight: &Sight, lane: usize, tile: &[A]) {
        let rows = sight.rows().clone();
        for (place, into) in self.words[rows.clone()].iter_mut().enumerate() {
            *into |= sight.words().map_or(!0 >> (TILE - site.width), |words| words[place]) << lane;
        }
        let from = &tile[site.span(&rows)];
        let into = &mut self.elements[rows.start * self.stride..rows.end * self.stride];
        if self.stride == TILE {
            A::run(path, site.vectors, Place { from, into, lane });
        } else {
            narrow_rows(path, site.vectors, from, into, self.stride, lane / 2);
        }
    }
}

/// What a whole tile is multiplied with, and added to.
pub(crate) struct OfTile<'a, A> {
    /// Rows of the tile, from the first on.
    pub(crate) first_row: usize,
    /// Keys, one a row of whole vectors.
    pub(crate) panel: &'a Panel<A>,
    /// The panel's rows that are the tile's keys.
    pub(crate) keys: Range<usize>,
    /// Rows of dq: a multiple of [`crate::isa::MOST_ROWS`].
    pub(crate) into: &'a mut [A],
    /// Elements of each of them: whole vectors.
    pub(crate) width: usize,
}

impl<A: Real> WholeTile<A> {
    /// dQ += dS·K.
    pub(crate) fn add(&self, path: Path, of: OfTile<'_, A>) {
        let OfTile { first_row, panel, keys, into, width } = of;
        let vectors = width / A::WIDTH;
        let strips = vectors.div_ceil(path.most_vectors());
        let mut column = 0;
        for strip in 0..strips {
            let vectors = (vectors + strips - 1 - strip) / strips;
            let job = RowSums { tile: self, first_row, panel, keys: keys.clone(), into: &mut *into, width, column };
            if panel.pairs() && !panel.finite() {
                job.visible_pairs(path, vectors);
            } else {
                A::run_products(path, panel.pairs(), vectors, job);
            }
            column += vectors * A::WIDTH;
        }
    }
}

/// Copies a strip into a wider tile.
struct Place<'a, A> {
    from: &'a [A],
    into: &'a mut [A],
    lane: usize,
}

impl<A: Real> Job for Place<'_, A> {
    type Output = ();

    #[inline(always)]
    fn run<const FUSED: bool, const ROWS: usize, const VECTORS: usize, const WIDTH: usize>(self) {
        for (from, into) in strip::<A, VECTORS, WIDTH>(self.from).iter().zip(self.into.chunks_exact_mut(TILE)) {
            if let Some(into) = strip_mut::<A, VECTORS, WIDTH>(&mut into[self.lane..]).first_mut() {
                *into = *from;
            }
        }
    }
}

/// C\[i\]\[l\] += Σ_k A\[i\]\[k\]·B\[k\]\[l\] for the columns `column ..` of C and B.
struct RowSums<'a, A> {
    tile: &'a WholeTile<A>,
    /// The row of the tile that belongs to the first row of C.
    first_row: usize,
    panel: &'a Panel<A>,
    /// Rows of the panel.
    keys: Range<usize>,
    /// C: a multiple of [`crate::isa::MOST_ROWS`] rows of `width` elements.
    into: &'a mut [A],
    width: usize,
    column: usize,
}

impl<A: Real> Kernel<A> for RowSums<'_, A> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<A>, const ROWS: usize, const VECTORS: usize>(self) {
        if !self.panel.finite() {
            return self.visible_only::<V, VECTORS>();
        }
        let Self { tile, first_row, panel, keys, into, width, column } = self;
        let b = panel.lines(&keys);
        for (block, c) in into.chunks_exact_mut(ROWS * width).enumerate() {
            let a = &tile.elements[(first_row + block * ROWS) * tile.stride..];
            let a: [&[A]; ROWS] = std::array::from_fn(|r| &a[r * tile.stride..][..tile.stride]);
            let mut sums = [[V::splat(A::ZERO); VECTORS]; ROWS];
            for (k, b) in b.chunks_exact(panel.line_stride()).enumerate().take(tile.stride) {
                let Some(b) = V::row::<VECTORS>(&b[column..]) else { break };
                unrolled!(r < ROWS, v < VECTORS, sums[r][v] = V::splat(a[r][k]).product(V::load(&b[v]), sums[r][v]));
            }
            unrolled!(r < ROWS, {
                if let Some(c) = V::row_mut::<VECTORS>(&mut c[r * width + column..]) {
                    unrolled!(v < VECTORS, V::load(&c[v]).plus(sums[r][v]).store(&mut c[v]));
                }
            });
        }
    }
}

impl<A: Real> RowSums<'_, A> {
    /// The same over words.
    fn visible_pairs(self, path: Path, vectors: usize) {
        let Self { tile, first_row, panel, keys, into, width, column } = self;
        let (b, stride) = (&words(panel.lines(&keys))[column..], panel.line_stride());
        for (row, c) in (first_row..).zip(into.chunks_exact_mut(width)) {
            let (a, c) = (words(&tile.elements[row * tile.stride..][..tile.stride]), &mut words_mut(c)[column..]);
            path.run_pairing(vectors, VisibleLine { a, b, stride, seen: tile.words[row], c });
        }
    }

    /// Skips what is not visible instead of multiplying it by 0.
    #[inline(always)]
    fn visible_only<V: Vector<A>, const VECTORS: usize>(self) {
        let Self { tile, first_row, panel, keys, into, width, column } = self;
        for (row, c) in (first_row..).zip(into.chunks_exact_mut(width)) {
            let mut sums = [V::splat(A::ZERO); VECTORS];
            for k in (0..keys.len()).filter(|k| tile.words[row] >> k & 1 != 0) {
                let Some(b) = V::row::<VECTORS>(&panel.rows(keys.start + k..keys.start + k + 1)[column..]) else { break };
                let a = tile.elements[row * TILE + k];
                unrolled!(v < VECTORS, sums[v] = V::splat(a).multiply_add(V::load(&b[v]), sums[v]));
            }
            if let Some(c) = V::row_mut::<VECTORS>(&mut c[column..]) {
                unrolled!(v < VECTORS, V::load(&c[v]).plus(sums[v]).store(&mut c[v]));
            }
        }
    }
}
