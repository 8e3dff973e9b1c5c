//! The plan's memory for blocks and gradients on their way.

use annulus_core::{Backend, BackwardMode, Error, Local, Result, Route, Rows, Space, Spec};

use super::shared::Shared;

/// Memory that stays with the plan: made at plan time, used in turn by every call.
pub(super) struct Buffers<S: Space> {
    /// Blocks: the home block and as many as the route keeps at once.
    pub(super) blocks: Vec<S::Buffer>,
    /// Travelling queries (two-pass backward).
    pub(super) queries: Vec<S::Buffer>,
    /// Fresh and travelling gradients.
    pub(super) gradients: Vec<S::Buffer>,
    /// This rank's own dk, dv.
    pub(super) home: Option<S::Buffer>,
    /// Row descriptions of the block at hand, refilled every step.
    pub(super) rows: Rows,
}

impl<S: Space> Buffers<S> {
    pub(super) fn allocate<B: Backend<Space = S>>(
        backend: &B,
        spec: &Spec,
        shared: &Shared,
        local: &Local,
        route: Route,
        backward: bool,
    ) -> Result<Self> {
        let many = |count: usize, rows: u64, bytes: u64| (0..count).map(|_| backend.allocate(rows * bytes)).collect::<Result<Vec<_>>>();
        let communicates = shared.coordinates.kv.len() > 1;
        // a relay recycles the home block as soon as it is sent; a direct route keeps it for later users
        let blocks = if !communicates {
            1
        } else if route == Route::Direct {
            3
        } else {
            2
        };
        let two_pass = backward && spec.backward == BackwardMode::TwoPass;
        // one fresh gradient is made while the last one is still on its way; one arrives from the rank before, one comes home
        let gradients = if backward && communicates && !two_pass { 4 } else { 0 };
        Ok(Self {
            blocks: many(blocks, shared.most_block_rows, spec.kv_record().bytes())?,
            queries: if two_pass && communicates { many(blocks, shared.most_query_rows, spec.query_record().bytes())? } else { Vec::new() },
            gradients: many(gradients, shared.most_block_rows, spec.gradient_record().bytes())?,
            home: if backward { Some(backend.allocate(local.keys.len() as u64 * spec.gradient_record().bytes())?) } else { None },
            rows: Rows::default(),
        })
    }
}

/// A buffer from the plan's stock. The counts in [`Buffers::allocate`] make sure that there is one.
pub(super) fn spare<T>(stock: &mut Vec<T>) -> Result<T> {
    stock.pop().ok_or_else(|| Error::Device { what: "the plan's buffers are all in flight (a defect of the schedule)".into() })
}
