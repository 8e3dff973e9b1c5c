//! Dense mask of the spec: one bit per pair of row numbers.

use std::sync::Arc;

use super::{Key, Mask, Query};
use crate::{DenseMask, Dims, Fingerprint, KeyIntervals, Result};

/// A dense mask of the spec. Every rank has all its query and key rows, in contrast to
/// [`crate::Batch::attention_mask`].
///
/// It is indexed by row numbers instead of positions, and broadcast over batch rows or heads if it
/// has one of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Dense(pub Arc<DenseMask>);

impl Mask for Dense {
    fn fingerprint(&self, into: Fingerprint) -> Fingerprint {
        self.0.fingerprint(into.text("dense"))
    }

    fn visible(&self, query: &Query, key: &Key) -> bool {
        self.0.visible(query.batch, query.head, crate::index(query.row), crate::index(key.row))
    }

    fn intervals(&self, _: &Query) -> Option<KeyIntervals> {
        None
    }

    fn per_head(&self) -> bool {
        self.0.shape()[1] > 1
    }

    fn per_batch(&self) -> bool {
        self.0.shape()[0] > 1
    }

    fn validate(&self, dims: &Dims) -> Result<()> {
        self.0.validate("mask", dims, dims.q_len)
    }
}
