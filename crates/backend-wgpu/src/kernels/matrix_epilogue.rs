//! Score epilogues of kernels with matrices that have all parts: the counterpart of
//! `tile_kernels::epilogue` and of the general part of `backward_step::score_gradients`, which take
//! fewer registers.
//!
//! ```text
//! for each part of the epilogue that the spec has: a uniform branch with the part of all 16 pairs
//! forward:    s = score, tile_max = its largest of the visible pairs of each row
//! backward:   e = e^(s − max);  p = e·factor·keep;  ds = e·(factor·keep·dp − Δ / sum) · ∂s/∂x;
//!             p and ds are 0 for masked pairs
//!             normalized:     factor = 1 / sum
//!             unnormalized:   factor = 1;  also ds ← ds − [s = max]·share
//! ```
//!
//! So what depends on queries or keys alone, as the offsets of a bias or the first rounds of
//! dropout, is computed once for the register tile; parts that a spec lacks cost one branch each
//! instead of one for each row; and full tiles without a bias have no work of masks.

use super::{
    Orientation, TileVariant,
    dropout::{COLUMN_QUERIES, QueryRounds, kept_rows, row_queries},
    products::each_row,
};
use crate::RegisterTile;

const TILE: RegisterTile = RegisterTile::FourRows;

/// A score with a soft cap: bit for bit that of `scores` of `tile.wgsl`, so that forward finds the
/// same largest scores as the backward pass of larger dims.
const CAPPED: &str = "s{r} =
    fma(vec4<f32>(params.cap), t{r}, select(bias{r}, vec4<f32>(0.0), {{IS_BIAS_FIRST}}));";

/// Generates the change of the statistics of four queries that the step needs.
pub(super) fn scale_statistics() -> String {
    each_row(TILE, "stats{r} = scaled_statistics(stats{r});")
}

/// Generates the scores of a tile of forward, the largest of each row, and `words`.
pub(super) fn scores() -> String {
    let of = Lines::Forward;
    [
        part("{{HAS_ROUNDED_LOGITS}}", "s{r} = rounded(s{r});"),
        of.biases(),
        part(
            "{{HAS_SOFT_CAP}}",
            &format!("let t{{r}} = half_tangents(TWICE_LOG2_E / params.cap * s{{r}});\n{CAPPED}"),
        ),
        of.maxima(),
    ]
    .concat()
}

/// Generates the backward step: `s` and `d` become dX and, if rows are keys, P.
pub(super) fn score_gradients(variant: TileVariant, orientation: Orientation) -> String {
    let of = if orientation == Orientation::RowsAreKeys { Lines::Keys } else { Lines::Queries };
    [
        of.dropout(variant, orientation),
        part("{{HAS_ROUNDED_LOGITS}}", "s{r} = rounded(s{r});"),
        of.biases(),
        each_row(TILE, "var slope{r} = vec4<f32>(1.0);"),
        part(
            "{{HAS_SOFT_CAP}}",
            &format!(
                "let t{{r}} = half_tangents(TWICE_LOG2_E / params.cap * s{{r}});
slope{{r}} = fma(-t{{r}}, t{{r}}, vec4<f32>(1.0));
{CAPPED}"
            ),
        ),
        of.gradients(),
        of.mask(),
    ]
    .concat()
}

/// Generates `line` for each row under a uniform condition.
fn part(condition: &str, line: &str) -> String {
    format!("if ({condition}) {{\n{}}}\n", each_row(TILE, line))
}

/// Meaning of the rows of a register tile.
#[derive(Clone, Copy, PartialEq)]
enum Lines {
    /// Queries of forward, or packed heads.
    Forward,
    /// Queries of dQ.
    Queries,
    /// Keys of dK and dV.
    Keys,
}

impl Lines {
    /// Expression for the first query of the register tile in its tile, and for the first key.
    const fn first(self) -> [&'static str; 2] {
        match self {
            Self::Forward | Self::Queries => ["4u * ty", "4u * tx"],
            Self::Keys => ["4u * tx", "4u * ty"],
        }
    }

