//! Calls of MPI that concern the library: its presence and version, return codes, GPU awareness.
//!
//! Rules, on which every `SAFETY` comment here, in [`super::lifetime`], [`super::communicator`],
//! [`super::nodes`] and [`super::requests`] relies:
//!
//! 1. **Alive.** MPI is called only between `MPI_Init` and `MPI_Finalize`
//!    ([`check_alive`](super::lifetime::check_alive)). The exceptions are the inquiries that MPI
//!    allows at any time. A host program that finalises MPI on another thread during one of these
//!    calls violates its own contract with MPI.
//! 2. **Thread.** Below `MPI_THREAD_MULTIPLE` a communicator is created on MPI's main thread only,
//!    and used and freed on that thread only (`Communicator::enter`). So no two calls from here are
//!    ever concurrent, and `MPI_THREAD_FUNNELED` suffices.
//! 3. **Handles.** An `MpiCommunicator` holds a handle that MPI returned to it alone, or that the
//!    host has given to it (`Communicator::adopt`). It is freed at most once, by
//!    `Communicator::free`, which consumes it. Dropping one frees nothing.
//!
//! GPU awareness is reported in several dialects:
//!
//! | library | report |
//! |---|---|
//! | Open MPI, MPICH, MVAPICH | `MPIX_Query_cuda_support()`, and the same for other runtimes |
//! | MPICH from 4.0 | `MPIX_GPU_query_support(kind, &supported)` |
//! | Cray MPICH | the variable `MPICH_GPU_SUPPORT_ENABLED`, and its transport library for the runtime |
#![expect(unsafe_code, reason = "calls of the C interface of MPI")]

use std::{
    ffi::{CStr, c_char, c_int},
    fmt,
};

use annulus_core::{Error, Result};
use annulus_mpi::ffi;

use super::lifetime::check_alive;

/// Peer and ring step that an error is reported with.
#[derive(Debug, Clone, Copy)]
pub(super) struct PeerStep {
    pub(super) peer: usize,
    pub(super) step: usize,
}

impl PeerStep {
    /// `peer`, outside of any ring step.
    pub(super) const fn of(peer: usize) -> Self {
        Self { peer, step: 0 }
    }
}

/// Return codes and error classes, in the type of C's return values.
const SUCCESS: c_int = ffi::MPI_SUCCESS as c_int;
const TRUNCATE: c_int = ffi::MPI_ERR_TRUNCATE as c_int;

/// Meaning of a return code other than success.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum MpiError {
    /// The message has another length than its receive.
    Length,
    /// The peer has failed, as a fault-tolerant MPI reports.
    PeerLost,
    /// Anything else, with MPI's error string.
    Other(String),
}

impl MpiError {
    /// Converts a return code.
    pub(super) fn check(code: c_int) -> Result<(), Self> {
        if code == SUCCESS {
            return Ok(());
        }
        let mut length = 0;
        let mut text = [0 as c_char; ffi::MPI_MAX_ERROR_STRING as usize + 1];
        // SAFETY: rule 1 (a code comes from a call that was allowed); MPI writes at most
        // MPI_MAX_ERROR_STRING characters, for which `text` has space, and the length, which lives
        // through the call
        let status = unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr(), &raw mut length) };
        if class(code) == TRUNCATE {
            return Err(Self::Length);
        }
        let length = if status == SUCCESS { count(length).min(text.len()) } else { 0 };
        let text: Vec<u8> = text[..length].iter().map(|&letter| letter.to_ne_bytes()[0]).collect();
        let text = String::from_utf8_lossy(&text).into_owned();
        Err(if text.contains("PROC_FAILED") {
            Self::PeerLost
        } else {
            Self::Other(format!("MPI error {code}: {text}"))
        })
    }

    /// Converts to the error that a caller gets.
    pub(super) fn into_error(self, PeerStep { peer, step }: PeerStep) -> Error {
        match self {
            Self::Length => Error::Comm {
                peer,
                step,
                what: "message truncated: longer than the receive".to_owned(),
            },
            Self::PeerLost => Error::PeerLost { peer, step },
            Self::Other(what) => Error::Comm { peer, step, what },
        }
    }
}

/// Returns the error class of a return code.
fn class(code: c_int) -> c_int {
    let mut class = SUCCESS;
    // SAFETY: rule 1 (a code comes from a call that was allowed); the number lives through the call
    unsafe { ffi::MPI_Error_class(code, &raw mut class) };
    class
}

/// Returns true for `MPI_ERR_IN_STATUS`: each status holds the return code of its own request.
pub(super) fn is_error_in_status(code: c_int) -> bool {
    code != SUCCESS && class(code) == ffi::MPI_ERR_IN_STATUS as c_int
}

/// Converts a return code to the error that a caller gets.
pub(super) fn check(code: c_int, at: PeerStep) -> Result<()> {
    MpiError::check(code).map_err(|error| error.into_error(at))
}

/// Checks that there is an MPI. Only one that is loaded at run time can be missing.
///
/// # Errors
/// [`Error::Unsupported`] with the loader's reason.
pub(super) fn check_loaded() -> Result<()> {
    annulus_mpi::loaded().map_err(|why| Error::unsupported("MPI", format!("this machine: {why}")))
}

/// Converts a count of MPI's, which is never negative.
pub(super) fn count(number: c_int) -> usize {
    usize::try_from(number).unwrap_or(0)
}

