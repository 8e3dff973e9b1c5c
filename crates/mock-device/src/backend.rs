//! The mock backend: every call only queues work, which reads and writes device memory when the
//! device executes it.

use std::{
    ops::Range,
    sync::{Arc, Mutex},
};

use annulus_core::{
    Backend, BackwardInputs, BackwardMode, BackwardPass, Block, Capabilities, ForwardPass,
    Gradients, Inputs, Outputs, Passes, RangePairs, RankShard, Reduction, Result, RowSet, Rows,
    Spec, Tick, View, ViewMut, Workspace, index, memory,
};
use ndarray::{Array4, Axis};

use super::{
    kernel::{Keys, Queries, State, pack, unpack},
    memory::{Device, DeviceBuffer, DeviceEvent, SlotTable, fault, lock},
    tensor::{MockSpace, Tag},
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
    ///
    /// # Errors
    /// [`annulus_core::Error::Device`] if its event belongs to another device, which this device's
    /// queue does not order.
    fn block(&self, block: &Block<'_, MockSpace>) -> Result<(u64, Rows)> {
        self.check_event(block.ready)?;
        Ok((block.buffer.slot(), block.rows.clone()))
    }

    fn check_event(&self, event: &DeviceEvent) -> Result<()> {
        if event.is_of(&self.device) { Ok(()) } else { Err(fault("an event of another device")) }
    }

    /// Packs k and v as rows of a KV block.
    fn pack_kv(&self, k: Tag, v: Tag, into: &DeviceBuffer) -> Result<DeviceEvent> {
        let slot = target(into)?;
        self.enqueue(&[k.slot, v.slot], &[slot], move |state, memory| {
            let k = k.read(memory)?;
            let v = v.read(memory)?;
            let record = state.shard.spec.kv_row_layout();
            memory.write(slot, 0, &pack(&record, state.shard.keys.len(), &[&k, &v]))
        })
    }
}

/// Returns the slot of a buffer to write.
///
/// # Errors
/// [`annulus_core::Error::Device`] while a transport co-owns the buffer, which may still send it.
fn target(buffer: &DeviceBuffer) -> Result<u64> {
    if buffer.is_shared() {
        Err(fault("a buffer to write is co-owned by a transport"))
    } else {
        Ok(buffer.slot())
    }
}

/// Unpacks a block of keys and values.
fn keys<'a>(state: &State, memory: &mut SlotTable, slot: u64, rows: &'a Rows) -> Result<Keys<'a>> {
    let spec = &state.shard.spec;
    let mut fields =
        unpack(&spec.kv_row_layout(), spec.dims.batch, rows.len(), memory.bytes(slot)?)?
            .into_iter();
    match (fields.next(), fields.next()) {
        (Some(k), Some(v)) => Ok(Keys { rows, k, v }),
        _ => Err(fault("a record of keys and values without both")),
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
    type Forward<'p> = MockForward<'p>;
    type Backward<'p> = MockBackward<'p>;

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
    ) -> Result<MockForward<'p>> {
        let read = read_inputs(&inputs);
        self.enqueue(&slots(&inputs), &[], move |state, memory| {
            read(state, memory)?;
            state.begin();
            Ok(())
        })?;
        Ok(MockForward { workspace: self, inputs })
    }

    fn backward<'p>(
        &'p mut self,
        inputs: BackwardInputs<View<'p, MockSpace>>,
        _: BackwardMode,
        _: Tick<'_>,
    ) -> Result<MockBackward<'p>> {
        let read = read_inputs(&inputs.forward);
        let out = inputs.out.tag;
        let max = inputs.max.tag;
        let dout = inputs.dout.tag;
        let [sum, ties, residual, dlse] =
            [&inputs.sum, &inputs.ties, &inputs.out_residual, &inputs.dlse]
                .map(|view| view.as_ref().map(|view| view.tag));
        let mut reads = slots(&inputs.forward);
        let more = [Some(out), Some(max), Some(dout), sum, ties, residual, dlse];
        reads.extend(more.into_iter().flatten().map(|tag| tag.slot));
        self.enqueue(&reads, &[], move |state, memory| {
            read(state, memory)?;
            state.dout = dout.read(memory)?;
            let mut maybe = |tag: Option<Tag>| tag.map(|tag| tag.read(memory)).transpose();
            let sum = maybe(sum)?;
            let ties = maybe(ties)?;
            let residual = maybe(residual)?;
            let dlse = maybe(dlse)?;
            let mut out = out.read(memory)?;
            if let Some(residual) = residual {
                out += &residual;
            }
            let max = max.read(memory)?;
            state.begin_backward(&out, &max, sum.as_ref(), ties.as_ref(), dlse.as_ref());
            Ok(())
        })?;
        Ok(MockBackward { workspace: self, inputs })
    }
}

