//! State of one rank and of its passes in device memory.
//!
//! Vectors of query rows in device memory, in as many buffers as the device's limit requires: wgpu
//! caps a buffer at 2 GiB − 1 byte on most devices, and f32 accumulators of 16-bit inputs are twice
//! as long as the inputs.

use annulus_core::{BackwardInputs, Block, Error, Inputs, RankShard, Result, View};

use crate::{
    block_mask::ChunkMask,
    copy::{Copy, CopySide, ElementStrides},
    device::Gpu,
    kernels::{BiasAxes, TILE, TileVariant},
    launch::{Arena, Commands},
    memory::{GpuBuffer, Tensor, WgpuSpace},
    operands::{self, Operand, Operands, RowsOf, floats, records, tensor},
};

/// Device, shard and kernel variant of one rank, and memory for the parameters of launches: common
/// to all passes of a workspace.
#[derive(Debug)]
pub(crate) struct RankKernels {
    pub(crate) shard: RankShard,
    pub(crate) tile: TileVariant,
    pub(crate) arena: Arena,
    pub(crate) block_mask: ChunkMask,
    pub(crate) gpu: Gpu,
}

impl RankKernels {
    /// Operands of the local queries and a block of keys and values.
    pub(crate) fn operands<'a>(
        &self,
        inputs: &Inputs<&'a Tensor>,
        kv: &Block<'a, WgpuSpace>,
        statistics: &'a GpuBuffer,
    ) -> Operands<'a> {
        let spec = &self.shard.spec;
        let rows = self.shard.queries.len();
        let (record, bytes) = (spec.kv_row_layout(), self.tile.storage.bytes());
        let of_block =
            |field| Some(records(Some(&kv.buffer.buffer), &record, field, bytes, RowsOf::Keys));
        Operands {
            q: Some(tensor(inputs.q, RowsOf::Queries)),
            k: of_block(0),
            v: of_block(1),
            statistics: Some(floats(&statistics.buffer, rows, spec.dims.q_heads, 4)),
            bias: self.bias(inputs, rows),
            ..Operands::default()
        }
    }

    /// Operand for the bias of `rows` queries.
    pub(crate) fn bias<'a>(&self, inputs: &Inputs<&'a Tensor>, rows: usize) -> Option<Operand<'a>> {
        let bias = self.shard.spec.bias.zip(inputs.bias);
        bias.map(|(shape, tensor)| operands::bias(Some(&tensor.buffer), shape, rows))
    }
}

/// State of a forward pass.
#[derive(Debug)]
pub(crate) struct ForwardBuffers {
    /// Accumulator of O, `[b, rows, q_heads, value_dim]`.
    pub(crate) acc: RowBuffers,
    /// (m, ℓ, ties, any key attended to), `[b, rows, q_heads, 4]`.
    pub(crate) softmax_statistics: GpuBuffer,
}

impl ForwardBuffers {
    pub(crate) fn bytes(&self) -> u64 {
        self.acc.bytes() + self.softmax_statistics.size()
    }
}

/// State of a backward pass.
#[derive(Debug)]
pub(crate) struct BackwardBuffers {
    /// dQ / scale, `[b, rows, q_heads, head_dim]`.
    pub(crate) dq: RowBuffers,
    /// (max, 1 / sum, Δ, share), `[b, rows, q_heads, 4]`.
    pub(crate) statistics: GpuBuffer,
    /// dbias: shaped as the bias, or one number per query row if the bias has no key axis.
    pub(crate) bias: Option<GpuBuffer>,
}

impl BackwardBuffers {
    pub(crate) fn bytes(&self) -> u64 {
        let bias = self.bias.as_ref().map_or(0, GpuBuffer::size);
        self.dq.bytes() + self.statistics.size() + bias
    }
}

/// A forward pass in progress: state and inputs.
pub(crate) struct ForwardContext<'p> {
    pub(crate) kernels: &'p mut RankKernels,
    pub(crate) state: &'p ForwardBuffers,
    pub(crate) inputs: Inputs<View<'p, WgpuSpace>>,
}

/// A backward pass in progress: state and inputs.
pub(crate) struct BackwardContext<'p> {
    pub(crate) kernels: &'p mut RankKernels,
    pub(crate) state: &'p BackwardBuffers,
    pub(crate) inputs: BackwardInputs<View<'p, WgpuSpace>>,
}

