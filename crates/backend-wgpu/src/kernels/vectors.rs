//! Tensors of vectors as the tile kernels load them, and the layout of their tile masks.

use super::TileVariant;

/// Distance of rows in workgroup memory, in vectors of 4: one more than the 8 of a row. Eight
/// invocations access eight rows at once, which then lie in different banks (32 banks of 4 bytes).
pub(super) const ROW_STEP: usize = 9;

/// Distance of rows of f16 elements in workgroup memory, in vectors of 4: two more than the 8 of a
/// row, so that eight rows lie in different banks and begin at multiples of 16 bytes.
pub(super) const HALF_STEP: usize = 10;

/// Distance of rows of `products`, in vectors of 4: two more than the 8 of a row. NVIDIA's GPUs
/// store a matrix of f32 two elements an invocation, four rows at once, which then lie in different
/// banks; one more would put half of them in the same, and an H200 ran forward at 0.97 of the speed
/// (benches/record/wgpu.md).
pub(super) const PRODUCT_STEP: usize = 10;

/// Row of a tile, of the first eight, that an invocation loads for the first products. Sixteen
/// neighbours store rows r and r + 4, which lie in different banks; r and r + 1 would share some.
pub(super) const LOADED_ROW: &str = "((lane >> 4u) | ((lane & 8u) >> 1u))";

/// A tensor of vectors: name in the text, number of rows, length of vectors.
pub(super) struct Vectors {
    pub(super) name: &'static str,
    pub(super) rows: &'static str,
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

    /// Generates `NAME_row`, the offset of a row, `NAME_last`, that of the last row, and
    /// `NAME_four`, four elements of a row from element `c` on; kernels with matrices have
    /// `NAME_halves`, the same in f16. Offsets count elements, or fours of them.
    ///
    /// Without branches: rows and elements beyond the chunk and the vector are clamped. A branch
    /// around each load would make the invocation wait for it before the next one. Pairs of rows
    /// beyond the chunk are masked, so what is loaded for them has no effect; elements beyond the
    /// vector are replaced where they matter.
    pub(super) fn functions(&self, words: &str, variant: TileVariant) -> String {
        let Self { name, dim, .. } = self;
        let TileVariant { storage, unpacks, aligned, .. } = variant;
        let on_matrices = variant.used_matrices().is_some();
        if variant.binds_halves() {
            // the bits of f16 elements reach workgroup memory without a conversion
            return self.offset_functions(variant)
                + &format!(
                    "fn {name}_halves(row: u32, c: u32) -> vec4<f16> {{
    return {words}[row + (min(c, params.{dim} - 4u) >> 2u)];
}}
fn {name}_four(row: u32, c: u32) -> vec4<f32> {{
    return vec4<f32>({name}_halves(row, c));
}}
"
                );
        }
        let four = if aligned {
            let four = storage.load_four("four", unpacks);
            let at = format!("min(c, params.{dim} - 4u)");
            let at = if variant.counts_fours() {
                format!("row + ({at} >> 2u)")
            } else {
                format!("(row + {at}) >> 2u")
            };
            format!("    let four = {words}[{at}];\n    return {four};\n")
        } else {
            let mut text = format!("    let last = params.{dim} - 1u;\n");
            for n in 0..4 {
                let at = format!("row + min(c + {n}u, last)");
                text += &format!("    let e{n} = {};\n", storage.load(words, &at, unpacks));
            }
            text + "    return vec4<f32>(e0, e1, e2, e3);\n"
        };
        let mut text = format!("fn {name}_four(row: u32, c: u32) -> vec4<f32> {{\n{four}}}\n");
        if on_matrices {
            text += &format!(
                "fn {name}_halves(row: u32, c: u32) -> vec4<f16> {{
    return vec4<f16>({name}_four(row, c));
}}
"
            );
        }
        self.offset_functions(variant) + &text
    }

    fn offset_functions(&self, variant: TileVariant) -> String {
        let (name, rows, head) = (self.name, self.rows, self.head());
        // bases and strides of aligned kernels are multiples of 4
        let shift = if variant.counts_fours() { " >> 2u" } else { "" };
        if self.is_packed(variant) {
            return format!(
                "fn {name}_packed(batch: u32, head: u32, first: u32, row: u32) -> u32 {{
    return (params.{name}_base + batch * params.{name}_batch
        + head_of(head, row) * params.{name}_head
        + min(query_of(first, row), params.queries - 1u) * params.{name}_row){shift};
}}
"
            );
        }
        format!(
            "fn {name}_row(batch: u32, {head}: u32, row: u32) -> u32 {{
    return ((params.{name}_base + batch * params.{name}_batch + {head} * params.{name}_head){shift})
        + row * (params.{name}_row{shift});
}}
fn {name}_last(batch: u32, {head}: u32) -> u32 {{
    return {name}_row(batch, {head}, params.{rows} - 1u);
}}
"
        )
    }

    /// Generates the offsets of the rows that an invocation loads of a workgroup's own tile, for
    /// declaration before the loop over the other side. Each takes a division if queries are
    /// packed. Kernels with matrices issue few other instructions; those of multiply-adds need the
    /// registers.
    pub(super) fn own_rows(&self, variant: TileVariant) -> String {
        let tile = variant.used_register_tile();
        let name = self.name;
        let numbers = 0..tile.loads();
        let loaded = if variant.used_matrices().is_some() { LOADED_ROW } else { "(lane >> 3u)" };
        if self.is_packed(variant) {
            let row = |n| {
                let row = n * tile.load_step();
                format!("{name}_packed(batch, head, first, {loaded} + {row}u)")
            };
            return numbers.map(|n| format!("let own_{name}_{n} = {};\n", row(n))).collect();
        }
        if variant.used_matrices().is_none() {
            return String::new();
        }
        let head = self.head();
        let last = format!("{name}_last(batch, {head})");
        let row = |n| {
            let step = self.distance(variant, n * tile.load_step());
            format!("min({name}_row(batch, {head}, first + {loaded}) + {step}, {last})")
        };
        numbers.map(|n| format!("let own_{name}_{n} = {};\n", row(n))).collect()
    }

    fn is_packed(&self, variant: TileVariant) -> bool {
        variant.decodes && self.rows == "queries"
    }

    /// Distance of rows, as an offset.
    pub(super) fn distance(&self, variant: TileVariant, rows: usize) -> String {
        let name = self.name;
        if variant.counts_fours() {
            format!("{rows}u * (params.{name}_row >> 2u)")
        } else {
            format!("{rows}u * params.{name}_row")
        }
    }

    /// Generates the offsets of the rows that an invocation loads of a tile: declarations of the
    /// names that begin with `side`, and an expression per row. The left tile, which is the own
    /// one, has the rows of [`Self::own_rows`].
    fn loaded_rows(&self, variant: TileVariant, side: &str) -> (String, Vec<String>) {
        let numbers = 0..variant.used_register_tile().loads();
        let is_own = side == "left" && variant.used_matrices().is_some();
        if is_own || self.is_packed(variant) {
            let rows = numbers.map(|n| format!("own_{}_{n}", self.name));
            return (String::new(), rows.collect());
        }
        // one register, rather than one per row
        let first = if side == "left" { "first" } else { "column" };
        let [row, last, step] = self.offsets(variant, first);
        let declared = format!(
            "    let {side}_row = {row};
    let {side}_last = {last};
    let {side}_step = {step};
"
        );
        let row = |n| format!("min({side}_row + {n}u * {side}_step, {side}_last)");
        (declared, numbers.map(row).collect())
    }

    /// Expressions for the offset of an invocation's first row, for that of the last row of all,
    /// and for the distance of its rows, in a tile that begins at row `first`.
    pub(super) fn offsets(&self, variant: TileVariant, first: &str) -> [String; 3] {
        let (name, head) = (self.name, self.head());
        [
            format!("{name}_row(batch, {head}, {first} + vector)"),
            format!("{name}_last(batch, {head})"),
            self.distance(variant, variant.used_register_tile().load_step()),
        ]
    }
}

