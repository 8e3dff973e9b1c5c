//! Products on cooperative matrices: what `products.rs` makes of multiply-adds, made of matrices that a subgroup multiplies together.
//!
//! Both factors lie in workgroup memory as f16, 32 × 32 at a time; the result comes back through workgroup memory, as f32, into the registers that
//! the rest of the kernel works on. Each subgroup owns some of the result's matrices. Weights are multiplied by [`WEIGHT_SCALE`] before they
//! are rounded to f16, so that those down to 6e-8 keep all bits.

use std::fmt::Write;

use super::{
    Access, Source, TileVariant,
    numbers::ProbeNumbers,
    products::{Vectors, Words},
    template::Template,
};
use crate::level::Matrices;

/// What a text with matrices begins with.
pub(super) const ENABLED: &str = "enable f16;\nenable wgpu_cooperative_matrix;\n";

/// A power of 2: weights are at most 1, but for a rounding, and f16 goes up to 65504.
const WEIGHT_SCALE: f32 = 1024.0;

/// How a kernel has the left factor in `tile_half`.
const OF_TILE: &str = "&tile_half[32u * matrix_row + k]";
/// How it has the right one in `right_half` where its rows are vectors.
const BY_ROWS: &str = "coopLoadT<{B}>(&right_half[32u * k + matrix_column], 32u)";
/// The same where its columns are.
const BY_COLUMNS: &str = "coopLoad<{B}>(&right_half[32u * matrix_column + k], 32u)";

/// Workgroup memory, and what reads it without matrices. `left_half`, `tile_half`: `[row][element]`; `right_half`: `[column or key][element]`.
pub(super) fn declarations() -> String {
    format!(
        "const WEIGHT_SCALE: f32 = {WEIGHT_SCALE:?};

var<workgroup> left_half: array<f16, 1024>;
var<workgroup> right_half: array<f16, 1024>;
var<workgroup> tile_half: array<f16, 1024>;
var<workgroup> products: array<f32, 1024>;
var<workgroup> rounds: u32;
var<workgroup> odd: atomic<u32>;

// Four products of a row, from a column on.
fn products_of(row: u32, column: u32) -> vec4<f32> {{
    let at = 32u * row + column;
    return vec4<f32>(products[at], products[at + 1u], products[at + 2u], products[at + 3u]);
}}

// Four elements of a vector.
fn right_of(j: u32, column: u32) -> vec4<f32> {{
    let at = 32u * j + column;
    return vec4<f32>(f32(right_half[at]), f32(right_half[at + 1u]), f32(right_half[at + 2u]), f32(right_half[at + 3u]));
}}

// Weights that four rows give to vector `j`.
fn weights_of(row: u32, j: u32) -> vec4<f32> {{
    let at = 32u * row + j;
    return vec4<f32>(f32(tile_half[at]), f32(tile_half[at + 32u]), f32(tile_half[at + 64u]), f32(tile_half[at + 96u]));
}}

// Whether they are not finite.
fn is_odd(four: vec4<f32>) -> vec4<bool> {{
    return (bitcast<vec4<u32>>(four) & vec4<u32>(0x7f800000u)) == vec4<u32>(0x7f800000u);
}}
"
    )
}

/// `products` += A·B for all of a subgroup's matrices, where `a` and `b` are expressions for the matrices at element `k`.
fn multiply(matrices: Matrices, most: &str, a: &str, b: &str) -> String {
    let size = matrices.size();
    let line = 32 / size;
    let named = |role: &str, element: &str| format!("coop_mat{size}x{size}<{element}, {role}>");
    let (of_a, of_b, of_c) = (named("A", "f16"), named("B", "f16"), named("C", "f32"));
    format!(
        "    for (var n = 0u; n < matrix_rounds; n++) {{
        let matrix = n * subgroups + subgroup;
        let matrix_row = {size}u * (matrix / {line}u);
        let matrix_column = {size}u * (matrix % {line}u);
        let place = 32u * matrix_row + matrix_column;
        var c_matrix = coopLoadT<{of_c}>(&products[place], 32u);
        for (var k = 0u; k < {most}; k = k + {size}u) {{
            let a_matrix = coopLoadT<{of_a}>({a}, 32u);
            let b_matrix = {b};
            c_matrix = coopMultiplyAdd(a_matrix, b_matrix, c_matrix);
        }}
        coopStoreT(c_matrix, &products[place], 32u);
    }}
",
        b = b.replace("{B}", &of_b)
    )
}

/// How many matrices each subgroup has, told to all invocations as one number. A tile has a multiple of as many as there are subgroups.
pub(super) fn count(matrices: Matrices) -> String {
    let all = (32 / matrices.size()).pow(2);
    format!(
        "if (lane == 0u) {{ rounds = {all}u / subgroups; atomicStore(&odd, 0u); }}\nlet matrix_rounds = workgroupUniformLoad(&rounds);\n"
    )
}

/// As `products::product`.
pub(super) fn product(matrices: Matrices, prefix: &str, left: &Vectors, left_first: &str, right: &Vectors, right_first: &str) -> String {
    let dim = left.dim;
    let rows = |side: &str, of: &Vectors, first: &str| {
        format!(
            "        {{
            let four = {name}_rows(batch, {head}, {first} + 4u * rows, c + at);
            for (var r = 0u; r < 4u; r++) {{ {side}[32u * (4u * rows + r) + at] = f16(four[r]); }}
        }}
",
            name = of.name,
            head = of.head(),
        )
    };
    let mut text = format!(
        "for (var c = 0u; c < numbers.{dim}; c = c + 32u) {{
    workgroupBarrier();
    for (var n = 0u; n < 4u; n++) {{
        let at = lane & 31u;
        let rows = (lane >> 5u) + 2u * n;
{}{}    }}
    if (c == 0u) {{
        for (var n = lane; n < 1024u; n = n + 64u) {{ products[n] = 0.0; }}
    }}
    workgroupBarrier();
    let most = min(32u, numbers.{dim} - c);
",
        rows("left_half", left, left_first),
        rows("right_half", right, right_first)
    );
    text += &multiply(matrices, "most", "&left_half[32u * matrix_row + k]", BY_COLUMNS);
    text.push_str("}\nworkgroupBarrier();\n");
    for r in 0..4 {
        let _infallible = writeln!(text, "var {prefix}{r} = products_of(4u * ty + {r}u, 4u * tx);");
    }
    text
}

