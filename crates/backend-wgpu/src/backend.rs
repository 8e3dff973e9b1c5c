//! Implementation of [`Backend`]: capabilities and memory.
//!
//! Device state of one rank across the ring.

use std::{
    ops::{ControlFlow, Range},
    slice,
};

use annulus_core::{
    Backend, BackwardInputs, BackwardMode, Capabilities, DType, Error, Inputs, OnHost, Passes,
    RankShard, Result, Spec, Tick, View, Workspace, index, memory,
};

use crate::{
    block_mask::ChunkMask,
    choice::Matrices,
    chunks::ProblemSize,
    copy::ElementStrides,
    device::Gpu,
    kernels::{Epilogue, Storage, TILE, TileVariant},
    launch::Arena,
    memory::{GpuBuffer, Queued, WgpuSpace},
    operands::{Operand, Operands, RowsOf, TileKernel, bias, records},
    pass_context::{BackwardBuffers, ForwardBuffers, RankKernels, RowBuffers},
    passes::{WgpuBackward, WgpuForward},
    staged::Copier,
};

/// Attention backend on a [`Gpu`].
#[derive(Debug, Clone)]
pub struct Wgpu {
    gpu: Gpu,
}

impl Wgpu {
    /// Largest supported head or value dim.
    pub const MAX_DIM: usize = 256;

    /// Creates a backend on this device. Several ranks may share a device.
    pub const fn new(gpu: Gpu) -> Self {
        Self { gpu }
    }

    /// Creates a backend on this device for tensors in host memory. Inputs are uploaded when a pass
    /// starts, outputs are downloaded when it finishes; blocks stay on the device.
    pub fn on_host(gpu: Gpu) -> OnHost<Self> {
        OnHost::new(Self::new(gpu.clone()), gpu)
    }

    /// Device of the backend.
    pub const fn gpu(&self) -> &Gpu {
        &self.gpu
    }
}

impl Backend for Wgpu {
    type Space = WgpuSpace;
    type Workspace = WgpuWorkspace;

    /// Supports everything but f64 and dims above [`Wgpu::MAX_DIM`]. Products of f32 and bf16
    /// inputs are true f32 for every [`Spec::precision`]. Those of f16 inputs depend on the level
    /// only, as on CUDA: at [`crate::Level::Matrix`] probabilities and score gradients are rounded
    /// to f16, also for [`annulus_core::Precision::Highest`], the default.
    ///
    /// `probs_dtype` is f16 where probabilities are multiplied on cooperative matrices: a rank at
    /// [`crate::Level::Matrix`] and one below it are refused, instead of rounding differently.
    ///
    /// # Errors
    /// [`Error::Unsupported`], and as [`Spec::validate`].
    fn capabilities(&self, spec: &Spec) -> Result<Capabilities> {
        spec.validate()?;
        if spec.dtype == DType::F64 {
            return Err(Error::unsupported("dtype f64", "wgpu"));
        }
        for (name, dim) in [("head_dim", spec.dims.head_dim), ("value_dim", spec.dims.value_dim)] {
            if dim > Self::MAX_DIM {
                return Err(Error::unsupported(
                    format!("{name} {dim} (at most {})", Self::MAX_DIM),
                    "wgpu",
                ));
            }
        }
        Ok(Capabilities {
            name: "wgpu",
            numerics_id: format!("wgpu {} {}", self.gpu.name(), self.gpu.level().name()),
            probs_dtype: matrices(&self.gpu, spec).map(|_| DType::F16),
            kv_tile: TILE as u64,
            reproducible: false,
            out_residual: false,
            second_derivatives: false,
            bias_table: false,
            statistics: false,
        })
    }

    fn allocate(&self, bytes: u64) -> Result<GpuBuffer> {
        GpuBuffer::new(&self.gpu, "block", bytes)
    }

