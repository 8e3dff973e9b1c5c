//! Arrays in the memory of an NVIDIA GPU, as Python libraries exchange them, and plans of them.
//!
//! Libraries lend arrays by DLPack (<https://dmlc.github.io/dlpack/latest/>), or by version 3 of
//! the CUDA array interface of Numba. Both leave the memory with its owner, and order the work of
//! two libraries by streams.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    mem::ManuallyDrop,
    ptr,
    sync::{Arc, Mutex, PoisonError},
};

use annulus::{
    DType, Dims, Error, Plan, Result, Setup,
    backend::cuda::{
        Cuda,
        device::{Api, CudaCopier, CudaSpace, CudaTensor, Device, Stream, Symbols},
    },
    comm::Staged,
};
use annulus_core::{HomeProcess, Host, Transport};
use pyo3::{
    exceptions::{PyAttributeError, PyBufferError},
    ffi,
    prelude::*,
    types::{PyDict, PyTuple},
};

use self::dlpack::{DataType, ManagedTensor, Place, Tensor};
use crate::{
    Raises,
    array::{ArrayInterface, NATIVE, TYPES, dtype_of, names_of},
    signals::{Interruptible, Signals},
};

/// DLPack's structures, of the versions before 1.0, which every library still speaks.
mod dlpack {
    use std::ffi::{CStr, c_void};

    /// Name of a capsule that nobody has taken yet.
    pub(super) const FRESH: &CStr = c"dltensor";
    /// Name of a capsule whose tensor has another owner now.
    pub(super) const USED: &CStr = c"used_dltensor";

    /// `kDLCUDA`.
    pub(super) const CUDA: i32 = 2;
    /// `kDLCUDAManaged`.
    pub(super) const MANAGED: i32 = 13;

    #[repr(C)]
    #[derive(Clone, Copy)]
    pub(super) struct Place {
        pub(super) kind: i32,
        pub(super) number: i32,
    }

    #[repr(C)]
    #[derive(Clone, Copy, PartialEq, Eq)]
    pub(super) struct DataType {
        pub(super) code: u8,
        pub(super) bits: u8,
        pub(super) lanes: u16,
    }

    #[repr(C)]
    pub(super) struct Tensor {
        pub(super) data: *mut c_void,
        pub(super) place: Place,
        pub(super) axes: i32,
        pub(super) dtype: DataType,
        pub(super) shape: *mut i64,
        /// In elements; null if the tensor is dense.
        pub(super) strides: *mut i64,
        pub(super) byte_offset: u64,
    }

    #[repr(C)]
    pub(super) struct ManagedTensor {
        pub(super) tensor: Tensor,
        pub(super) context: *mut c_void,
        pub(super) deleter: Option<unsafe extern "C" fn(*mut Self)>,
    }
}

impl From<DType> for DataType {
    fn from(dtype: DType) -> Self {
        // 2: IEEE numbers; 4: bfloat16
        let code = if dtype == DType::Bf16 { 4 } else { 2 };
        Self { code, bits: 8 * dtype.bytes() as u8, lanes: 1 }
    }
}

/// An array in the memory of a GPU: a view of another library's, or a result.
#[pyclass(frozen, module = "annulus_attention")]
pub(crate) struct DeviceArray {
    pub(crate) address: u64,
    pub(crate) dtype: DType,
    pub(crate) shape: Vec<usize>,
    /// In elements.
    strides: Vec<isize>,
    pub(crate) read_only: bool,
    pub(crate) device: usize,
    memory: Memory,
}

/// Owner of the memory of an array.
enum Memory {
    /// The array's own, and the stream in which it is written.
    Own(OwnMemory),
    /// Another library's.
    Lent { _tensor: Option<Taken>, owner: Py<PyAny> },
}

/// Memory of a result.
struct OwnMemory {
    /// `None` if it has no elements, or is freed.
    tensor: Option<CudaTensor>,
    stream: Stream,
}

impl Drop for OwnMemory {
    fn drop(&mut self) {
        let tensor = self.tensor.take();
        let freed = self.stream.device().with_context_restored(|| {
            drop(tensor);
            Ok(())
        });
        // the driver's failure is that of the next call
        drop(freed);
    }
}

/// A tensor that was taken out of a capsule, and is given back when dropped.
struct Taken(*mut ManagedTensor);

// SAFETY: DLPack lets any thread give a tensor back; nothing else uses the pointer after `take`.
unsafe impl Send for Taken {}
// SAFETY: as above.
unsafe impl Sync for Taken {}

