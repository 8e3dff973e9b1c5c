//! Handles that were dropped on a thread which may not call MPI. They wait for their own thread.

use std::sync::{Arc, Mutex, PoisonError};

use super::{drop::drop_context, endpoint::SharedEndpoint};

/// A context that waits to be dropped.
struct Parked {
    endpoint: Arc<SharedEndpoint>,
    context: u64,
}

static PARKED: Mutex<Vec<Parked>> = Mutex::new(Vec::new());

/// Keeps a context until [`drop_all`] is called on the thread of its endpoint.
pub(super) fn park(endpoint: Arc<SharedEndpoint>, context: u64) {
    let parked = Parked { endpoint, context };
    PARKED.lock().unwrap_or_else(PoisonError::into_inner).push(parked);
}

/// Drops the contexts that belong to this thread: when it makes the next endpoint or shares one,
/// and when MPI is finalised.
pub(super) fn drop_all() {
    // the list is free while endpoints are locked: a handle may be dropped elsewhere meanwhile
    let all = std::mem::take(&mut *PARKED.lock().unwrap_or_else(PoisonError::into_inner));
    for Parked { endpoint, context } in all {
        // parks it again on another thread
        drop_context(&endpoint, context);
    }
}
