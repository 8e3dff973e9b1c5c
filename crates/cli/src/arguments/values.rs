//! Values of flags, parsed and validated before any file is opened.

use std::{ffi::OsStr, str::FromStr, time::Duration};

use annulus::{Attention, BiasOrder, Division, backend::BackendName, comm::deadline};
use annulus_core::{Batch, DType, Dims, Placement, Result as LibraryResult, Spec};
use annulus_plan::{Choice, Layout, Strategy};
use clap::{
    Arg, Args, Command, ValueEnum,
    builder::{PossibleValue, PossibleValuesParser, TypedValueParser},
};

use crate::failure::{Failure, Outcome};

/// The most ranks of `plan`, which takes O(ranks) time and memory: a second for these.
const MOST_PLANNED_RANKS: usize = 1 << 16;
/// The most ranks in one process, each a thread with buffers of its own.
const MOST_RANKS: usize = 128;
/// The most threads of one rank. [`super::ring::threads_per_rank`] bounds it further by the cores.
const MOST_THREADS: usize = 1024;

/// Sliding window `L,R`. A side may be `none`; one number is for both sides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct WindowSides {
    /// Visible keys before the query; `None` is no bound.
    pub(crate) left: Option<u64>,
    /// Visible keys after the query; `None` is no bound.
    pub(crate) right: Option<u64>,
}

impl FromStr for WindowSides {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let side = |side: &str| match side.trim() {
            "none" => Ok(None),
            number => number.parse().map(Some).map_err(|_| {
                "want L,R, each `none` or a whole number from 0 to 2^64 - 1".to_owned()
            }),
        };
        let (left, right) = text.split_once(',').unwrap_or((text, text));
        Ok(Self { left: side(left)?, right: side(right)? })
    }
}

impl std::fmt::Display for WindowSides {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let side = |side: Option<u64>| side.map_or("none".to_owned(), |len| len.to_string());
        write!(f, "{},{}", side(self.left), side(self.right))
    }
}

/// Returns the parser of an element type.
pub(crate) fn dtype() -> impl TypedValueParser<Value = DType> {
    one_of([
        (DType::F64, DType::F64.name(), "64-bit IEEE, accumulated in f64"),
        (DType::F32, DType::F32.name(), "32-bit IEEE, accumulated in f32"),
        (DType::Bf16, DType::Bf16.name(), "bfloat16, accumulated in f32"),
        (DType::F16, DType::F16.name(), "16-bit IEEE, accumulated in f32"),
    ])
}

/// Returns the parser of an order of bias and soft cap.
pub(crate) fn bias_order() -> impl TypedValueParser<Value = BiasOrder> {
    one_of([
        (BiasOrder::BeforeSoftCap, "before", "cap·tanh((x + bias)/cap)"),
        (BiasOrder::AfterSoftCap, "after", "cap·tanh(x/cap) + bias"),
    ])
}

/// Returns the parser of a backend, which this build may not have.
pub(crate) fn backend() -> impl TypedValueParser<Value = BackendName> {
    one_of([
        (BackendName::Cpu, BackendName::Cpu.name(), "Host memory and SIMD"),
        (BackendName::Wgpu, BackendName::Wgpu.name(), "Any GPU through WebGPU"),
        (BackendName::Cuda, BackendName::Cuda.name(), "NVIDIA GPUs"),
        (BackendName::Hip, BackendName::Hip.name(), "AMD GPUs"),
    ])
}

/// Returns the parser of values by name, each with its help.
fn one_of<T: Copy + Send + Sync + 'static, const N: usize>(
    all: [(T, &'static str, &'static str); N],
) -> impl TypedValueParser<Value = T> {
    let names = all.map(|(_, name, help)| PossibleValue::new(name).help(help));
    PossibleValuesParser::new(names).try_map(move |text| {
        let found = all.iter().find(|(_, name, _)| *name == text);
        found.map(|(value, ..)| *value).ok_or("want one of the possible values")
    })
}

/// Returns the parser of a layout: a name, or `boxes:SHAPE`.
pub(crate) fn layout() -> impl TypedValueParser<Value = LayoutName> {
    LayoutParser
}

