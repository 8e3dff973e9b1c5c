//! Default level of a device: above [`Level::Plain`] only if a record shows that the level is
//! faster. Default register tile: by the number of registers that the compiler uses.
//!
//! To add an entry to [`PROOFS`], run `wgpu-levels` on such an adapter and keep its
//! output in `benches/record/`. Every `speedup` over the level below must exceed 1, for every pass
//! whose kernels differ.
//!
//! Queries of a tile of forward.
//!
//! Register tiles of the kernels of multiply-adds.

use annulus_core::{Error, Result};
use wgpu::{AdapterInfo, Backend, CooperativeMatrixProperties, CooperativeScalarType, Features};

/// Adapters to which a measurement applies: those of one GPU model with one driver, because shader
/// compilers and architectures differ within a vendor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct AdapterKind<'a> {
    /// Vulkan, Metal or DX12: each has its own shader translation.
    pub(crate) api: Backend,
    /// Numbers of vendor and device, mostly of PCI; 0 on Metal.
    pub(crate) vendor: u32,
    pub(crate) device: u32,
    /// Name of the device.
    pub(crate) name: &'a str,
    /// Name of the driver, without its version.
    pub(crate) driver: &'a str,
}

impl<'a> AdapterKind<'a> {
    pub(crate) const fn of(info: &'a AdapterInfo) -> Self {
        let AdapterInfo { backend, vendor, device, name, driver, .. } = info;
        Self {
            api: *backend,
            vendor: *vendor,
            device: *device,
            name: name.as_str(),
            driver: driver.as_str(),
        }
    }
}

/// Vendor number of Intel.
const INTEL: u32 = 0x8086;

impl RegisterTile {
    /// Selects the register tile for an adapter: 2 × 4 if its compiler has 128 registers for an
    /// invocation, half of the usual, because kernels of 4 × 4 would spill registers to memory.
    ///
    /// * On Intel's GPUs an invocation of the narrowest subgroups, of 8 invocations or, from Xe2
    ///   on, 16, has 128 registers. Kernels of two rows, or of one in their place, do not spill
    ///   there, by Mesa's compiler (benches/record/wgpu-compilers.md). Metal reports
    ///   no vendor.
    /// * RADV of Mesa 22.3 cannot encode 16-bit operands in the upper half of the 256 registers of
    ///   RDNA3 and uses the lower half only: `vgpr_limit` of `init_program` in its `aco_ir.cpp`.
    ///   Mesa 23.0 uses all (benches/record/wgpu-compilers.md).
    pub fn of_adapter(info: &AdapterInfo) -> Self {
        let is_intel = match info.backend {
            Backend::Metal => info.name.starts_with("Intel"),
            _ => info.vendor == INTEL,
        };
        // Mesa 22.3 names RDNA3 by its numbers, GFX1100 to GFX1103
        let is_half_of_rdna3 = info.driver == "radv"
            && info.driver_info.starts_with("Mesa 22.3.")
            && info.name.contains("RADV GFX11");
        if is_intel || is_half_of_rdna3 { Self::TwoRows } else { Self::FourRows }
    }
}

/// A level shown to be faster by a record.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Proof {
    /// Adapters that were measured.
    pub(crate) adapters: AdapterKind<'static>,
    /// Level that was faster than every level below.
    pub(crate) level: Level,
    /// Record file.
    pub(crate) record: &'static str,
}

/// On an NVIDIA H200 `matrix` takes 0.33 to 0.56 of the time of `plain` for f16, and as long for
/// other types. No GPU of another vendor has been measured. On Mesa's lavapipe `matrix` takes a
/// third longer (benches/record/wgpu.md), so software adapters use `plain`.
pub(crate) const PROOFS: &[Proof] = &[Proof {
    adapters: AdapterKind {
        api: Backend::Vulkan,
        vendor: 0x10de,
        device: 0x2335,
        name: "NVIDIA H200",
        driver: "NVIDIA",
    },
    level: Level::Matrix,
    record: "benches/record/wgpu.md",
}];

/// Returns the proof of the highest available level for this kind of adapter; without one, the
/// default is [`Level::Plain`].
pub(crate) fn choose<'a>(
    proofs: &'a [Proof],
    kind: &AdapterKind<'_>,
    available: &[Level],
) -> Option<&'a Proof> {
    proofs
        .iter()
        .filter(|proof| proof.adapters == *kind)
        .filter(|proof| available.contains(&proof.level))
        .max_by_key(|proof| proof.level)
}

