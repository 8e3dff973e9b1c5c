//! The backend that `--backend` chooses, opened.

use std::time::{Duration, Instant};

#[cfg(feature = "cuda")]
use annulus::backend::cuda::device::Api;
use annulus::{
    Attention, Cache, CacheShape, Dims, Plan, Runtime, Setup,
    backend::{BackendName, Cpu},
    comm::trace::{Trace, TraceLog},
};
#[cfg(any(feature = "wgpu", feature = "cuda"))]
use annulus_core::Control;
use annulus_core::{Backend, Error, HostTensors, Result};
use annulus_cpu::Isa;
use clap::Args;

#[cfg(feature = "cuda")]
use crate::gpus::Gpus;
use crate::{
    arguments::{
        ring::TransportName,
        values::{backend, whole},
    },
    failure::{Failure, Outcome},
    job::{Job, RankBackend, RankEndpoint},
};

/// Flags that choose the backend and its device.
#[derive(Debug, Clone, Args)]
pub(crate) struct DeviceFlags {
    /// Compute backend
    #[arg(long, default_value = "cpu", value_parser = backend())]
    pub(crate) backend: BackendName,
    /// Device number, counted from 0 as `annulus doctor` lists them. Default: the ranks of a node
    /// use its GPUs in turn; with wgpu the first and those of its kind
    #[arg(long, value_name = "N", value_parser = whole)]
    pub(crate) device: Option<usize>,
    /// Transport between ranks. Messages of `decode` and `measure` are in host memory: decode
    /// refuses nccl, and measure takes threads or mpi for it
    #[arg(long, value_enum, default_value = "auto")]
    pub(crate) transport: TransportName,
}

impl DeviceFlags {
    /// Opens the backend, and runs `work` in a job of `subcommand`.
    ///
    /// # Ordering
    /// Collective over the processes.
    /// # Errors
    /// Those of [`BackendChoice::open`], [`Job::start`] and `work`.
    pub(crate) fn run_job(
        &self,
        subcommand: &'static str,
        deadline: Duration,
        work: impl FnOnce(&mut Job, BackendChoice) -> Outcome,
    ) -> Outcome {
        let backend = BackendChoice::open(self, deadline)?;
        let mut job = Job::start(subcommand, self.transport, deadline)?;
        let done = work(&mut job, backend);
        job.end(done)
    }
}

/// Opened backend, from which the ranks of this process are created.
#[derive(Debug)]
pub(crate) enum BackendChoice {
    /// Host memory and SIMD.
    Cpu,
    /// One GPU or several equal ones, shared by the ranks of this process.
    #[cfg(feature = "wgpu")]
    Wgpu(annulus::backend::WgpuDevices),
    /// GPUs of NVIDIA or of AMD, shared by the ranks of this process.
    #[cfg(feature = "cuda")]
    Cuda(Gpus),
}

