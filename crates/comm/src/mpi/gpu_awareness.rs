//! GPU awareness: which device memory the MPI library accepts. It is reported in several dialects:
//!
//! | library | report |
//! |---|---|
//! | Open MPI, MPICH, MVAPICH | `MPIX_Query_cuda_support()`, and the same for other runtimes |
//! | MPICH from 4.0 | `MPIX_GPU_query_support(kind, &supported)` |
//! | Cray MPICH | the variable `MPICH_GPU_SUPPORT_ENABLED`, and its transport library for the runtime |

use std::{
    ffi::{CStr, c_int},
    fmt,
};

use annulus_core::{Error, Result};

use super::{
    ffi::library,
    lifetime::{Launch, check_alive},
};

/// Runtime whose device memory an MPI library may accept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GpuRuntime {
    /// CUDA, of NVIDIA.
    Cuda,
    /// HIP, of AMD.
    Hip,
    /// Level Zero, of Intel, whose memory this library does not pass.
    LevelZero,
}

#[cfg(feature = "cuda")]
impl From<annulus_device_cuda::Api> for GpuRuntime {
    fn from(api: annulus_device_cuda::Api) -> Self {
        match api {
            annulus_device_cuda::Api::Cuda => Self::Cuda,
            annulus_device_cuda::Api::Hip => Self::Hip,
        }
    }
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

    /// Returns true if memory of the runtime is to be passed to MPI: as the variable says, else if
    /// the library reports that it accepts it.
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

impl Launch {
    /// Returns the library's report on pointers to memory of a GPU runtime. Without support, blocks
    /// are staged.
    pub fn gpu_awareness(&self, runtime: GpuRuntime) -> GpuAwareness {
        GpuAwareness::of_runtime(runtime)
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
