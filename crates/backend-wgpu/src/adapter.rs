//! Adapters of this machine and their capabilities.
//!
//! Limits of a device that the launches of tile kernels obey.
//!
//! Device features that the kernels use.
//!
//! Values that a user forces by environment variables.

use std::sync::MutexGuard;

use annulus_core::{Error, Result};
use wgpu::{AdapterInfo, CooperativeMatrixProperties, CooperativeScalarType, Features};

use crate::{
    QueryTileSize, RegisterTile,
    choice::{AdapterKind, PROOFS, choose},
    open_device::{instance, turn},
};

/// Reason why [`crate::Gpu::list`] is empty.
pub const NO_ADAPTER: &str = "no Vulkan, Metal or DX12 driver found (wgpu lists no adapter without \
     a graphics queue, such as AMD Instinct, and DX12 needs dxcompiler.dll)";

/// Subgroup size of all Apple GPUs. wgpu reports 4 to 64 for any Metal device.
const APPLE_SUBGROUP: u32 = 32;

/// An adapter of this machine, as returned by [`crate::Gpu::list`].
#[derive(Debug, Clone)]
pub struct Adapter {
    /// Index for [`crate::Options::number`].
    pub number: usize,
    /// Name reported by the driver.
    pub name: String,
    /// Driver and its version.
    pub driver: String,
    /// Vulkan, Metal or DX12.
    pub api: String,
    /// True for an adapter that computes on the CPU.
    pub software: bool,
    /// Smallest and largest subgroup size.
    pub subgroups: (u32, u32),
    /// Levels that the adapter can run; any of them can be requested.
    pub levels: Vec<Level>,
    /// Level that is used by default.
    pub chosen: Level,
    /// Record file of the measurement that justifies `chosen`; `None` for [`Level::Plain`].
    pub record: Option<&'static str>,
    /// Register tile that is used by default.
    pub register_tile: RegisterTile,
    /// Query tile that large forward launches have by default at [`Level::Matrix`]; `None` if the
    /// adapter cannot run that level. At other levels it is [`QueryTileSize::Of32`].
    pub query_tile: Option<QueryTileSize>,
}

impl Adapter {
    /// Returns true if both are of the same model, with the same driver and API.
    pub fn is_same_kind(&self, other: &Self) -> bool {
        let kind = |of: &Self| (of.name.clone(), of.driver.clone(), of.api.clone());
        kind(self) == kind(other)
    }
}

/// Lists the adapters of this machine: of a GPU that Vulkan and DX12 offer, Vulkan's. `turn` is the
/// guard of [`turn()`].
pub(crate) fn adapters(turn: &MutexGuard<'static, ()>) -> Vec<wgpu::Adapter> {
    let all = pollster::block_on(instance(turn).enumerate_adapters(wgpu::Backends::all()));
    let infos: Vec<_> = all.iter().map(wgpu::Adapter::get_info).collect();
    let wanted = |(adapter, info)| (!is_second(info, &infos)).then_some(adapter);
    all.into_iter().zip(&infos).filter_map(wanted).collect()
}

/// True for a DX12 adapter of a GPU that Vulkan offers, too.
fn is_second(info: &AdapterInfo, all: &[AdapterInfo]) -> bool {
    let same = |other: &AdapterInfo| (other.vendor, other.device) == (info.vendor, info.device);
    info.backend == wgpu::Backend::Dx12
        && all.iter().any(|other| other.backend == wgpu::Backend::Vulkan && same(other))
}

/// Returns the smallest and the largest subgroup size of an adapter.
pub(crate) fn subgroup_sizes(info: &AdapterInfo) -> (u32, u32) {
    if info.backend == wgpu::Backend::Metal && info.name.starts_with("Apple") {
        return (APPLE_SUBGROUP, APPLE_SUBGROUP);
    }
    (info.subgroup_min_size, info.subgroup_max_size)
}

/// Returns the cooperative matrices that the kernels can use on an adapter.
pub(crate) fn matrices(adapter: &wgpu::Adapter) -> Option<Matrices> {
    let (least, most) = subgroup_sizes(&adapter.get_info());
    Matrices::of_device(&adapter.cooperative_matrix_properties(), least, most)
}

