//! The seam: which kernels serve which call.

use std::{
    collections::HashMap,
    ops::Range,
    sync::{Arc, Mutex, PoisonError},
};

use annulus_core::{Backend, Block, Error, Gradients, Inputs, Local, Outputs, Result, Saved, Spec, Tick};
use annulus_device_cuda::{Cache, Compiler, CompilerSymbols, CudaBuffer, CudaSpace, Device, Event, Stream, Symbols};

use crate::{
    Level, backward, backward_keys, backward_queries, bias_gradient, finish, forward,
    kernels::{Kernels, Variant, WarpgroupKernels},
    records,
    workspace::{Workspace, slopes},
};

/// Attention on one NVIDIA GPU.
///
/// # Examples
/// ```
/// match annulus_cuda::Cuda::open(0) {
///     Ok(cuda) => println!("{}", cuda.stream().device().name()),
///     // one line that says what this machine lacks
///     Err(error) => println!("{error}"),
/// }
/// ```
#[derive(Debug, Clone)]
pub struct Cuda {
    stream: Stream,
    compiler: Compiler,
    /// Options after those of the variant.
    options: Vec<String>,
    level: Level,
    known: Arc<Mutex<Known>>,
}

/// What has been compiled.
#[derive(Debug, Default)]
struct Known {
    kernels: HashMap<Variant, Kernels>,
    on_warpgroups: HashMap<Variant, WarpgroupKernels>,
}

impl Cuda {
    /// GPU number `ordinal` of this machine, with a stream of its own, at the level that [`Level::VARIABLE`] names.
    ///
    /// # Errors
    /// [`Error::Unsupported`] naming what is missing: driver, GPU, a compute capability of 8.0, compiler, or one that knows the GPU, or what the level
    /// needs; [`Error::InvalidArgument`] as [`Level::forced`].
    pub fn open(ordinal: usize) -> Result<Self> {
        let made = Self::with_symbols(Symbols::system(), CompilerSymbols::system, ordinal)?;
        Level::forced()?.map_or(Ok(made.clone()), |level| made.at_level(level))
    }

    /// As [`Cuda::open`] at [`Level::UNASKED`], through these functions; those of the compiler are looked for where there is a GPU to compile for.
    ///
    /// # Errors
    /// As [`Cuda::open`].
    pub fn with_symbols(driver: Result<Symbols>, compiler: impl FnOnce() -> Result<CompilerSymbols>, ordinal: usize) -> Result<Self> {
        let device = Device::with_symbols(driver?, ordinal)?;
        let compiler = Compiler::with_symbols(compiler()?, Cache::of_user())?;
        compiler.target(device.architecture())?;
        Ok(Self::on(Stream::new(&device)?, compiler, Vec::new()))
    }

    /// On this stream, with this compiler, at [`Level::UNASKED`]; `options` are given to the compiler after all others.
    pub fn on(stream: Stream, compiler: Compiler, options: Vec<String>) -> Self {
        Self { stream, compiler, options, level: Level::UNASKED, known: Arc::default() }
    }

    /// The same at another level.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the GPU, or the compiler for it, has not what the level needs.
    pub fn at_level(self, level: Level) -> Result<Self> {
        let device = self.stream.device();
        let architecture = device.architecture();
        if !level.runs_on(architecture, &self.compiler)? {
            let what = format!("cuda level {}", level.name());
            return Err(Error::unsupported(what, format!("{} (compute capability {architecture})", device.name())));
        }
        Ok(Self { level, known: Arc::default(), ..self })
    }

    /// The level at which it computes.
    pub const fn level(&self) -> Level {
        self.level
    }

    /// The variant whose forward kernel serves this spec.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if none does.
    pub fn forward_variant(&self, spec: &Spec) -> Result<Variant> {
        let on_warpgroups = if self.level == Level::Warpgroup { Variant::on_warpgroups(spec)? } else { None };
        on_warpgroups.map_or_else(|| Variant::of(spec), Ok)
    }

    /// Where its work goes. A caller's own work on the tensors belongs there, or must be ordered with it by events.
    pub const fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Compiles and loads what serves a spec, or finds it.
    fn kernels(&self, spec: &Spec) -> Result<Kernels> {
        let (variant, forward) = (Variant::of(spec)?, self.forward_variant(spec)?);
        let (device, compiler, options) = (self.stream.device(), &self.compiler, &self.options);
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let kernels = found(&mut known.kernels, variant, || Kernels::new(device, compiler, variant, self.level, options))?;
        let on_warpgroups = (forward != variant)
            .then(|| found(&mut known.on_warpgroups, forward, || WarpgroupKernels::new(device, compiler, forward, options)))
            .transpose()?;
        Ok(Kernels { warpgroup: on_warpgroups, ..kernels })
    }

    /// After what has been queued, which touches these buffers.
    pub(crate) fn after(&self, touched: &[&CudaBuffer]) -> Result<Event> {
        let event = self.stream.record()?;
        touched.iter().for_each(|buffer| buffer.touched_before(&event));
        Ok(event)
    }

    /// Lets work from here on wait for a block, be it ready or still used by another stream.
    pub(crate) fn wait_for(&self, block: &Block<'_, CudaSpace>) -> Result<()> {
        self.stream.wait_for(block.ready)
    }
}

/// What is known of a variant, or is made now.
fn found<T: Clone>(known: &mut HashMap<Variant, T>, variant: Variant, make: impl FnOnce() -> Result<T>) -> Result<T> {
    if let Some(kernels) = known.get(&variant) {
        return Ok(kernels.clone());
    }
    let kernels = make()?;
    known.insert(variant, kernels.clone());
    Ok(kernels)
}

