//! Splits tile kernels into chunks whose bindings, lists and loops the device supports.
//!
//! Parts of a chunk: consecutive workgroups whose work is bounded.

use annulus_core::{Error, Result, Spec};

use crate::{
    RegisterTile,
    adapter::ChunkLimits,
    block_mask::{ChunkMask, ListOwner, WorkChunk, max_words_per_tile},
    kernels::{TILE, TileVariant},
    launch::ElementRange,
    operands::{Operand, Operands, RowsOf, TileKernel, dims_of_products},
};

/// Upper bound of the words of lists per chunk, 16 MiB: tile masks take O(sequence length²) bits,
/// which must not be allocated at once.
const MAX_LIST_WORDS: u64 = 4 << 20;

/// Upper bound of the work of a workgroup in FLOPs, because a part has at least one: 0.5 s at 2
/// GFLOP/s, a workgroup's share of a slow integrated GPU. A constant, because it determines the
/// order of sums.
pub(crate) const MAX_WORKGROUP_WORK: u64 = 1 << 30;

/// Upper bound of the words of lists per chunk on a device.
pub(crate) fn most_list_words(limits: &ChunkLimits) -> u64 {
    MAX_LIST_WORDS.min((limits.binding_bytes.saturating_sub(1024)) / 4)
}

/// Problem size, and whether masks differ between batch rows and heads.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ProblemSize {
    pub(crate) queries: usize,
    pub(crate) keys: usize,
    pub(crate) per_batch: bool,
    pub(crate) per_head: bool,
    /// Queries per buffer of the accumulator: chunks begin at multiples of it.
    pub(crate) queries_each: usize,
}

/// Number of tiles that one workgroup iterates over.
fn tiles_per_workgroup(
    kind: TileKernel,
    spec: &Spec,
    [batches, heads, queries, keys]: [usize; 4],
) -> usize {
    let planes = match kind {
        TileKernel::Forward | TileKernel::Queries => 1,
        TileKernel::Keys { .. } => heads.min(spec.dims.group()),
        // a bias shared by all batch rows and heads is owned by one workgroup
        TileKernel::Bias(_) => batches * heads,
    };
    let tiles = if kind.owner() == ListOwner::Queries { keys } else { queries };
    planes * tiles.div_ceil(TILE)
}

/// Upper bound of loop iterations per tile: a product has at most 33 per 32 elements of its
/// vectors, and each dim at most three products.
const fn loop_steps_per_tile(spec: &Spec) -> u64 {
    let groups = TileVariant::groups(spec.dims.head_dim) + TileVariant::groups(spec.dims.value_dim);
    128 + 2 * 100 * groups as u64
}

impl Operands<'_> {
    /// Splits the work into chunks that the device supports.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if not even one tile fits.
    pub(crate) fn cut(
        &self,
        limits: &ChunkLimits,
        spec: &Spec,
        kind: TileKernel,
        size: ProblemSize,
    ) -> Result<Vec<WorkChunk>> {
        let ProblemSize { queries, keys, per_batch, per_head, queries_each } = size;
        let batch = spec.dims.batch;
        let heads = spec.dims.q_heads;
        let mut operands = self.clone();
        let groups = operands.groups(kind);
        let whole = |counts: [usize; 4]| {
            let [batches, heads, queries, keys] = counts.map(|count| (0, count));
            WorkChunk { batches, heads, queries, keys }
        };
        let bindings_fit = |counts: [usize; 4]| {
            groups.iter().all(|operands| {
                let bytes = operands.first().map_or(0, |operand| operand.bytes);
                let (first, end) = element_span(operands, &whole(counts), spec);
                ElementRange::bound_bytes(end - first, bytes, limits.alignment)
                    <= limits.binding_bytes
            })
        };
        let words = |[batches, heads, queries, keys]: [usize; 4]| {
            let planes = if per_batch { batches } else { 1 } * if per_head { heads } else { 1 };
            let tiles = planes * queries.div_ceil(TILE) * keys.div_ceil(TILE);
            tiles as u64 * max_words_per_tile(spec, TILE) as u64 + 2 * (queries + keys) as u64
        };
        // a tile pair is the least that a workgroup can be given
        let most_work = limits.part_work.unwrap_or(MAX_WORKGROUP_WORK).min(MAX_WORKGROUP_WORK);
        let most_pairs = (most_work / flops_per_tile_pair(kind, spec, limits.register_tile)).max(1);
        let walk_fits = |counts: [usize; 4]| {
            let pairs = tiles_per_workgroup(kind, spec, counts) as u64;
            let steps = pairs * loop_steps_per_tile(spec);
            pairs <= most_pairs && limits.loop_steps.is_none_or(|most| steps <= most)
        };
        let most_words = most_list_words(limits);
        let lists_fit = |counts: [usize; 4]| words(counts) <= most_words;
        let mut step = [batch, heads, queries.min(queries_each), keys].map(|count| count.max(1));
        while !(bindings_fit(step) && lists_fit(step) && walk_fits(step)) {
            let before = step;
            step = halved(step, kind, walk_fits(step), lists_fit(step));
            if step == before {
                return Err(Error::unsupported(
                    format!(
                        "a tile of {TILE} rows of these tensors in a binding of {} bytes",
                        limits.binding_bytes
                    ),
                    limits.device.as_str(),
                ));
            }
        }
        Ok(chunks_of([batch, heads, queries, keys], step, queries_each))
    }
}

