//! Plans in a CUDA stream of the host's, on tensors in device memory.

use std::ffi::{c_int, c_void};

use annulus::{Error, Result, backend::BackendName};

use crate::{
    attention::{annulus_attention, change},
    options::{Description, HostStream},
};

/// Lets the plans of this attention compute in a CUDA stream of the host's, on tensors in device
/// memory.
///
/// `context` is a CUcontext of GPU options.device, `stream` a CUstream of it, NULL for the default
/// stream; pointers of the CUDA runtime (cudaStream_t, the primary context) are the same.
/// options.backend is ANNULUS_BACKEND_CUDA, and options.has_device is set. Then the tensors of a
/// pass are in memory of this context. A pass reads them after the work that the stream has been
/// given before, and may return before its own work is done: results are complete in the order of
/// the stream, and tensors live until then. The batch of annulus_plan_update stays in host memory.
///
/// Such a plan has the strategy ring. It is a rank over MPI, or an in-process ring of
/// one rank. Its calls leave `context` the current one of the thread. A context and a stream are
/// neither created nor destroyed, and live until all plans of this attention are destroyed.
///
/// # Errors
/// ANNULUS_INVALID_ARGUMENT for another backend, without a device, or for NULL as `context`.
/// ANNULUS_UNSUPPORTED in a library without the feature cuda (annulus_features).
///
/// # Safety
/// `context` and `stream` are as said.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn annulus_attention_set_cuda_stream(
    attention: *mut annulus_attention,
    context: *mut c_void,
    stream: *mut c_void,
) -> c_int {
    change(attention, |description| {
        if !cfg!(feature = "cuda") {
            let what = "a CUDA stream of the host's";
            return Err(Error::unsupported(what, "a library without the feature cuda"));
        }
        if description.backend_name != BackendName::Cuda {
            let want = "ANNULUS_BACKEND_CUDA for a CUDA stream";
            return Err(Error::invalid("backend", description.backend_name, want));
        }
        if description.device.is_none() {
            let want = "options.has_device = 1 and the GPU of the context";
            return Err(Error::invalid("device", "none", want));
        }
        if context.is_null() {
            return Err(Error::invalid("context", "NULL", "a CUcontext"));
        }
        let communicator = description.host_stream.and_then(|stream| stream.communicator);
        let (context, stream) = (context.expose_provenance(), stream.expose_provenance());
        description.host_stream = Some(HostStream { context, stream, communicator });
        Ok(())
    })
}

/// Lets keys, values and gradients travel over an NCCL communicator of the host's, after
/// [`annulus_attention_set_cuda_stream`]. Its ranks are those of the plan, which still needs MPI
/// for control messages.
///
/// The communicator is neither aborted nor destroyed: after a pass has failed, that is up to the
/// host. It lives until all plans of this attention are destroyed, and is used by one of them at a
/// time.
///
/// # Errors
/// ANNULUS_INVALID_ARGUMENT without a stream, or for NULL. ANNULUS_UNSUPPORTED in a library without
/// the feature nccl.
///
/// # Safety
/// `communicator` is an ncclComm_t of the stream's GPU, and no other code uses it while a plan is
/// made or a pass runs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn annulus_attention_set_nccl_communicator(
    attention: *mut annulus_attention,
    communicator: *mut c_void,
) -> c_int {
    change(attention, |description| {
        if !cfg!(feature = "nccl") {
            let what = "an NCCL communicator of the host's";
            return Err(Error::unsupported(what, "a library without the feature nccl"));
        }
        let Some(stream) = &mut description.host_stream else {
            let want = "annulus_attention_set_cuda_stream before";
            return Err(Error::invalid("stream", "none", want));
        };
        if communicator.is_null() {
            return Err(Error::invalid("communicator", "NULL", "an ncclComm_t"));
        }
        stream.communicator = Some(communicator.expose_provenance());
        Ok(())
    })
}

impl Description {
    /// Checks that nothing is in device memory.
    pub(crate) fn check_host_tensors(&self, by: &str) -> Result<()> {
        match self.host_stream {
            Some(_) => Err(Error::unsupported("tensors in device memory", by)),
            None => Ok(()),
        }
    }
}

#[cfg(all(feature = "cuda", feature = "mpi"))]
pub(crate) use on_device::over_mpi;
#[cfg(feature = "cuda")]
pub(crate) use on_device::{DevicePlan, over};

#[cfg(feature = "cuda")]
mod on_device {
    use std::ptr;

    #[cfg(feature = "nccl")]
    use annulus::backend::cuda::device::nccl::NcclSymbols;
    use annulus::{
        Plan,
        backend::cuda::{
            Cuda,
            device::{self, CudaCopier, CudaSpace, CudaView, CudaViewMut, Device, Stream, Symbols},
        },
        comm::Staged,
    };
    use annulus_core::{Host, Transport};

    use super::{Error, HostStream, Result};
    use crate::{options::Description, tensor::Checked};

    /// One rank, on tensors in device memory.
    pub(crate) type DevicePlan = Plan<CudaSpace>;

    /// Transport of blocks in device memory.
    type Link = Box<dyn Transport<CudaSpace>>;

