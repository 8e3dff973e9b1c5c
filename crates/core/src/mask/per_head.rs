//! One mask a query head.

use super::{Key, Mask, Query, SharedMask};
use crate::{Dims, Error, Result, Spans};

/// Query head h goes by mask h.
#[derive(Debug, Clone)]
pub struct PerHead(pub Vec<SharedMask>);

impl Mask for PerHead {
    fn visible(&self, query: &Query, key: &Key) -> bool {
        self.0.get(query.head).is_some_and(|mask| mask.visible(query, key))
    }

    fn spans(&self, query: &Query) -> Option<Spans> {
        self.0.get(query.head).map_or(Some(Spans::nothing()), |mask| mask.spans(query))
    }

    fn bound(&self, query: &Query) -> Spans {
        self.0.get(query.head).map_or(Spans::nothing(), |mask| mask.bound(query))
    }

    fn per_head(&self) -> bool {
        true
    }

    fn per_batch(&self) -> bool {
        self.0.iter().any(|mask| mask.per_batch())
    }

    fn validate(&self, dims: &Dims) -> Result<()> {
        if self.0.len() != dims.q_heads {
            return Err(Error::invalid("mask", format!("{} masks", self.0.len()), format!("{}, one a query head", dims.q_heads)));
        }
        self.0.iter().try_for_each(|mask| mask.validate(dims))
    }
}
