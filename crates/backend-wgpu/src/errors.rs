//! Conversion of wgpu errors. wgpu panics on an error outside of error scopes, so every call uses
//! them.

use annulus_core::Error;
use wgpu::ErrorFilter;

/// A device error, which ends the plan.
pub(crate) fn device_error(what: impl ToString) -> Error {
    Error::Device { what: what.to_string() }
}

/// First error of each kind raised by some calls.
#[derive(Debug)]
pub(crate) struct ScopedErrors {
    pub(crate) memory: Option<wgpu::Error>,
    pub(crate) validation: Option<wgpu::Error>,
    pub(crate) internal: Option<wgpu::Error>,
}

impl ScopedErrors {
    /// Memory errors first: a failed allocation makes later uses invalid.
    pub(crate) fn into_error(self) -> Option<Error> {
        if self.memory.is_some() {
            return Some(Error::out_of_memory("the device", 0));
        }
        self.validation.or(self.internal).map(device_error)
    }
}

/// Runs calls to a device and returns the errors that they raised on this thread.
pub(crate) fn with_error_scopes<T>(
    device: &wgpu::Device,
    calls: impl FnOnce() -> T,
) -> (T, ScopedErrors) {
    let internal = device.push_error_scope(ErrorFilter::Internal);
    let memory = device.push_error_scope(ErrorFilter::OutOfMemory);
    let validation = device.push_error_scope(ErrorFilter::Validation);
    let result = calls();
    // popped innermost first
    let [validation, memory, internal] =
        [validation, memory, internal].map(|scope| pollster::block_on(scope.pop()));
    (result, ScopedErrors { memory, validation, internal })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_of_error_has_its_type() {
        let source = || Box::new(std::fmt::Error) as wgpu::ErrorSource;
        let none = || ScopedErrors { memory: None, validation: None, internal: None };
        let memory = || Some(wgpu::Error::OutOfMemory { source: source() });
        let validation =
            || Some(wgpu::Error::Validation { source: source(), description: "a binding".into() });
        let internal =
            || Some(wgpu::Error::Internal { source: source(), description: "a compiler".into() });
        assert_eq!(none().into_error(), None);
        assert_eq!(
            ScopedErrors { memory: memory(), ..none() }.into_error(),
            Some(Error::out_of_memory("the device", 0))
        );
        // the driver reports no number of bytes
        let message = Error::out_of_memory("the device", 0).to_string();
        assert_eq!(message, "out of memory: the device");
        // using a buffer whose allocation failed is also a validation error
        let both =
            ScopedErrors { memory: memory(), validation: validation(), internal: internal() }
                .into_error();
        assert!(matches!(both, Some(Error::OutOfMemory { .. })), "{both:?}");
        for (caught, word) in [
            (ScopedErrors { validation: validation(), ..none() }, "binding"),
            (ScopedErrors { internal: internal(), ..none() }, "compiler"),
        ] {
            let error = caught.into_error();
            assert!(
                matches!(&error, Some(Error::Device { what }) if what.contains(word)),
                "{error:?}"
            );
        }
    }
}
