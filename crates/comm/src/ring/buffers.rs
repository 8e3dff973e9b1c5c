//! The plan's memory for blocks and gradients on their way.

use annulus_core::{Backend, BackwardMode, Error, Local, Result, Route, Rows, Space, Spec};

use super::{legs::Leg, parts::MOST, shared::Shared};

/// Memory that stays with the plan: made at plan time, used in turn by every call.
pub(super) struct Buffers<S: Space> {
    /// Blocks: the home block and as many as the route keeps at once.
    pub(super) blocks: Vec<S::Buffer>,
    /// Travelling queries (two-pass backward).
    pub(super) queries: Vec<S::Buffer>,
    /// Fresh and travelling gradients.
    pub(super) gradients: Vec<S::Buffer>,
    /// The gradient that comes home from its last user.
    pub(super) homecomings: Vec<S::Buffer>,
    /// This rank's own dk, dv.
    pub(super) home: Option<S::Buffer>,
    /// Row descriptions of the block at hand, refilled every step.
    pub(super) rows: Rows,
}

/// How much each stock must hold, in bytes, by buffer.
struct Sizes {
    blocks: Vec<u64>,
    queries: Vec<u64>,
    gradients: Vec<u64>,
    homecomings: Vec<u64>,
    home: Option<u64>,
}

impl Sizes {
    fn of(spec: &Spec, shared: &Shared, local: &Local, route: Route, backward: bool) -> Self {
        let communicates = shared.coordinates.kv.len() > 1;
        let two_pass = backward && spec.backward == BackwardMode::TwoPass;
        // a relay recycles the home block as soon as it is sent; a direct route keeps it for later users
        let stock = |home: usize, received: u64, later: [u64; MOST - 1], bytes: u64| {
            let whole = match (communicates, route) {
                (false, _) => return vec![home as u64 * bytes],
                (true, Route::Direct) => vec![home as u64, received, received],
                (true, _) => vec![received.max(home as u64), received],
            };
            whole.into_iter().chain(later).map(|rows| rows * bytes).collect()
        };
        let (keys, queries) = (local.keys.len(), local.queries.len());
        let gradient = spec.gradient_record().bytes();
        let travels = backward && communicates && !two_pass;
        Self {
            blocks: stock(keys, shared.most_received, later_parts(&shared.way.legs), spec.kv_record().bytes()),
            queries: if two_pass && communicates {
                stock(queries, shared.most_queries_received, later_parts(&shared.query_legs), spec.query_record().bytes())
            } else {
                Vec::new()
            },
            gradients: if travels { gradients(shared.most_received, shared.late_rows(), gradient) } else { Vec::new() },
            homecomings: if travels { vec![keys as u64 * gradient] } else { Vec::new() },
            home: backward.then_some(keys as u64 * gradient),
        }
    }
}

/// Rows of the parts in which the last block comes, but for the first, which has a whole block's buffer.
fn later_parts(legs: &[Leg]) -> [u64; MOST - 1] {
    let mut rows = [0; MOST - 1];
    let parts = legs.iter().flat_map(|leg| leg.parts.iter().skip(1));
    rows.iter_mut().zip(parts).for_each(|(rows, part)| *rows = part.count());
    rows
}

/// One fresh gradient is made while the last one is still on its way and one arrives from the rank before. The home block's late rows come when
/// nothing arrives any more, so they need a buffer of their own only if they are more.
fn gradients(most_received: u64, late: u64, bytes: u64) -> Vec<u64> {
    let mut sizes = vec![most_received * bytes; 3];
    sizes.extend((late > most_received).then_some(late * bytes));
    sizes
}

impl<S: Space> Buffers<S> {
    /// Memory for these transfers.
    pub(super) fn allocate<B: Backend<Space = S>>(
        backend: &B,
        spec: &Spec,
        shared: &Shared,
        local: &Local,
        route: Route,
        backward: bool,
    ) -> Result<Self> {
        let sizes = Sizes::of(spec, shared, local, route, backward);
        let many = |sizes: Vec<u64>| sizes.into_iter().map(|bytes| backend.allocate(bytes)).collect::<Result<Vec<_>>>();
        Ok(Self {
            blocks: many(sizes.blocks)?,
            queries: many(sizes.queries)?,
            gradients: many(sizes.gradients)?,
            homecomings: many(sizes.homecomings)?,
            home: sizes.home.map(|bytes| backend.allocate(bytes)).transpose()?,
            rows: Rows::default(),
        })
    }

    /// Whether these transfers fit into this memory.
    pub(super) fn fit(&self, spec: &Spec, shared: &Shared, local: &Local, route: Route, backward: bool) -> bool {
        let sizes = Sizes::of(spec, shared, local, route, backward);
        let fits = |have: &[S::Buffer], want: Vec<u64>| {
            let mut have: Vec<u64> = have.iter().map(S::size).collect();
            let mut want = want;
            have.sort_unstable();
            want.sort_unstable();
            have.len() == want.len() && have.iter().zip(&want).all(|(have, want)| have >= want)
        };
        fits(&self.blocks, sizes.blocks) && fits(&self.queries, sizes.queries) && fits(&self.gradients, sizes.gradients)
        // the shard, and with it homecomings and home, never changes
    }
}

/// The smallest buffer of the stock that holds `bytes`. The sizes in [`Sizes::of`] make sure that there is one.
pub(super) fn spare<S: Space>(stock: &mut Vec<S::Buffer>, bytes: u64) -> Result<S::Buffer> {
    let fitting = stock.iter().enumerate().filter(|(_, buffer)| S::size(buffer) >= bytes).min_by_key(|(_, buffer)| S::size(buffer));
    match fitting.map(|(place, _)| place) {
        Some(place) => Ok(stock.swap_remove(place)),
        None => Err(Error::Device { what: "the plan's buffers are all in flight (a defect of the schedule)".into() }),
    }
}
