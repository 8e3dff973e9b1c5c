//! Splits tile kernels into chunks whose bindings, lists and loops the device supports.

use annulus_core::{Error, Result, Spec};

use crate::{
    adapter::ChunkLimits,
    block_mask::{ListOwner, WorkChunk, max_words_per_tile},
    kernels::{TILE, TileVariant},
    launch::ElementRange,
    operands::{Operand, Operands, RowsOf, TileKernel},
    parts::flops_per_tile_pair,
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
