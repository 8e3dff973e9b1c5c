//! Copies of the vectors of one tile, widened to the accumulator's type and laid out for [`crate::products`].

use std::ops::Range;

use annulus_core::Result;

use crate::{
    aligned::Aligned,
    input::{Input, Plane, Source},
    isa::{Kernel, MOST_ROWS, Path},
    lanes::unrolled,
    pairs::{FillPairLanes, FillPairs, pairs_of},
    real::Real,
    sight::TILE,
    vector::{MOST_WIDTH, Vector},
};

/// Rounds a count up to whole register tiles.
pub(crate) const fn padded(count: usize) -> usize {
    count.next_multiple_of(MOST_ROWS)
}

/// Up to [`TILE`] vectors, one a row: the broadcast operand. Elements beyond the dim, and rows that were never filled, are 0.
#[derive(Debug)]
pub(crate) struct Panel<A> {
    elements: Aligned<A>,
    stride: usize,
    finite: bool,
    /// Whether elements are words; see [`crate::pairs`].
    pairs: bool,
    /// Two rows a line of words, where that is wanted.
    crossed: Aligned<A>,
    crossed_stride: usize,
}

/// What a panel holds of its vectors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    /// Widened.
    Exact,
    /// Words along the dims.
    Pairs,
    /// Words along the dims, and words along the rows.
    CrossedPairs,
}

impl<A: Real> Panel<A> {
    pub(crate) fn new(dim: usize, form: Form) -> Result<Self> {
        Self::with_stride(TILE, dim, padded(dim), form)
    }

    /// Room for `rows` vectors of length `dim`: `stride` apart those that are widened and lines of words along the rows.
    pub(crate) fn with_stride(rows: usize, dim: usize, stride: usize, form: Form) -> Result<Self> {
        let pairs = form != Form::Exact;
        let crossed = if form == Form::CrossedPairs { rows.div_ceil(2) * stride } else { 0 };
        let (crossed, crossed_stride) = (Aligned::zeroed(crossed)?, stride);
        let stride = if pairs { padded(dim.div_ceil(2)) } else { stride };
        Ok(Self { elements: Aligned::zeroed(rows * stride)?, stride, finite: true, pairs, crossed, crossed_stride })
    }

    pub(crate) const fn stride(&self) -> usize {
        self.stride
    }

    /// Whether its elements are words.
    pub(crate) const fn pairs(&self) -> bool {
        self.pairs
    }

    /// How far apart lines of a panel that is summed along its rows lie.
    pub(crate) const fn line_stride(&self) -> usize {
        self.crossed_stride
    }

    /// What is summed along the rows `rows`, [`Panel::line_stride`] apart: the rows or, of words, lines of two of them.
    pub(crate) fn lines(&self, rows: &Range<usize>) -> &[A] {
        if self.pairs {
            let lines = pairs_of(rows);
            &self.crossed[lines.start * self.crossed_stride..lines.end * self.crossed_stride]
        } else {
            self.rows(rows.clone())
        }
    }

    /// The rows `rows`, `stride` apart.
    pub(crate) fn rows(&self, rows: Range<usize>) -> &[A] {
        &self.elements[rows.start * self.stride..rows.end * self.stride]
    }

    /// Whether no element of the vectors is NaN or infinite.
    pub(crate) const fn finite(&self) -> bool {
        self.finite
    }

    /// Takes the vectors `rows`, no more than there is room for, of one head.
    pub(crate) fn fill<E: Input<Accumulator = A>>(
        &mut self,
        path: Path,
        source: &Source<'_, E>,
        batch: usize,
        head: usize,
        rows: Range<usize>,
    ) {
        if self.pairs {
            let (natural, stride, crossed, crossed_stride) =
                (&mut self.elements[..], self.stride, &mut self.crossed[..], self.crossed_stride);
            let job = FillPairs { source, batch, head, rows, natural, stride, crossed, crossed_stride };
            self.finite = A::run(path, 1, job);
        } else {
            let (stride, plane) = (self.stride, source.plane(batch, head));
            let into = &mut self.elements[..rows.len() * stride];
            self.finite = A::run_kernel(path, 1, FillPanel { plane, rows, stride, into });
        }
    }
}

struct FillPanel<'a, 's, E: Input> {
    plane: Plane<'s, E>,
    rows: Range<usize>,
    stride: usize,
    into: &'a mut [E::Accumulator],
}

impl<E: Input> Kernel<E::Accumulator> for FillPanel<'_, '_, E> {
    /// Whether none is NaN or infinite: 0·x summed is NaN if and only if some x is not finite.
    type Output = bool;

