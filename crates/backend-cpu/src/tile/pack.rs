//! Packing: copies of a tile's vectors, widened to the accumulator type and laid out for
//! [`crate::tile::gemm`].
//!
//! ```text
//! Panel::fill:          rows of a tensor  →  [rows][dim padded]         the broadcast operand A
//! PackLanes:            rows of a tensor  →  [dim][lanes] (transposed)  the vector operand B, a
//!                                                                       strip
//! each_lane, LaneRows:  [dim][lanes]      →  rows again
//! ```
//! Rows of one head lie heads × dim elements apart in the caller's tensor. A micro-kernel reads
//! packed operands with unit stride, as in BLIS (Van Zee and van de Geijn 2015). A panel of which
//! few products are computed is read in place instead ([`PanelView`]).

use std::ops::Range;

use annulus_core::Result;

use crate::{
    simd::{
        dispatch::{IsaToken, MAX_REGISTER_ROWS, Real, SimdKernel},
        element::Float,
        isa::prefetch_l1,
        tile_unit::TILE_SIZE,
        vector::{MAX_LANES, Vector, unrolled},
    },
    tile::{
        aligned::Aligned,
        bf16_pairs::{PackPairs, pairs_of},
        input::{Plane, TileInput, TileSource},
        pack_terms::{PackRows, PairsAlongRows},
        terms::{ROW_PAIRS, RowPositions},
        tile_mask::{TILE, TileMask},
    },
};

/// Rounds a count up to whole register tiles.
pub(crate) const fn padded(count: usize) -> usize {
    count.next_multiple_of(MAX_REGISTER_ROWS)
}

/// Returns `dim` rounded up to whole vectors.
pub(crate) const fn padded_dim<A: Real>(dim: usize) -> usize {
    dim.next_multiple_of(A::WIDTH)
}

/// Vectors, one per row: the broadcast operand of a product.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PanelRows<L> {
    elements: L,
    /// Elements between two rows.
    pub(crate) stride: usize,
    /// True if no element is NaN or infinite.
    pub(crate) finite: bool,
    /// True if elements are pairs of bf16; see [`crate::tile::bf16_pairs`].
    pub(crate) pairs: bool,
    /// Pairs along the rows, for [`PanelFormat::InterleavedPairs`] and [`PanelFormat::Tiles`]; else
    /// empty.
    along_rows: L,
    /// Elements between two rows of [`PanelView::reduction_rows`], or between two lines of
    /// [`PanelView::along_rows`].
    pub(crate) reduction_stride: usize,
    /// bf16 terms of an element, for [`PanelFormat::Tiles`]; else 0.
    pub(crate) terms: usize,
    /// Powers of two by which rows were multiplied, then those of sums over each tile of rows; see
    /// [`crate::tile::terms`]. Empty for one term.
    factors: L,
    /// True for vectors of queries, false for those of keys; see [`crate::tile::terms`].
    pub(crate) is_of_queries: bool,
    /// Layout of `along_rows` for [`PanelFormat::Tiles`].
    along: Option<AlongRows>,
}

/// Packed vectors. Elements beyond the dim and rows that were never packed are 0.
pub(crate) type Panel<A> = PanelRows<Aligned<A>>;

/// Rows of a [`Panel`], or rows of a caller's tensor or of a block, read in place.
pub(crate) type PanelView<'a, A> = PanelRows<&'a [A]>;

/// Format of a panel's elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PanelFormat {
    /// Elements widened to the accumulator type.
    Widened,
    /// Pairs of bf16 along the dims.
    Pairs,
    /// Pairs of bf16 along the dims, and a second copy with pairs along the rows, two rows per line.
    InterleavedPairs,
    /// Sums of bf16 terms, as pairs along the dims and, if wanted, along the rows.
    Tiles { terms: usize, along_rows: Option<AlongRows> },
}

/// Line of a panel's pairs along the rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AlongRows {
    /// A dim: the first operand of a product of tiles.
    ByDim,
    /// Two rows: the second operand.
    ByRow,
}

impl<A: Real> Panel<A> {
    pub(crate) fn new(dim: usize, format: PanelFormat) -> Result<Self> {
        Self::with_stride(TILE, dim, padded(dim), format)
    }

