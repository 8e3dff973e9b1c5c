//! The emulated device as a subject of the suite.

use std::{
    path::PathBuf,
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use annulus_comm::{Checksum, Deadline, Fault, Staged, cuda::CudaCopier, threads};
use annulus_conformance::{Memory, RingSubject, Station, Subject};
use annulus_core::{DType, Element, Error, Result};
use annulus_cuda::{
    Cuda,
    device::{Cache, Compiler, CudaSpace, CudaTensor, CudaView, CudaViewMut, Device, Stream, emulator},
};
use ndarray::{Array4, ArrayView4};

/// No test waits longer than this for a peer that is silent.
const DEADLINE: Duration = Duration::from_secs(60);

/// A device of its own for every rank of every run, so that one that has failed disturbs nobody.
pub(crate) fn next_device() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed) % emulator::DEVICES
}

/// The emulated compiler, remembering in the folder that tests may write.
pub(crate) fn compiler() -> Result<Compiler> {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("emulated-kernels");
    Compiler::with_symbols(emulator::compiler_symbols(), Some(Cache::new(folder)))
}

/// A backend on an emulated device of its own.
pub(crate) fn emulated(options: &[&str]) -> Result<Cuda> {
    emulated_on(next_device(), options)
}

/// A backend on emulated device `ordinal`.
pub(crate) fn emulated_on(ordinal: usize, options: &[&str]) -> Result<Cuda> {
    let device = Device::with_symbols(emulator::symbols(), ordinal)?;
    Ok(Cuda::on(Stream::new(&device)?, compiler()?, options.iter().map(|&option| option.to_owned()).collect()))
}

/// Its memory.
pub(crate) struct CudaMemory(pub(crate) Stream);

impl Memory for CudaMemory {
    type Space = CudaSpace;
    type Tensor = CudaTensor;

    fn upload(&self, numbers: ArrayView4<'_, f64>, dtype: DType) -> Result<CudaTensor> {
        let mut bytes = Vec::with_capacity(numbers.len() * dtype.bytes());
        for &number in &numbers {
            match dtype {
                DType::F64 => bytes.extend(number.to_le_bytes()),
                DType::F32 => bytes.extend(<f32 as Element>::from_f64(number).to_le_bytes()),
                DType::Bf16 => bytes.extend(<half::bf16 as Element>::from_f64(number).to_le_bytes()),
                DType::F16 => bytes.extend(<half::f16 as Element>::from_f64(number).to_le_bytes()),
            }
        }
        CudaTensor::upload(&self.0, &bytes, dtype, numbers.dim().into())
    }

    fn download(&self, tensor: &CudaTensor) -> Result<Array4<f64>> {
        let bytes = tensor.download()?;
        let dtype = tensor.view().dtype();
        let number = |bytes: &[u8]| match (dtype, bytes) {
            (DType::F64, &[a, b, c, d, e, f, g, h]) => f64::from_le_bytes([a, b, c, d, e, f, g, h]),
            (DType::F32, &[a, b, c, d]) => f64::from(f32::from_le_bytes([a, b, c, d])),
            (DType::Bf16, &[a, b]) => half::bf16::from_le_bytes([a, b]).to_f64(),
            (DType::F16, &[a, b]) => half::f16::from_le_bytes([a, b]).to_f64(),
            _ => f64::NAN,
        };
        let numbers = bytes.chunks_exact(dtype.bytes()).map(number).collect();
        Array4::from_shape_vec(tensor.view().shape(), numbers).map_err(|error| Error::Device { what: error.to_string() })
    }

    fn view<'a>(&self, tensor: &'a CudaTensor) -> CudaView<'a> {
        tensor.view()
    }

    fn view_mut<'a>(&self, tensor: &'a mut CudaTensor) -> CudaViewMut<'a> {
        tensor.view_mut()
    }
}

/// Emulated devices, one a rank, their blocks staged through pinned host memory; each message up to `delay` late. Kernels are compiled with
/// `options` besides their own.
pub(crate) fn subject(options: &'static [&'static str], delay: Duration) -> impl Subject {
    RingSubject::new("emulated cuda over staged threads", move |ranks| -> Result<Vec<Station<CudaMemory, Cuda>>> {
        let station = |(rank, transport)| {
            let backend = emulated(options)?;
            let late = Checksum::new(Fault::random_delays(transport, rank as u64, delay));
            let staged = Staged::<_, CudaSpace>::new(late, CudaCopier::new(backend.stream().device())?);
            let memory = CudaMemory(backend.stream().clone());
            Ok(Station { memory, backend, transport: Box::new(Deadline::new(staged, DEADLINE)?) })
        };
        threads::ring(ranks).into_iter().enumerate().map(station).collect()
    })
}

/// As [`subject`] of the kernels as they are, on time.
pub(crate) fn plain() -> impl Subject {
    subject(&[], Duration::ZERO)
}
