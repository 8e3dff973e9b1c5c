//! Conjunctions and disjunctions of masks, and a mask for each query head.

use std::{any::Any, sync::Arc};

use super::{Band, Everything, Key, Mask, Query, SharedMask};
use crate::{Dims, Error, Fingerprint, KeyIntervals, Result};

/// Conjunction: a pair is visible if it is visible under every mask. Of no masks: every pair.
#[derive(Debug, Clone)]
pub struct And(pub Vec<SharedMask>);

/// Disjunction: a pair is visible if it is visible under some mask. Of no masks: no pair.
#[derive(Debug, Clone)]
pub struct Or(pub Vec<SharedMask>);

/// Returns the conjunction of two masks. Nested [`And`]s are merged into one, and [`Everything`] is
/// omitted.
pub fn and(a: SharedMask, b: SharedMask) -> SharedMask {
    let mut parts = Vec::new();
    for mask in [a, b] {
        match as_any(&mask).downcast_ref::<And>() {
            Some(And(inner)) => parts.extend(inner.iter().cloned()),
            None if as_any(&mask).is::<Everything>() => {}
            None => parts.push(mask),
        }
    }
    match parts.pop() {
        None => Arc::new(Everything),
        Some(only) if parts.is_empty() => only,
        Some(last) => {
            parts.push(last);
            Arc::new(And(parts))
        }
    }
}

/// Returns the disjunction of two masks. Nested [`Or`]s are merged into one. If a mask is
/// [`Everything`], so is the result.
pub fn or(a: SharedMask, b: SharedMask) -> SharedMask {
    let mut parts = Vec::new();
    for mask in [a, b] {
        match as_any(&mask).downcast_ref::<Or>() {
            Some(Or(inner)) => parts.extend(inner.iter().cloned()),
            None if as_any(&mask).is::<Everything>() => return mask,
            None => parts.push(mask),
        }
    }
    match parts.pop() {
        Some(only) if parts.is_empty() => only,
        last => {
            parts.extend(last);
            Arc::new(Or(parts))
        }
    }
}

fn as_any(mask: &SharedMask) -> &dyn Any {
    &**mask
}

impl Mask for And {
    fn fingerprint(&self, into: Fingerprint) -> Fingerprint {
        let into = into.text("and").number(self.0.len() as u64);
        self.0.iter().fold(into, |into, mask| mask.fingerprint(into))
    }

    fn visible(&self, query: &Query, key: &Key) -> bool {
        self.0.iter().all(|mask| mask.visible(query, key))
    }

    fn intervals(&self, query: &Query) -> Option<KeyIntervals> {
        let mut all = Some(KeyIntervals::everything());
        for mask in &self.0 {
            let part = mask.intervals(query);
            // the empty mask is absorbing, also beside a mask without intervals
            if part.as_ref().is_some_and(|part| part.ranges().is_empty()) {
                return part;
            }
            all = all.and_then(|all| Some(all.and(&part?)));
        }
        all
    }

    fn bound(&self, query: &Query) -> KeyIntervals {
        let parts = self.0.iter().map(|mask| mask.bound(query));
        parts.fold(KeyIntervals::everything(), |all, part| all.and(&part))
    }

    fn band(&self, batch: usize, head: usize) -> Option<Band> {
        let mut bands = self.0.iter().map(|mask| mask.band(batch, head));
        bands.try_fold(Band::everything(), |all, band| all.and(band?))
    }

    fn per_head(&self) -> bool {
        self.0.iter().any(|mask| mask.per_head())
    }

    fn per_batch(&self) -> bool {
        self.0.iter().any(|mask| mask.per_batch())
    }

    fn validate(&self, dims: &Dims) -> Result<()> {
        self.0.iter().try_for_each(|mask| mask.validate(dims))
    }
}

impl Mask for Or {
    fn fingerprint(&self, into: Fingerprint) -> Fingerprint {
        let into = into.text("or").number(self.0.len() as u64);
        self.0.iter().fold(into, |into, mask| mask.fingerprint(into))
    }

    fn visible(&self, query: &Query, key: &Key) -> bool {
        self.0.iter().any(|mask| mask.visible(query, key))
    }

    fn intervals(&self, query: &Query) -> Option<KeyIntervals> {
        let mut any = Some(KeyIntervals::nothing());
        for mask in &self.0 {
            let part = mask.intervals(query);
            // the full mask is absorbing, also beside a mask without intervals
            if part.as_ref().is_some_and(|part| *part == KeyIntervals::everything()) {
                return part;
            }
            any = any.and_then(|any| Some(any.or(&part?)));
        }
        any
    }

    fn bound(&self, query: &Query) -> KeyIntervals {
        self.0.iter().fold(KeyIntervals::nothing(), |any, mask| any.or(&mask.bound(query)))
    }

    fn per_head(&self) -> bool {
        self.0.iter().any(|mask| mask.per_head())
    }

    fn per_batch(&self) -> bool {
        self.0.iter().any(|mask| mask.per_batch())
    }

    fn validate(&self, dims: &Dims) -> Result<()> {
        self.0.iter().try_for_each(|mask| mask.validate(dims))
    }
}

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
