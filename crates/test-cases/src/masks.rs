//! The masks of a case, and their predicate for the oracle, written down from the definitions in
//! `docs/semantics.md`.

use std::sync::Arc;

use annulus_core::{
    Fingerprint, KeyIntervals, Mask,
    mask::{Key, Query},
};

/// The mask conditions of a case besides those of its batch. A pair is visible if all hold.
#[derive(Debug, Clone, Default)]
pub struct Masks {
    /// Positions j' ≤ i'.
    pub causal: bool,
    /// i' − l ≤ j' ≤ i' + r; `None` is unbounded.
    pub window: Option<[Option<u64>; 2]>,
    /// Keys with j' below this number are exempt from the window.
    pub first_visible: u64,
    /// ⌊i'/C⌋ = ⌊j'/C⌋ and j' ≤ i'.
    pub chunk: Option<u64>,
    /// j' < n or j' ≤ i'.
    pub prefix: Option<u64>,
    /// Mask objects.
    pub objects: Vec<Arc<dyn Mask>>,
}

/// The predicate only. It has no intervals, so that the oracle does not share the code of subjects.
impl Mask for Masks {
    fn fingerprint(&self, into: Fingerprint) -> Fingerprint {
        // constant: fingerprints are compared between ranks, and the oracle runs on none
        into.text("conformance")
    }

    fn visible(&self, query: &Query, key: &Key) -> bool {
        let i = i128::from(query.position);
        let j = i128::from(key.position);
        let near = |[left, right]: [Option<u64>; 2]| {
            left.is_none_or(|left| i - i128::from(left) <= j)
                && right.is_none_or(|right| j <= i + i128::from(right))
        };
        let exempt = self.first_visible > 0 && j < i128::from(self.first_visible);
        let same_chunk =
            |size: u64| i.div_euclid(size.into()) == j.div_euclid(size.into()) && j <= i;
        (!self.causal || self.prefix.is_some() || j <= i)
            && (self.window.is_none_or(near) || exempt)
            && self.chunk.is_none_or(same_chunk)
            && self.prefix.is_none_or(|prefix| j < i128::from(prefix) || j <= i)
            && self.objects.iter().all(|mask| mask.visible(query, key))
    }

    fn intervals(&self, _: &Query) -> Option<KeyIntervals> {
        None
    }

    fn per_head(&self) -> bool {
        self.objects.iter().any(|mask| mask.per_head())
    }

    fn per_batch(&self) -> bool {
        self.objects.iter().any(|mask| mask.per_batch())
    }
}
