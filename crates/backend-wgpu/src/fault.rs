//! What wgpu says of a call, as the house's errors. wgpu panics on an error that nobody catches; here somebody always does.

use annulus_core::Error;
use wgpu::ErrorFilter;

/// What the device says, as an error that ends the plan.
pub(crate) fn fault(what: impl ToString) -> Error {
    Error::Device { what: what.to_string() }
}

/// The first error of each kind that some calls have caused.
#[derive(Debug)]
pub(crate) struct Caught {
    pub(crate) memory: Option<wgpu::Error>,
    pub(crate) validation: Option<wgpu::Error>,
    pub(crate) internal: Option<wgpu::Error>,
}

impl Caught {
    /// Memory first: what could not be had makes what is done with it invalid.
    pub(crate) fn into_error(self) -> Option<Error> {
        if self.memory.is_some() {
            return Some(Error::OutOfMemory { asked: 0, free: None });
        }
        self.validation.or(self.internal).map(fault)
    }
}

/// Runs calls to a device; what went wrong with them on this thread.
pub(crate) fn caught<T>(device: &wgpu::Device, calls: impl FnOnce() -> T) -> (T, Caught) {
    let internal = device.push_error_scope(ErrorFilter::Internal);
    let memory = device.push_error_scope(ErrorFilter::OutOfMemory);
    let validation = device.push_error_scope(ErrorFilter::Validation);
    let result = calls();
    // innermost first
    let [validation, memory, internal] = [validation, memory, internal].map(|scope| pollster::block_on(scope.pop()));
    (result, Caught { memory, validation, internal })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_of_error_has_its_type() {
        let source = || Box::new(std::fmt::Error) as wgpu::ErrorSource;
        let none = || Caught { memory: None, validation: None, internal: None };
        let memory = || Some(wgpu::Error::OutOfMemory { source: source() });
        let validation = || Some(wgpu::Error::Validation { source: source(), description: "a binding".into() });
        let internal = || Some(wgpu::Error::Internal { source: source(), description: "a compiler".into() });
        assert_eq!(none().into_error(), None);
        assert_eq!(Caught { memory: memory(), ..none() }.into_error(), Some(Error::OutOfMemory { asked: 0, free: None }));
        // a buffer that could not be had is not valid either
        let both = Caught { memory: memory(), validation: validation(), internal: internal() }.into_error();
        assert!(matches!(both, Some(Error::OutOfMemory { .. })), "{both:?}");
        for (caught, word) in
            [(Caught { validation: validation(), ..none() }, "binding"), (Caught { internal: internal(), ..none() }, "compiler")]
        {
            let error = caught.into_error();
            assert!(matches!(&error, Some(Error::Device { what }) if what.contains(word)), "{error:?}");
        }
    }
}
