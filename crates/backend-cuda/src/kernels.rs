//! Kernels that are loaded on a device.

use std::sync::Arc;

use annulus_core::{Result, Spec};
use annulus_device_cuda::{Compiler, Device, Kernel, Module};

use crate::{
    Level,
    programs::{SourceEdit, compile},
    variant::{DECODE_KERNEL, MATRIX_KERNELS, SPLIT_KERNEL, Variant, WARPGROUP_BACKWARD_KERNELS},
};

/// Threads per block of the general kernels, except those on tensor cores; `THREADS` of
/// `kernels/primitives.cuh`.
pub(crate) const THREADS: u32 = 256;

/// Upper bound of the grid of grid-stride kernels: 31 blocks for each of the 132
/// multiprocessors of an H100.
pub(crate) const MAX_BLOCKS: u64 = 4096;

/// Grid for `elements` elements.
pub(crate) fn grid_of(elements: u64) -> [u64; 3] {
    [elements.div_ceil(u64::from(THREADS)).min(MAX_BLOCKS), 1, 1]
}

/// Loaded kernels of one variant on one device.
#[derive(Debug, Clone)]
pub(crate) struct Kernels {
    pub(crate) variant: Variant,
    pub(crate) forward: Kernel,
    /// Present if [`Variant::has_matrix`].
    pub(crate) matrix: Option<MatrixKernels>,
    /// Present at [`Level::Warpgroup`], if [`Variant::on_warpgroups`] serves the spec.
    pub(crate) warpgroup: Option<WarpgroupKernels>,
    /// Likewise, for [`Variant::backward_on_warpgroups`].
    pub(crate) backward_warpgroup: Option<Arc<BackwardWarpgroupKernels>>,
    pub(crate) finish_forward: Kernel,
    pub(crate) merge_splits: Kernel,
    pub(crate) begin_backward: Kernel,
    pub(crate) backward_queries: Kernel,
    pub(crate) backward_keys: Kernel,
    pub(crate) bias_gradient: Kernel,
    pub(crate) sink_gradient: Kernel,
    pub(crate) copy_elements: Kernel,
    pub(crate) round_sums: Kernel,
    pub(crate) copy_sums: Kernel,
    pub(crate) copy_statistics: Kernel,
    pub(crate) fill_sums: Kernel,
    pub(crate) combine_records: Kernel,
    /// Used by transports: see [`Device::set_range_copy`].
    pub(crate) copy_ranges: Kernel,
}

/// Kernels on tensor cores, for normalized outputs. The gradient of an unnormalized output flows
/// through the row maximum, which backward finds only if its scores equal those of forward bit for
/// bit.
#[derive(Debug, Clone)]
pub(crate) struct MatrixKernels {
    forward: Kernel,
    /// Forward of several ranges of keys, if not `forward`: see [`Variant::matrix_stages`].
    forward_split: Option<Kernel>,
    /// Forward of few rows: see [`crate::forward_tiles::ForwardTiles::has_few_rows`].
    forward_decode: Kernel,
    pub(crate) backward_queries: Kernel,
    pub(crate) backward_keys: Kernel,
}

/// Kernels on warpgroups.
#[derive(Debug, Clone)]
pub(crate) struct WarpgroupKernels {
    pub(crate) variant: Variant,
    pub(crate) forward: Kernel,
    /// Threads per block.
    pub(crate) threads: u32,
    /// Most blocks of a launch, which fetch tiles until all are computed.
    pub(crate) blocks: usize,
    /// Fewest rows for which they are used: see [`crate::Cuda::MIN_WARPGROUP_ROWS`].
    min_rows: usize,
}

impl WarpgroupKernels {
    /// Compiles and loads the kernels.
    pub(crate) fn new(
        device: &Device,
        compiler: &Compiler,
        variant: Variant,
        blocks: usize,
        min_rows: usize,
        edit: Option<SourceEdit>,
    ) -> Result<Self> {
        let module = load(device, compiler, variant, edit)?;
        let name = variant.forward_on_warpgroups();
        Ok(Self {
            variant,
            forward: module.kernel(name)?.with_shared(variant.dynamic_shared_bytes(name))?,
            threads: variant.warpgroup_threads(),
            blocks,
            min_rows,
        })
    }

    /// True if they serve `queries` queries of `heads` query heads that may share a tile faster
    /// than level matrix: fewer rows leave most of a tile empty (estimated, not measured).
    const fn are_filled_by(&self, queries: usize, heads: usize) -> bool {
        queries * heads >= self.min_rows
    }
}

/// Backward kernels on warpgroups.
#[derive(Debug)]
pub(crate) struct BackwardWarpgroupKernels {
    pub(crate) variant: Variant,
    pub(crate) statistics: Kernel,
    /// Without and with a score epilogue.
    pub(crate) queries: [Kernel; 2],
    pub(crate) keys: [Kernel; 2],
    /// Fewest queries for which they are used: see [`crate::Cuda::MIN_WARPGROUP_ROWS`].
    min_rows: usize,
}

