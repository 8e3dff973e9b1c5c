//! Kernel arguments: mirrors `kernels/arguments.cuh` field by field.
//!
//! Tensor maps of the operands and outputs of the warpgroup kernels, for TMA.

use annulus_core::{DType, Dims, Outputs, Result, RowLayout, ViewMut};
use annulus_device_cuda::{CudaSpace, CudaView, CudaViewMut, Device, TensorMap};

/// Address and strides of a tensor `[batch, row, head, dim]`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct TensorArgument {
    pub(crate) at: u64,
    /// Batch, row, head, dim; in elements, or in 2-byte units for statistics.
    pub(crate) strides: [i64; 4],
}

/// Device addresses of a [`crate::block_mask::BlockMask`].
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct BlockMaskAddresses {
    pub(crate) starts: u64,
    pub(crate) runs: u64,
    pub(crate) bits: u64,
    /// Lists of a plane: tiles × splits.
    pub(crate) lists: u32,
    pub(crate) per_batch: u32,
    pub(crate) per_head: u32,
    /// Ranges of keys per tile: see [`crate::forward_tiles`].
    pub(crate) splits: u32,
}

pub(crate) const HAS_BIAS: u32 = 1;
pub(crate) const HAS_CAP: u32 = 2;
pub(crate) const BIAS_BEFORE_CAP: u32 = 4;
pub(crate) const HAS_DROPOUT: u32 = 8;
pub(crate) const UNNORMALIZED: u32 = 16;
pub(crate) const HAS_SLOPES: u32 = 32;
pub(crate) const ADD: u32 = 64;
pub(crate) const QUERY_POSITIONS_PER_BATCH: u32 = 128;
pub(crate) const KEY_POSITIONS_PER_BATCH: u32 = 256;
pub(crate) const EMPTY_STATE: u32 = 512;
pub(crate) const WRITE_OUTPUTS: u32 = 1024;
pub(crate) const PARTIAL: u32 = 2048;

/// Arguments of the tile kernels: this rank's queries and one block of keys.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct AttentionArguments {
    pub(crate) q: TensorArgument,
    pub(crate) k: TensorArgument,
    pub(crate) v: TensorArgument,
    pub(crate) bias: TensorArgument,
    pub(crate) dout: TensorArgument,
    pub(crate) dk: TensorArgument,
    pub(crate) dv: TensorArgument,
    pub(crate) statistics: TensorArgument,
    pub(crate) acc: u64,
    pub(crate) dq: u64,
    pub(crate) max: u64,
    pub(crate) sum: u64,
    pub(crate) ties: u64,
    pub(crate) dbias: u64,
    pub(crate) block_mask: BlockMaskAddresses,
    pub(crate) query_rows: u64,
    pub(crate) key_rows: u64,
    pub(crate) query_positions: u64,
    pub(crate) key_positions: u64,
    pub(crate) slopes: u64,
    pub(crate) scale: f64,
    pub(crate) cap: f64,
    pub(crate) keep_scale: f64,
    pub(crate) queries: u32,
    pub(crate) keys: u32,
    pub(crate) batches: u32,
    pub(crate) q_heads: u32,
    pub(crate) kv_heads: u32,
    pub(crate) head_dim: u32,
    pub(crate) value_dim: u32,
    pub(crate) flags: u32,
    pub(crate) rounding: u32,
    pub(crate) dropout_key: [u32; 2],
    pub(crate) dropout_threshold: u32,
    /// [`annulus_core::Spec::whole_head`].
    pub(crate) dropout_first_head: u32,
    pub(crate) dropout_q_heads: u32,
    /// Batch, heads, rows, keys.
    pub(crate) bias_shape: [u32; 4],
    /// GQA packing: see [`crate::forward_tiles`].
    pub(crate) packed_heads: u32,
    pub(crate) packed_reciprocal: u32,
    /// With [`WRITE_OUTPUTS`].
    pub(crate) out: TensorArgument,
    pub(crate) of_rows: RowOutputs,
}

/// Outputs of a forward pass for every row.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct RowOutputs {
    pub(crate) lse: TensorArgument,
    /// Without an address if they are not wanted.
    pub(crate) max: TensorArgument,
    pub(crate) sum: TensorArgument,
}