#[derive(Clone)]
struct LayoutParser;

impl TypedValueParser for LayoutParser {
    type Value = LayoutName;

    fn parse_ref(
        &self,
        command: &Command,
        flag: Option<&Arg>,
        value: &OsStr,
    ) -> Result<LayoutName, clap::Error> {
        match value.to_str().and_then(|text| text.strip_prefix("boxes:")) {
            Some(shape) => {
                let read = |text: &str| text.parse().map(LayoutName::Boxes);
                read.parse_ref(command, flag, OsStr::new(shape))
            }
            None => {
                let name = PossibleValuesParser::new(possible_layouts());
                let value = name.parse_ref(command, flag, value)?;
                // `boxes:SHAPE` itself is no shape
                let read = |text: &str| <LayoutName as ValueEnum>::from_str(text, false);
                read.parse_ref(command, flag, OsStr::new(&value))
            }
        }
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        Some(Box::new(possible_layouts()))
    }
}

fn possible_layouts() -> impl Iterator<Item = PossibleValue> {
    let boxes = PossibleValue::new("boxes:SHAPE")
        .help("Boxes of least surface of a grid, as boxes:64x128, with rows in patches");
    LayoutName::value_variants().iter().filter_map(ValueEnum::to_possible_value).chain([boxes])
}

/// Points of a grid along its axes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shape {
    lens: [u64; 3],
    axes: usize,
}

impl Shape {
    fn lens(&self) -> &[u64] {
        &self.lens[..self.axes]
    }
}

impl FromStr for Shape {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let want = || "want one to three numbers of points, as 64x128".to_owned();
        let mut shape = Self { lens: [1; 3], axes: 0 };
        for len in text.split('x') {
            let into = shape.lens.get_mut(shape.axes).ok_or_else(want)?;
            *into = len.parse().map_err(|_| want())?;
            shape.axes += 1;
        }
        Ok(shape)
    }
}

/// Names of layouts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum LayoutName {
    /// Chosen from the mask.
    Auto,
    /// Rank r owns one run of rows.
    Contiguous,
    /// Rank r owns chunks r and 2·ranks − 1 − r of 2·ranks.
    Zigzag,
    /// Rank r owns rows r, r + ranks, …
    Striped,
    /// Equal rows and work on every rank, for the documents of the batch.
    Balanced,
    /// Boxes of least surface of a grid.
    #[value(skip)]
    Boxes(Shape),
}

impl std::fmt::Display for LayoutName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match (self, self.to_possible_value()) {
            (Self::Boxes(shape), _) => {
                let lens: Vec<String> = shape.lens().iter().map(u64::to_string).collect();
                write!(f, "boxes:{}", lens.join("x"))
            }
            (_, name) => f.write_str(name.as_ref().map_or("", PossibleValue::get_name)),
        }
    }
}

impl LayoutName {
    /// Returns the layout that does not depend on a batch; `None` chooses one.
    pub(crate) fn layout(self, dims: &Dims, ranks: usize) -> LibraryResult<Option<Layout>> {
        Ok(match self {
            Self::Auto | Self::Balanced => None,
            Self::Contiguous => Some(Layout::Contiguous),
            Self::Zigzag => Some(Layout::Zigzag),
            Self::Striped => Some(Layout::Striped),
            Self::Boxes(shape) => {
                let layout = Layout::boxes(shape.lens(), ranks)?;
                layout.validate(dims.q_len, dims.kv_len, ranks)?;
                Some(layout)
            }
        })
    }

    /// Sets the layout of a division among `ranks` ranks, and with `balanced` its route. `batch` is
    /// called for the balanced layout only; it returns the batch of all rows.
    pub(crate) fn apply(
        self,
        division: Division,
        attention: &Attention,
        dims: Dims,
        ranks: usize,
        batch: impl FnOnce() -> LibraryResult<Batch>,
    ) -> LibraryResult<Division> {
        match self {
            Self::Balanced => division.balanced(attention, dims, &batch()?, ranks),
            _ => Ok(division.layout(self.layout(&dims, ranks)?)),
        }
    }

