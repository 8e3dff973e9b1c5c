//! The mask that hides nothing.

use super::{Key, Mask, Query};
use crate::Spans;

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
