//! `Staged` over a mock device whose memory the host cannot access and whose copies take several
//! polls.

use std::{
    ops::Range,
    sync::{Arc, Mutex},
    time::Duration,
};

use annulus_comm::{Staged, Threads};
use annulus_core::{
    Arrived, Channel, Control, DType, Error, HostBuffer, Incoming, MessageHeader, Outgoing, Result,
    Space, StagedSpace, Tick, Transport, index,
};

use crate::common::*;

/// Device memory, behind a lock: only copies access it.
#[derive(Debug, Clone, Copy)]
struct Mock;

#[derive(Debug, Clone)]
struct MockBuffer(Arc<Mutex<Vec<u8>>>);

impl MockBuffer {
    fn new(bytes: Vec<u8>) -> Self {
        Self(Arc::new(Mutex::new(bytes)))
    }
    fn bytes(&self) -> Vec<u8> {
        self.0.lock().unwrap().clone()
    }
}

impl Space for Mock {
    type Buffer = MockBuffer;
    type View<'a> = ();
    type ViewMut<'a> = ();
    /// Number of the last operation that was enqueued.
    type Event = u64;

    fn size(buffer: &MockBuffer) -> u64 {
        buffer.0.lock().unwrap().len() as u64
    }
    fn is_shared(buffer: &MockBuffer) -> bool {
        Arc::strong_count(&buffer.0) > 1
    }
    fn reborrow((): &()) {}
    fn describe((): &()) -> (DType, [usize; 4]) {
        (DType::F32, [0; 4])
    }
    fn describe_mut((): &()) -> (DType, [usize; 4]) {
        (DType::F32, [0; 4])
    }
}

/// A queue in which every copy takes `polls` polls, and which fails if it is `broken`.
#[derive(Debug, Default)]
struct Queue {
    polls: u32,
    enqueued: u64,
    broken: bool,
}

/// A copy that completes after `polls` polls.
struct Copy<T> {
    result: Option<T>,
    polls: u32,
}

impl<T> Copy<T> {
    fn poll(&mut self, queue: &Queue) -> Result<Option<T>> {
        if queue.broken {
            return Err(Error::Device { what: "the queue broke".into() });
        }
        self.polls = self.polls.saturating_sub(1);
        Ok(if self.polls == 0 { self.result.take() } else { None })
    }
}

impl StagedSpace for Mock {
    type Copier = Queue;
    type Download = Copy<HostBuffer>;
    type Upload = Copy<(HostBuffer, Arrived<Self>)>;

    fn download(
        queue: &mut Queue,
        from: &MockBuffer,
        ready: &u64,
        ranges: &[Range<u64>],
        mut into: HostBuffer,
    ) -> Result<Self::Download> {
        assert_eq!(*ready, 77, "the copy waits for the sender's event");
        let from = from.bytes();
        let mut at = 0;
        for range in ranges {
            let bytes = &from[index(range.start)..index(range.end)];
            into.bytes_mut().unwrap()[at..at + bytes.len()].copy_from_slice(bytes);
            at += bytes.len();
        }
        Ok(Copy { result: Some(into), polls: queue.polls })
    }

    fn downloaded(queue: &mut Queue, copy: &mut Self::Download) -> Result<Option<HostBuffer>> {
        copy.poll(queue)
    }

    fn upload(
        queue: &mut Queue,
        from: HostBuffer,
        into: MockBuffer,
        ranges: &[Range<u64>],
        _: Tick<'_>,
    ) -> Result<Self::Upload> {
        let mut at = 0;
        for range in ranges {
            let length = index(range.end - range.start);
            into.0.lock().unwrap()[index(range.start)..index(range.end)]
                .copy_from_slice(&from.bytes()[at..at + length]);
            at += length;
        }
        queue.enqueued += 1;
        let arrived = Arrived { buffer: into, ready: queue.enqueued };
        Ok(Copy { result: Some((from, arrived)), polls: queue.polls })
    }

    fn uploaded(
        queue: &mut Queue,
        copy: &mut Self::Upload,
    ) -> Result<Option<(HostBuffer, Arrived<Self>)>> {
        copy.poll(queue)
    }
}

