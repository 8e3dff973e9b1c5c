//! Neighbourhoods on grids of one to three axes.
//!
//! Position p is the grid point with the coordinates of p in row-major order. On each axis, with
//! length L, dilation d, b points before and a points after,
//!
//! ```text
//! clip, causal   j = i + d·t, −b ≤ t ≤ a (causal: a = 0), 0 ≤ j < L
//! shift          as clip around the point nearest to i of i's residue class modulo d
//!                whose window is within 0..L: every query has b + 1 + a keys
//! periodic       j = (i + d·t) mod L, −b ≤ t ≤ a
//! ```
//! A key is visible if it is so on every axis. The lowering is the product of the axes' keys, in
//! which consecutive points of the last axis are one interval.
//!
//! # Source
//! Hassani et al. 2023, Neighborhood Attention Transformer (shift); Hassani and Shi 2022, Dilated
//! Neighborhood Attention Transformer; Hassani et al. 2024, Faster Neighborhood Attention (causal
//! axes).

use std::{fmt, ops::Range, str::FromStr};

use smallvec::SmallVec;

use super::{Key, Mask, Query};
use crate::{Dims, Error, Fingerprint, KeyIntervals, Result};

/// One axis of a [`Neighborhood`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Axis {
    /// Points of the grid along the axis.
    pub len: u64,
    /// Points of the window before the query.
    pub before: u64,
    /// Points of the window after the query. 0 on a causal axis.
    pub after: u64,
    /// Distance between points of the window, at least 1.
    pub dilation: u64,
    /// True if no key after the query is visible. The window is then clipped at the edge.
    pub causal: bool,
    /// True if the axis is a circle: the window continues at the other end.
    pub periodic: bool,
}

impl Axis {
    /// Creates an axis of `len` points with a window of `size` points around the query: ⌊size/2⌋
    /// before it and ⌈size/2⌉ − 1 after it.
    pub const fn new(len: u64, size: u64) -> Self {
        // no window contains 0 points; `validate` refuses the number that results
        let after = if size == 0 { u64::MAX } else { size.div_ceil(2) - 1 };
        Self { len, before: size / 2, after, dilation: 1, causal: false, periodic: false }
    }

    /// Makes the axis causal: all other points of the window are before the query.
    #[must_use]
    pub const fn causal(self) -> Self {
        let before = self.before.saturating_add(self.after);
        Self { before, after: 0, causal: true, ..self }
    }

    /// Returns true if a query at `i` has a key at `j`.
    fn attends(&self, i: u64, j: u64, edge: Edge) -> bool {
        if self.periodic {
            let ahead = if j >= i { j - i } else { self.len - (i - j) };
            let behind = (self.len - ahead) % self.len;
            let within =
                |way: u64, steps| way.is_multiple_of(self.dilation) && way / self.dilation <= steps;
            return within(ahead, self.after) || within(behind, self.before);
        }
        if i % self.dilation != j % self.dilation {
            return false;
        }
        let (centre, step) = (self.centre(i, edge), j / self.dilation);
        step <= centre.saturating_add(self.after) && centre <= step.saturating_add(self.before)
    }

    /// Returns the centre of the window of a query at `i`, among the points of its residue class.
    fn centre(&self, i: u64, edge: Edge) -> u64 {
        let step = i / self.dilation;
        match edge {
            Edge::Shift if !self.causal => {
                let last = (self.len - 1 - i % self.dilation) / self.dilation;
                step.min(last.saturating_sub(self.after)).max(self.before)
            }
            _ => step,
        }
    }

