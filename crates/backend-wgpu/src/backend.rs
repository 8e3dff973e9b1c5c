//! Implementation of [`Backend`]: capabilities and memory.

use std::{
    ops::{ControlFlow, Range},
    slice,
};

use annulus_core::{
    Backend, Capabilities, DType, Error, OnHost, Passes, RankShard, Result, Spec, index, memory,
};

use crate::{
    device::Gpu,
    kernels::TILE,
    memory::{GpuBuffer, Queued, WgpuSpace},
    staged::Copier,
    workspace::{WgpuWorkspace, matrices},
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
            return Err(Error::unsupported("f64", "wgpu"));
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
