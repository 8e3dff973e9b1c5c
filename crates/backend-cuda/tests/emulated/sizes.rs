//! Large sizes: offsets beyond 2³¹ and 2³² elements, and memory besides the caller's tensors.

use annulus::{Attention, Dims};
use annulus_core::{DType, Error, Gradients, Inputs, Outputs, Result};
use annulus_cuda::device::{CudaTensor, CudaView, CudaViewMut};
use annulus_cuda_emulator as emulator;
use half::bf16;
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

use crate::{
    common::{DEADLINE, ring},
    support::{backward_inputs, emulated, emulated_on, next_device},
};

/// Rows: with the strides of the test, the last one lies beyond 2³² elements.
const ROWS: usize = 130;
const BATCH: usize = 2;
const HEADS: usize = 2;
const DIM: usize = 32;

/// Reserved address space; pages are allocated when they are touched.
struct Sparse {
    start: *mut std::ffi::c_void,
    bytes: usize,
}

impl Sparse {
    fn new(bytes: usize) -> Result<Self> {
        let (both, lazy) =
            (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::NORESERVE);
        // SAFETY: a new mapping at an address that the system chooses.
        let start = unsafe { mmap_anonymous(std::ptr::null_mut(), bytes, both, lazy) };
        Ok(Self {
            start: start.map_err(|error| Error::Device {
                what: format!("{bytes} bytes of addresses: {error}"),
            })?,
            bytes,
        })
    }
}

