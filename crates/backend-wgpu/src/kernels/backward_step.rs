//! Generated parts of the backward kernels: the backward step of a register tile, from scores and
//! products to score gradients and probabilities.

use super::{
    Epilogue, Orientation, TileVariant,
    dropout::{column_queries, kept_rows, row_queries},
    products::{ELEMENTS, each_of, rest_of},
};
use crate::RegisterTile;

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

/// Statements of the backward step for a row of four pairs.
#[derive(Clone, Copy)]
pub(super) struct RowStep<'a> {
    /// With `s{r}`, `d{r}`, `grad` and `visible` in scope, in simple kernels.
    pub(super) masked: &'a str,
    /// As `masked`, where all pairs are visible.
    pub(super) full: &'a str,
    /// With `r`, `e`, `grad` and `visible` in scope, in general kernels; sets `next_s` and
    /// `next_d`.
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
        let [max, inverse_sum, delta, _] = ELEMENTS.map(|element| of_stats(r, element));
        match epilogue {
            Epilogue::SoftCap => format!(
                "let t = tangents(s{r});
    var grad = score_gradients(params.cap * t, d{r}, {max}, {inverse_sum}, {delta});
    grad.ds = grad.ds * fma(-t, t, vec4<f32>(1.0));"
            ),
            Epilogue::Dropout => format!(
                "let grad = score_gradients(
        params.scale * s{r}, d{r}, kept{r}, {max}, {inverse_sum}, {delta});"
            ),
            _ => format!(
                "let grad = score_gradients(
        params.scale * s{r}, d{r}, {max}, {inverse_sum}, {delta});"
            ),
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
            text += &format!(
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
            text += &format!(
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
    // A loop, because drivers take seconds to compile four copies. Registers rotate, so that none
    // is selected by the number of the row.
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
    let [max, inverse_sum, delta, share] = ELEMENTS.map(|element| of_stats(0, element));
    text += &format!(
        "{words}{rows}{late}    let visible = e.visible & is_not_positive_infinity({max});
    let hidden = bits & !visible;
    let ds_dx = e.ds_dx;
    let grad = score_gradients(e.s, d0, keep, {max}, {inverse_sum}, {delta}, {share});
    var next_s = s0;
    var next_d = d0;
    {}
    {}{}    s{last} = next_s;
    d{last} = next_d;
{next}}}
",
        then.general,
        rotate("s"),
        rotate("d")
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
