//! The tile kernels and their operands, in the layouts that passes have: dense tensors, dense f32
//! buffers, wire records, biases.

use annulus_core::{Dims, Spec};

use crate::{
    Level, RegisterTile,
    block_mask::ListOwner,
    copy::ElementStrides,
    kernels::{BiasAxes, Epilogue, KernelVariant, Storage, TileVariant},
    memory::Tensor,
};

/// A tensor of vectors that a kernel reads or writes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Operand<'a> {
    /// `None` if only the size matters.
    pub(crate) buffer: Option<&'a wgpu::Buffer>,
    pub(crate) layout: ElementStrides,
    /// Elements per vector.
    pub(crate) dim: usize,
    /// Bytes per element.
    pub(crate) bytes: u64,
    pub(crate) rows: RowsOf,
    /// Row at which the buffer begins.
    pub(crate) first_row: usize,
}

/// Rows and heads of an operand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RowsOf {
    /// Query rows; query heads of the chunk.
    Queries,
    /// Key rows; all KV heads.
    Keys,
}

/// Operands of a tile kernel.
#[derive(Debug, Clone, Default)]
pub(crate) struct Operands<'a> {
    pub(crate) q: Option<Operand<'a>>,
    pub(crate) k: Option<Operand<'a>>,
    pub(crate) v: Option<Operand<'a>>,
    pub(crate) dout: Option<Operand<'a>>,
    pub(crate) statistics: Option<Operand<'a>>,
    /// Accumulator of O, dQ or dK.
    pub(crate) acc: Option<Operand<'a>>,
    /// Accumulator of dV.
    pub(crate) dv: Option<Operand<'a>>,
    pub(crate) bias: Option<Operand<'a>>,
    /// Gradient of the bias.
    pub(crate) dbias: Option<Operand<'a>>,
}

/// Tile kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TileKernel {
    Forward,
    Queries,
    /// `from_records`: the queries are wire records, and what they give is added.
    Keys {
        from_records: bool,
    },
    Bias(BiasAxes),
}

impl TileKernel {
    /// Rows that a workgroup owns, so that it alone writes their outputs.
    pub(crate) const fn owner(self) -> ListOwner {
        match self {
            Self::Forward | Self::Queries => ListOwner::Queries,
            Self::Keys { .. } => ListOwner::Keys,
            Self::Bias(axes) => match axes {
                BiasAxes::Keys => ListOwner::Keys,
                _ => ListOwner::Queries,
            },
        }
    }

    /// Selects the kernel variant.
    pub(crate) fn variant(self, tile: TileVariant) -> KernelVariant {
        // only forward reduces over rows, so the others are the same at every level
        let alike = TileVariant { level: Level::Plain, tall: false, ..tile };
        match self {
            Self::Forward => KernelVariant::Forward(tile),
            Self::Queries => KernelVariant::BackwardQueries(alike),
            Self::Keys { from_records } => {
                KernelVariant::BackwardKeys(alike, from_records && tile.storage != Storage::F32)
            }
            Self::Bias(axes) => {
                KernelVariant::BackwardBias(TileVariant { matrices: None, ..alike }, axes)
            }
        }
    }
}

/// Returns the lengths of the vectors that a kernel of multiply-adds multiplies, one per product of
/// a tile pair.
pub(crate) fn dims_of_products(kind: TileKernel, spec: &Spec, tile: RegisterTile) -> Vec<usize> {
    let Dims { head_dim, value_dim, .. } = spec.dims;
    match kind {
        // S, O
        TileKernel::Forward => vec![head_dim, value_dim],
        // S, dP, dQ
        TileKernel::Queries => vec![head_dim, value_dim, head_dim],
        // S, dP, dV, dK; S twice if dV and dK are computed one after the other
        TileKernel::Keys { .. } => {
            let mut all = vec![head_dim, value_dim, value_dim, head_dim];
            let groups = TileVariant::groups(head_dim.max(value_dim));
            let tile = TileVariant::fitting_tile(tile, Epilogue::of(spec), groups);
            if TileVariant::splits_gradients(tile, head_dim, value_dim) {
                all.push(head_dim);
            }
            all
        }
        // S, dP
        TileKernel::Bias(_) => vec![head_dim, value_dim],
    }
}

impl Operand<'_> {
    /// True if all vectors begin at multiples of 4 elements and consist of whole fours.
    const fn is_aligned(&self) -> bool {
        let ElementStrides { base, batch, row, head } = self.layout;
        // first_row changes the base by whole rows
        (base | batch | row | head | self.dim as u64).is_multiple_of(4)
    }
}

impl<'a> Operands<'a> {
    /// True if a kernel can load and store four elements of these operands at once: of Q, K, V, dO
    /// and the accumulators, where `alignment` is that of binding offsets in bytes.
    pub(crate) fn are_aligned(&self, alignment: u64) -> bool {
        let vectors = [&self.q, &self.k, &self.v, &self.dout, &self.acc, &self.dv];
        alignment.is_multiple_of(16)
            && vectors.into_iter().flatten().all(|operand| operand.is_aligned())
    }