    /// Plans one rank over a transport of host memory. Blocks travel over the borrowed
    /// communicator, or are staged.
    pub(crate) fn over<T: Transport<Host> + 'static>(
        description: &Description,
        stream: HostStream,
        transport: T,
    ) -> Result<DevicePlan> {
        plan(description, stream, transport, staged)
    }

    /// Plans one rank over MPI, which sends from device memory if it takes it.
    #[cfg(feature = "mpi")]
    pub(crate) fn over_mpi(
        description: &Description,
        stream: HostStream,
        transport: annulus::comm::mpi::Mpi,
    ) -> Result<DevicePlan> {
        use annulus::comm::mpi::{DeviceMpi, GpuAwareness};

        plan(description, stream, transport, |transport, device| {
            if GpuAwareness::of_runtime(device.api().into()).decides()? {
                Ok(Box::new(DeviceMpi::new(transport, device)?))
            } else {
                staged(transport, device)
            }
        })
    }

    fn plan<T: Transport<Host> + 'static>(
        description: &Description,
        stream: HostStream,
        mut transport: T,
        link: impl FnOnce(T, &Device) -> Result<Link>,
    ) -> Result<DevicePlan> {
        // the other ranks wait for this one
        let cuda = cuda(description, stream).inspect_err(|error| transport.abort(error))?;
        let device = cuda.stream().device().clone();
        let link = match stream.communicator {
            Some(communicator) => over_nccl(transport, &device, communicator)?,
            None => link(transport, &device)?,
        };
        let mut setup = description.setup.clone();
        // the backend is this one
        setup.runtime = setup.runtime.backend(None);
        Plan::on_device(setup, description.dims, cuda, link)
    }

    fn staged<T: Transport<Host> + 'static>(transport: T, device: &Device) -> Result<Link> {
        Ok(Box::new(Staged::new(transport, CudaCopier::new(device)?)))
    }

    /// Opens the backend in the borrowed context and stream.
    fn cuda(description: &Description, stream: HostStream) -> Result<Cuda> {
        let ordinal = description.device.ok_or_else(|| Error::internal("a stream of no device"))?;
        let context = ptr::with_exposed_provenance_mut(stream.context);
        let stream = ptr::with_exposed_provenance_mut(stream.stream);
        // SAFETY: the host has promised both: a context of this GPU and its stream, which outlive
        // the plans
        let stream = unsafe {
            let device = Device::borrowed(symbols()?, ordinal, context)?;
            Stream::borrowed(&device, stream)
        };
        #[cfg(feature = "emulator")]
        if let Some(kernels) = crate::options::EMULATED_KERNELS.get() {
            let cache = Some(device::ImageCache::new(kernels.clone()));
            let symbols = annulus_cuda_emulator::compiler_symbols();
            return Ok(Cuda::on(stream, device::Compiler::with_symbols(symbols, cache)?));
        }
        Cuda::on_stream(stream)
    }

    fn symbols() -> Result<Symbols> {
        #[cfg(feature = "emulator")]
        if crate::options::is_emulated() {
            return Ok(annulus_cuda_emulator::symbols());
        }
        Symbols::system(device::Api::Cuda)
    }

    #[cfg(feature = "nccl")]
    fn nccl_symbols() -> Result<NcclSymbols> {
        #[cfg(feature = "emulator")]
        if crate::options::is_emulated() {
            return Ok(annulus_cuda_emulator::nccl_symbols());
        }
        NcclSymbols::system(device::Api::Cuda)
    }

    #[cfg(feature = "nccl")]
    fn over_nccl<T: Transport<Host> + 'static>(
        mut transport: T,
        device: &Device,
        communicator: usize,
    ) -> Result<Link> {
        use annulus::comm::nccl::{Nccl, STARTUP_DEADLINE};

        let symbols = nccl_symbols().inspect_err(|error| transport.abort(error))?;
        let communicator = ptr::with_exposed_provenance_mut(communicator);
        // SAFETY: the host has promised a communicator on this GPU that outlives the plan
        let nccl =
            unsafe { Nccl::borrowed(transport, device, symbols, communicator, STARTUP_DEADLINE)? };
        Ok(Box::new(nccl))
    }

    #[cfg(not(feature = "nccl"))]
    fn over_nccl<T>(_: T, _: &Device, _: usize) -> Result<Link> {
        Err(Error::internal("a communicator of NCCL without the feature nccl"))
    }

    impl Checked {
        /// Views device memory.
        ///
        /// # Safety
        /// As [`CudaView::from_raw`].
        pub(crate) unsafe fn device_view<'a>(&self) -> Result<CudaView<'a>> {
            let (address, dtype) = (self.data.addr() as u64, self.float()?);
            // SAFETY: as the caller promises
            Ok(unsafe { CudaView::from_raw(address, dtype, self.dims, self.signed()) })
        }

        /// Views device memory, for writing.
        ///
        /// # Safety
        /// As [`CudaViewMut::from_raw`], but that elements may overlap is found.
        pub(crate) unsafe fn device_view_mut<'a>(&self) -> Result<CudaViewMut<'a>> {
            self.expect_no_overlap()?;
            let (address, dtype) = (self.data.addr() as u64, self.float()?);
            // SAFETY: as the caller promises
            Ok(unsafe { CudaViewMut::from_raw(address, dtype, self.dims, self.signed()) })
        }

        fn signed(&self) -> [i64; 4] {
            self.strides.map(|stride| stride as i64)
        }
    }
}
