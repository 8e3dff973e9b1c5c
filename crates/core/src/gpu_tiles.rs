//! Division of the work of a GPU's forward pass that every GPU backend shares: query heads that
//! share the rows of a tile, and ranges of the keys of a query tile.

use crate::TileRun;

/// GQA packing: several query heads of one KV head share the rows of a forward tile.
///
/// ```text
/// row of the tile       0        1        2        3        4        5      …
/// 3 packed heads        q₀ h₀    q₀ h₁    q₀ h₂    q₁ h₀    q₁ h₁    q₁ h₂  …
/// ```
/// With few queries (decoding) a tile of one head is mostly empty, and every head of the group
/// reads the same keys and values again. Packed tiles are full and read them once. The order of a
/// row's sums does not change, so the output of the same kernel is bitwise the same.
///
/// # Source
/// The layout of `pack_gqa` of FlashAttention-3.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GqaPacking {
    rows: usize,
    heads: usize,
}

impl GqaPacking {
    /// No packing: one head per tile of `rows` rows.
    pub const fn none(rows: usize) -> Self {
        Self { rows, heads: 1 }
    }

    /// Chooses the packing for `queries` queries and a group of `group` heads per KV head, in tiles
    /// of `rows` rows.
    ///
    /// Takes the divisor of the group that needs the fewest tiles, the least such number. Packed
    /// tiles have fewer queries each, hence longer lists of key tiles and more partial tiles. So
    /// packing must save a quarter of the tiles; with many queries it never does.
    pub fn of(queries: usize, group: usize, rows: usize) -> Self {
        let tiles = |heads: usize| queries.div_ceil(rows / heads) * (group / heads);
        let shares = (1..=group.min(rows)).filter(|&heads| group.is_multiple_of(heads));
        let heads = shares
            .min_by_key(|&heads| tiles(heads))
            .filter(|&heads| 4 * tiles(heads) <= 3 * tiles(1))
            .unwrap_or(1);
        Self { rows, heads }
    }

    /// Query heads per tile.
    pub const fn heads(self) -> usize {
        self.heads
    }

    /// Queries per tile.
    pub const fn queries(self) -> usize {
        self.rows / self.heads
    }
}

/// Lists of key tiles, each divided into as many lists: the first run of each, the number of all
/// runs, and the runs.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct RangeLists {
    /// First run of each range, and the number of all runs.
    pub starts: Vec<u32>,
    /// Runs of all ranges.
    pub runs: Vec<TileRun>,
}

impl RangeLists {
    /// Divides each list into `ranges` ranges of consecutive tiles, which differ by at most one
    /// tile.
    pub fn of<'a>(lists: impl IntoIterator<Item = &'a [TileRun]>, ranges: usize) -> Self {
        let mut divided = Self { starts: vec![0], runs: Vec::new() };
        for list in lists {
            let count: usize = list.iter().map(|run| run.count as usize).sum();
            let mut rest = list.iter().copied();
            let mut run = rest.next();
            for range in 0..ranges {
                let mut wanted = (range + 1) * count / ranges - range * count / ranges;
                while let Some(current) = run.as_mut().filter(|_| wanted > 0) {
                    // at most the run's own count
                    let taken = wanted.min(current.count as usize) as u32;
                    divided.runs.push(TileRun { count: taken, ..*current });
                    wanted -= taken as usize;
                    current.first += taken;
                    current.count -= taken;
                    if current.count == 0 {
                        run = rest.next();
                    }
                }
                divided.starts.push(divided.runs.len() as u32);
            }
        }
        divided
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_are_packed_only_if_that_saves_tiles() {
        let of = |queries: usize, group: usize, rows: usize| {
            let packing = GqaPacking::of(queries, group, rows);
            assert!(packing.heads() * packing.queries() <= rows);
            (packing.heads(), packing.queries())
        };
        assert_eq!(of(1, 1, 32), (1, 32));
        assert_eq!(of(1, 8, 32), (8, 4));
        assert_eq!(of(1, 7, 32), (7, 4));
        assert_eq!(of(1, 64, 32), (32, 1));
        // a prime number of heads above the rows of a tile
        assert_eq!(of(1, 71, 32), (1, 32));
        // as many tiles with 8 heads as with 2
        assert_eq!(of(16, 8, 32), (2, 16));
        assert_eq!(of(32, 8, 32), (1, 32));
        // 5 tiles of 8 queries and 4 heads instead of 2 · 4
        assert_eq!(of(33, 4, 32), (4, 8));
        assert_eq!(of(1000, 8, 32), (1, 32));
    }

    #[test]
    fn ranges_have_equally_many_tiles_in_order() {
        const FULL: u32 = TileRun::FULL;
        const fn run(first: u32, count: u32, bitmask: u32) -> TileRun {
            TileRun { first, count, bitmask }
        }
        let long = [run(0, 5, FULL), run(5, 1, 7), run(6, 1, 8)];
        let short = [run(3, 1, 9)];
        let divided = RangeLists::of([&long[..], &short, &[]], 3);
        // 2, 2 and 3 tiles; of the short list all in the last range; of the empty one none
        assert_eq!(divided.starts, [0, 1, 2, 5, 5, 5, 6, 6, 6, 6]);
        assert_eq!(
            divided.runs,
            [
                run(0, 2, FULL),
                run(2, 2, FULL),
                run(4, 1, FULL),
                run(5, 1, 7),
                run(6, 1, 8),
                run(3, 1, 9)
            ]
        );
    }
}
