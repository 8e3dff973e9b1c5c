//! Generated parts of the tile kernels with dropout: the factors of a register tile, and the rounds
//! of Philox that depend on queries alone.

use super::{
    Epilogue, Orientation, TileVariant,
    products::{each_of, each_row},
};
use crate::RegisterTile;

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
    variant.used_matrices().is_some() && is_dropout || variant.has_backward_by_parts(groups)
}

/// Queries in the columns of a register tile of dropout alone.
pub(super) fn column_queries(variant: TileVariant) -> DropoutQueries {
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