    fn write_block(
        &self,
        into: &mut GpuBuffer,
        bytes: Range<u64>,
        fill: &mut dyn FnMut(&mut [u8]) -> Result<()>,
    ) -> Result<Queued> {
        let mut filled =
            memory::zeroed("a write to a block", index(bytes.end.saturating_sub(bytes.start)))?;
        fill(&mut filled)?;
        // rows that are appended to a cache, or one round's results: few pieces, whose waits end
        // with the parts in the queue, so there is no need of a tick
        let tick = &mut || ControlFlow::Continue(());
        Copier::new(self.gpu.clone()).write(into, slice::from_ref(&bytes), &filled, tick)?;
        Ok(Queued)
    }

    fn workspace(&self, shard: &RankShard, passes: Passes) -> Result<WgpuWorkspace> {
        WgpuWorkspace::new(&self.gpu, shard, passes)
    }
}

/// Workspace on the device: softmax statistics, accumulators, gradients in f32, and scratch for
/// block masks. It keeps a handle of the device, so its passes need no backend.
#[derive(Debug)]
pub struct WgpuWorkspace {
    kernels: RankKernels,
    forward: ForwardBuffers,
    /// `None` in a workspace for [`Passes::Forward`].
    backward: Option<BackwardBuffers>,
}

impl WgpuWorkspace {
    pub(crate) fn new(gpu: &Gpu, shard: &RankShard, passes: Passes) -> Result<Self> {
        let spec = &shard.spec;
        let dims = &spec.dims;
        let storage =
            Storage::of(spec.dtype).ok_or_else(|| Error::unsupported("dtype f64", "wgpu"))?;
        let tile = tile_variant(gpu, spec, storage)?;
        let vectors = (dims.batch * shard.queries.len() * dims.q_heads) as u64;
        // row kernels bind their statistics whole
        if vectors * 16 > gpu.chunk_limits().binding_bytes {
            return Err(Error::unsupported(
                format!("{vectors} rows of queries and heads on one rank"),
                gpu.name(),
            ));
        }
        check_fits(gpu, spec, storage, passes)?;
        let floats = |label, count: u64| GpuBuffer::new(gpu, label, count * 4);
        let of_queries = |label, dim| {
            RowBuffers::new(gpu, label, [dims.batch, shard.queries.len(), dims.q_heads, dim])
        };
        let backward = if passes == Passes::Both {
            let bias = spec.bias.map(|[batches, heads, queries, keys]| {
                let rows = if keys == 1 || queries != 1 { shard.queries.len() } else { 1 };
                floats("dbias", (batches * heads * rows * keys) as u64)
            });
            Some(BackwardBuffers {
                dq: of_queries("dq", dims.head_dim)?,
                statistics: floats("row statistics", vectors * 4)?,
                bias: bias.transpose()?,
            })
        } else {
            None
        };
        Ok(Self {
            kernels: RankKernels {
                gpu: gpu.clone(),
                shard: shard.clone(),
                tile,
                arena: Arena::default(),
                block_mask: ChunkMask::default(),
            },
            forward: ForwardBuffers {
                acc: of_queries("acc", dims.value_dim)?,
                softmax_statistics: floats("running softmax", vectors * 4)?,
            },
            backward,
        })
    }
}

impl Workspace for WgpuWorkspace {
    type Space = WgpuSpace;
    type Forward<'p> = WgpuForward<'p>;
    type Backward<'p> = WgpuBackward<'p>;

    /// Keeps all memory if the numbers of rows stay the same; else allocates a new workspace.
    fn update(&mut self, shard: &RankShard) -> Result<()> {
        let RankKernels { gpu, shard: old, .. } = &mut self.kernels;
        if old.queries.len() == shard.queries.len() && old.keys.len() == shard.keys.len() {
            *old = shard.clone();
        } else {
            let passes = if self.backward.is_some() { Passes::Both } else { Passes::Forward };
            *self = Self::new(gpu, shard, passes)?;
        }
        Ok(())
    }

