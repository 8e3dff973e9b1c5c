//! Bytes copied between host and device by whole passes of [`Wgpu::on_host`]: the tensors of the
//! call, and what the ring sends.
//!
//! Copies through host memory overlap the kernels: a block reaches the host transport while the
//! device computes with it, and the transport is polled until the kernels end, as MPI requires.
//!
//! Calls of the ring on [`Wgpu::on_host`], and copies of tensors and blocks: what is refused.

use std::{
    ops::ControlFlow,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use annulus::{
    Attention, Dims, Error, Layout, Report, SinkShape, Spec,
    comm::{
        Deadline, Staged, forward_control, forward_transport,
        ring::{Ring, RingOptions},
        threads::{self, Threads, each_rank},
    },
};
use annulus_core::{
    Arrived, Backend, BackwardInputs, BackwardMode, BackwardPass, Block, Channel, Control, DType,
    DeviceSpace, Gradients, Host, HostBuffer, HostView, HostViewMut, HostViews, Incoming, Inputs,
    OnHost, Outgoing, Outputs, Passes, RankShard, Result, RowSet, Rows, StagedSpace, Transport,
    Workspace,
};
use annulus_wgpu::{
    Copier, Gpu, GpuBuffer, Options, PATIENCE, Queued, TransferredBytes, Wgpu, WgpuSpace,
};
use half::bf16;
use ndarray::Array4;

use crate::{DEADLINE, gpu, open};

type HostRing = Ring<OnHost<Wgpu>>;

const DIMS: Dims =
    Dims { batch: 1, q_len: 320, kv_len: 320, q_heads: 2, kv_heads: 1, head_dim: 8, value_dim: 12 };

fn ring<T: Transport<Host> + 'static>(
    gpu: &Gpu,
    transport: T,
    mode: BackwardMode,
) -> Result<HostRing> {
    let staged = Staged::<_, HostViews<WgpuSpace>>::new(transport, Copier::new(gpu.clone()));
    let options =
        RingOptions { layout: Some(Layout::Contiguous), backward: true, ..RingOptions::default() };
    let transport = Box::new(Deadline::new(staged, DEADLINE)?);
    Ring::new(Wgpu::on_host(gpu.clone()), transport, spec(mode), options)
}

/// A spec with a bias and sinks.
fn spec(mode: BackwardMode) -> Result<Spec> {
    let mut spec = Attention::new().backward_mode(mode).spec(DIMS)?;
    spec.bias = Some([1, DIMS.q_heads, 1, DIMS.kv_len]);
    spec.sinks = Some(SinkShape { per_head: true, count: 2 });
    Ok(spec)
}

fn view(tensor: &Array4<f32>) -> HostView<'_> {
    HostView::F32(tensor.view())
}

/// Tensors of one rank with the shapes of q, k, v, bias, sinks, out and lse.
struct Tensors {
    q: Array4<f32>,
    k: Array4<f32>,
    v: Array4<f32>,
    bias: Array4<f32>,
    sinks: Array4<f32>,
    out: Array4<f32>,
    lse: Array4<f32>,
}

impl Tensors {
    fn new(rows: usize, number: f32) -> Self {
        let Dims { batch, q_heads, kv_heads, head_dim, value_dim, .. } = DIMS;
        let of = |heads, dim| Array4::from_elem((batch, rows, heads, dim), number);
        Self {
            q: of(q_heads, head_dim),
            k: of(kv_heads, head_dim),
            v: of(kv_heads, value_dim),
            bias: Array4::from_elem((1, q_heads, 1, DIMS.kv_len), number),
            // without weight
            sinks: Array4::from_elem((q_heads, 2, 1, 1), -1e30),
            out: of(q_heads, value_dim),
            lse: Array4::from_elem((batch, q_heads, rows, 1), number),
        }
    }