impl BackendChoice {
    /// Name on the command line.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            #[cfg(feature = "wgpu")]
            Self::Wgpu(_) => "wgpu",
            #[cfg(feature = "cuda")]
            Self::Cuda(gpus) => gpus.name(),
        }
    }

    /// Describes the backend by its name and, for CUDA and HIP, by the transport of its blocks.
    pub(crate) fn description(&self) -> String {
        match self {
            #[cfg(feature = "cuda")]
            Self::Cuda(gpus) => format!("{}, blocks {}", self.name(), gpus.link()),
            _ => self.name().to_owned(),
        }
    }

    /// Opens the backend that the flags name. Subcommands do this before they read any file.
    /// `deadline` bounds the rendezvous of NCCL's ranks.
    ///
    /// # Errors
    /// [`Error::Unsupported`] naming what this build or this machine has; [`Failure::Usage`] if an
    /// environment variable forces an unknown instruction set or level, or if a device is given for
    /// a backend without devices.
    pub(crate) fn open(flags: &DeviceFlags, deadline: Duration) -> Outcome<Self> {
        let DeviceFlags { backend: name, device, transport } = *flags;
        #[cfg(not(feature = "cuda"))]
        let _: Duration = deadline;
        if transport == TransportName::Nccl {
            if !cfg!(feature = "nccl") {
                return Err(transport.missing());
            }
            if !matches!(name, BackendName::Cuda | BackendName::Hip) {
                let by = format!(
                    "backend {name}, whose blocks are in host memory; use --backend cuda or hip"
                );
                return Err(Error::unsupported("transport nccl", by).into());
            }
        }
        match (name, device) {
            (BackendName::Cpu, Some(device)) => Err(Failure::usage(
                "--device",
                device,
                "nothing: the backend cpu has no devices to choose from",
            )),
            (BackendName::Cpu, None) => Isa::chosen().map(|_| Self::Cpu).map_err(Failure::of_flags),
            #[cfg(feature = "wgpu")]
            (BackendName::Wgpu, device) => {
                let opened = annulus::backend::WgpuDevices::find(device);
                Ok(Self::Wgpu(opened.map_err(|error| Failure::of_flags(of_device(device, error)))?))
            }
            #[cfg(feature = "cuda")]
            (BackendName::Cuda | BackendName::Hip, device) => match Gpus::open(
                if name == BackendName::Hip { Api::Hip } else { Api::Cuda },
                device,
                transport,
                deadline,
            ) {
                Err(Failure::Library(error)) => Err(of_device(device, error).into()),
                opened => opened.map(Self::Cuda),
            },
            (missing, _) => Err(not_in_this_build(missing).into()),
        }
    }

    /// Plans one rank. On the CPU it has `threads` threads.
    ///
    /// # Ordering
    /// Collective over the ranks.
    pub(crate) fn plan(
        &self,
        threads: usize,
        endpoint: RankEndpoint,
        setup: &Setup,
        dims: Dims,
    ) -> Result<Plan> {
        self.of_rank(threads, endpoint, setup, dims, None).map(|(plan, _)| plan)
    }

    /// As [`BackendChoice::plan`], with a log of its messages, whose time zero is `start`.
    pub(crate) fn traced_plan(
        &self,
        threads: usize,
        endpoint: RankEndpoint,
        setup: &Setup,
        dims: Dims,
        start: Instant,
    ) -> Result<(Plan, TraceLog)> {
        let (plan, log) = self.of_rank(threads, endpoint, setup, dims, Some(start))?;
        log.map(|log| (plan, log)).ok_or_else(|| Error::internal("a trace has no log"))
    }

    fn of_rank(
        &self,
        threads: usize,
        endpoint: RankEndpoint,
        setup: &Setup,
        dims: Dims,
        start: Option<Instant>,
    ) -> Result<(Plan, Option<TraceLog>)> {
        match self {
            Self::Cpu => plan((Cpu::new(threads)?, endpoint.of_host()), setup, dims, start),
            #[cfg(feature = "wgpu")]
            Self::Wgpu(devices) => plan(devices.rank(endpoint.of_host())?, setup, dims, start),
            #[cfg(feature = "cuda")]
            Self::Cuda(gpus) => plan(gpus.rank(endpoint)?, setup, dims, start),
        }
    }

    /// Creates one rank of an empty KV cache. On the CPU it has `threads` threads.
    ///
    /// # Ordering
    /// Collective over the ranks.
    pub(crate) fn cache(
        &self,
        threads: usize,
        endpoint: RankEndpoint,
        attention: &Attention,
        runtime: &Runtime,
        shape: CacheShape,
    ) -> Result<Cache> {
        match self {
            Self::Cpu => {
                let cpu = Cpu::new(threads)?;
                Cache::with_backend(attention, runtime, shape, cpu, endpoint.of_host())
            }
            #[cfg(feature = "wgpu")]
            Self::Wgpu(devices) => {
                let mut transport = endpoint.of_host();
                // the abort sends the reason to the ranks that wait for this one
                let gpu = devices.of_rank(&transport);
                let gpu = gpu.inspect_err(|error| transport.abort(error))?;
                let wgpu = annulus::backend::wgpu::Wgpu::on_host(gpu);
                Cache::with_backend(attention, runtime, shape, wgpu, transport)
            }
            #[cfg(feature = "cuda")]
            Self::Cuda(gpus) => {
                let cuda = gpus.of_rank(&endpoint);
                let mut transport = endpoint.of_host();
                let cuda = cuda.inspect_err(|error| transport.abort(error))?;
                Cache::with_backend(attention, runtime, shape, cuda.on_host(), transport)
            }
        }
    }
}

/// Plans a rank, with a log of its messages if there is a `start`.
fn plan<B: Backend<Space: HostTensors>>(
    (backend, transport): RankBackend<B>,
    setup: &Setup,
    dims: Dims,
    start: Option<Instant>,
) -> Result<(Plan, Option<TraceLog>)> {
    let Some(start) = start else {
        return Ok((Plan::with_backend(setup, dims, backend, transport)?, None));
    };
    let transport = Trace::new(transport, start);
    let log = transport.log();
    Ok((Plan::with_backend(setup, dims, backend, transport)?, Some(log)))
}

/// Error for a backend that this build does not have, with the command that builds it.
fn not_in_this_build(backend: BackendName) -> Error {
    let with =
        format!("`cargo build --release -p annulus-cli --features {}` adds it", backend.feature());
    Error::unsupported(
        format!("backend {backend}"),
        format!("this build, which has: {}; {with}", backends()),
    )
}

/// Adds the flag `--device` to an error of opening a device.
#[cfg(any(feature = "wgpu", feature = "cuda"))]
fn of_device(device: Option<usize>, error: Error) -> Error {
    match (device, error) {
        (Some(device), Error::Unsupported { what, by }) => {
            Error::Unsupported { what: format!("--device {device}: {what}"), by }
        }
        (Some(device), Error::InvalidArgument { argument, got, want }) => {
            Error::InvalidArgument { argument: format!("--device {device}: {argument}"), got, want }
        }
        (_, error) => error,
    }
}

/// Lists the backends of this build.
pub(crate) fn backends() -> String {
    let built = BackendName::ALL.into_iter().filter(|name| name.is_built());
    built.map(BackendName::name).collect::<Vec<_>>().join(", ")
}
