//! Delegation of methods that a wrapper leaves to its inner transport.

/// Expands, inside `impl Control for Wrapper<T>`, to the named methods of
/// [`Control`](annulus_core::Control), each of which calls that of `self.inner`. `last_heard`
/// stands for `watched`, too, because the two belong together, `start_all_gather` for
/// `start_entry`, and `placement` for `any_thread`.
///
/// # Examples
/// ```
/// use annulus_core::Control;
///
/// struct Named<T> {
///     inner: T,
///     name: String,
/// }
///
/// impl<T: Control> Control for Named<T> {
///     annulus_comm::forward_control! {
///         rank ranks start_all_gather try_all_gather stragglers abort heartbeat placement
///         last_heard last_work
///     }
/// }
/// ```
#[macro_export]
macro_rules! forward_control {
    ($($method:ident)*) => { $( $crate::forward_control!(@ $method); )* };
    (@ rank) => {
        fn rank(&self) -> usize {
            self.inner.rank()
        }
    };
    (@ ranks) => {
        fn ranks(&self) -> usize {
            self.inner.ranks()
        }
    };
    (@ start_all_gather) => {
        fn start_all_gather(&mut self, round: u64, bytes: &[u8]) -> $crate::core::Result<()> {
            self.inner.start_all_gather(round, bytes)
        }

        fn start_entry(&mut self, round: u64, bytes: &[u8]) -> $crate::core::Result<()> {
            self.inner.start_entry(round, bytes)
        }
    };
    (@ try_all_gather) => {
        fn try_all_gather(&mut self, round: u64) -> $crate::core::Result<Option<Vec<Vec<u8>>>> {
            self.inner.try_all_gather(round)
        }
    };
    (@ stragglers) => {
        fn stragglers(&self, round: u64) -> Vec<usize> {
            self.inner.stragglers(round)
        }
    };
    (@ abort) => {
        fn abort(&mut self, error: &$crate::core::Error) {
            self.inner.abort(error);
        }
    };
    (@ heartbeat) => {
        fn heartbeat(&mut self, working: bool) {
            self.inner.heartbeat(working);
        }
    };
    (@ placement) => {
        fn placement(&self) -> Option<&$crate::core::Placement> {
            self.inner.placement()
        }

        fn any_thread(&self) -> bool {
            self.inner.any_thread()
        }
    };
    (@ last_heard) => {
        fn last_heard(&self, peer: usize) -> std::time::Instant {
            self.inner.last_heard(peer)
        }

        fn watched(&self) -> Option<&[usize]> {
            self.inner.watched()
        }
    };
    (@ last_work) => {
        fn last_work(&self) -> std::time::Instant {
            self.inner.last_work()
        }
    };
}

/// Expands, inside `impl Transport<S> for Wrapper<T>` over a host transport `inner`, to
/// `post_host` and `take_host` of [`Transport`](annulus_core::Transport): `inner` moves messages in
/// host memory. The wrapper has `check_alive`, `remember` and `bytes_sent`.
macro_rules! host_messages_of_inner {
    () => {
        fn post_host(
            &mut self,
            sends: &[annulus_core::Outgoing<'_, annulus_core::Host>],
            receives: &mut Vec<annulus_core::Incoming<annulus_core::Host>>,
        ) -> annulus_core::Result<()> {
            self.check_alive()?;
            let bytes: u64 = sends.iter().map(|send| send.header.bytes()).sum();
            let posted = self.inner.post_host(sends, receives);
            self.remember(posted)?;
            self.bytes_sent += bytes;
            Ok(())
        }

        fn take_host(
            &mut self,
            header: &annulus_core::MessageHeader,
        ) -> annulus_core::Result<Option<annulus_core::Arrived<annulus_core::Host>>> {
            self.check_alive()?;
            self.inner.take_host(header)
        }
    };
}

pub(crate) use {forward_control, host_messages_of_inner};
