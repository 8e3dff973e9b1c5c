//! The generated parts of the kernels over tiles: products of vectors, unrolled over the four rows and columns of an invocation.

use std::fmt::Write;

use super::{
    ARITHMETIC, Access, BiasAxes, GRADIENT, Source, Storage, TILE_TEXT, TileVariant, matrices, numbers::TileNumbers, template::Template,
};
use crate::{Level, level::Matrices};

/// A tensor of vectors: its name in the text, which rows it has and how long its vectors are.
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
    /// How the text names the head of these vectors.
    pub(super) fn head(&self) -> &'static str {
        if self.rows == "keys" { "kv_head" } else { "head" }
    }

    /// `NAME_rows`: one element of four rows. `NAME_columns`: four elements of one row. Zero beyond the window and the vector.
    fn functions(&self, storage: Storage, words: &str) -> String {
        let Self { name, rows, dim } = self;
        let load = storage.load(words);
        let mut text = format!("fn {name}_at(at: u32) -> f32 {{\n    return {load};\n}}\n");
        let start =
            format!("numbers.{name}_base + batch * numbers.{name}_batch + head * numbers.{name}_head + row * numbers.{name}_row + c");
        for (kind, counted, most, step) in [("rows", "row", *rows, format!("numbers.{name}_row")), ("columns", "c", *dim, "1u".to_owned())]
        {
            let (other, other_most) = if kind == "rows" { ("c", *dim) } else { ("row", *rows) };
            let _infallible = write!(
                text,
                "fn {name}_{kind}(batch: u32, head: u32, row: u32, c: u32) -> vec4<f32> {{\n    var four = vec4<f32>(0.0);\n    \
                 if ({other} < numbers.{other_most}) {{\n        let start = {start};\n"
            );
            for n in 0..4 {
                let _infallible = write!(
                    text,
                    "        if ({counted} + {n}u < numbers.{most}) {{\n            four[{n}] = {name}_at(start + {n}u * {step});\n        }}\n"
                );
            }
            text.push_str("    }\n    return four;\n}\n");
        }
        text
    }
}

/// `s0` … `s3` (for prefix s): the products of four rows of `left` with four rows of `right`, one chain of multiply-adds each, in the order of
/// the elements; or what matrices make of them.
fn product(on: Option<Matrices>, prefix: &str, left: &Vectors, left_first: &str, right: &Vectors, right_first: &str) -> String {
    if let Some(on) = on {
        return matrices::product(on, prefix, left, left_first, right, right_first);
    }
    let rows = |side: &str, of: &Vectors, first: &str| {
        format!("{side}[8u * at + rows] = {}_rows(batch, {}, {first} + 4u * rows, c + at);", of.name, of.head())
    };
    let dim = left.dim;
    let (load_left, load_right) = (rows("left", left, left_first), rows("right", right, right_first));
    let mut text = String::new();
    for r in 0..4 {
        let _infallible = writeln!(text, "var {prefix}{r} = vec4<f32>(0.0);");
    }
    let _infallible = write!(
        text,
        "for (var c = 0u; c < numbers.{dim}; c = c + 32u) {{
    workgroupBarrier();
    for (var n = 0u; n < 4u; n++) {{
        let at = lane & 31u;
        let rows = (lane >> 5u) + 2u * n;
        {load_left}
        {load_right}
    }}
    workgroupBarrier();
    let most = min(32u, numbers.{dim} - c);
    for (var at = 0u; at < most; at++) {{
        let a = left[8u * at + ty];
        let b = right[8u * at + tx];
"
    );
    for (r, element) in ["x", "y", "z", "w"].iter().enumerate() {
        let _infallible = writeln!(text, "        {prefix}{r} = fma(vec4<f32>(a.{element}), b, {prefix}{r});");
    }
    text.push_str("    }\n}\n");
    text
}

/// Who sees whom among the rows and columns of `tile`: words of the rows, or words of the columns in `seen`.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Words {
    OfRows,
    OfColumns,
}

impl Words {
    /// An expression that is odd where row `r` of an invocation sees `j`.
    pub(super) fn bit(self, r: usize) -> String {
        match self {
            Self::OfRows => format!("(words[{r}] >> j) & 1u"),
            Self::OfColumns => format!("(word >> {r}u) & 1u"),
        }
    }
}

/// Four elements of vector `j` of those in workgroup memory.
fn right(variant: TileVariant) -> &'static str {
    if matrices::of(variant).is_some() { "right_of(j, 4u * tx)" } else { "right[8u * j + tx]" }
}

