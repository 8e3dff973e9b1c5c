//! Tall tiles of forward: 64 queries of a workgroup, so that a row of K or V that is loaded and
//! staged serves twice as many queries as in a tile of 32.
//!
//! **With multiply-adds** ([`TallTile::EightRows`]) each of 64 invocations computes 8 × 4 pairs:
//! four rows of either half. For four elements of a product it reads 12 vectors of 4 from workgroup
//! memory and issues 128 multiply-adds; a register tile of 4 × 4 reads 8 for 64. The kernel is that
//! of tiles of 32 queries, with the lines of a row once for each half ([`Half`]).
//!
//! **With matrices** a workgroup has 128 invocations:
//!
//! ```text
//! q ← Q, 64 queries of all elements                    once, if they fit (TallTile)
//! for each tile of 32 keys:
//!     for each 64 elements:  right_half[key][element] ← K;  S += q · right_halfᵀ
//!     softmax of S, 4 × 4 pairs an invocation;  left_half ← P
//!     for each 64 elements:  right_half[element][key] ← V
//!                            for each 32: products ← left_half · right_halfᵀ; O += products
//! ```
//! Loads of 64 elements are in flight together, four vectors of K or V an invocation. Sums have the
//! order of those of tiles of 32 queries, so results have the same bits. A subgroup owns whole rows
//! of matrices, as far as there are enough; then only K and V pass between subgroups.
//!
//! Workgroup memory decides how many workgroups a multiprocessor runs: NVIDIA's driver gives all of
//! them 48 KiB together. That is room for two of a tall tile that holds Q in matrices, and for one
//! of a tile that keeps Q there, which took 1.6 to 1.9 times as long on an H200
//! (benches/record/wgpu.md).
//!
//! Source: padded rows and 128 invocations are those of llama.cpp's `flash_attn_cm1.comp`, whose
//! tiles have 16 queries and 64 keys; Q in workgroup memory as well.

use std::fmt::Write;

use super::{
    TILE, TileVariant,
    matrices::{
        Grid, HALF_STEP, Operands, PRODUCT_STEP, Staged, SumOverChunks, hold, multiply_held,
    },
    template::Half,
    vectors::{K, Q, ROW_STEP},
};
use crate::level::Matrices;

/// A tall tile, by what holds its queries during the loop over keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum TallTile {
    /// Matrices of the subgroups that multiply them.
    Held,
    /// Workgroup memory.
    Kept {
        /// Groups of 32 elements.
        groups: usize,
    },
    /// Nothing: they are loaded again for each tile of keys, 64 elements at a time.
    Reloaded,
    /// Nothing: they are loaded again for each tile of keys, 32 elements at a time, and multiplied
    /// without matrices, 8 × 4 pairs an invocation.
    EightRows,
}

impl TallTile {
    /// Queries.
    pub(crate) const ROWS: usize = 64;

    /// Invocations of a workgroup with matrices.
    const INVOCATIONS: usize = 2 * Self::ROWS;

    /// Halves of the queries of [`Self::EightRows`].
    pub(super) const HALVES: [Half; 2] =
        [Half::FIRST, Half { suffix: "_lower", first_row: Self::ROWS / 2 }];

    /// Most groups of 32 columns of accumulators of [`Self::EightRows`]: each group takes 32 of up
    /// to 256 registers of an invocation.
    pub(super) const MAX_ACC_GROUPS: usize = 4;

    /// Elements of K or V that are staged at once.
    pub(super) const CHUNK: usize = 64;

    /// Most groups of 32 elements that matrices hold: in subgroups of 32 a quarter of the elements
    /// of Q, two a register, takes 32 registers of an invocation.
    const MAX_HELD: usize = 4;

    /// Selects the form of kernels of dims with `head_groups` groups for a device with these
    /// matrices and this much workgroup memory; `None` if it has too little.
    ///
    /// Subgroups of any size, whose matrices the text does not know, hold none.
    pub(crate) fn fitting(
        head_groups: usize,
        matrices: Matrices,
        memory_bytes: usize,
    ) -> Option<Self> {
        let can_hold = head_groups <= Self::MAX_HELD && !matrices.has_smaller_subgroups();
        let kept = [Self::Kept { groups: head_groups }, Self::Reloaded];
        let forms = can_hold.then_some(Self::Held).into_iter().chain(kept);
        forms.into_iter().find(|form| form.memory_bytes() <= memory_bytes)
    }

    /// Invocations of a workgroup.
    pub(crate) const fn invocations(self) -> usize {
        match self {
            Self::Held | Self::Kept { .. } | Self::Reloaded => Self::INVOCATIONS,
            Self::EightRows => Self::ROWS,
        }
    }

