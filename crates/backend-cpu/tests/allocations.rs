//! A warm workspace allocates nothing that grows with the sequence length or the number of tiles.

#![expect(clippy::unwrap_used, reason = "a test")]

use std::{
    alloc::{GlobalAlloc, Layout, System},
    ops::ControlFlow,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use annulus_core::{
    Alibi, Backend, BackwardInputs, BackwardMode, BackwardPass, Batch, Block, DType, Dims, Dropout,
    ForwardPass, Gradients, HostBuffer, HostView, HostViewMut, Inputs, Outputs, Passes, RankShard,
    RowSet, Rows, Side, SinkShape, Spec, Workspace as _, mask,
};
use annulus_cpu::{Cpu, CpuWorkspace};
use ndarray::{Array2, Array4};

/// Counts the bytes requested from the system allocator.
struct Counting;

static BYTES: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is forwarded unchanged to the system allocator, which fulfils the contract;
// counting has no effect on it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        BYTES.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller fulfils the contract of `alloc`, which is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: `pointer` came from `System.alloc` with this layout (see `alloc`); the caller
        // fulfils the rest of the contract.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// All tensors of one rank.
struct Tensors {
    shard: RankShard,
    q: Array4<f32>,
    k: Array4<f32>,
    v: Array4<f32>,
    bias: Array4<f32>,
    sinks: Array4<f32>,
    lines: Array4<f32>,
    block: HostBuffer,
    /// All keys.
    sent: RowSet,
    sums: HostBuffer,
}

impl Tensors {
    fn new(len: usize, bias: bool) -> Self {
        let mut spec = Spec::new(Dims { q_heads: 4, ..Dims::new(1, len, 2, 16) }, DType::F32);
        spec.mask = Arc::new(mask::Causal::default());
        spec.bias = bias.then_some([1, 1, 1, len]);
        spec.bias_function = Some(Arc::new(Alibi::published(4)));
        spec.soft_cap = Some(5.0);
        spec.sinks = Some(SinkShape { per_head: true, count: 1 });
        spec.dropout = Some(Dropout { probability: 0.2, seed: 1 });
        let tensor = |heads| {
            Array4::from_shape_fn((1, len, heads, 16), |(_, i, h, c)| {
                ((i * 7 + h * 3 + c) % 11) as f32 / 11.0 - 0.5
            })
        };
        let rows = rows_of(&spec, None);
        Self {
            q: tensor(4),
            k: tensor(2),
            v: tensor(2),
            bias: Array4::zeros((1, 1, 1, len)),
            sinks: Array4::zeros((4, 1, 1, 1)),
            lines: Array4::zeros((1, 4, len, 1)),
            sent: RowSet::all(len as u64),
            block: HostBuffer::zeroed(spec.kv_row_layout().bytes() * len as u64).unwrap(),
            sums: HostBuffer::zeroed(spec.gradient_row_layout().bytes() * len as u64).unwrap(),
            shard: RankShard {
                spec: Arc::new(spec),
                queries: rows.clone(),
                keys: rows,
                attention_mask: None,
                key_lists: None,
                most_block_rows: len as u64,
                most_query_rows: len as u64,
                leaves: None,
            },
        }
    }
}

/// Returns all rows in order; with `document`, in documents of that length.
fn rows_of(spec: &Spec, document: Option<usize>) -> Arc<Rows> {
    let ids = document
        .map(|len| Array2::from_shape_fn((1, spec.dims.q_len), |(_, row)| (row / len) as i32));
    let batch = Batch { q_segment_ids: ids.clone(), kv_segment_ids: ids, ..Batch::default() };
    let shard = annulus_plan::Layout::Contiguous.local_shard(
        &spec.dims,
        spec.alignment,
        Side::Q,
        0,
        1,
        &batch,
    );
    let mut rows = Rows::default();
    shard.expand(&RowSet::all(shard.rows.len()), &mut rows).unwrap();
    Arc::new(rows)
}

/// Runs forward and backward; returns the bytes that they allocate.
fn pass(workspace: &mut CpuWorkspace, t: &mut Tensors) -> usize {
    let mut out = t.q.clone();
    let mut lse = t.lines.clone();
    let (mut dq, mut dk, mut dv, mut dbias, mut dsinks) =
        (t.q.clone(), t.k.clone(), t.v.clone(), t.bias.clone(), t.sinks.clone());
    let mut tick = || ControlFlow::Continue(());
    let before = BYTES.load(Ordering::Relaxed);
    let inputs = Inputs {
        q: HostView::F32(t.q.view()),
        k: HostView::F32(t.k.view()),
        v: HostView::F32(t.v.view()),
        bias: t.shard.spec.bias.map(|_| HostView::F32(t.bias.view())),
        sinks: Some(HostView::F32(t.sinks.view())),
    };
    let mut forward =
        workspace.forward(inputs.as_ref().map(HostView::reborrow), &mut tick).unwrap();
    forward.local_kv(&mut t.block, &t.sent).unwrap();
    let block = Block { buffer: &t.block, ready: &(), rows: &t.shard.keys, first_local: None };
    let outputs =
        &mut Outputs::new(HostViewMut::F32(out.view_mut()), HostViewMut::F32(lse.view_mut()));
    forward.attend_last(&block, outputs, &mut tick).unwrap();
    forward.finish(outputs, &mut tick).unwrap();
    let inputs = BackwardInputs {
        forward: inputs,
        out: HostView::F32(out.view()),
        max: HostView::F32(lse.view()),
        sum: None,
        ties: None,
        dout: HostView::F32(t.q.view()),
        dlse: None,
        out_residual: None,
    };
    let mut backward = workspace.backward(inputs, BackwardMode::OnePass, &mut tick).unwrap();
    backward.attend_kv(&block, Some(&mut t.sums), &mut tick).unwrap();
    let mut gradients = Gradients {
        dq: HostViewMut::F32(dq.view_mut()),
        dk: HostViewMut::F32(dk.view_mut()),
        dv: HostViewMut::F32(dv.view_mut()),
        dbias: t.shard.spec.bias.map(|_| HostViewMut::F32(dbias.view_mut())),
        dsinks: Some(HostViewMut::F32(dsinks.view_mut())),
    };
    backward.finish(&t.sums, &mut gradients, &mut tick).unwrap();
    BYTES.load(Ordering::Relaxed) - before
}

/// The only test of this program, so that no other test allocates meanwhile.
#[test]
fn a_warm_pass_allocates_nothing_that_grows() {
    for (threads, bias) in [(1, true), (1, false), (3, true)] {
        let cpu = Cpu::new(threads).unwrap();
        let warm = [150, 900].map(|len| {
            let mut tensors = Tensors::new(len, bias);
            let mut workspace = cpu.workspace(&tensors.shard, Passes::Both).unwrap();
            let cold = pass(&mut workspace, &mut tensors);
            let warm = (0..3).map(|_| pass(&mut workspace, &mut tensors)).min().unwrap();
            assert!(warm <= cold);
            warm
        });
        // field lists of records, and a rayon job per thread and call
        assert!(warm.iter().all(|&bytes| bytes < 8192), "{threads} threads: {warm:?} bytes");
        if threads == 1 {
            assert_eq!(warm[0], warm[1], "bytes at 150 and 900 rows");
        }
    }
    wide_and_narrow_in_turn();
}

/// One workspace serves short documents, with shorter tasks in another order, and one long
/// document, in the same memory.
fn wide_and_narrow_in_turn() {
    for (threads, bias) in [(1, false), (3, true)] {
        let cpu = Cpu::new(threads).unwrap();
        let mut tensors = Tensors::new(1600, bias);
        let wide = tensors.shard.clone();
        let rows = rows_of(&wide.spec, Some(150));
        let narrow = RankShard { queries: rows.clone(), keys: rows, ..wide.clone() };
        let mut workspace = cpu.workspace(&wide, Passes::Both).unwrap();
        let mut allocated = Vec::new();
        for round in 0..3 {
            for shard in [&narrow, &wide] {
                tensors.shard = shard.clone();
                let before = BYTES.load(Ordering::Relaxed);
                workspace.update(shard).unwrap();
                let update = BYTES.load(Ordering::Relaxed) - before;
                let bytes = update + pass(&mut workspace, &mut tensors);
                // the first round builds and caches each batch's row indices
                allocated.extend((round > 0).then_some(bytes));
            }
        }
        assert!(
            allocated.iter().all(|&bytes| bytes < 8192),
            "{threads} threads: {allocated:?} bytes"
        );
    }
}
