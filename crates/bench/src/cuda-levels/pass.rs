//! One attention on one device: its ring of one rank and its tensors.
//! And the comparison of a level with level `plain` in f32, from the same inputs rounded to 16
//! bits. And times of single kernels: driver functions that record events around every launch.

use std::{
    collections::BTreeMap,
    ffi::{c_char, c_uint, c_void},
    sync::{
        Mutex, OnceLock, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use annulus::{Attention, DType, Dims, Error, Result, comm::ring::Ring};
use annulus_bench::{
    draw, {Results, Verification, have_same_bits},
};
use annulus_comm::{Staged, threads};
use annulus_core::{BackwardInputs, Element, Gradients, Inputs, Outputs};
use annulus_cuda::{
    Cuda, Level,
    device::{
        CudaCopier, CudaSpace, CudaTensor, Status, Stream, Symbols,
        cudarc::driver::sys::{CUevent, CUfunction, CUmodule, CUstream},
    },
};
use half::{bf16, f16};
use ndarray::Array4;
use serde_json::json;

use crate::Setup;

/// Longest wait for the device.
const DEADLINE: Duration = Duration::from_secs(120);

fn bytes_of(numbers: &Array4<f64>, dtype: DType) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(numbers.len() * dtype.bytes());
    for &number in numbers {
        match dtype {
            DType::F64 => bytes.extend(number.to_le_bytes()),
            DType::F32 => bytes.extend((number as f32).to_le_bytes()),
            DType::Bf16 => bytes.extend(<bf16 as Element>::from_f64(number).to_le_bytes()),
            DType::F16 => bytes.extend(<f16 as Element>::from_f64(number).to_le_bytes()),
        }
    }
    bytes
}

/// Ring and tensors of one attention.
pub(crate) struct Passes {
    ring: Ring<Cuda>,
    stream: Stream,
    inputs: [CudaTensor; 4],
    out: CudaTensor,
    lse: CudaTensor,
    gradients: [CudaTensor; 3],
}

impl Passes {
    pub(crate) fn new(
        cuda: &Cuda,
        attention: &Attention,
        dtype: DType,
        dims: Dims,
        numbers: &[Array4<f64>; 4],
    ) -> Result<Self> {
        let stream = cuda.stream().clone();
        let attention = attention.clone().dtype(dtype);
        let copier = CudaCopier::new(stream.device())?;
        let transport = Staged::<_, CudaSpace>::new(threads::ring(1).remove(0), copier);
        let setup = annulus::Setup::from(attention);
        let (spec, options) = (setup.spec(dims), setup.ring_options());
        let ring = Ring::new(cuda.clone(), Box::new(transport), spec, options)?;
        let shapes = numbers.each_ref().map(|tensor| tensor.dim().into());
        let upload = |index: usize| {
            let bytes = bytes_of(&numbers[index], dtype);
            CudaTensor::upload(&stream, &bytes, dtype, shapes[index])
        };
        // outputs begin as NaN, which shows an element that is not written. compute-sanitizer's
        // initcheck does not count TMA stores as writes: it would report their later reads.
        let made = |dtype: DType, shape: [usize; 4]| {
            let bytes = shape.iter().product::<usize>() * dtype.bytes();
            CudaTensor::upload(&stream, &vec![0xff; bytes], dtype, shape)
        };
        let rows = [dims.batch, dims.q_heads, dims.q_len, 1];
        Ok(Self {
            inputs: [upload(0)?, upload(1)?, upload(2)?, upload(3)?],
            out: made(dtype, shapes[3])?,
            lse: made(dtype.accumulator(), rows)?,
            gradients: [made(dtype, shapes[0])?, made(dtype, shapes[1])?, made(dtype, shapes[2])?],
            ring,
            stream,
        })
    }

    pub(crate) fn forward(&mut self) -> Result<()> {
        let [q, k, v, _] = &self.inputs;
        let inputs = Inputs { q: q.view(), k: k.view(), v: v.view(), bias: None, sinks: None };
        let (out, lse) = (self.out.view_mut(), self.lse.view_mut());
        let mut outputs = Outputs::new(out, lse);
        self.ring.forward(&inputs, &mut outputs).map(drop)
    }

    /// Computes gradients, after a forward pass.
    pub(crate) fn backward(&mut self) -> Result<()> {
        let [q, k, v, dout] = &self.inputs;
        let forward = Inputs { q: q.view(), k: k.view(), v: v.view(), bias: None, sinks: None };
        let inputs = BackwardInputs {
            forward,
            out: self.out.view(),
            max: self.lse.view(),
            sum: None,
            ties: None,
            dout: dout.view(),
            dlse: None,
            out_residual: None,
        };
        let [dq, dk, dv] = &mut self.gradients;
        let (dq, dk, dv) = (dq.view_mut(), dk.view_mut(), dv.view_mut());
        let mut gradients = Gradients { dq, dk, dv, dbias: None, dsinks: None };
        self.ring.backward(&inputs, &mut gradients).map(drop)
    }

    /// Runs one pass and waits for it. Returns its time by the host's clock.
    pub(crate) fn timed(&mut self, is_forward: bool) -> Result<f64> {
        self.stream.synchronize(DEADLINE)?;
        let start = Instant::now();
        if is_forward {
            self.forward()?
        } else {
            self.backward()?
        };
        self.stream.synchronize(DEADLINE)?;
        Ok(start.elapsed().as_secs_f64())
    }

    /// Downloads out, lse, dq, dk and dv.
    pub(crate) fn results(&self) -> Result<Results> {
        let [dq, dk, dv] = &self.gradients;
        let mut all = [const { Vec::new() }; 5];
        for (numbers, tensor) in all.iter_mut().zip([&self.out, &self.lse, dq, dk, dv]) {
            *numbers = numbers_of(&tensor.download()?, tensor.view().dtype());
        }
        Ok(all)
    }
}

fn numbers_of(bytes: &[u8], dtype: DType) -> Vec<f64> {
    let number = |bytes: &[u8]| match (dtype, bytes) {
        (DType::F64, &[a, b, c, d, e, f, g, h]) => f64::from_le_bytes([a, b, c, d, e, f, g, h]),
        (DType::F32, &[a, b, c, d]) => f64::from(f32::from_le_bytes([a, b, c, d])),
        (DType::Bf16, &[a, b]) => bf16::from_le_bytes([a, b]).to_f64(),
        (DType::F16, &[a, b]) => f16::from_le_bytes([a, b]).to_f64(),
        _ => f64::NAN,
    };
    bytes.chunks_exact(dtype.bytes()).map(number).collect()
}

/// Results of two passes, and true if they have the same bits.
fn compute(passes: &mut Passes) -> Result<(Results, bool)> {
    let mut once = || {
        passes.forward()?;
        passes.backward()?;
        passes.results()
    };
    let first = once()?;
    let same = have_same_bits(&first, &once()?);
    Ok((first, same))
}

/// Verifies the chosen masks of one element type, length and dim. Prints a line for each; false if
/// one is wrong.
pub(crate) fn verify(setup: &Setup, problem: &Verification<'_>) -> Result<bool> {
    let Setup { name: level, cuda } = setup;
    let Verification { dtype, len, dim, .. } = *problem;
    let bound = match dtype {
        DType::Bf16 => 5e-3,
        DType::F16 => 1e-3,
        _ => return Err(Error::invalid("dtypes", dtype, "bf16 or f16: f32 is the reference")),
    };
    let plain = cuda.clone().at_level(Level::Plain)?;
    let mut line = serde_json::Map::new();
    line.insert("gpu".into(), json!(cuda.to_string()));
    line.insert("level".into(), json!(level));
    line.insert("head_dim".into(), json!(dim));
    line.insert("n".into(), json!(len));
    problem.run(bound, &line, |shape, reference| {
        let numbers = draw(shape.dims, dtype);
        let (got, same_bits) =
            compute(&mut Passes::new(cuda, &shape.attention, dtype, shape.dims, &numbers)?)?;
        let mut passes = Passes::new(&plain, reference, DType::F32, shape.dims, &numbers)?;
        passes.forward()?;
        passes.backward()?;
        Ok((got, same_bits, passes.results()?))
    })
}

static DRIVER: OnceLock<Symbols> = OnceLock::new();
/// Names of kernels by handle.
static KERNEL_NAMES: Mutex<BTreeMap<usize, String>> = Mutex::new(BTreeMap::new());
/// Kernel and both events of every launch.
static LAUNCHES: Mutex<Vec<(usize, [usize; 2])>> = Mutex::new(Vec::new());
static RUNS: AtomicBool = AtomicBool::new(false);

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the driver with launches that can be timed.
pub(crate) fn watched(driver: Symbols) -> Symbols {
    let driver = *DRIVER.get_or_init(|| driver);
    Symbols { module_function, launch, ..driver }
}

/// Calls `work`, which waits for its kernels, and returns the milliseconds of each kernel.
pub(crate) fn times<R>(work: impl FnOnce() -> R) -> (R, BTreeMap<String, f64>) {
    lock(&LAUNCHES).clear();
    RUNS.store(true, Ordering::Relaxed);
    let result = work();
    RUNS.store(false, Ordering::Relaxed);
    let mut times = BTreeMap::new();
    let names = lock(&KERNEL_NAMES).clone();
    for (kernel, [before, after]) in std::mem::take(&mut *lock(&LAUNCHES)) {
        let mut ms = f32::NAN;
        let elapsed = DRIVER.get().and_then(|driver| driver.event_elapsed);
        let (before, after) = (before as CUevent, after as CUevent);
        if let (Some(driver), Some(elapsed)) = (DRIVER.get(), elapsed) {
            // SAFETY: both events were recorded and have passed; they are destroyed once.
            unsafe {
                elapsed(&raw mut ms, before, after);
                (driver.event_destroy)(before);
                (driver.event_destroy)(after);
            }
        }
        let name = names.get(&kernel).cloned().unwrap_or_default();
        *times.entry(name).or_default() += f64::from(ms);
    }
    (result, times)
}

unsafe extern "C" fn module_function(
    function: *mut CUfunction,
    module: CUmodule,
    name: *const c_char,
) -> Status {
    let Some(driver) = DRIVER.get() else { return Status::NOT_INITIALIZED };
    // SAFETY: the arguments are those of the driver's function; the name ends in 0.
    unsafe {
        let found = (driver.module_function)(function, module, name);
        if found == Status::SUCCESS {
            let name = std::ffi::CStr::from_ptr(name).to_string_lossy().into_owned();
            lock(&KERNEL_NAMES).insert(*function as usize, name);
        }
        found
    }
}

unsafe extern "C" fn launch(
    function: CUfunction,
    x: c_uint,
    y: c_uint,
    z: c_uint,
    threads_x: c_uint,
    threads_y: c_uint,
    threads_z: c_uint,
    shared_bytes: c_uint,
    stream: CUstream,
    parameters: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> Status {
    let Some(driver) = DRIVER.get() else { return Status::NOT_INITIALIZED };
    let runs = RUNS.load(Ordering::Relaxed);
    let mark = || {
        let mut event: CUevent = std::ptr::null_mut();
        // SAFETY: a local of the right type, and a valid stream. Flags 0: with a time.
        unsafe {
            (driver.event_create)(&raw mut event, 0);
            (driver.event_record)(event, stream);
        }
        event as usize
    };
    let before = runs.then(mark);
    // SAFETY: the arguments are those of the driver's function.
    let launched = unsafe {
        (driver.launch)(
            function,
            x,
            y,
            z,
            threads_x,
            threads_y,
            threads_z,
            shared_bytes,
            stream,
            parameters,
            extra,
        )
    };
    if let Some(before) = before {
        lock(&LAUNCHES).push((function as usize, [before, mark()]));
    }
    launched
}
