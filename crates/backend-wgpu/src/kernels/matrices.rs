//! Products on cooperative matrices: the counterpart of the multiply-adds in `products.rs`. Sums
//! over keys or queries are in `matrix_sums.rs`.
//!
//! Both operands lie in workgroup memory as f16, 32 × 32 at a time, their bits as in the tensors.
//! The result stays in matrices until it is complete, and returns through workgroup memory as f32
//! to the register tiles of the rest of the kernel. Each subgroup owns some matrices of it, which
//! are constants of the text for subgroups of the largest size of the device ([`Owned`]). Only on a
//! device with several sizes does the text have another path, for smaller subgroups.
//! Probabilities are multiplied by [`PROB_SCALE`] before they are rounded to f16, so that those
//! down to 6e-8 are normal f16 numbers and keep all bits. Score gradients have no bound: each row
//! of a tile is multiplied by the power of 2 that brings its largest one to 2^14 … 2^15. None
//! overflows, and those down to 2^-28 of the largest are normal numbers.

use super::{
    Access, Source, TILE, TallTile, TileVariant,
    params::ProbeParams,
    template::Template,
    vectors::{HALF_STEP, LOADED_ROW, PRODUCT_STEP, ROW_STEP, Vectors, stage_rows},
};
use crate::choice::Matrices;

/// Directives at the start of a kernel with matrices.
pub(crate) const ENABLED: &str = "enable f16;\nenable wgpu_cooperative_matrix;\n";

/// Power of 2, so scaling is exact. Probabilities are at most 1 (but for rounding) and f16 reaches
/// 65,504, so there is no overflow.
const PROB_SCALE: f32 = 1024.0;

/// Distance of rows of `products` on devices with several subgroup sizes, as AMD's have, which
/// store rows of 16 elements: two rows share banks at either distance. By RADV a SIMD of navi31 has
/// 8 subgroups of most kernels up to dim 128 with this one and 6 with the other, which takes more
/// workgroup memory.
const NARROW_PRODUCT_STEP: usize = ROW_STEP;

/// Workgroup memory and functions that read it. `left_half`: `[row][element]`, then P or dX;
/// `right_half`: `[column][element]`, then `[element][vector]`. All are arrays of vectors of 4,
/// because compilers need not join accesses to neighbouring elements: with arrays of scalars a GPU
/// ran forward at 0.90 to 0.97 of the speed (benches/record/wgpu.md).
///
/// # Alignment
/// Vulkan requires that matrices are loaded and stored at multiples of 16 bytes, and WGSL cannot
/// align a variable. So every variable in workgroup memory is of a multiple of 16 bytes: in
/// whichever order a driver places them, arrays begin at such. NVIDIA's places small ones first:
/// behind a `u32` all products were wrong on an H200 (benches/record/wgpu.md).
pub(super) fn declarations(grid: Grid) -> String {
    let rounds = if grid.matrices.has_smaller_subgroups() {
        "var<workgroup> rounds: vec4<u32>;\n"
    } else {
        ""
    };
    let [left, right] = grid.staged_vectors();
    format!(
        "const PROB_SCALE: f32 = {PROB_SCALE:?};
const NON_FINITE: u32 = 0x7f800000u;
const LOG2_E: f32 = 1.4426950408889634;
const TWICE_LOG2_E: f32 = 2.8853900817779268;

var<workgroup> left_half: array<vec4<f16>, {left}>;
var<workgroup> right_half: array<vec4<f16>, {right}>;
var<workgroup> products: array<vec4<f32>, {products}>;
{rounds}var<workgroup> non_finite: array<atomic<u32>, 4>;

// Factors of vector `j` in four rows.
fn factors_of(row: u32, j: u32) -> vec4<f32> {{
    let at = {HALF_STEP}u * row + (j >> 2u);
    let n = j & 3u;
    return vec4<f32>(vec4<f16>(
        left_half[at][n],
        left_half[at + {HALF_STEP}u][n],
        left_half[at + {two}u][n],
        left_half[at + {three}u][n]));
}}

// Exponent bits, by which numbers that are not finite exceed all others.
fn exponent_bits(four: vec4<f32>) -> vec4<u32> {{
    return bitcast<vec4<u32>>(four) & vec4<u32>(NON_FINITE);
}}

// e^x, for probabilities that are rounded to f16: exp2 may have an error of (3 + 2·|x|) ulp.
fn half_exponentials(x: vec4<f32>) -> vec4<f32> {{
    return exp2(x * LOG2_E);
}}

// tanh x = 1 − 2 / (1 + e^(2x)), from 2x·log2 e: an absolute error of some 1e-7. It is 1 from a
// power of 2^126 on.
fn half_tangents(x: vec4<f32>) -> vec4<f32> {{
    let e = exp2(min(x, vec4<f32>(126.0)));
    return fma(vec4<f32>(-2.0), vec4<f32>(1.0) / (vec4<f32>(1.0) + e), vec4<f32>(1.0));
}}
",
        products = grid.rows() * grid.product_step(),
        two = 2 * HALF_STEP,
        three = 3 * HALF_STEP,
    )
}