    /// Allocates room for `rows` vectors of length `dim`. `stride` separates widened rows, and
    /// lines of pairs along the rows.
    pub(crate) fn with_stride(
        rows: usize,
        dim: usize,
        stride: usize,
        format: PanelFormat,
    ) -> Result<Self> {
        let pairs = format != PanelFormat::Widened;
        let of_dims = dim.div_ceil(2).next_multiple_of(TILE_SIZE);
        let tiles = rows.div_ceil(TILE);
        let (mut terms, mut along, mut factors) = (0, None, 0);
        let (lines, reduction_stride) = match format {
            PanelFormat::Widened | PanelFormat::Pairs => (0, stride),
            PanelFormat::InterleavedPairs => (rows.div_ceil(2), stride),
            PanelFormat::Tiles { terms: count, along_rows } => {
                (terms, along) = (count, along_rows);
                factors = if terms > 1 { tiles * (TILE + 1) } else { 0 };
                match along_rows {
                    None => (0, stride),
                    Some(AlongRows::ByDim) => (dim.next_multiple_of(TILE_SIZE), terms * ROW_PAIRS),
                    Some(AlongRows::ByRow) => (terms * tiles * ROW_PAIRS, stride),
                }
            }
        };
        let along_rows = Aligned::zeroed(lines * reduction_stride)?;
        let stride = if pairs { terms.max(1) * of_dims } else { stride };
        Ok(Self {
            elements: Aligned::zeroed(rows * stride)?,
            stride,
            finite: true,
            pairs,
            along_rows,
            reduction_stride,
            terms,
            factors: Aligned::zeroed(factors)?,
            is_of_queries: false,
            along,
        })
    }

    /// Returns the heap bytes.
    pub(crate) const fn bytes(&self) -> usize {
        self.elements.bytes() + self.along_rows.bytes() + self.factors.bytes()
    }

    /// Returns the packed rows as an operand of a product.
    pub(crate) fn view(&self) -> PanelView<'_, A> {
        let Self { ref elements, ref along_rows, ref factors, .. } = *self;
        let Self { stride, finite, pairs, reduction_stride, terms, is_of_queries, along, .. } =
            *self;
        PanelRows {
            elements,
            stride,
            finite,
            pairs,
            along_rows,
            reduction_stride,
            terms,
            factors,
            is_of_queries,
            along,
        }
    }

    /// Packs the vectors `rows` of one head, at most as many as there is room for.
    pub(crate) fn fill<E: TileInput<Accumulator = A>>(
        &mut self,
        token: IsaToken,
        source: &TileSource<'_, E>,
        batch: usize,
        head: usize,
        rows: Range<usize>,
    ) {
        self.fill_at(token, source, batch, head, rows, RowPositions::default());
    }

    /// Packs the vectors `rows` of one head. On tiles, sums over rows have them at `positions`.
    pub(crate) fn fill_at<E: TileInput<Accumulator = A>>(
        &mut self,
        token: IsaToken,
        source: &TileSource<'_, E>,
        batch: usize,
        head: usize,
        rows: Range<usize>,
        positions: RowPositions<'_>,
    ) {
        if self.terms > 0 {
            self.fill_terms(token, source.plane(batch, head), rows, positions, 0);
        } else if self.pairs {
            let kernel = PackPairs {
                source,
                batch,
                head,
                rows,
                rows_of_pairs: &mut self.elements,
                stride: self.stride,
                along_rows: &mut self.along_rows,
                along_rows_stride: self.reduction_stride,
            };
            self.finite = A::run(token, 1, kernel);
        } else {
            let stride = self.stride;
            let plane = source.plane(batch, head);
            let into = &mut self.elements[..rows.len() * stride];
            self.finite = A::run_kernel(token, 1, PackPanel { plane, rows, stride, into });
        }
    }

    /// Packs rows into operands of products on tiles, from row `at` of the panel on. Pairs along the
    /// rows require that it is 0.
    pub(crate) fn fill_terms<E: TileInput<Accumulator = A>>(
        &mut self,
        token: IsaToken,
        plane: Plane<'_, E>,
        rows: Range<usize>,
        positions: RowPositions<'_>,
        at: usize,
    ) {
        let Self { stride, terms, reduction_stride, along, .. } = *self;
        // the rows of several heads are packed one after another, from row 0 on
        self.finite |= at == 0;
        let of_term = self.along_rows.len() / terms;
        let capacity = self.factors.len() / (TILE + 1) * TILE;
        let (of_rows, of_tiles) = self.factors.split_at_mut(capacity);
        for (tile, first) in rows.clone().step_by(TILE).enumerate() {
            let into = at + tile * TILE;
            let along_rows = match along {
                None => PairsAlongRows::Absent,
                Some(AlongRows::ByDim) => PairsAlongRows::ByDim(&mut self.along_rows),
                Some(AlongRows::ByRow) => PairsAlongRows::ByRow {
                    elements: &mut self.along_rows[tile * ROW_PAIRS * reduction_stride..],
                    of_term,
                    stride: reduction_stride,
                },
            };
            let mut finite = true;
            let kernel = PackRows {
                plane,
                rows: first..rows.end.min(first + TILE),
                terms,
                positions,
                elements: &mut self.elements[into * stride..],
                stride,
                along_rows,
                factors: of_rows.get_mut(into..).zip(of_tiles.get_mut(into / TILE)),
                finite: &mut finite,
            };
            token.run_pair_kernel(1, kernel);
            self.finite &= finite;
        }
    }
}