impl Drop for Sparse {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`, and no longer used.
        unsafe { munmap(self.start, self.bytes) }.unwrap_or_default();
    }
}

/// Tensors `[batch, row, head, dim]` in memory of the test, `apart` elements from one to the next,
/// with these strides.
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

    /// Calls `visit` with the address of every element.
    fn each(&self, number: u64, heads: usize, mut visit: impl FnMut(*mut u8)) {
        for index in 0..BATCH * ROWS * heads * DIM {
            let [b, row, head, x] = [
                index / (DIM * heads * ROWS),
                index / (DIM * heads) % ROWS,
                index / DIM % heads,
                index % DIM,
            ];
            let offset: i64 = [b, row, head, x]
                .iter()
                .zip(self.strides)
                .map(|(&index, stride)| index as i64 * stride)
                .sum();
            visit((self.address(number) + offset as u64 * self.dtype.bytes() as u64) as *mut u8);
        }
    }

    fn fill(&self, number: u64, heads: usize) {
        let mut state = number + 1;
        self.each(number, heads, |at| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            let value = (state >> 40) as f32 / (1 << 23) as f32 - 1.0;
            // SAFETY: memory of the test, not used elsewhere now; the address is aligned to its
            // type.
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
        self.each(number, heads, |at| {
            for byte in 0..self.dtype.bytes() {
                // SAFETY: as above, after all work is done.
                bytes.push(unsafe { at.add(byte).read() });
            }
        });
        bytes
    }

    fn view(&self, number: u64, heads: usize) -> CudaView<'_> {
        // SAFETY: every element is host memory, as that of the emulated device, and outlives the
        // pass.
        unsafe {
            let shape = [BATCH, ROWS, heads, DIM];
            CudaView::from_raw(self.address(number), self.dtype, shape, self.strides)
        }
    }

    fn view_mut(&self, number: u64, heads: usize) -> CudaViewMut<'_> {
        // SAFETY: as above; no two elements overlap.
        unsafe {
            let shape = [BATCH, ROWS, heads, DIM];
            CudaViewMut::from_raw(self.address(number), self.dtype, shape, self.strides)
        }
    }

    /// Computes out, dQ, dK and dV of these tensors.
    fn attend(&self) -> Result<Vec<Vec<u8>>> {
        let cuda = emulated()?;
        let attention = Attention::new().causal(true).dtype(self.dtype);
        let mut ring =
            ring(&cuda, &attention, Dims { kv_heads: 1, ..Dims::new(BATCH, ROWS, HEADS, DIM) })?;
        [(0, HEADS), (1, 1), (2, 1), (3, HEADS)]
            .into_iter()
            .for_each(|(number, heads)| self.fill(number, heads));
        let mut lse =
            CudaTensor::uninitialized(cuda.stream(), DType::F32, [BATCH, HEADS, ROWS, 1])?;
        let inputs = Inputs::new(self.view(0, HEADS), self.view(1, 1), self.view(2, 1));
        ring.forward(&inputs, &mut Outputs::new(self.view_mut(4, HEADS), lse.view_mut()))?;
        let rows = [self.view(4, HEADS), lse.view(), self.view(3, HEADS)];
        let gradients =
            &mut Gradients::new(self.view_mut(5, HEADS), self.view_mut(6, 1), self.view_mut(7, 1));
        ring.backward(&backward_inputs(inputs, rows), gradients)?;
        cuda.stream().synchronize(DEADLINE)?;
        Ok([(4, HEADS), (5, HEADS), (6, 1), (7, 1)]
            .map(|(number, heads)| self.bytes(number, heads))
            .into())
    }
}

#[test]
fn offsets_past_two_to_the_31_and_32_elements_are_correct() {
    for dtype in [DType::F32, DType::Bf16] {
        // row 64 starts at 2³¹ elements, row 128 at 2³²; batch rows lie between rows, heads and
        // tensors close together
        let strides = [1 << 24, 1 << 25, 64, 1];
        let last = strides[0] + (ROWS as i64 - 1) * strides[1] + 8 * 4096;
        let memory = Sparse::new(last as usize * dtype.bytes()).unwrap();
        let far =
            Tensors { start: memory.start as u64, apart: 4096, strides, dtype }.attend().unwrap();
        let line = (HEADS * DIM) as i64;
        let mut memory = vec![0u64; 8 * BATCH * ROWS * HEADS * DIM];
        let near = Tensors {
            start: memory.as_mut_ptr() as u64,
            apart: (BATCH * ROWS * HEADS * DIM) as u64,
            strides: [ROWS as i64 * line, line, DIM as i64, 1],
            dtype,
        };
        let near = near.attend().unwrap();
        for (name, (far, near)) in ["out", "dq", "dk", "dv"].into_iter().zip(far.iter().zip(&near))
        {
            assert!(far == near && far.iter().any(|&byte| byte != 0), "{name} of {dtype}");
        }
    }
}

/// Peak bytes of a device during a pass over `len` rows, forward or also backward, besides the
/// caller's tensors; and the bytes of an output.
fn held(
    len: usize,
    dtype: DType,
    [heads, dim]: [usize; 2],
    backward: bool,
) -> Result<(usize, usize)> {
    let ordinal = next_device();
    let cuda = emulated_on(ordinal)?;
    let stream = cuda.stream();
    let attention = Attention::new().forward_only(!backward).dtype(dtype);
    let shape = [1, len, heads, dim];
    let bytes = shape.iter().product::<usize>() * dtype.bytes();
    let zeros = || CudaTensor::upload(stream, &vec![0; bytes], dtype, shape);
    let [q, k, v, dout] = [zeros()?, zeros()?, zeros()?, zeros()?];
    let [mut out, mut dq, mut dk, mut dv] = [zeros()?, zeros()?, zeros()?, zeros()?];
    let mut lse = CudaTensor::uninitialized(stream, DType::F32, [1, heads, len, 1])?;
    let tensors = emulator::most_bytes(ordinal);
    let mut ring = ring(&cuda, &attention, Dims::new(1, len, heads, dim))?;
    let inputs = Inputs::new(q.view(), k.view(), v.view());
    ring.forward(&inputs, &mut Outputs::new(out.view_mut(), lse.view_mut()))?;
    if backward {
        let inputs = backward_inputs(inputs, [out.view(), lse.view(), dout.view()]);
        ring.backward(&inputs, &mut Gradients::new(dq.view_mut(), dk.view_mut(), dv.view_mut()))?;
    }
    stream.synchronize(DEADLINE)?;
    Ok((emulator::most_bytes(ordinal) - tensors, bytes))
}

#[test]
fn memory_besides_tensors_grows_with_rows() {
    for dtype in [DType::F32, DType::Bf16] {
        let [(small, _), (large, tensor)] =
            [192, 384].map(|len| held(len, dtype, [HEADS, DIM], true).unwrap());
        assert!(large <= 2 * small, "{dtype}: {small} bytes, then {large}");
        // f32 sums and blocks: a few tensors
        assert!(
            large <= 8 * tensor * 4 / dtype.bytes(),
            "{dtype}: {large} bytes beside tensors of {tensor}"
        );
    }
}

#[test]
fn memory_of_block_masks_grows_with_rows() {
    // With these dims, 16 bytes for every pair of visible tiles of 32 rows (lists by query and by
    // key) would exceed the tensors.
    let lens = [1024, 2048];
    let [small, large] = lens.map(|len| held(len, DType::F32, [1, 1], false).unwrap().0);
    let grows_with_rows = |small: usize, large: usize| 10 * large <= 21 * small;
    assert!(grows_with_rows(small, large), "{small} bytes, then {large}");
    let [few, many] = lens.map(|len| 16 * (len / 32).pow(2));
    assert!(
        !grows_with_rows(small + few, large + many),
        "{small} bytes, then {large}: too many to tell"
    );
}
