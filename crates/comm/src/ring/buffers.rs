//! The plan's memory for blocks and gradients in flight.

use annulus_core::{Backend, BackwardMode, GRADIENT_STEPS, LeafSums, Result, Space};

use super::{
    block_rows::BlockRows,
    block_stock::{BlockSizes, BlockStock},
    blocks::Pace,
    plan::{Agreed, RingPlan},
};

/// Buffers of a plan, allocated with it and used by every pass in turn.
pub(super) struct Buffers<S: Space> {
    /// KV blocks.
    pub(super) blocks: BlockStock<S>,
    /// Query blocks (two-pass backward).
    pub(super) queries: BlockStock<S>,
    /// Partial sums of dK and dV, computed here or in flight.
    pub(super) gradients: Vec<S::Buffer>,
    /// Final gradients that arrive.
    pub(super) final_gradients: Vec<S::Buffer>,
    /// dK and dV of the local keys.
    pub(super) local_dkv: Option<S::Buffer>,
    /// Rows of the current block.
    pub(super) rows: BlockRows,
    /// Terms of sums over leaves of the last backward pass, in the reproducible order.
    pub(super) leaf_sums: LeafSums,
}

/// Bytes of each buffer.
struct Sizes {
    blocks: BlockSizes,
    queries: Option<BlockSizes>,
    gradients: Vec<u64>,
    final_gradients: Vec<u64>,
    local_dkv: Option<u64>,
}

impl Sizes {
    fn of(agreed: &Agreed, plan: &RingPlan) -> Self {
        let Agreed { spec, backward, .. } = agreed;
        let communicates = plan.shards.kv.len() > 1;
        let two_pass = *backward && spec.backward == BackwardMode::TwoPass;
        let pace = Pace::new(agreed);
        let sends_gradients = *backward && communicates && !two_pass;
        let local_dkv = plan.gradient_bytes(plan.keys.len() as u64);
        let ahead = pace.with_gradients().ahead.min(GRADIENT_STEPS);
        Self {
            blocks: BlockSizes::new(
                plan.local_kv_bytes(),
                &plan.program.steps,
                spec.kv_row_layout().bytes(),
                pace,
            ),
            queries: (two_pass && communicates).then(|| {
                let row = plan.query_row.bytes();
                BlockSizes::new(plan.local_query_bytes(), &plan.query_steps, row, pace)
            }),
            gradients: if sends_gradients { partial_sums(plan, ahead) } else { Vec::new() },
            final_gradients: if sends_gradients { vec![local_dkv; ahead] } else { Vec::new() },
            local_dkv: backward.then_some(local_dkv),
        }
    }
}

/// Returns the sizes of the buffers for partial sums: one is computed while the last `ahead` are
/// sent and another arrives. The tail of the local block follows the last arrival, so it needs a
/// further buffer only if it is longer than a block.
fn partial_sums(plan: &RingPlan, ahead: usize) -> Vec<u64> {
    let mut rows = vec![plan.most_received; 2 + ahead];
    rows.extend((plan.tail_rows() > plan.most_received).then(|| plan.tail_rows()));
    rows.into_iter().map(|rows| plan.gradient_bytes(rows)).collect()
}

impl<S: Space> Buffers<S> {
    /// Allocates the buffers of a plan.
    ///
    /// # Errors
    /// As [`Backend::allocate`].
    pub(super) fn allocate<B: Backend<Space = S>>(
        backend: &B,
        agreed: &Agreed,
        plan: &RingPlan,
    ) -> Result<Self> {
        let sizes = Sizes::of(agreed, plan);
        let many = |sizes: Vec<u64>| {
            sizes.into_iter().map(|bytes| backend.allocate(bytes)).collect::<Result<Vec<_>>>()
        };
        Ok(Self {
            blocks: sizes.blocks.allocate(backend)?,
            queries: match sizes.queries {
                Some(sizes) => sizes.allocate(backend)?,
                None => BlockStock::empty(),
            },
            gradients: many(sizes.gradients)?,
            final_gradients: many(sizes.final_gradients)?,
            local_dkv: sizes.local_dkv.map(|bytes| backend.allocate(bytes)).transpose()?,
            rows: BlockRows::default(),
            leaf_sums: LeafSums::default(),
        })
    }

