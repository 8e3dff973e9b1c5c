//! Messages that wait for kernels of their rank, for longer than the deadline or for ever: the rank
//! sends heartbeats meanwhile, and a device that hangs is found at its own bound.

use std::{
    cell::Cell,
    time::{Duration, Instant},
};

use annulus_comm::{
    Deadline, Staged, Threads, deadline,
    nccl::Nccl,
    threads::{self, each_rank},
};
use annulus_core::{Arrived, Channel, Error, Incoming, MessageHeader, Outgoing, Result, Transport};
use annulus_cuda::device::{
    CudaBuffer, CudaCopier, CudaSpace, Device, Stream, Symbols,
    cudarc::driver::sys::{CUevent, CUresult},
};
use annulus_cuda_emulator::{self as emulator, nccl_symbols};

use crate::{common::DEADLINE, support::next_device};

/// Longest wait in one call of `progress`.
const POLL: Duration = Duration::from_millis(1);
/// Time that kernels take, beyond the least deadline.
const SLOW: Duration = Duration::from_millis(1_500);
/// Bytes of the message.
const BYTES: u64 = 64;

thread_local! {
    /// Time before which no event of this thread's rank passes.
    static SLOW_UNTIL: Cell<Option<Instant>> = const { Cell::new(None) };
}

unsafe extern "C" fn slow_query(event: CUevent) -> CUresult {
    if SLOW_UNTIL.get().is_some_and(|until| Instant::now() < until) {
        return CUresult::CUDA_ERROR_NOT_READY;
    }
    // SAFETY: as required of the caller.
    unsafe { (emulator::symbols().event_query)(event) }
}

/// Ranks of a transport of CUDA memory over a host transport.
type Wrap = fn(Threads, &Device) -> Result<Box<dyn Transport<CudaSpace>>>;

fn staged(inner: Threads, device: &Device) -> Result<Box<dyn Transport<CudaSpace>>> {
    Ok(Box::new(Staged::<_, CudaSpace>::new(inner, CudaCopier::new(device)?)))
}

fn over_nccl(inner: Threads, device: &Device) -> Result<Box<dyn Transport<CudaSpace>>> {
    Ok(Box::new(Nccl::with_symbols(inner, device, Ok(nccl_symbols()), DEADLINE)?))
}

/// Rank 0 sends what its kernels write, which takes them `time`; rank 1 receives it. Both have the
/// least deadline, and devices that count as hung after `bound`. Returns the bytes of each rank.
fn transfer(wrap: Wrap, time: Duration, bound: Duration) -> Result<Vec<Result<Vec<u8>>>> {
    each_rank(threads::ring(2), |rank, inner| {
        let symbols = Symbols { event_query: slow_query, ..emulator::symbols() };
        let device = Device::with_symbols(symbols, next_device())?;
        device.set_hang_bound(bound);
        let stream = Stream::new(&device)?;
        let mut transport = Deadline::new(wrap(inner, &device)?, deadline::LEAST)?;
        let buffer = CudaBuffer::new(&device, BYTES)?;
        if rank == 1 {
            return Ok(receive(&mut transport, &stream, buffer));
        }
        let bytes: Vec<u8> = (0..BYTES).map(|at| at as u8).collect();
        // SAFETY: the buffer is as long as the bytes.
        unsafe { stream.copy_to_device(buffer.address(), &bytes)? };
        SLOW_UNTIL.set(Some(Instant::now() + time));
        Ok(send(&mut transport, &stream, &buffer).map(|()| bytes))
    })
}

fn header(peer: usize) -> MessageHeader {
    let ranges = std::iter::once(0..BYTES).collect();
    MessageHeader { peer, channel: Channel::Kv, tag: 0, step: 0, ranges, agreed: None }
}

fn send(
    transport: &mut dyn Transport<CudaSpace>,
    stream: &Stream,
    buffer: &CudaBuffer,
) -> Result<()> {
    let ready = &stream.record()?;
    transport.post(&[Outgoing { header: header(1), buffer, ready }], &mut vec![])?;
    while transport.pending() {
        transport.progress(POLL)?;
    }
    Ok(())
}

fn receive(
    transport: &mut dyn Transport<CudaSpace>,
    stream: &Stream,
    buffer: CudaBuffer,
) -> Result<Vec<u8>> {
    transport.post(&[], &mut vec![Incoming { header: header(0), buffer }])?;
    let arrived = loop {
        match transport.take(&header(0))? {
            Some(Arrived { buffer, .. }) => break buffer,
            None => transport.progress(POLL)?,
        }
    };
    let mut got = vec![0; annulus_core::index(BYTES)];
    // SAFETY: the buffer is as long as the bytes.
    unsafe { stream.copy_to_host(&mut got, arrived.address(), DEADLINE)? };
    Ok(got)
}

#[test]
fn a_rank_whose_message_waits_for_long_kernels_is_not_silent() {
    for wrap in [staged as Wrap, over_nccl] {
        let results = transfer(wrap, SLOW, DEADLINE).unwrap();
        assert!(results[0].is_ok() && results[0] == results[1], "{results:?}");
    }
}

#[test]
fn a_device_that_hangs_before_a_message_is_found_at_its_bound() {
    for wrap in [staged as Wrap, over_nccl] {
        let began = Instant::now();
        let results = transfer(wrap, Duration::from_secs(3600), SLOW).unwrap();
        assert!(began.elapsed() >= SLOW, "{:?}", began.elapsed());
        let hung = |what: &str| what.contains("did not end within 1.5 s");
        assert!(matches!(&results[0], Err(Error::Device { what }) if hung(what)), "{results:?}");
        assert!(results[1].is_err(), "{results:?}");
    }
}
