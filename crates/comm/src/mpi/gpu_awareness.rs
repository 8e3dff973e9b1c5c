//! GPU awareness of the MPI library.

use std::fmt;

use annulus_core::{Error, Result};

/// Report of an MPI library on pointers to CUDA memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GpuAwareness {
    /// It accepts them.
    Yes,
    /// It does not accept them.
    No,
    /// It has no function that reports this.
    Unknown,
}

impl GpuAwareness {
    /// Environment variable that overrides the library's report: 1 or 0.
    pub const VARIABLE: &'static str = "ANNULUS_GPU_AWARE";

    /// Returns the report of the MPI library of this process.
    pub fn of_library() -> Self {
        match annulus_mpi::query_cuda_support() {
            Some(true) => Self::Yes,
            Some(false) => Self::No,
            None => Self::Unknown,
        }
    }

    /// Returns true if CUDA memory is to be passed to MPI: as the variable says, else if the
    /// library reports that it accepts it.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_variable_overrides_the_library() {
        use GpuAwareness::{No, Unknown, Yes};
        let decide = |variable| [Yes, No, Unknown].map(|report| report.decides_with(variable));
        assert_eq!(decide(None), [Ok(true), Ok(false), Ok(false)]);
        assert_eq!(decide(Some("1")), [Ok(true), Ok(true), Ok(true)]);
        assert_eq!(decide(Some("0")), [Ok(false), Ok(false), Ok(false)]);
        let error = Yes.decides_with(Some("maybe")).unwrap_err().to_string();
        assert_eq!(error, "ANNULUS_GPU_AWARE: got maybe, want 1 or 0");
    }
}
