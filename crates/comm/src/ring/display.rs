//! A plan as text.

use std::fmt;

use annulus_core::Backend;

use super::{Ring, program};

impl<B: Backend> fmt::Display for Ring<B> {
    /// Writes mask, ranks, layout, route, and what this rank receives and sends: `Causal { offset:
    /// 0 }, 8 ranks, zigzag, relay-down, 7 hops, 1.3 GiB sent forward, 2.6 GiB backward`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let program = &self.plan.program;
        let hops = program.steps.iter().filter(|step| !step.kv.receives.is_empty()).count();
        let forward = program::kv_bytes_sent(&program.steps);
        write!(
            f,
            "{:?}, {} ranks, {}, {}, {hops} hops, {} sent forward",
            self.spec().mask,
            self.ranks,
            self.layout().name(),
            self.route().name(),
            Bytes(forward),
        )?;
        if self.agreed.backward {
            let queries = program::kv_bytes_sent(&self.plan.query_steps);
            let backward = forward + program.gradient_bytes_sent() + queries;
            write!(f, ", {} backward", Bytes(backward))?;
        }
        Ok(())
    }
}

/// A number of bytes in the largest binary unit of which it has one.
struct Bytes(u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
        match (self.0.max(1).ilog2() / 10) as usize {
            0 => write!(f, "{} B", self.0),
            unit => {
                write!(f, "{:.1} {}", self.0 as f64 / (1u64 << (10 * unit)) as f64, units[unit - 1])
            }
        }
    }
}

impl<B: Backend> fmt::Debug for Ring<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ring")
            .field("rank", &self.rank)
            .field("ranks", &self.ranks)
            .field("layout", &self.layout().name())
            .field("route", &self.route())
            .finish_non_exhaustive()
    }
}
