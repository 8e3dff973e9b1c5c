//! [`Wgpu::on_host`] on one rank, pass by pass: results, copies between host and device, refusals.
//!
//! Without a Vulkan, Metal or DX12 driver the tests print NOT RUN; with `ANNULUS_REQUIRE=wgpu` they
//! fail instead.

#![expect(clippy::unwrap_used, reason = "a test")]

use std::{ops::ControlFlow, sync::Arc};

use annulus_core::{
    Arrived, Backend, BackwardInputs, BackwardMode, BackwardPass, Batch, Block, DType, DeviceSpace,
    Dims, Error, ForwardPass, Gradients, HostBuffer, HostView, HostViewMut, HostViews, Inputs,
    OnHost, OnHostWorkspace, Outputs, Passes, RankShard, Reduction, Result, RowSet, Rows,
    SinkShape, Spec, StagedSpace, Workspace, mask, oracle,
};
use annulus_wgpu::{
    Copier, Gpu, GpuBuffer, Options, PATIENCE, Queued, TransferredBytes, Wgpu, WgpuSpace,
    WgpuWorkspace,
};
use half::bf16;
use ndarray::{Array, Array4, Axis, Dimension};

/// Opens a device of the test's own, so that no other test copies on it.
fn open() -> Option<Gpu> {
    if Gpu::list().is_empty() {
        let required = std::env::var("ANNULUS_REQUIRE")
            .is_ok_and(|words| words.split(',').any(|word| word == "wgpu"));
        assert!(!required, "ANNULUS_REQUIRE has wgpu, and there is no adapter");
        eprintln!("NOT RUN: no Vulkan, Metal or DX12 adapter");
        return None;
    }
    Some(Gpu::open(&Options::default()).unwrap())
}

const DIMS: Dims =
    Dims { batch: 2, q_len: 70, kv_len: 70, q_heads: 4, kv_heads: 2, head_dim: 5, value_dim: 7 };

/// A causal problem with a bias and sinks, and its tensors.
struct Problem {
    spec: Spec,
    q: Array4<f32>,
    k: Array4<f32>,
    v: Array4<f32>,
    bias: Array4<f32>,
    sinks: Array4<f32>,
    dout: Array4<f32>,
    dlse: Array4<f32>,
}

/// Results of a forward and a backward pass.
struct Results {
    out: Array4<f32>,
    lse: Array4<f32>,
    dq: Array4<f32>,
    dk: Array4<f32>,
    dv: Array4<f32>,
    dbias: Array4<f32>,
    dsinks: Array4<f32>,
}

impl Problem {
    fn new() -> Self {
        let Dims { batch, q_len, kv_len, q_heads, kv_heads, head_dim, value_dim } = DIMS;
        let mut spec = Spec::new(DIMS, DType::F32);
        spec.mask = Arc::new(mask::Causal::default());
        spec.bias = Some([1, q_heads, 1, kv_len]);
        spec.sinks = Some(SinkShape { per_head: true, count: 2 });
        let mut state = 1_u64;
        let mut random = |shape: [usize; 4]| {
            Array4::from_shape_simple_fn(shape, || {
                state = state
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1_442_695_040_888_963_407);
                (state >> 40) as f32 / (1 << 23) as f32 - 1.0
            })
        };
        Self {
            q: random([batch, q_len, q_heads, head_dim]),
            k: random([batch, kv_len, kv_heads, head_dim]),
            v: random([batch, kv_len, kv_heads, value_dim]),
            bias: random([1, q_heads, 1, kv_len]),
            sinks: random([q_heads, 2, 1, 1]),
            dout: random([batch, q_len, q_heads, value_dim]),
            dlse: random([batch, q_heads, q_len, 1]),
            spec,
        }
    }

    fn shard(&self) -> RankShard {
        let rows = Arc::new(Rows::counting(DIMS.kv_len as u64, 0).unwrap());
        RankShard {
            spec: Arc::new(self.spec.clone()),
            queries: Arc::clone(&rows),
            keys: rows,
            attention_mask: None,
            most_block_rows: DIMS.kv_len as u64,
            most_query_rows: DIMS.q_len as u64,
            leaves: None,
        }
    }

    fn inputs(&self) -> Inputs<HostView<'_>> {
        Inputs {
            q: HostView::F32(self.q.view()),
            k: HostView::F32(self.k.view()),
            v: HostView::F32(self.v.view()),
            bias: Some(HostView::F32(self.bias.view())),
            sinks: Some(HostView::F32(self.sinks.view())),
        }
    }

    fn backward_inputs<'a>(&'a self, results: &'a Results) -> BackwardInputs<HostView<'a>> {
        BackwardInputs {
            forward: self.inputs(),
            out: HostView::F32(results.out.view()),
            max: HostView::F32(results.lse.view()),
            sum: None,
            ties: None,
            dout: HostView::F32(self.dout.view()),
            dlse: Some(HostView::F32(self.dlse.view())),
            out_residual: None,
        }
    }

    /// Compares results with the oracle's.
    fn check(&self, results: &Results) {
        fn wide<D: Dimension>(array: &Array<f32, D>) -> Array<f64, D> {
            array.mapv(f64::from)
        }
        let [q, k, v, bias, dout] = [&self.q, &self.k, &self.v, &self.bias, &self.dout].map(wide);
        let sinks = wide(&self.sinks).index_axis_move(Axis(3), 0).index_axis_move(Axis(2), 0);
        let dlse = wide(&self.dlse).index_axis_move(Axis(3), 0);
        let batch = Batch::default();
        let problem = oracle::Problem {
            spec: &self.spec,
            batch: &batch,
            q: q.view(),
            k: k.view(),
            v: v.view(),
            bias: Some(bias.view()),
            sinks: Some(sinks.view()),
        };
        let forward = oracle::forward(&problem).unwrap();
        let backward = oracle::backward(&problem, dout.view(), Some(dlse.view())).unwrap();
        let lse = forward.lse.insert_axis(Axis(3));
        let dsinks = backward.dsinks.unwrap().insert_axis(Axis(2)).insert_axis(Axis(3));
        for (name, got, want) in [
            ("out", &results.out, &forward.out),
            ("lse", &results.lse, &lse),
            ("dq", &results.dq, &backward.dq),
            ("dk", &results.dk, &backward.dk),
            ("dv", &results.dv, &backward.dv),
            ("dbias", &results.dbias, &backward.dbias.unwrap()),
            ("dsinks", &results.dsinks, &dsinks),
        ] {
            assert_eq!(got.dim(), want.dim(), "{name}");
            let close = |(&got, &want): (&f32, &f64)| {
                (f64::from(got) - want).abs() <= 2e-5 * (1.0 + want.abs())
            };
            assert!(got.iter().zip(want).all(close), "{name}: {got} instead of {want}");
        }
    }
}

