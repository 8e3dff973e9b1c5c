//! Learned biases that depend on relative positions: a table with a gradient, in O(entries) memory.
//!
//! ```text
//! bias(h, i, j) = table[h, index(i', j')]      table: [q_heads|1, entries]
//! dtable[h, e]  = Σ ds(h, i, j) over the pairs with index(i', j') = e
//! ```
//! Three kinds of index:
//!
//! | kind | index, with d = j' − i' |
//! |---|---|
//! | clipped difference | min(max(d, −left), right) + left |
//! | T5 buckets | exact for small distances, logarithmic up to `max_distance`, then one bucket |
//! | offsets on a grid | row-major over the axes, min(max(cₐ(i') − cₐ(j'), 1 − wₐ), wₐ − 1) + wₐ − 1 |

use std::{fmt, str::FromStr, sync::Arc};

use crate::{Error, Fingerprint, Result, index};

/// Index of a bias table by the positions of query and key, and the shape of the table.
///
/// As text, in every language: `clipped:LEFT,RIGHT`, `t5:BUCKETS,DISTANCE` (bidirectional),
/// `t5-causal:BUCKETS,DISTANCE`, `grid:8x8` (length and window of each axis), and `grid:64x64,8x8`
/// (lengths, then windows).
///
/// # Source
/// Shaw et al. 2018 (clipped differences), Raffel et al. 2020 (buckets), Liu et al. 2021 (offsets
/// on a grid).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BiasTable {
    kind: Kind,
    per_head: bool,
    /// As [`fmt::Display`] writes it.
    text: String,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Kind {
    /// Entry of each difference from `first` on; those beyond either end have the entry there.
    Differences {
        first: i64,
        lookup: Arc<[u32]>,
        entries: usize,
    },
    Grid(Vec<GridAxis>),
}

/// Axis of a grid, the slowest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct GridAxis {
    len: i64,
    window: i64,
    /// Entries of a step along the axis.
    stride: i64,
}

/// Most differences with an entry of their own, on either side.
const MOST_DIFFERENCES: u64 = 1 << 24;

impl BiasTable {
    /// Creates the table of differences j' − i', clipped to −`left` … `right`: left + right + 1
    /// entries, the first of the difference −`left`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a side of more than 2²⁴.
    pub fn clipped(left: u64, right: u64) -> Result<Self> {
        for side in [left, right] {
            if side > MOST_DIFFERENCES {
                return Err(Error::invalid("bias_table", side, "differences of at most 2^24"));
            }
        }
        let entries = index(left + right + 1);
        // fits: at most 2²⁵ entries
        let lookup = (0..u32::try_from(entries).unwrap_or(u32::MAX)).collect();
        let first = -left.cast_signed();
        let text = format!("clipped:{left},{right}");
        Ok(Self::of(Kind::Differences { first, lookup, entries }, text))
    }

    /// Creates the table of T5's buckets of j' − i': `num_buckets` entries.
    ///
    /// Half of the buckets of a side are of one distance each, the others grow logarithmically up
    /// to `max_distance`, beyond which all distances share the last one. `bidirectional`: keys after
    /// the query have the second half of the buckets. Otherwise they share the bucket of distance 0.
    ///
    /// Logarithms are computed in f32, as T5 does.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] unless a side has at least two buckets, and `max_distance` is
    /// more than its exact distances and at most 2²⁴.
    ///
    /// # Source
    /// Raffel et al. 2020, section 2.1, and the function `_relative_position_bucket` of
    /// google-research/text-to-text-transfer-transformer.
    pub fn t5(bidirectional: bool, num_buckets: usize, max_distance: u64) -> Result<Self> {
        let side = if bidirectional { num_buckets / 2 } else { num_buckets };
        let exact = side / 2;
        if exact == 0 || num_buckets > index(MOST_DIFFERENCES) {
            let least = if bidirectional { 4 } else { 2 };
            let want = format!("{least} to 2^24 buckets");
            return Err(Error::invalid("bias_table", num_buckets, want));
        }
        if max_distance <= exact as u64 || max_distance > MOST_DIFFERENCES {
            let want = format!("a max_distance of {} to 2^24", exact + 1);
            return Err(Error::invalid("bias_table", max_distance, want));
        }
        let bucket = |distance: u64| t5_bucket(distance, exact, side, max_distance);
        let reach = max_distance.cast_signed();
        let lookup = (-reach..=if bidirectional { reach } else { 0 })
            .map(|d| bucket(d.unsigned_abs()) + if d > 0 { side } else { 0 })
            .map(|bucket| u32::try_from(bucket).unwrap_or(u32::MAX))
            .collect();
        let entries = num_buckets;
        let name = if bidirectional { "t5" } else { "t5-causal" };
        let text = format!("{name}:{num_buckets},{max_distance}");
        Ok(Self::of(Kind::Differences { first: -reach, lookup, entries }, text))
    }

