//! Merge of the page results of a round, in the order of the tree over leaves.
//!
//! A page has 2^n whole leaves, so its partial result is a node of the tree over leaves
//! ([`annulus_core::LeafMerges`]), and the rest of that tree is one over pages. It is also the tree
//! of a second attention that has one key per page, and leaves of one key each:
//!
//! ```text
//! page p     m, acc, ℓ of the queries over its rows               not normalised
//! key p      score m, value (acc, ℓ): its leaf is (m, 1, (acc, ℓ)), because e^(m − m) = 1
//! tree       m = max(mˡ, mʳ)     acc = accˡ·e^(mˡ − m) + accʳ·e^(mʳ − m)     ℓ likewise
//! end        adds the sinks, divides by ℓ, rounds once            [`SoftmaxEnd`]
//! ```
//! ℓ is the last element of a value, because it is merged as accumulators are. So the backend
//! executes the operations of one attention over all rows, on the same numbers. Score rows have
//! keys of their own, hence each is a batch row of the second attention.

use std::sync::Arc;

use annulus_core::{
    Backend, Block, Dims, Error, ForwardPass, HostBuffer, HostTensors, HostView, HostViewMut,
    Inputs, LeafMerges, Outputs, Passes, RankLeaves, RankShard, Result, Rows, SoftmaxEnd, Space,
    Spec, Tick, Workspace, index, memory,
};

use super::{
    page_set::PageSet,
    tree_messages::{TreeMessages, too_short},
};

/// Workspace and memory that merge the page results of a number of score rows.
pub(super) struct PageTree<B: Backend> {
    /// Attention over pages. Its batch is the largest number of score rows.
    spec: Arc<Spec>,
    workspace: B::Workspace,
    /// Pages of all ranks that are merged.
    pages: Arc<PageSet>,
    /// Keys that stand for the pages.
    keys: Rows,
    /// Records of the pages, ascending.
    records: <B::Space as Space>::Buffer,
    /// Event after the last write to the records; `None` before the first.
    written: Option<<B::Space as Space>::Event>,
}

impl<B: Backend<Space: HostTensors>> PageTree<B> {
    /// Adapts `stored` to the longest round of a call and to the pages of all its rounds. Without
    /// score rows of this rank nothing is stored.
    pub(super) fn prepare(
        stored: &mut Option<Self>,
        backend: &B,
        spec: &Spec,
        rows: u64,
        pages: &Arc<PageSet>,
    ) -> Result<()> {
        let kept = stored.take().filter(|kept| kept.spec.dims.batch as u64 == rows);
        if rows == 0 {
            return Ok(());
        }
        // records are allocated for at most twice as many pages
        let room = pages.count().next_power_of_two();
        *stored = Some(match kept {
            Some(mut kept) => {
                kept.attend_to(pages)?;
                let record = kept.spec.kv_row_layout().bytes();
                if B::Space::size(&kept.records) < pages.count().saturating_mul(record) {
                    kept.records = backend.allocate(room.saturating_mul(record))?;
                }
                kept
            }
            None => {
                let spec = Arc::new(tree_spec(spec, rows)?);
                Self {
                    workspace: backend.workspace(&Self::shard(&spec, pages)?, Passes::Forward)?,
                    keys: Self::keys(&spec, pages)?,
                    records: backend.allocate(room.saturating_mul(spec.kv_row_layout().bytes()))?,
                    written: None,
                    pages: Arc::clone(pages),
                    spec,
                }
            }
        });
        Ok(())
    }

    /// Adapts the attention to `pages`, of which there are at most as many as in a call that was
    /// prepared.
    pub(super) fn attend_to(&mut self, pages: &Arc<PageSet>) -> Result<()> {
        if self.pages != *pages {
            self.workspace.update(&Self::shard(&self.spec, pages)?)?;
            self.keys = Self::keys(&self.spec, pages)?;
            self.pages = Arc::clone(pages);
        }
        Ok(())
    }