/// Cooperative matrices of a tile: those of a device, and the rows of the tile, of 32 columns.
#[derive(Clone, Copy)]
pub(super) struct Grid {
    matrices: Matrices,
    tall: bool,
}

impl Grid {
    /// Grid of a kernel; `None` if it has no matrices.
    pub(super) fn of(variant: TileVariant) -> Option<Self> {
        variant.used_matrices().map(|matrices| Self { matrices, tall: variant.tall })
    }

    const fn rows(self) -> usize {
        if self.tall { TallTile::ROWS } else { TILE }
    }

    /// Invocations of a workgroup: a register tile of 4 × 4 pairs each.
    pub(super) const fn invocations(self) -> usize {
        2 * self.rows()
    }

    /// Vectors of 4 of `left_half` and `right_half`.
    const fn staged_vectors(self) -> [usize; 2] {
        // of a tall tile 64 elements of 32 values, which take more than 32 keys of 64 elements
        let right = if self.tall { TallTile::CHUNK } else { TILE };
        [self.rows() * HALF_STEP, right * HALF_STEP]
    }

    /// Distance of rows of `products`, in vectors of 4.
    const fn product_step(self) -> usize {
        if self.matrices.has_smaller_subgroups() { NARROW_PRODUCT_STEP } else { PRODUCT_STEP }
    }

    /// Element of `products` at row `r` of the register tile.
    pub(super) fn product_at(self, r: usize) -> String {
        let step = self.product_step();
        format!("{}u * ty + tx + {}u", 4 * step, r * step)
    }

    /// True if a subgroup owns the matrices of exactly those rows of a tall tile of which its
    /// invocations hold register tiles.
    pub(super) fn owns_rows(self) -> bool {
        let Owned { columns, size, .. } = Owned::of(self);
        let are_whole = columns * size == TILE as u32;
        self.tall && are_whole
    }

    /// Barrier between writes and reads of `left_half` and `products`, of which a subgroup that
    /// owns rows accesses no others.
    pub(super) fn row_barrier(self) -> &'static str {
        if self.owns_rows() { "subgroupBarrier();" } else { "workgroupBarrier();" }
    }

    /// Matrices of a column of the tile, and of a row.
    const fn lines(self) -> [u32; 2] {
        let size = self.matrices.size();
        [self.rows() as u32 / size, TILE as u32 / size]
    }

    /// Subgroups of a workgroup that have the largest size of the device.
    const fn subgroups(self) -> u32 {
        self.matrices.subgroups() * (self.invocations() as u32 / 64)
    }
}

