//! Kernels: the files that each variant is compiled from, and those that are loaded on a device.

use std::{borrow::Cow, collections::HashMap, sync::Arc};

use annulus_core::{Error, Result};
use annulus_device_cuda::{
    Compiler, Device, Image, ImageKind, Kernel, KernelProgram, Module, Stream,
};

pub(crate) use crate::variant::THREADS;
use crate::variant::{Family, Variant};

/// Upper bound of the grid of grid-stride kernels: 31 blocks for each of the 132
/// multiprocessors of an H100.
pub(crate) const MAX_BLOCKS: u64 = 4096;

/// Grid for `elements` elements.
pub(crate) fn grid_of(elements: u64) -> [u64; 3] {
    [elements.div_ceil(u64::from(THREADS)).min(MAX_BLOCKS), 1, 1]
}

/// File name and text.
type Header = (&'static str, &'static str);

/// Headers of all programs.
const HEADERS: [Header; 7] = [
    ("primitives.cuh", include_str!("../kernels/primitives.cuh")),
    ("primitives_host.h", include_str!("../kernels/primitives_host.h")),
    ("numbers.cuh", include_str!("../kernels/numbers.cuh")),
    ("arguments.cuh", include_str!("../kernels/arguments.cuh")),
    ("dropout.cuh", include_str!("../kernels/dropout.cuh")),
    ("tile.cuh", include_str!("../kernels/tile.cuh")),
    ("forward_state.cuh", include_str!("../kernels/forward_state.cuh")),
];

/// Header of the two groups below.
const GRADIENT: Header = ("gradient.cuh", include_str!("../kernels/gradient.cuh"));

/// Headers of the kernels without matrix instructions.
const PLAIN_HEADERS: [Header; 6] = [
    ("forward.cuh", include_str!("../kernels/forward.cuh")),
    ("merge_splits.cuh", include_str!("../kernels/merge_splits.cuh")),
    ("backward.cuh", include_str!("../kernels/backward.cuh")),
    ("bias_gradient.cuh", include_str!("../kernels/bias_gradient.cuh")),
    ("rows.cuh", include_str!("../kernels/rows.cuh")),
    ("records.cuh", include_str!("../kernels/records.cuh")),
];

/// Headers of the kernels of matrix instructions, of either kind of GPU.
const MATRIX_HEADERS: [Header; 8] = [
    ("backward_pair.cuh", include_str!("../kernels/backward_pair.cuh")),
    ("chunk_stream.cuh", include_str!("../kernels/chunk_stream.cuh")),
    ("row_tiles.cuh", include_str!("../kernels/row_tiles.cuh")),
    ("forward_probs.cuh", include_str!("../kernels/forward_probs.cuh")),
    ("forward_matrix.cuh", include_str!("../kernels/forward_matrix.cuh")),
    ("backward_matrix.cuh", include_str!("../kernels/backward_matrix.cuh")),
    ("backward_queries_matrix.cuh", include_str!("../kernels/backward_queries_matrix.cuh")),
    ("backward_keys_matrix.cuh", include_str!("../kernels/backward_keys_matrix.cuh")),
];

/// Headers of AMD's GPUs: of all programs, and of matrix instructions.
const AMD_HEADERS: [Header; 2] = [
    ("primitives_amd.h", include_str!("../kernels/primitives_amd.h")),
    ("matrix_amd.cuh", include_str!("../kernels/matrix_amd.cuh")),
];

/// Further headers of [`Family::Warpgroup`] and [`Family::WarpgroupBackward`].
const WARPGROUP_HEADERS: [Header; 4] = [
    ("warpgroup_primitives.cuh", include_str!("../kernels/warpgroup_primitives.cuh")),
    ("warpgroup_host.h", include_str!("../kernels/warpgroup_host.h")),
    ("wgmma_host.h", include_str!("../kernels/wgmma_host.h")),
    ("warpgroup.cuh", include_str!("../kernels/warpgroup.cuh")),
];