/// Generates the copy of rows of the tile from `first` on and of that from `column` on to workgroup
/// memory: declarations, and a loop over each 32 elements up to its stores. Four elements are read
/// by the functions of this kind (`four`, f32, or `halves`, f16); `place` is where load `n` of a
/// side is stored.
pub(super) fn stage_rows(
    variant: TileVariant,
    [left, right]: [&Vectors; 2],
    kind: &str,
    place: impl Fn(&str, usize) -> String,
) -> [String; 2] {
    let zero = if kind == "halves" { "vec4<f16>(0.0h)" } else { "vec4<f32>(0.0)" };
    let [mut rows, mut loads, mut zeros, mut stores] = [const { String::new() }; 4];
    for (side, of) in [("left", left), ("right", right)] {
        let (declared, offsets) = of.loaded_rows(variant, side);
        let name = of.name;
        rows += &declared;
        // all loads before the first store, so that they are in flight together
        for (n, offset) in offsets.iter().enumerate() {
            loads += &format!("        var {side}_{n} = {name}_{kind}({offset}, c + element);\n");
            zeros += &format!("            {side}_{n} = select({zero}, {side}_{n}, inside);\n");
            stores += &format!("        {} = {side}_{n};\n", place(side, n));
        }
    }
    let dim = left.dim;
    let stage = format!(
        "    for (var c = 0u; c < params.{dim}; c = c + 32u) {{
{loads}        if (c + 32u > params.{dim}) {{
            let inside =
                vec4<u32>(c + element) + vec4<u32>(0u, 1u, 2u, 3u) < vec4<u32>(params.{dim});
{zeros}        }}
        workgroupBarrier();
{stores}        workgroupBarrier();
"
    );
    [rows, stage]
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

    /// Expression for `b`, or 0 if pair (row `r` of the invocation, `j`) is masked.
    pub(super) fn masked(self, r: usize) -> String {
        format!("select(vec4<f32>(0.0), b, ({}) != 0u)", self.bit(r))
    }
}