impl Results {
    fn junk(problem: &Problem) -> Self {
        let like = |array: &Array4<f32>| Array4::from_elem(array.raw_dim(), 77.0);
        Self {
            out: like(&problem.dout),
            lse: like(&problem.dlse),
            dq: like(&problem.q),
            dk: like(&problem.k),
            dv: like(&problem.v),
            dbias: like(&problem.bias),
            dsinks: like(&problem.sinks),
        }
    }
}

fn keep_going() -> ControlFlow<()> {
    ControlFlow::Continue(())
}

type OnHostWgpu = OnHostWorkspace<WgpuWorkspace, WgpuSpace>;

/// The ring's calls on one rank.
fn forward(
    backend: &OnHost<Wgpu>,
    workspace: &mut OnHostWgpu,
    problem: &Problem,
    results: &mut Results,
) -> Result<()> {
    let shard = problem.shard();
    let rows = shard.keys.len() as u64;
    let mut block = backend.allocate(rows * problem.spec.kv_row_layout().bytes())?;
    let mut pass = workspace.forward(problem.inputs(), &mut keep_going)?;
    let ready = pass.local_kv(&mut block, &RowSet::new())?;
    let kv = Block { buffer: &block, ready: &ready, rows: &shard.keys, first_local: Some(0) };
    pass.attend(&kv, &mut keep_going)?;
    let outputs = &mut Outputs {
        out: HostViewMut::F32(results.out.view_mut()),
        lse: HostViewMut::F32(results.lse.view_mut()),
        max: None,
        sum: None,
        ties: None,
        out_residual: None,
    };
    pass.finish(outputs, &mut keep_going)
}

