//! Ranges for profilers: two functions of the host that are called at the begin and at the end of
//! each activity of a rank, as NVTX, ROCTX, Caliper and their like take them.
//!
//! | name | activity |
//! |---|---|
//! | `forward`, `backward` | a pass, with its agreements |
//! | `attend` | a call of a KV cache |
//! | `step` | a ring step: tiles, and the messages that are posted between them |
//! | `wait` | exposed communication |
//!
//! Ranges nest, and each ends on the thread on which it began. Without functions a range costs one
//! load of an atomic.
//!
//! With the feature `tracing`, passes, ring steps and waits are also spans of that crate.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::OnceLock,
};

use annulus_core::{Error, Result};

/// Function of the host that is called with the name of a range.
type RangeHook = Box<dyn Fn(&'static str) + Send + Sync>;

struct RangeHooks {
    begin: RangeHook,
    end: RangeHook,
}

static HOOKS: OnceLock<RangeHooks> = OnceLock::new();

/// Calls `begin` and `end` with the name of every range of this process from now on. They are
/// called on the threads of the ranks, between tiles, so they are short. A panic in them is
/// ignored.
///
/// # Errors
/// [`Error::InvalidArgument`] if functions were set before: profilers belong to a process, and a
/// range must end with the functions that it began with.
///
/// # Examples
/// ```
/// use annulus_comm::profiler::set_range_hooks;
///
/// set_range_hooks(|name| println!("begin {name}"), |name| println!("end {name}"))?;
/// assert!(set_range_hooks(|_| {}, |_| {}).is_err());
/// # Ok::<(), annulus_core::Error>(())
/// ```
pub fn set_range_hooks(
    begin: impl Fn(&'static str) + Send + Sync + 'static,
    end: impl Fn(&'static str) + Send + Sync + 'static,
) -> Result<()> {
    let hooks = RangeHooks { begin: Box::new(begin), end: Box::new(end) };
    HOOKS
        .set(hooks)
        .map_err(|_| Error::invalid("range hooks", "a second pair", "one pair for each process"))
}

/// A range, which ends when it is dropped.
pub(crate) struct Range(Option<(&'static RangeHooks, &'static str)>);

impl Range {
    pub(crate) fn begin(name: &'static str) -> Self {
        let hooks = HOOKS.get();
        if let Some(RangeHooks { begin, .. }) = hooks {
            call(begin, name);
        }
        Self(hooks.map(|hooks| (hooks, name)))
    }
}

impl Drop for Range {
    fn drop(&mut self) {
        if let Some((RangeHooks { end, .. }, name)) = self.0 {
            call(end, name);
        }
    }
}

/// Calls a function of the host, whose panic must not unwind out of a drop.
fn call(hook: &RangeHook, name: &'static str) {
    drop(catch_unwind(AssertUnwindSafe(|| hook(name))));
}

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
