//! Generated parts of the tile kernels: products of vectors, unrolled over the register tile.

use super::{
    TILE, TileVariant,
    matrices::{self, ProductFactors},
    matrix_sums,
    vectors::{ROW_STEP, Vectors, Words, stage_rows},
};
use crate::RegisterTile;

/// Distance of rows `4 · t + n` and `4 · t + n + 1` in workgroup memory. Row 4 · t + n is stored as
/// row t + 8 · n, because invocations t = 0 … 7 access the rows 4 · t + n of one n at once.
const NEXT_ROW: usize = 8 * ROW_STEP;

/// Distance in workgroup memory from the row that an invocation loads first, row 0 … 7, to that
/// which is `rows` behind it, a multiple of 4.
const fn stored_at(rows: usize) -> usize {
    (rows / TILE * TILE + rows % TILE / 4) * ROW_STEP
}

pub(super) const ELEMENTS: [&str; 4] = ["x", "y", "z", "w"];

/// Generates `s0` … (for prefix s): products of the register tile's rows of `left` with four rows
/// of `right`. Each is one chain of multiply-adds in element order, or a product of cooperative
/// matrices.
///
/// ```text
/// for each 32 elements:
///     load both sides (4 elements of each row that an invocation loads), zeros beyond the vectors
///     store them to `tile` and `right`
///     for each 4 elements: read them of R + 4 rows; R × 4 × 4 multiply-adds (R: rows, 8 to 1)
/// ```
pub(super) fn product(
    variant: TileVariant,
    prefix: &str,
    left: &Vectors,
    right: &Vectors,
) -> String {
    let zero = format!("var {prefix}{{r}} = vec4<f32>(0.0);");
    let zeros = each_row(variant.used_register_tile(), &zero);
    zeros + &add_product(variant, prefix, left, right)
}

/// As [`product`], with `s0` … declared.
pub(super) fn add_product(
    variant: TileVariant,
    prefix: &str,
    left: &Vectors,
    right: &Vectors,
) -> String {
    if let Some(on) = matrices::Grid::of(variant) {
        return matrices::add_product(variant, on, prefix, left, right);
    }
    let tile = variant.used_register_tile();
    let [rows, stage] = stage_rows(variant, [left, right], "four", |side, n| {
        let array = if side == "left" { "tile" } else { side };
        format!("{array}[slot + {}u]", stored_at(n * tile.load_step()))
    });
    let mut text = format!(
        "{{
    let element = 4u * (lane & 7u);
    let vector = lane >> 3u;
    let slot = {ROW_STEP}u * ((vector >> 2u) + 8u * (vector & 3u)) + (lane & 7u);
{rows}{stage}        for (var four = 0u; four < 8u; four++) {{
"
    );
    let left_index = match tile {
        RegisterTile::FourRows => "ty",
        // rows 2 · ty and 2 · ty + 1, where they are stored
        RegisterTile::TwoRows => "((ty >> 1u) + 16u * (ty & 1u))",
        RegisterTile::OneRow => "((ty >> 2u) + 8u * (ty & 3u))",
    };
    let load = |name: &str, array: &str, index: &str, n: usize| {
        let at = n * NEXT_ROW;
        format!("            let {name} = {array}[{ROW_STEP}u * {index} + four + {at}u];\n")
    };
    let load_left = |r| load(&format!("a{r}"), "tile", left_index, r);
    let load_right: String = (0..4).map(|n| load(&format!("b{n}"), "right", "tx", n)).collect();
    let multiply_add = |r: usize, e: &str| {
        format!(
            "            {prefix}{r} = fma(
                vec4<f32>(a{r}.{e}),
                vec4<f32>(b0.{e}, b1.{e}, b2.{e}, b3.{e}),
                {prefix}{r},
            );\n"
        )
    };
    if is_row_by_row(variant, prefix) {
        text += &load_right;
        for r in 0..tile.rows() {
            text += &load_left(r);
            text.extend(ELEMENTS.map(|e| multiply_add(r, e)));
        }
    } else {
        text.extend((0..tile.rows()).map(load_left));
        text += &load_right;
        let rows = |e| (0..tile.rows()).map(|r| multiply_add(r, e)).collect::<String>();
        text.extend(ELEMENTS.map(rows));
    }
    text.push_str("        }\n    }\n}\n");
    text
}

/// True if a product reads one left row at a time: that of dP, during which S is live, in register
/// tiles of two rows and dims so large that the accumulators leave no other registers. By the
/// estimate of Mesa's compiler for Intel, dK and dV of dim 64 would take a tenth longer.
fn is_row_by_row(variant: TileVariant, prefix: &str) -> bool {
    let TileVariant { head_groups, value_groups, .. } = variant;
    let tile = variant.used_register_tile();
    tile == RegisterTile::TwoRows
        && prefix == "d"
        && TileVariant::splits_gradients(tile, 32 * head_groups, 32 * value_groups)
}

/// Accumulators `PREFIX{group}_{row}`.
#[derive(Clone, Copy)]
pub(super) struct Accumulators<'a> {
    pub(super) prefix: &'a str,
    pub(super) groups: usize,
    /// Lines that load and store the accumulators of the groups that do not fit registers. They are
    /// in memory between two tiles.
    pub(super) in_memory: Option<InMemory<'a>>,
}

