//! Grid of groups × members over which heads and rows are divided.

use std::ops::Range;

use crate::{Dims, Error, Result, Spec};

/// Ranks as a grid of groups × members. The ring index is group · members + member, so that the
/// ranks of a group are neighbours, on one node if possible.
///
/// Member j of every group has the heads of part j, of all rows of its group. If there are more
/// members than KV heads, members / KV heads neighbours have the same KV head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeadGrid {
    groups: usize,
    members: usize,
    q_heads: usize,
    kv_heads: usize,
}

impl HeadGrid {
    /// Creates the grid of `ranks` ranks in groups of `members`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] naming `strategy` if the members do not divide the ranks or the
    /// heads.
    pub fn new(dims: &Dims, ranks: usize, members: usize) -> Result<Self> {
        let refuse = |want: String| {
            Err(Error::invalid("strategy", format!("heads in groups of {members} ranks"), want))
        };
        if members == 0 || !ranks.is_multiple_of(members) {
            return refuse(format!("groups whose size divides the {ranks} ranks"));
        }
        let Dims { q_heads, kv_heads, .. } = *dims;
        if !q_heads.is_multiple_of(members) {
            return refuse(format!("groups whose size divides the {q_heads} query heads"));
        }
        if !kv_heads.is_multiple_of(members) && !members.is_multiple_of(kv_heads) {
            let want = "groups whose size divides the KV heads, or is a multiple of them";
            return refuse(format!("{want} ({kv_heads})"));
        }
        Ok(Self { groups: ranks / members, members, q_heads, kv_heads })
    }

    /// Checks that passes of `spec` can be divided over this grid.
    ///
    /// In the reproducible order, sums over heads are terms of one chain, which members would have
    /// to share: of dK and dV of replicated KV heads, and of gradients that all heads share.
    ///
    /// # Errors
    /// [`Error::Unsupported`].
    pub fn check(&self, spec: &Spec, backward: bool) -> Result<()> {
        if spec.leaf_rows.is_none() || !backward || self.members == 1 {
            return Ok(());
        }
        let refuse = |what: &str| {
            let by = format!("heads in groups of {} ranks", self.members);
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

    /// Returns the grids over which `spec` can be divided, by ascending number of members. The
    /// first is the ring.
    pub fn candidates(spec: &Spec, ranks: usize, backward: bool) -> Vec<Self> {
        let most = ranks.min(spec.dims.q_heads);
        (1..=most)
            .filter_map(|members| Self::new(&spec.dims, ranks, members).ok())
            .filter(|grid| grid.check(spec, backward).is_ok())
            .collect()
    }

    /// Returns the number of groups.
    pub const fn groups(&self) -> usize {
        self.groups
    }

    /// Returns the number of ranks of a group.
    pub const fn members(&self) -> usize {
        self.members
    }

    /// Returns the group of a ring index.
    pub const fn group(&self, ring_index: usize) -> usize {
        ring_index / self.members
    }

    /// Returns the member of a ring index.
    pub const fn member(&self, ring_index: usize) -> usize {
        ring_index % self.members
    }

    /// Returns the ring index of a member of a group.
    pub const fn ring_index(&self, group: usize, member: usize) -> usize {
        group * self.members + member
    }

    /// Returns the query heads of a member.
    pub const fn q_heads(&self, member: usize) -> Range<usize> {
        let count = self.q_heads / self.members;
        member * count..(member + 1) * count
    }

    /// Returns the KV heads of a member: those of its query heads.
    pub const fn kv_heads(&self, member: usize) -> Range<usize> {
        let first = member * self.kv_heads / self.members;
        first..first + self.kv_heads / self.members + (self.members > self.kv_heads) as usize
    }

    /// Returns the number of members that have the same KV head.
    pub const fn replicas(&self) -> usize {
        let replicas = self.members / self.kv_heads;
        if replicas > 1 { replicas } else { 1 }
    }
}
