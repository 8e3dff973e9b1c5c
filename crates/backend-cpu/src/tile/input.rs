//! Strided access to rows of the inputs, in a caller's tensors or in records.

use annulus_core::{Element, Error, HostView, HostViewMut, Result, RowLayout};
use ndarray::{ArrayView1, ArrayView2, ArrayView4, ArrayViewMut4, Axis, s};

use crate::simd::{dispatch::Real, element::WidenTo};

/// Accumulator type of an input type.
pub(crate) type Acc<E> = <E as Element>::Accumulator;

/// Element type of q, k, v and out.
pub(crate) trait TileInput: WidenTo<Accumulator: Real> {}

impl<E: WidenTo<Accumulator: Real>> TileInput for E {}

/// Rows of one tensor: the caller's, or a field of the records of a block.
#[derive(Debug, Clone, Copy)]
pub(crate) enum TileSource<'a, E> {
    /// `[b, rows, heads, dim]`, any strides.
    Tensor(ArrayView4<'a, E>),
    /// The same with contiguous vectors, or a field of records:
    /// `elements[first + batch·batch_stride + row·stride + head·head_stride ..][.. dim]`.
    Vectors {
        elements: &'a [E],
        first: usize,
        batch_stride: usize,
        stride: usize,
        head_stride: usize,
        heads: usize,
        dim: usize,
    },
}

impl<'a, E: Element> TileSource<'a, E> {
    /// Describes a caller's tensor, as vectors if its strides allow it.
    pub(crate) fn tensor(tensor: ArrayView4<'a, E>) -> Self {
        let (_, _, heads, dim) = tensor.dim();
        let strides = tensor.strides();
        // strides of axes of length 1 are arbitrary
        let positive =
            tensor.shape().iter().zip(strides).all(|(&len, &stride)| len == 1 || stride > 0);
        let side_by_side = dim == 1 || strides[3] == 1;
        match tensor.to_slice_memory_order() {
            Some(elements) if positive && side_by_side => {
                let [batch_stride, stride, head_stride] =
                    [0, 1, 2].map(|axis| strides[axis].unsigned_abs());
                Self::Vectors { elements, first: 0, batch_stride, stride, head_stride, heads, dim }
            }
            _ => Self::Tensor(tensor),
        }
    }

    /// Describes field `field` of `rows` records at the start of `bytes`.
    pub(crate) fn records(
        bytes: &'a [u8],
        rows: usize,
        record: &RowLayout,
        field: usize,
    ) -> Result<Self> {
        let elements = elements(bytes, rows, record)?;
        let size = size_of::<E>() as u64;
        let at = |bytes: u64| annulus_core::index(bytes / size);
        let shape = record.fields()[field];
        let heads = shape.heads;
        let dim = shape.dim;
        let first = at(record.offset(field, 0, 0));
        let stride = at(record.bytes());
        Ok(Self::Vectors {
            elements,
            first,
            batch_stride: heads * dim,
            stride,
            head_stride: dim,
            heads,
            dim,
        })
    }

    /// Returns the vectors of one batch row and head.
    pub(crate) fn plane(&self, batch: usize, head: usize) -> Plane<'a, E> {
        match *self {
            Self::Tensor(tensor) => Plane::Tensor(tensor.slice_move(s![batch, .., head, ..])),
            Self::Vectors { elements, first, batch_stride, stride, head_stride, dim, .. } => {
                let first = first + batch * batch_stride + head * head_stride;
                Plane::Vectors { elements: elements.get(first..).unwrap_or_default(), stride, dim }
            }
        }
    }

    /// Returns the vectors of all heads of a row, if they are contiguous.
    #[inline]
    pub(crate) fn row(&self, batch: usize, row: usize) -> Option<&'a [E]> {
        match *self {
            Self::Tensor(tensor) => {
                tensor.index_axis_move(Axis(0), batch).index_axis_move(Axis(0), row).to_slice()
            }
            Self::Vectors { elements, first, batch_stride, stride, head_stride, heads, dim }
                if heads == 1 || head_stride == dim =>
            {
                elements.get(first + batch * batch_stride + row * stride..)?.get(..heads * dim)
            }
            Self::Vectors { .. } => None,
        }
    }

    /// Returns one vector.
    #[inline]
    pub(crate) fn vector(&self, batch: usize, row: usize, head: usize) -> ArrayView1<'a, E> {
        match *self {
            Self::Tensor(tensor) => tensor.slice_move(s![batch, row, head, ..]),
            Self::Vectors { elements, first, batch_stride, stride, head_stride, dim, .. } => {
                ArrayView1::from(
                    &elements[first + batch * batch_stride + row * stride + head * head_stride..]
                        [..dim],
                )
            }
        }
    }
}

