//! `Staged` over the mock device, whose memory the host cannot access and whose work is done by
//! polls.

use std::{ops::ControlFlow, time::Duration};

use annulus_comm::{Staged, Threads};
use annulus_core::{
    Arrived, Channel, Control, Error, HostBuffer, Incoming, MessageHeader, Outgoing, Result,
    StagedSpace, Transport,
};
use annulus_mock_device::{Device, DeviceBuffer, MockSpace};

use crate::*;

type OverThreads = Staged<Threads, MockSpace>;

fn pair(device: &Device) -> (OverThreads, Threads) {
    let [a, b]: [Threads; 2] = annulus_comm::threads::ring(2).try_into().unwrap();
    (Staged::new(a, device.clone()), b)
}

fn filled(device: &Device, byte: u8) -> DeviceBuffer {
    let buffer = device.allocate(30);
    device.write(&buffer, &[byte; 30]).unwrap();
    buffer
}

/// Queues work that copies to `bytes` of a buffer of 30 bytes.
fn enqueue(device: &Device, buffer: &DeviceBuffer, bytes: u64) -> Result<()> {
    let from = HostBuffer::zeroed(bytes).unwrap();
    let tick = &mut || ControlFlow::Continue(());
    MockSpace::upload(&mut device.clone(), from, buffer.clone(), &[0..bytes], tick).map(drop)
}

fn wait(transport: &mut OverThreads, header: &MessageHeader) -> Result<Arrived<MockSpace>> {
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
    let wrap = |endpoint| {
        let device = Device::new();
        (Staged::<_, MockSpace>::new(endpoint, device.clone()), device)
    };
    on_ring(ranks, wrap, move |(mut endpoint, device)| {
        let rank = endpoint.rank();
        let (next, previous) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
        let other = device.allocate(30);
        let mut block = filled(&device, u8::try_from(rank).unwrap());
        for step in 0..ranks - 1 {
            let tag = step as u64;
            let to = header(next, Channel::Kv, tag, &[0..10, 20..30]);
            let from = header(previous, Channel::Kv, tag, &[5..25]);
            // the copies wait for work that is queued before them
            (0..3 * rank).for_each(|_| enqueue(&device, &other, 30).unwrap());
            let ready = device.now();
            let mut receives = vec![Incoming { header: from.clone(), buffer: device.allocate(30) }];
            endpoint
                .post(&[Outgoing { header: to, buffer: &block, ready: &ready }], &mut receives)
                .unwrap();
            assert!(endpoint.pending());
            let arrived = wait(&mut endpoint, &from).unwrap();
            assert!(endpoint.take(&from).is_err(), "a receive is taken once");
            while !arrived.ready.poll().unwrap() {}
            let owner = u8::try_from((rank + ranks - step - 1) % ranks).unwrap();
            let bytes = device.read(&arrived.buffer, &[0..30]).unwrap();
            assert_eq!(bytes, [vec![0; 5], vec![owner; 20], vec![0; 5]].concat());
            while endpoint.pending() {
                endpoint.progress(Duration::from_millis(20)).unwrap();
            }
            block = filled(&device, owner);
        }
        assert_eq!(endpoint.bytes_sent(), 3 * 20);
    });
}

#[test]
fn no_call_blocks_on_a_copy_that_never_ends() {
    watched(|| {
        let device = Device::new();
        let (mut a, _b) = pair(&device);
        let block = filled(&device, 1);
        (0..1000).for_each(|_| enqueue(&device, &block, 30).unwrap());
        let header = header(1, Channel::FinalGrad, 1, &[0..8]);
        let ready = device.now();
        a.post(&[Outgoing { header, buffer: &block, ready: &ready }], &mut Vec::new()).unwrap();
        for _ in 0..10 {
            a.progress(Duration::from_secs(20)).unwrap();
        }
        assert!(a.pending());
    });
}

#[test]
fn the_error_of_a_broken_device_is_permanent() {
    watched(|| {
        let device = Device::new();
        let (mut a, _b) = pair(&device);
        let block = filled(&device, 1);
        // beyond its end
        enqueue(&device, &block, 31).unwrap();
        let ready = device.now();
        let outgoing = |peer| Outgoing {
            header: header(peer, Channel::FinalGrad, 1, &[0..8]),
            buffer: &block,
            ready: &ready,
        };
        let refused = a.post(&[outgoing(9)], &mut Vec::new());
        assert!(matches!(refused, Err(Error::InvalidArgument { .. })));
        a.post(&[outgoing(1)], &mut Vec::new()).unwrap();
        let error = Transport::<MockSpace>::progress(&mut a, Duration::ZERO).unwrap_err();
        assert!(matches!(error, Error::Device { .. }), "{error}");
        assert_eq!(a.post(&[], &mut Vec::new()).unwrap_err(), error);
        assert_eq!(a.take(&header(1, Channel::FinalGrad, 1, &[])).unwrap_err(), error);
    });
}
