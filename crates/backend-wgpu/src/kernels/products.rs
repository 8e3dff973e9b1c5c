//! Generated parts of the tile kernels: products of vectors, unrolled over the 4 × 4 register tile.

use std::fmt::Write;

use super::{
    ARITHMETIC, Access, BiasAxes, GRADIENT, Source, Storage, TILE_TEXT, TileVariant, matrices,
    params::TileParams, template::Template,
};
use crate::{Level, level::Matrices};

/// A tensor of vectors: name in the text, number of rows, length of vectors.
pub(super) struct Vectors {
    pub(super) name: &'static str,
    rows: &'static str,
    pub(super) dim: &'static str,
}

const Q: Vectors = Vectors { name: "q", rows: "queries", dim: "head_dim" };
const K: Vectors = Vectors { name: "k", rows: "keys", dim: "head_dim" };
const V: Vectors = Vectors { name: "v", rows: "keys", dim: "value_dim" };
const DOUT: Vectors = Vectors { name: "dout", rows: "queries", dim: "value_dim" };

impl Vectors {
    /// Name of the head index of these vectors.
    pub(super) fn head(&self) -> &'static str {
        if self.rows == "keys" { "kv_head" } else { "head" }
    }

    /// Generates `NAME_rows` (one element of four rows) and `NAME_columns` (four elements of one
    /// row); 0 beyond the chunk and the vector.
    fn functions(&self, storage: Storage, words: &str) -> String {
        let Self { name, rows, dim } = self;
        let load = storage.load(words);
        let mut text = format!("fn {name}_at(at: u32) -> f32 {{\n    return {load};\n}}\n");
        let start = format!(
            "params.{name}_base + batch * params.{name}_batch + head * params.{name}_head + row * params.{name}_row + c"
        );
        for (kind, counted, most, step) in [
            ("rows", "row", *rows, format!("params.{name}_row")),
            ("columns", "c", *dim, "1u".to_owned()),
        ] {
            let (other, other_most) = if kind == "rows" { ("c", *dim) } else { ("row", *rows) };
            let _infallible = write!(
                text,
                "fn {name}_{kind}(batch: u32, head: u32, row: u32, c: u32) -> vec4<f32> {{\n    var four = vec4<f32>(0.0);\n    \
                 if ({other} < params.{other_most}) {{\n        let start = {start};\n"
            );
            for n in 0..4 {
                let _infallible = write!(
                    text,
                    "        if ({counted} + {n}u < params.{most}) {{\n            four[{n}] = {name}_at(start + {n}u * {step});\n        }}\n"
                );
            }
            text.push_str("    }\n    return four;\n}\n");
        }
        text
    }
}

/// Generates `s0` … `s3` (for prefix s): products of four rows of `left` with four rows of `right`.
/// Each is one chain of multiply-adds in element order, or a product of cooperative matrices.
fn product(
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
    let rows = |side: &str, of: &Vectors, first: &str| {
        format!(
            "{side}[8u * at + rows] = {}_rows(batch, {}, {first} + 4u * rows, c + at);",
            of.name,
            of.head()
        )
    };
    let dim = left.dim;
    let (load_left, load_right) =
        (rows("left", left, left_first), rows("right", right, right_first));
    let mut text = String::new();
    for r in 0..4 {
        let _infallible = writeln!(text, "var {prefix}{r} = vec4<f32>(0.0);");
    }
    let _infallible = write!(
        text,
        "for (var c = 0u; c < params.{dim}; c = c + 32u) {{
    workgroupBarrier();
    for (var n = 0u; n < 4u; n++) {{
        let at = lane & 31u;
        let rows = (lane >> 5u) + 2u * n;
        {load_left}
        {load_right}
    }}
    workgroupBarrier();
    let most = min(32u, params.{dim} - c);
    for (var at = 0u; at < most; at++) {{
        let a = left[8u * at + ty];
        let b = right[8u * at + tx];
"
    );
    for (r, element) in ["x", "y", "z", "w"].iter().enumerate() {
        let _infallible =
            writeln!(text, "        {prefix}{r} = fma(vec4<f32>(a.{element}), b, {prefix}{r});");
    }
    text.push_str("    }\n}\n");
    text
}

/// Layout of the tile mask relative to `tile`: one word per row, or one per column.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Words {
    OfRows,
    OfColumns,
}

impl Words {
    /// Expression that is odd if pair (row `r` of the invocation, `j`) is visible.
    pub(super) fn bit(self, r: usize) -> String {
        match self {
            Self::OfRows => format!("(words[{r}] >> j) & 1u"),
            Self::OfColumns => format!("(word >> {r}u) & 1u"),
        }
    }
}

/// Expression for four elements of vector `j` in workgroup memory.
fn right(variant: TileVariant) -> &'static str {
    if matrices::of(variant).is_some() { "right_of(j, 4u * tx)" } else { "right[8u * j + tx]" }
}

