//! Handles: numbers in a table of what is alive.
//!
//! A handle of C is a pointer that cannot be checked. So a handle here is no pointer: it is a
//! number that is never used twice, in the form of an address that no object can have. It is looked
//! up in a table and never dereferenced. A handle that is foreign, destroyed or of another kind is
//! therefore an error and not undefined behaviour.

use std::{
    collections::BTreeMap,
    ptr,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, TryLockError,
        atomic::{AtomicUsize, Ordering},
    },
};

use annulus::{Error, Result};

/// All handles of one kind that are alive.
pub(crate) struct Handles<T> {
    /// Name of the argument in errors.
    name: &'static str,
    live: Mutex<BTreeMap<usize, Arc<Mutex<T>>>>,
}

/// Shared by all kinds, so that a handle of one kind is none of another.
static NEXT: AtomicUsize = AtomicUsize::new(1);

/// An address between the lower and the upper half of the address space of x86-64 and AArch64,
/// where no object lies.
const BASE: usize = 0x00A5_0000_0000_0000;

impl<T> Handles<T> {
    pub(crate) const fn new(name: &'static str) -> Self {
        Self { name, live: Mutex::new(BTreeMap::new()) }
    }

    /// Takes `value` in and returns its handle.
    pub(crate) fn insert<H>(&self, value: T) -> *mut H {
        let address = BASE + (NEXT.fetch_add(1, Ordering::Relaxed) << 4);
        self.table().insert(address, Arc::new(Mutex::new(value)));
        ptr::without_provenance_mut(address)
    }

    /// Calls `body` with the value behind a handle.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a handle that is not alive or in use by another call.
    pub(crate) fn with<H, R>(
        &self,
        handle: *const H,
        body: impl FnOnce(&mut T) -> Result<R>,
    ) -> Result<R> {
        let value = self.table().get(&handle.addr()).map(Arc::clone);
        let Some(value) = value else { return Err(self.not_live(handle)) };
        match value.try_lock() {
            Ok(mut value) => body(&mut value),
            Err(TryLockError::WouldBlock) => Err(Error::invalid(
                self.name,
                "one that another call is using",
                "one call at a time, and none from within a callback",
            )),
            Err(TryLockError::Poisoned(_)) => {
                Err(Error::Poisoned { first: format!("a call on this {} panicked", self.name) })
            }
        }
    }

    /// Ends the life of a handle and drops its value, once no call uses it.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a handle that is not alive.
    pub(crate) fn remove<H>(&self, handle: *const H) -> Result<()> {
        let removed = self.table().remove(&handle.addr());
        // dropped here, when the table is unlocked: dropping a plan may take a second
        removed.map(drop).ok_or_else(|| self.not_live(handle))
    }

    fn table(&self) -> MutexGuard<'_, BTreeMap<usize, Arc<Mutex<T>>>> {
        // the table is whole after every statement, so a panic leaves it whole
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn not_live<H>(&self, handle: *const H) -> Error {
        let got = if handle.is_null() {
            "NULL".to_owned()
        } else {
            format!("{handle:p}, which is none or was destroyed")
        };
        Error::invalid(self.name, got, "a handle that annulus returned and that is not destroyed")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    static NUMBERS: Handles<i32> = Handles::new("number");
    static OTHERS: Handles<i32> = Handles::new("other");

    fn told<R: std::fmt::Debug>(result: Result<R>) -> String {
        result.unwrap_err().to_string()
    }

    #[test]
    fn a_handle_lives_from_insert_to_remove() {
        let handle: *mut u8 = NUMBERS.insert(7);
        assert_eq!(NUMBERS.with(handle, |number| Ok(*number)), Ok(7));
        assert!(told(OTHERS.with(handle, |_| Ok(()))).starts_with("other: got 0x"));
        assert_eq!(NUMBERS.remove(handle), Ok(()));
        assert!(told(NUMBERS.remove(handle)).contains("destroyed"));
        assert!(told(NUMBERS.with(handle, |_| Ok(()))).contains("destroyed"));
        let next: *mut u8 = NUMBERS.insert(8);
        assert_ne!(next, handle);
        assert_eq!(NUMBERS.remove(next), Ok(()));
        assert!(told(NUMBERS.remove(ptr::null::<u8>())).starts_with("number: got NULL"));
        let foreign = 5u8;
        assert!(told(NUMBERS.remove(&raw const foreign)).starts_with("number: got 0x"));
    }

    #[test]
    fn a_call_within_a_call_is_refused_and_destroying_waits_for_it() {
        let handle: *mut u8 = NUMBERS.insert(7);
        let inner = NUMBERS.with(handle, |number| {
            let again = told(NUMBERS.with(handle, |_| Ok(())));
            NUMBERS.remove(handle)?;
            *number += 1;
            Ok((again, *number))
        });
        let (again, number) = inner.unwrap();
        assert!(again.contains("another call"), "{again}");
        assert_eq!(number, 8);
    }
}
