//! Kernel variants and their compilation.

use std::sync::Arc;

use annulus_core::{DType, Error, Result, Spec};
use annulus_device_cuda::{
    Architecture, Compiler, Device, Image, ImageKind, Kernel, Module, Program,
};

use crate::Level;

/// File name and text.
type Header = (&'static str, &'static str);

/// Headers of all programs.
const HEADERS: [Header; 8] = [
    ("primitives.cuh", include_str!("../kernels/primitives.cuh")),
    ("primitives_host.h", include_str!("../kernels/primitives_host.h")),
    ("numbers.cuh", include_str!("../kernels/numbers.cuh")),
    ("arguments.cuh", include_str!("../kernels/arguments.cuh")),
    ("dropout.cuh", include_str!("../kernels/dropout.cuh")),
    ("tile.cuh", include_str!("../kernels/tile.cuh")),
    ("probs.cuh", include_str!("../kernels/probs.cuh")),
    ("forward_state.cuh", include_str!("../kernels/forward_state.cuh")),
];

/// Further headers of [`Family::General`].
const GENERAL_HEADERS: [Header; 18] = [
    ("head_tiles.cuh", include_str!("../kernels/head_tiles.cuh")),
    ("gradient.cuh", include_str!("../kernels/gradient.cuh")),
    ("backward_pair.cuh", include_str!("../kernels/backward_pair.cuh")),
    ("forward.cuh", include_str!("../kernels/forward.cuh")),
    ("gqa_packing.cuh", include_str!("../kernels/gqa_packing.cuh")),
    ("chunk_stream.cuh", include_str!("../kernels/chunk_stream.cuh")),
    ("row_tiles.cuh", include_str!("../kernels/row_tiles.cuh")),
    ("forward_matrix.cuh", include_str!("../kernels/forward_matrix.cuh")),
    ("merge_splits.cuh", include_str!("../kernels/merge_splits.cuh")),
    ("backward_matrix.cuh", include_str!("../kernels/backward_matrix.cuh")),
    ("backward_queries_matrix.cuh", include_str!("../kernels/backward_queries_matrix.cuh")),
    ("backward_keys_matrix.cuh", include_str!("../kernels/backward_keys_matrix.cuh")),
    ("backward_queries.cuh", include_str!("../kernels/backward_queries.cuh")),
    ("backward_keys.cuh", include_str!("../kernels/backward_keys.cuh")),
    ("bias_gradient.cuh", include_str!("../kernels/bias_gradient.cuh")),
    ("vectors.cuh", include_str!("../kernels/vectors.cuh")),
    ("rows.cuh", include_str!("../kernels/rows.cuh")),
    ("records.cuh", include_str!("../kernels/records.cuh")),
];

/// Further headers of [`Family::Warpgroup`] and [`Family::WarpgroupBackward`].
const WARPGROUP_HEADERS: [Header; 5] = [
    ("warpgroup_primitives.cuh", include_str!("../kernels/warpgroup_primitives.cuh")),
    ("warpgroup_host.h", include_str!("../kernels/warpgroup_host.h")),
    ("wgmma_host.h", include_str!("../kernels/wgmma_host.h")),
    ("warpgroup.cuh", include_str!("../kernels/warpgroup.cuh")),
    ("warpgroup_lane.cuh", include_str!("../kernels/warpgroup_lane.cuh")),
];

/// Further headers of [`Family::Warpgroup`].
const WARPGROUP_FORWARD_HEADERS: [Header; 6] = [
    ("gqa_packing.cuh", include_str!("../kernels/gqa_packing.cuh")),
    ("warpgroup_tile.cuh", include_str!("../kernels/warpgroup_tile.cuh")),
    ("warpgroup_scores.cuh", include_str!("../kernels/warpgroup_scores.cuh")),
    ("forward_scheduler.cuh", include_str!("../kernels/forward_scheduler.cuh")),
    ("forward_outputs.cuh", include_str!("../kernels/forward_outputs.cuh")),
    ("forward_warpgroup.cuh", include_str!("../kernels/forward_warpgroup.cuh")),
];