    /// Returns the keys of a query at `i`, in ascending order.
    fn keys(&self, i: u64, edge: Edge) -> AxisKeys {
        let point = |j: u64| j.cast_signed()..j.cast_signed() + 1;
        let mut keys = AxisKeys::new();
        if self.periodic {
            let first = (i + self.len - self.dilation * self.before % self.len) % self.len;
            let count = self.before + self.after + 1;
            if self.dilation == 1 {
                let beyond = (first + count).saturating_sub(self.len);
                keys.push(0..beyond.cast_signed());
                keys.push(first.cast_signed()..(first + count - beyond).cast_signed());
            } else {
                keys.extend((0..count).map(|t| point((first + t * self.dilation) % self.len)));
                keys.sort_unstable_by_key(|key| key.start);
            }
            return keys;
        }
        let residue = i % self.dilation;
        let centre = self.centre(i, edge);
        let last = (self.len - 1 - residue) / self.dilation;
        let first = centre.saturating_sub(self.before);
        let last = centre.saturating_add(self.after).min(last);
        if self.dilation == 1 {
            keys.push(first.cast_signed()..last.cast_signed() + 1);
        } else {
            keys.extend((first..=last).map(|step| point(residue + step * self.dilation)));
        }
        keys
    }

    fn validate(&self, edge: Edge) -> Result<()> {
        let window = || format!("{} before and {} after", self.before, self.after);
        let points = u128::from(self.before) + u128::from(self.after) + 1;
        let dilation = u128::from(self.dilation);
        // of a size of 0 points `after` is u64::MAX
        if self.before.max(self.after) > i64::MAX.unsigned_abs() {
            return Err(Error::invalid("window", "no point", "at least 1, at most 2⁶³ − 1"));
        }
        if self.len == 0 {
            return Err(Error::invalid("shape", 0, "at least 1 point on every axis"));
        }
        if self.dilation == 0 {
            return Err(Error::invalid("dilation", 0, "at least 1"));
        }
        if self.causal && self.periodic {
            return Err(Error::invalid("periodic", true, "false on a causal axis"));
        }
        if self.causal && self.after > 0 {
            return Err(Error::invalid("window", window(), "none after the query: causal axis"));
        }
        // the largest distances of a window whose points are distinct and within the axis
        let (extent, must_fit) = match (self.periodic, self.causal, edge) {
            (true, ..) => ((points - 1) * dilation + 1, true),
            (false, false, Edge::Shift) => (points * dilation, true),
            _ => (points, false),
        };
        if must_fit && extent > u128::from(self.len) {
            let want = format!("at most the {} points of its axis, dilation included", self.len);
            return Err(Error::invalid("window", window(), want));
        }
        Ok(())
    }
}

/// Keys of one query on one axis.
type AxisKeys = SmallVec<[Range<i64>; 4]>;

/// Rule for windows that pass the edge of the grid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Edge {
    /// The window is shifted back into the grid: every query has all its keys, as in NATTEN.
    #[default]
    Shift,
    /// Points outside the grid are left out.
    Clip,
}

/// Neighbourhood on a grid of one to three axes. A query at position p, the index of its grid point
/// in row-major order, attends to the points within its window on every axis.
///
/// Positions outside the grid have no visible pair.
///
/// Its text is `SHAPE:WINDOW[:OPTION=…]`, with a number for each axis or one for all:
/// `64x128:7x5:dilation=2x1:causal=0x1:periodic=0:edge=clip`. `3+2` for a size stands for 3 points
/// before and 2 after.
///
/// # Examples
/// ```
/// use annulus_core::{Mask, mask::{Axis, Edge, Neighborhood, Query}};
/// let image = Neighborhood { axes: vec![Axis::new(5, 3), Axis::new(8, 3)], edge: Edge::Shift };
/// assert_eq!("5x8:3".parse(), Ok(image.clone()));
/// // the corner: shifted to rows 0 to 2 and columns 0 to 2
/// let query = Query { batch: 0, head: 0, row: 0, position: 0 };
/// assert_eq!(image.intervals(&query).unwrap().ranges(), [0..3, 8..11, 16..19]);
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Neighborhood {
    /// Axes of the grid; the last one varies fastest.
    pub axes: Vec<Axis>,
    /// Rule at the edges of axes that are neither causal nor periodic.
    pub edge: Edge,
}

impl Neighborhood {
    /// Returns the coordinates of a position; `None` outside the grid.
    fn point(&self, position: i64) -> Option<SmallVec<[u64; 3]>> {
        if self.axes.iter().any(|axis| axis.dilation == 0) {
            return None;
        }
        let mut left = u64::try_from(position).ok()?;
        let mut point: SmallVec<[u64; 3]> = SmallVec::from_elem(0, self.axes.len());
        for (coordinate, axis) in point.iter_mut().zip(&self.axes).rev() {
            *coordinate = left.checked_rem(axis.len)?;
            left /= axis.len;
        }
        (left == 0).then_some(point)
    }
}

