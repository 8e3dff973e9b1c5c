//! The error type of all crates. Errors form three families: invalid calls, which have no effect;
//! missing resources; and failures after which the plan is unusable.

use std::time::Duration;

/// Result of a fallible function of annulus.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Any error of annulus. [`Error::code`] is stable across versions.
#[non_exhaustive]
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Error {
    /// An argument has an invalid value or shape. Nothing was written.
    #[error("{argument}: got {got}, want {want}")]
    InvalidArgument {
        /// Name of the argument in the public interface.
        argument: String,
        /// Value or shape that was passed.
        got: String,
        /// Values or shapes that are accepted.
        want: String,
    },
    /// A valid combination that this backend, transport or build does not implement. Nothing was
    /// written.
    #[error("{what} is not supported by {by}")]
    Unsupported {
        /// Feature or combination.
        what: String,
        /// Backend, transport or build that lacks it.
        by: String,
    },
    /// The arguments of a collective call differ between ranks. Every rank returns the same error.
    #[error("{field} differs between ranks: rank {rank} has {got}, rank 0 has {rank0}")]
    RankMismatch {
        /// Field of the spec or of the call's arguments.
        field: String,
        /// Lowest rank whose value differs from that of rank 0.
        rank: usize,
        /// Value of `rank`.
        got: String,
        /// Value of rank 0.
        rank0: String,
    },
    /// Another rank rejected its arguments, so the collective call had no effect on any rank.
    #[error("rank {rank} refused the call: {what}")]
    Refused {
        /// Lowest rank that rejected its arguments.
        rank: usize,
        /// Error of that rank, as text.
        what: String,
    },
    /// An allocation failed.
    #[error(
        "out of memory: {what}{}{}",
        if *asked > 0 { format!(" needs {asked} bytes") } else { String::new() },
        free.map(|free| format!(", {free} free")).unwrap_or_default()
    )]
    OutOfMemory {
        /// Tensor, or part of the plan, that was to be allocated.
        what: String,
        /// Number of bytes requested; 0 if the device does not report it.
        asked: u64,
        /// Number of free bytes, if the device reports it.
        free: Option<u64>,
    },
    /// A file could not be read or written.
    #[error("{path}: {what}")]
    Io {
        /// Path of the file.
        path: String,
        /// Message of the operating system.
        what: String,
    },
    /// A rank did not enter a collective call within the arrival deadline. Nothing was done: the
    /// plan is usable, and this rank makes the same call again.
    #[error(
        "rank {peer}: its entry into the call has not arrived within the arrival deadline \
         (waited {:.1} s)",
        waited.as_secs_f64()
    )]
    ArrivalTimeout {
        /// Rank whose entry is missing; of several, one that is silent.
        peer: usize,
        /// Time waited.
        waited: Duration,
    },
    /// The device failed. The plan is unusable.
    #[error("device failed: {what}")]
    Device {
        /// Message of the device.
        what: String,
    },
    /// A violated invariant, which is a defect of annulus, or a panic, also in a mask or bias
    /// function of the caller. The plan is unusable.
    #[error("internal error: {what}")]
    Internal {
        /// The violated invariant, or the message of the panic.
        what: String,
    },
    /// A transfer failed. The plan is unusable.
    #[error("communication with rank {peer} failed in step {step}: {what}")]
    Comm {
        /// Rank at the other end of the transfer.
        peer: usize,
        /// Ring step of the transfer.
        step: usize,
        /// Cause of the failure.
        what: String,
    },
    /// Within a call a peer sent nothing, or no rank of the ring made progress, for the deadline.
    /// The plan is unusable.
    #[error(
        "rank {peer} did not deliver in step {step} within the deadline (waited {:.1} s)",
        waited.as_secs_f64()
    )]
    Timeout {
        /// Rank that this rank waited for.
        peer: usize,
        /// Ring step in which it waited.
        step: usize,
        /// Time waited.
        waited: Duration,
    },
    /// The connection to a peer was lost. The plan is unusable.
    #[error("connection to rank {peer} lost (detected in step {step})")]
    PeerLost {
        /// Rank of the peer.
        peer: usize,
        /// Ring step in which the loss was detected.
        step: usize,
    },
    /// Another rank failed during the call and aborted it on all ranks. The plan is unusable. Every
    /// rank reports the same origin.
    #[error("rank {rank} aborted: {what}")]
    Aborted {
        /// Rank that failed first.
        rank: usize,
        /// Error of that rank, as text.
        what: String,
    },
    /// An earlier call failed and left the plan unusable.
    #[error("the plan is poisoned by an earlier failure: {first}")]
    Poisoned {
        /// Error of the earlier call, as text.
        first: String,
    },
}

impl Error {
    /// Creates [`Error::InvalidArgument`] from printable values.
    pub fn invalid(argument: impl Into<String>, got: impl ToString, want: impl ToString) -> Self {
        Self::InvalidArgument {
            argument: argument.into(),
            got: got.to_string(),
            want: want.to_string(),
        }
    }

    /// Creates [`Error::Unsupported`].
    pub fn unsupported(what: impl Into<String>, by: impl Into<String>) -> Self {
        Self::Unsupported { what: what.into(), by: by.into() }
    }

    /// Creates [`Error::OutOfMemory`] with an unknown number of free bytes.
    pub fn out_of_memory(what: impl Into<String>, asked: u64) -> Self {
        Self::OutOfMemory { what: what.into(), asked, free: None }
    }

    /// Creates [`Error::Internal`].
    pub fn internal(what: impl ToString) -> Self {
        Self::Internal { what: what.to_string() }
    }

    /// Returns the stable code of this kind of error: 1–19 for invalid calls, 20–39 for missing
    /// resources or ranks, 40–59 for failures after which the plan is unusable.
    pub const fn code(&self) -> i32 {
        match self {
            Self::InvalidArgument { .. } => 1,
            Self::Unsupported { .. } => 2,
            Self::RankMismatch { .. } => 3,
            Self::Refused { .. } => 4,
            Self::OutOfMemory { .. } => 20,
            Self::Io { .. } => 21,
            Self::ArrivalTimeout { .. } => 22,
            Self::Device { .. } => 40,
            Self::Comm { .. } => 41,
            Self::Timeout { .. } => 42,
            Self::PeerLost { .. } => 43,
            Self::Aborted { .. } => 44,
            Self::Poisoned { .. } => 45,
            Self::Internal { .. } => 46,
        }
    }

    /// Returns true if the plan that returned this error is unusable.
    pub const fn is_fatal(&self) -> bool {
        self.code() >= 40
    }
}