    /// Creates the table of offsets on a grid of one to three axes, of `shape` (length, window) of
    /// each, the slowest first: ∏ (2·window − 1) entries.
    ///
    /// Position p has the coordinates of element p of a row-major array of these lengths. The
    /// offset along an axis is the query's coordinate minus the key's, clipped to
    /// 1 − window … window − 1. Entries are row-major over the offsets, ascending. With a window
    /// equal to the length on both of two axes, this is the table of a window of Swin.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for no or more than three axes, a length or a window of 0, and more
    /// than 2²⁴ entries.
    pub fn grid(shape: &[(usize, usize)]) -> Result<Self> {
        if shape.is_empty() || shape.len() > 3 {
            return Err(Error::invalid("bias_table", format!("{shape:?}"), "one to three axes"));
        }
        let mut entries = 1_u64;
        let mut axes = Vec::new();
        for &(len, window) in shape.iter().rev() {
            let lengths = [len, window].map(|of| of as u64);
            if lengths.iter().any(|of| !(1..=MOST_DIFFERENCES).contains(of)) {
                let want = "lengths and windows of 1 to 2^24";
                return Err(Error::invalid("bias_table", format!("{shape:?}"), want));
            }
            let [len, window] = lengths.map(u64::cast_signed);
            axes.insert(0, GridAxis { len, window, stride: entries.cast_signed() });
            entries = entries.saturating_mul(2 * lengths[1] - 1);
        }
        if entries > MOST_DIFFERENCES {
            let want = "at most 2^24 entries";
            return Err(Error::invalid("bias_table", format!("{shape:?}"), want));
        }
        let axis = |of: fn(&(usize, usize)) -> usize| {
            shape.iter().map(|axis| of(axis).to_string()).collect::<Vec<_>>().join("x")
        };
        let text = format!("grid:{},{}", axis(|axis| axis.0), axis(|axis| axis.1));
        Ok(Self::of(Kind::Grid(axes), text))
    }

    /// Lets all query heads share one row of the table. Default: a row for each.
    #[must_use]
    pub const fn shared_by_heads(mut self) -> Self {
        self.per_head = false;
        self
    }

    const fn of(kind: Kind, text: String) -> Self {
        Self { kind, per_head: true, text }
    }

    /// Returns the number of entries of a row of the table.
    pub fn entries(&self) -> usize {
        match &self.kind {
            Kind::Differences { entries, .. } => *entries,
            Kind::Grid(axes) => {
                axes.iter().map(|axis| index((2 * axis.window - 1).unsigned_abs())).product()
            }
        }
    }

    /// Returns the shape of the table as a bias of `q_heads` query heads:
    /// `[1, q_heads|1, 1, entries]`.
    pub fn shape(&self, q_heads: usize) -> [usize; 4] {
        [1, if self.per_head { q_heads } else { 1 }, 1, self.entries()]
    }

