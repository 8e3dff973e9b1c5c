//! Sums over all leaves of a sequence, in the reproducible order: dsinks over leaves of queries,
//! and dbias that is broadcast over both sequences over leaves of keys.
//!
//! Every rank has the terms of its own leaves. It merges them into nodes of the tree
//! (`leaf_tree.rs`) whose leaves are all its own, sends the sums of these nodes to all ranks, and
//! each rank merges the nodes of all ranks in ascending order. The grouping of the terms is that of
//! the tree, whatever leaves a rank owns.

use crate::{Result, memory};

/// Terms of the leaves of one rank, for [`crate::BackwardPass::leaf_sums`]. Leaves are in the order
/// of the rank's rows.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct LeafSums {
    /// dsinks of each leaf of queries: `[leaves][q_heads|1][sinks]`.
    pub sinks: Vec<f64>,
    /// dbias of each leaf of keys: `[leaves][b|1][q_heads|1]`. Empty unless the bias has one row
    /// and one column. Of a table instead [`crate::ExactSum::numbers`] of each of its elements.
    pub bias: Vec<f64>,
}

/// Node of the merge tree: it covers the leaves `index`·2^`level` to (`index` + 1)·2^`level` − 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LeafNode {
    /// Distance to the leaves.
    pub level: u32,
    /// Number among the nodes of its level.
    pub index: u64,
}

impl LeafNode {
    /// Returns the first leaf that the node covers.
    pub const fn first_leaf(self) -> u64 {
        self.index << self.level
    }
}

/// Treatment of a sibling of which no leaf is in the list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AbsentLeaves {
    /// Its sum is unknown, and the node stays.
    Unknown,
    /// Its sum is empty: the node is merged with nothing.
    Empty,
}

/// Merges sums of `width` numbers of the nodes `nodes`, in ascending order of their leaves, as far
/// as possible, in place. `leaves` is the number of leaves of the sequence; leaves beyond it are
/// empty. With [`AbsentLeaves::Empty`] the root is left, if there are nodes.
pub fn merge_nodes(
    nodes: &mut Vec<LeafNode>,
    sums: &mut Vec<f64>,
    width: usize,
    leaves: u64,
    absent: AbsentLeaves,
) {
    let height = u64::BITS - leaves.saturating_sub(1).leading_zeros();
    for level in 0..height {
        let mut kept = 0;
        let mut at = 0;
        while at < nodes.len() {
            let LeafNode { level: of, index } = nodes[at];
            let right = LeafNode { level, index: index | 1 };
            let has_right = of == level
                && index % 2 == 0
                && nodes.get(at + 1).is_some_and(|&next| next == right);
            let is_last = index % 2 == 0 && right.first_leaf() >= leaves;
            let merges = of == level && (has_right || is_last || absent == AbsentLeaves::Empty);
            nodes[kept] =
                if merges { LeafNode { level: level + 1, index: index / 2 } } else { nodes[at] };
            sums.copy_within(at * width..(at + 1) * width, kept * width);
            at += 1;
            if has_right {
                let (left, right) = sums.split_at_mut(at * width);
                let left = &mut left[kept * width..(kept + 1) * width];
                left.iter_mut().zip(right).for_each(|(left, right)| *left += *right);
                at += 1;
            }
            kept += 1;
        }
        nodes.truncate(kept);
        sums.truncate(kept * width);
    }
}

/// Returns the nodes of the leaves `own`, ascending, whose leaves are all among them.
///
/// # Errors
/// [`crate::Error::OutOfMemory`].
pub fn complete_nodes(own: &[u64], leaves: u64) -> Result<Vec<LeafNode>> {
    let all = own.iter().map(|&index| LeafNode { level: 0, index });
    let mut nodes = memory::collect("the leaves of a plan", own.len(), all)?;
    merge_nodes(&mut nodes, &mut Vec::new(), 0, leaves, AbsentLeaves::Unknown);
    nodes.shrink_to_fit();
    Ok(nodes)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Evaluates the definition of the tree.
    fn root(terms: &[f64], level: u32, index: u64) -> Option<f64> {
        if level == 0 {
            return terms.get(crate::index(index)).copied();
        }
        let [left, right] = [0, 1].map(|side| root(terms, level - 1, 2 * index + side));
        match (left, right) {
            (Some(left), Some(right)) => Some(left + right),
            (left, right) => left.or(right),
        }
    }

    /// Sums the terms of two numbers per leaf over ranks that own the leaves of `owner`.
    fn over_ranks(terms: &[f64], ranks: u64, owner: impl Fn(u64) -> u64) -> Vec<f64> {
        let leaves = terms.len() as u64;
        let mut all = Vec::new();
        for rank in 0..ranks {
            let own: Vec<u64> = (0..leaves).filter(|&leaf| owner(leaf) == rank).collect();
            let mut nodes: Vec<_> = own.iter().map(|&index| LeafNode { level: 0, index }).collect();
            let of_leaf = |&leaf: &u64| [terms[crate::index(leaf)], -terms[crate::index(leaf)]];
            let mut sums: Vec<f64> = own.iter().flat_map(of_leaf).collect();
            merge_nodes(&mut nodes, &mut sums, 2, leaves, AbsentLeaves::Unknown);
            assert_eq!(nodes, complete_nodes(&own, leaves).unwrap());
            all.extend(nodes.into_iter().zip(sums.chunks(2).map(<[f64]>::to_vec)));
        }
        all.sort_by_key(|(node, _)| node.first_leaf());
        let mut nodes: Vec<_> = all.iter().map(|(node, _)| *node).collect();
        let mut sums: Vec<f64> = all.into_iter().flat_map(|(_, sums)| sums).collect();
        merge_nodes(&mut nodes, &mut sums, 2, leaves, AbsentLeaves::Empty);
        sums
    }

    #[test]
    fn sums_of_any_ranks_are_those_of_the_tree() {
        for leaves in 1..40 {
            // terms whose sum depends on the grouping
            let term = |leaf: u32| (f64::from(leaf) * 0.7).sin() * 10f64.powi(leaf as i32 % 17);
            let terms: Vec<f64> = (0..leaves).map(term).collect();
            let want = root(&terms, 6, 0).unwrap();
            for ranks in [1, 2, 3, 5] {
                let share = u64::from(leaves).div_ceil(ranks);
                for sums in [
                    over_ranks(&terms, ranks, |leaf| leaf / share),
                    over_ranks(&terms, ranks, |leaf| leaf % ranks),
                    over_ranks(&terms, ranks, |leaf| leaf * leaf % 7 % ranks),
                ] {
                    assert_eq!(sums, [want, -want], "{leaves} leaves, {ranks} ranks");
                }
            }
        }
        assert!(over_ranks(&[], 2, |_| 0).is_empty());
    }

    #[test]
    fn nodes_of_a_contiguous_shard_are_few() {
        let nodes = complete_nodes(&(5..21).collect::<Vec<_>>(), 21).unwrap();
        let want = [(0, 5), (1, 3), (3, 1), (4, 1)];
        assert_eq!(nodes, want.map(|(level, index)| LeafNode { level, index }));
    }
}