/// Queries of a workgroup of the forward kernels. Both give the same bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum QueryTileSize {
    /// 32 queries.
    Of32,
    /// 64 queries, so that K and V serve twice as many, for kernels with cooperative matrices: 128
    /// invocations in place of 64, and Q is loaded once, up to dim 128: a third of the loads for
    /// each product.
    /// Kernels without matrices have 32.
    Of64,
}

/// Vendors of the GPUs on which tiles of 64 queries were measured to be right and faster: NVIDIA,
/// whose H200 took 0.59 to 0.82 of the time (benches/record/wgpu.md).
///
/// By RADV's estimate AMD's gain 2 to 5 % without a bias and lose up to 30 % with one, because
/// fewer workgroups fit workgroup memory (benches/record/wgpu-compilers.md).
const MEASURED: &[u32] = &[0x10de];

/// Largest head and value dim of tiles of 64 queries by default. Beyond it matrices hold Q no
/// longer: with 256 an H200 took 1.13 times as long as with tiles of 32.
const MAX_DIM: usize = 128;

/// Least number of workgroups of 64 queries by default: as many as fill a GPU (`split_kv.rs`), or
/// it would be idle in part where twice as many workgroups of 32 queries keep it busy.
const MIN_WORKGROUPS: usize = 512;

/// Shape of a forward launch by which the tile is chosen.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LaunchShape {
    /// The larger of head and value dim.
    pub(crate) dim: usize,
    /// Workgroups of 64 queries.
    pub(crate) workgroups: usize,
}

impl QueryTileSize {
    /// All tiles.
    pub const ALL: [Self; 2] = [Self::Of32, Self::Of64];

    /// Environment variable that names the tile, if the caller requests none.
    pub const VARIABLE: &'static str = "ANNULUS_WGPU_QUERY_TILE";

    /// Reads the tile from [`QueryTileSize::VARIABLE`]; `None` if it is not set.
    ///
    /// # Errors
    /// [`annulus_core::Error::InvalidArgument`] if its value names none.
    pub fn forced() -> Result<Option<Self>> {
        forced(Self::VARIABLE, Self::ALL, Self::name)
    }

    /// Name in [`QueryTileSize::VARIABLE`] and in messages.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Of32 => "32",
            Self::Of64 => "64",
        }
    }

    /// Selects the tile of large launches on an adapter at a level.
    pub(crate) fn of_adapter(info: &AdapterInfo, level: Level) -> Self {
        let is_measured = level == Level::Matrix && MEASURED.contains(&info.vendor);
        if is_measured { Self::Of64 } else { Self::Of32 }
    }

    /// True if a launch of this shape gains by 64 queries, on adapters that do.
    pub(crate) const fn suits(shape: LaunchShape) -> bool {
        let LaunchShape { dim, workgroups } = shape;
        dim > 32 && dim <= MAX_DIM && workgroups >= MIN_WORKGROUPS
    }
}

/// Tile of forward launches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TileChoice {
    /// Requested: of all launches that can have it.
    Forced(QueryTileSize),
    /// Of launches that it suits.
    Default(QueryTileSize),
}

/// Pairs of a 32 × 32 tile that one invocation computes with multiply-adds.
///
/// All compute the same sums in the same order, so results have the same bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RegisterTile {
    /// 4 × 4 pairs, workgroups of 64 invocations. For every four elements of a product an
    /// invocation reads 8 vectors of 4 from workgroup memory and issues 64 multiply-adds. Of tiles
    /// of 64 queries it computes 8 × 4 pairs ([`crate::QueryTileSize::Of64`]).
    FourRows,
    /// 2 × 4 pairs, workgroups of 128 invocations: half of the accumulators, and half of the loads
    /// in flight, in each. 6 vectors for 32 multiply-adds. For GPUs whose invocations have 128
    /// registers. Kernels that would still exceed them have one row (`TileVariant::fitting_tile`).
    TwoRows,
    /// 1 × 4 pairs, workgroups of 256 invocations, the most that every device of WebGPU has. 5
    /// vectors for 16 multiply-adds. Only of kernels in place of [`RegisterTile::TwoRows`].
    OneRow,
}

impl RegisterTile {
    /// Register tiles of a device.
    pub const ALL: [Self; 2] = [Self::FourRows, Self::TwoRows];

