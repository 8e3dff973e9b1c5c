//! Division of the attention among ranks, as the caller requests it.
//!
//! A strategy is chosen by documents only if the division has them: a plan is made before its first
//! batch, which an update brings. The batch is not part of the agreement of the ranks, because the
//! strategy, which depends on it, is.

use std::{borrow::Cow, sync::Arc};

use annulus_core::{Batch, Dims, Result, Route, Strategy};

use crate::Attention;

/// The strategy, and what [`Strategy::Auto`] depends on besides the options of a ring.
#[derive(Debug, Clone)]
pub(crate) struct Division {
    pub(crate) strategy: Strategy,
    /// Route that the caller set: a strategy with another one is not chosen.
    pub(crate) route: Option<Route>,
    /// Route of the balanced layout, which that of a strategy replaces.
    pub(crate) balanced_route: Option<Route>,
    /// Batch of all rows for which a strategy is chosen, as the caller gave it.
    pub(crate) documents: Option<Arc<Batch>>,
}

impl Division {
    /// Returns the batch by which a strategy is planned for tensors of `dims`.
    ///
    /// # Errors
    /// [`annulus_core::Error::InvalidArgument`] naming a tensor that the caller gave, if the batch
    /// does not fit.
    pub(crate) fn planned_batch(&self, dims: &Dims) -> Result<Option<Cow<'_, Batch>>> {
        let Some(batch) = self.documents.as_deref() else { return Ok(None) };
        batch.validate(dims, dims.q_len, dims.kv_len)?;
        Ok(Some(with_ids_of_both_sides(batch)))
    }
}

impl Attention {
    /// Batch of all rows for which [`Strategy::Auto`] chooses: packed lengths, segment ids and
    /// positions; a dense mask is not used. Default: that of [`Attention::balanced`]; without
    /// either, the strategy is chosen by the mask alone.
    ///
    /// Every rank must set the same batch. The plan is updated with its own rows of the batch as
    /// without it. With another strategy, or if a tensor does not fit the lengths of the plan, it
    /// is refused when the plan is made ([`Attention::spec`]).
    ///
    /// With a layout that was set, [`Attention::rank_rows`] returns the rows of a rank before there
    /// is a plan, whichever strategy is chosen; otherwise [`crate::Plan::q_rows`] does.
    ///
    /// # Examples
    /// Documents that no rank shares with another are sent nowhere by a ring.
    /// ```
    /// use annulus::{Attention, Batch, Dims, Strategy};
    ///
    /// let dims = Dims::new(1, 64, 8, 8);
    /// let documents = Batch { cum_seqlens_q: Some(vec![0, 16, 32, 48, 64]), ..Batch::default() };
    /// let auto = Attention::new().strategy(Strategy::Auto);
    /// let strategy = |attention: Attention| -> annulus::Result<Strategy> {
    ///     let ring = attention.local_ring(dims, 4)?;
    ///     Ok(ring.plans().next().map(|plan| plan.strategy()).unwrap_or_default())
    /// };
    /// assert_eq!(strategy(auto.clone())?, Strategy::HeadsRing { heads: 4 });
    /// assert_eq!(strategy(auto.documents(documents))?, Strategy::Ring);
    /// # Ok::<(), annulus::Error>(())
    /// ```
    #[must_use]
    pub fn documents(mut self, batch: impl Into<Option<Batch>>) -> Self {
        // the dense mask does not count, and is not kept
        let coordinates = |batch: Batch| Batch { attention_mask: None, ..batch };
        self.documents = batch.into().map(coordinates).map(Arc::new);
        self
    }

    /// Returns the division.
    pub(crate) fn division(&self) -> Division {
        Division {
            strategy: self.strategy,
            route: self.route,
            balanced_route: self.balanced_route,
            documents: self.documents.as_ref().or(self.balanced_documents.as_ref()).cloned(),
        }
    }
}

