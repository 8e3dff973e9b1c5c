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
pub(super) const HALF_STEP: usize = 40;

/// Distance of rows of `products`: as [`ROW_STEP`] vectors of 4.
pub(super) const PRODUCT_STEP: usize = 4 * ROW_STEP;

/// Left operand.
const LEFT: &str = "&left_half[HALF_STEPu * matrix_row + k]";
/// Right operand, stored by columns: an invocation loads the consecutive elements of one column. By
/// rows it would load them one by one.
const RIGHT: &str = "&right_half[HALF_STEPu * matrix_column + k]";

/// Workgroup memory and functions that read it. `left_half`: `[row][element]`, then P or dX;
/// `right_half`: `[column][element]`, then `[element][vector]`.
pub(super) fn declarations() -> String {
    format!(
        "const PROB_SCALE: f32 = {PROB_SCALE:?};
const NON_FINITE: u32 = 0x7f800000u;

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

// Exponent bits, by which numbers that are not finite exceed all others.
fn exponent_bits(four: vec4<f32>) -> vec4<u32> {{
    return bitcast<vec4<u32>>(four) & vec4<u32>(NON_FINITE);
}}

fn largest_of(four: vec4<u32>) -> u32 {{
    return max(max(four.x, four.y), max(four.z, four.w));
}}

// e^x, for probabilities that are rounded to f16: exp2 may have an error of (3 + 2·|x|) ulp.
fn half_exponentials(x: vec4<f32>) -> vec4<f32> {{
    return exp2(x * 1.4426950408889634);
}}

// tanh |x| = (1 − e^(−2|x|)) / (1 + e^(−2|x|)), with the sign of x: an absolute error of some 1e-7.
fn half_tangents(x: vec4<f32>) -> vec4<f32> {{
    let e = exp2(abs(x) * -2.8853900817779268);
    let size = (vec4<f32>(1.0) - e) / (vec4<f32>(1.0) + e);
    let sign = bitcast<vec4<u32>>(x) & vec4<u32>(0x80000000u);
    return bitcast<vec4<f32>>(bitcast<vec4<u32>>(size) | sign);
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

/// Statement: accumulator `c_{n}` += A·B over 32 elements.
fn multiply_step(matrices: Matrices) -> String {
    let size = matrices.size();
    let named = |role: &str| format!("coop_mat{size}x{size}<f16, {role}>");
    let step = |text: &str| text.replace("HALF_STEP", &HALF_STEP.to_string());
    format!(
        "for (var k = 0u; k < 32u; k = k + {size}u) {{
        let a_matrix = coopLoadT<{of_a}>({a}, {HALF_STEP}u);
        let b_matrix = coopLoad<{of_b}>({b}, {HALF_STEP}u);
        c_{{n}} = coopMultiplyAdd(a_matrix, b_matrix, c_{{n}});
    }}
",
        of_a = named("A"),
        of_b = named("B"),
        a = step(LEFT),
        b = step(RIGHT),
    )
}

/// Statement: `products` ← accumulator `c_{n}`.
fn store_step() -> String {
    format!(
        "    let start = {PRODUCT_STEP}u * matrix_row + matrix_column;
    coopStoreT(c_{{n}}, &products[start], {PRODUCT_STEP}u);"
    )
}

/// Generates `products` ← A·B over 32 elements. Each accumulator is declared where it is used, or
/// compilers copy all of them at every branch.
fn multiply_and_store(matrices: Matrices) -> String {
    let size = matrices.size();
    let zero = format!("var c_{{n}} = coop_mat{size}x{size}<f32, C>();\n    ");
    each_matrix(matrices, &(zero + &multiply_step(matrices) + &store_step()))
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
        multiply = each_matrix(matrices, &multiply_step(matrices)),
        store = each_matrix(matrices, &store_step()),
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

/// Rows of a tile that an invocation loads for the second products, relative to twice its vector
/// index: pairs of neighbours, which share a word of `right_half`.
const PAIRED_ROWS: [usize; 4] = [0, 1, 16, 17];

/// Counterpart of `products::accumulate`, with the factors in `left_half`. Non-finite elements are
/// replaced by 0 in the matrices, where 0 · NaN would reach rows that do not attend to them; a
/// scalar fix-up then adds them for the queries that do. So masked elements change no bit.
///
/// ```text
/// for each group of 32 elements of the vectors:
///     right_half[element][vector] ← 32 vectors; elements that are not finite ← 0
///     products ← left_half · right_halfᵀ;  accumulators += factor of the row · products
/// ```
pub(super) fn accumulate(
    matrices: Matrices,
    prefix: &str,
    groups: usize,
    factors: Factors,
    of: &Vectors,
    words: Words,
) -> String {
    let Vectors { name, dim, rows, .. } = *of;
    let head = of.head();
    let product_factors = match factors {
        Factors::Probs => "vec4<f32>(params.keep_scale / PROB_SCALE)",
        Factors::Gradients => "gradient_factors",
    };
    let mut text = format!(
        "{{
let product_factors = {product_factors};
let element = 4u * (lane & 7u);
let vector = 2u * (lane >> 3u);
let own_row = {name}_row(batch, {head}, column + vector);
let last_row = {name}_last(batch, {head});
let stored_at = {HALF_STEP}u * element + vector;
// not a constant, so that compilers do not unroll this rare loop
let rare_end = 16u * min(params.{rows}, 1u);
var any_non_finite = false;
if (lane == 0u) {{ atomicStore(&non_finite, 0u); }}
"
    );
    for group in 0..groups {
        let first = 32 * group;
        let _infallible = writeln!(text, "if ({first}u < params.{dim}) {{");
        for (n, row) in PAIRED_ROWS.iter().enumerate() {
            let _infallible = writeln!(
                text,
                "    let four_{n} = {name}_halves(
        min(own_row + {row}u * params.{name}_row, last_row), {first}u + element);
    let bits_{n} = exponent_bits(vec4<f32>(four_{n}));"
            );
        }
        text.push_str(
            "    let largest_bits = max(max(bits_0, bits_1), max(bits_2, bits_3));
    workgroupBarrier();
",
        );
        for (n, row) in PAIRED_ROWS.iter().enumerate() {
            for (c, part) in ["x", "y", "z", "w"].iter().enumerate() {
                let at = HALF_STEP * c + row;
                let _infallible =
                    writeln!(text, "    right_half[stored_at + {at}u] = four_{n}.{part};");
            }
        }
        let _infallible = write!(
            text,
            "    if (largest_of(largest_bits) == NON_FINITE) {{
        any_non_finite = true;
        for (var n = 0u; n < rare_end; n++) {{
            let at = stored_at + {HALF_STEP}u * (n & 3u) + ((n >> 2u) & 1u) + 16u * (n >> 3u);
            if (exponent_bits(vec4<f32>(f32(right_half[at]))).x == NON_FINITE) {{
                right_half[at] = 0.0h;
            }}
        }}
    }}
    workgroupBarrier();
{}    workgroupBarrier();
",
            multiply_and_store(matrices),
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
"
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
            let lanes = exponent_bits(four) == vec4<u32>(NON_FINITE);
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

/// Kernel that multiplies two known matrices.
pub(super) fn probe(matrices: Matrices) -> Source {
    let mut text = Template::default();
    text.name("DECLARATIONS", declarations())
        .name("COUNT_MATRICES", count(matrices))
        .name("PRODUCT", multiply_and_store(matrices))
        .name("HALF_STEP", HALF_STEP.to_string())
        .name("PRODUCT_STEP", PRODUCT_STEP.to_string());
    let wgsl =
        [ENABLED, ProbeParams::WGSL, &text.expand(include_str!("matrix_probe.wgsl"))].concat();
    Source { wgsl, bindings: vec![Access::Write], params: size_of::<ProbeParams>() }
}

/// Number of results of the probe.
pub(crate) const PROBE_RESULTS: usize = 1024;

/// Expected results of the probe in row order: integers that f16 and f32 represent exactly, so
/// every order of sums gives the same bits.
pub(crate) fn probe_result(params: &ProbeParams) -> Vec<f32> {
    let left = |row: u32, k: u32| ((32 * row + k) * params.left_step % 17) as f32;
    let right = |column: u32, k: u32| ((32 * column + k) * params.right_step % 13) as f32;
    (0..1024).map(|at| (0..32).map(|k| left(at / 32, k) * right(at % 32, k)).sum()).collect()
}
