//! Tensors of the caller: checked once, then viewed where they are.

use std::ffi::c_void;

use annulus::{DType, Element, Error, Result};
use ndarray::{ArrayView, ArrayViewMut, Dimension, IxDyn, ShapeBuilder, StrideShape};

use crate::fields::check_pointer;

/// 32-bit IEEE; sums, lse, bias and sinks in f32.
pub const ANNULUS_F32: i32 = 1;
/// 64-bit IEEE; sums, lse, bias and sinks in f64.
pub const ANNULUS_F64: i32 = 2;
/// 16-bit IEEE; sums, lse, bias and sinks in f32.
pub const ANNULUS_F16: i32 = 3;
/// bfloat16; sums, lse, bias and sinks in f32.
pub const ANNULUS_BF16: i32 = 4;
/// Signed 8-bit integer, for `attention_mask`.
pub const ANNULUS_I8: i32 = 5;
/// Signed 16-bit integer, for `attention_mask`.
pub const ANNULUS_I16: i32 = 6;
/// Signed 32-bit integer, for segment ids, `cum_seqlens` and `attention_mask`.
pub const ANNULUS_I32: i32 = 7;
/// Signed 64-bit integer, for positions, `cum_seqlens` and `attention_mask`.
pub const ANNULUS_I64: i32 = 8;
/// Unsigned 8-bit integer, for `attention_mask`.
pub const ANNULUS_U8: i32 = 9;
/// One byte that is 0 (false) or not, as `bool` of C, for `attention_mask`.
pub const ANNULUS_BOOL: i32 = 10;

/// A tensor of the caller's, read or written in place.
///
/// The element with the indices i is at `data + sum(i[a] * strides[a])`, in elements. Axes beyond
/// those of a tensor have length 1: lse is `[batch, heads, seq, 1]`, segment ids
/// `[batch, rows, 1, 1]`. The stride of an axis of length 1 is not read.
///
/// Strides are 0 or more. A stride of 0 repeats an input; an output has no two indices for one
/// element. `data` is a multiple of the size of an element; it may be NULL if a length is 0.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct annulus_tensor {
    /// First element.
    pub data: *mut c_void,
    /// Element type, `ANNULUS_F32` to `ANNULUS_BOOL`.
    pub dtype: i32,
    /// Lengths of the axes.
    pub dims: [i64; 4],
    /// Distance of neighbours along each axis, in elements.
    pub strides: [i64; 4],
}

/// Element type of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ElementType {
    pub(crate) constant: i32,
    pub(crate) bytes: usize,
    name: &'static str,
    /// The floating-point type that it is.
    pub(crate) float: Option<DType>,
}

/// All element types.
const ELEMENT_TYPES: [ElementType; 10] = [
    float(ANNULUS_F32, DType::F32),
    float(ANNULUS_F64, DType::F64),
    float(ANNULUS_F16, DType::F16),
    float(ANNULUS_BF16, DType::Bf16),
    ElementType { constant: ANNULUS_I8, bytes: 1, name: "i8", float: None },
    ElementType { constant: ANNULUS_I16, bytes: 2, name: "i16", float: None },
    ElementType { constant: ANNULUS_I32, bytes: 4, name: "i32", float: None },
    ElementType { constant: ANNULUS_I64, bytes: 8, name: "i64", float: None },
    ElementType { constant: ANNULUS_U8, bytes: 1, name: "u8", float: None },
    ElementType { constant: ANNULUS_BOOL, bytes: 1, name: "bool", float: None },
];

const fn float(constant: i32, dtype: DType) -> ElementType {
    ElementType { constant, bytes: dtype.bytes(), name: dtype.name(), float: Some(dtype) }
}

impl ElementType {
    fn of(constant: i32) -> Option<Self> {
        ELEMENT_TYPES.into_iter().find(|element| element.constant == constant)
    }
}

