//! Messages of one round in the reproducible order.
//!
//! ```text
//! score row   one query of one head of one batch row, numbered as in [b, queries, q_heads]
//! tag 0       reduce-scatter: to each rank its share of the score rows, of each page of the sender
//!             a record  m [rows] · (acc, ℓ) [rows, dv + 1]            accumulator's type
//! tag 1       all-gather: to each rank the results of the sender's share of the score rows
//!             lse [rows], accumulator's type · out [rows, dv]
//! ```
//! Consecutive pages are on different ranks, and so are the two operands of every merge of pages: a
//! rank has nothing to merge before it sends.

use std::{ops::Range, sync::Arc};

use annulus_core::{
    Channel, DType, Dims, Error, HostView, HostViewMut, MessageHeader, Outputs, Result, index,
};

use super::page_set::{PageSet, Pages};
use crate::ring::program::MessageGroup;

/// Messages of `queries` queries.
#[derive(Debug, Clone)]
pub(super) struct TreeMessages {
    pub(super) dims: Dims,
    pub(super) dtype: DType,
    /// Pages of this rank.
    pub(super) pages: Pages,
    /// Pages of all ranks that the queries attend to.
    pub(super) visible: Arc<PageSet>,
    pub(super) queries: u64,
}

impl TreeMessages {
    /// Returns the bytes of one score row of one page.
    fn page_row_bytes(&self) -> u64 {
        (self.dims.value_dim as u64 + 2) * self.dtype.accumulator().bytes() as u64
    }

    /// Returns the bytes of the result of one score row.
    fn result_row_bytes(&self) -> u64 {
        let Self { dims, dtype, .. } = self;
        (dims.value_dim * dtype.bytes() + dtype.accumulator().bytes()) as u64
    }

    /// Returns the score rows of one query.
    const fn rows_of_query(&self) -> u64 {
        self.dims.batch as u64 * self.dims.q_heads as u64
    }

    /// Returns the most queries whose messages have at most `bytes` bytes, but at least one query.
    pub(super) fn most_queries(&self, bytes: u64) -> u64 {
        let page_rows = (bytes / self.page_row_bytes()) / self.visible.most().max(1);
        let result_rows = bytes / self.result_row_bytes();
        let rows_of_rank = page_rows.min(result_rows);
        (rows_of_rank.saturating_mul(self.pages.ranks) / self.rows_of_query().max(1)).max(1)
    }

    /// Returns the score rows that `rank` merges.
    pub(super) fn rows_of(&self, rank: u64) -> Range<u64> {
        let rows = u128::from(self.rows_of_query()) * u128::from(self.queries);
        let first = |rank: u64| {
            let first = rows * u128::from(rank) / u128::from(self.pages.ranks);
            u64::try_from(first).unwrap_or(u64::MAX)
        };
        first(rank)..first(rank + 1)
    }

    /// Returns the largest number of score rows of a rank.
    pub(super) fn most_rows(&self) -> u64 {
        // the shares differ by at most one
        self.rows_of_query().saturating_mul(self.queries).div_ceil(self.pages.ranks)
    }

    /// Returns the bytes for `receiver` in the buffer of the page results of `owner`.
    pub(super) fn pages_to(&self, owner: u64, receiver: u64) -> Range<u64> {
        let rows = self.rows_of(receiver);
        let row_bytes = self.visible.count_of(owner).saturating_mul(self.page_row_bytes());
        rows.start.saturating_mul(row_bytes)..rows.end.saturating_mul(row_bytes)
    }

    /// Returns the bytes of the results of `rank`.
    pub(super) fn results_of(&self, rank: u64) -> u64 {
        let rows = self.rows_of(rank);
        (rows.end - rows.start).saturating_mul(self.result_row_bytes())
    }

    /// Returns the bytes of the buffer from which any rank sends.
    pub(super) fn send_bytes(&self) -> u64 {
        let rows = self.rows_of_query().saturating_mul(self.queries);
        let pages = self.visible.most().saturating_mul(self.page_row_bytes());
        let results = self.most_rows().saturating_mul(self.result_row_bytes());
        rows.saturating_mul(pages).max(results)
    }

    /// Returns the bytes of a buffer for a message of any rank.
    pub(super) fn receive_bytes(&self) -> u64 {
        let pages = self.visible.most().saturating_mul(self.page_row_bytes());
        self.most_rows().saturating_mul(pages.max(self.result_row_bytes()))
    }

    /// Returns the payload bytes that this rank sends.
    pub(super) fn bytes_sent(&self) -> u64 {
        let Pages { rank, ranks, .. } = self.pages;
        let peers = (0..ranks).filter(|&peer| peer != rank);
        let pages = peers.map(|peer| {
            let bytes = self.pages_to(rank, peer);
            bytes.end - bytes.start
        });
        let results = (ranks - 1).saturating_mul(self.results_of(rank));
        pages.fold(results, u64::saturating_add)
    }