/// Further headers of [`Family::WarpgroupBackward`].
const WARPGROUP_BACKWARD_HEADERS: [Header; 9] = [
    ("head_tiles.cuh", include_str!("../kernels/head_tiles.cuh")),
    ("backward_pair.cuh", include_str!("../kernels/backward_pair.cuh")),
    ("backward_warpgroup.cuh", include_str!("../kernels/backward_warpgroup.cuh")),
    ("backward_statistics.cuh", include_str!("../kernels/backward_statistics.cuh")),
    ("backward_queries_warpgroup.cuh", include_str!("../kernels/backward_queries_warpgroup.cuh")),
    ("backward_key_rows.cuh", include_str!("../kernels/backward_key_rows.cuh")),
    ("backward_keys_warpgroup.cuh", include_str!("../kernels/backward_keys_warpgroup.cuh")),
    ("backward_dq_order.cuh", include_str!("../kernels/backward_dq_order.cuh")),
    ("backward_fused_warpgroup.cuh", include_str!("../kernels/backward_fused_warpgroup.cuh")),
];

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

/// Kernels on tensor cores: forward, dQ, dK and dV.
const MATRIX_KERNELS: [&str; 3] =
    ["forward_matrix", "backward_queries_matrix", "backward_keys_matrix"];

/// Kernels on warpgroups.
const WARPGROUP_KERNELS: [&str; 2] = ["forward_warpgroup", "forward_warpgroup_epilogue"];

/// Backward kernels on warpgroups.
const WARPGROUP_BACKWARD_KERNELS: [&str; 6] = [
    "backward_statistics",
    "backward_queries_warpgroup",
    "backward_queries_warpgroup_epilogue",
    "backward_keys_warpgroup",
    "backward_keys_warpgroup_epilogue",
    "backward_fused_warpgroup",
];

/// Kernels that every general variant has.
const GENERAL_KERNELS: [&str; 15] = [
    "forward",
    "finish_forward",
    "merge_splits",
    "begin_backward",
    "backward_queries",
    "backward_keys",
    "bias_gradient",
    "sink_gradient",
    "copy_elements",
    "round_sums",
    "copy_sums",
    "copy_statistics",
    "fill_sums",
    "combine_records",
    "copy_ranges",
];

/// Programs: each is compiled on its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Family {
    /// All kernels for any architecture.
    General,
    /// Forward kernels on warpgroups, for [`Architecture::HOPPER`] only; [`Family::General`] has
    /// the others.
    Warpgroup,
    /// Backward kernels on warpgroups, for [`Architecture::HOPPER`] only.
    WarpgroupBackward,
}

/// Template parameters of a program, besides the architecture. Its name (`bf16 128`,
/// `bf16 128 warpgroup`) identifies the kernels that serve a spec: see
/// [`crate::Cuda::forward_variant`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Variant {
    /// Program.
    pub family: Family,
    /// Element type.
    pub dtype: DType,
    /// Upper bound of head and value dim.
    pub dim: usize,
}

impl Variant {
    /// The largest supported head or value dim: backward keeps dK and dV of a tile in registers.
    pub const MAX_DIM: usize = 256;

    /// The largest head or value dim of backward kernels on warpgroups: with 256 dims dK and dV of
    /// 64 keys would take 256 registers of a thread.
    pub const MAX_BACKWARD_DIM: usize = 128;

    /// Lists every general variant.
    pub fn all() -> impl Iterator<Item = Self> {
        let dims =
            |dtype| [32, 64, 128, 256].into_iter().filter(move |&dim| dim >= Self::min_dim(dtype));
        let types = [DType::F64, DType::F32, DType::Bf16, DType::F16];
        types.into_iter().flat_map(move |dtype| {
            dims(dtype).map(move |dim| Self { family: Family::General, dtype, dim })
        })
    }

    /// Lists every variant that this architecture can run.
    pub fn all_on(architecture: Architecture) -> impl Iterator<Item = Self> {
        let hopper = architecture == Architecture::HOPPER;
        let on_warpgroups =
            move || Self::all().filter(move |variant| hopper && variant.has_matrix());
        let backward = on_warpgroups().filter(|variant| variant.dim <= Self::MAX_BACKWARD_DIM);
        Self::all()
            .chain(on_warpgroups().map(|variant| Self { family: Family::Warpgroup, ..variant }))
            .chain(backward.map(|variant| Self { family: Family::WarpgroupBackward, ..variant }))
    }

