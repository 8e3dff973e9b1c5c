//! Waits for the ranks of a program while an endpoint is made.
//!
//! A collective operation on the host's communicator must not be abandoned, because MPI would match
//! it with the host's next one. So the one duplication waits as long as the host does, unless the
//! caller sets a limit; the error then says that the operation stays pending.

use std::{fmt, sync::Arc, time::Duration};

/// Interval of warnings.
const WARNING_INTERVAL: Duration = Duration::from_secs(30);

type Warning = Arc<dyn Fn(Duration) + Send + Sync>;

/// Time to wait for the other ranks when an endpoint is created. Default: as long as it takes, as
/// any collective operation of MPI does, without warnings.
#[derive(Clone)]
pub struct Timeout {
    pub(super) limit: Option<Duration>,
    pub(super) warning_interval: Duration,
    warning: Option<Warning>,
}

impl Timeout {
    /// Waits without a limit.
    pub const fn unlimited() -> Self {
        Self { limit: None, warning_interval: WARNING_INTERVAL, warning: None }
    }

    /// Waits for at most `limit`.
    ///
    /// If it runs out, a duplication stays pending on the caller's communicator, which therefore
    /// cannot be used for collective operations any more. It has no such effect on a communicator
    /// that is adopted ([`Mpi::adopt`](super::Mpi::adopt)).
    pub const fn at_most(limit: Duration) -> Self {
        Self { limit: Some(limit), warning_interval: WARNING_INTERVAL, warning: None }
    }

    /// Calls `warning` with the time waited, every 30 s.
    #[must_use]
    pub fn with_warning(self, warning: impl Fn(Duration) + Send + Sync + 'static) -> Self {
        self.with_warning_every(WARNING_INTERVAL, warning)
    }

    /// Calls `warning` with the time waited, once in each interval.
    #[must_use]
    pub fn with_warning_every(
        self,
        interval: Duration,
        warning: impl Fn(Duration) + Send + Sync + 'static,
    ) -> Self {
        Self { warning_interval: interval, warning: Some(Arc::new(warning)), ..self }
    }

    pub(super) fn warn(&self, waited: Duration) {
        if let Some(warning) = &self.warning {
            warning(waited);
        }
    }
}

impl Default for Timeout {
    fn default() -> Self {
        Self::unlimited()
    }
}

impl fmt::Debug for Timeout {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Timeout").field("limit", &self.limit).finish_non_exhaustive()
    }
}