    /// Returns layout and route that a plan of `spec` chooses. Those of the balanced layout depend
    /// on documents too ([`Choice::balanced`]).
    pub(crate) fn choice(
        self,
        spec: &Spec,
        ranks: usize,
        placement: Option<&Placement>,
    ) -> LibraryResult<Choice> {
        let fixed = self.layout(&spec.dims, ranks)?;
        let fixed = spec.leaf_rows.map_or(fixed.clone(), |rows| fixed.map(|of| of.at_leaves(rows)));
        Ok(Choice::auto(spec, ranks, fixed.as_ref(), placement, &mut || ()))
    }
}

/// Flags of the lengths of a problem besides those of its sequences.
#[derive(Debug, Clone, Args)]
pub(crate) struct ShapeFlags {
    /// Batch rows
    #[arg(long, value_name = "N", default_value = "1", value_parser = count)]
    pub(crate) batch: usize,
    /// Query heads
    #[arg(long, value_name = "N", default_value = "8", value_parser = count)]
    pub(crate) heads: usize,
    /// KV heads. Default: as many as query heads
    #[arg(long, value_name = "N", value_parser = count)]
    pub(crate) kv_heads: Option<usize>,
    /// Dim of queries and keys, 1 to 1024
    #[arg(long, value_name = "N", default_value = "64", value_parser = dim)]
    pub(crate) head_dim: usize,
    /// Dim of values, 1 to 1024. Default: that of queries
    #[arg(long, value_name = "N", value_parser = dim)]
    pub(crate) value_dim: Option<usize>,
}

impl ShapeFlags {
    /// Returns the lengths of a problem with these sequences.
    pub(crate) fn dims(&self, q_len: usize, kv_len: Option<usize>) -> Dims {
        Dims {
            batch: self.batch,
            q_len,
            kv_len: kv_len.unwrap_or(q_len),
            q_heads: self.heads,
            kv_heads: self.kv_heads.unwrap_or(self.heads),
            head_dim: self.head_dim,
            value_dim: self.value_dim.unwrap_or(self.head_dim),
        }
    }
}

/// Parses a strategy.
pub(crate) fn strategy(text: &str) -> Result<Strategy, String> {
    text.parse().map_err(|_| format!("want {}", Strategy::EXPECTED))
}

/// Parses a finite number.
pub(crate) fn finite(text: &str) -> Result<f64, String> {
    number(text).filter(|number| number.is_finite()).ok_or_else(|| "want a finite number".into())
}

/// Parses a finite number above 0.
pub(crate) fn positive(text: &str) -> Result<f64, String> {
    number(text)
        .filter(|number| number.is_finite() && *number > 0.0)
        .ok_or_else(|| "want a finite number above 0".into())
}

/// Parses a probability below 1.
pub(crate) fn probability(text: &str) -> Result<f64, String> {
    number(text)
        .filter(|number| (0.0..1.0).contains(number))
        .ok_or_else(|| "want a probability from 0 to below 1".into())
}

/// Parses a probability from 0 to 1, both included.
pub(crate) fn share(text: &str) -> Result<f64, String> {
    number(text)
        .filter(|number| (0.0..=1.0).contains(number))
        .ok_or_else(|| "want a probability from 0 to 1".into())
}

/// Parses a deadline in seconds: at least the library's minimum, at most 10⁶ s (11 days).
pub(crate) fn silence(text: &str) -> Result<Duration, String> {
    let least = deadline::LEAST.as_secs_f64();
    let most = 1e6;
    let seconds = number(text).filter(|seconds| (least..=most).contains(seconds));
    seconds
        .map(Duration::from_secs_f64)
        .ok_or_else(|| format!("want seconds, from {least} to {most}"))
}

/// Parses a whole number from 0.
pub(crate) fn whole(text: &str) -> Result<usize, String> {
    text.parse().map_err(|_| "want a whole number from 0 to 2^64 - 1".into())
}

/// As [`whole`], in 64 bits.
pub(crate) fn whole_u64(text: &str) -> Result<u64, String> {
    whole(text).map(|number| number as u64)
}

