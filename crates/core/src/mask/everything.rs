//! The mask of full attention.

use super::{Band, Key, Mask, Query};
use crate::{Fingerprint, KeyIntervals};

/// Full attention: every query attends to every key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Everything;

impl Mask for Everything {
    fn fingerprint(&self, into: Fingerprint) -> Fingerprint {
        into.text("everything")
    }

    fn visible(&self, _: &Query, _: &Key) -> bool {
        true
    }

    fn intervals(&self, _: &Query) -> Option<KeyIntervals> {
        Some(KeyIntervals::everything())
    }

    fn band(&self, _: usize, _: usize) -> Option<Band> {
        Some(Band::everything())
    }
}
