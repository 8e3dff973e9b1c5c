//! Leaves of a sequence by owner: which rank holds the terms of which node of the reproducible
//! tree.

use std::sync::Arc;

use annulus_core::{
    AbsentLeaves, Error, LeafNode, Order, Result, RowSet, Shard, complete_nodes, leaves_of, memory,
    merge_nodes,
};

use crate::agreement::SUMMANDS_PER_GATHER;

const WHAT: &str = "the sums of leaves";

/// Leaves of one sequence by owner.
pub(super) struct LeafOwners {
    /// Leaves of the sequence.
    leaves: u64,
    /// Leaves of this rank, in local order.
    own: Vec<u64>,
    /// Complete nodes of each ring index, ascending.
    nodes: Vec<Vec<LeafNode>>,
    /// Ring index and number of every node, in ascending order of the nodes.
    ascending: Vec<(usize, usize)>,
}

impl LeafOwners {
    /// Derives the owners of leaves of `leaf_rows` rows, for the rank at `ring_index`.
    pub(super) fn new(leaf_rows: u64, shards: &[Arc<Shard>], ring_index: usize) -> Result<Self> {
        let of = |shard: &Shard| {
            let mut own =
                memory::list(WHAT, annulus_core::index(shard.rows.len() / leaf_rows + 1))?;
            let rows = RowSet::all(shard.rows.len());
            leaves_of(&shard.rows, &rows, leaf_rows, |leaf| own.push(leaf));
            Ok::<_, Error>(own)
        };
        let leaves = shards.iter().map(|shard| shard.rows.len()).sum::<u64>().div_ceil(leaf_rows);
        let mut nodes = Vec::new();
        for shard in shards {
            let mut own = of(shard)?;
            own.sort_unstable();
            nodes.push(complete_nodes(&own, leaves)?);
        }
        let all = nodes.iter().map(Vec::len).sum();
        let mut ascending = memory::list(WHAT, all)?;
        for (index, nodes) in nodes.iter().enumerate() {
            ascending.extend((0..nodes.len()).map(|node| (index, node)));
        }
        ascending.sort_unstable_by_key(|&(index, node)| nodes[index][node].first_leaf());
        Ok(Self { leaves, own: of(&shards[ring_index])?, nodes, ascending })
    }

    /// Merges the terms `[own leaves][width]` of this rank into its complete nodes, or into the
    /// root, as if there were no other leaves. Returns `[nodes][width]`.
    pub(super) fn merge_own(
        &self,
        terms: &[f64],
        width: usize,
        absent: AbsentLeaves,
    ) -> Result<Vec<f64>> {
        if terms.len() != self.own.len() * width {
            return Err(Error::internal(format!("{} terms of leaves", terms.len())));
        }
        let mut order = memory::collect(WHAT, self.own.len(), 0..self.own.len())?;
        order.sort_unstable_by_key(|&leaf| self.own[leaf]);
        let node = |&leaf: &usize| LeafNode { level: 0, index: self.own[leaf] };
        let mut nodes = memory::collect(WHAT, order.len(), order.iter().map(node))?;
        let mut sums = memory::list(WHAT, terms.len())?;
        order.iter().for_each(|leaf| sums.extend(&terms[leaf * width..(leaf + 1) * width]));
        merge_nodes(&mut nodes, &mut sums, width, self.leaves, absent);
        Ok(sums)
    }

    /// Merges the nodes of all ranks, of which `parts` are the bytes by rank, into `root`, which is
    /// 0 without leaves.
    pub(super) fn merge_all(
        &self,
        parts: Vec<Vec<u8>>,
        order: &Order,
        root: &mut [f64],
    ) -> Result<()> {
        let width = root.len();
        let parts = order.by_ring_index(parts);
        for (&peer, (part, nodes)) in order.ranks().iter().zip(parts.iter().zip(&self.nodes)) {
            let want = nodes.len() * width;
            if part.len() != want * 8 {
                let what = format!("{} numbers to sum, want {want}", part.len() / 8);
                return Err(Error::Comm { peer, step: 0, what });
            }
        }
        let mut nodes = memory::list(WHAT, self.ascending.len())?;
        let mut sums = memory::list(WHAT, self.ascending.len() * width)?;
        for &(index, node) in &self.ascending {
            nodes.push(self.nodes[index][node]);
            let bytes = &parts[index][node * width * 8..(node + 1) * width * 8];
            let numbers = bytes.as_chunks::<8>().0.iter();
            sums.extend(numbers.map(|bytes| f64::from_le_bytes(*bytes)));
        }
        merge_nodes(&mut nodes, &mut sums, width, self.leaves, AbsentLeaves::Empty);
        root.fill(0.0);
        root.iter_mut().zip(sums).for_each(|(root, sum)| *root = sum);
        Ok(())
    }

    /// Returns the number of elements per all-gather, the same on every rank.
    pub(super) fn chunk(&self) -> usize {
        let most = self.nodes.iter().map(Vec::len).max().unwrap_or(0);
        (SUMMANDS_PER_GATHER / most.max(1)).max(1)
    }
}
