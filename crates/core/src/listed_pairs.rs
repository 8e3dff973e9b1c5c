//! Visible pairs of key lists and one block of keys, in CSR form: every condition of the mask is
//! evaluated once, and kernels read indices alone.
//!
//! ```text
//! for each (batch row, head that differs, query):
//!     keys(query) = { index in the block of key j : j is listed and the pair is visible }
//! ```

use std::ops::Range;

use crate::{KeyIntervals, Result, Visibility, memory};

/// Visible pairs of a rank's queries and one block, `[batches, heads, queries]` lists.
///
/// Batch rows and heads that do not differ have one list.
#[derive(Debug, Default)]
pub struct ListedPairs {
    batches: usize,
    heads: usize,
    /// Query heads of each list.
    heads_of_list: usize,
    queries: usize,
    offsets: Vec<u64>,
    /// Indices of keys in the block, in the order of their row numbers.
    keys: Vec<u32>,
    /// Entry of each pair in the key lists.
    entries: Vec<u32>,
    lookup: Lookup,
}

const WHAT: &str = "visible pairs of key_lists";

impl ListedPairs {
    /// Computes the pairs of `visibility`, which has key lists, for `batch_rows` batch rows. Reuses
    /// its memory.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    pub fn refill(&mut self, visibility: &Visibility<'_>, batch_rows: usize) -> Result<()> {
        self.offsets.clear();
        self.keys.clear();
        self.entries.clear();
        let Some(listed) = visibility.key_lists else { return Ok(()) };
        let groups = listed.lists.shape()[1];
        let per_head = visibility.mask.per_head()
            || visibility.attention_mask.is_some_and(|mask| mask.shape()[1] > 1);
        self.batches = if visibility.per_batch() { batch_rows } else { batch_rows.min(1) };
        self.heads = if per_head { listed.q_heads } else { groups.min(listed.q_heads) };
        self.heads_of_list = listed.q_heads / self.heads.max(1);
        self.queries = visibility.queries.len();
        self.lookup.refill(visibility.keys.rows())?;
        let lists = self.batches * self.heads * self.queries;
        memory::reserve(WHAT, &mut self.offsets, lists + 1)?;
        self.offsets.push(0);
        for batch in 0..self.batches {
            for head in 0..self.heads {
                let head = head * self.heads_of_list;
                for q in 0..self.queries {
                    let entries = listed.lists.entries(batch, listed.group(head), q);
                    self.add(visibility, [batch, head, q], entries)?;
                    self.offsets.push(self.keys.len() as u64);
                }
            }
        }
        Ok(())
    }

    /// Adds the visible pairs of one list.
    fn add(
        &mut self,
        visibility: &Visibility<'_>,
        [batch, head, q]: [usize; 3],
        entries: Range<usize>,
    ) -> Result<()> {
        let lists = visibility.key_lists.map(|listed| listed.lists.keys()).unwrap_or_default();
        let keys = &lists[entries.clone()];
        let (near, first) = self.lookup.near(keys);
        memory::reserve(WHAT, &mut self.keys, near.len())?;
        memory::reserve(WHAT, &mut self.entries, near.len())?;
        let condition = Condition::of(visibility, batch, head, q);
        for (at, &row) in near.iter().enumerate() {
            let Some(key) = self.lookup.index(row) else { continue };
            if condition.is_none() || visibility.pair(batch, head, q, key) {
                self.keys.push(low_u32(key));
                self.entries.push(low_u32(entries.start + first + at));
            }
        }
        Ok(())
    }

    /// Marks the queries with a visible pair.
    pub fn mark_queries(&self, attends: &mut [bool]) {
        let lists = self.offsets.windows(2).enumerate().filter(|(_, pair)| pair[0] < pair[1]);
        lists.for_each(|(list, _)| attends[list % self.queries] = true);
    }

    /// Returns the number of lists' heads: those that differ.
    pub const fn heads(&self) -> usize {
        self.heads
    }

    /// Returns the number of visible pairs, each counted once for the heads and batch rows that do
    /// not differ.
    pub const fn len(&self) -> usize {
        self.keys.len()
    }

    /// Counts the visible pairs of all batch rows and query heads.
    pub fn count_all(&self, batch_rows: usize) -> u64 {
        let batches = batch_rows / self.batches.max(1);
        (self.keys.len() * self.heads_of_list * batches) as u64
    }

    /// Returns true if no pair is visible.
    pub const fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// Returns the heap bytes.
    pub const fn bytes(&self) -> usize {
        self.offsets.capacity() * 8
            + (self.keys.capacity() + self.entries.capacity()) * 4
            + self.lookup.bytes()
    }

    /// Returns the indices of the visible keys of all lists, one list after another.
    pub fn all_keys(&self) -> &[u32] {
        &self.keys
    }

    /// Returns the number of the list of a batch row, query head and query.
    pub const fn list(&self, batch: usize, head: usize, q: usize) -> usize {
        let batch = if self.batches <= 1 { 0 } else { batch };
        let heads_of_list = if self.heads_of_list == 0 { 1 } else { self.heads_of_list };
        (batch * self.heads + head / heads_of_list) * self.queries + q
    }

    /// Returns the pairs of one list.
    pub fn pairs(&self, list: usize) -> Range<usize> {
        match (self.offsets.get(list), self.offsets.get(list + 1)) {
            (Some(&start), Some(&end)) => crate::index(start)..crate::index(end),
            _ => 0..0,
        }
    }

    /// Returns the entries of the key lists that the pairs `pairs` come from.
    pub fn entries(&self, pairs: Range<usize>) -> &[u32] {
        &self.entries[pairs]
    }

    /// Counts the tiles of `side` queries × `side` keys with a visible pair, over all lists.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    pub fn count_tiles(&self, side: usize, keys: usize) -> Result<u64> {
        // the number of the last tile of queries that has marked each tile of keys
        let mut marks: Vec<u32> = memory::zeroed(WHAT, keys.div_ceil(side))?;
        let mut mark = 0;
        let mut tiles = 0;
        for plane in 0..self.batches * self.heads {
            for first in (0..self.queries).step_by(side) {
                mark += 1;
                let lists = plane * self.queries + first;
                let last = plane * self.queries + self.queries.min(first + side);
                let pairs = crate::index(self.offsets[lists])..crate::index(self.offsets[last]);
                for &key in &self.keys[pairs] {
                    let tile = &mut marks[key as usize / side];
                    tiles += u64::from(*tile != mark);
                    *tile = mark;
                }
            }
        }
        Ok(tiles)
    }
}

