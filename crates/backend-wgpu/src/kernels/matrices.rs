//! Products on cooperative matrices: the counterpart of the multiply-adds in `products.rs`.
//!
//! Both operands lie in workgroup memory as f16, 32 × 32 at a time. The result returns through
//! workgroup memory as f32 to the register tiles of the rest of the kernel. Each subgroup owns some
//! matrices of the result. Probabilities are multiplied by [`PROB_SCALE`] before they are rounded
//! to f16, so that those down to 6e-8 are normal f16 numbers and keep all bits.

use std::fmt::Write;

use super::{
    Access, Source, TileVariant,
    params::ProbeParams,
    template::Template,
    vectors::{Vectors, Words},
};
use crate::level::Matrices;

/// Directives at the start of a kernel with matrices.
pub(super) const ENABLED: &str = "enable f16;\nenable wgpu_cooperative_matrix;\n";

/// Power of 2, so scaling is exact. Probabilities are at most 1 (but for rounding) and f16 reaches
/// 65,504, so there is no overflow.
const PROB_SCALE: f32 = 1024.0;

/// Left operand in `tile_half`.
const OF_TILE: &str = "&tile_half[32u * matrix_row + k]";
/// Right operand in `right_half`, with vectors as rows.
const BY_ROWS: &str = "coopLoadT<{B}>(&right_half[32u * k + matrix_column], 32u)";
/// Right operand in `right_half`, with vectors as columns.
const BY_COLUMNS: &str = "coopLoad<{B}>(&right_half[32u * matrix_column + k], 32u)";

/// Workgroup memory and functions that read it. `left_half`, `tile_half`: `[row][element]`;
/// `right_half`: `[column or key][element]`.
pub(super) fn declarations() -> String {
    format!(
        "const PROB_SCALE: f32 = {PROB_SCALE:?};

var<workgroup> left_half: array<f16, 1024>;
var<workgroup> right_half: array<f16, 1024>;
var<workgroup> tile_half: array<f16, 1024>;
var<workgroup> products: array<f32, 1024>;
var<workgroup> rounds: u32;
var<workgroup> non_finite: atomic<u32>;

// Four products of a row, from a column on.
fn products_of(row: u32, column: u32) -> vec4<f32> {{
    let at = 32u * row + column;
    return vec4<f32>(products[at], products[at + 1u], products[at + 2u], products[at + 3u]);
}}

// Four elements of a vector.
fn right_of(j: u32, column: u32) -> vec4<f32> {{
    let at = 32u * j + column;
    return vec4<f32>(
        f32(right_half[at]),
        f32(right_half[at + 1u]),
        f32(right_half[at + 2u]),
        f32(right_half[at + 3u]),
    );
}}

// Factors of vector `j` in four rows.
fn factors_of(row: u32, j: u32) -> vec4<f32> {{
    let at = 32u * row + j;
    return vec4<f32>(
        f32(tile_half[at]),
        f32(tile_half[at + 32u]),
        f32(tile_half[at + 64u]),
        f32(tile_half[at + 96u]),
    );
}}

// Marks elements that are not finite.
fn non_finite_lanes(four: vec4<f32>) -> vec4<bool> {{
    return (bitcast<vec4<u32>>(four) & vec4<u32>(0x7f800000u)) == vec4<u32>(0x7f800000u);
}}
"
    )
}

/// Generates `products` += A·B over a subgroup's matrices; `a` and `b` are expressions for the
/// operands at element `k`.
fn multiply(matrices: Matrices, most: &str, a: &str, b: &str) -> String {
    let size = matrices.size();
    let line = 32 / size;
    let named = |role: &str, element: &str| format!("coop_mat{size}x{size}<{element}, {role}>");
    let of_a = named("A", "f16");
    let of_b = named("B", "f16");
    let of_c = named("C", "f32");
    format!(
        "    for (var n = 0u; n < matrix_rounds; n++) {{
        let matrix = n * subgroups + subgroup;
        let matrix_row = {size}u * (matrix / {line}u);
        let matrix_column = {size}u * (matrix % {line}u);
        let offset = 32u * matrix_row + matrix_column;
        var c_matrix = coopLoadT<{of_c}>(&products[offset], 32u);
        for (var k = 0u; k < {most}; k = k + {size}u) {{
            let a_matrix = coopLoadT<{of_a}>({a}, 32u);
            let b_matrix = {b};
            c_matrix = coopMultiplyAdd(a_matrix, b_matrix, c_matrix);
        }}
        coopStoreT(c_matrix, &products[offset], 32u);
    }}
