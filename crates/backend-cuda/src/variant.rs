//! Kernel variants: which programs there are, their tiles, shared memory and compiler options, and
//! the one that serves a spec.
//!
//! GPU features that the kernels use.

use std::ffi::OsString;

use annulus_core::{DType, Error, Result, Spec};
use annulus_device_cuda::{Api, Architecture, Compiler, Device, Gpu, ImageKind};

/// Threads per block of the general kernels, except those on tensor cores; `THREADS` of
/// `kernels/primitives.cuh`.
pub(crate) const THREADS: u32 = 256;

/// Kernels on tensor cores: forward, dQ, dK and dV.
pub(crate) const MATRIX_KERNELS: [&str; 3] =
    ["forward_matrix", "backward_queries_matrix", "backward_keys_matrix"];

/// Forward kernel on tensor cores for several ranges of keys, above 64 dims.
pub(crate) const SPLIT_KERNEL: &str = "forward_matrix_split";

/// Forward kernel on tensor cores for the few rows of [`Variant::decode_tile`].
pub(crate) const DECODE_KERNEL: &str = "forward_decode";

/// Backward kernels on warpgroups.
pub(crate) const WARPGROUP_BACKWARD_KERNELS: [&str; 5] = [
    "backward_statistics",
    "backward_queries_warpgroup",
    "backward_queries_warpgroup_epilogue",
    "backward_keys_warpgroup",
    "backward_keys_warpgroup_epilogue",
];