impl Mask for Neighborhood {
    fn fingerprint(&self, into: Fingerprint) -> Fingerprint {
        let into = into.text("neighborhood").number(self.axes.len() as u64);
        let into = into.number(u64::from(self.edge == Edge::Clip));
        self.axes.iter().fold(into, |into, axis| {
            let Axis { len, before, after, dilation, causal, periodic } = *axis;
            let into = into.number(len).number(before).number(after).number(dilation);
            into.number(causal.into()).number(periodic.into())
        })
    }

    fn visible(&self, query: &Query, key: &Key) -> bool {
        let points = self.point(query.position).zip(self.point(key.position));
        points.is_some_and(|(i, j)| {
            let mut axes = self.axes.iter().zip(i.iter().zip(&j));
            axes.all(|(axis, (&i, &j))| axis.attends(i, j, self.edge))
        })
    }

    fn intervals(&self, query: &Query) -> Option<KeyIntervals> {
        let mut intervals = KeyIntervals::nothing();
        if let Some(point) = self.point(query.position) {
            let axes = self.axes.iter().zip(&point);
            let keys: SmallVec<[(i64, AxisKeys); 3]> =
                axes.map(|(axis, &i)| (axis.len.cast_signed(), axis.keys(i, self.edge))).collect();
            push_product(&keys, 0, &mut intervals);
        }
        Some(intervals)
    }

    fn validate(&self, _: &Dims) -> Result<()> {
        self.check()
    }
}

impl Neighborhood {
    /// Checks the parameters.
    fn check(&self) -> Result<()> {
        if !(1..=3).contains(&self.axes.len()) {
            return Err(Error::invalid("shape", self.axes.len(), "1 to 3 axes"));
        }
        let points = self.axes.iter().try_fold(1, |all: u64, axis| all.checked_mul(axis.len));
        if points.is_none_or(|points| points > i64::MAX.unsigned_abs() / 4) {
            return Err(Error::invalid("shape", self, "fewer than 2⁶¹ points"));
        }
        self.axes.iter().try_for_each(|axis| axis.validate(self.edge))
    }
}

/// Appends the positions of all points with keys `axes`, within the point `outer` of the axes
/// before.
fn push_product(axes: &[(i64, AxisKeys)], outer: i64, into: &mut KeyIntervals) {
    let Some(((len, keys), inner)) = axes.split_first() else { return };
    for range in keys {
        let first = outer * len + range.start;
        let points = first..first + (range.end - range.start);
        if inner.is_empty() {
            into.push(points);
        } else {
            points.for_each(|point| push_product(inner, point, into));
        }
    }
}

/// Writes the text of [`Neighborhood`]'s documentation, without options that have their defaults.
impl fmt::Display for Neighborhood {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list =
            |of: &dyn Fn(&Axis) -> String| self.axes.iter().map(of).collect::<Vec<_>>().join("x");
        let window = |axis: &Axis| {
            let size = axis.before.saturating_add(axis.after).saturating_add(1);
            let sized = Axis::new(axis.len, size);
            let sized = if axis.causal { sized.causal() } else { sized };
            match (sized.before, sized.after) == (axis.before, axis.after) {
                true => size.to_string(),
                false => format!("{}+{}", axis.before, axis.after),
            }
        };
        write!(f, "{}:{}", list(&|axis| axis.len.to_string()), list(&window))?;
        if self.axes.iter().any(|axis| axis.dilation != 1) {
            write!(f, ":dilation={}", list(&|axis| axis.dilation.to_string()))?;
        }
        if self.axes.iter().any(|axis| axis.causal) {
            write!(f, ":causal={}", list(&|axis| u8::from(axis.causal).to_string()))?;
        }
        if self.axes.iter().any(|axis| axis.periodic) {
            write!(f, ":periodic={}", list(&|axis| u8::from(axis.periodic).to_string()))?;
        }
        if self.edge == Edge::Clip { f.write_str(":edge=clip") } else { Ok(()) }
    }
}

