//! The function that XLA's CPU runtime calls for attention in a compiled JAX program.
//!
//! XLA passes a call frame: buffers, and the attribute `call`, a text that `jax.py` wrote.
//! The handler takes the GIL and gives both to `jax._execute`, with the buffers as arrays
//! in place. The declarations follow XLA's stable C interface (`xla/ffi/api/c_api.h`, version 0.1),
//! in which later versions append fields and never move them.

use std::{
    ffi::{CString, c_int},
    ptr, slice,
};

use pyo3::{
    exceptions::{PyKeyboardInterrupt, PyMemoryError, PyNotImplementedError, PyValueError},
    prelude::*,
    types::{PyDict, PyTuple},
};

use self::c_api::{
    Attributes, Buffer, Buffers, CallFrame, Extension, MetadataExtension, NewError, Text, XlaError,
};

/// Version of the interface that the declarations follow.
const VERSION: [c_int; 2] = [0, 1];
/// `XLA_FFI_Extension_Metadata`: XLA asks for the version of the handler instead of calling it.
const METADATA: c_int = 1;
/// `XLA_FFI_DataType_BF16`.
const BFLOAT16: c_int = 16;
/// `XLA_FFI_AttrType_STRING`.
const STRING: c_int = 4;

/// Structures of the interface, with the fields up to the last one that is used here.
mod c_api {
    use std::ffi::{c_char, c_int, c_void};

    #[repr(C)]
    pub(super) struct Extension {
        pub(super) struct_size: usize,
        pub(super) kind: c_int,
        pub(super) next: *mut Extension,
    }

    #[repr(C)]
    pub(super) struct Version {
        pub(super) struct_size: usize,
        pub(super) extensions: *mut Extension,
        pub(super) numbers: [c_int; 2],
    }

    #[repr(C)]
    pub(super) struct Metadata {
        pub(super) struct_size: usize,
        pub(super) version: Version,
        pub(super) traits: u32,
    }

    #[repr(C)]
    pub(super) struct MetadataExtension {
        pub(super) base: Extension,
        pub(super) metadata: *mut Metadata,
    }

    #[repr(C)]
    pub(super) struct NewError {
        pub(super) struct_size: usize,
        pub(super) extensions: *mut Extension,
        pub(super) message: *const c_char,
        pub(super) code: c_int,
    }

    /// An error that belongs to XLA.
    pub(super) type XlaError = *mut c_void;

    #[repr(C)]
    pub(super) struct Api {
        pub(super) struct_size: usize,
        pub(super) extensions: *mut Extension,
        pub(super) version: Version,
        pub(super) internal: *const c_void,
        pub(super) new_error: unsafe extern "C" fn(*mut NewError) -> XlaError,
    }

    #[repr(C)]
    pub(super) struct Buffer {
        pub(super) struct_size: usize,
        pub(super) extensions: *mut Extension,
        pub(super) dtype: c_int,
        pub(super) data: *mut c_void,
        pub(super) rank: i64,
        pub(super) dims: *const i64,
    }

    #[repr(C)]
    pub(super) struct Buffers {
        pub(super) struct_size: usize,
        pub(super) extensions: *mut Extension,
        pub(super) len: i64,
        pub(super) kinds: *const c_int,
        pub(super) buffers: *const *const Buffer,
    }

    #[repr(C)]
    pub(super) struct Text {
        pub(super) start: *const u8,
        pub(super) len: usize,
    }

    #[repr(C)]
    pub(super) struct Attributes {
        pub(super) struct_size: usize,
        pub(super) extensions: *mut Extension,
        pub(super) len: i64,
        pub(super) kinds: *const c_int,
        pub(super) names: *const *const Text,
        pub(super) values: *const *const c_void,
    }

    /// Arguments of a call of a handler.
    #[repr(C)]
    pub(super) struct CallFrame {
        pub(super) struct_size: usize,
        pub(super) extensions: *mut Extension,
        pub(super) api: *const Api,
        pub(super) context: *mut c_void,
        pub(super) stage: c_int,
        pub(super) operands: Buffers,
        pub(super) results: Buffers,
        pub(super) attributes: Attributes,
    }
}

/// A buffer of XLA's as an array in place, valid until the handler returns.
#[pyclass(frozen, module = "annulus_attention._annulus")]
pub(crate) struct XlaBuffer {
    address: usize,
    shape: Vec<i64>,
    typestr: String,
    is_bfloat16: bool,
    read_only: bool,
}

#[pymethods]
impl XlaBuffer {
    /// The array, by which NumPy views it.
    #[getter]
    fn __array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let interface = PyDict::new(py);
        interface.set_item("version", 3)?;
        interface.set_item("shape", PyTuple::new(py, &self.shape)?)?;
        interface.set_item("typestr", &self.typestr)?;
        interface.set_item("data", (self.address, self.read_only))?;
        Ok(interface)
    }

    /// True if the elements, which NumPy views as 16-bit integers, are bfloat16.
    #[getter]
    fn is_bfloat16(&self) -> bool {
        self.is_bfloat16
    }
}

