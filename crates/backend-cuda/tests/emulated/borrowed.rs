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
        CudaTensor, CudaView, Device, Status, Stream, Symbols,
        cudarc::driver::sys::{CUcontext, CUdevice, CUfunction, CUstream},
    },
};
use annulus_cuda_emulator as emulator;
use annulus_plan::Layout;

use crate::{
    common::{DEADLINE, ring, staged},
    support::{backward_inputs, compiler, emulated_on, hopper_on, next_device},
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
    let attention = Attention::new().causal(true).dtype(DType::Bf16);
    let mut ring = ring(cuda, &attention, Dims::new(1, ROWS, HEADS, DIM))?;
    let dense = || CudaTensor::uninitialized(cuda.stream(), DType::Bf16, [1, ROWS, HEADS, DIM]);
    let q = tensor(cuda, 1, apart.queries)?;
    let [k, v] = [tensor(cuda, 2, apart.kv)?, tensor(cuda, 3, apart.kv)?];
    let mut out = dense()?;
    let mut lse = CudaTensor::uninitialized(cuda.stream(), DType::F32, [1, HEADS, ROWS, 1])?;
    let inputs = Inputs::new(view(&q, apart.queries), view(&k, apart.kv), view(&v, apart.kv));
    ring.forward(&inputs, &mut Outputs::new(out.view_mut(), lse.view_mut()))?;
    cuda.stream().synchronize(DEADLINE)?;
    let blocks = |kernel| emulator::blocks(ordinal, kernel);
    let forward_blocks = ["copy_elements", "fill_sums", "finish_forward"].map(blocks);

    // not the output of these inputs: any numbers do
    let [out_of_rows, dout] = [tensor(cuda, 4, apart.queries)?, tensor(cuda, 5, apart.queries)?];
    let rows = [view(&out_of_rows, apart.queries), lse.view(), view(&dout, apart.queries)];
    let [mut dq, mut dk, mut dv] = [dense()?, dense()?, dense()?];
    let gradients = &mut Gradients::new(dq.view_mut(), dk.view_mut(), dv.view_mut());
    ring.backward(&backward_inputs(inputs, rows), gradients)?;
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
