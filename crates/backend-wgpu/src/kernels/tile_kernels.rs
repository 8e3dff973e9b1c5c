//! The tile kernels, assembled from their templates and the generated products.

use std::fmt::Write;

use super::{
    ARITHMETIC, Access, BiasAxes, GRADIENT, Source, Storage, TILE_TEXT, TileVariant, matrices,
    params::TileParams,
    products::{
        ROW_STEP, acc_functions, accumulate, accumulate_weights, each, each_pair, each_row,
        product, score_gradients, statistics, store_tile, store_weights,
    },
    template::Template,
    vectors::{DOUT, K, Q, V, Vectors, Words},
};
use crate::Level;

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
    template.name("PADDED_VECTORS", format!("{}", 32 * ROW_STEP));
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

fn functions(variant: TileVariant, vectors: &[(&Vectors, &str)]) -> String {
    let TileVariant { storage, unpacks, .. } = variant;
    vectors
        .iter()
        .map(|(vectors, words)| vectors.functions(&storage.load(words, unpacks)))
        .collect()
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
if (any_visible[{r}]) {
    o{g}_{r} = load_acc(acc + (row + {r}u) * params.acc_row, {c}, params.value_dim);
}",
        ),
    );
    text.name(
        "STORE_ACC",
        each(
            groups,
            "if (row + {r}u < params.queries) {
    store_acc(acc + (row + {r}u) * params.acc_row, {c}, params.value_dim, o{g}_{r});
}",
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
    let functions = functions(variant, &[(&Q, "q_words"), (&K, "block"), (&V, "block")])
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
if (row + {r}u < params.queries) {
    o{g}_{r} = load_acc(acc + (row + {r}u) * params.acc_row, {c}, params.head_dim);
}",
        ),
    );
    text.name(
        "STORE_ACC",
        each(
            groups,
            "if (row + {r}u < params.queries) {
    store_acc(acc + (row + {r}u) * params.acc_row, {c}, params.head_dim, o{g}_{r});
}",
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
    let functions =
        functions(variant, &[(&Q, "q_words"), (&K, "block"), (&V, "block"), (&DOUT, "dout_words")])
            + &acc_functions("acc_words");
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
    let then = "s{r}[{c}] = select(0.0, grad.ds * e.ds_dx, visible);
d{r}[{c}] = select(0.0, grad.p_dropped, visible);";
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
        variant,
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
        "ROW_OFFSET",
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
    let column = block_mask[params.key_rows + 2u * (key + {c}u)];
    let at = target_row + (row + {r}u) * params.dbias_row + column;
    dbias[at] = dbias[at] + part;
}"
        }
        BiasAxes::Queries | BiasAxes::Keys => "all[{r}] = all[{r}] + select(0.0, part, visible);",
    };
    text.name("DX", score_gradients(variant.general, rows_are_keys, &format!("{ds}{then}")));
    let functions =
        functions(variant, &[(&Q, "q_words"), (&K, "block"), (&V, "block"), (&DOUT, "dout_words")]);
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
