//! The memory space of the mock device: tensors in its memory, and the tags that views consist of.

use std::marker::PhantomData;

use annulus_core::{DType, DeviceSpace, Error, HostView, HostViewMut, Result, Space, Tick};
use ndarray::{Array4, ArrayView4};

use super::{
    kernel::{decode, encode},
    memory::{Device, DeviceBuffer, DeviceEvent, SlotTable, fault},
};

/// The memory space of the mock device.
#[derive(Debug, Clone, Copy)]
pub struct MockSpace;

impl Space for MockSpace {
    type Buffer = DeviceBuffer;
    type View<'a> = DeviceView<'a>;
    type ViewMut<'a> = DeviceViewMut<'a>;
    type Event = DeviceEvent;

    fn size(buffer: &DeviceBuffer) -> u64 {
        buffer.len()
    }

    fn is_shared(buffer: &DeviceBuffer) -> bool {
        buffer.is_shared()
    }

    fn reborrow<'short>(view: &'short DeviceView<'_>) -> DeviceView<'short> {
        *view
    }

    fn describe(view: &DeviceView<'_>) -> (DType, [usize; 4]) {
        (view.tag.dtype, view.tag.shape)
    }

    fn describe_mut(view: &DeviceViewMut<'_>) -> (DType, [usize; 4]) {
        (view.tag.dtype, view.tag.shape)
    }
}

impl DeviceSpace for MockSpace {
    type Tensor = DeviceTensor;
    type Context = Device;

    fn tensor(device: &Device, dtype: DType, shape: [usize; 4]) -> Result<DeviceTensor> {
        DeviceTensor::zeros(device, shape, dtype)
    }

    fn upload(
        device: &Device,
        from: HostView<'_>,
        into: &mut DeviceTensor,
        tick: Tick<'_>,
    ) -> Result<()> {
        if tick().is_break() {
            return Ok(());
        }
        // replaced, not overwritten: queued work may still use the old tensor
        let numbers = Array4::from_shape_vec(from.shape(), from.widened()?);
        let numbers = numbers.map_err(Error::internal)?;
        *into = DeviceTensor::upload(device, numbers.view(), from.dtype())?;
        Ok(())
    }

    fn download(
        device: &Device,
        from: &DeviceTensor,
        into: &mut HostViewMut<'_>,
        tick: Tick<'_>,
    ) -> Result<()> {
        if device.wait(tick)?.is_break() {
            return Ok(());
        }
        into.write_each(from.download()?.iter().copied());
        Ok(())
    }

    fn view(tensor: &DeviceTensor) -> DeviceView<'_> {
        tensor.view()
    }

    fn view_mut(tensor: &mut DeviceTensor) -> DeviceViewMut<'_> {
        tensor.view_mut()
    }
}

/// A caller's dense tensor in device memory.
#[derive(Debug)]
pub struct DeviceTensor {
    buffer: DeviceBuffer,
    tag: Tag,
}

/// A tensor as the device's work addresses it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tag {
    pub(crate) slot: u64,
    pub(crate) dtype: DType,
    pub(crate) shape: [usize; 4],
}

/// A tensor borrowed for reading: a tag, without access for the host.
#[derive(Debug, Clone, Copy)]
pub struct DeviceView<'a> {
    pub(crate) tag: Tag,
    borrow: PhantomData<&'a DeviceTensor>,
}

/// A tensor borrowed for writing.
#[derive(Debug)]
pub struct DeviceViewMut<'a> {
    pub(crate) tag: Tag,
    borrow: PhantomData<&'a mut DeviceTensor>,
}

impl DeviceTensor {
    /// Rounds numbers to `dtype` and copies them to the device.
    pub fn upload(device: &Device, numbers: ArrayView4<'_, f64>, dtype: DType) -> Result<Self> {
        let buffer = device.allocate((numbers.len() * dtype.bytes()) as u64);
        let mut bytes = Vec::with_capacity(numbers.len() * dtype.bytes());
        numbers.iter().for_each(|&number| encode(number, dtype, &mut bytes));
        device.write(&buffer, &bytes)?;
        Ok(Self { tag: Tag { slot: buffer.slot(), dtype, shape: numbers.dim().into() }, buffer })
    }

    /// Creates a tensor of zeros.
    pub fn zeros(device: &Device, shape: [usize; 4], dtype: DType) -> Result<Self> {
        Self::upload(device, Array4::zeros(shape).view(), dtype)
    }

    /// Copies the numbers to the host, widened to f64.
    pub fn download(&self) -> Result<Array4<f64>> {
        let whole = 0..self.buffer.len();
        numbers(self.tag, &self.buffer.device().read(&self.buffer, std::slice::from_ref(&whole))?)
    }

    /// Borrows the tensor for reading.
    pub const fn view(&self) -> DeviceView<'_> {
        DeviceView { tag: self.tag, borrow: PhantomData }
    }

    /// Borrows the tensor for writing.
    pub const fn view_mut(&mut self) -> DeviceViewMut<'_> {
        DeviceViewMut { tag: self.tag, borrow: PhantomData }
    }
}

impl Tag {
    /// Reads the tensor; called by the device's work.
    pub(crate) fn read(self, memory: &mut SlotTable) -> Result<Array4<f64>> {
        numbers(self, memory.bytes(self.slot)?)
    }

    /// Rounds and writes the tensor; called by the device's work.
    pub(crate) fn write(self, memory: &mut SlotTable, numbers: ArrayView4<'_, f64>) -> Result<()> {
        if numbers.dim() != self.shape.into() {
            return Err(fault(format!(
                "{:?} numbers for a tensor of {:?}",
                numbers.shape(),
                self.shape
            )));
        }
        let mut bytes = Vec::new();
        numbers.iter().for_each(|&number| encode(number, self.dtype, &mut bytes));
        memory.bytes(self.slot)?.copy_from_slice(&bytes);
        Ok(())
    }
}

fn numbers(tag: Tag, bytes: &[u8]) -> Result<Array4<f64>> {
    let numbers =
        bytes.chunks_exact(tag.dtype.bytes()).map(|bytes| decode(tag.dtype, bytes)).collect();
    Array4::from_shape_vec(tag.shape, numbers)
        .map_err(|error| Error::Device { what: error.to_string() })
}
