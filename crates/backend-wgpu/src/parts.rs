//! Kernels over tiles are cut into parts whose bindings, lists and loops the device can take.

use annulus_core::{Error, Result, Spec};

use crate::{
    device::Gpu,
    kernels::{TILE, TileVariant},
    launch::Stretch,
    sight::{Owner, Part, most_words_a_tile},
    tiles::{Kind, Operand, Operands, RowsOf},
};

/// Words of lists that are made at once: what a mask in bits takes must not grow with the square of a sequence.
const MOST_WORDS: u64 = 4 << 20;

/// How much there is of both sides, and whether batch rows and heads see differently.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sides {
    pub(crate) queries: usize,
    pub(crate) keys: usize,
    pub(crate) per_batch: bool,
    pub(crate) per_head: bool,
}

/// The tiles that one workgroup goes through, one after the other.
fn walk(kind: Kind, spec: &Spec, [batches, heads, queries, keys]: [usize; 4]) -> usize {
    let planes = match kind {
        Kind::Forward | Kind::Queries => 1,
        Kind::Keys { .. } => heads.min(spec.dims.group()),
        // a bias may be one for all
        Kind::Bias(_) => batches * heads,
    };
    let tiles = if kind.owner() == Owner::Queries { keys } else { queries };
    planes * tiles.div_ceil(TILE)
}

/// Rounds of all loops for one tile, with room to spare: each of the at most four products has fewer than 100 for 32 elements of its vectors.
const fn steps_a_tile(spec: &Spec) -> u64 {
    let groups = TileVariant::groups(spec.dims.head_dim) + TileVariant::groups(spec.dims.value_dim);
    128 + 2 * 100 * groups as u64
}

impl Operands<'_> {
    /// Cuts the work into parts whose bindings and lists the device can take.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if not even one tile fits.
    pub(crate) fn cut(&self, gpu: &Gpu, spec: &Spec, kind: Kind, sides: Sides) -> Result<Vec<Part>> {
        let Sides { queries, keys, per_batch, per_head } = sides;
        let (batch, heads) = (spec.dims.batch, spec.dims.q_heads);
        let groups = self.groups(kind);
        let whole = |counts: [usize; 4]| {
            let [batches, heads, queries, keys] = counts.map(|count| (0, count));
            Part { batches, heads, queries, keys }
        };
        let bindings_fit = |counts: [usize; 4]| {
            groups.iter().all(|(operands, _)| {
                let bytes = operands.first().map_or(0, |operand| operand.bytes);
                let (first, end) = union(operands, &whole(counts), spec);
                Stretch::bound_bytes(end - first, bytes, gpu.alignment()) <= gpu.most_binding()
            })
        };
        let words = |[batches, heads, queries, keys]: [usize; 4]| {
            let planes = if per_batch { batches } else { 1 } * if per_head { heads } else { 1 };
            let tiles = planes * queries.div_ceil(TILE) * keys.div_ceil(TILE);
            tiles as u64 * most_words_a_tile(spec) as u64 + 2 * (queries + keys) as u64
        };
        let walk_fits =
            |counts: [usize; 4]| gpu.most_steps().is_none_or(|most| walk(kind, spec, counts) as u64 * steps_a_tile(spec) <= most);
        let most_words = MOST_WORDS.min((gpu.most_binding().saturating_sub(1024)) / 4);
        let lists_fit = |counts: [usize; 4]| words(counts) <= most_words;
        let mut step = [batch, heads, queries, keys].map(|count| count.max(1));
        while !(bindings_fit(step) && lists_fit(step) && walk_fits(step)) {
            // what is cheapest to go without comes first
            let halve = |rows: usize| rows.div_ceil(2).next_multiple_of(TILE);
            let before = step;
            let walked = if kind.owner() == Owner::Queries { 3 } else { 2 };
            if !walk_fits(step) {
                if step[walked] > TILE {
                    step[walked] = halve(step[walked]);
                } else if step[0] > 1 {
                    step[0] = 1;
                } else {
                    step[1] = 1;
                }
            } else if !lists_fit(step) && step[2] > 8 * TILE {
                step[2] = halve(step[2]);
            } else if step[0] > 1 {
                step[0] = 1;
            } else if step[2] > 8 * TILE {
                step[2] = halve(step[2]);
            } else if step[3] > 8 * TILE {
                step[3] = halve(step[3]);
            } else if step[1] > 1 {
                step[1] = 1;
            } else if step[2] > TILE {
                step[2] = halve(step[2]);
            } else if step[3] > TILE {
                step[3] = halve(step[3]);
            }
            if step == before {
                return Err(Error::unsupported(
                    format!("a tile of {TILE} rows of these tensors in a binding of {} bytes", gpu.most_binding()),
                    gpu.name(),
                ));
            }
        }
        let ranges = |count: usize, step: usize| (0..count).step_by(step).map(move |first| (first, step.min(count - first)));
        let mut parts = Vec::new();
        for batches in ranges(batch, step[0]) {
            for heads in ranges(heads, step[1]) {
                for keys in ranges(keys, step[3]) {
                    parts.extend(ranges(queries, step[2]).map(|queries| Part { batches, heads, queries, keys }));
                }
            }
        }
        Ok(parts)
    }
}

/// The elements, from the first to the last and one further, that a part of these operands lies between.
pub(crate) fn union(operands: &[Operand<'_>], part: &Part, spec: &Spec) -> (u64, u64) {
    let of = |operand: &Operand<'_>| {
        let first = first_element(operand, part);
        let (rows, heads) = match operand.rows {
            RowsOf::Queries => (part.queries.1, part.heads.1),
            RowsOf::Keys => (part.keys.1, spec.dims.kv_heads),
        };
        let last = |count: usize, distance: u64| (count as u64).saturating_sub(1) * distance;
        let layout = operand.layout;
        let end = first + last(part.batches.1, layout.batch) + last(rows, layout.row) + last(heads, layout.head) + operand.dim as u64;
        (first, end)
    };
    operands.iter().map(of).reduce(|a, b| (a.0.min(b.0), a.1.max(b.1))).unwrap_or((0, 0))
}

/// The element of an operand with which a part begins.
pub(crate) const fn first_element(operand: &Operand<'_>, part: &Part) -> u64 {
    let (rows, heads) = match operand.rows {
        RowsOf::Queries => (part.queries.0, part.heads.0),
        RowsOf::Keys => (part.keys.0, 0),
    };
    let layout = operand.layout;
    layout.base + part.batches.0 as u64 * layout.batch + rows as u64 * layout.row + heads as u64 * layout.head
}
