//! The kernels: one WGSL text per [`KernelVariant`], expanded from a template.
//!
//! | kernel | output of a workgroup | file |
//! |---|---|---|
//! | forward | 32 or 64 queries of a head | `forward.wgsl` |
//! | decode | queries × heads of a group, a range of their keys | `forward.wgsl` |
//! | dQ | 32 queries of a head | `backward_queries.wgsl` |
//! | dK, dV | 32 keys of a KV head | `backward_keys.wgsl` |
//! | dbias | 32 queries or keys of one batch row and head of the bias | `backward_bias.wgsl` |
//! | row prologue, epilogue | 64 rows | `row_statistics.wgsl`, `finish_rows.wgsl` |
//! | merge of ranges of keys | a row of a head | `merge_ranges.wgsl` |
//! | sums over rows | one sum | `sinks.wgsl`, `bias_rows.wgsl` |
//! | copies | 64 elements | `copy.wgsl` |
//! | counter | number of batches that ran | `step.wgsl` |
//! | probes | shuffles; f16 to f32 | `step.wgsl` |
//! | | products of matrices | `matrix_probe.wgsl` |
//!
//! A template has lines `#if FLAG`, `#if !FLAG`, `#else`, `#end`; lines from `#halves` to `#end
//! halves` for each half of the queries of a tile; and names in double braces for generated text.
//! Properties that cost registers are decided here (dims, element type, score epilogue). The others
//! are uniform parameters, so that few pipelines are compiled.

mod backward_step;
mod dropout;
pub(crate) mod matrices;
mod matrix_epilogue;
mod matrix_sums;
pub(crate) mod offline;
pub(crate) mod params;
mod products;
mod tall_tiles;
mod template;
mod tile_kernels;
mod vectors;

use annulus_core::{DType, Spec};

use params::{CopyParams, MergeParams, RowParams, StepParams};
use template::Template;
use vectors::{HALF_STEP, PRODUCT_STEP};

use crate::{Level, RegisterTile, choice::Matrices};

/// Rows and columns of a tile.
pub(crate) const TILE: usize = 32;

/// Columns of one accumulator group: the register tiles of a workgroup cover 32 × 32.
const GROUP: usize = 32;

/// Upper bound of the ranges of keys of a tile.
pub(crate) const MAX_RANGES: usize = 512;

/// Element type of the inputs in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Storage {
    F32,
    F16,
    Bf16,
}

impl Storage {
    /// Storage of an element type; `None` for f64.
    pub(crate) const fn of(dtype: DType) -> Option<Self> {
        match dtype {
            DType::F64 => None,
            DType::F32 => Some(Self::F32),
            DType::F16 => Some(Self::F16),
            DType::Bf16 => Some(Self::Bf16),
        }
    }

    /// Bytes per element.
    pub(crate) const fn bytes(self) -> u64 {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }

    /// Expression for element `at` of `words`. `unpacks`: f16 by the device's own conversion.
    fn load(self, words: &str, at: &str, unpacks: bool) -> String {
        let half = format!("({words}[({at}) >> 1u] >> (16u * (({at}) & 1u)))");
        match self {
            Self::F32 => format!("bitcast<f32>({words}[{at}])"),
            Self::F16 if unpacks => format!("unpack2x16float({half}).x"),
            Self::F16 => format!("from_f16({half} & 0xffffu)"),
            // the shift discards the upper half
            Self::Bf16 => format!("from_bf16({half})"),
        }
    }

    /// Kind of the elements of a binding that an aligned kernel reads: four elements each.
    const fn four(self) -> &'static str {
        match self {
            Self::F32 => "vec4<u32>",
            Self::F16 | Self::Bf16 => "vec2<u32>",
        }
    }

    /// Expression for the four elements in `words`, of the kind [`Self::four`].
    fn load_four(self, words: &str, unpacks: bool) -> String {
        match self {
            Self::F32 => format!("bitcast<vec4<f32>>({words})"),
            Self::F16 if unpacks => {
                format!("vec4<f32>(unpack2x16float({words}.x), unpack2x16float({words}.y))")
            }
            Self::F16 => {
                let parts = ["x & 0xffffu", "x >> 16u", "y & 0xffffu", "y >> 16u"];
                let parts = parts.map(|part| format!("from_f16({words}.{part})"));
                format!("vec4<f32>({})", parts.join(", "))
            }
            Self::Bf16 => format!(
                "bitcast<vec4<f32>>(vec4<u32>({words}.xxyy << vec4<u32>(16u, 0u, 16u, 0u))
        & vec4<u32>(0xffff0000u))"
            ),
        }
    }

    /// WGSL functions from and to the element's bits.
    const fn conversions(self) -> (&'static str, &'static str) {
        match self {
            Self::F32 => ("bitcast<f32>", "bitcast<u32>"),
            Self::F16 => ("from_f16", "to_f16"),
            Self::Bf16 => ("from_bf16", "to_bf16"),
        }
    }
}

