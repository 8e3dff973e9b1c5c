//! Passes on tensors in host memory that the device shares: a call returns once the work that it
//! enqueued has ended. A caller may drop or forget a pass and free its tensors, which kernels would
//! then still access. Tensors in device memory need no wait: they are freed only once queued work
//! has ended.

use std::ops::ControlFlow;

use annulus_core::{
    BackwardPass, Block, ForwardPass, Gradients, Outputs, RangePairs, Reduction, Result, RowSet,
    Tick, ViewMut,
};
use annulus_device_cuda::{CudaBuffer, CudaSpace, CudaView, CudaViewMut, Event, Stream};

/// A pass of this backend.
pub struct Settled<P> {
    pass: P,
    stream: Stream,
    /// True if an input is in host memory: then every call waits.
    waits: bool,
}

/// Waits for the work of a stream if `waits`, and returns the result of the call that enqueued it.
/// Other ranks may wait for this one, so it ticks; a tick that breaks does not end the wait.
fn wait<T>(stream: &Stream, waits: bool, called: Result<T>, tick: Tick<'_>) -> Result<T> {
    if !waits {
        return called;
    }
    let bound = stream.device().hang_bound();
    let waited = stream.wait(bound, &mut || {
        let _: ControlFlow<()> = tick();
        ControlFlow::Continue(())
    });
    // the failure of the device is the first, and the cause of the other
    waited.and(called)
}

impl<P> Settled<P> {
    /// Wraps a pass on `inputs`, which `begin` has begun in `stream`.
    pub(crate) fn new<'a>(
        stream: &Stream,
        mut inputs: impl Iterator<Item = CudaView<'a>>,
        begin: Result<P>,
        tick: Tick<'_>,
    ) -> Result<Self> {
        let waits = inputs.any(|view| view.is_in_host_memory());
        let pass = wait(stream, waits, begin, tick)?;
        Ok(Self { pass, stream: stream.clone(), waits })
    }

    /// Calls the pass and waits.
    fn call<T>(
        &mut self,
        tick: Tick<'_>,
        call: impl FnOnce(&mut P, Tick<'_>) -> Result<T>,
    ) -> Result<T> {
        let called = call(&mut self.pass, &mut *tick);
        wait(&self.stream, self.waits, called, tick)
    }
}

/// True if an output is in host memory.
fn is_any_in_host_memory<'a>(mut outputs: impl Iterator<Item = &'a CudaViewMut<'a>>) -> bool {
    outputs.any(|output| output.view().is_in_host_memory())
}

/// Ticks of a call that has none: its work is short.
fn no_tick() -> ControlFlow<()> {
    ControlFlow::Continue(())
}

impl<P: ForwardPass<CudaSpace>> ForwardPass<CudaSpace> for Settled<P> {
    fn local_kv(&mut self, into: &mut CudaBuffer, sent: &RowSet) -> Result<Event> {
        self.call(&mut no_tick, |pass, _| pass.local_kv(into, sent))
    }

    fn attend(&mut self, kv: &Block<'_, CudaSpace>, tick: Tick<'_>) -> Result<()> {
        self.call(tick, |pass, tick| pass.attend(kv, tick))
    }

    fn attend_last(
        &mut self,
        kv: &Block<'_, CudaSpace>,
        outputs: &mut Outputs<ViewMut<'_, CudaSpace>>,
        tick: Tick<'_>,
    ) -> Result<()> {
        self.waits |= is_any_in_host_memory(outputs.as_ref().into_tensors());
        self.call(tick, |pass, tick| pass.attend_last(kv, outputs, tick))
    }

    fn finish(self, outputs: &mut Outputs<ViewMut<'_, CudaSpace>>, tick: Tick<'_>) -> Result<()> {
        let Self { pass, stream, waits } = self;
        let waits = waits || is_any_in_host_memory(outputs.as_ref().into_tensors());
        let finished = pass.finish(outputs, &mut *tick);
        wait(&stream, waits, finished, tick)
    }
}

impl<P: BackwardPass<CudaSpace>> BackwardPass<CudaSpace> for Settled<P> {
    fn local_kv(&mut self, into: &mut CudaBuffer, sent: &RowSet) -> Result<Event> {
        self.call(&mut no_tick, |pass, _| pass.local_kv(into, sent))
    }

    fn local_queries(&mut self, into: &mut CudaBuffer) -> Result<Event> {
        self.call(&mut no_tick, |pass, _| pass.local_queries(into))
    }

    fn attend_kv(
        &mut self,
        kv: &Block<'_, CudaSpace>,
        dkv: Option<&mut CudaBuffer>,
        tick: Tick<'_>,
    ) -> Result<Event> {
        self.call(tick, |pass, tick| pass.attend_kv(kv, dkv, tick))
    }

    fn attend_queries(
        &mut self,
        queries: &Block<'_, CudaSpace>,
        dkv: &mut CudaBuffer,
        tick: Tick<'_>,
    ) -> Result<()> {
        self.call(tick, |pass, tick| pass.attend_queries(queries, dkv, tick))
    }

    /// Sums of blocks, which are in device memory.
    fn reduce(
        &mut self,
        into: &mut CudaBuffer,
        from: &CudaBuffer,
        ready: &Event,
        pairs: &RangePairs,
        reduction: Reduction,
    ) -> Result<Event> {
        self.pass.reduce(into, from, ready, pairs, reduction)
    }

    fn finish(
        self,
        dkv: &CudaBuffer,
        gradients: &mut Gradients<ViewMut<'_, CudaSpace>>,
        tick: Tick<'_>,
    ) -> Result<()> {
        let Self { pass, stream, waits } = self;
        let waits = waits || is_any_in_host_memory(gradients.as_ref().into_tensors());
        let finished = pass.finish(dkv, gradients, &mut *tick);
        wait(&stream, waits, finished, tick)
    }
}
