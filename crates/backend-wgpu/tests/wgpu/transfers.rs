//! Bytes copied between host and device by whole passes of [`Wgpu::on_host`]: the tensors of the
//! call, and what the ring sends.
//!
//! Copies through host memory overlap the kernels: a block reaches the host transport while the
//! device computes with it, and the transport is polled until the kernels end, as MPI requires.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use annulus::{
    Attention, Dims, Layout, Report,
    comm::{
        Deadline, Staged, forward_control, forward_transport,
        ring::{Ring, RingOptions},
        threads::{self, Threads, each_rank},
    },
};
use annulus_core::{
    BackwardInputs, BackwardMode, Channel, Control, Gradients, Host, HostView, HostViewMut,
    HostViews, Incoming, Inputs, OnHost, Outgoing, Outputs, Result, Transport,
};
use annulus_wgpu::{Copier, Gpu, Options, TransferredBytes, Wgpu, WgpuSpace};
use ndarray::Array4;

use crate::{DEADLINE, open};

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
    Ring::new(
        Wgpu::on_host(gpu.clone()),
        Box::new(Deadline::new(staged, DEADLINE)?),
        Attention::new().backward_mode(mode).spec(DIMS),
        options,
    )
}

/// Tensors of one rank with the shapes of q, k, v, out and lse.
struct Tensors {
    q: Array4<f32>,
    k: Array4<f32>,
    v: Array4<f32>,
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
            out: of(q_heads, value_dim),
            lse: Array4::from_elem((batch, q_heads, rows, 1), number),
        }
    }

    fn inputs(&self) -> Inputs<HostView<'_>> {
        Inputs {
            q: HostView::F32(self.q.view()),
            k: HostView::F32(self.k.view()),
            v: HostView::F32(self.v.view()),
            bias: None,
            sinks: None,
        }
    }

    /// Bytes of q, k and v.
    fn input_bytes(&self) -> u64 {
        4 * (self.q.len() + self.k.len() + self.v.len()) as u64
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
        let mut outputs = Outputs {
            out: HostViewMut::F32(out.view_mut()),
            lse: HostViewMut::F32(lse.view_mut()),
            max: None,
            sum: None,
            ties: None,
            out_residual: None,
        };
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
        let inputs = BackwardInputs {
            forward: tensors.inputs(),
            out: HostView::F32(tensors.out.view()),
            max: HostView::F32(tensors.lse.view()),
            sum: None,
            ties: None,
            dout: HostView::F32(dout.view()),
            dlse: None,
            out_residual: None,
        };
        let report = ring.backward(
            &inputs,
            &mut Gradients {
                dq: HostViewMut::F32(gradients.q.view_mut()),
                dk: HostViewMut::F32(gradients.k.view_mut()),
                dv: HostViewMut::F32(gradients.v.view_mut()),
                dbias: None,
                dsinks: None,
            },
        )?;
        // every key has the weight 1 / 320 in each of 320 queries of two heads
        assert!(gradients.v.iter().all(|&dv| (dv - 0.5).abs() < 1e-5));
        Ok(report)
    }
}

/// Runs a pass on all ranks; returns them, the copies, and the bytes that all ranks sent.
fn measure(
    gpu: &Gpu,
    ranks: Vec<Rank>,
    pass: fn(&mut Rank) -> Result<Report>,
) -> (Vec<Rank>, TransferredBytes, u64) {
    let before = gpu.transfers();
    let done = each_rank(ranks, |_, mut rank| {
        let report = pass(&mut rank)?;
        Ok((rank, report.bytes_sent))
    });
    let after = gpu.transfers();
    let copied = TransferredBytes {
        to_device: after.to_device - before.to_device,
        to_host: after.to_host - before.to_host,
    };
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
            let dout_bytes: u64 = ranks.iter().map(|rank| 4 * rank.tensors.out.len() as u64).sum();

            let (ranks, copied, sent) = measure(&gpu, ranks, Rank::forward);
            assert_eq!(sent > 0, count > 1);
            let want =
                TransferredBytes { to_device: input_bytes + sent, to_host: output_bytes + sent };
            assert_eq!(copied, want, "forward, {count} ranks");

            let (_, copied, sent) = measure(&gpu, ranks, Rank::backward);
            assert_eq!(sent > 0, count > 1);
            let want = TransferredBytes {
                to_device: input_bytes + output_bytes + dout_bytes + sent,
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
