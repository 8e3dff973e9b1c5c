//! An MPI that is loaded at run time: a library with the standard ABI, or a shim.
//! `ffi.rs` has its types, constants and functions.

use std::{
    env,
    error::Error,
    ffi::{CStr, OsStr, OsString},
    sync::OnceLock,
};

use libloading::Library;

pub mod ffi;

/// Loads MPI at the first call.
///
/// # Errors
/// The text of the reason, if no library can be loaded, if it lacks a function, or if its ABI has
/// another version. Every call returns the same result.
pub fn loaded() -> Result<(), String> {
    ffi::table().map(|_| ()).map_err(ToOwned::to_owned)
}

/// Returns a function of MPI that the standard does not have, or `None` if no MPI is loaded or it
/// lacks the function.
///
/// # Safety
/// `F` is the type of a pointer to the function of this name.
pub(crate) unsafe fn extension<F: Copy>(name: &CStr) -> Option<F> {
    let opened = opened().as_ref().ok()?;
    // SAFETY: as the caller promises; the library stays loaded. A shim depends on its MPI, so the
    // search includes that
    unsafe { opened.library.get::<F>(name.to_bytes_with_nul()).ok().map(|function| *function) }
}

/// The variable that names the library, as the loader of the system takes it: a path, or a name
/// that is searched.
const VARIABLE: &str = "ANNULUS_MPI_LIBRARY";

/// Names of the library of the standard ABI. Its version is that of the ABI, which is 1; MPICH
/// 5.0.0 and 5.0.1 have 0 by mistake (MPICH pull request 7867). A library that the program has
/// loaded already is found by this name, wherever it is.
const NAMES: &[&str] = if cfg!(target_os = "macos") {
    &["libmpi_abi.1.dylib", "libmpi_abi.0.dylib"]
} else {
    &["libmpi_abi.so.1", "libmpi_abi.so.0"]
};

/// Prefix of the functions of a shim. They cannot have the names of MPI's own, which they call.
const SHIM_PREFIX: &str = "annulus_";

/// A library that is never unloaded.
struct OpenedLibrary {
    library: Library,
    /// Before the name of every function.
    prefix: &'static str,
}

/// Returns the library, which the first call loads.
fn opened() -> &'static Result<OpenedLibrary, String> {
    static LIBRARY: OnceLock<Result<OpenedLibrary, String>> = OnceLock::new();
    LIBRARY.get_or_init(|| open(env::var_os(VARIABLE)))
}

/// Loads the library `chosen`, or the first of [`NAMES`] that there is.
fn open(chosen: Option<OsString>) -> Result<OpenedLibrary, String> {
    let is_chosen = chosen.is_some();
    let names = chosen.map_or_else(|| NAMES.iter().map(OsString::from).collect(), |one| vec![one]);
    let mut first_error = None;
    for name in names {
        // SAFETY: loading runs the initialisers of an MPI, which may run at any time
        match unsafe { Library::new(&name) } {
            Ok(library) => return Ok(OpenedLibrary::new(library)),
            Err(error) => {
                first_error.get_or_insert_with(|| reason(&name, &error));
            }
        }
    }
    let error = first_error.unwrap_or_default();
    Err(if is_chosen {
        format!("{VARIABLE}: {error}")
    } else {
        format!("{error}; {VARIABLE} can name another library")
    })
}

/// Returns the reason of the loader, which names the library.
fn reason(name: &OsStr, error: &libloading::Error) -> String {
    let text = error.source().map_or_else(|| error.to_string(), ToString::to_string);
    let name = name.to_string_lossy();
    if text.contains(&*name) { text } else { format!("{name}: {text}") }
}

impl OpenedLibrary {
    fn new(library: Library) -> Self {
        let mut opened = Self { library, prefix: SHIM_PREFIX };
        // SAFETY: the address is not used
        if unsafe { opened.function::<*const ()>("MPI_Abi_get_version") }.is_err() {
            opened.prefix = "";
        }
        opened
    }

    /// Looks up a function of MPI.
    ///
    /// # Errors
    /// A text that names the function, if the library lacks it.
    ///
    /// # Safety
    /// `F` is the type of a pointer to the function of this name.
    unsafe fn function<F: Copy>(&self, name: &str) -> Result<F, String> {
        let symbol = format!("{}{name}", self.prefix);
        // SAFETY: as the caller promises; the library stays loaded
        let found = unsafe { self.library.get::<F>(symbol.as_bytes()) };
        found.map(|function| *function).map_err(|_| {
            format!(
                "the library has no {name} of the standard ABI of MPI 5.0; an MPI with another ABI \
                 needs the shim annulus_mpi_shim.c, which {VARIABLE} names"
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_is_named_with_the_variable() {
        let text = open(Some("libnone.so.9".into())).err().unwrap_or_default();
        assert!(text.starts_with("ANNULUS_MPI_LIBRARY: libnone.so.9: "), "{text}");
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn a_library_without_the_functions_of_mpi_is_refused() {
        let opened = open(Some("libc.so.6".into())).unwrap_or_else(|text| panic!("{text}"));
        // SAFETY: the address is not used
        let found = unsafe { opened.function::<*const ()>("MPI_Isend") };
        let text = found.err().unwrap_or_default();
        assert!(text.starts_with("the library has no MPI_Isend of the standard ABI"), "{text}");
    }
}
