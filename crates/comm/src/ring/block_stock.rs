//! Buffers of the blocks that circulate, each in a place of its own.
//!
//! ```text
//! 0 .. blocks     blocks in the order in which they arrive: block j in place j % blocks
//! then            parts of the last block but the first, which is in the place of the block
//! then            the local block, if the route sends from it until the end; else it is block 0
//! ```
//! The number of the first places and their sizes are those of [`block_buffers`]. A block has one
//! place, not any that is large enough: a small block in a large buffer would keep the next large
//! one from being received ahead.

use annulus_core::{Backend, Result, Space, block_buffers};

use super::{block_parts::MAX_PARTS, pace::Pace, places::Places, program::RankStep};

/// Bytes of the blocks of one circulation.
pub(super) struct BlockSizes {
    /// Blocks in the order in which they arrive, with the local one first unless it is kept.
    blocks: Vec<u64>,
    /// Parts of the last block but the first.
    later_parts: [u64; MAX_PARTS - 1],
    /// The local block, on a route that sends from it until the end.
    kept: Option<u64>,
    pace: Pace,
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
    pub(super) fn new(local: u64, steps: &[RankStep], record_bytes: u64, pace: Pace) -> Self {
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