/// A right operand in `right_half`: the distance of its rows, and the expression that is added to
/// the offset of an element, or none.
#[derive(Clone, Copy)]
pub(super) struct RightOperand<'a> {
    pub(super) step: usize,
    pub(super) at: &'a str,
}

impl RightOperand<'_> {
    /// 32 elements of each row.
    pub(super) const NARROW: Self = RightOperand { step: HALF_STEP, at: "" };
}

/// Matrices of a tile that a subgroup of the largest size owns: `rows` × `columns` of them, from
/// row `matrix_row` and column `matrix_column` on, at distances of `row_step` and `column_step`.
/// They share their operands: a row of matrices its left one, a column its right one.
///
/// With one subgroup all indices are constants of the text, and no accumulator passes a branch at
/// which compilers copy it.
struct Owned {
    size: u32,
    rows: u32,
    columns: u32,
    row_step: u32,
    column_step: u32,
    /// Expressions for the first row and column.
    first: [String; 2],
    /// Distance of rows of `products`, in vectors of 4.
    product_step: usize,
}

impl Owned {
    fn of(grid: Grid) -> Self {
        let (size, subgroups) = (grid.matrices.size(), grid.subgroups());
        if grid.tall {
            return Self::by_rows(grid);
        }
        let line = 32 / size;
        if subgroups > line {
            // a column each
            return Self {
                size,
                rows: line * line / subgroups,
                columns: 1,
                row_step: size * subgroups / line,
                column_step: 0,
                first: [
                    format!("{size}u * (subgroup / {line}u)"),
                    format!("{size}u * (subgroup % {line}u)"),
                ],
                product_step: grid.product_step(),
            };
        }
        let column = if subgroups == 1 { "0u".into() } else { format!("{size}u * subgroup") };
        Self {
            size,
            rows: line,
            columns: line / subgroups,
            row_step: size,
            column_step: size * subgroups,
            first: ["0u".to_owned(), column],
            product_step: grid.product_step(),
        }
    }

    /// Divides the tile into whole rows of matrices, or into parts of rows if there are more
    /// subgroups.
    fn by_rows(grid: Grid) -> Self {
        let (size, subgroups) = (grid.matrices.size(), grid.subgroups());
        let [down, across] = grid.lines();
        let per_row = (subgroups / down).max(1);
        let (rows, columns) = ((down / subgroups).max(1), across / per_row);
        let first = if per_row == 1 {
            [format!("{}u * subgroup", size * rows), "0u".to_owned()]
        } else {
            [
                format!("{size}u * (subgroup / {per_row}u)"),
                format!("{}u * (subgroup % {per_row}u)", size * columns),
            ]
        };
        let product_step = grid.product_step();
        Self { size, rows, columns, row_step: size, column_step: size, first, product_step }
    }

    const fn count(&self) -> u32 {
        self.rows * self.columns
    }

    /// Generates `text` for each matrix, `{i}` being its row and `{j}` its column among those
    /// owned.
    fn each(&self, text: &str) -> String {
        let all = (0..self.rows).flat_map(|i| (0..self.columns).map(move |j| (i, j)));
        all.map(|(i, j)| text.replace("{i}", &i.to_string()).replace("{j}", &j.to_string()))
            .collect()
    }

    /// Type of the matrices of a role.
    fn kind(&self, role: &str) -> String {
        let (size, element) = (self.size, if role == "C" { "f32" } else { "f16" });
        format!("coop_mat{size}x{size}<{element}, {role}>")
    }

    /// Generates accumulators `c_{i}_{j}` of 0.
    fn zeros(&self) -> String {
        self.each(&format!("    var c_{{i}}_{{j}} = {}();\n", self.kind("C")))
    }

    /// Load of the left operand, from `row` and element 4·`k` on.
    fn load_left(&self, row: &str, k: &str) -> String {
        let kind = self.kind("A");
        format!("coopLoadT<{kind}>(&left_half[{HALF_STEP}u * {row} + {k}], {HALF_STEP}u)")
    }

