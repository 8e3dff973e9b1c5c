//! The process that made a value, by which a child of `fork` recognises values of its parent.
//!
//! A forked child has a copy of the parent's memory but none of its threads: a lock that one of
//! them held is never released, and a message to one of them is never answered. Connections (MPI,
//! the driver of a GPU) belong to the parent.
//!
//! | value of the parent | in the child |
//! |---|---|
//! | plan, cache, endpoint, device | calls return an error: [`Process::check`] |
//! | threads, memory and connections behind it | are leaked by the drop: [`ProcessOwned`] |
//! | MPI, driver of a GPU | cannot be used at all: [`HomeProcess`] |
//!
//! Processes are compared by number, at the entry of a call, because that finds every kind of fork
//! and registers nothing with the C library.

use std::{
    fmt, mem,
    ops::{Deref, DerefMut},
    process,
    sync::atomic::{AtomicU32, Ordering},
};

use crate::{Error, Result};

/// A process, by number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Process(u32);

impl Process {
    /// Returns the calling process.
    pub fn current() -> Self {
        Self(process::id())
    }

    /// Returns true in this process, false in a child that it forked.
    pub fn is_current(self) -> bool {
        self == Self::current()
    }

    /// Checks that `argument`, which this process made, is not used in a forked child.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] naming it.
    pub fn check(self, argument: &str) -> Result<()> {
        if self.is_current() {
            return Ok(());
        }
        let got = format!("one of process {}, from which this process was forked", self.0);
        Err(Error::invalid(argument, got, "a new one, made in this process"))
    }
}

/// A value that a forked child does not drop: it owns threads, locks or connections of the process
/// that made it.
///
/// # Examples
/// ```
/// use annulus_core::ProcessOwned;
///
/// let mut owned = ProcessOwned::new(vec![1]);
/// owned.process().check("list")?; // an error in a forked child
/// owned.push(2);
/// assert_eq!(*owned, [1, 2]);
/// # Ok::<(), annulus_core::Error>(())
/// ```
pub struct ProcessOwned<T> {
    /// `None` only while it is dropped.
    value: Option<T>,
    process: Process,
}

impl<T> ProcessOwned<T> {
    /// Wraps a value that the calling process made.
    pub fn new(value: T) -> Self {
        Self { value: Some(value), process: Process::current() }
    }

    /// Returns the process that made the value.
    pub const fn process(&self) -> Process {
        self.process
    }
}

impl<T> Deref for ProcessOwned<T> {
    type Target = T;

    fn deref(&self) -> &T {
        let Some(value) = &self.value else { unreachable!("only a drop takes the value") };
        value
    }
}

impl<T> DerefMut for ProcessOwned<T> {
    fn deref_mut(&mut self) -> &mut T {
        let Some(value) = &mut self.value else { unreachable!("only a drop takes the value") };
        value
    }
}

impl<T> Drop for ProcessOwned<T> {
    fn drop(&mut self) {
        if !self.process.is_current() {
            mem::forget(self.value.take());
        }
    }
}

impl<T: fmt::Debug> fmt::Debug for ProcessOwned<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&**self, f)
    }
}

/// The process in which a library, such as MPI or the driver of a GPU, was first used. The library
/// does not work in children that this process forks.
#[derive(Debug)]
pub struct HomeProcess {
    /// 0 before the first use.
    number: AtomicU32,
}

impl HomeProcess {
    /// Creates the record of a library that is not in use yet.
    pub const fn unused() -> Self {
        Self { number: AtomicU32::new(0) }
    }

    /// Records a use, before which no process has used the library or which [`HomeProcess::check`]
    /// has admitted.
    pub fn note(&self) {
        // a failed exchange keeps the first process
        let current = process::id();
        let _ = self.number.compare_exchange(0, current, Ordering::AcqRel, Ordering::Acquire);
    }

    /// Returns true in a child that was forked after the first use.
    pub fn is_foreign(&self) -> bool {
        let number = self.number.load(Ordering::Acquire);
        number != 0 && !Process(number).is_current()
    }

    /// Checks that the library `what` is not used in a forked child.
    ///
    /// # Errors
    /// [`Error::Unsupported`] naming it.
    pub fn check(&self, what: &str) -> Result<()> {
        if !self.is_foreign() {
            return Ok(());
        }
        let by = "a forked process whose parent has used it; start the process with exec, as the \
                  start methods spawn and forkserver of Python do";
        Err(Error::unsupported(what, by))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn values_of_another_process_are_refused_and_leaked() {
        let alive = Arc::new(());
        let mut owned = ProcessOwned::new(Arc::clone(&alive));
        assert_eq!(owned.process().check("plan"), Ok(()));
        drop(ProcessOwned::new(Arc::clone(&alive)));
        assert_eq!(Arc::strong_count(&alive), 2);
        owned.process = Process(u32::MAX);
        let told = owned.process().check("plan").unwrap_err().to_string();
        assert_eq!(
            told,
            format!(
                "plan: got one of process {}, from which this process was forked, want a new one, \
                 made in this process",
                u32::MAX
            )
        );
        drop(owned);
        assert_eq!(Arc::strong_count(&alive), 2);
    }

    #[test]
    fn a_library_stays_in_the_process_that_used_it_first() {
        let home = HomeProcess::unused();
        assert_eq!(home.check("MPI"), Ok(()));
        home.note();
        assert_eq!(home.check("MPI"), Ok(()));
        home.number.store(u32::MAX, Ordering::Release);
        home.note();
        assert!(home.is_foreign());
        assert_eq!(home.check("MPI").unwrap_err().code(), 2);
    }
}
