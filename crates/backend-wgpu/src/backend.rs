//! The seam: which pass serves which call.

use std::ops::Range;

use annulus_core::{Backend, Block, DType, Error, Gradients, Inputs, Local, Outputs, Result, Saved, Spec, Tick};

use crate::{
    backward, backward_keys, backward_queries,
    device::Gpu,
    finish, forward,
    memory::{GpuBuffer, Queued, Tensor, WgpuSpace},
    records,
    workspace::{Workspace, matrices},
};

/// Attention on a [`Gpu`].
#[derive(Debug, Clone)]
pub struct Wgpu {
    gpu: Gpu,
}

impl Wgpu {
    /// The longest vectors of queries, keys and values.
    pub const MOST_DIM: usize = 256;

    /// A backend on this device. Several ranks may share one.
    pub const fn new(gpu: Gpu) -> Self {
        Self { gpu }
    }

    /// The device.
    pub const fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// Whether all tensors are on the device.
    fn check<'a>(&self, tensors: impl IntoIterator<Item = (&'a str, Option<&'a Tensor>)>) -> Result<()> {
        tensors.into_iter().try_for_each(|(name, tensor)| tensor.map_or(Ok(()), |tensor| tensor.check_on(&self.gpu, name)))
    }

    fn check_inputs(&self, inputs: &Inputs<'_, WgpuSpace>) -> Result<()> {
        let Inputs { q, k, v, bias, sinks } = *inputs;
        self.check([("query", Some(q)), ("key", Some(k)), ("value", Some(v)), ("bias", bias), ("softmax_aux", sinks)])
    }

    fn check_saved(&self, saved: &Saved<'_, WgpuSpace>) -> Result<()> {
        let Saved { out, lse, max, ties, dout, dlse } = *saved;
        self.check([("out", Some(out)), ("lse", Some(lse)), ("max", max), ("ties", ties), ("dout", Some(dout)), ("dlse", dlse)])
    }
}

impl Backend for Wgpu {
    type Space = WgpuSpace;
    type Workspace = Workspace;

