//! Grouped heads in one tile: which of the query heads that read the same keys share the rows of a tile of the forward pass.
//!
//! ```text
//! rows of a tile        0        1        2        3        4        5      …
//! 3 heads share it      q₀ h₀    q₀ h₁    q₀ h₂    q₁ h₀    q₁ h₁    q₁ h₂  …
//! ```
//! A tile of one head has room for more queries than there are when a sequence is decoded: most of its rows are empty, and every head of the group reads
//! the same keys and values again. Packed, the rows are full, and keys are read once for the heads that share a tile. Every row's sums are formed as they
//! were, so packing changes no bit. On level 0 there is none: which query and head a row has costs registers
//! that on compute capability 8.0 let two blocks share a multiprocessor.

/// How the rows of a tile are shared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Packing {
    rows: usize,
    heads: usize,
}

impl Packing {
    /// A head a tile of so many rows.
    pub(crate) const fn none(rows: usize) -> Self {
        Self { rows, heads: 1 }
    }

    /// What serves so many queries of a group of so many heads.
    ///
    /// The number of heads, a divisor of the group, for which the fewest tiles hold the rows of the group; the least such number. Tiles of fewer queries
    /// have longer lists of keys and more edges, so there is none unless it saves a fourth of the tiles: with many queries it never does.
    pub(crate) fn of(queries: usize, group: usize, rows: usize) -> Self {
        let tiles = |heads: usize| queries.div_ceil(rows / heads) * (group / heads);
        let shares = (1..=group.min(rows)).filter(|&heads| group.is_multiple_of(heads));
        let heads = shares.min_by_key(|&heads| tiles(heads)).filter(|&heads| 4 * tiles(heads) <= 3 * tiles(1)).unwrap_or(1);
        Self { rows, heads }
    }

    /// Query heads a tile.
    pub(crate) const fn heads(self) -> usize {
        self.heads
    }

    /// Queries a tile.
    pub(crate) const fn queries(self) -> usize {
        self.rows / self.heads
    }

    /// As kernels are told: heads a tile, and 2¹⁶ by that, rounded up, so that they divide by it with a product. No tile has more than 2¹⁵ rows.
    pub(crate) const fn numbers(self) -> (u32, u32) {
        let heads = self.heads as u32;
        (heads, (1u32 << 16).div_ceil(heads))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn heads(queries: usize, group: usize) -> usize {
        Packing::of(queries, group, 64).heads()
    }

    #[test]
    fn few_queries_share_a_tile_with_as_many_heads_as_fit() {
        assert_eq!([1, 8, 16].map(|queries| heads(queries, 4)), [4; 3]);
        // two heads of 32 fill a tile: more would not save one
        assert_eq!(heads(32, 4), 2);
        assert_eq!(heads(33, 4), 4);
        // any divisor will do, and of a group that is larger than a tile the largest that fits
        assert_eq!([3, 5, 6, 7, 14].map(|group| heads(1, group)), [3, 5, 6, 7, 14]);
        assert_eq!(heads(1, 128), 64);
        assert_eq!(heads(1, 71), 1);
    }

    #[test]
    fn where_it_saves_little_there_is_none() {
        assert_eq!([1, 20, 5000].map(|queries| heads(queries, 1)), [1; 3]);
        // 8 tiles or 7
        assert_eq!(heads(100, 4), 1);
        assert!((200..3000).all(|queries| heads(queries, 8) == 1));
    }

    #[test]
    fn kernels_divide_rows_by_heads_exactly() {
        for rows in [32, 64] {
            for heads in 1..=rows {
                let packing = Packing { rows, heads };
                let (heads, reciprocal) = packing.numbers();
                for row in 0..=rows as u32 {
                    assert_eq!((row * reciprocal) >> 16, row / heads, "{row} by {heads}");
                }
                assert_eq!(packing.queries() as u32, (rows as u32 * reciprocal) >> 16);
            }
        }
    }
}
