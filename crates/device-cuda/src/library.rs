//! Libraries that are found at run time, and tables of their functions.

use annulus_core::{Error, Result};
use libloading::Library;

/// The first of these libraries that there is. It is never unloaded: tables of its functions have no lifetime.
pub(crate) fn open(names: &[&str]) -> Option<&'static Library> {
    // SAFETY: loading a library runs its initialisers; those of CUDA's libraries may run at any time, on any thread.
    let found = names.iter().find_map(|name| unsafe { Library::new(*name) }.ok());
    // a library that is asked for again is the same one
    found.map(|library| &*Box::leak(Box::new(library)))
}

/// This machine has it not, or not so.
pub(crate) fn absent(what: &str, why: impl std::fmt::Display) -> Error {
    Error::unsupported(what, format!("this machine: {why}"))
}

/// The function `symbol`, by its name.
///
/// # Errors
/// [`Error::Unsupported`] if the library of `what` has none of this name.
///
/// # Safety
/// `F` is the type of a function pointer, and what the library has by this name is a function of this type.
pub(crate) unsafe fn function<F: Copy>(library: &'static Library, what: &str, symbol: &str) -> Result<F> {
    // SAFETY: as promised; the library stays loaded.
    let found = unsafe { library.get::<F>(symbol.as_bytes()) };
    found.map(|function| *function).map_err(|_| absent(what, format!("its library has no {symbol}")))
}

/// A structure of functions, a field each, that [`function`] finds in a library by their names.
macro_rules! table {
    ($(#[$doc:meta])* $name:ident of $what:literal {
        $($field:ident = $symbol:ident($($argument:ty),*) -> $result:ty;)*
    }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy)]
        pub struct $name {
            $(
                #[doc = concat!("`", stringify!($symbol), "`.")]
                pub $field: unsafe extern "C" fn($($argument),*) -> $result,
            )*
        }

        impl $name {
            /// Finds every function in a library.
            ///
            /// # Errors
            /// [`annulus_core::Error::Unsupported`] naming the first function that it lacks.
            ///
            /// # Safety
            /// The library is the one of that name, so that every function has the type that its header gives it.
            pub(crate) unsafe fn of(library: &'static libloading::Library) -> annulus_core::Result<Self> {
                // SAFETY: as promised.
                unsafe { Ok(Self { $($field: $crate::library::function(library, $what, stringify!($symbol))?,)* }) }
            }
        }
    };
}
pub(crate) use table;

#[cfg(test)]
mod tests {
    use crate::{CompilerSymbols, Symbols};

    #[test]
    fn a_function_that_a_library_lacks_is_named() {
        // a library that has none of CUDA's functions
        let library = super::open(&["libnone.so.1", "libc.so.6"]).unwrap();
        // SAFETY: as it has none, none gets a wrong type.
        let (driver, compiler) = unsafe { (Symbols::of(library).unwrap_err(), CompilerSymbols::of(library).unwrap_err()) };
        assert_eq!(driver.to_string(), "CUDA is not supported by this machine: its library has no cuInit");
        assert_eq!(compiler.to_string(), "CUDA is not supported by this machine: its library has no nvrtcVersion");
        #[cfg(feature = "nccl")]
        {
            // SAFETY: as above.
            let nccl = unsafe { crate::nccl::NcclSymbols::of(library) }.unwrap_err();
            assert_eq!(nccl.to_string(), "NCCL is not supported by this machine: its library has no ncclGetVersion");
        }
        assert!(super::open(&["libnone.so.1"]).is_none());
    }
}
