//! The plan's memory for blocks and gradients in flight: buffers in numbered places.
//!
//! [`BlockStock`] has the blocks that circulate:
//!
//! ```text
//! 0 .. blocks     blocks in the order in which they arrive: block j in place j % blocks
//! then            parts of the last block but the first, which is in the place of the block
//! then            the local block, if the route sends from it until the end; else it is block 0
//! ```
//! The number of the first places and their sizes are those of [`block_buffers`]. A block has one
//! place, not any that is large enough: a small block in a large buffer would keep the next large
//! one from being received ahead.
//!
//! [`GradientStock`] has the gradients of a one-pass backward:
//!
//! ```text
//! sums       dK and dV of a block, computed here, until they are sent: sum j in place j % sums
//! arriving   the partial sum that is added to the next of them; after the steps, the tail's sum
//! finals     final gradients that arrive: number j, in the order of the steps, in place j % finals
//! ```
//! The numbers of places and their sizes are those of [`gradient_buffers`].

use std::sync::Arc;

use annulus_core::{
    Backend, BackwardMode, Channel, Error, LeafSums, Result, RowSet, Rows, Shard, Space,
};
use annulus_plan::{GRADIENT_BUFFERS, block_buffers, gradient_buffers};

use super::{
    overlap::MAX_PARTS,
    plan::{Agreed, GroupPace, RingPlan},
    program::RankStep,
};

