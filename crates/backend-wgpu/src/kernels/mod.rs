//! The kernels: one WGSL text each, made for a [`Variant`] from a template.
//!
//! | kernel | what a workgroup owns | file |
//! |---|---|---|
//! | forward | 32 queries of a head | `forward.wgsl` |
//! | dq | 32 queries of a head | `backward_queries.wgsl` |
//! | dk, dv | 32 keys of a key head | `backward_keys.wgsl` |
//! | dbias | 32 queries or keys of a line of the bias | `backward_bias.wgsl` |
//! | all the others | 64 elements or rows | `copy.wgsl`, `finish_rows.wgsl`, `row_statistics.wgsl`, `sinks.wgsl`, `bias_rows.wgsl` |
//! | a probe | one product of matrices | `matrix_probe.wgsl` |
//!
//! A template has lines `#if FLAG`, `#if !FLAG`, `#else`, `#end`, and names in double braces that stand for generated text. Everything that costs
//! registers is decided here (widths, element type, whether a mask's rarer companions are there at all); the rest are numbers at run time, so
//! that few pipelines are made.

pub(crate) mod matrices;
pub(crate) mod numbers;
mod products;
mod template;

use annulus_core::DType;

use numbers::{CopyNumbers, RowNumbers};
use template::Template;

use crate::{Level, level::Matrices};

/// Rows and columns of a tile.
pub(crate) const TILE: usize = 32;

/// Columns of a product that 64 invocations keep in one register each, times 4 rows.
const GROUP: usize = 32;

/// How elements of the inputs lie in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Storage {
    F32,
    F16,
    Bf16,
}

impl Storage {
    /// Of an element type; `None` for f64.
    pub(crate) const fn of(dtype: DType) -> Option<Self> {
        match dtype {
            DType::F64 => None,
            DType::F32 => Some(Self::F32),
            DType::F16 => Some(Self::F16),
            DType::Bf16 => Some(Self::Bf16),
        }
    }

    /// Bytes of an element.
    pub(crate) const fn bytes(self) -> u64 {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }

    /// An expression for element `at` of `words`.
    fn load(self, words: &str) -> String {
        let half = format!("(({words}[at >> 1u] >> (16u * (at & 1u))) & 0xffffu)");
        match self {
            Self::F32 => format!("bitcast<f32>({words}[at])"),
            Self::F16 => format!("from_f16({half})"),
            Self::Bf16 => format!("from_bf16({half})"),
        }
    }

    /// The functions from and to its bits.
    const fn conversions(self) -> (&'static str, &'static str) {
        match self {
            Self::F32 => ("bitcast<f32>", "bitcast<u32>"),
            Self::F16 => ("from_f16", "to_f16"),
            Self::Bf16 => ("from_bf16", "to_bf16"),
        }
    }
}

/// How the gradient of a bias is gathered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum BiasAxes {
    /// Each pair has an element.
    Pairs,
    /// Each query has one: keys are summed up.
    Queries,
    /// Each key has one: queries are summed up.
    Keys,
}

/// How a copy treats what it copies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Copying {
    /// 2 or 4 bytes as they are.
    Raw {
        /// Of 2 bytes.
        half: bool,
    },
    /// f32 to the target's type, times one factor.
    Rounded(Storage),
    /// f32 to the target's type, times a factor a row.
    ByRow(Storage),
    /// f32 added to f32.
    Added,
}

/// What the kernels over tiles are made for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct TileVariant {
    pub(crate) storage: Storage,
    /// Groups of 32 elements of a query's and of a value's vector, powers of 2.
    pub(crate) head_groups: usize,
    pub(crate) value_groups: usize,
    /// Whether there may be a bias, a soft cap, dropout, rounded logits, an output that is not normalised.
    pub(crate) general: bool,
    /// Plain or subgroup.
    pub(crate) level: Level,
    /// What products of f16 elements are made of, where not of multiply-adds.
    pub(crate) matrices: Option<Matrices>,
}

impl TileVariant {
    /// Groups that hold `dim` elements.
    pub(crate) const fn groups(dim: usize) -> usize {
        dim.div_ceil(GROUP).next_power_of_two()
    }
}

