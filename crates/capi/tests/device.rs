//! Plans in a CUDA stream of the host's, on tensors in device memory, on the emulated device: the
//! numbers of the CPU, staged and over a communicator of NCCL; and refusals.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::{
    ffi::c_int,
    path::PathBuf,
    ptr,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
};

use annulus::{
    Attention, Batch, DType, Dims, Result,
    backend::cuda::device::{
        CudaTensor, Device, Status, Stream,
        cudarc::driver::sys::{CUcontext, CUstream},
        nccl::{RawCommunicator, UniqueId},
    },
    comm::threads::{Threads, each_rank, ring},
    half::f16,
    ndarray::{Array, Array3, Array4, Dimension},
};
use annulus_capi::*;
use annulus_core::{Control, Element, Host, Incoming, Outgoing, Transport};
use annulus_cuda_emulator as emulator;
use common::{PassInputs, args, attention, last_error, ok, rows};

const DIMS: Dims =
    Dims { batch: 1, q_len: 70, kv_len: 70, q_heads: 4, kv_heads: 2, head_dim: 16, value_dim: 16 };

/// A context and a stream that a host has made.
struct Gpu {
    ordinal: usize,
    context: CUcontext,
    handle: CUstream,
    stream: Stream,
}

impl Gpu {
    /// Takes a device of its own, so that a failure affects one test only.
    fn new() -> Self {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        emulate_cuda(PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("emulated-kernels"));
        let ordinal = NEXT.fetch_add(1, Ordering::Relaxed) % emulator::DEVICES;
        let symbols = emulator::symbols();
        let (mut context, mut handle) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: pointers to locals; context and stream outlive everything made of them
        unsafe {
            let retained = (symbols.context_retain)(&raw mut context, ordinal as c_int);
            assert_eq!(retained, Status::SUCCESS);
            assert_eq!((symbols.context_set)(context), Status::SUCCESS);
            assert_eq!((symbols.stream_create)(&raw mut handle, 1), Status::SUCCESS);
            let device = Device::borrowed(symbols, ordinal, context).unwrap();
            Self { ordinal, context, handle, stream: Stream::borrowed(&device, handle) }
        }
    }

    fn upload<T: Element, D: Dimension>(&self, array: &Array<T, D>) -> CudaTensor {
        let mut shape = [1; 4];
        shape[..array.ndim()].copy_from_slice(array.shape());
        let bytes = bytemuck::cast_slice(array.as_slice().unwrap());
        CudaTensor::upload(&self.stream, bytes, T::DTYPE, shape).unwrap()
    }
}

/// Numbers of a tensor in device memory.
fn downloaded<T: Element>(tensor: &CudaTensor) -> Array4<f64> {
    let numbers = bytemuck::pod_collect_to_vec::<u8, T>(&tensor.download().unwrap());
    let numbers = numbers.iter().map(|number| number.to_f64()).collect();
    Array::from_shape_vec(tensor.view().shape(), numbers).unwrap()
}

/// The tensor of C for a tensor in device memory.
fn described(tensor: &CudaTensor) -> annulus_tensor {
    let view = tensor.view();
    annulus_tensor {
        data: ptr::with_exposed_provenance_mut(view.address() as usize),
        dtype: if view.dtype() == DType::F16 { ANNULUS_F16 } else { ANNULUS_F32 },
        dims: view.shape().map(|len| len as i64),
        strides: view.strides(),
    }
}

fn options(dtype: i32, ordinal: usize) -> annulus_options {
    annulus_options {
        dtype,
        causal: 1,
        backend: ANNULUS_BACKEND_CUDA,
        has_device: 1,
        device: ordinal as i64,
        ..common::options(DIMS)
    }
}

/// An endpoint that counts the bytes of tensors that it sends.
struct Counted {
    inner: Threads,
    bytes: Arc<AtomicU64>,
}

impl Control for Counted {
    annulus::comm::forward_control! {
        rank ranks start_all_gather try_all_gather stragglers abort heartbeat placement
        last_heard last_work
    }
}

impl Transport<Host> for Counted {
    annulus::comm::forward_transport! {
        progress take pending bytes_sent posts_ahead runs_groups_in_order
    }

