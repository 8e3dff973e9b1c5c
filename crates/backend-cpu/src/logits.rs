//! From products to logits: everything between q·k and the softmax, for one tile.
//!
//! ```text
//! x = scale · round(q·k)       s = cap·tanh(x / cap) + bias    or    cap·tanh((x + bias) / cap)       s = −∞ where hidden
//! ```
//! A tile without soft cap, bias, rounding and hidden pairs runs none of this: softmax and gradients take its products and scale them on the way.

use std::ops::Range;

use annulus_core::{
    BiasFunction, BiasOrder, DType, DropoutMask, Rows, Spec,
    mask::{Key, Query},
};
use ndarray::ArrayView4;

use crate::{
    bias::fill_bias,
    dropout::{Spread, kept},
    isa::{Job, Path},
    lanes::{each_row_mut, map, select, strip, strip_mut, unrolled, zip},
    real::Real,
    sight::{Lanes, Sight, TILE, transpose},
};

/// Where a tile lies.
#[derive(Debug, Clone)]
pub(crate) struct Site {
    pub(crate) batch: usize,
    /// Query head.
    pub(crate) head: usize,
    /// Local numbers.
    pub(crate) queries: Range<usize>,
    /// Local numbers in the block.
    pub(crate) keys: Range<usize>,
    pub(crate) lanes: Lanes,
    /// Number of the strip among all that the task has.
    pub(crate) strip: usize,
    /// Vectors of the strip.
    pub(crate) vectors: usize,
    /// Elements of a row of the tile.
    pub(crate) width: usize,
}

impl Site {
    /// Queries and keys of the tile's rows `rows`, counted from the tile's first.
    pub(crate) fn offsets(&self, rows: &Range<usize>) -> (Range<usize>, Range<usize>) {
        match self.lanes {
            Lanes::Queries => (0..self.queries.len(), rows.clone()),
            Lanes::Keys => (rows.clone(), 0..self.keys.len()),
        }
    }

    /// Row and lane of a pair.
    const fn place(&self, query: usize, key: usize) -> (usize, usize) {
        match self.lanes {
            Lanes::Queries => (key, query),
            Lanes::Keys => (query, key),
        }
    }

    /// The elements of the tile's rows `rows`.
    pub(crate) const fn span(&self, rows: &Range<usize>) -> Range<usize> {
        rows.start * self.width..rows.end * self.width
    }

    /// The element of a pair.
    pub(crate) const fn element(&self, query: usize, key: usize) -> usize {
        let (row, lane) = self.place(query, key);
        row * self.width + lane
    }
}

/// How the logits between some queries and some keys are made.
pub(crate) struct Logits<'a, A> {
    pub(crate) spec: &'a Spec,
    pub(crate) path: Path,
    pub(crate) queries: &'a Rows,
    pub(crate) keys: &'a Rows,
    /// `[b|1, heads|1, q rows|1, kv rows of the whole sequence|1]`.
    pub(crate) bias: Option<ArrayView4<'a, A>>,
}