",
        b = b.replace("{B}", &of_b)
    )
}

/// Generates the number of matrices per subgroup, uniform over the workgroup. The number of
/// matrices in a tile is a multiple of the number of subgroups.
pub(super) fn count(matrices: Matrices) -> String {
    let all = (32 / matrices.size()).pow(2);
    format!(
        "if (lane == 0u) {{
    rounds = {all}u / subgroups;
    atomicStore(&non_finite, 0u);
}}
let matrix_rounds = workgroupUniformLoad(&rounds);
"
    )
}

/// Counterpart of `products::product`.
pub(super) fn product(
    matrices: Matrices,
    prefix: &str,
    left: &Vectors,
    left_first: &str,
    right: &Vectors,
    right_first: &str,
) -> String {
    let dim = left.dim;
    let rows = |side: &str, of: &Vectors, first: &str| {
        format!(
            "        {{
            let four = {name}_four(
                min({name}_row(batch, {head}, {first} + vector), {name}_last(batch, {head})),
                c + element,
            );
            let inside =
                vec4<u32>(c + element) + vec4<u32>(0u, 1u, 2u, 3u) < vec4<u32>(params.{dim});
            for (var e = 0u; e < 4u; e++) {{
                {side}[32u * vector + element + e] = f16(select(0.0, four[e], inside[e]));
            }}
        }}
",
            dim = of.dim,
            name = of.name,
            head = of.head(),
        )
    };
    let mut text = format!(
        "for (var c = 0u; c < params.{dim}; c = c + 32u) {{
    workgroupBarrier();
    for (var n = 0u; n < 4u; n++) {{
        let element = 4u * (lane & 7u);
        let vector = (lane >> 3u) + 8u * n;
{}{}    }}
    if (c == 0u) {{
        for (var n = lane; n < 1024u; n = n + 64u) {{ products[n] = 0.0; }}
    }}
    workgroupBarrier();
    let most = min(32u, params.{dim} - c);
",
        rows("left_half", left, left_first),
        rows("right_half", right, right_first)
    );
    text += &multiply(matrices, "most", "&left_half[32u * matrix_row + k]", BY_COLUMNS);
    text.push_str("}\nworkgroupBarrier();\n");
    for r in 0..4 {
        let _infallible = writeln!(text, "{prefix}{r} = products_of(4u * ty + {r}u, 4u * tx);");
    }
    text
}

/// Generates `tile_half` ← a register tile of probabilities.
pub(super) fn store_tile(prefix: &str) -> String {
    let mut text = "let prob_factor = PROB_SCALE / params.keep_scale;\n".to_owned();
    for r in 0..4 {
        for c in 0..4 {
            let _infallible = writeln!(
                text,
                "tile_half[32u * (4u * ty + {r}u) + 4u * tx + {c}u] =
    f16({prefix}{r}[{c}] * prob_factor);"
            );
        }
    }
    text
}