    fn shard(spec: &Arc<Spec>, pages: &PageSet) -> Result<RankShard> {
        let leaves = RankLeaves {
            rows: spec.leaf_rows.unwrap_or(1),
            keys: LeafMerges::of_arrivals(pages.numbers())?,
            queries: LeafMerges::default(),
            sends_queries: false,
        };
        Ok(RankShard {
            spec: Arc::clone(spec),
            queries: Arc::new(Rows::counting(1, 0)?),
            keys: Arc::default(),
            attention_mask: None,
            key_lists: None,
            received_lists: None,
            most_block_rows: pages.count(),
            most_query_rows: 1,
            leaves: Some(Arc::new(leaves)),
        })
    }

    /// Lists the keys of the pages: of each the first row number of the leaf with its number.
    fn keys(spec: &Spec, pages: &PageSet) -> Result<Rows> {
        let leaf_rows = spec.leaf_rows.unwrap_or(1);
        let count = index(pages.count());
        let rows = memory::collect("pages", count, pages.numbers().map(|page| page * leaf_rows))?;
        let mut keys = Rows::default();
        keys.refill(|numbers, positions, _| {
            positions.extend(rows.iter().map(|row| row.cast_signed()));
            *numbers = rows;
        })?;
        Ok(keys)
    }

    /// Returns the largest number of score rows.
    fn rows(&self) -> usize {
        self.spec.dims.batch
    }

    /// Copies the message with the page results of `owner`.
    ///
    /// # Errors
    /// [`Error::Internal`] for a message that is too short; as [`Backend::write_block`].
    pub(super) fn gather(
        &mut self,
        backend: &B,
        messages: &TreeMessages,
        owner: u64,
        message: &[u8],
    ) -> Result<()> {
        let rows = self.rows() as u64;
        let Self { records, written, .. } = self;
        messages.gather(owner, message, rows, |first, bytes| {
            let range = first..first + bytes.len() as u64;
            *written = Some(backend.write_block(records, range, &mut |into| {
                into.copy_from_slice(bytes);
                Ok(())
            })?);
            Ok(())
        })
    }

    /// Merges the pages and writes the results of this rank's score rows, as a message. The sinks
    /// are `[q_heads|1, count, 1, 1]`.
    pub(super) fn merge(
        &mut self,
        messages: &TreeMessages,
        sinks: Option<&HostView<'_>>,
        into: &mut [u8],
        tick: Tick<'_>,
    ) -> Result<()> {
        let rows = self.rows();
        let Self { spec, workspace, pages, keys, records, written } = self;
        let value_dim = spec.dims.value_dim;
        let sums = spec.dtype;
        let ones = memory::filled("queries of pages", rows, 1.0f64)?;
        let bytes = rows * sums.bytes();
        let mut q = HostBuffer::zeroed(bytes as u64)?;
        let q = q.bytes_mut().ok_or_else(too_short)?;
        HostViewMut::of_bytes(q, sums, [rows, 1, 1, 1])?.write(&ones);
        let inputs = Inputs {
            q: HostView::of_bytes(q, sums, [rows, 1, 1, 1])?,
            k: HostView::of_bytes(&[], sums, [rows, 0, 1, 1])?,
            v: HostView::of_bytes(&[], sums, [rows, 0, 1, value_dim])?,
            bias: None,
            sinks: None,
        };
        let mut merged = HostBuffer::zeroed((bytes * (value_dim + 4)) as u64)?;
        let merged = merged.bytes_mut().ok_or_else(too_short)?;
        let (values, statistics) = merged.split_at_mut(bytes * value_dim);
        let (max, unread) = statistics.split_at_mut(bytes);
        let mut unread = unread.chunks_exact_mut(bytes);
        let mut statistic = || {
            let bytes = unread.next().ok_or_else(too_short)?;
            HostViewMut::of_bytes(bytes, sums, [rows, 1, 1, 1])
        };
        let mut pass = workspace.forward(inputs, &mut *tick)?;
        if pages.count() > 0 {
            let ready = written.as_ref().ok_or_else(too_short)?;
            pass.attend(
                &Block { buffer: records, ready, rows: keys, first_local: None },
                &mut *tick,
            )?;
        }
        let outputs = &mut Outputs {
            out: HostViewMut::of_bytes(values, sums, [rows, 1, 1, value_dim])?,
            max: Some(HostViewMut::of_bytes(max, sums, [rows, 1, 1, 1])?),
            lse: statistic()?,
            sum: Some(statistic()?),
            ties: Some(statistic()?),
            out_residual: None,
            statistics: None,
            head_statistics: None,
        };
        pass.finish(outputs, tick)?;
        let values = HostView::of_bytes(values, sums, [rows, 1, 1, value_dim])?.widened()?;
        let max = HostView::of_bytes(max, sums, [rows, 1, 1, 1])?.widened()?;
        Self::write_results(messages, &values, &max, sinks, into)
    }