/// Further headers of [`Family::Warpgroup`].
const WARPGROUP_FORWARD_HEADERS: [Header; 4] = [
    ("warpgroup_tile.cuh", include_str!("../kernels/warpgroup_tile.cuh")),
    ("forward_scheduler.cuh", include_str!("../kernels/forward_scheduler.cuh")),
    ("forward_outputs.cuh", include_str!("../kernels/forward_outputs.cuh")),
    ("forward_warpgroup.cuh", include_str!("../kernels/forward_warpgroup.cuh")),
];

/// Further headers of [`Family::WarpgroupBackward`].
const WARPGROUP_BACKWARD_HEADERS: [Header; 4] = [
    ("backward_pair.cuh", include_str!("../kernels/backward_pair.cuh")),
    ("backward_warpgroup.cuh", include_str!("../kernels/backward_warpgroup.cuh")),
    ("backward_queries_warpgroup.cuh", include_str!("../kernels/backward_queries_warpgroup.cuh")),
    ("backward_keys_warpgroup.cuh", include_str!("../kernels/backward_keys_warpgroup.cuh")),
];

/// Changes the text of a kernel file, given its name and its text, by which tests plant mistakes
/// ([`crate::Cuda::edited`]).
#[doc(hidden)]
pub type SourceEdit = fn(file: &str, text: &str) -> Result<String>;

/// Compiles a variant for a [target](Compiler::target), with the texts of its files as they are or
/// as `edit` changes them.
///
/// # Errors
/// [`annulus_core::Error::Device`] with the compiler's log; those of `edit`.
pub fn compile(
    compiler: &Compiler,
    variant: Variant,
    edit: Option<SourceEdit>,
    kind: ImageKind,
    target: &str,
) -> Result<Image> {
    let [amd, matrix_amd] = AMD_HEADERS;
    let (main, own): (Header, Vec<Header>) = match variant.family {
        Family::General if kind == ImageKind::CodeObject => (
            ("plain.hip", include_str!("../kernels/plain.hip")),
            [&[GRADIENT, amd][..], &PLAIN_HEADERS].concat(),
        ),
        Family::General => (
            ("kernels.cu", include_str!("../kernels/kernels.cu")),
            [&[GRADIENT][..], &PLAIN_HEADERS, &MATRIX_HEADERS].concat(),
        ),
        Family::Mfma => (
            ("matrix.hip", include_str!("../kernels/matrix.hip")),
            [&[GRADIENT, amd, matrix_amd][..], &MATRIX_HEADERS].concat(),
        ),
        Family::Warpgroup | Family::WarpgroupEpilogue => (
            ("warpgroup.cu", include_str!("../kernels/warpgroup.cu")),
            [WARPGROUP_HEADERS, WARPGROUP_FORWARD_HEADERS].concat(),
        ),
        Family::WarpgroupBackward => (
            ("backward_warpgroup.cu", include_str!("../kernels/backward_warpgroup.cu")),
            [WARPGROUP_HEADERS, WARPGROUP_BACKWARD_HEADERS].concat(),
        ),
    };
    let headers = [&HEADERS[..], &own].concat();
    let edited = |&(name, text): &Header| match edit {
        Some(edit) => edit(name, text).map(Cow::Owned),
        None => Ok(Cow::Borrowed(text)),
    };
    let source = edited(&main)?;
    let texts = headers.iter().map(edited).collect::<Result<Vec<Cow<'_, str>>>>()?;
    // the cache key covers all headers passed: only those that the program includes are
    let headers: Vec<(&str, &str)> =
        headers.iter().zip(&texts).map(|((name, _), text)| (*name, text.as_ref())).collect();
    let program = KernelProgram { name: main.0, source: &source, headers: &headers };
    compiler.compile(&program, &variant.options(), kind, target)
}