/// Maximum number of products with a tile's rows, above which it is packed. A packed tile is read
/// from the first-level cache at unit stride; for a few products, that does not pay for the copy.
pub(crate) const MAX_USES_IN_PLACE: usize = 4;

impl<'a, A: Real> PanelView<'a, A> {
    /// Returns the rows `rows` of a plane as an operand that is read in place; `None` if they have
    /// to be packed, because
    ///
    /// * they are not contiguous vectors of the accumulator's type, or
    /// * they are not whole register tiles, which kernels read.
    pub(crate) fn in_place<E: TileInput<Accumulator = A>>(
        plane: Plane<'a, E>,
        rows: &Range<usize>,
    ) -> Option<Self> {
        let Plane::Vectors { elements, stride, dim } = plane else { return None };
        let is_whole = rows.len().is_multiple_of(MAX_REGISTER_ROWS)
            && dim.is_multiple_of(MAX_REGISTER_ROWS)
            && !rows.is_empty();
        if E::DTYPE != A::DTYPE || !is_whole {
            return None;
        }
        let elements = elements.get(rows.start * stride..(rows.end - 1) * stride + dim)?;
        Some(Self {
            elements: bytemuck::cast_slice(elements),
            stride,
            finite: true,
            pairs: false,
            along_rows: &[],
            reduction_stride: stride,
            terms: 0,
            factors: &[],
            is_of_queries: false,
            along: None,
        })
    }

    /// Returns the same rows with [`PanelView::finite`] as found out by reading them, of rows in
    /// place whose vectors have length `dim`.
    pub(crate) fn probed(self, token: IsaToken, dim: usize) -> Self {
        let Self { elements, stride, .. } = self;
        Self { finite: A::run_kernel(token, 1, ProbeRows { elements, stride, dim }), ..self }
    }

    /// Returns the same panel as vectors of queries.
    pub(crate) const fn of_queries(self) -> Self {
        Self { is_of_queries: true, ..self }
    }

    /// Returns the same panel from element `first` on: later rows, or the second halves of vectors
    /// that consist of two. Each of these has to be followed by as many elements as kernels read.
    pub(crate) fn starting_at(&self, first: usize) -> Self {
        Self { elements: &self.elements[first..], ..*self }
    }

    /// Returns the operand of a product that sums over the rows `rows`: these rows or, for pairs of
    /// bf16, lines that hold two rows each.
    pub(crate) fn reduction_rows(&self, rows: &Range<usize>) -> &'a [A] {
        if self.pairs {
            let pairs = pairs_of(rows);
            &self.along_rows[pairs.start * self.reduction_stride..pairs.end * self.reduction_stride]
        } else {
            self.rows(rows.clone())
        }
    }

    /// Returns pairs along the rows, for products on tiles.
    pub(crate) const fn along_rows(&self) -> &'a [A] {
        self.along_rows
    }

    /// Returns the factors of the rows; none for one term.
    pub(crate) fn row_factors(&self) -> &'a [A] {
        &self.factors[..self.factors.len() / (TILE + 1) * TILE]
    }

    /// Returns the factor of sums over the tile of row `first`; none for one term.
    pub(crate) fn tile_factor(&self, first: usize) -> &'a [A] {
        let tile = self.factors.len() / (TILE + 1) * TILE + first / TILE;
        self.factors.get(tile..tile + 1).unwrap_or_default()
    }

    /// Returns the rows `rows`, `stride` apart. The last one may end with its vector.
    pub(crate) fn rows(&self, rows: Range<usize>) -> &'a [A] {
        &self.elements[rows.start * self.stride..self.elements.len().min(rows.end * self.stride)]
    }
}