    /// Returns the entry of a query at position `i` and a key at position `j`.
    #[inline]
    pub fn index(&self, i: i64, j: i64) -> usize {
        match &self.kind {
            Kind::Differences { .. } => self.of_difference(j.saturating_sub(i)).unwrap_or(0),
            Kind::Grid(axes) => {
                let (mut i, mut j) = (i, j);
                let mut entry = 0;
                for (number, axis) in axes.iter().enumerate().rev() {
                    // the slowest axis has no end: positions beyond the grid go on along it
                    let (ci, cj) = if number == 0 {
                        (i, j)
                    } else {
                        (i.rem_euclid(axis.len), j.rem_euclid(axis.len))
                    };
                    (i, j) = (i.div_euclid(axis.len), j.div_euclid(axis.len));
                    let most = axis.window - 1;
                    entry += (ci.saturating_sub(cj).clamp(-most, most) + most) * axis.stride;
                }
                index(entry.unsigned_abs())
            }
        }
    }

    /// Returns the entry of the difference j' − i'; `None` if the entry depends on more than that.
    #[inline]
    pub fn of_difference(&self, difference: i64) -> Option<usize> {
        let Kind::Differences { first, lookup, .. } = &self.kind else { return None };
        let last = lookup.len() - 1;
        let place = index(difference.saturating_sub(*first).max(0).unsigned_abs()).min(last);
        Some(lookup[place] as usize)
    }

    /// Returns the entry of all differences from `from` to `to`, if they lie beyond one end of the
    /// table.
    pub fn beyond_an_end(&self, from: i64, to: i64) -> Option<usize> {
        let Kind::Differences { first, lookup, .. } = &self.kind else { return None };
        let last = first.saturating_add_unsigned(lookup.len() as u64 - 1);
        let entry = match (from.min(to), from.max(to)) {
            (_, most) if most <= *first => lookup.first(),
            (least, _) if least >= last => lookup.last(),
            _ => None,
        };
        entry.map(|&entry| entry as usize)
    }

    /// True if the entry depends on the difference of the positions alone.
    pub const fn is_of_differences(&self) -> bool {
        matches!(self.kind, Kind::Differences { .. })
    }

    /// Adds all that the index depends on to a fingerprint.
    pub fn fingerprint(&self, into: Fingerprint) -> Fingerprint {
        into.number(u64::from(self.per_head)).text(&self.text)
    }
}

impl fmt::Display for BiasTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl FromStr for BiasTable {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let wrong = || {
            let want = "clipped:LEFT,RIGHT, t5:BUCKETS,DISTANCE, t5-causal:BUCKETS,DISTANCE, \
                        grid:LENGTHS or grid:LENGTHS,WINDOWS with lengths such as 8x8";
            Error::invalid("bias_table", text, want)
        };
        let (name, parameters) = text.split_once(':').ok_or_else(wrong)?;
        let mut parts = parameters.split(',');
        let mut part = || parts.next().ok_or_else(wrong);
        let number = |text: &str| text.parse::<u64>().map_err(|_| wrong());
        let table = match name {
            "clipped" => Self::clipped(number(part()?)?, number(part()?)?),
            "t5" | "t5-causal" => {
                let buckets = number(part()?)?.min(1 << 32);
                Self::t5(name == "t5", index(buckets), number(part()?)?)
            }
            "grid" => {
                let axes = |text: &str| {
                    let lengths =
                        text.split('x').map(|of| of.parse::<usize>().map_err(|_| wrong()));
                    lengths.collect::<Result<Vec<_>>>()
                };
                let lengths = axes(part()?)?;
                let windows = part().map_or_else(|_| Ok(lengths.clone()), axes)?;
                if windows.len() != lengths.len() {
                    return Err(wrong());
                }
                Self::grid(&lengths.into_iter().zip(windows).collect::<Vec<_>>())
            }
            _ => Err(wrong()),
        }?;
        if part().is_ok() { Err(wrong()) } else { Ok(table) }
    }
}