/// The floating-point type of a constant.
pub(crate) fn dtype(name: &str, constant: i32) -> Result<DType> {
    ElementType::of(constant).and_then(|element| element.float).ok_or_else(|| {
        let want = "ANNULUS_F32, ANNULUS_F64, ANNULUS_F16, ANNULUS_BF16";
        Error::invalid(name, constant, want)
    })
}

/// A tensor whose lengths and strides fit memory: every element lies within `extent` elements from
/// an aligned `data`, which is not NULL unless there is no element.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Checked {
    pub(crate) name: &'static str,
    pub(crate) element: ElementType,
    pub(crate) data: *mut u8,
    pub(crate) dims: [usize; 4],
    /// 0 for axes of length 0 and 1.
    pub(crate) strides: [usize; 4],
    /// Elements from the first to behind the last; 0 without elements.
    pub(crate) extent: usize,
}

// SAFETY: an address, of which only the functions that view it make a reference: their callers
// promise that the elements may be used on this thread
unsafe impl Send for Checked {}

impl Checked {
    /// Reads and checks a tensor.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] naming the tensor.
    ///
    /// # Safety
    /// `tensor` is NULL, misaligned or points to a tensor.
    pub(crate) unsafe fn read(name: &'static str, tensor: *const annulus_tensor) -> Result<Self> {
        let tensor = check_pointer(name, tensor)?;
        // SAFETY: not NULL, aligned, and the caller promises that it is a tensor
        Self::of(name, unsafe { tensor.read() })
    }

    /// As [`Checked::read`]; `None` for NULL.
    ///
    /// # Safety
    /// As [`Checked::read`].
    pub(crate) unsafe fn read_optional(
        name: &'static str,
        tensor: *const annulus_tensor,
    ) -> Result<Option<Self>> {
        // SAFETY: as the caller promises
        (!tensor.is_null()).then(|| unsafe { Self::read(name, tensor) }).transpose()
    }

    fn of(name: &'static str, tensor: annulus_tensor) -> Result<Self> {
        let invalid = |field: &str, got: String, want: &str| {
            Err(Error::invalid(format!("{name}.{field}"), got, want))
        };
        let Some(element) = ElementType::of(tensor.dtype) else {
            return invalid("dtype", tensor.dtype.to_string(), "ANNULUS_F32 to ANNULUS_BOOL");
        };
        let (mut dims, mut strides) = ([0; 4], [0; 4]);
        for (axis, (&len, &stride)) in tensor.dims.iter().zip(&tensor.strides).enumerate() {
            let Ok(len) = usize::try_from(len) else {
                return invalid("dims", format!("{:?}", tensor.dims), "lengths of 0 or more");
            };
            dims[axis] = len;
            if len > 1 {
                let Ok(stride) = usize::try_from(stride) else {
                    return invalid("strides", format!("{:?}", tensor.strides), "0 or more");
                };
                strides[axis] = stride;
            }
        }
        let empty = dims.contains(&0);
        if empty {
            strides = [0; 4];
        }
        let Some(extent) = extent(dims, strides).filter(|&extent| {
            // also where no element is: ndarray counts the lengths that are not 0
            let bytes = extent.checked_mul(element.bytes);
            let elements = dims
                .iter()
                .filter(|&&len| len > 0)
                .try_fold(element.bytes, |all, &len| all.checked_mul(len));
            let end = bytes.and_then(|bytes| tensor.data.addr().checked_add(bytes));
            bytes.is_some_and(|bytes| isize::try_from(bytes).is_ok())
                && elements.is_some_and(|elements| isize::try_from(elements).is_ok())
                && end.is_some()
        }) else {
            let got = format!("dims {:?}, strides {:?}", tensor.dims, tensor.strides);
            return Err(Error::invalid(name, got, "a tensor that fits the address space"));
        };
        let data = tensor.data.cast::<u8>();
        if !empty && data.is_null() {
            return invalid("data", "NULL".to_owned(), "a pointer to the first element");
        }
        if !empty && !data.addr().is_multiple_of(element.bytes) {
            let want = format!("an address that is a multiple of {}", element.bytes);
            return invalid("data", format!("{data:p}"), &want);
        }
        Ok(Self { name, element, data, dims, strides, extent: if empty { 0 } else { extent } })
    }

