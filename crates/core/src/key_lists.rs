//! Key lists: the keys of each query in CSR form, `O(listed pairs)` memory.
//!
//! ```text
//! keys of query q = keys[offsets[q] .. offsets[q + 1]]          ascending, each key once
//! ```
//! A pair is visible if it is listed **and** every other condition of the mask holds. The queries
//! are a rank's own rows in local order, keys are row numbers of the whole sequence.
//!
//! # Source
//! The graph of a graph transformer, the neighbourhoods of NVIDIA torch-harmonics, and the selected
//! keys of NSA (Yuan et al. 2025), section 3, are lists of this form.

use std::ops::Range;

use crate::{Dims, Error, Result, memory};

/// Keys that each query attends to, at most: `[b|1, groups, q rows]` lists.
///
/// Query head h uses the lists of group h · groups / q_heads.
#[derive(Clone, Default, PartialEq)]
pub struct KeyLists {
    batches: usize,
    groups: usize,
    queries: usize,
    /// `[b|1 · groups · q rows + 1]`.
    offsets: Vec<u64>,
    keys: Vec<u32>,
    /// One additive number for each listed pair.
    bias: Option<Vec<f64>>,
}

/// Name of the argument in errors.
const NAME: &str = "key_lists";

impl KeyLists {
    /// Creates lists of the keys `keys[offsets[q]..offsets[q + 1]]` of each query `q`, the same for
    /// all batch rows and heads.
    ///
    /// # Errors
    /// As [`KeyLists::by_group`].
    pub fn new(offsets: Vec<u64>, keys: Vec<u32>) -> Result<Self> {
        Self::by_group([1, 1], offsets, keys)
    }

    /// Creates lists that differ between batch rows or groups of query heads.
    ///
    /// # Shapes
    /// `offsets` `[batches · groups · q rows + 1]`, from 0 to the length of `keys`. `batches` is b
    /// or 1, `groups` divides q_heads.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] naming the row and the entry of a key that is not larger than the
    /// one before it in its list, or the row of a bad offset.
    pub fn by_group(
        [batches, groups]: [usize; 2],
        offsets: Vec<u64>,
        keys: Vec<u32>,
    ) -> Result<Self> {
        let lists = offsets.len().saturating_sub(1);
        let planes = batches * groups;
        if offsets.is_empty() || planes == 0 || !lists.is_multiple_of(planes) {
            let want = format!("a multiple of {planes} lists, and one offset more");
            return Err(Error::invalid(NAME, format!("{} offsets", offsets.len()), want));
        }
        let made = Self { batches, groups, queries: lists / planes, offsets, keys, bias: None };
        made.check_offsets(made.keys.len())?;
        made.check_order()?;
        Ok(made)
    }