/// Lines for a row of a group of accumulators in memory, with the names of [`each`].
#[derive(Clone, Copy)]
pub(super) struct InMemory<'a> {
    /// Number of groups before the first one in memory.
    pub(super) held: usize,
    pub(super) load: &'a str,
    pub(super) store: &'a str,
}

impl<'a> Accumulators<'a> {
    /// Accumulators that are all in registers.
    pub(super) const fn held(prefix: &'a str, groups: usize) -> Self {
        Self { prefix, groups, in_memory: None }
    }
}

/// Generates accumulators += P·`of` or dX·`of`, on cooperative matrices if the variant has them.
pub(super) fn accumulate(
    variant: TileVariant,
    into: Accumulators<'_>,
    factors: ProductFactors,
    of: &Vectors,
    words: Words,
) -> String {
    matrix_sums::accumulate(variant, into.prefix, into.groups, factors, of, words)
        .unwrap_or_else(|| multiply_add(variant, into, Factor::Of(of), words))
}

/// Vectors that P or dX is multiplied by.
#[derive(Clone, Copy)]
pub(super) enum Factor<'a> {
    Of(&'a Vectors),
    /// Vectors of the pass of dV, or of that of dK.
    OfPass {
        dv: &'a Vectors,
        dk: &'a Vectors,
    },
}

impl Factor<'_> {
    /// Generates variables from names and expressions for the vectors.
    fn variables(
        self,
        kind: &str,
        definitions: impl Fn(&Vectors) -> Vec<(String, String)>,
    ) -> String {
        let lines = |start: &str, of: &Vectors| -> String {
            let each = definitions(of).into_iter();
            each.map(|(name, expression)| format!("{start}{name} = {expression};\n")).collect()
        };
        match self {
            Self::Of(of) => lines("let ", of),
            Self::OfPass { dv, dk } => {
                let names = definitions(dv).into_iter();
                let declared: String =
                    names.map(|(name, _)| format!("var {name}: {kind};\n")).collect();
                let [dv, dk] = [dv, dk].map(|of| lines("", of));
                format!("{declared}if (is_dv) {{\n{dv}}} else {{\n{dk}}}\n")
            }
        }
    }

    /// Generates the offsets of an invocation's rows of the tile at `column`.
    fn rows(self, variant: TileVariant) -> String {
        self.variables("u32", |of| {
            let names = ["own_row", "last_row", "row_step"].map(str::to_owned);
            names.into_iter().zip(of.offsets(variant, "column")).collect()
        })
    }

    /// Generates the loads of four elements of each row that an invocation loads.
    fn loads(self, tile: RegisterTile, first: usize) -> String {
        self.variables("vec4<f32>", |of| {
            let load = |n| {
                let row = format!("min(own_row + {n}u * row_step, last_row)");
                (format!("four_{n}"), format!("{}_four({row}, {first}u + element)", of.name))
            };
            (0..tile.loads()).map(load).collect()
        })
    }
}

