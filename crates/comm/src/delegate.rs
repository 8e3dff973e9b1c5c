//! Delegation of methods that a wrapper leaves to its inner transport, and [`HostMessages`]: the
//! messages in host memory of a transport of any space, as a transport of host memory.

use std::time::Duration;

use annulus_core::{
    Arrived, Control, Host, Incoming, MessageHeader, Outgoing, Result, Space, Transport,
};

/// Expands, inside `impl Control for Wrapper<T>`, to the named methods of
/// [`Control`](annulus_core::Control), which call the same methods of `self.inner`. `last_heard`
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

/// Expands, inside `impl Transport<Host> for Wrapper<T>`, to `control`, to
/// [`messages_are_blocks`](annulus_core::messages_are_blocks), and to the named methods of
/// [`Transport`](annulus_core::Transport), which call the same methods of `self.inner`.
///
/// A wrapper of a transport of any space `S` names it, as `of S:` before the methods. Messages in
/// host memory then have methods of their own, `post_host` and `take_host`.
///
/// # Examples
/// A transport that counts its receives.
/// ```
/// use annulus_core::{Arrived, Control, Host, MessageHeader, Result, Transport};
///
/// struct Counting<T> {
///     inner: T,
///     receives: u64,
/// }
///
/// impl<T: Transport<Host>> Transport<Host> for Counting<T> {
///     annulus_comm::forward_transport! {
///         post progress pending bytes_sent posts_ahead runs_groups_in_order
///     }
///
///     fn take(&mut self, header: &MessageHeader) -> Result<Option<Arrived<Host>>> {
///         let taken = self.inner.take(header)?;
///         self.receives += u64::from(taken.is_some());
///         Ok(taken)
///     }
/// }
///
/// impl<T: Control> Control for Counting<T> {
///     annulus_comm::forward_control! {
///         rank ranks start_all_gather try_all_gather stragglers abort heartbeat placement
///         last_heard last_work
///     }
/// }
/// ```
#[macro_export]
macro_rules! forward_transport {
    (@ $space:ty, post) => {
        fn post(
            &mut self,
            sends: &[$crate::core::Outgoing<'_, $space>],
            receives: &mut Vec<$crate::core::Incoming<$space>>,
        ) -> $crate::core::Result<()> {
            $crate::core::Transport::<$space>::post(&mut self.inner, sends, receives)
        }
    };
    (@ $space:ty, progress) => {
        fn progress(&mut self, timeout: std::time::Duration) -> $crate::core::Result<()> {
            $crate::core::Transport::<$space>::progress(&mut self.inner, timeout)
        }
    };
    (@ $space:ty, take) => {
        fn take(
            &mut self,
            header: &$crate::core::MessageHeader,
        ) -> $crate::core::Result<Option<$crate::core::Arrived<$space>>> {
            $crate::core::Transport::<$space>::take(&mut self.inner, header)
        }
    };
    (@ $space:ty, take_host) => {
        fn take_host(
            &mut self,
            header: &$crate::core::MessageHeader,
        ) -> $crate::core::Result<Option<$crate::core::Arrived<$crate::core::Host>>> {
            $crate::core::Transport::<$space>::take_host(&mut self.inner, header)
        }
    };
    (@ $space:ty, pending) => {
        fn pending(&self) -> bool {
            $crate::core::Transport::<$space>::pending(&self.inner)
        }
    };
    (@ $space:ty, bytes_sent) => {
        fn bytes_sent(&self) -> u64 {
            $crate::core::Transport::<$space>::bytes_sent(&self.inner)
        }
    };
    (@ $space:ty, posts_ahead) => {
        fn posts_ahead(&self) -> bool {
            $crate::core::Transport::<$space>::posts_ahead(&self.inner)
        }
    };
    (@ $space:ty, runs_groups_in_order) => {
        fn runs_groups_in_order(&self) -> bool {
            $crate::core::Transport::<$space>::runs_groups_in_order(&self.inner)
        }
    };
    (of $space:ident: $($method:ident)*) => {
        fn control(&mut self) -> &mut dyn $crate::core::Control {
            self
        }

        $( $crate::forward_transport!(@ $space, $method); )*
    };
    ($($method:ident)*) => {
        fn control(&mut self) -> &mut dyn $crate::core::Control {
            self
        }

        $crate::core::messages_are_blocks! {}

        $( $crate::forward_transport!(@ $crate::core::Host, $method); )*
    };
}

/// Expands, inside `impl Transport<S> for Wrapper<T>` over a host transport `inner`, to
/// `post_host` and `take_host` of [`Transport`](annulus_core::Transport): `inner` moves messages in
/// host memory. The wrapper, or its named field, has `check` and `remember` of
/// [`Failure`](crate::message::Failure), and it counts `bytes_sent`.
macro_rules! host_messages_of_inner {
    ($($failure:ident)?) => {
        fn post_host(
            &mut self,
            sends: &[annulus_core::Outgoing<'_, annulus_core::Host>],
            receives: &mut Vec<annulus_core::Incoming<annulus_core::Host>>,
        ) -> annulus_core::Result<()> {
            self.$($failure.)?check()?;
            let bytes: u64 = sends.iter().map(|send| send.header.bytes()).sum();
            let posted = self.inner.post_host(sends, receives);
            self.$($failure.)?remember(posted)?;
            self.bytes_sent += bytes;
            Ok(())
        }

        fn take_host(
            &mut self,
            header: &annulus_core::MessageHeader,
        ) -> annulus_core::Result<Option<annulus_core::Arrived<annulus_core::Host>>> {
            self.$($failure.)?check()?;
            self.inner.take_host(header)
        }
    };
}

pub(crate) use {forward_control, host_messages_of_inner};

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
