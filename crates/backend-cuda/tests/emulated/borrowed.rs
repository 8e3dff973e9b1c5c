//! A caller's context and stream: all work uses them, and they are neither released nor destroyed.
//!
//! K and V of one rank are read where the caller has them, in both passes, and packed only for TMA
//! and only if it cannot read them; the last kernel of a forward pass writes the outputs. The bits
//! are the same, as they are for all strides.

use std::{
    ffi::{c_int, c_uint, c_void},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use annulus::{Attention, Dims};
use annulus_conformance::{Case, Draw, Masks, Setting, suite};
use annulus_core::{DType, Gradients, Inputs, Outputs, Result, Spec};
use annulus_cuda::{
    Cuda,
    device::{
        CudaTensor, CudaView, CudaViewMut, Device, Status, Stream, Symbols,
        cudarc::driver::sys::{CUcontext, CUdevice, CUfunction, CUstream},
    },
};
use annulus_cuda_emulator as emulator;
use annulus_plan::Layout;

use crate::{
    common::{DEADLINE, ring, staged},
    support::{backward_inputs, compiler, emulated_on, hopper_on, next_device},
    warpgroup_backward::{KEYS, QUERIES},
};

static RETAINED: AtomicUsize = AtomicUsize::new(0);
static RELEASED: AtomicUsize = AtomicUsize::new(0);
static DESTROYED: Mutex<Vec<usize>> = Mutex::new(Vec::new());
/// Streams of the kernel launches.
static USED: Mutex<Vec<usize>> = Mutex::new(Vec::new());

fn note(list: &Mutex<Vec<usize>>, stream: CUstream) {
    list.lock().unwrap_or_else(PoisonError::into_inner).push(stream as usize);
}

unsafe extern "C" fn retain(context: *mut CUcontext, device: CUdevice) -> Status {
    RETAINED.fetch_add(1, Ordering::Relaxed);
    // SAFETY: the arguments are those of the driver's function.
    unsafe { (emulator::symbols().context_retain)(context, device) }
}

unsafe extern "C" fn release(device: CUdevice) -> Status {
    RELEASED.fetch_add(1, Ordering::Relaxed);
    // SAFETY: the arguments are those of the driver's function.
    unsafe { (emulator::symbols().context_release)(device) }
}

unsafe extern "C" fn destroy(stream: CUstream) -> Status {
    note(&DESTROYED, stream);
    // SAFETY: the arguments are those of the driver's function.
    unsafe { (emulator::symbols().stream_destroy)(stream) }
}

unsafe extern "C" fn launch(
    function: CUfunction,
    x: c_uint,
    y: c_uint,
    z: c_uint,
    threads_x: c_uint,
    threads_y: c_uint,
    threads_z: c_uint,
    shared_bytes: c_uint,
    stream: CUstream,
    parameters: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> Status {
    note(&USED, stream);
    let [x, y, z, tx, ty, tz] = [x, y, z, threads_x, threads_y, threads_z];
    let launch = emulator::symbols().launch;
    // SAFETY: the arguments are those of the driver's function.
    unsafe { launch(function, x, y, z, tx, ty, tz, shared_bytes, stream, parameters, extra) }
}

#[test]
fn a_borrowed_context_and_stream_are_used_and_never_released() {
    let symbols = Symbols {
        context_retain: retain,
        context_release: release,
        stream_destroy: destroy,
        launch,
        ..emulator::symbols()
    };
    let lent = Mutex::new(Vec::new());
    let subject = staged("emulated cuda in lent streams", Duration::ZERO, || {
        let ordinal = next_device();
        let own = emulator::symbols();
        let mut context = std::ptr::null_mut();
        let mut stream = std::ptr::null_mut();
        // SAFETY: pointers to locals. Context and stream outlive the run.
        let stream = unsafe {
            assert_eq!((own.context_retain)(&raw mut context, ordinal as c_int), Status::SUCCESS);
            assert_eq!((own.context_set)(context), Status::SUCCESS);
            assert_eq!((own.stream_create)(&raw mut stream, 1), Status::SUCCESS);
            lent.lock().unwrap().push(stream as usize);
            Stream::borrowed(&Device::borrowed(symbols, ordinal, context)?, stream)
        };
        Ok(Cuda::on(stream, compiler()?))
    });
    let dims = Dims { kv_heads: 1, ..Dims::new(1, 70, 2, 16) };
    let masks = Masks { causal: true, ..Masks::default() };
    let case = Case::new("lent", Spec::new(dims, DType::F64), masks, &mut Draw::new(7))
        .in_dtype(DType::F16);
    suite::answer(&subject, &case, &Setting::new(2, Layout::Contiguous)).unwrap();

    let (lent, used, destroyed) =
        (lent.lock().unwrap(), USED.lock().unwrap(), DESTROYED.lock().unwrap());
    assert!(
        !used.is_empty() && used.iter().all(|stream| lent.contains(stream)),
        "{used:?} {lent:?}"
    );
    assert!(lent.iter().all(|stream| !destroyed.contains(stream)), "{destroyed:?} {lent:?}");
    assert_eq!((RETAINED.load(Ordering::Relaxed), RELEASED.load(Ordering::Relaxed)), (0, 0));
    for &stream in &*lent {
        // SAFETY: the stream was not destroyed.
        let code = unsafe { (emulator::symbols().stream_destroy)(stream as CUstream) };
        assert_eq!(code, Status::SUCCESS);
    }
}

const ROWS: usize = 150;
const HEADS: usize = 2;
const DIM: usize = 16;

/// Byte beside the elements of an output.
const BESIDE: u8 = 0x5a;

/// Elements between one head of a tensor and its next.
#[derive(Debug, Clone, Copy, Default)]
struct Gaps {
    kv: usize,
    /// Of q, dout, and out as an input.
    queries: usize,
    /// Of out as an output.
    out: usize,
}

/// A tensor `[1, ROWS, HEADS, dim + gap]`, of numbers or, without a `salt`, of [`BESIDE`].
struct Spaced {
    whole: CudaTensor,
    dim: usize,
    gap: usize,
}

impl Spaced {
    fn new(cuda: &Cuda, salt: Option<usize>, dim: usize, gap: usize) -> Result<Self> {
        let apart = dim + gap;
        let number = |index: usize, salt: usize| {
            let (row, x) = (index / apart, index % apart);
            // numbers beyond the dims are not those of a dense tensor
            let number = if x < dim { ((row * dim + x) * 7 + salt) % 23 } else { 1000 };
            half::bf16::from_f32(number as f32 * 0.1 - 1.0).to_ne_bytes()
        };
        let bytes: Vec<u8> = (0..ROWS * HEADS * apart)
            .flat_map(|index| salt.map_or([BESIDE; 2], |salt| number(index, salt)))
            .collect();
        let shape = [1, ROWS, HEADS, apart];
        let whole = CudaTensor::upload(cuda.stream(), &bytes, DType::Bf16, shape)?;
        Ok(Self { whole, dim, gap })
    }

    fn layout(&self) -> (u64, DType, [usize; 4], [i64; 4]) {
        let apart = self.dim + self.gap;
        let strides = [0, HEADS * apart, apart, 1].map(|stride| stride as i64);
        (self.whole.view().address(), DType::Bf16, [1, ROWS, HEADS, self.dim], strides)
    }

    fn view(&self) -> CudaView<'_> {
        let (address, dtype, shape, strides) = self.layout();
        // SAFETY: the first `dim` elements of each head.
        unsafe { CudaView::from_raw(address, dtype, shape, strides) }
    }

    fn view_mut(&mut self) -> CudaViewMut<'_> {
        let (address, dtype, shape, strides) = self.layout();
        // SAFETY: as for `view`, borrowed mutably.
        unsafe { CudaViewMut::from_raw(address, dtype, shape, strides) }
    }

    /// Returns the bytes of the elements; those beside them must be [`BESIDE`].
    fn own(&self) -> Result<Vec<u8>> {
        let mut own = Vec::new();
        for head in self.whole.download()?.chunks_exact(2 * (self.dim + self.gap)) {
            let (elements, beside) = head.split_at(2 * self.dim);
            assert!(beside.iter().all(|&byte| byte == BESIDE), "{}", self.gap);
            own.extend(elements);
        }
        Ok(own)
    }
}

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
fn attend(cuda: &Cuda, ordinal: usize, value_dim: usize, gaps: Gaps) -> Result<Results> {
    let attention = Attention::new().causal(true).dtype(DType::Bf16);
    let mut ring = ring(cuda, &attention, Dims { value_dim, ..Dims::new(1, ROWS, HEADS, DIM) })?;
    let q = Spaced::new(cuda, Some(1), DIM, gaps.queries)?;
    let k = Spaced::new(cuda, Some(2), DIM, gaps.kv)?;
    let v = Spaced::new(cuda, Some(3), value_dim, gaps.kv)?;
    let mut out = Spaced::new(cuda, None, value_dim, gaps.out)?;
    let mut lse = CudaTensor::uninitialized(cuda.stream(), DType::F32, [1, HEADS, ROWS, 1])?;
    let inputs = Inputs::new(q.view(), k.view(), v.view());
    ring.forward(&inputs, &mut Outputs::new(out.view_mut(), lse.view_mut()))?;
    cuda.stream().synchronize(DEADLINE)?;
    let blocks = |kernel| emulator::blocks(ordinal, kernel);
    let forward_blocks = ["copy_elements", "fill_sums", "finish_forward"].map(blocks);

    // not the output of these inputs: any numbers do
    let out_of_rows = Spaced::new(cuda, Some(4), value_dim, gaps.queries)?;
    let dout = Spaced::new(cuda, Some(5), value_dim, gaps.queries)?;
    let rows = [out_of_rows.view(), lse.view(), dout.view()];
    let dense = |dim| CudaTensor::uninitialized(cuda.stream(), DType::Bf16, [1, ROWS, HEADS, dim]);
    let [mut dq, mut dk, mut dv] = [dense(DIM)?, dense(DIM)?, dense(value_dim)?];
    let gradients = &mut Gradients::new(dq.view_mut(), dk.view_mut(), dv.view_mut());
    ring.backward(&backward_inputs(inputs, rows), gradients)?;
    cuda.stream().synchronize(DEADLINE)?;
    Ok(Results {
        out: out.own()?,
        gradients: [dq.download()?, dk.download()?, dv.download()?],
        forward_blocks,
        backward_copies: blocks("copy_elements") - forward_blocks[0],
    })
}