/// Adds the weights in `tile`, or on matrices, times the vectors `of` to the sums `PREFIX{group}_{row}`.
fn accumulate_weights(variant: TileVariant, prefix: &str, groups: usize, of: &Vectors, words: Words) -> String {
    match matrices::of(variant) {
        Some(on) => matrices::accumulate(on, prefix, groups, of, words),
        None => accumulate(variant, prefix, groups, of, words),
    }
}

/// Adds `tile`ᵀ times the vectors `of` to the sums `PREFIX{group}_{row}`. Vectors that a row does not see are taken for 0, whatever they hold.
fn accumulate(variant: TileVariant, prefix: &str, groups: usize, of: &Vectors, words: Words) -> String {
    let (name, head, dim, general) = (of.name, of.head(), of.dim, variant.general);
    let mut text = String::new();
    for group in 0..groups {
        let _infallible = write!(
            text,
            "if ({first}u < numbers.{dim}) {{
    workgroupBarrier();
    for (var n = 0u; n < 4u; n++) {{
        let j = (lane >> 3u) + 8u * n;
        let four = {name}_columns(batch, {head}, column + j, {first}u + 4u * tx);
        {store}
    }}
    workgroupBarrier();
    {edge}
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
            // with the rarer companions of a mask there is one way for all tiles: less to compile
            edge = if general { "{" } else { "if (is_edge) {" }
        );
        if words == Words::OfColumns {
            text.push_str("            let word = atomicLoad(&seen[j]) >> (4u * ty);\n");
        }
        let line = |r: usize, b: &str| {
            let element = ["x", "y", "z", "w"][r];
            format!("{prefix}{group}_{r} = fma(vec4<f32>(a.{element}), {b}, {prefix}{group}_{r});\n")
        };
        for r in 0..4 {
            let bit = words.bit(r);
            let _infallible = write!(text, "            {}", line(r, &format!("select(vec4<f32>(0.0), b, ({bit}) != 0u)")));
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

/// A line for every group and row; `{g}`, `{r}` and `{c}` (the group's first column) stand for numbers.
fn each(groups: usize, line: &str) -> String {
    let mut text = String::new();
    for g in 0..groups {
        for r in 0..4 {
            let line = line.replace("{g}", &g.to_string()).replace("{r}", &r.to_string());
            let _infallible = writeln!(text, "{}", line.replace("{c}", &format!("({}u + 4u * tx)", 32 * g)));
        }
    }
    text
}

/// What is done with each of the 16 pairs of an invocation, written for row `{r}` and column `{c}`, `{r}u` and `{c}u` as numbers. `lists` are the
/// prefixes of four vectors that it reads and writes, none of which ends in one that comes before it.
///
/// Unrolled where it is short. With the rarer companions of a mask it is long, and 16 copies of it take drivers seconds to compile: there it is a loop.
fn each_pair(general: bool, lists: &[&str], line: &str) -> String {
    let mut text = String::new();
    if !general {
        for r in 0..4 {
            for c in 0..4 {
                let _infallible = writeln!(text, "{}", line.replace("{r}", &r.to_string()).replace("{c}", &c.to_string()));
            }
        }
        return text;
    }
    let mut body = line.to_owned();
    text.push_str("{\n");
    for list in lists {
        let _infallible = writeln!(text, "var all_{list} = array<vec4<f32>, 4>({list}0, {list}1, {list}2, {list}3);");
        body = body.replace(&format!("{list}{{r}}"), &format!("all_{list}[r]")).replace(&format!("{list}{{c}}"), &format!("all_{list}[c]"));
    }
    for index in ["r", "c"] {
        body = body.replace(&format!("{{{index}}}u"), index).replace(&format!("{{{index}}}"), index);
    }
    let _infallible = write!(text, "for (var r = 0u; r < 4u; r++) {{\nfor (var c = 0u; c < 4u; c++) {{\n{body}\n}}\n}}\n");
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

/// Sums are read and written four at a time, as far as a vector goes.
fn sums_functions(buffer: &str) -> String {
    format!(
        "fn load_sums(at: u32, c: u32, dim: u32) -> vec4<f32> {{
    var four = vec4<f32>(0.0);
    for (var n = 0u; n < 4u; n++) {{
        if (c + n < dim) {{
            four[n] = {buffer}[at + c + n];
        }}
    }}
    return four;
}}
fn store_sums(at: u32, c: u32, dim: u32, four: vec4<f32>) {{
    for (var n = 0u; n < 4u; n++) {{
        if (c + n < dim) {{
            {buffer}[at + c + n] = four[n];
        }}
    }}
}}
"
    )
}

/// One storage binding.
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

/// Puts a kernel together. Binding 1 is `sight`; `bindings` follow.
fn assemble(variant: TileVariant, template: &mut Template, text: &str, functions: &str, gradient: bool, bindings: &[Binding]) -> Source {
    let on = matrices::of(variant);
    template.flag("GENERAL", variant.general).flag("SUBGROUP", variant.level != Level::Plain).flag("MATRIX", on.is_some());
    template.name("COUNT_MATRICES", on.map_or_else(String::new, matrices::count));
    let mut declared = on.map_or_else(String::new, |_| matrices::declarations());
    for (number, Binding { name, kind, access }) in bindings.iter().enumerate() {
        let access = if *access == Access::Read { "read" } else { "read_write" };
        let _infallible = writeln!(declared, "@group(0) @binding({}) var<storage, {access}> {name}: array<{kind}>;", number + 2);
    }
    let gradient = if gradient { template.expand(GRADIENT) } else { String::new() };
    let enabled = if on.is_some() { matrices::ENABLED } else { "" };
    let wgsl =
        [enabled, TileNumbers::WGSL, ARITHMETIC, &declared, &template.expand(TILE_TEXT), &gradient, functions, &template.expand(text)]
            .concat();
    let bindings = std::iter::once(Access::Read).chain(bindings.iter().map(|binding| binding.access)).collect();
    Source { wgsl, bindings, numbers: size_of::<TileNumbers>() }
}

fn functions(storage: Storage, vectors: &[(&Vectors, &str)]) -> String {
    vectors.iter().map(|(vectors, words)| vectors.functions(storage, words)).collect()
}

/// The forward kernel.
pub(super) fn forward(variant: TileVariant) -> Source {
    let (groups, general, on) = (variant.value_groups, variant.general, matrices::of(variant));
    let mut text = Template::default();
    text.name(
        "LOAD_SUMS",
        each(
            groups,
            "var o{g}_{r} = vec4<f32>(0.0);
if (any_seen[{r}]) { o{g}_{r} = load_sums(sums + (row + {r}u) * numbers.sums_row, {c}, numbers.value_dim); }",
        ),
    );
    text.name(
        "STORE_SUMS",
        each(
            groups,
            "if (row + {r}u < numbers.queries) { store_sums(sums + (row + {r}u) * numbers.sums_row, {c}, numbers.value_dim, o{g}_{r}); }",
        ),
    );
    text.name("RESCALE_SUMS", each(groups, "o{g}_{r} = o{g}_{r} * rescale[{r}];"));
    text.name("LOGITS", product(on, "s", &Q, "first", &K, "column"));
    text.name(
        "PAIRS",
        each_pair(
            general,
            &["s"],
            "{
    let bit = ((words[{r}] >> {c}u) & 1u) != 0u;
    let e = pair(batch, head, row + {r}u, key + {c}u, edge, bit, s{r}[{c}]);
    s{r}[{c}] = e.logit;
    if (e.visible) {
        most[{r}] = max(most[{r}], e.logit);
    }
#if GENERAL
    if (bit && !e.visible) {
        atomicAnd(&seen[4u * ty + {r}u], ~(1u << (4u * tx + {c}u)));
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
    let weight = select(0.0, exponential(s{r}[{c}] - greatest[{r}]), visible);
    sum[{r}] = sum[{r}] + weight;
#if GENERAL
    ties[{r}] = ties[{r}] + select(0.0, 1.0, visible && s{r}[{c}] == greatest[{r}]);
#end
    s{r}[{c}] = weight;
}",
    );
    let keep = if general {
        "for (var r = 0u; r < 4u; r++) {\n    let keep = kept(batch, head, row + r, key);\n".to_owned()
            + &each_row("    s{r} = s{r} * select(vec4<f32>(1.0), keep, r == {r}u);")
            + "}\n"
    } else {
        String::new()
    };
    text.name("WEIGHTS", weight + &keep + &store_weights(on, "s"));
    text.name("ACCUMULATE", accumulate_weights(variant, "o", groups, &V, Words::OfRows));
    let functions = functions(variant.storage, &[(&Q, "q_words"), (&K, "block"), (&V, "block")]) + &sums_functions("sums_of");
    let bindings = [read("q_words"), read("block"), read("bias_words"), write("sums_of"), write("statistics")];
    assemble(variant, &mut text, include_str!("forward.wgsl"), &functions, false, &bindings)
}

/// `tile` ← four columns of four rows.
fn store_tile(prefix: &str) -> String {
    (0..4)
        .map(|c| format!("tile[8u * (4u * tx + {c}u) + ty] = vec4<f32>({prefix}0[{c}], {prefix}1[{c}], {prefix}2[{c}], {prefix}3[{c}]);\n"))
        .collect()
}

/// Weights, on their way into a product.
fn store_weights(on: Option<Matrices>, prefix: &str) -> String {
    if on.is_some() { matrices::store_tile(prefix) } else { store_tile(prefix) }
}

/// Statistics of the invocation's four rows or columns, `stats0` … `stats3`.
fn statistics(first: &str) -> String {
    each_row(&format!(
        "var stats{{r}} = vec4<f32>(0.0);
if ({first} + {{r}}u < numbers.queries) {{ stats{{r}} = statistics_of(state + ({first} + {{r}}u) * numbers.statistics_row); }}"
    ))
}

/// Turns logits `s` and products `d` into dx and weights, 0 where a pair is hidden, and clears the bits of pairs that only a bias or an empty row
/// hides. `rows_are_keys` says which way the tile lies; `then` is done with each pair, where `slope` is at hand.
fn slopes(general: bool, rows_are_keys: bool, then: &str) -> String {
    let (query, key, word, bit, stats, keep) = if rows_are_keys {
        ("query + {c}u", "row + {r}u", "4u * tx + {c}u", "4u * ty + {r}u", "stats{c}", "keep{c}[{r}]")
    } else {
        ("row + {r}u", "key + {c}u", "4u * ty + {r}u", "4u * tx + {c}u", "stats{r}", "keep{r}[{c}]")
    };
    let (keep_query, keep_key) = if rows_are_keys { ("query + r", "row") } else { ("row + r", "key") };
    let keeps = if general {
        // a loop, for the same reason
        let loops = format!(
            "var keeps = array<vec4<f32>, 4>();\nfor (var r = 0u; r < 4u; r++) {{\n    keeps[r] = kept(batch, head, {keep_query}, {keep_key});\n}}\n"
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
    let bit = ((atomicLoad(&seen[{word}]) >> ({bit})) & 1u) != 0u;
    let e = pair(batch, head, {query}, {key}, edge, bit, s{{r}}[{{c}}]);
    let slope = slope_of(e.logit, d{{r}}[{{c}}], {keep}, {stats});
#if GENERAL
    let visible = e.visible && !is_negative_infinity({stats}.x);
    if (bit && !visible) {{
        atomicAnd(&seen[{word}], ~(1u << ({bit})));
    }}
#else
    let visible = e.visible;
#end
{then}
}}"
            ),
        )
}

/// The kernel of dq.
pub(super) fn backward_queries(variant: TileVariant) -> Source {
    let (groups, on) = (variant.head_groups, matrices::of(variant));
    let mut text = Template::default();
    text.name("ROW_STATISTICS", statistics("row"));
    text.name(
        "LOAD_SUMS",
        each(
            groups,
            "var o{g}_{r} = vec4<f32>(0.0);
if (row + {r}u < numbers.queries) { o{g}_{r} = load_sums(sums + (row + {r}u) * numbers.sums_row, {c}, numbers.head_dim); }",
        ),
    );
    text.name(
        "STORE_SUMS",
        each(
            groups,
            "if (row + {r}u < numbers.queries) { store_sums(sums + (row + {r}u) * numbers.sums_row, {c}, numbers.head_dim, o{g}_{r}); }",
        ),
    );
    text.name("LOGITS", product(on, "s", &Q, "first", &K, "column"));
    text.name("PRODUCTS", product(on, "d", &DOUT, "first", &V, "column"));
    text.name("SLOPES", slopes(variant.general, false, "s{r}[{c}] = select(0.0, slope.ds * e.slope, visible);") + &store_tile("s"));
    text.name("ACCUMULATE", accumulate(variant, "o", groups, &K, Words::OfRows));
    let functions =
        functions(variant.storage, &[(&Q, "q_words"), (&K, "block"), (&V, "block"), (&DOUT, "dout_words")]) + &sums_functions("sums_of");
    let bindings = [read("q_words"), read("block"), read("bias_words"), write("sums_of"), read("statistics"), read("dout_words")];
    assemble(variant, &mut text, include_str!("backward_queries.wgsl"), &functions, true, &bindings)
}

/// The kernel of dk and dv.
pub(super) fn backward_keys(variant: TileVariant, travelling: bool) -> Source {
    let on = matrices::of(variant);
    let mut text = Template::default();
    text.flag("HALF_STATISTICS", travelling && variant.storage != Storage::F32);
    text.name(
        "ZERO_SUMS",
        each(variant.head_groups, "var dk{g}_{r} = vec4<f32>(0.0);") + &each(variant.value_groups, "var dv{g}_{r} = vec4<f32>(0.0);"),
    );
    let store = |prefix: &str, groups: usize, base: &str, dim: &str, factor: &str| {
        each(
            groups,
            &format!(
                "if (row + {{r}}u < numbers.keys) {{
    let at = {base} + (row + {{r}}u) * numbers.sums_row;
    var part = {factor}{prefix}{{g}}_{{r}};
    if (numbers.add != 0u) {{ part = load_sums(at, {{c}}, numbers.{dim}) + part; }}
    store_sums(at, {{c}}, numbers.{dim}, part);
}}"
            ),
        )
    };
    text.name(
        "STORE_SUMS",
        store("dk", variant.head_groups, "sums", "head_dim", "numbers.scale * ")
            + &store("dv", variant.value_groups, "more", "value_dim", ""),
    );
    text.name("LOGITS", product(on, "s", &K, "first", &Q, "column"));
    text.name("PRODUCTS", product(on, "d", &V, "first", &DOUT, "column"));
    text.name("COLUMN_STATISTICS", statistics("query"));
    let then = "s{r}[{c}] = select(0.0, slope.ds * e.slope, visible);\nd{r}[{c}] = select(0.0, slope.weight, visible);";
    text.name("SLOPES", slopes(variant.general, true, then) + &store_weights(on, "d"));
    text.name("ACCUMULATE_VALUES", accumulate_weights(variant, "dv", variant.value_groups, &DOUT, Words::OfColumns));
    text.name("STORE_TILE", store_tile("s"));
    text.name("ACCUMULATE_KEYS", accumulate(variant, "dk", variant.head_groups, &Q, Words::OfColumns));
    let functions = functions(variant.storage, &[(&Q, "q_words"), (&K, "k_words"), (&V, "v_words"), (&DOUT, "dout_words")])
        + &sums_functions("sums_of");
    let bindings =
        [read("q_words"), read("k_words"), read("v_words"), read("bias_words"), write("sums_of"), read("statistics"), read("dout_words")];
    assemble(variant, &mut text, include_str!("backward_keys.wgsl"), &functions, true, &bindings)
}

