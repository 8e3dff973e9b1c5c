//! Division of the attention among ranks: rows, route, strategy, messages.
//!
//! A strategy is chosen by documents only if the division has them: a plan is made before its first
//! batch, which an update brings. The batch is not part of the agreement of the ranks, because the
//! strategy, which depends on it, is.

use std::{borrow::Cow, num::NonZeroUsize, sync::Arc};

use annulus_comm::ring::RingOptions;
use annulus_core::{Batch, Dims, Error, Result, Runs, Side, Spec};
use annulus_plan::{Choice, Layout, Machine, Route, Strategy};

use crate::Attention;

/// How the ranks divide an attention: a ring with the layout and the route that the mask suggests,
/// then one parameter per method. Results are the same up to rounding.
///
/// # Examples
/// ```
/// use annulus::{Attention, Dims, Division, Layout, LocalRing};
///
/// let attention = Attention::new().causal(true);
/// let division = Division::new().layout(Layout::Striped);
/// let ring = LocalRing::new((&attention, &division), Dims::new(1, 64, 2, 8), 4)?;
/// assert_eq!(ring.plan().layout(), &Layout::Striped);
/// # Ok::<(), annulus::Error>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct Division {
    layout: Option<Layout>,
    route: Option<Route>,
    strategy: Strategy,
    machine: Option<Arc<Machine>>,
    /// Batch of [`Division::documents`].
    documents: Option<Arc<Batch>>,
    /// Route that [`Division::balanced`] has chosen.
    balanced_route: Option<Route>,
    /// Batch of [`Division::balanced`].
    balanced_documents: Option<Arc<Batch>>,
    kv_block_size: Option<u64>,
    receive_ahead: Option<usize>,
}

/// Row numbers of one rank, in the order of its tensors ([`Division::rank_rows`]).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankRows {
    /// Query rows.
    pub q: Runs,
    /// Key rows.
    pub kv: Runs,
}

impl Division {
    /// Starts with a ring whose layout and route are chosen by the mask.
    pub fn new() -> Self {
        Self::default()
    }

    /// Assignment of rows to ranks. Default: chosen by the mask, balanced work first, then the
    /// fewest bytes.
    #[must_use]
    pub fn layout(mut self, layout: impl Into<Option<Layout>>) -> Self {
        self.layout = layout.into();
        self.balanced_route = None;
        self.balanced_documents = None;
        self
    }

    /// Route of the blocks. Default: chosen by the mask and by the nodes of the transport: a relay,
    /// or over several nodes with as many ranks each rails ([`Route::RailsUp`]), whose results
    /// differ from a relay's by rounding.
    ///
    /// Rails with 0 `node_ranks` are over the nodes of the transport, and a typed error if these do
    /// not have as many ranks each.
    #[must_use]
    pub fn route(mut self, route: impl Into<Option<Route>>) -> Self {
        self.route = route.into();
        self
    }

