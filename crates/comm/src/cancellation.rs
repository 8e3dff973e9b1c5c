//! Cancellation of a pass by another thread.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use annulus_core::{Error, Result};

/// A flag by which another thread ends the pass of a plan
/// ([`Deadline::with_cancellation`](crate::Deadline::with_cancellation)). Clones are the same flag.
#[derive(Debug, Clone, Default)]
pub struct Cancellation(Arc<AtomicBool>);

impl Cancellation {
    /// Ends the pass under way, at its next wait or after its next tile, and the plan with it on
    /// all ranks. Until [`Cancellation::reset`] it ends every pass.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Release);
    }

    /// Lets passes run again.
    pub fn reset(&self) {
        self.0.store(false, Ordering::Release);
    }

    /// Checks that no thread has cancelled the pass.
    ///
    /// # Errors
    /// [`Error::Device`], which ends the plan.
    pub(crate) fn check(&self) -> Result<()> {
        if self.0.load(Ordering::Acquire) {
            return Err(Error::Device { what: "the program cancelled the pass".to_owned() });
        }
        Ok(())
    }
}