impl RowOutputs {
    /// Describes those of `outputs`.
    pub(crate) fn new(outputs: &Outputs<ViewMut<'_, CudaSpace>>) -> Self {
        let rows = |view: &CudaViewMut<'_>| by_head(tensor_mut(view));
        Self {
            lse: rows(&outputs.lse),
            max: outputs.max.as_ref().map(rows).unwrap_or_default(),
            sum: outputs.sum.as_ref().map(rows).unwrap_or_default(),
        }
    }
}

/// Arguments of the warpgroup kernels: `kernels/warpgroup.cuh`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct WarpgroupAttention {
    pub(crate) k_map: TensorMap,
    pub(crate) v_map: TensorMap,
    pub(crate) out_map: TensorMap,
    pub(crate) attention: AttentionArguments,
    /// Of the tile scheduler: `kernels/forward_scheduler.cuh`.
    pub(crate) order: u64,
    pub(crate) counter: u64,
    pub(crate) tiles: u32,
    pub(crate) section: u32,
    /// 1 if outputs are written through `out_map`.
    pub(crate) stores_by_tma: u32,
    pub(crate) reserved: u32,
}

// as asserted in `kernels/warpgroup.cuh`
const _: () =
    assert!(size_of::<AttentionArguments>() == 712 && size_of::<WarpgroupAttention>() == 1152);

/// Arguments of the backward kernels on warpgroups: `kernels/backward_warpgroup.cuh`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct BackwardAttention {
    /// Of the streamed operands: K and V, or Q and dO.
    pub(crate) maps: [TensorMap; 2],
    pub(crate) attention: AttentionArguments,
    /// `StatisticsTile` of every 64 queries.
    pub(crate) statistics: u64,
    pub(crate) statistics_tiles: u32,
    /// Heads in a section of own tiles.
    pub(crate) section: u32,
}

// as asserted in `kernels/backward_warpgroup.cuh`
const _: () = assert!(size_of::<BackwardAttention>() == 1024);

/// Arguments of the kernels that process one query row without its keys.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct RowArguments {
    pub(crate) out: TensorArgument,
    pub(crate) dout: TensorArgument,
    pub(crate) lse: TensorArgument,
    pub(crate) max: TensorArgument,
    pub(crate) sum: TensorArgument,
    pub(crate) ties: TensorArgument,
    pub(crate) dlse: TensorArgument,
    pub(crate) sinks: TensorArgument,
    pub(crate) dsinks: TensorArgument,
    pub(crate) statistics: TensorArgument,
    pub(crate) acc: u64,
    pub(crate) row_max: u64,
    pub(crate) row_sum: u64,
    pub(crate) row_ties: u64,
    pub(crate) queries: u32,
    pub(crate) batches: u32,
    pub(crate) q_heads: u32,
    pub(crate) value_dim: u32,
    pub(crate) sinks_count: u32,
    pub(crate) sinks_lines: u32,
    pub(crate) flags: u32,
    pub(crate) reserved: u32,
}

/// Copies one tensor to another of the same shape.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct CopyArguments {
    pub(crate) from: TensorArgument,
    pub(crate) to: TensorArgument,
    /// Batch, rows, heads, dim.
    pub(crate) shape: [u32; 4],
}

/// Writes one value to `count` sums.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Fill {
    pub(crate) at: u64,
    pub(crate) count: u64,
    pub(crate) value: f64,
}

/// Copies or adds ranges of gradient records.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Combine {
    pub(crate) to: u64,
    pub(crate) from: u64,
    pub(crate) ranges: u64,
    pub(crate) record_sums: u64,
    pub(crate) add: u32,
    pub(crate) reserved: u32,
}

/// Merges the partial results of ranges of keys.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Merge {
    pub(crate) state: StateAddresses,
    pub(crate) partial: StateAddresses,
    pub(crate) out: TensorArgument,
    pub(crate) of_rows: RowOutputs,
    pub(crate) batches: u32,
    pub(crate) queries: u32,
    pub(crate) q_heads: u32,
    pub(crate) value_dim: u32,
    pub(crate) splits: u32,
    pub(crate) flags: u32,
}

/// Addresses of accumulators and softmax statistics.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct StateAddresses {
    pub(crate) acc: u64,
    pub(crate) max: u64,
    pub(crate) sum: u64,
    pub(crate) ties: u64,
}

impl RowArguments {
    /// Number of rows.
    pub(crate) fn rows(&self) -> u64 {
        u64::from(self.batches) * u64::from(self.queries) * u64::from(self.q_heads)
    }
}