    /// Load of a right operand, stored by columns: an invocation loads the consecutive elements of
    /// one column. By rows it would load them one by one.
    fn load_right(&self, right: RightOperand<'_>, column: &str, k: &str) -> String {
        let RightOperand { step, at } = right;
        let kind = self.kind("B");
        format!("coopLoad<{kind}>(&right_half[{step}u * {column} + {at}{k}], {step}u)")
    }

    /// Generates `q_{i}_{n}`, matrices of 32 elements of the rows in `left_half`, which are those
    /// of the queries from element `first` on.
    fn hold(&self, first: u32) -> String {
        let mut text = String::new();
        for element in (0..TILE as u32).step_by(self.size as usize) {
            let (n, k) = ((first + element) / self.size, element / 4);
            for i in 0..self.rows {
                let row = format!("(matrix_row + {}u)", self.row_step * i);
                let load = self.load_left(&row, &format!("{k}u"));
                text += &format!("let q_{i}_{n} = {load};\n");
            }
        }
        text
    }

    /// Generates c_{i}_{j} += A·B, where A are the matrices of [`Self::hold`] for `elements`
    /// elements from `first` on. B begins at element 0.
    fn multiply_held(&self, right: RightOperand<'_>, first: u32, elements: u32) -> String {
        let mut text = String::new();
        for element in (0..elements).step_by(self.size as usize) {
            let (n, k) = ((first + element) / self.size, element / 4);
            text.push_str("    {\n");
            for j in 0..self.columns {
                let column = format!("(matrix_column + {}u)", self.column_step * j);
                let load = self.load_right(right, &column, &format!("{k}u"));
                text += &format!("        let b_{j} = {load};\n");
            }
            text += &self.each(&format!(
                "        c_{{i}}_{{j}} = coopMultiplyAdd(q_{{i}}_{n}, b_{{j}}, c_{{i}}_{{j}});\n"
            ));
            text.push_str("    }\n");
        }
        text
    }

    /// Generates c_{i}_{j} += A·B.
    fn multiply(&self, right: RightOperand<'_>) -> String {
        let (size, end) = (self.size, TILE / 4);
        let mut text = format!("    for (var k = 0u; k < {end}u; k = k + {}u) {{\n", size / 4);
        for i in 0..self.rows {
            let load = self.load_left(&format!("(matrix_row + {}u)", self.row_step * i), "k");
            text += &format!("        let a_{i} = {load};\n");
        }
        for j in 0..self.columns {
            let column = format!("(matrix_column + {}u)", self.column_step * j);
            let load = self.load_right(right, &column, "k");
            text += &format!("        let b_{j} = {load};\n");
        }
        text += &self.each("        c_{i}_{j} = coopMultiplyAdd(a_{i}, b_{j}, c_{i}_{j});\n");
        text + "    }\n"
    }

    /// Generates `products` ← accumulators.
    fn store(&self) -> String {
        let step = self.product_step;
        let mut text = String::new();
        for i in 0..self.rows {
            for j in 0..self.columns {
                let [row, column] = [self.row_step * i, self.column_step * j].map(|at| at as usize);
                let at = step * row + column / 4;
                text += &format!(
                    "    coopStoreT(c_{i}_{j}, &products[matrix_product + {at}u], {step}u);\n"
                );
            }
        }
        text
    }

