//! Bytes copied between host and device by whole passes of [`Wgpu::on_host`]: the tensors of the
//! call, and what the ring sends.
//!
//! Copies through host memory overlap the kernels: a block reaches the host transport while the
//! device computes with it, and the transport is polled until the kernels end, as MPI requires.
//!
//! Calls on [`Wgpu::on_host`], and copies of tensors and blocks: what is refused.

use std::{
    ops::ControlFlow,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use annulus::{
    Attention, Dims, Error, Layout, LocalRing, Plan, Report, Setup, SinkShape, Spec,
    comm::{
        Staged, forward_control, forward_transport,
        threads::{self, Threads, each_rank},
    },
};
use annulus_core::{
    Arrived, Backend, BackwardInputs, BackwardMode, BackwardPass, Block, Channel, Control, DType,
    DeviceSpace, Host, HostBuffer, HostView, HostViewMut, HostViews, Incoming, Inputs, OnHost,
    Outgoing, Passes, RankShard, RowSet, Rows, StagedSpace, Transport, Workspace,
};
use annulus_wgpu::{
    Copier, Gpu, GpuBuffer, Options, PATIENCE, Queued, TransferredBytes, Wgpu, WgpuSpace,
};
use half::bf16;
use ndarray::{Array2, Array3, Array4};

use crate::{gpu, open};

type Space = HostViews<WgpuSpace>;

const DIMS: Dims =
    Dims { batch: 1, q_len: 320, kv_len: 320, q_heads: 2, kv_heads: 1, head_dim: 8, value_dim: 12 };

/// Shape of the bias.
const BIAS: [usize; 4] = [1, DIMS.q_heads, 1, DIMS.kv_len];

/// Returns the copies that `pass` makes, and the bytes that all ranks sent.
fn measure(gpu: &Gpu, pass: impl FnOnce() -> Vec<Report>) -> (TransferredBytes, u64) {
    let before = gpu.transfers();
    let reports = pass();
    let after = gpu.transfers();
    let copied = TransferredBytes {
        to_device: after.to_device - before.to_device,
        to_host: after.to_host - before.to_host,
    };
    (copied, reports.iter().map(|report| report.bytes_sent).sum())
}

/// A block is copied to the host once for each rank that receives it; with one rank, never.
#[test]
fn only_the_callers_tensors_and_sent_blocks_are_copied_to_the_host() {
    let Dims { batch, q_len, q_heads, kv_heads, head_dim, value_dim, .. } = DIMS;
    let of = |heads, dim| Array4::<f32>::from_elem((batch, q_len, heads, dim), 0.5);
    let [q, k, v] = [of(q_heads, head_dim), of(kv_heads, head_dim), of(kv_heads, value_dim)];
    let bias = Array4::from_elem(BIAS, 0.5);
    let sinks = Array2::from_elem((q_heads, 2), 0.5);
    let dout = of(q_heads, value_dim);
    let dlse = Array3::from_elem((batch, q_heads, q_len), 0.5);
    let tensors = annulus::Tensors::new(q.view(), k.view(), v.view())
        .with_bias(bias.view())
        .with_softmax_aux(sinks.view());
    for mode in [BackwardMode::OnePass, BackwardMode::TwoPass] {
        for ranks in [1, 2] {
            // a device of its own, on which no other test copies
            let Some(gpu) = open(&Options::default()) else { return };
            let attention = Attention::new().backward_mode(mode);
            let attention = attention.bias(BIAS).softmax_aux(SinkShape::per_head(2));
            let setup = Setup::from(attention).map_division(|all| all.layout(Layout::Contiguous));
            let plans = LocalRing::from_plans(setup, DIMS, ranks, |_, setup, endpoint| {
                let staged = Staged::<_, Space>::new(endpoint, Copier::new(gpu.clone()));
                Plan::with_backend(setup, DIMS, Wgpu::on_host(gpu.clone()), staged)
            });
            let mut ring = plans.expect("plans");
            // every rank has the whole bias and all sinks
            let of_rows = q.len() + k.len() + v.len();
            let input_bytes = 4 * (of_rows + ranks * (bias.len() + sinks.len())) as u64;
            let out_bytes = 4 * dout.len() as u64;
            // of lse, of row maxima, of row sums
            let statistics_bytes = 3 * 4 * dlse.len() as u64;

            let mut forward = None;
            let (copied, sent) = measure(&gpu, || {
                forward.insert(ring.forward(&tensors).expect("a pass")).reports.clone()
            });
            assert_eq!(sent > 0, ranks > 1);
            let want = TransferredBytes {
                to_device: input_bytes + sent,
                to_host: out_bytes + statistics_bytes + sent,
            };
            assert_eq!(copied, want, "forward, {ranks} ranks");

            let forward = forward.expect("its results");
            let (copied, sent) = measure(&gpu, || {
                let dlse = Some(dlse.view());
                ring.backward(&tensors, &forward, dout.view(), dlse).expect("a pass").reports
            });
            assert_eq!(sent > 0, ranks > 1);
            let want = TransferredBytes {
                // out and dout; dlse is as long as lse, in whose place it is
                to_device: input_bytes + 2 * out_bytes + statistics_bytes + sent,
                to_host: input_bytes + sent,
            };
            assert_eq!(copied, want, "backward, {mode:?}, {ranks} ranks");
        }
    }
}

/// All rows on one rank, with a bias.
fn shard() -> annulus::Result<RankShard> {
    let rows = Arc::new(Rows::counting(DIMS.kv_len as u64, 0)?);
    let spec = Spec { bias: Some(BIAS), ..Spec::new(DIMS, DType::F32) };
    Ok(RankShard {
        spec: Arc::new(spec),
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

/// Tensors of a backward pass; those of q and k, and of out, dout and v have equal numbers.
struct Tensors {
    q: Array4<f32>,
    k: Array4<f32>,
    v: Array4<f32>,
    bias: Array4<f32>,
    out: Array4<f32>,
    lse: Array4<f32>,
}

impl Tensors {
    fn new() -> Self {
        let Dims { batch, q_len, q_heads, kv_heads, head_dim, value_dim, .. } = DIMS;
        let of = |heads, dim| Array4::from_elem((batch, q_len, heads, dim), 0.5);
        Self {
            q: of(q_heads, head_dim),
            k: of(kv_heads, head_dim),
            v: of(kv_heads, value_dim),
            bias: Array4::from_elem(BIAS, 0.5),
            out: of(q_heads, value_dim),
            lse: Array4::from_elem((batch, q_heads, q_len, 1), 0.5),
        }
    }

    fn backward_inputs(&self) -> BackwardInputs<HostView<'_>> {
        let [q, k, v, bias, out, max] =
            [&self.q, &self.k, &self.v, &self.bias, &self.out, &self.lse]
                .map(|tensor| HostView::F32(tensor.view()));
        BackwardInputs {
            forward: Inputs { bias: Some(bias), ..Inputs::new(q, k, v) },
            max,
            sum: None,
            ties: None,
            dout: HostView::F32(self.out.view()),
            out,
            dlse: None,
            out_residual: None,
        }
    }
}

fn keep_going() -> ControlFlow<()> {
    ControlFlow::Continue(())
}

/// After a tick that broke, neither the kernel of dbias nor that of dK and dV is launched.
#[test]
fn a_broken_tick_stops_the_kernels_that_follow() {
    let Some(gpu) = gpu() else { return };
    let backend: OnHost<Wgpu> = Wgpu::on_host(gpu);
    let (shard, tensors) = (shard().unwrap(), Tensors::new());
    let rows = DIMS.kv_len as u64;
    let mut workspace = backend.workspace(&shard, Passes::Both).unwrap();
    let mut block = backend.allocate(rows * shard.spec.kv_row_layout().bytes()).unwrap();
    let mut dkv = backend.allocate(rows * shard.spec.gradient_row_layout().bytes()).unwrap();
    let inputs = tensors.backward_inputs();
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

/// Call of a transport.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Call {
    SendKv,
    /// A poll that does not wait: a tick of a kernel.
    Tick,
    Wait,
}

/// A transport that records its calls.
struct Recorded {
    inner: Threads,
    calls: Arc<Mutex<Vec<Call>>>,
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
    ) -> annulus::Result<()> {
        let of_kv = sends.iter().filter(|send| send.header.channel == Channel::Kv);
        self.calls.lock().expect("no thread panicked").extend(of_kv.map(|_| Call::SendKv));
        self.inner.post(sends, receives)
    }

    fn progress(&mut self, timeout: Duration) -> annulus::Result<()> {
        let call = if timeout.is_zero() { Call::Tick } else { Call::Wait };
        self.calls.lock().expect("no thread panicked").push(call);
        Transport::<Host>::progress(&mut self.inner, timeout)
    }
}

/// Ticks after each send of keys and values, until the next wait.
fn ticks_after_sends(calls: &[Call]) -> Vec<usize> {
    let until_wait = |from: usize| {
        let ended = |call: &&Call| **call != Call::Wait;
        calls[from..].iter().take_while(ended).filter(|call| **call == Call::Tick).count()
    };
    let sends = calls.iter().enumerate().filter(|(_, call)| **call == Call::SendKv);
    sends.map(|(index, _)| until_wait(index)).collect()
}

#[test]
fn a_block_is_sent_while_the_device_computes_with_it() {
    // one pair of tiles in a submission: 50 submissions of a kernel in each step
    let Some(gpu) = open(&Options { most_part_flops: Some(1), ..Options::default() }) else {
        return;
    };
    let of = |heads, dim| Array4::<f32>::from_elem((1, DIMS.q_len / 2, heads, dim), 0.5);
    let q = of(DIMS.q_heads, DIMS.head_dim);
    let k = of(DIMS.kv_heads, DIMS.head_dim);
    let v = of(DIMS.kv_heads, DIMS.value_dim);
    let dout = of(DIMS.q_heads, DIMS.value_dim);
    let tensors = annulus::Tensors::new(q.view(), k.view(), v.view());
    let all = each_rank(threads::ring(2), |_, inner| {
        let calls = Arc::<Mutex<Vec<Call>>>::default();
        let transport = Recorded { inner, calls: Arc::clone(&calls) };
        let staged = Staged::<_, Space>::new(transport, Copier::new(gpu.clone()));
        let mut plan =
            Plan::with_backend(Attention::new(), DIMS, Wgpu::on_host(gpu.clone()), staged)?;
        let taken = || std::mem::take(&mut *calls.lock().expect("no thread panicked"));
        taken();
        let forward = plan.forward(&tensors)?;
        let of_forward = taken();
        plan.backward(&tensors, &forward, dout.view(), None)?;
        Ok([of_forward, taken()])
    });
    for calls in all.expect("the passes").into_iter().flatten() {
        let ticks = ticks_after_sends(&calls);
        assert!(!ticks.is_empty() && ticks.iter().all(|&ticks| ticks >= 10), "{ticks:?}");
    }
}

#[test]
fn a_workspace_for_forward_refuses_a_backward_pass() {
    let Some(gpu) = gpu() else { return };
    let mut workspace = Wgpu::on_host(gpu).workspace(&shard().unwrap(), Passes::Forward).unwrap();
    let tensors = Tensors::new();
    let inputs = tensors.backward_inputs();
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
    let Some(gpu) = open(&Options::default()) else { return };
    let mut copier = Copier::new(gpu.clone());
    let block: GpuBuffer = Wgpu::on_host(gpu.clone()).allocate(64).unwrap();
    let mut bytes = HostBuffer::zeroed(24).unwrap();
    bytes.bytes_mut().unwrap().fill(7);
    let (copied, _) = measure(&gpu, || {
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
        Vec::new()
    });
    assert_eq!(copied, TransferredBytes { to_device: 16, to_host: 24 });
}
