//! Beginning and ending MPI, for a program that nobody has begun it for.

use std::fmt;

use annulus_core::Result;

use super::ffi;

/// MPI from its beginning to its end: what `main` of a program under a launcher holds. Where a host program has initialised MPI, it does nothing.
///
/// Dropping it finalises MPI if it has initialised it; while the thread panics it ends the job on all ranks instead, with status 101, for
/// whoever waits for a rank that panicked waits for ever.
///
/// Below `MPI_THREAD_MULTIPLE` it belongs on the main thread, like every call of MPI.
#[derive(Debug)]
pub struct Launch {
    began: bool,
}

impl Launch {
    /// Initialises MPI with the highest thread level that it grants, unless somebody has.
    ///
    /// # Errors
    /// [`annulus_core::Error::InvalidArgument`] if MPI was finalised already, [`annulus_core::Error::Comm`] if it fails.
    pub fn begin() -> Result<Self> {
        if ffi::state() == (true, false) {
            return Ok(Self { began: false });
        }
        ffi::initialize()?;
        Ok(Self { began: true })
    }

    /// Whether it was this that initialised MPI.
    pub const fn began(&self) -> bool {
        self.began
    }

    /// What the MPI library says of itself.
    ///
    /// # Errors
    /// [`annulus_core::Error::InvalidArgument`] if somebody has finalised MPI.
    pub fn library(&self) -> Result<String> {
        ffi::library()
    }

    /// Which threads of a process may call MPI, as MPI has granted.
    ///
    /// # Errors
    /// [`annulus_core::Error::InvalidArgument`] if somebody has finalised MPI.
    pub fn thread_level(&self) -> Result<ThreadLevel> {
        ffi::thread_level()
    }

    /// Whether MPI says that it takes pointers to device memory. Annulus does not need it: it stages.
    pub fn gpu_awareness(&self) -> GpuAwareness {
        ffi::gpu_awareness()
    }

    /// Ends the job on all ranks with this status.
    pub fn abort(&self, status: i32) -> ! {
        ffi::abort_job(status)
    }

    /// Leaves MPI as it is. For a rank that has lost another one: finalising would wait for it.
    pub fn abandon(mut self) {
        self.began = false;
    }
}

/// Which threads of a process may call MPI.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum ThreadLevel {
    /// There may be no other thread.
    Single,
    /// The main thread.
    Funneled,
    /// One at a time.
    Serialized,
    /// All, at any time.
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

/// Whether an MPI takes pointers to device memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GpuAwareness {
    /// It says that it does.
    Yes,
    /// It says that it does not.
    No,
    /// It has no way to say.
    Unknown,
}

impl fmt::Display for GpuAwareness {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Yes => "yes",
            Self::No => "no",
            Self::Unknown => "unknown",
        })
    }
}

impl Drop for Launch {
    fn drop(&mut self) {
        if self.began && std::thread::panicking() {
            ffi::abort_job(101);
        }
        if self.began {
            ffi::finalize();
        }
    }
}
