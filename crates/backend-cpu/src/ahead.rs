//! Asking for rows of a caller's tensor before they are taken in. Vectors of one head lie far apart in memory, and whoever waited for each would wait
//! long; but only few requests can be on their way, and whoever asks for more waits too. So a few are made after each register tile of a product.

use std::ops::Range;

use annulus_core::Element;

use crate::{
    input::Plane,
    isa::{MOST_ROWS, prefetch},
    products::Between,
    sight::TILE,
};

/// What will soon be taken in, and has not been asked for.
#[derive(Debug, Default)]
pub(crate) struct Ahead {
    /// Rows of a tile.
    pub(crate) rows: Range<usize>,
    /// Queries of a strip, asked for after the rows.
    pub(crate) queries: Range<usize>,
    /// Their head.
    pub(crate) head: usize,
    /// Register tiles between two requests.
    pause: usize,
    /// How many of them are still to come.
    left: usize,
}

impl Ahead {
    /// Spreads the requests for a tile and a strip over the products of `tiles` tiles, each of about `lines` lines of results.
    pub(crate) fn spread(&mut self, tiles: usize, lines: usize) {
        self.pause = (tiles * lines / MOST_ROWS / TILE).saturating_sub(1);
    }

    /// Makes the requests while a product is made: for `rows` in the first two planes, then for `queries` in the last.
    pub(crate) const fn asking<'a>(&'a mut self, rows: [Lines<'a>; 2], queries: Lines<'a>) -> Asking<'a> {
        Asking { ahead: self, rows, queries }
    }
}

/// The vectors of one batch row and head; none where their elements do not lie side by side.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Lines<'a> {
    bytes: &'a [u8],
    stride: usize,
    len: usize,
}

impl<'a> Lines<'a> {
    pub(crate) fn of<E: Element>(plane: Plane<'a, E>) -> Self {
        match plane {
            Plane::Tensor(_) => Self::default(),
            Plane::Vectors { elements, stride, dim } => {
                Self { bytes: bytemuck::cast_slice(elements), stride: stride * size_of::<E>(), len: dim * size_of::<E>() }
            }
        }
    }

    fn prefetch(&self, row: usize) {
        prefetch(self.bytes.get(row * self.stride..row * self.stride + self.len).unwrap_or_default());
    }
}

/// See [`Ahead::asking`].
#[derive(Debug)]
pub(crate) struct Asking<'a> {
    ahead: &'a mut Ahead,
    rows: [Lines<'a>; 2],
    queries: Lines<'a>,
}

impl Asking<'_> {
    /// Not inlined: it is seldom called, and the register tiles are to keep their registers.
    #[inline(never)]
    fn ask(&mut self) {
        self.ahead.left = self.ahead.pause;
        if let Some(row) = self.ahead.rows.next() {
            self.rows.iter().for_each(|lines| lines.prefetch(row));
        } else if let Some(row) = self.ahead.queries.next() {
            self.queries.prefetch(row);
        }
    }
}

impl Between for Asking<'_> {
    #[inline(always)]
    fn step(&mut self) {
        if self.ahead.left == 0 {
            self.ask();
        } else {
            self.ahead.left -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_spread_and_end() {
        let mut ahead = Ahead { rows: 3..5, queries: 0..2, ..Ahead::default() };
        ahead.spread(4, MOST_ROWS * TILE / 2);
        assert_eq!(ahead.pause, 1);
        let elements = [0f32; 64];
        let lines = Lines::of(Plane::Vectors { elements: &elements[..], stride: 16, dim: 8 });
        let mut left = Vec::new();
        for _ in 0..10 {
            // rows that are not there are not asked for
            ahead.asking([lines, Lines::default()], lines).step();
            left.push((ahead.rows.len(), ahead.queries.len()));
        }
        assert_eq!(left, [(1, 2), (1, 2), (0, 2), (0, 2), (0, 1), (0, 1), (0, 0), (0, 0), (0, 0), (0, 0)]);
    }
}
