//! Handles: numbers in a table of what is alive.
//!
//! A handle of C is a pointer that cannot be checked. So a handle here is no pointer: it is a
//! number that is never used twice, in the form of an address that no object can have. It is looked
//! up in a table and never dereferenced. A handle that is foreign, destroyed or of another kind is
//! therefore an error and not undefined behaviour.
//!
//! A forked child has the handles of its parent. It may use an attention, which is data; plans,
//! caches and endpoints refuse, and destroying them frees nothing.

use std::{
    any::Any,
    collections::BTreeMap,
    ffi::c_int,
    marker::PhantomData,
    ptr,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, TryLockError,
        atomic::{AtomicUsize, Ordering},
    },
};

use annulus::{Error, Result};
use annulus_core::Process;

use crate::{fields::check_pointer, status::guard};

/// The handles of one kind.
pub(crate) struct Handles<T> {
    /// Name of the argument in errors.
    name: &'static str,
    values: PhantomData<Mutex<T>>,
}

/// A value behind a handle.
struct LiveHandle<T> {
    /// Name of its kind.
    name: &'static str,
    /// Process that made it.
    process: Process,
    value: Mutex<T>,
}

/// Entries of all kinds that are alive, by handle.
type Live = BTreeMap<usize, Arc<dyn Any + Send + Sync>>;

static LIVE: Mutex<Live> = Mutex::new(BTreeMap::new());

static NEXT: AtomicUsize = AtomicUsize::new(1);

/// An address between the lower and the upper half of the address space of x86-64 and AArch64,
/// where no object lies.
const BASE: usize = 0x00A5_0000_0000_0000;

impl<T: Send + 'static> Handles<T> {
    pub(crate) const fn new(name: &'static str) -> Self {
        Self { name, values: PhantomData }
    }

    /// Takes `value` in and returns its handle.
    fn insert<H>(&self, value: T) -> *mut H {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        #[cfg(unix)]
        if number == 1 {
            fork::register();
        }
        let address = BASE + (number << 4);
        let (name, process) = (self.name, Process::current());
        table().insert(address, Arc::new(LiveHandle { name, process, value: Mutex::new(value) }));
        ptr::without_provenance_mut(address)
    }

    /// Makes a value with `make` and writes its handle to `*out`; writes NULL if that fails.
    /// Returns the status.
    ///
    /// # Safety
    /// `out` is NULL, misaligned or points to a writable pointer.
    pub(crate) unsafe fn create<H>(
        &self,
        out: *mut *mut H,
        make: impl FnOnce() -> Result<T>,
    ) -> c_int {
        guard(|| {
            let out = check_pointer(self.name, out.cast_const())?;
            // SAFETY: not NULL, aligned, writable as the caller promises
            unsafe { out.write(ptr::null_mut()) };
            let made = make()?;
            // SAFETY: as above
            unsafe { out.write(self.insert(made)) };
            Ok(())
        })
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
        let live = table().get(&handle.addr()).map(Arc::clone);
        let entry = live.and_then(|entry| self.of_kind(entry));
        let Some(entry) = entry else { return Err(self.not_live(handle)) };
        match entry.value.try_lock() {
            Ok(mut value) => body(&mut value),
            Err(TryLockError::WouldBlock) => {
                // in a forked child: a call of another thread of the parent
                entry.process.check(self.name)?;
                Err(Error::invalid(
                    self.name,
                    "one that another call is using",
                    "one call at a time, and none from within a callback",
                ))
            }
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
        let mut live = table();
        let found = live.get(&handle.addr()).map(Arc::clone);
        if found.is_none_or(|entry| self.of_kind(entry).is_none()) {
            return Err(self.not_live(handle));
        }
        let removed = live.remove(&handle.addr());
        drop(live);
        // dropped here, when the table is unlocked: dropping a plan may take a second
        drop(removed);
        Ok(())
    }

    /// Returns an entry if its handle is one of this kind.
    fn of_kind(&self, entry: Arc<dyn Any + Send + Sync>) -> Option<Arc<LiveHandle<T>>> {
        entry.downcast::<LiveHandle<T>>().ok().filter(|entry| entry.name == self.name)
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

fn table() -> MutexGuard<'static, Live> {
    // the table is whole after every statement, so a panic leaves it whole
    LIVE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Holds the table while a process forks, so that the child finds it whole and unlocked; and finds
/// out if the parent has an MPI that the child must not call.
#[cfg(unix)]
mod fork {
    use std::{cell::UnsafeCell, ffi::c_int, sync::MutexGuard};

    use super::{Live, table};

    struct ForkGuard(UnsafeCell<Option<MutexGuard<'static, Live>>>);

    // SAFETY: used between `before` and `after` only, by the thread that forks and so has the lock;
    // in the child that thread is the only one
    unsafe impl Sync for ForkGuard {}

    static FORK_GUARD: ForkGuard = ForkGuard(UnsafeCell::new(None));

    type Handler = extern "C" fn();

    unsafe extern "C" {
        safe fn pthread_atfork(prepare: Handler, parent: Handler, child: Handler) -> c_int;
    }

    extern "C" fn before() {
        // it records the process of an MPI that is alive; one that is not linked is not loaded here
        #[cfg(feature = "mpi")]
        if annulus::comm::mpi::IS_LINKED {
            annulus::comm::mpi::is_alive();
        }
        let guard = table();
        // SAFETY: as of `ForkGuard`
        unsafe { *FORK_GUARD.0.get() = Some(guard) };
    }

    extern "C" fn after() {
        // SAFETY: as of `ForkGuard`; taken out before it is dropped, which releases the lock
        let guard = unsafe { (*FORK_GUARD.0.get()).take() };
        drop(guard);
    }

    /// Registers the functions above with the C library. If there is no memory for that, a child
    /// may find the table locked.
    pub(super) fn register() {
        pthread_atfork(before, after, after);
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
