//! The mock backend: every call only queues work, which reads and writes device memory when the
//! device executes it. The arithmetic is `kernel.rs`.

use std::{
    ops::Range,
    sync::{Arc, Mutex},
};

use annulus_core::{
    Backend, BackwardInputs, BackwardMode, BackwardPass, Block, Capabilities, ForwardPass,
    Gradients, Inputs, Outputs, Passes, RangePairs, RankShard, Reduction, Result, RowSet, Rows,
    Spec, Tick, View, ViewMut, Workspace, index, memory,
};

use super::{
    kernel::State,
    memory::{Device, DeviceBuffer, DeviceEvent, SlotTable, fault, lock},
    tensor::MockSpace,
};

/// A backend for [`MockSpace`] that supports every feature, computed pair by pair.
#[derive(Debug, Clone)]
pub struct MockBackend {
    device: Device,
}

/// The state of one plan on the mock device.
pub struct MockWorkspace {
    device: Device,
    state: Arc<Mutex<State>>,
}

impl MockBackend {
    /// Creates a backend on this device.
    pub const fn new(device: Device) -> Self {
        Self { device }
    }
}

impl MockWorkspace {
    /// Queues work on the state and on these slots.
    fn enqueue(
        &self,
        reads: &[u64],
        writes: &[u64],
        work: impl FnOnce(&mut State, &mut SlotTable) -> Result<()> + Send + 'static,
    ) -> Result<DeviceEvent> {
        let state = Arc::clone(&self.state);
        self.device.enqueue(reads, writes, move |memory| work(&mut lock(&state), memory))
    }

    /// As [`MockWorkspace::enqueue`], of a tile kernel.
    fn enqueue_kernel(
        &self,
        reads: &[u64],
        writes: &[u64],
        kernel: impl FnOnce(&mut State, &mut SlotTable) -> Result<()> + Send + 'static,
    ) -> Result<DeviceEvent> {
        let state = Arc::clone(&self.state);
        self.device.enqueue_kernel(reads, writes, move |memory| kernel(&mut lock(&state), memory))
    }

    /// Returns a block's slot and rows.
    fn block(&self, block: &Block<'_, MockSpace>) -> Result<(u64, Rows)> {
        self.check_event(block.ready)?;
        Ok((block.buffer.slot(), block.rows.clone()))
    }

    fn check_event(&self, event: &DeviceEvent) -> Result<()> {
        if event.is_of(&self.device) { Ok(()) } else { Err(fault("an event of another device")) }
    }

    fn local_kv(&self, into: &DeviceBuffer) -> Result<DeviceEvent> {
        let slot = target(into)?;
        self.enqueue(&[], &[slot], move |state, memory| memory.write(slot, 0, &state.packed_kv()))
    }
}

/// Returns the slot of a buffer to write.
fn target(buffer: &DeviceBuffer) -> Result<u64> {
    if buffer.is_shared() {
        Err(fault("a buffer to write is co-owned by a transport"))
    } else {
        Ok(buffer.slot())
    }
}

impl Backend for MockBackend {
    type Space = MockSpace;
    type Workspace = MockWorkspace;

    fn capabilities(&self, spec: &Spec) -> Result<Capabilities> {
        spec.check_complete("mock")?;
        Ok(Capabilities {
            name: "mock",
            numerics_id: "mock".into(),
            probs_dtype: None,
            // other than that of any other backend: a mixed ring must agree on the largest
            kv_tile: 16,
            reproducible: false,
            out_residual: true,
            second_derivatives: false,
            bias_table: false,
            statistics: false,
        })
    }

    fn allocate(&self, bytes: u64) -> Result<DeviceBuffer> {
        Ok(self.device.allocate(bytes))
    }

    /// The bytes are copied when the device executes the write, as by a queue of copies.
    fn write_block(
        &self,
        into: &mut DeviceBuffer,
        bytes: Range<u64>,
        fill: &mut dyn FnMut(&mut [u8]) -> Result<()>,
    ) -> Result<DeviceEvent> {
        let slot = target(into)?;
        let mut filled =
            memory::zeroed("a write to a block", index(bytes.end.saturating_sub(bytes.start)))?;
        fill(&mut filled)?;
        self.device.enqueue(&[], &[slot], move |memory| memory.write(slot, bytes.start, &filled))
    }

    fn workspace(&self, shard: &RankShard, _: Passes) -> Result<MockWorkspace> {
        let state = Arc::new(Mutex::new(State::new(shard.clone())));
        Ok(MockWorkspace { device: self.device.clone(), state })
    }
}

impl Workspace for MockWorkspace {
    type Space = MockSpace;
    type Forward<'p> = MockPass<'p>;
    type Backward<'p> = MockPass<'p>;

    fn update(&mut self, shard: &RankShard) -> Result<()> {
        // queued work keeps the state for which it was queued
        self.state = Arc::new(Mutex::new(State::new(shard.clone())));
        Ok(())
    }

    fn bytes(&self) -> u64 {
        lock(&self.state).bytes()
    }