/// Kernels that every general variant has; on AMD GPUs it has no others.
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
    /// All kernels for any architecture. Of AMD GPUs those of level plain.
    General,
    /// Kernels on matrix cores (MFMA) of AMD GPUs; [`Family::General`] has the others.
    Mfma,
    /// Forward kernel on warpgroups, for [`Architecture::HOPPER`] only; [`Family::General`] has the
    /// others.
    Warpgroup,
    /// As [`Family::Warpgroup`], for scores with an epilogue, and dropout: with the tiles of wider
    /// ones its registers would spill.
    WarpgroupEpilogue,
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

    /// Selects the variant on matrix cores of AMD GPUs for a spec's passes, if it can serve them:
    /// 16-bit elements, a normalized output. Probabilities of f16 are scaled by 2¹⁰
    /// (`kernels/forward_probs.cuh`), which leaves a factor of 2⁵ for those that dropout keeps.
    ///
    /// # Errors
    /// As [`Variant::of`].
    pub fn on_matrix_cores(spec: &Spec) -> Result<Option<Self>> {
        let any = Self::of(spec)?;
        let kept = spec.dropout.map_or(1.0, |dropout| 1.0 - dropout.probability);
        let is_in_range = spec.dtype != DType::F16 || kept > 1.0 / 32.0;
        let fits = any.has_matrix() && spec.normalize && is_in_range;
        Ok(fits.then_some(Self { family: Family::Mfma, ..any }))
    }

    /// Lists every variant that this architecture can run.
    pub fn all_on(architecture: Architecture) -> impl Iterator<Item = Self> {
        let hopper = architecture == Architecture::HOPPER;
        let on_warpgroups =
            move || Self::all().filter(move |variant| hopper && variant.has_matrix());
        let epilogue = on_warpgroups().filter(|variant| variant.dim <= Self::MOST_EPILOGUE_DIMS);
        let backward = on_warpgroups().filter(|variant| variant.dim <= Self::MAX_BACKWARD_DIM);
        let forward = on_warpgroups()
            .map(|variant| Self { family: Family::Warpgroup, ..variant })
            .chain(epilogue.map(|variant| Self { family: Family::WarpgroupEpilogue, ..variant }));
        Self::all()
            .chain(forward)
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
        let family =
            if needs_epilogue(spec) { Family::WarpgroupEpilogue } else { Family::Warpgroup };
        Ok(fits.then_some(Self { family, ..any }))
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
            Family::WarpgroupEpilogue | Family::WarpgroupBackward => [128, 128],
            Family::Warpgroup => match self.dim {
                64 => [192, 128],
                128 => [128, 176],
                _ => [128, 80],
            },
            Family::General if matches!(self.dtype, DType::F64) || self.dim == 32 => [32, 32],
            Family::General | Family::Mfma => [64, 64],
        }
    }

    /// Rows (queries, in the forward pass perhaps pairs of query and head) and keys per tile of the
    /// kernels on tensor cores whose left operand is queries; `ForwardShape::rows` of
    /// `kernels/forward_matrix.cuh`, `QUERIES_ROWS` of `kernels/backward_queries_matrix.cuh`.
    pub(crate) const fn queries_matrix_tile(self) -> [usize; 2] {
        let has_wide_rows = self.dim <= 128 || matches!(self.family, Family::Mfma);
        [if has_wide_rows { 128 } else { 64 }, self.tile()[1]]
    }

    /// Rows and keys per tile of `forward_decode`, which has the rows of one MMA tile; `DecodeShape`
    /// of `kernels/forward_matrix.cuh`.
    pub(crate) const fn decode_tile(self) -> [usize; 2] {
        [if matches!(self.family, Family::Mfma) { 32 } else { 16 }, self.tile()[1]]
    }

    /// Keys of a block of the dK/dV kernel on tensor cores, whose tiles have
    /// [`Variant::tile`] keys; `KEYS_ROWS` of `kernels/backward_keys_matrix.cuh`.
    pub(crate) const fn keys_matrix_rows(self) -> usize {
        if self.dim <= 128 || matches!(self.family, Family::Mfma) { 64 } else { 32 }
    }

    /// Threads per block of one of its kernels. On tensor cores `FORWARD_THREADS` of
    /// `kernels/forward_matrix.cuh` and `BACKWARD_THREADS` of `kernels/backward_matrix.cuh`; on
    /// warpgroups one producer, and a consumer for each 64 rows of a tile.
    pub(crate) fn threads(self, kernel: &str) -> u32 {
        match self.family {
            Family::General if GENERAL_KERNELS.contains(&kernel) => THREADS,
            Family::General => 128,
            Family::Mfma => 256,
            _ => 128 * (1 + self.consumers() as u32),
        }
    }

    const fn consumers(self) -> usize {
        self.tile()[0] / 64
    }

    /// Rows of the largest KV tile of these kernels, at multiples of which the ring splits a block
    /// into up to four parts. Other tiles that are powers of two are then whole, too. Tiles of 176
    /// or 80 keys are not multiples of those of the backward pass, which then has up to three
    /// partial tiles more, in the last block that a rank receives: of 8,192 keys and 128 dims 66
    /// tiles instead of
    /// 64. Parts of whole backward tiles would cost the forward pass as much: 48 tiles instead of
    /// 47.
    pub(crate) fn kv_tile(variants: [Self; 2]) -> u64 {
        let [one, other] = variants.map(|variant| variant.tile()[1] as u64);
        one.max(other)
    }

    /// Bytes of a chunk of keys or values that one stage of `forward_matrix` holds;
    /// `CHUNK_ELEMENTS` of `kernels/chunk_stream.cuh`.
    pub(crate) const CHUNK_BYTES: usize = 64 * 64 * 2;

    /// Stages of the forward kernels on tensor cores, for a range of keys or all of them;
    /// `SPLIT_STAGES` and `FORWARD_STAGES` of `kernels/forward_matrix.cuh`.
    pub(crate) const fn matrix_stages(dim: usize, is_range: bool) -> usize {
        if dim <= 64 || is_range { 4 } else { 2 }
    }

    /// Bytes of all stages of `forward_decode`; `DECODE_STAGES` of `kernels/forward_matrix.cuh`.
    pub(crate) const DECODE_STAGE_BYTES: usize = 64 * 1024;

    /// Bytes of keys or values that one stage of `forward_decode` holds: 64 rows of up to 128 dims.
    #[cfg(test)]
    pub(crate) const fn decode_chunk_bytes(dim: usize) -> usize {
        if dim <= 64 { Self::CHUNK_BYTES } else { 2 * Self::CHUNK_BYTES }
    }

    /// Bytes of dynamic shared memory per launch of one of its kernels. Forward on tensor cores:
    /// `ForwardShape::Storage` of `kernels/forward_matrix.cuh` (q, stages). Backward on tensor
    /// cores: `QueriesStorage` and `KeysStorage` of `kernels/backward_queries_matrix.cuh` and
    /// `kernels/backward_keys_matrix.cuh` (own rows of two operands; two stages; two floats per
    /// query, for dK and dV three of a tile's, and the exchanged scores in f32; on matrix cores own
    /// rows and statistics for dQ are in registers, and one stage serves dK and dV). Forward on
    /// warpgroups: `SharedStorage` of `kernels/warpgroup.cuh` (q; K and V, two stages each; two
    /// work tiles; 12 mbarriers). Backward: `BackwardStorage` of `kernels/backward_warpgroup.cuh`
    /// (own rows of two operands; their streamed rows, two stages of 128 or four of 64; statistics
    /// of two floats per streamed row; two mbarriers per stage).
    pub fn dynamic_shared_bytes(self, kernel: &str) -> u32 {
        let ([queries, keys], dim) = (self.tile(), self.dim);
        let bytes = match self.family {
            Family::General => match kernel {
                "forward_matrix" | SPLIT_KERNEL => {
                    let stages = Self::matrix_stages(dim, kernel == SPLIT_KERNEL);
                    self.queries_matrix_tile()[0] * dim * 2 + stages * Self::CHUNK_BYTES
                }
                DECODE_KERNEL => self.decode_tile()[0] * dim * 2 + Self::DECODE_STAGE_BYTES,
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
            Family::Mfma => match kernel {
                "backward_keys_matrix" => 2 * 32 * dim * 2 + 64 * 32 * 4 + 3 * queries * 4,
                // two stages, of 64 or 32 rows: see `Stream` of `kernels/matrix_amd.cuh`
                "backward_queries_matrix" => 2 * 32 * dim.min(128) * 2,
                // or the results of a wave
                _ => (2 * 64 * dim.min(128) * 2).max(64 * 8 + 32 * dim * 4),
            },
            Family::Warpgroup | Family::WarpgroupEpilogue => {
                let tiles = queries * dim * 2 + 4 * keys * dim * 2;
                tiles + 2 * 16 + 12 * 8
            }
            Family::WarpgroupBackward => {
                let (rows, stages) = match kernel {
                    "backward_statistics" => return 0,
                    "backward_queries_warpgroup" => (128, 2),
                    _ => (64, 4),
                };
                let own = 2 * 128 * dim * 2;
                let streamed = 2 * stages * rows * dim * 2;
                own + streamed + stages * rows * 12 + 2 * stages * 8
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

    /// True if several ranges of keys have a forward kernel of their own, with more stages.
    pub(crate) const fn has_split_kernel(self) -> bool {
        self.has_matrix() && self.dim > 64 && matches!(self.family, Family::General)
    }

    /// Name of the forward kernel of a variant on warpgroups.
    pub(crate) const fn forward_on_warpgroups(self) -> &'static str {
        if matches!(self.family, Family::WarpgroupEpilogue) {
            "forward_warpgroup_epilogue"
        } else {
            "forward_warpgroup"
        }
    }

    /// Names of its kernels, of GPUs of NVIDIA or AMD.
    pub fn kernels(self, api: Api) -> Vec<&'static str> {
        match self.family {
            Family::General if api == Api::Hip => GENERAL_KERNELS.to_vec(),
            Family::Mfma => MATRIX_KERNELS.into_iter().chain([DECODE_KERNEL]).collect(),
            Family::Warpgroup | Family::WarpgroupEpilogue => vec![self.forward_on_warpgroups()],
            Family::WarpgroupBackward => WARPGROUP_BACKWARD_KERNELS.to_vec(),
            Family::General => {
                let matrix = MATRIX_KERNELS.into_iter().filter(|_| self.has_matrix());
                let split = self.has_split_kernel().then_some(SPLIT_KERNEL);
                let decode = self.has_matrix().then_some(DECODE_KERNEL);
                GENERAL_KERNELS.into_iter().chain(matrix).chain(split).chain(decode).collect()
            }
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
        let mut options =
            vec![define("DTYPE", dtype), define("TILE", self.tile()[1]), define("DIM", self.dim)];
        if self.family == Family::Mfma {
            options.push("-DANNULUS_MATRIX".into());
        } else if self.family != Family::General {
            options.push(define("CONSUMERS", self.consumers()));
        }
        if self.family == Family::WarpgroupEpilogue {
            options.push("-DANNULUS_EPILOGUE".into());
        }
        options
    }
}

impl std::fmt::Display for Variant {
    /// Writes element type, dim and, for warpgroups, the family.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let family = match self.family {
            Family::General => "",
            Family::Mfma => " mfma",
            Family::Warpgroup => " warpgroup",
            Family::WarpgroupEpilogue => " warpgroup epilogue",
            Family::WarpgroupBackward => " warpgroup backward",
        };
        write!(f, "{} {}{family}", self.dtype, self.dim)
    }
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

/// GPU features that the kernels for 16-bit elements use. f32 and f64 are the same at every level.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Level {
    /// Scalar multiply-adds: any supported GPU.
    Plain,
    /// Matrix units, forward and backward. Tensor cores by `mma.sync`: any supported NVIDIA GPU.
    /// Matrix cores by MFMA: AMD's gfx90a, gfx942 and gfx950.
    Matrix,
    /// Also forward and backward on warpgroups (`wgmma`, TMA): compute capability 9.0 only. What
    /// these cannot serve is computed as at [`Level::Matrix`]: specs beyond
    /// [`crate::Variant::on_warpgroups`] and [`crate::Variant::backward_on_warpgroups`], passes of
    /// few queries ([`crate::Cuda::MIN_WARPGROUP_ROWS`]), and dK and dV of a rank whose own queries
    /// TMA cannot read (address and strides of q and dout that are multiples of 16 bytes).
    Warpgroup,
}