/// Returns the levels that an adapter can run.
fn levels(adapter: &wgpu::Adapter) -> Vec<Level> {
    let (least, _) = subgroup_sizes(&adapter.get_info());
    Level::of_device(adapter.features(), least, matrices(adapter))
}

/// Returns the level that a record shows to be the fastest on such adapters, if one does.
pub(crate) fn proven_level(adapter: &wgpu::Adapter) -> Option<Level> {
    choose(PROOFS, &AdapterKind::of(&adapter.get_info()), &levels(adapter)).map(|proof| proof.level)
}

/// Lists the adapters of this machine; empty without a driver.
pub(crate) fn list() -> Vec<Adapter> {
    let describe = |(number, adapter): (usize, wgpu::Adapter)| {
        let info = adapter.get_info();
        let subgroups = subgroup_sizes(&info);
        let levels = levels(&adapter);
        let proof = choose(PROOFS, &AdapterKind::of(&info), &levels);
        let register_tile = RegisterTile::of_adapter(&info);
        let has_matrices = levels.contains(&Level::Matrix);
        let query_tile = has_matrices.then(|| QueryTileSize::of_adapter(&info, Level::Matrix));
        Adapter {
            number,
            name: info.name,
            driver: format!("{} {}", info.driver, info.driver_info),
            api: info.backend.to_string(),
            software: info.device_type == wgpu::DeviceType::Cpu,
            subgroups,
            levels,
            chosen: proof.map_or(Level::Plain, |proof| proof.level),
            record: proof.map(|proof| proof.record),
            register_tile,
            query_tile,
        }
    };
    let Ok(turn) = turn() else { return Vec::new() };
    adapters(&turn).into_iter().enumerate().map(describe).collect()
}

/// Limits of a device that chunks obey.
#[derive(Debug, Clone)]
pub(crate) struct ChunkLimits {
    /// Name of the device.
    pub(crate) device: String,
    /// Upper bound of a binding in bytes.
    pub(crate) binding_bytes: u64,
    /// Alignment of binding offsets in bytes.
    pub(crate) alignment: u64,
    /// Upper bound of loop iterations per kernel, if any.
    pub(crate) loop_steps: Option<u64>,
    /// Upper bound of the work of a part in FLOPs, if it is less than the default.
    pub(crate) part_work: Option<u64>,
    /// Register tile of the kernels, which determines their work.
    pub(crate) register_tile: RegisterTile,
}

/// Returns the upper bound of a binding in bytes. Kernels compute offsets within a binding in 32
/// bits, in elements of at least 2 bytes: a bound of 2^32 bytes leaves half of the range to offsets
/// of rows beyond the last, which are computed before they are clamped.
pub(crate) fn binding_bytes(limits: &wgpu::Limits) -> u64 {
    limits.max_storage_buffer_binding_size.min(limits.max_buffer_size).min(1 << 32)
}

/// Device features that the tile kernels use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Level {
    /// Row reductions through workgroup memory: any device.
    Plain,
    /// Row reductions by subgroup shuffles and, for f16 inputs, cooperative matrices (experimental
    /// in wgpu): all products of both passes but those of dbias, with f32 accumulators. Used on
    /// request, or if a record shows that it is faster.
    Matrix,
}

impl Level {
    /// All levels, lowest first.
    pub const ALL: [Self; 2] = [Self::Plain, Self::Matrix];

    /// Environment variable that names the level, if the caller requests none.
    pub const VARIABLE: &'static str = "ANNULUS_WGPU_LEVEL";

    /// Reads the level from [`Level::VARIABLE`]; `None` if it is not set.
    ///
    /// # Errors
    /// [`annulus_core::Error::InvalidArgument`] if its value names no level.
    pub fn forced() -> Result<Option<Self>> {
        forced(Self::VARIABLE, Self::ALL, Self::name)
    }

    /// Name in [`Level::VARIABLE`] and in messages.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Matrix => "matrix",
        }
    }

    /// Lists the levels that a device with these properties can run, lowest first.
    pub(crate) fn of_device(
        features: Features,
        smallest_subgroup: u32,
        matrices: Option<Matrices>,
    ) -> Vec<Self> {
        let multiplies = features.contains(Matrices::FEATURES) && matrices.is_some();
        let runs = |level: &Self| match level {
            Self::Plain => true,
            Self::Matrix => smallest_subgroup >= 8 && multiplies,
        };
        Self::ALL.into_iter().filter(runs).collect()
    }
}

