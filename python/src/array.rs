//! Views of arrays that Python owns, made from `__array_interface__` or `DeviceArray`, and the
//! checks that make them sound: element type, alignment, strides, writability, and that no output
//! overlaps anything.

use std::ptr;

#[cfg(feature = "cuda")]
use annulus::backend::cuda::device::{CudaView, CudaViewMut};
use annulus::{
    DType, Element, Error, Result,
    ndarray::{ArrayView, ArrayViewMut, Axis, Dimension, IxDyn, ShapeBuilder, StrideShape},
};
use bytemuck::Pod;
use pyo3::{prelude::*, types::PyDict};

use crate::{Raised, Raises};

/// Element types, with NumPy's names and those of the array interface protocol without the byte
/// order. NumPy has no bfloat16: the package passes those arrays as views of 16-bit integers.
pub(crate) const TYPES: [(DType, &str, &str); 4] = [
    (DType::F64, "float64", "f8"),
    (DType::F32, "float32", "f4"),
    (DType::F16, "float16", "f2"),
    (DType::Bf16, "bfloat16", "u2"),
];

/// Returns the names of an element type.
pub(crate) fn names_of(dtype: DType) -> (&'static str, &'static str) {
    let known = TYPES.iter().find(|(known, ..)| *known == dtype);
    known.map_or(("", ""), |(_, name, typestr)| (name, typestr))
}

/// Returns the element type of a NumPy name.
pub(crate) fn dtype_of(argument: &str, name: &str) -> Result<DType> {
    let known = TYPES.iter().find(|(_, known, _)| *known == name);
    known
        .map(|(dtype, ..)| *dtype)
        .ok_or_else(|| Error::invalid(argument, name, "float64, float32, bfloat16 or float16"))
}

/// The byte order of this machine in the array interface protocol.
pub(crate) const NATIVE: char = if cfg!(target_endian = "little") { '<' } else { '>' };

/// An array of Python's, with its reference, so that the memory outlives the views.
pub(crate) struct Array<'py> {
    name: &'static str,
    _object: Bound<'py, PyAny>,
    address: usize,
    shape: Vec<usize>,
    /// In bytes.
    strides: Vec<isize>,
    typestr: String,
    writable: bool,
    /// Number of the GPU whose memory it is in, or `None` for host memory.
    device: Option<usize>,
}

impl<'py> Array<'py> {
    /// Reads the array interface of `object`.
    pub(crate) fn new(name: &'static str, object: Bound<'py, PyAny>) -> Raises<Self> {
        #[cfg(feature = "cuda")]
        if let Ok(array) = object.cast::<crate::device::DeviceArray>() {
            let array = array.get();
            return Ok(Self {
                name,
                address: annulus_core::index(array.address),
                shape: array.shape.clone(),
                strides: array.byte_strides(),
                typestr: array.typestr(),
                writable: !array.read_only,
                device: Some(array.device),
                _object: object,
            });
        }
        let interface = ArrayInterface::read(name, &object, "__array_interface__")?;
        let strides = interface
            .strides
            .unwrap_or_else(|| dense_strides(&interface.shape, item_bytes(&interface.typestr)));
        Ok(Self {
            name,
            _object: object,
            address: interface.address,
            shape: interface.shape,
            strides,
            typestr: interface.typestr,
            writable: !interface.read_only,
            device: None,
        })
    }

    pub(crate) fn refuse(&self, got: impl ToString, want: impl ToString) -> Error {
        Error::invalid(self.name, got, want)
    }

    /// Checks that the array has elements of `typestr`, whose size is their alignment, in the
    /// memory of GPU `device`, or of the host. Returns the size.
    fn check(&self, typestr: &str, device: Option<usize>) -> Result<usize> {
        if self.device != device {
            return Err(self.refuse(memory(self.device), memory(device)));
        }
        let want = [format!("{NATIVE}{typestr}"), format!("|{typestr}")];
        if !want.contains(&self.typestr) {
            let got = format!("elements {}", self.typestr);
            return Err(self.refuse(got, format!("elements {}", want[0])));
        }
        let size = item_bytes(&self.typestr);
        // an array of stride 0 may have more elements than memory has bytes
        let bytes = self.shape.iter().filter(|&&len| len > 0).try_fold(size, |product, &len| {
            product.checked_mul(len).filter(|&bytes| bytes <= isize::MAX.cast_unsigned())
        });
        if bytes.is_none() {
            return Err(self.refuse(format!("shape {:?}", self.shape), "fewer than 2^63 bytes"));
        }
        let whole = self.strides.iter().all(|&stride| stride % size.cast_signed() == 0);
        if self.strides.len() != self.shape.len() || !whole {
            let got = format!("strides {:?}", self.strides);
            return Err(self.refuse(got, format!("multiples of {size}")));
        }
        if !self.address.is_multiple_of(size) {
            let got = format!("elements at {:#x}", self.address);
            return Err(self.refuse(got, format!("an address that {size} divides")));
        }
        Ok(size)
    }

