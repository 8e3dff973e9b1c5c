//! Copies through host memory overlap the kernels: a block reaches the host transport while the
//! device computes with it, and the transport is polled until the kernels end, as MPI requires.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use annulus::comm::{
    forward_control, forward_transport,
    threads::{self, Threads, each_rank},
};
use annulus_core::{BackwardMode, Channel, Control, Host, Incoming, Outgoing, Result, Transport};
use annulus_wgpu::Options;

use super::{open, transfers::Rank};

/// Call of a transport.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Call {
    Send(Channel),
    /// A poll that does not wait: a tick of a kernel.
    Tick,
    Wait,
}

/// A transport that records its calls.
struct Recorded {
    inner: Threads,
    calls: Arc<Mutex<Vec<Call>>>,
}

impl Recorded {
    fn record(&self, call: Call) {
        self.calls.lock().expect("no thread panicked").push(call);
    }
}

impl Control for Recorded {
    forward_control! {
        rank ranks placement start_all_gather try_all_gather stragglers abort heartbeat last_heard
        last_work
    }
}

impl Transport<Host> for Recorded {
    forward_transport! {
        take pending bytes_sent posts_ahead runs_groups_in_order
    }

    fn post(
        &mut self,
        sends: &[Outgoing<'_, Host>],
        receives: &mut Vec<Incoming<Host>>,
    ) -> Result<()> {
        sends.iter().for_each(|send| self.record(Call::Send(send.header.channel)));
        self.inner.post(sends, receives)
    }

    fn progress(&mut self, timeout: Duration) -> Result<()> {
        self.record(if timeout.is_zero() { Call::Tick } else { Call::Wait });
        Transport::<Host>::progress(&mut self.inner, timeout)
    }
}

/// Ticks after each send of a channel, until the next wait.
fn ticks_after_sends(calls: &[Call], channel: Channel) -> Vec<usize> {
    let until_wait = |from: usize| {
        let ended = |call: &&Call| **call != Call::Wait;
        calls[from..].iter().take_while(ended).filter(|call| **call == Call::Tick).count()
    };
    let sends = calls.iter().enumerate().filter(|(_, call)| **call == Call::Send(channel));
    sends.map(|(index, _)| until_wait(index)).collect()
}

#[test]
fn a_block_is_sent_while_the_device_computes_with_it() {
    // one pair of tiles in a submission: 50 submissions of a kernel in each step
    let Some(gpu) = open(&Options { most_part_flops: Some(1), ..Options::default() }) else {
        return;
    };
    let all = each_rank(threads::ring(2), |_, inner| {
        let calls = Arc::default();
        let transport = Recorded { inner, calls: Arc::clone(&calls) };
        let mut rank = Rank::new(&gpu, transport, BackwardMode::OnePass)?;
        let taken = || std::mem::take(&mut *calls.lock().expect("no thread panicked"));
        taken();
        rank.forward()?;
        let forward = taken();
        rank.backward()?;
        Ok([forward, taken()])
    });
    for calls in all.expect("the passes").into_iter().flatten() {
        let ticks = ticks_after_sends(&calls, Channel::Kv);
        assert!(!ticks.is_empty() && ticks.iter().all(|&ticks| ticks >= 10), "{ticks:?}");
    }
}
