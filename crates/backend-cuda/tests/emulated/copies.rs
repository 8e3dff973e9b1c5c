//! Copies of messages: several byte ranges are gathered and scattered by one launch, and a block
//! that is staged through host memory is sent from the memory into which the device has copied it.
//!
//! Messages that wait for kernels of their rank, for longer than the deadline or for ever: the rank
//! sends heartbeats meanwhile, and a device that hangs is found at its own bound.

use std::{
    cell::Cell,
    ops::{ControlFlow, Range},
    sync::Arc,
    time::{Duration, Instant},
};

use annulus_comm::{
    Deadline, Staged, Threads, deadline,
    nccl::Nccl,
    threads::{self, each_rank},
};
use annulus_core::{
    Arrived, Backend, Channel, DType, Dims, Error, HostBuffer, HostMemory, Incoming, MessageHeader,
    Outgoing, Passes, RankShard, Result, Rows, Spec, StagedSpace, Transport,
};
use annulus_cuda::device::{
    CudaBuffer, CudaCopier, CudaSpace, Device, PinnedBuffer, Status, Stream, Symbols,
    cudarc::driver::sys::CUevent,
};
use annulus_cuda_emulator::{self as emulator, nccl_symbols};

use crate::{
    common::DEADLINE,
    support::{emulated_on, next_device},
};

/// Longest wait in one call of `progress`.
const POLL: Duration = Duration::from_millis(1);

/// Bytes of the buffers.
const BYTES: u64 = 40_000;

pub(crate) fn header(peer: usize, tag: u64, ranges: &[Range<u64>]) -> MessageHeader {
    MessageHeader { peer, channel: Channel::Kv, tag, step: 3, ranges: ranges.into(), agreed: None }
}

/// A new buffer with these bytes, for which other streams wait.
pub(crate) fn filled(stream: &Stream, bytes: &[u8]) -> Result<CudaBuffer> {
    let mut buffer = CudaBuffer::new(stream.device(), bytes.len() as u64)?;
    buffer.write(stream, 0, bytes)?;
    Ok(buffer)
}

/// Sends ranges of a buffer to rank `peer`.
fn send(
    transport: &mut dyn Transport<CudaSpace>,
    stream: &Stream,
    header: MessageHeader,
    buffer: &CudaBuffer,
) -> Result<()> {
    let ready = &stream.record()?;
    transport.post(&[Outgoing { header, buffer, ready }], &mut vec![])?;
    while transport.pending() {
        transport.progress(POLL)?;
    }
    Ok(())
}

/// Receives into ranges of a buffer; returns all of its bytes.
fn receive(
    transport: &mut dyn Transport<CudaSpace>,
    stream: &Stream,
    header: &MessageHeader,
    buffer: CudaBuffer,
) -> Result<Vec<u8>> {
    transport.post(&[], &mut vec![Incoming { header: header.clone(), buffer }])?;
    arrived(transport, stream, header)
}

/// Waits for a message; returns all bytes of its buffer.
pub(crate) fn arrived(
    transport: &mut dyn Transport<CudaSpace>,
    stream: &Stream,
    header: &MessageHeader,
) -> Result<Vec<u8>> {
    let Arrived { buffer, ready } = loop {
        match transport.take(header)? {
            Some(arrived) => break arrived,
            None => transport.progress(POLL)?,
        }
    };
    stream.wait_for(&ready)?;
    let mut got = vec![0; annulus_core::index(buffer.len())];
    // SAFETY: the buffer is as long as the bytes.
    unsafe { stream.copy_to_host(&mut got, buffer.address(), DEADLINE)? };
    Ok(got)
}

/// A shard of four rows.
fn shard() -> Result<RankShard> {
    let rows = Arc::new(Rows::counting(4, 0)?);
    Ok(RankShard {
        spec: Arc::new(Spec::new(Dims::new(1, 4, 1, 8), DType::F32)),
        queries: Arc::clone(&rows),
        keys: rows,
        attention_mask: None,
        key_lists: None,
        received_lists: None,
        most_block_rows: 4,
        most_query_rows: 4,
        leaves: None,
    })
}

