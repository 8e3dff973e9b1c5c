//! Products on cooperative matrices: the counterpart of the multiply-adds in `products.rs`.
//!
//! Both operands lie in workgroup memory as f16, 32 × 32 at a time, their bits as in the tensors.
//! The result stays in matrices until it is complete, and returns through workgroup memory as f32
//! to the register tiles of the rest of the kernel. Each subgroup owns some matrices of it.
//! Probabilities are multiplied by [`PROB_SCALE`] before they are rounded to f16, so that those
//! down to 6e-8 are normal f16 numbers and keep all bits. Score gradients have no bound: each row
//! of a tile is multiplied by the power of 2 that brings its largest one to 2^14 … 2^15. None
//! overflows, and those down to 2^-28 of the largest are normal numbers.

use std::fmt::Write;

use super::{
    Access, Source, TileVariant,
    params::ProbeParams,
    template::Template,
    vectors::{ROW_STEP, Vectors, Words},
};
use crate::level::Matrices;

/// Directives at the start of a kernel with matrices.
pub(super) const ENABLED: &str = "enable f16;\nenable wgpu_cooperative_matrix;\n";

/// Power of 2, so scaling is exact. Probabilities are at most 1 (but for rounding) and f16 reaches
/// 65,504, so there is no overflow.
const PROB_SCALE: f32 = 1024.0;

/// Distance of rows of f16 elements in workgroup memory: 8 more than their 32, so that eight rows
/// lie in different banks and begin at multiples of 16 bytes.
const HALF_STEP: usize = 40;

/// Distance of rows of `products`: as [`ROW_STEP`] vectors of 4.
const PRODUCT_STEP: usize = 4 * ROW_STEP;

/// Left operand.
const LEFT: &str = "&left_half[HALF_STEPu * matrix_row + k]";
/// Right operand, with vectors as rows.
const BY_ROWS: &str = "coopLoadT<{B}>(&right_half[HALF_STEPu * k + matrix_column], HALF_STEPu)";
/// Right operand, with vectors as columns.
const BY_COLUMNS: &str = "coopLoad<{B}>(&right_half[HALF_STEPu * matrix_column + k], HALF_STEPu)";

/// Workgroup memory and functions that read it. `left_half`: `[row][element]`, then P or dX;
/// `right_half`: `[column or key][element]`.
pub(super) fn declarations() -> String {
    format!(
        "const PROB_SCALE: f32 = {PROB_SCALE:?};

var<workgroup> left_half: array<f16, {halves}>;
var<workgroup> right_half: array<f16, {halves}>;
var<workgroup> products: array<f32, {products}>;
var<workgroup> rounds: u32;
var<workgroup> non_finite: atomic<u32>;

// Four products of a row, from a column on.
fn products_of(row: u32, column: u32) -> vec4<f32> {{
    let at = {PRODUCT_STEP}u * row + column;
    return vec4<f32>(products[at], products[at + 1u], products[at + 2u], products[at + 3u]);
}}

// Factors of vector `j` in four rows.
fn factors_of(row: u32, j: u32) -> vec4<f32> {{
    let at = {HALF_STEP}u * row + j;
    return vec4<f32>(vec4<f16>(
        left_half[at],
        left_half[at + {HALF_STEP}u],
        left_half[at + {two}u],
        left_half[at + {three}u]));
}}

// Marks elements that are not finite.
fn non_finite_lanes(four: vec4<f32>) -> vec4<bool> {{
    return (bitcast<vec4<u32>>(four) & vec4<u32>(0x7f800000u)) == vec4<u32>(0x7f800000u);
}}
",
        halves = 32 * HALF_STEP,
        products = 32 * PRODUCT_STEP,
        two = 2 * HALF_STEP,
        three = 3 * HALF_STEP,
    )
}

