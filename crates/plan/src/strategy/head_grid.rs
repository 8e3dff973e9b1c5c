//! Grid of ranks over which heads, queries and keys are divided.

use std::ops::Range;

use super::Strategy;
use annulus_core::{Dims, Error, Result, Side, Spec};

/// Ranks as a grid of groups × members, and the members of a group as key columns × head parts.
///
/// ```text
/// ring index  group · members + column · head parts + part
/// group       query rows of its members: a part of the queries
/// column      key rows of the members of all groups in this column
/// part        heads of a member
/// ```
/// The ranks of a group are neighbours, on one node if possible. A member computes the heads of its
/// part, of all query rows of its group, over the keys of its column. If there are more parts than
/// KV heads, parts / KV heads neighbours have the same KV head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeadGrid {
    groups: usize,
    columns: usize,
    parts: usize,
    q_heads: usize,
    kv_heads: usize,
}

impl HeadGrid {
    /// Creates the grid of a strategy on `ranks` ranks; `None` for [`Strategy::Auto`].
    ///
    /// # Errors
    /// As [`HeadGrid::new`] and [`HeadGrid::with_columns`];
    /// [`Error::InvalidArgument`] naming `strategy` also if the parts of a [`Strategy::Grid`] are
    /// not as many as the ranks, or the ranks of a node of [`Strategy::OncePerNode`] do not divide
    /// them.
    pub fn of(dims: &Dims, ranks: usize, strategy: Strategy) -> Result<Option<Self>> {
        if let Some(route) = strategy.route().filter(|route| route.node_ranks() != Some(0))
            && !route.fits(ranks)
        {
            let want = format!("nodes of a divisor of {ranks} ranks");
            return Err(Error::invalid("strategy", strategy, want));
        }
        match strategy.on_ranks(ranks) {
            Strategy::HeadsRing { heads } => Self::new(dims, ranks, heads).map(Some),
            Strategy::Grid { heads, queries, keys } => {
                let parts = heads.checked_mul(queries).and_then(|parts| parts.checked_mul(keys));
                if parts != Some(ranks) {
                    let want = format!("a grid of {ranks} parts, one per rank");
                    return Err(Error::invalid("strategy", strategy, want));
                }
                Self::with_columns(dims, ranks, heads, keys).map(Some)
            }
            Strategy::Auto => Ok(None),
            _ => Self::new(dims, ranks, 1).map(Some),
        }
    }

    /// Creates the grid of `ranks` ranks in groups of `heads`, each with a part of the heads.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] naming `strategy` if the members do not divide the ranks or the
    /// heads.
    pub fn new(dims: &Dims, ranks: usize, heads: usize) -> Result<Self> {
        Self::with_columns(dims, ranks, heads, 1)
    }

    /// Creates the grid of `ranks` ranks in groups of `heads` × `columns`.
    ///
    /// # Errors
    /// As [`HeadGrid::new`].
    pub fn with_columns(dims: &Dims, ranks: usize, heads: usize, columns: usize) -> Result<Self> {
        let refuse = |want: String| {
            let got = match columns {
                1 => format!("heads in groups of {heads} ranks"),
                _ => format!("{heads} parts of the heads and {columns} of the keys"),
            };
            Err(Error::invalid("strategy", got, want))
        };
        let members = heads.saturating_mul(columns);
        if members == 0 || !ranks.is_multiple_of(members) {
            return refuse(format!("groups whose size divides the {ranks} ranks"));
        }
        let Dims { q_heads, kv_heads, .. } = *dims;
        if !q_heads.is_multiple_of(heads) {
            return refuse(format!("groups whose size divides the {q_heads} query heads"));
        }
        if !kv_heads.is_multiple_of(heads) && !heads.is_multiple_of(kv_heads) {
            let want = "groups whose size divides the KV heads, or is a multiple of them";
            return refuse(format!("{want} ({kv_heads})"));
        }
        Ok(Self { groups: ranks / members, columns, parts: heads, q_heads, kv_heads })
    }

    /// Checks that passes of `spec` can be divided over this grid.
    ///
    /// Several key columns merge partial results, in an order that depends on the grid. In the
    /// reproducible order, sums over heads are terms of one
    /// chain, which members would have to share: of dK and dV of replicated KV heads, and of
    /// gradients that all heads share.
    ///
    /// # Errors
    /// [`Error::Unsupported`].
    pub fn check(&self, spec: &Spec, backward: bool) -> Result<()> {
        if self.columns > 1 {
            let refuse = |what: &str| {
                let by = format!("keys in {} columns of ranks", self.columns);
                Err(Error::unsupported(what, by))
            };
            if spec.leaf_rows.is_some() {
                return refuse("reproducible");
            }
        }
        if spec.leaf_rows.is_none() || !backward || self.parts == 1 {
            return Ok(());
        }
        let refuse = |what: &str| {
            let by = format!("heads in groups of {} ranks", self.parts);
            Err(Error::unsupported(format!("a reproducible backward pass with {what}"), by))
        };
        if self.replicas() > 1 {
            return refuse("fewer KV heads than ranks of a group");
        }
        if spec.sinks.is_some_and(|sinks| !sinks.per_head) {
            return refuse("sinks that all heads share");
        }
        if spec.bias.is_some_and(|shape| shape[1] == 1) && spec.dims.q_heads > 1 {
            return refuse("a bias tensor that all heads share");
        }
        Ok(())
    }