/// A forward pass on the mock device.
pub struct MockForward<'p> {
    workspace: &'p MockWorkspace,
    inputs: Inputs<View<'p, MockSpace>>,
}

impl ForwardPass<MockSpace> for MockForward<'_> {
    fn local_kv(&mut self, into: &mut DeviceBuffer, _: &RowSet) -> Result<DeviceEvent> {
        self.workspace.pack_kv(self.inputs.k.tag, self.inputs.v.tag, into)
    }

    fn attend(&mut self, kv: &Block<'_, MockSpace>, tick: Tick<'_>) -> Result<()> {
        if tick().is_break() {
            return Ok(());
        }
        let (slot, rows) = self.workspace.block(kv)?;
        self.workspace
            .enqueue_kernel(&[slot], &[], move |state, memory| {
                let keys = keys(state, memory, slot, &rows)?;
                state.attend(&keys);
                Ok(())
            })
            .map(drop)
    }

    /// Writes no outputs: `finish` is a kernel of its own.
    fn attend_last(
        &mut self,
        kv: &Block<'_, MockSpace>,
        _: &mut Outputs<ViewMut<'_, MockSpace>>,
        tick: Tick<'_>,
    ) -> Result<()> {
        self.attend(kv, tick)
    }

    fn finish(self, outputs: &mut Outputs<ViewMut<'_, MockSpace>>, tick: Tick<'_>) -> Result<()> {
        if tick().is_break() {
            return Ok(());
        }
        let out = outputs.out.tag;
        let lse = outputs.lse.tag;
        let [max, sum, ties, residual] =
            [&outputs.max, &outputs.sum, &outputs.ties, &outputs.out_residual]
                .map(|view| view.as_ref().map(|view| view.tag));
        let writes: Vec<u64> = [Some(out), Some(lse), max, sum, ties, residual]
            .into_iter()
            .flatten()
            .map(|tag| tag.slot)
            .collect();
        self.workspace
            .enqueue(&[], &writes, move |state, memory| {
                let lse_numbers = state.finish();
                out.write(memory, state.acc.view())?;
                if let Some(residual) = residual {
                    let rounded = out.read(memory)?;
                    let mut exact = state.acc.clone();
                    exact.zip_mut_with(&rounded, |exact, &rounded| {
                        *exact = if rounded.is_finite() { *exact - rounded } else { 0.0 };
                    });
                    residual.write(memory, exact.view())?;
                }
                for (tag, numbers) in [
                    (Some(lse), &lse_numbers),
                    (max, &state.max),
                    (sum, &state.sum),
                    (ties, &state.ties),
                ] {
                    tag.map_or(Ok(()), |tag: Tag| {
                        tag.write(memory, numbers.view().insert_axis(Axis(3)))
                    })?;
                }
                Ok(())
            })
            .map(drop)
    }
}

/// A backward pass on the mock device.
pub struct MockBackward<'p> {
    workspace: &'p MockWorkspace,
    inputs: BackwardInputs<View<'p, MockSpace>>,
}

