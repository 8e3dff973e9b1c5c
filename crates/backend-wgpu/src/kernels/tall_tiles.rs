//! Tall tiles of forward: 64 queries of a workgroup, so that a row of K or V that is loaded and
//! staged serves twice as many queries as in a tile of 32.
//!
//! They need cooperative matrices, of subgroups of one size, and hold up to 128 elements of a query
//! in them. A workgroup has 128 invocations:
//!
//! ```text
//! q ← Q, 64 queries of all elements, in matrices       once
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
//! them 48 KiB together, room for two of a tall tile. A tile that keeps Q there, too, has room for
//! one, and took 1.6 to 1.9 times as long on an H200 (benches/record/wgpu.md).
//!
//! Source: padded rows and 128 invocations are those of llama.cpp's `flash_attn_cm1.comp`, whose
//! tiles have 16 queries and 64 keys.

use super::{
    TILE, TallTile, TileVariant,
    matrices::{Grid, RightOperand, SumOverChunks, hold, multiply_held},
    vectors::{HALF_STEP, K, Q},
};

/// Generates the matrices of all elements of the queries, zeros beyond the vectors. They pass
/// through `left_half`, 32 elements at a time, of which eight invocations load a row.
pub(super) fn held_queries(variant: TileVariant, grid: Grid) -> String {
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
        text += &format!(
            "{{
let element = {first}u + 4u * (lane & 7u);
let inside = vec4<u32>(element) + vec4<u32>(0u, 1u, 2u, 3u) < vec4<u32>(params.head_dim);
"
        );
        for row in (0..TallTile::ROWS).step_by(STEP) {
            let (at, step) = (HALF_STEP * row, Q.distance(variant, row));
            text += &format!(
                "left_half[stored_q + {at}u] = select(
    vec4<f16>(0.0h), q_halves(min(own_q + {step}, own_q_last), element), inside);\n"
            );
        }
        text.push_str("}\nworkgroupBarrier();\n");
        text += &hold(grid, first);
        text.push_str("workgroupBarrier();\n");
    }
    text
}

/// Sixteen invocations load 64 elements of a row: distance of the rows that one loads.
const LOAD_STEP: usize = 8;

/// Rows of K of which an invocation loads four elements of a chunk.
const LOADS_OF_KEYS: usize = TILE / LOAD_STEP;

/// Distance of the rows of K in `right_half`, in vectors of 4.
const KEY_STEP: usize = TallTile::CHUNK / 4 + 2;

/// Counterpart of `matrices::add_product` for the scores of a tall tile: `s0` ….
pub(super) fn scores(variant: TileVariant, grid: Grid) -> String {
    let (mut loads, mut zeros, mut stores) = (String::new(), String::new(), String::new());
    let step = K.distance(variant, LOAD_STEP);
    for n in 0..LOADS_OF_KEYS {
        let at = n * LOAD_STEP * KEY_STEP;
        loads += &format!(
            "        var k_{n} = k_halves(min(k_first + {n}u * k_step, k_end), c + element);\n"
        );
        zeros += &format!("            k_{n} = select(vec4<f16>(0.0h), k_{n}, inside);\n");
        stores += &format!("        right_half[stored_at + {at}u] = k_{n};\n");
    }
    let right = RightOperand { step: KEY_STEP, at: "" };
    let parts = SumOverChunks::of(grid);
    let stage = format!(
        "{loads}        if (c + 64u > params.head_dim) {{
            let inside =
                vec4<u32>(c + element) + vec4<u32>(0u, 1u, 2u, 3u) < vec4<u32>(params.head_dim);
{zeros}        }}
        workgroupBarrier();
{stores}        workgroupBarrier();
"
    );
    // matrices have no index
    let elements = 32 * variant.head_groups;
    let chunk = |c| {
        let count = TallTile::CHUNK.min(elements - c);
        let multiply = multiply_held(grid, right, c, count);
        format!("    {{\n    let c = {c}u;\n{stage}    }}\n{multiply}")
    };
    let chunks: String = (0..elements).step_by(TallTile::CHUNK).map(chunk).collect();
    let zeroed: String = (0..4).map(|r| format!("var s{r} = vec4<f32>(0.0);\n")).collect();
    format!(
        "{zeroed}{{
    let element = 4u * (lane & 15u);
    let vector = lane >> 4u;
    let stored_at = {KEY_STEP}u * vector + (lane & 15u);
    let k_first = k_row(batch, kv_head, column + vector);
    let k_end = k_last(batch, kv_head);
    let k_step = {step};
{begin}{chunks}{end}}}
",
        begin = parts.begin,
        end = parts.end("s"),
    )
}