    /// Selects the general variant for a spec.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if a dim exceeds [`Variant::MAX_DIM`].
    pub fn of(spec: &Spec) -> Result<Self> {
        let dim = spec.dims.head_dim.max(spec.dims.value_dim);
        if dim > Self::MAX_DIM {
            return Err(Error::unsupported(
                format!("a head or value dim of {dim}"),
                format!("cuda (at most {})", Self::MAX_DIM),
            ));
        }
        Ok(Self {
            family: Family::General,
            dtype: spec.dtype,
            dim: dim.next_power_of_two().max(Self::min_dim(spec.dtype)),
        })
    }

    /// The largest dim for which warpgroups serve scores with an epilogue (bias, soft cap,
    /// rounding, a scale that is not positive) and dropout: at 256, registers would spill.
    pub const MOST_EPILOGUE_DIMS: usize = 128;

    /// Selects the warpgroup variant for a spec's forward pass, if it can serve it: 16-bit
    /// elements, a normalized output, head and value dims that are multiples of 8 (TMA needs
    /// strides that are multiples of 16 bytes), no score epilogue beyond
    /// [`Variant::MOST_EPILOGUE_DIMS`].
    ///
    /// # Errors
    /// As [`Variant::of`].
    pub fn on_warpgroups(spec: &Spec) -> Result<Option<Self>> {
        let any = Self::of(spec)?;
        let fits = any.has_matrix()
            && spec.normalize
            && spec.dims.head_dim.is_multiple_of(8)
            && spec.dims.value_dim.is_multiple_of(8)
            && (any.dim <= Self::MOST_EPILOGUE_DIMS || !needs_epilogue(spec));
        Ok(fits.then_some(Self { family: Family::Warpgroup, ..any }))
    }

    /// Selects the warpgroup variant for a spec's backward pass, if it can serve it: as
    /// [`Variant::on_warpgroups`], and dims up to [`Variant::MAX_BACKWARD_DIM`].
    ///
    /// # Errors
    /// As [`Variant::of`].
    pub fn backward_on_warpgroups(spec: &Spec) -> Result<Option<Self>> {
        let forward = Self::on_warpgroups(spec)?;
        let served = forward.filter(|variant| variant.dim <= Self::MAX_BACKWARD_DIM);
        Ok(served.map(|variant| Self { family: Family::WarpgroupBackward, ..variant }))
    }

    /// Queries and keys per tile. 32 × 32 where the operands are wide (f64: 48 KB of static shared
    /// memory) or the dims are few (accumulators are small, and more tiles fill the GPU).
    pub(crate) const fn tile(self) -> [usize; 2] {
        match self.family {
            Family::Warpgroup if self.dim == 256 => [128, 64],
            Family::Warpgroup | Family::WarpgroupBackward => [128, 128],
            Family::General if matches!(self.dtype, DType::F64) || self.dim == 32 => [32, 32],
            Family::General => [64, 64],
        }
    }

    /// Rows (queries, in the forward pass perhaps pairs of query and head) and keys per tile of the
    /// kernels on tensor cores whose left operand is queries; `FORWARD_ROWS` of
    /// `kernels/forward_matrix.cuh`, `QUERIES_ROWS` of `kernels/backward_queries_matrix.cuh`.
    pub(crate) const fn queries_matrix_tile(self) -> [usize; 2] {
        [if self.dim <= 128 { 128 } else { 64 }, self.tile()[1]]
    }

    /// Keys of a block of the dK/dV kernel on tensor cores, whose tiles have
    /// [`Variant::tile`] keys; `KEYS_ROWS` of `kernels/backward_keys_matrix.cuh`.
    pub(crate) const fn keys_matrix_rows(self) -> usize {
        if self.dim <= 128 { 64 } else { 32 }
    }

