//! Copies of rows and heads between tensors in host memory and packed bytes.
//!
//! Packed bytes are `[batch][row][head][element]`, for some rows and some heads of a tensor
//! `[batch, rows, heads, elements]`.

use std::ops::Range;

use half::{bf16, f16};
use ndarray::{ArrayView3, ArrayView4, ArrayViewMut3, ArrayViewMut4, Axis, Slice};

use crate::{DType, Element, Error, HostView, HostViewMut, Result, dtype::with_array};

/// Consecutive rows of a rank that are consecutive in a larger tensor, such as the rows of its
/// group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowSegment {
    /// Index of the first row in the larger tensor.
    pub first: usize,
    /// Number of rows.
    pub count: usize,
}

/// Methods of both kinds of views that rearrange axes.
macro_rules! axis_methods {
    ($view:ident) => {
        /// Exchanges the second and the third axis: rows and heads.
        #[must_use]
        pub fn swap_rows_and_heads(self) -> Self {
            with_array!(Self, self, array => Element::$view(array.permuted_axes([0, 2, 1, 3])))
        }

        /// Returns the indices `range` of an axis.
        #[must_use]
        pub fn slice(self, axis: usize, range: Range<usize>) -> Self {
            with_array!(Self, self, array => {
                let mut array = array;
                array.slice_axis_inplace(Axis(axis), Slice::from(range));
                Element::$view(array)
            })
        }
    };
}

impl<'a> HostView<'a> {
    /// Returns bytes as a dense tensor.
    ///
    /// # Errors
    /// [`Error::Internal`] if their number or alignment is not that of the tensor.
    pub fn of_bytes(bytes: &'a [u8], dtype: DType, shape: [usize; 4]) -> Result<Self> {
        fn view<T: Element>(bytes: &[u8], shape: [usize; 4]) -> Result<HostView<'_>> {
            // bytes that do not exist need no alignment
            let elements = if bytes.is_empty() {
                &[]
            } else {
                bytemuck::try_cast_slice(bytes).map_err(Error::internal)?
            };
            ArrayView4::from_shape(shape, elements).map(T::view).map_err(Error::internal)
        }
        match dtype {
            DType::F64 => view::<f64>(bytes, shape),
            DType::F32 => view::<f32>(bytes, shape),
            DType::Bf16 => view::<bf16>(bytes, shape),
            DType::F16 => view::<f16>(bytes, shape),
        }
    }

    /// Returns a tensor of ones, in the type of an accumulator.
    ///
    /// # Errors
    /// [`Error::Internal`] if the shape has too many elements.
    pub fn ones(dtype: DType, shape: [usize; 4]) -> Result<Self> {
        let shape = ndarray::ShapeBuilder::strides(shape, [0; 4]);
        match dtype {
            DType::F64 => ArrayView4::from_shape(shape, &[1.0]).map(Self::F64),
            _ => ArrayView4::from_shape(shape, &[1.0]).map(Self::F32),
        }
        .map_err(Error::internal)
    }

    axis_methods!(view);

    /// Packs rows and heads of a tensor `[batch, rows, heads, elements]`. Returns the number of
    /// bytes.
    ///
    /// # Errors
    /// [`Error::Internal`] if `into` is too short.
    pub fn pack(&self, rows: &[RowSegment], heads: Range<usize>, into: &mut [u8]) -> Result<usize> {
        with_array!(Self, self, array => pack(array, rows, heads, into))
    }

    /// Returns all elements in logical order, widened.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub fn widened(&self) -> Result<Vec<f64>> {
        with_array!(Self, self, array => {
            let elements = array.iter().map(|element| element.to_f64());
            crate::memory::collect("a gradient", array.len(), elements)
        })
    }
}

