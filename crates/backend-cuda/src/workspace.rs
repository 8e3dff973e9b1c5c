//! Device memory of one rank across the ring.

use annulus_core::{
    BackwardInputs, BackwardMode, Dims, Error, Inputs, Passes, RankShard, Result, Spec, Workspace,
};
use annulus_device_cuda::{CudaBuffer, CudaSpace, Device, Stream};

use crate::{
    backward::CudaBackward,
    forward::CudaForward,
    kernels::Kernels,
    pass_context::{PassContext, local_bias},
};

/// Softmax statistics, accumulators, gradients in the sums' type, and cached block masks.
#[derive(Debug)]
pub struct CudaWorkspace {
    context: PassContext,
    forward: ForwardState,
    /// Present in a workspace for [`Passes::Both`].
    backward: Option<BackwardState>,
}

/// Online softmax of every local query.
#[derive(Debug)]
pub(crate) struct ForwardState {
    /// `[b, local q_len, q_heads, value_dim]`.
    pub(crate) acc: CudaBuffer,
    /// `[b, q_heads, local q_len]`, like the two below.
    pub(crate) max: CudaBuffer,
    pub(crate) sum: CudaBuffer,
    pub(crate) ties: CudaBuffer,
}

/// State of the backward pass.
#[derive(Debug)]
pub(crate) struct BackwardState {
    /// `[b, local q_len, q_heads, 4]`.
    pub(crate) statistics: CudaBuffer,
    /// `[b, local q_len, q_heads, head_dim]`.
    pub(crate) dq: CudaBuffer,
    /// Shape of this rank's bias.
    pub(crate) dbias: Option<CudaBuffer>,
    /// RowLayout ranges of the last [`crate::records::reduce`].
    pub(crate) ranges: CudaBuffer,
}

impl CudaWorkspace {
    pub(crate) fn new(
        shard: &RankShard,
        passes: Passes,
        stream: &Stream,
        kernels: Kernels,
    ) -> Result<Self> {
        let context = PassContext::new(stream, kernels, shard)?;
        let sizes = Sizes::of(shard);
        let device = stream.device();
        let backward = match passes {
            Passes::Forward => None,
            Passes::Both => Some(BackwardState::new(&sizes, device)?),
        };
        Ok(Self { context, forward: ForwardState::new(&sizes, device)?, backward })
    }
}

impl ForwardState {
    fn new(sizes: &Sizes, device: &Device) -> Result<Self> {
        Ok(Self {
            acc: sizes.buffer(device, sizes.acc)?,
            max: sizes.buffer(device, sizes.rows)?,
            sum: sizes.buffer(device, sizes.rows)?,
            ties: sizes.buffer(device, sizes.rows)?,
        })
    }

    fn grow(&mut self, sizes: &Sizes, device: &Device) -> Result<()> {
        sizes.grow(device, &mut self.acc, sizes.acc)?;
        for rows in [&mut self.max, &mut self.sum, &mut self.ties] {
            sizes.grow(device, rows, sizes.rows)?;
        }
        Ok(())
    }
}

impl BackwardState {
    fn new(sizes: &Sizes, device: &Device) -> Result<Self> {
        Ok(Self {
            statistics: sizes.buffer(device, sizes.statistics)?,
            dq: sizes.buffer(device, sizes.dq)?,
            dbias: sizes.dbias.map(|sums| sizes.buffer(device, sums)).transpose()?,
            ranges: CudaBuffer::new(device, 0)?,
        })
    }

    fn grow(&mut self, sizes: &Sizes, device: &Device) -> Result<()> {
        sizes.grow(device, &mut self.statistics, sizes.statistics)?;
        sizes.grow(device, &mut self.dq, sizes.dq)?;
        match (&mut self.dbias, sizes.dbias) {
            (Some(dbias), Some(sums)) => sizes.grow(device, dbias, sums),
            _ => Ok(()),
        }
    }
}

impl Workspace for CudaWorkspace {
    type Space = CudaSpace;
    type Forward<'p> = CudaForward<'p>;
    type Backward<'p> = CudaBackward<'p>;

    /// Buffers that are large enough are kept.
    fn update(&mut self, shard: &RankShard) -> Result<()> {
        let sizes = Sizes::of(shard);
        let device = self.context.stream.device();
        self.forward.grow(&sizes, device)?;
        if let Some(state) = &mut self.backward {
            state.grow(&sizes, device)?;
        }
        self.context.update(shard);
        Ok(())
    }

    fn forward<'p>(&'p mut self, inputs: Inputs<'p, CudaSpace>) -> Result<CudaForward<'p>> {
        CudaForward::begin(&mut self.context, &self.forward, inputs)
    }

    fn backward<'p>(
        &'p mut self,
        inputs: BackwardInputs<'p, CudaSpace>,
        _: BackwardMode,
    ) -> Result<CudaBackward<'p>> {
        let state = self.backward.as_mut().ok_or_else(|| {
            Error::internal("a backward pass in a workspace allocated for forward passes only")
        })?;
        CudaBackward::begin(&mut self.context, state, inputs)
    }
}

/// Numbers of sums per buffer.
struct Sizes {
    sum_bytes: u64,
    rows: usize,
    acc: usize,
    statistics: usize,
    dq: usize,
    dbias: Option<usize>,
}

impl Sizes {
    fn of(shard: &RankShard) -> Self {
        let Dims { batch, q_heads, head_dim, value_dim, .. } = shard.spec.dims;
        let rows = batch * q_heads * shard.queries.len();
        Self {
            sum_bytes: shard.spec.dtype.accumulator().bytes() as u64,
            rows,
            acc: rows * value_dim,
            statistics: rows * Spec::ROW_STATISTICS,
            dq: rows * head_dim,
            dbias: local_bias(shard).map(|shape| shape.iter().product()),
        }
    }

    fn buffer(&self, device: &Device, sums: usize) -> Result<CudaBuffer> {
        CudaBuffer::new(device, sums as u64 * self.sum_bytes)
    }

    /// Replaces a buffer that is too small.
    fn grow(&self, device: &Device, buffer: &mut CudaBuffer, sums: usize) -> Result<()> {
        if buffer.len() < sums as u64 * self.sum_bytes {
            *buffer = self.buffer(device, sums)?;
        }
        Ok(())
    }
}
