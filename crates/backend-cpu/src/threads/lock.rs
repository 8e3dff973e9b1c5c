//! Mutex access without poison.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks, ignoring poison: a panic ends the pass, and its results are never read.
pub(crate) fn lock<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the contents of a mutex that no other thread can hold.
pub(crate) fn get_mut<T>(shared: &mut Mutex<T>) -> &mut T {
    shared.get_mut().unwrap_or_else(PoisonError::into_inner)
}