/// Buffers of a plan, allocated with it and used by every pass in turn.
pub(super) struct RingBuffers<S: Space> {
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
struct BufferSizes {
    blocks: BlockSizes,
    queries: Option<BlockSizes>,
    gradients: Option<GradientSizes>,
}

impl BufferSizes {
    fn of(agreed: &Agreed, plan: &RingPlan) -> Self {
        let Agreed { spec, backward, .. } = agreed;
        let communicates = plan.shards.kv.len() > 1;
        let two_pass = *backward && spec.backward == BackwardMode::TwoPass;
        let pace = GroupPace::new(agreed);
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

impl<S: Space> RingBuffers<S> {
    /// Allocates the buffers of a plan.
    pub(super) fn allocate<B: Backend<Space = S>>(
        backend: &B,
        agreed: &Agreed,
        plan: &RingPlan,
    ) -> Result<Self> {
        let BufferSizes { blocks, queries, gradients } = BufferSizes::of(agreed, plan);
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
        let BufferSizes { blocks, queries, gradients } = BufferSizes::of(agreed, plan);
        // `local_dkv` fits: the number of local rows never changes
        self.blocks.fits(&blocks)
            && queries.is_none_or(|sizes| self.queries.fits(&sizes))
            && gradients.is_none_or(|sizes| self.gradients.fits(&sizes))
    }
}

/// Buffers of a plan, each in a place of its own, from which the messages of a pass take it.
pub(super) struct Places<S: Space>(Vec<Option<S::Buffer>>);

impl<S: Space> Places<S> {
    /// Allocates buffers of these sizes.
    pub(super) fn allocate<B: Backend<Space = S>>(
        backend: &B,
        sizes: impl IntoIterator<Item = u64>,
    ) -> Result<Self> {
        let buffer = |bytes| backend.allocate(bytes).map(Some);
        sizes.into_iter().map(buffer).collect::<Result<_>>().map(Self)
    }

    /// Returns no places.
    pub(super) const fn none() -> Self {
        Self(Vec::new())
    }

    /// Returns the number of places.
    pub(super) const fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns true if the buffer of a place is free.
    pub(super) fn is_free(&self, place: usize) -> bool {
        self.0.get(place).is_some_and(Option::is_some)
    }

    /// Takes the buffer of a place.
    ///
    /// # Errors
    /// [`Error::Internal`] if it is not free.
    pub(super) fn take(&mut self, place: usize) -> Result<S::Buffer> {
        let buffer = self.0.get_mut(place).and_then(Option::take);
        buffer.ok_or_else(|| Error::internal("a buffer of the plan is in use"))
    }

    /// Returns the buffer of a place.
    pub(super) fn put(&mut self, place: usize, buffer: S::Buffer) {
        if let Some(empty) = self.0.get_mut(place) {
            *empty = Some(buffer);
        }
    }

    /// Returns the bytes of all free buffers: of all, between passes.
    pub(super) fn bytes(&self) -> u64 {
        self.0.iter().flatten().map(S::size).sum()
    }

    /// Returns true if the buffer of a place is free and has so many bytes.
    pub(super) fn holds(&self, place: usize, bytes: u64) -> bool {
        let buffer = self.0.get(place).and_then(Option::as_ref);
        buffer.is_some_and(|buffer| S::size(buffer) >= bytes)
    }

    /// Returns true if the first `count` places hold messages of these sizes, number j in place j %
    /// `count`.
    pub(super) fn hold(&self, count: usize, sizes: &[u64]) -> bool {
        let holds = |(number, &bytes): (usize, &u64)| self.holds(number % count.max(1), bytes);
        sizes.iter().enumerate().all(holds)
    }
}

/// Bytes of the blocks of one circulation.
pub(super) struct BlockSizes {
    /// Blocks in the order in which they arrive, with the local one first unless it is kept.
    blocks: Vec<u64>,
    /// Parts of the last block but the first.
    later_parts: [u64; MAX_PARTS - 1],
    /// The local block, on a route that sends from it until the end.
    kept: Option<u64>,
    pace: GroupPace,
}

/// Buffers for the blocks of one circulation.
pub(super) struct BlockStock<S: Space> {
    places: Places<S>,
    /// Number of places for blocks that arrive.
    blocks: usize,
    keeps_local: bool,
}

impl BlockSizes {
    /// Returns the sizes of the blocks of `steps`, with records of `record_bytes` bytes.
    pub(super) fn new(local: u64, steps: &[RankStep], record_bytes: u64, pace: GroupPace) -> Self {
        let received = steps.iter().flat_map(|step| &step.kv.receives).map(|block| block.bytes());
        let (first, kept) =
            if pace.keeps_local { (None, Some(local)) } else { (Some(local), None) };
        let mut later_parts = [0; MAX_PARTS - 1];
        let parts = steps.iter().flat_map(|step| step.parts.iter().skip(1));
        later_parts.iter_mut().zip(parts).for_each(|(bytes, part)| {
            *bytes = part.count() * record_bytes;
        });
        Self { blocks: first.into_iter().chain(received).collect(), later_parts, kept, pace }
    }

    /// Allocates buffers for the blocks.
    pub(super) fn allocate<B: Backend>(&self, backend: &B) -> Result<BlockStock<B::Space>> {
        let Self { blocks, later_parts, kept, pace } = self;
        let blocks = block_buffers(blocks, pace.ahead, pace.is_unbounded());
        let sizes = blocks.iter().chain(later_parts).chain(kept).copied();
        Ok(BlockStock {
            places: Places::allocate(backend, sizes)?,
            blocks: blocks.len(),
            keeps_local: kept.is_some(),
        })
    }
}

impl<S: Space> BlockStock<S> {
    /// Returns a stock without places, of a plan that has no such circulation.
    pub(super) const fn empty() -> Self {
        Self { places: Places::none(), blocks: 0, keeps_local: false }
    }

    /// Returns the place of the local block.
    pub(super) const fn local(&self) -> usize {
        if self.keeps_local { self.blocks + MAX_PARTS - 1 } else { 0 }
    }

    /// Returns the place of part `part` of the block that arrives after `received` others.
    pub(super) const fn place(&self, received: usize, part: usize) -> usize {
        if part > 0 {
            return self.blocks + part - 1;
        }
        let block = if self.keeps_local { received } else { received + 1 };
        if self.blocks == 0 { 0 } else { block % self.blocks }
    }

    /// Returns true if the buffer of a place is free.
    pub(super) fn is_free(&self, place: usize) -> bool {
        self.places.is_free(place)
    }

    /// Takes the buffer of a place.
    pub(super) fn take(&mut self, place: usize) -> Result<S::Buffer> {
        self.places.take(place)
    }

    /// Returns the buffer of a place.
    pub(super) fn put(&mut self, place: usize, buffer: S::Buffer) {
        self.places.put(place, buffer);
    }

    /// Returns the bytes of all free buffers: of all, between passes.
    pub(super) fn bytes(&self) -> u64 {
        self.places.bytes()
    }

    /// Returns true if the buffers, which are all free, can hold these blocks as far ahead as those
    /// that [`BlockSizes::allocate`] returns at least can.
    pub(super) fn fits(&self, sizes: &BlockSizes) -> bool {
        let BlockSizes { blocks, later_parts, kept, pace } = sizes;
        let mut later_parts = later_parts.iter().enumerate();
        kept.is_some() == self.keeps_local
            && self.blocks >= blocks.len().min(pace.ahead + 1)
            && self.places.hold(self.blocks, blocks)
            && later_parts.all(|(part, &bytes)| self.places.holds(self.blocks + part, bytes))
            && kept.is_none_or(|local| self.places.holds(self.local(), local))
    }
}

/// Bytes of the gradients of a pass.
pub(super) struct GradientSizes {
    sums: Vec<u64>,
    arriving: u64,
    finals: Vec<u64>,
    pace: GroupPace,
}

/// Buffers for the gradients of a pass.
pub(super) struct GradientStock<S: Space> {
    pub(super) sums: Places<S>,
    pub(super) arriving: Places<S>,
    pub(super) finals: Places<S>,
}

impl GradientSizes {
    /// Returns the sizes of the gradients of `steps`, with records of `record_bytes` bytes and
    /// `tail` bytes of the tail of the local block.
    pub(super) fn new(steps: &[RankStep], record_bytes: u64, tail: u64, pace: GroupPace) -> Self {
        let received = |channel| {
            let messages = steps.iter().flat_map(|step| &step.gradients.receives);
            messages.filter(move |message| message.channel == channel).map(|of| of.bytes())
        };
        let blocks = steps.iter().skip(1).map(|step| step.rows.count());
        Self {
            sums: blocks.filter(|&rows| rows > 0).map(|rows| rows * record_bytes).collect(),
            arriving: received(Channel::PartialGrad).max().unwrap_or(0).max(tail),
            finals: received(Channel::FinalGrad).collect(),
            pace: pace.with_gradients(),
        }
    }

    /// Allocates buffers for the gradients.
    pub(super) fn allocate<B: Backend>(&self, backend: &B) -> Result<GradientStock<B::Space>> {
        let Self { sums, arriving, finals, pace } = self;
        let [sums, finals] = gradient_buffers(sums, finals, pace.ahead, pace.is_unbounded());
        Ok(GradientStock {
            sums: Places::allocate(backend, sums)?,
            arriving: Places::allocate(backend, [*arriving])?,
            finals: Places::allocate(backend, finals)?,
        })
    }
}

impl<S: Space> GradientStock<S> {
    /// Returns a stock without places, of a plan that sends no gradients.
    pub(super) const fn empty() -> Self {
        Self { sums: Places::none(), arriving: Places::none(), finals: Places::none() }
    }

    /// Returns the bytes of all free buffers: of all, between passes.
    pub(super) fn bytes(&self) -> u64 {
        self.sums.bytes() + self.arriving.bytes() + self.finals.bytes()
    }

    /// Returns true if the buffers, which are all free, can hold these gradients as late as those
    /// that [`GradientSizes::allocate`] returns at least can.
    pub(super) fn fits(&self, sizes: &GradientSizes) -> bool {
        let GradientSizes { sums, arriving, finals, pace } = sizes;
        let late = pace.ahead.min(GRADIENT_BUFFERS);
        let fits = |places: &Places<S>, sizes: &[u64], least: usize| {
            places.len() >= sizes.len().min(least) && places.hold(places.len(), sizes)
        };
        fits(&self.sums, sums, late + 1)
            && fits(&self.finals, finals, late)
            && self.arriving.holds(0, *arriving)
    }
}

/// Row numbers, positions and segment ids of one block, one by one. They are overwritten when
/// another block is attended to, and kept for the same one: a ring of one rank has one block in all
/// passes, and a token over a long one would wait for the host to list its rows.
#[derive(Debug, Default)]
pub(super) struct BlockRows {
    rows: Rows,
    /// Shard that the rows are of; `None` before the first one and after an error.
    shard: Option<Arc<Shard>>,
    set: RowSet,
}

impl BlockRows {
    /// Lists the local rows `set` of a shard.
    pub(super) fn expand(&mut self, shard: &Arc<Shard>, set: &RowSet) -> Result<&Rows> {
        let is_same = self.shard.as_ref().is_some_and(|same| Arc::ptr_eq(same, shard));
        if !is_same || self.set != *set {
            self.shard = None;
            shard.expand(set, &mut self.rows)?;
            self.set.clone_from(set);
            self.shard = Some(Arc::clone(shard));
        }
        Ok(&self.rows)
    }
}

#[cfg(test)]
mod tests {
    use annulus_core::{Alignment, Batch, Dims, Side};
    use annulus_plan::Layout;

    use super::*;

    #[test]
    fn rows_are_listed_again_only_for_another_block() {
        let dims = Dims::new(1, 100, 1, 8);
        let shard = || {
            let batch = Batch::default();
            let layout = Layout::Contiguous;
            Arc::new(layout.local_shard(&dims, Alignment::TopLeft, Side::Kv, 0, 1, &batch))
        };
        let (first, other) = (shard(), shard());
        let (all, some) = (RowSet::all(100), RowSet::all(40));
        let mut rows = BlockRows::default();
        // with the number of the listing, which clones keep
        let mut list = |shard, set| format!("{:?}", rows.expand(shard, set).unwrap());
        let once = list(&first, &all);
        assert_eq!(list(&first, &all), once);
        // another set, another shard, and the first ones again
        assert_ne!(list(&first, &some), once);
        assert_ne!(list(&other, &all), once);
        assert_ne!(list(&first, &all), once);
    }
}
