//! Handles that were dropped on a thread which may not call MPI. They wait for their own thread.

use std::sync::{Mutex, PoisonError};

/// Drops a handle, or defers it again on a thread that is not the handle's.
type DropHandle = Box<dyn FnOnce() + Send>;

static DEFERRED: Mutex<Vec<DropHandle>> = Mutex::new(Vec::new());

/// Keeps a handle until [`drop_all`] is called on its thread.
pub(super) fn defer(drop_handle: impl FnOnce() + Send + 'static) {
    DEFERRED.lock().unwrap_or_else(PoisonError::into_inner).push(Box::new(drop_handle));
}

/// Drops the handles that belong to this thread: when it makes the next endpoint or shares one, and
/// when MPI is finalised.
pub(super) fn drop_all() {
    // the list is free while they are dropped: another thread may defer one meanwhile
    let all = std::mem::take(&mut *DEFERRED.lock().unwrap_or_else(PoisonError::into_inner));
    all.into_iter().for_each(|drop_handle| drop_handle());
}