    fn inputs(&self) -> Inputs<HostView<'_>> {
        Inputs {
            bias: Some(view(&self.bias)),
            sinks: Some(view(&self.sinks)),
            ..Inputs::new(view(&self.q), view(&self.k), view(&self.v))
        }
    }

    fn backward_inputs<'a>(&'a self, dout: &'a Array4<f32>) -> BackwardInputs<HostView<'a>> {
        BackwardInputs {
            forward: self.inputs(),
            out: view(&self.out),
            max: view(&self.lse),
            sum: None,
            ties: None,
            dout: view(dout),
            dlse: Some(view(&self.lse)),
            out_residual: None,
        }
    }

    /// Bytes of the inputs.
    fn input_bytes(&self) -> u64 {
        let Self { q, k, v, bias, sinks, .. } = self;
        [q, k, v, bias, sinks].iter().map(|tensor| 4 * tensor.len() as u64).sum()
    }

    /// Bytes of out and lse.
    fn output_bytes(&self) -> u64 {
        4 * (self.out.len() + self.lse.len()) as u64
    }
}

/// One rank: its ring, and the tensors of a call and of its gradients.
pub(super) struct Rank {
    ring: HostRing,
    tensors: Tensors,
    gradients: Tensors,
}

impl Rank {
    /// Plans a rank; each has the same tensors.
    pub(super) fn new<T: Transport<Host> + 'static>(
        gpu: &Gpu,
        transport: T,
        mode: BackwardMode,
    ) -> Result<Self> {
        let ring = ring(gpu, transport, mode)?;
        let rows = annulus_core::index(ring.q_rows().len());
        Ok(Self { ring, tensors: Tensors::new(rows, 0.5), gradients: Tensors::new(rows, 0.25) })
    }

    pub(super) fn forward(&mut self) -> Result<Report> {
        let mut out = self.tensors.out.clone();
        let mut lse = self.tensors.lse.clone();
        let [out_view, lse_view] = [out.view_mut(), lse.view_mut()].map(HostViewMut::F32);
        let mut outputs = Outputs::new(out_view, lse_view);
        let report = self.ring.forward(&self.tensors.inputs(), &mut outputs)?;
        // equal scores: every output is the mean of equal values
        assert!(out.iter().all(|&out| (out - 0.5).abs() < 1e-6));
        self.tensors.out = out;
        self.tensors.lse = lse;
        Ok(report)
    }

    pub(super) fn backward(&mut self) -> Result<Report> {
        let Self { ring, tensors, gradients } = self;
        let dout = gradients.out.clone();
        let [dq, dk, dv, dbias, dsinks] = [
            &mut gradients.q,
            &mut gradients.k,
            &mut gradients.v,
            &mut gradients.bias,
            &mut gradients.sinks,
        ]
        .map(|tensor| HostViewMut::F32(tensor.view_mut()));
        let report = ring.backward(
            &tensors.backward_inputs(&dout),
            &mut Gradients {
                dbias: Some(dbias),
                dsinks: Some(dsinks),
                ..Gradients::new(dq, dk, dv)
            },
        )?;
        // every key has the weight 1 / 320 in each of 320 queries of two heads
        assert!(gradients.v.iter().all(|&dv| (dv - 0.5).abs() < 1e-5));
        Ok(report)
    }
}

/// Returns the copies that `work` makes.
fn transfers(gpu: &Gpu, work: impl FnOnce()) -> TransferredBytes {
    let before = gpu.transfers();
    work();
    let after = gpu.transfers();
    TransferredBytes {
        to_device: after.to_device - before.to_device,
        to_host: after.to_host - before.to_host,
    }
}