    /// Generates `products` ← A·B, or `products` + A·B if it `adds`, by subgroups of any size: each
    /// computes every `subgroups`-th matrix of the tile. How many, the text does not know, so their
    /// accumulators are in memory.
    fn multiply_in_memory(&self, right: RightOperand<'_>, adds: bool) -> String {
        let (size, line, kind) = (self.size, 32 / self.size, self.kind("C"));
        let left = self.load_left("any_row", "k");
        let right = self.load_right(right, "any_column", "k");
        let first = if adds {
            format!("coopLoadT<{kind}>(&products[start], {}u)", self.product_step)
        } else {
            format!("{kind}()")
        };
        format!(
            "    for (var n = 0u; n < matrix_rounds; n++) {{
        let matrix = n * subgroups + subgroup;
        let any_row = {size}u * (matrix / {line}u);
        let any_column = {size}u * (matrix % {line}u);
        let start = {row_step}u * any_row + any_column / 4u;
        var sum = {first};
        for (var k = 0u; k < {end}u; k = k + {step}u) {{
            let a = {left};
            let b = {right};
            sum = coopMultiplyAdd(a, b, sum);
        }}
        coopStoreT(sum, &products[start], {row_step}u);
    }}
",
            step = size / 4,
            end = TILE / 4,
            row_step = self.product_step,
        )
    }
}

/// Generates `owned` for subgroups of the largest size and, if the device has others, `in_memory`
/// for those.
fn by_subgroup_size(matrices: Matrices, owned: &str, in_memory: &str) -> String {
    if !matrices.has_smaller_subgroups() {
        return owned.to_owned();
    }
    let otherwise =
        if in_memory.is_empty() { String::new() } else { format!(" else {{\n{in_memory}}}") };
    format!("if (matrices_are_owned) {{\n{owned}}}{otherwise}\n")
}

/// Generates `products` ← A·B. The accumulators are declared where they are used, or compilers copy
/// all of them at every branch.
pub(super) fn multiply_and_store(grid: Grid, right: RightOperand<'_>) -> String {
    let of = Owned::of(grid);
    let owned = of.zeros() + &of.multiply(right) + &of.store();
    by_subgroup_size(grid.matrices, &owned, &of.multiply_in_memory(right, false))
}

/// Generates the first matrix of a subgroup. If the device has subgroups of several sizes, also the
/// number of matrices per subgroup, and whether these are those of [`Owned`]; both are uniform over
/// the workgroup. The number of matrices in a tile is a multiple of the number of subgroups.
pub(super) fn count(grid: Grid) -> String {
    let owned = Owned::of(grid);
    let [row, column] = &owned.first;
    let [down, across] = grid.lines();
    let rounds = if grid.matrices.has_smaller_subgroups() {
        format!(
            "if (lane == 0u) {{
    rounds.x = {}u / subgroups;
}}
let matrix_rounds = workgroupUniformLoad(&rounds).x;
let matrices_are_owned = matrix_rounds == {}u;
",
            down * across,
            owned.count()
        )
    } else {
        String::new()
    };
    format!(
        "{rounds}let matrix_row = {row};
let matrix_column = {column};
let matrix_product = {}u * matrix_row + matrix_column / 4u;
",
        grid.product_step()
    )
}

/// Counterpart of `products::add_product`: S stays in matrices for all elements.
pub(super) fn add_product(
    variant: TileVariant,
    grid: Grid,
    prefix: &str,
    left: &Vectors,
    right: &Vectors,
) -> String {
    let [rows, stage] = stage_rows(variant, [left, right], "halves", |side, n| {
        format!("{side}_half[stored_at + {}u]", 8 * HALF_STEP * n)
    });
    let parts = SumOverChunks::of(grid);
    format!(
        "{{
    let element = 4u * (lane & 7u);
    let vector = {LOADED_ROW};
    let stored_at = {HALF_STEP}u * vector + (lane & 7u);
{rows}{begin}{stage}{multiply}    }}
{end}}}
",
        begin = parts.begin,
        multiply = parts.multiply,
        end = parts.end(prefix),
    )
}

/// Generates the matrices of the 32 elements of queries from `first` on that are in `left_half`.
pub(super) fn hold(grid: Grid, first: usize) -> String {
    Owned::of(grid).hold(first as u32)
}