/// Cooperative matrices of a device: f16 × f16 accumulated in f32, square.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Matrices {
    /// Rows, equal to columns.
    size: u32,
    /// Subgroups of a workgroup that have the largest size of the device.
    subgroups: u32,
    /// True if a driver may run a kernel with subgroups smaller than the largest.
    has_smaller_subgroups: bool,
}

impl Matrices {
    /// wgpu features that kernels with cooperative matrices require.
    pub(crate) const FEATURES: Features = Features::SUBGROUP
        .union(Features::SUBGROUP_BARRIER)
        .union(Features::SHADER_F16)
        .union(Features::EXPERIMENTAL_COOPERATIVE_MATRIX);

    /// Selects the largest matrices that a device offers, given its range of subgroup sizes.
    ///
    /// A workgroup of 64 consists of whole subgroups of any of these sizes, and a tile has at least
    /// one matrix per subgroup.
    pub(crate) fn of_device(
        offered: &[CooperativeMatrixProperties],
        smallest: u32,
        largest: u32,
    ) -> Option<Self> {
        let fits = |&size: &u32| {
            let shape = |offer: &CooperativeMatrixProperties| {
                [offer.m_size, offer.n_size, offer.k_size] == [size; 3]
            };
            let types = |offer: &CooperativeMatrixProperties| {
                (offer.ab_type, offer.cr_type)
                    == (CooperativeScalarType::F16, CooperativeScalarType::F32)
            };
            smallest >= size
                && largest <= 64
                && offered.iter().any(|offer| shape(offer) && types(offer))
        };
        let size = [16, 8].into_iter().find(fits)?;
        let of_largest = Self::new(size, largest);
        Some(if smallest == largest { of_largest } else { of_largest.with_smaller_subgroups() })
    }

    /// Matrices of `size` rows, in subgroups of `invocations` of a workgroup of 64.
    pub(crate) const fn new(size: u32, invocations: u32) -> Self {
        Self { size, subgroups: 64 / invocations, has_smaller_subgroups: false }
    }

    /// The same matrices on a device whose driver may choose smaller subgroups.
    pub(crate) const fn with_smaller_subgroups(self) -> Self {
        Self { has_smaller_subgroups: true, ..self }
    }

    /// True if kernels must work with subgroups smaller than the largest, too.
    pub(crate) const fn has_smaller_subgroups(self) -> bool {
        self.has_smaller_subgroups
    }

    /// Subgroups of a workgroup that have the largest size of the device. If it has several sizes,
    /// a driver may choose a smaller one: wgpu cannot request a size.
    pub(crate) const fn subgroups(self) -> u32 {
        self.subgroups
    }

    /// Rows, equal to columns.
    pub(crate) const fn size(self) -> u32 {
        self.size
    }
}

/// Reads the one of `all` that the environment variable `variable` names; `None` if it is not set.
///
/// # Errors
/// [`Error::InvalidArgument`] if its value names none.
pub(crate) fn forced<T: Copy, const COUNT: usize>(
    variable: &'static str,
    all: [T; COUNT],
    name: impl Fn(T) -> &'static str,
) -> Result<Option<T>> {
    let Some(value) = std::env::var_os(variable) else { return Ok(None) };
    let named = all.into_iter().find(|&one| value == name(one));
    let names = all.map(name).join(", ");
    named
        .map(Some)
        .ok_or_else(|| Error::invalid(variable, value.display(), format!("one of {names}")))
}

#[cfg(test)]
mod tests {
    use wgpu::{Backend, DeviceType};

    use super::*;

    fn info(backend: Backend, name: &str, device: u32) -> AdapterInfo {
        AdapterInfo {
            name: name.to_owned(),
            vendor: 0x1002,
            device,
            ..AdapterInfo::new(DeviceType::DiscreteGpu, backend)
        }
    }

    #[test]
    fn a_gpu_is_listed_once() {
        let all = [
            info(Backend::Vulkan, "a", 1),
            info(Backend::Vulkan, "a", 1),
            info(Backend::Dx12, "a", 1),
            info(Backend::Dx12, "b", 2),
        ];
        // two equal cards are two adapters
        assert_eq!(all.each_ref().map(|info| is_second(info, &all)), [false, false, true, false]);
    }