    /// Division of the attention among ranks. Default: [`Strategy::Ring`].
    ///
    /// [`Strategy::HeadsRing`] divides the heads among groups of ranks, which sends fewer bytes
    /// than a ring if there are many KV heads: a quarter with 32 query and KV heads on 8 ranks.
    /// [`Strategy::Grid`] divides the keys too, which sends fewer bytes on many ranks: 2.7 % of the
    /// ring's with 32 heads of bf16 on 256 ranks. Results differ from those of the ring by rounding
    /// at most. Both need memory for the tensors of a rank once more, and blocks in host memory.
    /// `docs/semantics.md` in the repository lists what they do not support.
    ///
    /// [`Strategy::AllGather`], [`Strategy::AllToAll`], [`Strategy::OncePerNode`] and
    /// [`Strategy::PassQ`] are published names of forms of these: a plan has the form as its
    /// strategy, and the route.
    ///
    /// # Examples
    /// Groups of two ranks, each of which has half of the heads, and a ring over two groups.
    /// ```
    /// use annulus::{Attention, Dims, Division, LocalRing, Strategy, Tensors};
    /// use ndarray::Array4;
    ///
    /// let x = Array4::<f32>::ones((1, 64, 4, 8));
    /// let attention = Attention::new().causal(true);
    /// let division = Division::new().strategy(Strategy::HeadsRing { heads: 2 });
    /// let mut ring = LocalRing::new((&attention, &division), Dims::new(1, 64, 4, 8), 4)?;
    /// let forward = ring.forward(&Tensors::new(x.view(), x.view(), x.view()))?;
    /// assert!(forward.reports.iter().all(|report| report.bytes_sent == report.bytes_predicted));
    /// # Ok::<(), annulus::Error>(())
    /// ```
    ///
    /// # Source
    /// Jacobs et al. 2023, DeepSpeed Ulysses; Fang, Zhao 2024, USP; ATTENTION2D 2025, arXiv
    /// 2503.15758.
    #[must_use]
    pub const fn strategy(mut self, strategy: Strategy) -> Self {
        self.strategy = strategy;
        self
    }

    /// Machine on which [`Strategy::Auto`] takes the strategy of the least predicted time whose
    /// buffers fit the memory of a rank. Default: none, and the strategy that sends the fewest
    /// bytes. `annulus measure` writes the figures of a machine to a file.
    ///
    /// All ranks have the same machine. With another strategy it is refused.
    ///
    /// # Examples
    /// Four ranks on two nodes with a slow network. A block of keys and values crosses the network
    /// three times in a ring, and once in a ring over groups, which are the nodes. The ranks of a
    /// node then divide the keys.
    /// ```
    /// use annulus::{
    ///     Attention, DType, Dims, Division, LocalRing, Strategy,
    ///     planning::{ComputeRate, Link, Machine},
    /// };
    ///
    /// let link = |bandwidth| Some(Link { latency: 1e-6, bandwidth });
    /// let machine = Machine {
    ///     ranks_per_node: 2,
    ///     inside_node: link(1e11),
    ///     between_nodes: link(1e7),
    ///     node_bandwidth: Some(2e7),
    ///     rates: vec![ComputeRate {
    ///         dtype: DType::F32,
    ///         head_dim: 8,
    ///         forward: 1e13,
    ///         backward: 1e13,
    ///     }],
    ///     memory: 1 << 30,
    /// };
    /// let division = Division::new().strategy(Strategy::Auto).machine(machine);
    /// let dims = Dims::new(1, 64, 4, 8).kv_heads(1);
    /// let ring = LocalRing::new((Attention::new(), division), dims, 4)?;
    /// assert_eq!(ring.plan().strategy(), Strategy::Grid { heads: 1, queries: 2, keys: 2 });
    /// # Ok::<(), annulus::Error>(())
    /// ```
    #[must_use]
    pub fn machine(mut self, machine: impl Into<Option<Machine>>) -> Self {
        self.machine = machine.into().map(Arc::new);
        self
    }

