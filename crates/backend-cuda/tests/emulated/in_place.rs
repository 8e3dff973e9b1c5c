//! K and V of one rank are read where the caller has them, and packed only for TMA and only if it
//! cannot read them; the last kernel writes the outputs. The bits are the same.

use annulus::{Attention, Dims, Ring};
use annulus_comm::{Deadline, Staged, threads};
use annulus_core::{DType, Inputs, Outputs, Result};
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

/// Bytes of out; then blocks of the kernels that copy K and V, clear the state, and finish.
fn forward(cuda: &Cuda, ordinal: usize, apart: usize) -> Result<(Vec<u8>, [u64; 3])> {
    let attention = Attention::new().causal(true).dtype(DType::Bf16);
    let copier = CudaCopier::new(cuda.stream().device())?;
    let staged = Staged::<_, CudaSpace>::new(threads::ring(1).remove(0), copier);
    let mut ring = Ring::new(
        cuda.clone(),
        Box::new(Deadline::new(staged, DEADLINE)?),
        attention.spec(Dims::new(1, ROWS, HEADS, DIM)),
        attention.ring_options(),
    )?;
    let [q, k, v] = [tensor(cuda, 1, DIM)?, tensor(cuda, 2, apart)?, tensor(cuda, 3, apart)?];
    let mut out = CudaTensor::uninitialized(cuda.stream(), DType::Bf16, [1, ROWS, HEADS, DIM])?;
    let mut lse = CudaTensor::uninitialized(cuda.stream(), DType::F32, [1, HEADS, ROWS, 1])?;
    let (k, v) = (view(&k, apart), view(&v, apart));
    let inputs = Inputs { q: q.view(), k, v, bias: None, sinks: None };
    let (out_view, lse) = (out.view_mut(), lse.view_mut());
    let mut outputs = Outputs { out: out_view, lse, max: None, sum: None, ties: None };
    ring.forward(&inputs, &mut outputs)?;
    cuda.stream().synchronize(DEADLINE)?;
    let kernels = ["copy_elements", "fill_sums", "finish_forward"];
    Ok((out.download()?, kernels.map(|kernel| emulator::blocks(ordinal, kernel))))
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
        let open = |ordinal| {
            if on_warpgroups { hopper_on(ordinal, 0, 0) } else { emulated_on(ordinal, &[]) }
        };
        let [one, other] = [next_device(), next_device()];
        let (got, [copied, cleared, finished]) = forward(&open(one).unwrap(), one, apart).unwrap();
        assert_eq!(copied > 0, copies, "{on_warpgroups} {apart}");
        assert_eq!([cleared, finished], [0, 0]);
        let (want, _) = forward(&open(other).unwrap(), other, DIM).unwrap();
        assert!(got == want, "{on_warpgroups} {apart}");
    }
}
