//! Texts of the tile kernels for compilers that run without a device.

use annulus_core::DType;

use super::{Access, Source, Storage, TileVariant, Variant};
use crate::Level;

/// A kernel as it is passed to a driver.
#[derive(Debug, Clone)]
pub struct KernelText {
    /// Pass, element type, dim, and `simple` or `general` (with a score epilogue).
    pub name: String,
    /// The text, with the entry point `main`.
    pub wgsl: String,
    /// True for each storage buffer, from binding 1 on, that the kernel only reads. Binding 0 has
    /// the uniform parameters.
    pub read_only: Vec<bool>,
    /// True if the shader checks indices.
    pub checked: bool,
}

impl KernelText {
    /// Generates the kernels of both passes at [`Level::Plain`] for one type and one dim of heads
    /// and values; empty for f64.
    pub fn of_passes(dtype: DType, dim: usize) -> Vec<Self> {
        let Some(storage) = Storage::of(dtype) else { return Vec::new() };
        let of_passes = |general: bool| {
            let tile = TileVariant {
                storage,
                unpacks: storage == Storage::F16,
                head_groups: TileVariant::groups(dim),
                value_groups: TileVariant::groups(dim),
                general,
                level: Level::Plain,
                matrices: None,
            };
            [
                Variant::Forward(tile),
                Variant::BackwardQueries(tile),
                Variant::BackwardKeys(tile, false),
            ]
        };
        let text = |variant: Variant| {
            let Source { wgsl, bindings, .. } = variant.source();
            let checked = variant.is_general();
            let kind = if checked { "general" } else { "simple" };
            Self {
                name: format!("{} {dtype} {dim} {kind}", variant.name()),
                wgsl,
                read_only: bindings.into_iter().map(|access| access == Access::Read).collect(),
                checked,
            }
        };
        [false, true].into_iter().flat_map(of_passes).map(text).collect()
    }
}