/// Rank 0 sends the ranges `sent` to rank 1, which receives them as the ranges `received`, with a
/// backend in the same context if `has_backend`. Returns the bytes that rank 1 receives into, and
/// of both devices the blocks of the kernel and the copies on the device.
fn transfer(
    sent: &[Range<u64>],
    received: &[Range<u64>],
    has_backend: bool,
) -> Result<(Vec<u8>, [[u64; 2]; 2])> {
    let ordinals = [next_device(), next_device()];
    let results = each_rank(threads::ring(2), |rank, inner| {
        let cuda = emulated_on(ordinals[rank])?;
        let stream = cuda.stream();
        let device = stream.device();
        // its kernels are loaded as long as the workspace lives
        let workspace =
            if has_backend { Some(cuda.workspace(&shard()?, Passes::Forward)?) } else { None };
        let mut nccl = Nccl::with_symbols(inner, device, Ok(nccl_symbols()), DEADLINE)?;
        let bytes: Vec<u8> =
            (0..BYTES).map(|at| if rank == 0 { (at % 251) as u8 } else { 255 }).collect();
        let buffer = filled(stream, &bytes)?;
        let got = if rank == 0 {
            send(&mut nccl, stream, header(1, 0, sent), &buffer).map(|()| Vec::new())?
        } else {
            receive(&mut nccl, stream, &header(0, 0, received), buffer)?
        };
        drop(workspace);
        Ok(got)
    })?;
    let counts = ordinals.map(|ordinal| {
        [emulator::blocks(ordinal, "copy_ranges"), emulator::device_copies(ordinal)]
    });
    Ok((results.into_iter().nth(1).unwrap_or_default(), counts))
}

/// Bytes that rank 1 must have.
fn wanted(sent: &[Range<u64>], received: &[Range<u64>]) -> Vec<u8> {
    let [sent, received] =
        [sent, received].map(|ranges| ranges.iter().cloned().flatten().collect::<Vec<_>>());
    assert_eq!(sent.len(), received.len());
    let mut all = vec![255; BYTES as usize];
    for (from, to) in sent.into_iter().zip(received) {
        all[to as usize] = (from % 251) as u8;
    }
    all
}

/// `count` ranges of `bytes` bytes, `apart` bytes from one to the next.
fn ranges(count: u64, start: u64, bytes: u64, apart: u64) -> Vec<Range<u64>> {
    (0..count).map(|index| start + index * apart..start + index * apart + bytes).collect()
}

#[test]
fn ranges_are_gathered_and_scattered_by_one_launch() {
    // multiples of 16, of 4 and of 1; more ranges than the arguments hold; ranges of several parts
    for (sent, received) in [
        (ranges(3, 32, 64, 160), ranges(2, 16, 96, 512)),
        (ranges(5, 4, 12, 100), ranges(2, 8, 30, 64)),
        (ranges(2, 1, 7, 9), ranges(7, 3, 2, 5)),
        (ranges(33, 0, 16, 48), ranges(44, 5, 12, 13)),
        (ranges(2, 0, 18_000, 20_000), ranges(3, 48, 12_000, 12_016)),
    ] {
        let (got, counts) = transfer(&sent, &received, true).unwrap();
        assert!(got == wanted(&sent, &received), "{sent:?} to {received:?}");
        for (ranges, [blocks, copies]) in [&sent, &received].into_iter().zip(counts) {
            let parts = ranges.iter().map(|range| range.end - range.start).max().unwrap();
            let blocks_wanted = ranges.len() as u64 * parts.div_ceil(16_384);
            assert_eq!([blocks, copies], [blocks_wanted, 0], "{ranges:?}");
        }
    }
}

#[test]
fn without_a_backend_each_range_is_a_copy() {
    let (sent, received) = (ranges(3, 32, 64, 160), ranges(2, 16, 96, 512));
    let (got, counts) = transfer(&sent, &received, false).unwrap();
    assert!(got == wanted(&sent, &received));
    assert_eq!(counts, [[0, 3], [0, 2]]);
}

#[test]
fn a_staged_block_is_sent_from_the_memory_that_the_device_writes() {
    let cuda = emulated_on(next_device()).unwrap();
    let stream = cuda.stream();
    let mut copier = CudaCopier::new(stream.device()).unwrap();
    let bytes: Vec<u8> = (0..64).collect();
    let buffer = filled(stream, &bytes).unwrap();
    let ready = stream.record().unwrap();
    let into = CudaSpace::staging_buffer(&mut copier, 40).unwrap();
    let address = into.bytes().as_ptr();
    let ranges = [8..16, 32..48];
    let mut copy = CudaSpace::download(&mut copier, &buffer, &ready, &ranges, into).unwrap();
    let sent = loop {
        if let Some(sent) = CudaSpace::downloaded(&mut copier, &mut copy).unwrap() {
            break sent;
        }
    };
    // no copy on the host: the transport gets the pinned memory itself
    assert_eq!(
        sent.foreign_memory::<PinnedBuffer>().map(|pinned| pinned.address().cast_const()),
        Some(address)
    );
    assert_eq!(sent.bytes()[..24], [&bytes[8..16], &bytes[32..48]].concat());
    assert!(CudaSpace::downloaded(&mut copier, &mut copy).is_err());

    // and receives into it: the device reads it, and it is returned
    let into = CudaBuffer::new(stream.device(), 64).unwrap();
    let tick = &mut || ControlFlow::Continue(());
    let mut copy = CudaSpace::upload(&mut copier, sent, into, &[0..10, 20..34], tick).unwrap();
    let (staged, arrived) = loop {
        if let Some(both) = CudaSpace::uploaded(&mut copier, &mut copy).unwrap() {
            break both;
        }
    };
    assert_eq!(staged.bytes().as_ptr(), address);
    let mut got = vec![0; 64];
    // SAFETY: the buffer is as long as the bytes.
    unsafe { stream.copy_to_host(&mut got, arrived.buffer.address(), DEADLINE).unwrap() };
    assert_eq!([&got[..10], &got[20..34]].concat(), staged.bytes()[..24]);
}