/// Reads and checks the text of [`Neighborhood`]'s documentation.
///
/// # Errors
/// [`Error::InvalidArgument`] naming `shape`, `window`, `dilation`, `causal`, `periodic`, `edge` or
/// `neighborhood`.
impl FromStr for Neighborhood {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let wrong = |argument: &'static str, want: &str| Error::invalid(argument, text, want);
        let mut parts = text.split(':');
        const FORM: &str = "SHAPE:WINDOW, as 64x64:7x7";
        let shape = parts.next().unwrap_or_default().split('x');
        let axis = |len: &str| len.parse().map(|len| Axis::new(len, 1));
        let axes = shape.map(axis).collect::<std::result::Result<Vec<_>, _>>();
        let mut axes = axes.map_err(|_| wrong("shape", FORM))?;
        let window = parts.next().ok_or_else(|| wrong("window", FORM))?;
        let mut edge = Edge::Shift;
        for part in parts {
            let (option, list) = part.split_once('=').unwrap_or((part, ""));
            let (argument, is_read) = match option {
                "dilation" => (
                    "dilation",
                    set(&mut axes, list, |axis, number| {
                        number.parse().map(|dilation| axis.dilation = dilation).ok()
                    }),
                ),
                "causal" => (
                    "causal",
                    set(&mut axes, list, |axis, number| {
                        flag(number).map(|causal| axis.causal = causal)
                    }),
                ),
                "periodic" => (
                    "periodic",
                    set(&mut axes, list, |axis, number| {
                        flag(number).map(|periodic| axis.periodic = periodic)
                    }),
                ),
                "edge" if list == "clip" => {
                    edge = Edge::Clip;
                    continue;
                }
                "edge" if list == "shift" => continue,
                "edge" => return Err(wrong("edge", "shift or clip")),
                _ => return Err(wrong("neighborhood", "dilation, causal, periodic or edge")),
            };
            is_read
                .ok_or_else(|| wrong(argument, "a number for each axis, as 1x0, or one for all"))?;
        }
        // last: the window of a causal axis ends at the query
        set(&mut axes, window, |axis, size| {
            let (before, after) = match size.split_once('+') {
                Some((before, after)) => (before.parse().ok()?, after.parse().ok()?),
                None => {
                    let sized = Axis::new(axis.len, size.parse().ok()?);
                    let sized = if axis.causal { sized.causal() } else { sized };
                    (sized.before, sized.after)
                }
            };
            *axis = Axis { before, after, ..*axis };
            Some(())
        })
        .ok_or_else(|| wrong("window", "a size for each axis, as 7x5 or 3+2x5, or one for all"))?;
        let read = Self { axes, edge };
        read.check().map(|()| read)
    }
}

/// Sets a property of every axis from a list of as many texts or of one; `None` if it has another
/// length, or if `one` fails.
fn set(
    axes: &mut [Axis],
    list: &str,
    mut one: impl FnMut(&mut Axis, &str) -> Option<()>,
) -> Option<()> {
    let given = list.split('x').count();
    let texts = (given == axes.len() || given == 1).then(|| list.split('x').cycle())?;
    axes.iter_mut().zip(texts).try_for_each(|(axis, text)| one(axis, text))
}

