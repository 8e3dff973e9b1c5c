//! dq, dk and dv of one block of keys in one go: logits and their gradients are made once.
//!
//! ```text
//! for each task (batch row, kv head):
//!     for some tiles of 64 keys, for each tile of 64 queries that see some of them, and each query head of the kv head, and each of the tiles of keys:
//!         S, dP, dS and weights as in `backward_keys`      dVᵀ += dOᵀ·weights      dKᵀ += Qᵀ·dS      dQ += dS·K
//! ```
//! Five products where the two passes, each for itself, take seven. Every sum has the terms of those passes in their order (dq: keys ascend, 64 to a
//! chain; dk and dv: queries ascend), so the bits are the same, and which form runs may depend on the number of threads. A task owns a whole head's
//! dq: with too few (batch row, kv head) pairs for the threads, or with a bias whose gradient is summed by queries, the two passes run.

use std::{
    ops::Range,
    sync::{Mutex, PoisonError},
};

use annulus_core::{Block, Host, HostBuffer, Inputs, Result, Saved, Tick};

use crate::{
    aligned::Aligned,
    backward_keys::{KeyPass, Task, attend_block, attend_keys},
    backward_queries::attend_queries,
    forward::Acc,
    geometry::Geometry,
    input::{Input, device},
    isa::{Job, Kernel, Path},
    lanes::{strip, strip_mut, unrolled},
    logits::Site,
    pack::{Panel, padded},
    pairs::{VisibleLine, narrow_rows, words, words_mut},
    real::Real,
    scratch::Scratch,
    sight::{Sight, TILE},
    team::Team,
    vector::Vector,
    workspace::{Order, QueryBlock, State, Summed},
};

/// Adds what a block of keys gives to dq and to the gradient of the bias, and writes what this rank's queries give to dk and dv.
pub(crate) fn attend_backward<E: Input<Accumulator: Summed>>(
    team: &Team,
    state: &mut State<Acc<E>>,
    inputs: &Inputs<'_, Host>,
    saved: &Saved<'_, Host>,
    block: &Block<'_, Host>,
    fresh: &mut HostBuffer,
    tick: Tick<'_>,
) -> Result<()> {
    if !state.together(team.threads()) {
        attend_queries::<E>(team, state, inputs, saved, block, &mut *tick)?;
        return attend_keys::<E>(team, state, inputs, saved, block, fresh, tick);
    }
    state.sum_in(Order::Rows)?;
    attend_block::<E>(team, state, inputs, saved, block, fresh, true, tick)
}

/// All tasks; `sums` are gradient records, the blocks are those of all queries, each of so many rows.
pub(crate) fn add_together<E: Input<Accumulator: Summed>>(
    pass: &KeyPass<'_, E>,
    team: &Team,
    scratch: &mut [Scratch<Acc<E>>],
    sums: &mut [Acc<E>],
    (blocks, q_rows): (&mut [QueryBlock<Acc<E>>], usize),
    tick: Tick<'_>,
) {
    let len = pass.visibility.keys.len();
    let (path, width, group) = (pass.geometry.path, pass.geometry.query_width(), pass.geometry.dims.group());
    let planes = blocks.chunk_by_mut(|a, b| (a.batch, a.kv_head) == (b.batch, b.kv_head));
    // tasks write different elements of the same records: they take turns
    let sums = Mutex::new(sums);
    team.run(scratch, planes, Some(tick), |scratch, blocks, pulse| {
        let (batch, kv_head) = blocks.first().map_or((0, 0), |block| (block.batch, block.kv_head));
        let mut dq = QueryGradients { path, width, group, blocks, q_rows };
        for first in (0..len).step_by(pass.k_rows) {
            let task = Task { batch, kv_head, keys: first..len.min(first + pass.k_rows) };
            scratch.rows_key.fill(path, &pass.k, batch, kv_head, task.keys.clone());
            pass.sum(scratch, &task, Some(&mut dq), pulse);
            if pulse.stopped() {
                return;
            }
            pass.write(scratch, &task, &mut sums.lock().unwrap_or_else(PoisonError::into_inner));
        }
    });
}

impl<A: Real> State<A> {
    /// Whether one task for each (batch row, kv head) keeps the threads busy enough to make up for the two products that the two passes take more.
    fn together(&self, threads: usize) -> bool {
        let planes = self.geometry.dims.batch * self.geometry.dims.kv_heads;
        let busy = planes.div_ceil(threads) * threads;
        self.bias_gradient.is_none() && !self.blocks.is_empty() && 5 * busy <= 7 * planes
    }

    /// Decides how dq lies in memory during a backward pass, once.
    pub(crate) fn sum_in(&mut self, order: Order) -> Result<()> {
        match self.order.replace(order) {
            Some(before) if before != order => Err(device("a backward pass is attended to in one way from its beginning to its end")),
            _ => Ok(()),
        }
    }
}

/// The gradients of all queries of a (batch row, kv head), a row of memory each.
pub(crate) struct QueryGradients<'a, A> {
    path: Path,
    /// Elements of a row.
    width: usize,
    /// Query heads of a key head.
    group: usize,
    /// From late queries to early ones.
    blocks: &'a mut [QueryBlock<A>],
    /// Rows of every block but that of the last queries.
    q_rows: usize,
}

impl<A: Real> QueryGradients<'_, A> {
    /// dQ += dS·K for a tile of queries of one head and the tile of keys that begins at key `first_key` of the task.
    pub(crate) fn add(&mut self, scratch: &Scratch<A>, head: usize, task: &Task, first_key: usize, queries: &Range<usize>) {
        let Scratch { rows_key, whole_tile, .. } = scratch;
        let keys = first_key..task.keys.len().min(first_key + TILE);
        let last = self.blocks.len() - 1;
        let mut first = queries.start;
        // a tile may lie across blocks: all of them begin at whole register tiles
        while first < queries.end {
            let block = &mut self.blocks[last - first / self.q_rows];
            let end = block.rows.end.min(queries.end);
            let rows = first - queries.start..first - queries.start + padded(end - first);
            let at = block.lane(head % self.group, first - block.rows.start);
            let into = &mut block.sums[at * self.width..(at + rows.len()) * self.width];
            let vectors = self.width / A::WIDTH;
            let strips = vectors.div_ceil(self.path.most_vectors());
            let mut column = 0;
            for strip in 0..strips {
                let vectors = (vectors + strips - 1 - strip) / strips;
                let job = RowSums {
                    tile: whole_tile,
                    first_row: rows.start,
                    panel: rows_key,
                    keys: keys.clone(),
                    into,
                    width: self.width,
                    column,
                };
                if rows_key.pairs() && !rows_key.finite() {
                    job.visible_pairs(self.path, vectors);
                } else {
                    A::run_products(self.path, rows_key.pairs(), vectors, job);
                }
                column += vectors * A::WIDTH;
            }
            first = end;
        }
    }
}

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