/// Generates the store of four elements of `row` to workgroup memory.
pub(super) fn store_halves(array: &str, four: &str, row: &str) -> String {
    let mut text = format!("    {{\n        let at = {HALF_STEP}u * ({row}) + element;\n");
    for (c, part) in ["x", "y", "z", "w"].iter().enumerate() {
        let _infallible = writeln!(text, "        {array}[at + {c}u] = {four}.{part};");
    }
    text + "    }\n"
}

/// Generates accumulators `c_0` …, one per matrix that a subgroup may own.
fn zero_sums(matrices: Matrices) -> String {
    let size = matrices.size();
    (0..matrices.per_subgroup())
        .map(|n| format!("var c_{n} = coop_mat{size}x{size}<f32, C>();\n"))
        .collect()
}

/// Generates a statement for each matrix of a subgroup, with its number `{n}`, `matrix_row` and
/// `matrix_column`.
fn each_matrix(matrices: Matrices, statement: &str) -> String {
    let size = matrices.size();
    let line = 32 / size;
    (0..matrices.per_subgroup())
        .map(|n| {
            format!(
                "if ({n}u < matrix_rounds) {{
    let matrix = {n}u * subgroups + subgroup;
    let matrix_row = {size}u * (matrix / {line}u);
    let matrix_column = {size}u * (matrix % {line}u);
    {}
}}
",
                statement.replace("{n}", &n.to_string())
            )
        })
        .collect()
}

/// Generates the accumulators += A·B over 32 elements, with B as `b` loads it.
fn multiply(matrices: Matrices, b: &str) -> String {
    let size = matrices.size();
    let named = |role: &str| format!("coop_mat{size}x{size}<f16, {role}>");
    let step = |text: &str| text.replace("HALF_STEP", &HALF_STEP.to_string());
    let statement = format!(
        "for (var k = 0u; k < 32u; k = k + {size}u) {{
        let a_matrix = coopLoadT<{of_a}>({a}, {HALF_STEP}u);
        let b_matrix = {b};
        c_{{n}} = coopMultiplyAdd(a_matrix, b_matrix, c_{{n}});
    }}",
        of_a = named("A"),
        a = step(LEFT),
        b = step(b).replace("{B}", &named("B")),
    );
    each_matrix(matrices, &statement)
}

/// Generates `products` ← the accumulators.
fn store_sums(matrices: Matrices) -> String {
    let statement = format!(
        "let start = {PRODUCT_STEP}u * matrix_row + matrix_column;
    coopStoreT(c_{{n}}, &products[start], {PRODUCT_STEP}u);"
    );
    each_matrix(matrices, &statement)
}

/// Generates the number of matrices per subgroup, uniform over the workgroup. The number of
/// matrices in a tile is a multiple of the number of subgroups.
pub(super) fn count(matrices: Matrices) -> String {
    let all = (32 / matrices.size()).pow(2);
    format!(
        "if (lane == 0u) {{
    rounds = {all}u / subgroups;
}}
let matrix_rounds = workgroupUniformLoad(&rounds);
"
    )
}

/// Counterpart of `products::add_product`: S stays in matrices for all elements.
pub(super) fn add_product(
    variant: TileVariant,
    matrices: Matrices,
    prefix: &str,
    left: &Vectors,
    left_first: &str,
    right: &Vectors,
    right_first: &str,
) -> String {
    let (mut rows, mut loads, mut zeros, mut stores) =
        (String::new(), String::new(), String::new(), String::new());
    for (side, of, first) in [("left", left, left_first), ("right", right, right_first)] {
        let (declared, offsets) = of.loaded_rows(variant, side, first);
        rows += &declared;
        for (n, offset) in offsets.iter().enumerate() {
            let _infallible = writeln!(
                loads,
                "        var {side}_{n} = {name}_halves({offset}, c + element);",
                name = of.name
            );
            let _infallible = writeln!(
                zeros,
                "            {side}_{n} = select(vec4<f16>(0.0h), {side}_{n}, inside);"
            );
            let array = format!("{side}_half");
            stores +=
                &store_halves(&array, &format!("{side}_{n}"), &format!("vector + {}u", 8 * n));
        }
    }
    let dim = left.dim;
    let mut text = format!(
        "{{
    let element = 4u * (lane & 7u);
    let vector = lane >> 3u;
{rows}{sums}    for (var c = 0u; c < params.{dim}; c = c + 32u) {{
{loads}        if (c + 32u > params.{dim}) {{
            let inside =
                vec4<u32>(c + element) + vec4<u32>(0u, 1u, 2u, 3u) < vec4<u32>(params.{dim});
{zeros}        }}
        workgroupBarrier();
{stores}        workgroupBarrier();
{multiply}    }}
{store}    workgroupBarrier();
",
        sums = zero_sums(matrices),
        multiply = multiply(matrices, BY_COLUMNS),
        store = store_sums(matrices),
    );
    for r in 0..4 {
        let _infallible = writeln!(text, "    {prefix}{r} = products_of(4u * ty + {r}u, 4u * tx);");
    }
    text + "}\n"
}

