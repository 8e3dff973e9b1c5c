//! Rows of the ranks before there are tensors: the balanced layout, and the rows of one rank.

use annulus_core::{Batch, Choice, Dims, Error, Layout, Result, Runs, Side};

use crate::Attention;

/// Row numbers of one rank, in the order of its tensors ([`Attention::rank_rows`]).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankRows {
    /// Query rows.
    pub q: Runs,
    /// Key rows.
    pub kv: Runs,
}

impl Attention {
    /// Sets a layout with equal rows and balanced work for the documents of a batch, on `ranks`
    /// ranks ([`Layout::balanced`]). Unless [`Attention::route`] is set, also the route on which
    /// rows are sent only to ranks that need them.
    ///
    /// Call it after the setters of the masks, which it uses. `batch` has all rows; its dense mask
    /// is not used. [`Strategy::Auto`] chooses for the same documents. Every rank must call it with
    /// the same arguments. The plan is updated with its
    /// own rows of the batch as with every layout, and other batches are correct but less balanced.
    ///
    /// # Errors
    /// As [`Layout::balanced`], and [`Error::InvalidArgument`] of the options.
    ///
    /// [`Strategy::Auto`]: crate::Strategy::Auto
    ///
    /// # Examples
    /// Each rank loads its rows of 4 packed documents:
    /// ```
    /// use annulus::{Attention, Batch, Dims};
    ///
    /// let dims = Dims::new(1, 8192, 8, 64);
    /// let documents = Batch {
    ///     cum_seqlens_q: Some(vec![0, 512, 2560, 3560, 8192]),
    ///     ..Batch::default()
    /// };
    /// let attention = Attention::new().causal(true).balanced(dims, &documents, 4)?;
    /// let rows = (0..4).map(|rank| attention.rank_rows(dims, 4, rank));
    /// for rows in rows {
    ///     let rows = rows?;
    ///     assert_eq!(rows.q.len(), 2048);
    ///     assert_eq!(rows.q, rows.kv);
    /// }
    /// # Ok::<(), annulus::Error>(())
    /// ```
    pub fn balanced(self, dims: Dims, batch: &Batch, ranks: usize) -> Result<Self> {
        let choice = Choice::balanced(&self.spec(dims)?, batch, ranks)?;
        let coordinates = Batch {
            q_segment_ids: batch.q_segment_ids.clone(),
            kv_segment_ids: batch.kv_segment_ids.clone(),
            q_positions: batch.q_positions.clone(),
            kv_positions: batch.kv_positions.clone(),
            attention_mask: None,
            cum_seqlens_q: batch.cum_seqlens_q.clone(),
            cum_seqlens_k: batch.cum_seqlens_k.clone(),
        };
        Ok(self.with_balanced(choice, coordinates))
    }

    /// Returns a layout of `ranks` ranks with equal rows and balanced work for the documents of a
    /// batch ([`Layout::balanced`]). [`Attention::balanced`] also sets it, with its route.
    ///
    /// # Errors
    /// As [`Attention::balanced`].
    pub fn balanced_layout(&self, dims: Dims, batch: &Batch, ranks: usize) -> Result<Layout> {
        Layout::balanced(&self.spec(dims)?, batch, ranks)
    }

    /// Returns the rows of one of `ranks` ranks under the layout that was set, before there are
    /// tensors or a plan. Local.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] naming `layout` if none is set: then a plan chooses layout and
    /// ring order, which depends on the nodes of the ranks ([`crate::Plan::q_rows`]). Also naming
    /// `layout` if it is not one of `ranks` ranks, `ranks`, `rank`, or an option.
    pub fn rank_rows(&self, dims: Dims, ranks: usize, rank: usize) -> Result<RankRows> {
        let spec = self.spec(dims)?;
        let Some(layout) = self.ring_options().layout else {
            let want = "a layout, because that of a plan depends on the nodes of its ranks";
            return Err(Error::invalid("layout", "none", want));
        };
        layout.validate(dims.q_len, dims.kv_len, ranks)?;
        if rank >= ranks {
            return Err(Error::invalid("rank", rank, format!("a rank below {ranks}")));
        }
        let layout = match spec.leaf_rows {
            Some(rows) => {
                layout.validate_leaves(dims.q_len, dims.kv_len, rows)?;
                layout.at_leaves(rows)
            }
            None => layout,
        };
        let rows = |side, len| layout.shard(side, len, rank, ranks);
        Ok(RankRows { q: rows(Side::Q, dims.q_len), kv: rows(Side::Kv, dims.kv_len) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use annulus_core::{CustomLayout, LEAF_ROWS, Route};

    fn documents(ends: &[i64]) -> Batch {
        Batch { cum_seqlens_q: Some(ends.to_vec()), ..Batch::default() }
    }

    fn text(result: Result<RankRows>) -> String {
        result.unwrap_err().to_string()
    }

    #[test]
    fn a_given_route_is_kept_and_another_layout_removes_the_chosen_one() {
        let dims = Dims::new(1, 400, 1, 8);
        let batch = documents(&[0, 150, 170, 400]);
        let balanced = |attention: Attention| attention.causal(true).balanced(dims, &batch, 3);
        let chosen = balanced(Attention::new()).unwrap();
        assert!(chosen.ring_options().route.is_some());
        assert_eq!(chosen.layout(Layout::Zigzag).ring_options().route, None);
        let given = balanced(Attention::new().route(Route::RelayUp)).unwrap();
        assert_eq!(given.ring_options().route, Some(Route::RelayUp));
    }

    #[test]
    fn rows_of_ranks_need_a_layout_of_as_many_ranks() {
        let dims = Dims::new(1, 9, 1, 8);
        let attention = Attention::new();
        assert!(
            text(attention.rank_rows(dims, 2, 0)).starts_with("layout: got none, want a layout")
        );
        let striped = Attention::new().layout(Layout::Striped);
        assert_eq!(
            striped.rank_rows(dims, 2, 1).unwrap().q.iter().collect::<Vec<_>>(),
            [1, 3, 5, 7]
        );
        assert_eq!(text(striped.rank_rows(dims, 2, 2)), "rank: got 2, want a rank below 2");
        assert_eq!(text(striped.rank_rows(dims, 0, 0)), "ranks: got 0, want at least 1");
        // more ranks than rows: some have none
        let balanced = attention.balanced(dims, &documents(&[0, 4, 9]), 12).unwrap();
        let rows = |rank| balanced.rank_rows(dims, 12, rank).unwrap().kv.len();
        assert_eq!((0..12).map(rows).sum::<u64>(), 9);
        assert!(text(balanced.rank_rows(dims, 3, 0)).starts_with("layout: got 12 shards of q"));
    }

    #[test]
    fn reproducible_rows_are_whole_leaves() {
        let dims = Dims::new(1, 2000, 1, 8);
        let attention = Attention::new().reproducible(true);
        let contiguous = attention.clone().layout(Layout::Contiguous);
        assert_eq!(contiguous.rank_rows(dims, 3, 0).unwrap().q.len() % LEAF_ROWS, 0);
        let balanced = attention.clone().balanced(dims, &documents(&[0, 700, 2000]), 3).unwrap();
        balanced.rank_rows(dims, 3, 2).unwrap();
        let rows = |start, count| Runs::counting(start, count);
        let q = vec![rows(0, 100), rows(100, 1900)];
        let custom = Layout::Custom(CustomLayout { kv: q.clone(), q }.into());
        assert!(text(attention.layout(custom).rank_rows(dims, 2, 0)).contains("whole leaves"));
    }
}
