//! Ranks on GPUs: the backend for tensors in host memory, and the transport of its blocks, which
//! are in device memory.
//!
//! | function | blocks travel |
//! |---|---|
//! | [`wgpu_rank`], [`cuda_rank`] | staged through host memory, over any host transport |
//! | [`cuda_rank_over_nccl`] | from GPU to GPU; the host transport carries the control messages |
//! | [`cuda_rank_over_mpi`] | by MPI from device memory if the library takes it, else staged |

use std::{
    collections::BTreeMap,
    sync::{Mutex, PoisonError},
};

use annulus_comm::Staged;
use annulus_core::{Backend, Host, OnHost, Process, Result, Transport};
#[cfg(feature = "cuda")]
use annulus_cuda::device::Api;

/// A backend and the transport of its blocks, as [`crate::Plan::new`] takes them.
pub type Rank<B> = (B, Box<dyn Transport<<B as Backend>::Space>>);

/// Creates a rank on a wgpu device.
#[cfg(feature = "wgpu")]
pub fn wgpu_rank<T: Transport<Host> + 'static>(
    gpu: &annulus_wgpu::Gpu,
    transport: T,
) -> Rank<OnHost<annulus_wgpu::Wgpu>> {
    let copier = annulus_wgpu::Copier::new(gpu.clone());
    (annulus_wgpu::Wgpu::on_host(gpu.clone()), Box::new(Staged::new(transport, copier)))
}

/// Opened devices of this process by number.
#[derive(Debug)]
struct OpenedDevices<D> {
    by_number: Mutex<BTreeMap<usize, D>>,
    process: Process,
}

impl<D: Clone> OpenedDevices<D> {
    fn new() -> Self {
        Self { by_number: Mutex::default(), process: Process::current() }
    }

    /// Returns device `number`, which `open` opens once.
    fn get(&self, number: usize, open: impl FnOnce() -> Result<D>) -> Result<D> {
        self.process.check("device")?;
        let mut opened = self.by_number.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(device) = opened.get(&number) {
            return Ok(device.clone());
        }
        let device = open()?;
        opened.insert(number, device.clone());
        Ok(device)
    }
}

/// wgpu adapters of this process, each opened when its first rank needs it. Ranks on one adapter
/// share its device and its kernels.
#[cfg(feature = "wgpu")]
#[derive(Debug)]
pub struct WgpuDevices {
    /// Numbers of the adapters.
    numbers: Vec<usize>,
    opened: OpenedDevices<annulus_wgpu::Gpu>,
}

#[cfg(feature = "wgpu")]
impl WgpuDevices {
    /// Finds the adapters and opens the first of them. All ranks use adapter number `device`;
    /// without a number, the ranks of a node use its first adapter and all of the same kind (model,
    /// driver, API) round robin. Others, such as an integrated GPU, would delay the ring.
    ///
    /// # Errors
    /// As [`annulus_wgpu::Gpu::open`].
    pub fn find(device: Option<usize>) -> Result<Self> {
        let all = annulus_wgpu::Gpu::list();
        let numbers = match (device, all.first()) {
            (None, Some(first)) => all
                .iter()
                .filter(|other| first.is_same_kind(other))
                .map(|other| other.number)
                .collect(),
            (device, _) => vec![device.unwrap_or(0)],
        };
        let devices = Self { numbers, opened: OpenedDevices::new() };
        devices.get(0)?;
        Ok(devices)
    }

    /// Returns the number of adapters that ranks use.
    pub fn count(&self) -> usize {
        self.numbers.len()
    }

    /// Returns the adapter of the rank with this index on its node; it is opened once.
    ///
    /// # Errors
    /// As [`annulus_wgpu::Gpu::open`]; [`crate::Error::InvalidArgument`] in a forked child.
    pub fn get(&self, index: usize) -> Result<annulus_wgpu::Gpu> {
        let number = self.numbers.get(index % self.count().max(1)).copied().unwrap_or(0);
        let options = annulus_wgpu::Options { number, ..annulus_wgpu::Options::default() };
        self.opened.get(number, || annulus_wgpu::Gpu::open(&options))
    }

