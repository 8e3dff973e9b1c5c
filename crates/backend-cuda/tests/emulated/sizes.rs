//! What is large: offsets past 2³¹ and 2³² elements, and memory beside a caller's tensors.

use annulus::{Attention, Dims, Ring};
use annulus_comm::{Deadline, Staged, cuda::CudaCopier, threads};
use annulus_core::{DType, Error, Gradients, Inputs, Outputs, Result, Saved};
use annulus_cuda::{
    Cuda,
    device::{CudaSpace, CudaTensor, CudaView, CudaViewMut, emulator},
};
use half::bf16;
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

use crate::{
    common::DEADLINE,
    support::{emulated, emulated_on, next_device},
};

/// Rows; with the strides below the last of them is past 2³² elements.
const ROWS: usize = 130;
const BATCH: usize = 2;
const HEADS: usize = 2;
const DIM: usize = 32;

/// A ring of one rank on `cuda`.
fn ring(cuda: &Cuda, attention: &Attention, dims: Dims) -> Result<Ring<Cuda>> {
    let staged = Staged::<_, CudaSpace>::new(threads::ring(1).remove(0), CudaCopier::new(cuda.stream().device())?);
    Ring::new(cuda.clone(), Box::new(Deadline::new(staged, DEADLINE)?), attention.spec(dims), attention.ring_options(None))
}

/// Address space that takes memory only where it is touched.
struct Sparse {
    start: *mut std::ffi::c_void,
    bytes: usize,
}

impl Sparse {
    fn new(bytes: usize) -> Result<Self> {
        let (both, lazy) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::NORESERVE);
        // SAFETY: new memory at an address of the system's choice.
        let start = unsafe { mmap_anonymous(std::ptr::null_mut(), bytes, both, lazy) };
        Ok(Self { start: start.map_err(|error| Error::Device { what: format!("{bytes} bytes of addresses: {error}") })?, bytes })
    }
}

impl Drop for Sparse {
    fn drop(&mut self) {
        // SAFETY: mapped by this, and nothing uses it any more.
        unsafe { munmap(self.start, self.bytes) }.unwrap_or_default();
    }
}

/// Tensors `[batch, row, head, dim]` in memory of the test's, one after another at `apart` elements, each with these strides.
struct Tensors {
    start: u64,
    apart: u64,
    strides: [i64; 4],
    dtype: DType,
}

impl Tensors {
    fn address(&self, number: u64) -> u64 {
        self.start + number * self.apart * self.dtype.bytes() as u64
    }

    /// Calls with the address of every element.
    fn each(&self, number: u64, heads: usize, mut visit: impl FnMut(*mut u8)) {
        for place in 0..BATCH * ROWS * heads * DIM {
            let [b, row, head, x] = [place / (DIM * heads * ROWS), place / (DIM * heads) % ROWS, place / DIM % heads, place % DIM];
            let offset: i64 = [b, row, head, x].iter().zip(self.strides).map(|(&index, stride)| index as i64 * stride).sum();
            visit((self.address(number) + offset as u64 * self.dtype.bytes() as u64) as *mut u8);
        }
    }

    fn fill(&self, number: u64, heads: usize) {
        let mut state = number + 1;
        self.each(number, heads, |at| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let value = (state >> 40) as f32 / (1 << 23) as f32 - 1.0;
            // SAFETY: the memory is the test's, and nothing else uses it now; the address is aligned to its type.
            unsafe {
                match self.dtype {
                    DType::F32 => at.cast::<f32>().write(value),
                    _ => at.cast::<bf16>().write(bf16::from_f32(value)),
                }
            }
        });
    }

    fn bytes(&self, number: u64, heads: usize) -> Vec<u8> {
        let mut bytes = Vec::new();
        // SAFETY: as above, once all work is done.
        self.each(number, heads, |at| bytes.extend((0..self.dtype.bytes()).map(|byte| unsafe { at.add(byte).read() })));
        bytes
    }

    fn view(&self, number: u64, heads: usize) -> CudaView<'_> {
        // SAFETY: every element is memory of the emulated device's host, which outlives the pass.
        unsafe { CudaView::from_raw(self.address(number), self.dtype, [BATCH, ROWS, heads, DIM], self.strides) }
    }

    fn view_mut(&self, number: u64, heads: usize) -> CudaViewMut<'_> {
        // SAFETY: as above; no two elements are the same memory.
        unsafe { CudaViewMut::from_raw(self.address(number), self.dtype, [BATCH, ROWS, heads, DIM], self.strides) }
    }

    /// out, dq, dk, dv of a forward and a backward pass over these tensors.
    fn attend(&self) -> Result<Vec<Vec<u8>>> {
        let cuda = emulated(&[])?;
        let attention = Attention::new().causal().dtype(self.dtype);
        let mut ring = ring(&cuda, &attention, Dims { kv_heads: 1, ..Dims::new(BATCH, ROWS, HEADS, DIM) })?;
        [(0, HEADS), (1, 1), (2, 1), (3, HEADS)].into_iter().for_each(|(number, heads)| self.fill(number, heads));
        let mut lse = CudaTensor::uninitialized(cuda.stream(), DType::F32, [BATCH, HEADS, ROWS, 1])?;
        let inputs = Inputs { q: self.view(0, HEADS), k: self.view(1, 1), v: self.view(2, 1), bias: None, sinks: None };
        let mut outputs = Outputs { out: self.view_mut(4, HEADS), lse: lse.view_mut(), max: None, sum: None, ties: None };
        ring.forward(&inputs, &mut outputs)?;
        let saved = Saved { out: self.view(4, HEADS), lse: lse.view(), max: None, ties: None, dout: self.view(3, HEADS), dlse: None };
        let (dq, dk, dv) = (self.view_mut(5, HEADS), self.view_mut(6, 1), self.view_mut(7, 1));
        ring.backward(&inputs, &saved, &mut Gradients { dq, dk, dv, dbias: None, dsinks: None })?;
        cuda.stream().synchronize(DEADLINE)?;
        Ok([(4, HEADS), (5, HEADS), (6, 1), (7, 1)].map(|(number, heads)| self.bytes(number, heads)).into())
    }
}