    /// Creates lists from the numbers of another language: as [`KeyLists::by_group`], or with `ends`
    /// from the ranges `keys[at]..ends[at]` of the entries `at`, ascending and not empty. Ranges take
    /// the memory of their keys.
    ///
    /// # Errors
    /// As [`KeyLists::by_group`], also for a number that no row can have; [`Error::OutOfMemory`].
    pub fn from_arrays(
        [batches, groups]: [usize; 2],
        offsets: &[i64],
        keys: &[i64],
        ends: Option<&[i64]>,
    ) -> Result<Self> {
        let unsigned = |number: i64| u64::try_from(number).unwrap_or(u64::MAX);
        let entries = memory::collect(NAME, offsets.len(), offsets.iter().copied().map(unsigned))?;
        let queries = offsets.len().saturating_sub(1) / (batches * groups).max(1);
        let named = Self { batches, groups, queries, offsets: entries, ..Self::default() };
        let wrong = |at: usize, got: String, want: &str| {
            let list = named.offsets.partition_point(|&offset| offset <= at as u64);
            let list = list.saturating_sub(1);
            let first = named.offsets.get(list).map_or(0, |&first| crate::index(first));
            let entry = at.saturating_sub(first);
            Error::invalid(NAME, format!("{}, entry {entry}: {got}", named.row(list)), want)
        };
        let row = |at: usize, key: i64| {
            u32::try_from(key).map_err(|_| wrong(at, format!("key {key}"), "keys from 0"))
        };
        let Some(ends) = ends else {
            let mut all = memory::list(NAME, keys.len())?;
            for (at, &key) in keys.iter().enumerate() {
                all.push(row(at, key)?);
            }
            return Self::by_group([batches, groups], named.offsets, all);
        };
        if ends.len() != keys.len() {
            let got = format!("{} ends of {} ranges", ends.len(), keys.len());
            return Err(Error::invalid(NAME, got, "one end for each range"));
        }
        named.check_offsets(keys.len())?;
        let mut ranges: Vec<Range<u32>> = memory::list(NAME, keys.len())?;
        for (at, (&start, &end)) in keys.iter().zip(ends).enumerate() {
            let range = row(at, start)?..row(at, end)?;
            if range.is_empty() {
                return Err(wrong(at, format!("keys {start}..{end}"), "ranges of some keys"));
            }
            let is_first = named.offsets.binary_search(&(at as u64)).is_ok();
            if let Some(before) =
                ranges.last().filter(|before| !is_first && before.end > range.start)
            {
                let got = format!("keys {start}..{end} after {}..{}", before.start, before.end);
                return Err(wrong(at, got, "ascending ranges, each key once"));
            }
            ranges.push(range);
        }
        let total: u64 = ranges.iter().map(|range| range.len() as u64).sum();
        memory::check_available(NAME, total.saturating_mul(4))?;
        let mut all = memory::list(NAME, crate::index(total))?;
        let mut lowered = memory::list(NAME, named.offsets.len())?;
        lowered.push(0);
        for list in 0..named.offsets.len() - 1 {
            ranges[named.span(list)].iter().for_each(|range| all.extend(range.clone()));
            lowered.push(all.len() as u64);
        }
        Self::by_group([batches, groups], lowered, all)
    }

    /// Creates lists of `[q_len, kv_len]` pairs from selected blocks of keys: each query of block
    /// number n, of `q_block` queries, attends to the blocks `blocks[offsets[n]..offsets[n + 1]]`
    /// of `kv_block` keys. The last block of each side may be short.
    ///
    /// # Shapes
    /// `offsets` `[batches · groups · ⌈q_len / q_block⌉ + 1]`.
    ///
    /// # Errors
    /// As [`KeyLists::by_group`]; rows and entries are those of the blocks.
    pub fn from_blocks(
        planes: [usize; 2],
        [q_len, kv_len]: [usize; 2],
        [q_block, kv_block]: [usize; 2],
        offsets: Vec<u64>,
        blocks: Vec<u32>,
    ) -> Result<Self> {
        if q_block == 0 || kv_block == 0 {
            let got = format!("blocks of {q_block} × {kv_block}");
            return Err(Error::invalid(NAME, got, "blocks of some rows"));
        }
        let selected = Self::by_group(planes, offsets, blocks)?;
        let [q_blocks, kv_blocks] = [q_len.div_ceil(q_block), kv_len.div_ceil(kv_block)];
        let dims = Dims { kv_len: kv_blocks, ..Dims::new(planes[0], q_blocks, planes[1], 1) };
        selected.validate(&dims, q_blocks)?;
        let mut offsets = vec![0];
        let [mut starts, mut ends] = [Vec::new(), Vec::new()];
        for plane in 0..planes[0] * planes[1] {
            for q in 0..q_len {
                let entries = selected.span(plane * q_blocks + q / q_block);
                for &block in &selected.keys[entries] {
                    let start = block as usize * kv_block;
                    starts.push(start as i64);
                    ends.push(kv_len.min(start + kv_block) as i64);
                }
                offsets.push(starts.len() as i64);
            }
        }
        Self::from_arrays(planes, &offsets, &starts, Some(&ends))
    }

