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
    program::{RankProgram, RankStep},
};

/// Buffers of a plan, allocated with it and used by every pass in turn.
pub(super) struct RingBuffers<S: Space> {
    /// KV blocks.
    pub(super) blocks: BlockStock<S>,
    /// KV blocks with tangents (second derivatives).
    pub(super) tangent_blocks: BlockStock<S>,
    /// Query blocks (two-pass backward).
    pub(super) queries: BlockStock<S>,
    /// Gradients in flight (one-pass backward, double backward).
    pub(super) gradients: GradientStock<S>,
    /// dK and dV of the local keys.
    pub(super) local_dkv: Option<S::Buffer>,
    /// Rows of the current block.
    pub(super) rows: BlockRows,
    /// Terms of sums over leaves of the last backward pass, in the reproducible order.
    pub(super) leaf_sums: LeafSums,
}

/// Sizes of the places of a plan: of its blocks and of its queries those of [`block_sizes`], of its
/// gradients those of [`gradient_sizes`].
struct BufferSizes {
    blocks: [PlaceSizes; 3],
    tangents: Option<[PlaceSizes; 3]>,
    queries: Option<[PlaceSizes; 3]>,
    gradients: Option<[PlaceSizes; 3]>,
}

impl BufferSizes {
    fn of(agreed: &Agreed, plan: &RingPlan) -> Self {
        let Agreed { spec, backward, .. } = agreed;
        let communicates = plan.shards.kv.len() > 1;
        let two_pass = *backward && spec.backward == BackwardMode::TwoPass;
        let pace = GroupPace::new(agreed, plan);
        // of a two-pass backward those of a double backward
        let of_gradients = if two_pass { plan.tangents.as_ref() } else { Some(&plan.program) };
        let of_blocks = |program: &RankProgram| {
            block_sizes(program.local_bytes(), &program.steps, program.record_bytes, pace)
        };
        Self {
            blocks: of_blocks(&plan.program),
            tangents: plan.tangents.as_ref().map(of_blocks),
            queries: (two_pass && communicates).then(|| {
                let row = plan.query_row.bytes();
                block_sizes(plan.local_query_bytes(), &plan.query_steps, row, pace)
            }),
            gradients: of_gradients.filter(|_| *backward && communicates).map(|program| {
                let tail = plan.gradient_bytes(program.tail_rows());
                let pace = pace.with_gradients();
                gradient_sizes(&program.steps, plan.gradient_bytes(1), tail, pace)
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
        let BufferSizes { blocks, tangents, queries, gradients } = BufferSizes::of(agreed, plan);
        let local_dkv = plan.gradient_bytes(plan.keys.len() as u64);
        let none = || [PlaceSizes::default(), PlaceSizes::default(), PlaceSizes::default()];
        let [sums, arriving, finals] = gradients.unwrap_or_else(none);
        Ok(Self {
            blocks: BlockStock::allocate(backend, &blocks)?,
            tangent_blocks: BlockStock::allocate(backend, &tangents.unwrap_or_else(none))?,
            queries: BlockStock::allocate(backend, &queries.unwrap_or_else(none))?,
            gradients: GradientStock {
                sums: Places::allocate(backend, sums.places)?,
                arriving: Places::allocate(backend, arriving.places)?,
                finals: Places::allocate(backend, finals.places)?,
            },
            local_dkv: agreed.backward.then(|| backend.allocate(local_dkv)).transpose()?,
            rows: BlockRows::default(),
            leaf_sums: LeafSums::default(),
        })
    }

    /// Returns the bytes of all buffers, between passes.
    pub(super) fn bytes(&self) -> u64 {
        let GradientStock { sums, arriving, finals } = &self.gradients;
        let stocks = [&self.blocks, &self.tangent_blocks, &self.queries];
        let places = stocks.map(|stock| &stock.places);
        let places = places.into_iter().chain([sums, arriving, finals]);
        let buffers = places.flat_map(|places| &places.0).chain([&self.local_dkv]);
        buffers.flatten().map(S::size).sum()
    }

    /// Returns true if the buffers, which are all free, are large enough for this plan of the same
    /// ring: if its messages can be received as far ahead, and gradients can be as late, as in
    /// those that [`RingBuffers::allocate`] returns at least.
    pub(super) fn fit(&self, agreed: &Agreed, plan: &RingPlan) -> bool {
        let BufferSizes { blocks, tangents, queries, gradients } = BufferSizes::of(agreed, plan);
        // `local_dkv` fits: the number of local rows never changes
        let GradientStock { sums, arriving, finals } = &self.gradients;
        let gradients = gradients.is_none_or(|[of_sums, of_arriving, of_finals]| {
            of_sums.fit::<S>(&sums.0)
                && of_arriving.fit::<S>(&arriving.0)
                && of_finals.fit::<S>(&finals.0)
        });
        self.blocks.fits(&blocks)
            && tangents.is_none_or(|sizes| self.tangent_blocks.fits(&sizes))
            && queries.is_none_or(|sizes| self.queries.fits(&sizes))
            && gradients
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
}

/// Sizes of messages that share places, message j in place j % places.
#[derive(Default)]
struct PlaceSizes {
    /// Bytes of the messages, in order.
    messages: Vec<u64>,
    /// Bytes of the places to allocate.
    places: Vec<u64>,
    /// Fewest places that suffice, if they are large enough.
    least: usize,
}

impl PlaceSizes {
    /// Returns one place for each message.
    fn apart(messages: impl IntoIterator<Item = u64>) -> Self {
        let messages: Vec<u64> = messages.into_iter().collect();
        Self { places: messages.clone(), least: messages.len(), messages }
    }

    /// Returns true if free places can hold the messages.
    fn fit<S: Space>(&self, places: &[Option<S::Buffer>]) -> bool {
        let holds = |(number, &bytes): (usize, &u64)| {
            let buffer = places.get(number % places.len().max(1)).and_then(Option::as_ref);
            buffer.is_some_and(|buffer| S::size(buffer) >= bytes)
        };
        places.len() >= self.least && self.messages.iter().enumerate().all(holds)
    }
}

/// Returns the sizes of the blocks of `steps`, with records of `record_bytes` bytes: blocks in the
/// order in which they arrive, with the local one first unless it is kept; parts of the last block
/// but the first; the local block, on a route that sends from it until the end.
fn block_sizes(
    local: u64,
    steps: &[RankStep],
    record_bytes: u64,
    pace: GroupPace,
) -> [PlaceSizes; 3] {
    let received = steps.iter().flat_map(|step| &step.kv.receives).map(|block| block.bytes());
    let (first, kept) = if pace.keeps_local { (None, Some(local)) } else { (Some(local), None) };
    let messages: Vec<u64> = first.into_iter().chain(received).collect();
    let parts = steps.iter().flat_map(|step| step.parts.iter().skip(1));
    let parts = parts.map(|part| part.count() * record_bytes).chain(std::iter::repeat(0));
    let blocks = PlaceSizes {
        places: block_buffers(&messages, pace.ahead, pace.is_unbounded()),
        least: messages.len().min(pace.ahead + 1),
        messages,
    };
    [blocks, PlaceSizes::apart(parts.take(MAX_PARTS - 1)), PlaceSizes::apart(kept)]
}

/// Returns the sizes of the gradients of `steps`, with records of `record_bytes` bytes and `tail`
/// bytes of the tail of the local block: of sums, of the one that arrives, and of final gradients.
fn gradient_sizes(
    steps: &[RankStep],
    record_bytes: u64,
    tail: u64,
    pace: GroupPace,
) -> [PlaceSizes; 3] {
    let received = |channel| {
        let messages = steps.iter().flat_map(|step| &step.gradients.receives);
        messages.filter(move |message| message.channel == channel).map(|of| of.bytes())
    };
    let blocks = steps.iter().skip(1).map(|step| step.rows.count());
    let sums: Vec<u64> = blocks.filter(|&rows| rows > 0).map(|rows| rows * record_bytes).collect();
    let arriving = received(Channel::PartialGrad).max().unwrap_or(0).max(tail);
    let finals: Vec<u64> = received(Channel::FinalGrad).collect();
    let places = gradient_buffers(&sums, &finals, pace.ahead, pace.is_unbounded());
    let late = pace.ahead.min(GRADIENT_BUFFERS);
    let [sum_places, final_places] = places;
    [
        PlaceSizes { least: sums.len().min(late + 1), messages: sums, places: sum_places },
        PlaceSizes::apart([arriving]),
        PlaceSizes { least: finals.len().min(late), messages: finals, places: final_places },
    ]
}

/// Buffers for the blocks of one circulation.
pub(super) struct BlockStock<S: Space> {
    places: Places<S>,
    /// Number of places for blocks that arrive.
    blocks: usize,
    keeps_local: bool,
}

impl<S: Space> BlockStock<S> {
    fn allocate<B: Backend<Space = S>>(
        backend: &B,
        [blocks, parts, kept]: &[PlaceSizes; 3],
    ) -> Result<Self> {
        let places = blocks.places.iter().chain(&parts.places).chain(&kept.places);
        Ok(Self {
            places: Places::allocate(backend, places.copied())?,
            blocks: blocks.places.len(),
            keeps_local: !kept.places.is_empty(),
        })
    }

    fn fits(&self, [blocks, parts, kept]: &[PlaceSizes; 3]) -> bool {
        let (of_blocks, others) = self.places.0.split_at(self.blocks);
        let (of_parts, of_kept) = others.split_at(parts.places.len().min(others.len()));
        blocks.fit::<S>(of_blocks) && parts.fit::<S>(of_parts) && kept.fit::<S>(of_kept)
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
}

/// Buffers for the gradients of a pass.
pub(super) struct GradientStock<S: Space> {
    pub(super) sums: Places<S>,
    pub(super) arriving: Places<S>,
    pub(super) finals: Places<S>,
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
