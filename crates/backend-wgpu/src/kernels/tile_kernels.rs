//! The tile kernels, assembled from their templates and the generated products.

use super::{
    ARITHMETIC, Access, BiasAxes, DROPOUT, Epilogue, GRADIENT, Orientation, Source, Storage,
    TILE_TEXT, TileVariant,
    backward_step::{RowStep, column_statistics, row_statistics, score_gradients},
    dropout::{
        DropoutQueries, QueryRounds, SHARED_ROUNDS, kept_rows, row_queries, share_rounds,
        shares_rounds,
    },
    matrices::{self, Grid, ProductFactors},
    matrix_epilogue,
    params::TileParams,
    products::{
        Accumulators, Factor, InMemory, acc_functions, accumulate, add_product, each, each_row,
        multiply_add, product, rest_of, store_factors, store_tile,
    },
    tall_tiles,
    template::Template,
    vectors::{DOUT, K, Q, ROW_STEP, V, Words},
};
use crate::{Level, RegisterTile};

/// A storage binding.
struct Binding {
    name: &'static str,
    kind: &'static str,
    access: Access,
}

const fn read(name: &'static str) -> Binding {
    Binding { name, kind: "u32", access: Access::Read }
}

/// Binding of vectors.
fn vectors(name: &'static str, variant: TileVariant) -> Binding {
    let kind = if variant.binds_halves() {
        "vec4<f16>"
    } else if variant.aligned {
        variant.storage.four()
    } else {
        "u32"
    };
    Binding { name, kind, access: Access::Read }
}

const fn write(name: &'static str) -> Binding {
    Binding { name, kind: "f32", access: Access::Write }
}

const ACC: &str = "acc_words";

/// Binding of accumulators.
const fn accumulators(variant: TileVariant) -> Binding {
    let kind = if variant.aligned { "vec4<f32>" } else { "f32" };
    Binding { name: ACC, kind, access: Access::Write }
}

/// Index of a workgroup's list in its plane. Long lists come first, so that no workgroup starts
/// when most of the device is idle. No function of WGSL, whose result would not count as uniform.
const LIST_INDEX: &str = "select(
        group % params.tiles,
        params.tiles - 1u - group % params.tiles,
        params.is_reversed != 0u,
    )";

/// Generates the loads of the tile mask to workgroup memory. `is_partial` is false if all pairs are
/// visible; then simple kernels read no mask.
fn tile_mask(variant: TileVariant) -> String {
    let masks = variant.epilogue.masks();
    if masks || variant.used_matrices().is_some() {
        let biased = if masks { "\n    || {{HAS_BIAS}} || {{HAS_BIAS_FUNCTION}}" } else { "" };
        return format!(
            "let is_partial = mask_index != FULL_TILE{biased};
workgroupBarrier();
if (lane < {{{{QUERY_ROWS}}}}u) {{
    var word = 0xffffffffu;
    if (mask_index != FULL_TILE) {{
        word = mask_word(mask_index, lane);
    }}
    atomicStore(&visible_bits[lane], word);
}}
"
        );
    }
    "let is_partial = mask_index != FULL_TILE;
workgroupBarrier();
if (is_partial && lane < {{QUERY_ROWS}}u) {
    atomicStore(&visible_bits[lane], mask_word(mask_index, lane));
}
"
    .to_owned()
}

/// Conditions of the parts of a score epilogue: constants, except in the kernel of all epilogues.
fn conditions(epilogue: Epilogue) -> [(&'static str, &'static str); 9] {
    let names = [
        ("HAS_BIAS", "params.has_bias != 0u"),
        ("HAS_BIAS_FUNCTION", "params.function_at != 0u"),
        ("HAS_SOFT_CAP", "params.cap > 0.0"),
        // without a soft cap both orders are the same
        ("IS_BIAS_FIRST", "params.bias_first != 0u"),
        ("HAS_DROPOUT", "params.threshold != 0u"),
        ("IS_UNNORMALIZED", "params.normalize == 0u"),
        ("ROUNDS_TO_BF16", "params.logits_dtype == 1u"),
        ("ROUNDS_TO_F16", "params.logits_dtype == 2u"),
        ("HAS_ROUNDED_LOGITS", "params.logits_dtype != 0u"),
    ];
    names.map(|(name, condition)| match epilogue {
        Epilogue::General => (name, condition),
        Epilogue::Bias if name == "HAS_BIAS" || name == "IS_BIAS_FIRST" => (name, "true"),
        _ => (name, "false"),
    })
}

