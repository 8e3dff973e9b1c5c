//! Which kernels there are, in which variants, and how they are compiled.

use annulus_core::{DType, Error, Result, Spec};
use annulus_device_cuda::{Compiler, Device, Image, ImageKind, Kernel, Module, Program};

/// The program.
const SOURCE: &str = include_str!("../kernels/kernels.cu");

/// What it includes.
const HEADERS: [(&str, &str); 16] = [
    ("primitives.cuh", include_str!("../kernels/primitives.cuh")),
    ("host_twin.h", include_str!("../kernels/host_twin.h")),
    ("numbers.cuh", include_str!("../kernels/numbers.cuh")),
    ("arguments.cuh", include_str!("../kernels/arguments.cuh")),
    ("dropout.cuh", include_str!("../kernels/dropout.cuh")),
    ("tile.cuh", include_str!("../kernels/tile.cuh")),
    ("gradient.cuh", include_str!("../kernels/gradient.cuh")),
    ("forward.cuh", include_str!("../kernels/forward.cuh")),
    ("matrix.cuh", include_str!("../kernels/matrix.cuh")),
    ("forward_matrix.cuh", include_str!("../kernels/forward_matrix.cuh")),
    ("backward_matrix.cuh", include_str!("../kernels/backward_matrix.cuh")),
    ("backward_queries.cuh", include_str!("../kernels/backward_queries.cuh")),
    ("backward_keys.cuh", include_str!("../kernels/backward_keys.cuh")),
    ("bias_gradient.cuh", include_str!("../kernels/bias_gradient.cuh")),
    ("ends.cuh", include_str!("../kernels/ends.cuh")),
    ("records.cuh", include_str!("../kernels/records.cuh")),
];

/// Threads of every block.
pub(crate) const THREADS: u32 = 256;

/// The kernels on matrix units: forward, dq, dk and dv.
const MATRIX_KERNELS: [&str; 3] = ["forward_matrix", "backward_queries_matrix", "backward_keys_matrix"];

/// The names of the kernels that every variant has.
const KERNELS: [&str; 13] = [
    "forward",
    "finish_forward",
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
];

/// What a program is compiled for, besides the architecture.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Variant {
    /// Element type.
    pub dtype: DType,
    /// Head and value dims are at most this.
    pub dim: usize,
}

impl Variant {
    /// The largest head or value dim.
    pub const MOST_DIM: usize = 256;

    /// Every variant.
    pub fn all() -> impl Iterator<Item = Self> {
        let dims = |dtype| [32, 64, 128, 256].into_iter().filter(move |&dim| dim >= Self::least_dim(dtype));
        [DType::F64, DType::F32, DType::Bf16, DType::F16].into_iter().flat_map(move |dtype| dims(dtype).map(move |dim| Self { dtype, dim }))
    }

    /// The one that serves this spec.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if no dim is large enough.
    pub fn of(spec: &Spec) -> Result<Self> {
        let dim = spec.dims.head_dim.max(spec.dims.value_dim);
        if dim > Self::MOST_DIM {
            return Err(Error::unsupported(format!("a head or value dim of {dim}"), format!("cuda (at most {})", Self::MOST_DIM)));
        }
        Ok(Self { dtype: spec.dtype, dim: dim.next_power_of_two().max(Self::least_dim(spec.dtype)) })
    }

    /// Queries and keys a tile. Small dims have small tiles: there are more of them, and a tile's sums are few.
    pub const fn tile(self) -> usize {
        if matches!(self.dtype, DType::F64) || self.dim == 32 { 32 } else { 64 }
    }

    /// Matrix units want tiles of 64.
    const fn least_dim(dtype: DType) -> usize {
        if matches!(dtype, DType::Bf16 | DType::F16) { 64 } else { 32 }
    }

    /// Whether it runs on matrix units: 16-bit elements do. Products of f32 and f64 are never rounded to fewer bits.
    pub const fn has_matrix(self) -> bool {
        matches!(self.dtype, DType::Bf16 | DType::F16)
    }

    /// The names of its kernels.
    pub fn kernels(self) -> Vec<&'static str> {
        KERNELS.into_iter().chain(MATRIX_KERNELS.into_iter().filter(|_| self.has_matrix())).collect()
    }

    /// The compiler's options.
    pub fn options(self) -> Vec<String> {
        let dtype = match self.dtype {
            DType::F64 => 0,
            DType::F32 => 1,
            DType::Bf16 => 2,
            DType::F16 => 3,
        };
        let define = |name: &str, value: usize| format!("-DANNULUS_{name}={value}");
        // products and sums are fused where the source says so, and nowhere else: forward and backward must meet the same logits
        vec!["--fmad=false".into(), define("DTYPE", dtype), define("TILE", self.tile()), define("DIM", self.dim)]
    }
}

/// Compiles a variant for a [target](Compiler::target); `more` options come last.
///
/// # Errors
/// [`Error::Device`] with the compiler's words.
pub fn compile(compiler: &Compiler, variant: Variant, more: &[String], kind: ImageKind, target: &str) -> Result<Image> {
    let program = Program { name: "kernels.cu", source: SOURCE, headers: &HEADERS };
    let options = [variant.options(), more.to_vec()].concat();
    compiler.compile(&program, &options, kind, target)
}

/// The kernels of one variant on one device.
#[derive(Debug, Clone)]
pub(crate) struct Kernels {
    pub(crate) variant: Variant,
    pub(crate) forward: Kernel,
    /// Where [`Variant::has_matrix`].
    pub(crate) matrix: Option<MatrixKernels>,
    pub(crate) finish_forward: Kernel,
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
}

/// Those on matrix units. They serve outputs that are normalised: one that is not has a gradient through its largest logit, which backward finds
/// again only where products are formed alike.
#[derive(Debug, Clone)]
pub(crate) struct MatrixKernels {
    pub(crate) forward: Kernel,
    pub(crate) backward_queries: Kernel,
    pub(crate) backward_keys: Kernel,
}

impl MatrixKernels {
    fn new(module: &Module) -> Result<Self> {
        let [forward, backward_queries, backward_keys] = MATRIX_KERNELS.map(|name| module.kernel(name));
        Ok(Self { forward: forward?, backward_queries: backward_queries?, backward_keys: backward_keys? })
    }
}

impl Kernels {
    /// Those on matrix units, where they serve this spec.
    pub(crate) fn matrix_for(&self, spec: &Spec) -> Option<&MatrixKernels> {
        self.matrix.as_ref().filter(|_| spec.normalize)
    }

    /// Compiles and loads.
    pub(crate) fn new(device: &Device, compiler: &Compiler, variant: Variant, more: &[String]) -> Result<Self> {
        let (kind, target) = compiler.target(device.architecture())?;
        let module = Module::load(device, &compile(compiler, variant, more, kind, &target)?)?;
        Ok(Self {
            variant,
            forward: module.kernel("forward")?,
            matrix: variant.has_matrix().then(|| MatrixKernels::new(&module)).transpose()?,
            finish_forward: module.kernel("finish_forward")?,
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
        })
    }
}