    #[inline(always)]
    fn run<V: Vector<E::Accumulator>, const ROWS: usize, const VECTORS: usize>(self) -> bool {
        let zero = V::splat(E::Accumulator::ZERO);
        // two sums, so that none waits for another
        let mut probe = [zero; TWO];
        let mut rest = E::Accumulator::ZERO;
        for (row, into) in self.rows.zip(self.into.chunks_exact_mut(self.stride)) {
            let Some(vector) = self.plane.slice(row) else {
                for (into, &element) in into.iter_mut().zip(self.plane.vector(row)) {
                    *into = element.widen();
                    rest += *into * E::Accumulator::ZERO;
                }
                continue;
            };
            let (whole, into_whole) = (vector.chunks_exact(TWO * V::WIDTH), V::strip_mut::<TWO>(into));
            let taken = into_whole.len().min(whole.len()) * TWO * V::WIDTH;
            for (from, into) in whole.zip(into_whole) {
                unrolled!(i < TWO, {
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

const TWO: usize = 2;

/// Transposes the vectors `rows` of one head into a strip of `width` lanes, one vector a lane, with `pairs` two dims a word; lanes without a
/// vector are 0.
pub(crate) fn fill_lanes<E: Input>(
    path: Path,
    source: &Source<'_, E>,
    (batch, head): (usize, usize),
    rows: Range<usize>,
    width: usize,
    strip: &mut [E::Accumulator],
    pairs: bool,
) {
    let plane = source.plane(batch, head);
    if pairs {
        <E::Accumulator as Real>::run(path, 1, FillPairLanes { plane, rows, width, strip });
    } else {
        <E::Accumulator as Real>::run_kernel(path, 1, FillLanes { plane, rows, width, strip });
    }
}

struct FillLanes<'a, 's, E: Input> {
    plane: Plane<'s, E>,
    rows: Range<usize>,
    width: usize,
    strip: &'a mut [E::Accumulator],
}

impl<E: Input> Kernel<E::Accumulator> for FillLanes<'_, '_, E> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<E::Accumulator>, const ROWS: usize, const VECTORS: usize>(self) {
        let Self { plane, rows, width, strip } = self;
        for first in (0..width).step_by(V::WIDTH) {
            let used = rows.len().saturating_sub(first).min(V::WIDTH);
            for (chunk, lines) in strip.chunks_mut(V::WIDTH * width).enumerate() {
                let mut block = [V::splat(E::Accumulator::ZERO); MOST_WIDTH];
                for (row, into) in (rows.start + first..).zip(&mut block[..used]) {
                    *into = match plane.slice(row) {
                        Some(vector) => V::widen(vector.get(chunk * V::WIDTH..).unwrap_or_default()),
                        None => {
                            let vector = plane.vector(row);
                            let element = |i| vector.get(chunk * V::WIDTH + i).copied().unwrap_or(E::from_f64(0.0));
                            V::widen(&std::array::from_fn::<E, MOST_WIDTH, _>(element))
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

/// Calls `take(lane, first, elements)` with the elements `first ..` of the vector in a lane, a few at a time, for the first `lanes` lanes and the
/// first `dim` elements of a strip.
pub(crate) fn each_lane<A: Real>(path: Path, strip: &[A], width: usize, lanes: usize, dim: usize, take: impl FnMut(usize, usize, &[A])) {
    A::run_kernel(path, 1, EachLane { strip: &strip[..dim * width], width, lanes, take });
}

struct EachLane<'a, A, F> {
    strip: &'a [A],
    width: usize,
    lanes: usize,
    take: F,
}

/// Vectors of which [`EachLane`] gives a lane's elements at once.
const AT_ONCE: usize = 4;

impl<A: Real, F: FnMut(usize, usize, &[A])> Kernel<A> for EachLane<'_, A, F> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<A>, const ROWS: usize, const VECTORS: usize>(mut self) {
        let mut rows = [[A::ZERO; AT_ONCE * MOST_WIDTH]; MOST_WIDTH];
        for first in (0..self.lanes).step_by(V::WIDTH) {
            for (place, lines) in self.strip.chunks(AT_ONCE * V::WIDTH * self.width).enumerate() {
                for (chunk, lines) in lines.chunks(V::WIDTH * self.width).enumerate() {
                    let mut block = [V::splat(A::ZERO); MOST_WIDTH];
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
                    (self.take)(first + lane, place * AT_ONCE * V::WIDTH, &row[..dims]);
                }
            }
        }
    }
}