impl Level {
    /// All levels, lowest first.
    pub const ALL: [Self; 3] = [Self::Plain, Self::Matrix, Self::Warpgroup];

    /// Environment variable that names the level of [`crate::Cuda::open`] or
    /// [`crate::Cuda::open_hip`].
    pub const fn variable(api: Api) -> &'static str {
        match api {
            Api::Cuda => "ANNULUS_CUDA_LEVEL",
            Api::Hip => "ANNULUS_HIP_LEVEL",
        }
    }

    /// Reads the level from the [`Level::variable`] of an interface; `None` if it is not set.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if its value names no level.
    pub fn forced(api: Api) -> Result<Option<Self>> {
        Self::read(api, |variable| std::env::var_os(variable))
    }

    fn read(api: Api, value_of: impl Fn(&str) -> Option<OsString>) -> Result<Option<Self>> {
        let variable = Self::variable(api);
        let Some(value) = value_of(variable) else { return Ok(None) };
        let names = Self::ALL.map(Self::name).join(", ");
        let found = Self::ALL.into_iter().find(|level| value == level.name());
        found
            .map(Some)
            .ok_or_else(|| Error::invalid(variable, value.display(), format!("one of {names}")))
    }

    /// Name in [`Level::variable`] and in messages.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Matrix => "matrix",
            Self::Warpgroup => "warpgroup",
        }
    }

    /// Returns the highest level that the device and the compiler support: the level if none is
    /// requested. It was the fastest one on an H200 (`docs/cuda.md`).
    pub(crate) fn highest(device: &Device, compiler: &Compiler) -> Self {
        let mut highest_first = Self::ALL.into_iter().rev();
        let served = highest_first.find(|level| level.check(device, compiler).is_ok());
        served.unwrap_or(Self::Plain)
    }

    /// Checks that the device and the compiler support the level.
    ///
    /// # Errors
    /// [`Error::Unsupported`]; as [`Compiler::target`].
    pub(crate) fn check(self, device: &Device, compiler: &Compiler) -> Result<()> {
        let what = format!("{} level {}", backend_name(device.api()), self.name());
        if self == Self::Plain {
            return Ok(());
        }
        let architecture = match device.gpu() {
            Gpu::Amd(name) if self == Self::Matrix && has_matrix_cores(name) => return Ok(()),
            Gpu::Amd(name) => {
                return Err(Error::unsupported(what, format!("{} ({name})", device.name())));
            }
            Gpu::Nvidia(_) if self == Self::Matrix => return Ok(()),
            Gpu::Nvidia(architecture) => *architecture,
        };
        if !device.has_tensor_maps() {
            return Err(Error::unsupported(what, "a driver without cuTensorMapEncodeTiled"));
        }
        let (kind, _) = compiler.target(device.gpu())?;
        // PTX for an older architecture has no wgmma or TMA
        if architecture != Architecture::HOPPER || kind != ImageKind::Cubin {
            let device = format!("{} (compute capability {architecture})", device.name());
            return Err(Error::unsupported(what, device));
        }
        Ok(())
    }
}

