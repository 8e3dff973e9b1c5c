//! Tensors of vectors as the tile kernels load them, and the layout of their tile masks.

use std::fmt::Write;

use super::Storage;

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
    pub(super) fn functions(&self, storage: Storage, words: &str) -> String {
        let Self { name, rows, dim } = self;
        let load = storage.load(words);
        let mut text = format!("fn {name}_at(at: u32) -> f32 {{\n    return {load};\n}}\n");
        let start = format!(
            "params.{name}_base + batch * params.{name}_batch + head * params.{name}_head
            + row * params.{name}_row + c"
        );
        for (kind, counted, most, step) in [
            ("rows", "row", *rows, format!("params.{name}_row")),
            ("columns", "c", *dim, "1u".to_owned()),
        ] {
            let (other, other_most) = if kind == "rows" { ("c", *dim) } else { ("row", *rows) };
            let _infallible = write!(
                text,
                "fn {name}_{kind}(batch: u32, head: u32, row: u32, c: u32) -> vec4<f32> {{
    var four = vec4<f32>(0.0);
    if ({other} < params.{other_most}) {{
        let start = {start};
"
            );
            for n in 0..4 {
                let _infallible = write!(
                    text,
                    "        if ({counted} + {n}u < params.{most}) {{
            four[{n}] = {name}_at(start + {n}u * {step});
        }}
"
                );
            }
            text.push_str("    }\n    return four;\n}\n");
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
