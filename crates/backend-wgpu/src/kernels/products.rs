//! Generated parts of the tile kernels: products of vectors, unrolled over the register tile.

use std::fmt::Write;

use super::{
    Epilogue, TILE, TileVariant,
    matrices::{self, Factors},
    matrix_epilogue, matrix_sums,
    vectors::{ROW_STEP, Vectors, Words},
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

const ELEMENTS: [&str; 4] = ["x", "y", "z", "w"];

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
/// A tile of two halves has the products of both, four rows of each.
pub(super) fn product(
    variant: TileVariant,
    prefix: &str,
    left: &Vectors,
    left_first: &str,
    right: &Vectors,
    right_first: &str,
) -> String {
    let zero = format!("var {prefix}{{r}}{{{{H}}}} = vec4<f32>(0.0);");
    let zeros = each_half(variant, &each_row(variant.used_register_tile(), &zero));
    zeros + &add_product(variant, prefix, left, left_first, right, right_first)
}

/// As [`product`], with `s0` … declared.
pub(super) fn add_product(
    variant: TileVariant,
    prefix: &str,
    left: &Vectors,
    left_first: &str,
    right: &Vectors,
    right_first: &str,
) -> String {
    if let Some(on) = matrices::Grid::of(variant) {
        return matrices::add_product(variant, on, prefix, left, left_first, right, right_first);
    }
    let tile = variant.used_register_tile();
    let (mut rows, mut loads, mut zeros, mut stores) =
        (String::new(), String::new(), String::new(), String::new());
    for (side, array, of, first) in
        [("left", "tile", left, left_first), ("right", "right", right, right_first)]
    {
        let (declared, offsets) = of.loaded_rows(variant, side, first);
        rows += &declared;
        for (n, offset) in offsets.iter().enumerate() {
            let slot = stored_at(n * tile.load_step());
            // all loads before the first store, so that they are in flight together
            let _infallible = writeln!(
                loads,
                "        var {side}_{n} = {name}_four({offset}, c + element);",
                name = of.name
            );
            let _infallible = writeln!(
                zeros,
                "            {side}_{n} = select(vec4<f32>(0.0), {side}_{n}, inside);"
            );
            let _infallible = writeln!(stores, "        {array}[slot + {slot}u] = {side}_{n};");
        }
    }
    let dim = left.dim;
    let mut text = format!(
        "{{
    let element = 4u * (lane & 7u);
    let vector = lane >> 3u;
    let slot = {ROW_STEP}u * ((vector >> 2u) + 8u * (vector & 3u)) + (lane & 7u);
{rows}    for (var c = 0u; c < params.{dim}; c = c + 32u) {{
{loads}        if (c + 32u > params.{dim}) {{
            let inside =
                vec4<u32>(c + element) + vec4<u32>(0u, 1u, 2u, 3u) < vec4<u32>(params.{dim});
{zeros}        }}
        workgroupBarrier();
{stores}        workgroupBarrier();
        for (var four = 0u; four < 8u; four++) {{
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
        let half = if array == "tile" { "{{HALF_VECTORS}}" } else { "" };
        format!("            let {name} = {array}[{ROW_STEP}u * {index} + four + {at}u{half}];\n")
    };
    let load_left = |r| load(&format!("a{r}{{{{H}}}}"), "tile", left_index, r);
    let load_right: String = (0..4).map(|n| load(&format!("b{n}"), "right", "tx", n)).collect();
    let multiply_add = |r: usize, e: &str| {
        format!(
            "            {prefix}{r}{{{{H}}}} = fma(
                vec4<f32>(a{r}{{{{H}}}}.{e}),
                vec4<f32>(b0.{e}, b1.{e}, b2.{e}, b3.{e}),
                {prefix}{r}{{{{H}}}},
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
        // both halves use the right rows
        for (half, right) in variant.halves().iter().zip([&*load_right, ""]) {
            let left: String = (0..tile.rows()).map(load_left).collect();
            let rows = |e| (0..tile.rows()).map(|r| multiply_add(r, e)).collect::<String>();
            text += &half.expand(&(left + right + &ELEMENTS.map(rows).concat()));
        }
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
    factors: Factors,
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
        let _infallible = writeln!(text, "if ({first}u < {dim}) {{");
        text += &of.loads(tile, first);
        if let Some(InMemory { load, .. }) = in_memory {
            text += &each_of_group(tile, group, load);
        }
        text.push_str("    workgroupBarrier();\n");
        for n in 0..tile.loads() {
            let row = n * tile.load_step();
            let _infallible = writeln!(
                text,
                "    right[{ROW_STEP}u * (vector + {row}u) + (lane & 7u)] = four_{n};"
            );
        }
        text.push_str("    workgroupBarrier();\n");
        let sums = format!("{prefix}{group}");
        text += &match tile {
            RegisterTile::FourRows => multiply_columns(variant, &sums, words),
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
/// column of the register tile, of two halves a column of either.
fn multiply_columns(variant: TileVariant, sums: &str, words: Words) -> String {
    let load = |at: &str| {
        each_half(variant, &format!("let a{{{{H}}}} = tile[{at}{{{{HALF_VECTORS}}}}];\n"))
    };
    let line = |r: usize, b: &str| {
        let sum = format!("{sums}_{r}{{{{H}}}}");
        format!("{sum} = fma(vec4<f32>(a{{{{H}}}}.{}), {b}, {sum});\n", ELEMENTS[r])
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
    text += &each_half(variant, &rows);
    let rows: String = (0..4).map(|r| line(r, "b")).collect();
    text.push_str("        }\n    } else {\n        for (var four = 0u; four < 8u; four++) {\n");
    for n in 0..4 {
        let at = n * NEXT_ROW;
        let _infallible = writeln!(
            text,
            "            {{
{}let b = right[{ROW_STEP}u * (4u * four + {n}u) + tx];
{}            }}",
            load(&format!("{ROW_STEP}u * four + ty + {at}u")),
            each_half(variant, &rows)
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
            let _infallible = writeln!(
                text,
                "            let a{r} = tile[{ROW_STEP}u * ({rows}u * ty + {r}u) + four];"
            );
        }
        for (n, element) in ELEMENTS.iter().enumerate() {
            let _infallible = writeln!(
                text,
                "            {{
                let j = 4u * four + {n}u;
                let b = right[{ROW_STEP}u * j + tx];"
            );
            if is_partial && words == Words::OfColumns {
                let _infallible = writeln!(
                    text,
                    "                let word = atomicLoad(&visible_bits[j]) >> ({rows}u * ty);"
                );
            }
            for r in 0..rows {
                let b = if is_partial { words.masked(r) } else { "b".to_owned() };
                let _infallible = writeln!(
                    text,
                    "                {sums}_{r} = fma(vec4<f32>(a{r}.{element}), {b}, {sums}_{r});"
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

/// Generates lines for each half of the queries of a tile, with the names of [`Half::expand`].
fn each_half(variant: TileVariant, lines: &str) -> String {
    variant.halves().iter().map(|half| half.expand(lines)).collect()
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
fn each_of(count: usize, line: &str) -> String {
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
                let column = [0, 1, 2, 3].map(|r| format!("{prefix}{r}{{{{H}}}}[{c}]")).join(", ");
                let at = format!("{ROW_STEP}u * tx + ty + {}u{{{{HALF_VECTORS}}}}", c * NEXT_ROW);
                format!("tile[{at}] = vec4<f32>({column});\n")
            })
            .collect(),
        RegisterTile::TwoRows | RegisterTile::OneRow => {
            let at = format!("{ROW_STEP}u * ({}u * ty + {{r}}u) + tx", tile.rows());
            each_row(tile, &format!("tile[{at}] = {prefix}{{r}};"))
        }
    };
    "workgroupBarrier();\n".to_owned() + &each_half(variant, &stores)
}

/// Generates the store of P or dX for the second product.
pub(super) fn store_factors(variant: TileVariant, factors: Factors, prefix: &str) -> String {
    match (variant.used_matrices(), factors) {
        (None, _) => store_tile(variant, prefix),
        (Some(_), Factors::Probs) => matrices::store_probs(prefix),
        (Some(_), Factors::Gradients) => {
            matrices::GRADIENT_FACTORS.to_owned() + &matrices::store_gradients(prefix)
        }
    }
}

/// Generates the loads of the statistics of `count` queries, `stats0` …. Queries beyond the chunk
/// have those of the last one: their pairs are masked.
fn statistics(count: usize, first: &str) -> String {
    let line = format!(
        "var stats{{r}} =
    statistics_of(state + min({first} + {{r}}u, params.queries - 1u) * params.statistics_row);"
    );
    each_of(count, &line)
}

/// Generates the statistics of the queries in the rows of a register tile.
pub(super) fn row_statistics(tile: RegisterTile) -> String {
    statistics(tile.rows(), "row")
}

/// Generates the statistics of the queries in the columns of a register tile, unless
/// [`score_gradients`] does.
pub(super) fn column_statistics(variant: TileVariant) -> String {
    if loads_statistics_late(variant) { String::new() } else { statistics(4, "query") }
}

/// True if the statistics of columns are loaded after the scores, so that they take no registers
/// during the score epilogue. Only one row can: others would load them for each of their rows.
fn loads_statistics_late(variant: TileVariant) -> bool {
    variant.epilogue.masks() && variant.used_register_tile() == RegisterTile::OneRow
}

/// Orientation of a tile of the backward pass.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Orientation {
    RowsAreQueries,
    RowsAreKeys,
}

/// Statements of the backward step for a row of four pairs.
#[derive(Clone, Copy)]
pub(super) struct RowStep<'a> {
    /// With `s{r}`, `d{r}`, `grad` and `visible` in scope, in simple kernels.
    pub(super) masked: &'a str,
    /// As `masked`, where all pairs are visible.
    pub(super) full: &'a str,
    /// With `r`, `e`, `grad` and `visible` in scope, in general kernels; sets `next_s` and `next_d`.
    pub(super) general: &'a str,
}

/// Generates the backward step: scores `s` and products `d` become dX and P, 0 for masked pairs.
/// Clears the bits of pairs that only a bias or an empty row masks.
pub(super) fn score_gradients(
    variant: TileVariant,
    orientation: Orientation,
    then: RowStep<'_>,
) -> String {
    let (epilogue, tile) = (variant.epilogue, variant.used_register_tile());
    let rows_are_keys = orientation == Orientation::RowsAreKeys;
    let of_stats = |r: usize, element: &str| {
        if rows_are_keys {
            let columns = [0, 1, 2, 3].map(|c| format!("stats{c}.{element}"));
            format!("vec4<f32>({})", columns.join(", "))
        } else {
            format!("vec4<f32>(stats{r}.{element})")
        }
    };
    let gradient = |r: usize| {
        let [lse, _, delta, _] = ELEMENTS.map(|element| of_stats(r, element));
        match epilogue {
            Epilogue::SoftCap => format!(
                "let t = tangents(s{r});
    var grad = score_gradients(params.cap * t, d{r}, {lse}, {delta});
    grad.ds = grad.ds * fma(-t, t, vec4<f32>(1.0));"
            ),
            Epilogue::Dropout => format!(
                "let grad = score_gradients(params.scale * s{r}, d{r}, kept{r}, {lse}, {delta});"
            ),
            _ => format!("let grad = score_gradients(params.scale * s{r}, d{r}, {lse}, {delta});"),
        }
    };
    let tile_rows = tile.rows();
    // words of the register tile's queries, and its lowest bit in them
    let (queries, first_query, first_bit) = if rows_are_keys {
        (4, "4u * tx".to_owned(), format!("{tile_rows}u * ty"))
    } else {
        (tile_rows, format!("{tile_rows}u * ty"), "4u * tx".to_owned())
    };
    let words = each_of(
        queries,
        &format!(
            "let word{{r}} = atomicLoad(&visible_bits[{first_query} + {{r}}u]) >> ({first_bit});"
        ),
    );
    // four pairs in vectors: bits of row r
    let bits = |r: usize| {
        if rows_are_keys {
            format!(
                "((vec4<u32>(word0, word1, word2, word3) >> vec4<u32>({r}u)) & vec4<u32>(1u)) \
                 != vec4<u32>(0u)"
            )
        } else {
            format!("four_bits(word{r})")
        }
    };
    let for_row = |r: usize, text: &str| text.replace("{r}", &r.to_string());
    let mut text = String::new();
    if !epilogue.masks() {
        if epilogue == Epilogue::Dropout {
            let of = if rows_are_keys { column_queries(variant) } else { row_queries(tile) };
            text += &kept_rows(variant, orientation, of);
        }
        text.push_str("if (is_partial) {\n");
        text.push_str(&words);
        for r in 0..tile.rows() {
            let _infallible = write!(
                text,
                "{{
    let visible = {};
    {}
    {}
}}
",
                bits(r),
                gradient(r),
                for_row(r, then.masked)
            );
        }
        text.push_str("} else {\n");
        for r in 0..tile.rows() {
            let _infallible = write!(
                text,
                "{{
    {}
    {}
}}
",
                gradient(r),
                for_row(r, then.full)
            );
        }
        text.push_str("}\n");
        return text;
    }
    // A loop, because drivers take seconds to compile four copies. Registers rotate, so that none is
    // selected by the number of the row.
    let rotate = |names: &str| -> String {
        (1..tile_rows).map(|r| format!("{names}{} = {names}{r};\n", r - 1)).collect()
    };
    let last = tile_rows - 1;
    let rows = if rows_are_keys {
        "var keep0 = vec4<f32>(1.0);
var keep1 = vec4<f32>(1.0);
var keep2 = vec4<f32>(1.0);
var keep3 = vec4<f32>(1.0);
if ({{HAS_DROPOUT}}) {
    let keys_of_tile = {{DROPOUT_KEYS}}(row);
    for (var c = 0u; c < 4u; c++) {
        let keep = {{KEEP_FACTORS}}(batch, head, query + c, keys_of_tile);
        keep0 = keep1;
        keep1 = keep2;
        keep2 = keep3;
        keep3 = keep;
    }
}
let queries = vec4<u32>(query) + vec4<u32>(0u, 1u, 2u, 3u);
var cleared = vec4<u32>(0u);
var column_words = vec4<u32>(word0, word1, word2, word3);
for (var r = 0u; r < {{TILE_ROWS}}u; r++) {
    let bits = (column_words & vec4<u32>(1u)) != vec4<u32>(0u);
    let e = scores(batch, head, queries, vec4<u32>(row + r), mask_index, bits, s0);
    let keep = vec4<f32>(keep0.x, keep1.x, keep2.x, keep3.x);
"
        .to_owned()
    } else {
        let words = (0..tile_rows).map(|r| format!("word{r}")).collect::<Vec<_>>().join(", ");
        format!(
            "let keys = vec4<u32>(key) + vec4<u32>(0u, 1u, 2u, 3u);
var cleared = {{{{ROW_WORDS}}}}(0u);
var row_words = {{{{ROW_WORDS}}}}({words});
for (var r = 0u; r < {{{{TILE_ROWS}}}}u; r++) {{
    let bits = four_bits(row_words.x);
    let e = scores(batch, head, vec4<u32>(row + r), keys, mask_index, bits, s0);
    var keep = vec4<f32>(1.0);
    if ({{{{HAS_DROPOUT}}}}) {{
        keep = {{{{KEEP_FACTORS}}}}(batch, head, row + r, {{{{DROPOUT_KEYS}}}}(key));
    }}
"
        )
    };
    let next = if rows_are_keys {
        "    cleared = cleared | select(vec4<u32>(0u), vec4<u32>(1u << r), hidden);
    column_words = column_words >> vec4<u32>(1u);
    keep0 = keep0.yzwx;
    keep1 = keep1.yzwx;
    keep2 = keep2.yzwx;
    keep3 = keep3.yzwx;
"
        .to_owned()
    } else {
        format!(
            "    cleared = {{{{ROW_WORDS}}}}({}bits_of_four(hidden));
    row_words = row_words.{{{{ROW_REST}}}}x;
    let first_stats = stats0;
{}stats{last} = first_stats;
",
            rest_of(tile, "cleared"),
            rotate("stats")
        )
    };
    let late = if rows_are_keys && loads_statistics_late(variant) {
        statistics(4, "query")
    } else {
        String::new()
    };
    let [lse, max, delta, share] = ELEMENTS.map(|element| of_stats(0, element));
    let _infallible = write!(
        text,
        "{words}{rows}{late}    let visible = e.visible & is_not_negative_infinity({lse});
    let hidden = bits & !visible;
    let ds_dx = e.ds_dx;
    let grad = score_gradients(e.s, d0, keep, {lse}, {max}, {delta}, {share});
    var next_s = s0;
    var next_d = d0;
    {}
    {}{}    s{last} = next_s;
    d{last} = next_d;
{next}}}
",
        then.general,
        rotate("s"),
        rotate("d"),
    );
    text + &each_of(
        queries,
        &format!(
            "if (cleared[{{r}}] != 0u) {{
    atomicAnd(&visible_bits[{first_query} + {{r}}u], ~(cleared[{{r}}] << ({first_bit})));
}}"
        ),
    )
}

/// Queries of a register tile, for dropout: expressions for head and query of row, or column, `n`.
#[derive(Clone, Copy)]
pub(super) struct DropoutQueries {
    pub(super) head: &'static str,
    pub(super) query: &'static str,
    pub(super) count: usize,
    pub(super) rounds: QueryRounds,
}

/// Place of the rounds of Philox that depend on a query alone.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum QueryRounds {
    /// At their use.
    Here,
    /// Before the loop over keys.
    Own,
    /// By 32 invocations, for all, in workgroup memory.
    Shared,
}

/// Queries in the columns of a register tile of dK and dV.
pub(super) const COLUMN_QUERIES: DropoutQueries =
    DropoutQueries { head: "head", query: "query + n", count: 4, rounds: QueryRounds::Here };

/// True if the kernel of dK and dV shares the rounds of its queries.
pub(super) fn shares_rounds(variant: TileVariant, groups: usize) -> bool {
    let is_dropout = variant.epilogue == Epilogue::Dropout && variant.has_wide_products();
    variant.used_matrices().is_some() && is_dropout
        || matrix_epilogue::applies_backward(variant, groups)
}

/// Queries in the columns of a register tile of dropout alone.
fn column_queries(variant: TileVariant) -> DropoutQueries {
    let is_shared = shares_rounds(variant, usize::MAX);
    COLUMN_QUERIES.with(if is_shared { QueryRounds::Shared } else { QueryRounds::Here })
}

/// Queries in the rows of a register tile of dQ.
pub(super) const fn row_queries(tile: RegisterTile) -> DropoutQueries {
    DropoutQueries { head: "head", query: "row + n", count: tile.rows(), rounds: QueryRounds::Here }
}

impl DropoutQueries {
    pub(super) const fn with(self, rounds: QueryRounds) -> Self {
        Self { rounds, ..self }
    }

    /// Generates the rounds of Philox that depend on the query alone, `query_rounds0` …. If queries
    /// are a workgroup's own, before the loop over keys: kernels of dropout alone have the
    /// registers.
    pub(super) fn rounds(self) -> String {
        let Self { head, query, count, .. } = self;
        let rounds = format!("let query_rounds{{r}} = query_rounds(batch, {head}, {query});");
        each_of(count, &rounds.replace("+ n", "+ {r}u"))
            + &format!("let queries_are_low = {};\n", self.are_low())
    }

    /// Returns the condition that the high words of the numbers of all queries are 0.
    fn are_low(self) -> String {
        let is_low = |n| format!("is_query_low({})", self.query).replace("+ n", &format!("+ {n}u"));
        (0..self.count).map(is_low).collect::<Vec<_>>().join(" && ")
    }

    /// As [`Self::rounds`], if the variant computes them before the loop over keys.
    pub(super) fn own_rounds(self, variant: TileVariant) -> String {
        if has_own_rounds(variant) { self.rounds() } else { String::new() }
    }

    /// As [`Self::rounds`], if the spec has dropout.
    pub(super) fn rounds_if_dropped(self) -> String {
        let Self { head, query, count, .. } = self;
        let zeros = each_of(count, "var query_rounds{r} = vec4<u32>(0u);");
        let rounds = format!("    query_rounds{{r}} = query_rounds(batch, {head}, {query});");
        format!(
            "{zeros}var queries_are_low = false;
if ({{{{HAS_DROPOUT}}}}) {{
{}    queries_are_low = {};
}}
",
            each_of(count, &rounds.replace("+ n", "+ {r}u")),
            self.are_low()
        )
    }
}

/// Generates what 32 invocations compute of the queries of a tile for [`QueryRounds::Shared`]. A
/// barrier must follow.
pub(super) fn share_rounds(variant: TileVariant) -> String {
    let condition = if variant.epilogue == Epilogue::Dropout { "" } else { "{{HAS_DROPOUT}} && " };
    format!(
        "if ({condition}lane < 32u) {{
    shared_rounds[lane] = query_rounds(batch, head, column + lane);
    shared_high[lane] = block_mask[query_at(column + lane) + 1u];
}}
"
    )
}

/// Declares the variables of [`share_rounds`].
pub(super) const SHARED_ROUNDS: &str = "var<workgroup> shared_rounds: array<vec4<u32>, 32>;
var<workgroup> shared_high: array<u32, 32>;
";

/// Loads what [`share_rounds`] has stored, for the four queries of a register tile.
const LOAD_SHARED_ROUNDS: &str = "let query_rounds0 = shared_rounds[4u * tx];
let query_rounds1 = shared_rounds[4u * tx + 1u];
let query_rounds2 = shared_rounds[4u * tx + 2u];
let query_rounds3 = shared_rounds[4u * tx + 3u];
let queries_are_low = ((shared_high[4u * tx] | shared_high[4u * tx + 1u])
    | (shared_high[4u * tx + 2u] | shared_high[4u * tx + 3u])) == 0u;
";

fn has_own_rounds(variant: TileVariant) -> bool {
    variant.has_wide_products() && variant.epilogue == Epilogue::Dropout
}

/// Generates the dropout factors of a register tile, a vector per row: `kept0` ….
pub(super) fn kept_rows(
    variant: TileVariant,
    orientation: Orientation,
    of: DropoutQueries,
) -> String {
    let tile = variant.used_register_tile();
    let DropoutQueries { head, query, count, .. } = of;
    let keys = if orientation == Orientation::RowsAreQueries { "key" } else { "row" };
    let mut text = each_of(count, "var kept{r} = vec4<f32>(1.0);");
    let is_wide = variant.has_wide_products();
    let keys_of_tile = if is_wide { "keys_of_tile" } else { keys };
    // a loop, because drivers take seconds to compile several copies
    let shift: String = (1..count).map(|n| format!("kept{} = kept{n};\n", n - 1)).collect();
    let of_any_keys = format!(
        "for (var n = 0u; n < {count}u; n++) {{
    let keep = keep_factors(batch, {head}, {query}, {keys_of_tile});
{shift}kept{} = keep;
}}
",
        count - 1
    );
    text += &if is_wide {
        let is_own = orientation == Orientation::RowsAreQueries && has_own_rounds(variant);
        let rounds = match of.rounds {
            QueryRounds::Shared => LOAD_SHARED_ROUNDS.to_owned(),
            QueryRounds::Here if !is_own => of.rounds(),
            QueryRounds::Here | QueryRounds::Own => String::new(),
        };
        let of_block =
            each_of(count, "kept{r} = keep_factors_of_block(query_rounds{r}, of_block);");
        format!(
            "let keys_of_tile = dropout_keys({keys});
{rounds}let are_one_block = keys_of_tile.are_one_block && queries_are_low;
if (are_one_block) {{
let of_block = block_rounds(keys_of_tile);
{of_block}}} else {{
{of_any_keys}}}
"
        )
    } else {
        of_any_keys
    };
    if orientation == Orientation::RowsAreKeys {
        let rows = each_row(
            tile,
            "let row_kept{r} = vec4<f32>(kept0[{r}], kept1[{r}], kept2[{r}], kept3[{r}]);",
        );
        text += &rows;
        text += &each_row(tile, "kept{r} = row_kept{r};");
    }
    text
}