    /// Environment variable that names the register tile, if the caller requests none.
    pub const VARIABLE: &'static str = "ANNULUS_WGPU_REGISTER_TILE";

    /// Reads the register tile from [`RegisterTile::VARIABLE`]; `None` if it is not set.
    ///
    /// # Errors
    /// [`annulus_core::Error::InvalidArgument`] if its value names none.
    pub fn forced() -> Result<Option<Self>> {
        forced(Self::VARIABLE, Self::ALL, Self::name)
    }

    /// Name in [`RegisterTile::VARIABLE`] and in messages.
    pub const fn name(self) -> &'static str {
        match self {
            Self::FourRows => "4x4",
            Self::TwoRows => "2x4",
            Self::OneRow => "1x4",
        }
    }

    /// Rows of the register tile, of 4 columns each.
    pub(crate) const fn rows(self) -> usize {
        match self {
            Self::FourRows => 4,
            Self::TwoRows => 2,
            Self::OneRow => 1,
        }
    }

    /// Invocations of a workgroup. Kernels of one row in place of two have twice as many.
    pub const fn invocations(self) -> u32 {
        match self {
            Self::FourRows => 64,
            Self::TwoRows => 128,
            Self::OneRow => 256,
        }
    }

    /// Most invocations of a workgroup of any kernel.
    pub(crate) const fn max_invocations(self) -> u32 {
        match self {
            Self::FourRows => 64,
            Self::TwoRows | Self::OneRow => 256,
        }
    }

    /// Upper bound of the registers of an invocation that hold sums of dV and dK. The rest of a
    /// kernel of four rows takes 75 to 120 of up to 256 registers, that of a kernel of two rows or
    /// one about 80 of 128.
    pub(crate) const fn max_accumulators(self) -> usize {
        match self {
            Self::FourRows => 128,
            Self::TwoRows | Self::OneRow => 32,
        }
    }

    /// Distance of the rows of which an invocation loads four elements each. Eight invocations load
    /// the 32 elements of a row.
    pub(crate) const fn load_step(self) -> usize {
        self.invocations() as usize / 8
    }

    /// Number of these rows.
    pub(crate) const fn loads(self) -> usize {
        32 / self.load_step()
    }
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
    use super::*;

    const HERE: AdapterKind<'_> = AdapterKind {
        api: Backend::Vulkan,
        vendor: 0x1002,
        device: 0x744c,
        name: "AMD Radeon RX 7900 XTX (RADV NAVI31)",
        driver: "radv",
    };

    fn proof(adapters: AdapterKind<'static>, level: Level) -> Proof {
        Proof { adapters, level, record: "" }
    }

    fn chosen(proofs: &[Proof], available: &[Level]) -> Option<Level> {
        choose(proofs, &HERE, available).map(|proof| proof.level)
    }

    #[test]
    fn compilers_with_128_registers_have_register_tiles_of_two_rows() {
        // as the drivers report themselves
        let chosen = |backend, vendor, name: &str, [driver, driver_info]: [&str; 2]| {
            RegisterTile::of_adapter(&AdapterInfo {
                name: name.to_owned(),
                vendor,
                driver: driver.to_owned(),
                driver_info: driver_info.to_owned(),
                ..AdapterInfo::new(wgpu::DeviceType::DiscreteGpu, backend)
            })
        };
        let anv = ["Intel open-source Mesa driver", "Mesa 25.0.7-2+deb13u1"];
        for (backend, vendor, name, wanted) in [
            (Backend::Vulkan, 0x8086, "Intel(R) Arc(tm) A770 Graphics (DG2)", "2x4"),
            (Backend::Vulkan, 0x8086, "Intel(R) Iris(R) Xe Graphics (TGL GT2)", "2x4"),
            (Backend::Dx12, 0x8086, "Intel(R) Arc(TM) B580 Graphics", "2x4"),
            (Backend::Metal, 0, "Intel(R) UHD Graphics 630", "2x4"),
            (Backend::Metal, 0, "Apple M3 Max", "4x4"),
            (Backend::Metal, 0, "AMD Radeon Pro 5500M", "4x4"),
            (Backend::Vulkan, 0x10de, "NVIDIA GeForce RTX 4090", "4x4"),
            // lavapipe on a processor of Intel's
            (Backend::Vulkan, 0x10005, "llvmpipe (LLVM 15.0.6, 256 bits)", "4x4"),
        ] {
            assert_eq!(chosen(backend, vendor, name, anv).name(), wanted, "{backend:?} {name}");
        }
        for (name, driver, wanted) in [
            ("AMD Radeon RX 7900 XTX (RADV GFX1100)", ["radv", "Mesa 22.3.6"], "2x4"),
            ("AMD Radeon RX 7600 (RADV GFX1102)", ["radv", "Mesa 22.3.0"], "2x4"),
            ("AMD Radeon RX 6800 (RADV NAVI21)", ["radv", "Mesa 22.3.6"], "4x4"),
            ("AMD Radeon RX 7900 XTX (RADV GFX1100)", ["radv", "Mesa 23.0.0"], "4x4"),
            ("AMD Radeon RX 7900 XTX (RADV NAVI31)", ["radv", "Mesa 25.0.7-2+deb13u1"], "4x4"),
            ("AMD Radeon RX 7900 XTX", ["AMD open-source driver", "2022.Q4.4 (LLPC)"], "4x4"),
        ] {
            let chosen = chosen(Backend::Vulkan, 0x1002, name, driver).name();
            assert_eq!(chosen, wanted, "{name} {driver:?}");
        }
    }

    #[test]
    fn levels_without_a_record_are_not_chosen() {
        // a vendor number that does not exist
        assert!(
            choose(PROOFS, &AdapterKind { vendor: 0xdead_beef, ..HERE }, &Level::ALL).is_none()
        );
        assert_eq!(chosen(&[], &Level::ALL), None);
        for elsewhere in [
            AdapterKind { api: Backend::Dx12, ..HERE },
            AdapterKind { vendor: 0x10de, ..HERE },
            AdapterKind { device: 0x73bf, ..HERE },
            AdapterKind { name: "AMD Radeon RX 7900 XT (RADV NAVI31)", ..HERE },
            AdapterKind { driver: "AMD proprietary driver", ..HERE },
        ] {
            assert_eq!(chosen(&[proof(elsewhere, Level::Matrix)], &Level::ALL), None);
        }
    }

    #[test]
    fn the_highest_that_is_proven_and_can_be_run_is_chosen() {
        let proofs = [proof(HERE, Level::Plain), proof(HERE, Level::Matrix)];
        assert_eq!(chosen(&proofs, &Level::ALL), Some(Level::Matrix));
        assert_eq!(chosen(&proofs, &[Level::Plain]), Some(Level::Plain));
        assert_eq!(chosen(&proofs[1..], &[Level::Plain]), None);
    }

    /// True if the record exists and contains the level and its speedup.
    fn is_shown(proof: &Proof) -> bool {
        let record =
            std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(proof.record);
        let shows = |text: String| text.contains(proof.level.name()) && text.contains("speedup");
        proof.level != Level::Plain && std::fs::read_to_string(record).is_ok_and(shows)
    }

    #[test]
    fn every_proof_has_its_record() {
        let record = |record| Proof { record, ..proof(HERE, Level::Matrix) };
        assert!(!is_shown(&record("benches/record/nothing.md")) && !is_shown(&record("README.md")));
        assert!(is_shown(&record("benches/record/wgpu.md")));
        assert!(PROOFS.iter().all(is_shown));
    }
}