/// Names of what depends on the register tile. A row vector has an element for each of its rows.
fn name_rows(text: &mut Template, variant: TileVariant) {
    let tile = variant.used_register_tile();
    let (rest, as_four, part) = match tile {
        RegisterTile::FourRows => ("yzw", "", ""),
        RegisterTile::TwoRows => ("y", ".xyxy", ".xy"),
        RegisterTile::OneRow => ("x", ".xxxx", ".xx"),
    };
    let rows = tile.rows();
    // WGSL has no vectors of one element: the second one is not used
    let elements = rows.max(2);
    text.name("INVOCATIONS", variant.invocations().to_string())
        .name("QUERY_ROWS", variant.query_rows().to_string())
        .name("LAST_QUERY_ROW", (variant.query_rows() - 1).to_string())
        .name("TILE_ROWS", rows.to_string())
        .name("ROW_FLOATS", format!("vec{elements}<f32>"))
        .name("ROW_WORDS", format!("vec{elements}<u32>"))
        .name("ROW_BOOLS", format!("vec{elements}<bool>"))
        // elements after the first, or the first of one
        .name("ROW_REST", rest)
        // a row vector as a vector of 4, and back
        .name("AS_FOUR", as_four)
        .name("ROW_PART", part);
}

/// Assembles a kernel. Binding 1 is the block mask; q, the block or `keys` and `values`, the bias,
/// what is `written`, the statistics and, for a gradient, dout follow.
fn assemble(
    variant: TileVariant,
    template: &mut Template,
    text: &str,
    [keys, values]: [&'static str; 2],
    written: Binding,
    gradient: bool,
) -> Source {
    let mut operands = vec![(&Q, "q_words"), (&K, keys), (&V, values)];
    let statistics = if gradient { read("statistics") } else { write("statistics") };
    let mut bindings = vec![vectors("q_words", variant), vectors(keys, variant)];
    bindings.extend((values != keys).then(|| vectors(values, variant)));
    let has_acc = written.name == ACC;
    bindings.extend([read("bias_words"), written, statistics]);
    if gradient {
        operands.push((&DOUT, "dout_words"));
        bindings.push(vectors("dout_words", variant));
    }
    let mut functions: String =
        operands.iter().map(|(vectors, words)| vectors.functions(words, variant)).collect();
    if has_acc {
        functions += &acc_functions(ACC, variant.aligned);
    }
    let on = Grid::of(variant);
    let wide = variant.has_wide_products();
    template
        .flag("GENERAL", variant.epilogue.masks())
        .flag("TIES", variant.epilogue == Epilogue::General)
        .flag("SOFT_CAP", variant.epilogue == Epilogue::SoftCap)
        .flag("DROPOUT", variant.epilogue == Epilogue::Dropout)
        .flag("WIDE_PRODUCTS", wide)
        .flag("FOUR_ROWS", variant.used_register_tile() == RegisterTile::FourRows)
        .flag("SUBGROUP", variant.level == Level::Matrix)
        .flag("MATRIX", on.is_some())
        .flag("DECODE", variant.decodes);
    name_rows(template, variant);
    template.name("LIST_INDEX", LIST_INDEX);
    template.name("TILE_MASK", tile_mask(variant));
    template.name("PADDED_VECTORS", format!("{}", 32 * ROW_STEP));
    template.name("QUERY_VECTORS", format!("{}", variant.query_rows() * ROW_STEP));
    for (name, condition) in conditions(variant.epilogue) {
        template.name(name, condition);
    }
    template.name("EXPONENTIALS", if on.is_some() { "half_exponentials" } else { "exponentials" });
    template.name("PRODUCT", if wide { "wide_product" } else { "product_by_halves" });
    let keep_factors = if wide { "keep_factors_of_row" } else { "keep_factors" };
    template.name("KEEP_FACTORS", keep_factors);
    // positions of keys, or the first key
    template.name("DROPOUT_KEYS", if wide { "dropout_keys" } else { "" });
    template.name("COUNT_MATRICES", on.map_or_else(String::new, matrices::count));
    let mut declared = on.map_or_else(String::new, matrices::declarations);
    for (number, Binding { name, kind, access }) in bindings.iter().enumerate() {
        let access = if *access == Access::Read { "read" } else { "read_write" };
        declared += &format!(
            "@group(0) @binding({}) var<storage, {access}> {name}: array<{kind}>;\n",
            number + 2
        );
    }
    let gradient = if gradient { template.expand(GRADIENT) } else { String::new() };
    let dropout =
        if variant.epilogue.calls_dropout() { template.expand(DROPOUT) } else { String::new() };
    let enabled = if on.is_some() { matrices::ENABLED } else { "" };
    let wgsl = [
        enabled,
        TileParams::WGSL,
        ARITHMETIC,
        &declared,
        &template.expand(TILE_TEXT),
        &dropout,
        &gradient,
        &functions,
        &template.expand(text),
    ]
    .concat();
    let bindings = std::iter::once(Access::Read)
        .chain(bindings.iter().map(|binding| binding.access))
        .collect();
    Source { wgsl, bindings, params: size_of::<TileParams>() }
}

/// Generates the scores of a tile and their row maxima.
fn epilogue(variant: TileVariant) -> String {
    if variant.has_epilogue_by_parts() {
        return matrix_epilogue::scores();
    }
    let (of, tile) = (variant.epilogue, variant.used_register_tile());
    let words = "for (var r = 0u; r < {{TILE_ROWS}}u; r++) {
    words[r] = atomicLoad(&visible_bits[{{TILE_ROWS}}u * ty + r]);
}
";
    if of.masks() {
        // A loop, because drivers take seconds to compile four copies. Registers rotate, so that
        // none is selected by the number of the row.
        let last = tile.rows() - 1;
        let rotate: String = (0..last).map(|r| format!("    s{r} = s{};\n", r + 1)).collect();
        let rest = rest_of(tile, "tile_max");
        return format!(
            "{words}let columns = vec4<u32>(key) + vec4<u32>(0u, 1u, 2u, 3u);
for (var r = 0u; r < {{{{TILE_ROWS}}}}u; r++) {{
    let bits = four_bits(words.x >> (4u * tx));
    let e = scores(
        batch,
        head_of(head, row + r),
        vec4<u32>(query_of(first, row + r)),
        columns,
        mask_index,
        bits,
        s0,
    );
    let hidden = bits & !e.visible;
    if (any(hidden)) {{
        atomicAnd(&visible_bits[{{{{TILE_ROWS}}}}u * ty + r], ~(bits_of_four(hidden) << (4u * tx)));
    }}
    let highest = max(tile_max.x, greatest(select(vec4<f32>(-3.4028234e38), e.s, e.visible)));
    tile_max = {{{{ROW_FLOATS}}}}({rest}highest);
    words = words.{{{{ROW_REST}}}}x;
{rotate}    s{last} = e.s;
}}
workgroupBarrier();
{words}"
        );
    }
    let score = if of == Epilogue::SoftCap {
        "s{r} = params.cap * tangents(s{r});"
    } else {
        "s{r} = params.scale * s{r};"
    };
    let partial = format!(
        "{{
    {score}
    let visible = four_bits(words[{{r}}] >> (4u * tx));
    let shown = select(vec4<f32>(-3.4028234e38), s{{r}}, visible);
    tile_max[{{r}}] = max(tile_max[{{r}}], greatest(shown));
}}"
    );
    let full = format!(
        "{score}
tile_max[{{r}}] = max(tile_max[{{r}}], greatest(s{{r}}));"
    );
    format!(
        "if (is_partial) {{
{words}{}}} else {{
{}}}
",
        each_row(tile, &partial),
        each_row(tile, &full)
    )
}