/// Left factors of the second products.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Factors {
    Probs,
    Gradients,
}

/// Declares the variable of [`store_gradients`].
pub(super) const GRADIENT_FACTORS: &str = "var gradient_factors = vec4<f32>(1.0);\n";

/// Generates `left_half` ← a register tile of probabilities.
pub(super) fn store_probs(prefix: &str) -> String {
    "let prob_factors = vec4<f32>(PROB_SCALE / params.keep_scale);\n".to_owned()
        + &store_tile(prefix, "prob_factors")
}

/// Generates `left_half` ← a register tile of score gradients, once all invocations have read what
/// was in it, and `gradient_factors`, by which the products of its four rows are to be multiplied.
///
/// ```text
/// e = exponent of the row's largest |dX|, over the eight invocations that hold the row
/// left_half = f16(dX · 2^(14−e));  gradient_factors = 2^(e−14)
/// ```
///
/// e is limited to −112 … 127, so that both powers are normal numbers.
pub(super) fn store_gradients(prefix: &str) -> String {
    let largest = [0, 1, 2, 3].map(|r| {
        let [x, y, z, w] = ["x", "y", "z", "w"].map(|c| format!("abs({prefix}{r}.{c})"));
        format!("max(max({x}, {y}), max({z}, {w}))")
    });
    format!(
        "var largest_gradients = vec4<f32>(
    {},
);
largest_gradients = max(largest_gradients, subgroupShuffleXor(largest_gradients, 1u));
largest_gradients = max(largest_gradients, subgroupShuffleXor(largest_gradients, 2u));
largest_gradients = max(largest_gradients, subgroupShuffleXor(largest_gradients, 4u));
let exponents = clamp(
    bitcast<vec4<u32>>(largest_gradients) >> vec4<u32>(23u), vec4<u32>(15u), vec4<u32>(254u));
let to_half = bitcast<vec4<f32>>((vec4<u32>(268u) - exponents) << vec4<u32>(23u));
gradient_factors = bitcast<vec4<f32>>((exponents - vec4<u32>(14u)) << vec4<u32>(23u));
workgroupBarrier();
{}",
        largest.join(",\n    "),
        store_tile(prefix, "to_half")
    )
}

/// Generates `left_half` ← a register tile, each row multiplied by its element of `factors`.
fn store_tile(prefix: &str, factors: &str) -> String {
    let mut text = String::new();
    for r in 0..4 {
        for c in 0..4 {
            let _infallible = writeln!(
                text,
                "left_half[{HALF_STEP}u * (4u * ty + {r}u) + 4u * tx + {c}u] =
    f16({prefix}{r}[{c}] * {factors}[{r}]);"
            );
        }
    }
    text
}