    /// Checks that the element type is one of those for which `is_wanted` is true.
    pub(crate) fn expect(&self, is_wanted: impl Fn(&ElementType) -> bool) -> Result<()> {
        if is_wanted(&self.element) {
            return Ok(());
        }
        let names = ELEMENT_TYPES.iter().filter(|element| is_wanted(element));
        let names: Vec<&str> = names.map(|element| element.name).collect();
        Err(Error::invalid(format!("{}.dtype", self.name), self.element.name, names.join(" or ")))
    }

    /// The floating-point type of the elements.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if they are integers.
    #[cfg(feature = "cuda")]
    pub(crate) fn float(&self) -> Result<DType> {
        self.expect(|element| element.float.is_some())?;
        self.element.float.ok_or_else(|| Error::internal("a float without a type"))
    }

    /// Checks that this can be written: no element has two indices.
    ///
    /// Sufficient and, but for exotic strides, necessary: each stride passes all elements that the
    /// axes with smaller strides reach.
    pub(crate) fn expect_no_overlap(&self) -> Result<()> {
        let mut axes = [0, 1, 2, 3];
        axes.sort_unstable_by_key(|&axis| self.strides[axis]);
        let mut reached = 0;
        for axis in axes {
            if self.dims[axis] <= 1 || self.extent == 0 {
                continue;
            }
            if self.strides[axis] <= reached {
                return Err(Error::invalid(
                    format!("{}.strides", self.name),
                    format!("{:?} for dims {:?}", self.strides, self.dims),
                    "strides with which no two elements of an output overlap",
                ));
            }
            reached += (self.dims[axis] - 1) * self.strides[axis];
        }
        Ok(())
    }

    /// Checks that the axes from `rank` on have length 1.
    fn expect_rank(&self, rank: usize) -> Result<()> {
        if self.dims[rank..].iter().all(|&len| len == 1) {
            return Ok(());
        }
        Err(Error::invalid(
            format!("{}.dims", self.name),
            format!("{:?}", self.dims),
            format!("length 1 of the axes from {rank} on"),
        ))
    }

    /// The first element, or an aligned address that is never read.
    const fn pointer<T>(&self) -> *mut T {
        if self.extent == 0 { std::ptr::dangling_mut() } else { self.data.cast() }
    }
}

/// Elements from the first to behind the last, if they can be counted.
fn extent(dims: [usize; 4], strides: [usize; 4]) -> Option<usize> {
    dims.iter().zip(strides).try_fold(1usize, |extent, (&len, stride)| {
        extent.checked_add(len.saturating_sub(1).checked_mul(stride)?)
    })
}

impl Checked {
    /// Views the tensor, for reading.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for another element type or more axes.
    ///
    /// # Safety
    /// The elements are initialised, and nobody writes to them during `'a`.
    pub(crate) unsafe fn view<'a, T: Element, D: Dimension>(&self) -> Result<ArrayView<'a, T, D>> {
        let shape = self.shape::<T, D>()?;
        // SAFETY: `T` has the element type's size and alignment, which `data` is a multiple of, and
        // any bytes are a value of it; all elements lie within `extent` of a pointer that is not
        // null, which fits isize (`Checked::of`); the rest is the caller's promise
        let view = unsafe { ArrayView::from_shape_ptr(shape, self.pointer::<T>().cast_const()) };
        view.into_dimensionality().map_err(Error::internal)
    }

