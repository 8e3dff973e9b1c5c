//! The gradient of the bias, summed where no two threads write the same element.
//!
//! Tasks that share an element of the bias (an axis of it has length 1) have one *owner* and are worked one after another by one thread, in a fixed
//! order; each owner has a part of the sums to itself.

use std::ops::Range;

use annulus_core::{Error, Result, Spec};
use ndarray::{ArrayViewMut4, s};

use crate::{
    logits::{Site, bias_column},
    real::Real,
    workspace::QueryBlock,
};

/// Who owns the biases that a task reads. Without a bias, or without a backward pass, every task owns itself.
pub(crate) const fn owner(spec: &Spec, backward: bool, batch: usize, kv_head: usize, block: usize, own: usize) -> usize {
    match spec.bias {
        Some([batches, heads, queries, _]) if backward => {
            let batch = if batches == 1 { 0 } else { batch };
            let kv_head = if heads == 1 { 0 } else { kv_head };
            let block = if queries == 1 { 0 } else { block };
            (block * spec.dims.batch + batch) * spec.dims.kv_heads + kv_head
        }
        _ => own,
    }
}

/// One owner's sums: `[heads][queries][keys]`, or 1 in place of any that is broadcast.
#[derive(Debug)]
pub(crate) struct Part<A> {
    batch: usize,
    heads: Range<usize>,
    queries: Range<usize>,
    keys: usize,
    sums: Vec<A>,
}

/// The gradient of this rank's bias.
#[derive(Debug)]
pub(crate) struct BiasGradient<A> {
    /// In the order of the owners.
    pub(crate) parts: Vec<Part<A>>,
}

impl<A: Real> BiasGradient<A> {
    /// For tasks sorted by owner; `None` without a bias.
    pub(crate) fn new(spec: &Spec, blocks: &[QueryBlock<A>]) -> Result<Option<Self>> {
        let Some([batches, heads, queries, keys]) = spec.bias else { return Ok(None) };
        let group = spec.dims.group();
        let mut parts = Vec::new();
        for tasks in blocks.chunk_by(|a, b| a.owner == b.owner) {
            let first = &tasks[0];
            let own_heads = if heads == 1 { 0..1 } else { first.kv_head * group..(first.kv_head + 1) * group };
            let own_queries = if queries == 1 { 0..1 } else { first.rows.clone() };
            let len = own_heads.len() * own_queries.len() * keys;
            let mut sums = Vec::new();
            let asked = len as u64 * size_of::<A>() as u64;
            sums.try_reserve_exact(len).map_err(|_| Error::OutOfMemory { asked, free: None })?;
            sums.resize(len, A::ZERO);
            let batch = if batches == 1 { 0 } else { first.batch };
            parts.push(Part { batch, heads: own_heads, queries: own_queries, keys, sums });
        }
        Ok(Some(Self { parts }))
    }

    pub(crate) fn clear(&mut self) {
        self.parts.iter_mut().for_each(|part| part.sums.fill(A::ZERO));
    }

    /// Writes the sums. Elements that no local query reads (there are none of them if there are no local queries) are 0.
    pub(crate) fn write(&self, mut into: ArrayViewMut4<'_, A>) {
        into.fill(A::ZERO);
        for part in &self.parts {
            let mut lines = part.sums.chunks_exact(part.keys.max(1));
            for head in part.heads.clone() {
                for (query, line) in part.queries.clone().zip(&mut lines) {
                    into.slice_mut(s![part.batch, head, query, ..]).iter_mut().zip(line).for_each(|(into, &sum)| *into = sum);
                }
            }
        }
    }
}

impl<A: Real> Part<A> {
    /// Adds what the visible rows of a tile of queries in lanes give; `key_rows` are the numbers of the block's keys.
    pub(crate) fn add(&mut self, site: &Site, rows: &Range<usize>, tile: &[A], key_rows: &[u64]) {
        let head = if self.heads.contains(&site.head) { site.head - self.heads.start } else { 0 };
        let (queries, keys) = site.offsets(rows);
        for query in queries {
            let q = site.queries.start + query;
            let place = if self.queries.contains(&q) { q - self.queries.start } else { 0 };
            let line = &mut self.sums[(head * self.queries.len() + place) * self.keys..][..self.keys];
            for key in keys.clone() {
                line[bias_column(self.keys, key_rows[site.keys.start + key])] += tile[site.element(query, key)];
            }
        }
    }
}
