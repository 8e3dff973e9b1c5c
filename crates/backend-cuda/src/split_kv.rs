//! Split-KV decoding: with few queries, ranges of the keys of a query tile are thread blocks of
//! their own, because a GPU would otherwise be mostly idle. Kernel: `kernels/merge_splits.cuh`.
//!
//! ```text
//! for each range s of the list of a query tile, in parallel:  (m_s, ℓ_s, O_s) of its keys
//! for each row, in parallel:                     (m, ℓ, O) ← merge of (m, ℓ, O) and all s
//! ```
//! The number of ranges depends on shapes and masks, not on the multiprocessors of the device, so
//! that the order of sums is the same on every GPU.
//!
//! Source: Flash-Decoding (Dao et al. 2023).

use annulus_core::Result;
use annulus_device_cuda::{CudaBuffer, Device};

use crate::{
    arguments::{Attention, Merge, StateAddresses},
    kernels::THREADS,
    pass_context::PassContext,
};

/// Device memory of the partial results of all ranges: accumulators, then maxima, sums and ties,
/// each range after range.
#[derive(Debug)]
pub(crate) struct PartialResults {
    buffer: CudaBuffer,
}

impl PartialResults {
    /// Allocates `bytes` bytes ([`crate::state::Sizes::partial_bytes`]).
    pub(crate) fn new(device: &Device, bytes: u64) -> Result<Self> {
        Ok(Self { buffer: CudaBuffer::new(device, bytes)? })
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.buffer.len()
    }

    /// Addresses for `ranges` ranges.
    fn addresses(&self, context: &PassContext, ranges: usize) -> StateAddresses {
        let dims = &context.spec().dims;
        let sums = context.sums().bytes();
        let rows = (ranges * dims.batch * dims.q_heads * context.queries() * sums) as u64;
        let acc = self.buffer.address();
        let max = acc + rows * dims.value_dim as u64;
        StateAddresses { acc, max, sum: max + rows, ties: max + 2 * rows }
    }

    /// Makes a forward kernel write the partial results of `ranges` ranges.
    pub(crate) fn write_to(&self, context: &PassContext, ranges: usize, arguments: &mut Attention) {
        arguments.set_state(self.addresses(context, ranges));
    }

    /// Queues the merge of `ranges` ranges into the state, or with
    /// [`crate::arguments::WRITE_OUTPUTS`] into the outputs of `arguments`.
    pub(crate) fn merge(
        &self,
        context: &PassContext,
        ranges: usize,
        arguments: &Attention,
        state: StateAddresses,
    ) -> Result<()> {
        let Attention { batches, queries, q_heads, value_dim, .. } = *arguments;
        let merge = Merge {
            state,
            partial: self.addresses(context, ranges),
            out: arguments.out,
            of_rows: arguments.of_rows,
            batches,
            queries,
            q_heads,
            value_dim,
            splits: arguments.block_mask.splits,
            flags: arguments.flags,
        };
        let rows = u64::from(batches) * u64::from(queries) * u64::from(q_heads);
        let kernel = &context.kernels.merge_splits;
        // SAFETY: the engine has validated the outputs' shapes, and the partial results and the
        // state have these rows; memory is freed only after queued work.
        unsafe { kernel.launch(&context.stream, [rows, 1, 1], THREADS, &merge) }
    }
}
