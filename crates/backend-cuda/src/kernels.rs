//! Which kernels there are, in which variants, and how they are compiled.

use annulus_core::{DType, Error, Result, Spec};
use annulus_device_cuda::{Architecture, Compiler, Device, Image, ImageKind, Kernel, Module, Program};

use crate::Level;

/// Name and text.
type File = (&'static str, &'static str);

/// What both programs include.
const HEADERS: [File; 7] = [
    ("primitives.cuh", include_str!("../kernels/primitives.cuh")),
    ("host_twin.h", include_str!("../kernels/host_twin.h")),
    ("numbers.cuh", include_str!("../kernels/numbers.cuh")),
    ("arguments.cuh", include_str!("../kernels/arguments.cuh")),
    ("dropout.cuh", include_str!("../kernels/dropout.cuh")),
    ("tile.cuh", include_str!("../kernels/tile.cuh")),
    ("weights.cuh", include_str!("../kernels/weights.cuh")),
];

/// What [`Family::Any`] includes besides.
const HEADERS_OF_ANY: [File; 10] = [
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

/// What [`Family::Warpgroup`] includes besides.
const HEADERS_OF_WARPGROUP: [File; 5] = [
    ("warpgroup_primitives.cuh", include_str!("../kernels/warpgroup_primitives.cuh")),
    ("warpgroup_twin.h", include_str!("../kernels/warpgroup_twin.h")),
    ("products_twin.h", include_str!("../kernels/products_twin.h")),
    ("warpgroup.cuh", include_str!("../kernels/warpgroup.cuh")),
    ("forward_warpgroup.cuh", include_str!("../kernels/forward_warpgroup.cuh")),
];

/// Threads of every block of the first family.
pub(crate) const THREADS: u32 = 256;

/// The kernels on matrix units: forward, dq, dk and dv.
const MATRIX_KERNELS: [&str; 3] = ["forward_matrix", "backward_queries_matrix", "backward_keys_matrix"];

/// Those on warpgroups.
const WARPGROUP_KERNELS: [&str; 1] = ["forward_warpgroup"];

/// The names of the kernels that every variant of the first family has.
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

/// Programs, each with kernels of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Family {
    /// Everything, on any architecture.
    Any,
    /// What runs on warpgroups: [`Architecture::HOPPER`] alone. Everything else is done by [`Family::Any`].
    Warpgroup,
}

/// What a program is compiled for, besides the architecture. Its name (`bf16 128`, `bf16 128 warpgroup`) says which kernels serve a spec: see
/// [`crate::Cuda::forward_variant`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Variant {
    /// Which program.
    pub family: Family,
    /// Element type.
    pub dtype: DType,
    /// Head and value dims are at most this.
    pub dim: usize,
}

impl Variant {
    /// The largest head or value dim.
    pub const MOST_DIM: usize = 256;

    /// Every variant of the family that any architecture can run.
    pub fn all() -> impl Iterator<Item = Self> {
        let dims = |dtype| [32, 64, 128, 256].into_iter().filter(move |&dim| dim >= Self::least_dim(dtype));
        let types = [DType::F64, DType::F32, DType::Bf16, DType::F16];
        types.into_iter().flat_map(move |dtype| dims(dtype).map(move |dim| Self { family: Family::Any, dtype, dim }))
    }

    /// Every variant that this architecture can run.
    pub fn all_on(architecture: Architecture) -> impl Iterator<Item = Self> {
        let hopper = architecture == Architecture::HOPPER;
        let on_warpgroups = Self::all().filter(move |variant| hopper && variant.has_matrix());
        Self::all().chain(on_warpgroups.map(|variant| Self { family: Family::Warpgroup, ..variant }))
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
        Ok(Self { family: Family::Any, dtype: spec.dtype, dim: dim.next_power_of_two().max(Self::least_dim(spec.dtype)) })
    }

    /// The one on warpgroups, where it can serve this spec's forward pass: 16-bit elements, an output that is normalised, head and value dims that
    /// are multiples of 8 (the copy engine wants rows at multiples of 16 bytes).
    ///
    /// # Errors
    /// As [`Variant::of`].
    pub fn on_warpgroups(spec: &Spec) -> Result<Option<Self>> {
        let any = Self::of(spec)?;
        let fits = any.has_matrix() && spec.normalize && spec.dims.head_dim.is_multiple_of(8) && spec.dims.value_dim.is_multiple_of(8);
        Ok(fits.then_some(Self { family: Family::Warpgroup, ..any }))
    }