/// Returns a batch in which segment ids of one side alone are those of both, because a grid with
/// key columns has other rows on each side.
fn with_ids_of_both_sides(batch: &Batch) -> Cow<'_, Batch> {
    if batch.q_segment_ids.is_some() == batch.kv_segment_ids.is_some() {
        return Cow::Borrowed(batch);
    }
    let mut both = batch.clone();
    if both.q_segment_ids.is_none() {
        both.q_segment_ids = both.kv_segment_ids.clone();
    } else {
        both.kv_segment_ids = both.q_segment_ids.clone();
    }
    Cow::Owned(both)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::Array2;

    fn packed(starts: &[i64]) -> Batch {
        Batch { cum_seqlens_q: Some(starts.to_vec()), ..Batch::default() }
    }

    #[test]
    fn documents_that_do_not_fit_are_refused_on_any_number_of_ranks() {
        let dims = Dims::new(1, 40, 2, 8);
        let auto = Attention::new().strategy(Strategy::Auto);
        for ranks in [1, 3] {
            let refusal = |starts: &[i64]| {
                let documents = auto.clone().documents(packed(starts));
                documents.local_ring(dims, ranks).unwrap_err().to_string()
            };
            assert!(refusal(&[0, 41]).starts_with("cum_seqlens_q: got 41 as the last"));
            assert!(refusal(&[0, 9, 5, 40]).starts_with("cum_seqlens_q: got 5 after 9"));
            assert!(refusal(&[]).starts_with("cum_seqlens_q: got an empty list"));
            // a document without rows, and padding
            auto.clone().documents(packed(&[0, 9, 9, 30])).local_ring(dims, ranks).unwrap();
        }
        let ring = Attention::new().documents(packed(&[0, 40])).local_ring(dims, 1);
        assert!(ring.unwrap_err().to_string().starts_with("documents: got one, for ring"));
    }

    #[test]
    fn segment_ids_of_one_side_are_refused_by_the_name_that_was_given() {
        let ids = |batch: usize, rows: usize| Some(Array2::zeros((batch, rows)));
        let of_queries = |ids| Batch { q_segment_ids: ids, ..Batch::default() };
        let of_keys = |ids| Batch { kv_segment_ids: ids, ..Batch::default() };
        let auto = Attention::new().strategy(Strategy::Auto);
        let same = Dims::new(1, 40, 2, 8);
        let longer = Dims { kv_len: 60, ..same };
        for ranks in [1, 3] {
            let refusal = |dims: Dims, batch: Batch| {
                let documents = auto.clone().documents(batch);
                documents.local_ring(dims, ranks).unwrap_err().to_string()
            };
            let want = "q_segment_ids: got alone, with unequal lengths, want kv_segment_ids";
            assert!(refusal(longer, of_queries(ids(1, 40))).starts_with(want));
            let want = "kv_segment_ids: got alone, with unequal lengths, want q_segment_ids";
            assert!(refusal(longer, of_keys(ids(1, 60))).starts_with(want));
            let want = "q_segment_ids: got (1, 39), want (1, 40)";
            assert_eq!(refusal(same, of_queries(ids(1, 39))), want);
            let want = "kv_segment_ids: got (2, 40), want (1, 40)";
            assert_eq!(refusal(same, of_keys(ids(2, 40))), want);
        }
        // the balanced layout keeps the batch of other lengths: here of 2 batch rows, not 1
        let two = Dims { batch: 2, ..same };
        for batch in [of_queries(ids(2, 40)), of_keys(ids(2, 40))] {
            let name = if batch.q_segment_ids.is_some() { "q" } else { "kv" };
            let balanced = auto.clone().balanced(two, &batch, 3).unwrap();
            let refusal = balanced.local_ring(same, 3).unwrap_err().to_string();
            assert_eq!(refusal, format!("{name}_segment_ids: got (2, 40), want (1, 40)"));
        }
    }
}