/// Results on a new device, and the device.
fn attend_on(on_warpgroups: bool, value_dim: usize, gaps: Gaps) -> (Results, usize) {
    let ordinal = next_device();
    let open = if on_warpgroups { hopper_on(ordinal, None, 0) } else { emulated_on(ordinal) };
    let cuda = open.expect("an emulated device");
    (attend(&cuda, ordinal, value_dim, gaps).expect("gradients"), ordinal)
}

#[test]
fn k_and_v_of_one_rank_are_copied_only_if_tma_cannot_read_them() {
    let dense = [false, true].map(|level| attend_on(level, DIM, Gaps::default()).0);
    // rows and heads at multiples of 16 bytes, and not
    for (on_warpgroups, kv, copies) in
        [(false, 0, false), (false, 4, false), (true, 0, false), (true, 8, false), (true, 4, true)]
    {
        let (got, _) = attend_on(on_warpgroups, DIM, Gaps { kv, ..Gaps::default() });
        let want = &dense[usize::from(on_warpgroups)];
        assert!(got.out == want.out && got.gradients == want.gradients, "{on_warpgroups} {kv}");
        let [copied, cleared, finished] = got.forward_blocks;
        assert_eq!(copied > 0, copies, "{on_warpgroups} {kv}");
        assert_eq!(got.backward_copies > 0, copies, "{on_warpgroups} {kv}");
        assert_eq!([cleared, finished], [0, 0]);
    }
}