fn staged(endpoint: Threads, polls: u32) -> Staged<Threads, Mock> {
    Staged::new(endpoint, Queue { polls, ..Queue::default() })
}

fn wait(transport: &mut dyn Transport<Mock>, header: &MessageHeader) -> Result<Arrived<Mock>> {
    loop {
        match transport.take(header)? {
            Some(arrived) => return Ok(arrived),
            None => transport.progress(Duration::from_millis(20))?,
        }
    }
}

#[test]
fn blocks_circulate_through_device_memory() {
    let ranks = 4;
    on_ring(
        ranks,
        |endpoint| {
            let polls = u32::try_from(endpoint.rank()).unwrap() * 3 + 1;
            staged(endpoint, polls)
        },
        move |mut endpoint| {
            let rank = endpoint.rank();
            let (next, previous) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
            let mut block = MockBuffer::new(vec![u8::try_from(rank).unwrap(); 30]);
            for step in 0..ranks - 1 {
                let tag = step as u64;
                let to = header(next, Channel::Kv, tag, &[0..10, 20..30]);
                let from = header(previous, Channel::Kv, tag, &[5..25]);
                let mut receives =
                    vec![Incoming { header: from.clone(), buffer: MockBuffer::new(vec![0; 30]) }];
                endpoint
                    .post(&[Outgoing { header: to, buffer: &block, ready: &77 }], &mut receives)
                    .unwrap();
                assert!(endpoint.pending());
                let arrived = wait(&mut endpoint, &from).unwrap();
                assert_eq!(arrived.ready, tag + 1, "the reader waits for the upload");
                let owner = u8::try_from((rank + ranks - step - 1) % ranks).unwrap();
                assert_eq!(
                    arrived.buffer.bytes(),
                    [vec![0; 5], vec![owner; 20], vec![0; 5]].concat()
                );
                while endpoint.pending() {
                    endpoint.progress(Duration::from_millis(20)).unwrap();
                }
                block = MockBuffer::new(vec![owner; 30]);
                assert!(endpoint.take(&from).is_err(), "a receive is taken once");
            }
            assert_eq!(endpoint.bytes_sent(), 3 * 20);
        },
    );
}

#[test]
fn no_call_blocks_on_a_copy_that_never_ends() {
    watched(|| {
        let [a, _b]: [Threads; 2] = annulus_comm::threads::ring(2).try_into().unwrap();
        let mut a = staged(a, u32::MAX);
        let block = MockBuffer::new(vec![1; 8]);
        a.post(
            &[Outgoing {
                header: header(1, Channel::FinalGrad, 1, &[0..8]),
                buffer: &block,
                ready: &77,
            }],
            &mut Vec::new(),
        )
        .unwrap();
        for _ in 0..10 {
            a.progress(Duration::from_secs(20)).unwrap();
        }
        assert!(a.pending());
    });
}

#[test]
fn the_error_of_a_broken_device_is_permanent() {
    watched(|| {
        let [a, _b]: [Threads; 2] = annulus_comm::threads::ring(2).try_into().unwrap();
        let mut a: Staged<Threads, Mock> =
            Staged::new(a, Queue { polls: 3, enqueued: 0, broken: true });
        let block = MockBuffer::new(vec![1; 8]);
        let outgoing = |peer| Outgoing {
            header: header(peer, Channel::FinalGrad, 1, &[0..8]),
            buffer: &block,
            ready: &77,
        };
        assert!(matches!(
            a.post(&[outgoing(9)], &mut Vec::new()),
            Err(Error::InvalidArgument { .. })
        ));
        a.post(&[outgoing(1)], &mut Vec::new()).unwrap();
        let error = Transport::<Mock>::progress(&mut a, Duration::ZERO).unwrap_err();
        assert_eq!(error, Error::Device { what: "the queue broke".into() });
        assert_eq!(a.post(&[], &mut Vec::new()).unwrap_err(), error);
        assert_eq!(a.take(&header(1, Channel::FinalGrad, 1, &[])).unwrap_err(), error);
    });
}