impl XlaBuffer {
    /// Describes a buffer.
    ///
    /// # Safety
    /// `buffer` is one of a call frame, and the frame is in use.
    unsafe fn new(buffer: &Buffer, read_only: bool) -> PyResult<Self> {
        let (kind, bytes) = match buffer.dtype {
            1 => ('b', 1),
            code @ 2..=5 => ('i', 1 << (code - 2)),
            code @ 6..=9 => ('u', 1 << (code - 6)),
            code @ 10..=12 => ('f', 2 << (code - 10)),
            BFLOAT16 => ('u', 2),
            other => {
                return Err(PyNotImplementedError::new_err(format!(
                    "XLA passed an array of element type {other}"
                )));
            }
        };
        let order = if cfg!(target_endian = "little") { '<' } else { '>' };
        let rank = usize::try_from(buffer.rank).unwrap_or(0);
        let shape = if rank == 0 {
            Vec::new()
        } else {
            // SAFETY: `dims` has `rank` numbers
            unsafe { slice::from_raw_parts(buffer.dims, rank) }.to_vec()
        };
        Ok(Self {
            address: buffer.data.addr(),
            shape,
            typestr: format!("{}{kind}{bytes}", if bytes == 1 { '|' } else { order }),
            is_bfloat16: buffer.dtype == BFLOAT16,
            read_only,
        })
    }
}

/// Address of the handler, for `jax.ffi.register_ffi_target`.
#[pyfunction]
pub(crate) fn xla_handler() -> usize {
    attend as unsafe extern "C" fn(*mut CallFrame) -> XlaError as usize
}

/// Runs one pass, or tells XLA the version of the interface.
///
/// # Safety
/// XLA calls it with a call frame of its own, which it keeps until the function returns.
unsafe extern "C" fn attend(frame: *mut CallFrame) -> XlaError {
    // SAFETY: as required of the caller
    let frame = unsafe { &*frame };
    // SAFETY: the extensions of a frame are a list in XLA's memory, or null
    if unsafe { tell_version(frame.extensions) } {
        return ptr::null_mut();
    }
    let refused = Python::try_attach(|py| {
        // SAFETY: the frame is in use until this returns
        let done = unsafe { execute(py, frame) };
        done.map_err(|error| (code(py, &error), error.value(py).to_string()))
    });
    let (code, message) = match refused {
        Some(Ok(())) => return ptr::null_mut(),
        Some(Err(refused)) => refused,
        None => (CANCELLED, "Python has ended".to_owned()),
    };
    let message = CString::new(message.replace('\0', " ")).unwrap_or_default();
    let mut new = NewError {
        struct_size: size_of::<NewError>(),
        extensions: ptr::null_mut(),
        message: message.as_ptr(),
        code,
    };
    // SAFETY: a frame that is executed has the functions of XLA, which copies the message
    unsafe { ((*frame.api).new_error)(&raw mut new) }
}

/// Writes the version of the interface if XLA asks for it.
///
/// # Safety
/// `extension` is the first of a list in XLA's memory, or null.
unsafe fn tell_version(mut extension: *mut Extension) -> bool {
    // SAFETY: as required of the caller; an extension of this kind is a `MetadataExtension`, whose
    // metadata XLA lets the handler write
    unsafe {
        while let Some(this) = extension.as_ref() {
            if this.kind == METADATA {
                let metadata = (*extension.cast::<MetadataExtension>()).metadata;
                (*metadata).version.numbers = VERSION;
                (*metadata).traits = 0;
                return true;
            }
            extension = this.next;
        }
    }
    false
}

/// Gives the buffers and the text of a frame to `jax._execute`.
///
/// # Safety
/// The frame is one of XLA's, in the stage "execute", the only one the handler is registered for.
unsafe fn execute(py: Python<'_>, frame: &CallFrame) -> PyResult<()> {
    // SAFETY: as required of the caller
    let (text, operands, results) = unsafe {
        (text(&frame.attributes)?, arrays(&frame.operands, true)?, arrays(&frame.results, false)?)
    };
    py.import("annulus_attention.jax")?.getattr("_execute")?.call1((text, operands, results))?;
    Ok(())
}

/// Describes buffers of a frame.
///
/// # Safety
/// They are those of a frame that is in use.
unsafe fn arrays(buffers: &Buffers, read_only: bool) -> PyResult<Vec<XlaBuffer>> {
    let len = usize::try_from(buffers.len).unwrap_or(0);
    // SAFETY: there are `len` pointers to buffers, the only kind of operand and result
    (0..len).map(|i| unsafe { XlaBuffer::new(&**buffers.buffers.add(i), read_only) }).collect()
}

/// Returns the attribute `call`.
///
/// # Safety
/// The attributes are those of a frame that is in use.
unsafe fn text(attributes: &Attributes) -> PyResult<String> {
    // SAFETY: a span of a frame is text of XLA's
    let read = |span: &Text| unsafe { slice::from_raw_parts(span.start, span.len) };
    let len = usize::try_from(attributes.len).unwrap_or(0);
    for index in 0..len {
        // SAFETY: there are `len` of each, and the value of a string is a span
        let value = unsafe {
            let kind = *attributes.kinds.add(index);
            if kind != STRING || read(&**attributes.names.add(index)) != b"call" {
                continue;
            }
            read(&*(*attributes.values.add(index)).cast::<Text>())
        };
        return Ok(String::from_utf8_lossy(value).into_owned());
    }
    Err(PyValueError::new_err("XLA passed no attribute call"))
}

/// `XLA_FFI_Error_Code_CANCELLED`.
const CANCELLED: c_int = 1;

/// Code of an exception in XLA.
fn code(py: Python<'_>, error: &PyErr) -> c_int {
    const INVALID_ARGUMENT: c_int = 3;
    const RESOURCE_EXHAUSTED: c_int = 8;
    const UNIMPLEMENTED: c_int = 12;
    const INTERNAL: c_int = 13;
    if error.is_instance_of::<PyValueError>(py) {
        INVALID_ARGUMENT
    } else if error.is_instance_of::<PyMemoryError>(py) {
        RESOURCE_EXHAUSTED
    } else if error.is_instance_of::<PyNotImplementedError>(py) {
        UNIMPLEMENTED
    } else if error.is_instance_of::<PyKeyboardInterrupt>(py) {
        CANCELLED
    } else {
        INTERNAL
    }
}