impl<A: Real> Logits<'_, A> {
    /// Whether products are made into logits by [`Logits::finish`]; else they stay as they are, and whoever reads them multiplies by the unit.
    fn bends(&self) -> bool {
        // a negative scale turns the largest product into the smallest logit; and a maximum that is compared with must be that of logits
        self.has_bias() || self.spec.soft_cap.is_some() || self.spec.scale <= 0.0 || !self.spec.normalize || self.rounding().is_some()
    }

    /// What the elements of a finished tile are multiplied by to be logits: positive.
    pub(crate) fn unit(&self) -> A {
        if self.bends() { A::ONE } else { A::from_f64(self.spec.scale) }
    }

    /// Whether something is added to logits.
    pub(crate) const fn has_bias(&self) -> bool {
        self.bias.is_some() || self.spec.bias_function.is_some()
    }

    /// Whether [`Logits::finish`] leaves the products of this tile as they are.
    pub(crate) fn plain(&self, sight: &Sight) -> bool {
        !self.bends() && sight.words().is_none()
    }

    /// Whether ∂s/∂x is not 1.
    pub(crate) const fn has_slope(&self) -> bool {
        self.spec.soft_cap.is_some()
    }

    /// Makes logits, divided by the unit, of the products in the visible rows of `tile`. `slope`, if wanted, becomes ∂s/∂x where [`Logits::has_slope`]
    /// (0 where hidden); `extra` is scratch.
    pub(crate) fn finish(&self, site: &Site, sight: &mut Sight, tile: &mut [A], mut slope: Option<&mut [A]>, extra: &mut [A]) {
        let has_bias = self.has_bias();
        if has_bias {
            self.fill_bias(site, sight, extra);
        }
        let span = site.span(sight.rows());
        if self.bends() {
            let bend = Bend {
                tile: &mut tile[span.clone()],
                bias: has_bias.then(|| &extra[span.clone()]),
                slope: slope.as_deref_mut().map(|slope| &mut slope[span.clone()]),
                round: self.rounding(),
                scale: A::from_f64(self.spec.scale),
                cap: self.spec.soft_cap.map(|cap| (A::from_f64(cap), A::from_f64(1.0 / cap))),
                bias_first: self.spec.bias_order == BiasOrder::BeforeSoftCap,
            };
            A::run(self.path, site.vectors, bend);
        }
        if let Some(words) = sight.words() {
            A::run(self.path, site.vectors, Hide { tile: &mut tile[span.clone()], words, value: -A::INFINITY });
            if let Some(slope) = slope.filter(|_| self.has_slope()) {
                A::run(self.path, site.vectors, Hide { tile: &mut slope[span], words, value: A::ZERO });
            }
        }
    }

    /// Writes what dropout multiplies each weight by, 1/(1 − p) or 0, for the visible rows; false if there is no dropout.
    pub(crate) fn fill_keep(&self, site: &Site, rows: &Range<usize>, keep: &mut [A]) -> bool {
        let Some(mask) = self.spec.dropout.map(DropoutMask::new) else { return false };
        let mut words = [0; TILE];
        let plane = (site.batch, site.head, self.spec.dims.q_heads);
        let (queries, keys) = (&self.queries.rows()[site.queries.clone()], &self.keys.rows()[site.keys.clone()]);
        kept(self.path, &mask, plane, queries, keys, &mut words);
        if site.lanes == Lanes::Queries {
            transpose(&mut words);
        }
        let spread = Spread { tile: &mut keep[site.span(rows)], words: &words[rows.clone()], kept: A::from_f64(mask.keep_scale()) };
        A::run(self.path, site.vectors, spread);
        true
    }

    /// The type that products are rounded to, if it is narrower than they are.
    fn rounding(&self) -> Option<DType> {
        let (wanted, have) = (self.spec.logits_dtype, A::DTYPE);
        (wanted.bytes() < have.bytes()).then_some(wanted)
    }

    /// Writes the bias of the visible rows, and hides what a bias of −∞ hides.
    fn fill_bias(&self, site: &Site, sight: &mut Sight, into: &mut [A]) {
        let rows = sight.rows().clone();
        let (queries, keys) = site.offsets(&rows);
        match self.bias {
            Some(bias) => self.fill_tensor(bias, site, sight, (queries.clone(), keys.clone()), into),
            None => into[site.span(&rows)].fill(A::ZERO),
        }
        if let Some(function) = &self.spec.bias_function {
            self.add_function(&**function, site, sight, (queries, keys), into);
        }
    }

    /// Writes the bias tensor's part.
    fn fill_tensor(
        &self,
        bias: ArrayView4<'_, A>,
        site: &Site,
        sight: &mut Sight,
        (queries, keys): (Range<usize>, Range<usize>),
        into: &mut [A],
    ) {
        let key_rows = &self.keys.rows()[site.keys.clone()][keys.clone()];
        if !fill_bias(self.path, bias, site, (keys.start, key_rows), queries.clone(), into) {
            return;
        }
        for query in queries {
            for key in keys.clone().filter(|&key| into[site.element(query, key)] == -A::INFINITY) {
                let (row, lane) = site.place(query, key);
                sight.hide(row, lane);
            }
        }
    }

    /// Adds the bias function's part to the visible pairs.
    fn add_function(
        &self,
        function: &dyn BiasFunction,
        site: &Site,
        sight: &mut Sight,
        (queries, keys): (Range<usize>, Range<usize>),
        into: &mut [A],
    ) {
        let positions = (self.queries.positions(site.batch), self.keys.positions(site.batch));
        for query in queries {
            let q = site.queries.start + query;
            let at = Query { batch: site.batch, head: site.head, row: self.queries.rows()[q], position: positions.0[q] };
            for key in keys.clone() {
                let (row, lane) = site.place(query, key);
                if !sight.visible(row, lane) {
                    continue;
                }
                let k = site.keys.start + key;
                let bias = A::from_f64(function.bias(&at, &Key { row: self.keys.rows()[k], position: positions.1[k] }));
                if bias == -A::INFINITY {
                    sight.hide(row, lane);
                }
                into[site.element(query, key)] += bias;
            }
        }
    }
}

