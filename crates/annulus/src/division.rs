//! Division of the attention among ranks, as the caller requests it.

use std::sync::Arc;

use annulus_core::{Batch, Route, Strategy};

use crate::Attention;

/// The strategy, and what [`Strategy::Auto`] depends on besides the options of a ring.
#[derive(Debug, Clone)]
pub(crate) struct Division {
    pub(crate) strategy: Strategy,
    /// Route that the caller set: a strategy with another one is not chosen.
    pub(crate) route: Option<Route>,
    /// Route of the balanced layout, which that of a strategy replaces.
    pub(crate) balanced_route: Option<Route>,
    /// Batch of all rows for which a strategy is chosen.
    pub(crate) documents: Option<Arc<Batch>>,
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
        self.documents = batch.into().map(planned).map(Arc::new);
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

/// Returns the fields of a batch by which a strategy is planned. Ids of one side alone are used for
/// both, because a grid with key columns has other rows on each side.
pub(crate) fn planned(batch: Batch) -> Batch {
    let Batch { q_segment_ids, kv_segment_ids, .. } = batch;
    let (q, kv) = match (q_segment_ids, kv_segment_ids) {
        (Some(ids), None) | (None, Some(ids)) => (Some(ids.clone()), Some(ids)),
        both => both,
    };
    Batch { q_segment_ids: q, kv_segment_ids: kv, attention_mask: None, ..batch }
}

#[cfg(test)]
mod tests {
    use super::*;
    use annulus_core::Dims;

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
}