/// Two operands of a tile that are read in place: K and V, or Q and dO.
pub(crate) struct PanelsInPlace<'a, A> {
    panels: [PanelView<'a, A>; 2],
    /// Lengths of their vectors.
    dims: [usize; 2],
    /// True for panels that are known to be finite or not.
    is_probed: [bool; 2],
}

impl<'a, A: Real> PanelsInPlace<'a, A> {
    /// Returns the rows `rows` of two planes, of which `uses` products each are computed; `None` if
    /// they have to be packed.
    pub(crate) fn new<E: TileInput<Accumulator = A>>(
        planes: [Plane<'a, E>; 2],
        rows: &Range<usize>,
        dims: [usize; 2],
        uses: usize,
    ) -> Option<Self> {
        if uses > MAX_USES_IN_PLACE {
            return None;
        }
        let [first, second] = planes.map(|plane| PanelView::in_place(plane, rows));
        Some(Self { panels: [first?, second?], dims, is_probed: [false; 2] })
    }

    /// Returns a panel for a product of vectors, which needs no knowledge of its elements.
    pub(crate) const fn panel(&self, index: usize) -> PanelView<'a, A> {
        self.panels[index]
    }

    /// Returns a panel for a product that sums over its rows. Reads it first if masked pairs of the
    /// tile have to be skipped where an element is not finite.
    pub(crate) fn reduction_panel(
        &mut self,
        index: usize,
        token: IsaToken,
        tile_mask: &TileMask,
    ) -> PanelView<'a, A> {
        let has_masked = tile_mask.words().is_some();
        if has_masked && !std::mem::replace(&mut self.is_probed[index], true) {
            self.panels[index] = self.panels[index].probed(token, self.dims[index]);
        }
        self.panels[index]
    }
}

/// Finds out if some rows are finite.
struct ProbeRows<'a, A> {
    /// Rows `stride` apart.
    elements: &'a [A],
    stride: usize,
    dim: usize,
}

impl<A: Real> SimdKernel<A> for ProbeRows<'_, A> {
    /// As [`PackPanel`].
    type Output = bool;

    #[inline(always)]
    fn run<V: Vector<A>, const ROWS: usize, const VECTORS: usize>(self) -> bool {
        let zero = V::splat(A::ZERO);
        let mut probe = [zero; UNROLL];
        let mut rest = A::ZERO;
        for row in self.elements.chunks(self.stride) {
            let vector = &row[..self.dim];
            let taken = vector.len() / (UNROLL * V::WIDTH) * UNROLL * V::WIDTH;
            for vectors in V::strip::<UNROLL>(&vector[..taken]) {
                unrolled!(i < UNROLL, {
                    probe[i] = V::load(&vectors[i]).multiply_add(zero, probe[i]);
                });
            }
            for &element in &vector[taken..] {
                rest += element * A::ZERO;
            }
        }
        probe[0].plus(probe[1]).total() + rest == A::ZERO
    }
}

struct PackPanel<'a, 's, E: TileInput> {
    plane: Plane<'s, E>,
    rows: Range<usize>,
    stride: usize,
    into: &'a mut [E::Accumulator],
}

impl<E: TileInput> SimdKernel<E::Accumulator> for PackPanel<'_, '_, E> {
    /// True if no element is NaN or infinite: Σ 0·x is NaN exactly if some x is not finite.
    type Output = bool;

