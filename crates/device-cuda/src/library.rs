//! Loading of libraries at run time, and tables of their functions.

use annulus_core::{Error, Result};
use libloading::Library;

/// Loads the first of these libraries that exists. It is never unloaded, so its functions are valid
/// for the whole process.
pub(crate) fn open(names: &[&str]) -> Option<&'static Library> {
    // SAFETY: loading runs initializers; those of CUDA's libraries may run at any time, on any
    // thread.
    let found = names.iter().find_map(|name| unsafe { Library::new(*name) }.ok());
    // loading a library again yields the same handle
    found.map(|library| &*Box::leak(Box::new(library)))
}

/// Error for a library, function or feature that this machine lacks.
pub(crate) fn missing(what: &str, why: impl std::fmt::Display) -> Error {
    Error::unsupported(what, format!("this machine: {why}"))
}

/// Looks up the function `symbol`.
///
/// # Errors
/// [`Error::Unsupported`] if the library lacks it.
///
/// # Safety
/// `F` is a function pointer type, and the library's symbol of this name has this type.
pub(crate) unsafe fn function<F: Copy>(
    library: &'static Library,
    what: &str,
    symbol: &str,
) -> Result<F> {
    // SAFETY: as required of the caller; the library stays loaded.
    let found = unsafe { library.get::<F>(symbol.as_bytes()) };
    found
        .map(|function| *function)
        .map_err(|_| missing(what, format!("its library has no {symbol}")))
}

/// Declares a structure of function pointers that [`function`] looks up by their C names.
macro_rules! table {
    ($(#[$doc:meta])* $name:ident of $what:literal {
        $($field:ident = $symbol:ident($($argument:ty),*) -> $result:ty;)*
    } $(optional {
        $($extra:ident = $extra_symbol:ident($($extra_argument:ty),*) -> $extra_result:ty;)*
    })?) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy)]
        pub struct $name {
            $(
                #[doc = concat!("`", stringify!($symbol), "`.")]
                pub $field: unsafe extern "C" fn($($argument),*) -> $result,
            )*
            $($(
                #[doc = concat!("`", stringify!($extra_symbol), "`, if the library has it.")]
                pub $extra: Option<unsafe extern "C" fn($($extra_argument),*) -> $extra_result>,
            )*)?
        }

        impl $name {
            /// Looks up every function.
            ///
            /// # Errors
            /// [`annulus_core::Error::Unsupported`] naming the first missing function that is not
            /// optional.
            ///
            /// # Safety
            /// The library is the one that the table describes, so that every function has its
            /// type.
            pub(crate) unsafe fn of(
                library: &'static libloading::Library,
            ) -> annulus_core::Result<Self> {
                use $crate::library::function;

                // SAFETY: as required of the caller.
                unsafe {
                    Ok(Self {
                        $($field: function(library, $what, stringify!($symbol))?,)*
                        $($($extra: function(library, $what, stringify!($extra_symbol)).ok(),)*)?
                    })
                }
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
        // a library with none of CUDA's functions
        let library = super::open(&["libnone.so.1", "libc.so.6"]).unwrap();
        // SAFETY: no symbol is found, so none gets a wrong type.
        let (driver, compiler) = unsafe {
            (Symbols::of(library).unwrap_err(), CompilerSymbols::of(library).unwrap_err())
        };
        assert_eq!(
            driver.to_string(),
            "CUDA is not supported by this machine: its library has no cuInit"
        );
        assert_eq!(
            compiler.to_string(),
            "CUDA is not supported by this machine: its library has no nvrtcVersion"
        );
        #[cfg(feature = "nccl")]
        {
            // SAFETY: as above.
            let nccl = unsafe { crate::nccl::NcclSymbols::of(library) }.unwrap_err();
            assert_eq!(
                nccl.to_string(),
                "NCCL is not supported by this machine: its library has no ncclGetVersion"
            );
        }
        assert!(super::open(&["libnone.so.1"]).is_none());
    }
}
