//! K and V of one rank are read where the caller has them, in both passes, and packed only for TMA
//! and only if it cannot read them; the last kernel of a forward pass writes the outputs. The bits
//! are the same, as they are for all strides.

use annulus::{Attention, Dims, Ring, Setup};
use annulus_comm::{Deadline, Staged, threads};
use annulus_core::{BackwardInputs, DType, Gradients, Inputs, Outputs, Result};
use annulus_cuda::{
    Cuda,
    device::{CudaCopier, CudaSpace, CudaTensor, CudaView},
};
use annulus_cuda_emulator as emulator;

use crate::{
    common::DEADLINE,
    support::{emulated_on, hopper_on, next_device},
};

const ROWS: usize = 150;
const HEADS: usize = 2;
const DIM: usize = 16;

/// A tensor `[1, ROWS, HEADS, DIM]` with `apart` elements from one head to the next.
fn tensor(cuda: &Cuda, salt: usize, apart: usize) -> Result<CudaTensor> {
    let number = |index: usize| {
        let (row, x) = (index / apart, index % apart);
        // numbers beyond the dims are not those of a dense tensor
        if x < DIM { ((row * DIM + x) * 7 + salt) % 23 } else { 1000 }
    };
    let bytes: Vec<u8> = (0..ROWS * HEADS * apart)
        .flat_map(|index| half::bf16::from_f32(number(index) as f32 * 0.1 - 1.0).to_ne_bytes())
        .collect();
    CudaTensor::upload(cuda.stream(), &bytes, DType::Bf16, [1, ROWS, HEADS, apart])
}

fn view(tensor: &CudaTensor, apart: usize) -> CudaView<'_> {
    let strides = [0, HEADS * apart, apart, 1].map(|stride| stride as i64);
    // SAFETY: the tensor has `apart` elements for each head, of which these are the first.
    unsafe {
        CudaView::from_raw(tensor.view().address(), DType::Bf16, [1, ROWS, HEADS, DIM], strides)
    }
}

/// Elements from one head of a tensor to its next.
#[derive(Debug, Clone, Copy)]
struct Apart {
    kv: usize,
    /// Of q, out and dout.
    queries: usize,
}

const DENSE: Apart = Apart { kv: DIM, queries: DIM };

/// Results of both passes.
struct Results {
    /// Bytes of out.
    out: Vec<u8>,
    /// Bytes of dq, dk and dv.
    gradients: [Vec<u8>; 3],
    /// Blocks of the kernels that copy K and V, clear the state, and finish, of the forward pass.
    forward_blocks: [u64; 3],
    /// Blocks of the kernel that copies K and V in the backward pass.
    backward_copies: u64,
}

/// Runs both passes on device `ordinal`.
fn attend(cuda: &Cuda, ordinal: usize, apart: Apart) -> Result<Results> {
    let setup = Setup::from(Attention::new().causal(true).dtype(DType::Bf16));
    let copier = CudaCopier::new(cuda.stream().device())?;
    let staged = Staged::<_, CudaSpace>::new(threads::ring(1).remove(0), copier);
    let mut ring = Ring::new(
        cuda.clone(),
        Box::new(Deadline::new(staged, DEADLINE)?),
        setup.spec(Dims::new(1, ROWS, HEADS, DIM)),
        setup.ring_options(),
    )?;
    let dense = || CudaTensor::uninitialized(cuda.stream(), DType::Bf16, [1, ROWS, HEADS, DIM]);
    let q = tensor(cuda, 1, apart.queries)?;
    let [k, v] = [tensor(cuda, 2, apart.kv)?, tensor(cuda, 3, apart.kv)?];
    let mut out = dense()?;
    let mut lse = CudaTensor::uninitialized(cuda.stream(), DType::F32, [1, HEADS, ROWS, 1])?;
    let (k, v) = (view(&k, apart.kv), view(&v, apart.kv));
    let inputs = Inputs { q: view(&q, apart.queries), k, v, bias: None, sinks: None };
    let (out_view, lse_view) = (out.view_mut(), lse.view_mut());
    let mut outputs = Outputs {
        out: out_view,
        lse: lse_view,
        max: None,
        sum: None,
        ties: None,
        out_residual: None,
    };
    ring.forward(&inputs, &mut outputs)?;
    cuda.stream().synchronize(DEADLINE)?;
    let blocks = |kernel| emulator::blocks(ordinal, kernel);
    let forward_blocks = ["copy_elements", "fill_sums", "finish_forward"].map(blocks);

    // not the output of these inputs: any numbers do
    let [out_of_rows, dout] = [tensor(cuda, 4, apart.queries)?, tensor(cuda, 5, apart.queries)?];
    let inputs = BackwardInputs {
        forward: inputs,
        out: view(&out_of_rows, apart.queries),
        max: lse.view(),
        sum: None,
        ties: None,
        dout: view(&dout, apart.queries),
        dlse: None,
        out_residual: None,
    };
    let [mut dq, mut dk, mut dv] = [dense()?, dense()?, dense()?];
    let mut gradients = Gradients {
        dq: dq.view_mut(),
        dk: dk.view_mut(),
        dv: dv.view_mut(),
        dbias: None,
        dsinks: None,
    };
    ring.backward(&inputs, &mut gradients)?;
    cuda.stream().synchronize(DEADLINE)?;
    Ok(Results {
        out: out.download()?,
        gradients: [dq.download()?, dk.download()?, dv.download()?],
        forward_blocks,
        backward_copies: blocks("copy_elements") - forward_blocks[0],
    })
}

fn open(on_warpgroups: bool, ordinal: usize) -> Cuda {
    if on_warpgroups { hopper_on(ordinal, None, 0) } else { emulated_on(ordinal) }
        .expect("an emulated device")
}

/// Results with strides, and bits as with dense tensors.
fn attend_as_dense(on_warpgroups: bool, apart: Apart) -> Results {
    let [one, other] = [next_device(), next_device()];
    let got = attend(&open(on_warpgroups, one), one, apart).expect("gradients");
    let want = attend(&open(on_warpgroups, other), other, DENSE).expect("gradients");
    assert!(got.out == want.out, "{on_warpgroups} {apart:?}");
    assert!(got.gradients == want.gradients, "{on_warpgroups} {apart:?}");
    got
}

#[test]
fn k_and_v_of_one_rank_are_copied_only_if_tma_cannot_read_them() {
    // rows and heads at multiples of 16 bytes, and not
    for (on_warpgroups, apart, copies) in [
        (false, DIM, false),
        (false, 20, false),
        (true, DIM, false),
        (true, 24, false),
        (true, 20, true),
    ] {
        let got = attend_as_dense(on_warpgroups, Apart { kv: apart, ..DENSE });
        let [copied, cleared, finished] = got.forward_blocks;
        assert_eq!(copied > 0, copies, "{on_warpgroups} {apart}");
        assert_eq!(got.backward_copies > 0, copies, "{on_warpgroups} {apart}");
        assert_eq!([cleared, finished], [0, 0]);
    }
}

/// delta is summed in one order, whether 16 bytes are loaded at once or not.
#[test]
fn gradients_do_not_depend_on_strides_of_queries() {
    for queries in [24, 20, 17] {
        attend_as_dense(false, Apart { queries, ..DENSE });
    }
}