/// Loaded kernels of one variant on one device.
#[derive(Debug)]
pub(crate) struct VariantKernels {
    pub(crate) variant: Variant,
    kernels: HashMap<&'static str, Kernel>,
}

impl VariantKernels {
    /// Compiles and loads the kernels.
    pub(crate) fn load(
        device: &Device,
        compiler: &Compiler,
        variant: Variant,
        edit: Option<SourceEdit>,
    ) -> Result<Self> {
        let (kind, target) = compiler.target(device.gpu())?;
        let module = Module::load(device, &compile(compiler, variant, edit, kind, &target)?)?;
        let kernel = |name| {
            let kernel = module.kernel(name)?;
            Ok((
                name,
                match variant.dynamic_shared_bytes(name) {
                    0 => kernel,
                    bytes => kernel.with_shared(bytes)?,
                },
            ))
        };
        let kernels =
            variant.kernels(device.api()).into_iter().map(kernel).collect::<Result<_>>()?;
        Ok(Self { variant, kernels })
    }

    /// Returns the kernel of this name.
    pub(crate) fn get(&self, name: &str) -> Result<&Kernel> {
        let missing = || Error::internal(format!("{} has no kernel {name}", self.variant));
        self.kernels.get(name).ok_or_else(missing)
    }

    /// Queues the kernel of this name.
    /// # Safety
    /// As [`Kernel::launch`], except that addresses of buffers stay valid: memory is freed only
    /// after queued work.
    pub(crate) unsafe fn launch<T>(
        &self,
        stream: &Stream,
        name: &str,
        grid: [u64; 3],
        arguments: &T,
    ) -> Result<()> {
        // SAFETY: as required of the caller.
        unsafe { self.get(name)?.launch(stream, grid, self.variant.threads(name), arguments) }
    }
}

/// Kernels that serve one spec.
#[derive(Debug, Clone)]
pub(crate) struct Kernels {
    pub(crate) general: Arc<VariantKernels>,
    /// Those that have the kernels on tensor cores or matrix cores, if these serve the spec: 16-bit
    /// elements, normalized outputs, on AMD GPUs as [`Variant::on_matrix_cores`]. The gradient of
    /// an unnormalized output flows through the row maximum, which backward finds only if its
    /// scores equal those of forward bit for bit.
    pub(crate) matrix: Option<Arc<VariantKernels>>,
    /// Present at [`crate::Level::Warpgroup`], if [`Variant::on_warpgroups`] serves the spec.
    pub(crate) warpgroup: Option<Arc<VariantKernels>>,
    /// Likewise, for [`Variant::backward_on_warpgroups`].
    pub(crate) backward_warpgroup: Option<Arc<VariantKernels>>,
    /// Fewest rows for which warpgroups are used: see [`crate::Cuda::MIN_WARPGROUP_ROWS`].
    pub(crate) min_rows: usize,
    /// Most blocks of a forward launch on warpgroups, which fetch tiles until all are computed.
    pub(crate) most_blocks: usize,
}

impl Kernels {
    /// Returns the kernels of passes that are not on warpgroups.
    pub(crate) fn of_passes(&self) -> &VariantKernels {
        self.matrix.as_deref().unwrap_or(&self.general)
    }

    /// Returns the warpgroup kernels if they serve a forward pass over `queries` queries of
    /// `heads` query heads that may share a tile faster than level matrix: fewer rows leave most
    /// of a tile empty (estimated, not measured).
    pub(crate) fn warpgroup_for(&self, queries: usize, heads: usize) -> Option<&VariantKernels> {
        self.warpgroup.as_deref().filter(|_| queries * heads >= self.min_rows)
    }

    /// Returns the backward kernels on warpgroups if they serve a pass over `queries` queries of
    /// each head: fewer than a tile would leave most of its rows empty.
    pub(crate) fn backward_warpgroup_for(&self, queries: usize) -> Option<Arc<VariantKernels>> {
        self.backward_warpgroup.clone().filter(|_| queries >= self.min_rows.max(1))
    }
}
