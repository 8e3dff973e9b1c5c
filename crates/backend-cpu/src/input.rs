//! The four element types of inputs, and rows of them wherever they lie.

use annulus_core::{Element, Error, HostView, HostViewMut, Record, Result};
use half::{bf16, f16};
use ndarray::{ArrayView1, ArrayView2, ArrayView4, ArrayViewMut4, Axis, s};

use crate::real::Real;

/// What q, k, v and out are made of.
pub(crate) trait Input: Element<Accumulator: Real> {
    /// Widens exactly.
    fn widen(self) -> Self::Accumulator;
    /// Rounds to nearest, ties to even.
    fn narrow(value: Self::Accumulator) -> Self;
}

impl Input for f64 {
    #[inline(always)]
    fn widen(self) -> f64 {
        self
    }

    #[inline(always)]
    fn narrow(value: f64) -> Self {
        value
    }
}

impl Input for f32 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }

    #[inline(always)]
    fn narrow(value: f32) -> Self {
        value
    }
}

impl Input for bf16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    #[inline(always)]
    fn narrow(value: f32) -> Self {
        Self::from_f32(value)
    }
}

impl Input for f16 {
    /// In arithmetic that becomes vectors: the exponent is rebased by a product, which also makes subnormals right.
    #[inline(always)]
    fn widen(self) -> f32 {
        const REBASE: f32 = f32::from_bits((127 + 112) << 23);
        let bits = u32::from(self.to_bits());
        let size = f32::from_bits((bits & 0x7fff) << 13) * REBASE;
        let special = if size >= 65_536.0 { 0x7f80_0000 } else { 0 };
        f32::from_bits(size.to_bits() | special | (bits & 0x8000) << 16)
    }

    #[inline(always)]
    fn narrow(value: f32) -> Self {
        Self::from_f32(value)
    }
}

/// Rows of one tensor: the caller's, or those in the records of a block.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Source<'a, E> {
    /// `[b, rows, heads, dim]`, any strides.
    Tensor(ArrayView4<'a, E>),
    /// The same where each vector's elements lie side by side, or a field of records:
    /// `elements[first + batch·batch_stride + row·stride + head·head_stride ..][.. dim]`.
    Vectors { elements: &'a [E], first: usize, batch_stride: usize, stride: usize, head_stride: usize, heads: usize, dim: usize },
}

impl<'a, E: Element> Source<'a, E> {
    /// A caller's tensor.
    pub(crate) fn tensor(tensor: ArrayView4<'a, E>) -> Self {
        let (_, _, heads, dim) = tensor.dim();
        let strides = tensor.strides();
        // strides of axes of one element mean nothing
        let positive = tensor.shape().iter().zip(strides).all(|(&len, &stride)| len == 1 || stride > 0);
        let side_by_side = dim == 1 || strides[3] == 1;
        match tensor.to_slice_memory_order() {
            Some(elements) if positive && side_by_side => {
                let [batch_stride, stride, head_stride] = [0, 1, 2].map(|axis| strides[axis].unsigned_abs());
                Self::Vectors { elements, first: 0, batch_stride, stride, head_stride, heads, dim }
            }
            _ => Self::Tensor(tensor),
        }
    }

    /// Field `field` of `rows` records that lie at the start of `bytes`.
    pub(crate) fn records(bytes: &'a [u8], rows: usize, record: &Record, field: usize) -> Result<Self> {
        let elements = elements(bytes, rows, record)?;
        let size = size_of::<E>() as u64;
        let at = |bytes: u64| annulus_core::index(bytes / size);
        let shape = record.fields()[field];
        let (heads, dim) = (shape.heads, shape.dim);
        let (first, stride) = (at(record.offset(field, 0, 0)), at(record.bytes()));
        Ok(Self::Vectors { elements, first, batch_stride: heads * dim, stride, head_stride: dim, heads, dim })
    }

    /// The vectors of one batch row and head.
    pub(crate) fn plane(&self, batch: usize, head: usize) -> Plane<'a, E> {
        match *self {
            Self::Tensor(tensor) => Plane::Tensor(tensor.slice_move(s![batch, .., head, ..])),
            Self::Vectors { elements, first, batch_stride, stride, head_stride, dim, .. } => {
                let first = first + batch * batch_stride + head * head_stride;
                Plane::Vectors { elements: elements.get(first..).unwrap_or_default(), stride, dim }
            }
        }
    }

    /// The vectors of all heads, where they lie side by side.
    #[inline]
    pub(crate) fn row(&self, batch: usize, row: usize) -> Option<&'a [E]> {
        match *self {
            Self::Tensor(tensor) => tensor.index_axis_move(Axis(0), batch).index_axis_move(Axis(0), row).to_slice(),
            Self::Vectors { elements, first, batch_stride, stride, head_stride, heads, dim } if heads == 1 || head_stride == dim => {
                elements.get(first + batch * batch_stride + row * stride..)?.get(..heads * dim)
            }
            Self::Vectors { .. } => None,
        }
    }

    /// One vector.
    #[inline]
    pub(crate) fn vector(&self, batch: usize, row: usize, head: usize) -> ArrayView1<'a, E> {
        match *self {
            Self::Tensor(tensor) => tensor.slice_move(s![batch, row, head, ..]),
            Self::Vectors { elements, first, batch_stride, stride, head_stride, dim, .. } => {
                ArrayView1::from(&elements[first + batch * batch_stride + row * stride + head * head_stride..][..dim])
            }
        }
    }
}

