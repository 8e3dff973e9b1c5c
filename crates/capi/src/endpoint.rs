//! The handle of an endpoint: a communicator of MPI that several plans and caches share.
//!
//! An endpoint is a handle of its own and not a plan that others share: no plan has to outlive
//! another, and the n-th plan over it is the same plan on all ranks.

use std::ffi::c_int;

use annulus::Result;
#[cfg(feature = "mpi")]
use annulus::comm::mpi::{self, Mpi, Timeout};

#[cfg(feature = "mpi")]
use crate::options::MpiOptions;
use crate::{
    attention::{annulus_attention, description},
    handle::Handles,
    options::Description,
    status::guard,
};

/// A duplicate of a communicator, which several plans and caches share. Opaque.
pub struct annulus_endpoint {
    _opaque: [u8; 0],
}

#[cfg(feature = "mpi")]
pub(crate) type Endpoint = Mpi;
/// A transport that no function makes: there is no endpoint without MPI.
#[cfg(not(feature = "mpi"))]
pub(crate) type Endpoint = annulus::comm::threads::Threads;

static ENDPOINTS: Handles<Endpoint> = Handles::new("endpoint");

/// Makes an endpoint over the ranks of a communicator of MPI, given as Fortran and MPI_Comm_c2f
/// have it, for several plans and caches: annulus_plan_create_endpoint,
/// annulus_cache_create_endpoint.
///
/// They share its communicators, heartbeats and buffers. A plan over an endpoint takes no further
/// communicator, of which an MPI has some thousands, and no collective operation of MPI. Of
/// `attention`, only options.adopt_communicator, options.arrival_deadline_seconds and the function
/// of [`annulus_attention_on_silence`](crate::annulus_attention_on_silence) are used.
///
/// Collective over the communicator, by the rules of
/// [`annulus_plan_create_mpi_f`](crate::annulus_plan_create_mpi_f). `*endpoint` is NULL if the call
/// fails.
///
/// # Errors
/// As [`annulus_plan_create_mpi_f`](crate::annulus_plan_create_mpi_f).
///
/// # Safety
/// As [`annulus_plan_create_mpi_f`](crate::annulus_plan_create_mpi_f).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn annulus_endpoint_create_mpi_f(
    attention: *const annulus_attention,
    communicator: i32,
    endpoint: *mut *mut annulus_endpoint,
) -> c_int {
    // SAFETY: as the caller promises
    let make = || unsafe { Communicator::Fortran(communicator).open(&description(attention)?) };
    // SAFETY: as the caller promises
    unsafe { ENDPOINTS.create(endpoint, make) }
}

/// As [`annulus_endpoint_create_mpi_f`], of a communicator as C has it.
///
/// Only in a library with the feature mpi. The header declares it where ANNULUS_WITH_MPI is
/// defined, and then includes mpi.h.
///
/// # Errors
/// As [`annulus_endpoint_create_mpi_f`].
///
/// # Safety
/// As [`annulus_endpoint_create_mpi_f`].
#[cfg(feature = "mpi")]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn annulus_endpoint_create_mpi(
    attention: *const annulus_attention,
    communicator: MPI_Comm,
    endpoint: *mut *mut annulus_endpoint,
) -> c_int {
    // SAFETY: as the caller promises
    let make = || unsafe { Communicator::C(communicator).open(&description(attention)?) };
    // SAFETY: as the caller promises
    unsafe { ENDPOINTS.create(endpoint, make) }
}

/// Destroys the handle of an endpoint. Plans and caches over it live on; the communicators are
/// freed with the last of them.
///
/// Local. If it is the last, it waits up to one second for the other ranks to do the same. After
/// MPI_Finalize it is harmless.
///
/// # Errors
/// ANNULUS_INVALID_ARGUMENT for NULL, a foreign handle, or one that was destroyed.
#[unsafe(no_mangle)]
pub extern "C" fn annulus_endpoint_destroy(endpoint: *mut annulus_endpoint) -> c_int {
    guard(|| ENDPOINTS.remove(endpoint))
}

/// Returns a handle to an endpoint, for a plan or a cache. All ranks share an endpoint in the same
/// order, so this comes before anything that one rank alone may refuse.
pub(crate) fn share(endpoint: *const annulus_endpoint) -> Result<Endpoint> {
    #[cfg(feature = "mpi")]
    return ENDPOINTS.with(endpoint, |endpoint| endpoint.share());
    #[cfg(not(feature = "mpi"))]
    return ENDPOINTS.with(endpoint, |_| Err(annulus::Error::internal("an endpoint without MPI")));
}

/// A communicator, as mpi.h defines it.
#[cfg(feature = "mpi")]
pub type MPI_Comm = mpi::Communication;

/// A communicator of the host's.
pub(crate) enum Communicator {
    /// As Fortran and MPI_Comm_c2f have it.
    Fortran(i32),
    /// As C has it.
    #[cfg(feature = "mpi")]
    C(MPI_Comm),
}

impl Communicator {
    /// Makes an endpoint over the communicator.
    ///
    /// # Errors
    /// [`Error::Unsupported`] in a library without the feature mpi.
    ///
    /// # Safety
    /// As [`annulus_endpoint_create_mpi_f`].
    #[cfg(feature = "mpi")]
    pub(crate) unsafe fn open(self, description: &Description) -> Result<Endpoint> {
        let settings = settings(description);
        // SAFETY: as the caller promises
        unsafe {
            match (self, description.mpi.adopts) {
                (Self::Fortran(number), true) => Mpi::adopt_fortran(number, settings),
                (Self::Fortran(number), false) => Mpi::over_fortran(number, settings),
                (Self::C(handle), true) => Mpi::adopt(handle, settings),
                (Self::C(handle), false) => Mpi::over_communicator(handle, settings),
            }
        }
    }

    #[cfg(not(feature = "mpi"))]
    pub(crate) unsafe fn open(self, _: &Description) -> Result<Endpoint> {
        let Self::Fortran(communicator) = self;
        let what = format!("a ring over the MPI communicator {communicator}");
        Err(annulus::Error::unsupported(what, "a library without the feature mpi"))
    }
}

/// Settings of an endpoint. Only on a communicator that is the plan's own the wait may end: on the
/// host's, a collective operation that was abandoned would be matched with the host's next one.
#[cfg(feature = "mpi")]
fn settings(description: &Description) -> mpi::Settings {
    let MpiOptions { adopts, arrival_deadline, silence } = &description.mpi;
    let limit = arrival_deadline.filter(|_| *adopts);
    let timeout = limit.map_or_else(Timeout::unlimited, Timeout::at_most);
    let timeout = match *silence {
        Some(hook) => timeout.with_warning(move |waited| hook.call(None, 0, waited)),
        None => timeout,
    };
    mpi::Settings { timeout, ..Default::default() }
}