    /// Creates the rank at this end of `transport` on its adapter.
    ///
    /// # Errors
    /// As [`WgpuDevices::get`]; then the other ranks get [`crate::Error::Aborted`].
    pub fn rank<T: Transport<Host> + 'static>(
        &self,
        mut transport: T,
    ) -> Result<Rank<OnHost<annulus_wgpu::Wgpu>>> {
        let gpu = self.of_rank(&transport).inspect_err(|error| transport.abort(error))?;
        Ok(wgpu_rank(&gpu, transport))
    }

    /// Returns the adapter of the rank at this end of `transport`.
    ///
    /// # Errors
    /// As [`WgpuDevices::get`].
    pub fn of_rank<T: Transport<Host>>(&self, transport: &T) -> Result<annulus_wgpu::Gpu> {
        let nodes = transport.placement().map(annulus_core::Placement::nodes);
        self.get(index_on_node(transport.rank(), nodes))
    }
}

/// GPUs of NVIDIA or of AMD of this process, each opened when its first rank needs it. Ranks on one
/// GPU share its stream and its kernels.
#[cfg(feature = "cuda")]
#[derive(Debug)]
pub struct CudaDevices {
    api: Api,
    device: Option<usize>,
    count: usize,
    opened: OpenedDevices<annulus_cuda::Cuda>,
}

#[cfg(feature = "cuda")]
impl CudaDevices {
    /// Finds the visible GPUs. All ranks use GPU number `device`; without a number, the ranks of a
    /// node use its GPUs round robin.
    ///
    /// # Errors
    /// [`crate::Error::Unsupported`] without a driver or a GPU that is new enough;
    /// [`crate::Error::InvalidArgument`] for a number that no GPU has.
    pub fn find(api: Api, device: Option<usize>) -> Result<Self> {
        let count = annulus_cuda::device::Device::count(api)?;
        device.map_or(Ok(()), |device| annulus_cuda::device::Device::check(api, device))?;
        Ok(Self { api, device, count, opened: OpenedDevices::new() })
    }

    /// Returns the interface of the GPUs' driver.
    pub const fn api(&self) -> Api {
        self.api
    }

    /// Returns the number of visible GPUs.
    pub const fn count(&self) -> usize {
        self.count
    }

    /// Returns GPU `number`, which is opened once.
    ///
    /// # Errors
    /// As [`annulus_cuda::Cuda::open`]; [`crate::Error::InvalidArgument`] in a forked child.
    pub fn get(&self, number: usize) -> Result<annulus_cuda::Cuda> {
        let open = match self.api {
            Api::Cuda => annulus_cuda::Cuda::open,
            Api::Hip => annulus_cuda::Cuda::open_hip,
        };
        self.opened.get(number, || open(number))
    }

    /// Returns the GPU of the rank at this end of `transport`.
    ///
    /// # Errors
    /// As [`CudaDevices::get`].
    pub fn of_rank<T: Transport<Host>>(&self, transport: &T) -> Result<annulus_cuda::Cuda> {
        let nodes = transport.placement().map(annulus_core::Placement::nodes);
        let index = index_on_node(transport.rank(), nodes);
        self.get(self.device.unwrap_or(index % self.count.max(1)))
    }
}

/// Returns the index of a rank among those of its node; without `nodes` all ranks are on one.
fn index_on_node(rank: usize, nodes: Option<&[usize]>) -> usize {
    nodes.map_or(rank, |nodes| {
        nodes.iter().take(rank).filter(|&node| Some(node) == nodes.get(rank)).count()
    })
}