/// delta is summed in one order, whether 16 bytes are loaded at once or not.
#[test]
fn gradients_do_not_depend_on_strides_of_queries() {
    let (dense, _) = attend_on(false, DIM, Gaps::default());
    for queries in [8, 4, 1] {
        let (got, _) = attend_on(false, DIM, Gaps { queries, ..Gaps::default() });
        assert!(got.out == dense.out && got.gradients == dense.gradients, "{queries}");
    }
}

/// One panel of values, and two.
#[test]
fn outputs_are_written_by_tma_or_threads_and_nothing_beside_them() {
    for value_dim in [16, 72] {
        let (dense, _) = attend_on(true, value_dim, Gaps::default());
        // heads at multiples of 16 bytes; heads that TMA cannot address
        for out in [8, 4] {
            let (got, _) = attend_on(true, value_dim, Gaps { out, ..Gaps::default() });
            assert!(got.out == dense.out, "{value_dim} {out}");
        }
    }
}

/// dK and dV of tensors that TMA cannot read run on tensor cores; dQ streams records and does not.
#[test]
fn tensors_that_tma_cannot_read_run_on_mma_sync() {
    let (dense, _) = attend_on(false, DIM, Gaps::default());
    let (got, ordinal) = attend_on(true, DIM, Gaps { queries: 1, kv: 0, out: 0 });
    let blocks = [QUERIES, KEYS].map(|names| names.map(|name| emulator::blocks(ordinal, name)));
    assert_eq!(blocks, [[4, 0, 0], [0, 0, 6]]);
    // dK and dV of the same kernel
    assert!(got.gradients[1..] == dense.gradients[1..]);
}
