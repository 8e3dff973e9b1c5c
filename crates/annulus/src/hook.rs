//! Functions of the caller's that a plan calls.

use std::{fmt, sync::Arc};

/// A function of the caller's that takes an event of type `E`.
pub(crate) struct Hook<E>(pub(crate) Arc<dyn Fn(E) + Send + Sync>);

impl<E> Clone for Hook<E> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<E> fmt::Debug for Hook<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a function")
    }
}
