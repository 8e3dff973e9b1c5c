//! Spans of passes, ring steps and waits, with the feature `tracing`.

/// Opens a span that ends with the scope. Without the feature it expands to nothing, and its
/// arguments are not evaluated.
macro_rules! span {
    ($name:literal $(, $($field:tt)*)?) => {
        #[cfg(feature = "tracing")]
        let _span = tracing::debug_span!(target: "annulus", $name $(, $($field)*)?).entered();
    };
}

pub(crate) use span;
