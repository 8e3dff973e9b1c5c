//! A mask for each query head.

use super::{Band, Key, Mask, Query, SharedMask};
use crate::{Dims, Error, Fingerprint, KeyIntervals, Result};

/// A list of masks, one per query head: head h uses mask h.
#[derive(Debug, Clone)]
pub struct PerHead(pub Vec<SharedMask>);

impl Mask for PerHead {
    fn fingerprint(&self, into: Fingerprint) -> Fingerprint {
        let into = into.text("per head").number(self.0.len() as u64);
        self.0.iter().fold(into, |into, mask| mask.fingerprint(into))
    }

    fn visible(&self, query: &Query, key: &Key) -> bool {
        self.0.get(query.head).is_some_and(|mask| mask.visible(query, key))
    }

    fn intervals(&self, query: &Query) -> Option<KeyIntervals> {
        self.0.get(query.head).map_or(Some(KeyIntervals::nothing()), |mask| mask.intervals(query))
    }

    fn bound(&self, query: &Query) -> KeyIntervals {
        self.0.get(query.head).map_or(KeyIntervals::nothing(), |mask| mask.bound(query))
    }

    fn band(&self, batch: usize, head: usize) -> Option<Band> {
        self.0.get(head)?.band(batch, head)
    }

    fn per_head(&self) -> bool {
        true
    }

    fn per_batch(&self) -> bool {
        self.0.iter().any(|mask| mask.per_batch())
    }

    fn validate(&self, dims: &Dims) -> Result<()> {
        if self.0.len() != dims.q_heads {
            return Err(Error::invalid(
                "mask",
                format!("{} masks", self.0.len()),
                format!("{}, one per query head", dims.q_heads),
            ));
        }
        self.0.iter().try_for_each(|mask| mask.validate(dims))
    }
}