    /// Expression for the statistics of the queries of row `{r}`.
    fn statistics(self, name: &str) -> String {
        if self == Self::Keys {
            let columns = [0, 1, 2, 3].map(|c| name.replace("{r}", &c.to_string()));
            format!("vec4<f32>({})", columns.join(", "))
        } else {
            format!("vec4<f32>({name})")
        }
    }

    /// Generates the factors of dropout. If rows are keys, `keep` is their product with `factor`;
    /// in dQ only dP has them.
    fn dropout(self, variant: TileVariant, orientation: Orientation) -> String {
        let (queries, declared, line) = if self == Self::Keys {
            let factor = self.statistics("stats{r}.y");
            let declared = each_row(TILE, &format!("var keep{{r}} = {factor};"));
            (COLUMN_QUERIES.with(QueryRounds::Shared), declared, "keep{r} = keep{r} * kept{r};")
        } else {
            let queries = row_queries(TILE).with(QueryRounds::Own);
            (queries, String::new(), "d{r} = d{r} * kept{r};")
        };
        let kept = kept_rows(variant, orientation, queries);
        let lines = each_row(TILE, line);
        format!("{declared}if ({{{{HAS_DROPOUT}}}}) {{\n{kept}{lines}}}\n")
    }

    /// Generates the scores without a soft cap, and `bias`, of which −∞ masks a pair.
    fn biases(self) -> String {
        let (query, key) = match self {
            Self::Forward => ("head_of(head, row + {r}u), query_of(first, row + {r}u)", "key"),
            Self::Queries => ("head, row + {r}u", "key"),
            Self::Keys => ("head, query + {r}u", "row"),
        };
        let of_queries = |function: &str| {
            let lines = format!("let query{{r}} = {function}(batch, {query}, mask_index, {key});");
            each_row(TILE, &lines)
        };
        // of a row's four pairs
        let load = |from: &str, of_key: &dyn Fn(&str) -> String| {
            let pairs = ["0", "1", "2", "3"].map(|c| {
                let (query, key) = if self == Self::Keys { (c, "{r}") } else { ("{r}", c) };
                format!("{from}[query{query} + {}]", of_key(key))
            });
            format!("bitcast<vec4<f32>>(vec4<u32>(\n    {}))", pairs.join(",\n    "))
        };
        let of_tensor = load("bias_words", &|key| format!("of_keys[{key}]"));
        let of_function = load("block_mask", &|key| format!("{key}u"));
        let sum = format!("bias{{r}} = sum_of_biases(bias{{r}}, {of_function});");
        [
            each_row(TILE, "var bias{r} = vec4<f32>(0.0);"),
            format!(
                "if ({{{{HAS_BIAS}}}}) {{\nlet of_keys = bias_keys({key});\n{}{}}}\n",
                of_queries("bias_query"),
                each_row(TILE, &format!("bias{{r}} = {of_tensor};"))
            ),
            format!(
                "if ({{{{HAS_BIAS_FUNCTION}}}}) {{\n{}{}}}\n",
                of_queries("position_query"),
                each_row(TILE, &sum)
            ),
            // without a soft cap it is the first, too
            format!(
                "if ({{{{IS_BIAS_FIRST}}}}) {{\n{}}} else {{\n{}}}\n",
                each_row(TILE, "s{r} = fma(vec4<f32>(params.scale), s{r}, bias{r});"),
                each_row(TILE, "s{r} = params.scale * s{r};")
            ),
        ]
        .concat()
    }