impl Drop for Taken {
    fn drop(&mut self) {
        Python::attach(|py| {
            // an owner that runs Python code would lose the exception that unwinds the call
            let raised = PyErr::take(py);
            // SAFETY: taken out of its capsule, and given back once
            unsafe {
                if let Some(give_back) = (*self.0).deleter {
                    give_back(self.0);
                }
            }
            if let Some(raised) = raised {
                raised.restore(py);
            }
        });
    }
}

#[pymethods]
impl DeviceArray {
    /// Allocates an array whose elements are undefined.
    #[staticmethod]
    fn empty(
        py: Python<'_>,
        device: usize,
        stream: usize,
        shape: Vec<usize>,
        dtype: &str,
    ) -> Raises<Self> {
        let dtype = dtype_of("dtype", dtype)?;
        let dims = four("shape", &shape)?;
        let made = py.detach(|| {
            let stream = borrowed_stream(device, stream)?;
            let opened = stream.device().clone();
            opened.with_context_restored(|| {
                // the driver allocates no memory of 0 bytes
                let tensor = if dims.contains(&0) {
                    None
                } else {
                    Some(CudaTensor::uninitialized(&stream, dtype, dims)?)
                };
                Ok(OwnMemory { tensor, stream })
            })
        });
        let memory = made?;
        let address = memory.tensor.as_ref().map_or(0, |tensor| tensor.view().address());
        let strides = dense(&shape);
        let memory = Memory::Own(memory);
        Ok(Self { address, dtype, shape, strides, read_only: false, device, memory })
    }

    /// Takes the tensor out of a capsule, which `owner.__dlpack__` has returned.
    #[staticmethod]
    fn of_dlpack(name: &str, owner: Bound<'_, PyAny>, capsule: &Bound<'_, PyAny>) -> Raises<Self> {
        let py = owner.py();
        let object = capsule.as_ptr();
        // SAFETY: the GIL is held; the name is compared before the pointer is used
        let pointer = unsafe {
            if ffi::PyCapsule_IsValid(object, dlpack::FRESH.as_ptr()) == 0 {
                return Err(Error::invalid(name, "no tensor of DLPack", "a new one").into());
            }
            let pointer = ffi::PyCapsule_GetPointer(object, dlpack::FRESH.as_ptr());
            if ffi::PyCapsule_SetName(object, dlpack::USED.as_ptr()) != 0 {
                return Err(PyErr::fetch(py).into());
            }
            pointer.cast::<ManagedTensor>()
        };
        let taken = Taken(pointer);
        // SAFETY: a capsule of this name has such a tensor
        let Tensor { data, place, axes, dtype, shape, strides, byte_offset } =
            unsafe { &(*pointer).tensor };
        let known = TYPES.iter().find(|(known, ..)| DataType::from(*known) == *dtype);
        let Some(&(element, ..)) = known else {
            let got = format!("elements of DLPack type {}, {} bits", dtype.code, dtype.bits);
            return Err(Error::invalid(name, got, "floats of 16, 32 or 64 bits").into());
        };
        let device = usize::try_from(place.number);
        let (Ok(device), dlpack::CUDA | dlpack::MANAGED) = (device, place.kind) else {
            let got = format!("memory of DLPack device {}", place.kind);
            return Err(Error::invalid(name, got, "memory of a CUDA GPU").into());
        };
        let axes = usize::try_from(*axes).unwrap_or(0);
        let lengths = |from: *const i64| {
            // SAFETY: as many numbers as axes
            (0..axes).map(|axis| unsafe { *from.add(axis) }).collect::<Vec<_>>()
        };
        let shape: Vec<_> = lengths(*shape).iter().map(|&len| usize::try_from(len)).collect();
        let shape = shape.into_iter().collect::<std::result::Result<Vec<_>, _>>();
        let shape = shape.map_err(|_| Error::invalid(name, "a negative length", "a shape"))?;
        let strides = if strides.is_null() {
            dense(&shape)
        } else {
            lengths(*strides).iter().map(|&stride| stride as isize).collect()
        };
        Ok(Self {
            address: data.addr() as u64 + byte_offset,
            dtype: element,
            shape,
            strides,
            read_only: false,
            device,
            memory: Memory::Lent { _tensor: Some(taken), owner: owner.unbind() },
        })
    }

