//! Texts of the tile kernels for compilers that run without a device.

use annulus_core::DType;

use super::{Access, Source, Storage, TileVariant, Variant};
use crate::{Level, level::Matrices};

/// A kernel as it is passed to a driver.
#[derive(Debug, Clone)]
pub struct KernelText {
    /// Pass, level, element type, dim, and `simple` or `general` (with a score epilogue).
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
    /// Generates the kernels of both passes, at each level at which they differ, for one type and
    /// one dim of heads and values; empty for f64.
    pub fn of_passes(dtype: DType, dim: usize) -> Vec<Self> {
        let Some(storage) = Storage::of(dtype) else { return Vec::new() };
        let mut all = Vec::new();
        for general in [false, true] {
            for (level, matrices) in [
                (Level::Plain, None),
                (Level::Subgroup, None),
                (Level::Matrix, Some(Matrices::new(16, 64))),
            ] {
                let tile = TileVariant {
                    storage,
                    unpacks: storage == Storage::F16,
                    aligned: true,
                    head_groups: TileVariant::groups(dim),
                    value_groups: TileVariant::groups(dim),
                    general,
                    level: if level == Level::Plain { level } else { Level::Subgroup },
                    matrices,
                };
                let forward = Variant::Forward(tile);
                let backward = [Variant::BackwardQueries(tile), Variant::BackwardKeys(tile, false)];
                let variants = match level {
                    Level::Plain => [forward].into_iter().chain(backward).collect(),
                    // only forward has reductions
                    Level::Subgroup => vec![forward],
                    Level::Matrix if storage == Storage::F16 => {
                        [forward].into_iter().chain(backward).collect()
                    }
                    Level::Matrix => Vec::new(),
                };
                let masks = if general { "general" } else { "simple" };
                let name =
                    |of: Variant| format!("{} {} {dtype} {dim} {masks}", of.name(), level.name());
                all.extend(variants.into_iter().map(|of| Self::new(of, name(of), level)));
            }
        }
        all
    }

    fn new(variant: Variant, name: String, level: Level) -> Self {
        let Source { wgsl, bindings, .. } = variant.source();
        let read_only = bindings.into_iter().map(|access| access == Access::Read).collect();
        Self { name, level, wgsl, read_only }
    }
}
