//! Implementation of [`Backend`]: a GPU, its compiler, and the kernels compiled so far; and of
//! [`Workspace`].

use std::{
    collections::HashMap,
    ops::Range,
    sync::{Arc, Mutex, PoisonError},
};

use annulus_core::{
    Backend, BackwardInputs, BackwardMode, Capabilities, Error, Inputs, OnHost, Passes, RankShard,
    Result, Spec, Tick, View, Workspace, index, memory,
};
use annulus_device_cuda::{
    Api, Compiler, CompilerSymbols, CudaBuffer, CudaSpace, Device, Event, ImageCache, Stream,
    Symbols,
};

use crate::{
    Level,
    backward::CudaBackward,
    forward::CudaForward,
    forward_tiles::ForwardTiles,
    kernels::{Kernels, SourceEdit, THREADS, VariantKernels},
    pass_context::{PassContext, slopes},
    settled::Settled,
    state::{BackwardState, ForwardState, StateSizes, grow},
    variant::{Variant, backend_name},
};

/// Attention backend on one GPU: of NVIDIA by CUDA, of AMD by HIP.
///
/// # Examples
/// ```
/// match annulus_cuda::Cuda::open(0) {
///     Ok(cuda) => println!("{}", cuda.stream().device().name()),
///     // one line that names what this machine lacks
///     Err(error) => println!("{error}"),
/// }
/// ```
#[derive(Debug, Clone)]
pub struct Cuda {
    stream: Stream,
    compiler: Compiler,
    /// `None`: the kernel files as they are.
    edit: Option<SourceEdit>,
    level: Level,
    min_warpgroup_rows: usize,
    /// `None`: the multiprocessors of the GPU.
    forward_blocks: Option<usize>,
    /// Kernels loaded so far, shared by the clones of a backend.
    cache: Arc<Mutex<HashMap<Variant, Arc<VariantKernels>>>>,
}

impl Cuda {
    /// Fewest rows (queries × query heads of a KV head; with a mask per head, queries) of a rank
    /// for which the forward pass at [`Level::Warpgroup`] runs on warpgroups: one tile. A backward
    /// pass needs as many queries.
    pub const MIN_WARPGROUP_ROWS: usize = 128;

    /// Opens GPU `ordinal` with a stream of its own, at the level in [`Level::variable`]; by
    /// default at the highest that the GPU and the compiler support.
    ///
    /// # Errors
    /// [`annulus_core::Error::Unsupported`] naming what is missing: the driver, the GPU, compute
    /// capability 8.0, the compiler or its support for the GPU, or a requirement of the level;
    /// [`annulus_core::Error::InvalidArgument`] as [`Level::forced`].
    pub fn open(ordinal: usize) -> Result<Self> {
        Self::open_with(Api::Cuda, ordinal)
    }

    /// As [`Cuda::open`], on an AMD GPU by HIP and hipRTC.
    ///
    /// # Errors
    /// As [`Cuda::open`], of HIP.
    pub fn open_hip(ordinal: usize) -> Result<Self> {
        Self::open_with(Api::Hip, ordinal)
    }

    fn open_with(api: Api, ordinal: usize) -> Result<Self> {
        let made = Self::with_symbols(
            Symbols::system(api),
            || CompilerSymbols::system(api),
            ImageCache::of_user(),
            ordinal,
        )?;
        Level::forced(api)?.map_or(Ok(made.clone()), |level| made.at_level(level))
    }

    /// Uses this stream, a caller's perhaps ([`Stream::borrowed`]), with the compiler and at the
    /// level of [`Cuda::open`].
    ///
    /// # Errors
    /// As [`Cuda::open`].
    pub fn on_stream(stream: Stream) -> Result<Self> {
        let api = stream.device().api();
        let compiler = compiler(api, || CompilerSymbols::system(api), ImageCache::of_user())?;
        compiler.target(stream.device().gpu())?;
        let made = Self::on(stream, compiler);
        Level::forced(api)?.map_or(Ok(made.clone()), |level| made.at_level(level))
    }

