//! Endpoints that were dropped on a thread which may not call MPI. They wait for their own thread.

use std::sync::{Mutex, PoisonError};

use super::Mpi;

static PARKED: Mutex<Vec<Mpi>> = Mutex::new(Vec::new());

/// Keeps an endpoint until [`drop_all`] is called on its thread.
pub(super) fn park(endpoint: Mpi) {
    PARKED.lock().unwrap_or_else(PoisonError::into_inner).push(endpoint);
}

/// Drops the endpoints that belong to this thread: when it makes the next endpoint, and when MPI is
/// finalised.
pub(super) fn drop_all() {
    let ours = {
        let mut parked = PARKED.lock().unwrap_or_else(PoisonError::into_inner);
        let (ours, others) =
            parked.drain(..).partition(|endpoint| !endpoint.is_on_another_thread());
        *parked = others;
        ours
    };
    // the lock is free: an endpoint may be dropped elsewhere meanwhile
    drop::<Vec<Mpi>>(ours);
}