    /// Returns the bytes of all buffers, between passes.
    pub(super) fn bytes(&self) -> u64 {
        let Self { blocks, queries, gradients, final_gradients, local_dkv, .. } = self;
        let of_gradients = gradients.iter().chain(final_gradients).chain(local_dkv);
        blocks.bytes() + queries.bytes() + of_gradients.map(S::size).sum::<u64>()
    }

    /// Returns true if the buffers are large enough for this plan of the same ring.
    pub(super) fn fit(&self, agreed: &Agreed, plan: &RingPlan) -> bool {
        let sizes = Sizes::of(agreed, plan);
        let fits = |have: &[S::Buffer], mut want: Vec<u64>| {
            let mut have: Vec<u64> = have.iter().map(S::size).collect();
            have.sort_unstable();
            want.sort_unstable();
            have.len() == want.len() && have.iter().zip(&want).all(|(have, want)| have >= want)
        };
        // `final_gradients` and `local_dkv` fit: the number of local rows never changes
        self.blocks.fits(&sizes.blocks)
            && sizes.queries.is_none_or(|sizes| self.queries.fits(&sizes))
            && fits(&self.gradients, sizes.gradients)
    }
}

/// Returns the index of the smallest buffer of the stock that holds `bytes`.
fn find_buffer<S: Space>(stock: &[S::Buffer], bytes: u64) -> Option<usize> {
    stock
        .iter()
        .enumerate()
        .filter(|(_, buffer)| S::size(buffer) >= bytes)
        .min_by_key(|(_, buffer)| S::size(buffer))
        .map(|(index, _)| index)
}

/// The gradient buffers of one pass.
pub(super) struct GradientBuffers<'a, S: Space> {
    stock: &'a mut Vec<S::Buffer>,
    final_stock: &'a mut Vec<S::Buffer>,
    /// Partial sums that were sent; free once no transport owns them.
    sent: Vec<S::Buffer>,
}

impl<'a, S: Space> GradientBuffers<'a, S> {
    pub(super) const fn new(
        stock: &'a mut Vec<S::Buffer>,
        final_stock: &'a mut Vec<S::Buffer>,
    ) -> Self {
        Self { stock, final_stock, sent: Vec::new() }
    }

    /// Takes a buffer for a partial sum; `None` while all are being sent.
    pub(super) fn take(&mut self, bytes: u64) -> Option<S::Buffer> {
        self.stock.extend(self.sent.extract_if(.., |buffer| !S::is_shared(buffer)));
        let index = find_buffer::<S>(self.stock, bytes)?;
        Some(self.stock.swap_remove(index))
    }

    /// Takes a buffer for a final gradient; `None` while all are expected.
    pub(super) fn take_final(&mut self, bytes: u64) -> Option<S::Buffer> {
        let index = find_buffer::<S>(self.final_stock, bytes)?;
        Some(self.final_stock.swap_remove(index))
    }

    /// Returns the buffer of a partial sum.
    pub(super) fn put_back(&mut self, buffer: S::Buffer) {
        self.stock.push(buffer);
    }

    /// Returns the buffer of a final gradient.
    pub(super) fn put_back_final(&mut self, buffer: S::Buffer) {
        self.final_stock.push(buffer);
    }

    /// Keeps a buffer until its bytes are sent.
    pub(super) fn sent(&mut self, dkv: Option<(S::Buffer, S::Event)>) {
        self.sent.extend(dkv.map(|(buffer, _)| buffer));
    }

    /// Ends the pass, of which all sends have completed.
    pub(super) fn finish(&mut self) {
        self.stock.append(&mut self.sent);
    }
}