/// Generates accumulators += `tile`ᵀ·`of`. In partial tiles the vector of a masked pair counts as
/// 0, because 0 · NaN would reach the row.
pub(super) fn multiply_add(
    variant: TileVariant,
    into: Accumulators<'_>,
    of: Factor<'_>,
    words: Words,
) -> String {
    let tile = variant.used_register_tile();
    let mut text =
        "{\n    let element = 4u * (lane & 7u);\n    let vector = lane >> 3u;\n".to_owned();
    text += &of.rows(variant);
    let dim = match of {
        Factor::Of(of) => format!("params.{}", of.dim),
        Factor::OfPass { .. } => "acc_dim".to_owned(),
    };
    let Accumulators { prefix, groups, in_memory } = into;
    for group in 0..groups {
        let first = 32 * group;
        let in_memory = in_memory.filter(|of| group >= of.held);
        text += &format!("if ({first}u < {dim}) {{\n");
        text += &of.loads(tile, first);
        if let Some(InMemory { load, .. }) = in_memory {
            text += &each_of_group(tile, group, load);
        }
        text.push_str("    workgroupBarrier();\n");
        for n in 0..tile.loads() {
            let row = n * tile.load_step();
            text +=
                &format!("    right[{ROW_STEP}u * (vector + {row}u) + (lane & 7u)] = four_{n};\n");
        }
        text.push_str("    workgroupBarrier();\n");
        let sums = format!("{prefix}{group}");
        text += &match tile {
            RegisterTile::FourRows => multiply_columns(&sums, words),
            RegisterTile::TwoRows | RegisterTile::OneRow => multiply_rows(tile, &sums, words),
        };
        if let Some(InMemory { store, .. }) = in_memory {
            text += &each_of_group(tile, group, store);
        }
        text.push_str("}\n");
    }
    text.push_str("}\n");
    text
}

/// Generates `SUMS_{row}` += `tile`ᵀ·`right`, where `tile` is `[column][row]`: one vector has a
/// column of the register tile.
fn multiply_columns(sums: &str, words: Words) -> String {
    let load = |at: &str| format!("let a = tile[{at}];\n");
    let line = |r: usize, b: &str| {
        let sum = format!("{sums}_{r}");
        format!("{sum} = fma(vec4<f32>(a.{}), {b}, {sum});\n", ELEMENTS[r])
    };
    let mut text = format!(
        "    if (is_partial) {{
        for (var j = 0u; j < 32u; j++) {{
{}let b = right[{ROW_STEP}u * j + tx];
",
        load(&format!("{ROW_STEP}u * ((j >> 2u) + 8u * (j & 3u)) + ty"))
    );
    if words == Words::OfColumns {
        text.push_str("let word = atomicLoad(&visible_bits[j]) >> (4u * ty);\n");
    }
    let rows: String = (0..4).map(|r| line(r, &words.masked(r))).collect();
    text += &rows;
    let rows: String = (0..4).map(|r| line(r, "b")).collect();
    text.push_str("        }\n    } else {\n        for (var four = 0u; four < 8u; four++) {\n");
    for n in 0..4 {
        let at = n * NEXT_ROW;
        text += &format!(
            "            {{
{}let b = right[{ROW_STEP}u * (4u * four + {n}u) + tx];
{}            }}\n",
            load(&format!("{ROW_STEP}u * four + ty + {at}u")),
            rows
        );
    }
    text + "        }\n    }\n"
}

/// As [`multiply_columns`], where `tile` is `[row][column]`: one vector has four columns of a row
/// of the register tile. With two rows, `[column][row]` would take twice as many reads, of half a
/// vector each, with one row four times as many.
///
/// The bound of the masked loop is not a constant, so that compilers do not unroll it. If both are
/// unrolled, they compute the addresses of all reads before the branch and keep them: Mesa's
/// compiler for Intel 48 of them, of 128 registers.
fn multiply_rows(tile: RegisterTile, sums: &str, words: Words) -> String {
    let rows = tile.rows();
    let product = |is_partial: bool| {
        let bound = if is_partial { "8u * min(params.keys, 1u)" } else { "8u" };
        let mut text = format!("        for (var four = 0u; four < {bound}; four++) {{\n");
        for r in 0..rows {
            text += &format!(
                "            let a{r} = tile[{ROW_STEP}u * ({rows}u * ty + {r}u) + four];\n"
            );
        }
        for (n, element) in ELEMENTS.iter().enumerate() {
            text += &format!(
                "            {{
                let j = 4u * four + {n}u;
                let b = right[{ROW_STEP}u * j + tx];\n"
            );
            if is_partial && words == Words::OfColumns {
                text += &format!(
                    "                let word = atomicLoad(&visible_bits[j]) >> ({rows}u * ty);\n"
                );
            }
            for r in 0..rows {
                let b = if is_partial { words.masked(r) } else { "b".to_owned() };
                text += &format!(
                    "                {sums}_{r} = fma(vec4<f32>(a{r}.{element}), {b}, {sums}_{r});\n"
                );
            }
            text.push_str("            }\n");
        }
        text + "        }\n"
    };
    format!("    if (is_partial) {{\n{}    }} else {{\n{}    }}\n", product(true), product(false))
}