    #[inline(always)]
    fn run<V: Vector<E::Accumulator>, const ROWS: usize, const VECTORS: usize>(self) -> bool {
        let zero = V::splat(E::Accumulator::ZERO);
        // two sums hide the latency of the multiply-add
        let mut probe = [zero; UNROLL];
        let mut rest = E::Accumulator::ZERO;
        for (row, into) in self.rows.zip(self.into.chunks_exact_mut(self.stride)) {
            let Some(vector) = self.plane.slice(row) else {
                for (into, &element) in into.iter_mut().zip(self.plane.vector(row)) {
                    *into = element.widen();
                    rest += *into * E::Accumulator::ZERO;
                }
                continue;
            };
            let (whole, into_whole) =
                (vector.chunks_exact(UNROLL * V::WIDTH), V::strip_mut::<UNROLL>(into));
            let taken = into_whole.len().min(whole.len()) * UNROLL * V::WIDTH;
            for (from, into) in whole.zip(into_whole) {
                unrolled!(i < UNROLL, {
                    let elements = V::widen(&from[i * V::WIDTH..(i + 1) * V::WIDTH]);
                    probe[i] = elements.multiply_add(zero, probe[i]);
                    elements.store(&mut into[i]);
                });
            }
            for (into, &element) in into[taken..].iter_mut().zip(&vector[taken..]) {
                *into = element.widen();
                rest += *into * E::Accumulator::ZERO;
            }
        }
        probe[0].plus(probe[1]).total() + rest == E::Accumulator::ZERO
    }
}

/// Vectors that [`PackPanel`] widens per step.
const UNROLL: usize = 2;

/// Packs the vectors `rows` of one head, transposed, into a strip of `width` lanes, one vector per
/// lane.
pub(crate) struct PackLanes<'a, 's, E: TileInput> {
    pub(crate) plane: Plane<'s, E>,
    pub(crate) rows: Range<usize>,
    pub(crate) width: usize,
    pub(crate) strip: &'a mut [E::Accumulator],
}

impl<E: TileInput> SimdKernel<E::Accumulator> for PackLanes<'_, '_, E> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<E::Accumulator>, const ROWS: usize, const VECTORS: usize>(self) {
        let Self { plane, rows, width, strip } = self;
        for first in (0..width).step_by(V::WIDTH) {
            let used = rows.len().saturating_sub(first).min(V::WIDTH);
            for (chunk, lines) in strip.chunks_mut(V::WIDTH * width).enumerate() {
                let mut block = [V::splat(E::Accumulator::ZERO); MAX_LANES];
                for (row, into) in (rows.start + first..).zip(&mut block[..used]) {
                    *into = match plane.slice(row) {
                        Some(vector) => {
                            V::widen(vector.get(chunk * V::WIDTH..).unwrap_or_default())
                        }
                        None => {
                            let vector = plane.vector(row);
                            let element = |i| {
                                vector
                                    .get(chunk * V::WIDTH + i)
                                    .copied()
                                    .unwrap_or(E::from_f64(0.0))
                            };
                            V::widen(&std::array::from_fn::<E, MAX_LANES, _>(element))
                        }
                    };
                }
                V::transpose(&mut block);
                for (line, column) in lines.chunks_exact_mut(width).zip(block) {
                    if let Some([into]) = V::row_mut::<1>(&mut line[first..]) {
                        column.store(into);
                    }
                }
            }
        }
    }
}

/// Consumer of the vectors of [`each_lane`]. A trait and not a closure, so that `take` is compiled
/// for the kernel's instruction set.
pub(crate) trait TakeLane<A> {
    /// Takes consecutive elements of a lane's vector, from its element `first` on. Implementations
    /// are `#[inline(always)]`.
    fn take(&mut self, lane: usize, first: usize, elements: &[A]);
}

/// Transposes a strip back: passes the first `dim` elements of each of the first `lanes` lanes to
/// `take`, in pieces that ascend.
pub(crate) fn each_lane<A: Real>(
    token: IsaToken,
    strip: &[A],
    width: usize,
    lanes: usize,
    dim: usize,
    take: impl TakeLane<A>,
) {
    A::run_kernel(token, 1, EachLane { strip: &strip[..dim * width], width, lanes, take });
}

struct EachLane<'a, A, F> {
    strip: &'a [A],
    width: usize,
    lanes: usize,
    take: F,
}

/// Vectors of elements that [`EachLane`] passes per call: longer contiguous writes for the caller,
/// at the price of a larger buffer.
const VECTORS_PER_CALL: usize = 4;

