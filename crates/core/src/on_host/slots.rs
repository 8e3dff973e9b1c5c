//! Tensors of a pass on the device, which [`crate::OnHostWorkspace`] keeps from pass to pass.

use super::HostViews;
use crate::{DType, DeviceSpace, HostView, Inputs, Result, Tick};

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

    pub(super) fn upload_optional<'a>(
        &'a mut self,
        context: &D::Context,
        from: Option<HostView<'_>>,
        tick: Tick<'_>,
    ) -> Result<Option<D::View<'a>>> {
        from.map(|from| self.upload(context, from, tick)).transpose()
    }

    fn bytes(&self) -> u64 {
        self.0.as_ref().map_or(0, |tensor| {
            let (dtype, shape) = D::describe(&D::view(tensor));
            shape.iter().product::<usize>() as u64 * dtype.bytes() as u64
        })
    }
}

/// The tensors of a pass. Outputs of the forward pass are inputs of the backward pass and share
/// their slots.
pub(super) struct Tensors<D: DeviceSpace> {
    pub(super) context: D::Context,
    pub(super) inputs: InputSlots<D>,
    pub(super) out: Slot<D>,
    pub(super) lse: Slot<D>,
    pub(super) max: Slot<D>,
    pub(super) sum: Slot<D>,
    pub(super) ties: Slot<D>,
    pub(super) out_residual: Slot<D>,
    pub(super) dout: Slot<D>,
    pub(super) dlse: Slot<D>,
    pub(super) gradients: GradientSlots<D>,
}

pub(super) struct InputSlots<D: DeviceSpace> {
    pub(super) q: Slot<D>,
    pub(super) k: Slot<D>,
    pub(super) v: Slot<D>,
    pub(super) bias: Slot<D>,
    pub(super) sinks: Slot<D>,
}

pub(super) struct GradientSlots<D: DeviceSpace> {
    pub(super) dq: Slot<D>,
    pub(super) dk: Slot<D>,
    pub(super) dv: Slot<D>,
    pub(super) dbias: Slot<D>,
    pub(super) dsinks: Slot<D>,
}

impl<D: DeviceSpace> Tensors<D> {
    pub(super) fn new(context: D::Context) -> Self {
        let slot = || Slot(None);
        Self {
            context,
            inputs: InputSlots { q: slot(), k: slot(), v: slot(), bias: slot(), sinks: slot() },
            out: slot(),
            lse: slot(),
            max: slot(),
            sum: slot(),
            ties: slot(),
            out_residual: slot(),
            dout: slot(),
            dlse: slot(),
            gradients: GradientSlots {
                dq: slot(),
                dk: slot(),
                dv: slot(),
                dbias: slot(),
                dsinks: slot(),
            },
        }
    }
}

impl<D: DeviceSpace> Tensors<D> {
    /// Returns the bytes of all tensors that there are.
    pub(super) fn bytes(&self) -> u64 {
        let Self { context: _, inputs, out, lse, max, sum, ties, dout, dlse, gradients, .. } = self;
        let InputSlots { q, k, v, bias, sinks } = inputs;
        let GradientSlots { dq, dk, dv, dbias, dsinks } = gradients;
        let of_inputs = [q, k, v, bias, sinks, dout, dlse];
        let out_residual = &self.out_residual;
        let of_outputs = [out, lse, max, sum, ties, out_residual, dq, dk, dv, dbias, dsinks];
        of_inputs.into_iter().chain(of_outputs).map(Slot::bytes).sum()
    }
}

impl<D: DeviceSpace> InputSlots<D> {
    pub(super) fn upload<'a>(
        &'a mut self,
        context: &D::Context,
        inputs: &Inputs<'_, HostViews<D>>,
        tick: Tick<'_>,
    ) -> Result<Inputs<'a, D>> {
        Ok(Inputs {
            q: self.q.upload(context, inputs.q, &mut *tick)?,
            k: self.k.upload(context, inputs.k, &mut *tick)?,
            v: self.v.upload(context, inputs.v, &mut *tick)?,
            bias: self.bias.upload_optional(context, inputs.bias, &mut *tick)?,
            sinks: self.sinks.upload_optional(context, inputs.sinks, &mut *tick)?,
        })
    }
}
