//! The mock backend: every call only queues work, which reads and writes device memory when its turn comes.

use std::{
    ops::Range,
    sync::{Arc, Mutex},
};

use annulus_core::{Backend, Block, Gradients, Inputs, Local, Outputs, Result, Rows, Saved, Spec, Tick, index};
use ndarray::{Array4, Axis};

use super::{
    kernel::{Keys, Queries, State, pack, unpack},
    memory::{Device, DeviceBuffer, DeviceEvent, Memory, fault, lock},
    tensor::{DeviceSpace, Tag},
};

/// A backend for [`DeviceSpace`] that can do everything, slowly.
#[derive(Debug, Clone)]
pub struct MockBackend {
    device: Device,
}

/// What the mock keeps on its device for one plan.
pub struct MockWorkspace(Arc<Mutex<State>>);

impl MockBackend {
    /// A backend on this device.
    pub const fn new(device: Device) -> Self {
        Self { device }
    }

    /// Queues work on the state and on these slots.
    fn enqueue(
        &self,
        workspace: &MockWorkspace,
        reads: &[u64],
        writes: &[u64],
        work: impl FnOnce(&mut State, &mut Memory) -> Result<()> + Send + 'static,
    ) -> Result<DeviceEvent> {
        let state = Arc::clone(&workspace.0);
        self.device.enqueue(reads, writes, move |memory| work(&mut lock(&state), memory))
    }

    /// A block's rows, and the promise that it may be read in this device's order.
    fn block(&self, block: &Block<'_, DeviceSpace>) -> Result<(u64, Rows)> {
        self.check_event(block.ready)?;
        Ok((block.buffer.slot(), block.rows.clone()))
    }

    fn check_event(&self, event: &DeviceEvent) -> Result<()> {
        if event.is_of(&self.device) { Ok(()) } else { Err(fault("an event of another device")) }
    }

    /// A buffer that may be written.
    fn target(buffer: &DeviceBuffer) -> Result<u64> {
        if buffer.is_shared() { Err(fault("a buffer is to be written while a transport co-owns it")) } else { Ok(buffer.slot()) }
    }
}

/// Unpacks a block of keys and values.
fn keys<'a>(state: &State, memory: &mut Memory, slot: u64, rows: &'a Rows) -> Result<Keys<'a>> {
    let spec = &state.local.spec;
    let mut fields = unpack(&spec.kv_record(), spec.dims.batch, rows.len(), memory.bytes(slot)?)?.into_iter();
    match (fields.next(), fields.next()) {
        (Some(k), Some(v)) => Ok(Keys { rows, k, v }),
        _ => Err(fault("a record of keys and values without both")),
    }
}

impl Backend for MockBackend {
    type Space = DeviceSpace;
    type Workspace = MockWorkspace;