/// Runs a pass on all ranks; returns them, the copies, and the bytes that all ranks sent.
fn measure(
    gpu: &Gpu,
    ranks: Vec<Rank>,
    pass: fn(&mut Rank) -> Result<Report>,
) -> (Vec<Rank>, TransferredBytes, u64) {
    let mut done = Ok(Vec::new());
    let copied = transfers(gpu, || {
        done = each_rank(ranks, |_, mut rank| {
            let report = pass(&mut rank)?;
            Ok((rank, report.bytes_sent))
        });
    });
    let (ranks, sent): (Vec<_>, Vec<_>) = done.expect("a pass").into_iter().unzip();
    (ranks, copied, sent.into_iter().sum())
}

/// A block is copied to the host once for each rank that receives it; with one rank, never.
#[test]
fn only_the_callers_tensors_and_sent_blocks_are_copied_to_the_host() {
    for mode in [BackwardMode::OnePass, BackwardMode::TwoPass] {
        for count in [1, 2] {
            // a device of its own, on which no other test copies
            let Some(gpu) = open(&Options::default()) else { return };
            let ranks =
                each_rank(threads::ring(count), |_, transport| Rank::new(&gpu, transport, mode));
            let ranks = ranks.expect("a plan");
            let input_bytes: u64 = ranks.iter().map(|rank| rank.tensors.input_bytes()).sum();
            let output_bytes: u64 = ranks.iter().map(|rank| rank.tensors.output_bytes()).sum();

            let (ranks, copied, sent) = measure(&gpu, ranks, Rank::forward);
            assert_eq!(sent > 0, count > 1);
            let want =
                TransferredBytes { to_device: input_bytes + sent, to_host: output_bytes + sent };
            assert_eq!(copied, want, "forward, {count} ranks");

            let (_, copied, sent) = measure(&gpu, ranks, Rank::backward);
            assert_eq!(sent > 0, count > 1);
            let want = TransferredBytes {
                // dlse is as long as lse
                to_device: input_bytes + 2 * output_bytes + sent,
                to_host: input_bytes + sent,
            };
            assert_eq!(copied, want, "backward, {mode:?}, {count} ranks");
        }
    }
}

/// Call of a transport.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Call {
    Send(Channel),
    /// A poll that does not wait: a tick of a kernel.
    Tick,
    Wait,
}

/// A transport that records its calls.
struct Recorded {
    inner: Threads,
    calls: Arc<Mutex<Vec<Call>>>,
}

impl Recorded {
    fn record(&self, call: Call) {
        self.calls.lock().expect("no thread panicked").push(call);
    }
}

impl Control for Recorded {
    forward_control! {
        rank ranks placement start_all_gather try_all_gather stragglers abort heartbeat last_heard
        last_work
    }
}

impl Transport<Host> for Recorded {
    forward_transport! {
        take pending bytes_sent posts_ahead runs_groups_in_order
    }

