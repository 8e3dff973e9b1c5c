//! i' + offset − left ≤ j' ≤ i' + offset + right, and the first keys always.

use super::{Key, Mask, Query, clip};
use crate::{Fingerprint, KeyIntervals};

/// A query sees the keys near it, both ends included: i' + offset − left ≤ j' ≤ i' + offset + right. A side that is `None` is unbounded.
///
/// # Source
/// Beltagy et al. 2020 (window); Xiao et al. 2023 (first keys stay visible).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Window {
    /// How far back; `None` = to the first key.
    pub left: Option<u64>,
    /// How far ahead; `None` = to the last key.
    pub right: Option<u64>,
    /// Keys at positions j' < `first_visible` are exempt from this window (from nothing else); 0 exempts none.
    pub first_visible: u64,
    /// Shifts the window.
    pub offset: i64,
}

impl Window {
    /// The window (left, right), not shifted, without exempt keys.
    pub const fn new(left: Option<u64>, right: Option<u64>) -> Self {
        Self { left, right, first_visible: 0, offset: 0 }
    }

    /// First and last position within the window proper, in 128 bits: any offset and any side fit.
    fn ends(&self, query: &Query) -> (i128, i128) {
        let centre = i128::from(query.position) + i128::from(self.offset);
        let first = self.left.map_or(i128::from(i64::MIN), |left| centre - i128::from(left));
        let last = self.right.map_or(i128::from(i64::MAX), |right| centre + i128::from(right));
        (first, last)
    }

    /// The position before which all keys are exempt; `i64::MIN` if none is. Not 0, or negative positions would be exempt.
    fn exempt_before(&self) -> i64 {
        if self.first_visible == 0 { i64::MIN } else { clip(self.first_visible.into()) }
    }
}

impl Mask for Window {
    fn fingerprint(&self, into: Fingerprint) -> Fingerprint {
        let into = into.text("window").optional(self.left).optional(self.right);
        into.number(self.first_visible).number(self.offset.cast_unsigned())
    }

    fn visible(&self, query: &Query, key: &Key) -> bool {
        let (first, last) = self.ends(query);
        (first..=last).contains(&i128::from(key.position)) || key.position < self.exempt_before()
    }

    fn intervals(&self, query: &Query) -> Option<KeyIntervals> {
        let (first, last) = self.ends(query);
        let window = KeyIntervals::one(clip(first), clip(last + 1));
        if self.first_visible == 0 {
            Some(window)
        } else {
            window.or(&KeyIntervals::one(i64::MIN, self.exempt_before()))
        }
    }
}