    /// Rows of a KV tile that all of these kernels compute whole: their largest, a multiple of the
    /// others, because tiles are powers of two.
    pub(crate) fn kv_tile(variants: [Self; 2]) -> u64 {
        let [one, other] = variants.map(|variant| variant.tile()[1] as u64);
        one.max(other)
    }

    /// Bytes of dynamic shared memory per launch of one of its kernels. Backward on tensor cores:
    /// `QueriesStorage` and `KeysStorage` of `kernels/backward_queries_matrix.cuh` and
    /// `kernels/backward_keys_matrix.cuh` (own rows of two operands; two stages; two floats per
    /// query, for dK and dV three of a tile's, and the exchanged scores in f32). Forward on
    /// warpgroups: `SharedStorage` of `kernels/warpgroup.cuh` (q; K and V, two stages each; 16 keys of P per
    /// query; a zero operand of 16 × 64; two work tiles; 12 mbarriers). Backward:
    /// `BackwardStorage` of `kernels/backward_warpgroup.cuh` (own rows of two operands; their
    /// streamed rows, two stages of 128 or four of 64; a zero operand of as many rows × 64;
    /// statistics of two floats per streamed row; two mbarriers per stage). Fused: `FusedStorage`
    /// of `kernels/backward_fused_warpgroup.cuh` (also two buffers of dX, and a tile of dQ).
    pub fn dynamic_shared_bytes(self, kernel: &str) -> u32 {
        let ([queries, keys], dim) = (self.tile(), self.dim);
        let bytes = match self.family {
            Family::General => match kernel {
                "backward_queries_matrix" => {
                    let rows = self.queries_matrix_tile()[0];
                    2 * rows * dim * 2 + 2 * 64 * 64 * 2 + 2 * rows * 4
                }
                "backward_keys_matrix" => {
                    let rows = self.keys_matrix_rows();
                    let streamed = if dim <= 128 { 32 } else { 16 };
                    let operands = 2 * rows * dim * 2 + 2 * 2 * streamed * dim * 2;
                    operands + rows * streamed * 4 + 3 * queries * 4
                }
                _ => 0,
            },
            Family::Warpgroup => {
                let tiles = queries * dim * 2 + 4 * keys * dim * 2 + queries * 16 * 2;
                tiles + 16 * 64 * 2 + 2 * 16 + 12 * 8
            }
            Family::WarpgroupBackward => {
                let fused_rows = fused_rows(dim) as usize;
                let (rows, stages, fused) = match kernel {
                    "backward_statistics" => return 0,
                    "backward_queries_warpgroup" => (128, 2, 0),
                    "backward_fused_warpgroup" => {
                        let dx = 2 * keys * fused_rows * 2;
                        // a dQ tile; three `StreamedTile`; two mbarriers; ticket and tile, to a
                        // multiple of 16
                        let others = 3 * 16 + 2 * 8 + 16;
                        (fused_rows, 2, dx + fused_rows * (dim + 8) * 4 + others)
                    }
                    _ => (64, 4, 0),
                };
                let own = 2 * 128 * dim * 2;
                let streamed = 2 * stages * rows * dim * 2;
                fused + own + streamed + rows * 64 * 2 + stages * rows * 8 + 2 * stages * 8
            }
        };
        bytes as u32
    }

    /// 64 for 16-bit elements: the tensor-core kernels have tiles of 64 and chunks of 64 dims.
    const fn min_dim(dtype: DType) -> usize {
        if matches!(dtype, DType::Bf16 | DType::F16) { 64 } else { 32 }
    }

    /// Returns true for 16-bit elements, which have kernels on tensor cores. Products of f32 and
    /// f64 are never rounded to fewer bits.
    pub const fn has_matrix(self) -> bool {
        matches!(self.dtype, DType::Bf16 | DType::F16)
    }

