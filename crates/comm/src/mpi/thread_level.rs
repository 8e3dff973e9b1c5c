//! Thread levels of MPI.

use std::fmt;

/// Threads of a process that may call MPI.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum ThreadLevel {
    /// The process has one thread.
    Single,
    /// Only the main thread.
    Funneled,
    /// Any thread, one at a time.
    Serialized,
    /// Any thread at any time.
    Multiple,
}

impl fmt::Display for ThreadLevel {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Single => "MPI_THREAD_SINGLE",
            Self::Funneled => "MPI_THREAD_FUNNELED",
            Self::Serialized => "MPI_THREAD_SERIALIZED",
            Self::Multiple => "MPI_THREAD_MULTIPLE",
        })
    }
}