    /// As [`Cuda::open`] at the highest supported level, with these functions and this cache.
    /// `compiler` is called only if there is a GPU to compile for. Without a compiler, the images
    /// that one has left in the cache are used; a plan that needs another one is an error.
    ///
    /// # Errors
    /// As [`Cuda::open`].
    pub fn with_symbols(
        driver: Result<Symbols>,
        compiler: impl FnOnce() -> Result<CompilerSymbols>,
        cache: Option<ImageCache>,
        ordinal: usize,
    ) -> Result<Self> {
        let device = Device::with_symbols(driver?, ordinal)?;
        let compiler = self::compiler(device.api(), compiler, cache)?;
        compiler.target(device.gpu())?;
        Ok(Self::on(Stream::new(&device)?, compiler))
    }

    /// Uses this stream and compiler, at the highest level that they support.
    pub fn on(stream: Stream, compiler: Compiler) -> Self {
        let level = Level::highest(stream.device(), &compiler);
        Self {
            stream,
            compiler,
            edit: None,
            level,
            min_warpgroup_rows: Self::MIN_WARPGROUP_ROWS,
            forward_blocks: None,
            cache: Arc::default(),
        }
    }

    /// Changes the level.
    ///
    /// # Errors
    /// [`annulus_core::Error::Unsupported`] if the GPU or the compiler does not support the level.
    pub fn at_level(self, level: Level) -> Result<Self> {
        level.check(self.stream.device(), &self.compiler)?;
        Ok(Self { level, ..self })
    }

    /// Replaces [`Cuda::MIN_WARPGROUP_ROWS`]. With 0, warpgroups serve any number of queries: for
    /// tests, and to measure where they are faster.
    #[must_use]
    pub fn with_min_warpgroup_rows(self, rows: usize) -> Self {
        Self { min_warpgroup_rows: rows, ..self }
    }

    /// Sets the most thread blocks of a forward launch on warpgroups. Each computes one tile of
    /// queries after the other until there are none. Default: one for each multiprocessor, as many
    /// as run at the same time. `usize::MAX`: one for each tile, whose end then overlaps with no
    /// other tile of its multiprocessor; for comparison. Results do not depend on it. 0 is 1.
    #[must_use]
    pub fn with_forward_blocks(self, blocks: usize) -> Self {
        Self { forward_blocks: Some(blocks.max(1)), ..self }
    }

    /// Compiles kernels whose texts a test has changed.
    #[doc(hidden)]
    #[must_use]
    pub fn edited(self, edit: SourceEdit) -> Self {
        Self { edit: Some(edit), cache: Arc::default(), ..self }
    }

    /// Level of the kernels.
    pub const fn level(&self) -> Level {
        self.level
    }

    /// Returns the variant whose forward kernel serves this spec, if there are enough queries
    /// ([`Cuda::MIN_WARPGROUP_ROWS`]).
    ///
    /// # Errors
    /// [`annulus_core::Error::Unsupported`] if none does.
    pub fn forward_variant(&self, spec: &Spec) -> Result<Variant> {
        if self.stream.device().api() == Api::Hip {
            return self.variant(Level::Matrix, spec, Variant::on_matrix_cores);
        }
        self.variant(Level::Warpgroup, spec, Variant::on_warpgroups)
    }

    /// As [`Cuda::forward_variant`], for the kernels of dQ, dK and dV.
    ///
    /// # Errors
    /// [`annulus_core::Error::Unsupported`] if none does.
    pub fn backward_variant(&self, spec: &Spec) -> Result<Variant> {
        if self.stream.device().api() == Api::Hip {
            return self.forward_variant(spec);
        }
        self.variant(Level::Warpgroup, spec, Variant::backward_on_warpgroups)
    }

    /// Returns the variant of a level, if it is this one and serves the spec; else the general one.
    fn variant(
        &self,
        level: Level,
        spec: &Spec,
        of_level: fn(&Spec) -> Result<Option<Variant>>,
    ) -> Result<Variant> {
        let found = if self.level == level { of_level(spec)? } else { None };
        found.map_or_else(|| Variant::of(spec), Ok)
    }