/// Generates the probabilities of a tile and their row sums.
fn probs(variant: TileVariant) -> String {
    let (of, tile) = (variant.epilogue, variant.used_register_tile());
    let partial = "{
    let visible = four_bits(words[{r}] >> (4u * tx));
    let all = {{EXPONENTIALS}}(s{r} - vec4<f32>(row_max[{r}]));
    let prob = select(vec4<f32>(0.0), all, visible);
    sum[{r}] = sum[{r}] + sum_of(prob);
#if TIES
    let is_tie = visible & (s{r} == vec4<f32>(row_max[{r}]));
    ties[{r}] = ties[{r}] + sum_of(select(vec4<f32>(0.0), vec4<f32>(1.0), is_tie));
#end
    s{r} = prob;
}";
    let drop = kept_rows(variant, Orientation::RowsAreQueries, packed_queries(tile))
        + &each_row(tile, "s{r} = s{r} * kept{r};");
    let full = "s{r} = {{EXPONENTIALS}}(s{r} - vec4<f32>(row_max[{r}]));
sum[{r}] = sum[{r}] + sum_of(s{r});";
    if of.masks() {
        let mut all = each_row(tile, partial);
        if variant.has_epilogue_by_parts() {
            let ties = "{
    let is_tie = s{r} == vec4<f32>(row_max[{r}]);
    ties[{r}] = ties[{r}] + sum_of(select(vec4<f32>(0.0), vec4<f32>(1.0), is_tie));
}
";
            let full = each_row(tile, &format!("{ties}{full}"));
            all = format!("if (is_partial) {{\n{all}}} else {{\n{full}}}\n");
        }
        return if of == Epilogue::General {
            format!("{all}if ({{{{HAS_DROPOUT}}}}) {{\n{drop}}}\n")
        } else {
            all
        };
    }
    let [partial, full] = [partial, full].map(|line| each_row(tile, line));
    let mut text = format!("if (is_partial) {{\n{partial}}} else {{\n{full}}}\n");
    if of == Epilogue::Dropout {
        text += &drop;
    }
    text
}