    /// Returns the messages of the reduce-scatter, to and from the nearest rank first. Empty
    /// messages are not sent.
    pub(super) fn page_transfers(&self) -> MessageGroup {
        let rank = self.pages.rank;
        self.transfers(0, |peer| {
            let received = self.pages_to(peer, rank);
            [self.pages_to(rank, peer), 0..received.end - received.start]
        })
    }

    /// Returns the messages of the all-gather.
    pub(super) fn result_transfers(&self) -> MessageGroup {
        let own = self.results_of(self.pages.rank);
        self.transfers(1, |peer| [0..own, 0..self.results_of(peer)])
    }

    fn transfers(&self, tag: u64, bytes: impl Fn(u64) -> [Range<u64>; 2]) -> MessageGroup {
        let header = |peer, bytes| MessageHeader {
            peer,
            channel: Channel::Kv,
            tag,
            step: index(tag),
            ranges: std::iter::once(bytes).collect(),
            agreed: None,
        };
        let [rank, ranks] = [self.pages.rank, self.pages.ranks].map(index);
        MessageGroup::exchange([rank, ranks], 1..ranks, header, |peer| bytes(peer as u64))
    }

    /// Writes the records of one page for all ranks: the one at `index_of_page` among this rank's
    /// pages that the queries attend to.
    ///
    /// # Errors
    /// [`Error::Internal`] for a buffer that is too short.
    pub(super) fn write_page(
        &self,
        index_of_page: u64,
        result: &PageResult<'_>,
        buffer: &mut [u8],
    ) -> Result<()> {
        let bytes_of_number = self.dtype.accumulator().bytes();
        let acc_bytes = self.dims.value_dim * bytes_of_number;
        for receiver in 0..self.pages.ranks {
            let rows = self.rows_of(receiver);
            let count = index(rows.end - rows.start);
            if count == 0 {
                continue;
            }
            let region = self.pages_to(self.pages.rank, receiver);
            let record_bytes = count * index(self.page_row_bytes());
            let first = index(region.start) + index(index_of_page) * record_bytes;
            let record = buffer.get_mut(first..first + record_bytes).ok_or_else(too_short)?;
            let (maxima, values) = record.split_at_mut(count * bytes_of_number);
            let maxima = maxima.chunks_exact_mut(bytes_of_number);
            let values = values.chunks_exact_mut(acc_bytes + bytes_of_number);
            let copy = |into: &mut [u8], list: &[u8], number: usize| -> Result<()> {
                let first = number * into.len();
                into.copy_from_slice(list.get(first..first + into.len()).ok_or_else(too_short)?);
                Ok(())
            };
            for ((row, max), value) in rows.zip(maxima).zip(values) {
                let (acc, sum) = value.split_at_mut(acc_bytes);
                copy(max, result.max, self.statistic(row))?;
                copy(acc, result.acc, index(row))?;
                copy(sum, result.sum, self.statistic(row))?;
            }
        }
        Ok(())
    }

    /// Returns the number of a score row in `[b, q_heads, queries]`.
    pub(super) fn statistic(&self, row: u64) -> usize {
        let (heads, queries) = (self.dims.q_heads as u64, self.queries);
        let head = row % heads;
        let query = row / heads;
        index((query / queries * heads + head) * queries + query % queries)
    }