impl AttentionArguments {
    /// Sets the accumulators and softmax statistics that a forward kernel reads and writes.
    pub(crate) const fn set_state(&mut self, state: StateAddresses) {
        let StateAddresses { acc, max, sum, ties } = state;
        (self.acc, self.max, self.sum, self.ties) = (acc, max, sum, ties);
    }
}

/// Describes a caller's tensor `[batch, row, head, dim]`; an axis of length 1 gets stride 0.
pub(crate) fn tensor(view: &CudaView<'_>) -> TensorArgument {
    let shape = view.shape();
    let strides = view.strides();
    let strides = std::array::from_fn(|axis| if shape[axis] == 1 { 0 } else { strides[axis] });
    TensorArgument { at: view.address(), strides }
}

/// As [`tensor`], for outputs.
pub(crate) fn tensor_mut(view: &CudaViewMut<'_>) -> TensorArgument {
    tensor(&view.view())
}

/// Permutes the strides of a caller's tensor `[batch, head, row, dim]`, such as lse and bias.
pub(crate) fn by_head(view: TensorArgument) -> TensorArgument {
    let [batch, head, row, dim] = view.strides;
    TensorArgument { strides: [batch, row, head, dim], ..view }
}

/// Describes a dense tensor `[batch, row, head, dim]`.
pub(crate) const fn dense(at: u64, rows: usize, heads: usize, dim: usize) -> TensorArgument {
    let rows = rows as i64;
    let heads = heads as i64;
    let dim = dim as i64;
    TensorArgument { at, strides: [rows * heads * dim, heads * dim, dim, 1] }
}

/// Describes field `field` of records at `at`, with strides in units of `unit` bytes.
pub(crate) fn field(at: u64, record: &RowLayout, field: usize, unit: usize) -> TensorArgument {
    let shape = record.fields()[field];
    let bytes = |elements: usize| (elements * shape.dtype.bytes() / unit) as i64;
    let row = (record.bytes() / unit as u64).cast_signed();
    let strides = [bytes(shape.heads * shape.dim), row, bytes(shape.dim), bytes(1)];
    TensorArgument { at: at + record.offset(field, 0, 0), strides }
}

/// Describes a workspace's row statistics, with strides in 2-byte units.
pub(crate) fn row_statistics(at: u64, rows: usize, dims: &Dims, sums: DType) -> TensorArgument {
    let unit = (sums.bytes() / 2) as i64;
    let TensorArgument { at, strides } =
        dense(at, rows, dims.q_heads, annulus_core::Spec::ROW_STATISTICS);
    TensorArgument { at, strides: strides.map(|stride| stride * unit) }
}

/// Bytes of an element: the warpgroup kernels serve 16-bit types only.
const ELEMENT: u64 = 2;

/// Stride of an axis of length 1, in bytes: TMA does not use it, but it must be a positive multiple
/// of 16.
const UNUSED_STRIDE: u64 = 16;

/// True if TMA can read or write a caller's tensor of 16-bit elements with `shape` rows, heads and
/// batch rows: contiguous dims, and rows, heads and batch rows at multiples of 16 bytes. An axis of
/// length 1 has stride 0 ([`crate::arguments`]).
pub(crate) fn is_tma_readable(tensor: &TensorArgument, shape: [u32; 3]) -> bool {
    let [batch, row, head, dim] = tensor.strides;
    let [rows, heads, batches] = shape;
    let fits = |stride: i64, length: u32| {
        length == 1 || (stride > 0 && stride % 8 == 0 && stride < 1 << 39)
    };
    (dim == 1 || dim == 0)
        && tensor.at.is_multiple_of(16)
        && fits(row, rows)
        && fits(head, heads)
        && fits(batch, batches)
}

/// Encodes the tensor map of a tensor with `shape` rows, heads and batch rows, in boxes of `rows`
/// rows.
pub(crate) fn tma_boxes(
    device: &Device,
    tensor: &TensorArgument,
    dim: u32,
    shape: [u32; 3],
    rows: u32,
) -> Result<TensorMap> {
    let [batch, row, head, _] = tensor.strides;
    let in_bytes = |stride: i64| match stride.cast_unsigned() * ELEMENT {
        0 => UNUSED_STRIDE,
        bytes => bytes,
    };
    let [rows_of, heads, batches] = shape.map(u64::from);
    let lengths = [u64::from(dim), rows_of, heads, batches];
    TensorMap::new(device, tensor.at, lengths, [row, head, batch].map(in_bytes), rows)
}