    fn name(&self) -> &'static str {
        "mock"
    }

    fn supports(&self, _: &Spec) -> Result<()> {
        Ok(())
    }

    fn allocate(&self, bytes: u64) -> Result<DeviceBuffer> {
        Ok(self.device.allocate(bytes))
    }

    fn workspace(&self, local: &Local, _: bool) -> Result<MockWorkspace> {
        Ok(MockWorkspace(Arc::new(Mutex::new(State::new(local.clone())))))
    }

    fn update(&self, workspace: &mut MockWorkspace, local: &Local) -> Result<()> {
        // work that is still queued keeps the state that it was queued for
        *workspace = self.workspace(local, true)?;
        Ok(())
    }

    fn pack(&self, workspace: &mut MockWorkspace, inputs: &Inputs<'_, DeviceSpace>, into: &mut DeviceBuffer) -> Result<DeviceEvent> {
        let (k, v, slot) = (inputs.k.tag, inputs.v.tag, Self::target(into)?);
        self.enqueue(workspace, &[k.slot, v.slot], &[slot], move |state, memory| {
            let (k, v) = (k.read(memory)?, v.read(memory)?);
            memory.write(slot, 0, &pack(&state.local.spec.kv_record(), state.local.keys.len(), &[&k, &v]))
        })
    }

    fn begin(&self, workspace: &mut MockWorkspace, inputs: &Inputs<'_, DeviceSpace>) -> Result<()> {
        let read = read_inputs(inputs);
        self.enqueue(workspace, &slots(inputs), &[], move |state, memory| {
            read(state, memory)?;
            state.begin();
            Ok(())
        })
        .map(|_| ())
    }

    fn attend(
        &self,
        workspace: &mut MockWorkspace,
        _: &Inputs<'_, DeviceSpace>,
        block: &Block<'_, DeviceSpace>,
        tick: Tick<'_>,
    ) -> Result<()> {
        if tick().is_break() {
            return Ok(());
        }
        let (slot, rows) = self.block(block)?;
        self.enqueue(workspace, &[slot], &[], move |state, memory| {
            let keys = keys(state, memory, slot, &rows)?;
            state.attend(&keys);
            Ok(())
        })
        .map(|_| ())
    }

    fn finish(&self, workspace: &mut MockWorkspace, _: &Inputs<'_, DeviceSpace>, outputs: &mut Outputs<'_, DeviceSpace>) -> Result<()> {
        let (out, lse) = (outputs.out.tag, outputs.lse.tag);
        let [max, sum, ties] = [&outputs.max, &outputs.sum, &outputs.ties].map(|view| view.as_ref().map(|view| view.tag));
        let writes: Vec<u64> = [Some(out), Some(lse), max, sum, ties].into_iter().flatten().map(|tag| tag.slot).collect();
        self.enqueue(workspace, &[], &writes, move |state, memory| {
            let lse_numbers = state.finish();
            out.write(memory, state.acc.view())?;
            for (tag, numbers) in [(Some(lse), &lse_numbers), (max, &state.max), (sum, &state.sum), (ties, &state.ties)] {
                tag.map_or(Ok(()), |tag: Tag| tag.write(memory, numbers.view().insert_axis(Axis(3))))?;
            }
            Ok(())
        })
        .map(|_| ())
    }

    fn begin_backward(
        &self,
        workspace: &mut MockWorkspace,
        inputs: &Inputs<'_, DeviceSpace>,
        saved: &Saved<'_, DeviceSpace>,
    ) -> Result<()> {
        let read = read_inputs(inputs);
        let (out, lse, dout) = (saved.out.tag, saved.lse.tag, saved.dout.tag);
        let [max, ties, dlse] = [&saved.max, &saved.ties, &saved.dlse].map(|view| view.as_ref().map(|view| view.tag));
        let mut reads = slots(inputs);
        reads.extend([Some(out), Some(lse), Some(dout), max, ties, dlse].into_iter().flatten().map(|tag| tag.slot));
        self.enqueue(workspace, &reads, &[], move |state, memory| {
            read(state, memory)?;
            state.dout = dout.read(memory)?;
            let mut maybe = |tag: Option<Tag>| tag.map(|tag| tag.read(memory)).transpose();
            let (max, ties, dlse) = (maybe(max)?, maybe(ties)?, maybe(dlse)?);
            let (out, lse) = (out.read(memory)?, lse.read(memory)?);
            state.begin_backward(&out, &lse, max.zip(ties), dlse.as_ref());
            Ok(())
        })
        .map(|_| ())
    }

    fn attend_queries(
        &self,
        workspace: &mut MockWorkspace,
        _: &Inputs<'_, DeviceSpace>,
        _: &Saved<'_, DeviceSpace>,
        block: &Block<'_, DeviceSpace>,
        tick: Tick<'_>,
    ) -> Result<()> {
        if tick().is_break() {
            return Ok(());
        }
        let (slot, rows) = self.block(block)?;
        self.enqueue(workspace, &[slot], &[], move |state, memory| {
            let keys = keys(state, memory, slot, &rows)?;
            state.attend_queries(&keys);
            Ok(())
        })
        .map(|_| ())
    }

    fn attend_keys(
        &self,
        workspace: &mut MockWorkspace,
        _: &Inputs<'_, DeviceSpace>,
        _: &Saved<'_, DeviceSpace>,
        block: &Block<'_, DeviceSpace>,
        fresh: &mut DeviceBuffer,
        tick: Tick<'_>,
    ) -> Result<DeviceEvent> {
        if tick().is_break() {
            return Ok(self.device.now());
        }
        let ((slot, rows), fresh) = (self.block(block)?, Self::target(fresh)?);
        self.enqueue(workspace, &[slot], &[fresh], move |state, memory| {
            let keys = keys(state, memory, slot, &rows)?;
            let [dk, dv] = state.attend_keys(&state.own_queries(), &keys);
            memory.write(fresh, 0, &pack(&state.local.spec.gradient_record(), rows.len(), &[&dk, &dv]))
        })
    }

    fn pack_queries(
        &self,
        workspace: &mut MockWorkspace,
        _: &Inputs<'_, DeviceSpace>,
        _: &Saved<'_, DeviceSpace>,
        into: &mut DeviceBuffer,
    ) -> Result<DeviceEvent> {
        let slot = Self::target(into)?;
        self.enqueue(workspace, &[], &[slot], move |state, memory| {
            let record = state.local.spec.query_record();
            memory.write(slot, 0, &pack(&record, state.local.queries.len(), &[&state.q, &state.dout, &state.statistics]))
        })
    }

    fn attend_keys_home(
        &self,
        workspace: &mut MockWorkspace,
        inputs: &Inputs<'_, DeviceSpace>,
        queries: &Block<'_, DeviceSpace>,
        home: &mut DeviceBuffer,
        tick: Tick<'_>,
    ) -> Result<()> {
        if tick().is_break() {
            return Ok(());
        }
        let ((slot, rows), home, k, v) = (self.block(queries)?, Self::target(home)?, inputs.k.tag, inputs.v.tag);
        self.enqueue(workspace, &[slot, k.slot, v.slot, home], &[home], move |state, memory| {
            let spec = Arc::clone(&state.local.spec);
            let fields = unpack(&spec.query_record(), spec.dims.batch, rows.len(), memory.bytes(slot)?)?;
            let [q, dout, statistics] = &fields[..] else { return Err(fault("a query record without its three fields")) };
            let own = Arc::clone(&state.local.keys);
            let keys = Keys { rows: &own, k: k.read(memory)?, v: v.read(memory)? };
            let [dk, dv] = state.attend_keys(&Queries { rows: &rows, q, dout, statistics }, &keys);
            let record = spec.gradient_record();
            let before = unpack(&record, spec.dims.batch, own.len(), memory.bytes(home)?)?;
            let [old_dk, old_dv] = &before[..] else { return Err(fault("a gradient record without its two fields")) };
            memory.write(home, 0, &pack(&record, own.len(), &[&(old_dk + &dk), &(old_dv + &dv)]))
        })
        .map(|_| ())
    }

    fn combine(
        &self,
        workspace: &mut MockWorkspace,
        into: &mut DeviceBuffer,
        from: &DeviceBuffer,
        ready: &DeviceEvent,
        places: &[(Range<u64>, Range<u64>)],
        add: bool,
    ) -> Result<DeviceEvent> {
        self.check_event(ready)?;
        let (target, source, places) = (Self::target(into)?, from.slot(), places.to_vec());
        self.enqueue(workspace, &[source, target], &[target], move |state, memory| {
            let (record, batch) = (state.local.spec.gradient_record(), state.local.spec.dims.batch);
            for (to, source_rows) in places {
                if to.end - to.start != source_rows.end - source_rows.start {
                    return Err(fault(format!("{source_rows:?} does not fit {to:?}")));
                }
                let rows = index(to.end - to.start);
                let bytes = |rows: &Range<u64>| index(rows.start * record.bytes())..index(rows.end * record.bytes());
                let mut part = |slot: u64, rows: &Range<u64>| -> Result<Vec<u8>> {
                    memory.bytes(slot)?.get(bytes(rows)).map(<[u8]>::to_vec).ok_or_else(|| fault("records past the end"))
                };
                let (new, old) = (part(source, &source_rows)?, part(target, &to)?);
                let sum: Vec<Array4<f64>> = unpack(&record, batch, rows, &new)?
                    .into_iter()
                    .zip(unpack(&record, batch, rows, &old)?)
                    .map(|(new, old)| if add { old + new } else { new })
                    .collect();
                let packed = pack(&record, rows, &sum.iter().collect::<Vec<_>>());
                memory.write(target, to.start * record.bytes(), &packed)?;
            }
            Ok(())
        })
    }

    fn finish_backward(
        &self,
        workspace: &mut MockWorkspace,
        _: &Inputs<'_, DeviceSpace>,
        home: &DeviceBuffer,
        gradients: &mut Gradients<'_, DeviceSpace>,
    ) -> Result<()> {
        let [dq, dk, dv] = [&gradients.dq, &gradients.dk, &gradients.dv].map(|view| view.tag);
        let [dbias, dsinks] = [&gradients.dbias, &gradients.dsinks].map(|view| view.as_ref().map(|view| view.tag));
        let writes: Vec<u64> = [Some(dq), Some(dk), Some(dv), dbias, dsinks].into_iter().flatten().map(|tag| tag.slot).collect();
        let home = home.slot();
        self.enqueue(workspace, &[home], &writes, move |state, memory| {
            let spec = Arc::clone(&state.local.spec);
            let fields = unpack(&spec.gradient_record(), spec.dims.batch, state.local.keys.len(), memory.bytes(home)?)?;
            let [dk_numbers, dv_numbers] = &fields[..] else { return Err(fault("a gradient record without its two fields")) };
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
        .map(|_| ())
    }
}

/// Reads q, bias and sinks into the state.
fn read_inputs(inputs: &Inputs<'_, DeviceSpace>) -> impl FnOnce(&mut State, &mut Memory) -> Result<()> + Send + use<> {
    let (q, bias, sinks) = (inputs.q.tag, inputs.bias.map(|bias| bias.tag), inputs.sinks.map(|sinks| sinks.tag));
    move |state, memory| {
        state.q = q.read(memory)?;
        state.bias = bias.map(|bias| bias.read(memory)).transpose()?;
        let sinks = sinks.map(|sinks| sinks.read(memory)).transpose()?;
        state.sinks = sinks.map(|sinks| sinks.index_axis_move(Axis(3), 0).index_axis_move(Axis(2), 0));
        Ok(())
    }
}

/// What [`read_inputs`] reads.
fn slots(inputs: &Inputs<'_, DeviceSpace>) -> Vec<u64> {
    [Some(inputs.q), inputs.bias, inputs.sinks].into_iter().flatten().map(|view| view.tag.slot).collect()
}
