//! Tensors of vectors as the tile kernels load them, and the layout of their tile masks.

use std::fmt::Write;

/// A tensor of vectors: name in the text, number of rows, length of vectors.
pub(super) struct Vectors {
    pub(super) name: &'static str,
    rows: &'static str,
    pub(super) dim: &'static str,
}

pub(super) const Q: Vectors = Vectors { name: "q", rows: "queries", dim: "head_dim" };
pub(super) const K: Vectors = Vectors { name: "k", rows: "keys", dim: "head_dim" };
pub(super) const V: Vectors = Vectors { name: "v", rows: "keys", dim: "value_dim" };
pub(super) const DOUT: Vectors = Vectors { name: "dout", rows: "queries", dim: "value_dim" };

impl Vectors {
    /// Name of the head index of these vectors.
    pub(super) fn head(&self) -> &'static str {
        if self.rows == "keys" { "kv_head" } else { "head" }
    }

    /// Generates `NAME_rows` (one element of four rows) and `NAME_columns` (four elements of one
    /// row); 0 beyond the chunk and the vector.
    ///
    /// Without branches: the indices are clamped, and what lies beyond is replaced after the loads.
    /// A branch around each load would make the invocation wait for it before the next one.
    pub(super) fn functions(&self, load: &str) -> String {
        let Self { name, rows, dim } = self;
        let head = self.head();
        let mut text = format!(
            "fn {name}_at(at: u32) -> f32 {{
    return {load};
}}
fn {name}_start(batch: u32, {head}: u32) -> u32 {{
    return params.{name}_base + batch * params.{name}_batch + {head} * params.{name}_head;
}}
"
        );
        for (kind, counted, fixed) in [("rows", "row", "c"), ("columns", "c", "row")] {
            let [most, fixed_most] = if kind == "rows" { [rows, dim] } else { [dim, rows] };
            let (step, fixed_step) = if kind == "rows" {
                (format!(" * params.{name}_row"), String::new())
            } else {
                (String::new(), format!(" * params.{name}_row"))
            };
            let loads: Vec<String> = (0..4)
                .map(|n| format!("{name}_at(start + min({counted} + {n}u, last){step})"))
                .collect();
            let _infallible = write!(
                text,
                "fn {name}_{kind}(batch: u32, {head}: u32, row: u32, c: u32) -> vec4<f32> {{
    let start = {name}_start(batch, {head}) + min({fixed}, params.{fixed_most} - 1u){fixed_step};
    let last = params.{most} - 1u;
    let four = vec4<f32>(
        {loads}
    );
    let inside = vec4<u32>({counted}) + vec4<u32>(0u, 1u, 2u, 3u) < vec4<u32>(params.{most});
    return select(vec4<f32>(0.0), four, inside & vec4<bool>({fixed} < params.{fixed_most}));
}}
",
                loads = loads.join(",\n        ")
            );
        }
        text
    }
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
