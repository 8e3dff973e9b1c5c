//! Lists of four neighbouring rows, merged where they have most of their elements in common.
//!
//! ```text
//! rows 0..4 of a window    {3 4 5} {4 5 6} {5 6 7} {6 7 8}
//! merged                   3 4 5 6 7 8, each with one bit a row
//! ```
//! A kernel reads a row of a merged list once for four rows of its own side. Where lists have
//! little in common, as scattered ones, most bits would be 0, and they stay apart.

use std::ops::Range;

use annulus_core::{Result, memory};

/// Rows whose lists are merged.
pub(crate) const GROUP: usize = 4;

/// Time of an element of a merged list in units of an element of a list of one row: it takes four
/// products of each kind, but one read.
const MERGED_COST: f64 = 2.2;

/// Merged lists of `[planes, rows]`.
#[derive(Debug, Default)]
pub(crate) struct MergedLists {
    groups_of_plane: usize,
    /// Pairs of the merged lists.
    pub(crate) pairs: usize,
    /// One for each group.
    spans: Vec<Span>,
    elements: Vec<u32>,
    /// For each 64 elements of a list one word for each row of the group.
    words: Vec<[u64; GROUP]>,
}

/// Place of a merged list.
#[derive(Debug, Clone, Copy)]
struct Span {
    first: usize,
    first_word: usize,
    /// 0: the lists are not merged.
    len: usize,
}

/// Elements of a list and, if it is merged, the rows of each.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MergedList<'a> {
    pub(crate) elements: &'a [u32],
    pub(crate) words: &'a [[u64; GROUP]],
}

impl MergedLists {
    /// Merges the lists of `planes` planes of `rows` rows, where that saves time and `is_wanted`.
    /// The list of plane p and row r is `list(p · rows + r)`, with distinct elements below `count`.
    ///
    /// # Errors
    /// [`annulus_core::Error::OutOfMemory`].
    pub(crate) fn refill<'l>(
        &mut self,
        [planes, rows]: [usize; 2],
        count: usize,
        is_wanted: bool,
        list: impl Fn(usize) -> &'l [u32],
    ) -> Result<()> {
        const WHAT: &str = "merged lists of visible pairs";
        self.groups_of_plane = rows.div_ceil(GROUP);
        self.pairs = 0;
        self.spans.clear();
        self.elements.clear();
        self.words.clear();
        let groups = planes * self.groups_of_plane;
        memory::reserve(WHAT, &mut self.spans, groups)?;
        // the group that has marked an element last, and the element's place in its list
        let mut marks: Vec<[usize; 2]> = memory::filled(WHAT, count, [0; 2])?;
        for group in 0..groups {
            let (first, first_word) = (self.elements.len(), self.words.len());
            let start = group % self.groups_of_plane * GROUP;
            let plane = group / self.groups_of_plane;
            let lists = (start..rows.min(start + GROUP)).map(|row| list(plane * rows + row));
            let total: usize = lists.clone().map(<[u32]>::len).sum();
            memory::reserve(WHAT, &mut self.elements, total)?;
            memory::reserve(WHAT, &mut self.words, total.div_ceil(64))?;
            for (row, list) in lists.enumerate().filter(|_| is_wanted) {
                for &element in list {
                    let mark = &mut marks[element as usize];
                    if mark[0] != group + 1 {
                        *mark = [group + 1, self.elements.len() - first];
                        self.elements.push(element);
                        if mark[1].is_multiple_of(64) {
                            self.words.push([0; GROUP]);
                        }
                    }
                    self.words[first_word + mark[1] / 64][row] |= 1 << (mark[1] % 64);
                }
            }
            let mut len = self.elements.len() - first;
            if len as f64 * MERGED_COST > total as f64 {
                len = 0;
                self.elements.truncate(first);
                self.words.truncate(first_word);
            } else if is_wanted {
                self.pairs += total;
            }
            self.spans.push(Span { first, first_word, len });
        }
        Ok(())
    }

    /// Returns the merged list of the group that begins with row `row` of a plane, if there is one.
    pub(crate) fn get(&self, plane: usize, row: usize) -> Option<MergedList<'_>> {
        let span = self.spans.get(plane * self.groups_of_plane + row / GROUP)?;
        let elements = &self.elements[span.first..][..span.len];
        let words = &self.words[span.first_word..][..span.len.div_ceil(64)];
        (!elements.is_empty()).then_some(MergedList { elements, words })
    }

    /// Returns the heap bytes.
    pub(crate) const fn bytes(&self) -> usize {
        self.spans.capacity() * size_of::<Span>()
            + self.elements.capacity() * 4
            + self.words.capacity() * size_of::<[u64; GROUP]>()
    }
}

impl<'a> MergedList<'a> {
    /// Returns the list of one row, which is not merged.
    pub(crate) const fn of_row(elements: &'a [u32]) -> Self {
        Self { elements, words: &[] }
    }

    /// Returns the number of rows of the group.
    pub(crate) const fn rows(&self) -> usize {
        if self.words.is_empty() { 1 } else { GROUP }
    }

    /// Iterates over the parts of at most `len` elements, a multiple of 64, and their ranges.
    pub(crate) fn parts(self, len: usize) -> impl Iterator<Item = (Range<usize>, Self)> {
        let Self { elements, words } = self;
        (0..elements.len()).step_by(len).map(move |first| {
            let end = elements.len().min(first + len);
            let words = words.get(first / 64..end.div_ceil(64)).unwrap_or_default();
            (first..end, Self { elements: &elements[first..end], words })
        })
    }
}