    /// Ends the softmax of each score row. `values` are acc and ℓ, `max` the maxima.
    fn write_results(
        messages: &TreeMessages,
        values: &[f64],
        max: &[f64],
        sinks: Option<&HostView<'_>>,
        into: &mut [u8],
    ) -> Result<()> {
        let Dims { q_heads, value_dim, .. } = messages.dims;
        let own = messages.rows_of(messages.pages.rank);
        let rows = index(own.end - own.start);
        let sinks_of_heads = sinks.is_some_and(|sinks| sinks.shape()[0] > 1);
        let count = sinks.map_or(0, |sinks| sinks.shape()[1]);
        let sinks = sinks.map(HostView::widened).transpose()?.unwrap_or_default();
        let mut out = memory::filled("the results", rows * value_dim, 0.0)?;
        let mut lse = memory::filled("lse", rows, 0.0)?;
        let of_rows = values.chunks_exact(value_dim + 1).zip(max).zip(own);
        for (((value, &max), row), (lse, out)) in
            of_rows.zip(lse.iter_mut().zip(out.chunks_exact_mut(value_dim)))
        {
            let head = index(row) % q_heads;
            let first_sink = if sinks_of_heads { head * count } else { 0 };
            let sinks = sinks[first_sink..first_sink + count].iter().copied();
            // ties matter to the backward pass only
            let end = SoftmaxEnd::of(max, value[value_dim], 0.0, sinks);
            *lse = end.lse;
            if end.summed {
                let rounded = |x: f64| messages.dtype.accumulator().round(x);
                let factor = rounded(end.rescale / end.sum);
                // a product of two f32 is exact in f64
                out.iter_mut().zip(value).for_each(|(out, acc)| *out = rounded(acc * factor));
            }
        }
        let Outputs { out: mut out_rows, lse: mut lse_rows, .. } =
            messages.results(into, messages.pages.rank)?;
        out_rows.write(&out);
        lse_rows.write(&lse);
        Ok(())
    }
}

/// Returns the attention of a page's queries, for the cache's attention `spec`: its results are
/// not divided by ℓ, and sinks are merged once, at the end.
pub(super) fn page_spec(spec: &Spec) -> Spec {
    Spec { sinks: None, normalize: false, partial: true, ..spec.clone() }
}

/// Returns the attention over pages of `rows` score rows.
///
/// # Errors
/// [`Error::InvalidArgument`] if a value and its ℓ have too many elements.
pub(super) fn tree_spec(spec: &Spec, rows: u64) -> Result<Spec> {
    let value_dim = spec.dims.value_dim;
    if value_dim >= Dims::MAX_DIM {
        let want = format!("at most {} in the reproducible order", Dims::MAX_DIM - 1);
        return Err(Error::invalid("value_dim", value_dim, want));
    }
    let dims = Dims {
        batch: index(rows),
        q_len: 1,
        kv_len: 1,
        q_heads: 1,
        kv_heads: 1,
        head_dim: 1,
        value_dim: value_dim + 1,
    };
    let of_pages = Spec {
        scale: 1.0,
        normalize: false,
        leaf_rows: spec.leaf_rows,
        ..Spec::new(dims, spec.dtype.accumulator())
    };
    of_pages.validate()?;
    Ok(of_pages)
}