    /// Returns one list of offsets from `[planes, queries + 1]` offsets, whose planes follow each
    /// other.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] of planes with a gap.
    pub fn joined_offsets<'a>(planes: impl IntoIterator<Item = &'a [i64]>) -> Result<Vec<i64>> {
        let mut all: Vec<i64> = Vec::new();
        for plane in planes {
            let first = plane.first().copied();
            if all.last().is_some_and(|&last| Some(last) != first) {
                let want = "groups whose lists follow each other";
                return Err(Error::invalid(NAME, "offsets with gaps", want));
            }
            let skipped = usize::from(!all.is_empty());
            memory::reserve(NAME, &mut all, plane.len())?;
            all.extend(plane.iter().skip(skipped));
        }
        Ok(all)
    }

    fn check_offsets(&self, entries: usize) -> Result<()> {
        let offsets = &self.offsets;
        if offsets.first() != Some(&0) || offsets.last() != Some(&(entries as u64)) {
            let [first, last] =
                [offsets.first(), offsets.last()].map(|of| of.copied().unwrap_or(0));
            let want = format!("offsets from 0 to {entries}, the number of indices");
            return Err(Error::invalid(NAME, format!("offsets from {first} to {last}"), want));
        }
        match offsets.windows(2).position(|pair| pair[0] > pair[1]) {
            Some(at) => {
                let got =
                    format!("{}: offset {} after {}", self.row(at), offsets[at + 1], offsets[at]);
                Err(Error::invalid(NAME, got, "ascending offsets"))
            }
            None => Ok(()),
        }
    }

    fn check_order(&self) -> Result<()> {
        for list in 0..self.offsets.len() - 1 {
            let keys = &self.keys[self.span(list)];
            if keys.is_sorted_by(|a, b| a < b) {
                continue;
            }
            let at = keys.windows(2).position(|pair| pair[0] >= pair[1]).unwrap_or(0);
            let [before, key] = [keys[at], keys[at + 1]];
            let got = format!("{}, entry {}: key {key} after key {before}", self.row(list), at + 1);
            return Err(Error::invalid(NAME, got, "ascending keys, each once"));
        }
        Ok(())
    }

    /// Names list number `list`.
    fn row(&self, list: usize) -> String {
        let row = list % self.queries.max(1);
        let plane = list / self.queries.max(1);
        match (self.batches, self.groups) {
            (1, 1) => format!("row {row}"),
            (1, _) => format!("row {row} of group {plane}"),
            _ => {
                let [batch, group] = [plane / self.groups, plane % self.groups];
                format!("row {row} of batch row {batch}, group {group}")
            }
        }
    }

    /// Adds `bias[entry]` to the score of each listed pair, in the order of the entries.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for another number of elements.
    pub fn with_bias(self, bias: Vec<f64>) -> Result<Self> {
        if bias.len() != self.keys.len() {
            let want = format!("{}, one for each listed pair", self.keys.len());
            return Err(Error::invalid("key_list_bias", format!("{} numbers", bias.len()), want));
        }
        if let Some(entry) = bias.iter().position(|number| !number.is_finite()) {
            let list = self.offsets.partition_point(|&offset| offset <= entry as u64) - 1;
            let within = entry - self.span(list).start;
            let got = format!("{}, entry {within}: {}", self.row(list), bias[entry]);
            return Err(Error::invalid("key_list_bias", got, "finite numbers"));
        }
        Ok(Self { bias: Some(bias), ..self })
    }

    /// Returns `[b|1, groups, q rows]`.
    pub const fn shape(&self) -> [usize; 3] {
        [self.batches, self.groups, self.queries]
    }

    /// Returns the keys of all lists, one list after another.
    pub fn keys(&self) -> &[u32] {
        &self.keys
    }

    /// Returns the additive number of each listed pair.
    pub fn bias(&self) -> Option<&[f64]> {
        self.bias.as_deref()
    }

    /// Returns the number of listed pairs.
    pub const fn len(&self) -> usize {
        self.keys.len()
    }

    /// Returns true if no pair is listed.
    pub const fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// Returns the entries of the list number `list`, counted over batch rows, groups and queries.
    fn span(&self, list: usize) -> Range<usize> {
        crate::index(self.offsets[list])..crate::index(self.offsets[list + 1])
    }

    /// Returns the entries of one query; none if there is no such row. `batch` is broadcast.
    pub fn entries(&self, batch: usize, group: usize, q: usize) -> Range<usize> {
        let batch = if self.batches == 1 { 0 } else { batch };
        if batch >= self.batches || group >= self.groups || q >= self.queries {
            return 0..0;
        }
        self.span((batch * self.groups + group) * self.queries + q)
    }

    /// Returns the entries of all queries of a group. `batch` is broadcast.
    pub fn plane(&self, batch: usize, group: usize) -> Range<usize> {
        let last = self.queries.saturating_sub(1);
        self.entries(batch, group, 0).start..self.entries(batch, group, last).end
    }

    /// Checks the lists of a rank with `q_rows` queries.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for another shape, and naming the row and the entry of a key that
    /// does not exist.
    pub fn validate(&self, dims: &Dims, q_rows: usize) -> Result<()> {
        let Self { batches, groups, queries, .. } = *self;
        let fits = (batches == 1 || batches == dims.batch)
            && groups > 0
            && dims.q_heads.is_multiple_of(groups)
            && queries == q_rows;
        if !fits {
            let got = format!("lists of [{batches}, {groups}, {queries}]");
            let want = format!("[{}|1, a divisor of {}, {q_rows}]", dims.batch, dims.q_heads);
            return Err(Error::invalid(NAME, got, want));
        }
        if u32::try_from(self.keys.len().max(dims.kv_len)).is_err() {
            let got = format!("{} pairs of {} keys", self.keys.len(), dims.kv_len);
            return Err(Error::invalid(NAME, got, "less than 2³² pairs a rank, and keys"));
        }
        // a list ascends, so that its last key is its largest
        let is_outside = |list: usize| {
            self.keys[self.span(list)].last().is_some_and(|&key| key as usize >= dims.kv_len)
        };
        let Some(list) = (0..self.offsets.len() - 1).find(|&list| is_outside(list)) else {
            return Ok(());
        };
        let keys = &self.keys[self.span(list)];
        let entry = keys.partition_point(|&key| (key as usize) < dims.kv_len);
        let got = format!("{}, entry {entry}: key {}", self.row(list), keys[entry]);
        Err(Error::invalid(NAME, got, format!("keys below {}", dims.kv_len)))
    }

    /// Returns the lists of the query rows `rows`, in that order. A row that does not exist has an
    /// empty list.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub fn select_queries(&self, rows: &[u64]) -> Result<Self> {
        self.restrict(rows, |_| true)
    }

    /// Returns [`KeyLists::select_queries`] with the keys that `keeps` accepts.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub fn restrict(&self, rows: &[u64], keeps: impl Fn(u32) -> bool) -> Result<Self> {
        let planes = [self.batches, self.groups];
        let mut selected = Self::without_lists(planes, rows.len(), self.bias.is_some())?;
        for plane in 0..planes[0] * planes[1] {
            for &q in rows {
                let list = self.entries(plane / planes[1], plane % planes[1], crate::index(q));
                selected.append(self, list, &keeps)?;
            }
        }
        Ok(selected)
    }

    /// Creates lists of `queries` queries, which [`KeyLists::append`] completes.
    fn without_lists(
        [batches, groups]: [usize; 2],
        queries: usize,
        has_bias: bool,
    ) -> Result<Self> {
        let mut offsets = memory::list(NAME, batches * groups * queries + 1)?;
        offsets.push(0);
        let bias = has_bias.then(Vec::new);
        Ok(Self { batches, groups, queries, offsets, keys: Vec::new(), bias })
    }

    /// Appends a list with the keys of `entries` of `from` that `keeps` accepts.
    fn append(
        &mut self,
        from: &Self,
        entries: Range<usize>,
        keeps: impl Fn(u32) -> bool,
    ) -> Result<()> {
        let kept = |&entry: &usize| keeps(from.keys[entry]);
        memory::reserve(NAME, &mut self.keys, entries.len())?;
        self.keys.extend(entries.clone().filter(kept).map(|entry| from.keys[entry]));
        if let (Some(bias), Some(from)) = (&mut self.bias, &from.bias) {
            memory::reserve(NAME, bias, entries.len())?;
            bias.extend(entries.filter(kept).map(|entry| from[entry]));
        }
        self.offsets.push(self.keys.len() as u64);
        Ok(())
    }

    /// Returns the number of keys of each list, one list after another.
    pub fn counts(&self) -> impl Iterator<Item = u64> + '_ {
        self.offsets.windows(2).map(|pair| pair[1] - pair[0])
    }
}