/// Generates c_{i}_{j} += product of held queries, from element `first` on, with `elements`
/// elements of `right`.
pub(super) fn multiply_held(
    grid: Grid,
    right: RightOperand<'_>,
    first: usize,
    elements: usize,
) -> String {
    Owned::of(grid).multiply_held(right, first as u32, elements as u32)
}

/// Parts of a product that sums over chunks of elements: S and dP.
pub(super) struct SumOverChunks {
    /// Before the loop over chunks.
    pub(super) begin: String,
    /// Sums over a chunk.
    pub(super) multiply: String,
    store: String,
    grid: Grid,
}

impl SumOverChunks {
    pub(super) fn of(grid: Grid) -> Self {
        let (owned, matrices) = (Owned::of(grid), grid.matrices);
        let operand = RightOperand::NARROW;
        let in_memory = owned.multiply_in_memory(operand, true);
        Self {
            begin: owned.zeros() + &zero_products(grid),
            multiply: by_subgroup_size(matrices, &owned.multiply(operand), &in_memory),
            store: by_subgroup_size(matrices, &owned.store(), ""),
            grid,
        }
    }

    /// Generates the end of the product: `PREFIX{row}` ← sums.
    pub(super) fn end(&self, prefix: &str) -> String {
        let mut text = format!("{}    {}\n", self.store, self.grid.row_barrier());
        for r in 0..4 {
            let at = self.grid.product_at(r);
            text += &format!("    {prefix}{r} = products[{at}];\n");
        }
        text
    }
}

/// Generates `products` ← 0, for subgroups whose accumulators are in memory.
fn zero_products(grid: Grid) -> String {
    if !grid.matrices.has_smaller_subgroups() {
        return String::new();
    }
    let (vectors, invocations) = (grid.rows() * grid.product_step(), grid.invocations());
    format!(
        "    if (!matrices_are_owned) {{
        workgroupBarrier();
        for (var n = 0u; n < {}u; n++) {{
            products[({invocations}u * n + lane) % {vectors}u] = vec4<f32>(0.0);
        }}
    }}
",
        vectors.div_ceil(invocations)
    )
}

/// Left factors of the second products.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum ProductFactors {
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
        text += &format!(
            "left_half[{}u * ty + tx + {}u] = vec4<f16>({prefix}{r} * {factors}[{r}]);\n",
            4 * HALF_STEP,
            HALF_STEP * r
        );
    }
    text
}

/// Kernel that multiplies known matrices.
pub(crate) fn probe(matrices: Matrices) -> Source {
    let mut text = Template::default();
    let grid = Grid { matrices, tall: false };
    text.name("DECLARATIONS", declarations(grid))
        .name("COUNT_MATRICES", count(grid))
        .name("PRODUCT", multiply_and_store(grid, RightOperand::NARROW))
        .name("HALF_STEP", HALF_STEP.to_string())
        .name("PRODUCT_STEP", grid.product_step().to_string());
    let wgsl =
        [ENABLED, ProbeParams::WGSL, &text.expand(include_str!("matrix_probe.wgsl"))].concat();
    Source { wgsl, bindings: vec![Access::Write], params: size_of::<ProbeParams>() }
}

/// Elements of the product of the probe, with which its results begin.
pub(crate) const PROBE_PRODUCT: usize = 1024;

/// Counts of wrong elements of a workgroup that follow: one per invocation.
pub(crate) const PROBE_COUNTS: usize = 64;

/// Expected product of the probe in row order: integers that f16 and f32 represent exactly, so
/// every order of sums gives the same bits.
pub(crate) fn probe_product([left_step, right_step]: [u32; 2]) -> Vec<f32> {
    let left = |row: u32, k: u32| ((32 * row + k) * left_step % 17) as f32;
    let right = |column: u32, k: u32| ((32 * column + k) * right_step % 13) as f32;
    (0..1024).map(|at| (0..32).map(|k| left(at / 32, k) * right(at % 32, k)).sum()).collect()
}