impl BackwardPass<MockSpace> for MockBackward<'_> {
    fn local_kv(&mut self, into: &mut DeviceBuffer, _: &RowSet) -> Result<DeviceEvent> {
        let Inputs { k, v, .. } = &self.inputs.forward;
        self.workspace.pack_kv(k.tag, v.tag, into)
    }

    fn local_queries(&mut self, into: &mut DeviceBuffer) -> Result<DeviceEvent> {
        let slot = target(into)?;
        self.workspace.enqueue(&[], &[slot], move |state, memory| {
            let record = state.shard.spec.query_row_layout();
            memory.write(
                slot,
                0,
                &pack(
                    &record,
                    state.shard.queries.len(),
                    &[&state.q, &state.dout, &state.statistics],
                ),
            )
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
            let keys = keys(state, memory, slot, &rows)?;
            state.backward_dq(&keys);
            let Some(dkv) = dkv else { return Ok(()) };
            let [dk, dv] = state.backward_dkv(&state.local_queries(), &keys);
            let record = state.shard.spec.gradient_row_layout();
            memory.write(dkv, 0, &pack(&record, rows.len(), &[&dk, &dv]))
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
        let k = self.inputs.forward.k.tag;
        let v = self.inputs.forward.v.tag;
        self.workspace
            .enqueue_kernel(&[slot, k.slot, v.slot, dkv], &[dkv], move |state, memory| {
                let spec = Arc::clone(&state.shard.spec);
                let fields = unpack(
                    &spec.query_row_layout(),
                    spec.dims.batch,
                    rows.len(),
                    memory.bytes(slot)?,
                )?;
                let [q, dout, statistics] = &fields[..] else {
                    return Err(fault("a query record without its three fields"));
                };
                let local = Arc::clone(&state.shard.keys);
                let keys = Keys { rows: &local, k: k.read(memory)?, v: v.read(memory)? };
                let [dk, dv] =
                    state.backward_dkv(&Queries { rows: &rows, q, dout, statistics }, &keys);
                let record = spec.gradient_row_layout();
                let before = unpack(&record, spec.dims.batch, local.len(), memory.bytes(dkv)?)?;
                let [old_dk, old_dv] = &before[..] else {
                    return Err(fault("a gradient record without its two fields"));
                };
                memory.write(
                    dkv,
                    0,
                    &pack(&record, local.len(), &[&(old_dk + &dk), &(old_dv + &dv)]),
                )
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
            let record = state.shard.spec.gradient_row_layout();
            let batch = state.shard.spec.dims.batch;
            for (to, source_rows) in pairs {
                if to.end - to.start != source_rows.end - source_rows.start {
                    return Err(fault(format!("{source_rows:?} does not fit {to:?}")));
                }
                let rows = index(to.end - to.start);
                let bytes = |rows: &Range<u64>| {
                    index(rows.start * record.bytes())..index(rows.end * record.bytes())
                };
                let mut part = |slot: u64, rows: &Range<u64>| -> Result<Vec<u8>> {
                    memory
                        .bytes(slot)?
                        .get(bytes(rows))
                        .map(<[u8]>::to_vec)
                        .ok_or_else(|| fault("records past the end"))
                };
                let new = part(source, &source_rows)?;
                let old = part(target, &to)?;
                let sum: Vec<Array4<f64>> = unpack(&record, batch, rows, &new)?
                    .into_iter()
                    .zip(unpack(&record, batch, rows, &old)?)
                    .map(|(new, old)| match reduction {
                        Reduction::Copy => new,
                        Reduction::Add => old + new,
                    })
                    .collect();
                let packed = pack(&record, rows, &sum.iter().collect::<Vec<_>>());
                memory.write(target, to.start * record.bytes(), &packed)?;
            }
            Ok(())
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
        let [dq, dk, dv] = [&gradients.dq, &gradients.dk, &gradients.dv].map(|view| view.tag);
        let [dbias, dsinks] =
            [&gradients.dbias, &gradients.dsinks].map(|view| view.as_ref().map(|view| view.tag));
        let writes: Vec<u64> = [Some(dq), Some(dk), Some(dv), dbias, dsinks]
            .into_iter()
            .flatten()
            .map(|tag| tag.slot)
            .collect();
        let dkv = dkv.slot();
        self.workspace
            .enqueue(&[dkv], &writes, move |state, memory| {
                let spec = Arc::clone(&state.shard.spec);
                let fields = unpack(
                    &spec.gradient_row_layout(),
                    spec.dims.batch,
                    state.shard.keys.len(),
                    memory.bytes(dkv)?,
                )?;
                let [dk_numbers, dv_numbers] = &fields[..] else {
                    return Err(fault("a gradient record without its two fields"));
                };
                dq.write(memory, state.dq.view())?;
                dk.write(memory, dk_numbers.view())?;
                dv.write(memory, dv_numbers.view())?;
                if let (Some(tag), Some(numbers)) = (dbias, &state.dbias) {
                    tag.write(memory, numbers.view())?;
                }
                if let (Some(tag), Some(numbers)) = (dsinks, state.dsinks()) {
                    tag.write(memory, numbers.view().insert_axis(Axis(2)).insert_axis(Axis(3)))?;
                }
                Ok(())
            })
            .map(drop)
    }
}

/// Returns work that reads q, bias and sinks into the state.
fn read_inputs(
    inputs: &Inputs<View<'_, MockSpace>>,
) -> impl FnOnce(&mut State, &mut SlotTable) -> Result<()> + Send + use<> {
    let q = inputs.q.tag;
    let bias = inputs.bias.map(|bias| bias.tag);
    let sinks = inputs.sinks.map(|sinks| sinks.tag);
    move |state, memory| {
        state.q = q.read(memory)?;
        state.bias = bias.map(|bias| bias.read(memory)).transpose()?;
        let sinks = sinks.map(|sinks| sinks.read(memory)).transpose()?;
        state.sinks =
            sinks.map(|sinks| sinks.index_axis_move(Axis(3), 0).index_axis_move(Axis(2), 0));
        Ok(())
    }
}

/// Returns the slots that [`read_inputs`] reads.
fn slots(inputs: &Inputs<View<'_, MockSpace>>) -> Vec<u64> {
    [Some(inputs.q), inputs.bias, inputs.sinks]
        .into_iter()
        .flatten()
        .map(|view| view.tag.slot)
        .collect()
}
