//! Rows of the block that a rank attends to.

use std::sync::Arc;

use annulus_core::{Result, RowSet, Rows, Shard};

/// Row numbers, positions and segment ids of one block, one by one. They are overwritten when
/// another block is attended to, and kept for the same one: a ring of one rank has one block in all
/// passes, and a token over a long one would wait for the host to list its rows.
#[derive(Debug, Default)]
pub(super) struct BlockRows {
    rows: Rows,
    /// Shard that the rows are of; `None` before the first one and after an error.
    shard: Option<Arc<Shard>>,
    set: RowSet,
}

impl BlockRows {
    /// Lists the local rows `set` of a shard.
    pub(super) fn expand(&mut self, shard: &Arc<Shard>, set: &RowSet) -> Result<&Rows> {
        let is_same = self.shard.as_ref().is_some_and(|same| Arc::ptr_eq(same, shard));
        if !is_same || self.set != *set {
            self.shard = None;
            shard.expand(set, &mut self.rows)?;
            self.set.clone_from(set);
            self.shard = Some(Arc::clone(shard));
        }
        Ok(&self.rows)
    }
}

#[cfg(test)]
mod tests {
    use annulus_core::{Alignment, Batch, Dims, Layout, Side};

    use super::*;

    #[test]
    fn rows_are_listed_again_only_for_another_block() {
        let dims = Dims::new(1, 100, 1, 8);
        let shard = || {
            let batch = Batch::default();
            let layout = Layout::Contiguous;
            Arc::new(layout.local_shard(&dims, Alignment::TopLeft, Side::Kv, 0, 1, &batch))
        };
        let (first, other) = (shard(), shard());
        let (all, some) = (RowSet::all(100), RowSet::all(40));
        let mut rows = BlockRows::default();
        // with the number of the listing, which clones keep
        let mut list = |shard, set| format!("{:?}", rows.expand(shard, set).unwrap());
        let once = list(&first, &all);
        assert_eq!(list(&first, &all), once);
        // another set, another shard, and the first ones again
        assert_ne!(list(&first, &some), once);
        assert_ne!(list(&other, &all), once);
        assert_ne!(list(&first, &all), once);
    }
}