/// Queries in the rows of a register tile of forward.
const fn packed_queries(tile: RegisterTile) -> DropoutQueries {
    DropoutQueries {
        head: "head_of(head, row + n)",
        query: "query_of(first, row + n)",
        count: tile.rows(),
        rounds: QueryRounds::Here,
    }
}

/// Generates the forward kernel.
pub(super) fn forward(variant: TileVariant) -> Source {
    let (groups, tile) = (variant.value_groups, variant.used_register_tile());
    let mut text = Template::default();
    let held = variant.held_groups(groups, 2);
    let load = |condition: &str| {
        format!(
            "var o{{g}}_{{r}} = vec4<f32>(0.0);
if ({condition}[{{r}}]) {{
    let at = acc + acc_at(first, head, row + {{r}}u);
    o{{g}}_{{r}} = load_acc(at, {{c}}, params.value_dim);
}}"
        )
    };
    let store = "if (is_row(first, row + {r}u)) {
    let at = acc + acc_at(first, head, row + {r}u);
    store_acc(at, {c}, params.value_dim, o{g}_{r});
}";
    let rescale = "o{g}_{r} = o{g}_{r} * rescale[{r}];";
    let load_in_loop = format!("{}\n{rescale}", load("was_visible"));
    let in_memory = Some(InMemory { held, load: &load_in_loop, store });
    text.flag("ACC_IN_MEMORY", held < groups);
    text.name("LOAD_ACC", each(tile, held, &load("any_visible")));
    text.name("STORE_ACC", each(tile, held, store));
    text.name("RESCALE_ACC", each(tile, held, rescale));
    let (own_rows, scores) = match Grid::of(variant).filter(|_| variant.tall) {
        Some(grid) => (tall_tiles::held_queries(variant, grid), tall_tiles::scores(variant, grid)),
        None => (Q.own_rows(variant), product(variant, "s", &Q, &K)),
    };
    text.name("OWN_ROWS", own_rows + &packed_queries(tile).own_rounds(variant));
    text.name("SCORES", scores);
    text.name("EPILOGUE", epilogue(variant));
    text.name("PROBS", probs(variant));
    text.name("STORE_PROBS", store_factors(variant, ProductFactors::Probs, "s"));
    let into = Accumulators { prefix: "o", groups, in_memory };
    text.name("ACCUMULATE", accumulate(variant, into, ProductFactors::Probs, &V, Words::OfRows));
    let acc = accumulators(variant);
    assemble(variant, &mut text, include_str!("forward.wgsl"), ["block"; 2], acc, false)
}