    /// Stream of all work. Work of the caller on the same tensors must be issued to it, or be
    /// ordered with it by events.
    pub const fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Wraps the backend for tensors in host memory. Blocks stay on the device: their transport is
    /// one of `annulus_core::HostViews<CudaSpace>`, such as NCCL or `annulus_comm::Staged`.
    pub fn on_host(self) -> OnHost<Self> {
        let stream = self.stream.clone();
        OnHost::new(self, stream)
    }

    /// Returns the kernels for a spec, compiling and loading them on first use.
    fn kernels(&self, spec: &Spec) -> Result<Kernels> {
        let general = Variant::of(spec)?;
        let device = self.stream.device();
        let mut cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        let mut of = |variant: Variant| -> Result<Arc<VariantKernels>> {
            if let Some(kernels) = cache.get(&variant) {
                return Ok(Arc::clone(kernels));
            }
            let loaded = VariantKernels::load(device, &self.compiler, variant, self.edit)?;
            let kernels = Arc::new(loaded);
            cache.insert(variant, Arc::clone(&kernels));
            Ok(kernels)
        };
        let of_general = of(general)?;
        let mut others = |variant: Option<Variant>| {
            variant.filter(|&variant| variant != general).map(&mut of).transpose()
        };
        let [forward, backward] =
            [self.forward_variant(spec)?, self.backward_variant(spec)?].map(Some);
        let (matrix, [warpgroup, backward_warpgroup]) = if device.api() == Api::Hip {
            (others(forward)?, [None, None])
        } else {
            let on_matrices = general.has_matrix() && self.level >= Level::Matrix && spec.normalize;
            (on_matrices.then(|| Arc::clone(&of_general)), [others(forward)?, others(backward)?])
        };
        Ok(Kernels {
            general: of_general,
            matrix,
            warpgroup,
            backward_warpgroup,
            min_rows: self.min_warpgroup_rows,
            most_blocks: self.forward_blocks.unwrap_or(device.multiprocessors()),
        })
    }
}

impl std::fmt::Display for Cuda {
    /// Writes GPU, compute capability, compiler, level, and a memory shared with the host.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let device = self.stream.device();
        write!(f, "{}, {}, {}", device.name(), device.gpu(), self.compiler.label())?;
        if self.compiler.is_cache_only() {
            write!(f, " (cached images only)")?;
        }
        write!(f, ", level {}", self.level.name())?;
        if device.shares_host_memory() {
            write!(f, ", memory shared with the host")?;
        }
        Ok(())
    }
}

/// Returns the compiler, or one that finds images in the cache only.
fn compiler(
    api: Api,
    symbols: impl FnOnce() -> Result<CompilerSymbols>,
    cache: Option<ImageCache>,
) -> Result<Compiler> {
    match symbols() {
        Ok(symbols) => Compiler::with_symbols(symbols, cache),
        Err(missing) if api == Api::Hip => Err(missing),
        Err(missing) => cache.and_then(Compiler::of_cache).ok_or(missing),
    }
}

impl Backend for Cuda {
    type Space = CudaSpace;
    type Workspace = CudaWorkspace;

    /// Supports everything but head and value dims above [`Variant::MAX_DIM`] and bias functions
    /// other than ALiBi. Products of f32 inputs are true f32 for every [`Spec::precision`].
    ///
    /// # Errors
    /// As [`Spec::validate`]; [`annulus_core::Error::Unsupported`].
    fn capabilities(&self, spec: &Spec) -> Result<Capabilities> {
        spec.validate()?;
        slopes(spec)?;
        let variants = [Variant::of(spec)?, self.forward_variant(spec)?];
        self.compiler.target(self.stream.device().gpu())?;
        let (name, level) = (backend_name(self.stream.device().api()), self.level.name());
        Ok(Capabilities {
            name,
            // e^x and tanh are implemented by the compiler's library
            numerics_id: format!("{name}, {}, level {level}", self.compiler.label()),
            probs_dtype: None,
            kv_tile: Variant::kv_tile(variants),
            reproducible: false,
            out_residual: false,
            second_derivatives: false,
            bias_table: false,
            statistics: false,
        })
    }