    /// Checks that the array may be written.
    fn check_writable(&self) -> Result<()> {
        match self.writable {
            true => Ok(()),
            false => Err(self.refuse("a read-only array", "a writable one")),
        }
    }

    /// First byte of the array, and the byte after its last. Empty if the array is.
    pub(crate) fn bytes(&self) -> std::ops::Range<usize> {
        if self.shape.contains(&0) {
            return self.address..self.address;
        }
        let (mut first, mut last) = (self.address, self.address);
        for (&len, &stride) in self.shape.iter().zip(&self.strides) {
            let extent = stride.unsigned_abs() * (len - 1);
            if stride < 0 {
                first -= extent;
            } else {
                last += extent;
            }
        }
        first..last + item_bytes(&self.typestr)
    }

    /// Views the array.
    ///
    /// # Errors
    /// `ValueError` naming the array if its elements, strides or number of axes do not fit.
    pub(crate) fn view<T: Element, D: Dimension>(&self) -> Result<ArrayView<'_, T, D>> {
        self.view_of(names_of(T::DTYPE).1)
    }

    /// As [`Array::view`], of a type that `typestr` names.
    pub(crate) fn view_of<T: Pod, D: Dimension>(
        &self,
        typestr: &str,
    ) -> Result<ArrayView<'_, T, D>> {
        let (first, shape) = self.ascending::<T>(typestr)?;
        // SAFETY:
        // - the array interface names memory of `shape` and `strides` at `address`, which lives as
        //   long as the object, to which `self` holds a reference for the life of the view;
        // - `check` has compared element size, alignment, divisibility of the strides and the
        //   number of elements, and every bit pattern is a `T`;
        // - `ascending` has made the strides non-negative and moved the address to match;
        // - nobody writes it: no output of the call overlaps it (`Outputs::check`), and a Python
        //   thread that writes an array during a call races, as with NumPy's own functions.
        let mut view = unsafe { ArrayView::from_shape_ptr(shape, first.cast_const()) };
        self.descending().for_each(|axis| view.invert_axis(axis));
        view.into_dimensionality().map_err(|_| self.wrong_axes::<D>())
    }

    /// Views the array for writing.
    ///
    /// # Safety
    /// Nothing else views the memory of the array: `Outputs::check` has accepted it, and this is
    /// called once.
    ///
    /// # Errors
    /// As [`Array::view`], and `ValueError` if the array is read-only.
    pub(crate) unsafe fn view_mut<T: Element, D: Dimension>(
        &self,
    ) -> Result<ArrayViewMut<'_, T, D>> {
        let (first, shape) = self.ascending::<T>(names_of(T::DTYPE).1)?;
        self.check_writable()?;
        // SAFETY: as in `view`; the array says that it may be written; its elements do not overlap
        // each other and nothing else views them, which the caller vouches for
        let mut view = unsafe { ArrayViewMut::from_shape_ptr(shape, first) };
        self.descending().for_each(|axis| view.invert_axis(axis));
        view.into_dimensionality().map_err(|_| self.wrong_axes::<D>())
    }

    /// Checks the array. Returns the element with the lowest address, or an aligned address that is
    /// never read, and the lengths with strides in elements without sign.
    fn ascending<T: Pod>(&self, typestr: &str) -> Result<(*mut T, StrideShape<IxDyn>)> {
        let size = self.check(typestr, None)?;
        let strides: Vec<_> =
            self.strides.iter().map(|stride| stride.unsigned_abs() / size).collect();
        if self.shape.contains(&0) {
            let none = IxDyn(&vec![0; self.shape.len()]);
            return Ok((ptr::dangling_mut(), IxDyn(&self.shape).strides(none)));
        }
        let first = ptr::with_exposed_provenance_mut(self.bytes().start);
        Ok((first, IxDyn(&self.shape).strides(IxDyn(&strides))))
    }

    /// Axes with a negative stride.
    fn descending(&self) -> impl Iterator<Item = Axis> {
        let is_empty = self.shape.contains(&0);
        let axes = self.strides.iter().enumerate();
        axes.filter(move |(_, stride)| **stride < 0 && !is_empty).map(|(axis, _)| Axis(axis))
    }

    fn wrong_axes<D: Dimension>(&self) -> Error {
        let got = format!("{} axes", self.shape.len());
        self.refuse(got, format!("{} axes", D::NDIM.unwrap_or_default()))
    }

    /// Views an array in the memory of GPU `device`, of which the plan checks type and shape.
    ///
    /// # Errors
    /// `ValueError` naming the array if its memory, strides or number of axes do not fit.
    #[cfg(feature = "cuda")]
    pub(crate) fn device_view(&self, device: usize) -> Result<CudaView<'_>> {
        let (dtype, shape, strides) = self.four_axes(device)?;
        // SAFETY:
        // - the owner has lent memory of `shape` and `strides` at this address, which lives as long
        //   as the object; that it lives until the stream has done the pass, and that its writes
        //   come earlier in the stream, is what the documentation of `Plan` asks for;
        // - `check` has compared element size, alignment and divisibility of the strides.
        Ok(unsafe { CudaView::from_raw(self.address as u64, dtype, shape, strides) })
    }

    /// Views an array in the memory of GPU `device`, for writing.
    ///
    /// # Safety
    /// As [`Array::view_mut`].
    ///
    /// # Errors
    /// As [`Array::device_view`], and `ValueError` if the array is read-only.
    #[cfg(feature = "cuda")]
    pub(crate) unsafe fn device_view_mut(&self, device: usize) -> Result<CudaViewMut<'_>> {
        let (dtype, shape, strides) = self.four_axes(device)?;
        self.check_writable()?;
        // SAFETY: as in `device_view`; nothing else views the memory, and its elements do not
        // overlap, which the caller vouches for
        Ok(unsafe { CudaViewMut::from_raw(self.address as u64, dtype, shape, strides) })
    }

    /// Checks an array in the memory of GPU `device`. Returns its type, its lengths, and strides in
    /// elements, with axes of length 1 appended. Sinks that all heads share have one axis, and an
    /// axis of heads is put before it.
    #[cfg(feature = "cuda")]
    fn four_axes(&self, device: usize) -> Result<(DType, [usize; 4], [i64; 4])> {
        let typestr = self.typestr.get(1..).unwrap_or_default();
        let size = self.check(typestr, Some(device))?;
        let known = TYPES.iter().find(|(.., known)| *known == typestr);
        let (dtype, ..) = known.ok_or_else(|| self.refuse(&self.typestr, "floats"))?;
        let (mut shape, mut strides) = ([1; 4], [1; 4]);
        let first = usize::from(self.shape.len() == 1);
        if self.shape.len() + first > 4 {
            return Err(self.refuse(format!("{} axes", self.shape.len()), "at most 4"));
        }
        for (axis, (&len, &stride)) in self.shape.iter().zip(&self.strides).enumerate() {
            shape[first + axis] = len;
            strides[first + axis] = (stride / size.cast_signed()) as i64;
        }
        Ok((*dtype, shape, strides))
    }

    /// True if no two elements share memory, found by sorting the axes by stride; some arrays
    /// whose elements interleave are refused too.
    fn is_injective(&self) -> bool {
        let mut axes: Vec<_> = self.shape.iter().zip(&self.strides).collect();
        axes.retain(|&(&len, _)| len > 1);
        axes.sort_by_key(|&(_, stride)| stride.unsigned_abs());
        let mut covered = item_bytes(&self.typestr);
        axes.into_iter().all(|(&len, &stride)| {
            let fits = stride.unsigned_abs() >= covered;
            covered += stride.unsigned_abs() * (len - 1);
            fits
        })
    }
}