impl<A: Real, F: TakeLane<A>> SimdKernel<A> for EachLane<'_, A, F> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<A>, const ROWS: usize, const VECTORS: usize>(mut self) {
        let mut rows = [[A::ZERO; VECTORS_PER_CALL * MAX_LANES]; MAX_LANES];
        for first in (0..self.lanes).step_by(V::WIDTH) {
            for (group, lines) in
                self.strip.chunks(VECTORS_PER_CALL * V::WIDTH * self.width).enumerate()
            {
                for (chunk, lines) in lines.chunks(V::WIDTH * self.width).enumerate() {
                    let mut block = [V::splat(A::ZERO); MAX_LANES];
                    for (line, into) in lines.chunks_exact(self.width).zip(&mut block) {
                        if let Some([line]) = V::row::<1>(&line[first..]) {
                            *into = V::load(line);
                        }
                    }
                    V::transpose(&mut block);
                    for (row, column) in rows.iter_mut().zip(block).take(V::WIDTH) {
                        if let Some([into]) = V::row_mut::<1>(&mut row[chunk * V::WIDTH..]) {
                            column.store(into);
                        }
                    }
                }
                let dims = lines.len() / self.width;
                for (lane, row) in rows.iter().enumerate().take(V::WIDTH.min(self.lanes - first)) {
                    self.take.take(first + lane, group * VECTORS_PER_CALL * V::WIDTH, &row[..dims]);
                }
            }
        }
    }
}

/// Rows to which a strip is transposed back, of a tensor in the accumulator's type.
pub(crate) struct LaneRows<'a, A> {
    /// Elements from the first row's vector on.
    pub(crate) rows: &'a mut [A],
    /// Elements between the vectors of two rows.
    pub(crate) stride: usize,
    /// Number of rows: the used lanes of the strip.
    pub(crate) count: usize,
    /// Elements of a vector.
    pub(crate) dim: usize,
    /// Factor of the strip's elements.
    pub(crate) scale: A,
    /// True if the strip is added to the rows, false if it overwrites them.
    pub(crate) add: bool,
}

impl<A: Real> LaneRows<'_, A> {
    /// Writes a strip of `width` lanes, one vector per lane.
    pub(crate) fn write(self, token: IsaToken, strip: &[A], width: usize) {
        let strip = &strip[..self.dim * width];
        A::run_kernel(token, 1, WriteLanes { strip, width, into: self });
    }
}

struct WriteLanes<'a, A> {
    strip: &'a [A],
    width: usize,
    into: LaneRows<'a, A>,
}

impl<A: Real> SimdKernel<A> for WriteLanes<'_, A> {
    type Output = ();

    /// Stores blocks from registers, without a buffer for whole vectors.
    #[inline(always)]
    fn run<V: Vector<A>, const ROWS: usize, const VECTORS: usize>(self) {
        let Self { strip, width, into } = self;
        let LaneRows { rows, stride, count, dim, scale, add } = into;
        let factor = V::splat(scale);
        for first in (0..count).step_by(V::WIDTH) {
            let lanes = V::WIDTH.min(count - first);
            for lane in first + V::WIDTH..count.min(first + 2 * V::WIDTH) {
                prefetch_l1(&rows[lane * stride..][..dim]);
            }
            for (chunk, lines) in strip.chunks(V::WIDTH * width).enumerate() {
                let mut block = [V::splat(A::ZERO); MAX_LANES];
                for (line, into) in lines.chunks_exact(width).zip(&mut block) {
                    if let Some([line]) = V::row::<1>(&line[first..]) {
                        *into = V::load(line);
                    }
                }
                V::transpose(&mut block);
                for (lane, column) in block.iter().enumerate().take(lanes) {
                    let into = &mut rows[(first + lane) * stride..][..dim][chunk * V::WIDTH..];
                    if let Some([into]) = V::row_mut::<1>(into) {
                        let scaled = factor.times(*column);
                        let sum = if add { V::load(into).plus(scaled) } else { scaled };
                        sum.store(into);
                        continue;
                    }
                    let mut rest = [A::ZERO; MAX_LANES];
                    if let Some([rest]) = V::row_mut::<1>(&mut rest) {
                        column.store(rest);
                    }
                    for (into, element) in into.iter_mut().zip(rest) {
                        *into = if add { *into + scale * element } else { scale * element };
                    }
                }
            }
        }
    }
}