    /// Names of its kernels.
    pub fn kernels(self) -> Vec<&'static str> {
        match self.family {
            Family::Warpgroup if self.dim > Self::MOST_EPILOGUE_DIMS => vec!["forward_warpgroup"],
            Family::Warpgroup => WARPGROUP_KERNELS.to_vec(),
            Family::WarpgroupBackward => WARPGROUP_BACKWARD_KERNELS.to_vec(),
            Family::General => GENERAL_KERNELS
                .into_iter()
                .chain(MATRIX_KERNELS.into_iter().filter(|_| self.has_matrix()))
                .collect(),
        }
    }

    /// Compiler options.
    pub fn options(self) -> Vec<String> {
        let dtype = match self.dtype {
            DType::F64 => 0,
            DType::F32 => 1,
            DType::Bf16 => 2,
            DType::F16 => 3,
        };
        let define = |name: &str, value: usize| format!("-DANNULUS_{name}={value}");
        // no implicit fused multiply-add: forward and backward must compute the same scores bit for
        // bit
        vec![
            "--fmad=false".into(),
            define("DTYPE", dtype),
            define("TILE", self.tile()[1]),
            define("DIM", self.dim),
        ]
    }
}

impl std::fmt::Display for Variant {
    /// Writes element type, dim and, for warpgroups, the family.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let family = match self.family {
            Family::General => "",
            Family::Warpgroup => " warpgroup",
            Family::WarpgroupBackward => " warpgroup backward",
        };
        write!(f, "{} {}{family}", self.dtype, self.dim)
    }
}

/// Compiles a variant for a [target](Compiler::target); `more` options are appended.
///
/// # Errors
/// [`Error::Device`] with the compiler's log.
pub fn compile(
    compiler: &Compiler,
    variant: Variant,
    more: &[String],
    kind: ImageKind,
    target: &str,
) -> Result<Image> {
    let ((name, source), headers): (Header, Vec<Header>) = match variant.family {
        Family::General => (
            ("kernels.cu", include_str!("../kernels/kernels.cu")),
            [&HEADERS[..], &GENERAL_HEADERS].concat(),
        ),
        Family::Warpgroup => (
            ("warpgroup.cu", include_str!("../kernels/warpgroup.cu")),
            [&HEADERS[..], &WARPGROUP_HEADERS, &WARPGROUP_FORWARD_HEADERS].concat(),
        ),
        Family::WarpgroupBackward => (
            ("backward_warpgroup.cu", include_str!("../kernels/backward_warpgroup.cu")),
            [&HEADERS[..], &WARPGROUP_HEADERS, &WARPGROUP_BACKWARD_HEADERS].concat(),
        ),
    };
    // the cache key covers all headers passed: only those that the program includes are
    let program = Program { name, source, headers: &headers };
    let options = [variant.options(), more.to_vec()].concat();
    compiler.compile(&program, &options, kind, target)
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
    pub(crate) forward: Kernel,
    pub(crate) backward_queries: Kernel,
    pub(crate) backward_keys: Kernel,
}

/// Kernels on warpgroups.
#[derive(Debug, Clone)]
pub(crate) struct WarpgroupKernels {
    pub(crate) variant: Variant,
    pub(crate) forward: Kernel,
    /// Forward of scores with an epilogue, or with dropout; up to
    /// [`Variant::MOST_EPILOGUE_DIMS`].
    pub(crate) with_epilogue: Option<Kernel>,
    /// Most blocks of a launch, which fetch tiles until all are computed.
    pub(crate) blocks: usize,
    /// Fewest rows for which they are used: see [`crate::Cuda::MIN_WARPGROUP_ROWS`].
    min_rows: usize,
}

impl WarpgroupKernels {
    /// Threads per block: one producer warpgroup, two consumers.
    pub(crate) const THREADS: u32 = 384;

    /// Compiles and loads the kernels.
    pub(crate) fn new(
        device: &Device,
        compiler: &Compiler,
        variant: Variant,
        blocks: usize,
        min_rows: usize,
        more: &[String],
    ) -> Result<Self> {
        let module = load(device, compiler, variant, more)?;
        let kernel = |name| module.kernel(name)?.with_shared(variant.dynamic_shared_bytes(name));
        let [forward, with_epilogue] = WARPGROUP_KERNELS;
        let has_epilogue = variant.dim <= Variant::MOST_EPILOGUE_DIMS;
        Ok(Self {
            variant,
            forward: kernel(forward)?,
            with_epilogue: has_epilogue.then(|| kernel(with_epilogue)).transpose()?,
            blocks,
            min_rows,
        })
    }