/// Checks that no output of a call overlaps another one, an input or itself.
///
/// # Errors
/// `ValueError` naming the output.
pub(crate) fn check_outputs(outputs: &[&Array<'_>], inputs: &[&Array<'_>]) -> Result<()> {
    for (index, output) in outputs.iter().enumerate() {
        let own = output.bytes();
        if !output.shape.contains(&0) && !output.is_injective() {
            return Err(output.refuse("elements that share memory", "memory of its own"));
        }
        for other in outputs[..index].iter().chain(inputs) {
            let other_bytes = other.bytes();
            if own.start < other_bytes.end && other_bytes.start < own.end {
                let got = format!("memory that overlaps {}", other.name);
                return Err(output.refuse(got, "memory of its own"));
            }
        }
    }
    Ok(())
}

/// Reads the array of a name, if there is one.
pub(crate) fn array<'py>(
    arrays: &Bound<'py, PyDict>,
    name: &'static str,
) -> Raises<Option<Array<'py>>> {
    let given = arrays.get_item(name)?.filter(|array| !array.is_none());
    given.map(|given| Array::new(name, given)).transpose()
}

/// Reads the array of a name.
pub(crate) fn needed<'py>(arrays: &Bound<'py, PyDict>, name: &'static str) -> Raises<Array<'py>> {
    Ok(array(arrays, name)?.ok_or_else(|| Error::invalid(name, "nothing", "an array"))?)
}