/// Generates the kernel of dQ.
pub(super) fn backward_queries(variant: TileVariant) -> Source {
    let (groups, tile) = (variant.head_groups, variant.used_register_tile());
    let mut text = Template::default();
    let by_parts = variant.has_backward_by_parts(groups);
    let scale = if by_parts { matrix_epilogue::scale_statistics() } else { String::new() };
    text.name("ROW_STATISTICS", row_statistics(tile) + &scale);
    let load = "var o{g}_{r} = vec4<f32>(0.0);
if (row + {r}u < params.queries) {
    o{g}_{r} = load_acc(acc + (row + {r}u) * params.acc_row, {c}, params.head_dim);
}";
    let store = "if (row + {r}u < params.queries) {
    store_acc(acc + (row + {r}u) * params.acc_row, {c}, params.head_dim, o{g}_{r});
}";
    let held = variant.held_groups(groups, 0);
    text.name("LOAD_ACC", each(tile, held, load));
    text.name("STORE_ACC", each(tile, held, store));
    text.name(
        "OWN_ROWS",
        Q.own_rows(variant)
            + &DOUT.own_rows(variant)
            + &if by_parts {
                row_queries(tile).rounds_if_dropped()
            } else {
                row_queries(tile).own_rounds(variant)
            },
    );
    text.name("SCORES", product(variant, "s", &Q, &K));
    text.name("DPROBS", product(variant, "d", &DOUT, &V));
    let step = RowStep {
        masked: "s{r} = select(vec4<f32>(0.0), grad.ds, visible);",
        full: "s{r} = grad.ds;",
        general: "next_s = select(vec4<f32>(0.0), grad.ds * ds_dx, visible);",
    };
    let gradients = if by_parts {
        matrix_epilogue::score_gradients(variant, Orientation::RowsAreQueries)
    } else {
        score_gradients(variant, Orientation::RowsAreQueries, step)
    };
    text.name("DX", gradients + &store_factors(variant, ProductFactors::Gradients, "s"));
    let in_memory = Some(InMemory { held, load, store });
    let into = Accumulators { prefix: "o", groups, in_memory };
    text.name(
        "ACCUMULATE",
        accumulate(variant, into, ProductFactors::Gradients, &K, Words::OfRows),
    );
    let acc = accumulators(variant);
    assemble(variant, &mut text, include_str!("backward_queries.wgsl"), ["block"; 2], acc, true)
}