/// The ring's calls on one rank, in either mode; `reduce` copies and then adds nothing.
fn backward(
    backend: &OnHost<Wgpu>,
    workspace: &mut OnHostWgpu,
    problem: &Problem,
    results: &mut Results,
    mode: BackwardMode,
) -> Result<()> {
    let shard = problem.shard();
    let rows = shard.keys.len() as u64;
    let mut block = backend.allocate(rows * problem.spec.kv_row_layout().bytes())?;
    let mut queries = backend.allocate(rows * problem.spec.query_row_layout().bytes())?;
    let [mut dkv, mut fresh, zeros] = [(); 3]
        .map(|()| backend.allocate(rows * problem.spec.gradient_row_layout().bytes()).unwrap());
    let out = results.out.clone();
    let lse = results.lse.clone();
    let saved = Results { out, lse, ..Results::junk(problem) };
    let mut pass = workspace.backward(problem.backward_inputs(&saved), mode, &mut keep_going)?;
    let ready = pass.local_kv(&mut block, &RowSet::all(shard.keys.len() as u64))?;
    let kv = Block { buffer: &block, ready: &ready, rows: &shard.keys, first_local: Some(0) };
    match mode {
        BackwardMode::OnePass => {
            let ready = pass.attend_kv(&kv, Some(&mut fresh), &mut keep_going)?;
            let halves = [(0..30, 0..30), (30..rows, 30..rows)];
            pass.reduce(&mut dkv, &fresh, &ready, &halves, Reduction::Copy)?;
            pass.reduce(&mut dkv, &zeros, &ready, &halves, Reduction::Add)?;
        }
        BackwardMode::TwoPass => {
            pass.attend_kv(&kv, None, &mut keep_going)?;
            let ready = pass.local_queries(&mut queries)?;
            let queries =
                Block { buffer: &queries, ready: &ready, rows: &shard.queries, first_local: None };
            pass.attend_queries(&queries, &mut dkv, &mut keep_going)?;
        }
    }
    pass.finish(
        &dkv,
        &mut Gradients {
            dq: HostViewMut::F32(results.dq.view_mut()),
            dk: HostViewMut::F32(results.dk.view_mut()),
            dv: HostViewMut::F32(results.dv.view_mut()),
            dbias: Some(HostViewMut::F32(results.dbias.view_mut())),
            dsinks: Some(HostViewMut::F32(results.dsinks.view_mut())),
        },
        &mut keep_going,
    )
}

/// Bytes of tensors of f32 elements.
fn bytes<const N: usize>(tensors: [&Array4<f32>; N]) -> u64 {
    tensors.iter().map(|tensor| 4 * tensor.len() as u64).sum()
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

/// Only the tensors of the calls are copied: no block crosses to the host and back.
#[test]
fn a_rank_alone_copies_its_inputs_and_outputs_only() {
    let Some(gpu) = open() else { return };
    let backend = Wgpu::on_host(gpu.clone());
    let problem = Problem::new();
    assert_eq!(backend.capabilities(&problem.spec).unwrap().kv_tile, 32);
    let mut workspace = backend.workspace(&problem.shard(), Passes::Both).unwrap();
    let mut results = Results::junk(&problem);
    let Problem { q, k, v, bias, sinks, dout, dlse, .. } = &problem;
    for mode in [BackwardMode::OnePass, BackwardMode::TwoPass] {
        let copied = transfers(&gpu, || {
            forward(&backend, &mut workspace, &problem, &mut results).unwrap();
        });
        let inputs = bytes([q, k, v, bias, sinks]);
        let outputs = bytes([&results.out, &results.lse]);
        assert_eq!(copied, TransferredBytes { to_device: inputs, to_host: outputs }, "{mode:?}");
        let copied = transfers(&gpu, || {
            backward(&backend, &mut workspace, &problem, &mut results, mode).unwrap();
        });
        let want = TransferredBytes {
            to_device: inputs + outputs + bytes([dout, dlse]),
            to_host: bytes([q, k, v, bias, sinks]),
        };
        assert_eq!(copied, want, "{mode:?}");
        problem.check(&results);
    }
}

/// After a tick that broke, neither the kernel of dbias nor that of dK and dV is launched.
#[test]
fn a_broken_tick_stops_the_kernels_that_follow() {
    let Some(gpu) = open() else { return };
    let backend = Wgpu::on_host(gpu);
    let problem = Problem::new();
    let shard = problem.shard();
    let rows = shard.keys.len() as u64;
    let mut workspace = backend.workspace(&shard, Passes::Both).unwrap();
    let mut block = backend.allocate(rows * problem.spec.kv_row_layout().bytes()).unwrap();
    let mut dkv = backend.allocate(rows * problem.spec.gradient_row_layout().bytes()).unwrap();
    let saved = Results::junk(&problem);
    let inputs = problem.backward_inputs(&saved);
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
    let Some(gpu) = open() else { return };
    let backend = Wgpu::on_host(gpu);
    let problem = Problem::new();
    let mut workspace = backend.workspace(&problem.shard(), Passes::Forward).unwrap();
    let results = Results::junk(&problem);
    let inputs = problem.backward_inputs(&results);
    let refusal = workspace.backward(inputs, BackwardMode::OnePass, &mut keep_going).err();
    assert!(matches!(refusal, Some(Error::Internal { .. })), "{refusal:?}");
}

/// Host tensors of any strides, with a number of 2-byte elements that is no whole number of words.
#[test]
fn tensors_of_any_strides_return_unchanged() {
    let Some(gpu) = open() else { return };
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
    let (Some(gpu), Some(other)) = (open(), open()) else { return };
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
    let Some(gpu) = open() else { return };
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
        let start = std::time::Instant::now();
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