    #[test]
    fn apple_gpus_have_subgroups_of_32() {
        let reported =
            |info: AdapterInfo| AdapterInfo { subgroup_min_size: 4, subgroup_max_size: 64, ..info };
        let sizes = |backend, name| subgroup_sizes(&reported(info(backend, name, 0)));
        assert_eq!(sizes(Backend::Metal, "Apple M3 Max"), (32, 32));
        assert_eq!(sizes(Backend::Metal, "AMD Radeon Pro 5500M"), (4, 64));
        assert_eq!(sizes(Backend::Vulkan, "Apple M1 (G13G B1)"), (4, 64));
    }
}

#[cfg(test)]
mod limits_tests {
    use super::*;

    #[test]
    fn offsets_within_a_binding_have_31_bits() {
        let limits = |binding, buffer| wgpu::Limits {
            max_storage_buffer_binding_size: binding,
            max_buffer_size: buffer,
            ..wgpu::Limits::default()
        };
        for large in [1 << 32, 1 << 33, 1 << 40] {
            assert_eq!((binding_bytes(&limits(large, large)) / 2 - 1) >> 31, 0, "{large}");
        }
        assert_eq!(binding_bytes(&limits(1000, 1 << 40)), 1000);
        assert_eq!(binding_bytes(&limits(1 << 40, 1000)), 1000);
    }
}

#[cfg(test)]
mod level_tests {
    use super::*;

    fn offer(size: u32, cr_type: CooperativeScalarType) -> CooperativeMatrixProperties {
        let ab_type = CooperativeScalarType::F16;
        CooperativeMatrixProperties {
            m_size: size,
            n_size: size,
            k_size: size,
            ab_type,
            cr_type,
            saturating_accumulation: false,
        }
    }

    #[test]
    fn matrices_are_chosen_by_size_type_and_subgroup() {
        let f16 = CooperativeScalarType::F16;
        let f32 = CooperativeScalarType::F32;
        let both = [offer(8, f32), offer(16, f32)];
        assert_eq!(Matrices::of_device(&both, 32, 32), Some(Matrices::new(16, 32)));
        assert_eq!(
            Matrices::of_device(&both, 8, 32),
            Some(Matrices::new(8, 32).with_smaller_subgroups())
        );
        assert_eq!(Matrices::of_device(&both, 4, 32), None);
        assert_eq!(Matrices::new(8, 32).subgroups(), 2);
        assert_eq!(Matrices::new(16, 64).subgroups(), 1);
        assert_eq!(Matrices::new(16, 16).subgroups(), 4);
        assert_eq!(Matrices::of_device(&both, 64, 128), None);
        assert_eq!(Matrices::of_device(&[offer(16, f16)], 32, 32), None);
        assert_eq!(
            Matrices::of_device(
                &[CooperativeMatrixProperties { n_size: 8, ..offer(16, f32) }],
                32,
                32
            ),
            None
        );
    }

    #[test]
    fn levels_follow_from_subgroups_of_4_to_128() {
        let f32 = CooperativeScalarType::F32;
        let both = [offer(8, f32), offer(16, f32)];
        for (smallest, largest, levels) in [
            (4, 4, 1),
            (4, 32, 1),
            (8, 8, 2),
            (8, 32, 2),
            (16, 16, 2),
            (32, 32, 2),
            (32, 64, 2),
            (64, 64, 2),
            // a subgroup is larger than a workgroup, which matrices need whole
            (64, 128, 1),
            (128, 128, 1),
        ] {
            let matrices = Matrices::of_device(&both, smallest, largest);
            let found = Level::of_device(Matrices::FEATURES, smallest, matrices);
            assert_eq!(found, Level::ALL[..levels], "{smallest} to {largest}");
        }
    }

    #[test]
    fn a_device_runs_the_levels_that_its_features_allow() {
        assert_eq!(Level::of_device(Matrices::FEATURES, 8, Some(Matrices::new(8, 8))), Level::ALL);
        assert_eq!(Level::of_device(Features::empty(), 32, None), [Level::Plain]);
        assert_eq!(Level::of_device(Matrices::FEATURES, 4, None), [Level::Plain]);
        let without_matrices = Level::of_device(Features::SUBGROUP, 8, Some(Matrices::new(8, 8)));
        assert_eq!(without_matrices, [Level::Plain]);
    }
}
