//! Spans of passes, ring steps and waits: ranges for the host's profiler, and with the feature
//! `tracing` spans of that crate.

/// Opens a span that ends with the scope. The range of a pass has the name of the pass. Without the
/// feature, fields are not evaluated.
macro_rules! span {
    ("pass", $pass:ident $(, $($field:tt)*)?) => {
        let _range = $crate::profiler::Range::begin($pass);
        #[cfg(feature = "tracing")]
        let _span = tracing::debug_span!(target: "annulus", "pass", $pass $(, $($field)*)?).entered();
    };
    ($name:literal $(, $($field:tt)*)?) => {
        let _range = $crate::profiler::Range::begin($name);
        #[cfg(feature = "tracing")]
        let _span = tracing::debug_span!(target: "annulus", $name $(, $($field)*)?).entered();
    };
}

pub(crate) use span;