    /// Queries and keys a tile. Small dims have small tiles: there are more of them, and a tile's sums are few.
    pub(crate) const fn tile(self) -> [usize; 2] {
        match self.family {
            Family::Warpgroup if self.dim == 256 => [128, 64],
            Family::Warpgroup => [128, 128],
            Family::Any if matches!(self.dtype, DType::F64) || self.dim == 32 => [32, 32],
            Family::Any => [64, 64],
        }
    }

    /// Bytes of shared memory that a launch asks for, besides a kernel's own arrays. On warpgroups those of `BlockMemory` of `kernels/warpgroup.cuh`: own
    /// rows; two operands of the other side, two stages each; scratch of a float a product; 8 barriers.
    pub const fn launch_bytes(self) -> u32 {
        let ([own, others], dim) = (self.tile(), self.dim);
        match self.family {
            Family::Any => 0,
            Family::Warpgroup => (own * dim * 2 + 4 * others * dim * 2 + own * others * 4 + 8 * 8) as u32,
        }
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
        match self.family {
            Family::Warpgroup => WARPGROUP_KERNELS.to_vec(),
            Family::Any => KERNELS.into_iter().chain(MATRIX_KERNELS.into_iter().filter(|_| self.has_matrix())).collect(),
        }
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
        vec!["--fmad=false".into(), define("DTYPE", dtype), define("TILE", self.tile()[1]), define("DIM", self.dim)]
    }
}

impl std::fmt::Display for Variant {
    /// Type, dims and, where it is not that of any architecture, the family.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let family = match self.family {
            Family::Any => "",
            Family::Warpgroup => " warpgroup",
        };
        write!(f, "{} {}{family}", self.dtype, self.dim)
    }
}

/// Compiles a variant for a [target](Compiler::target); `more` options come last.
///
/// # Errors
/// [`Error::Device`] with the compiler's words.
pub fn compile(compiler: &Compiler, variant: Variant, more: &[String], kind: ImageKind, target: &str) -> Result<Image> {
    let ((name, source), besides): (File, &[File]) = match variant.family {
        Family::Any => (("kernels.cu", include_str!("../kernels/kernels.cu")), &HEADERS_OF_ANY),
        Family::Warpgroup => (("warpgroup.cu", include_str!("../kernels/warpgroup.cu")), &HEADERS_OF_WARPGROUP),
    };
    // the cache knows a program by what it includes: what it does not include is not given
    let program = Program { name, source, headers: &[&HEADERS, besides].concat() };
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
    /// Where the level is that, and [`Variant::on_warpgroups`] serves the spec.
    pub(crate) warpgroup: Option<WarpgroupKernels>,
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

/// Those on warpgroups.
#[derive(Debug, Clone)]
pub(crate) struct WarpgroupKernels {
    pub(crate) variant: Variant,
    pub(crate) forward: Kernel,
}

impl WarpgroupKernels {
    /// Threads of every block: a warpgroup that copies, two that multiply.
    pub(crate) const THREADS: u32 = 384;

    /// Compiles and loads.
    pub(crate) fn new(device: &Device, compiler: &Compiler, variant: Variant, more: &[String]) -> Result<Self> {
        let module = load(device, compiler, variant, more)?;
        let [forward] = WARPGROUP_KERNELS.map(|name| module.kernel(name));
        Ok(Self { variant, forward: forward?.with_shared(variant.launch_bytes())? })
    }
}

fn load(device: &Device, compiler: &Compiler, variant: Variant, more: &[String]) -> Result<Module> {
    let (kind, target) = compiler.target(device.architecture())?;
    Module::load(device, &compile(compiler, variant, more, kind, &target)?)
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

    /// Compiles and loads those of [`Family::Any`]. At [`Level::Plain`], none on matrix units is used.
    pub(crate) fn new(device: &Device, compiler: &Compiler, variant: Variant, level: Level, more: &[String]) -> Result<Self> {
        let module = load(device, compiler, variant, more)?;
        let has_matrix = variant.has_matrix() && level >= Level::Matrix;
        Ok(Self {
            variant,
            warpgroup: None,
            forward: module.kernel("forward")?,
            matrix: has_matrix.then(|| MatrixKernels::new(&module)).transpose()?,
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