/// Counterpart of `products::accumulate`, with the factors in `tile_half`. Non-finite elements are
/// replaced by 0 in the matrices, where 0 · NaN would reach rows that do not attend to them; a
/// scalar fix-up then adds them for the queries that do. So masked elements change no bit.
pub(super) fn accumulate(
    matrices: Matrices,
    prefix: &str,
    groups: usize,
    of: &Vectors,
    words: Words,
) -> String {
    let name = of.name;
    let head = of.head();
    let dim = of.dim;
    let mut text = "let product_factor = params.keep_scale / PROB_SCALE;\n".to_owned();
    for group in 0..groups {
        let four = format!(
            "{name}_four(
        min({name}_row(batch, {head}, column + j), {name}_last(batch, {head})),
        {}u + 4u * tx,
    )",
            32 * group
        );
        let _infallible = write!(
            text,
            "if ({first}u < params.{dim}) {{
    workgroupBarrier();
    for (var n = 0u; n < 4u; n++) {{
        let j = (lane >> 3u) + 8u * n;
        let four = {four};
        let lanes = non_finite_lanes(four);
        if (any(lanes)) {{ atomicStore(&non_finite, 1u); }}
        for (var c = 0u; c < 4u; c++) {{
            right_half[32u * j + 4u * tx + c] = select(f16(four[c]), 0.0h, lanes[c]);
        }}
    }}
    for (var n = lane; n < 1024u; n = n + 64u) {{ products[n] = 0.0; }}
    workgroupBarrier();
",
            first = 32 * group,
        );
        text.push_str("    let has_non_finite = atomicLoad(&non_finite) != 0u;\n");
        text += &multiply(matrices, "32u", OF_TILE, BY_ROWS);
        // all invocations have read the flag
        text.push_str(
            "    workgroupBarrier();\n    if (lane == 0u) { atomicStore(&non_finite, 0u); }\n",
        );
        for r in 0..4 {
            let sum = format!("{prefix}{group}_{r}");
            let _infallible = writeln!(
                text,
                "    {sum} =
        fma(vec4<f32>(product_factor), products_of(4u * ty + {r}u, 4u * tx), {sum});"
            );
        }
        let _infallible = write!(
            text,
            "    if (has_non_finite) {{
        for (var j = 0u; j < 32u; j++) {{
            let four = {four};
            let lanes = non_finite_lanes(four);
            let a = product_factor * factors_of(4u * ty, j);
"
        );
        if words == Words::OfColumns {
            text.push_str("            let word = atomicLoad(&visible_bits[j]) >> (4u * ty);\n");
        }
        for r in 0..4 {
            let sum = format!("{prefix}{group}_{r}");
            let bit = words.bit(r);
            let _infallible = writeln!(
                text,
                "            {sum} = select(
                {sum},
                fma(vec4<f32>(a[{r}]), four, {sum}),
                lanes & vec4<bool>(({bit}) != 0u),
            );"
            );
        }
        text.push_str("        }\n    }\n}\n");
    }
    text
}

/// Kernel that multiplies two known matrices, with the right operand by rows and by columns.
pub(super) fn probe(matrices: Matrices) -> Source {
    let mut text = Template::default();
    text.name("DECLARATIONS", declarations()).name("COUNT_MATRICES", count(matrices));
    text.name("BY_ROWS", multiply(matrices, "32u", OF_TILE, BY_ROWS))
        .name("BY_COLUMNS", multiply(matrices, "32u", OF_TILE, BY_COLUMNS));
    let wgsl =
        [ENABLED, ProbeParams::WGSL, &text.expand(include_str!("matrix_probe.wgsl"))].concat();
    Source { wgsl, bindings: vec![Access::Write], params: size_of::<ProbeParams>() }
}

/// Number of results of the probe.
pub(crate) const PROBE_RESULTS: usize = 2048;

/// Expected results of the probe in row order: integers that f16 and f32 represent exactly, so
/// every order of sums gives the same bits.
pub(crate) fn probe_result(params: &ProbeParams) -> Vec<f32> {
    let left = |row: u32, k: u32| ((32 * row + k) * params.left_step % 17) as f32;
    let right = |row: u32, k: u32| ((32 * row + k) * params.right_step % 13) as f32;
    let by_rows = |at: u32| (0..32).map(|k| left(at / 32, k) * right(k, at % 32)).sum::<f32>();
    let by_columns = |at: u32| (0..32).map(|k| left(at / 32, k) * right(at % 32, k)).sum::<f32>();
    (0..1024).map(by_rows).chain((0..1024).map(by_columns)).map(|sum| 1.0 + sum).collect()
}

/// Cooperative matrices that a kernel of this variant uses.
pub(super) fn of(variant: TileVariant) -> Option<Matrices> {
    variant.matrices.filter(|_| variant.storage == super::Storage::F16)
}