/// Generates accumulators `PREFIX{group}_{row}` += P·`of`, on cooperative matrices if the variant
/// has them.
fn accumulate_weights(
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
fn accumulate(
    variant: TileVariant,
    prefix: &str,
    groups: usize,
    of: &Vectors,
    words: Words,
) -> String {
    let name = of.name;
    let head = of.head();
    let dim = of.dim;
    let general = variant.general;
    let mut text = String::new();
    for group in 0..groups {
        let _infallible = write!(
            text,
            "if ({first}u < params.{dim}) {{
    workgroupBarrier();
    for (var n = 0u; n < 4u; n++) {{
        let j = (lane >> 3u) + 8u * n;
        let four = {name}_columns(batch, {head}, column + j, {first}u + 4u * tx);
        {store}
    }}
    workgroupBarrier();
    {mask_index}
        for (var j = 0u; j < 32u; j++) {{
            let a = tile[8u * j + ty];
            let b = {right};
",
            first = 32 * group,
            right = right(variant),
            store = if matrices::of(variant).is_some() {
                "for (var c = 0u; c < 4u; c++) { right_half[32u * j + 4u * tx + c] = f16(four[c]); }"
            } else {
                "right[8u * j + tx] = four;"
            },
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
        text.push_str("        }\n    } else {\n        for (var j = 0u; j < 32u; j++) {\n            let a = tile[8u * j + ty];\n");
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
fn each(groups: usize, line: &str) -> String {
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
fn each_pair(general: bool, lists: &[&str], line: &str) -> String {
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

fn each_row(line: &str) -> String {
    let mut text = String::new();
    for r in 0..4 {
        let _infallible = writeln!(text, "{}", line.replace("{r}", &r.to_string()));
    }
    text
}

/// Generates loads and stores of four accumulators, bounded by the vector length.
fn acc_functions(buffer: &str) -> String {
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

/// A storage binding.
struct Binding {
    name: &'static str,
    kind: &'static str,
    access: Access,
}

const fn read(name: &'static str) -> Binding {
    Binding { name, kind: "u32", access: Access::Read }
}

const fn write(name: &'static str) -> Binding {
    Binding { name, kind: "f32", access: Access::Write }
}

/// Assembles a kernel. Binding 1 is the block mask; `bindings` follow.
fn assemble(
    variant: TileVariant,
    template: &mut Template,
    text: &str,
    functions: &str,
    gradient: bool,
    bindings: &[Binding],
) -> Source {
    let on = matrices::of(variant);
    template
        .flag("GENERAL", variant.general)
        .flag("SUBGROUP", variant.level != Level::Plain)
        .flag("MATRIX", on.is_some());
    template.name("COUNT_MATRICES", on.map_or_else(String::new, matrices::count));
    let mut declared = on.map_or_else(String::new, |_| matrices::declarations());
    for (number, Binding { name, kind, access }) in bindings.iter().enumerate() {
        let access = if *access == Access::Read { "read" } else { "read_write" };
        let _infallible = writeln!(
            declared,
            "@group(0) @binding({}) var<storage, {access}> {name}: array<{kind}>;",
            number + 2
        );
    }
    let gradient = if gradient { template.expand(GRADIENT) } else { String::new() };
    let enabled = if on.is_some() { matrices::ENABLED } else { "" };
    let wgsl = [
        enabled,
        TileParams::WGSL,
        ARITHMETIC,
        &declared,
        &template.expand(TILE_TEXT),
        &gradient,
        functions,
        &template.expand(text),
    ]
    .concat();
    let bindings = std::iter::once(Access::Read)
        .chain(bindings.iter().map(|binding| binding.access))
        .collect();
    Source { wgsl, bindings, params: size_of::<TileParams>() }
}

fn functions(storage: Storage, vectors: &[(&Vectors, &str)]) -> String {
    vectors.iter().map(|(vectors, words)| vectors.functions(storage, words)).collect()
}

/// Generates the forward kernel.
pub(super) fn forward(variant: TileVariant) -> Source {
    let groups = variant.value_groups;
    let general = variant.general;
    let on = matrices::of(variant);
    let mut text = Template::default();
    text.name(
        "LOAD_ACC",
        each(
            groups,
            "var o{g}_{r} = vec4<f32>(0.0);
if (any_visible[{r}]) { o{g}_{r} = load_acc(acc + (row + {r}u) * params.acc_row, {c}, params.value_dim); }",
        ),
    );
    text.name(
        "STORE_ACC",
        each(
            groups,
            "if (row + {r}u < params.queries) { store_acc(acc + (row + {r}u) * params.acc_row, {c}, params.value_dim, o{g}_{r}); }",
        ),
    );
    text.name("RESCALE_ACC", each(groups, "o{g}_{r} = o{g}_{r} * rescale[{r}];"));
    text.name("SCORES", product(on, "s", &Q, "first", &K, "column"));
    text.name(
        "EPILOGUE",
        each_pair(
            general,
            &["s"],
            "{
    let bit = ((words[{r}] >> {c}u) & 1u) != 0u;
    let e = score(batch, head, row + {r}u, key + {c}u, mask_index, bit, s{r}[{c}]);
    s{r}[{c}] = e.s;
    if (e.visible) {
        tile_max[{r}] = max(tile_max[{r}], e.s);
    }
#if GENERAL
    if (bit && !e.visible) {
        atomicAnd(&visible_bits[4u * ty + {r}u], ~(1u << (4u * tx + {c}u)));
    }
#end
}",
        ),
    );
    let weight = each_pair(
        general,
        &["s"],
        "{
    let visible = ((words[{r}] >> (4u * tx + {c}u)) & 1u) != 0u;
    let prob = select(0.0, exponential(s{r}[{c}] - row_max[{r}]), visible);
    sum[{r}] = sum[{r}] + prob;
#if GENERAL
    ties[{r}] = ties[{r}] + select(0.0, 1.0, visible && s{r}[{c}] == row_max[{r}]);
#end
    s{r}[{c}] = prob;
}",
    );
    let keep = if general {
        "for (var r = 0u; r < 4u; r++) {\n    let keep = keep_factors(batch, head, row + r, key);\n"
            .to_owned()
            + &each_row("    s{r} = s{r} * select(vec4<f32>(1.0), keep, r == {r}u);")
            + "}\n"
    } else {
        String::new()
    };
    text.name("PROBS", weight + &keep + &store_weights(on, "s"));
    text.name("ACCUMULATE", accumulate_weights(variant, "o", groups, &V, Words::OfRows));
    let functions = functions(variant.storage, &[(&Q, "q_words"), (&K, "block"), (&V, "block")])
        + &acc_functions("acc_words");
    let bindings = [
        read("q_words"),
        read("block"),
        read("bias_words"),
        write("acc_words"),
        write("statistics"),
    ];
    assemble(variant, &mut text, include_str!("forward.wgsl"), &functions, false, &bindings)
}

/// Generates `tile` ← four columns of four rows.
fn store_tile(prefix: &str) -> String {
    (0..4)
        .map(|c| format!("tile[8u * (4u * tx + {c}u) + ty] = vec4<f32>({prefix}0[{c}], {prefix}1[{c}], {prefix}2[{c}], {prefix}3[{c}]);\n"))
        .collect()
}

/// Generates the store of P for the second product.
fn store_weights(on: Option<Matrices>, prefix: &str) -> String {
    if on.is_some() { matrices::store_tile(prefix) } else { store_tile(prefix) }
}

/// Generates the loads of the statistics of the invocation's four queries, `stats0` … `stats3`.
fn statistics(first: &str) -> String {
    each_row(&format!(
        "var stats{{r}} = vec4<f32>(0.0);
if ({first} + {{r}}u < params.queries) {{ stats{{r}} = statistics_of(state + ({first} + {{r}}u) * params.statistics_row); }}"
    ))
}

/// Generates the backward step: scores `s` and products `d` become dX and P, 0 for masked pairs.
/// Clears the bits of pairs that only a bias or an empty row masks. `rows_are_keys` is the
/// orientation of the tile; `then` runs for each pair, with `grad` in scope.
fn score_gradients(general: bool, rows_are_keys: bool, then: &str) -> String {
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
            "var keeps = array<vec4<f32>, 4>();\nfor (var r = 0u; r < 4u; r++) {{\n    keeps[r] = keep_factors(batch, head, {keep_query}, {keep_key});\n}}\n"
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

/// Generates the kernel of dQ.
pub(super) fn backward_queries(variant: TileVariant) -> Source {
    let groups = variant.head_groups;
    let on = matrices::of(variant);
    let mut text = Template::default();
    text.name("ROW_STATISTICS", statistics("row"));
    text.name(
        "LOAD_ACC",
        each(
            groups,
            "var o{g}_{r} = vec4<f32>(0.0);
if (row + {r}u < params.queries) { o{g}_{r} = load_acc(acc + (row + {r}u) * params.acc_row, {c}, params.head_dim); }",
        ),
    );
    text.name(
        "STORE_ACC",
        each(
            groups,
            "if (row + {r}u < params.queries) { store_acc(acc + (row + {r}u) * params.acc_row, {c}, params.head_dim, o{g}_{r}); }",
        ),
    );
    text.name("SCORES", product(on, "s", &Q, "first", &K, "column"));
    text.name("DPROBS", product(on, "d", &DOUT, "first", &V, "column"));
    text.name(
        "DX",
        score_gradients(
            variant.general,
            false,
            "s{r}[{c}] = select(0.0, grad.ds * e.ds_dx, visible);",
        ) + &store_tile("s"),
    );
    text.name("ACCUMULATE", accumulate(variant, "o", groups, &K, Words::OfRows));
    let functions = functions(
        variant.storage,
        &[(&Q, "q_words"), (&K, "block"), (&V, "block"), (&DOUT, "dout_words")],
    ) + &acc_functions("acc_words");
    let bindings = [
        read("q_words"),
        read("block"),
        read("bias_words"),
        write("acc_words"),
        read("statistics"),
        read("dout_words"),
    ];
    assemble(variant, &mut text, include_str!("backward_queries.wgsl"), &functions, true, &bindings)
}

/// Generates the kernel of dK and dV.
pub(super) fn backward_keys(variant: TileVariant, from_records: bool) -> Source {
    let on = matrices::of(variant);
    let mut text = Template::default();
    text.flag("HALF_STATISTICS", from_records && variant.storage != Storage::F32);
    text.name(
        "ZERO_ACC",
        each(variant.head_groups, "var dk{g}_{r} = vec4<f32>(0.0);")
            + &each(variant.value_groups, "var dv{g}_{r} = vec4<f32>(0.0);"),
    );
    let store = |prefix: &str, groups: usize, base: &str, dim: &str, factor: &str| {
        each(
            groups,
            &format!(
                "if (row + {{r}}u < params.keys) {{
    let at = {base} + (row + {{r}}u) * params.acc_row;
    var part = {factor}{prefix}{{g}}_{{r}};
    if (params.add != 0u) {{ part = load_acc(at, {{c}}, params.{dim}) + part; }}
    store_acc(at, {{c}}, params.{dim}, part);
}}"
            ),
        )
    };
    text.name(
        "STORE_ACC",
        store("dk", variant.head_groups, "dk_base", "head_dim", "params.scale * ")
            + &store("dv", variant.value_groups, "dv_base_of_head", "value_dim", ""),
    );
    text.name("SCORES", product(on, "s", &K, "first", &Q, "column"));
    text.name("DPROBS", product(on, "d", &V, "first", &DOUT, "column"));
    text.name("COLUMN_STATISTICS", statistics("query"));
    let then = "s{r}[{c}] = select(0.0, grad.ds * e.ds_dx, visible);\nd{r}[{c}] = select(0.0, grad.p_dropped, visible);";
    text.name("DX", score_gradients(variant.general, true, then) + &store_weights(on, "d"));
    text.name(
        "ACCUMULATE_DV",
        accumulate_weights(variant, "dv", variant.value_groups, &DOUT, Words::OfColumns),
    );
    text.name("STORE_TILE", store_tile("s"));
    text.name(
        "ACCUMULATE_DK",
        accumulate(variant, "dk", variant.head_groups, &Q, Words::OfColumns),
    );
    let functions = functions(
        variant.storage,
        &[(&Q, "q_words"), (&K, "k_words"), (&V, "v_words"), (&DOUT, "dout_words")],
    ) + &acc_functions("acc_words");
    let bindings = [
        read("q_words"),
        read("k_words"),
        read("v_words"),
        read("bias_words"),
        write("acc_words"),
        read("statistics"),
        read("dout_words"),
    ];
    assemble(variant, &mut text, include_str!("backward_keys.wgsl"), &functions, true, &bindings)
}

/// Generates the kernel of dbias.
pub(super) fn backward_bias(variant: TileVariant, axes: BiasAxes) -> Source {
    let rows_are_keys = axes == BiasAxes::Keys;
    let on = matrices::of(variant);
    let mut text = Template::default();
    text.flag("SUM_ROWS", axes != BiasAxes::Pairs);
    text.name("ROWS", if rows_are_keys { "params.keys" } else { "params.queries" });
    text.name(
        "ROW_PLACE",
        if rows_are_keys {
            "block_mask[params.key_rows + 2u * (row + r)]"
        } else {
            "(row + r) * params.dbias_row"
        },
    );
    if rows_are_keys {
        text.name("SCORES", product(on, "s", &K, "first", &Q, "column"))
            .name("DPROBS", product(on, "d", &V, "first", &DOUT, "column"));
        text.name(
            "STATISTICS",
            "let query = column + 4u * tx;\n".to_owned() + &statistics("query"),
        );
    } else {
        text.name("SCORES", product(on, "s", &Q, "first", &K, "column"))
            .name("DPROBS", product(on, "d", &DOUT, "first", &V, "column"));
        text.name("STATISTICS", "let key = column + 4u * tx;\n".to_owned() + &statistics("row"));
    }
    // the bias is added before or after the soft cap
    let ds = "let part = select(grad.ds, grad.ds * e.ds_dx, params.bias_first != 0u);\n";
    let then = match axes {
        BiasAxes::Pairs => {
            "if (visible) {
    let at = target_row + (row + {r}u) * params.dbias_row + block_mask[params.key_rows + 2u * (key + {c}u)];
    dbias[at] = dbias[at] + part;
}"
        }
        BiasAxes::Queries | BiasAxes::Keys => "all[{r}] = all[{r}] + select(0.0, part, visible);",
    };
    text.name("DX", score_gradients(variant.general, rows_are_keys, &format!("{ds}{then}")));
    let functions = functions(
        variant.storage,
        &[(&Q, "q_words"), (&K, "block"), (&V, "block"), (&DOUT, "dout_words")],
    );
    let bindings = [
        read("q_words"),
        read("block"),
        read("bias_words"),
        write("dbias"),
        read("statistics"),
        read("dout_words"),
    ];
    assemble(variant, &mut text, include_str!("backward_bias.wgsl"), &functions, true, &bindings)
}