/// The rows of one batch row and head.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Plane<'a, E> {
    /// `[rows, dim]`, any strides.
    Tensor(ArrayView2<'a, E>),
    /// `elements[row·stride ..][.. dim]`.
    Vectors { elements: &'a [E], stride: usize, dim: usize },
}

impl<'a, E: Element> Plane<'a, E> {
    /// One vector.
    #[inline]
    pub(crate) fn vector(&self, row: usize) -> ArrayView1<'a, E> {
        match *self {
            Self::Tensor(plane) => plane.index_axis_move(Axis(0), row),
            Self::Vectors { elements, stride, dim } => ArrayView1::from(&elements[row * stride..][..dim]),
        }
    }

    /// One vector, if there is one and its elements lie side by side.
    #[inline(always)]
    pub(crate) fn slice(&self, row: usize) -> Option<&'a [E]> {
        match *self {
            Self::Tensor(plane) if row < plane.nrows() => plane.index_axis_move(Axis(0), row).to_slice(),
            Self::Tensor(_) => None,
            Self::Vectors { elements, stride, dim } => elements.get(row * stride..row * stride + dim),
        }
    }
}

/// The first `rows` records as elements of one type; what is not of that type is never looked at.
pub(crate) fn elements<'a, E: Element>(bytes: &'a [u8], rows: usize, record: &Record) -> Result<&'a [E]> {
    let len = annulus_core::index(record.bytes()) * rows;
    let records = bytes.get(..len).ok_or_else(|| short(bytes.len(), len))?;
    bytemuck::try_cast_slice(records).map_err(device)
}

/// As [`elements`], for writing.
pub(crate) fn elements_mut<'a, E: Element>(bytes: &'a mut [u8], rows: usize, record: &Record) -> Result<&'a mut [E]> {
    let (len, got) = (annulus_core::index(record.bytes()) * rows, bytes.len());
    let records = bytes.get_mut(..len).ok_or_else(|| short(got, len))?;
    bytemuck::try_cast_slice_mut(records).map_err(device)
}

/// A block that is not what the schedule says: a fault of the engine, not of the caller.
pub(crate) fn device(what: impl ToString) -> Error {
    Error::Device { what: what.to_string() }
}

fn short(got: usize, want: usize) -> Error {
    device(format!("a block buffer of {got} bytes where its records take {want}"))
}

/// A tensor of the type that the spec says.
pub(crate) fn array<'a, E: Element>(name: &str, view: HostView<'a>) -> Result<ArrayView4<'a, E>> {
    let got = view.dtype();
    E::array(view).ok_or_else(|| Error::invalid(name, got, E::DTYPE))
}

/// A writable tensor of the type that the spec says.
pub(crate) fn array_mut<'a, E: Element>(name: &str, view: &'a mut HostViewMut<'_>) -> Result<ArrayViewMut4<'a, E>> {
    let got = view.dtype();
    let reborrowed = match view {
        HostViewMut::F64(view) => HostViewMut::F64(view.view_mut()),
        HostViewMut::F32(view) => HostViewMut::F32(view.view_mut()),
        HostViewMut::Bf16(view) => HostViewMut::Bf16(view.view_mut()),
        HostViewMut::F16(view) => HostViewMut::F16(view.view_mut()),
    };
    E::array_mut(reborrowed).ok_or_else(|| Error::invalid(name, got, E::DTYPE))
}

#[cfg(test)]
mod tests {
    use ndarray::Array4;

    use super::*;

    #[test]
    fn every_half_is_widened_exactly() {
        for bits in 0..=u16::MAX {
            let (half, brain) = (f16::from_bits(bits), bf16::from_bits(bits));
            for (got, want) in [(half.widen(), half.to_f32()), (brain.widen(), brain.to_f32())] {
                assert!(got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan(), "{bits:04x}");
            }
        }
    }

    #[test]
    fn vectors_are_found_whatever_the_strides() {
        let dense = Array4::from_shape_fn((2, 3, 4, 5), |(b, i, h, c)| (b * 1000 + i * 100 + h * 10 + c) as f32);
        let mut upside_down = dense.view();
        upside_down.invert_axis(Axis(1));
        let heads_first = dense.view().permuted_axes([0, 2, 1, 3]);
        let dims_first = dense.view().permuted_axes([0, 1, 3, 2]);
        let part = dense.slice(s![.., 1.., ..2, ..]);
        let line = dense.slice(s![..1, ..1, 1..2, ..]);
        let views = [(dense.view(), true), (heads_first, true), (line, true), (upside_down, false), (dims_first, false), (part, false)];
        for (view, side_by_side) in views {
            let source = Source::tensor(view);
            assert_eq!(matches!(source, Source::Vectors { .. }), side_by_side, "{:?}", view.strides());
            let (batch, rows, heads, dim) = view.dim();
            for (b, i, h) in (0..batch).flat_map(|b| (0..rows).flat_map(move |i| (0..heads).map(move |h| (b, i, h)))) {
                let want = view.slice(s![b, i, h, ..]);
                let plane = source.plane(b, h);
                assert!(source.vector(b, i, h) == want && plane.vector(i) == want);
                assert!(plane.slice(i).is_none_or(|slice| want.iter().eq(slice)));
                assert!(source.row(b, i).is_none_or(|line| want.iter().eq(&line[h * dim..(h + 1) * dim])));
                assert!(!side_by_side || plane.slice(i).is_some());
            }
        }
    }
}
