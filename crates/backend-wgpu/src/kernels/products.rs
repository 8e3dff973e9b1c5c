//! Generated parts of the tile kernels: products of vectors, unrolled over the 4 × 4 register tile.

use std::fmt::Write;

use super::{
    TileVariant, matrices,
    vectors::{Vectors, Words},
};
use crate::level::Matrices;

/// Distance of rows of `left` and `right` in workgroup memory, in vectors of 4: one more than the 8
/// of a row, because a multiple of 8 would put the elements that 32 invocations store at once into
/// one of 32 banks.
pub(super) const ROW_STEP: usize = 9;

/// Generates `s0` … `s3` (for prefix s): products of four rows of `left` with four rows of `right`.
/// Each is one chain of multiply-adds in element order, or a product of cooperative matrices.
pub(super) fn product(
    on: Option<Matrices>,
    prefix: &str,
    left: &Vectors,
    left_first: &str,
    right: &Vectors,
    right_first: &str,
) -> String {
    if let Some(on) = on {
        return matrices::product(on, prefix, left, left_first, right, right_first);
    }
    // all loads before the first store, so that they are in flight together
    let (mut loads, mut stores) = (String::new(), String::new());
    for (side, of, first) in [("left", left, left_first), ("right", right, right_first)] {
        for n in 0..4 {
            let _infallible = writeln!(
                loads,
                "let {side}_{n} = {}_rows(batch, {}, {first} + 4u * rows + {}u, c + at);",
                of.name,
                of.head(),
                8 * n
            );
            let _infallible =
                writeln!(stores, "{side}[{ROW_STEP}u * at + rows + {}u] = {side}_{n};", 2 * n);
        }
    }
    let dim = left.dim;
    let mut text = String::new();
    for r in 0..4 {
        let _infallible = writeln!(text, "var {prefix}{r} = vec4<f32>(0.0);");
    }
    let _infallible = write!(
        text,
        "for (var c = 0u; c < params.{dim}; c = c + 32u) {{
    workgroupBarrier();
    {{
        let at = lane & 31u;
        let rows = lane >> 5u;
{loads}{stores}    }}
    workgroupBarrier();
    let most = min(32u, params.{dim} - c);
    for (var eighth = 0u; eighth < most; eighth = eighth + 8u) {{
    for (var n = 0u; n < 8u; n++) {{
        let at = eighth + n;
        let a = left[{ROW_STEP}u * at + ty];
        let b = right[{ROW_STEP}u * at + tx];
"
    );
    for (r, element) in ["x", "y", "z", "w"].iter().enumerate() {
        let _infallible =
            writeln!(text, "        {prefix}{r} = fma(vec4<f32>(a.{element}), b, {prefix}{r});");
    }
    text.push_str("    }\n    }\n}\n");
    text
}

/// Expression for four elements of vector `j` in workgroup memory.
fn right(variant: TileVariant) -> String {
    if matrices::of(variant).is_some() {
        "right_of(j, 4u * tx)".to_owned()
    } else {
        format!("right[{ROW_STEP}u * j + tx]")
    }
}

/// Generates the loads of 32 elements of 32 vectors from element `first` on, and their stores to
/// workgroup memory.
fn stage(variant: TileVariant, of: &Vectors, first: usize) -> String {
    let (mut loads, mut stores) = (String::new(), String::new());
    for n in 0..4 {
        let vector = 8 * n;
        let _infallible = writeln!(
            loads,
            "let four_{n} =
    {}_columns(batch, {}, column + j + {vector}u, {first}u + 4u * tx);",
            of.name,
            of.head()
        );
        let _infallible = if matrices::of(variant).is_some() {
            writeln!(
                stores,
                "for (var c = 0u; c < 4u; c++) {{
    right_half[32u * (j + {vector}u) + 4u * tx + c] = f16(four_{n}[c]);
}}"
            )
        } else {
            writeln!(stores, "right[{ROW_STEP}u * (j + {vector}u) + tx] = four_{n};")
        };
    }
    loads + &stores
}

/// Generates accumulators `PREFIX{group}_{row}` += P·`of`, on cooperative matrices if the variant
/// has them.
pub(super) fn accumulate_weights(
    variant: TileVariant,
    prefix: &str,
    groups: usize,
    of: &Vectors,
    words: Words,
) -> String {
    match matrices::of(variant) {
        Some(on) => matrices::accumulate(on, prefix, groups, of, words),
        None => accumulate(variant, prefix, groups, of, words),
    }
}

/// Generates accumulators `PREFIX{group}_{row}` += `tile`ᵀ·`of`. In partial tiles the vector of a
/// masked pair counts as 0, because 0 · NaN would reach the row.
pub(super) fn accumulate(
    variant: TileVariant,
    prefix: &str,
    groups: usize,
    of: &Vectors,
    words: Words,
) -> String {
    let dim = of.dim;
    let general = variant.general;
    let mut text = String::new();
    for group in 0..groups {
        let _infallible = write!(
            text,
            "if ({first}u < params.{dim}) {{
    workgroupBarrier();
    {{
        let j = lane >> 3u;
{stage}    }}
    workgroupBarrier();
    {mask_index}
        for (var j = 0u; j < 32u; j++) {{
            let a = tile[8u * j + ty];
            let b = {right};
",
            first = 32 * group,
            stage = stage(variant, of, 32 * group),
            right = right(variant),
            // general variants use one loop for full and partial tiles: less to compile
            mask_index = if general { "{" } else { "if (is_partial) {" }
        );
        if words == Words::OfColumns {
            text.push_str("            let word = atomicLoad(&visible_bits[j]) >> (4u * ty);\n");
        }
        let line = |r: usize, b: &str| {
            let element = ["x", "y", "z", "w"][r];
            format!(
                "{prefix}{group}_{r} = fma(vec4<f32>(a.{element}), {b}, {prefix}{group}_{r});\n"
            )
        };
        for r in 0..4 {
            let bit = words.bit(r);
            let _infallible = write!(
                text,
                "            {}",
                line(r, &format!("select(vec4<f32>(0.0), b, ({bit}) != 0u)"))
            );
        }
        if general {
            text.push_str("        }\n    }\n}\n");
            continue;
        }
        text.push_str(
            "        }
    } else {
        for (var j = 0u; j < 32u; j++) {
",
        );
        let _infallible = writeln!(text, "            let a = tile[8u * j + ty];");
        let _infallible = writeln!(text, "            let b = {};", right(variant));
        for r in 0..4 {
            let _infallible = write!(text, "            {}", line(r, "b"));
        }
        text.push_str("        }\n    }\n}\n");
    }
    text
}

/// Generates a line per group and row; `{g}`, `{r}` and `{c}` (the group's first column) are
/// numbers.
pub(super) fn each(groups: usize, line: &str) -> String {
    let mut text = String::new();
    for g in 0..groups {
        for r in 0..4 {
            let line = line.replace("{g}", &g.to_string()).replace("{r}", &r.to_string());
            let _infallible =
                writeln!(text, "{}", line.replace("{c}", &format!("({}u + 4u * tx)", 32 * g)));
        }
    }
    text
}

/// Generates a statement for each of the 16 pairs of an invocation, written for row `{r}` and
/// column `{c}` (`{r}u`, `{c}u` as WGSL numbers). `lists` are the prefixes of four vectors that it
/// reads or writes; none may end in an earlier one.
///
/// Unrolled if the epilogue is empty. Otherwise the statement is long, and drivers take seconds to
/// compile 16 copies of it, so it is a loop.
pub(super) fn each_pair(general: bool, lists: &[&str], line: &str) -> String {
    let mut text = String::new();
    if !general {
        for r in 0..4 {
            for c in 0..4 {
                let _infallible = writeln!(
                    text,
                    "{}",
                    line.replace("{r}", &r.to_string()).replace("{c}", &c.to_string())
                );
            }
        }
        return text;
    }
    let mut body = line.to_owned();
    text.push_str("{\n");
    for list in lists {
        let _infallible = writeln!(
            text,
            "var all_{list} = array<vec4<f32>, 4>({list}0, {list}1, {list}2, {list}3);"
        );
        body = body
            .replace(&format!("{list}{{r}}"), &format!("all_{list}[r]"))
            .replace(&format!("{list}{{c}}"), &format!("all_{list}[c]"));
    }
    for index in ["r", "c"] {
        body =
            body.replace(&format!("{{{index}}}u"), index).replace(&format!("{{{index}}}"), index);
    }
    let _infallible = write!(
        text,
        "for (var r = 0u; r < 4u; r++) {{\nfor (var c = 0u; c < 4u; c++) {{\n{body}\n}}\n}}\n"
    );
    for list in lists.iter().filter(|list| ["s", "d"].contains(list)) {
        for r in 0..4 {
            let _infallible = writeln!(text, "{list}{r} = all_{list}[{r}];");
        }
    }
    text.push_str("}\n");
    text
}

/// Generates a line per row `{r}`.
pub(super) fn each_row(line: &str) -> String {
    let mut text = String::new();
    for r in 0..4 {
        let _infallible = writeln!(text, "{}", line.replace("{r}", &r.to_string()));
    }
    text
}

/// Generates loads and stores of four accumulators, bounded by the vector length.
pub(super) fn acc_functions(buffer: &str) -> String {
    format!(
        "fn load_acc(at: u32, c: u32, dim: u32) -> vec4<f32> {{
    var four = vec4<f32>(0.0);
    for (var n = 0u; n < 4u; n++) {{
        if (c + n < dim) {{
            four[n] = {buffer}[at + c + n];
        }}
    }}
    return four;
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

/// Generates `tile` ← four columns of four rows.
pub(super) fn store_tile(prefix: &str) -> String {
    (0..4)
        .map(|c| {
            let column = [0, 1, 2, 3].map(|r| format!("{prefix}{r}[{c}]")).join(", ");
            format!("tile[8u * (4u * tx + {c}u) + ty] = vec4<f32>({column});\n")
        })
        .collect()
}

/// Generates the store of P for the second product.
pub(super) fn store_weights(on: Option<Matrices>, prefix: &str) -> String {
    if on.is_some() { matrices::store_tile(prefix) } else { store_tile(prefix) }
}

/// Generates the loads of the statistics of the invocation's four queries, `stats0` … `stats3`.
pub(super) fn statistics(first: &str) -> String {
    each_row(&format!(
        "var stats{{r}} = vec4<f32>(0.0);
if ({first} + {{r}}u < params.queries) {{
    stats{{r}} = statistics_of(state + ({first} + {{r}}u) * params.statistics_row);
}}"
    ))
}

/// Generates the backward step: scores `s` and products `d` become dX and P, 0 for masked pairs.
/// Clears the bits of pairs that only a bias or an empty row masks. `rows_are_keys` is the
/// orientation of the tile; `then` runs for each pair, with `grad` in scope.
pub(super) fn score_gradients(general: bool, rows_are_keys: bool, then: &str) -> String {
    let (query, key, word, bit, stats, keep) = if rows_are_keys {
        (
            "query + {c}u",
            "row + {r}u",
            "4u * tx + {c}u",
            "4u * ty + {r}u",
            "stats{c}",
            "keep{c}[{r}]",
        )
    } else {
        ("row + {r}u", "key + {c}u", "4u * ty + {r}u", "4u * tx + {c}u", "stats{r}", "keep{r}[{c}]")
    };
    let (keep_query, keep_key) =
        if rows_are_keys { ("query + r", "row") } else { ("row + r", "key") };
    let keeps = if general {
        // a loop, as in each_pair
        let loops = format!(
            "var keeps = array<vec4<f32>, 4>();
for (var r = 0u; r < 4u; r++) {{
    keeps[r] = keep_factors(batch, head, {keep_query}, {keep_key});
}}
"
        );
        loops + &each_row("let keep{r} = keeps[{r}];")
    } else {
        each_row("let keep{r} = vec4<f32>(1.0);")
    };
    keeps
        + &each_pair(
            general,
            &["stats", "keep", "s", "d"],
            &format!(
                "{{
    let bit = ((atomicLoad(&visible_bits[{word}]) >> ({bit})) & 1u) != 0u;
    let e = score(batch, head, {query}, {key}, mask_index, bit, s{{r}}[{{c}}]);
    let grad = score_gradient(e.s, d{{r}}[{{c}}], {keep}, {stats});
#if GENERAL
    let visible = e.visible && !is_negative_infinity({stats}.x);
    if (bit && !visible) {{
        atomicAnd(&visible_bits[{word}], ~(1u << ({bit})));
    }}
#else
    let visible = e.visible;
#end
{then}
}}"
            ),
        )
}