/// Rows of one batch row and head.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Plane<'a, E> {
    /// `[rows, dim]`, any strides.
    Tensor(ArrayView2<'a, E>),
    /// `elements[row·stride ..][.. dim]`.
    Vectors { elements: &'a [E], stride: usize, dim: usize },
}

impl<'a, E: Element> Plane<'a, E> {
    /// Returns one vector.
    #[inline]
    pub(crate) fn vector(&self, row: usize) -> ArrayView1<'a, E> {
        match *self {
            Self::Tensor(plane) => plane.index_axis_move(Axis(0), row),
            Self::Vectors { elements, stride, dim } => {
                ArrayView1::from(&elements[row * stride..][..dim])
            }
        }
    }

    /// Returns the length of a vector.
    pub(crate) fn dim(&self) -> usize {
        match self {
            Self::Tensor(plane) => plane.ncols(),
            Self::Vectors { dim, .. } => *dim,
        }
    }

    /// Returns one vector, if it exists and its elements are contiguous.
    #[inline(always)]
    pub(crate) fn slice(&self, row: usize) -> Option<&'a [E]> {
        match *self {
            Self::Tensor(plane) if row < plane.nrows() => {
                plane.index_axis_move(Axis(0), row).to_slice()
            }
            Self::Tensor(_) => None,
            Self::Vectors { elements, stride, dim } => {
                elements.get(row * stride..row * stride + dim)
            }
        }
    }
}

/// Views the first `rows` records as elements of one type. Callers read only the fields that have
/// this type.
pub(crate) fn elements<'a, E: Element>(
    bytes: &'a [u8],
    rows: usize,
    record: &RowLayout,
) -> Result<&'a [E]> {
    let len = annulus_core::index(record.bytes()) * rows;
    let records = bytes.get(..len).ok_or_else(|| short_buffer(bytes.len(), len))?;
    bytemuck::try_cast_slice(records).map_err(Error::internal)
}

/// Views the first `rows` records as mutable elements; see [`elements`].
pub(crate) fn elements_mut<'a, E: Element>(
    bytes: &'a mut [u8],
    rows: usize,
    record: &RowLayout,
) -> Result<&'a mut [E]> {
    let len = annulus_core::index(record.bytes()) * rows;
    let got = bytes.len();
    let records = bytes.get_mut(..len).ok_or_else(|| short_buffer(got, len))?;
    bytemuck::try_cast_slice_mut(records).map_err(Error::internal)
}

fn short_buffer(got: usize, want: usize) -> Error {
    Error::internal(format!("a block buffer of {got} bytes, but its records take {want}"))
}

/// Returns the view as an array of the spec's element type.
pub(crate) fn array<'a, E: Element>(name: &str, view: HostView<'a>) -> Result<ArrayView4<'a, E>> {
    let got = view.dtype();
    E::array(view).ok_or_else(|| Error::invalid(name, got, E::DTYPE))
}

/// Returns the mutable view as an array of the spec's element type.
pub(crate) fn array_mut<'a, E: Element>(
    name: &str,
    view: &'a mut HostViewMut<'_>,
) -> Result<ArrayViewMut4<'a, E>> {
    let got = view.dtype();
    let reborrowed = match view {
        HostViewMut::F64(view) => HostViewMut::F64(view.view_mut()),
        HostViewMut::F32(view) => HostViewMut::F32(view.view_mut()),
        HostViewMut::Bf16(view) => HostViewMut::Bf16(view.view_mut()),
        HostViewMut::F16(view) => HostViewMut::F16(view.view_mut()),
    };
    E::array_mut(reborrowed).ok_or_else(|| Error::invalid(name, got, E::DTYPE))
}
