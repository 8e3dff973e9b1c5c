//! Bytes that a workspace holds.
//!
//! Counted is all heap memory whose size depends on lengths, heads or dims: accumulators, row
//! statistics, scratch of each thread, sums of dbias, lists of visible keys, a dense mask that was
//! received. The last two grow in the first pass of each kind. Not counted: fixed sizes, the stacks
//! of threads, and the coordinates that the workspace shares with the ring.

use crate::{
    simd::dispatch::Real,
    tile::aligned::list_bytes,
    workspace::{
        decode::{Decode, DecodeScratch, RowStatistics, TileStatistics},
        query_block::QueryBlock,
        scratch::{ThreadScratch, Tiles},
        state::PassState,
    },
};

impl<A: Real> PassState<A> {
    /// Returns the bytes of this state.
    pub(crate) fn bytes(&self) -> usize {
        let lists = list_bytes(&self.blocks)
            + list_bytes(&self.shared_dq)
            + list_bytes(&self.block_index)
            + list_bytes(&self.scratch);
        lists
            + self.blocks.iter().map(QueryBlock::bytes).sum::<usize>()
            + self.scratch.iter().map(ThreadScratch::bytes).sum::<usize>()
            + self.statistics.bytes()
            + self.bias_gradient.as_ref().map_or(0, |gradient| gradient.bytes())
            + self.query_tiles.bytes()
            + self.decode.as_ref().map_or(0, Decode::bytes)
            + self.arrivals.bytes()
            + self.key_leaves.bytes()
            + self.received_mask.bytes()
    }
}

impl<A: Real> PassState<A> {
    /// Returns the bytes of partial results of leaves.
    pub(crate) fn leaf_bytes(&self) -> usize {
        let of_queries = self.blocks.iter().map(|block| block.leaves.bytes()).sum::<usize>();
        of_queries + self.key_leaves.bytes()
    }
}

impl<A: Real> QueryBlock<A> {
    fn bytes(&self) -> usize {
        let Self { sums, max, sum, ties, leaves, kept_q, .. } = self;
        let lists = [sums, max, sum, ties].map(|list| list.bytes());
        lists.iter().sum::<usize>() + leaves.bytes() + kept_q.bytes()
    }
}

impl<A: Real> RowStatistics<A> {
    fn bytes(&self) -> usize {
        let Self { max, inverse_sum, delta, share, .. } = self;
        [max, inverse_sum, delta, share].map(list_bytes).iter().sum()
    }
}

impl<A: Real> Decode<A> {
    fn bytes(&self) -> usize {
        let partials = self.partials.iter();
        let of_partials: usize = partials
            .map(|partial| partial.max.bytes() + partial.sum.bytes() + partial.out.bytes())
            .sum();
        list_bytes(&self.partials) + of_partials
    }
}

impl<A: Real> ThreadScratch<A> {
    fn bytes(&self) -> usize {
        let Tiles { s, dp, soft_cap_slope, extra } = &self.tiles;
        let TileStatistics { max, inverse_sum, delta, share } = &self.statistics;
        let DecodeScratch { q, tile, products, rescale } = &self.decode;
        let lanes = [&self.lanes_head, &self.lanes_value, &self.tile_max, &self.rescale];
        let sums = [&self.sums_head, &self.sums_value, &self.sums_bias];
        let arrays = [s, dp, soft_cap_slope, extra, max, inverse_sum, delta, share].into_iter();
        let arrays = arrays.chain([q, tile, products, rescale]).chain(lanes).chain(sums);
        let panels = [&self.rows_head, &self.rows_value, &self.rows_key];
        arrays.map(|array| array.bytes()).sum::<usize>()
            + panels.map(|panel| panel.bytes()).iter().sum::<usize>()
            + self.ds_tile.bytes()
            + list_bytes(&self.filled)
            + list_bytes(&self.summed)
            + list_bytes(&self.written)
            + list_bytes(&self.last_keys)
            + self.task_tile.bytes()
            + self.mask_cache.bytes()
            + self.near_sums.bytes()
    }
}
