//! annulus errors as the exceptions of `annulus_attention/_errors.py`.

use annulus::Error;
use pyo3::prelude::*;

/// An exception: of Python, or of an error of annulus.
#[derive(Debug)]
pub(crate) struct Raised(PyErr);

/// Result of a function that Python calls.
pub(crate) type Raises<T> = Result<T, Raised>;

impl From<PyErr> for Raised {
    fn from(error: PyErr) -> Self {
        Self(error)
    }
}

impl From<Error> for Raised {
    fn from(error: Error) -> Self {
        Python::attach(|py| Self(exception(py, &error)))
    }
}

impl From<Raised> for PyErr {
    fn from(raised: Raised) -> Self {
        raised.0
    }
}

/// Builds the exception of an error: its class, message, stable code and, where there is one, the
/// argument's name.
fn exception(py: Python<'_>, error: &Error) -> PyErr {
    let argument = match error {
        Error::InvalidArgument { argument, .. } => Some(argument.as_str()),
        _ => None,
    };
    let made = py
        .import("annulus_attention._errors")
        .and_then(|module| module.getattr("from_code"))
        .and_then(|make| make.call1((error.code(), error.to_string(), argument)));
    match made {
        Ok(exception) => PyErr::from_value(exception),
        Err(failed) => failed,
    }
}