    /// Batch of all rows for which [`Strategy::Auto`] chooses: packed lengths, segment ids and
    /// positions; a dense mask is not used. Default: that of [`Division::balanced`]; without
    /// either, the strategy is chosen by the mask alone.
    ///
    /// Every rank must set the same batch. The plan is updated with its own rows of the batch as
    /// without it. With another strategy, or if a tensor does not fit the lengths of the plan, it
    /// is refused when the plan is made ([`crate::Setup::spec`]).
    ///
    /// With a layout that was set, [`Division::rank_rows`] returns the rows of a rank before there
    /// is a plan, whichever strategy is chosen; otherwise [`crate::Plan::q_rows`] does.
    ///
    /// # Examples
    /// Documents that no rank shares with another are sent nowhere by a ring.
    /// ```
    /// use annulus::{Attention, Batch, Dims, Division, LocalRing, Strategy};
    ///
    /// let dims = Dims::new(1, 64, 8, 8);
    /// let documents = Batch { cum_seqlens_q: Some(vec![0, 16, 32, 48, 64]), ..Batch::default() };
    /// let auto = Division::new().strategy(Strategy::Auto);
    /// let strategy = |division: Division| -> annulus::Result<Strategy> {
    ///     let ring = LocalRing::new((Attention::new(), division), dims, 4)?;
    ///     Ok(ring.plans().next().map(|plan| plan.strategy()).unwrap_or_default())
    /// };
    /// assert_eq!(strategy(auto.clone())?, Strategy::HeadsRing { heads: 4 });
    /// assert_eq!(strategy(auto.documents(documents))?, Strategy::Ring);
    /// # Ok::<(), annulus::Error>(())
    /// ```
    #[must_use]
    pub fn documents(mut self, batch: impl Into<Option<Batch>>) -> Self {
        self.documents = batch.into().map(|batch| Arc::new(coordinates(&batch)));
        self
    }

    /// Hint: rows at multiples of which a KV block is split into messages, so that computing on one
    /// part overlaps receiving the next. Default: the KV tile of the backend (64 on the CPU), to
    /// multiples of which it is rounded up.
    ///
    /// Larger parts make fewer and longer messages. Results change by rounding at most. Ranks may
    /// differ: all use the largest. The tile sizes of the kernels are fixed when they are compiled.
    #[must_use]
    pub fn kv_block_size(mut self, rows: impl Into<Option<u64>>) -> Self {
        self.kv_block_size = rows.into();
        self
    }

    /// Ring steps by which a rank posts the receive of a block ahead of the step that computes on
    /// it, and may forward the block ahead, equal on all ranks. Default: 1, so that a rank receives
    /// one block while it computes on another, and 4 on a balanced layout
    /// ([`Division::balanced`]), whose steps are uneven.
    ///
    /// With 2 a rank whose neighbour is late by less than a step does not wait for it. Each step
    /// but the first takes the memory of one more block. On a direct route, more receives are
    /// posted ahead if blocks are so small that they fit into the same memory
    /// ([`annulus_plan::block_buffers`]). In a one-pass backward each of the first four steps also
    /// takes two buffers of gradients: where they are computed, and where they arrive
    /// ([`Plan::buffer_bytes`](crate::Plan)). Messages and results are the same, bit for bit. Over
    /// NCCL a one-pass backward receives one step ahead.
    #[must_use]
    pub fn receive_ahead(mut self, steps: impl Into<Option<usize>>) -> Self {
        self.receive_ahead = steps.into();
        self
    }

    /// Sets a layout with equal rows and balanced work for the documents of a batch, on `ranks`
    /// ranks ([`Layout::balanced`]). Unless [`Division::route`] is set, also the route on which
    /// rows are sent only to ranks that need them.
    ///
    /// `attention` has the masks, which decide the work of a row. `batch` has all rows; its dense
    /// mask is not used. [`Strategy::Auto`] chooses for the same documents. Every rank must call it
    /// with the same arguments. The plan is updated with its own rows of the batch as with every
    /// layout, and other batches are correct but less balanced.
    ///
    /// # Errors
    /// As [`Layout::balanced`], and [`Error::InvalidArgument`] of the options.
    ///
    /// # Examples
    /// Each rank loads its rows of 4 packed documents:
    /// ```
    /// use annulus::{Attention, Batch, Dims, Division};
    ///
    /// let dims = Dims::new(1, 8192, 8, 64);
    /// let documents = Batch {
    ///     cum_seqlens_q: Some(vec![0, 512, 2560, 3560, 8192]),
    ///     ..Batch::default()
    /// };
    /// let attention = Attention::new().causal(true);
    /// let division = Division::new().balanced(&attention, dims, &documents, 4)?;
    /// let rows = (0..4).map(|rank| division.rank_rows(&attention, dims, 4, rank));
    /// for rows in rows {
    ///     let rows = rows?;
    ///     assert_eq!(rows.q.len(), 2048);
    ///     assert_eq!(rows.q, rows.kv);
    /// }
    /// # Ok::<(), annulus::Error>(())
    /// ```
    pub fn balanced(
        self,
        attention: &Attention,
        dims: Dims,
        batch: &Batch,
        ranks: usize,
    ) -> Result<Self> {
        let choice = Choice::balanced(&attention.spec(dims)?, batch, ranks)?;
        let Choice { layout, route, .. } = choice;
        Ok(Self {
            layout: Some(layout),
            balanced_route: Some(route),
            balanced_documents: Some(Arc::new(coordinates(batch))),
            ..self
        })
    }

