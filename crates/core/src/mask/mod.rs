//! Who may see whom: pure predicates on positions and row numbers, closed under and/or, with a lowering to intervals.
//!
//! A mask has two views. [`Mask::visible`] is its meaning. [`Mask::spans`] is its *lowering*: for one query the key **positions** that
//! it sees, as at most a few half-open intervals, or `None` where it cannot be said so (dense masks, closures): then bits are made
//! lazily, a tile at a time, from `visible`. Kernels only ever see intervals, segment ids and bits, so a new mask is never a new kernel.

use std::sync::Arc;

use crate::{Dims, Result, Spans};

/// A query as a mask sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Query {
    /// Batch row.
    pub batch: usize,
    /// Query head.
    pub head: usize,
    /// Row number in the unsharded sequence: bias tensors, dense masks and dropout go by it.
    pub row: u64,
    /// Position i': what causal, windows and chunks compare.
    pub position: i64,
}

/// A key as a mask sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Key {
    /// Row number in the unsharded sequence.
    pub row: u64,
    /// Position j'.
    pub position: i64,
}

/// A pure predicate: does this query see this key?
///
/// `Debug` must tell all that the answer depends on: ranks compare it to agree that they run the same mask.
pub trait Mask: std::fmt::Debug + Send + Sync {
    /// Whether `query` sees `key`.
    fn visible(&self, query: &Query, key: &Key) -> bool;

    /// The key positions that `query` sees, exactly; `None` if they are no few intervals of positions.
    fn spans(&self, query: &Query) -> Option<Spans>;

    /// Whether the answer depends on the query's head.
    fn per_head(&self) -> bool {
        false
    }

    /// Whether the answer depends on the batch row other than through positions.
    fn per_batch(&self) -> bool {
        false
    }

    /// Checks the mask's own numbers.
    ///
    /// # Errors
    /// [`crate::Error::InvalidArgument`] naming the field.
    fn validate(&self, dims: &Dims) -> Result<()> {
        let _unused_by_masks_without_numbers = dims;
        Ok(())
    }
}

/// Every query sees every key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Everything;

impl Mask for Everything {
    fn visible(&self, _: &Query, _: &Key) -> bool {
        true
    }

    fn spans(&self, _: &Query) -> Option<Spans> {
        Some(Spans::everything())
    }
}

/// A shared mask.
pub type SharedMask = Arc<dyn Mask>;
