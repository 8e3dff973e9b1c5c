//! Sums over keys or queries on cooperative matrices: the counterpart of `products::multiply_add`,
//! with the factors in `left_half`.
//!
//! ```text
//! for each group of 32 elements of the vectors:
//!     right_half[element][vector] ← 32 vectors; of partial tiles, elements not finite ← 0
//!     products ← left_half · right_halfᵀ;  accumulators += factor of the row · products
//! if any element of a partial tile is not finite:
//!     accumulators += factor · vector in its elements that are not finite
//! ```
//!
//! In partial tiles non-finite elements are replaced by 0 in the matrices, where 0 · NaN would
//! reach rows that do not attend to them; a scalar fix-up then adds them for the queries that do.
//! So masked elements change no bit. In full tiles all rows attend to them. An invocation tests the
//! sum of the elements that it stores, which any that is not finite makes infinite or NaN. If
//! finite ones overflow, the fix-up finds none.

use std::ops::Range;

use super::{
    TileVariant,
    matrices::{Grid, ProductFactors, RightOperand, multiply_and_store},
    vectors::{HALF_STEP, Vectors, Words},
};

/// Generates accumulators += P·`of` or dX·`of`; `None` if the variant has no matrices.
///
/// The stores need no barrier before them: there is one behind the product that reads what was
/// there before.
pub(super) fn accumulate(
    variant: TileVariant,
    prefix: &str,
    groups: usize,
    factors: ProductFactors,
    of: &Vectors,
    words: Words,
) -> Option<String> {
    let sum = MatrixSum { grid: Grid::of(variant)?, variant, prefix, groups, of };
    // groups whose vectors are staged together, each by 64 invocations
    let staged = sum.grid.invocations() / 64;
    let mut text = sum.declarations(factors);
    for first_group in (0..groups).step_by(staged) {
        text += &format!("if ({}u < params.{}) {{\n", 32 * first_group, of.dim);
        text += &sum.stage(first_group);
        text += &sum.add_products(first_group..groups.min(first_group + staged));
        text.push_str("}\n");
    }
    text += &sum.add_non_finite(words);
    text.push_str("}\n");
    Some(text)
}

/// A sum of vectors over the columns of a tile.
struct MatrixSum<'a> {
    grid: Grid,
    variant: TileVariant,
    /// Name of the accumulators, before group and row.
    prefix: &'a str,
    /// Groups of 32 elements of the vectors.
    groups: usize,
    of: &'a Vectors,
}

impl MatrixSum<'_> {
    /// Generates the begin of a block and the variables that all groups share.
    fn declarations(&self, factors: ProductFactors) -> String {
        let Vectors { name, rows, .. } = *self.of;
        let head = self.of.head();
        let product_factors = match factors {
            ProductFactors::Probs => "vec4<f32>(params.keep_scale / PROB_SCALE)",
            ProductFactors::Gradients => "gradient_factors",
        };
        format!(
            "{{
let product_factors = {product_factors};
let element = 4u * (lane >> 3u);
let own_row = {name}_row(batch, {head}, column + 4u * (lane & 7u));
let last_row = {name}_last(batch, {head});
let stored_at = {HALF_STEP}u * element + (lane & 7u);
// not a constant, so that compilers do not unroll this rare loop
let rare_end = 16u * min(params.{rows}, 1u);
var any_non_finite = false;
if (lane == 0u) {{ atomicStore(&non_finite[0], 0u); }}
"
        )
    }

    /// Generates `right_half` ← 32 vectors, from the elements of `first_group` on, without elements
    /// that are not finite. An invocation transposes four elements of four neighbouring vectors in
    /// registers.
    fn stage(&self, first_group: usize) -> String {
        let (name, first) = (self.of.name, 32 * first_group);
        let mut text = String::new();
        for n in 0..4 {
            text += &format!(
                "    let four_{n} = {name}_halves(
        min(own_row + {step}, last_row), {first}u + element);\n",
                step = self.of.distance(self.variant, n)
            );
        }
        text.push_str(
            "    let sums = vec4<f32>((four_0 + four_1) + (four_2 + four_3));
    let sum_bits = bitcast<u32>((sums.x + sums.y) + (sums.z + sums.w));
",
        );
        if self.grid.owns_rows() {
            // until all subgroups have read what was there before
            text.push_str("    workgroupBarrier();\n");
        }
        for (c, part) in ["x", "y", "z", "w"].iter().enumerate() {
            let four = [0, 1, 2, 3].map(|n| format!("four_{n}.{part}")).join(", ");
            let at = HALF_STEP * c;
            text += &format!("    right_half[stored_at + {at}u] = vec4<f16>({four});\n");
        }
        text += &format!(
            "    if (is_partial && (sum_bits & NON_FINITE) == NON_FINITE) {{
        any_non_finite = true;
        for (var n = 0u; n < rare_end; n++) {{
            let at = stored_at + {HALF_STEP}u * (n & 3u);
            if (exponent_bits(vec4<f32>(f32(right_half[at][n >> 2u]))).x == NON_FINITE) {{
                right_half[at][n >> 2u] = 0.0h;
            }}
        }}
    }}
    workgroupBarrier();