#[test]
fn only_pinned_memory_is_downloaded_to() {
    let cuda = emulated_on(next_device()).unwrap();
    let stream = cuda.stream();
    let mut copier = CudaCopier::new(stream.device()).unwrap();
    let buffer = CudaBuffer::new(stream.device(), 64).unwrap();
    let ready = stream.record().unwrap();
    let mut download = |into: HostBuffer| {
        CudaSpace::download(&mut copier, &buffer, &ready, std::slice::from_ref(&(0..40)), into)
            .map(drop)
    };
    assert!(download(HostBuffer::zeroed(64).unwrap()).is_err());
    let pinned = |bytes| HostBuffer::foreign(PinnedBuffer::zeroed(stream.device(), bytes)?);
    // too small; shared
    assert!(download(pinned(32).unwrap()).is_err());
    let shared = pinned(64).unwrap();
    assert!(download(shared.clone()).is_err());
    download(pinned(64).unwrap()).unwrap();
}

/// Bytes that start one byte after a multiple of 8.
#[derive(Debug)]
struct Misaligned(Vec<u64>);

impl HostMemory for Misaligned {
    fn bytes(&self) -> &[u8] {
        // SAFETY: 7 of the 8 bytes of the first word.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr().cast::<u8>().add(1), 7) }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_mut_ptr().cast::<u8>().add(1), 7) }
    }
}

#[test]
fn host_buffers_of_misaligned_memory_are_refused() {
    let error = HostBuffer::foreign(Misaligned(vec![0])).unwrap_err();
    assert!(
        matches!(&error, Error::InvalidArgument { argument, .. } if argument == "host memory"),
        "{error}"
    );
    assert!(HostBuffer::zeroed(8).unwrap().foreign_memory::<Misaligned>().is_none());
}

/// Time that kernels take, beyond the least deadline.
const SLOW: Duration = Duration::from_millis(1_500);
thread_local! {
    /// Time before which no event of this thread's rank passes.
    static SLOW_UNTIL: Cell<Option<Instant>> = const { Cell::new(None) };
}

unsafe extern "C" fn slow_query(event: CUevent) -> Status {
    if SLOW_UNTIL.get().is_some_and(|until| Instant::now() < until) {
        return Status::NOT_READY;
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
fn slow_transfer(wrap: Wrap, time: Duration, bound: Duration) -> Result<Vec<Result<Vec<u8>>>> {
    each_rank(threads::ring(2), |rank, inner| {
        let symbols = Symbols { event_query: slow_query, ..emulator::symbols() };
        let device = Device::with_symbols(symbols, next_device())?;
        device.set_hang_bound(bound);
        let stream = Stream::new(&device)?;
        let mut transport = Deadline::new(wrap(inner, &device)?, deadline::LEAST)?;
        let bytes: Vec<u8> = (0..64).map(|at| if rank == 0 { at } else { 0 }).collect();
        let buffer = filled(&stream, &bytes)?;
        let header = header(1 - rank, 0, std::slice::from_ref(&(0..64)));
        if rank == 1 {
            return Ok(receive(&mut transport, &stream, &header, buffer));
        }
        SLOW_UNTIL.set(Some(Instant::now() + time));
        Ok(send(&mut transport, &stream, header, &buffer).map(|()| bytes))
    })
}

#[test]
fn a_rank_whose_message_waits_for_long_kernels_is_not_silent() {
    for wrap in [staged as Wrap, over_nccl] {
        let results = slow_transfer(wrap, SLOW, DEADLINE).unwrap();
        assert!(results[0].is_ok() && results[0] == results[1], "{results:?}");
    }
}

#[test]
fn a_device_that_hangs_before_a_message_is_found_at_its_bound() {
    for wrap in [staged as Wrap, over_nccl] {
        let began = Instant::now();
        let results = slow_transfer(wrap, Duration::from_secs(3600), SLOW).unwrap();
        assert!(began.elapsed() >= SLOW, "{:?}", began.elapsed());
        let hung = |what: &str| what.contains("did not end within 1.5 s");
        assert!(matches!(&results[0], Err(Error::Device { what }) if hung(what)), "{results:?}");
        assert!(results[1].is_err(), "{results:?}");
    }
}