    /// Views an object with the CUDA array interface, after the work of its stream.
    #[staticmethod]
    fn of_interface(
        name: &str,
        owner: Bound<'_, PyAny>,
        device: usize,
        stream: usize,
    ) -> Raises<Self> {
        let py = owner.py();
        let ArrayInterface { address, read_only, shape, strides, typestr, dict } =
            ArrayInterface::read(name, &owner, "__cuda_array_interface__")?;
        // the interface has no bfloat16
        let is_float = |known: DType| known != DType::Bf16 && typestr == typestr_of(known);
        let Some(&(dtype, ..)) = TYPES.iter().find(|(known, ..)| is_float(*known)) else {
            let (got, want) = (format!("elements {typestr}"), "floats of 16, 32 or 64 bits");
            return Err(Error::invalid(name, got, want).into());
        };
        let size = dtype.bytes().cast_signed();
        let strides = match strides {
            None => dense(&shape),
            Some(bytes) if bytes.iter().any(|stride| stride % size != 0) => {
                let (got, want) = (format!("strides {bytes:?}"), format!("multiples of {size}"));
                return Err(Error::invalid(name, got, want).into());
            }
            Some(bytes) => bytes.into_iter().map(|stride| stride / size).collect(),
        };
        if strides.len() != shape.len() {
            let got = format!("{} strides", strides.len());
            return Err(Error::invalid(name, got, "one per axis").into());
        }
        if dict.get_item("mask")?.is_some_and(|mask| !mask.is_none()) {
            return Err(Error::invalid(name, "a masked array", "one without a mask").into());
        }
        let theirs = dict.get_item("stream")?.filter(|stream| !stream.is_none());
        if let Some(theirs) = theirs {
            let theirs: usize = theirs.extract()?;
            py.detach(|| order(device, theirs, stream))?;
        }
        let address = address as u64;
        let memory = Memory::Lent { _tensor: None, owner: owner.unbind() };
        Ok(Self { address, dtype, shape, strides, read_only, device, memory })
    }

    /// Lengths of the axes.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.shape)
    }

    /// Name of the element type.
    #[getter]
    fn dtype(&self) -> &'static str {
        names_of(self.dtype).0
    }

    /// Number of the GPU.
    #[getter]
    const fn device(&self) -> usize {
        self.device
    }

    /// The array that this one views, or None.
    #[getter]
    fn base(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        match &self.memory {
            Memory::Own(_) => None,
            Memory::Lent { owner, .. } => Some(owner.clone_ref(py)),
        }
    }

    /// Version 3 of the CUDA array interface; not of bfloat16, for which it has no name.
    #[getter]
    fn __cuda_array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        if self.dtype == DType::Bf16 {
            return Err(PyAttributeError::new_err("the array interface has no bfloat16"));
        }
        let interface = PyDict::new(py);
        interface.set_item("version", 3)?;
        interface.set_item("shape", PyTuple::new(py, &self.shape)?)?;
        interface.set_item("typestr", typestr_of(self.dtype))?;
        interface.set_item("data", (self.address, self.read_only))?;
        interface.set_item("strides", PyTuple::new(py, self.byte_strides())?)?;
        let stream = match &self.memory {
            // 0 is not a number of the interface; 1 is the default stream
            Memory::Own(own) => Some(own.stream.handle().addr().max(1)),
            Memory::Lent { .. } => None,
        };
        interface.set_item("stream", stream)?;
        Ok(interface)
    }

    /// DLPack's device type and the number of the GPU.
    const fn __dlpack_device__(&self) -> (i32, usize) {
        (dlpack::CUDA, self.device)
    }

    /// Lends the array by DLPack. Work of `stream` (None or 1 for the default stream, −1 for none)
    /// comes after the work that writes the array.
    #[pyo3(signature = (*, stream = None, max_version = None, dl_device = None, copy = None))]
    fn __dlpack__<'py>(
        this: &Bound<'py, Self>,
        stream: Option<isize>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, usize)>,
        copy: Option<bool>,
    ) -> Raises<Bound<'py, PyAny>> {
        // a tensor before version 1.0 is one that every version reads
        let _ = max_version;
        let py = this.py();
        let array = this.get();
        if copy == Some(true) {
            return Err(PyBufferError::new_err("a DeviceArray is lent, not copied").into());
        }
        if dl_device.is_some_and(|device| device != array.__dlpack_device__()) {
            return Err(PyBufferError::new_err("a DeviceArray stays on its GPU").into());
        }
        if let (Memory::Own(own), Some(theirs)) =
            (&array.memory, usize::try_from(stream.unwrap_or(1)).ok())
        {
            py.detach(|| {
                let device = own.stream.device();
                device.with_context_restored(|| wait_for(device, &own.stream, theirs))
            })?;
        }
        let lent = Lent::of(this);
        // SAFETY: the capsule owns the tensor until somebody takes it; the destructor frees it if
        // nobody has
        unsafe {
            let capsule =
                ffi::PyCapsule_New(lent.cast(), dlpack::FRESH.as_ptr(), Some(give_up_capsule));
            if capsule.is_null() {
                give_back(lent);
            }
            Ok(Bound::from_owned_ptr_or_err(py, capsule)?)
        }
    }

    fn __repr__(&self) -> String {
        format!("DeviceArray({:?}, {}, GPU {})", self.shape, self.dtype(), self.device)
    }
}