    /// Returns the spec of what a member of each group computes: its heads, and with several key
    /// columns the partial results of its column. Sinks are scores of the first column.
    pub fn spec_of(&self, spec: &Spec, member: usize) -> Spec {
        let of_heads = spec.of_heads(self.q_heads(member), self.kv_heads(member).len());
        if self.columns == 1 {
            return of_heads;
        }
        let sinks = of_heads.sinks.filter(|_| self.column(member) == 0);
        Spec { partial: true, sinks, ..of_heads }
    }

    /// Returns the grids over which `spec` can be divided, by ascending number of key columns, then
    /// of head parts. The first is the ring.
    pub fn candidates(spec: &Spec, ranks: usize, backward: bool) -> Vec<Self> {
        let divisors = || (1..=ranks).filter(|&parts| ranks.is_multiple_of(parts));
        let most = spec.dims.q_heads;
        divisors()
            .flat_map(|columns| divisors().map(move |heads| (heads, columns)))
            .filter(|&(heads, _)| heads <= most)
            .filter_map(|(heads, columns)| {
                Self::with_columns(&spec.dims, ranks, heads, columns).ok()
            })
            .filter(|grid| grid.check(spec, backward).is_ok())
            .collect()
    }

    /// Returns the strategy of this grid, the simplest of equal ones.
    pub const fn strategy(&self) -> Strategy {
        match (self.columns, self.parts) {
            (1, heads) => Strategy::of_heads(heads),
            (keys, heads) => Strategy::Grid { heads, queries: self.groups, keys },
        }
    }

    /// Returns the number of groups, which is that of query parts.
    pub const fn groups(&self) -> usize {
        self.groups
    }

    /// Returns the number of ranks of a group.
    pub const fn members(&self) -> usize {
        self.columns * self.parts
    }

    /// Returns the number of key columns.
    pub const fn columns(&self) -> usize {
        self.columns
    }

    /// Returns the number of parts of the heads.
    pub const fn head_parts(&self) -> usize {
        self.parts
    }

    /// Returns the group of a ring index.
    pub const fn group(&self, ring_index: usize) -> usize {
        ring_index / self.members()
    }

    /// Returns the member of a ring index.
    pub const fn member(&self, ring_index: usize) -> usize {
        ring_index % self.members()
    }

    /// Returns the ring index of a member of a group.
    pub const fn ring_index(&self, group: usize, member: usize) -> usize {
        group * self.members() + member
    }

    /// Returns the key column of a member.
    pub const fn column(&self, member: usize) -> usize {
        member / self.parts
    }

    /// Returns the part of the heads of a member.
    pub const fn part(&self, member: usize) -> usize {
        member % self.parts
    }

    /// Returns the members of a key column.
    pub const fn of_column(&self, column: usize) -> Range<usize> {
        column * self.parts..(column + 1) * self.parts
    }

    /// Returns one member for each ring that differs: every member if masks differ by head, else
    /// one of each key column.
    pub(crate) fn distinct_members(&self, per_head: bool) -> impl Iterator<Item = usize> {
        let step = if per_head { 1 } else { self.parts };
        (0..self.members()).step_by(step)
    }

    /// Returns true if two members exchange rows of `side`: queries with all members of their
    /// group, keys with those of their column.
    pub fn shares(&self, side: Side, member: usize, other: usize) -> bool {
        side == Side::Q || self.column(member) == self.column(other)
    }

    /// Returns the query heads of a member.
    pub const fn q_heads(&self, member: usize) -> Range<usize> {
        let count = self.q_heads / self.parts;
        let part = self.part(member);
        part * count..(part + 1) * count
    }

    /// Returns the KV heads of a member: those of its query heads.
    pub const fn kv_heads(&self, member: usize) -> Range<usize> {
        let first = self.part(member) * self.kv_heads / self.parts;
        first..first + self.kv_heads / self.parts + (self.parts > self.kv_heads) as usize
    }

    /// Returns the number of parts of the heads that have the same KV head.
    pub const fn replicas(&self) -> usize {
        let replicas = self.parts / self.kv_heads;
        if replicas > 1 { replicas } else { 1 }
    }
}