/// True for the AMD GPUs whose matrix instructions `kernels/primitives_amd.h` uses: `name` is the
/// full name, such as `gfx90a:sramecc+:xnack-`.
fn has_matrix_cores(name: &str) -> bool {
    let target = name.split(':').next().unwrap_or(name);
    ["gfx90a", "gfx942", "gfx950"].contains(&target)
}

/// Name of the backend on GPUs of an interface.
pub(crate) const fn backend_name(api: Api) -> &'static str {
    match api {
        Api::Cuda => "cuda",
        Api::Hip => "hip",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_parse_from_their_names_only_and_each_interface_has_a_variable() {
        let read = |api, set: &str, value: &str| {
            Level::read(api, |variable| (variable == set).then(|| value.into()))
        };
        for (api, variable, other) in [
            (Api::Cuda, "ANNULUS_CUDA_LEVEL", "ANNULUS_HIP_LEVEL"),
            (Api::Hip, "ANNULUS_HIP_LEVEL", "ANNULUS_CUDA_LEVEL"),
        ] {
            for level in Level::ALL {
                assert_eq!(read(api, variable, level.name()), Ok(Some(level)));
            }
            assert_eq!(read(api, other, "4"), Ok(None));
            let error = read(api, variable, "4").unwrap_err();
            let Error::InvalidArgument { argument, .. } = &error else { panic!("{error}") };
            assert_eq!(argument, variable);
        }
    }
}