    fn forward<'p>(
        &'p mut self,
        inputs: Inputs<View<'p, MockSpace>>,
        _: Tick<'_>,
    ) -> Result<MockPass<'p>> {
        let tags = inputs.map(|view| view.tag);
        let slots: Vec<u64> = tags.into_tensors().map(|tag| tag.slot).collect();
        self.enqueue(&slots, &[], move |state, memory| {
            state.begin(tags.try_map(|tag| tag.read(memory))?);
            Ok(())
        })?;
        Ok(MockPass { workspace: self })
    }

    fn backward<'p>(
        &'p mut self,
        inputs: BackwardInputs<View<'p, MockSpace>>,
        _: BackwardMode,
        _: Tick<'_>,
    ) -> Result<MockPass<'p>> {
        let tags = inputs.map(|view| view.tag);
        let slots: Vec<u64> = tags.into_tensors().map(|tag| tag.slot).collect();
        self.enqueue(&slots, &[], move |state, memory| {
            state.begin_backward(tags.try_map(|tag| tag.read(memory))?);
            Ok(())
        })?;
        Ok(MockPass { workspace: self })
    }
}

/// A pass on the mock device.
pub struct MockPass<'p> {
    workspace: &'p MockWorkspace,
}

impl ForwardPass<MockSpace> for MockPass<'_> {
    fn local_kv(&mut self, into: &mut DeviceBuffer, _: &RowSet) -> Result<DeviceEvent> {
        self.workspace.local_kv(into)
    }

    fn attend(&mut self, kv: &Block<'_, MockSpace>, tick: Tick<'_>) -> Result<()> {
        if tick().is_break() {
            return Ok(());
        }
        let (slot, rows) = self.workspace.block(kv)?;
        self.workspace
            .enqueue_kernel(&[slot], &[], move |state, memory| {
                state.attend(&rows, memory.bytes(slot)?)
            })
            .map(drop)
    }

    fn finish(self, outputs: &mut Outputs<ViewMut<'_, MockSpace>>, tick: Tick<'_>) -> Result<()> {
        if tick().is_break() {
            return Ok(());
        }
        let tags = outputs.as_ref().map(|view| view.tag);
        let writes: Vec<u64> = tags.into_tensors().map(|tag| tag.slot).collect();
        self.workspace
            .enqueue(&[], &writes, move |state, memory| {
                let mut computed = tags.zip(state.finish()).into_tensors();
                computed.try_for_each(|(tag, numbers)| tag.write(memory, numbers.view()))
            })
            .map(drop)
    }
}

impl BackwardPass<MockSpace> for MockPass<'_> {
    fn local_kv(&mut self, into: &mut DeviceBuffer, _: &RowSet) -> Result<DeviceEvent> {
        self.workspace.local_kv(into)
    }

    fn local_queries(&mut self, into: &mut DeviceBuffer) -> Result<DeviceEvent> {
        let slot = target(into)?;
        self.workspace.enqueue(&[], &[slot], move |state, memory| {
            memory.write(slot, 0, &state.packed_queries())
        })
    }

    fn attend_kv(
        &mut self,
        kv: &Block<'_, MockSpace>,
        dkv: Option<&mut DeviceBuffer>,
        tick: Tick<'_>,
    ) -> Result<DeviceEvent> {
        if tick().is_break() {
            return Ok(self.workspace.device.now());
        }
        let (slot, rows) = self.workspace.block(kv)?;
        let dkv = dkv.map(|dkv| target(dkv)).transpose()?;
        self.workspace.enqueue_kernel(&[slot], dkv.as_slice(), move |state, memory| {
            let records = memory.bytes(slot)?;
            state.attend_kv(&rows, records)?;
            let Some(dkv) = dkv else { return Ok(()) };
            let packed = state.packed_dkv(&rows, records)?;
            memory.write(dkv, 0, &packed)
        })
    }

    fn attend_queries(
        &mut self,
        queries: &Block<'_, MockSpace>,
        dkv: &mut DeviceBuffer,
        tick: Tick<'_>,
    ) -> Result<()> {
        if tick().is_break() {
            return Ok(());
        }
        let (slot, rows) = self.workspace.block(queries)?;
        let dkv = target(dkv)?;
        self.workspace
            .enqueue_kernel(&[slot, dkv], &[dkv], move |state, memory| {
                let records = memory.bytes(slot)?.to_vec();
                state.attend_queries(&rows, &records, memory.bytes(dkv)?)
            })
            .map(drop)
    }

    fn reduce(
        &mut self,
        into: &mut DeviceBuffer,
        from: &DeviceBuffer,
        ready: &DeviceEvent,
        pairs: &RangePairs,
        reduction: Reduction,
    ) -> Result<DeviceEvent> {
        self.workspace.check_event(ready)?;
        let source = from.slot();
        let target = target(into)?;
        let pairs = pairs.to_vec();
        self.workspace.enqueue(&[source, target], &[target], move |state, memory| {
            let from = memory.bytes(source)?.to_vec();
            state.reduce(memory.bytes(target)?, &from, &pairs, reduction)
        })
    }

    fn finish(
        self,
        dkv: &DeviceBuffer,
        gradients: &mut Gradients<ViewMut<'_, MockSpace>>,
        tick: Tick<'_>,
    ) -> Result<()> {
        if tick().is_break() {
            return Ok(());
        }
        let tags = gradients.as_ref().map(|view| view.tag);
        let writes: Vec<u64> = tags.into_tensors().map(|tag| tag.slot).collect();
        let dkv = dkv.slot();
        self.workspace
            .enqueue(&[dkv], &writes, move |state, memory| {
                let computed = state.gradients(memory.bytes(dkv)?)?;
                let mut computed = tags.zip(computed).into_tensors();
                computed.try_for_each(|(tag, numbers)| tag.write(memory, numbers.view()))
            })
            .map(drop)
    }
}