    fn post(
        &mut self,
        sends: &[Outgoing<'_, Host>],
        receives: &mut Vec<Incoming<Host>>,
    ) -> Result<()> {
        sends.iter().for_each(|send| self.record(Call::Send(send.header.channel)));
        self.inner.post(sends, receives)
    }

    fn progress(&mut self, timeout: Duration) -> Result<()> {
        self.record(if timeout.is_zero() { Call::Tick } else { Call::Wait });
        Transport::<Host>::progress(&mut self.inner, timeout)
    }
}

/// Ticks after each send of a channel, until the next wait.
fn ticks_after_sends(calls: &[Call], channel: Channel) -> Vec<usize> {
    let until_wait = |from: usize| {
        let ended = |call: &&Call| **call != Call::Wait;
        calls[from..].iter().take_while(ended).filter(|call| **call == Call::Tick).count()
    };
    let sends = calls.iter().enumerate().filter(|(_, call)| **call == Call::Send(channel));
    sends.map(|(index, _)| until_wait(index)).collect()
}

#[test]
fn a_block_is_sent_while_the_device_computes_with_it() {
    // one pair of tiles in a submission: 50 submissions of a kernel in each step
    let Some(gpu) = open(&Options { most_part_flops: Some(1), ..Options::default() }) else {
        return;
    };
    let all = each_rank(threads::ring(2), |_, inner| {
        let calls = Arc::default();
        let transport = Recorded { inner, calls: Arc::clone(&calls) };
        let mut rank = Rank::new(&gpu, transport, BackwardMode::OnePass)?;
        let taken = || std::mem::take(&mut *calls.lock().expect("no thread panicked"));
        taken();
        rank.forward()?;
        let forward = taken();
        rank.backward()?;
        Ok([forward, taken()])
    });
    for calls in all.expect("the passes").into_iter().flatten() {
        let ticks = ticks_after_sends(&calls, Channel::Kv);
        assert!(!ticks.is_empty() && ticks.iter().all(|&ticks| ticks >= 10), "{ticks:?}");
    }
}

/// A shard of `rows` rows, all on one rank.
fn shard(rows: u64) -> Result<RankShard> {
    let rows = Arc::new(Rows::counting(rows, 0)?);
    Ok(RankShard {
        spec: Arc::new(spec(BackwardMode::OnePass)?),
        most_block_rows: rows.len() as u64,
        most_query_rows: rows.len() as u64,
        queries: Arc::clone(&rows),
        keys: rows,
        attention_mask: None,
        key_lists: None,
        received_lists: None,
        leaves: None,
    })
}

fn keep_going() -> ControlFlow<()> {
    ControlFlow::Continue(())
}

/// After a tick that broke, neither the kernel of dbias nor that of dK and dV is launched.
#[test]
fn a_broken_tick_stops_the_kernels_that_follow() {
    let Some(gpu) = gpu() else { return };
    let backend = Wgpu::on_host(gpu);
    let rows = DIMS.kv_len as u64;
    let (shard, tensors) = (shard(rows).unwrap(), Tensors::new(DIMS.kv_len, 0.5));
    let mut workspace = backend.workspace(&shard, Passes::Both).unwrap();
    let mut block = backend.allocate(rows * shard.spec.kv_row_layout().bytes()).unwrap();
    let mut dkv = backend.allocate(rows * shard.spec.gradient_row_layout().bytes()).unwrap();
    let inputs = tensors.backward_inputs(&tensors.out);
    let mut pass = workspace.backward(inputs, BackwardMode::OnePass, &mut keep_going).unwrap();
    let ready = pass.local_kv(&mut block, &RowSet::new()).unwrap();
    let kv = Block { buffer: &block, ready: &ready, rows: &shard.keys, first_local: Some(0) };
    let mut ticks = 0;
    let mut stop = || {
        ticks += 1;
        ControlFlow::Break(())
    };
    pass.attend_kv(&kv, Some(&mut dkv), &mut stop).unwrap();
    assert_eq!(ticks, 1);
}

#[test]
fn a_workspace_for_forward_refuses_a_backward_pass() {
    let Some(gpu) = gpu() else { return };
    let shard = shard(DIMS.kv_len as u64).unwrap();
    let mut workspace = Wgpu::on_host(gpu).workspace(&shard, Passes::Forward).unwrap();
    let tensors = Tensors::new(DIMS.kv_len, 0.5);
    let inputs = tensors.backward_inputs(&tensors.out);
    let refusal = workspace.backward(inputs, BackwardMode::OnePass, &mut keep_going).err();
    assert!(matches!(refusal, Some(Error::Internal { .. })), "{refusal:?}");
}

/// Host tensors of any strides, with a number of 2-byte elements that is no whole number of words.
#[test]
fn tensors_of_any_strides_return_unchanged() {
    let Some(gpu) = open(&Options::default()) else { return };
    let numbers = Array4::from_shape_fn((3, 1, 5, 7), |(a, _, b, c)| {
        bf16::from_f32((35 * a + 7 * b + c) as f32)
    });
    let swapped = numbers.view().permuted_axes([2, 1, 0, 3]);
    let mut tensor = WgpuSpace::tensor(&gpu, DType::Bf16, [5, 1, 3, 7]).unwrap();
    <WgpuSpace as DeviceSpace>::upload(&gpu, HostView::Bf16(swapped), &mut tensor, &mut keep_going)
        .unwrap();
    let mut dense = Array4::from_elem((5, 1, 3, 7), bf16::NAN);
    let mut into = HostViewMut::Bf16(dense.view_mut());
    <WgpuSpace as DeviceSpace>::download(&gpu, &tensor, &mut into, &mut keep_going).unwrap();
    assert_eq!(dense, swapped);
    let mut strided = Array4::from_elem((3, 1, 5, 7), bf16::NAN);
    let mut into = HostViewMut::Bf16(strided.view_mut().permuted_axes([2, 1, 0, 3]));
    <WgpuSpace as DeviceSpace>::download(&gpu, &tensor, &mut into, &mut keep_going).unwrap();
    assert_eq!(strided, numbers);
}

#[test]
fn tensors_of_another_shape_type_or_device_are_refused() {
    let (Some(gpu), Some(other)) = (open(&Options::default()), open(&Options::default())) else {
        return;
    };
    let mut tensor = WgpuSpace::tensor(&gpu, DType::F32, [1, 2, 3, 4]).unwrap();
    let shorter = Array4::zeros((1, 2, 3, 3));
    let wider = Array4::zeros((1, 2, 3, 4));
    let alike = Array4::zeros((1, 2, 3, 4));
    for (gpu, from) in [
        (&gpu, HostView::F32(shorter.view())),
        (&gpu, HostView::F64(wider.view())),
        (&other, HostView::F32(alike.view())),
    ] {
        let refusal = <WgpuSpace as DeviceSpace>::upload(gpu, from, &mut tensor, &mut keep_going);
        assert!(matches!(refusal, Err(Error::InvalidArgument { .. })), "{refusal:?}");
    }
    let mut into = shorter.clone();
    let mut into = HostViewMut::F32(into.view_mut());
    let refusal = <WgpuSpace as DeviceSpace>::download(&gpu, &tensor, &mut into, &mut keep_going);
    assert!(matches!(refusal, Err(Error::InvalidArgument { .. })), "{refusal:?}");
    let refusal = WgpuSpace::tensor(&gpu, DType::F64, [1; 4]).err();
    assert!(matches!(refusal, Some(Error::Unsupported { .. })), "{refusal:?}");
}

/// The space of host views stages the blocks of the device space.
#[test]
fn blocks_of_host_views_are_staged() {
    type Space = HostViews<WgpuSpace>;
    let Some(gpu) = open(&Options::default()) else { return };
    let mut copier = Copier::new(gpu.clone());
    let block: GpuBuffer = Wgpu::on_host(gpu.clone()).allocate(64).unwrap();
    let mut bytes = HostBuffer::zeroed(24).unwrap();
    bytes.bytes_mut().unwrap().fill(7);
    let copied = transfers(&gpu, || {
        let ranges = [8..16, 40..48];
        let mut upload =
            Space::upload(&mut copier, bytes, block, &ranges, &mut keep_going).unwrap();
        let (host, Arrived { buffer, ready }) =
            Space::uploaded(&mut copier, &mut upload).unwrap().unwrap();
        let Queued = ready;
        let mut download =
            Space::download(&mut copier, &buffer, &ready, &[0..16, 44..52], host).unwrap();
        let start = Instant::now();
        let downloaded = loop {
            if let Some(host) = Space::downloaded(&mut copier, &mut download).unwrap() {
                break host;
            }
            assert!(start.elapsed() < PATIENCE);
        };
        assert_eq!(downloaded.bytes(), [[0; 8], [7; 8], [7, 7, 7, 7, 0, 0, 0, 0]].concat());
    });
    assert_eq!(copied, TransferredBytes { to_device: 16, to_host: 24 });
}