/// The pairs of [`ListedPairs`] by key: for each key of the block the queries that attend to it,
/// ascending, so that sums over queries have one order.
#[derive(Debug, Default)]
pub struct TransposedPairs {
    batches: usize,
    heads: usize,
    heads_of_list: usize,
    keys: usize,
    offsets: Vec<u64>,
    queries: Vec<u32>,
    /// Number of each pair in [`ListedPairs`].
    pairs: Vec<u32>,
}

impl TransposedPairs {
    /// Transposes `from`, whose block has `keys` keys, by counting, in O(pairs + keys). Reuses its
    /// memory.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    pub fn refill(&mut self, from: &ListedPairs, keys: usize) -> Result<()> {
        let ListedPairs { batches, heads, heads_of_list, .. } = *from;
        (self.batches, self.heads, self.heads_of_list, self.keys) =
            (batches, heads, heads_of_list, keys);
        let planes = batches * heads;
        self.offsets.clear();
        memory::reserve(WHAT, &mut self.offsets, planes * keys + 1)?;
        self.offsets.resize(planes * keys + 1, 0);
        for list in [&mut self.queries, &mut self.pairs] {
            list.clear();
            memory::reserve(WHAT, list, from.len())?;
            list.resize(from.len(), 0);
        }
        for plane in 0..planes {
            for list in plane * from.queries..(plane + 1) * from.queries {
                for &key in &from.keys[from.pairs(list)] {
                    self.offsets[plane * keys + key as usize + 1] += 1;
                }
            }
        }
        for at in 1..self.offsets.len() {
            self.offsets[at] += self.offsets[at - 1];
        }
        let mut next: Vec<u64> =
            memory::collect(WHAT, planes * keys, self.offsets.iter().copied().take(planes * keys))?;
        for plane in 0..planes {
            for q in 0..from.queries {
                for pair in from.pairs(plane * from.queries + q) {
                    let next = &mut next[plane * keys + from.keys[pair] as usize];
                    let at = crate::index(*next);
                    *next += 1;
                    self.queries[at] = low_u32(q);
                    self.pairs[at] = low_u32(pair);
                }
            }
        }
        Ok(())
    }

    /// Returns the queries of all keys, one key after another.
    pub fn all_queries(&self) -> &[u32] {
        &self.queries
    }

    /// Returns the numbers in [`ListedPairs`] of the pairs `pairs`.
    pub fn numbers(&self, pairs: Range<usize>) -> &[u32] {
        &self.pairs[pairs]
    }

    /// Returns the pairs of a key, by ascending query.
    pub fn pairs(&self, batch: usize, head: usize, key: usize) -> Range<usize> {
        let batch = if self.batches <= 1 { 0 } else { batch };
        let list = (batch * self.heads + head / self.heads_of_list.max(1)) * self.keys + key;
        match (self.offsets.get(list), self.offsets.get(list + 1)) {
            (Some(&start), Some(&end)) => crate::index(start)..crate::index(end),
            _ => 0..0,
        }
    }

    /// Returns the heap bytes.
    pub const fn bytes(&self) -> usize {
        self.offsets.capacity() * 8 + (self.queries.capacity() + self.pairs.capacity()) * 4
    }
}