    /// Generates the largest scores of rows of forward; of partial tiles those of visible pairs.
    fn maxima(self) -> String {
        let load = each_row(TILE, "words[{r}] = atomicLoad(&visible_bits[4u * ty + {r}u]);");
        let masked = "let visible{r} =
    four_bits(words[{r}] >> (4u * tx)) & is_not_negative_infinity(bias{r});
tile_max[{r}] =
    max(tile_max[{r}], greatest(select(vec4<f32>(-3.4028234e38), s{r}, visible{r})));";
        let [masked, full] = [masked, "tile_max[{r}] = max(tile_max[{r}], greatest(s{r}));"]
            .map(|line| each_row(TILE, line));
        let hide = self.hide("words[{r}] >> (4u * tx)");
        format!(
            "if (is_partial) {{
{load}{masked}{hide}workgroupBarrier();
{load}}} else {{
{full}}}
"
        )
    }

    /// Generates `d` ← dX and, if rows are keys, `keep` ← P.
    fn gradients(self) -> String {
        let [max, factor, delta, share] =
            ["x", "y", "z", "w"].map(|element| self.statistics(&format!("stats{{r}}.{element}")));
        let step = if self == Self::Keys {
            format!(
                "d{{r}} = e * fma(keep{{r}}, d{{r}}, -{delta});\n    keep{{r}} = keep{{r}} * e;"
            )
        } else {
            format!("d{{r}} = e * fma({factor}, d{{r}}, -{delta});")
        };
        each_row(
            TILE,
            &format!(
                "{{
    let e = {{{{EXPONENTIALS}}}}(s{{r}} - {max});
    {step}
}}"
            ),
        ) + &part(
            "{{IS_UNNORMALIZED}}",
            &format!("d{{r}} = d{{r}} - select(vec4<f32>(0.0), {share}, s{{r}} == {max});"),
        ) + &part("{{HAS_SOFT_CAP}}", "d{r} = d{r} * slope{r};")
    }

    /// Generates `s` ← dX and, if rows are keys, `d` ← P, of visible pairs. Queries without a
    /// visible key have none.
    fn mask(self) -> String {
        let [first_query, first_key] = self.first();
        let words = each_row(
            TILE,
            &format!(
                "let word{{r}} =
    atomicLoad(&visible_bits[{first_query} + {{r}}u]) >> ({first_key});
let bits{{r}} = select(word{{r}}, 0u, is_positive_infinity(stats{{r}}.x));"
            ),
        );
        let (bits, masked, full) = if self == Self::Keys {
            (
                "((vec4<u32>(bits0, bits1, bits2, bits3) & vec4<u32>(1u << {r}u)) \
                 != vec4<u32>(0u))",
                "s{r} = select(vec4<f32>(0.0), d{r}, visible{r});
d{r} = select(vec4<f32>(0.0), keep{r}, visible{r});",
                "s{r} = d{r};\nd{r} = keep{r};",
            )
        } else {
            (
                "four_bits(bits{r})",
                "s{r} = select(vec4<f32>(0.0), d{r}, visible{r});",
                "s{r} = d{r};",
            )
        };
        let visible = format!("let visible{{r}} = {bits} & is_not_negative_infinity(bias{{r}});");
        let [visible, masked, full] =
            [visible.as_str(), masked, full].map(|line| each_row(TILE, line));
        let hide = self.hide("word{r}");
        format!("if (is_partial) {{\n{words}{visible}{masked}{hide}}} else {{\n{full}}}\n")
    }

    /// Generates the change of the tile mask: pairs that are not in `visible` are masked. `word` is
    /// an expression for the bits of query `{r}`, from the register tile's first key on.
    fn hide(self, word: &str) -> String {
        let [first_query, first_key] = self.first();
        let shown = if self == Self::Keys {
            "    shown = shown | select(vec4<u32>(0u), vec4<u32>(1u << {r}u), visible{r});"
        } else {
            "    shown[{r}] = bits_of_four(visible{r});"
        };
        let clear = format!(
            "    atomicAnd(&visible_bits[{first_query} + {{r}}u],
        ~(({word} & ~shown[{{r}}] & 15u) << ({first_key})));"
        );
        format!(
            "if (!all(visible0 & visible1 & visible2 & visible3)) {{
    var shown = vec4<u32>(0u);
{}{}}}
",
            each_row(TILE, shown),
            each_row(TILE, &clear)
        )
    }
}
