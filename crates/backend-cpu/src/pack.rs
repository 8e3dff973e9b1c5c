//! Copies of the vectors of one tile, widened to the accumulator's type and laid out for [`crate::products`].

use std::ops::Range;

use annulus_core::Result;

use crate::{
    aligned::Aligned,
    input::{Input, Plane, Source},
    isa::{Job, MOST_ROWS, Path},
    lanes::{unrolled, zip},
    pairs::{FillPairLanes, FillPairs, pairs_of},
    real::Real,
    sight::TILE,
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
            self.finite = A::run(path, 1, FillPanel { panel: self, source, batch, head, rows });
        }
    }
}

struct FillPanel<'a, 's, E: Input> {
    panel: &'a mut Panel<E::Accumulator>,
    source: &'a Source<'s, E>,
    batch: usize,
    head: usize,
    rows: Range<usize>,
}

impl<E: Input> Job for FillPanel<'_, '_, E> {
    type Output = bool;

    #[inline(always)]
    fn run<const FUSED: bool, const ROWS: usize, const VECTORS: usize, const WIDTH: usize>(self) -> bool {
        let stride = self.panel.stride;
        let plane = self.source.plane(self.batch, self.head);
        let filled = &mut self.panel.elements[..self.rows.len() * stride];
        for (row, into) in self.rows.zip(filled.chunks_exact_mut(stride)) {
            let vector = plane.vector(row);
            if let Some(vector) = vector.to_slice() {
                let (chunks, rest) = vector.as_chunks::<WIDTH>();
                let (into_chunks, into_rest) = into.split_at_mut(chunks.len() * WIDTH);
                for (into, chunk) in into_chunks.as_chunks_mut::<WIDTH>().0.iter_mut().zip(chunks) {
                    *into = chunk.map(Input::widen);
                }
                into_rest.iter_mut().zip(rest).for_each(|(into, &element)| *into = element.widen());
            } else {
                into.iter_mut().zip(vector).for_each(|(into, &element)| *into = element.widen());
            }
        }
        all_finite::<E::Accumulator, WIDTH>(filled)
    }
}

/// Whether none is NaN or infinite: 0·x summed is NaN if and only if some x is not finite. In four sums, so that none waits for another.
#[inline(always)]
fn all_finite<A: Real, const WIDTH: usize>(elements: &[A]) -> bool {
    let mut probe = [[A::ZERO; WIDTH]; FOUR];
    let (chunks, rest) = elements.as_chunks::<WIDTH>();
    let (fours, more) = chunks.as_chunks::<FOUR>();
    for four in fours {
        unrolled!(v < FOUR, probe[v] = zip(four[v], probe[v], |x, probe| x * A::ZERO + probe));
    }
    for chunk in more {
        probe[0] = zip(*chunk, probe[0], |x, probe| x * A::ZERO + probe);
    }
    let rest: A = rest.iter().map(|&x| x * A::ZERO).sum();
    probe.as_flattened().iter().fold(rest, |sum, &probe| sum + probe) == A::ZERO
}

/// How many sums [`all_finite`] keeps.
const FOUR: usize = 4;

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
        <E::Accumulator as Real>::run(path, 1, FillLanes { plane, rows, width, strip });
    }
}

struct FillLanes<'a, 's, E: Input> {
    plane: Plane<'s, E>,
    rows: Range<usize>,
    width: usize,
    strip: &'a mut [E::Accumulator],
}

impl<E: Input> Job for FillLanes<'_, '_, E> {
    type Output = ();

    #[inline(always)]
    fn run<const FUSED: bool, const ROWS: usize, const VECTORS: usize, const WIDTH: usize>(self) {
        let Self { plane, rows, width, strip } = self;
        for first in (0..width).step_by(WIDTH) {
            let used = rows.len().saturating_sub(first).min(WIDTH);
            for (chunk, lines) in strip.chunks_mut(WIDTH * width).enumerate() {
                let mut block = [[E::Accumulator::ZERO; WIDTH]; WIDTH];
                for (row, into) in (rows.start + first..).zip(&mut block[..used]) {
                    let vector = plane.vector(row);
                    if let Some(whole) = vector.to_slice().and_then(|vector| vector[chunk * WIDTH..].first_chunk::<WIDTH>()) {
                        *into = whole.map(Input::widen);
                    } else {
                        into.iter_mut().zip(vector.iter().skip(chunk * WIDTH)).for_each(|(into, &element)| *into = element.widen());
                    }
                }
                for (dim, line) in lines.chunks_exact_mut(width).enumerate() {
                    if let Some(into) = line[first..].first_chunk_mut::<WIDTH>() {
                        *into = column(&block, dim);
                    }
                }
            }
        }
    }
}

/// Column `dim` of a block.
#[inline(always)]
fn column<A: Real, const WIDTH: usize>(block: &[[A; WIDTH]; WIDTH], dim: usize) -> [A; WIDTH] {
    let mut column = [A::ZERO; WIDTH];
    for lane in 0..WIDTH {
        column[lane] = block[lane][dim];
    }
    column
}

/// Calls `take(lane, first, elements)` with the elements `first ..` of the vector in a lane, a few at a time, for the first `lanes` lanes and the
/// first `dim` elements of a strip.
pub(crate) fn each_lane<A: Real>(path: Path, strip: &[A], width: usize, lanes: usize, dim: usize, take: impl FnMut(usize, usize, &[A])) {
    A::run(path, 1, EachLane { strip: &strip[..dim * width], width, lanes, take });
}

struct EachLane<'a, A, F> {
    strip: &'a [A],
    width: usize,
    lanes: usize,
    take: F,
}

impl<A: Real, F: FnMut(usize, usize, &[A])> Job for EachLane<'_, A, F> {
    type Output = ();

    #[inline(always)]
    fn run<const FUSED: bool, const ROWS: usize, const VECTORS: usize, const WIDTH: usize>(mut self) {
        for first in (0..self.lanes).step_by(WIDTH) {
            for (chunk, lines) in self.strip.chunks(WIDTH * self.width).enumerate() {
                let mut block = [[A::ZERO; WIDTH]; WIDTH];
                for (line, into) in lines.chunks_exact(self.width).zip(&mut block) {
                    if let Some(line) = line[first..].first_chunk::<WIDTH>() {
                        *into = *line;
                    }
                }
                let dims = lines.len() / self.width;
                for lane in 0..WIDTH.min(self.lanes - first) {
                    let elements = column(&block, lane);
                    (self.take)(first + lane, chunk * WIDTH, &elements[..dims]);
                }
            }
        }
    }
}
