//! GQA packing of decode: the queries of a KV head's group as blocks of packed rows.

use std::ops::Range;

use crate::{
    simd::{dispatch::Real, vector::MAX_LANES},
    tile::{geometry::Geometry, pack::padded_dim},
};

/// Maximum packed rows per block, with 32 registers.
pub(crate) const MAX_PACKED: usize = 4;

pub(super) const TWO: usize = 2;
pub(super) const ONE: usize = 1;

/// Packed rows of one KV head, in blocks that are processed in lockstep. Each block is a strip,
/// `[dim / lanes][packed rows][lanes]`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PackedQueries {
    len: usize,
    max_block_len: usize,
}

impl PackedQueries {
    /// Describes the packed rows of a group with `queries` queries.
    pub(crate) const fn of_group(geometry: &Geometry, queries: usize) -> Self {
        let max_block_len = match (geometry.token.max_vectors(), geometry.lanes(1)) {
            (MAX_PACKED.., MAX_LANES) => MAX_PACKED,
            // f64 vectors are left to the compiler, which takes two registers for each
            (MAX_PACKED.., _) => TWO,
            _ => ONE,
        };
        Self { len: geometry.dims.group() * queries, max_block_len }
    }

    /// Returns the number of packed rows.
    #[inline]
    pub(crate) const fn len(&self) -> usize {
        self.len
    }

    /// Returns the length of the block that starts with packed row `first`: [`MAX_PACKED`], two or
    /// one packed rows; 0 after the last block.
    #[inline(always)]
    pub(super) const fn block_len(&self, first: usize) -> usize {
        let left = self.len.saturating_sub(first);
        let mut count = self.max_block_len;
        while count > left {
            count /= 2;
        }
        count
    }

    /// Iterates over the blocks in order.
    fn blocks(self) -> impl Iterator<Item = Range<usize>> {
        let block = move |first| Some(first..first + self.block_len(first));
        let blocks = std::iter::successors(block(0), move |last: &Range<usize>| block(last.end));
        blocks.take_while(|block| !block.is_empty())
    }

    /// Returns the element ranges, one per register, of the vector of length `dim` of one packed
    /// row. The last is padded.
    pub(crate) fn vectors<A: Real>(
        self,
        packed_row: usize,
        dim: usize,
    ) -> impl Iterator<Item = Range<usize>> {
        let block = self.blocks().find(|block| block.contains(&packed_row)).unwrap_or_default();
        let first =
            block.start * padded_dim::<A>(dim) + packed_row.saturating_sub(block.start) * A::WIDTH;
        (0..dim.div_ceil(A::WIDTH))
            .map(move |vector| first + vector * block.len() * A::WIDTH)
            .map(|first| first..first + A::WIDTH)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_cover_all_packed_queries_and_their_vectors() {
        for (len, max_block_len, want) in [
            (1, 4, vec![1]),
            (3, 4, vec![2, 1]),
            (7, 4, vec![4, 2, 1]),
            (12, 4, vec![4, 4, 4]),
            (3, 1, vec![1, 1, 1]),
        ] {
            let packed = PackedQueries { len, max_block_len };
            assert_eq!(packed.blocks().map(|block| block.len()).collect::<Vec<_>>(), want);
            let mut elements: Vec<usize> = (0..len)
                .flat_map(|packed_row| packed.vectors::<f32>(packed_row, 40).flatten())
                .collect();
            elements.sort_unstable();
            assert!(elements.iter().copied().eq(0..len * padded_dim::<f32>(40)));
        }
        // in a block of four, the registers of one packed row are four vectors apart
        let products = |packed_row| {
            PackedQueries { len: 7, max_block_len: 4 }
                .vectors::<f32>(packed_row, 32)
                .collect::<Vec<_>>()
        };
        assert_eq!(products(3), [48..64, 112..128]);
        assert_eq!(products(6), [192..208, 208..224]);
    }
}