impl<'a> HostViewMut<'a> {
    /// Returns bytes as a dense tensor.
    ///
    /// # Errors
    /// As [`HostView::of_bytes`].
    pub fn of_bytes(bytes: &'a mut [u8], dtype: DType, shape: [usize; 4]) -> Result<Self> {
        fn view<T: Element>(bytes: &mut [u8], shape: [usize; 4]) -> Result<HostViewMut<'_>> {
            let elements = if bytes.is_empty() {
                &mut []
            } else {
                bytemuck::try_cast_slice_mut(bytes).map_err(Error::internal)?
            };
            ArrayViewMut4::from_shape(shape, elements).map(T::view_mut).map_err(Error::internal)
        }
        match dtype {
            DType::F64 => view::<f64>(bytes, shape),
            DType::F32 => view::<f32>(bytes, shape),
            DType::Bf16 => view::<bf16>(bytes, shape),
            DType::F16 => view::<f16>(bytes, shape),
        }
    }

    axis_methods!(view_mut);

    /// Writes zeros.
    pub fn fill_zero(&mut self) {
        with_array!(Self, self, array => array.map_inplace(|x| *x = Element::from_f64(0.0)));
    }

    /// Writes packed rows and heads. Returns the number of bytes.
    ///
    /// # Errors
    /// [`Error::Internal`] if `from` is too short.
    pub fn unpack(
        &mut self,
        rows: &[RowSegment],
        heads: Range<usize>,
        from: &[u8],
    ) -> Result<usize> {
        with_array!(Self, self, array => unpack(array, rows, heads, from))
    }

    /// Adds packed elements of type `dtype` to all rows of some heads. Returns the number of bytes.
    ///
    /// # Errors
    /// As [`HostViewMut::unpack`].
    pub fn add(&mut self, dtype: DType, heads: Range<usize>, from: &[u8]) -> Result<usize> {
        with_array!(Self, self, array => match dtype {
            DType::F64 => add::<_, f64>(array, heads, from),
            DType::F32 => add::<_, f32>(array, heads, from),
            DType::Bf16 => add::<_, bf16>(array, heads, from),
            DType::F16 => add::<_, f16>(array, heads, from),
        })
    }

    /// Subtracts the products ⟨a, b⟩ of the rows of two tensors `[batch, rows, heads, elements]`
    /// from a tensor `[batch, rows, heads, 1]`. Products are in f64.
    pub fn subtract_row_products(&mut self, a: &HostView<'_>, b: &HostView<'_>) {
        with_array!(Self, self, into => with_array!(HostView, a, a => with_array!(HostView, b, b => {
            let rows = a.lanes(Axis(3)).into_iter().zip(b.lanes(Axis(3)));
            for (into, (a, b)) in into.iter_mut().zip(rows) {
                let product: f64 = a.iter().zip(b).map(|(a, b)| a.to_f64() * b.to_f64()).sum();
                *into = Element::from_f64(into.to_f64() - product);
            }
        })));
    }

    /// Divides the elements by those of `by`, a tensor of the same shape. An element that is
    /// divided by 0 becomes 0.
    pub fn divide(&mut self, by: &HostView<'_>) {
        with_array!(Self, self, into => with_array!(HostView, by, by => {
            for (into, by) in into.iter_mut().zip(by.iter()) {
                let by = by.to_f64();
                let quotient = if by == 0.0 { 0.0 } else { into.to_f64() / by };
                *into = Element::from_f64(quotient);
            }
        }));
    }

    /// Rounds the elements of `from`, a tensor of the same shape, to this type.
    pub fn round_from(&mut self, from: &HostView<'_>) {
        with_array!(Self, self, into => with_array!(HostView, from, from => {
            let pairs = into.iter_mut().zip(from.iter());
            pairs.for_each(|(into, from)| *into = Element::from_f64(from.to_f64()));
        }));
    }

    /// Writes elements in logical order, rounded.
    pub fn write(&mut self, elements: &[f64]) {
        self.write_each(elements.iter().copied());
    }

    /// Writes the rounding residuals of elements in logical order: element − its rounding to this
    /// type, rounded; 0 where the rounding is not finite.
    pub fn write_residual(&mut self, elements: &[f64]) {
        with_array!(Self, self, array => {
            for (into, &element) in array.iter_mut().zip(elements) {
                *into = Element::from_f64(element);
                let rounded = into.to_f64();
                *into = Element::from_f64(if rounded.is_finite() { element - rounded } else { 0.0 });
            }
        });
    }

    /// As [`HostViewMut::write`].
    pub fn write_each(&mut self, elements: impl Iterator<Item = f64>) {
        with_array!(Self, self, array => {
            let pairs = array.iter_mut().zip(elements);
            pairs.for_each(|(into, element)| *into = Element::from_f64(element));
        });
    }
}

fn too_short() -> Error {
    Error::internal("a message that is shorter than its rows")
}