/// Reduction of the gradient of a bias.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum BiasAxes {
    /// One element per pair.
    Pairs,
    /// One element per query: summed over keys.
    Queries,
    /// One element per key: summed over queries.
    Keys,
}

/// Conversion of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum CopyMode {
    /// Bits unchanged.
    Raw {
        /// Elements of 2 bytes rather than 4.
        half: bool,
    },
    /// f32 to the target's type, times a uniform factor.
    Rounded(Storage),
    /// f32 to the target's type, times a factor per row.
    ByRow(Storage),
    /// f32 accumulated into f32.
    Added,
}

/// Work on the scores of a tile after their products that a kernel's text contains. Each of the
/// usual ones has kernels of its own, which take fewer registers than that of all; combinations
/// have the kernel of all, so that few pipelines are compiled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Epilogue {
    /// Scale only.
    Simple,
    /// Soft cap.
    SoftCap,
    /// Dropout.
    Dropout,
    /// A bias tensor.
    Bias,
    /// Any combination, also bias functions, rounded logits and unnormalized outputs: uniform
    /// branches.
    General,
}

impl Epilogue {
    pub(crate) const ALL: [Self; 5] =
        [Self::Simple, Self::SoftCap, Self::Dropout, Self::Bias, Self::General];

    /// Returns the epilogue of a spec.
    pub(crate) const fn of(spec: &Spec) -> Self {
        if spec.bias_function.is_some() || !spec.normalize || spec.logits_dtype.bytes() < 4 {
            return Self::General;
        }
        match (spec.bias.is_some(), spec.soft_cap.is_some(), spec.dropout.is_some()) {
            (false, false, false) => Self::Simple,
            (false, true, false) => Self::SoftCap,
            (false, false, true) => Self::Dropout,
            (true, false, false) => Self::Bias,
            _ => Self::General,
        }
    }

    /// Name in tables.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Simple => "simple",
            Self::SoftCap => "soft-cap",
            Self::Dropout => "dropout",
            Self::Bias => "bias",
            Self::General => "general",
        }
    }

    /// True if the text calls the functions of dropout; that of a bias, under a false condition.
    const fn calls_dropout(self) -> bool {
        !matches!(self, Self::Simple | Self::SoftCap)
    }

    /// True if scores may mask pairs, as a bias of −∞ does: full tiles have masks, too.
    const fn masks(self) -> bool {
        matches!(self, Self::Bias | Self::General)
    }
}

/// Orientation of a tile of the backward pass.
#[derive(Clone, Copy, PartialEq)]
enum Orientation {
    RowsAreQueries,
    RowsAreKeys,
}

/// Parameters of a tile kernel's text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct TileVariant {
    pub(crate) storage: Storage,
    /// True if f16 elements are widened by the device's own conversion.
    pub(crate) unpacks: bool,
    /// True if vectors begin at multiples of 4 elements in their bindings and consist of whole
    /// fours: the kernel loads and stores four elements at once.
    pub(crate) aligned: bool,
    /// Groups of 32 elements of head and value dim, rounded up to powers of 2.
    pub(crate) head_groups: usize,
    pub(crate) value_groups: usize,
    pub(crate) epilogue: Epilogue,
    /// True if the products of dropout's Philox are computed in 64 bits.
    pub(crate) has_u64: bool,
    /// Forward of few queries: rows of a tile are packed heads, and a tile has several ranges of
    /// keys (`split_kv.rs`).
    pub(crate) decodes: bool,
    /// Register tile of kernels of multiply-adds.
    pub(crate) register_tile: RegisterTile,
    /// Rows are reduced through workgroup memory, or at level matrix by subgroup shuffles.
    pub(crate) level: Level,
    /// Cooperative matrices for f16 products, if any.
    pub(crate) matrices: Option<Matrices>,
    /// Forward without packed heads: 64 queries of a workgroup instead of 32.
    pub(crate) tall: bool,
}