/// Parses a count from 1.
pub(crate) fn count(text: &str) -> Result<usize, String> {
    text.parse()
        .ok()
        .filter(|&count| count > 0)
        .ok_or_else(|| "want a whole number from 1 to 2^64 - 1".into())
}

/// Parses a head or value dim.
pub(crate) fn dim(text: &str) -> Result<usize, String> {
    count_to(Dims::MAX_DIM, text)
}

/// As [`count`], in 64 bits.
pub(crate) fn count_u64(text: &str) -> Result<u64, String> {
    count(text).map(|count| count as u64)
}

/// Parses a number of ranks of this process.
pub(crate) fn ranks(text: &str) -> Result<usize, String> {
    count_to(MOST_RANKS, text)
}

/// Parses a number of ranks of `plan`.
pub(crate) fn planned_ranks(text: &str) -> Result<usize, String> {
    count_to(MOST_PLANNED_RANKS, text)
}

/// Parses a number of rows of a page of a KV cache.
pub(crate) fn page_rows(text: &str) -> Result<usize, String> {
    count_to(1 << 32, text)
}

/// Parses a number of sink logits per head.
pub(crate) fn sinks_count(text: &str) -> Result<usize, String> {
    count_to(1 << 16, text)
}

/// Parses a number of threads of one rank.
pub(crate) fn threads(text: &str) -> Result<usize, String> {
    count_to(MOST_THREADS, text)
}

fn count_to(most: usize, text: &str) -> Result<usize, String> {
    count(text)
        .ok()
        .filter(|&count| count <= most)
        .ok_or_else(|| format!("want a whole number from 1 to {most}"))
}

fn number(text: &str) -> Option<f64> {
    text.trim().parse().ok()
}

/// Name of the flag of packed documents.
pub(crate) const DOCUMENTS: &str = "--documents";

/// Returns the rows of all documents.
///
/// # Errors
/// [`Failure::Usage`] for 2⁶³ rows or more.
pub(crate) fn rows_of_documents(documents: &[usize]) -> Outcome<usize> {
    let total = documents.iter().try_fold(0usize, |sum, &len| sum.checked_add(len));
    let total = total.filter(|&total| i64::try_from(total).is_ok());
    total.ok_or_else(|| {
        Failure::usage(DOCUMENTS, "lengths of 2^63 or more together", "shorter documents")
    })
}

/// Checks that documents fill both sequences.
///
/// # Errors
/// [`Failure::Usage`] naming the flag and both lengths.
pub(crate) fn check_documents(documents: &[usize], dims: &Dims) -> Outcome {
    if documents.is_empty() {
        return Ok(());
    }
    let rows = rows_of_documents(documents)?;
    for (len, side) in [(dims.q_len, "queries"), (dims.kv_len, "keys")] {
        if rows != len {
            let got = format!("lengths of {rows} rows together");
            return Err(Failure::usage(DOCUMENTS, got, format!("{len}, the number of {side}")));
        }
    }
    Ok(())
}

/// Returns the batch of the documents: the default one if there are none. [`rows_of_documents`]
/// must have accepted them.
pub(crate) fn packed(documents: &[usize]) -> Batch {
    let starts = std::iter::once(0).chain(documents.iter().scan(0i64, |end, &len| {
        *end += len as i64;
        Some(*end)
    }));
    let starts = (!documents.is_empty()).then(|| starts.collect::<Vec<_>>());
    Batch { cum_seqlens_q: starts.clone(), cum_seqlens_k: starts, ..Batch::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_are_parsed_and_printed() {
        let window = |left, right| Ok(WindowSides { left, right });
        assert_eq!("7,2".parse(), window(Some(7), Some(2)));
        assert_eq!("none,0".parse(), window(None, Some(0)));
        assert_eq!("3, none".parse(), window(Some(3), None));
        assert_eq!("4".parse(), window(Some(4), Some(4)));
        for bad in ["", "-1,3", "1,2,3", "x", "1.5,2", ",", "1,"] {
            assert!(bad.parse::<WindowSides>().is_err(), "{bad}");
        }
        assert_eq!(WindowSides { left: None, right: Some(2) }.to_string(), "none,2");
    }
}