/// Generates the kernel of dK and dV.
pub(super) fn backward_keys(variant: TileVariant, from_records: bool) -> Source {
    let TileVariant { head_groups, value_groups, .. } = variant;
    let (on, tile) = (variant.used_matrices(), variant.used_register_tile());
    let splits = TileVariant::splits_gradients(tile, 32 * head_groups, 32 * value_groups);
    let mut text = Template::default();
    text.flag("HALF_STATISTICS", from_records && variant.storage != Storage::F32);
    text.flag("SPLIT", splits).flag("ROWS_ARE_KEYS", true);
    let all_groups = head_groups + value_groups;
    let shares_rounds = shares_rounds(variant, all_groups);
    text.name("SHARE_ROUNDS", if shares_rounds { share_rounds(variant) } else { String::new() });
    let zero = |prefix: &str, groups: usize| {
        each(tile, groups, &format!("var {prefix}{{g}}_{{r}} = vec4<f32>(0.0);"))
    };
    let store = |prefix: &str, groups: usize, base: &str, dim: &str, factor: &str| {
        each(
            tile,
            groups,
            &format!(
                "if (row + {{r}}u < params.keys) {{
    let at = {base} + (row + {{r}}u) * params.acc_row;
    var part = {factor}{prefix}{{g}}_{{r}};
    if (params.add != 0u) {{ part = load_acc(at, {{c}}, {dim}) + part; }}
    store_acc(at, {{c}}, {dim}, part);
}}"
            ),
        )
    };
    text.name("OWN_ROWS", K.own_rows(variant) + &V.own_rows(variant));
    text.name("SCORES", product(variant, "s", &K, &Q));
    text.name("COLUMN_STATISTICS", column_statistics(variant));
    let gradients = |step| score_gradients(variant, Orientation::RowsAreKeys, step);
    if splits {
        let groups = head_groups.max(value_groups);
        text.name("ZERO_ACC", zero("acc", groups));
        text.name(
            "STORE_ACC",
            "let acc_base = select(dk_base, dv_base_of_head, is_dv);
let acc_factor = select(params.scale, 1.0, is_dv);
"
            .to_owned()
                + &store("acc", groups, "acc_base", "acc_dim", "acc_factor * "),
        );
        let dprobs = add_product(variant, "d", &V, &DOUT);
        text.name(
            "DPROBS",
            each_row(tile, "var d{r} = vec4<f32>(0.0);") + &format!("if (!is_dv) {{\n{dprobs}}}\n"),
        );
        let of_pass = "select(grad.ds, grad.p_dropped, vec4<bool>(is_dv))";
        let general_of_pass = of_pass.replace("grad.ds", "grad.ds * ds_dx");
        let step = RowStep {
            masked: &format!("s{{r}} = select(vec4<f32>(0.0), {of_pass}, visible);"),
            full: &format!("s{{r}} = {of_pass};"),
            general: &format!("next_s = select(vec4<f32>(0.0), {general_of_pass}, visible);"),
        };
        let words = Words::OfColumns;
        if on.is_some() {
            let [dv, dk] = [matrices::store_probs("s"), matrices::store_gradients("s")];
            let store = format!("if (is_dv) {{\n{dv}}} else {{\n{dk}}}\n");
            text.name("DX", gradients(step) + matrices::GRADIENT_FACTORS + &store);
            let [dv, dk] = [value_groups, head_groups].map(|of| Accumulators::held("acc", of));
            let dv = accumulate(variant, dv, ProductFactors::Probs, &DOUT, words);
            let dk = accumulate(variant, dk, ProductFactors::Gradients, &Q, words);
            text.name("ACCUMULATE", format!("if (is_dv) {{\n{dv}}} else {{\n{dk}}}\n"));
        } else {
            text.name("DX", gradients(step) + &store_tile(variant, "s"));
            let of = Factor::OfPass { dv: &DOUT, dk: &Q };
            let into = Accumulators::held("acc", groups);
            text.name("ACCUMULATE", multiply_add(variant, into, of, words));
        }
    } else {
        text.name("ZERO_ACC", zero("dk", head_groups) + &zero("dv", value_groups));
        text.name(
            "STORE_ACC",
            store("dk", head_groups, "dk_base", "params.head_dim", "params.scale * ")
                + &store("dv", value_groups, "dv_base_of_head", "params.value_dim", ""),
        );
        text.name("DPROBS", product(variant, "d", &V, &DOUT));
        let step = RowStep {
            masked: "s{r} = select(vec4<f32>(0.0), grad.ds, visible);
d{r} = select(vec4<f32>(0.0), grad.p_dropped, visible);",
            full: "s{r} = grad.ds;
d{r} = grad.p_dropped;",
            general: "next_s = select(vec4<f32>(0.0), grad.ds * ds_dx, visible);
next_d = select(vec4<f32>(0.0), grad.p_dropped, visible);",
        };
        let words = Words::OfColumns;
        let dv = Accumulators::held("dv", value_groups);
        let of_dv = accumulate(variant, dv, ProductFactors::Probs, &DOUT, words);
        let dk = Accumulators::held("dk", head_groups);
        let of_dk = accumulate(variant, dk, ProductFactors::Gradients, &Q, words);
        let gradients = if variant.has_backward_by_parts(all_groups) {
            matrix_epilogue::scale_statistics()
                + &matrix_epilogue::score_gradients(variant, Orientation::RowsAreKeys)
        } else {
            gradients(step)
        };
        text.name("DX", gradients + &store_factors(variant, ProductFactors::Probs, "d"))
            .name("ACCUMULATE_DV", of_dv)
            .name("STORE_TILE", store_factors(variant, ProductFactors::Gradients, "s"))
            .name("ACCUMULATE_DK", of_dk);
    }
    let blocks = ["k_words", "v_words"];
    let acc = accumulators(variant);
    let shared = if shares_rounds { SHARED_ROUNDS } else { "" };
    let wgsl = [shared, include_str!("backward_keys.wgsl")].concat();
    assemble(variant, &mut text, &wgsl, blocks, acc, true)
}