impl TileVariant {
    /// True if dV and dK of these dims are computed in two passes, because their accumulators
    /// together take too many registers: the rows of a register tile × 4 columns for each group.
    pub(crate) const fn splits_gradients(
        tile: RegisterTile,
        head_dim: usize,
        value_dim: usize,
    ) -> bool {
        let groups = Self::groups(head_dim) + Self::groups(value_dim);
        4 * tile.rows() * groups > tile.max_accumulators()
    }

    /// Returns the register tile of a kernel of dK and dV, or of dbias, of up to `groups` groups.
    ///
    /// An invocation of a GPU for which [`RegisterTile::TwoRows`] is meant has 128 registers. With
    /// two rows the accumulators of dim 256 take 64 of them, and an epilogue that masks pairs holds
    /// bias, dropout factors and statistics of its pairs. Forward and dQ keep accumulators in
    /// memory instead ([`Self::held_groups`]); dK and dV, which a launch adds to what is in memory
    /// only at its end, have nowhere to keep them.
    pub(crate) const fn fitting_tile(
        tile: RegisterTile,
        epilogue: Epilogue,
        groups: usize,
    ) -> RegisterTile {
        let max_groups = if epilogue.masks() { 0 } else { 4 };
        match tile {
            RegisterTile::TwoRows if groups > max_groups => RegisterTile::OneRow,
            _ => tile,
        }
    }

    /// Returns the variant with the register tile that fits a kernel of dK and dV, or of dbias.
    fn fitting(self) -> Self {
        let groups = self.head_groups.max(self.value_groups);
        let register_tile = Self::fitting_tile(self.register_tile, self.epilogue, groups);
        Self { register_tile, ..self }
    }

    /// Returns how many of `groups` accumulators of O or dQ the kernel holds in registers. The
    /// others are in memory between two tiles. Of two rows, four groups hold the 128 columns that
    /// most models have; an epilogue that masks pairs leaves registers for `masked` groups.
    fn held_groups(self, groups: usize, masked: usize) -> usize {
        let most = match (self.used_register_tile(), self.epilogue.masks()) {
            (RegisterTile::FourRows, _) => 8,
            (_, false) => 4,
            (_, true) => masked,
        };
        groups.min(most)
    }

    /// Returns the cooperative matrices that a kernel of this variant uses.
    pub(crate) fn used_matrices(self) -> Option<Matrices> {
        self.matrices.filter(|_| self.storage == Storage::F16)
    }

    /// True if forward computes the parts of the score epilogue one after the other
    /// ([`matrix_epilogue`]).
    fn has_epilogue_by_parts(self) -> bool {
        self.used_matrices().is_some()
            && self.epilogue == Epilogue::General
            && self.has_wide_products()
    }

    /// True if a kernel of the backward pass with so many groups of accumulators does: beside four
    /// the values of 16 pairs fit registers.
    fn has_backward_by_parts(self, groups: usize) -> bool {
        self.has_epilogue_by_parts() && groups <= 4
    }

    /// Returns the kernel's register tile. With matrices, whose subgroups divide 64 invocations, it
    /// has four rows.
    fn used_register_tile(self) -> RegisterTile {
        if self.used_matrices().is_some() { RegisterTile::FourRows } else { self.register_tile }
    }

    /// True if dropout multiplies in 64 bits, a block of four keys at once. Register tiles of fewer
    /// rows lack the registers: by Mesa's compiler for Intel more kernels would spill.
    fn has_wide_products(self) -> bool {
        self.has_u64 && self.used_register_tile() == RegisterTile::FourRows
    }

    /// True if offsets of rows count fours of elements. In register tiles of fewer rows they count
    /// elements: by Mesa's compiler for Intel dK and dV of dim 64 would spill.
    fn counts_fours(self) -> bool {
        self.aligned && self.used_register_tile() == RegisterTile::FourRows
    }

