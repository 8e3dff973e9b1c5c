//! One tensor of a member's heads.

use annulus_core::{DType, Host, HostBuffer, HostView, HostViewMut, Result, Space, index};
use annulus_plan::HeadField;

use super::exchange::count_bytes;

/// A dense tensor `[batch, rows, heads, elements]`.
pub(super) struct ShardTensor {
    buffer: HostBuffer,
    dtype: DType,
    shape: [usize; 4],
}

impl ShardTensor {
    pub(super) fn new(field: &HeadField, rows: u64, heads: usize) -> Result<Self> {
        Self::with_shape([field.batch, index(rows), heads, field.dim], field.dtype)
    }

    pub(super) fn with_shape(shape: [usize; 4], dtype: DType) -> Result<Self> {
        let lengths = shape.into_iter().chain([dtype.bytes()]);
        let bytes = lengths.fold(1, |bytes: u128, len| bytes * len as u128);
        let buffer = HostBuffer::zeroed(count_bytes(bytes))?;
        Ok(Self { buffer, dtype, shape })
    }

    pub(super) fn view(&self) -> Result<HostView<'_>> {
        HostView::of_bytes(self.buffer.bytes(), self.dtype, self.shape)
    }

    pub(super) fn view_mut(&mut self) -> Result<HostViewMut<'_>> {
        let bytes = self.buffer.bytes_mut().unwrap_or_default();
        HostViewMut::of_bytes(bytes, self.dtype, self.shape)
    }

    /// Returns the tensor as `[batch, heads, rows, elements]`, as a pass takes statistics and bias.
    pub(super) fn heads_first(&self) -> Result<HostView<'_>> {
        self.view().map(HostView::swap_rows_and_heads)
    }

    /// As [`ShardTensor::heads_first`], for writing.
    pub(super) fn heads_first_mut(&mut self) -> Result<HostViewMut<'_>> {
        self.view_mut().map(HostViewMut::swap_rows_and_heads)
    }

    pub(super) fn bytes(&self) -> u64 {
        Host::size(&self.buffer)
    }
}