/// `tile_half` ← four columns of four rows of weights.
pub(super) fn store_tile(prefix: &str) -> String {
    let mut text = "let weight_factor = WEIGHT_SCALE / numbers.keep_scale;\n".to_owned();
    for r in 0..4 {
        for c in 0..4 {
            let _infallible = writeln!(text, "tile_half[32u * (4u * ty + {r}u) + 4u * tx + {c}u] = f16({prefix}{r}[{c}] * weight_factor);");
        }
    }
    text
}

/// As `products::accumulate`, of the weights in `tile_half`. Numbers that are not finite are 0 in a matrix, which would give them to rows that do not see
/// them as well; those who see them are given them afterwards, one by one. So what is hidden changes no bit.
pub(super) fn accumulate(matrices: Matrices, prefix: &str, groups: usize, of: &Vectors, words: Words) -> String {
    let (name, head, dim) = (of.name, of.head(), of.dim);
    let mut text = "let product_factor = numbers.keep_scale / WEIGHT_SCALE;\n".to_owned();
    for group in 0..groups {
        let four = format!("{name}_columns(batch, {head}, column + j, {}u + 4u * tx)", 32 * group);
        let _infallible = write!(
            text,
            "if ({first}u < numbers.{dim}) {{
    workgroupBarrier();
    for (var n = 0u; n < 4u; n++) {{
        let j = (lane >> 3u) + 8u * n;
        let four = {four};
        let strange = is_odd(four);
        if (any(strange)) {{ atomicStore(&odd, 1u); }}
        for (var c = 0u; c < 4u; c++) {{ right_half[32u * j + 4u * tx + c] = select(f16(four[c]), 0.0h, strange[c]); }}
    }}
    for (var n = lane; n < 1024u; n = n + 64u) {{ products[n] = 0.0; }}
    workgroupBarrier();
",
            first = 32 * group,
        );
        text.push_str("    let has_odd = atomicLoad(&odd) != 0u;\n");
        text += &multiply(matrices, "32u", OF_TILE, BY_ROWS);
        // all have read it
        text.push_str("    workgroupBarrier();\n    if (lane == 0u) { atomicStore(&odd, 0u); }\n");
        for r in 0..4 {
            let sum = format!("{prefix}{group}_{r}");
            let _infallible = writeln!(text, "    {sum} = fma(vec4<f32>(product_factor), products_of(4u * ty + {r}u, 4u * tx), {sum});");
        }
        let _infallible = write!(
            text,
            "    if (has_odd) {{
        for (var j = 0u; j < 32u; j++) {{
            let four = {four};
            let strange = is_odd(four);
            let a = product_factor * weights_of(4u * ty, j);
"
        );
        if words == Words::OfColumns {
            text.push_str("            let word = atomicLoad(&seen[j]) >> (4u * ty);\n");
        }
        for r in 0..4 {
            let sum = format!("{prefix}{group}_{r}");
            let bit = words.bit(r);
            let _infallible = writeln!(
                text,
                "            {sum} = select({sum}, fma(vec4<f32>(a[{r}]), four, {sum}), strange & vec4<bool>(({bit}) != 0u));"
            );
        }
        text.push_str("        }\n    }\n}\n");
    }
    text
}

/// A kernel that multiplies two known matrices, with the right one by rows and by columns.
pub(super) fn probe(matrices: Matrices) -> Source {
    let mut text = Template::default();
    text.name("DECLARATIONS", declarations()).name("COUNT_MATRICES", count(matrices));
    text.name("BY_ROWS", multiply(matrices, "32u", OF_TILE, BY_ROWS)).name("BY_COLUMNS", multiply(matrices, "32u", OF_TILE, BY_COLUMNS));
    let wgsl = [ENABLED, ProbeNumbers::WGSL, &text.expand(include_str!("matrix_probe.wgsl"))].concat();
    Source { wgsl, bindings: vec![Access::Write], numbers: size_of::<ProbeNumbers>() }
}

/// Numbers that the probe computes.
pub(crate) const PROBE_NUMBERS: usize = 2048;

/// What the probe computes, row by row: integers that f16 and f32 hold exactly, so that any order of sums gives these bits.
pub(crate) fn probe_result(numbers: &ProbeNumbers) -> Vec<f32> {
    let left = |row: u32, k: u32| ((32 * row + k) * numbers.left_step % 17) as f32;
    let right = |row: u32, k: u32| ((32 * row + k) * numbers.right_step % 13) as f32;
    let by_rows = |at: u32| (0..32).map(|k| left(at / 32, k) * right(k, at % 32)).sum::<f32>();
    let by_columns = |at: u32| (0..32).map(|k| left(at / 32, k) * right(at % 32, k)).sum::<f32>();
    (0..1024).map(by_rows).chain((0..1024).map(by_columns)).map(|sum| 1.0 + sum).collect()
}

/// The matrices that a kernel of this variant multiplies with.
pub(super) fn of(variant: TileVariant) -> Option<Matrices> {
    variant.matrices.filter(|_| variant.storage == super::Storage::F16)
}