    /// Views the tensor, for writing.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for another element type or more axes, or if two indices have one
    /// element.
    ///
    /// # Safety
    /// The elements are initialised, and nobody else reads or writes them during `'a`.
    pub(crate) unsafe fn view_mut<'a, T: Element, D: Dimension>(
        &self,
    ) -> Result<ArrayViewMut<'a, T, D>> {
        let shape = self.shape::<T, D>()?;
        self.expect_no_overlap()?;
        // SAFETY: as above, and no two indices have one element
        let view = unsafe { ArrayViewMut::from_shape_ptr(shape, self.pointer::<T>()) };
        view.into_dimensionality().map_err(Error::internal)
    }

    /// Lengths and strides of the first axes, as many as `D` has.
    fn shape<T: Element, D: Dimension>(&self) -> Result<StrideShape<IxDyn>> {
        self.expect(|element| element.float == Some(T::DTYPE))?;
        let rank = D::NDIM.unwrap_or(4);
        self.expect_rank(rank)?;
        Ok(IxDyn(&self.dims[..rank]).strides(IxDyn(&self.strides[..rank])))
    }
}

impl Checked {
    /// Reads the element with these indices as an integer.
    ///
    /// # Safety
    /// The indices are within the lengths, the element type is an integer or bool, and the elements
    /// are initialised.
    pub(crate) unsafe fn integer(&self, index: [usize; 4]) -> i64 {
        let offset: usize =
            index.iter().zip(self.strides).map(|(&index, stride)| index * stride).sum();
        let element = self.data.wrapping_add(offset * self.element.bytes);
        // SAFETY: the element lies in the tensor, which is aligned for its type (`Checked::of`) and
        // initialised, as the caller promises; a bool is read as a byte
        unsafe {
            match self.element.constant {
                ANNULUS_I8 => element.cast::<i8>().read().into(),
                ANNULUS_I16 => element.cast::<i16>().read().into(),
                ANNULUS_I32 => element.cast::<i32>().read().into(),
                ANNULUS_I64 => element.cast::<i64>().read(),
                _ => element.read().into(),
            }
        }
    }
}

// Outputs that share memory with another tensor of the same call.
//
// Two tensors whose byte ranges overlap may still share no element: q, k and v of one packed
// projection `[batch, seq, 3, heads, dim]` interleave. Disjoint elements are proved by a period P:
// axes whose strides are multiples of P only move an element by multiples of P, so modulo P each
// tensor lies in the interval that its other axes reach. If the two intervals are disjoint on the
// circle of length P, so are the tensors. Every stride of either is tried as P. What cannot be
// proved is refused.

/// Checks that no output shares an element with another tensor.
///
/// # Errors
/// [`Error::InvalidArgument`] naming both.
pub(crate) fn check_overlap<I: Iterator<Item = Checked>, O: Iterator<Item = Checked>>(
    inputs: impl Fn() -> I,
    outputs: impl Fn() -> O,
) -> Result<()> {
    for (place, output) in outputs().enumerate() {
        let mut others = outputs().take(place).chain(inputs());
        if let Some(other) = others.find(|other| !are_disjoint(&output, other)) {
            return Err(Error::invalid(
                output.name,
                format!("memory that {} has as well", other.name),
                "elements of its own",
            ));
        }
    }
    Ok(())
}

fn are_disjoint(a: &Checked, b: &Checked) -> bool {
    let start = |tensor: &Checked| tensor.data.addr();
    let end = |tensor: &Checked| start(tensor) + tensor.extent * tensor.element.bytes;
    if a.extent == 0 || b.extent == 0 || end(a) <= start(b) || end(b) <= start(a) {
        return true;
    }
    let strides = |tensor: &Checked| tensor.strides.map(|stride| stride * tensor.element.bytes);
    strides(a).into_iter().chain(strides(b)).any(|period| are_apart(a, b, period))
}