/// Returns name and version of the MPI library.
pub(super) fn library() -> Result<String> {
    check_loaded()?;
    // SAFETY: a constant of the linked MPI
    let capacity = count(unsafe { ffi::RSMPI_MAX_LIBRARY_VERSION_STRING });
    let mut text = vec![0u8; capacity + 1];
    let mut length = 0;
    // SAFETY: may be called at any time; MPI writes at most `capacity` characters and the length
    let code = unsafe {
        ffi::MPI_Get_library_version(text.as_mut_ptr().cast::<c_char>(), &raw mut length)
    };
    check(code, PeerStep::of(0))?;
    text.truncate(count(length).min(capacity));
    Ok(String::from_utf8_lossy(&text).trim_end_matches(['\0', '\n']).to_owned())
}

/// Runtime whose device memory an MPI library may accept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GpuRuntime {
    /// CUDA, of NVIDIA. The only one of which this library passes memory.
    Cuda,
    /// HIP, of AMD.
    Hip,
    /// Level Zero, of Intel.
    LevelZero,
}

impl GpuRuntime {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Cuda, Self::Hip, Self::LevelZero];

    /// Functions without arguments that report it.
    const fn queries(self) -> &'static [&'static CStr] {
        match self {
            Self::Cuda => &[c"MPIX_Query_cuda_support"],
            Self::Hip => &[c"MPIX_Query_hip_support", c"MPIX_Query_rocm_support"],
            Self::LevelZero => &[c"MPIX_Query_ze_support"],
        }
    }

    /// `MPIX_GPU_SUPPORT_*` of MPICH.
    const fn kind(self) -> c_int {
        match self {
            Self::Cuda => 0,
            Self::LevelZero => 1,
            Self::Hip => 2,
        }
    }

    /// Cray MPICH's transport library for it.
    const fn cray_library(self) -> &'static str {
        match self {
            Self::Cuda => "libmpi_gtl_cuda",
            Self::Hip => "libmpi_gtl_hsa",
            Self::LevelZero => "libmpi_gtl_ze",
        }
    }
}

impl fmt::Display for GpuRuntime {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Cuda => "CUDA",
            Self::Hip => "HIP",
            Self::LevelZero => "Level Zero",
        })
    }
}

/// Report of an MPI library on pointers to the memory of a GPU runtime.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GpuAwareness {
    /// It accepts them.
    Yes,
    /// It does not accept them.
    No,
    /// It does not report this.
    Unknown,
}

impl GpuAwareness {
    /// Environment variable that overrides the library's report: 1 or 0.
    pub const VARIABLE: &'static str = "ANNULUS_GPU_AWARE";

    /// Returns the report of the MPI library of this process on CUDA memory.
    pub fn of_library() -> Self {
        Self::of_runtime(GpuRuntime::Cuda)
    }

    /// Returns the report of the MPI library of this process on memory of `runtime`.
    pub fn of_runtime(runtime: GpuRuntime) -> Self {
        let is_cray = library().is_ok_and(|version| version.contains("CRAY MPICH"));
        let cray = is_cray.then(|| {
            let enabled = std::env::var("MPICH_GPU_SUPPORT_ENABLED").ok();
            let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
            is_cray_enabled(runtime, enabled.as_deref(), &maps)
        });
        let own = runtime.queries().iter().map(|query| annulus_mpi::query_gpu_support(query));
        // unlike the others, it may be called between MPI_Init and MPI_Finalize only
        let general = check_alive().ok().and_then(|()| annulus_mpi::query_gpu_kind(runtime.kind()));
        Self::of_reports(cray, own.chain([general]))
    }

    /// Concludes from Cray's settings, if the library is Cray's, else from the reports of functions
    /// that the library has.
    fn of_reports(cray: Option<bool>, functions: impl Iterator<Item = Option<bool>>) -> Self {
        let any = || functions.flatten().reduce(|one, other| one || other);
        match cray.or_else(any) {
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

/// Returns true if Cray MPICH accepts memory of `runtime`: if the variable enables it and the
/// library for it is loaded.
fn is_cray_enabled(runtime: GpuRuntime, enabled: Option<&str>, maps: &str) -> bool {
    enabled.is_some_and(|value| value.trim() == "1") && maps.contains(runtime.cray_library())
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
    fn any_function_may_report_support_and_cray_decides_by_its_settings() {
        use GpuAwareness::{No, Unknown, Yes};
        let of = |cray, functions: [Option<bool>; 2]| {
            GpuAwareness::of_reports(cray, functions.into_iter())
        };
        assert_eq!(of(None, [None, None]), Unknown);
        assert_eq!(of(None, [Some(false), None]), No);
        assert_eq!(of(None, [None, Some(true)]), Yes);
        assert_eq!(of(None, [Some(false), Some(true)]), Yes);
        assert_eq!(of(Some(false), [Some(true), None]), No);
        assert_eq!(of(Some(true), [Some(false), None]), Yes);
        let maps = "7f r-xp /opt/cray/pe/lib64/libmpi_gtl_hsa.so.0\n";
        assert!(is_cray_enabled(GpuRuntime::Hip, Some("1"), maps));
        assert!(!is_cray_enabled(GpuRuntime::Cuda, Some("1"), maps));
        assert!(!is_cray_enabled(GpuRuntime::Hip, Some("0"), maps));
        assert!(!is_cray_enabled(GpuRuntime::Hip, None, maps));
        // no MPI is loaded that has such a function, or it reports no GPU of this machine
        assert!(GpuRuntime::ALL.map(GpuAwareness::of_runtime).iter().all(|&aware| aware != Yes));
    }

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
