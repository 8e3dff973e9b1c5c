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
        made.check_offsets()?;
        made.check_order()?;
        Ok(made)
    }

    fn check_offsets(&self) -> Result<()> {
        let Self { offsets, keys, .. } = self;
        if offsets.first() != Some(&0) || offsets.last() != Some(&(keys.len() as u64)) {
            let [first, last] =
                [offsets.first(), offsets.last()].map(|of| of.copied().unwrap_or(0));
            let want = format!("offsets from 0 to {}, the number of indices", keys.len());
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
        let Self { batches, groups, .. } = *self;
        let planes = (0..batches).flat_map(|b| (0..groups).map(move |g| (b, g)));
        let lists = |(b, g)| rows.iter().map(move |&q| self.entries(b, g, crate::index(q)));
        let total = planes.clone().flat_map(lists).map(|list| list.len()).sum();
        let mut offsets = memory::list(NAME, batches * groups * rows.len() + 1)?;
        let mut keys = memory::list(NAME, total)?;
        let mut bias = self.bias.as_ref().map(|_| memory::list(NAME, total)).transpose()?;
        offsets.push(0);
        for list in planes.flat_map(lists) {
            keys.extend_from_slice(&self.keys[list.clone()]);
            if let (Some(into), Some(from)) = (&mut bias, &self.bias) {
                into.extend_from_slice(&from[list]);
            }
            offsets.push(keys.len() as u64);
        }
        Ok(Self { batches, groups, queries: rows.len(), offsets, keys, bias })
    }
}

impl std::fmt::Debug for KeyLists {
    /// Writes the shape, the number of pairs, and whether there is a bias.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let bias = if self.bias.is_some() { " with bias" } else { "" };
        write!(f, "KeyLists({:?}, {} pairs{bias})", self.shape(), self.len())
    }
}

/// Key lists of the queries of a pass, by query head.
#[derive(Debug, Clone, Copy)]
pub struct ListedKeys<'a> {
    /// The lists.
    pub lists: &'a KeyLists,
    /// Query heads of the attention, which the groups of the lists divide.
    pub q_heads: usize,
}

impl<'a> ListedKeys<'a> {
    /// Returns the group of a query head.
    pub const fn group(&self, head: usize) -> usize {
        match (head * self.lists.groups).checked_div(self.q_heads) {
            Some(group) => group,
            None => 0,
        }
    }

    /// Returns the listed keys of one query, ascending row numbers of the whole sequence.
    pub fn keys(&self, batch: usize, head: usize, q: usize) -> &'a [u32] {
        &self.lists.keys[self.lists.entries(batch, self.group(head), q)]
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
    fn lists_follow_their_queries_groups_and_batch_rows() {
        // [2 batch rows, 2 groups, 2 queries]
        let offsets = vec![0, 1, 3, 3, 4, 5, 6, 7, 9];
        let lists = KeyLists::by_group([2, 2], offsets, vec![5, 1, 2, 0, 7, 8, 3, 4, 6]).unwrap();
        let lists = lists.with_bias((0..9).map(f64::from).collect()).unwrap();
        let listed = ListedKeys { lists: &lists, q_heads: 4 };
        assert_eq!(listed.keys(0, 1, 1), [1, 2]);
        assert_eq!(listed.keys(0, 3, 1), [0]);
        assert!(listed.contains(1, 2, 1, 6) && !listed.contains(1, 1, 1, 6));
        let turned = lists.select_queries(&[1, 0, 7]).unwrap();
        let listed = ListedKeys { lists: &turned, q_heads: 4 };
        assert_eq!((listed.keys(0, 0, 0), listed.keys(0, 0, 1)), (&[1, 2][..], &[5][..]));
        assert!(listed.keys(1, 3, 2).is_empty());
        let entries = turned.entries(1, 1, 0);
        assert_eq!(turned.bias().map(|bias| &bias[entries]), Some(&[7.0, 8.0][..]));
    }
}