"
        );
        text
    }

    /// Generates accumulators += factor of the row · `left_half` · `right_half`ᵀ for these groups,
    /// which are staged one after another.
    fn add_products(&self, groups: Range<usize>) -> String {
        let Self { prefix, of: Vectors { dim, .. }, .. } = self;
        let row_barrier = self.grid.row_barrier();
        let mut text = String::new();
        for (staged, group) in groups.enumerate() {
            let mut at = String::new();
            if staged > 0 {
                // once all have read the products before
                let first = 32 * group;
                text += &format!(
                    "    if ({first}u < params.{dim}) {{
    {row_barrier}\n"
                );
                at = format!("{}u + ", 32 * staged * HALF_STEP);
            }
            let right = RightOperand { at: &at, ..RightOperand::NARROW };
            text += &multiply_and_store(self.grid, right);
            text += &format!("    {row_barrier}\n");
            for r in 0..4 {
                let sum = format!("{prefix}{group}_{r}");
                text += &format!(
                    "    {sum} =
        fma(vec4<f32>(product_factors[{r}]), products[{}], {sum});\n",
                    self.grid.product_at(r)
                );
            }
            text.push_str(if staged > 0 { "    }\n" } else { "" });
        }
        text
    }

    /// Generates the fix-up: the elements that are not finite, for the rows that attend to their
    /// vectors.
    fn add_non_finite(&self, words: Words) -> String {
        let Vectors { name, rows, .. } = *self.of;
        let head = self.of.head();
        // the bound is not a constant, so that compilers do not unroll this rare loop
        let mut text = format!(
            "if (is_partial) {{
if (any_non_finite) {{ atomicStore(&non_finite[0], 1u); }}
workgroupBarrier();
if (atomicLoad(&non_finite[0]) != 0u) {{
    let end = min(32u, params.{rows} - column);
    for (var j = 0u; j < end; j++) {{
        let vector_row = {name}_row(batch, {head}, column + j);
        let a = product_factors * factors_of(4u * ty, j);
"
        );
        if words == Words::OfColumns {
            text.push_str("        let word = atomicLoad(&visible_bits[j]) >> (4u * ty);\n");
        }
        for group in 0..self.groups {
            text += &self.add_non_finite_of(group, words);
        }
        text + "    }\n}\n}\n"
    }

    /// Generates the fix-up of a group, for vector `j`.
    fn add_non_finite_of(&self, group: usize, words: Words) -> String {
        let Self { prefix, of: Vectors { name, dim, .. }, .. } = self;
        let first = 32 * group;
        let mut text = format!(
            "        if ({first}u < params.{dim}) {{
            let four = {name}_four(vector_row, {first}u + 4u * tx);
            let lanes = exponent_bits(four) == vec4<u32>(NON_FINITE);
"
        );
        for r in 0..4 {
            let sum = format!("{prefix}{group}_{r}");
            let bit = words.bit(r);
            text += &format!(
                "            {sum} = select(
                {sum},
                fma(vec4<f32>(a[{r}]), four, {sum}),
                lanes & vec4<bool>(({bit}) != 0u),
            );\n"
            );
        }
        text + "        }\n"
    }
}