    /// True if vectors are bound as f16: at level matrix, which has f16 arithmetic. A device whose
    /// conversions flush subnormal numbers reads words.
    fn binds_halves(self) -> bool {
        self.aligned && self.unpacks && self.used_matrices().is_some()
    }

    /// Queries of a tile.
    const fn query_rows(self) -> usize {
        if self.tall { TallTile::ROWS } else { TILE }
    }

    /// True if forward can have tall tiles on a device with this much workgroup memory: with
    /// matrices of subgroups of one size, which hold the queries.
    pub(crate) fn can_be_tall(self, memory_bytes: usize) -> bool {
        let are_owned =
            self.used_matrices().is_some_and(|matrices| !matrices.has_smaller_subgroups());
        are_owned
            && self.head_groups <= TallTile::MAX_GROUPS
            && TallTile::MEMORY_BYTES <= memory_bytes
    }

    /// Invocations of a workgroup.
    fn invocations(self) -> usize {
        if self.tall {
            TallTile::INVOCATIONS
        } else {
            self.used_register_tile().invocations() as usize
        }
    }

    /// Number of groups for `dim` elements.
    pub(crate) const fn groups(dim: usize) -> usize {
        dim.div_ceil(GROUP).next_power_of_two()
    }
}

/// A tall tile of forward (`tall_tiles.rs`), whose queries matrices of the subgroups hold.
pub(crate) struct TallTile;

impl TallTile {
    /// Queries.
    pub(crate) const ROWS: usize = 64;

    /// Invocations of a workgroup.
    pub(crate) const INVOCATIONS: usize = 2 * Self::ROWS;

    /// Elements of K or V that are staged at once.
    const CHUNK: usize = 64;

    /// Most groups of 32 elements that matrices hold: in subgroups of 32 a quarter of the elements
    /// of Q, two a register, takes 32 registers of an invocation.
    const MAX_GROUPS: usize = 4;

    /// Upper bound of the bytes of workgroup memory of a kernel: staged rows, products, tile mask,
    /// and the flag of non-finite elements.
    const MEMORY_BYTES: usize = 8 * HALF_STEP * (Self::ROWS + Self::CHUNK)
        + 16 * PRODUCT_STEP * Self::ROWS
        + 4 * Self::ROWS
        + 16;
}

/// A kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum KernelVariant {
    Forward(TileVariant),
    BackwardQueries(TileVariant),
    /// The flag: queries are wire records.
    BackwardKeys(TileVariant, bool),
    BackwardBias(TileVariant, BiasAxes),
    Copy(CopyMode),
    FinishRows {
        /// True if maxima and sums are written.
        with_sums: bool,
        normalize: bool,
    },
    RowStatistics(Storage),
    MergeRanges,
    Sinks,
    BiasRows,
    Count,
    SubgroupProbe,
    UnpackProbe,
    MatrixProbe(Matrices),
}

/// Access mode of a binding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    Read,
    Write,
}

/// Text of a kernel and its storage bindings, from binding 1 on; binding 0 has the uniform
/// parameters.
pub(crate) struct Source {
    pub(crate) wgsl: String,
    pub(crate) bindings: Vec<Access>,
    /// Size of the uniform parameters in bytes.
    pub(crate) params: usize,
}

const ARITHMETIC: &str = include_str!("arithmetic.wgsl");
const TILE_TEXT: &str = include_str!("tile.wgsl");
const GRADIENT: &str = include_str!("gradient.wgsl");
const DROPOUT: &str = include_str!("dropout.wgsl");