/// Marks that the pairs of a query have to be tested one by one.
struct Condition;

impl Condition {
    /// Returns `None` if the query attends to every key of the block.
    fn of(visibility: &Visibility<'_>, batch: usize, head: usize, q: usize) -> Option<Self> {
        if visibility.attention_mask.is_some() || visibility.segment(batch, q).is_some() {
            return Some(Self);
        }
        if visibility.queries.segments(batch).is_some_and(|segments| segments[q] < 0) {
            return Some(Self);
        }
        let (intervals, is_bound) = visibility.intervals(batch, head, q);
        let is_everything = !is_bound && intervals.ranges() == KeyIntervals::everything().ranges();
        (!is_everything).then_some(Self)
    }
}

/// Index in a block of each of its row numbers.
#[derive(Debug)]
enum Lookup {
    /// Rows `first..first + len`.
    Consecutive { first: u64, len: usize },
    /// Row number and index, ascending.
    Sorted(Vec<(u32, u32)>),
}

impl Default for Lookup {
    fn default() -> Self {
        Self::Consecutive { first: 0, len: 0 }
    }
}

impl Lookup {
    fn refill(&mut self, rows: &[u64]) -> Result<()> {
        let first = rows.first().copied().unwrap_or(0);
        if rows.iter().enumerate().all(|(index, &row)| row == first + index as u64) {
            *self = Self::Consecutive { first, len: rows.len() };
            return Ok(());
        }
        let mut sorted = match std::mem::take(self) {
            Self::Sorted(sorted) => sorted,
            Self::Consecutive { .. } => Vec::new(),
        };
        sorted.clear();
        memory::reserve(WHAT, &mut sorted, rows.len())?;
        // no list has a row number beyond 32 bits
        let indexed = rows.iter().enumerate();
        sorted
            .extend(indexed.filter_map(|(at, &row)| Some((u32::try_from(row).ok()?, low_u32(at)))));
        if !sorted.is_sorted() {
            sorted.sort_unstable();
        }
        *self = Self::Sorted(sorted);
        Ok(())
    }

    /// Returns the part of an ascending list that may be in the block, and where it begins.
    fn near<'a>(&self, list: &'a [u32]) -> (&'a [u32], usize) {
        let (first, end) = match self {
            Self::Consecutive { first, len } => (*first, first + *len as u64),
            Self::Sorted(sorted) => match (sorted.first(), sorted.last()) {
                (Some(first), Some(last)) => (first.0.into(), u64::from(last.0) + 1),
                _ => (0, 0),
            },
        };
        let start = list.partition_point(|&key| u64::from(key) < first);
        let len = list[start..].partition_point(|&key| u64::from(key) < end);
        (&list[start..start + len], start)
    }

    fn index(&self, row: u32) -> Option<usize> {
        match self {
            Self::Consecutive { first, len } => {
                Some(crate::index(u64::from(row).checked_sub(*first)?)).filter(|at| at < len)
            }
            Self::Sorted(sorted) => {
                let at = sorted.binary_search_by_key(&row, |&(row, _)| row).ok()?;
                Some(sorted[at].1 as usize)
            }
        }
    }

    const fn bytes(&self) -> usize {
        match self {
            Self::Consecutive { .. } => 0,
            Self::Sorted(sorted) => sorted.capacity() * 8,
        }
    }
}

/// Narrows an index of a block or of the pairs of one rank.
#[expect(
    clippy::cast_possible_truncation,
    reason = "KeyLists::validate bounds the pairs of a rank, and the keys, by 32 bits"
)]
const fn low_u32(index: usize) -> u32 {
    index as u32
}