/// Counterpart of `products::accumulate`, with the factors in `left_half`. Non-finite elements are
/// replaced by 0 in the matrices, where 0 · NaN would reach rows that do not attend to them; a
/// scalar fix-up then adds them for the queries that do. So masked elements change no bit.
pub(super) fn accumulate(
    matrices: Matrices,
    prefix: &str,
    groups: usize,
    factors: Factors,
    of: &Vectors,
    words: Words,
) -> String {
    let Vectors { name, dim, .. } = *of;
    let [row, last, step] = of.offsets("column");
    let product_factors = match factors {
        Factors::Probs => "vec4<f32>(params.keep_scale / PROB_SCALE)",
        Factors::Gradients => "gradient_factors",
    };
    let mut text = format!(
        "{{
let product_factors = {product_factors};
let element = 4u * (lane & 7u);
let vector = lane >> 3u;
let own_row = {row};
let last_row = {last};
let row_step = {step};
var any_non_finite = false;
if (lane == 0u) {{ atomicStore(&non_finite, 0u); }}
"
    );
    for group in 0..groups {
        let first = 32 * group;
        let _infallible = writeln!(text, "if ({first}u < params.{dim}) {{");
        for n in 0..4 {
            let _infallible = writeln!(
                text,
                "    let loaded_{n} =
        {name}_halves(min(own_row + {n}u * row_step, last_row), {first}u + element);
    let lanes_{n} = non_finite_lanes(vec4<f32>(loaded_{n}));
    let four_{n} = select(loaded_{n}, vec4<f16>(0.0h), lanes_{n});"
            );
        }
        text.push_str(
            "    any_non_finite =
        any_non_finite | any((lanes_0 | lanes_1) | (lanes_2 | lanes_3));
    workgroupBarrier();
",
        );
        for n in 0..4 {
            let row = format!("vector + {}u", 8 * n);
            text += &store_halves("right_half", &format!("four_{n}"), &row);
        }
        let _infallible = write!(
            text,
            "    workgroupBarrier();
    {{
{}{}{}    }}
    workgroupBarrier();
",
            zero_sums(matrices),
            multiply(matrices, BY_ROWS),
            store_sums(matrices),
        );
        for r in 0..4 {
            let sum = format!("{prefix}{group}_{r}");
            let _infallible = writeln!(
                text,
                "    {sum} =
        fma(vec4<f32>(product_factors[{r}]), products_of(4u * ty + {r}u, 4u * tx), {sum});"
            );
        }
        text.push_str("}\n");
    }
    // the bound is not a constant, so that compilers do not unroll this rare loop
    let _infallible = write!(
        text,
        "if (any_non_finite) {{ atomicStore(&non_finite, 1u); }}
workgroupBarrier();
if (atomicLoad(&non_finite) != 0u) {{
    let end = min(32u, params.{rows} - column);
    for (var j = 0u; j < end; j++) {{
        let vector_row = {name}_row(batch, {head}, column + j);
        let a = product_factors * factors_of(4u * ty, j);
",
        rows = of.rows,
        head = of.head(),
    );
    if words == Words::OfColumns {
        text.push_str("        let word = atomicLoad(&visible_bits[j]) >> (4u * ty);\n");
    }
    for group in 0..groups {
        let first = 32 * group;
        let _infallible = write!(
            text,
            "        if ({first}u < params.{dim}) {{
            let four = {name}_four(vector_row, {first}u + 4u * tx);
            let lanes = non_finite_lanes(four);
"
        );
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
        text.push_str("        }\n");
    }
    text.push_str("    }\n}\n}\n");
    text
}

/// Kernel that multiplies two known matrices, with the right operand by rows and by columns.
pub(super) fn probe(matrices: Matrices) -> Source {
    let mut text = Template::default();
    text.name("DECLARATIONS", declarations()).name("COUNT_MATRICES", count(matrices));
    for (name, b) in [("BY_ROWS", BY_ROWS), ("BY_COLUMNS", BY_COLUMNS)] {
        let product = [zero_sums(matrices), multiply(matrices, b), store_sums(matrices)].concat();
        text.name(name, product);
    }
    text.name("HALF_STEP", HALF_STEP.to_string()).name("PRODUCT_STEP", PRODUCT_STEP.to_string());
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
    (0..1024).map(by_rows).chain((0..1024).map(by_columns)).collect()
}