/// Generates the kernel of dbias.
pub(super) fn backward_bias(variant: TileVariant, axes: BiasAxes) -> Source {
    // without the products that matrices compute
    let variant = TileVariant { matrices: None, ..variant };
    let rows_are_keys = axes == BiasAxes::Keys;
    let mut text = Template::default();
    text.flag("SUM_ROWS", axes != BiasAxes::Pairs).flag("ROWS_ARE_KEYS", rows_are_keys);
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
        text.name("SCORES", product(variant, "s", &K, &Q))
            .name("DPROBS", product(variant, "d", &V, &DOUT));
        text.name(
            "STATISTICS",
            "let query = column + 4u * tx;\n".to_owned() + &column_statistics(variant),
        );
    } else {
        text.name("SCORES", product(variant, "s", &Q, &K))
            .name("DPROBS", product(variant, "d", &DOUT, &V));
        text.name(
            "STATISTICS",
            "let key = column + 4u * tx;\n".to_owned()
                + &row_statistics(variant.used_register_tile()),
        );
    }
    // the bias is added before or after the soft cap
    let mut then =
        "let part = select(grad.ds, grad.ds * ds_dx, vec4<bool>({{IS_BIAS_FIRST}}));\n".to_owned();
    if axes == BiasAxes::Pairs {
        for c in 0..4 {
            then += &format!(
                "if (visible[{c}]) {{
    let column = block_mask[params.key_rows + 2u * (key + {c}u)];
    let at = target_row + (row + r) * params.dbias_row + column;
    dbias[at] = dbias[at] + part[{c}];
}}
"
            );
        }
    } else {
        let rest = rest_of(variant.used_register_tile(), "all");
        then += &format!(
            "let kept = select(vec4<f32>(0.0), part, visible);
all = {{{{ROW_FLOATS}}}}({rest}all.x + ((kept.x + kept.y) + (kept.z + kept.w)));"
        );
    }
    let orientation =
        if rows_are_keys { Orientation::RowsAreKeys } else { Orientation::RowsAreQueries };
    // the kernel of dbias is general
    let step = RowStep { masked: "", full: "", general: &then };
    text.name("DX", score_gradients(variant, orientation, step));
    let wgsl = include_str!("backward_bias.wgsl");
    assemble(variant, &mut text, wgsl, ["block"; 2], write("dbias"), true)
}