/// Reads a flag.
fn flag(text: &str) -> Option<bool> {
    match text {
        "0" => Some(false),
        "1" => Some(true),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Returns a valid axis.
    pub(in crate::mask) fn any_axis() -> impl Strategy<Value = Axis> {
        let numbers = (1u64..9, 0u64..5, 0u64..5, 1u64..4);
        (numbers, any::<bool>(), any::<bool>()).prop_map(|(numbers, causal, periodic)| {
            let (len, before, after, dilation) = numbers;
            let axis = Axis { before, after, dilation, periodic, ..Axis::new(len, 1) };
            let axis = if causal && !periodic { axis.causal() } else { axis };
            match axis.validate(Edge::Shift) {
                Ok(()) => axis,
                Err(_) => Axis::new(len, 1),
            }
        })
    }

    /// Returns the keys of a query at `i` on an axis by the rules of `docs/semantics.md`.
    fn keys_by_the_rules(axis: &Axis, i: i64, edge: Edge) -> Vec<i64> {
        let Axis { len, before, after, dilation, causal, periodic } = *axis;
        let [len, before, after, dilation] =
            [len, before, after, dilation].map(|number| number as i64);
        let steps = -before..=after;
        if periodic {
            return steps.map(|t| (i + t * dilation).rem_euclid(len)).collect();
        }
        let class: Vec<i64> = (i % dilation..len).step_by(dilation as usize).collect();
        let at = class.iter().position(|&j| j == i).unwrap() as i64;
        let count = class.len() as i64;
        let start = match edge {
            Edge::Shift if !causal => (at - before).clamp(0, count - (before + after + 1)),
            _ => at - before,
        };
        let window = start..=start + before + after;
        window.filter(|at| (0..count).contains(at)).map(|at| class[at as usize]).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(400))]
        #[test]
        fn predicate_and_lowering_equal_the_rules(
            axes in prop::collection::vec(any_axis(), 1..4),
            clip in any::<bool>(),
        ) {
            let edge = if clip { Edge::Clip } else { Edge::Shift };
            let mask = Neighborhood { axes, edge };
            prop_assert_eq!(mask.check(), Ok(()));
            prop_assert_eq!(mask.to_string().parse(), Ok(mask.clone()));
            let points: i64 = mask.axes.iter().map(|axis| axis.len as i64).product();
            let coordinates = |mut position: i64| -> Vec<i64> {
                let mut of: Vec<i64> = mask.axes.iter().rev().map(|axis| {
                    let len = axis.len as i64;
                    let at = position % len;
                    position /= len;
                    at
                }).collect();
                of.reverse();
                of
            };
            for i in 0..points {
                let of_axes = mask.axes.iter().zip(coordinates(i));
                let keys: Vec<Vec<i64>> =
                    of_axes.map(|(axis, at)| keys_by_the_rules(axis, at, edge)).collect();
                let query = Query { batch: 0, head: 0, row: 0, position: i };
                let intervals = mask.intervals(&query).unwrap();
                for j in -2..points + 2 {
                    let inside = (0..points).contains(&j);
                    let mut axes = keys.iter().zip(coordinates(j.rem_euclid(points)));
                    let want = inside && axes.all(|(keys, at)| keys.contains(&at));
                    prop_assert_eq!(mask.visible(&query, &Key { row: 0, position: j }), want);
                    prop_assert_eq!(intervals.contains(j), want, "{} {} {}", &mask, i, j);
                }
            }
        }
    }

    #[test]
    fn wrong_neighbourhoods_name_the_argument() {
        for (text, argument) in [
            ("", "shape"),
            ("8x", "shape"),
            ("8", "window"),
            ("8x8:", "window"),
            ("8x8:3x3x3", "window"),
            ("2x2x2x2:1", "shape"),
            ("0x8:1", "shape"),
            ("4294967296x4294967296:1", "shape"),
            ("8x8:0", "window"),
            ("8x8:9x3", "window"),
            ("8:5:dilation=2", "window"),
            ("8:5:dilation=2:periodic=1", "window"),
            ("8:2+1:causal=1", "window"),
            ("8:3:dilation=0", "dilation"),
            ("8:3:dilation=1x1", "dilation"),
            ("8:3:causal=2", "causal"),
            ("8:3:causal=1:periodic=1", "periodic"),
            ("8:3:edge=wrap", "edge"),
            ("8:3:stride=2", "neighborhood"),
        ] {
            match text.parse::<Neighborhood>() {
                Err(Error::InvalidArgument { argument: got, .. }) => {
                    assert_eq!(got, argument, "{text}");
                }
                other => panic!("{text} gave {other:?}"),
            }
        }
        // a clipped window may be larger than the grid
        let all: Neighborhood = "4x4:99:edge=clip".parse().unwrap();
        let query = Query { batch: 0, head: 0, row: 0, position: 3 };
        assert_eq!(all.intervals(&query).unwrap(), KeyIntervals::one(0, 16));
        assert_eq!(all.intervals(&Query { position: 16, ..query }).unwrap().ranges(), []);
    }
}