impl DeviceArray {
    /// Strides in bytes.
    pub(crate) fn byte_strides(&self) -> Vec<isize> {
        self.strides.iter().map(|stride| stride * self.dtype.bytes().cast_signed()).collect()
    }

    /// Element type in the array interface protocol; that of its bits for bfloat16.
    pub(crate) fn typestr(&self) -> String {
        typestr_of(self.dtype)
    }
}

/// A tensor that was lent by DLPack, with what it points to.
#[repr(C)]
struct Lent {
    /// First, so that its address is that of the whole.
    managed: ManagedTensor,
    shape: Vec<i64>,
    strides: Vec<i64>,
    array: Option<Py<DeviceArray>>,
}

impl Lent {
    fn of(array: &Bound<'_, DeviceArray>) -> *mut ManagedTensor {
        let own = array.get();
        let mut lent = Box::new(Self {
            managed: ManagedTensor {
                tensor: Tensor {
                    data: ptr::with_exposed_provenance_mut(own.address as usize),
                    place: Place { kind: dlpack::CUDA, number: own.device as i32 },
                    axes: own.shape.len() as i32,
                    dtype: own.dtype.into(),
                    shape: ptr::null_mut(),
                    strides: ptr::null_mut(),
                    byte_offset: 0,
                },
                context: ptr::null_mut(),
                deleter: Some(give_back),
            },
            shape: own.shape.iter().map(|&len| len as i64).collect(),
            strides: own.strides.iter().map(|&stride| stride as i64).collect(),
            array: Some(array.clone().unbind()),
        });
        lent.managed.tensor.shape = lent.shape.as_mut_ptr();
        lent.managed.tensor.strides = lent.strides.as_mut_ptr();
        Box::into_raw(lent).cast()
    }
}

/// Gives a lent tensor back: DLPack's deleter.
///
/// # Safety
/// The tensor is one of [`Lent::of`], and is given back once.
unsafe extern "C" fn give_back(tensor: *mut ManagedTensor) {
    // SAFETY: as the caller guarantees
    let mut lent = unsafe { Box::from_raw(tensor.cast::<Lent>()) };
    // any thread may give it back, also one without the GIL
    Python::attach(|_| drop(lent.array.take()));
}

/// Frees the tensor of a capsule that nobody has taken it out of.
///
/// # Safety
/// A capsule of [`DeviceArray::__dlpack__`].
unsafe extern "C" fn give_up_capsule(capsule: *mut ffi::PyObject) {
    // SAFETY: Python calls this once, with the GIL; the name tells who owns the tensor
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, dlpack::FRESH.as_ptr()) != 0 {
            give_back(ffi::PyCapsule_GetPointer(capsule, dlpack::FRESH.as_ptr()).cast());
        }
    }
}

/// Element type in the array interface protocol; that of its bits for bfloat16.
fn typestr_of(dtype: DType) -> String {
    format!("{NATIVE}{}", names_of(dtype).1)
}

/// Strides of a dense array, in elements.
fn dense(shape: &[usize]) -> Vec<isize> {
    let mut strides = vec![1_isize; shape.len()];
    for axis in (1..shape.len()).rev() {
        strides[axis - 1] = strides[axis].saturating_mul(shape[axis].cast_signed());
    }
    strides
}

/// Appends axes of length 1, up to four.
fn four(name: &str, shape: &[usize]) -> Result<[usize; 4]> {
    let mut four = [1; 4];
    let Some(first) = four.get_mut(..shape.len()) else {
        return Err(Error::invalid(name, format!("{} axes", shape.len()), "at most 4"));
    };
    first.copy_from_slice(shape);
    Ok(four)
}