    fn post(
        &mut self,
        sends: &[Outgoing<'_, Host>],
        receives: &mut Vec<Incoming<Host>>,
    ) -> Result<()> {
        let bytes = sends.iter().map(|send| send.header.bytes()).sum();
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        self.inner.post(sends, receives)
    }
}

/// Runs `rank` on a thread for each of `ranks` ranks. Returns the results in their order, and the
/// bytes of tensors that went through host memory.
fn on_all(ranks: usize, rank: impl Fn(Counted) -> Share + Sync) -> (Vec<Share>, u64) {
    let bytes = Arc::new(AtomicU64::new(0));
    let endpoints = ring(ranks).into_iter();
    let endpoints = endpoints.map(|inner| Counted { inner, bytes: Arc::clone(&bytes) });
    let shares = each_rank(endpoints, |_, endpoint| Ok(rank(endpoint))).unwrap();
    (shares, bytes.load(Ordering::Relaxed))
}

/// Transport of the blocks of a rank.
enum Link {
    Alone,
    Staged(Counted),
    Nccl(Counted, RawCommunicator),
}

/// Rows of a rank, and its out, dq, dk and dv.
type Share = (Vec<i64>, [Array4<f64>; 4]);

/// Plans and runs both passes of one rank on `gpu`.
fn passes<T: Element>(gpu: &Gpu, link: Link, starts: bool) -> Share {
    let dtype = if T::DTYPE == DType::F16 { ANNULUS_F16 } else { ANNULUS_F32 };
    let attention = attention(&options(dtype, gpu.ordinal));
    let mut plan = ptr::null_mut();
    // SAFETY: pointers to locals; the context and the stream live to the end of the test
    unsafe {
        ok(annulus_attention_set_cuda_stream(attention, gpu.context.cast(), gpu.handle.cast()));
        match link {
            Link::Alone => ok(annulus_plan_create_threads(attention, 1, &raw mut plan)),
            Link::Staged(endpoint) => ok(plan_over(attention, endpoint, &mut plan)),
            Link::Nccl(endpoint, communicator) => {
                ok(annulus_attention_set_nccl_communicator(attention, communicator.cast()));
                ok(plan_over(attention, endpoint, &mut plan));
            }
        }
    }
    ok(annulus_attention_destroy(attention));
    let (rows, mut bytes) = (rows(plan), 0);
    // SAFETY: a pointer to a local
    ok(unsafe { annulus_plan_workspace_bytes(plan, &raw mut bytes) });
    // the accumulators alone
    assert!(bytes >= (rows.len() * DIMS.q_heads * DIMS.value_dim * 4) as u64, "{bytes}");

    let inputs = PassInputs::<T>::of(DIMS, &rows);
    let [q, k, v, dout] =
        [&inputs.q, &inputs.k, &inputs.v, &inputs.dout].map(|array| gpu.upload(array));
    let zeros =
        |heads| gpu.upload(&Array4::from_elem((1, rows.len(), heads, 16), T::from_f64(0.0)));
    let [out, dq] = [(); 2].map(|()| zeros(DIMS.q_heads));
    let [dk, dv] = [(); 2].map(|()| zeros(DIMS.kv_heads));
    let lse = gpu.upload(&Array3::<f32>::zeros((1, DIMS.q_heads, rows.len())));
    let inputs = [&q, &k, &v, &dout].map(described);
    let outputs = [&out, &lse].map(described);
    let gradients = [&dq, &dk, &dv].map(described);
    let (forward, backward) = args(inputs.each_ref(), outputs.each_ref(), gradients.each_ref());
    // SAFETY: the tensors are in memory of the device and outlive the calls
    unsafe {
        ok(annulus_plan_update(plan, ptr::null()));
        if starts {
            ok(annulus_forward_start(plan, &raw const forward));
            ok(annulus_plan_wait(plan));
            ok(annulus_backward_start(plan, &raw const backward));
            ok(annulus_plan_wait(plan));
        } else {
            ok(annulus_forward(plan, &raw const forward));
            ok(annulus_backward(plan, &raw const backward));
        }
        // a tensor of another type is refused by name, before anything is done
        let wrong = annulus_tensor { dtype: ANNULUS_BF16, ..inputs[2] };
        let refused = annulus_forward_args { v: &raw const wrong, ..forward };
        assert_eq!(annulus_forward(plan, &raw const refused), ANNULUS_INVALID_ARGUMENT);
        assert!(last_error().starts_with("v: got bf16"), "{}", last_error());
    }
    let results = [&out, &dq, &dk, &dv].map(downloaded::<T>);
    ok(annulus_plan_destroy(plan));
    (rows, results)
}

/// Compares the shares of all ranks with the CPU's answer.
fn compare<T: Element>(shares: &[Share], tolerance: f64) {
    let causal = Attention::new().causal(true);
    let inputs = PassInputs::<T>::all(DIMS);
    let (forward, gradients) = inputs.by_facade(&causal, DIMS, 1, &Batch::default());
    let want = [&forward.out, &gradients.dq, &gradients.dk, &gradients.dv];
    assert_eq!(shares.iter().map(|(rows, _)| rows.len()).sum::<usize>(), DIMS.q_len);
    for (rows, results) in shares {
        for ((name, got), want) in ["out", "dq", "dk", "dv"].iter().zip(results).zip(want) {
            for ((b, i, h, c), &got) in got.indexed_iter() {
                let want = want[[b, rows[i] as usize, h, c]].to_f64();
                assert!((got - want).abs() <= tolerance, "{name}: {got}, want {want}");
            }
        }
    }
}

#[test]
fn one_rank_computes_in_the_stream_of_the_host() {
    let gpu = Gpu::new();
    compare::<f32>(&[passes::<f32>(&gpu, Link::Alone, false)], 1e-5);
    compare::<f16>(&[passes::<f16>(&gpu, Link::Alone, true)], 4e-3);
}

#[test]
fn a_ring_stages_its_blocks_in_host_memory() {
    let (shares, bytes) =
        on_all(3, |endpoint| passes::<f32>(&Gpu::new(), Link::Staged(endpoint), false));
    compare::<f32>(&shares, 1e-5);
    // a third of the keys and values, 23·2·32·4 bytes, from a rank at least
    assert!(bytes >= 5888, "{bytes}");
}

#[test]
fn blocks_travel_over_the_communicator_of_the_host() {
    let symbols = emulator::nccl_symbols();
    let mut id = UniqueId([0; UniqueId::BYTES]);
    // SAFETY: a pointer to a local
    assert_eq!(unsafe { (symbols.unique_id)(&raw mut id) }, 0);
    let (shares, bytes) = on_all(2, |endpoint| {
        let gpu = Gpu::new();
        let mut communicator = ptr::null_mut();
        // SAFETY: a pointer to a local; the emulator does not read the last one
        unsafe {
            let rank = endpoint.rank() as c_int;
            let made = (symbols.init_rank)(&raw mut communicator, 2, id, rank, ptr::null_mut());
            assert!([0, 7].contains(&made), "{made}");
        }
        let share = passes::<f32>(&gpu, Link::Nccl(endpoint, communicator), false);
        // SAFETY: the host's own, and its plans are destroyed
        assert_eq!(unsafe { (symbols.destroy)(communicator) }, 0);
        share
    });
    compare::<f32>(&shares, 1e-5);
    // no block among the messages of the host: half of the keys and values are 35·2·32·4 bytes
    assert!(bytes < 8960, "{bytes}");
}

#[test]
fn handles_without_meaning_are_refused() {
    let gpu = Gpu::new();
    let (mut attention, mut plan) = (ptr::null_mut(), ptr::null_mut());
    let one = gpu.context.cast::<std::ffi::c_void>();
    let refuses = |status: i32, text: &str| {
        assert_eq!(status, ANNULUS_INVALID_ARGUMENT);
        assert!(last_error().starts_with(text), "{}", last_error());
    };
    // SAFETY: pointers to locals; nothing reads the handles that are refused
    unsafe {
        for (change, text) in [
            ((|o| o.backend = ANNULUS_BACKEND_CPU) as fn(&mut annulus_options), "backend: got cpu"),
            (|_| {}, "device: got none"),
        ] {
            let mut options = options(ANNULUS_F32, 0);
            options.has_device = 0;
            change(&mut options);
            ok(annulus_attention_create(&raw const options, &raw mut attention));
            refuses(annulus_attention_set_cuda_stream(attention, one, ptr::null_mut()), text);
            ok(annulus_attention_destroy(attention));
        }
        let options = options(ANNULUS_F32, gpu.ordinal);
        ok(annulus_attention_create(&raw const options, &raw mut attention));
        let null = ptr::null_mut();
        refuses(annulus_attention_set_nccl_communicator(attention, one), "stream: got none");
        refuses(annulus_attention_set_cuda_stream(attention, null, null), "context: got NULL");
        ok(annulus_attention_set_cuda_stream(attention, one, gpu.handle.cast()));
        refuses(annulus_attention_set_nccl_communicator(attention, null), "communicator: got NULL");
        // rows of whole tensors would have to be copied on the device
        let status = annulus_plan_create_threads(attention, 2, &raw mut plan);
        assert_eq!((status, plan), (ANNULUS_UNSUPPORTED, ptr::null_mut()));
        assert!(last_error().contains("tensors in device memory"), "{}", last_error());
        ok(annulus_attention_destroy(attention));
        let of_cache = annulus_options { q_len: 0, kv_len: 0, ..options };
        ok(annulus_attention_create(&raw const of_cache, &raw mut attention));
        ok(annulus_attention_set_cuda_stream(attention, one, gpu.handle.cast()));
        let mut cache = ptr::null_mut();
        let status = annulus_cache_create_threads(attention, 1, &raw mut cache);
        assert_eq!((status, cache), (ANNULUS_UNSUPPORTED, ptr::null_mut()));
        let why = "tensors in device memory is not supported by the KV cache";
        assert!(last_error().contains(why), "{}", last_error());
        ok(annulus_attention_destroy(attention));

        // the exchanges of other strategies are for tensors in host memory
        let strategy = ANNULUS_STRATEGY_HEADS_RING;
        let divided = annulus_options { strategy, strategy_heads: 1, ..options };
        ok(annulus_attention_create(&raw const divided, &raw mut attention));
        ok(annulus_attention_set_cuda_stream(attention, one, gpu.handle.cast()));
        let status = annulus_plan_create_threads(attention, 1, &raw mut plan);
        assert_eq!((status, plan), (ANNULUS_UNSUPPORTED, ptr::null_mut()));
        assert!(last_error().starts_with("strategy heads:1"), "{}", last_error());
        ok(annulus_attention_destroy(attention));
    }
}
