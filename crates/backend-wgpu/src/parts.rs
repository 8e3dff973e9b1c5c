//! Parts of a chunk: consecutive workgroups whose work is bounded.

use annulus_core::Spec;

use crate::{
    RegisterTile,
    block_mask::ChunkMask,
    kernels::TILE,
    operands::{TileKernel, dims_of_products},
};

/// Work besides the products, in columns of a product: exponentials and masks of a tile pair, or
/// loads and stores of a workgroup's outputs.
const OVERHEAD_COLUMNS: u64 = 32;

/// FLOPs of a product of 32 × 32 pairs per element of their vectors.
const FLOPS_PER_COLUMN: u64 = 2 * (TILE * TILE) as u64;

/// Returns the FLOPs of a pair of tiles.
pub(crate) fn flops_per_tile_pair(kind: TileKernel, spec: &Spec, tile: RegisterTile) -> u64 {
    let dims = dims_of_products(kind, spec, tile);
    let columns: usize = dims.iter().map(|dim| dim.next_multiple_of(TILE)).sum();
    FLOPS_PER_COLUMN * (columns as u64 + OVERHEAD_COLUMNS)
}

/// Workgroups of a chunk: for each batch row, for each head, one per tile of the owning side.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Workgroups {
    /// Lists of a plane: tiles, times ranges of keys if the kernel decodes.
    pub(crate) tiles: usize,
    /// True if workgroups begin with the last list of each plane.
    pub(crate) is_reversed: bool,
    /// Heads that a batch row has workgroups for, and batch rows.
    pub(crate) heads: usize,
    pub(crate) batches: usize,
    /// Heads and batch rows over which one workgroup iterates.
    pub(crate) heads_each: usize,
    pub(crate) batches_each: usize,
    /// FLOPs of a pair of tiles.
    pub(crate) flops: u64,
}

impl Workgroups {
    /// Number of workgroups.
    pub(crate) const fn count(&self) -> usize {
        self.tiles * self.heads * self.batches
    }

    /// Returns the FLOPs of workgroup `number`. It iterates over `heads_each` heads from its own
    /// on, fewer at the end, whose tile pairs are as many if all heads share their lists.
    fn work(&self, block_mask: &ChunkMask, number: usize) -> u64 {
        let list = number % self.tiles;
        let tile = if self.is_reversed { self.tiles - 1 - list } else { list };
        let head = number / self.tiles % self.heads * self.heads_each;
        let batch = number / self.tiles / self.heads * self.batches_each;
        let planes = |first: usize, each: usize, shared: bool| {
            // one plane stands for all if they are equal
            let count = if shared { 1 } else { each };
            (first..first + count, (each / count) as u64)
        };
        let (heads, per_head) = planes(head, self.heads_each, block_mask.plane_head == 0);
        let (batches, per_batch) = planes(batch, self.batches_each, block_mask.plane_batch == 0);
        let pairs: u64 = batches
            .flat_map(|batch| heads.clone().map(move |head| (batch, head)))
            .map(|(batch, head)| block_mask.pairs(batch, head, tile))
            .sum();
        self.flops * pairs * per_head * per_batch + FLOPS_PER_COLUMN * OVERHEAD_COLUMNS
    }

    /// Returns the end of the part that begins at workgroup `first`, and its FLOPs: as many
    /// workgroups as `budget` FLOPs allow, but at least one.
    pub(crate) fn part(&self, block_mask: &ChunkMask, first: usize, budget: u64) -> (usize, u64) {
        let mut total = 0;
        for number in first..self.count() {
            let work = self.work(block_mask, number);
            if number > first && total + work > budget {
                return (number, total);
            }
            total += work;
        }
        (self.count(), total)
    }
}

#[cfg(test)]
mod tests {
    use annulus_core::{DType, Dims, Rows, Visibility, mask::Causal};

    use super::*;
    use crate::{
        adapter::ChunkLimits,
        block_mask::{ListForm, ListOwner, WorkChunk},
        chunks::ProblemSize,
        kernels::BiasAxes,
        operands::Operands,
    };

    const KERNELS: [TileKernel; 5] = [
        TileKernel::Forward,
        TileKernel::Queries,
        TileKernel::Keys { from_records: false },
        TileKernel::Bias(BiasAxes::Pairs),
        TileKernel::Bias(BiasAxes::Keys),
    ];