#[cfg(test)]
mod query_tile_tests {
    use super::*;

    #[test]
    fn gpus_of_measured_vendors_have_64_queries_by_default() {
        for (vendor, wanted) in [
            (0x10de, QueryTileSize::Of64),
            (0x1002, QueryTileSize::Of32),
            (0x8086, QueryTileSize::Of32),
            (0x10005, QueryTileSize::Of32),
            (0, QueryTileSize::Of32),
        ] {
            let kind = wgpu::DeviceType::DiscreteGpu;
            let info = AdapterInfo { vendor, ..AdapterInfo::new(kind, wgpu::Backend::Vulkan) };
            assert_eq!(QueryTileSize::of_adapter(&info, Level::Matrix), wanted, "{vendor:#x}");
            let at_plain = QueryTileSize::of_adapter(&info, Level::Plain);
            assert_eq!(at_plain, QueryTileSize::Of32, "{vendor:#x}");
        }
    }

    #[test]
    fn large_launches_of_medium_dims_suit_64_queries() {
        let suits = |dim, workgroups| QueryTileSize::suits(LaunchShape { dim, workgroups });
        assert!(suits(64, 512) && suits(128, 4096));
        assert!(!suits(64, 511) && !suits(32, 4096) && !suits(129, 4096));
    }

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