impl BackwardWarpgroupKernels {
    /// Threads per block: one producer warpgroup, two consumers.
    pub(crate) const THREADS: u32 = 384;

    /// Compiles and loads the kernels.
    pub(crate) fn new(
        device: &Device,
        compiler: &Compiler,
        variant: Variant,
        min_rows: usize,
        edit: Option<SourceEdit>,
    ) -> Result<Self> {
        let module = load(device, compiler, variant, edit)?;
        let [statistics, queries, queries_epilogue, keys, keys_epilogue] =
            WARPGROUP_BACKWARD_KERNELS
                .map(|name| module.kernel(name)?.with_shared(variant.dynamic_shared_bytes(name)));
        Ok(Self {
            variant,
            statistics: statistics?,
            queries: [queries?, queries_epilogue?],
            keys: [keys?, keys_epilogue?],
            min_rows,
        })
    }
}

fn load(
    device: &Device,
    compiler: &Compiler,
    variant: Variant,
    edit: Option<SourceEdit>,
) -> Result<Module> {
    let (kind, target) = compiler.target(device.architecture())?;
    Module::load(device, &compile(compiler, variant, edit, kind, &target)?)
}

impl MatrixKernels {
    /// Threads per block; `FORWARD_THREADS` of `kernels/forward_matrix.cuh`, `BACKWARD_THREADS` of
    /// `kernels/backward_matrix.cuh`.
    pub(crate) const THREADS: u32 = 128;

    fn new(module: &Module, variant: Variant) -> Result<Self> {
        let kernel = |name| module.kernel(name)?.with_shared(variant.dynamic_shared_bytes(name));
        let [forward, backward_queries, backward_keys] = MATRIX_KERNELS.map(kernel);
        Ok(Self {
            forward: forward?,
            forward_split: variant.has_split_kernel().then(|| kernel(SPLIT_KERNEL)).transpose()?,
            forward_decode: kernel(DECODE_KERNEL)?,
            backward_queries: backward_queries?,
            backward_keys: backward_keys?,
        })
    }

    /// Returns the forward kernel for tiles of few rows or many, with `ranges` ranges of keys.
    pub(crate) fn forward(&self, has_few_rows: bool, ranges: u32) -> &Kernel {
        if has_few_rows {
            return &self.forward_decode;
        }
        self.forward_split.as_ref().filter(|_| ranges > 1).unwrap_or(&self.forward)
    }
}

impl Kernels {
    /// Returns the warpgroup kernels if they serve a forward pass over `queries` queries of
    /// `heads` query heads that may share a tile.
    pub(crate) fn warpgroup_for(&self, queries: usize, heads: usize) -> Option<&WarpgroupKernels> {
        self.warpgroup.as_ref().filter(|kernels| kernels.are_filled_by(queries, heads))
    }

    /// Returns the backward kernels on warpgroups if they serve a pass over `queries` queries of
    /// each head: fewer than a tile would leave most of its rows empty.
    pub(crate) fn backward_warpgroup_for(
        &self,
        queries: usize,
    ) -> Option<Arc<BackwardWarpgroupKernels>> {
        self.backward_warpgroup.clone().filter(|kernels| queries >= kernels.min_rows.max(1))
    }

    /// Returns the tensor-core kernels if they serve this spec.
    pub(crate) fn matrix_for(&self, spec: &Spec) -> Option<&MatrixKernels> {
        self.matrix.as_ref().filter(|_| spec.normalize)
    }

    /// Compiles and loads the general kernels. [`Level::Plain`] omits those on tensor cores.
    pub(crate) fn new(
        device: &Device,
        compiler: &Compiler,
        variant: Variant,
        level: Level,
        edit: Option<SourceEdit>,
    ) -> Result<Self> {
        let module = load(device, compiler, variant, edit)?;
        let has_matrix = variant.has_matrix() && level >= Level::Matrix;
        Ok(Self {
            variant,
            warpgroup: None,
            backward_warpgroup: None,
            forward: module.kernel("forward")?,
            matrix: has_matrix.then(|| MatrixKernels::new(&module, variant)).transpose()?,
            finish_forward: module.kernel("finish_forward")?,
            merge_splits: module.kernel("merge_splits")?,
            begin_backward: module.kernel("begin_backward")?,
            backward_queries: module.kernel("backward_queries")?,
            backward_keys: module.kernel("backward_keys")?,
            bias_gradient: module.kernel("bias_gradient")?,
            sink_gradient: module.kernel("sink_gradient")?,
            copy_elements: module.kernel("copy_elements")?,
            round_sums: module.kernel("round_sums")?,
            copy_sums: module.kernel("copy_sums")?,
            copy_statistics: module.kernel("copy_statistics")?,
            fill_sums: module.kernel("fill_sums")?,
            combine_records: module.kernel("combine_records")?,
            copy_ranges: module.kernel("copy_ranges")?,
        })
    }
}