    fn allocate(&self, bytes: u64) -> Result<CudaBuffer> {
        CudaBuffer::new(self.stream.device(), bytes)
    }

    fn write_block(
        &self,
        into: &mut CudaBuffer,
        bytes: Range<u64>,
        fill: &mut dyn FnMut(&mut [u8]) -> Result<()>,
    ) -> Result<Event> {
        let mut filled =
            memory::zeroed("a write to a block", index(bytes.end.saturating_sub(bytes.start)))?;
        fill(&mut filled)?;
        into.write(&self.stream, bytes.start, &filled)
    }

    fn workspace(&self, shard: &RankShard, passes: Passes) -> Result<CudaWorkspace> {
        let kernels = self.kernels(&shard.spec)?;
        self.stream.device().set_range_copy(kernels.general.get("copy_ranges")?, THREADS);
        CudaWorkspace::new(shard, passes, &self.stream, kernels)
    }
}

/// Device memory of the passes of one rank, and cached block masks.
#[derive(Debug)]
pub struct CudaWorkspace {
    context: PassContext,
    forward: ForwardState,
    /// Present in a workspace for [`Passes::Both`].
    backward: Option<BackwardState>,
}

impl CudaWorkspace {
    pub(crate) fn new(
        shard: &RankShard,
        passes: Passes,
        stream: &Stream,
        kernels: Kernels,
    ) -> Result<Self> {
        let context = PassContext::new(stream, kernels, shard, passes)?;
        let sizes = StateSizes::of(shard, context.forward_tiles.ranges.most);
        let device = stream.device();
        let backward = match passes {
            Passes::Forward => None,
            Passes::Both => Some(BackwardState::new(&sizes, device)?),
        };
        Ok(Self { context, forward: ForwardState::new(&sizes, device)?, backward })
    }
}

impl Workspace for CudaWorkspace {
    type Space = CudaSpace;
    type Forward<'p> = Settled<CudaForward<'p>>;
    type Backward<'p> = Settled<CudaBackward<'p>>;

    /// Buffers that are large enough are kept.
    fn update(&mut self, shard: &RankShard) -> Result<()> {
        let tiles = ForwardTiles::of(&self.context.kernels, shard);
        let sizes = StateSizes::of(shard, tiles.ranges.most);
        let device = self.context.stream.device();
        grow(device, self.forward.buffers(), sizes.forward)?;
        if let Some(state) = &mut self.backward {
            grow(device, state.buffers(), sizes.backward)?;
        }
        self.context.update(shard);
        Ok(())
    }

    /// Not counted: masks, slopes and the tile counter.
    fn bytes(&self) -> u64 {
        let ForwardState { acc, max, sum, ties, partial } = &self.forward;
        let of_backward = self.backward.iter().flat_map(|state| {
            let BackwardState { statistics, dq, dbias, statistics_tiles, ranges } = state;
            [statistics, dq, dbias, statistics_tiles, ranges]
        });
        [acc, max, sum, ties, partial].into_iter().chain(of_backward).map(CudaBuffer::len).sum()
    }

    fn forward<'p>(
        &'p mut self,
        inputs: Inputs<View<'p, CudaSpace>>,
        tick: Tick<'_>,
    ) -> Result<Self::Forward<'p>> {
        let stream = self.context.stream.clone();
        let pass = CudaForward::begin(&mut self.context, &self.forward, inputs);
        Settled::new(&stream, inputs.into_tensors(), Ok(pass), tick)
    }

    fn backward<'p>(
        &'p mut self,
        inputs: BackwardInputs<View<'p, CudaSpace>>,
        _: BackwardMode,
        tick: Tick<'_>,
    ) -> Result<Self::Backward<'p>> {
        let state = self.backward.as_mut().ok_or_else(|| {
            Error::internal("a backward pass in a workspace allocated for forward passes only")
        })?;
        let stream = self.context.stream.clone();
        let pass = CudaBackward::begin(&mut self.context, state, inputs);
        Settled::new(&stream, inputs.into_tensors(), pass, tick)
    }
}