/// Halves the axis of [batches, heads, queries, keys] whose split costs least. Returns `step`
/// unchanged if no axis can be split further.
fn halved(mut step: [usize; 4], kind: TileKernel, walk_fits: bool, lists_fit: bool) -> [usize; 4] {
    let [batches, heads, queries, keys] = [0, 1, 2, 3];
    let walked = if kind.owner() == ListOwner::Queries { keys } else { queries };
    // axes in the order in which they are split, each while it is longer than this
    let by_walk = [(walked, TILE), (batches, 1), (heads, 1)];
    let by_lists = (queries, if lists_fit { usize::MAX } else { 8 * TILE });
    let by_size = [
        by_lists,
        (batches, 1),
        (queries, 8 * TILE),
        (keys, 8 * TILE),
        (heads, 1),
        (queries, TILE),
        (keys, TILE),
    ];
    let order = if walk_fits { &by_size[..] } else { &by_walk };
    if let Some(&(axis, least)) = order.iter().find(|&&(axis, least)| step[axis] > least) {
        let rows = step[axis].div_ceil(2).next_multiple_of(TILE);
        step[axis] = if least == 1 { 1 } else { rows };
    }
    step
}

/// Splits [batches, heads, queries, keys] into chunks of at most `step` each, queries innermost. No
/// chunk has queries on both sides of a multiple of `queries_each`.
fn chunks_of(
    [batch, heads, queries, keys]: [usize; 4],
    step: [usize; 4],
    queries_each: usize,
) -> Vec<WorkChunk> {
    let ranges = |count: usize, step: usize| {
        (0..count).step_by(step).map(move |first| (first, step.min(count - first)))
    };
    let of_queries = || {
        ranges(queries, queries_each).flat_map(move |(begin, count)| {
            ranges(count, step[2]).map(move |(first, count)| (begin + first, count))
        })
    };
    let mut chunks = Vec::new();
    for batches in ranges(batch, step[0]) {
        for heads in ranges(heads, step[1]) {
            for keys in ranges(keys, step[3]) {
                chunks.extend(of_queries().map(|queries| WorkChunk {
                    batches,
                    heads,
                    queries,
                    keys,
                }));
            }
        }
    }
    chunks
}

/// Returns the range (first, end) of elements that a chunk of these operands spans.
pub(crate) fn element_span(
    operands: &[&mut Operand<'_>],
    chunk: &WorkChunk,
    spec: &Spec,
) -> (u64, u64) {
    let of = |operand: &&mut Operand<'_>| {
        let first = first_element(operand, chunk);
        let (rows, heads) = match operand.rows {
            RowsOf::Queries => (chunk.queries.1, chunk.heads.1),
            RowsOf::Keys => (chunk.keys.1, spec.dims.kv_heads),
        };
        let last = |count: usize, distance: u64| (count as u64).saturating_sub(1) * distance;
        let layout = operand.layout;
        let end = first
            + last(chunk.batches.1, layout.batch)
            + last(rows, layout.row)
            + last(heads, layout.head)
            + operand.dim as u64;
        (first, end)
    };
    operands.iter().map(of).reduce(|a, b| (a.0.min(b.0), a.1.max(b.1))).unwrap_or((0, 0))
}

/// Returns the first element of an operand in a chunk.
pub(crate) const fn first_element(operand: &Operand<'_>, chunk: &WorkChunk) -> u64 {
    let (rows, heads) = match operand.rows {
        RowsOf::Queries => (chunk.queries.0, chunk.heads.0),
        RowsOf::Keys => (chunk.keys.0, 0),
    };
    let layout = operand.layout;
    layout.base
        + chunk.batches.0 as u64 * layout.batch
        + (rows - operand.first_row) as u64 * layout.row
        + heads as u64 * layout.head
}

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
    use annulus_core::{DType, Dims};

    use super::*;
    use crate::{RegisterTile, copy::ElementStrides};

    /// Limits of a device whose bindings have 2^31 bytes.
    fn limits() -> ChunkLimits {
        ChunkLimits {
            device: "a device".to_owned(),
            binding_bytes: 1 << 31,
            alignment: 256,
            loop_steps: None,
            part_work: None,
            register_tile: RegisterTile::FourRows,
        }
    }

    #[test]
    fn chunks_of_more_than_two_to_the_32_elements_fit_bindings_and_cover_all_queries() {
        // 2^33 elements of queries, and one tile of keys
        let (rows, keys, heads, dim) = (1 << 21, 32, 32, 128);
        let dims = Dims { kv_len: keys, kv_heads: 1, ..Dims::new(1, rows, heads, dim) };
        let spec = Spec::new(dims, DType::F16);
        let operand = |rows: RowsOf, count, heads| Operand {
            buffer: None,
            layout: ElementStrides::dense(count, heads, dim),
            dim,
            bytes: 2,
            rows,
            first_row: 0,
        };
        let mut q = operand(RowsOf::Queries, rows, heads);
        let k = operand(RowsOf::Keys, keys, 1);
        let operands = Operands { q: Some(q), k: Some(k), ..Operands::default() };
        let size = ProblemSize {
            queries: rows,
            keys,
            per_batch: false,
            per_head: false,
            queries_each: rows,
        };
        let chunks = operands.cut(&limits(), &spec, TileKernel::Forward, size).unwrap();
        let row = (heads * dim) as u64;
        let mut ends = vec![0];
        for chunk in chunks.iter().filter(|chunk| chunk.keys.0 == 0) {
            assert_eq!(chunk.heads, (0, heads));
            let (first, end) = element_span(&[&mut q], chunk, &spec);
            assert_eq!(first, row * chunk.queries.0 as u64);
            assert!(2 * (end - first) < 1 << 31, "{chunk:?}");
            assert_eq!(ends.last(), Some(&first), "{chunk:?}");
            ends.push(end);
        }
        assert_eq!(ends.last(), Some(&(1 << 33)));
    }
}

#[cfg(test)]
mod part_tests {
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
        let visibility = Visibility {
            mask: &mask,
            attention_mask: None,
            key_lists: None,
            queries: &rows,
            keys: &rows,
        };
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
