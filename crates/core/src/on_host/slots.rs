//! Tensors of a pass on the device, which [`crate::OnHostWorkspace`] keeps from pass to pass.

use crate::{DType, DeviceSpace, Gradients, HostView, Inputs, Outputs, Result, Tick};

/// A tensor on the device, allocated when it is first used and again when its shape changes.
pub(super) struct Slot<D: DeviceSpace>(Option<D::Tensor>);

impl<D: DeviceSpace> Slot<D> {
    /// Returns a tensor of this type and shape; its contents are unspecified.
    pub(super) fn reserve(
        &mut self,
        context: &D::Context,
        dtype: DType,
        shape: [usize; 4],
    ) -> Result<&mut D::Tensor> {
        let tensor = match self.0.take() {
            Some(tensor) if D::describe(&D::view(&tensor)) == (dtype, shape) => tensor,
            _ => D::tensor(context, dtype, shape)?,
        };
        Ok(self.0.insert(tensor))
    }

    /// Uploads a tensor and returns its view.
    pub(super) fn upload<'a>(
        &'a mut self,
        context: &D::Context,
        from: HostView<'_>,
        tick: Tick<'_>,
    ) -> Result<D::View<'a>> {
        let tensor = self.reserve(context, from.dtype(), from.shape())?;
        D::upload(context, from, tensor, tick)?;
        Ok(D::view(tensor))
    }

    fn bytes(&self) -> u64 {
        self.0.as_ref().map_or(0, |tensor| {
            let (dtype, shape) = D::describe(&D::view(tensor));
            shape.iter().product::<usize>() as u64 * dtype.bytes() as u64
        })
    }
}

/// The tensors of passes, with a slot for every optional one. Outputs of the forward pass are inputs
/// of the backward pass and share their slots.
pub(super) struct PassTensors<D: DeviceSpace> {
    pub(super) context: D::Context,
    pub(super) inputs: Inputs<Slot<D>>,
    pub(super) outputs: Outputs<Slot<D>>,
    pub(super) dout: Slot<D>,
    pub(super) dlse: Slot<D>,
    pub(super) gradients: Gradients<Slot<D>>,
}

impl<D: DeviceSpace> PassTensors<D> {
    pub(super) fn new(context: D::Context) -> Self {
        let slot = || Slot(None);
        let optional = || Some(slot());
        Self {
            context,
            inputs: Inputs { q: slot(), k: slot(), v: slot(), bias: optional(), sinks: optional() },
            outputs: Outputs {
                out: slot(),
                lse: slot(),
                max: optional(),
                sum: optional(),
                ties: optional(),
                out_residual: optional(),
            },
            dout: slot(),
            dlse: slot(),
            gradients: Gradients {
                dq: slot(),
                dk: slot(),
                dv: slot(),
                dbias: optional(),
                dsinks: optional(),
            },
        }
    }

    /// Returns the bytes of all tensors that there are.
    pub(super) fn bytes(&self) -> u64 {
        let Self { context: _, inputs, outputs, dout, dlse, gradients } = self;
        let passes = inputs.as_ref().into_tensors().chain(outputs.as_ref().into_tensors());
        let slots = passes.chain(gradients.as_ref().into_tensors()).chain([dout, dlse]);
        slots.map(Slot::bytes).sum()
    }
}