/// Generates a line per group and row; `{g}`, `{r}` and `{c}` (the group's first column) are
/// numbers.
pub(super) fn each(tile: RegisterTile, groups: usize, line: &str) -> String {
    (0..groups).map(|g| each_of_group(tile, g, line)).collect()
}

/// Generates a line per row of a group.
fn each_of_group(tile: RegisterTile, group: usize, line: &str) -> String {
    let line = line
        .replace("{g}", &group.to_string())
        .replace("{c}", &format!("({}u + 4u * tx)", 32 * group));
    each_row(tile, &line)
}

/// Generates a line per row `{r}` of the register tile.
pub(super) fn each_row(tile: RegisterTile, line: &str) -> String {
    each_of(tile.rows(), line)
}

/// Elements of a row vector after the first, for a constructor of one that is shifted by a row.
pub(super) fn rest_of(tile: RegisterTile, vector: &str) -> String {
    if tile.rows() == 1 { String::new() } else { format!("{vector}.{{{{ROW_REST}}}}, ") }
}

/// Generates a line per number `{r}`.
pub(super) fn each_of(count: usize, line: &str) -> String {
    (0..count).map(|r| line.replace("{r}", &r.to_string()) + "\n").collect()
}

/// Generates loads and stores of four accumulators, bounded by the vector length.
pub(super) fn acc_functions(buffer: &str, aligned: bool) -> String {
    if aligned {
        return format!(
            "fn load_acc(at: u32, c: u32, dim: u32) -> vec4<f32> {{
    return {buffer}[(at + min(c, dim - 4u)) >> 2u];
}}
fn store_acc(at: u32, c: u32, dim: u32, four: vec4<f32>) {{
    if (c < dim) {{
        {buffer}[(at + c) >> 2u] = four;
    }}
}}
"
        );
    }
    format!(
        "fn load_acc(at: u32, c: u32, dim: u32) -> vec4<f32> {{
    let last = dim - 1u;
    return vec4<f32>(
        {buffer}[at + min(c, last)],
        {buffer}[at + min(c + 1u, last)],
        {buffer}[at + min(c + 2u, last)],
        {buffer}[at + min(c + 3u, last)],
    );
}}
fn store_acc(at: u32, c: u32, dim: u32, four: vec4<f32>) {{
    for (var n = 0u; n < 4u; n++) {{
        if (c + n < dim) {{
            {buffer}[at + c + n] = four[n];
        }}
    }}
}}
"
    )
}

/// Generates `tile` ← a register tile, once all invocations have read what was in it:
/// `[column][row]` of four rows ([`multiply_columns`]), `[row][column]` of fewer
/// ([`multiply_rows`]).
pub(super) fn store_tile(variant: TileVariant, prefix: &str) -> String {
    let tile = variant.used_register_tile();
    let stores: String = match tile {
        RegisterTile::FourRows => (0..4)
            .map(|c| {
                let column = [0, 1, 2, 3].map(|r| format!("{prefix}{r}[{c}]")).join(", ");
                let at = format!("{ROW_STEP}u * tx + ty + {}u", c * NEXT_ROW);
                format!("tile[{at}] = vec4<f32>({column});\n")
            })
            .collect(),
        RegisterTile::TwoRows | RegisterTile::OneRow => {
            let at = format!("{ROW_STEP}u * ({}u * ty + {{r}}u) + tx", tile.rows());
            each_row(tile, &format!("tile[{at}] = {prefix}{{r}};"))
        }
    };
    "workgroupBarrier();\n".to_owned() + &stores
}

/// Generates the store of P or dX for the second product.
pub(super) fn store_factors(variant: TileVariant, factors: ProductFactors, prefix: &str) -> String {
    match (variant.used_matrices(), factors) {
        (None, _) => store_tile(variant, prefix),
        (Some(_), ProductFactors::Probs) => matrices::store_probs(prefix),
        (Some(_), ProductFactors::Gradients) => {
            matrices::GRADIENT_FACTORS.to_owned() + &matrices::store_gradients(prefix)
        }
    }
}