impl KernelVariant {
    /// Name for labels and errors.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Forward(TileVariant { decodes: true, .. }) => "decode",
            Self::Forward(_) => "forward",
            Self::BackwardQueries(_) => "backward_queries",
            Self::BackwardKeys(..) => "backward_keys",
            Self::BackwardBias(..) => "backward_bias",
            Self::Copy(_) => "copy",
            Self::FinishRows { .. } => "finish_rows",
            Self::RowStatistics(_) => "row_statistics",
            Self::MergeRanges => "merge_ranges",
            Self::Sinks => "sinks",
            Self::BiasRows => "bias_rows",
            Self::Count => "count",
            Self::SubgroupProbe => "subgroup_probe",
            Self::UnpackProbe => "unpack_probe",
            Self::MatrixProbe(_) => "matrix_probe",
        }
    }

    /// Generates the text.
    pub(crate) fn source(self) -> Source {
        use Access::{Read, Write};
        let of_rows = |text: &Template, wgsl: &str, bindings: &[Access]| Source {
            wgsl: format!("{}{ARITHMETIC}{}", RowParams::WGSL, text.expand(wgsl)),
            bindings: bindings.to_vec(),
            params: size_of::<RowParams>(),
        };
        let of_step = |kernel: &'static str| {
            let mut text = Template::default();
            text.flag(kernel, true);
            Source {
                wgsl: [StepParams::WGSL, &text.expand(include_str!("step.wgsl"))].concat(),
                bindings: vec![Write],
                params: size_of::<StepParams>(),
            }
        };
        match self {
            Self::Forward(variant) => tile_kernels::forward(variant),
            Self::BackwardQueries(variant) => tile_kernels::backward_queries(variant),
            Self::BackwardKeys(variant, from_records) => {
                tile_kernels::backward_keys(variant.fitting(), from_records)
            }
            Self::BackwardBias(variant, axes) => {
                tile_kernels::backward_bias(variant.fitting(), axes)
            }
            Self::Copy(mode) => copy_source(mode),
            Self::FinishRows { with_sums, normalize } => {
                let mut text = Template::default();
                text.flag("SUMS", with_sums).flag("UNNORMALIZED", !normalize);
                let mut bindings = vec![Write, Read, Write];
                bindings.extend([Write; 2].iter().filter(|_| with_sums));
                bindings.extend((!normalize).then_some(Write));
                of_rows(&text, include_str!("finish_rows.wgsl"), &bindings)
            }
            Self::RowStatistics(storage) => {
                let mut text = Template::default();
                text.name("LOAD_OUT", storage.load("out_words", "at", false))
                    .name("LOAD_DOUT", storage.load("dout_words", "at", false));
                of_rows(
                    &text,
                    include_str!("row_statistics.wgsl"),
                    &[Read, Read, Read, Read, Read, Read, Write],
                )
            }
            Self::Sinks => {
                of_rows(&Template::default(), include_str!("sinks.wgsl"), &[Read, Read, Write])
            }
            Self::MergeRanges => {
                let mut text = Template::default();
                text.name("MAX_RANGES", MAX_RANGES.to_string());
                let wgsl = text.expand(include_str!("merge_ranges.wgsl"));
                Source {
                    wgsl: [MergeParams::WGSL, ARITHMETIC, &wgsl].concat(),
                    bindings: vec![Read, Read, Write, Write],
                    params: size_of::<MergeParams>(),
                }
            }
            Self::Count => of_step("COUNT"),
            Self::SubgroupProbe => of_step("SUBGROUP_PROBE"),
            Self::UnpackProbe => of_step("UNPACK_PROBE"),
            Self::MatrixProbe(matrices) => matrices::probe(matrices),
            Self::BiasRows => {
                of_rows(&Template::default(), include_str!("bias_rows.wgsl"), &[Read, Write])
            }
        }
    }
}

/// Generates the text of a copy.
fn copy_source(mode: CopyMode) -> Source {
    let mut text = Template::default();
    let (storage, by_row) = match mode {
        CopyMode::Rounded(storage) => (storage, false),
        CopyMode::ByRow(storage) => (storage, true),
        CopyMode::Raw { .. } | CopyMode::Added => (Storage::F32, false),
    };
    let half = mode == CopyMode::Raw { half: true };
    let raw = matches!(mode, CopyMode::Raw { .. } | CopyMode::Added);
    text.flag("RAW", raw)
        .flag("ADD", mode == CopyMode::Added)
        .flag("ROW_FACTORS", by_row)
        .flag("FROM_HALF", half)
        .flag("INTO_HALF", half || storage != Storage::F32);
    text.name("TO_BITS", storage.conversions().1).name("FROM_BITS", storage.conversions().0);
    let bindings = if by_row {
        vec![Access::Read, Access::Write, Access::Read]
    } else {
        vec![Access::Read, Access::Write]
    };
    Source {
        wgsl: format!("{}{ARITHMETIC}{}", CopyParams::WGSL, text.expand(include_str!("copy.wgsl"))),
        bindings,
        params: size_of::<CopyParams>(),
    }
}

#[cfg(test)]
mod tests;
