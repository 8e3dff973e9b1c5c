//! The plan's memory for blocks and gradients in flight.

use annulus_core::{Backend, BackwardMode, LeafSums, Result, Space};

use super::{
    block_rows::BlockRows,
    block_stock::{BlockSizes, BlockStock},
    gradient_stock::{GradientSizes, GradientStock},
    pace::Pace,
    plan::{Agreed, RingPlan},
};

/// Buffers of a plan, allocated with it and used by every pass in turn.
pub(super) struct Buffers<S: Space> {
    /// KV blocks.
    pub(super) blocks: BlockStock<S>,
    /// Query blocks (two-pass backward).
    pub(super) queries: BlockStock<S>,
    /// Gradients in flight (one-pass backward).
    pub(super) gradients: GradientStock<S>,
    /// dK and dV of the local keys.
    pub(super) local_dkv: Option<S::Buffer>,
    /// Rows of the current block.
    pub(super) rows: BlockRows,
    /// Terms of sums over leaves of the last backward pass, in the reproducible order.
    pub(super) leaf_sums: LeafSums,
}

/// Bytes of the messages of a plan.
struct Sizes {
    blocks: BlockSizes,
    queries: Option<BlockSizes>,
    gradients: Option<GradientSizes>,
}

impl Sizes {
    fn of(agreed: &Agreed, plan: &RingPlan) -> Self {
        let Agreed { spec, backward, .. } = agreed;
        let communicates = plan.shards.kv.len() > 1;
        let two_pass = *backward && spec.backward == BackwardMode::TwoPass;
        let pace = Pace::new(agreed);
        let steps = &plan.program.steps;
        let kv_row = spec.kv_row_layout().bytes();
        Self {
            blocks: BlockSizes::new(plan.local_kv_bytes(), steps, kv_row, pace),
            queries: (two_pass && communicates).then(|| {
                let row = plan.query_row.bytes();
                BlockSizes::new(plan.local_query_bytes(), &plan.query_steps, row, pace)
            }),
            gradients: (*backward && communicates && !two_pass).then(|| {
                let tail = plan.gradient_bytes(plan.tail_rows());
                GradientSizes::new(steps, plan.gradient_bytes(1), tail, pace)
            }),
        }
    }
}

impl<S: Space> Buffers<S> {
    /// Allocates the buffers of a plan.
    pub(super) fn allocate<B: Backend<Space = S>>(
        backend: &B,
        agreed: &Agreed,
        plan: &RingPlan,
    ) -> Result<Self> {
        let Sizes { blocks, queries, gradients } = Sizes::of(agreed, plan);
        let local_dkv = plan.gradient_bytes(plan.keys.len() as u64);
        Ok(Self {
            blocks: blocks.allocate(backend)?,
            queries: match queries {
                Some(sizes) => sizes.allocate(backend)?,
                None => BlockStock::empty(),
            },
            gradients: match gradients {
                Some(sizes) => sizes.allocate(backend)?,
                None => GradientStock::empty(),
            },
            local_dkv: agreed.backward.then(|| backend.allocate(local_dkv)).transpose()?,
            rows: BlockRows::default(),
            leaf_sums: LeafSums::default(),
        })
    }

    /// Returns the bytes of all buffers, between passes.
    pub(super) fn bytes(&self) -> u64 {
        let Self { blocks, queries, gradients, local_dkv, .. } = self;
        let local_dkv = local_dkv.as_ref().map_or(0, S::size);
        blocks.bytes() + queries.bytes() + gradients.bytes() + local_dkv
    }

    /// Returns true if the buffers are large enough for this plan of the same ring.
    pub(super) fn fit(&self, agreed: &Agreed, plan: &RingPlan) -> bool {
        let Sizes { blocks, queries, gradients } = Sizes::of(agreed, plan);
        // `local_dkv` fits: the number of local rows never changes
        self.blocks.fits(&blocks)
            && queries.is_none_or(|sizes| self.queries.fits(&sizes))
            && gradients.is_none_or(|sizes| self.gradients.fits(&sizes))
    }
}