impl std::fmt::Debug for KeyLists {
    /// Writes the shape, the number of pairs, and whether there is a bias.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let bias = if self.bias.is_some() { " with bias" } else { "" };
        write!(f, "KeyLists({:?}, {} pairs{bias})", self.shape(), self.len())
    }
}

/// Lists of queries of other ranks, in a two-pass backward: of their keys, those of this rank.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ReceivedLists {
    /// Row numbers of the queries, ascending.
    rows: Vec<u64>,
    lists: KeyLists,
}

impl ReceivedLists {
    /// Merges lists of one shape, each with the row numbers of its queries, all different.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub fn merge([batches, groups]: [usize; 2], parts: &[(Vec<u64>, KeyLists)]) -> Result<Self> {
        let count = parts.iter().map(|(rows, _)| rows.len()).sum();
        let numbered = parts.iter().enumerate().flat_map(|(part, (rows, _))| {
            rows.iter().enumerate().map(move |(q, &row)| (row, part, q))
        });
        let mut order = memory::collect(NAME, count, numbered)?;
        order.sort_unstable();
        let rows = memory::collect(NAME, count, order.iter().map(|&(row, ..)| row))?;
        let has_bias = parts.iter().any(|(_, lists)| lists.bias.is_some());
        let mut lists = KeyLists::without_lists([batches, groups], count, has_bias)?;
        for plane in 0..batches * groups {
            for &(_, part, q) in &order {
                let from = &parts[part].1;
                lists.append(from, from.entries(plane / groups, plane % groups, q), |_| true)?;
            }
        }
        Ok(Self { rows, lists })
    }

    /// Returns the lists of the queries with the row numbers `rows`, in that order; a query that no
    /// rank sent has an empty list. Reuses the memory of `index`.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub fn of_rows<'a>(
        &'a self,
        rows: &[u64],
        q_heads: usize,
        index: &'a mut Vec<usize>,
    ) -> Result<ListedKeys<'a>> {
        index.clear();
        memory::reserve(NAME, index, rows.len())?;
        index.extend(rows.iter().map(|row| self.rows.binary_search(row).unwrap_or(usize::MAX)));
        Ok(ListedKeys { lists: &self.lists, q_heads, index: Some(index) })
    }
}