fn pack<T: Element>(
    array: &ArrayView4<'_, T>,
    rows: &[RowSegment],
    heads: Range<usize>,
    into: &mut [u8],
) -> Result<usize> {
    let all = into.len();
    let mut rest = into;
    let mut copy = |block: ArrayView3<'_, T>| -> Result<()> {
        let bytes = block.len() * size_of::<T>();
        let (now, later) =
            std::mem::take(&mut rest).split_at_mut_checked(bytes).ok_or_else(too_short)?;
        rest = later;
        if let Some(elements) = block.as_slice() {
            now.copy_from_slice(bytemuck::cast_slice(elements));
        } else {
            let elements = now.chunks_exact_mut(size_of::<T>()).zip(&block);
            elements.for_each(|(into, element)| into.copy_from_slice(bytemuck::bytes_of(element)));
        }
        Ok(())
    };
    for batch in array.outer_iter() {
        for &RowSegment { first, count } in rows {
            let mut block = batch.view();
            block.slice_axis_inplace(Axis(0), Slice::from(first..first + count));
            block.slice_axis_inplace(Axis(1), Slice::from(heads.clone()));
            if block.is_standard_layout() {
                copy(block)?;
                continue;
            }
            for row in 0..count {
                copy(block.slice_axis(Axis(0), Slice::from(row..row + 1)))?;
            }
        }
    }
    Ok(all - rest.len())
}

fn unpack<T: Element>(
    array: &mut ArrayViewMut4<'_, T>,
    rows: &[RowSegment],
    heads: Range<usize>,
    from: &[u8],
) -> Result<usize> {
    let all = from.len();
    let mut rest = from;
    let mut copy = |mut block: ArrayViewMut3<'_, T>| -> Result<()> {
        let bytes = block.len() * size_of::<T>();
        let (now, later) = rest.split_at_checked(bytes).ok_or_else(too_short)?;
        rest = later;
        if let Some(elements) = block.as_slice_mut() {
            bytemuck::cast_slice_mut(elements).copy_from_slice(now);
        } else {
            let elements = block.iter_mut().zip(now.chunks_exact(size_of::<T>()));
            elements.for_each(|(into, bytes)| *into = bytemuck::pod_read_unaligned(bytes));
        }
        Ok(())
    };
    for mut batch in array.outer_iter_mut() {
        for &RowSegment { first, count } in rows {
            let mut block = batch.view_mut();
            block.slice_axis_inplace(Axis(0), Slice::from(first..first + count));
            block.slice_axis_inplace(Axis(1), Slice::from(heads.clone()));
            if block.is_standard_layout() {
                copy(block)?;
                continue;
            }
            for row in 0..count {
                copy(block.slice_axis_mut(Axis(0), Slice::from(row..row + 1)))?;
            }
        }
    }
    Ok(all - rest.len())
}

fn add<T: Element, F: Element>(
    array: &mut ArrayViewMut4<'_, T>,
    heads: Range<usize>,
    from: &[u8],
) -> Result<usize> {
    let mut block = array.slice_axis_mut(Axis(2), Slice::from(heads));
    let bytes = block.len() * size_of::<F>();
    let from = from.get(..bytes).ok_or_else(too_short)?;
    let pairs = block.iter_mut().zip(from.chunks_exact(size_of::<F>()));
    pairs.for_each(|(into, bytes)| {
        let term: F = bytemuck::pod_read_unaligned(bytes);
        *into = T::from_f64(into.to_f64() + term.to_f64());
    });
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_need_the_number_and_the_alignment_of_the_elements() {
        let mut bytes = [0; 17];
        let aligned = bytes.as_ptr().align_offset(size_of::<f64>());
        let of = |bytes, rows| HostView::of_bytes(bytes, DType::F64, [1, rows, 1, 1]).is_ok();
        assert!(of(&bytes[aligned..aligned + 8], 1));
        assert!(!of(&bytes[aligned + 1..aligned + 9], 1));
        assert!(!of(&bytes[aligned..aligned + 8], 2));
        assert!(of(&bytes[aligned + 1..aligned + 1], 0));
        let empty = &mut bytes[aligned + 1..aligned + 1];
        assert!(HostViewMut::of_bytes(empty, DType::F64, [1, 0, 1, 1]).is_ok());
    }
}