    /// Upper bound of the bytes of workgroup memory of a kernel.
    pub(crate) const fn memory_bytes(self) -> usize {
        if matches!(self, Self::EightRows) {
            // Q or P, and K or V; the mask
            return 16 * ROW_STEP * (Self::ROWS + TILE) + 4 * Self::ROWS;
        }
        let staged = 8 * HALF_STEP * (Self::ROWS + Self::CHUNK);
        let products = 16 * PRODUCT_STEP * Self::ROWS;
        let mask = 4 * Self::ROWS;
        // number of matrices and flag of non-finite elements
        8 * self.own_vectors() + staged + products + mask + 32
    }

    /// Distance of rows of `own_half` in vectors of 4. Two more than a row has, as of
    /// [`HALF_STEP`]: 36 + 32·n words of 4 bytes, so that eight rows begin in different banks.
    const fn own_step(self) -> usize {
        let chunks = match self {
            Self::Held | Self::Reloaded | Self::EightRows => 1,
            Self::Kept { groups } => (32 * groups).div_ceil(Self::CHUNK),
        };
        chunks * Self::CHUNK / 4 + 2
    }

    const fn own_vectors(self) -> usize {
        match self {
            Self::Held | Self::EightRows => 0,
            Self::Kept { .. } | Self::Reloaded => Self::ROWS * self.own_step(),
        }
    }

    /// Generates the declaration of `own_half`.
    pub(super) fn declaration(self) -> String {
        match self.own_vectors() {
            0 => String::new(),
            vectors => format!("var<workgroup> own_half: array<vec4<f16>, {vectors}>;\n"),
        }
    }

    /// Generates what is done with the queries before the loop over keys: the matrices that hold
    /// them, `own_half` ← Q, or the offsets of the rows that an invocation loads.
    pub(super) fn own_rows(self, variant: TileVariant, grid: Grid) -> String {
        match self {
            Self::Held => held_queries(variant, grid),
            Self::Kept { .. } => {
                let [loads, stores] = self.queries(OF_CHUNK);
                format!(
                    "{{
{}let element = 4u * (lane & 15u);
let own_at = {}u * (lane >> 4u) + (lane & 15u);
for (var c = 0u; c < params.head_dim; c = c + 64u) {{
{loads}{stores}}}
}}
",
                    own_offsets(variant),
                    self.own_step(),
                )
            }
            Self::Reloaded => own_offsets(variant),
            Self::EightRows => String::new(),
        }
    }

    /// Generates loads and stores of `own_half` ← 64 elements of Q from `c` on, zeros beyond the
    /// vectors.
    fn queries(self, at: &str) -> [String; 2] {
        let mut loads = "        let q_inside =
            vec4<u32>(c + element) + vec4<u32>(0u, 1u, 2u, 3u) < vec4<u32>(params.head_dim);\n"
            .to_owned();
        let mut stores = String::new();
        for n in 0..LOADS_OF_QUERIES {
            let row = n * LOAD_STEP * self.own_step();
            let _infallible =
                writeln!(loads, "        let q_{n} = q_halves(own_q_{n}, c + element);");
            let _infallible = writeln!(
                stores,
                "        own_half[own_at + {at}{row}u] = select(vec4<f16>(0.0h), q_{n}, q_inside);"
            );
        }
        [loads, stores]
    }
}

/// Generates the offsets of the rows of Q that an invocation loads, sixteen invocations a row.
fn own_offsets(variant: TileVariant) -> String {
    (0..LOADS_OF_QUERIES)
        .map(|n| {
            let step = Q.distance(variant, n * LOAD_STEP);
            format!(
                "let own_q_{n} =
    min(q_row(batch, head, first + (lane >> 4u)) + {step}, q_last(batch, head));\n"
            )
        })
        .collect()
}