/// Key lists of the queries of a pass, by query head.
#[derive(Debug, Clone, Copy)]
pub struct ListedKeys<'a> {
    /// The lists.
    pub lists: &'a KeyLists,
    /// Query heads of the attention, which the groups of the lists divide.
    pub q_heads: usize,
    /// Number in the lists of each query of the pass, unless they are the same.
    index: Option<&'a [usize]>,
}

impl<'a> ListedKeys<'a> {
    /// Creates the lists of a pass over the queries of `lists`.
    pub const fn new(lists: &'a KeyLists, q_heads: usize) -> Self {
        Self { lists, q_heads, index: None }
    }

    /// Returns the group of a query head.
    pub const fn group(&self, head: usize) -> usize {
        match (head * self.lists.groups).checked_div(self.q_heads) {
            Some(group) => group,
            None => 0,
        }
    }

    /// Returns the entries of one query in the lists.
    pub fn entries(&self, batch: usize, head: usize, q: usize) -> Range<usize> {
        let q = self.index.map_or(q, |index| index[q]);
        self.lists.entries(batch, self.group(head), q)
    }

    /// Returns the listed keys of one query, ascending row numbers of the whole sequence.
    pub fn keys(&self, batch: usize, head: usize, q: usize) -> &'a [u32] {
        &self.lists.keys[self.entries(batch, head, q)]
    }

    /// Returns true if the list of query `q` has the key row `key`.
    pub fn contains(&self, batch: usize, head: usize, q: usize, key: u64) -> bool {
        let key = u32::try_from(key);
        key.is_ok_and(|key| self.keys(batch, head, q).binary_search(&key).is_ok())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(made: Result<KeyLists>) -> String {
        made.unwrap_err().to_string()
    }

    #[test]
    fn bad_lists_are_refused_with_row_and_entry() {
        let new = KeyLists::new;
        assert!(refused(new(vec![], vec![])).contains("0 offsets"));
        assert!(refused(new(vec![0, 2], vec![1])).contains("offsets from 0 to 2"));
        assert!(refused(new(vec![1, 2], vec![1, 2])).contains("offsets from 1 to 2"));
        assert!(refused(new(vec![0, 2, 1, 2], vec![1, 2])).contains("row 1: offset 1 after 2"));
        let unsorted = refused(new(vec![0, 1, 4], vec![9, 2, 7, 5]));
        assert!(unsorted.contains("row 1, entry 2: key 5 after key 7"), "{unsorted}");
        let twice = refused(KeyLists::by_group([1, 2], vec![0, 1, 1, 1, 3], vec![0, 4, 4]));
        assert!(twice.contains("row 1 of group 1, entry 1: key 4 after key 4"), "{twice}");
        let lists = new(vec![0, 2, 4], vec![1, 3, 0, 9]).unwrap();
        let dims = Dims::new(1, 2, 4, 8);
        let far = lists.validate(&Dims { kv_len: 9, ..dims }, 2).unwrap_err().to_string();
        assert!(far.contains("row 1, entry 1: key 9") && far.contains("below 9"), "{far}");
        assert_eq!(lists.validate(&Dims { kv_len: 10, ..dims }, 2), Ok(()));
        assert!(lists.validate(&Dims { kv_len: 10, ..dims }, 3).is_err());
        assert!(lists.clone().with_bias(vec![0.0; 3]).is_err());
    }

    #[test]
    fn ranges_and_blocks_are_the_lists_of_their_keys() {
        let lists = KeyLists::from_arrays([1, 1], &[0, 2, 2, 3], &[1, 4, 0], Some(&[3, 5, 2]));
        assert_eq!(lists, KeyLists::new(vec![0, 3, 3, 5], vec![1, 2, 4, 0, 1]));
        // 2 groups, blocks of 2 queries and 3 keys, of 3 queries and 7 keys
        let of_blocks =
            |blocks| KeyLists::from_blocks([1, 2], [3, 7], [2, 3], vec![0, 2, 2, 2, 3], blocks);
        let keys = vec![0, 1, 2, 6, 0, 1, 2, 6, 3, 4, 5];
        let want = KeyLists::by_group([1, 2], vec![0, 4, 8, 8, 8, 8, 11], keys);
        assert_eq!(of_blocks(vec![0, 2, 1]), want);
        let far = refused(of_blocks(vec![0, 3, 1]));
        assert!(far.contains("row 0 of group 0, entry 1: key 3"), "{far}");
        let bad = |offsets: &[i64], keys: &[i64], ends: &[i64], text: &str| {
            let error = refused(KeyLists::from_arrays([1, 1], offsets, keys, Some(ends)));
            assert!(error.contains(text), "{error}");
        };
        bad(&[0, 1, 2], &[0, 4], &[1, 4], "row 1, entry 0: keys 4..4");
        bad(&[0, 2], &[0, 2], &[3, 4], "row 0, entry 1: keys 2..4 after 0..3");
        bad(&[0, 1, 3], &[5, 0, -2], &[9, 1, 1], "row 1, entry 1: key -2");
        bad(&[0, 1], &[0], &[1, 2], "2 ends of 1 ranges");
        bad(&[0, -1], &[0], &[1], "offsets from 0");
        let negative = KeyLists::from_arrays([1, 2], &[0, 1, 2], &[3, -1], None);
        assert!(refused(negative).contains("row 0 of group 1, entry 0: key -1"));
    }

    #[test]
    fn lists_follow_their_queries_groups_and_batch_rows() {
        // [2 batch rows, 2 groups, 2 queries]
        let offsets = vec![0, 1, 3, 3, 4, 5, 6, 7, 9];
        let lists = KeyLists::by_group([2, 2], offsets, vec![5, 1, 2, 0, 7, 8, 3, 4, 6]).unwrap();
        let lists = lists.with_bias((0..9).map(f64::from).collect()).unwrap();
        let listed = ListedKeys::new(&lists, 4);
        assert_eq!(listed.keys(0, 1, 1), [1, 2]);
        assert_eq!(listed.keys(0, 3, 1), [0]);
        assert!(listed.contains(1, 2, 1, 6) && !listed.contains(1, 1, 1, 6));
        let turned = lists.select_queries(&[1, 0, 7]).unwrap();
        let listed = ListedKeys::new(&turned, 4);
        assert_eq!((listed.keys(0, 0, 0), listed.keys(0, 0, 1)), (&[1, 2][..], &[5][..]));
        assert!(listed.keys(1, 3, 2).is_empty());
        let entries = turned.entries(1, 1, 0);
        assert_eq!(turned.bias().map(|bias| &bias[entries]), Some(&[7.0, 8.0][..]));
    }
}
