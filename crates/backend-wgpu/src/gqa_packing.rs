//! GQA packing: several query heads of one KV head share the rows of a forward tile.
//!
//! ```text
//! row of the tile       0        1        2        3        4        5      …
//! 3 packed heads        q₀ h₀    q₀ h₁    q₀ h₂    q₁ h₀    q₁ h₁    q₁ h₂  …
//! ```
//! With few queries (decoding) a tile of one head is mostly empty, and every head of the group
//! reads the same keys and values again. Packed tiles are full and read them once. The order of a
//! row's sums does not change, so the output is bitwise the same.
//!
//! Source: the same layout as `pack_gqa` of FlashAttention-3.

use crate::kernels::TILE;

/// Assignment of a tile's rows to heads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct GqaPacking {
    heads: usize,
}

impl GqaPacking {
    /// No packing: one head per tile.
    pub(crate) const NONE: Self = Self { heads: 1 };

    /// Chooses the packing for `queries` queries and a group of `group` heads per KV head.
    ///
    /// Takes the divisor of the group that needs the fewest tiles, the least such number. Packed
    /// tiles have fewer queries each, hence longer lists of key tiles and more partial tiles. So
    /// packing must save a quarter of the tiles; with many queries it never does.
    pub(crate) fn of(queries: usize, group: usize) -> Self {
        let tiles = |heads: usize| queries.div_ceil(TILE / heads) * (group / heads);
        let shares = (1..=group.min(TILE)).filter(|&heads| group.is_multiple_of(heads));
        let heads = shares
            .min_by_key(|&heads| tiles(heads))
            .filter(|&heads| 4 * tiles(heads) <= 3 * tiles(1))
            .unwrap_or(1);
        Self { heads }
    }

    /// Query heads per tile.
    pub(crate) const fn heads(self) -> usize {
        self.heads
    }

    /// Queries per tile.
    pub(crate) const fn queries(self) -> usize {
        TILE / self.heads
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_are_packed_only_if_that_saves_tiles() {
        let of = |queries: usize, group: usize| {
            let packing = GqaPacking::of(queries, group);
            assert!(packing.heads() * packing.queries() <= TILE);
            (packing.heads(), packing.queries())
        };
        assert_eq!(of(1, 1), (1, 32));
        assert_eq!(of(1, 8), (8, 4));
        assert_eq!(of(1, 7), (7, 4));
        assert_eq!(of(1, 64), (32, 1));
        // a prime number of heads above the rows of a tile
        assert_eq!(of(1, 71), (1, 32));
        // as many tiles with 8 heads as with 2
        assert_eq!(of(16, 8), (2, 16));
        assert_eq!(of(32, 8), (1, 32));
        // 5 tiles of 8 queries and 4 heads instead of 2 · 4
        assert_eq!(of(33, 4), (4, 8));
        assert_eq!(of(1000, 8), (1, 32));
    }
}