    fn name(&self) -> &'static str {
        "wgpu"
    }

    fn arithmetic(&self) -> String {
        format!("wgpu {} {}", self.gpu.name(), self.gpu.level().name())
    }

    /// f16 where weights are multiplied on cooperative matrices: a rank at [`crate::Level::Matrix`] and one below it are told so, instead of rounding differently.
    fn narrowing(&self, spec: &Spec) -> Option<DType> {
        matrices(&self.gpu, spec).map(|_| DType::F16)
    }

    /// Everything but f64 and vectors longer than [`Wgpu::MOST_DIM`]. Products of f32 inputs are true f32 whatever [`Spec::precision`] allows.
    ///
    /// # Errors
    /// [`Error::Unsupported`], and as [`Spec::validate`].
    fn supports(&self, spec: &Spec) -> Result<()> {
        spec.validate()?;
        if spec.dtype == DType::F64 {
            return Err(Error::unsupported("f64", "wgpu"));
        }
        for (name, dim) in [("head_dim", spec.dims.head_dim), ("value_dim", spec.dims.value_dim)] {
            if dim > Self::MOST_DIM {
                return Err(Error::unsupported(format!("{name} {dim} (at most {})", Self::MOST_DIM), "wgpu"));
            }
        }
        Ok(())
    }

    fn allocate(&self, bytes: u64) -> Result<GpuBuffer> {
        GpuBuffer::new(&self.gpu, "block", bytes)
    }

    fn workspace(&self, local: &Local, backward: bool) -> Result<Workspace> {
        Workspace::new(&self.gpu, local, backward)
    }

    fn update(&self, workspace: &mut Workspace, local: &Local) -> Result<()> {
        if !workspace.update(local) {
            *workspace = Workspace::new(&self.gpu, local, workspace.backward)?;
        }
        Ok(())
    }

    fn pack(&self, workspace: &mut Workspace, inputs: &Inputs<'_, WgpuSpace>, into: &mut GpuBuffer) -> Result<Queued> {
        self.check_inputs(inputs)?;
        records::pack(&self.gpu, workspace, inputs, into).map(|()| Queued)
    }

    fn begin(&self, workspace: &mut Workspace, inputs: &Inputs<'_, WgpuSpace>) -> Result<()> {
        self.check_inputs(inputs)?;
        forward::begin(&self.gpu, workspace)
    }

    fn attend(
        &self,
        workspace: &mut Workspace,
        inputs: &Inputs<'_, WgpuSpace>,
        block: &Block<'_, WgpuSpace>,
        tick: Tick<'_>,
    ) -> Result<()> {
        forward::attend(&self.gpu, workspace, inputs, block, tick)
    }

    fn finish(&self, workspace: &mut Workspace, inputs: &Inputs<'_, WgpuSpace>, outputs: &mut Outputs<'_, WgpuSpace>) -> Result<()> {
        let Outputs { out, lse, max, sum, ties } = &*outputs;
        let more = [("max", max), ("sum", sum), ("ties", ties)].map(|(name, tensor)| (name, tensor.as_deref()));
        self.check([("out", Some(&**out)), ("lse", Some(&**lse))].into_iter().chain(more))?;
        finish::finish(&self.gpu, workspace, inputs, outputs)
    }

    fn begin_backward(&self, workspace: &mut Workspace, inputs: &Inputs<'_, WgpuSpace>, saved: &Saved<'_, WgpuSpace>) -> Result<()> {
        self.check_inputs(inputs)?;
        self.check_saved(saved)?;
        backward::begin(&self.gpu, workspace, saved)
    }

    fn attend_queries(
        &self,
        workspace: &mut Workspace,
        inputs: &Inputs<'_, WgpuSpace>,
        saved: &Saved<'_, WgpuSpace>,
        block: &Block<'_, WgpuSpace>,
        tick: Tick<'_>,
    ) -> Result<()> {
        backward_queries::attend_queries(&self.gpu, workspace, inputs, saved, block, tick)
    }

    fn attend_keys(
        &self,
        workspace: &mut Workspace,
        inputs: &Inputs<'_, WgpuSpace>,
        saved: &Saved<'_, WgpuSpace>,
        block: &Block<'_, WgpuSpace>,
        fresh: &mut GpuBuffer,
        tick: Tick<'_>,
    ) -> Result<Queued> {
        backward_keys::attend_keys(&self.gpu, workspace, inputs, saved, block, fresh, tick).map(|()| Queued)
    }

    fn pack_queries(
        &self,
        workspace: &mut Workspace,
        inputs: &Inputs<'_, WgpuSpace>,
        saved: &Saved<'_, WgpuSpace>,
        into: &mut GpuBuffer,
    ) -> Result<Queued> {
        records::pack_queries(&self.gpu, workspace, inputs, saved, into).map(|()| Queued)
    }

    fn attend_keys_home(
        &self,
        workspace: &mut Workspace,
        inputs: &Inputs<'_, WgpuSpace>,
        queries: &Block<'_, WgpuSpace>,
        home: &mut GpuBuffer,
        tick: Tick<'_>,
    ) -> Result<()> {
        backward_keys::attend_keys_home(&self.gpu, workspace, inputs, queries, home, tick)
    }

    fn combine(
        &self,
        workspace: &mut Workspace,
        into: &mut GpuBuffer,
        from: &GpuBuffer,
        _: &Queued,
        places: &[(Range<u64>, Range<u64>)],
        add: bool,
    ) -> Result<Queued> {
        records::combine(&self.gpu, workspace, into, from, places, add).map(|()| Queued)
    }

    fn finish_backward(
        &self,
        workspace: &mut Workspace,
        inputs: &Inputs<'_, WgpuSpace>,
        home: &GpuBuffer,
        gradients: &mut Gradients<'_, WgpuSpace>,
    ) -> Result<()> {
        let Gradients { dq, dk, dv, dbias, dsinks } = &*gradients;
        let more = [("dbias", dbias), ("dsoftmax_aux", dsinks)].map(|(name, tensor)| (name, tensor.as_deref()));
        self.check([("dq", Some(&**dq)), ("dk", Some(&**dk)), ("dv", Some(&**dv))].into_iter().chain(more))?;
        backward::finish(&self.gpu, workspace, inputs, home, gradients)
    }
}