/// Creates a rank on a GPU whose blocks are staged through pinned host memory.
///
/// # Errors
/// [`crate::Error::Device`], [`crate::Error::OutOfMemory`].
#[cfg(feature = "cuda")]
pub fn cuda_rank<T: Transport<Host> + 'static>(
    cuda: annulus_cuda::Cuda,
    transport: T,
) -> Result<Rank<OnHost<annulus_cuda::Cuda>>> {
    let copier = annulus_cuda::device::CudaCopier::new(cuda.stream().device())?;
    Ok((cuda.on_host(), Box::new(Staged::new(transport, copier))))
}

/// Creates a rank on a GPU whose blocks are sent by NCCL, or by RCCL on an AMD GPU. Every rank needs
/// a GPU of its own.
///
/// # Ordering
/// Collective over the ranks of `transport`, for at most `deadline`, as a rule
/// [`annulus_comm::nccl::STARTUP_DEADLINE`].
///
/// # Errors
/// As [`annulus_comm::nccl::Nccl::open`].
#[cfg(feature = "nccl")]
pub fn cuda_rank_over_nccl<T: Transport<Host> + 'static>(
    cuda: annulus_cuda::Cuda,
    transport: T,
    deadline: std::time::Duration,
) -> Result<Rank<OnHost<annulus_cuda::Cuda>>> {
    let nccl = annulus_comm::nccl::Nccl::open(transport, cuda.stream().device(), deadline)?;
    Ok((cuda.on_host(), Box::new(nccl)))
}

/// Creates a rank on a GPU over MPI. Returns true beside it if MPI reads and writes device memory;
/// [`annulus_comm::mpi::GpuAwareness`] of the GPU's runtime decides that.
///
/// # Errors
/// As [`annulus_comm::mpi::DeviceMpi::new`] and [`annulus_comm::mpi::GpuAwareness::decides`].
#[cfg(all(feature = "cuda", feature = "mpi"))]
pub fn cuda_rank_over_mpi(
    cuda: annulus_cuda::Cuda,
    transport: annulus_comm::mpi::Mpi,
) -> Result<(Rank<OnHost<annulus_cuda::Cuda>>, bool)> {
    use annulus_comm::mpi::{DeviceMpi, GpuAwareness};
    let device = cuda.stream().device();
    if !GpuAwareness::of_runtime(device.api().into()).decides()? {
        return Ok((cuda_rank(cuda, transport)?, false));
    }
    let device = DeviceMpi::new(transport, device)?;
    Ok(((cuda.on_host(), Box::new(device)), true))
}

/// Creates a rank on a GPU over any host transport, over MPI by [`cuda_rank_over_mpi`].
#[cfg(feature = "cuda")]
pub(crate) fn cuda_rank_over<T: Transport<Host> + 'static>(
    cuda: annulus_cuda::Cuda,
    transport: T,
) -> Result<Rank<OnHost<annulus_cuda::Cuda>>> {
    let mut transport = Some(transport);
    #[cfg(feature = "mpi")]
    {
        let any: &mut dyn std::any::Any = &mut transport;
        let mpi = any.downcast_mut::<Option<annulus_comm::mpi::Mpi>>();
        if let Some(mpi) = mpi.and_then(Option::take) {
            return Ok(cuda_rank_over_mpi(cuda, mpi)?.0);
        }
    }
    let transport =
        transport.take().ok_or_else(|| annulus_core::Error::internal("no transport"))?;
    cuda_rank(cuda, transport)
}

#[cfg(all(test, feature = "cuda"))]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_counted_within_their_node() {
        let indices = |nodes: Option<&[usize]>| [0, 1, 2, 3].map(|rank| index_on_node(rank, nodes));
        assert_eq!(indices(None), [0, 1, 2, 3]);
        assert_eq!(indices(Some(&[0, 0, 1, 1])), [0, 1, 0, 1]);
        assert_eq!(indices(Some(&[0, 1, 0, 1])), [0, 0, 1, 1]);
    }
}
