//! The handle of an endpoint: a communicator of MPI that several plans and caches share.
//!
//! An endpoint is a handle of its own and not a plan that others share: no plan has to outlive
//! another, and the n-th plan over it is the same plan on all ranks.

use std::ffi::c_int;

#[cfg(not(feature = "mpi"))]
use annulus::Error;
use annulus::Result;
#[cfg(feature = "mpi")]
use annulus::comm::mpi::{self, Mpi, Timeout};

#[cfg(feature = "mpi")]
use crate::options::MpiOptions;
use crate::{
    attention::{ATTENTIONS, annulus_attention, create},
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
/// There is none without MPI.
#[cfg(not(feature = "mpi"))]
pub(crate) type Endpoint = std::convert::Infallible;

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
    #[cfg(feature = "mpi")]
    let make = || {
        let description = description(attention)?;
        // SAFETY: as the caller promises
        unsafe { over_fortran(&description, communicator) }.map(|made| ENDPOINTS.insert(made))
    };
    #[cfg(not(feature = "mpi"))]
    let make = || {
        description(attention)?;
        Err(no_mpi(communicator))
    };
    // SAFETY: as the caller promises
    unsafe { create("endpoint", endpoint, make) }
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
    let make = || {
        let description = description(attention)?;
        // SAFETY: as the caller promises
        unsafe { over_communicator(&description, communicator) }.map(|made| ENDPOINTS.insert(made))
    };
    // SAFETY: as the caller promises
    unsafe { create("endpoint", endpoint, make) }
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

fn description(attention: *const annulus_attention) -> Result<Description> {
    ATTENTIONS.with(attention, |description| Ok(description.clone()))
}

/// Returns a handle to an endpoint, for a plan or a cache. All ranks share an endpoint in the same
/// order, so this comes before anything that one rank alone may refuse.
pub(crate) fn share(endpoint: *const annulus_endpoint) -> Result<Endpoint> {
    #[cfg(feature = "mpi")]
    return ENDPOINTS.with(endpoint, |endpoint| endpoint.share());
    #[cfg(not(feature = "mpi"))]
    return ENDPOINTS.with(endpoint, |none| match *none {});
}

/// A communicator, as mpi.h defines it.
#[cfg(feature = "mpi")]
pub type MPI_Comm = mpi::Communication;

/// Makes an endpoint over a communicator as Fortran has it.
///
/// # Safety
/// As [`annulus_endpoint_create_mpi_f`].
#[cfg(feature = "mpi")]
pub(crate) unsafe fn over_fortran(description: &Description, communicator: i32) -> Result<Mpi> {
    let settings = settings(description);
    // SAFETY: as the caller promises
    unsafe {
        if description.mpi.adopts {
            Mpi::adopt_fortran(communicator, settings)
        } else {
            Mpi::over_fortran(communicator, settings)
        }
    }
}

/// Makes an endpoint over a communicator as C has it.
///
/// # Safety
/// As [`annulus_endpoint_create_mpi_f`].
#[cfg(feature = "mpi")]
pub(crate) unsafe fn over_communicator(
    description: &Description,
    communicator: MPI_Comm,
) -> Result<Mpi> {
    let settings = settings(description);
    // SAFETY: as the caller promises
    unsafe {
        if description.mpi.adopts {
            Mpi::adopt(communicator, settings)
        } else {
            Mpi::over_communicator(communicator, settings)
        }
    }
}

/// The error of a library without the feature mpi.
#[cfg(not(feature = "mpi"))]
pub(crate) fn no_mpi(communicator: i32) -> Error {
    let what = format!("a ring over the MPI communicator {communicator}");
    Error::unsupported(what, "a library without the feature mpi")
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