/// Generates the matrices of all elements of the queries, zeros beyond the vectors. They pass
/// through `left_half`, 32 elements at a time, of which eight invocations load a row.
fn held_queries(variant: TileVariant, grid: Grid) -> String {
    /// Rows that are loaded at once.
    const STEP: usize = TallTile::INVOCATIONS / 8;
    // sixteen neighbours store rows r and r + 4, as of `LOADED_ROW`
    let mut text = format!(
        "let loaded_row = ((lane >> 4u) & 3u) | ((lane & 8u) >> 1u) | ((lane >> 6u) << 3u);
let own_q = q_row(batch, head, first + loaded_row);
let own_q_last = q_last(batch, head);
let stored_q = {HALF_STEP}u * loaded_row + (lane & 7u);
"
    );
    for group in 0..variant.head_groups {
        let first = 32 * group;
        let _infallible = write!(
            text,
            "{{
let element = {first}u + 4u * (lane & 7u);
let inside = vec4<u32>(element) + vec4<u32>(0u, 1u, 2u, 3u) < vec4<u32>(params.head_dim);
"
        );
        for row in (0..TallTile::ROWS).step_by(STEP) {
            let (at, step) = (HALF_STEP * row, Q.distance(variant, row));
            let _infallible = writeln!(
                text,
                "left_half[stored_q + {at}u] = select(
    vec4<f16>(0.0h), q_halves(min(own_q + {step}, own_q_last), element), inside);"
            );
        }
        text.push_str("}\nworkgroupBarrier();\n");
        text += &hold(grid, first);
        text.push_str("workgroupBarrier();\n");
    }
    text
}

/// Offset of the chunk at element `c` in a row of `own_half`, as a multiple of 16 vectors, so that
/// compilers load matrices 16 bytes at a time.
const OF_CHUNK: &str = "((c >> 6u) << 4u) + ";

/// Sixteen invocations load 64 elements of a row: distance of the rows that one loads.
const LOAD_STEP: usize = 8;

/// Rows of Q, and of K, of which an invocation loads four elements of a chunk.
const LOADS_OF_QUERIES: usize = TallTile::ROWS / LOAD_STEP;
const LOADS_OF_KEYS: usize = TILE / LOAD_STEP;

/// Distance of the rows of K in `right_half`, in vectors of 4.
const KEY_STEP: usize = TallTile::CHUNK / 4 + 2;

/// Counterpart of `matrices::add_product` for the scores of a tall tile: `s0` ….
pub(super) fn scores(variant: TileVariant, tall: TallTile, grid: Grid) -> String {
    let (mut loads, mut zeros, mut stores) = (String::new(), String::new(), String::new());
    let step = K.distance(variant, LOAD_STEP);
    for n in 0..LOADS_OF_KEYS {
        let at = n * LOAD_STEP * KEY_STEP;
        let _infallible = writeln!(
            loads,
            "        var k_{n} = k_halves(min(k_first + {n}u * k_step, k_end), c + element);"
        );
        let _infallible =
            writeln!(zeros, "            k_{n} = select(vec4<f16>(0.0h), k_{n}, inside);");
        let _infallible = writeln!(stores, "        right_half[stored_at + {at}u] = k_{n};");
    }
    let (mut own_at, mut at) = (String::new(), OF_CHUNK);
    if tall == TallTile::Reloaded {
        own_at = format!("    let own_at = {}u * vector + (lane & 15u);\n", tall.own_step());
        at = "";
        let [of_queries, into] = tall.queries("");
        loads += &of_queries;
        stores += &into;
    }
    let right = Staged { array: "right_half", step: KEY_STEP, at: "" };
    let operands = Operands {
        left: Staged { array: "own_half", step: tall.own_step(), at },
        right,
        elements: TallTile::CHUNK,
    };
    let parts = SumOverChunks::of(grid, operands);
    let stage = format!(
        "{loads}        if (c + 64u > params.head_dim) {{
            let inside =
                vec4<u32>(c + element) + vec4<u32>(0u, 1u, 2u, 3u) < vec4<u32>(params.head_dim);
{zeros}        }}
        workgroupBarrier();
{stores}        workgroupBarrier();
"
    );
    let chunks = if tall == TallTile::Held {
        // matrices have no index
        let elements = 32 * variant.head_groups;
        let chunk = |c| {
            let count = TallTile::CHUNK.min(elements - c);
            let multiply = multiply_held(grid, right, c, count);
            format!("    {{\n    let c = {c}u;\n{stage}    }}\n{multiply}")
        };
        (0..elements).step_by(TallTile::CHUNK).map(chunk).collect()
    } else {
        format!(
            "    for (var c = 0u; c < params.head_dim; c = c + 64u) {{
{stage}{}    }}
",
            parts.multiply
        )
    };
    let zeroed: String = (0..4).map(|r| format!("var s{r} = vec4<f32>(0.0);\n")).collect();
    format!(
        "{zeroed}{{
    let element = 4u * (lane & 15u);
    let vector = lane >> 4u;
    let stored_at = {KEY_STEP}u * vector + (lane & 15u);
{own_at}    let k_first = k_row(batch, kv_head, column + vector);
    let k_end = k_last(batch, kv_head);
    let k_step = {step};
{begin}{chunks}{end}}}
",
        begin = parts.begin,
        end = parts.end("s"),
    )
}