/// One kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Variant {
    Forward(TileVariant),
    BackwardQueries(TileVariant),
    /// `travelling`: the queries have come as records.
    BackwardKeys(TileVariant, bool),
    BackwardBias(TileVariant, BiasAxes),
    Copy(Copying),
    FinishRows {
        normalize: bool,
    },
    RowStatistics(Storage),
    Sinks,
    BiasRows,
    MatrixProbe(Matrices),
}

/// What a binding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    Read,
    Write,
}

/// A kernel's text and its storage bindings, 1 and on (0 has the numbers).
pub(crate) struct Source {
    pub(crate) wgsl: String,
    pub(crate) bindings: Vec<Access>,
    /// Bytes of the numbers.
    pub(crate) numbers: usize,
}

const ARITHMETIC: &str = include_str!("arithmetic.wgsl");
const TILE_TEXT: &str = include_str!("tile.wgsl");
const GRADIENT: &str = include_str!("gradient.wgsl");

impl Variant {
    /// A name for labels and errors.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Forward(_) => "forward",
            Self::BackwardQueries(_) => "backward_queries",
            Self::BackwardKeys(..) => "backward_keys",
            Self::BackwardBias(..) => "backward_bias",
            Self::Copy(_) => "copy",
            Self::FinishRows { .. } => "finish_rows",
            Self::RowStatistics(_) => "row_statistics",
            Self::Sinks => "sinks",
            Self::BiasRows => "bias_rows",
            Self::MatrixProbe(_) => "matrix_probe",
        }
    }

    /// The kernel's text.
    pub(crate) fn source(self) -> Source {
        use Access::{Read, Write};
        let line = |text: &Template, wgsl: &str, numbers: &str, size: usize, bindings: &[Access]| Source {
            wgsl: format!("{numbers}{ARITHMETIC}{}", text.expand(wgsl)),
            bindings: bindings.to_vec(),
            numbers: size,
        };
        let of_rows =
            |text: &Template, wgsl: &str, bindings: &[Access]| line(text, wgsl, RowNumbers::WGSL, size_of::<RowNumbers>(), bindings);
        match self {
            Self::Forward(variant) => products::forward(variant),
            Self::BackwardQueries(variant) => products::backward_queries(variant),
            Self::BackwardKeys(variant, travelling) => products::backward_keys(variant, travelling),
            Self::BackwardBias(variant, axes) => products::backward_bias(variant, axes),
            Self::Copy(copying) => {
                let mut text = Template::default();
                let (storage, by_row) = match copying {
                    Copying::Rounded(storage) => (storage, false),
                    Copying::ByRow(storage) => (storage, true),
                    Copying::Raw { .. } | Copying::Added => (Storage::F32, false),
                };
                let half = copying == Copying::Raw { half: true };
                let raw = matches!(copying, Copying::Raw { .. } | Copying::Added);
                text.flag("RAW", raw).flag("ADD", copying == Copying::Added).flag("ROW_FACTORS", by_row).flag("FROM_HALF", half);
                text.flag("INTO_HALF", half || storage != Storage::F32);
                text.name("TO_BITS", storage.conversions().1).name("FROM_BITS", storage.conversions().0);
                let bindings: &[Access] = if by_row { &[Read, Write, Read] } else { &[Read, Write] };
                line(&text, include_str!("copy.wgsl"), CopyNumbers::WGSL, size_of::<CopyNumbers>(), bindings)
            }
            Self::FinishRows { normalize } => {
                let mut text = Template::default();
                text.flag("UNNORMALIZED", !normalize);
                let bindings: &[Access] = if normalize { &[Write, Read, Write] } else { &[Write, Read, Write, Write, Write, Write] };
                of_rows(&text, include_str!("finish_rows.wgsl"), bindings)
            }
            Self::RowStatistics(storage) => {
                let mut text = Template::default();
                text.name("LOAD_OUT", storage.load("out_words")).name("LOAD_DOUT", storage.load("dout_words"));
                of_rows(&text, include_str!("row_statistics.wgsl"), &[Read, Read, Read, Read, Read, Read, Write])
            }
            Self::Sinks => of_rows(&Template::default(), include_str!("sinks.wgsl"), &[Read, Read, Write]),
            Self::MatrixProbe(matrices) => matrices::probe(matrices),
            Self::BiasRows => of_rows(&Template::default(), include_str!("bias_rows.wgsl"), &[Read, Write]),
        }
    }
}

#[cfg(test)]
mod tests;
