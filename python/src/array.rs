//! Views of arrays that Python owns, made from `__array_interface__` or `DeviceArray`, and the
//! checks that make them sound: element type, alignment, strides, writability, and that no output
//! overlaps anything.

#[cfg(feature = "cuda")]
use annulus::backend::cuda::device::{CudaView, CudaViewMut};
use annulus::ndarray::{ArrayView, ArrayViewMut, Axis, Dimension, IxDyn, ShapeBuilder};
use pyo3::{
    prelude::*,
    types::{PyDict, PyTuple},
};

use crate::errors::invalid;

/// A type of which a bit pattern of an array is a value.
///
/// # Safety
/// Every bit pattern of the type's size is a value, and `TYPESTR` names an array element of that
/// size.
pub(crate) unsafe trait Plain: Copy + Send + Sync + 'static {
    /// Element type in the array interface protocol, without the byte order.
    const TYPESTR: &'static str;
}

macro_rules! plain {
    ($($type:ty = $name:literal)*) => {
        $(
            // SAFETY: every bit pattern of an integer or IEEE number is a value, and the number in
            // the name is the size of the type
            unsafe impl Plain for $type {
                const TYPESTR: &'static str = $name;
            }
        )*
    };
}
// NumPy has no bfloat16: the package passes those arrays as views of 16-bit integers
plain!(f64 = "f8" f32 = "f4" annulus::half::f16 = "f2" annulus::half::bf16 = "u2"
       i32 = "i4" i64 = "i8" u8 = "u1");