    /// True if they serve `queries` queries of `heads` query heads that may share a tile faster
    /// than level matrix: fewer rows leave most of a tile of 128 empty (estimated; not measured on
    /// a GPU).
    const fn are_filled_by(&self, queries: usize, heads: usize) -> bool {
        queries * heads >= self.min_rows
    }
}

/// Choices of a backend for the backward pass on warpgroups.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BackwardOptions {
    pub(crate) min_rows: usize,
    pub(crate) is_fused: bool,
}

/// Backward kernels on warpgroups.
#[derive(Debug)]
pub(crate) struct BackwardWarpgroupKernels {
    pub(crate) variant: Variant,
    pub(crate) statistics: Kernel,
    /// Without and with a score epilogue.
    pub(crate) queries: [Kernel; 2],
    pub(crate) keys: [Kernel; 2],
    /// dQ, dK and dV in one pass, without a score epilogue.
    pub(crate) fused: Kernel,
    /// Use it where it serves.
    pub(crate) is_fused: bool,
    /// Fewest queries for which they are used: see [`crate::Cuda::MIN_WARPGROUP_ROWS`].
    min_rows: usize,
}

impl BackwardWarpgroupKernels {
    /// Compiles and loads the kernels.
    pub(crate) fn new(
        device: &Device,
        compiler: &Compiler,
        variant: Variant,
        options: BackwardOptions,
        more: &[String],
    ) -> Result<Self> {
        let BackwardOptions { min_rows, is_fused } = options;
        let module = load(device, compiler, variant, more)?;
        let [statistics, queries, queries_epilogue, keys, keys_epilogue, fused] =
            WARPGROUP_BACKWARD_KERNELS
                .map(|name| module.kernel(name)?.with_shared(variant.dynamic_shared_bytes(name)));
        Ok(Self {
            variant,
            statistics: statistics?,
            queries: [queries?, queries_epilogue?],
            keys: [keys?, keys_epilogue?],
            fused: fused?,
            is_fused,
            min_rows,
        })
    }
}

/// Queries per tile of the fused backward kernel; `FUSED_ROWS` of
/// `kernels/backward_fused_warpgroup.cuh`.
pub(crate) const fn fused_rows(dim: usize) -> u32 {
    if dim == 64 { 128 } else { 64 }
}

/// True if the QKᵀ products need an epilogue: bias, soft cap or rounding; or a scale that is not
/// positive (the maximum of scale·s is scale·max s only for scale > 0) or so small that products
/// with it may leave the normal range of f32. Otherwise the scale is deferred to the softmax. Also
/// true with dropout.
pub(crate) fn needs_epilogue(spec: &Spec) -> bool {
    let is_deferred = spec.scale as f32 > 1e-30;
    spec.bias.is_some()
        || spec.bias_function.is_some()
        || spec.soft_cap.is_some()
        || spec.dropout.is_some()
        || spec.logits_dtype != spec.dtype.accumulator()
        || !is_deferred
}

fn load(device: &Device, compiler: &Compiler, variant: Variant, more: &[String]) -> Result<Module> {
    let (kind, target) = compiler.target(device.architecture())?;
    Module::load(device, &compile(compiler, variant, more, kind, &target)?)
}

impl MatrixKernels {
    /// Threads per block; `FORWARD_THREADS` of `kernels/forward_matrix.cuh`, `BACKWARD_THREADS` of
    /// `kernels/backward_matrix.cuh`.
    pub(crate) const THREADS: u32 = 128;

    fn new(module: &Module, variant: Variant) -> Result<Self> {
        let [forward, backward_queries, backward_keys] = MATRIX_KERNELS
            .map(|name| module.kernel(name)?.with_shared(variant.dynamic_shared_bytes(name)));
        Ok(Self {
            forward: forward?,
            backward_queries: backward_queries?,
            backward_keys: backward_keys?,
        })
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
        more: &[String],
    ) -> Result<Self> {
        let module = load(device, compiler, variant, more)?;
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