    fn bytes(&self) -> u64 {
        let Self { kernels, forward, backward } = self;
        let backward = backward.as_ref().map_or(0, BackwardBuffers::bytes);
        forward.bytes() + backward + kernels.arena.bytes()
    }

    fn forward<'p>(
        &'p mut self,
        inputs: Inputs<View<'p, WgpuSpace>>,
        _: Tick<'_>,
    ) -> Result<WgpuForward<'p>> {
        WgpuForward::start(&mut self.kernels, &self.forward, inputs)
    }

    /// Both modes are the same kernels: the ring decides which of them it calls.
    fn backward<'p>(
        &'p mut self,
        inputs: BackwardInputs<View<'p, WgpuSpace>>,
        _: BackwardMode,
        _: Tick<'_>,
    ) -> Result<WgpuBackward<'p>> {
        let Some(state) = &self.backward else {
            return Err(Error::internal("a backward pass on a workspace for forward only"));
        };
        WgpuBackward::start(&mut self.kernels, state, inputs)
    }
}

/// Selects the kernels of a spec.
fn tile_variant(gpu: &Gpu, spec: &Spec, storage: Storage) -> Result<TileVariant> {
    Ok(TileVariant {
        storage,
        unpacks: storage == Storage::F16 && gpu.unpacks()?,
        // each launch decides, by the layouts of its operands
        aligned: false,
        head_groups: TileVariant::groups(spec.dims.head_dim),
        value_groups: TileVariant::groups(spec.dims.value_dim),
        epilogue: Epilogue::of(spec),
        has_u64: gpu.device().features().contains(wgpu::Features::SHADER_INT64),
        decodes: false,
        register_tile: gpu.register_tile(),
        level: gpu.level(),
        matrices: matrices(gpu, spec),
        // each launch decides, by the shape of its chunk
        tall: false,
    })
}

/// Returns the cooperative matrices for products of this spec, if any.
pub(crate) fn matrices(gpu: &Gpu, spec: &Spec) -> Option<Matrices> {
    // the gradient of an unnormalized output needs the row maximum bit for bit, so all of its
    // scores are computed by multiply-adds
    gpu.matrices().filter(|_| spec.dtype == DType::F16 && spec.normalize)
}

/// Checks that at least one tile of every pass fits the device's bindings.
fn check_fits(gpu: &Gpu, spec: &Spec, storage: Storage, passes: Passes) -> Result<()> {
    let dims = &spec.dims;
    let queries = |dim, bytes| {
        let layout = ElementStrides::dense(dims.q_len, dims.q_heads, dim);
        Some(Operand { buffer: None, layout, dim, bytes, rows: RowsOf::Queries, first_row: 0 })
    };
    let record = spec.kv_row_layout();
    let gradient = spec.gradient_row_layout();
    let keys = |record, field, bytes| Some(records(None, record, field, bytes, RowsOf::Keys));
    let bytes = storage.bytes();
    let operands = Operands {
        q: queries(dims.head_dim, bytes),
        k: keys(&record, 0, bytes),
        v: keys(&record, 1, bytes),
        dout: queries(dims.value_dim, bytes),
        statistics: queries(4, 4),
        acc: queries(dims.value_dim.max(dims.head_dim), 4),
        dv: None,
        bias: spec.bias.map(|shape| bias(None, shape, dims.q_len)),
        dbias: None,
    };
    let size = ProblemSize {
        queries: dims.q_len,
        keys: dims.kv_len,
        per_batch: false,
        per_head: false,
        queries_each: usize::MAX,
    };
    operands.cut(gpu.chunk_limits(), spec, TileKernel::Forward, size)?;
    if passes == Passes::Both {
        operands.cut(gpu.chunk_limits(), spec, TileKernel::Queries, size)?;
        let operands =
            Operands { acc: keys(&gradient, 0, 4), dv: keys(&gradient, 1, 4), ..operands };
        let kind = TileKernel::Keys { from_records: false };
        operands.cut(gpu.chunk_limits(), spec, kind, size)?;
    }
    Ok(())
}
