//! The one error type, in three families: the caller's fault and nothing happened; a resource; the plan is dead.

use std::time::Duration;

/// The result of everything in annulus that can fail.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What went wrong, with enough to act on. [`Error::code`] is stable across versions.
#[non_exhaustive]
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Error {
    /// An argument has a value or shape that has no meaning. Nothing was written.
    #[error("{argument}: got {got}, want {want}")]
    InvalidArgument {
        /// The argument's name as the caller knows it.
        argument: String,
        /// What was given.
        got: String,
        /// What would have been accepted.
        want: String,
    },
    /// A meaningful combination that this backend, transport or build cannot do. Nothing was written.
    #[error("{what} is not supported by {by}")]
    Unsupported {
        /// The feature or combination.
        what: String,
        /// Who cannot do it.
        by: String,
    },
    /// A collective call was given different arguments on different ranks. The same error on every rank.
    #[error("{field} differs between ranks: rank {rank} has {got}, rank 0 has {rank0}")]
    RankMismatch {
        /// The field of the agreed descriptor.
        field: String,
        /// The lowest rank that differs from rank 0.
        rank: usize,
        /// That rank's value.
        got: String,
        /// Rank 0's value.
        rank0: String,
    },
    /// Another rank refused its arguments, so the collective call did nothing anywhere.
    #[error("rank {rank} refused the call: {what}")]
    Refused {
        /// The lowest rank that refused.
        rank: usize,
        /// Its error, as text.
        what: String,
    },
    /// Memory could not be had.
    #[error("out of memory: {what} needs {asked} bytes{}", free.map(|free| format!(", {free} free")).unwrap_or_default())]
    OutOfMemory {
        /// The tensor that was to be allocated, by its name, or a part of the plan.
        what: String,
        /// Bytes asked for.
        asked: u64,
        /// Bytes free, where the device tells.
        free: Option<u64>,
    },
    /// A file could not be read or written.
    #[error("{path}: {what}")]
    Io {
        /// The file.
        path: String,
        /// What the system said.
        what: String,
    },
    /// The device failed; the plan is dead.
    #[error("device failed: {what}")]
    Device {
        /// What the device said.
        what: String,
    },
    /// A contradiction within annulus, which is a defect to be reported, or a panic, also in a mask
    /// or bias function of the caller's. The plan is dead.
    #[error("internal error: {what}")]
    Internal {
        /// The contradiction.
        what: String,
    },
    /// A transfer failed; the plan is dead.
    #[error("communication with rank {peer} failed in step {step}: {what}")]
    Comm {
        /// The other end of the transfer.
        peer: usize,
        /// The ring step.
        step: usize,
        /// What failed.
        what: String,
    },
    /// A peer was silent, or the whole ring made no progress, for as long as the deadline; the plan is dead.
    #[error("rank {peer} did not deliver in step {step} within the deadline (waited {:.1} s)", waited.as_secs_f64())]
    Timeout {
        /// The peer that was waited for.
        peer: usize,
        /// The ring step.
        step: usize,
        /// How long.
        waited: Duration,
    },
    /// A peer is gone; the plan is dead.
    #[error("rank {peer} is gone (noticed in step {step})")]
    PeerLost {
        /// The peer.
        peer: usize,
        /// The ring step in which it was noticed.
        step: usize,
    },
    /// Another rank failed in mid-call and said so; the plan is dead. The same origin on every rank.
    #[error("rank {rank} aborted: {what}")]
    Aborted {
        /// The rank that failed first.
        rank: usize,
        /// Its error, as text.
        what: String,
    },
    /// An earlier call killed this plan.
    #[error("the plan is poisoned by an earlier failure: {first}")]
    Poisoned {
        /// That failure, as text.
        first: String,
    },
}

impl Error {
    /// Builds [`Error::InvalidArgument`] from anything printable.
    pub fn invalid(argument: impl Into<String>, got: impl ToString, want: impl ToString) -> Self {
        Self::InvalidArgument {
            argument: argument.into(),
            got: got.to_string(),
            want: want.to_string(),
        }
    }

    /// Builds [`Error::Unsupported`].
    pub fn unsupported(what: impl Into<String>, by: impl Into<String>) -> Self {
        Self::Unsupported { what: what.into(), by: by.into() }
    }

    /// Builds [`Error::OutOfMemory`] where nobody says what is free.
    pub fn out_of_memory(what: impl Into<String>, asked: u64) -> Self {
        Self::OutOfMemory { what: what.into(), asked, free: None }
    }

    /// Builds [`Error::Internal`].
    pub fn internal(what: impl ToString) -> Self {
        Self::Internal { what: what.to_string() }
    }

    /// The stable integer of this kind of error: 1–19 the caller's fault, 20–39 a resource, 40–59 the plan is dead.
    pub const fn code(&self) -> i32 {
        match self {
            Self::InvalidArgument { .. } => 1,
            Self::Unsupported { .. } => 2,
            Self::RankMismatch { .. } => 3,
            Self::Refused { .. } => 4,
            Self::OutOfMemory { .. } => 20,
            Self::Io { .. } => 21,
            Self::Device { .. } => 40,
            Self::Comm { .. } => 41,
            Self::Timeout { .. } => 42,
            Self::PeerLost { .. } => 43,
            Self::Aborted { .. } => 44,
            Self::Poisoned { .. } => 45,
            Self::Internal { .. } => 46,
        }
    }

    /// Whether the plan that returned this can still be used.
    pub const fn is_fatal(&self) -> bool {
        self.code() >= 40
    }
}