/// Returns T5's bucket of a distance on a side of `side` buckets, `exact` of them of one distance.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    clippy::cast_sign_loss,
    reason = "the arithmetic of T5 is that of f32, and truncates"
)]
fn t5_bucket(distance: u64, exact: usize, side: usize, max_distance: u64) -> usize {
    if distance < exact as u64 {
        return index(distance);
    }
    let ln = |x: f32| f64::from(x).ln() as f32;
    let ratio = ln(distance as f32 / exact as f32)
        / (max_distance as f64 / exact as f64).ln() as f32
        * (side - exact) as f32;
    (exact + ratio as usize).min(side - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_are_read_from_text() {
        for text in ["clipped:3,0", "t5:32,128", "t5-causal:16,64", "grid:8x8,4x8", "grid:2,2"] {
            assert_eq!(text.parse::<BiasTable>().unwrap().to_string(), text);
        }
        let square: BiasTable = "grid:7x7".parse().unwrap();
        assert_eq!((square.entries(), square.to_string()), (169, "grid:7x7,7x7".to_owned()));
        for text in ["", "clipped:3", "clipped:1,2,3", "t5:-1,8", "grid:2x,2", "grid:2x2,2", "x:1"]
        {
            let error = text.parse::<BiasTable>().unwrap_err().to_string();
            assert!(error.starts_with("bias_table: got"), "{error}");
        }
    }

    #[test]
    fn differences_are_clipped() {
        let table = BiasTable::clipped(2, 1).unwrap();
        let row: Vec<usize> = (0..7).map(|j| table.index(3, j)).collect();
        assert_eq!((table.entries(), row), (4, vec![0, 0, 1, 2, 3, 3, 3]));
        assert_eq!(table.index(i64::MIN, i64::MAX), 3);
        let ends = [(-9, -2), (1, 5), (-9, -1), (0, 1)].map(|(a, b)| table.beyond_an_end(b, a));
        assert_eq!(ends, [Some(0), Some(3), None, None]);
        assert_eq!(table.index(i64::MAX, i64::MIN), 0);
        assert_eq!(table.shape(6), [1, 6, 1, 4]);
        assert_eq!(table.shared_by_heads().shape(6), [1, 1, 1, 4]);
        assert!(BiasTable::clipped(1 << 25, 0).is_err());
    }

    /// Buckets of the distances 0 to 20, 50, 127, 128 and 1,000, by the program of T5.
    #[test]
    fn buckets_are_those_of_t5() {
        let distances = || (0..=20).chain([50, 127, 128, 1000]);
        let both = BiasTable::t5(true, 32, 128).unwrap();
        let want =
            [0, 1, 2, 3, 4, 5, 6, 7, 8, 8, 8, 8, 9, 9, 9, 9, 10, 10, 10, 10, 10, 13, 15, 15, 15];
        assert!(distances().map(|d| both.index(d, 0)).eq(want));
        assert!(distances().skip(1).map(|d| both.index(0, d)).eq(want[1..].iter().map(|w| w + 16)));
        let before = BiasTable::t5(false, 32, 128).unwrap();
        let want = [16, 16, 16, 17, 17, 24, 31, 31, 31];
        assert!(distances().map(|d| before.index(d, 0)).eq((0..16).chain(want)));
        assert!(distances().all(|d| before.index(0, d) == 0));
        for (bidirectional, buckets, distance) in
            [(true, 3, 128), (false, 1, 9), (true, 32, 8), (false, 8, 1 << 25)]
        {
            assert!(BiasTable::t5(bidirectional, buckets, distance).is_err());
        }
    }

    #[test]
    fn offsets_are_those_of_a_window_of_swin() {
        let table = BiasTable::grid(&[(2, 2), (3, 3)]).unwrap();
        assert_eq!(table.entries(), 15);
        for i in 0..6 {
            for j in 0..6 {
                let [rows, columns] = [i / 3 - j / 3 + 1, i % 3 - j % 3 + 2];
                assert_eq!(table.index(i, j), index((rows * 5 + columns).unsigned_abs()));
            }
        }
        // a window below the grid clips; positions before 0 and beyond the end go on
        let narrow = BiasTable::grid(&[(4, 2), (4, 1)]).unwrap();
        assert_eq!(narrow.entries(), 3);
        assert_eq!([narrow.index(15, 0), narrow.index(0, 15), narrow.index(7, 4)], [2, 0, 1]);
        assert_eq!(narrow.index(-1, 4), 0);
        for shape in [&[][..], &[(1, 1); 4], &[(0, 1)], &[(1, 0)], &[(1, 1 << 13), (1, 1 << 13)]] {
            assert!(BiasTable::grid(shape).is_err(), "{shape:?}");
        }
    }
}