/// Views an input that there may be.
pub(crate) fn view<'a, T: Element, D: Dimension>(
    array: &'a Option<Array<'_>>,
) -> Result<Option<ArrayView<'a, T, D>>> {
    array.as_ref().map(Array::view).transpose()
}

/// Views an output that there may be.
///
/// # Safety
/// As [`Array::view_mut`].
pub(crate) unsafe fn view_mut<'a, T: Element, D: Dimension>(
    array: &'a Option<Array<'_>>,
) -> Result<Option<ArrayViewMut<'a, T, D>>> {
    // SAFETY: as the caller vouches
    array.as_ref().map(|array| unsafe { array.view_mut() }).transpose()
}

/// The array interface of an object, of the host or of CUDA.
pub(crate) struct ArrayInterface<'py> {
    pub(crate) address: usize,
    pub(crate) read_only: bool,
    pub(crate) shape: Vec<usize>,
    /// In bytes; `None` if the array is dense.
    pub(crate) strides: Option<Vec<isize>>,
    pub(crate) typestr: String,
    /// The whole, with the fields that only arrays of GPUs have.
    #[cfg_attr(
        not(feature = "cuda"),
        expect(dead_code, reason = "arrays of GPUs have more fields")
    )]
    pub(crate) dict: Bound<'py, PyDict>,
}

impl<'py> ArrayInterface<'py> {
    /// Reads the attribute `interface` of an object.
    pub(crate) fn read(name: &str, object: &Bound<'py, PyAny>, interface: &str) -> Raises<Self> {
        let dict = object.getattr(interface)?.cast_into::<PyDict>().map_err(PyErr::from)?;
        let field = |key: &str| {
            let value = dict.get_item(key)?;
            let got = || format!("an array interface without {key}");
            Ok::<_, Raised>(value.ok_or_else(|| Error::invalid(name, got(), "an array"))?)
        };
        let (address, read_only) = field("data")?.extract()?;
        let strides = dict.get_item("strides")?.filter(|strides| !strides.is_none());
        Ok(Self {
            address,
            read_only,
            shape: field("shape")?.extract()?,
            strides: strides.map(|strides| strides.extract()).transpose()?,
            typestr: field("typestr")?.extract()?,
            dict,
        })
    }
}

/// Names a memory in errors.
fn memory(device: Option<usize>) -> String {
    device.map_or_else(|| "an array in host memory".to_owned(), |n| format!("one of GPU {n}"))
}

/// Bytes of an element.
fn item_bytes(typestr: &str) -> usize {
    typestr.get(2..).and_then(|size| size.parse().ok()).unwrap_or(1)
}

/// Strides of a dense array.
fn dense_strides(shape: &[usize], item: usize) -> Vec<isize> {
    let mut strides = vec![0; shape.len()];
    let mut bytes = item;
    for (stride, &len) in strides.iter_mut().zip(shape).rev() {
        *stride = bytes.cast_signed();
        bytes *= len;
    }
    strides
}