    #[test]
    fn parts_cover_all_workgroups_and_exceed_no_budget() {
        let rows = Rows::counting(1000, 0).unwrap();
        let mask = Causal { offset: 0 };
        let visibility =
            Visibility { mask: &mask, attention_mask: None, queries: &rows, keys: &rows };
        let spec = Spec::new(Dims::new(2, 1000, 6, 64), DType::F32);
        let chunk =
            WorkChunk { batches: (0, 2), heads: (0, 6), queries: (0, 1000), keys: (0, 1000) };
        for owner in [ListOwner::Queries, ListOwner::Keys] {
            let mut mask = ChunkMask::default();
            mask.rebuild(&spec, &visibility, &chunk, owner, ListForm::DEFAULT).unwrap();
            // the last queries and the first keys of a causal mask have most pairs
            assert_eq!(mask.is_ascending, owner == ListOwner::Queries);
            for (heads_each, batches_each) in [(1, 1), (3, 1), (6, 2)] {
                let all = Workgroups {
                    tiles: 32,
                    is_reversed: mask.is_ascending,
                    heads: 6 / heads_each,
                    batches: 2 / batches_each,
                    heads_each,
                    batches_each,
                    flops: 1000,
                };
                let works: Vec<u64> = (0..all.count()).map(|n| all.work(&mask, n)).collect();
                assert!(works[0] > works[31], "long lists come first");
                // a triangle of tile pairs in each of 12 planes
                let pairs = 12 * 32 * 33 / 2;
                let fixed = works.len() as u64 * FLOPS_PER_COLUMN * OVERHEAD_COLUMNS;
                assert_eq!(works.iter().sum::<u64>(), 1000 * pairs + fixed);
                for budget in [1, 70_000, 300_000, 5_000_000, u64::MAX] {
                    let mut first = 0;
                    while first < all.count() {
                        let (end, work) = all.part(&mask, first, budget);
                        assert_eq!(work, works[first..end].iter().sum::<u64>());
                        assert!(end > first && (work <= budget || end == first + 1));
                        assert!(end == all.count() || work + works[end] > budget, "too small");
                        first = end;
                    }
                }
            }
        }
    }

    #[test]
    fn no_workgroup_of_a_long_sequence_exceeds_its_bound() {
        let limits = ChunkLimits {
            device: "a device".to_owned(),
            binding_bytes: u64::from(u32::MAX),
            alignment: 256,
            loop_steps: None,
            part_work: None,
            register_tile: RegisterTile::TwoRows,
        };
        // many query heads share few keys: a workgroup of dK and dV iterates over them
        for (heads, kv_heads, dim, len) in
            [(32, 32, 128, 131_072), (64, 1, 256, 65_536), (1, 1, 32, 1_000_000)]
        {
            let dims = Dims { kv_heads, ..Dims::new(1, len, heads, dim) };
            let mut spec = Spec::new(dims, DType::F32);
            spec.bias = Some([1, 1, 1, len]);
            let size = ProblemSize {
                queries: len,
                keys: len,
                per_batch: false,
                per_head: false,
                queries_each: 31_968,
            };
            for kind in KERNELS {
                let chunks = Operands::default().cut(&limits, &spec, kind, size).unwrap();
                let flops = flops_per_tile_pair(kind, &spec, limits.register_tile);
                let planes = |chunk: &WorkChunk| match kind {
                    TileKernel::Forward | TileKernel::Queries => 1,
                    TileKernel::Keys { .. } => chunk.heads.1.min(dims.group()),
                    TileKernel::Bias(_) => chunk.heads.1,
                };
                let worst = chunks
                    .iter()
                    .map(|chunk| {
                        let other = if kind.owner() == ListOwner::Queries {
                            chunk.keys
                        } else {
                            chunk.queries
                        };
                        flops * (planes(chunk) * other.1.div_ceil(TILE)) as u64
                    })
                    .max();
                // at 2 GFLOP/s, a workgroup's share of a slow GPU, 0.55 s: systems end a submission
                // after 2 s, and a part has at least one workgroup
                assert!(worst.is_some_and(|worst| worst <= 1_100_000_000), "{kind:?} {worst:?}");
                let pairs: usize =
                    chunks.iter().map(|chunk| chunk.heads.1 * chunk.queries.1 * chunk.keys.1).sum();
                assert_eq!(pairs, heads * len * len, "{kind:?}");
            }
        }
    }
}
