//! Locks that ignore poison.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks, ignoring poison: entries are complete or absent even if a holder panicked.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
