//! A handle to an endpoint, as the transport of one plan.

use std::time::{Duration, Instant};

use annulus_core::{
    Arrived, Control, Error, Host, Incoming, MessageHeader, Outgoing, Placement, Result, Transport,
};

use super::{
    Mpi,
    endpoint::MpiEndpoint,
    lifetime::{check_process, is_forked},
    messages::MessageBuffer,
};

impl Mpi {
    /// Calls `work` with the endpoint, then notes which neighbours are left.
    fn with_endpoint<R>(&mut self, work: impl FnOnce(&mut MpiEndpoint, u64) -> R) -> R {
        let mut endpoint = self.shared.lock();
        let result = work(&mut endpoint, self.context);
        // neighbours only leave
        if endpoint.peers.staying().len() != self.watched.len() {
            self.watched = endpoint.peers.staying().to_vec();
        }
        result
    }
}

impl Transport<Host> for Mpi {
    fn control(&mut self) -> &mut dyn Control {
        self
    }

    fn post(
        &mut self,
        sends: &[Outgoing<'_, Host>],
        receives: &mut Vec<Incoming<Host>>,
    ) -> Result<()> {
        check_process()?;
        self.with_endpoint(|endpoint, context| endpoint.post(context, sends, receives))
    }

    fn progress(&mut self, timeout: Duration) -> Result<()> {
        // not in the polls between tiles
        if !timeout.is_zero() {
            check_process()?;
        }
        self.shared.wait(timeout, &mut self.seen)?;
        self.with_endpoint(|_, _| Ok(()))
    }

    fn take(&mut self, header: &MessageHeader) -> Result<Option<Arrived<Host>>> {
        let taken =
            self.with_endpoint(|endpoint, context| endpoint.take_buffer(context, header))?;
        Ok(taken.and_then(MessageBuffer::into_host).map(|buffer| Arrived { buffer, ready: () }))
    }

    annulus_core::messages_are_blocks! {}

    fn pending(&self) -> bool {
        let endpoint = self.shared.lock();
        endpoint.contexts.get(&self.context).is_some_and(|context| context.has_unsent())
    }

    fn bytes_sent(&self) -> u64 {
        let endpoint = self.shared.lock();
        endpoint.contexts.get(&self.context).map_or(0, |context| context.bytes_sent)
    }

    fn posts_ahead(&self) -> bool {
        self.posts_ahead
    }

    fn runs_groups_in_order(&self) -> bool {
        false
    }
}

impl Control for Mpi {
    fn rank(&self) -> usize {
        self.rank
    }

    fn ranks(&self) -> usize {
        self.ranks
    }

    fn start_all_gather(&mut self, round: u64, bytes: &[u8]) -> Result<()> {
        check_process()?;
        self.with_endpoint(|endpoint, context| endpoint.start_all_gather(context, round, bytes))
    }

    fn try_all_gather(&mut self, round: u64) -> Result<Option<Vec<Vec<u8>>>> {
        self.with_endpoint(|endpoint, context| endpoint.try_all_gather(context, round))
    }

    fn stragglers(&self, round: u64) -> Vec<usize> {
        self.shared.lock().stragglers(self.context, round)
    }

    fn abort(&mut self, error: &Error) {
        if !is_forked() {
            self.with_endpoint(|endpoint, _| endpoint.abort(error));
        }
    }

    fn heartbeat(&mut self, working: bool) {
        if !is_forked() {
            self.with_endpoint(|endpoint, context| endpoint.heartbeat(context, working));
        }
    }

    fn placement(&self) -> Option<&Placement> {
        Some(self.nodes.placement())
    }

    fn any_thread(&self) -> bool {
        Self::any_thread(self)
    }

    fn last_heard(&self, peer: usize) -> Instant {
        if peer == self.rank { Instant::now() } else { self.shared.lock().peers.last_heard(peer) }
    }

    fn watched(&self) -> Option<&[usize]> {
        Some(&self.watched)
    }

    fn last_work(&self) -> Instant {
        self.shared.lock().work.latest().at
    }
}
