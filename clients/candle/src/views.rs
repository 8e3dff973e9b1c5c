//! Views of candle's CPU tensors as ndarray views, with their strides, and errors of candle.

use annulus::ndarray::{ArrayView, Dim, Dimension, IntoDimension, Ix, ShapeBuilder};
use candle_core::{Error, Result, Storage, StorageRef, Tensor, WithDType};

/// Creates an error of candle that names an argument.
pub(crate) fn invalid(argument: &str, got: impl ToString, want: impl ToString) -> Error {
    Error::wrap(annulus::Error::invalid(argument, got, want))
}

/// A tensor that is locked for reading, under the name of its argument.
pub(crate) struct Read<'a> {
    name: &'static str,
    tensor: &'a Tensor,
    storage: StorageRef<'a>,
}

impl<'a> Read<'a> {
    pub(crate) fn new(name: &'static str, tensor: &'a Tensor) -> Self {
        Self { name, tensor, storage: tensor.storage_and_layout().0 }
    }

    /// Returns the elements as a view of `N` axes, without a copy.
    pub(crate) fn view<T: WithDType, const N: usize>(
        &self,
    ) -> Result<ArrayView<'_, T, Dim<[Ix; N]>>>
    where
        [Ix; N]: IntoDimension<Dim = Dim<[Ix; N]>>,
        Dim<[Ix; N]>: Dimension,
    {
        let (shape, strides) = (self.tensor.dims(), self.tensor.stride());
        let (Ok(dims), Ok(steps)) = (<[Ix; N]>::try_from(shape), <[Ix; N]>::try_from(strides))
        else {
            return Err(invalid(self.name, format!("{shape:?}"), format!("{N} axes")));
        };
        let Storage::Cpu(storage) = &*self.storage else {
            return Err(invalid(self.name, "a tensor on a GPU", "one on the CPU"));
        };
        let dtype = self.tensor.dtype();
        if dtype != T::DTYPE {
            return Err(invalid(self.name, dtype.as_str(), T::DTYPE.as_str()));
        }
        let elements = T::cpu_storage_as_slice(storage)?;
        let view = if self.tensor.elem_count() == 0 {
            ArrayView::from_shape(dims.into_dimension(), &[])
        } else {
            let first = self.tensor.layout().start_offset();
            let strided = dims.into_dimension().strides(steps.into_dimension());
            ArrayView::from_shape(strided, &elements[first..])
        };
        view.map_err(|error| invalid(self.name, error, "strides inside the storage"))
    }
}