    /// Returns the rows of one of `ranks` ranks under the layout that was set, before there are
    /// tensors or a plan. Local.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] naming `layout` if none is set: then a plan chooses layout and
    /// ring order, which depends on the nodes of the ranks ([`crate::Plan::q_rows`]). Also naming
    /// `layout` if it is not one of `ranks` ranks, `ranks`, `rank`, or an option.
    pub fn rank_rows(
        &self,
        attention: &Attention,
        dims: Dims,
        ranks: usize,
        rank: usize,
    ) -> Result<RankRows> {
        let spec = attention.spec(dims)?;
        self.check(&spec)?;
        let Some(layout) = self.layout.clone() else {
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

    /// Checks the values that depend on each other, for the attention `spec`.
    pub(crate) fn check(&self, spec: &Spec) -> Result<()> {
        if self.kv_block_size == Some(0) {
            return Err(Error::invalid("kv_block_size", 0, "at least 1"));
        }
        if self.receive_ahead == Some(0) {
            return Err(Error::invalid("receive_ahead", 0, "at least 1"));
        }
        if let (Some(given), Some(route)) = (self.route, self.strategy.route())
            && given != route
        {
            let want = format!("none, or {}: that of strategy {}", route.name(), self.strategy);
            return Err(Error::invalid("route", given.name(), want));
        }
        if let Some(machine) = &self.machine {
            machine.check().map_err(of_machine)?;
        }
        let of_auto =
            [("machine", self.machine.is_some()), ("documents", self.documents.is_some())];
        if let Some((name, _)) = of_auto.iter().find(|(_, is_given)| *is_given)
            && self.strategy != Strategy::Auto
        {
            let got = format!("one, for {}", self.strategy);
            return Err(Error::invalid(*name, got, "none: the strategy auto alone depends on it"));
        }
        if let Some(documents) = &self.documents {
            spec.validate_batch(documents, spec.dims.q_len, spec.dims.kv_len)?;
        }
        Ok(())
    }

    /// Returns the name of a parameter that is set, if any: a KV cache has none of them.
    pub fn first_set(&self) -> Option<&'static str> {
        let set = [
            (self.layout.is_some(), "layout"),
            (self.route.is_some(), "route"),
            (self.strategy != Strategy::Ring, "strategy"),
            (self.machine.is_some(), "machine"),
            (self.documents.is_some(), "documents"),
            (self.kv_block_size.is_some(), "kv_block_size"),
            (self.receive_ahead.is_some(), "receive_ahead"),
        ];
        set.into_iter().find(|(is_set, _)| *is_set).map(|(_, name)| name)
    }

    /// Returns the strategy as it was given.
    pub(crate) const fn given_strategy(&self) -> Strategy {
        self.strategy
    }

    /// Returns the route that the caller set, if any: a strategy with another one is not chosen.
    pub(crate) const fn given_route(&self) -> Option<Route> {
        self.route
    }

    /// Returns the route of the balanced layout, which the route of a strategy replaces.
    pub(crate) const fn balanced_route(&self) -> Option<Route> {
        self.balanced_route
    }

    /// Returns the batch by which a strategy is planned for tensors of `dims`.
    ///
    /// # Errors
    /// [`annulus_core::Error::InvalidArgument`] naming a tensor that the caller gave, if the batch
    /// does not fit.
    pub(crate) fn planned_batch(&self, dims: &Dims) -> Result<Option<Cow<'_, Batch>>> {
        let documents = self.documents.as_deref().or(self.balanced_documents.as_deref());
        let Some(batch) = documents else { return Ok(None) };
        batch.validate(dims, dims.q_len, dims.kv_len)?;
        Ok(Some(with_ids_of_both_sides(batch)))
    }