/// The kernel of dbias.
pub(super) fn backward_bias(variant: TileVariant, axes: BiasAxes) -> Source {
    let (rows_are_keys, on) = (axes == BiasAxes::Keys, matrices::of(variant));
    let mut text = Template::default();
    text.flag("SUM_ROWS", axes != BiasAxes::Pairs);
    text.name("ROWS", if rows_are_keys { "numbers.keys" } else { "numbers.queries" });
    text.name("ROW_PLACE", if rows_are_keys { "sight[numbers.key_rows + 2u * (row + r)]" } else { "(row + r) * numbers.gradient_row" });
    if rows_are_keys {
        text.name("LOGITS", product(on, "s", &K, "first", &Q, "column")).name("PRODUCTS", product(on, "d", &V, "first", &DOUT, "column"));
        text.name("STATISTICS", "let query = column + 4u * tx;\n".to_owned() + &statistics("query"));
    } else {
        text.name("LOGITS", product(on, "s", &Q, "first", &K, "column")).name("PRODUCTS", product(on, "d", &DOUT, "first", &V, "column"));
        text.name("STATISTICS", "let key = column + 4u * tx;\n".to_owned() + &statistics("row"));
    }
    // the bias comes before or after the soft cap
    let ds = "let part = select(slope.ds, slope.ds * e.slope, numbers.bias_first != 0u);\n";
    let then = match axes {
        BiasAxes::Pairs => {
            "if (visible) {
    let at = target_row + (row + {r}u) * numbers.gradient_row + sight[numbers.key_rows + 2u * (key + {c}u)];
    gradient[at] = gradient[at] + part;
}"
        }
        BiasAxes::Queries | BiasAxes::Keys => "all[{r}] = all[{r}] + select(0.0, part, visible);",
    };
    text.name("SLOPES", slopes(variant.general, rows_are_keys, &format!("{ds}{then}")));
    let functions = functions(variant.storage, &[(&Q, "q_words"), (&K, "block"), (&V, "block"), (&DOUT, "dout_words")]);
    let bindings = [read("q_words"), read("block"), read("bias_words"), write("gradient"), read("statistics"), read("dout_words")];
    assemble(variant, &mut text, include_str!("backward_bias.wgsl"), &functions, true, &bindings)
}