/// Returns true if the tensors are disjoint modulo `period` bytes.
fn are_apart(a: &Checked, b: &Checked, period: usize) -> bool {
    if period == 0 {
        return false;
    }
    // bytes that the axes reach whose strides are no multiples of the period
    let width = |tensor: &Checked| {
        let axes = tensor.dims.iter().zip(tensor.strides);
        axes.filter(|(_, stride)| !(stride * tensor.element.bytes).is_multiple_of(period))
            .map(|(&len, stride)| len.saturating_sub(1) * stride * tensor.element.bytes)
            .sum::<usize>()
            + tensor.element.bytes
    };
    // from the beginning of one to that of the other, around the circle
    let gap = |from: &Checked, to: &Checked| {
        (to.data.addr() % period + period - from.data.addr() % period) % period
    };
    width(a) <= gap(a, b) && width(b) <= gap(b, a)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use ndarray::{Ix3, Ix4};

    use super::*;

    fn tensor(data: *mut c_void, dtype: i32, dims: [i64; 4], strides: [i64; 4]) -> Result<Checked> {
        // SAFETY: a tensor on the stack
        unsafe { Checked::read("q", &annulus_tensor { data, dtype, dims, strides }) }
    }

    fn told(tensor: Result<Checked>) -> String {
        tensor.unwrap_err().to_string()
    }

    #[test]
    fn tensors_without_meaning_are_refused_by_name() {
        let mut numbers = [0f32; 24];
        let data: *mut c_void = numbers.as_mut_ptr().cast();
        let dims = [1, 2, 3, 4];
        let packed = [24, 12, 4, 1];
        assert!(tensor(data, ANNULUS_F32, dims, packed).is_ok());
        let unknown = told(tensor(data, 99, dims, packed));
        assert!(unknown.starts_with("q.dtype: got 99"), "{unknown}");
        let negative = told(tensor(data, ANNULUS_F32, [1, -2, 3, 4], packed));
        assert!(negative.starts_with("q.dims: got [1, -2, 3, 4]"), "{negative}");
        let backwards = told(tensor(data, ANNULUS_F32, dims, [24, 12, 4, -1]));
        assert!(backwards.starts_with("q.strides: got [24, 12, 4, -1]"), "{backwards}");
        let null = told(tensor(std::ptr::null_mut(), ANNULUS_F32, dims, packed));
        assert_eq!(null, "q.data: got NULL, want a pointer to the first element");
        let odd = data.wrapping_byte_add(2);
        assert!(told(tensor(odd, ANNULUS_F32, dims, packed)).ends_with("a multiple of 4"));
        for (dims, strides) in [
            ([1, i64::MAX, 2, 1], [1, 4, 2, 1]),
            ([1, 2, 3, 4], [24, i64::MAX, 4, 1]),
            ([i64::MAX, i64::MAX, 0, 1], [1, 1, 1, 1]),
            ([1, 1 << 62, 1, 1], [0, 1, 0, 0]),
            ([1, 1 << 40, 1 << 40, 1], [0, 0, 0, 0]),
        ] {
            let told = told(tensor(data, ANNULUS_F32, dims, strides));
            assert!(told.ends_with("fits the address space"), "{dims:?} {strides:?}: {told}");
        }
        // nothing is read of an empty one
        assert!(tensor(std::ptr::null_mut(), ANNULUS_F32, [1, 0, 3, 4], packed).is_ok());
        // nor the stride of an axis of length 1
        assert!(tensor(data, ANNULUS_F32, [1, 2, 3, 4], [-7, 12, 4, 1]).is_ok());
    }

    #[test]
    fn outputs_whose_elements_overlap_are_refused() {
        let mut numbers = [0f32; 64];
        let data: *mut c_void = numbers.as_mut_ptr().cast();
        let overlap = |dims, strides| {
            tensor(data, ANNULUS_F32, dims, strides).unwrap().expect_no_overlap().is_err()
        };
        assert!(!overlap([1, 2, 3, 4], [0, 12, 4, 1]));
        assert!(!overlap([1, 2, 3, 4], [0, 1, 2, 6]));
        assert!(!overlap([1, 1, 1, 1], [0, 0, 0, 0]));
        assert!(!overlap([1, 0, 3, 4], [0, 0, 0, 0]));
        assert!(overlap([1, 2, 3, 4], [0, 0, 4, 1]));
        assert!(overlap([1, 2, 3, 4], [0, 12, 3, 1]));
        assert!(overlap([1, 2, 3, 4], [0, 1, 1, 1]));
    }

    #[test]
    fn views_have_the_elements_of_their_strides() {
        let mut numbers: Vec<f32> = (0..24u8).map(f32::from).collect();
        let data: *mut c_void = numbers.as_mut_ptr().cast();
        let heads_first = tensor(data, ANNULUS_F32, [1, 2, 3, 4], [0, 4, 8, 1]).unwrap();
        // SAFETY: the vector outlives the view and is not touched meanwhile
        let view = unsafe { heads_first.view::<f32, Ix4>() }.unwrap();
        assert_eq!(view[[0, 1, 2, 3]], 4.0 + 16.0 + 3.0);
        // SAFETY: refused
        assert!(unsafe { heads_first.view::<f64, Ix4>() }.is_err());
        // SAFETY: refused
        let more = unsafe { heads_first.view::<f32, Ix3>() }.unwrap_err().to_string();
        assert_eq!(more, "q.dims: got [1, 2, 3, 4], want length 1 of the axes from 3 on");
        // SAFETY: as the first
        let mut view = unsafe { heads_first.view_mut::<f32, Ix4>() }.unwrap();
        view[[0, 1, 0, 0]] = -1.0;
        assert_eq!(numbers[4], -1.0);
    }

    fn checked(first: usize, dims: [i64; 4], strides: [i64; 4]) -> Checked {
        let data = std::ptr::without_provenance_mut(0x10000 + 4 * first);
        // SAFETY: a tensor on the stack, whose elements are never read
        unsafe { Checked::read("x", &annulus_tensor { data, dtype: ANNULUS_F32, dims, strides }) }
            .unwrap()
    }

    fn elements(tensor: &Checked) -> HashSet<usize> {
        let [b, s, h, d] = tensor.dims;
        let mut all = HashSet::new();
        for index in 0..b * s * h * d {
            let at = [index / (s * h * d), index / (h * d) % s, index / d % h, index % d];
            let offset: usize = at.iter().zip(tensor.strides).map(|(i, stride)| i * stride).sum();
            all.insert(tensor.data.addr() + 4 * offset);
        }
        all
    }

    #[test]
    fn tensors_of_one_packed_projection_are_disjoint() {
        // [batch 2, seq 5, 3, heads 2, dim 4]
        let part = |number: usize| checked(8 * number, [2, 5, 2, 4], [120, 24, 4, 1]);
        for (a, b) in [(0, 1), (0, 2), (1, 2), (2, 0)] {
            assert!(are_disjoint(&part(a), &part(b)), "{a} {b}");
        }
        assert!(!are_disjoint(&part(1), &part(1)));
        // heads of one tensor, interleaved: even and odd
        let heads = |first| checked(first, [1, 5, 2, 4], [0, 16, 8, 1]);
        assert!(are_disjoint(&heads(0), &heads(4)));
        assert!(!are_disjoint(&heads(0), &heads(3)));
    }

    #[test]
    fn what_is_called_disjoint_shares_no_element() {
        let mut disjoint = 0;
        for first in 0..40 {
            for strides in [[0, 24, 4, 1], [0, 8, 4, 1], [0, 1, 20, 5], [0, 24, 12, 3]] {
                let a = checked(7, [1, 3, 2, 2], [0, 24, 4, 1]);
                let b = checked(first, [1, 3, 2, 2], strides);
                if are_disjoint(&a, &b) {
                    disjoint += 1;
                    assert!(elements(&a).is_disjoint(&elements(&b)), "{first} {strides:?}");
                } else {
                    assert!(!are_disjoint(&b, &a));
                }
            }
        }
        assert!(disjoint > 20, "{disjoint}");
        let empty = checked(7, [1, 0, 2, 2], [0, 24, 4, 1]);
        assert!(are_disjoint(&empty, &checked(7, [1, 3, 2, 2], [0, 24, 4, 1])));
    }
}