#[test]
fn offsets_past_two_to_the_31_and_32_elements_reach_what_they_name() {
    for dtype in [DType::F32, DType::Bf16] {
        // row 64 is at 2³¹ elements, row 128 at 2³²; batch rows lie between rows, heads and tensors close together
        let strides = [1 << 24, 1 << 25, 64, 1];
        let last = strides[0] + (ROWS as i64 - 1) * strides[1] + 8 * 4096;
        let memory = Sparse::new(last as usize * dtype.bytes()).unwrap();
        let far = Tensors { start: memory.start as u64, apart: 4096, strides, dtype }.attend().unwrap();
        let line = (HEADS * DIM) as i64;
        let mut memory = vec![0u64; 8 * BATCH * ROWS * HEADS * DIM];
        let near = Tensors {
            start: memory.as_mut_ptr() as u64,
            apart: (BATCH * ROWS * HEADS * DIM) as u64,
            strides: [ROWS as i64 * line, line, DIM as i64, 1],
            dtype,
        };
        let near = near.attend().unwrap();
        for (name, (far, near)) in ["out", "dq", "dk", "dv"].into_iter().zip(far.iter().zip(&near)) {
            assert!(far == near && far.iter().any(|&byte| byte != 0), "{name} of {dtype}");
        }
    }
}

/// Bytes that a device holds at most during a forward pass over `len` rows, and a backward pass if asked, beside the caller's tensors, and those of an
/// output.
fn held(len: usize, dtype: DType, [heads, dim]: [usize; 2], backward: bool) -> Result<(usize, usize)> {
    let ordinal = next_device();
    let cuda = emulated_on(ordinal, &[])?;
    let stream = cuda.stream();
    let attention = if backward { Attention::new() } else { Attention::new().forward_only() }.dtype(dtype);
    let shape = [1, len, heads, dim];
    let zeros = || CudaTensor::upload(stream, &vec![0; shape.iter().product::<usize>() * dtype.bytes()], dtype, shape);
    let (q, k, v, dout) = (zeros()?, zeros()?, zeros()?, zeros()?);
    let (mut out, mut dq, mut dk, mut dv) = (zeros()?, zeros()?, zeros()?, zeros()?);
    let mut lse = CudaTensor::uninitialized(stream, DType::F32, [1, heads, len, 1])?;
    let tensors = emulator::most_bytes(ordinal);
    let mut ring = ring(&cuda, &attention, Dims::new(1, len, heads, dim))?;
    let inputs = Inputs { q: q.view(), k: k.view(), v: v.view(), bias: None, sinks: None };
    ring.forward(&inputs, &mut Outputs { out: out.view_mut(), lse: lse.view_mut(), max: None, sum: None, ties: None })?;
    if backward {
        let saved = Saved { out: out.view(), lse: lse.view(), max: None, ties: None, dout: dout.view(), dlse: None };
        let gradients = &mut Gradients { dq: dq.view_mut(), dk: dk.view_mut(), dv: dv.view_mut(), dbias: None, dsinks: None };
        ring.backward(&inputs, &saved, gradients)?;
    }
    stream.synchronize(DEADLINE)?;
    Ok((emulator::most_bytes(ordinal) - tensors, shape.iter().product::<usize>() * dtype.bytes()))
}

#[test]
fn memory_beside_tensors_is_that_of_rows() {
    for dtype in [DType::F32, DType::Bf16] {
        let [(small, _), (large, tensor)] = [192, 384].map(|len| held(len, dtype, [HEADS, DIM], true).unwrap());
        assert!(large <= 2 * small, "{dtype}: {small} bytes, then {large}");
        // sums in f32 and blocks: a few tensors' worth
        assert!(large <= 8 * tensor * 4 / dtype.bytes(), "{dtype}: {large} bytes beside tensors of {tensor}");
    }
}

#[test]
fn memory_of_lists_of_tiles_is_that_of_rows() {
    // rows so slim that numbers for every two tiles of 32 rows that see each other would show beside them: 16 bytes, for lists by both sides
    let lens = [1024, 2048];
    let [small, large] = lens.map(|len| held(len, DType::F32, [1, 1], false).unwrap().0);
    let grows_with_rows = |small: usize, large: usize| 10 * large <= 21 * small;
    assert!(grows_with_rows(small, large), "{small} bytes, then {large}");
    let [few, many] = lens.map(|len| 16 * (len / 32).pow(2));
    assert!(!grows_with_rows(small + few, large + many), "{small} bytes, then {large}: too many to tell");
}
