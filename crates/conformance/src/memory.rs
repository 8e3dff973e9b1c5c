//! Upload and download of a test's tensors, so that one suite can drive any backend.

use annulus_core::{DType, Element, Host, HostView, HostViewMut, Result, Space};
use half::{bf16, f16};
use ndarray::{Array4, ArrayView4};

use crate::device::{Device, DeviceTensor, MockSpace};

/// A memory space with the transfers that a test needs.
pub trait TensorMemory: Send {
    /// The space of the backend.
    type Space: Space;
    /// A caller's tensor in this space.
    type Tensor;

    /// Rounds numbers to `dtype` and copies them to a new tensor.
    fn upload(&self, numbers: ArrayView4<'_, f64>, dtype: DType) -> Result<Self::Tensor>;

    /// Waits for the queued work, then returns a tensor's numbers widened to f64.
    fn download(&self, tensor: &Self::Tensor) -> Result<Array4<f64>>;

    /// Borrows a tensor as input of a pass.
    fn view<'a>(&self, tensor: &'a Self::Tensor) -> <Self::Space as Space>::View<'a>;

    /// Borrows a tensor as output of a pass.
    fn view_mut<'a>(&self, tensor: &'a mut Self::Tensor) -> <Self::Space as Space>::ViewMut<'a>;
}

/// Host memory.
#[derive(Debug, Clone, Copy)]
pub struct HostMemory;

/// A tensor in host memory.
#[derive(Debug, Clone)]
pub enum HostTensor {
    /// f64 elements.
    F64(Array4<f64>),
    /// f32 elements.
    F32(Array4<f32>),
    /// bf16 elements.
    Bf16(Array4<bf16>),
    /// f16 elements.
    F16(Array4<f16>),
}

impl TensorMemory for HostMemory {
    type Space = Host;
    type Tensor = HostTensor;

    fn upload(&self, numbers: ArrayView4<'_, f64>, dtype: DType) -> Result<HostTensor> {
        Ok(match dtype {
            DType::F64 => HostTensor::F64(numbers.to_owned()),
            DType::F32 => HostTensor::F32(numbers.mapv(Element::from_f64)),
            DType::Bf16 => HostTensor::Bf16(numbers.mapv(Element::from_f64)),
            DType::F16 => HostTensor::F16(numbers.mapv(Element::from_f64)),
        })
    }

    fn download(&self, tensor: &HostTensor) -> Result<Array4<f64>> {
        Ok(match tensor {
            HostTensor::F64(array) => array.clone(),
            HostTensor::F32(array) => array.mapv(Element::to_f64),
            HostTensor::Bf16(array) => array.mapv(Element::to_f64),
            HostTensor::F16(array) => array.mapv(Element::to_f64),
        })
    }

    fn view<'a>(&self, tensor: &'a HostTensor) -> HostView<'a> {
        match tensor {
            HostTensor::F64(array) => HostView::F64(array.view()),
            HostTensor::F32(array) => HostView::F32(array.view()),
            HostTensor::Bf16(array) => HostView::Bf16(array.view()),
            HostTensor::F16(array) => HostView::F16(array.view()),
        }
    }

    fn view_mut<'a>(&self, tensor: &'a mut HostTensor) -> HostViewMut<'a> {
        match tensor {
            HostTensor::F64(array) => HostViewMut::F64(array.view_mut()),
            HostTensor::F32(array) => HostViewMut::F32(array.view_mut()),
            HostTensor::Bf16(array) => HostViewMut::Bf16(array.view_mut()),
            HostTensor::F16(array) => HostViewMut::F16(array.view_mut()),
        }
    }
}

impl TensorMemory for Device {
    type Space = MockSpace;
    type Tensor = DeviceTensor;

    fn upload(&self, numbers: ArrayView4<'_, f64>, dtype: DType) -> Result<DeviceTensor> {
        DeviceTensor::upload(self, numbers, dtype)
    }

    fn download(&self, tensor: &DeviceTensor) -> Result<Array4<f64>> {
        self.synchronize()?;
        tensor.download()
    }

    fn view<'a>(&self, tensor: &'a DeviceTensor) -> <MockSpace as Space>::View<'a> {
        tensor.view()
    }

    fn view_mut<'a>(&self, tensor: &'a mut DeviceTensor) -> <MockSpace as Space>::ViewMut<'a> {
        tensor.view_mut()
    }
}