    /// Returns the tensors of the message with the results of `rank`, for writing: lse
    /// `[rows, 1, 1, 1]`, out `[rows, 1, 1, dv]`.
    pub(super) fn results<'a>(
        &self,
        message: &'a mut [u8],
        rank: u64,
    ) -> Result<Outputs<HostViewMut<'a>>> {
        let (rows, lse_bytes) = self.lengths_of_results(rank);
        let bytes = message.get_mut(..index(self.results_of(rank))).ok_or_else(too_short)?;
        let (lse, out) = bytes.split_at_mut(lse_bytes);
        let shape = |dim| [rows, 1, 1, dim];
        Ok(Outputs::new(
            HostViewMut::of_bytes(out, self.dtype, shape(self.dims.value_dim))?,
            HostViewMut::of_bytes(lse, self.dtype.accumulator(), shape(1))?,
        ))
    }

    /// Copies the results of `rank` to `out` `[b, queries, q_heads, dv]` and `lse`
    /// `[b, q_heads, queries]`.
    pub(super) fn read_results(
        &self,
        rank: u64,
        message: &[u8],
        out: &mut [f64],
        lse: &mut [f64],
    ) -> Result<()> {
        let dim = self.dims.value_dim;
        let (rows, lse_bytes) = self.lengths_of_results(rank);
        let bytes = message.get(..index(self.results_of(rank))).ok_or_else(too_short)?;
        let (of_lse, of_out) = bytes.split_at(lse_bytes);
        let sums = self.dtype.accumulator();
        let of_lse = HostView::of_bytes(of_lse, sums, [rows, 1, 1, 1])?.widened()?;
        let of_out = HostView::of_bytes(of_out, self.dtype, [rows, 1, 1, dim])?.widened()?;
        for (row, from) in self.rows_of(rank).zip(of_lse) {
            lse[self.statistic(row)] = from;
        }
        let first = index(self.rows_of(rank).start) * dim;
        out[first..first + of_out.len()].copy_from_slice(&of_out);
        Ok(())
    }

    /// Returns the score rows of the results of `rank`, and the bytes of their lse.
    fn lengths_of_results(&self, rank: u64) -> (usize, usize) {
        let rows = self.rows_of(rank);
        let rows = index(rows.end - rows.start);
        (rows, rows * self.dtype.accumulator().bytes())
    }

    /// Copies the page results of `owner` for this rank into the records of all pages that the
    /// queries attend to, ascending, each of `rows` score rows; further rows keep their contents.
    /// `write` copies bytes to an offset in the records.
    pub(super) fn gather(
        &self,
        owner: u64,
        message: &[u8],
        rows: u64,
        mut write: impl FnMut(u64, &[u8]) -> Result<()>,
    ) -> Result<()> {
        let own = self.rows_of(self.pages.rank);
        let count = index(own.end - own.start);
        let bytes_of_number = self.dtype.accumulator().bytes();
        let record_bytes = rows * self.page_row_bytes();
        let from = message.chunks_exact(count * index(self.page_row_bytes()));
        if (from.len() as u64) < self.visible.count_of(owner) {
            return Err(too_short());
        }
        for (page, from) in self.visible.numbers_of(owner).zip(from) {
            let maxima = self.visible.index_of(page) * record_bytes;
            let values = maxima + rows * bytes_of_number as u64;
            let (from_maxima, from_values) = from.split_at(count * bytes_of_number);
            write(maxima, from_maxima)?;
            write(values, from_values)?;
        }
        Ok(())
    }
}

/// Partial result of one page, in the accumulator's type.
pub(super) struct PageResult<'a> {
    /// Unnormalised outputs, `[b, queries, q_heads, dv]`.
    pub(super) acc: &'a [u8],
    /// `[b, q_heads, queries]`.
    pub(super) max: &'a [u8],
    /// `[b, q_heads, queries]`.
    pub(super) sum: &'a [u8],
}

pub(super) fn too_short() -> Error {
    Error::internal("a message that is shorter than its page results")
}

#[cfg(test)]
mod tests {
    use annulus_core::Spec;

    use super::*;

    fn messages(rank: u64, ranks: u64, len: u64, queries: u64) -> TreeMessages {
        let dims = Dims {
            batch: 1,
            q_len: 1,
            kv_len: 1,
            q_heads: 3,
            kv_heads: 1,
            head_dim: 4,
            value_dim: 6,
        };
        let pages = Pages { rows: 256, ranks, rank };
        let spec = Spec::new(dims, DType::Bf16);
        let rows = len.saturating_sub(queries)..len;
        let visible = Arc::new(PageSet::visible(&spec, pages, len, rows));
        TreeMessages { dims, dtype: DType::Bf16, pages, visible, queries }
    }

    #[test]
    fn score_rows_are_divided_evenly_and_bytes_are_those_of_the_messages() {
        // 3 pages on 2 ranks, 3 score rows of a token
        let of_rank = |rank| messages(rank, 2, 3 * 256, 1);
        assert_eq!([of_rank(0).rows_of(0), of_rank(0).rows_of(1)], [0..1, 1..3]);
        // rank 0: 2 pages of 2 score rows of 8 f32, and 1 result of 6 bf16 and 1 f32
        assert_eq!(of_rank(0).bytes_sent(), 2 * 2 * 8 * 4 + (6 * 2 + 4));
        // rank 1: 1 page of 1 score row, and 2 results
        assert_eq!(of_rank(1).bytes_sent(), 8 * 4 + 2 * (6 * 2 + 4));
        for (ranks, len, queries) in [(1, 5, 1), (3, 0, 2), (3, 10_000, 7), (8, 300, 1)] {
            for rank in 0..ranks {
                let of_rank = messages(rank, ranks, len, queries);
                let lists = [of_rank.page_transfers(), of_rank.result_transfers()];
                let sent: u64 = lists.iter().map(MessageGroup::bytes_sent).sum();
                assert_eq!(sent, of_rank.bytes_sent());
                let sends = lists.iter().flat_map(|list| &list.sends);
                let end = sends.flat_map(|header| header.ranges.iter().map(|range| range.end));
                assert!(end.max().unwrap_or(0) <= of_rank.send_bytes());
                let receives = lists.iter().flat_map(|list| &list.receives);
                let most = receives.map(MessageHeader::bytes).max().unwrap_or(0);
                assert!(most <= of_rank.receive_bytes());
                assert!(most <= 1 << 14 || of_rank.queries > of_rank.most_queries(1 << 14));
            }
        }
    }
}
