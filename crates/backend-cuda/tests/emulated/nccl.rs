//! Rings over emulated NCCL and RCCL, device to device; then failures: each is a typed error on
//! every rank, in time.

use std::{
    ffi::c_int,
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use annulus::{LocalRing, Plan, Setup};
use annulus_comm::{
    Deadline, Threads,
    nccl::Nccl,
    threads::{self, each_rank},
};
use annulus_conformance::{
    Case, Draw, FacadeOn, Masks, RankSetup, RingSubject, Setting, Subject, suite,
};
use annulus_core::{BackwardMode, DType, Dims, Error, Incoming, Outgoing, Result, Spec, Transport};
use annulus_cuda::{
    Cuda,
    device::{
        CudaBuffer, CudaSpace, Device, Stream,
        nccl::{NcclSymbols, RawCommunicator, Status, UniqueId},
    },
};
use annulus_cuda_emulator::{self as emulator, nccl_symbols, rccl_symbols};
use annulus_plan::{Layout, Route};

use crate::{
    common::{CudaMemory, DEADLINE, refuses_a_shared_gpu},
    copies::{arrived, filled, header},
    hip::hip_on,
    support::{emulated, next_device},
};

/// Backend and transport of one rank.
fn rank_setup(
    inner: Threads,
    backend: Cuda,
    table: NcclSymbols,
) -> Result<RankSetup<CudaMemory, Cuda>> {
    let nccl = Nccl::with_symbols(inner, backend.stream().device(), Ok(table), DEADLINE)?;
    let memory = CudaMemory(backend.stream().clone());
    Ok(RankSetup { memory, backend, transport: Box::new(Deadline::new(nccl, DEADLINE)?) })
}

fn subject() -> impl Subject {
    RingSubject::new("emulated cuda over nccl", |ranks| {
        // initialization waits for all ranks
        each_rank(threads::ring(ranks), |_, inner| rank_setup(inner, emulated()?, nccl_symbols()))
    })
}

#[test]
fn rings_of_amd_gpus_hold_over_rccl() {
    let subject = RingSubject::new("emulated hip over rccl", |ranks| {
        each_rank(threads::ring(ranks), |_, inner| {
            rank_setup(inner, hip_on::<0x942>(next_device())?, rccl_symbols())
        })
    });
    let dims = Dims { kv_heads: 1, ..Dims::new(1, 150, 2, 64) };
    let masks = Masks { causal: true, ..Masks::default() };
    let case = Case::new("rccl", Spec::new(dims, DType::F64), masks, &mut Draw::new(3));
    // zigzag rows are gathered and scattered
    for (ranks, layout, dtype) in
        [(2, Layout::Zigzag, DType::F16), (3, Layout::Contiguous, DType::Bf16)]
    {
        let setting = Setting::new(ranks, layout);
        suite::answer(&subject, &case.clone().in_dtype(dtype), &setting).unwrap();
    }
}

/// NCCL runs groups in order, so they are posted whole.
#[test]
fn receives_further_ahead_hold_over_nccl() {
    let dims = Dims { kv_heads: 1, ..Dims::new(1, 60, 2, 8) };
    let case = Case::new("ahead", Spec::new(dims, DType::F64), Masks::default(), &mut Draw::new(3));
    let mut case = case.in_dtype(DType::F32);
    for (steps, backward) in [(3, BackwardMode::OnePass), (9, BackwardMode::TwoPass)] {
        case.spec.backward = backward;
        for route in Route::ALL {
            let setting = Setting {
                route: Some(route),
                receive_ahead: Some(steps),
                ..Setting::new(5, Layout::Zigzag)
            };
            suite::answer(&subject(), &case, &setting).unwrap();
        }
    }
}

#[test]
fn random_cases_hold_over_nccl() {
    suite::random_cases(&subject(), 200..212).unwrap();
}

/// Plans for tensors in host memory.
pub(crate) fn plans(setup: &Setup, dims: Dims, ranks: usize) -> Result<LocalRing> {
    LocalRing::from_plans(setup, dims, ranks, |_, setup, inner| {
        let cuda = emulated()?;
        let device = cuda.stream().device();
        let nccl = Nccl::with_symbols(inner, device, Ok(nccl_symbols()), DEADLINE)?;
        Plan::with_backend(setup, dims, cuda.on_host(), nccl)
    })
}

/// Exchanges are messages in host memory, which the host transport moves.
#[test]
fn strategies_hold_over_nccl() {
    let dtypes = [DType::F32, DType::Bf16];
    let facade = FacadeOn::new("facade over nccl", &dtypes, plans);
    suite::strategies(&facade, 0..2).unwrap();
}

/// NCCL functions that accept two groups and lose the third.
fn losing_the_third() -> NcclSymbols {
    thread_local! {
        static GROUPS: std::cell::Cell<u32> = const { std::cell::Cell::new(0) };
    }
    unsafe extern "C" fn start() -> Status {
        GROUPS.set(GROUPS.get() + 1);
        // SAFETY: no arguments.
        unsafe { (nccl_symbols().group_start)() }
    }
    unsafe extern "C" fn send(
        from: *const std::ffi::c_void,
        bytes: usize,
        kind: c_int,
        peer: c_int,
        communicator: RawCommunicator,
        stream: annulus_cuda::device::cudarc::driver::sys::CUstream,
    ) -> Status {
        if GROUPS.get() < 3 {
            // SAFETY: the arguments are those of NCCL's function.
            unsafe { (nccl_symbols().send)(from, bytes, kind, peer, communicator, stream) }
        } else {
            0
        }
    }
    with(|symbols| (symbols.group_start, symbols.send) = (start, send))
}

#[test]
fn a_received_part_can_be_taken_while_the_next_is_pending() {
    let finished = AtomicBool::new(false);
    let run = |rank: usize, inner: Threads| -> Result<Vec<bool>> {
        let device = Device::with_symbols(emulator::symbols(), next_device())?;
        let stream = Stream::new(&device)?;
        let table = if rank == 1 { losing_the_third() } else { nccl_symbols() };
        let mut nccl: Box<dyn Transport<CudaSpace>> =
            Box::new(Nccl::with_symbols(inner, &device, Ok(table), DEADLINE)?);
        let header = |tag| header(1 - rank, tag, std::slice::from_ref(&(0..8)));
        let tags = [4, 5, 6];
        if rank == 1 {
            let buffer = CudaBuffer::new(&device, 8)?;
            let ready = stream.record()?;
            let parts =
                tags.map(|tag| Outgoing { header: header(tag), buffer: &buffer, ready: &ready });
            nccl.post(&parts, &mut Vec::new())?;
            while !finished.load(Ordering::Acquire) {
                nccl.progress(Duration::from_millis(1))?;
            }
            return Ok(Vec::new());
        }
        let incoming =
            |tag| Ok(Incoming { header: header(tag), buffer: CudaBuffer::new(&device, 8)? });
        nccl.post(&[], &mut tags.map(incoming).into_iter().collect::<Result<_>>()?)?;
        let mut received = vec![false; 3];
        let began = Instant::now();
        while !(received[0] && received[1]) && began.elapsed() < Duration::from_secs(20) {
            nccl.progress(Duration::from_millis(1))?;
            for (received, tag) in received.iter_mut().zip(tags).filter(|(done, _)| !**done) {
                *received = nccl.take(&header(tag))?.is_some();
            }
        }
        finished.store(true, Ordering::Release);
        Ok(received)
    };
    let received = each_rank(threads::ring(2), run).unwrap().remove(0);
    assert_eq!(received, [true, true, false]);
}

/// Errors of two ranks that open endpoints with these tables, and the time it took.
fn meet(tables: [Result<NcclSymbols>; 2], deadline: Duration) -> ([Option<Error>; 2], Duration) {
    let began = Instant::now();
    let make = |rank: usize, inner| -> Result<Option<Error>> {
        let device = Device::with_symbols(emulator::symbols(), next_device())?;
        Ok(Nccl::with_symbols(inner, &device, tables[rank].clone(), deadline).err())
    };
    let errors = each_rank(threads::ring(2), make).and_then(|errors| {
        let both: [_; 2] =
            errors.try_into().map_err(|_| Error::invalid("ranks", "not two", "two"))?;
        Ok(both)
    });
    (errors.unwrap_or_else(|error| [Some(error.clone()), Some(error)]), began.elapsed())
}

fn with(change: impl FnOnce(&mut NcclSymbols)) -> NcclSymbols {
    let mut symbols = nccl_symbols();
    change(&mut symbols);
    symbols
}

#[test]
fn a_machine_without_nccl_is_refused_on_all_ranks() {
    let missing = Error::unsupported("NCCL", "this machine: its library has no ncclSend");
    let (errors, _) = meet([Ok(nccl_symbols()), Err(missing.clone())], DEADLINE);
    assert_eq!(
        errors,
        [Some(Error::Refused { rank: 1, what: missing.to_string() }), Some(missing)]
    );
    // nor does RCCL serve a GPU of NVIDIA
    let other = Error::unsupported("memory of CUDA", "RCCL");
    let (errors, _) = meet([Ok(nccl_symbols()), Ok(rccl_symbols())], DEADLINE);
    assert_eq!(errors, [Some(Error::Refused { rank: 1, what: other.to_string() }), Some(other)]);
}

#[test]
fn a_communicator_that_cannot_be_created_is_an_error_on_all_ranks() {
    unsafe extern "C" fn refuse(
        _: *mut RawCommunicator,
        _: c_int,
        _: UniqueId,
        _: c_int,
        _: *mut annulus_cuda::device::nccl::Config,
    ) -> Status {
        2
    }
    // rank 0 waits for the other only until it receives its error
    let (errors, took) =
        meet([Ok(nccl_symbols()), Ok(with(|symbols| symbols.init_rank = refuse))], DEADLINE);
    let [first, second] = errors.map(|error| error.unwrap().to_string());
    assert!(
        second.contains("ncclCommInitRankConfig: unhandled system error (status 2)"),
        "{second}"
    );
    assert!(first.starts_with("rank 1 aborted: ") && first.contains(&second), "{first}");
    assert!(took < DEADLINE, "{took:?}");
}

/// "Duplicate GPU detected" is not an error of the call, but of the communicator's state after it.
#[test]
fn a_refusal_of_ranks_that_share_a_gpu_is_recognized() {
    unsafe extern "C" fn invalid_usage(_: RawCommunicator, status: *mut Status) -> Status {
        // SAFETY: a valid pointer, by the NCCL function's contract.
        unsafe { *status = 5 };
        0
    }
    let refused = || Ok(with(|symbols| symbols.async_error = invalid_usage));
    let (errors, _) = meet([refused(), refused()], DEADLINE);
    for error in errors {
        let error = error.unwrap();
        assert!(
            refuses_a_shared_gpu(&error) && error.to_string().contains("invalid usage"),
            "{error}"
        );
    }
    let other = Error::Comm { peer: 1, step: 0, what: "ncclSend: unhandled system error".into() };
    assert!(!refuses_a_shared_gpu(&other));
}

#[test]
fn a_communicator_that_is_never_ready_is_an_error_at_the_deadline() {
    unsafe extern "C" fn busy(_: RawCommunicator, status: *mut Status) -> Status {
        // SAFETY: a valid pointer, by the NCCL function's contract.
        unsafe { *status = annulus_cuda::device::nccl::IN_PROGRESS };
        0
    }
    let never = || Ok(with(|symbols| symbols.async_error = busy));
    let (errors, took) = meet([never(), never()], Duration::from_millis(500));
    for error in errors {
        let text = error.unwrap().to_string();
        assert!(text.contains("ncclCommInitRankConfig did not end before the deadline"), "{text}");
    }
    assert!(took < Duration::from_secs(10), "{took:?}");
}

#[test]
fn a_peer_that_does_not_join_is_named_at_the_deadline() {
    let mut ring = threads::ring(2);
    let device = Device::with_symbols(emulator::symbols(), next_device()).unwrap();
    let error =
        Nccl::with_symbols(ring.remove(0), &device, Ok(nccl_symbols()), Duration::from_millis(200))
            .unwrap_err();
    assert!(matches!(error, Error::Timeout { peer: 1, .. }), "{error}");
}

/// Two ranks send 8 bytes to each other in two parts, rank 1 with `table`; returns both results.
fn swap(table: NcclSymbols, deadline: Duration) -> (Vec<Result<Vec<u8>>>, Duration) {
    let began = Instant::now();
    let run = |rank: usize, inner: Threads| -> Result<Vec<u8>> {
        let device = Device::with_symbols(emulator::symbols(), next_device())?;
        let stream = Stream::new(&device)?;
        let symbols = if rank == 1 { table } else { nccl_symbols() };
        let nccl = Nccl::with_symbols(inner, &device, Ok(symbols), DEADLINE)?;
        let mut transport = Deadline::<_, CudaSpace>::new(nccl, deadline)?;
        let bytes: Vec<u8> = (0..16).map(|byte| byte + 100 * rank as u8).collect();
        let [from, to] = [filled(&stream, &bytes)?, CudaBuffer::new(&device, 8)?];
        let ready = stream.record()?;
        // the two sides split the message differently
        let pieces = if rank == 0 { vec![0..2, 10..16] } else { std::iter::once(4..12).collect() };
        let receive = header(1 - rank, 7, std::slice::from_ref(&(0..8)));
        let send = Outgoing { header: header(1 - rank, 7, &pieces), buffer: &from, ready: &ready };
        transport.post(&[send], &mut vec![Incoming { header: receive.clone(), buffer: to }])?;
        let got = arrived(&mut transport, &stream, &receive)?;
        while transport.pending() {
            transport.progress(Duration::from_millis(1))?;
        }
        Ok(got)
    };
    let results = each_rank(threads::ring(2), |rank, inner| Ok(run(rank, inner)));
    (results.unwrap_or_else(|error| vec![Err(error)]), began.elapsed())
}

#[test]
fn a_message_in_pieces_arrives_complete() {
    let (results, _) = swap(nccl_symbols(), DEADLINE);
    assert_eq!(results, [Ok((104..112).collect()), Ok(vec![0, 1, 10, 11, 12, 13, 14, 15])]);
}

/// NCCL functions whose communicators have this state once a transfer was posted.
fn in_state<const STATE: Status>() -> NcclSymbols {
    thread_local! {
        static GROUPS: std::cell::Cell<u32> = const { std::cell::Cell::new(0) };
    }
    unsafe extern "C" fn end() -> Status {
        GROUPS.set(GROUPS.get() + 1);
        // SAFETY: no arguments.
        unsafe { (nccl_symbols().group_end)() }
    }
    unsafe extern "C" fn state<const STATE: Status>(
        communicator: RawCommunicator,
        status: *mut Status,
    ) -> Status {
        if GROUPS.get() > 0 {
            // SAFETY: a valid pointer, by the NCCL function's contract.
            unsafe { *status = STATE };
            return 0;
        }
        // SAFETY: the arguments are those of NCCL's function.
        unsafe { (nccl_symbols().async_error)(communicator, status) }
    }
    with(|symbols| (symbols.group_end, symbols.async_error) = (end, state::<STATE>))
}

#[test]
fn an_asynchronous_failure_aborts_the_ring_on_both_sides_even_if_the_abort_hangs() {
    unsafe extern "C" fn hang(_: RawCommunicator) -> Status {
        std::thread::sleep(Duration::from_secs(20));
        0
    }
    let failing = in_state::<6>();
    for (table, hangs) in [(failing, false), (NcclSymbols { abort: hang, ..failing }, true)] {
        let (results, took) = swap(table, DEADLINE);
        let [first, second] = [0, 1].map(|rank: usize| results[rank].clone().unwrap_err());
        let Error::Comm { peer: 0, step: 3, what } = &second else { panic!("{second}") };
        assert!(what.contains("remote process exited"), "{second}");
        let is_reported = what.contains("ncclCommAbort did not return within 3.0 s");
        assert_eq!(is_reported, hangs, "{second}");
        assert!(matches!(&first, Error::Aborted { rank: 1, .. }), "{first}");
        assert!(took < Duration::from_secs(10), "{took:?}");
    }
}

#[test]
fn a_group_that_is_refused_names_the_call() {
    unsafe extern "C" fn refuse(
        _: *const std::ffi::c_void,
        _: usize,
        _: c_int,
        _: c_int,
        _: RawCommunicator,
        _: annulus_cuda::device::cudarc::driver::sys::CUstream,
    ) -> Status {
        4
    }
    let (results, _) = swap(with(|symbols| symbols.send = refuse), DEADLINE);
    let second = results[1].clone().unwrap_err();
    let Error::Comm { peer: 0, step: 3, what } = &second else { panic!("{second}") };
    assert!(what.starts_with("ncclSend: invalid argument"), "{second}");
}

#[test]
fn a_transfer_that_is_never_accepted_ends_at_the_deadline() {
    let table = in_state::<{ annulus_cuda::device::nccl::IN_PROGRESS }>();
    let (results, took) = swap(table, Duration::from_secs(1));
    for error in results {
        let error = error.unwrap_err();
        assert!(matches!(error, Error::Timeout { .. } | Error::Aborted { .. }), "{error}");
    }
    assert!(took < Duration::from_secs(10), "{took:?}");
}

#[test]
fn a_borrowed_communicator_must_fit_and_outlives_the_ring() {
    let device = Device::with_symbols(emulator::symbols(), next_device()).unwrap();
    let symbols = nccl_symbols();
    let make = |ranks, rank| {
        let mut id = UniqueId([0; UniqueId::BYTES]);
        let mut communicator = std::ptr::null_mut();
        // SAFETY: pointers to locals; the emulator does not read the last one.
        unsafe {
            (symbols.unique_id)(&raw mut id);
            (symbols.init_rank)(&raw mut communicator, ranks, id, rank, std::ptr::null_mut());
        }
        communicator
    };
    for (ranks, rank) in [(2, 1), (1, 0)] {
        let communicator = make(ranks, rank);
        // SAFETY: just created, and destroyed after the ring.
        let made = unsafe {
            Nccl::borrowed(threads::ring(1).remove(0), &device, symbols, communicator, DEADLINE)
        };
        match made {
            Ok(ring) => drop(ring),
            Err(error) => assert_eq!(
                (ranks, error.to_string().as_str()),
                (2, "communicator: got rank 1 of 2, want rank 0 of 1")
            ),
        }
        // SAFETY: not destroyed yet.
        assert_eq!(unsafe { (symbols.destroy)(communicator) }, 0);
    }
}
