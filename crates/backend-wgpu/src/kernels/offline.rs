//! Texts of the tile kernels for compilers that run without a device.

use annulus_core::{DType, Error, Result};

use super::{Access, Epilogue, KernelVariant, Source, Storage, TileVariant, matrices};
use crate::{Level, RegisterTile, choice::Matrices, memory_model};

/// A kernel as it is passed to a driver.
#[derive(Debug, Clone)]
pub struct KernelText {
    /// Pass, level, element type, dim and score epilogue.
    pub name: String,
    /// Lowest level that runs the kernel.
    pub level: Level,
    /// The text, with the entry point `main`.
    pub wgsl: String,
    /// True for each storage buffer, from binding 1 on, that the kernel only reads. Binding 0 has
    /// the uniform parameters.
    pub read_only: Vec<bool>,
}

impl KernelText {
    /// Generates the kernels of both passes at level plain and, for f16, with matrices, for one
    /// type and one dim of heads and values; empty for f64. Dims above 128, and decoding, with the
    /// simplest and the most general epilogue only. Matrices with [`RegisterTile::FourRows`] only,
    /// for tiles of 32 queries.
    pub fn of_passes(dtype: DType, dim: usize, register_tile: RegisterTile) -> Vec<Self> {
        let Some(storage) = Storage::of(dtype) else { return Vec::new() };
        let mut all = Vec::new();
        for epilogue in Epilogue::ALL {
            let is_usual = matches!(epilogue, Epilogue::Simple | Epilogue::General);
            if dim > 128 && !is_usual {
                continue;
            }
            for level in Level::ALL {
                let has_matrices =
                    storage == Storage::F16 && register_tile == RegisterTile::FourRows;
                if level == Level::Matrix && !has_matrices {
                    continue;
                }
                // of navi31, whose subgroups have 32 or 64 invocations
                let matrices = (level == Level::Matrix)
                    .then(|| Matrices::new(16, 64).with_smaller_subgroups());
                let tile = TileVariant {
                    storage,
                    unpacks: storage == Storage::F16,
                    aligned: true,
                    head_groups: TileVariant::groups(dim),
                    value_groups: TileVariant::groups(dim),
                    epilogue,
                    has_u64: true,
                    decodes: false,
                    register_tile,
                    tall: false,
                    level,
                    matrices,
                };
                let passes = [
                    KernelVariant::Forward(tile),
                    KernelVariant::BackwardQueries(tile),
                    KernelVariant::BackwardKeys(tile, false),
                ];
                let decode = KernelVariant::Forward(TileVariant { decodes: true, ..tile });
                let decoding = is_usual.then_some(decode);
                let name = |of: &str| {
                    let level = level.name();
                    format!("{of} {level} {dtype} {dim} {}", epilogue.name())
                };
                let variants = passes.into_iter().chain(decoding);
                all.extend(variants.map(|of| Self::new(of, name(of.name()), level)));
            }
        }
        all
    }

    /// Returns the kernel as it runs on full tiles of vectors of `dim` elements: without the code
    /// for partial tiles and non-finite elements, with the loops of its products unrolled, and with
    /// subgroups of 64, so that a compiler's estimate counts each instruction as often as it is
    /// executed: of a branch that is uniform it counts half.
    #[must_use]
    pub fn of_full_tiles(self, dim: usize) -> Self {
        let mut wgsl =
            self.wgsl.replace("let is_partial = mask_index != FULL_TILE", "let is_partial = false");
        for (condition, value) in [
            ("matrix_rounds = workgroupUniformLoad(&rounds).x;", "matrix_rounds = 4u;"),
            ("let rare_end = 16u * min(params.", "let rare_end = 0u * min(params."),
            // with an effect, or compilers remove the tests that lead to it
            (
                "let end = min(32u, params.",
                "acc_words[0] = vec4<f32>(0.0);\nlet end = min(0u, params.",
            ),
            ("if (are_one_block) {", "if (true) {"),
        ] {
            wgsl = wgsl.replace(condition, value);
        }
        for name in ["params.head_dim", "params.value_dim"] {
            wgsl = wgsl.replace(name, &format!("{dim}u"));
        }
        // elements that a product stages at once: of tall tiles 64
        for chunk in [32, 64] {
            let of_vector = format!("for (var c = 0u; c < {dim}u; c = c + {chunk}u) {{");
            wgsl = unrolled(&wgsl, &of_vector, "c", (0..dim).step_by(chunk));
        }
        wgsl = unrolled(&wgsl, "for (var four = 0u; four < 8u; four++) {", "four", 0..8);
        let of_philox = "for (var round_number = 3u; round_number < 10u; round_number++) {";
        wgsl = unrolled(&wgsl, of_philox, "round_number", 3..10);
        wgsl = unrolled(&wgsl, "for (var r = 0u; r < 4u; r++) {", "r", 0..4);
        Self { wgsl, ..self }
    }

    /// Translates a kernel with cooperative matrices to the SPIR-V module that the backend passes
    /// to Vulkan drivers; `None` for other kernels, which wgpu translates.
    ///
    /// # Errors
    /// [`Error::Internal`] if the text is not valid.
    pub fn module(&self) -> Option<Result<Vec<u32>>> {
        self.wgsl.starts_with(matrices::ENABLED).then(|| {
            let translation = memory_model::translate(&self.wgsl, false);
            translation.map(|translation| translation.spirv).map_err(Error::internal)
        })
    }

    fn new(variant: KernelVariant, name: String, level: Level) -> Self {
        let Source { wgsl, bindings, .. } = variant.source();
        let read_only = bindings.into_iter().map(|access| access == Access::Read).collect();
        Self { name, level, wgsl, read_only }
    }
}

/// Replaces each loop that begins with `head` by a block per value of its variable.
fn unrolled(
    text: &str,
    head: &str,
    variable: &str,
    values: impl Iterator<Item = usize> + Clone,
) -> String {
    let Some((before, rest)) = text.split_once(head) else { return text.to_owned() };
    let mut depth = 1;
    let end = rest.find(|c| {
        depth += match c {
            '{' => 1,
            '}' => -1,
            _ => 0,
        };
        depth == 0
    });
    let Some((body, after)) = end.map(|end| (&rest[..end], &rest[end + 1..])) else {
        return text.to_owned();
    };
    let copies: String =
        values.clone().map(|value| format!("{{\nlet {variable} = {value}u;\n{body}}}\n")).collect();
    format!("{before}{copies}{}", unrolled(after, head, variable, values))
}