impl std::fmt::Display for Cuda {
    /// GPU, compute capability, compiler and, if it is not the one that is taken unasked, the level.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (device, (major, minor)) = (self.stream.device(), self.compiler.version());
        write!(f, "{}, compute capability {}, NVRTC {major}.{minor}", device.name(), device.architecture())?;
        if self.level == Level::UNASKED { Ok(()) } else { write!(f, ", level {}", self.level.name()) }
    }
}

impl Backend for Cuda {
    type Space = CudaSpace;
    type Workspace = Workspace;

    fn name(&self) -> &'static str {
        "cuda"
    }

    fn arithmetic(&self) -> String {
        // the functions e^x and tanh are the compiler's
        format!("cuda, NVRTC {:?}, level {}", self.compiler.version(), self.level.name())
    }

    /// Everything but head and value dims above [`Variant::MOST_DIM`] and bias functions other than ALiBi. Products of f32 inputs are true f32
    /// whatever [`Spec::precision`] allows.
    ///
    /// # Errors
    /// As [`Spec::validate`]; [`Error::Unsupported`].
    fn supports(&self, spec: &Spec) -> Result<()> {
        spec.validate()?;
        slopes(spec)?;
        Variant::of(spec)?;
        self.compiler.target(self.stream.device().architecture()).map(|_| ())
    }

    fn allocate(&self, bytes: u64) -> Result<CudaBuffer> {
        CudaBuffer::new(self.stream.device(), bytes)
    }

    fn workspace(&self, local: &Local, backward: bool) -> Result<Workspace> {
        let kernels = self.kernels(&local.spec)?;
        Workspace::new(local, kernels, backward, &self.stream)
    }

    fn update(&self, workspace: &mut Workspace, local: &Local) -> Result<()> {
        workspace.update(local, self.stream.device())
    }

    fn pack(&self, workspace: &mut Workspace, inputs: &Inputs<'_, CudaSpace>, into: &mut CudaBuffer) -> Result<Event> {
        records::pack(self, workspace, inputs, into)
    }

    fn begin(&self, workspace: &mut Workspace, _: &Inputs<'_, CudaSpace>) -> Result<()> {
        forward::begin(self, workspace)
    }

    fn attend(
        &self,
        workspace: &mut Workspace,
        inputs: &Inputs<'_, CudaSpace>,
        block: &Block<'_, CudaSpace>,
        tick: Tick<'_>,
    ) -> Result<()> {
        if tick().is_break() {
            return Ok(());
        }
        forward::attend(self, workspace, inputs, block)
    }

    fn finish(&self, workspace: &mut Workspace, inputs: &Inputs<'_, CudaSpace>, outputs: &mut Outputs<'_, CudaSpace>) -> Result<()> {
        finish::finish(self, workspace, inputs, outputs)
    }

    fn begin_backward(&self, workspace: &mut Workspace, _: &Inputs<'_, CudaSpace>, saved: &Saved<'_, CudaSpace>) -> Result<()> {
        backward::begin(self, workspace, saved)
    }

    fn attend_queries(
        &self,
        workspace: &mut Workspace,
        inputs: &Inputs<'_, CudaSpace>,
        saved: &Saved<'_, CudaSpace>,
        block: &Block<'_, CudaSpace>,
        tick: Tick<'_>,
    ) -> Result<()> {
        if tick().is_break() {
            return Ok(());
        }
        backward_queries::attend_queries(self, workspace, inputs, saved, block)?;
        bias_gradient::add(self, workspace, inputs, saved, block)
    }

    fn attend_keys(
        &self,
        workspace: &mut Workspace,
        inputs: &Inputs<'_, CudaSpace>,
        saved: &Saved<'_, CudaSpace>,
        block: &Block<'_, CudaSpace>,
        fresh: &mut CudaBuffer,
        tick: Tick<'_>,
    ) -> Result<Event> {
        if tick().is_break() {
            return self.stream.record();
        }
        backward_keys::attend_keys(self, workspace, inputs, saved, block, fresh)
    }

    fn pack_queries(
        &self,
        workspace: &mut Workspace,
        inputs: &Inputs<'_, CudaSpace>,
        saved: &Saved<'_, CudaSpace>,
        into: &mut CudaBuffer,
    ) -> Result<Event> {
        records::pack_queries(self, workspace, inputs, saved, into)
    }

    fn attend_keys_home(
        &self,
        workspace: &mut Workspace,
        inputs: &Inputs<'_, CudaSpace>,
        queries: &Block<'_, CudaSpace>,
        home: &mut CudaBuffer,
        tick: Tick<'_>,
    ) -> Result<()> {
        if tick().is_break() {
            return Ok(());
        }
        backward_keys::attend_keys_home(self, workspace, inputs, queries, home)
    }

    fn combine(
        &self,
        workspace: &mut Workspace,
        into: &mut CudaBuffer,
        from: &CudaBuffer,
        ready: &Event,
        places: &[(Range<u64>, Range<u64>)],
        add: bool,
    ) -> Result<Event> {
        records::combine(self, workspace, into, from, ready, places, add)
    }

    fn finish_backward(
        &self,
        workspace: &mut Workspace,
        inputs: &Inputs<'_, CudaSpace>,
        home: &CudaBuffer,
        gradients: &mut Gradients<'_, CudaSpace>,
    ) -> Result<()> {
        backward::finish(self, workspace, inputs, home, gradients)
    }
}