    /// Returns the operands of each binding after the block mask, in order; an empty one is unused.
    pub(crate) fn groups(&mut self, kind: TileKernel) -> Vec<Vec<&mut Operand<'a>>> {
        let Self { q, k, v, dout, statistics, acc, dv, bias, dbias } = self;
        let groups = match kind {
            TileKernel::Forward => {
                vec![vec![q], vec![k, v], vec![bias], vec![acc], vec![statistics]]
            }
            TileKernel::Queries => {
                vec![vec![q], vec![k, v], vec![bias], vec![acc], vec![statistics], vec![dout]]
            }
            TileKernel::Keys { .. } => vec![
                vec![q],
                vec![k],
                vec![v],
                vec![bias],
                vec![acc, dv],
                vec![statistics],
                vec![dout],
            ],
            TileKernel::Bias(_) => {
                vec![vec![q], vec![k, v], vec![bias], vec![dbias], vec![statistics], vec![dout]]
            }
        };
        groups.into_iter().map(|group| group.into_iter().flatten().collect()).collect()
    }
}

/// Operand for a dense tensor.
pub(crate) fn tensor(tensor: &Tensor, rows: RowsOf) -> Operand<'_> {
    let [_, len, heads, dim] = tensor.shape;
    let layout = ElementStrides::dense(len, heads, dim);
    let bytes = tensor.dtype.bytes() as u64;
    Operand { buffer: Some(&tensor.buffer), layout, dim, bytes, rows, first_row: 0 }
}

/// Operand for a dense f32 buffer `[b, rows, heads, dim]` of queries.
pub(crate) const fn floats(
    buffer: &wgpu::Buffer,
    rows: usize,
    heads: usize,
    dim: usize,
) -> Operand<'_> {
    Operand {
        buffer: Some(buffer),
        layout: ElementStrides::dense(rows, heads, dim),
        dim,
        bytes: 4,
        rows: RowsOf::Queries,
        first_row: 0,
    }
}

/// Operand for field `field` of records.
pub(crate) fn records<'a>(
    buffer: Option<&'a wgpu::Buffer>,
    record: &annulus_core::RowLayout,
    field: usize,
    bytes: u64,
    rows: RowsOf,
) -> Operand<'a> {
    let annulus_core::RowField { dim, dtype, .. } = record.fields()[field];
    let scale = annulus_core::index(dtype.bytes() as u64 / bytes);
    let layout = ElementStrides::records(record, field, bytes);
    Operand { buffer, layout, dim: dim * scale, bytes, rows, first_row: 0 }
}

/// Operand for a bias `[b|1, heads|1, rows|1, keys|1]`, one vector per query row.
pub(crate) fn bias(buffer: Option<&wgpu::Buffer>, shape: [usize; 4], rows: usize) -> Operand<'_> {
    let [batches, heads, queries, keys] = shape;
    let rows = if queries == 1 { 1 } else { rows as u64 };
    let distance = |len: usize, distance: u64| if len == 1 { 0 } else { distance };
    let layout = ElementStrides {
        base: 0,
        batch: distance(batches, heads as u64 * rows * keys as u64),
        row: distance(queries, keys as u64),
        head: distance(heads, rows * keys as u64),
    };
    Operand { buffer, layout, dim: keys, bytes: 4, rows: RowsOf::Queries, first_row: 0 }
}

/// Operand for dbias: shaped as the bias, but with one number per row if it has no key axis.
pub(crate) fn dbias_operand(
    buffer: Option<&wgpu::Buffer>,
    shape: [usize; 4],
    rows: usize,
) -> Operand<'_> {
    let [batches, heads, queries, keys] = shape;
    if keys != 1 {
        return bias(buffer, shape, rows);
    }
    // one number per row, even if the bias has no query axis
    let mut acc = bias(buffer, [batches, heads, queries.max(2), 1], rows);
    acc.layout.row = 1;
    acc
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fours_are_loaded_at_once_only_where_all_vectors_consist_of_them() {
        let of = |base: u64, dim: usize| {
            let layout = ElementStrides { base, ..ElementStrides::dense(7, 3, dim) };
            let rows = RowsOf::Queries;
            Some(Operand { buffer: None, layout, dim, bytes: 4, rows, first_row: 0 })
        };
        let all = Operands { q: of(0, 64), k: of(12, 8), acc: of(0, 4), ..Operands::default() };
        assert!(all.are_aligned(16) && all.are_aligned(256));
        assert!(!all.are_aligned(4), "bindings that begin between fours");
        for wrong in [of(2, 64), of(0, 66), of(0, 33), of(0, 2)] {
            assert!(!Operands { v: wrong, ..all.clone() }.are_aligned(256), "{wrong:?}");
            assert!(!Operands { dv: wrong, ..all.clone() }.are_aligned(256), "{wrong:?}");
        }
        // a bias and statistics are loaded one by one
        assert!(Operands { bias: of(1, 3), statistics: of(2, 4), ..all }.are_aligned(256));
    }
}
