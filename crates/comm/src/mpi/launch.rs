//! Beginning and ending MPI, for a program that nobody has begun it for.

use std::fmt;

use annulus_core::{Error, Result};

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

    /// Whether MPI says that it takes pointers to CUDA memory. Where it does not, blocks are staged.
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

/// Whether an MPI takes pointers to CUDA memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GpuAwareness {
    /// It says that it does.
    Yes,
    /// It says that it does not.
    No,
    /// It has no way to say.
    Unknown,
}

impl GpuAwareness {
    /// The variable that decides, whatever MPI says: 1 or 0.
    pub const VARIABLE: &'static str = "ANNULUS_GPU_AWARE";

    /// What the MPI of this process says.
    pub fn of_library() -> Self {
        ffi::gpu_awareness()
    }

    /// Whether CUDA memory is handed to MPI: as the variable has it, else if MPI says that it takes it.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the variable has another value.
    pub fn decides(self) -> Result<bool> {
        let variable = std::env::var_os(Self::VARIABLE);
        self.decides_with(variable.as_ref().map(|value| value.to_string_lossy()).as_deref())
    }

    fn decides_with(self, variable: Option<&str>) -> Result<bool> {
        match variable {
            Some("1") => Ok(true),
            Some("0") => Ok(false),
            Some(other) => Err(Error::invalid(Self::VARIABLE, other, "1 or 0")),
            None => Ok(self == Self::Yes),
        }
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_variable_decides_and_mpi_where_there_is_none() {
        use GpuAwareness::{No, Unknown, Yes};
        assert_eq!(
            [Yes, No, Unknown].map(|says| says.decides_with(None)),
            [Ok(true), Ok(false), Ok(false)]
        );
        assert_eq!(
            [Yes, No, Unknown].map(|says| says.decides_with(Some("1"))),
            [Ok(true), Ok(true), Ok(true)]
        );
        assert_eq!(
            [Yes, No, Unknown].map(|says| says.decides_with(Some("0"))),
            [Ok(false), Ok(false), Ok(false)]
        );
        let error = Yes.decides_with(Some("maybe")).unwrap_err().to_string();
        assert_eq!(error, "ANNULUS_GPU_AWARE: got maybe, want 1 or 0");
    }
}