/// Rounding, soft cap and bias, in the order of the spec.
struct Bend<'a, A> {
    tile: &'a mut [A],
    bias: Option<&'a [A]>,
    slope: Option<&'a mut [A]>,
    /// Rounds to this type, before it is scaled.
    round: Option<DType>,
    scale: A,
    /// cap and 1/cap.
    cap: Option<(A, A)>,
    bias_first: bool,
}

impl<A: Real> Job for Bend<'_, A> {
    type Output = ();

    #[inline(always)]
    fn run<const FUSED: bool, const ROWS: usize, const VECTORS: usize, const WIDTH: usize>(mut self) {
        // one vector after another, whatever the strip's width
        let tile = strip_mut::<A, 1, WIDTH>(self.tile);
        let bias = self.bias.map(strip::<A, 1, WIDTH>);
        let mut slope = self.slope.as_deref_mut().map(strip_mut::<A, 1, WIDTH>);
        for (index, [x]) in each_row_mut(tile).enumerate() {
            if let Some(dtype) = self.round {
                *x = map(*x, |x| x.rounded(dtype));
            }
            *x = map(*x, |x| self.scale * x);
            let bias = bias.and_then(|bias| bias.get(index));
            if let Some([bias]) = bias.filter(|_| self.bias_first) {
                *x = zip(*x, *bias, |x, bias| x + bias);
            }
            if let Some((cap, inverse)) = self.cap {
                let tanh = map(*x, |x| (x * inverse).tanh::<FUSED>());
                *x = map(tanh, |tanh| cap * tanh);
                if let Some([slope]) = slope.as_mut().and_then(|slope| slope.get_mut(index)) {
                    *slope = map(tanh, |tanh| A::ONE - tanh * tanh);
                }
            }
            if let Some([bias]) = bias.filter(|_| !self.bias_first) {
                *x = zip(*x, *bias, |x, bias| x + bias);
            }
        }
    }
}

/// Another value where a pair is hidden.
struct Hide<'a, A> {
    tile: &'a mut [A],
    value: A,
    words: &'a [u64],
}

impl<A: Real> Job for Hide<'_, A> {
    type Output = ();

    #[inline(always)]
    fn run<const FUSED: bool, const ROWS: usize, const VECTORS: usize, const WIDTH: usize>(self) {
        for (row, &word) in each_row_mut(strip_mut::<A, VECTORS, WIDTH>(self.tile)).zip(self.words) {
            unrolled!(v < VECTORS, row[v] = select(word, v * WIDTH, row[v], [self.value; WIDTH]));
        }
    }
}