    /// Returns the options of the ring engine; those of the mathematics have their defaults.
    pub(crate) fn ring_options(&self) -> RingOptions {
        RingOptions {
            layout: self.layout.clone(),
            route: self.route.or(self.strategy.route()).or(self.balanced_route),
            kv_block_size: self.kv_block_size,
            receive_ahead: self
                .receive_ahead
                .and_then(NonZeroUsize::new)
                .or(self.strategy.receive_ahead())
                .or(self.layout.as_ref().map(Layout::receive_ahead)),
            machine: self.machine.clone(),
            ..RingOptions::default()
        }
    }
}

/// Returns the batch without its dense mask and key lists, on which no layout or strategy depends.
fn coordinates(batch: &Batch) -> Batch {
    Batch {
        q_segment_ids: batch.q_segment_ids.clone(),
        kv_segment_ids: batch.kv_segment_ids.clone(),
        q_positions: batch.q_positions.clone(),
        kv_positions: batch.kv_positions.clone(),
        attention_mask: None,
        key_lists: None,
        cum_seqlens_q: batch.cum_seqlens_q.clone(),
        cum_seqlens_k: batch.cum_seqlens_k.clone(),
    }
}

/// Names the machine in an error of one of its fields.
fn of_machine(error: Error) -> Error {
    match error {
        Error::InvalidArgument { argument, got, want } => {
            Error::InvalidArgument { argument: format!("machine.{argument}"), got, want }
        }
        other => other,
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
    use annulus_core::LEAF_ROWS;
    use annulus_plan::CustomLayout;
    use ndarray::Array2;

    use super::*;
    use crate::LocalRing;

    fn packed(starts: &[i64]) -> Batch {
        Batch { cum_seqlens_q: Some(starts.to_vec()), ..Batch::default() }
    }

    fn ring(division: Division, dims: Dims, ranks: usize) -> Result<LocalRing> {
        LocalRing::new((Attention::new(), division), dims, ranks)
    }

    #[test]
    fn documents_that_do_not_fit_are_refused_on_any_number_of_ranks() {
        let dims = Dims::new(1, 40, 2, 8);
        let auto = Division::new().strategy(Strategy::Auto);
        for ranks in [1, 3] {
            let refusal = |starts: &[i64]| {
                let documents = auto.clone().documents(packed(starts));
                ring(documents, dims, ranks).unwrap_err().to_string()
            };
            assert!(refusal(&[0, 41]).starts_with("cum_seqlens_q: got 41 as the last"));
            assert!(refusal(&[0, 9, 5, 40]).starts_with("cum_seqlens_q: got 5 after 9"));
            assert!(refusal(&[]).starts_with("cum_seqlens_q: got an empty list"));
            // a document without rows, and padding
            ring(auto.clone().documents(packed(&[0, 9, 9, 30])), dims, ranks).unwrap();
        }
        let of_ring = ring(Division::new().documents(packed(&[0, 40])), dims, 1);
        assert!(of_ring.unwrap_err().to_string().starts_with("documents: got one, for ring"));
    }

    #[test]
    fn segment_ids_of_one_side_are_refused_by_the_name_that_was_given() {
        let ids = |batch: usize, rows: usize| Some(Array2::zeros((batch, rows)));
        let of_queries = |ids| Batch { q_segment_ids: ids, ..Batch::default() };
        let of_keys = |ids| Batch { kv_segment_ids: ids, ..Batch::default() };
        let auto = Division::new().strategy(Strategy::Auto);
        let same = Dims::new(1, 40, 2, 8);
        let longer = Dims { kv_len: 60, ..same };
        for ranks in [1, 3] {
            let refusal = |dims: Dims, batch: Batch| {
                let documents = auto.clone().documents(batch);
                ring(documents, dims, ranks).unwrap_err().to_string()
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
            let balanced = auto.clone().balanced(&Attention::new(), two, &batch, 3).unwrap();
            let refusal = ring(balanced, same, 3).unwrap_err().to_string();
            assert_eq!(refusal, format!("{name}_segment_ids: got (2, 40), want (1, 40)"));
        }
    }

    fn text(result: Result<RankRows>) -> String {
        result.unwrap_err().to_string()
    }

    #[test]
    fn a_given_route_is_kept_and_another_layout_removes_the_chosen_one() {
        let dims = Dims::new(1, 400, 1, 8);
        let batch = packed(&[0, 150, 170, 400]);
        let causal = Attention::new().causal(true);
        let balanced = |division: Division| division.balanced(&causal, dims, &batch, 3);
        let chosen = balanced(Division::new()).unwrap();
        assert!(chosen.ring_options().route.is_some());
        assert_eq!(chosen.layout(Layout::Zigzag).ring_options().route, None);
        let given = balanced(Division::new().route(Route::RelayUp)).unwrap();
        assert_eq!(given.ring_options().route, Some(Route::RelayUp));
    }

    #[test]
    fn rows_of_ranks_need_a_layout_of_as_many_ranks() {
        let (attention, dims) = (Attention::new(), Dims::new(1, 9, 1, 8));
        let none = text(Division::new().rank_rows(&attention, dims, 2, 0));
        assert!(none.starts_with("layout: got none, want a layout"));
        let striped = Division::new().layout(Layout::Striped);
        let rows = |ranks, rank| striped.rank_rows(&attention, dims, ranks, rank);
        assert_eq!(rows(2, 1).unwrap().q.iter().collect::<Vec<_>>(), [1, 3, 5, 7]);
        assert_eq!(text(rows(2, 2)), "rank: got 2, want a rank below 2");
        assert_eq!(text(rows(0, 0)), "ranks: got 0, want at least 1");
        // more ranks than rows: some have none
        let documents = packed(&[0, 4, 9]);
        let balanced = Division::new().balanced(&attention, dims, &documents, 12).unwrap();
        let rows = |ranks, rank| balanced.rank_rows(&attention, dims, ranks, rank);
        assert_eq!((0..12).map(|rank| rows(12, rank).unwrap().kv.len()).sum::<u64>(), 9);
        assert!(text(rows(3, 0)).starts_with("layout: got 12 shards of q"));
    }

    #[test]
    fn reproducible_rows_are_whole_leaves() {
        let dims = Dims::new(1, 2000, 1, 8);
        let attention = Attention::new().reproducible(true);
        let contiguous = Division::new().layout(Layout::Contiguous);
        let rows = contiguous.rank_rows(&attention, dims, 3, 0).unwrap();
        assert_eq!(rows.q.len() % LEAF_ROWS, 0);
        let documents = packed(&[0, 700, 2000]);
        let balanced = Division::new().balanced(&attention, dims, &documents, 3).unwrap();
        balanced.rank_rows(&attention, dims, 3, 2).unwrap();
        let rows = |start, count| Runs::counting(start, count);
        let q = vec![rows(0, 100), rows(100, 1900)];
        let custom =
            Division::new().layout(Layout::Custom(CustomLayout { kv: q.clone(), q }.into()));
        assert!(text(custom.rank_rows(&attention, dims, 2, 0)).contains("whole leaves"));
    }
}