/// Reduction of the gradient of a bias of this shape.
pub(crate) const fn bias_axes([_, _, queries, keys]: [usize; 4]) -> BiasAxes {
    match (queries, keys) {
        (_, 1) => BiasAxes::Queries,
        (1, _) => BiasAxes::Keys,
        _ => BiasAxes::Pairs,
    }
}

/// f32 vectors `[batch, rows, heads, dim]`. A buffer has consecutive rows of all batch rows.
#[derive(Debug)]
pub(crate) struct RowBuffers {
    rows: usize,
    /// Rows of each buffer but the last.
    rows_each: usize,
    heads: usize,
    dim: usize,
    buffers: Vec<GpuBuffer>,
}

impl RowBuffers {
    pub(crate) fn bytes(&self) -> u64 {
        self.buffers.iter().map(GpuBuffer::size).sum()
    }

    /// Allocates vectors of the shape `[batch, rows, heads, dim]`.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], also if not even one tile of rows fits a buffer; [`Error::Device`].
    pub(crate) fn new(
        gpu: &Gpu,
        label: &str,
        [batch, rows, heads, dim]: [usize; 4],
    ) -> Result<Self> {
        let row_bytes = 4 * (batch * heads * dim) as u64;
        let most = gpu.max_buffer_bytes();
        let rows_each = rows_per_buffer(rows, row_bytes, most).ok_or_else(|| {
            let asked = row_bytes * TILE as u64;
            Error::OutOfMemory { what: label.into(), asked, free: Some(most) }
        })?;
        let buffers = (0..rows.max(1))
            .step_by(rows_each)
            .map(|first| {
                let rows = rows_each.min(rows - first);
                GpuBuffer::new(gpu, label, row_bytes * rows as u64)
            })
            .collect::<Result<_>>()?;
        Ok(Self { rows, rows_each, heads, dim, buffers })
    }

    /// Rows of each buffer but the last; chunks of queries begin at multiples of it.
    pub(crate) const fn rows_each(&self) -> usize {
        self.rows_each
    }

    /// Zeros the vectors before the first kernel of the batch runs.
    pub(crate) fn clear(&self, commands: &mut Commands<'_>) {
        self.buffers.iter().for_each(|buffer| commands.clear(&buffer.buffer));
    }

    /// Returns the operand of a chunk whose queries begin at row `query`.
    pub(crate) fn operand(&self, query: usize) -> Option<Operand<'_>> {
        let number = query / self.rows_each;
        let first_row = number * self.rows_each;
        Some(Operand {
            buffer: Some(&self.buffers.get(number)?.buffer),
            layout: self.layout(first_row),
            dim: self.dim,
            bytes: 4,
            rows: RowsOf::Queries,
            first_row,
        })
    }

    /// Layout of the buffer that begins at row `first`.
    fn layout(&self, first: usize) -> ElementStrides {
        ElementStrides::dense(self.rows_each.min(self.rows - first), self.heads, self.dim)
    }

    /// Records a copy of all vectors.
    pub(crate) fn launch_copy(
        &self,
        copy: Copy<'_>,
        gpu: &Gpu,
        commands: &mut Commands<'_>,
    ) -> Result<()> {
        for (number, buffer) in self.buffers.iter().enumerate() {
            let first = number * self.rows_each;
            let rows = self.rows_each.min(self.rows - first);
            let from = CopySide { buffer: &buffer.buffer, layout: self.layout(first), bytes: 4 };
            copy.of_rows(first, rows).launch(from, gpu, commands)?;
        }
        Ok(())
    }
}

/// Returns the rows of each buffer: all if they fit, else whole tiles; `None` if not even one tile
/// fits.
fn rows_per_buffer(rows: usize, row_bytes: u64, most: u64) -> Option<usize> {
    let fit = most / row_bytes.max(1);
    if rows as u64 <= fit {
        return Some(rows.max(1));
    }
    let tiles = annulus_core::index(fit) / TILE;
    (tiles > 0).then_some(tiles * TILE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_divided_at_tiles_only_if_they_must_be() {
        assert_eq!(rows_per_buffer(100, 10, 1000), Some(100));
        assert_eq!(rows_per_buffer(101, 10, 1000), Some(96));
        assert_eq!(rows_per_buffer(101, 10, 319), None);
        assert_eq!(rows_per_buffer(0, 10, 5), Some(1));
        assert_eq!(rows_per_buffer(3, 0, 5), Some(3));
        // 131 072 rows × 32 heads × 128 in f32 are one byte more than wgpu's cap on most devices
        let row = 32 * 128 * 4;
        assert_eq!(rows_per_buffer(131_072, row, i32::MAX as u64), Some(131_040));
    }
}
