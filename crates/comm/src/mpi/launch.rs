//! Initialises and finalises MPI, for a program whose host has not done so.

use annulus_core::Result;

use super::{
    ffi,
    gpu_awareness::{GpuAwareness, GpuRuntime},
    lifetime::{self, Lifetime, ThreadLevel, lifetime},
};

/// MPI from initialisation to finalisation: held by `main` of a program under a launcher. Does
/// nothing if the host program has initialised MPI.
///
/// Dropping it finalises MPI if it has initialised it. If the thread panics, it ends the job on all
/// ranks with status 101 instead, because the other ranks would wait for this one without end. In a
/// forked child it does nothing.
///
/// Below `MPI_THREAD_MULTIPLE` it belongs on the main thread, like every call of MPI.
#[derive(Debug)]
pub struct Launch {
    began: bool,
}

impl Launch {
    /// Initialises MPI with the highest thread level that it grants, unless it is initialised.
    ///
    /// # Errors
    /// [`annulus_core::Error::InvalidArgument`] if MPI was finalised already,
    /// [`annulus_core::Error::Unsupported`] in a forked child of a process that uses MPI,
    /// [`annulus_core::Error::Comm`] if it fails.
    pub fn begin() -> Result<Self> {
        if lifetime() == Lifetime::Alive {
            lifetime::check_process()?;
            return Ok(Self { began: false });
        }
        lifetime::initialize()?;
        Ok(Self { began: true })
    }

    /// Returns true if this has initialised MPI.
    pub const fn began(&self) -> bool {
        self.began
    }

    /// Returns name and version of the MPI library.
    ///
    /// # Errors
    /// [`annulus_core::Error::Comm`] if MPI fails.
    pub fn library(&self) -> Result<String> {
        ffi::library()
    }

    /// Returns the thread level that MPI has granted.
    ///
    /// # Errors
    /// [`annulus_core::Error::InvalidArgument`] if MPI was finalised.
    pub fn thread_level(&self) -> Result<ThreadLevel> {
        lifetime::thread_level()
    }

    /// Returns the library's report on pointers to memory of a GPU runtime. Without those of CUDA,
    /// blocks are staged.
    pub fn gpu_awareness(&self, runtime: GpuRuntime) -> GpuAwareness {
        GpuAwareness::of_runtime(runtime)
    }

    /// Ends the job on all ranks with this status.
    pub fn abort(&self, status: i32) -> ! {
        lifetime::abort_job(status)
    }

    /// Drops this without finalising MPI. For a rank that has lost another one: `MPI_Finalize`
    /// would wait for it.
    pub fn abandon(mut self) {
        self.began = false;
    }
}

impl Drop for Launch {
    fn drop(&mut self) {
        if lifetime::is_forked() {
            return;
        }
        if self.began && std::thread::panicking() {
            lifetime::abort_job(101);
        }
        if self.began {
            lifetime::finalize();
        }
    }
}