/// GPUs whose primary context this process has, until it ends.
static GPUS: Mutex<BTreeMap<usize, Device>> = Mutex::new(BTreeMap::new());

/// Process that uses [`GPUS`]: its forked children can use no GPU, and may find the lock taken.
static HOME: HomeProcess = HomeProcess::unused();

/// Borrows a stream of a GPU, in the GPU's primary context, which is that of the CUDA runtime and
/// so of torch, JAX and CuPy.
fn borrowed_stream(number: usize, stream: usize) -> Result<Stream> {
    HOME.check("a GPU")?;
    let symbols = Symbols::system(Api::Cuda)?;
    HOME.note();
    let mut gpus = GPUS.lock().unwrap_or_else(PoisonError::into_inner);
    let opened = match gpus.entry(number) {
        Entry::Occupied(opened) => opened.into_mut(),
        Entry::Vacant(new) => new.insert(Device::with_symbols(symbols, number)?),
    };
    // a device of its own for each user: after a failure, such as of a stream that is none, it
    // returns errors only
    // SAFETY: the context is one of this GPU, and `GPUS` keeps it; the package's documentation
    // demands a stream of this GPU that outlives the plans
    unsafe {
        let device = Device::borrowed(symbols, number, opened.context())?;
        Ok(Stream::borrowed(&device, ptr::with_exposed_provenance_mut(stream)))
    }
}

/// Lets the work of stream `ours` come after the work of `theirs`, on one GPU.
fn order(device: usize, theirs: usize, ours: usize) -> Result<()> {
    let theirs = borrowed_stream(device, theirs)?;
    let device = theirs.device();
    device.with_context_restored(|| wait_for(device, &theirs, ours))
}

/// Lets the work of stream `after` come after the work of `before`.
fn wait_for(device: &Device, before: &Stream, after: usize) -> Result<()> {
    if before.handle().addr() == after {
        return Ok(());
    }
    // SAFETY: whoever names a stream keeps it during the call
    let after = unsafe { Stream::borrowed(device, ptr::with_exposed_provenance_mut(after)) };
    after.wait_for(&before.record()?)
}

/// One rank, on arrays in the memory of a GPU. The context that was current before a call is so
/// after it.
pub(crate) struct DevicePlan {
    plan: ManuallyDrop<Plan<CudaSpace>>,
    device: Device,
    number: usize,
}

impl DevicePlan {
    /// Plans a rank on GPU `on.0` whose passes run in stream `on.1` of the caller's. Blocks are
    /// staged over `transport`.
    pub(crate) fn new<T: Transport<Host> + 'static>(
        setup: &Setup,
        dims: Dims,
        (number, stream): (usize, usize),
        mut transport: T,
        signals: &Arc<Signals>,
    ) -> Result<Self> {
        // the other ranks wait for this one
        let stream = borrowed_stream(number, stream).inspect_err(|error| transport.abort(error))?;
        let device = stream.device().clone();
        let plan = device.with_context_restored(|| {
            let opened = Cuda::on_stream(stream)
                .and_then(|cuda| Ok((cuda, CudaCopier::new(&device)?)))
                .inspect_err(|error| transport.abort(error))?;
            let (cuda, copier) = opened;
            let transport = Interruptible::new(transport, Arc::clone(signals));
            Plan::on_device(setup, dims, cuda, Staged::new(transport, copier))
        })?;
        Ok(Self { plan: ManuallyDrop::new(plan), device, number })
    }

    /// Runs a call of the plan.
    pub(crate) fn run<T>(
        &mut self,
        call: impl FnOnce(&mut Plan<CudaSpace>) -> Result<T>,
    ) -> Result<T> {
        self.device.with_context_restored(|| call(&mut self.plan))
    }

    /// Returns the plan, for its facts.
    pub(crate) fn plan(&self) -> &Plan<CudaSpace> {
        &self.plan
    }

    /// Number of the GPU.
    pub(crate) const fn number(&self) -> usize {
        self.number
    }
}

impl Drop for DevicePlan {
    fn drop(&mut self) {
        let freed = self.device.with_context_restored(|| {
            // SAFETY: dropped once, here, and not used afterwards
            unsafe { ManuallyDrop::drop(&mut self.plan) };
            Ok(())
        });
        // the driver's failure is that of the next call
        drop(freed);
    }
}