/// An array of Python's, with its reference, so that the memory outlives the views.
pub(crate) struct Array<'py> {
    name: &'static str,
    object: Bound<'py, PyAny>,
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
    pub(crate) fn new(name: &'static str, object: Bound<'py, PyAny>) -> PyResult<Self> {
        #[cfg(feature = "cuda")]
        if let Ok(array) = object.cast::<crate::device::DeviceArray>() {
            let array = array.get();
            return Ok(Self {
                name,
                address: annulus_core::index(array.address()),
                shape: array.lengths().to_vec(),
                strides: array.byte_strides(),
                typestr: array.typestr().to_owned(),
                writable: !array.is_read_only(),
                device: Some(array.number()),
                object,
            });
        }
        let interface = object.getattr("__array_interface__")?.cast_into::<PyDict>()?;
        let field = |key: &str| {
            interface.get_item(key)?.ok_or_else(|| {
                invalid(object.py(), name, format!("an array interface without {key}"), "an array")
            })
        };
        let typestr: String = field("typestr")?.extract()?;
        let shape: Vec<usize> = field("shape")?.extract()?;
        let (address, read_only): (usize, bool) = field("data")?.extract()?;
        let strides = match interface.get_item("strides")?.filter(|strides| !strides.is_none()) {
            Some(strides) => strides.cast_into::<PyTuple>()?.extract()?,
            None => dense_strides(&shape, item_bytes(&typestr)),
        };
        let writable = !read_only;
        Ok(Self { name, object, address, shape, strides, typestr, writable, device: None })
    }

    fn py(&self) -> Python<'py> {
        self.object.py()
    }

    /// Checks that the array is one of `T` in the memory of GPU `device`, or of the host.
    fn check<T: Plain>(&self, device: Option<usize>) -> PyResult<()> {
        if self.device != device {
            let (got, want) = (memory(self.device), memory(device));
            return Err(invalid(self.py(), self.name, got, want));
        }
        let native = if cfg!(target_endian = "little") { '<' } else { '>' };
        let want = [format!("{native}{}", T::TYPESTR), format!("|{}", T::TYPESTR)];
        let refuse = |got: String, want: String| Err(invalid(self.py(), self.name, got, want));
        if !want.contains(&self.typestr) {
            return refuse(format!("elements {}", self.typestr), format!("elements {}", want[0]));
        }
        let size = size_of::<T>();
        // an array of stride 0 may have more elements than memory has bytes
        let bytes = self.shape.iter().filter(|&&len| len > 0).try_fold(size, |product, &len| {
            product.checked_mul(len).filter(|&bytes| bytes <= isize::MAX.cast_unsigned())
        });
        if bytes.is_none() {
            return refuse(format!("shape {:?}", self.shape), "fewer than 2^63 bytes".to_owned());
        }
        let whole = self.strides.iter().all(|&stride| stride % size.cast_signed() == 0);
        if self.strides.len() != self.shape.len() || !whole {
            return refuse(format!("strides {:?}", self.strides), format!("multiples of {size}"));
        }
        if !self.address.is_multiple_of(align_of::<T>()) {
            let want = format!("an address that {} divides", align_of::<T>());
            return refuse(format!("elements at {:#x}", self.address), want);
        }
        Ok(())
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
    pub(crate) fn view<T: Plain, D: Dimension>(&self) -> PyResult<ArrayView<'_, T, D>> {
        self.check::<T>(None)?;
        if self.shape.contains(&0) {
            let empty = ArrayView::from_shape(IxDyn(&self.shape), &[]);
            return self.dimensions(empty.map_err(|error| {
                invalid(self.py(), self.name, error, "an array of another shape")
            })?);
        }
        let (first, strides) = self.ascending(size_of::<T>());
        let shape = IxDyn(&self.shape).strides(IxDyn(&strides));
        // SAFETY:
        // - the array interface names memory of `shape` and `strides` at `address`, which lives as
        //   long as `object`, to which `self` holds a reference for the life of the view;
        // - `check` has compared element size, alignment, divisibility of the strides and the
        //   number of elements, and every bit pattern is a `T`;
        // - `ascending` has made the strides non-negative and moved the address to match;
        // - nobody writes it: no output of the call overlaps it (`Outputs::check`), and a Python
        //   thread that writes an array during a call races, as with NumPy's own functions.
        let mut view = unsafe { ArrayView::from_shape_ptr(shape, first as *const T) };
        for (axis, _) in self.strides.iter().enumerate().filter(|(_, stride)| **stride < 0) {
            view.invert_axis(Axis(axis));
        }
        self.dimensions(view)
    }

    /// Views the array for writing.
    ///
    /// # Safety
    /// Nothing else views the memory of the array: `Outputs::check` has accepted it, and this is
    /// called once.
    ///
    /// # Errors
    /// As [`Array::view`], and `ValueError` if the array is read-only.
    pub(crate) unsafe fn view_mut<T: Plain, D: Dimension>(
        &self,
    ) -> PyResult<ArrayViewMut<'_, T, D>> {
        self.check::<T>(None)?;
        if !self.writable {
            return Err(invalid(self.py(), self.name, "a read-only array", "a writable one"));
        }
        if self.shape.contains(&0) {
            let empty = ArrayViewMut::from_shape(IxDyn(&self.shape), &mut []);
            let empty = empty.map_err(|error| {
                invalid(self.py(), self.name, error, "an array of another shape")
            })?;
            return empty.into_dimensionality().map_err(|_| self.wrong_axes::<D>());
        }
        let (first, strides) = self.ascending(size_of::<T>());
        let shape = IxDyn(&self.shape).strides(IxDyn(&strides));
        // SAFETY: as in `view`; the array says that it may be written; its elements do not overlap
        // each other and nothing else views them, which the caller vouches for
        let mut view = unsafe { ArrayViewMut::from_shape_ptr(shape, first as *mut T) };
        for (axis, _) in self.strides.iter().enumerate().filter(|(_, stride)| **stride < 0) {
            view.invert_axis(Axis(axis));
        }
        view.into_dimensionality().map_err(|_| self.wrong_axes::<D>())
    }

    /// Views an array in the memory of GPU `device`.
    ///
    /// # Errors
    /// `ValueError` naming the array if its memory, elements, strides or number of axes do not fit.
    #[cfg(feature = "cuda")]
    pub(crate) fn device_view<T: Plain + annulus::Element>(
        &self,
        device: usize,
    ) -> PyResult<CudaView<'_>> {
        self.check::<T>(Some(device))?;
        let (shape, strides) = self.four_axes(size_of::<T>())?;
        // SAFETY:
        // - the owner has lent memory of `shape` and `strides` at this address, which lives as long
        //   as `object`; that it lives until the stream has done the pass, and that its writes come
        //   earlier in the stream, is what the documentation of `Plan` asks for;
        // - `check` has compared element size, alignment and divisibility of the strides.
        Ok(unsafe { CudaView::from_raw(self.address as u64, T::DTYPE, shape, strides) })
    }

    /// Views an array in the memory of GPU `device`, for writing.
    ///
    /// # Safety
    /// As [`Array::view_mut`].
    ///
    /// # Errors
    /// As [`Array::device_view`], and `ValueError` if the array is read-only.
    #[cfg(feature = "cuda")]
    pub(crate) unsafe fn device_view_mut<T: Plain + annulus::Element>(
        &self,
        device: usize,
    ) -> PyResult<CudaViewMut<'_>> {
        self.check::<T>(Some(device))?;
        if !self.writable {
            return Err(invalid(self.py(), self.name, "a read-only array", "a writable one"));
        }
        let (shape, strides) = self.four_axes(size_of::<T>())?;
        // SAFETY: as in `device_view`; nothing else views the memory, and its elements do not
        // overlap, which the caller vouches for
        Ok(unsafe { CudaViewMut::from_raw(self.address as u64, T::DTYPE, shape, strides) })
    }

    /// Lengths, and strides in elements, with axes of length 1 appended. Sinks that all heads share
    /// have one axis, and an axis of heads is put before it.
    #[cfg(feature = "cuda")]
    fn four_axes(&self, size: usize) -> PyResult<([usize; 4], [i64; 4])> {
        let (mut shape, mut strides) = ([1; 4], [1; 4]);
        let first = usize::from(self.shape.len() == 1);
        if self.shape.len() + first > 4 {
            let got = format!("{} axes", self.shape.len());
            return Err(invalid(self.py(), self.name, got, "at most 4"));
        }
        for (axis, (&len, &stride)) in self.shape.iter().zip(&self.strides).enumerate() {
            shape[first + axis] = len;
            strides[first + axis] = (stride / size.cast_signed()) as i64;
        }
        Ok((shape, strides))
    }

    fn dimensions<'a, T, D: Dimension>(
        &self,
        view: ArrayView<'a, T, IxDyn>,
    ) -> PyResult<ArrayView<'a, T, D>> {
        view.into_dimensionality().map_err(|_| self.wrong_axes::<D>())
    }

    fn wrong_axes<D: Dimension>(&self) -> PyErr {
        let got = format!("{} axes", self.shape.len());
        invalid(self.py(), self.name, got, format!("{} axes", D::NDIM.unwrap_or_default()))
    }

    /// Address of the element with the lowest one, and strides in elements without sign.
    fn ascending(&self, size: usize) -> (usize, Vec<usize>) {
        let strides = self.strides.iter().map(|stride| stride.unsigned_abs() / size).collect();
        (self.bytes().start, strides)
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

/// The arrays that a call writes.
pub(crate) struct Outputs<'a, 'py>(pub(crate) Vec<&'a Array<'py>>);

impl Outputs<'_, '_> {
    /// Checks that no output overlaps another one, an input or itself.
    ///
    /// # Errors
    /// `ValueError` naming the output.
    pub(crate) fn check(&self, inputs: &[&Array<'_>]) -> PyResult<()> {
        for (index, output) in self.0.iter().enumerate() {
            let own = output.bytes();
            let refuse = |got| Err(invalid(output.py(), output.name, got, "memory of its own"));
            if !output.shape.contains(&0) && !output.is_injective() {
                return refuse("elements that share memory".to_owned());
            }
            for other in self.0[..index].iter().copied().chain(inputs.iter().copied()) {
                let other_bytes = other.bytes();
                if own.start < other_bytes.end && other_bytes.start < own.end {
                    return refuse(format!("memory that overlaps {}", other.name));
                }
            }
        }
        Ok(())
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
