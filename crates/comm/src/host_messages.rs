//! The messages in host memory of a transport of any space, as a transport of host memory.

use std::time::Duration;

use annulus_core::{
    Arrived, Control, Host, Incoming, MessageHeader, Outgoing, Result, Space, Transport,
};

use crate::delegate::forward_control;

/// Moves blocks in host memory as the [messages in host memory](Transport::post_host) of `inner`.
pub(crate) struct HostMessages<'a, S: Space> {
    inner: &'a mut dyn Transport<S>,
}

impl<'a, S: Space> HostMessages<'a, S> {
    pub(crate) fn new(inner: &'a mut dyn Transport<S>) -> Self {
        Self { inner }
    }
}

impl<S: Space> Transport<Host> for HostMessages<'_, S> {
    fn control(&mut self) -> &mut dyn Control {
        self.inner.control()
    }

    fn post(
        &mut self,
        sends: &[Outgoing<'_, Host>],
        receives: &mut Vec<Incoming<Host>>,
    ) -> Result<()> {
        self.inner.post_host(sends, receives)
    }

    fn progress(&mut self, timeout: Duration) -> Result<()> {
        self.inner.progress(timeout)
    }

    fn take(&mut self, header: &MessageHeader) -> Result<Option<Arrived<Host>>> {
        self.inner.take_host(header)
    }

    annulus_core::messages_are_blocks! {}

    fn pending(&self) -> bool {
        self.inner.pending()
    }

    fn bytes_sent(&self) -> u64 {
        self.inner.bytes_sent()
    }

    fn posts_ahead(&self) -> bool {
        self.inner.posts_ahead()
    }

    fn runs_groups_in_order(&self) -> bool {
        self.inner.runs_groups_in_order()
    }
}

impl<S: Space> Control for HostMessages<'_, S> {
    forward_control! {
        rank ranks placement start_all_gather try_all_gather stragglers abort heartbeat last_heard
        last_work
    }
}
