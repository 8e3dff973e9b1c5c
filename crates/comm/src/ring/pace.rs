//! When the groups of a pass are posted (`blocks.rs`).

use super::plan::Agreed;

/// When groups are posted.
#[derive(Clone, Copy)]
pub(super) struct Pace {
    /// Steps by which a receive is posted ahead, at least 1.
    pub(super) ahead: usize,
    /// True if a group is posted whole, and after those before it.
    pub(super) whole_groups: bool,
    /// True if the route sends from the local block in later steps than step 0.
    pub(super) keeps_local: bool,
}

impl Pace {
    /// Returns the pace of a pass whose only messages are blocks.
    pub(super) fn new(agreed: &Agreed) -> Self {
        let &Agreed { receive_ahead: ahead, groups_in_order: whole_groups, .. } = agreed;
        let keeps_local = agreed.route.keeps_local(agreed.order.ranks().len());
        Self { ahead, whole_groups, keeps_local }
    }

    /// Returns the pace of a pass that also sends gradients: their groups follow those of blocks,
    /// so where the order counts, none of these comes early.
    pub(super) const fn with_gradients(self) -> Self {
        Self { ahead: if self.whole_groups { 1 } else { self.ahead }, ..self }
    }

    /// Returns true if no step, but buffers alone, bound how far ahead groups are posted.
    pub(super) const fn is_unbounded(self) -> bool {
        self.keeps_local && !self.whole_groups
    }
}
